"""Several processes, one training (torchrun, accelerate launch): which this is, and what only the first may do.

The first alone writes, prints and pushes. The launcher stops the others when one fails.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

from hf_vit.errors import UserError
from hf_vit.training.refusals import refusal_of

# How long the others wait while the first looks at every image.
_PATIENCE = timedelta(days=1)


def world_size() -> int:
    """Processes that train together, as the launcher tells."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes and tells."""
    return int(os.environ.get("RANK", "0")) == 0


def told_by_first(report: Callable[[str], None] | None) -> Callable[[str], None]:
    """`report` in the first process, silence in the others."""
    return report if report is not None and is_first() else lambda line: None


@contextmanager
def first_goes_first(device: str | None) -> Generator[None]:
    """The first process runs the block alone; the others follow, or end without a word if it failed.

    What can be wrong is so found once, and what is loaded or built is in the caches when the others come.

    Args:
        device: what the user chose to train on.

    Raises:
        UserError: several processes cannot share the chosen device.
    """
    if world_size() == 1:
        yield
        return
    if device not in (None, "cpu", "cuda"):
        raise refusal_of("device", processes=world_size(), device=device)
    group = _join(device)
    if is_first():
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            _from_first(succeeded, group)
    else:
        if not _from_first(False, group):
            raise SystemExit(1)
        yield


def wait_for_all() -> None:
    """Go on when every process has come here."""
    if world_size() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def need_same(what: str, value: str | int) -> None:
    """Make sure that all processes were given the same.

    Args:
        what: its name in the error, such as "training data".
        value: this process'.

    Raises:
        UserError: they differ; in every process.
    """
    if world_size() == 1:
        return
    from accelerate.utils import gather_object

    found: list[str | int] = gather_object([value])
    if len(set(found)) > 1:
        raise UserError(
            f"the processes have different {what}: {', '.join(map(str, found))}; give all of them the same, each takes "
            "its own part"
        )


def _join(device: str | None) -> object:
    import torch
    from accelerate import PartialState

    from hf_vit.subjects.device import pick_device

    PartialState(cpu=pick_device(device).type == "cpu")
    return torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)


def _from_first(value: bool, group: object) -> bool:
    import torch

    held = [value]
    torch.distributed.broadcast_object_list(held, src=0, group=group, device=torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    return held[0]
