"""Who computes: this process, or Ray."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from hf_vit.evaluation.ray_runner import RayRunner

RUNNERS = ("local", "ray")


@contextmanager
def running(
    runner: str, address: str | None, device: str | None, num_processes: int | None = None
) -> "Generator[RayRunner | None]":
    """A connection to Ray; None for the runner "local", whose processes the caller starts."""
    if runner not in RUNNERS:
        raise UserError(f"unknown runner '{runner}'; choose from {', '.join(RUNNERS)}")
    if runner == "local":
        if address is not None:
            raise UserError(f"--address {address} needs --runner ray; add it, or leave the address out")
        yield None
        return
    try:
        from hf_vit.evaluation.ray_runner import connected
    except ModuleNotFoundError as error:
        raise UserError('--runner ray needs Ray: pip install "hf-vit[ray]"') from error
    with connected(address, num_processes, device) as ray:
        yield ray
