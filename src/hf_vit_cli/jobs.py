"""Trainings as jobs of a cluster, by submitit: started, preempted, gone on with, and how they stand.

FOLDER/                        what `hf-vit submit` writes
FOLDER/jobs.json               the jobs, last: without it nothing was submitted, or its submission was killed
FOLDER/<id>_<task>_log.out     what a job printed, over all its requeues; of several processes one file each
FOLDER/<id>_submission.sh      what sbatch was given; the pickles beside it are submitit's
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from hf_vit.errors import UserError, one_line
from hf_vit.results.writing import write_atomically

try:
    from submitit import AutoExecutor, SlurmJob
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment
except ImportError as error:
    raise UserError("jobs are submitit's, which is not installed: pip install 'hf-vit[slurm]'") from error

_INDEX = "jobs.json"
_TOOLS = ("sbatch", "srun", "scontrol")
_SIGNAL_SECONDS = 120  # before a job's time is over its training is asked to stop
_STOP_SECONDS = 90  # that it then has for its step and its checkpoint
_TAIL = 4096  # bytes of a log that hold its last line


class Training:
    """One process of a training, which goes on when its job is queued again.

    Args:
        arguments: of hf-vit, with --resume from the beginning: Slurm, too, queues a job again as it was.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        """Run it to its end.

        Raises:
            SystemExit: with its exit code, when that is not 0.
        """
        place = TorchDistributedEnvironment()
        if place.world_size > 1:
            place.export(set_cuda_visible_devices=False, overwrite=True)
        # A session of its own: Slurm signals the whole group, but submitit's handler alone is to act on it.
        words = [sys.executable, "-u", "-m", "hf_vit", *self._arguments]
        self._process = process = subprocess.Popen(words, start_new_session=True)
        try:
            while process.poll() is None:  # not `wait`, whose lock the signal's handler would find taken
                time.sleep(0.2)
        finally:
            process.kill()
        if process.returncode:
            raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit calls when the job is preempted or its time is over, before it queues it again."""
        if self._process is not None:
            self._process.terminate()
            end = time.monotonic() + _STOP_SECONDS
            while self._process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
        return DelayedSubmission(Training(self._arguments))


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Attributes:
        id: of the cluster.
        output: folder of the finished model.
        log: what its first process prints.
    """

    id: Annotated[str, Field(pattern=r"^\d+(_\d+)?$")]
    output: Path
    log: Path


@dataclass(frozen=True)
class Submission:
    """What FOLDER/jobs.json holds."""

    cluster: Literal["slurm", "local"]
    jobs: list[Job]


@dataclass(frozen=True)
class Resources:
    """What one job asks for.

    Attributes:
        gpus: of a machine; with several, or several machines, a process each.
        nodes: machines.
        cpus: cores a process.
        memory: GB a machine.
        hours: after which it is stopped and queued again.
        requeues: how often, at most; being preempted does not count.
        partition: of the cluster.
        sbatch: other options of sbatch.
    """

    gpus: int
    nodes: int
    cpus: int | None
    memory: float | None
    hours: float
    requeues: int
    partition: str | None
    sbatch: Mapping[str, str]


def submit(
    folder: Path, trainings: Mapping[Path, Sequence[str]], cluster: Literal["slurm", "local"], resources: Resources
) -> Submission:
    """Queue trainings, several as one array; those that are local run at once, and their end is waited for.

    Args:
        folder: new or empty.
        trainings: output folder -> arguments of hf-vit.

    Raises:
        UserError: there is no Slurm, it refuses, submitit is missing, or the folder is taken.
    """
    refuse_full(folder, "the folder for jobs")
    if "%" in str(folder.absolute()) or not str(folder.absolute()).isprintable():
        raise UserError(f"the folder for jobs {folder} has a name that Slurm would read; choose one without %")
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if cluster == "slurm" and absent:
        raise UserError(f"there is no {absent[0]} on this machine; submit from one of a Slurm cluster, or use --local")
    existed = folder.exists()
    said = StringIO()
    try:
        with redirect_stderr(said):
            executor = AutoExecutor(
                folder,
                cluster=cluster,
                slurm_max_num_timeout=resources.requeues,
                local_max_num_timeout=resources.requeues,
            )
            executor.update_parameters(**_parameters(resources))
            queued = executor.submit_array([Training(words) for words in trainings.values()])
    except (FailedJobError, FailedSubmissionError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if existed:
            folder.mkdir()
        raise UserError(f"sbatch refuses ({one_line(error)}); nothing is queued: give what it asks for") from error
    jobs = [Job(job.job_id, output.absolute(), job.paths.stdout) for output, job in zip(trainings, queued, strict=True)]
    submission = Submission(cluster, jobs)
    _write(folder / _INDEX, submission)
    if cluster == "local":
        for job in queued:
            job.wait()
    return submission


def _parameters(resources: Resources) -> dict[str, object]:
    """As submitit names them; None: not asked for."""
    return {
        "name": "hf-vit",
        "timeout_min": max(1, round(60 * resources.hours)),
        "mem_gb": resources.memory,
        "nodes": resources.nodes,
        "gpus_per_node": resources.gpus or None,
        "tasks_per_node": max(1, resources.gpus),
        "cpus_per_task": resources.cpus,
        "stderr_to_stdout": True,
        "slurm_partition": resources.partition,
        "slurm_signal_delay_s": _SIGNAL_SECONDS,
        # Where one process fails, the others are not left waiting for it.
        "slurm_srun_args": ["--kill-on-bad-exit=1"],
        "slurm_additional_parameters": {**resources.sbatch, "requeue": True},
    }


def refuse_full(folder: Path, what: str) -> None:
    """Make sure that a folder is new or empty.

    Raises:
        UserError: it is not.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{what} {folder} is a file; choose a new or empty folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{what} {folder} is not empty; choose a new or empty one")


def read_submission(folder: Path) -> Submission:
    """What was submitted.

    Raises:
        UserError: nothing was, or the file is damaged.
    """
    try:
        submission = TypeAdapter(Submission).validate_json((folder / _INDEX).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no {_INDEX} of hf-vit submit; give the folder that it named") from error
    if submission.cluster == "slurm" and shutil.which("sacct") is None:
        raise UserError(f"the jobs of {folder} are asked for by sacct, which is not here; use a machine of the cluster")
    return submission


def states(folder: Path, submission: Submission) -> list[str]:
    """How every job stands: finished, when its model is complete; else what Slurm says; unfinished of a local one."""
    say = _slurm_states(folder, submission) if submission.cluster == "slurm" else lambda job: "unfinished"
    return ["finished" if _is_finished(job.output) else say(job) for job in submission.jobs]


def last_line(job: Job) -> str:
    """Of what the job printed itself; empty where it has not begun."""
    try:
        with job.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    spoken = [line for line in lines if not line.startswith(("submitit ", "slurmstepd:", "srun:"))]
    return one_line(next(reversed(spoken or lines), ""))


def _slurm_states(folder: Path, submission: Submission) -> Callable[[Job], str]:
    asked: dict[str, SlurmJob[object]] = {job.id: SlurmJob(folder, job.id) for job in submission.jobs}
    return lambda job: asked[job.id].state.lower()  # of all at once, by one call of sacct


def _is_finished(output: Path) -> bool:
    from hf_vit.training.run.output import is_finished

    return is_finished(output)


def _write(path: Path, submission: Submission) -> None:
    write_atomically(path, TypeAdapter(Submission).dump_json(submission, indent=2))
