"""What hf_vit costs beyond importing transformers' own classes, in fresh processes.

    python benchmarks/import_time.py [--runs 9] [--output benchmarks/results/import_time.json]

Each process first imports transformers' classes, then takes the CPU seconds of what hf_vit adds: so the noise of the
seconds before does not enter the few hundredths that are asked for.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

BASE = "from transformers import PreTrainedModel, AutoModelForImageClassification"
PROGRAM = """
import time
start = time.process_time()
{base}
between = time.process_time()
{own}
print("CPU", between - start, time.process_time() - between)
"""
CANDIDATES = {
    "import hf_vit": "import hf_vit",
    "hf-vit --help": "try:\n    from hf_vit.cli.main import main; main(['--help'])\nexcept SystemExit: pass",
}


def cpu_seconds(own: str) -> tuple[float, float]:
    """CPU seconds of transformers' classes, and of what comes on top."""
    code = PROGRAM.format(base=BASE, own=own)
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    base, added = printed.strip().splitlines()[-1].split()[1:]
    return float(base), float(added)


def measure(own: str, runs: int) -> dict[str, float]:
    cpu_seconds(own)  # warm the file cache
    rows = [cpu_seconds(own) for _ in range(runs)]
    low, median, high = statistics.quantiles([added for _, added in rows], n=4)
    return {
        "transformers_s": statistics.median(base for base, _ in rows),
        "added_s": median,
        "lower_quartile_s": low,
        "upper_quartile_s": high,
    }


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
        "rows": {name: measure(own, options.runs) for name, own in CANDIDATES.items()},
    }
    for name, row in result["rows"].items():
        print(
            f"{name:15} adds {row['added_s'] * 1000:.0f} ms CPU (quartiles {row['lower_quartile_s'] * 1000:.0f} .. "
            f"{row['upper_quartile_s'] * 1000:.0f}) to transformers' {row['transformers_s']:.2f} s"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
