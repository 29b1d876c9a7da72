"""The tests' side of `zygote`: runs `hf-vit` in a place of its own, struck at a change of files or at a moment."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "campaigns.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=os.environ | quiet | here | environment,
            text=True,
        )

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)

    def _ask(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the warm process ended"
        return json.loads(line)

    def warm(self, *arguments: str) -> Outcome:
        """Run a command to its end, and import whatever it imported, for those that are forked from now on."""
        outcome = self.run(*arguments, names=True)
        names = (self.folder / "modules").read_text().splitlines()
        assert self._ask(do="warm", names=names)["threads"] == 1, "a fork of several threads may hang"
        return outcome

    def run(self, *arguments: str, names: bool = False, limit: float = 120, **strike: Any) -> Outcome:
        """Run `hf-vit` in the place, for so many seconds at most; `strike`: see `zygote.Striker`."""
        answer = self._ask(
            do="run",
            arguments=arguments,
            place=str(self.place),
            log=str(self.folder),
            strike=strike,
            seconds=limit,
            names=names,
        )
        printed = {name: (self.folder / f"std{name}").read_text(errors="replace") for name in ("out", "err")}
        return Outcome(**answer, **printed)
