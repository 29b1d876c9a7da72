"""Choose the runner of a computation: this process, or Ray."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError
from hf_vit.evaluation.reading import NamedModel
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.optimizing import optimize as make_faster
from hf_vit.loading.optimizing import select_engine
from hf_vit.loading.pixels import find_max_patches, keep_image_sizes

if TYPE_CHECKING:
    from hf_vit.evaluation.ray_runner import RayRunner

RUNNERS = ("local", "ray")


@contextmanager
def open_runner(
    runner: str, address: str | None, device: str | None, num_processes: int | None = None
) -> "Generator[RayRunner | None]":
    """Yield a connection to Ray, or None for the runner "local".

    Raises:
        UserError: the runner is unknown, an address is given without Ray, or Ray is not installed or not reachable.
    """
    if runner not in RUNNERS:
        raise UserError(f"--runner {runner} is unknown; choose one of {', '.join(RUNNERS)}")
    if runner == "local":
        if address is not None:
            raise UserError(f"--address {address} only works with --runner ray; add it, or leave --address out")
        yield None
        return
    try:
        from hf_vit.evaluation.ray_runner import connect
    except ModuleNotFoundError as error:
        raise UserError('--runner ray needs Ray; install it with pip install "hf-vit[ray]"') from error
    with connect(address, num_processes, device) as ray:
        yield ray


def keep_sizes(
    loaded: LoadedModel, max_num_patches: int | None, *, needs_one_size: bool
) -> tuple[LoadedModel, int | None]:
    """Return the model with images in their own sizes, if `max_num_patches` or its image processor says so.

    Returns:
        The model, and the largest number of patches of an image; None for images of one size.
    """
    if max_num_patches is None and not needs_one_size:
        max_num_patches = find_max_patches(loaded)
    if max_num_patches is not None:
        loaded = keep_image_sizes(loaded, max_num_patches)
    return loaded, max_num_patches


def prepare_engine(
    loaded: LoadedModel,
    model: Any,
    num_images: int | None,
    ray: "RayRunner | None",
    *,
    optimize: bool,
    max_num_patches: int | None,
) -> "tuple[str | None, RayRunner | None]":
    """Optimize a local model in place if its images have one size and that pays for this many of them.

    Returns:
        The engine, or None, and Ray with the model to run, or None.
    """
    is_named = isinstance(model, str | os.PathLike)
    runs_on_gpus = ray is not None and ray.gpus > 0
    may_optimize = optimize and is_named and max_num_patches is None and not runs_on_gpus
    engine = select_engine(loaded, num_images) if may_optimize else None
    if ray is not None:  # its processes load and optimize the model themselves
        return engine, replace(ray, model=NamedModel(str(model), max_num_patches, engine))
    if engine is not None:
        make_faster(loaded, engine)
    return engine, None
