"""Commands at work in processes of their own, which a campaign watches, strikes and waits for."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


class Launch:
    """Processes that belong together, each with a file for what it prints.

    Args:
        bound: seconds for all of it on a busy machine.
    """

    def __init__(self, bound: float) -> None:
        self.bound, self.begun = bound, time.monotonic()
        self.processes, self.logs = list[subprocess.Popen[bytes]](), list[Path]()
        self.started = set[psutil.Process]()

    def start(self, log: Path, *words: object, cwd: Path | None = None, **environment: str) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        with log.open("w") as file:
            streams: Any = {"stdout": file, "stderr": file}
            self.processes.append(subprocess.Popen(list(map(str, words)), cwd=cwd, env=variables, **streams))
        self.logs.append(log)

    @property
    def text(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def children(self) -> list[psutil.Process]:
        """Return what the processes have started and what still runs, in all generations."""
        found: list[psutil.Process] = []
        for process in self.processes:
            with suppress(psutil.Error):
                found += psutil.Process(process.pid).children(recursive=True)
        self.started |= set(found)
        return found

    def wait_until(self, condition: Callable[[], bool], share: float = 1) -> bool:
        """Return whether the condition came to hold before any process ended, in this share of the bound."""
        while all(process.poll() is None for process in self.processes):
            self.children()
            if condition():
                return True
            if time.monotonic() - self.begun > share * self.bound:
                return False
            time.sleep(0.01)
        return False

    def slow_down(self, victims: Callable[[], Iterable[psutil.Process]]) -> None:
        """Let them work a tenth of the time for half of the bound, as long as there are any."""

        def is_over() -> bool:
            slowed = list(victims())
            for change, seconds in (("suspend", 0.45), ("resume", 0.05)):
                for process in slowed:
                    with suppress(psutil.Error):
                        getattr(process, change)()
                time.sleep(seconds)
            return False

        self.wait_until(is_over, share=0.5)

    def end(self) -> list[int]:
        """Return the exit statuses, within the bound."""
        try:
            return [process.wait(max(1, self.begun + self.bound - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in (*self.children(), *self.processes):
                process.kill()
            raise AssertionError(f"it hangs: {self.text[-600:]}") from None
