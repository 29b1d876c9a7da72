"""Run models on Ray: a Ray Data pipeline whose tasks read images and whose actors run the model, and separate tasks.

The result of a part depends on the part alone, so Ray can repeat killed work on another machine. This module keeps
batches in the order of their parts, requires equal package versions on all nodes, and turns errors into one line.
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
from hf_vit.environment import list_versions
from hf_vit.errors import UserError, to_one_line
from hf_vit.evaluation.reading import NamedModel

if TYPE_CHECKING:
    from hf_vit.loading.model import LoadedModel

ATTEMPTS = 4  # of a task
# Actors request almost no cores, so that readers find room beside them even if some nodes are lost.
_ACTOR_CORES, _READER_CORES = 0.001, 0.99
_SILENCE = 600  # seconds without progress before an error; an autoscaler may need minutes to add nodes
_PATIENCE = 10  # seconds to wait for a connection
_COMPARED = ("hf-vit", "torch", "torchvision", "transformers")
# Defaults: report no usage, print no C++ messages, do not hide GPUs from tasks that request none, and keep reading
# processes alive for the next part, because starting one takes seconds.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
}


class Work(Protocol):
    """A computation on parts of the data, which can be sent to any process."""

    def batches(self, part: Any, prepare: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
        """Iterate over the batches of a part: (pixel values or None, other values of the batch)."""
        ...

    def answer(self, pixel_values: Any, rest: Any, loaded: "LoadedModel") -> Any:
        """Compute the output for a batch."""
        ...


@dataclass(frozen=True)
class RayRunner:
    """A connection to Ray, and the division of its machines among actors.

    Attributes:
        num_processes: number of actors, each with a model.
        device: of every actor; None for a GPU if it has one.
        gpus: GPUs of an actor, which may be a fraction, or 0.
        threads: of an actor without a GPU.
        model: the model of the actors.
        pipelines: pipelines that were started.
    """

    num_processes: int
    device: str | None
    gpus: float
    threads: int
    model: NamedModel | None = None
    pipelines: list[Any] = field(default_factory=list[Any])

    def run(self, work: Work, parts: Sequence[Any], loaded: "LoadedModel") -> Iterator[tuple[int, Any]]:
        """Iterate over (number of the part, output of `work.answer`) for every batch of all parts, in order."""
        if not parts:
            return
        # In a list, so that Ray passes the reference itself, and every process reads its object only once.
        cargo = [ray.put((work, parts, loaded.prepare, os.getcwd()))]
        read = cast(Any, _read)
        actor = [self.model, loaded.fingerprint, self.device, self.threads, get_compared_versions(), cargo]
        settings = _make_settings()
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        with _shorten_errors():
            with ray.data.DataContext.current(settings):
                numbers = ray.data.range(len(parts), override_num_blocks=len(parts))
                batches = numbers.map_batches(read, batch_size=None, fn_args=[cargo], num_cpus=_READER_CORES)
                pipeline = batches.map_batches(
                    _Model,
                    batch_size=None,
                    fn_constructor_args=actor,
                    zero_copy_batch=True,
                    compute=ray.data.ActorPoolStrategy(size=self.num_processes),
                    num_cpus=_ACTOR_CORES,
                    num_gpus=self.gpus,
                )
            rows: Any = iter(pipeline.iter_batches(batch_size=None))
            self.pipelines.append(rows)
            for row in rows:
                answer = pickle.loads(row["answer"][0])
                if isinstance(answer, _Failure):
                    raise answer.error
                yield int(row["part"][0]), answer


def _make_settings() -> Any:
    """Return settings for a pipeline that prints nothing and passes every batch on, in order, as soon as it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by Ray's own settings
        settings = ray.data.DataContext.get_current().copy()
    settings.execution_options.preserve_order = True
    settings.target_max_block_size = 1  # byte, so that no batch waits for the next one
    settings.enable_progress_bars = settings.print_on_execution_start = False
    settings.execution_no_progress_timeout_s = _SILENCE
    return settings


@lru_cache(maxsize=1)
def _get_cargo(reference: Any) -> Any:
    """Return the objects that `RayRunner.run` sends to all processes; cached in every process."""
    return ray.get(reference)


@dataclass
class _Failure:
    """An error of another process, sent as an output because Ray Data would add its own text to an exception."""

    error: Exception


