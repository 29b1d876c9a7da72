"""Keep finished runs as lines of a file, which several processes or Ray fill without repeating a run."""

import argparse
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_vit.environment import list_versions, read_hardware
from hf_vit.evaluation.runners import RUNNERS, open_runner

Job = dict[str, Any]  # the values that identify a run
PlannedJob = tuple[Job, Sequence[Job]]  # a job, and the jobs that have to be done before it
# Takes a job and the records of its prerequisites; returns the values to record beside the job's own.
RunJob = Callable[[Job, list[dict[str, Any]]], dict[str, Any]]
PAUSE = 30  # seconds to wait for results of other processes
RESULTS = Path(__file__).parent / "results"
RESUMING = """Each finished job is a line of the output and is not repeated. Start it in as many processes of one thread
as there are cores, whenever you like: each takes the next job that no other on this machine is at, waits where all that
is left waits for others, and lets go of it when it is killed. Or once with --runner ray, where there is that option."""


class RecordOptions(argparse.ArgumentParser):
    """The options of a script with a record in results/, which only holds runs with its default numbers, or fewer."""

    def parse_args(self, *given: Any, **named: Any) -> Any:
        arguments = super().parse_args(*given, **named)
        for name, value in vars(arguments).items() if arguments.output == self.get_default("output") else ():
            values, usual = (
                each if isinstance(each, list | tuple) else [each] for each in (value, self.get_default(name))
            )
            if {type(each) for each in values} <= {int, float} and not {*values} <= {*usual}:
                self.error(f"{arguments.output.name} of results/ has other {name}; give --output FILE")
        return arguments


def script_options(
    description: str | None, name: str, plan: Any = None, runner: bool = False, **choices: Iterable[str]
) -> argparse.ArgumentParser:
    """Return the options of a script: its record, where its jobs run, and the fields of a plan, with their choices."""
    raw = argparse.RawDescriptionHelpFormatter
    options = RecordOptions(description=description, epilog=RESUMING, formatter_class=raw)
    options.add_argument("--output", type=Path, default=RESULTS / name)
    if runner:
        options.add_argument("--runner", choices=RUNNERS, default=RUNNERS[0])
        options.add_argument("--address", help="HOST:PORT of Ray's cluster; by default it is started on this machine")
    for plan_field in fields(plan) if plan is not None else ():
        option, default = plan_field.name.replace("_", "-"), plan_field.default
        kind, nargs = (type(default[0]), "+") if isinstance(default, tuple) else (type(default), None)
        allowed = list(choices.get(plan_field.name, ())) or None
        if isinstance(default, bool):
            options.add_argument(f"--no-{option}", action="store_false", dest=plan_field.name)
        else:
            options.add_argument(f"--{option}", default=default, choices=allowed, type=kind, nargs=nargs)
    torch.set_num_threads(1)
    return options


def read_plan(plan: Any, arguments: argparse.Namespace) -> Any:
    values = {plan_field.name: getattr(arguments, plan_field.name) for plan_field in fields(plan)}
    return plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def read(path: Path) -> list[dict[str, Any]]:
    """Return all finished runs; a line that a crash cut off is ignored."""
    records: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class Records:
    """The lines of a file to which several processes add, and the claims of running jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, list[dict[str, Any]]] = (0, [])

    def find(self, job: Job) -> dict[str, Any] | None:
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
        """Yield whether no other process runs the job; the system releases the claim of a dead process."""
        offset = int.from_bytes(hashlib.sha256(json.dumps(job, sort_keys=True).encode()).digest()[:7])
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, offset)

    def work(
        self,
        jobs: Sequence[PlannedJob],
        run_job: RunJob,
        runner: str = "local",
        address: str | None = None,
        has_files: Callable[[Job], bool] = lambda job: True,
    ) -> None:
        """Run unfinished jobs that no other process runs, in order, until all are finished.

        Ray runs all jobs without open prerequisites at once, one core each; only this process writes records. A job
        whose files do not exist (any more) is run again without a second record.
        """

        def is_done(job: Job) -> bool:
            return has_files(job) and self.find(job) is not None

        def run_here(job: Job, results: list[Any]) -> bool:
            """Run a job unless it is finished or running elsewhere; return whether it was run here."""
            with self.claim(job) as is_ours:
                if is_ours and not is_done(job):
                    self._keep(job, _run_ready_job((job, results), run_job))
                    return True
            return False

        with open_runner(runner, address, "cpu") as ray:
            while unfinished := [(job, prerequisites) for job, prerequisites in jobs if not is_done(job)]:
                ready: list[Any] = [
                    (job, [self.find(prerequisite) for prerequisite in prerequisites])
                    for job, prerequisites in unfinished
                    if all(map(is_done, prerequisites))
                ]
                if ray is not None:
                    from hf_vit.evaluation.ray_runner import run_independent

                    for number, result in run_independent(ray, _run_ready_job, ready, run_job):
                        self._keep(ready[number][0], result)
                # Run the first job that is ready, then look again, as other processes add records.
                elif not any(run_here(*each) for each in ready):
                    time.sleep(PAUSE)

    def _keep(self, job: Job, result: dict[str, Any]) -> None:
        record = result | job | {"date": time.strftime("%Y-%m-%d", time.gmtime())}
        if self.find(job) is None:
            self.add(record)
        summary = (f"{key} {value}" for key, value in record.items() if not isinstance(value, dict))
        print(", ".join(summary), flush=True)


def _run_ready_job(ready: tuple[Job, list[dict[str, Any]]], run_job: RunJob) -> dict[str, Any]:
    """Return the record of a job, with its CPU seconds, those of other processes included, and where it ran."""
    start = sum(os.times()[:4])  # of this process and of finished children
    result = run_job(*ready)
    seconds = result.pop("earlier_cpu_seconds", 0.0) + sum(os.times()[:4]) - start
    return result | {
        "cpu_seconds": round(seconds, 1), "hardware": read_hardware("cpu"), "versions": list_versions()
    }  # fmt: skip
