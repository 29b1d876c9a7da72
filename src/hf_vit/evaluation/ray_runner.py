"""Work by parts on many machines, by Ray: tasks that read, and actors that hold the model.

A part is given to an actor, which has a task read it: decoded, resized batches flow, a few ahead, from wherever a core
is free. Ray starts again what was killed, on another machine if need be. What comes of a part follows from the part
alone, so that it may be done twice.
"""

import itertools
import logging
import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import ray
import torch
from ray._private import worker
from ray.exceptions import RayActorError, RayError

from hf_vit.data.fingerprints import ChangedImageError
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.ray_nodes import ATTEMPTS, compared_versions, enter, got, lost, need_versions

if TYPE_CHECKING:
    from hf_vit.loading.model import LoadedModel

_BEGINNING = -1  # counts as a part
_SILENCE = 600  # seconds in which nothing begins: long enough for nodes that an autoscaler brings
# Next to nothing: readers must find room beside actors, also where nodes are lost and others take their actors.
_ACTOR_CORES = 0.001
_BATCHES_AHEAD = 2  # of a part, that wait decoded
_PARTS_AT_ONCE = (2, 16)  # of an actor, at least and at most: one is computed while others are read and written
_PARTS_AHEAD = 8  # of the oldest part in work, for each that is in work: where results are wanted in order
# Unless the user asks for something else: usage is not reported, GPUs are not hidden from tasks that ask for none, and
# processes that read live on for the next part, as importing takes a new one seconds.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
}
_PATIENCE = 10  # seconds with an address where nobody answers


class Work(Protocol):
    """What is done to parts; it travels to every process."""

    def opened(self, device: str | None) -> "LoadedModel":
        """The model, in a process that holds it."""
        ...

    def batches(self, part: Any, prepare: Callable[..., Any]) -> Iterator[Any]:
        """What the images of a part are for the model, made by the `prepare` of the subject, in any process."""
        ...

    def done(self, part: Any, batches: Iterator[Any], subject: "LoadedModel") -> Any:
        """What comes of a part, computed where the model is."""
        ...