def _read(parts: Mapping[str, Any], cargo: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Read the batches of a part (a Ray task); pixels are passed as arrays in shared memory."""
    work, all_parts, prepare, folder = _get_cargo(cargo[0])
    change_folder(folder)
    for number in parts["id"].tolist():
        try:
            for pixel_values, rest in work.batches(all_parts[number], prepare):
                # Images of one size are a single tensor, which gets the name "", others several named tensors.
                tensors = {"": pixel_values} if isinstance(pixel_values, torch.Tensor) else pixel_values or {}
                arrays = {f"pixels {name}": value.numpy()[None] for name, value in tensors.items()}
                yield {"part": [number], "rest": _pack(rest), **arrays}
        except Exception as error:
            if isinstance(error, ChangedImageError):
                node = ray.util.get_node_ip_address()
                error = UserError(f"on node {node}: {error}; give data on storage that all nodes share")
            yield {"part": [number], "rest": _pack(_Failure(error))}


@dataclass
class _Model:
    """A Ray actor that loads the model and runs it on batches."""

    model: NamedModel
    fingerprint: str
    device: str | None
    threads: int
    versions: dict[str, str]
    cargo: Sequence[Any]
    loaded: "LoadedModel | None" = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer for a batch; a failure travels as an answer, so that the main process raises it."""
        answer = pickle.loads(batch["rest"][0])
        if not isinstance(answer, _Failure):
            try:
                answer = self._run(batch, answer)
            except Exception as error:
                answer = _Failure(error)
        return {"part": batch["part"], "answer": _pack(answer)}

    def _run(self, batch: Mapping[str, Any], rest: Any) -> Any:
        """Run the work on a batch; the first call loads the model."""
        work, _, _, folder = _get_cargo(self.cargo[0])
        if self.loaded is None:
            change_folder(folder)
            self.loaded = self._load()
        # The arrays are copied, because shared memory is read-only.
        arrays = {key.removeprefix("pixels "): array[0] for key, array in batch.items() if "pixels" in key}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        if "" in tensors:  # see `_read`
            return work.answer(tensors[""], rest, self.loaded)
        return work.answer(BatchFeature(tensors) if tensors else None, rest, self.loaded)

    def _load(self) -> "LoadedModel":
        """Load the model; raise UserError if versions or the model differ from those of the main process."""
        node = check_versions(self.versions)
        torch.set_num_threads(self.threads)
        try:
            loaded = self.model.load(self.device)
        except UserError as error:
            raise UserError(f"on node {node}: {error}") from error
        if loaded.fingerprint != self.fingerprint:
            raise UserError(
                f"node {node} has another model under the name {loaded.name}; put the model on storage that all "
                "nodes share, or give a Hub id"
            )
        return loaded


def _pack(value: Any) -> Any:
    """Pickle a value into an object array, as Ray Data requires arrays."""
    packed = np.empty(1, dtype=object)
    packed[0] = pickle.dumps(value, protocol=5)
    return packed


def run_independent(
    runner: RayRunner, run: Callable[..., Any], items: Sequence[Any], *shared: Any
) -> Iterator[tuple[int, Any]]:
    """Iterate over (number, `run(item, *shared)`) as the tasks end; tasks of a lost machine are repeated on another.

    A task has a GPU, or without GPUs as many cores as torch uses in this process, so that its results are the same as
    here. With OMP_NUM_THREADS=1 as many tasks run at once as the cluster has cores.
    """
    threads = min(torch.get_num_threads(), int(max(node["Resources"].get("CPU", 1) for node in ray.nodes())))
    task = ray.remote(_run).options(
        num_cpus=1 if runner.gpus else threads,
        num_gpus=1 if runner.gpus else 0,
        max_retries=ATTEMPTS - 1,
        scheduling_strategy="SPREAD",
    )
    shared_reference = ray.put((run, shared, os.getcwd(), get_compared_versions(), threads))
    waiting: dict[Any, int] = {task.remote(shared_reference, item): number for number, item in enumerate(items)}
    try:
        while waiting:
            done, _ = ray.wait([*waiting], num_returns=1)
            with _shorten_errors():
                result = ray.get(done[0])
            yield waiting.pop(done[0]), result
    finally:
        if ray.is_initialized():
            for reference in waiting:
                ray.cancel(reference, force=True)


def _run(shared_values: tuple[Callable[..., Any], tuple[Any, ...], str, dict[str, str], int], item: Any) -> Any:
    """Run one item of `run_independent` (a Ray task)."""
    run, shared, folder, required_versions, threads = shared_values
    node = check_versions(required_versions)
    torch.set_num_threads(threads)
    change_folder(folder)
    try:
        return run(item, *shared)
    except UserError as error:
        raise UserError(f"on node {node}: {error}") from error


def get_compared_versions() -> dict[str, str]:
    """Return the versions of the packages that must be equal on all nodes."""
    return {name: version for name, version in list_versions().items() if name in _COMPARED}


def check_versions(required_versions: dict[str, str]) -> str:
    """Return the address of this node; raise UserError if it has other package versions."""
    installed_versions = list_versions()
    node = ray.util.get_node_ip_address()
    for name, version in required_versions.items():
        if installed_versions.get(name) != version:
            raise UserError(
                f"node {node} has {name} {installed_versions.get(name)}, but this run uses {version}; "
                f"install {version} there"
            )
    return node


def change_folder(folder: str) -> None:
    """Change to the working directory of the main process, so that relative paths mean the same."""
    with suppress(OSError):  # a node without this folder reports missing files later
        os.chdir(folder)


@contextmanager
def _shorten_errors() -> Generator[None]:
    """Raise errors of other processes as if they were raised here, and turn errors of Ray into one line."""
    try:
        yield
    except ExecutionTimeoutError as error:
        raise UserError(
            f"Ray started no process within {_SILENCE} s; free cores or GPUs (see ray status) or add nodes, "
            "then run the same command again (finished parts are kept)"
        ) from error
    except RayError as error:
        cause: Any = error  # the error that a function of ours raised in another process, if there is one
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if not isinstance(cause, RayError):
            raise cause from error
        package_match = re.search(r"No module named '(\w+)", str(error))
        if package_match:
            node_match = re.search(r"\bip=([^,)\s]+)", str(error))
            node = node_match[1] if node_match else "(unknown)"
            raise UserError(f"node {node} cannot import {package_match[1]}; install the package there") from error
        if isinstance(cause, RayTaskError):
            raise
        lines = [line for line in map(to_one_line, str(error).splitlines()) if line]
        reason = next(reversed(lines), type(error).__name__)[:200]
        raise UserError(
            f"Ray's processes ended {ATTEMPTS} times during the same work, or could not start ({reason}); "
            "free memory or add nodes, then run the same command again (finished parts are kept)"
        ) from error


@contextmanager
def connect(address: str | None, num_processes: int | None, device: str | None) -> Generator[RayRunner]:
    """Connect to Ray at an address or start it here, and disconnect afterwards unless it was connected before."""
    was_connected = ray.is_initialized()
    if was_connected and address is not None:
        raise UserError(
            f"this Python process is already connected to Ray, so address={address!r} cannot be used; leave it out, "
            "or call ray.shutdown() first"
        )
    if not was_connected:
        _connect(address or os.environ.get("RAY_ADDRESS") or "local")
    pipelines: list[Any] = []
    try:
        runner = _divide_resources(num_processes, device)
        pipelines = runner.pipelines
        yield runner
    finally:
        for pipeline in pipelines:  # after an error a pipeline may still be running
            pipeline.close()
        if not was_connected:
            ray.shutdown()


def _connect(address: str) -> None:
    """Connect to "local", "auto" or HOST:PORT; raise UserError if the address is wrong or no cluster answers."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if "://" in address:
        raise UserError(
            f"--address {address} is a Ray client address, which is not supported; run the command on a "
            "machine of the cluster with --address HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal()):
        raise UserError(
            f"--address {address} is not HOST:PORT; give the address that `ray start` printed, or leave --address out "
            "to start Ray on this machine"
        )
    in_main = threading.current_thread() is threading.main_thread()
    previous_handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        if address not in ("local", "auto"):  # without an answer Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        with _silence_stderr():
            ray.init(address=address, include_dashboard=False, logging_level=logging.CRITICAL, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        with suppress(Exception):
            ray.shutdown()
        reason = to_one_line(error)
        if "Version mismatch" in reason:
            other = f"the cluster at {address} runs another version ({reason})"
            raise UserError(f"{other}; install the versions of the cluster here") from error
        raise UserError(
            f"the Ray cluster at {address} cannot be reached ({reason}); give the HOST:PORT that ray start printed, or "
            "leave --address out to start Ray on this machine"
        ) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, previous_handler)


@contextmanager
def _silence_stderr() -> Generator[None]:
    """Discard messages of C++ code on standard error."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _divide_resources(num_processes: int | None, device: str | None) -> RayRunner:
    """Plan a process for every GPU, or without GPUs for every machine, with an equal share of the cores."""
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
    machines = max(1, sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes()))
    if cpus < 1:
        raise UserError("the Ray cluster has no CPUs for tasks; start its nodes with ray start --num-cpus")
    if device is not None and device.startswith("cuda"):
        if ":" in device:
            raise UserError(f"--device {device} cannot be used: Ray assigns the GPUs itself; use --device cuda")
        if not gpus:
            raise UserError(
                "--device cuda was given, but the Ray cluster has no GPU; add a node with a GPU, or leave "
                "--device cuda out"
            )
    uses_gpus = bool(gpus) and device in (None, "cuda")
    count = num_processes or (gpus if uses_gpus else machines)
    gpu_share = 1 / math.ceil(count / gpus) if uses_gpus else 0  # more processes than GPUs share them
    return RayRunner(
        num_processes=count, device=device, gpus=gpu_share, threads=max(1, int(cpus / max(count, machines)))
    )
