"""Who computes: this process, or Ray."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError
from hf_vit.evaluation.reading import NamedModel
from hf_vit.loading.optimizing import optimize as make_faster
from hf_vit.loading.optimizing import select_engine

if TYPE_CHECKING:
    from hf_vit.evaluation.ray_runner import RayRunner
    from hf_vit.loading.model import LoadedModel

RUNNERS = ("local", "ray")


@contextmanager
def running(
    runner: str, address: str | None, device: str | None, num_processes: int | None = None
) -> "Generator[RayRunner | None]":
    """Connect to Ray; None for the runner "local", whose processes the caller starts."""
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


def choose_engine(
    subject: "LoadedModel",
    model: Any,
    num_images: int | None,
    ray: "RayRunner | None",
    *,
    optimize: bool,
    max_num_patches: int | None = None,
) -> "tuple[str | None, RayRunner | None]":
    """Return the engine that so many images repay, which computes the model from now on, and Ray with the model."""
    is_named = isinstance(model, str | os.PathLike)
    engine = select_engine(subject, num_images) if optimize and is_named and not (ray and ray.gpus) else None
    if engine is not None and ray is None:
        make_faster(subject, engine)
    return engine, None if ray is None else replace(ray, model=NamedModel(str(model), max_num_patches, engine))
