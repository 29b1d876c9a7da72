"""Distributed training (torchrun, accelerate launch): which process this is, and what only the first may do.

The first alone writes, prints and pushes. When one fails the launcher stops the others, or they miss it themselves.
What several processes cannot do together is refused.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from hf_vit.errors import UserError

# What the first tells the others.
_FAILED, _DONE, _AT_WORK = range(3)
# What several processes cannot do together; the reasons stand in docs/combinations.md.
REFUSALS = {
    "device": "{processes} processes cannot share --device {device}; leave it out (one GPU each), or give cpu",
    "batch": ("{processes} processes do not divide the batch size {batch_size}; choose a multiple of their number"),
    "contrastive parts": (
        "a contrastive batch of {share} images cannot be split into micro-batches of {parts}: its images "
        "are each other's negatives; leave --micro-batch-size out, or choose a smaller --batch-size"
    ),
    "meta pseudo labels": "meta-pseudo-labels runs in one process; start it without torchrun",
    "fsdp1": "FSDP of version 1 is not supported; set fsdp_version: 2 (examples/accelerate/fsdp2.yaml)",
    "sam micro-batches": (
        "--sam-micro-batches needs the whole weights in every process, and FSDP divides them; leave it out, or use DDP"
    ),
    "checkpointing dropout": (
        "fsdp_activation_checkpointing computes every block twice, with other dropout the second time; choose "
        "--dropout 0 --drop-path 0, or set it to false"
    ),
}


def refusal_of(name: str, **values: object) -> UserError:
    """Return the error of a line of the table, to be raised."""
    return UserError(REFUSALS[name].format(**values))


def world_size() -> int:
    """Return how many processes train together, as the launcher sets it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this process is the one that writes and reports."""
    return int(os.environ.get("RANK", "0")) == 0


def report_on_first(report: Callable[[str], None] | None) -> Callable[[str], None]:
    """Return `report` in the first process, silence in the others."""
    return report if report is not None and is_first() else lambda line: None


@contextmanager
def first_goes_first(device: str | None, timeout: int) -> Generator[None]:
    """The first process runs the block alone; the others follow, or end without a word if it failed.

    Errors are then found once, and what is loaded or built is in the caches when the others come. It may take long:
    the first reports that it is still at work. `timeout`: seconds that processes wait for each other, here and later.
    """
    if world_size() == 1:
        yield
        return
    if device not in (None, "cpu", "cuda"):
        raise refusal_of("device", processes=world_size(), device=device)
    group = _join(device, timeout)
    if not is_first():
        while (word := _first_word(_FAILED, group)) == _AT_WORK:
            pass
        if word == _FAILED:
            raise SystemExit(1)
        yield
        return
    ended = threading.Event()
    heartbeat = threading.Thread(target=_tell_of_work, args=(ended, timeout / 3, group), daemon=True)
    heartbeat.start()
    word = _FAILED
    try:
        yield
        word = _DONE
    finally:
        ended.set()
        heartbeat.join()
        with suppress(RuntimeError) if word == _FAILED else nullcontext():
            _first_word(word, group)


@contextmanager
def missing_explained(timeout: int) -> Generator[None]:
    """Turn the errors of torch.distributed that another process' silence raises into one line."""
    try:
        yield
    except Exception as error:
        from torch import distributed

        is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)  # which has no class of its own
        is_silence = is_of_gloo or isinstance(error, distributed.DistError)
        if world_size() == 1 or not is_silence:
            raise
        raise UserError(
            f"process {os.environ.get('RANK')} of {world_size()} lost contact with another process, which "
            f"ended or did not answer for {timeout} seconds (--process-timeout); read that process's error, "
            "then continue with --resume"
        ) from error


def wait_for_all() -> None:
    """Continue when every process has come here."""
    if world_size() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def need_same(what: str, value: str | int) -> None:
    """Raise in every process if `value` differs between them; `what` names it, such as "training data"."""
    if world_size() == 1:
        return
    from accelerate.utils import gather_object

    values: list[str | int] = gather_object([value])
    if len(set(values)) > 1:
        raise UserError(f"the processes have different {what}: {', '.join(map(str, values))}; give the same to all")


def _join(device: str | None, timeout: int) -> object:
    import torch
    from accelerate import PartialState

    from hf_vit.environment import pick_device

    patience = timedelta(seconds=timeout)
    PartialState(cpu=pick_device(device).type == "cpu", timeout=patience, **_place_to_meet(patience))
    group = torch.distributed.new_group(backend="gloo", timeout=patience)
    # torch waits without end for the store by which all join, and the first may hold it: it works when all are through.
    torch.distributed.barrier(group)  # pyright: ignore[reportArgumentType]
    return group


def _place_to_meet(patience: timedelta) -> dict[str, Any]:
    """Return torchrun's store with keys of this start alone.

    It outlives the processes, and torch 2.15 gives those that torchrun starts again the same keys (its issue 135712): a
    process may read where one waited that is gone.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], TCPStore(*place, is_master=False, timeout=patience))
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size()}


def _tell_of_work(ended: threading.Event, interval: float, group: object) -> None:
    while not ended.wait(interval):
        try:
            _first_word(_AT_WORK, group)
        except RuntimeError:  # the others are gone: the first is told when it is done
            return


def _first_word(word: int, group: object) -> int:
    import torch

    held = torch.tensor([word])
    torch.distributed.broadcast(held, src=0, group=group)  # pyright: ignore[reportArgumentType]
    return int(held)
