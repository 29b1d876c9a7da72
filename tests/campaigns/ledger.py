"""A campaign: many cases tried from outside, counted, resumable, recorded with the date.

A campaign draws its cases from a seed and tries each with a function that returns its outcome in a word or two ("same
model", "refused") and raises AssertionError for an outcome that no promise allows. What was tried is kept beside the
results until the campaign has ended, so that a stopped one goes on where it was; the ended one is a file of counts in
`results/`, and what failed is in it.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_vit.results.measurements import Measurements

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(os.environ.get("HF_VIT_CAMPAIGNS", "build/campaigns"))


class Campaign:
    """Tries cases and counts outcomes.

    Args:
        name: of the files.
        command: runs it.
        settings: whatever decides which cases there are (a seed, numbers): with others, it begins anew.
    """

    def __init__(self, name: str, command: str, **settings: object) -> None:
        self.name, self.command, self.settings = name, command, settings
        self.progress = SCRATCH / f"{name}.jsonl"
        self.tried: dict[str, str] = {}
        if self.progress.exists():
            head, *lines = self.progress.read_text().splitlines()
            if json.loads(head) == json.loads(json.dumps(settings)):
                # A kill cuts the last line short.
                self.tried = dict(json.loads(line) for line in lines if line.endswith("]"))

    def run(
        self, cases: Iterable[str], attempt: Callable[[str], str], group_of: Callable[[str], str] | None = None
    ) -> Counter[tuple[str, str]]:
        """Try what was not tried before, then record; outcomes count by group, which of a case "group/rest" is that.

        Returns:
            (group, outcome) -> cases; a failure's outcome begins with "FAILED".
        """
        self.progress.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(self.settings), *(json.dumps([case, outcome]) for case, outcome in self.tried.items())]
        self.progress.write_text("".join(f"{line}\n" for line in lines))
        names: list[str] = []
        with self.progress.open("a", buffering=1) as file:
            for case in cases:
                names.append(case)
                if case in self.tried:
                    continue
                try:
                    outcome = attempt(case)
                except AssertionError as error:
                    outcome = f"FAILED: {case}: {str(error)[:500]}"
                self.tried[case] = outcome
                file.write(json.dumps([case, outcome]) + "\n")
                if len(names) % 100 == 0:
                    print(f"{self.name}: {len(names)} cases", flush=True)
        assert len(set(names)) == len(names), "a case was drawn twice"
        counts = Counter(((group_of or _beginning)(case), self.tried[case]) for case in names)
        self._record(counts)
        self.progress.unlink()
        return counts

    def _record(self, counts: Counter[tuple[str, str]]) -> None:
        RESULTS.mkdir(exist_ok=True)
        record = Measurements(RESULTS / f"{self.name}.json", self.command, "cpu", **self.settings)
        for group in sorted({group for group, _ in counts}):
            outcomes = {outcome: count for (other, outcome), count in sorted(counts.items()) if other == group}
            print(f"{self.name}: {group}: {outcomes}", flush=True)
            record.add({"group": group, "cases": sum(outcomes.values()), "outcomes": outcomes}, cases=counts.total())


def _beginning(case: str) -> str:
    return case.split("/")[0]


def failures(counts: Counter[tuple[str, str]]) -> list[str]:
    """The outcomes that no promise allows."""
    return sorted(outcome for _, outcome in counts if outcome.startswith("FAILED"))