@dataclass(frozen=True)
class RayRunner:
    """A connection to Ray, and how its machines are shared out.

    Attributes:
        num_processes: actors, each with a model.
        device: of each of them; None: a GPU if it has one.
        gpus: of an actor, perhaps a share of one; 0 for none.
        parts_at_once: of an actor.
        threads: of an actor without a GPU.
        reading: cores that Ray reckons for a part that is read.
    """

    num_processes: int
    device: str | None
    gpus: float
    parts_at_once: int
    threads: int
    reading: float

    def each(
        self, work: Work, parts: Iterable[Any], subject: "LoadedModel", ahead: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(number of the part, what came of it), as they are done.

        Args:
            work: what is done.
            parts: whatever `work` understands.
            subject: the model here, as which those of the actors must be.
            ahead: how many parts the oldest in work is left behind at most; by default any number.

        Raises:
            UserError: of the work itself; or processes ended over a part again and again.
        """
        cargo = ray.put((work, subject.prepare, os.getcwd()))
        task = _Task(cargo, self.device, self.threads, self.reading, subject.fingerprint, compared_versions())
        run = _Run(self, task, parts, ahead)
        try:
            yield from run.results()
        finally:
            run.end()

    def in_order(self, work: Work, parts: Iterable[Any], subject: "LoadedModel") -> Iterator[Any]:
        """What came of every part, in the order of the parts; few wait for an earlier one."""
        waiting: dict[int, Any] = {}
        ahead = _PARTS_AHEAD * self.num_processes * self.parts_at_once
        following = itertools.count()
        upcoming = next(following)
        for number, result in self.each(work, parts, subject, ahead):
            waiting[number] = result
            while upcoming in waiting:
                yield waiting.pop(upcoming)
                upcoming = next(following)


class _Run:
    """Parts on their way through actors, of which those that are lost are replaced."""

    def __init__(self, runner: RayRunner, task: "_Task", parts: Iterable[Any], ahead: int | None) -> None:
        self._runner, self._task, self._ahead = runner, task, ahead
        self._queue = enumerate(parts)
        self._upcoming = next(self._queue, None)
        self._again: list[tuple[int, Any]] = []  # parts of lost actors
        self._busy: dict[Any, tuple[int, Any, Any]] = {}  # result -> number, part, actor
        self._starting: dict[Any, Any] = {}  # word that it is ready -> actor
        self._ready: list[Any] = []
        self._failures = Counter[int]()
        for _ in range(runner.num_processes):
            self._start()

    def results(self) -> Iterator[tuple[int, Any]]:
        """(number of the part, what came of it), as they are done."""
        while self._busy or self._again or self._upcoming is not None:
            while (actor := self._free()) is not None and (following := self._following()) is not None:
                self._busy[actor.do.remote(following[1])] = (*following, actor)
            told, _ = ray.wait([*self._busy, *self._starting], num_returns=1, timeout=_SILENCE)
            if not told and not self._busy:
                raise UserError(
                    f"no process of Ray could begin in {_SILENCE} s; free its cores or GPUs (ray status), or add nodes"
                )
            for reference in told:
                if reference in self._starting:
                    self._begin(reference)
                elif (result := self._result(reference)) is not None:
                    yield result

    def end(self) -> None:
        """Let no actor live on."""
        if ray.is_initialized():  # else they are gone, and the next word would start it anew
            for actor in (*self._ready, *self._starting.values()):
                ray.kill(actor)

    def _start(self) -> None:
        runner = self._runner
        actor = ray.remote(_ModelProcess).options(
            num_cpus=_ACTOR_CORES,
            num_gpus=runner.gpus,
            max_concurrency=runner.parts_at_once,
            scheduling_strategy="SPREAD",
        )
        handle: Any = actor.remote()
        self._starting[handle.begin.remote(self._task)] = handle

    def _begin(self, reference: Any) -> None:
        actor = self._starting.pop(reference)
        try:
            got(reference)
        except RayError as error:
            self._count(_BEGINNING, error)
            self._start()
        else:
            self._failures[_BEGINNING] = 0
            self._ready.append(actor)

    def _free(self) -> Any | None:
        """The ready actor with the least to do, if it can take a part."""
        loads = [actor for *_, actor in self._busy.values()]
        actor = min(self._ready, key=loads.count, default=None)
        return None if actor is None or loads.count(actor) >= self._runner.parts_at_once else actor

    def _following(self) -> tuple[int, Any] | None:
        if self._again:
            return self._again.pop(0)
        following = self._upcoming
        if following is None:
            return None
        oldest = min((number for number, *_ in self._busy.values()), default=following[0])
        if self._ahead is not None and following[0] - oldest >= self._ahead:
            return None
        self._upcoming = next(self._queue, None)
        return following

    def _result(self, reference: Any) -> tuple[int, Any] | None:
        """None where what computes it is lost: the part is done again."""
        number, part, actor = self._busy.pop(reference)
        try:
            return number, got(reference)
        except RayError as error:
            self._count(number, error)
            self._again.append((number, part))
            if isinstance(error, RayActorError) and actor in self._ready:
                self._ready.remove(actor)
                ray.kill(actor)
                self._start()
            return None

    def _count(self, number: int, error: RayError) -> None:
        self._failures[number] += 1
        if self._failures[number] >= ATTEMPTS:
            raise lost(error) from error


@dataclass(frozen=True)
class _Task:
    """What an actor is told when it begins.

    Attributes:
        cargo: reference to the work, the `prepare` of the subject, and the folder that paths start from.
        device, threads, reading: see `RayRunner`.
        fingerprint: of the model.
        versions: of the packages that compute.
    """

    cargo: Any
    device: str | None
    threads: int
    reading: float
    fingerprint: str
    versions: dict[str, str]


class _ModelProcess:
    """An actor: it holds the model, and computes a batch at a time of the parts that are read for it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def begin(self, task: "_Task") -> None:
        """Open the model."""
        self._task = task
        self._work, self._subject = _opened(task)

    def do(self, part: Any) -> Any:
        """What comes of a part."""
        with closing(self._in_turn(part)) as batches:
            return self._work.done(part, batches, self._subject)

    def _in_turn(self, part: Any) -> Generator[Any]:
        """Batches, each while no other thread has one: the model computes one at a time."""
        reading = ray.remote(_read).options(
            num_cpus=self._task.reading,
            num_returns="streaming",
            max_retries=ATTEMPTS,
            _generator_backpressure_num_objects=_BATCHES_AHEAD,
        )
        references: Any = reading.remote(self._task.cargo, part)
        for reference in references:
            batch = got(reference)
            with self._turn:
                yield batch


def _opened(task: _Task) -> "tuple[Work, LoadedModel]":
    node = need_versions(task.versions)
    torch.set_num_threads(task.threads)
    work: Work
    work, _, folder = ray.get(task.cargo)
    enter(folder)
    try:
        subject = work.opened(task.device)
    except UserError as error:
        raise UserError(f"on node {node}: {error}") from error
    if subject.fingerprint != task.fingerprint:
        raise UserError(f"node {node} has another model of the name {subject.name}; give one that all nodes share")
    return work, subject


def _read(cargo: tuple[Work, Callable[..., Any], str], part: Any) -> Iterator[Any]:
    """A task: the batches of a part."""
    # An array goes through shared memory without the copies that a pickled tensor is made of.
    ray.util.register_serializer(torch.Tensor, serializer=_array_of, deserializer=_tensor_of)
    work, prepare, folder = cargo
    enter(folder)
    try:
        yield from work.batches(part, prepare)
    except ChangedImageError as error:
        node = ray.util.get_node_ip_address()
        raise UserError(f"on node {node}: {error}; give data that all nodes share") from error


def _array_of(tensor: Any) -> Any:
    return tensor.numpy()


def _tensor_of(array: Any) -> Any:
    return torch.from_numpy(array.copy())  # of its own: the store's memory may only be read


@contextmanager
def connected(address: str | None, num_processes: int | None, device: str | None) -> Generator[RayRunner]:
    """Ray, started on this machine or where it runs already; what was started ends with it.

    A process that is connected to Ray stays so.

    Args:
        address: HOST:PORT of a cluster, or "auto"; by default what RAY_ADDRESS says, else this machine alone.
        num_processes: with a model each; by default one for every GPU, or where there is none for every machine.
        device: torch device of the models.

    Raises:
        UserError: there is no such cluster, it is of another version, or it has not what is asked for.
    """
    was_there = ray.is_initialized()
    if was_there and address is not None:
        raise UserError(f"this process is connected to Ray already; leave the address {address} out, or end that first")
    if not was_there:
        _connect(address or os.environ.get("RAY_ADDRESS") or "local")
    try:
        yield _shared_out(num_processes, device)
    finally:
        if not was_there:
            ray.shutdown()


def _connect(address: str) -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if "://" in address:
        raise UserError(f"the address {address} is of Ray's client; give HOST:PORT, on a machine of the cluster")
    if address not in ("local", "auto"):
        _refuse_silence(address)
    # It tells on standard output of every process that it starts again.
    worker._worker_logs_enabled = False
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(address=address, include_dashboard=False, logging_level=logging.CRITICAL, log_to_driver=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        with suppress(Exception):
            ray.shutdown()
        _refuse(address, error)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, handler)


def _refuse_silence(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if not (host and port.isdecimal()):
            raise ValueError("no HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        _refuse(address, error)


def _refuse(address: str, error: Exception) -> NoReturn:
    said = one_line(error)
    if "Version mismatch" in said:
        raise UserError(f"the cluster at {address} is of another version ({said}); install the same") from error
    raise UserError(
        f"there is no cluster of Ray at {address} ({said}); give the HOST:PORT that ray start named, or leave "
        "--address out for this machine alone"
    ) from error


def _shared_out(num_processes: int | None, device: str | None) -> RayRunner:
    """A model a GPU, or a machine; all cores for reading, which beside a model on the CPU waits most of the time."""
    have = ray.cluster_resources()
    cpus, gpus = have.get("CPU", 0.0), int(have.get("GPU", 0))
    machines = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")) or 1
    if cpus < 1:
        raise UserError("the cluster of Ray offers no CPU; start its nodes with --num-cpus")
    if device is not None and device.startswith("cuda"):
        if ":" in device:
            raise UserError(f"which GPU is Ray's choice; give --device cuda instead of {device}")
        if not gpus:
            raise UserError("the cluster of Ray has no GPU; leave --device cuda out")
    uses_gpus = bool(gpus) and device in (None, "cuda")
    count = num_processes or (gpus if uses_gpus else machines)
    least, most = _PARTS_AT_ONCE
    at_once = min(max(math.ceil(cpus / count), least), most)
    return RayRunner(
        num_processes=count,
        device=device,
        gpus=1 / math.ceil(count / gpus) if uses_gpus else 0,
        parts_at_once=at_once,
        threads=max(1, int(cpus / max(count, machines))),
        reading=min(1.0, math.floor(9_000 * cpus / (count * at_once)) / 10_000),  # Ray reckons in ten thousandths
    )
