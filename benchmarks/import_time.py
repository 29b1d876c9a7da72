"""What `import hf_vit` costs beyond transformers' own classes, as paired fresh processes.

    python benchmarks/import_time.py [--pairs 15] [--output benchmarks/results/import_time.json]

Each pair starts two Python processes one after the other and compares their user + system seconds, which a busy
machine disturbs less than the clock. Prints the median and the quartiles of the difference.
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

BASE = "from transformers import PreTrainedModel, AutoModelForImageClassification"
CANDIDATES = {
    "import hf_vit": [sys.executable, "-c", f"{BASE}; import hf_vit"],
    "hf-vit --help": [sys.executable, "-m", "hf_vit", "--help"],
}


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(command: list[str], pairs: int) -> dict[str, float]:
    base = [sys.executable, "-c", BASE]
    cpu_seconds(base), cpu_seconds(command)  # warm the file cache
    rows = [(cpu_seconds(base), cpu_seconds(command)) for _ in range(pairs)]
    differences = [own - other for other, own in rows]
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "base_s": statistics.median(other for other, _ in rows),
        "difference_s": median,
        "lower_quartile_s": low,
        "upper_quartile_s": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
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
        "pairs": options.pairs,
        "load_before": os.getloadavg()[0],
        "rows": {name: measure(command, options.pairs) for name, command in CANDIDATES.items()},
    }
    for name, row in result["rows"].items():
        print(
            f"{name:15} {row['difference_s'] * 1000:+6.0f} ms CPU over transformers "
            f"(quartiles {row['lower_quartile_s'] * 1000:+.0f} .. {row['upper_quartile_s'] * 1000:+.0f}; "
            f"transformers alone {row['base_s']:.2f} s)"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
