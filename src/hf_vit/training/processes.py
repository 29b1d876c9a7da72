"""Distributed training (torchrun, accelerate launch): the rank of this process, and coordination of all processes.

Only the main process (rank 0) writes, prints and pushes. When one process fails, the launcher stops the others, or they
lose contact. Settings that do not work with several processes are refused.
"""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from hf_vit.errors import UserError

# Messages of the main process to the others.
_FAILED, _DONE, _AT_WORK = range(3)
# Errors of settings that do not work with several processes; docs/combinations.md has the reasons.
REFUSALS = {
    "device": (
        "{processes} processes cannot share --device {device}; leave --device out (one GPU per process), "
        "or use --device cpu"
    ),
    "batch": (
        "the batch size {batch_size} cannot be divided among {processes} processes; choose a multiple of "
        "{processes} for --batch-size"
    ),
    "contrastive parts": (
        "a contrastive batch of {share} images cannot be split into micro-batches of {parts}, because its images are "
        "each other's negatives; leave --micro-batch-size out, or choose a smaller --batch-size"
    ),
    "meta pseudo labels": "meta-pseudo-labels only works in one process; start the command without torchrun",
    "fsdp1": "FSDP version 1 is not supported; set fsdp_version: 2 (examples/accelerate/fsdp2.yaml)",
    "fsdp dense": "segmentation and detection do not work with FSDP; use DDP (examples/accelerate/ddp.yaml)",
    "sam micro-batches": (
        "--sam-micro-batches does not work with FSDP, which splits the weights among processes; leave "
        "--sam-micro-batches out, or use DDP"
    ),
    "checkpointing dropout": (
        "fsdp_activation_checkpointing would compute every block twice with different dropout; use "
        "--dropout 0 --drop-path 0, or set it to false"
    ),
}


def make_refusal(name: str, **values: object) -> UserError:
    """Build the error of an entry of `REFUSALS`."""
    return UserError(REFUSALS[name].format(**values))


def world_size() -> int:
    """Return the number of processes that train together, which the launcher sets."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this is the main process (rank 0), which writes and reports."""
    return int(os.environ.get("RANK", "0")) == 0


def report_on_main(report: Callable[[str], None] | None) -> Callable[[str], None]:
    """Return `report` in the main process, and a function that does nothing in the others."""
    return report if report is not None and is_main() else lambda line: None


@contextmanager
def run_main_process_first(device: str | None, timeout: int) -> Generator[None]:
    """Run the block in the main process first, and then in the others, which exit silently if it failed.

    So errors are reported once, and caches are filled when the other processes run. While the main process works it
    sends signs of life. `timeout` is the number of seconds that processes wait for each other, here and later.
    """
    if world_size() == 1:
        yield
        return
    if device not in (None, "cpu", "cuda"):
        raise make_refusal("device", processes=world_size(), device=device)
    group = _join(device, timeout)
    if not is_main():
        while (message := _broadcast_message(_FAILED, group)) == _AT_WORK:
            pass
        if message == _FAILED:
            raise SystemExit(1)
        yield
        return
    ended = threading.Event()
    heartbeat = threading.Thread(target=_send_heartbeats, args=(ended, timeout / 3, group), daemon=True)
    heartbeat.start()
    message = _FAILED
    try:
        yield
        message = _DONE
    finally:
        ended.set()
        heartbeat.join()
        with suppress(RuntimeError) if message == _FAILED else nullcontext():
            _broadcast_message(message, group)


@contextmanager
def explain_lost_contact(timeout: int) -> Generator[None]:
    """Turn errors of torch.distributed that another process caused by ending or hanging into a UserError."""
    try:
        yield
    except Exception as error:
        from torch import distributed

        is_gloo_error = isinstance(error, RuntimeError) and "gloo" in str(error)  # gloo has no class of errors
        is_lost_contact = is_gloo_error or isinstance(error, distributed.DistError)
        if world_size() == 1 or not is_lost_contact:
            raise
        raise UserError(
            f"process {os.environ.get('RANK')} of {world_size()} lost contact with another process, which "
            f"ended or did not respond for {timeout} seconds (--process-timeout); look up the error of that "
            "process, then continue with --resume"
        ) from error


def wait_for_all() -> None:
    """Wait until every process has called this function."""
    if world_size() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def require_same(name: str, value: str | int) -> None:
    """Raise UserError in every process if `value` differs between them; `name` is for the message."""
    if world_size() == 1:
        return
    from accelerate.utils import gather_object

    values: list[str | int] = gather_object([value])
    if len(set(values)) > 1:
        raise UserError(
            f"the processes have different {name} ({', '.join(map(str, values))}); give all processes the same"
        )


def _join(device: str | None, timeout: int) -> object:
    """Connect this process to the others, and return a gloo group for messages on the CPU."""
    import torch
    from accelerate import PartialState

    from hf_vit.environment import pick_device

    time_limit = timedelta(seconds=timeout)
    PartialState(cpu=pick_device(device).type == "cpu", timeout=time_limit, **_make_store(time_limit))
    group = torch.distributed.new_group(backend="gloo", timeout=time_limit)
    # torch waits forever for the store through which processes join and which the main process may host; after this
    # barrier all have joined.
    torch.distributed.barrier(group)  # pyright: ignore[reportArgumentType]
    return group


def _make_store(timeout: timedelta) -> dict[str, Any]:
    """Return torchrun's store with a key prefix for this restart.

    The store outlives the processes, and torch 2.15 uses the same keys after a restart (its issue 135712), so that a
    process could read messages of an ended one.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], TCPStore(*address, is_master=False, timeout=timeout))
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": world_size()}


def _send_heartbeats(ended: threading.Event, interval: float, group: object) -> None:
    """Tell the other processes that the main process is still at work, until `ended` is set."""
    while not ended.wait(interval):
        try:
            _broadcast_message(_AT_WORK, group)
        except RuntimeError:  # the others have ended; the main process notices when its work is done
            return


def _broadcast_message(message: int, group: object) -> int:
    """Send a message of the main process to all others, or receive it there; return the message."""
    import torch

    tensor = torch.tensor([message])
    torch.distributed.broadcast(tensor, src=0, group=group)  # pyright: ignore[reportArgumentType]
    return int(tensor)
