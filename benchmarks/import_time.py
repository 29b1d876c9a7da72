"""What `import hf_vit` costs beyond importing transformers' own classes, and what the program's quick answers cost.

    python benchmarks/import_time.py [--runs 9] [--output benchmarks/results/import_time.json]

A process first imports transformers' classes, then takes the CPU seconds of what hf_vit adds: so the noise of the
seconds before does not enter the few hundredths that are asked for. Of the program all CPU seconds are counted, those
of Python's start as well.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import time
start = time.process_time()
from transformers import PreTrainedModel, AutoModelForImageClassification
between = time.process_time()
import hf_vit
print("CPU", between - start, time.process_time() - between)
"""
COMMANDS = {
    "hf-vit --help": (["--help"], {}),
    "hf-vit finetune --help": (["finetune", "--help"], {}),
    "hf-vit --version": (["--version"], {}),
    "completion": ([], {"_HF_VIT_COMPLETE": "complete_bash", "COMP_WORDS": "hf-vit finetune --le", "COMP_CWORD": "2"}),
}


def import_seconds() -> tuple[float, float]:
    """CPU seconds of transformers' classes, and of what hf_vit adds."""
    printed = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    base, added = printed.strip().splitlines()[-1].split()[1:]
    return float(base), float(added)


def program_seconds(name: str) -> float:
    """CPU seconds of the whole process."""
    arguments, variables = COMMANDS[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "from hf_vit_cli.main import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, env={**os.environ, **variables}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def spread(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median_s": median, "lower_quartile_s": low, "upper_quartile_s": high}


def measure(runs: int) -> dict[str, dict[str, float]]:
    imports = [import_seconds() for _ in range(runs + 1)][1:]  # the first warms the file cache
    return {
        "import of transformers' classes": spread([base for base, _ in imports]),
        "import hf_vit, beyond that": spread([added for _, added in imports]),
    } | {name: spread([program_seconds(name) for _ in range(runs + 1)][1:]) for name in COMMANDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import torch
    import transformers

    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "runs": options.runs,
        "load_before": os.getloadavg()[0],
        "rows": measure(options.runs),
    }
    for name, row in result["rows"].items():
        low, high = row["lower_quartile_s"], row["upper_quartile_s"]
        print(f"{name:32} {row['median_s']:.3f} s CPU (quartiles {low:.3f} .. {high:.3f})")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
