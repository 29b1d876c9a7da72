"""Run the contract tests on the oldest versions that pyproject.toml allows, in an environment that `make compat` makes.

The dependencies themselves are the oldest (uv's `--resolution lowest-direct`); what they bring along is not. Old
libraries warn of newer ones around them, so that warnings are no errors here.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/test_any_model.py::test_every_family_by_every_door",
    *(f"tests/models/test_{name}.py" for name in ("config", "forward", "saving", "loss", "plain_torch")),
    *(f"tests/conversion/test_{name}.py" for name in ("golden", "pytorch_origins", "loading")),
    "tests/training/test_finetune.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = ROOT / "build" / "compat.xml"
    warnings = ("-o", "filterwarnings=default", "--disable-warnings")
    command = [sys.executable, "-m", "pytest", "-q", *warnings, f"--junitxml={report}", *TESTS]
    finished = subprocess.run(command, cwd=ROOT, check=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    failures = [case for case in suite.iter("testcase") if {each.tag for each in case} & {"failure", "error"}]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in failures]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["export"], *extras["peft"], *extras["quantization"]]
    result = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in sorted(Requirement(line).name for line in requirements)},
        "tests": list(TESTS),
        "passed": sum(not len(case) for case in suite.iter("testcase")),
        "failed": failed,
        "seconds": round(float(suite.get("time", 0))),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
