"""Runs that know nothing of each other, each a task of Ray: the trials of a sweep, the models of a comparison."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from hf_vit.errors import UserError
from hf_vit.evaluation.ray_nodes import ATTEMPTS, compared_versions, enter, got, lost, need_versions
from hf_vit.evaluation.ray_runner import RayRunner


def independent(
    runner: RayRunner, run: Callable[..., Any], each: Sequence[Any], *shared: Any
) -> Iterator[tuple[int, Any]]:
    """(number, `run(one, *shared)`) of each, as they are done; a lost machine's are run again on another.

    A run has a GPU, or where there is none as many cores as torch takes here, so that its numbers are those of here:
    with OMP_NUM_THREADS=1 there are as many at once as the cluster has cores.

    Args:
        runner: where.
        run: a function of a module, which may be called twice.
        each, shared: what it is called with.

    Raises:
        UserError: of a run, after which the others end; or its processes ended again and again.
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
            try:
                yield waiting[done[0]], got(done[0])
            except RayError as error:
                raise lost(error) from error
            del waiting[done[0]]
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
