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
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from hf_vit.environment import versions
from hf_vit.errors import UserError, one_line

try:
    import ray
    from ray._private import worker
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise UserError('the runner ray is not installed: pip install "hf-vit[ray]"') from error

if TYPE_CHECKING:
    from hf_vit.subjects.subject import Subject

# At a part: what ends a process each time ends the run. A rest of 2, 4, ... s between them outlasts the minute in which
# a machine that fell silent is not known to be lost.
_ATTEMPTS = 7
_WINK = 1.0  # seconds, after which is looked again for a process that rests no longer
_BATCHES_AHEAD = 2  # of a part, that wait decoded
_PARTS_AT_ONCE = (2, 16)  # of an actor, at least and at most: one is computed while others are read and written
_PARTS_AHEAD = 8  # of the oldest part in work, for each that is in work: where results are wanted in order
_PATIENCE = 10  # seconds with an address where nobody answers
_COMPARED = ("hf-vit", "torch", "torchvision", "transformers")


class Work(Protocol):
    """What is done to parts; it travels to every process."""

    def opened(self, device: str | None) -> "Subject":
        """The model, in a process that holds it."""
        ...

    def batches(self, part: Any, prepare: Callable[..., Any]) -> Iterator[Any]:
        """What the images of a part are for the model, made by the `prepare` of the subject, in any process."""
        ...

    def done(self, part: Any, batches: Iterator[Any], subject: "Subject") -> Any:
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
        holding, reading: cores that Ray reckons for an actor, and for each part that is read.
    """

    num_processes: int
    device: str | None
    gpus: float
    parts_at_once: int
    threads: int
    holding: float
    reading: float

    def each(
        self, work: Work, parts: Iterable[Any], subject: "Subject", ahead: int | None = None
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
        known = {name: version for name, version in versions().items() if name in _COMPARED}
        task = _Task(cargo, self.device, self.threads, self.reading, subject.fingerprint, known)
        processes = [self._process() for _ in range(self.num_processes)]
        queue, again, failures = enumerate(parts), list[tuple[int, Any]](), Counter[int]()
        busy: dict[Any, tuple[int, Any, int]] = {}  # result -> number, part, process
        rests = [0.0] * len(processes)  # until when nothing is given to a process that was lost
        begun = 0
        try:
            while True:
                while (place := self._free_place(busy, rests)) is not None:
                    oldest = min((number for number, *_ in (*busy.values(), *again)), default=begun)
                    is_far = ahead is not None and begun - oldest >= ahead
                    following = again.pop(0) if again else None if is_far else next(queue, None)
                    if following is None:
                        break
                    begun = max(begun, following[0] + 1)
                    busy[processes[place].do.remote(following[1], task)] = (*following, place)
                if not busy and not again:
                    return
                if not busy:
                    time.sleep(_WINK)
                    continue
                ready, _ = ray.wait(list(busy), num_returns=1, timeout=_WINK)
                for result in ready:
                    number, part, place = busy.pop(result)
                    try:
                        outcome = _got(result)
                    except RayError as error:
                        failures[number] += 1
                        if failures[number] == _ATTEMPTS:
                            raise _lost(error) from error
                        again.append((number, part))
                        rests[place] = time.monotonic() + 2 ** failures[number]
                    else:
                        yield number, outcome
        finally:
            if ray.is_initialized():  # else they are gone, and the next word would start it anew
                for process in processes:
                    ray.kill(process)

    def _free_place(self, busy: Mapping[Any, tuple[int, Any, int]], rests: Sequence[float]) -> int | None:
        """The process with the least to do that can take a part."""
        loads = Counter(place for *_, place in busy.values())
        awake = [place for place, until in enumerate(rests) if until <= time.monotonic()]
        place = min(awake, key=lambda place: loads[place], default=None)
        return None if place is None or loads[place] >= self.parts_at_once else place

    def in_order(self, work: Work, parts: Iterable[Any], subject: "Subject") -> Iterator[Any]:
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

    def _process(self) -> Any:
        actor = ray.remote(_ModelProcess).options(
            num_cpus=self.holding,
            num_gpus=self.gpus,
            max_restarts=-1,
            max_concurrency=self.parts_at_once,
            scheduling_strategy="SPREAD",
        )
        return actor.remote()


@dataclass(frozen=True)
class _Task:
    """What an actor is told with every part, as it may have been started again.

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
        self._opened: tuple[Work, Subject] | None = None

    def do(self, part: Any, task: _Task) -> Any:
        """What comes of a part."""
        with self._turn:
            if self._opened is None:
                self._opened = _opened(task)
        work, subject = self._opened
        with closing(self._in_turn(part, task)) as batches:
            return work.done(part, batches, subject)

    def _in_turn(self, part: Any, task: _Task) -> Generator[Any]:
        """Batches, each while no other thread has one: the model computes one at a time."""
        reading = ray.remote(_read).options(
            num_cpus=task.reading,
            num_returns="streaming",
            max_retries=_ATTEMPTS,
            _generator_backpressure_num_objects=_BATCHES_AHEAD,
        )
        references: Any = reading.remote(task.cargo, part)
        for reference in references:
            batch = _got(reference)
            with self._turn:
                yield batch


def _opened(task: _Task) -> "tuple[Work, Subject]":
    node = ray.util.get_node_ip_address()
    here = versions()
    for name, version in task.versions.items():
        if here.get(name) != version:
            raise UserError(f"node {node} has {name} {here.get(name)}, this run {version}; install the same there")
    torch.set_num_threads(task.threads)
    work: Work
    work, _, folder = ray.get(task.cargo)
    _enter(folder)
    try:
        subject = work.opened(task.device)
    except UserError as error:
        raise UserError(f"on node {node}: {error}") from error
    if subject.fingerprint != task.fingerprint:
        raise UserError(f"node {node} has another model of the name {subject.name}; give one that all nodes share")
    return work, subject


def _enter(folder: str) -> None:
    with suppress(OSError):  # of a node without it, paths that begin there are not found
        os.chdir(folder)


def _read(cargo: tuple[Work, Callable[..., Any], str], part: Any) -> Iterator[Any]:
    """A task: the batches of a part."""
    # An array goes through shared memory without the copies that a pickled tensor is made of.
    ray.util.register_serializer(torch.Tensor, serializer=_array_of, deserializer=_tensor_of)
    work, prepare, folder = cargo
    _enter(folder)
    yield from work.batches(part, prepare)


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
    # Its usage is not reported, and GPUs are not hidden from tasks that ask for none, unless that is asked for.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
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
    """A model a GPU, or a machine; what cores there are, half for models and half for reading."""
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
        holding=_rounded(min(0.5, cpus / (2 * count))),
        reading=_rounded(min(1.0, cpus / (2 * count * at_once))),
    )


def _rounded(cores: float) -> float:
    """Ray reckons in ten thousandths."""
    return math.floor(cores * 10_000) / 10_000


def _got(reference: Any) -> Any:
    """An object of Ray's store.

    Raises:
        RayError: those who compute it are lost.
        Exception: as whoever computes it raised it.
    """
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause: Any = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if isinstance(cause, RayTaskError):
            raise
        raise cause from error


def _lost(error: RayError) -> UserError:
    if isinstance(error, RayTaskError):
        raise error  # of the program, not of Ray
    lines = [line for line in map(one_line, str(error).splitlines()) if line]
    reason = next(reversed(lines), type(error).__name__)[:200]
    return UserError(
        f"processes of Ray ended {_ATTEMPTS} times over the same images, or could not begin ({reason}); what is "
        "complete stays, the same command goes on from it"
    )
