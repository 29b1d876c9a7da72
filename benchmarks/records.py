"""Finished runs as lines of a file, which several processes fill without doing anything twice; or Ray's machines."""

import argparse
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hf_vit.environment import hardware, versions
from hf_vit.evaluation.runners import RUNNERS, running

Job = dict[str, Any]  # what identifies a run
Needing = tuple[Job, Sequence[Job]]  # one, and those that have to be done before it
Do = Callable[[Job, list[dict[str, Any]]], dict[str, Any]]  # gives what a record says beside the job, from those before
PAUSE = 30  # seconds between looks at what others have done


def runner_options(options: argparse.ArgumentParser) -> None:
    """Where the jobs run."""
    options.add_argument("--runner", choices=RUNNERS, default=RUNNERS[0])
    options.add_argument("--address", help="HOST:PORT of Ray's cluster; by default it is started on this machine")


def read(path: Path) -> list[dict[str, Any]]:
    """All finished runs; a line cut off by a crash is no finished run."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


class Records:
    """Lines of a file, to which several processes add, and who is at what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, list[dict[str, Any]]] = (0, [])

    def find(self, job: Job) -> dict[str, Any] | None:
        """Its record; a line that a kill cut off is none."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._known[0]:
            self._known = (size, read(self.path))
        return next((line for line in self._known[1] if all(line.get(key) == job[key] for key in job)), None)

    def add(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            cut_off = not f"\n{file.read()}".endswith("\n")
            file.write("\n" * cut_off + json.dumps(record) + "\n")

    @cached_property
    def _locks(self) -> int:
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        return os.open(Path(tempfile.gettempdir()) / f"hf_vit-{name}.lock", os.O_RDWR | os.O_CREAT)

    @contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Whether no other process is at it; the system ends the claim of a process that dies."""
        place = int.from_bytes(hashlib.sha256(json.dumps(job, sort_keys=True).encode()).digest()[:7])
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, place)

    def work(self, jobs: Sequence[Needing], do: Do, runner: str = "local", address: str | None = None) -> None:
        """Do what is left and nobody else does, the first first, until nothing is left.

        Ray does all at once that need nothing more, a core each, while this process alone keeps the records.
        """
        with running(runner, address, "cpu") as ray:
            while left := [(job, needed) for job, needed in jobs if self.find(job) is None]:
                ready = [(job, found) for job, needed in left if all(found := [self.find(one) for one in needed])]
                if ray is not None:
                    from hf_vit.evaluation.ray_runner import independent

                    for number, done in independent(ray, _done, ready, do):
                        self._keep(ready[number][0], done)
                # The first that can be done; then all over again, as others add to the records.
                elif not any(self.attempt(job, partial(do, job, found)) for job, found in ready):
                    time.sleep(PAUSE)

    def attempt(self, job: Job, do: Callable[[], dict[str, Any]], is_done: Callable[[], bool] | None = None) -> bool:
        """Do a job and add its record, if it is still to be done and nobody is at it; whether it was done here.

        Args:
            do: gives what the record says beside the job.
            is_done: by default, whether it has a record.
        """
        with self.claim(job) as is_ours:
            if not is_ours or (is_done() if is_done else self.find(job) is not None):
                return False
            self._keep(job, _with_facts(do))
        return True

    def _keep(self, job: Job, done: dict[str, Any]) -> None:
        record = done | job | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
        if self.find(job) is None:
            self.add(record)
        told = (f"{key} {value}" for key, value in record.items() if not isinstance(value, dict))
        print(", ".join(told), flush=True)


def _done(ready: tuple[Job, list[dict[str, Any]]], do: Do) -> dict[str, Any]:
    return _with_facts(partial(do, *ready))


def _with_facts(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begun = time.process_time()
    done = do() | {"cpu_seconds": round(time.process_time() - begun, 1)}
    return done | {"hardware": hardware("cpu"), "versions": versions()}
