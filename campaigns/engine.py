"""One engine for all campaigns: draw cases by a seed, try each from outside, judge, record, resume."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(ROOT / "tests"), str(ROOT)) if path not in sys.path]
RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(os.environ.get("HF_VIT_CAMPAIGNS", ROOT / "build/campaigns"))
FAILED = "FAILED: "

# Tries one case and returns its outcome in a word or two ("same model", "refused").
# Raises AssertionError for an outcome that no promise allows.
Attempt = Callable[[str], str]


@dataclass(frozen=True)
class Campaign:
    """Cases, and how to try one.

    Attributes:
        name: of the module and of the record.
        promise: what must come of every case, in one sentence.
        cases: returns the names of all cases, "group/rest", always the same ones for the same settings.
        prepare: makes, in an empty folder, what the cases need, and yields the function that tries one.
        settings: what decides which cases there are (seed, numbers).
        is_quick: whether a case takes seconds; the default test suite draws from these.
        group_of: the group in which a case is counted.
    """

    name: str
    promise: str
    cases: Callable[[], Sequence[str]]
    prepare: Callable[[Path], AbstractContextManager[Attempt]]
    settings: Mapping[str, object] = field(default_factory=dict)
    is_quick: Callable[[str], bool] = lambda case: True
    group_of: Callable[[str], str] = lambda case: case.partition("/")[0]

    def sample(self, count: int) -> list[str]:
        """Return `count` quick cases, drawn by the campaign's name."""
        quick = [case for case in self.cases() if self.is_quick(case)]
        return random.Random(self.name).sample(quick, count)

    def run(self, folder: Path, only: str = "") -> Counter[tuple[str, str]]:
        """Try every case that was not tried before, then write the record.

        Args:
            folder: empty; for what the cases need.
            only: regular expression; these cases are tried again, beside the progress of a stopped run. A record whose
                groups are single cases gets their outcomes, and tells what was tried again; others stay as they are.

        Returns:
            (group, outcome) -> number of cases; the outcome of a failure begins with `FAILED`.
        """
        cases = [case for case in self.cases() if re.search(only, case)]
        assert len(set(cases)) == len(cases), "a case was drawn twice"
        progress = SCRATCH / f"{self.name}{'_again' if only else ''}.jsonl"
        progress.parent.mkdir(parents=True, exist_ok=True)
        head = {**self.settings, "only": only} if only else self.settings
        outcomes = self._read(progress, head)
        lines = [json.dumps(head), *map(json.dumps, outcomes.items())]
        progress.write_text("".join(f"{line}\n" for line in lines))
        with progress.open("a", buffering=1) as file, self.prepare(folder) as attempt:
            for number, case in enumerate(cases, 1):
                if case not in outcomes:
                    try:
                        outcomes[case] = attempt(case)
                    except AssertionError as error:
                        outcomes[case] = f"{FAILED}{case}: {str(error)[:500]}"
                    print(json.dumps([case, outcomes[case]]), file=file)
                if number % 100 == 0 or number == len(cases):
                    print(f"{self.name}: {number} of {len(cases)} cases", flush=True)
        counts = Counter((self.group_of(case), outcomes[case]) for case in cases)
        self._record(counts, bool(only))
        progress.unlink()
        return counts

    def _read(self, progress: Path, head: Mapping[str, object]) -> dict[str, str]:
        """Return the outcomes that a stopped run with the same settings left behind."""
        if not progress.exists():
            return {}
        first, *lines = progress.read_text().splitlines()
        if json.loads(first) != json.loads(json.dumps(head)):
            return {}
        return dict(json.loads(line) for line in lines if line.endswith("]"))  # a kill cuts the last line short

    def _record(self, counts: Counter[tuple[str, str]], is_part: bool) -> None:
        from hf_vit.results.documents import Measurements

        RESULTS.mkdir(exist_ok=True)
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        path, command = RESULTS / f"{self.name}.json", f"python -m campaigns {self.name}"
        if is_part:
            record, outcomes = json.loads(path.read_text()) if path.exists() else {"rows": []}, dict(counts.keys())
            if {row["cases"] for row in record["rows"]} != {1}:
                return
            for row in record["rows"]:
                if row["group"] in outcomes:
                    row["outcomes"] = {outcomes[row["group"]]: 1}
            again = {"cases": len(outcomes), "date": f"{date.today():%Y-%m-%d}", "commit": commit}
            path.write_text(json.dumps({**record, "again": again}, indent=1, ensure_ascii=False) + "\n")
            return
        record = Measurements(path, command, "cpu", commit=commit, promise=self.promise, **self.settings)
        for group in sorted({group for group, _ in counts}):
            outcomes = {outcome: count for (other, outcome), count in sorted(counts.items()) if other == group}
            record.add({"group": group, "cases": sum(outcomes.values()), "outcomes": outcomes}, cases=counts.total())


def forget_peak() -> None:
    """Set back what `resident_memory("HWM")` gives (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_memory(kind: str) -> int:
    """Return bytes of this process: "HWM", the most since `forget_peak`, or "RSS", at present (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"Vm{kind}:"))


def failures(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return the outcomes that no promise allows."""
    return sorted(outcome for _, outcome in counts if outcome.startswith(FAILED))
