"""Ray: a pipeline of Ray Data whose tasks read and whose actors hold the model, and tasks that stand alone.

Ray Data starts again what was killed, on another machine if need be: what comes of a part follows from the part alone.
What stays here: batches in the order of their parts, nodes that are alike, and errors of one line.
"""

import logging
import math
import os
import pickle
import re
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import ray
import ray.data
import torch
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError, RayTaskError
from transformers import BatchFeature

from hf_vit.data.fingerprints import ChangedImageError
from hf_vit.environment import versions
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.reading import NamedModel

if TYPE_CHECKING:
    from hf_vit.loading.model import LoadedModel

ATTEMPTS = 4  # at a task
# Next to nothing: readers must find room beside actors, also where nodes are lost and others take their actors.
_ACTOR_CORES, _READER_CORES = 0.001, 0.99
_SILENCE = 600  # seconds without progress: long enough for nodes that an autoscaler brings
_PATIENCE = 10  # seconds with an address where nobody answers
_COMPARED = ("hf-vit", "torch", "torchvision", "transformers")
# Unless the user asks for something else: usage is not reported, no lines of C++ come among ours, GPUs are not hidden
# from tasks that ask for none, and processes that read live on for the next part, as importing takes a new one seconds.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
}


class Work(Protocol):
    """What is done to parts of the data, in any process; it travels there."""

    def batches(self, part: Any, prepare: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
        """Iterate over (pixel values or None, whatever else belongs to them) of a part."""
        ...

    def answer(self, pixel_values: Any, rest: Any, subject: "LoadedModel") -> Any:
        """Return what the model makes of a batch."""
        ...


@dataclass(frozen=True)
class RayRunner:
    """A connection to Ray, and how its machines are shared out."""

    num_processes: int  # actors, each with a model
    device: str | None  # of each of them; None: a GPU if it has one
    gpus: float  # of an actor, perhaps a share of one; 0 for none
    threads: int  # of an actor without a GPU
    model: NamedModel | None = None  # that the actors hold
    pipelines: list[Any] = field(default_factory=list[Any])  # that were begun

    def answers(self, work: Work, parts: Sequence[Any], subject: "LoadedModel") -> Iterator[tuple[int, Any]]:
        """Iterate over (number of the part, answer) of every batch of all parts, in their order."""
        if not parts:
            return
        cargo, read = [ray.put((work, parts, subject.prepare, os.getcwd()))], cast(Any, _read)
        actor = [self.model, subject.fingerprint, self.device, self.threads, compared_versions(), cargo]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Ray's own settings
            context = ray.data.DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # every batch is sent on as soon as it is read
        context.enable_progress_bars = context.print_on_execution_start = False
        context.execution_no_progress_timeout_s = _SILENCE
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        with _one_line_errors():
            with ray.data.DataContext.current(context):
                pipeline = (
                    ray.data.range(len(parts), override_num_blocks=len(parts))
                    .map_batches(read, batch_size=None, fn_args=[cargo], num_cpus=_READER_CORES)
                    .map_batches(
                        _Model,
                        batch_size=None,
                        fn_constructor_args=actor,
                        zero_copy_batch=True,
                        compute=ray.data.ActorPoolStrategy(size=self.num_processes),
                        num_cpus=_ACTOR_CORES,
                        num_gpus=self.gpus,
                    )
                )
            rows: Any = iter(pipeline.iter_batches(batch_size=None))
            self.pipelines.append(rows)
            for row in rows:
                answer = pickle.loads(row["answer"][0])
                if isinstance(answer, _Failure):
                    raise answer.error
                yield int(row["part"][0]), answer


@lru_cache(maxsize=1)
def _opened(reference: Any) -> Any:
    """Return what `answers` sent to all processes; each reads it once."""
    return ray.get(reference)


@dataclass
class _Failure:
    """What a process raised. It goes with the answers, as Ray Data would add advice of its own to an exception."""

    error: Exception


def _read(parts: Mapping[str, Any], cargo: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Read the batches of a part, as a task; pixels go through shared memory as arrays."""
    work, all_parts, prepare, folder = _opened(cargo[0])
    enter(folder)
    for number in parts["id"].tolist():
        try:
            for pixel_values, rest in work.batches(all_parts[number], prepare):
                tensors = {"": pixel_values} if isinstance(pixel_values, torch.Tensor) else pixel_values or {}
                arrays = {f"pixels {name}": value.numpy()[None] for name, value in tensors.items()}
                yield {"part": [number], "rest": _packed(rest), **arrays}
        except ChangedImageError as error:
            told = UserError(f"on node {ray.util.get_node_ip_address()}: {error}; give data that all nodes share")
            yield {"part": [number], "rest": _packed(_Failure(told))}
        except Exception as error:
            yield {"part": [number], "rest": _packed(_Failure(error))}


@dataclass
class _Model:
    """An actor: it holds the model, and answers a batch at a time."""

    model: NamedModel
    fingerprint: str
    device: str | None
    threads: int
    versions: dict[str, str]
    cargo: Sequence[Any]
    subject: "LoadedModel | None" = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        answer = pickle.loads(batch["rest"][0])
        if not isinstance(answer, _Failure):
            try:
                answer = self._answer(batch, answer)
            except Exception as error:
                answer = _Failure(error)
        return {"part": batch["part"], "answer": _packed(answer)}

    def _answer(self, batch: Mapping[str, Any], rest: Any) -> Any:
        work, _, _, folder = _opened(self.cargo[0])
        if self.subject is None:
            enter(folder)
            self.subject = self._open()
        # Copied, as shared memory may only be read.
        tensors = {k.removeprefix("pixels "): torch.from_numpy(v[0].copy()) for k, v in batch.items() if "pixels" in k}
        pixel_values = tensors[""] if "" in tensors else BatchFeature(tensors) if tensors else None
        return work.answer(pixel_values, rest, self.subject)

    def _open(self) -> "LoadedModel":
        node = need_versions(self.versions)
        torch.set_num_threads(self.threads)
        try:
            subject = self.model.opened(self.device)
        except UserError as error:
            raise UserError(f"on node {node}: {error}") from error
        if subject.fingerprint != self.fingerprint:
            raise UserError(f"node {node} has another model of the name {subject.name}; give one that all nodes share")
        return subject


def _packed(value: Any) -> Any:
    packed = np.empty(1, dtype=object)
    packed[0] = pickle.dumps(value, protocol=5)
    return packed


def independent(
    runner: RayRunner, run: Callable[..., Any], each: Sequence[Any], *shared: Any
) -> Iterator[tuple[int, Any]]:
    """Iterate over (number, `run(one, *shared)`) of each task as it ends; a lost machine's run again on another.

    A run has a GPU, or where there is none as many cores as torch takes here, so that its numbers are those of here:
    with OMP_NUM_THREADS=1 there are as many at once as the cluster has cores.
    """
    threads = min(torch.get_num_threads(), int(max(node["Resources"].get("CPU", 1) for node in ray.nodes())))
    task = ray.remote(_run).options(
        num_cpus=1 if runner.gpus else threads,
        num_gpus=1 if runner.gpus else 0,
        max_retries=ATTEMPTS - 1,
        scheduling_strategy="SPREAD",
    )
    cargo = ray.put((run, shared, os.getcwd(), compared_versions(), threads))
    waiting: dict[Any, int] = {task.remote(cargo, one): number for number, one in enumerate(each)}
    try:
        while waiting:
            done, _ = ray.wait([*waiting], num_returns=1)
            with _one_line_errors():
                result = ray.get(done[0])
            yield waiting.pop(done[0]), result
    finally:
        if ray.is_initialized():
            for reference in waiting:
                ray.cancel(reference, force=True)


def _run(cargo: tuple[Callable[..., Any], tuple[Any, ...], str, dict[str, str], int], one: Any) -> Any:
    run, shared, folder, wanted, threads = cargo
    node = need_versions(wanted)
    torch.set_num_threads(threads)
    enter(folder)
    try:
        return run(one, *shared)
    except UserError as error:
        raise UserError(f"on node {node}: {error}") from error


def compared_versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    return {name: version for name, version in versions().items() if name in _COMPARED}


def need_versions(wanted: dict[str, str]) -> str:
    """Return the address of this node, which must compute with the same packages."""
    here, node = versions(), ray.util.get_node_ip_address()
    for name, version in wanted.items():
        if here.get(name) != version:
            raise UserError(f"node {node} has {name} {here.get(name)}, this run {version}; install the same there")
    return node


def enter(folder: str) -> None:
    """Let relative paths begin where the command was typed."""
    with suppress(OSError):  # of a node without it, paths that begin there are not found
        os.chdir(folder)


@contextmanager
def _one_line_errors() -> Generator[None]:
    """Raise what a process raised as if it were raised here, and say in one line where processes were lost."""
    try:
        yield
    except ExecutionTimeoutError as error:
        raise UserError(
            f"Ray started no process within {_SILENCE} s; free cores or GPUs (see ray status), or add "
            "nodes, then run the same command again: finished parts are kept"
        ) from error
    except RayError as error:
        if "failed to import on the worker" in str(error):
            node = re.search(r"\bip=([^,)\s]+)", str(error))
            package = re.search(r"No module named '(\w+)", str(error))
            raise UserError(
                f"node {node[1] if node else '(unknown)'} cannot import "
                f"{package[1] if package else 'a package of this run'}; install the same packages there"
            ) from error
        cause: Any = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if not isinstance(cause, RayError):
            raise cause from error
        if isinstance(cause, RayTaskError):
            raise
        lines = [line for line in map(one_line, str(error).splitlines()) if line]
        reason = next(reversed(lines), type(error).__name__)[:200]
        raise UserError(
            f"processes of Ray ended {ATTEMPTS} times over the same work, or could not start ({reason}); "
            "run the same command again: finished parts are kept"
        ) from error


@contextmanager
def connected(address: str | None, num_processes: int | None, device: str | None) -> Generator[RayRunner]:
    """Connect to Ray, on this machine or where it runs; what was started ends, a connection from before stays."""
    was_there = ray.is_initialized()
    if was_there and address is not None:
        raise UserError(
            f"this process is already connected to Ray; leave the address {address} out, or disconnect first"
        )
    if not was_there:
        _connect(address or os.environ.get("RAY_ADDRESS") or "local")
    pipelines: list[Any] = []
    try:
        runner = _shared_out(num_processes, device)
        pipelines = runner.pipelines
        yield runner
    finally:
        for pipeline in pipelines:  # one that an error left is at work
            pipeline.close()
        if not was_there:
            ray.shutdown()


def _connect(address: str) -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if "://" in address:
        raise UserError(f"the address {address} is a Ray client address; give HOST:PORT, on a machine of the cluster")
    host, _, port = address.rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal()):
        raise UserError(
            f"--address {address} is not HOST:PORT; give the address that `ray start` printed, or leave --address out "
            "to start Ray on this machine"
        )
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        if address not in ("local", "auto"):  # where nobody answers Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        with _no_stderr():
            ray.init(address=address, include_dashboard=False, logging_level=logging.CRITICAL, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        with suppress(Exception):
            ray.shutdown()
        reason = one_line(error)
        if "Version mismatch" in reason:
            other = f"the cluster at {address} runs another version ({reason})"
            raise UserError(f"{other}; install the same version") from error
        raise UserError(
            f"no Ray cluster at {address} ({reason}); give the HOST:PORT that ray start printed, or leave "
            "--address out to start Ray on this machine"
        ) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _no_stderr() -> Generator[None]:
    """Drop what C++ says of its settings."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _shared_out(num_processes: int | None, device: str | None) -> RayRunner:
    """Give every GPU or machine a model, and all cores to reading, which beside a model on the CPU waits mostly."""
    have = ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0), int(have.get("GPU", 0))
    machines = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")) or 1
    if cpus < 1:
        raise UserError("the Ray cluster has no CPUs; start its nodes with --num-cpus")
    if device is not None and device.startswith("cuda"):
        if ":" in device:
            raise UserError(f"Ray assigns GPUs itself; give --device cuda instead of {device}")
        if not gpus:
            raise UserError("the Ray cluster has no GPU; leave --device cuda out")
    uses_gpus = bool(gpus) and device in (None, "cuda")
    count = num_processes or (gpus if uses_gpus else machines)
    return RayRunner(
        num_processes=count,
        device=device,
        gpus=1 / math.ceil(count / gpus) if uses_gpus else 0,
        threads=max(1, int(cpus / max(count, machines))),
    )
