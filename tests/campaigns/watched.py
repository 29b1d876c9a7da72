"""The tests' side of `striker`: runs `hf-vit` in a place of its own, struck at a change of files or at a moment."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zygote import Zygote

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        code: exit code; negative: the signal that killed it; None if it hung.
        out, err: what it printed.
        changes: the changes of files that it was about to make, "call path", as far as a strike could have fallen.
        struck: where it was struck; empty if it ended before.
        seconds: it took.
    """

    code: int | None
    out: str
    err: str
    changes: list[str] = field(repr=False)
    struck: str
    seconds: float


class Watcher:
    """Runs commands in `place`, each in a process that is forked from a warm one; all changes within are watched.

    Args:
        folder: for the place, and for logs beside it.
        environment: variables that are set beside the usual ones.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.place = folder, folder / "place"
        self.place.mkdir(parents=True, exist_ok=True)
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        quiet |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        here = {"HF_HOME": str(self.place / "home"), "TMPDIR": str(self.place / "tmp"), "PYTHONPATH": str(TESTS)}
        environment = os.environ | quiet | here | environment
        self._warm = Zygote("-W", "ignore", "-m", "campaigns.striker", folder=folder, environment=environment)
        self.close = self._warm.close

    def warm(self, *arguments: str) -> Outcome:
        """Run a command to its end, and import whatever it imported, for those that are forked from now on."""
        outcome = self.run(*arguments, names=True)
        names = (self.folder / "modules").read_text().splitlines()
        assert self._warm.ask("warm_up", names=names) == 1, "a fork of several threads may hang"
        return outcome

    def run(self, *arguments: str, names: bool = False, limit: float = 120, **strike: Any) -> Outcome:
        """Run `hf-vit` in the place, for so many seconds at most; `strike`: see `striker.Striker`."""
        answer = self._warm.ask(
            "run",
            arguments=arguments,
            place=str(self.place),
            log=str(self.folder),
            strike=strike,
            seconds=limit,
            names=names,
        )
        printed = {name: (self.folder / f"std{name}").read_text(errors="replace") for name in ("out", "err")}
        return Outcome(**answer, **printed)
