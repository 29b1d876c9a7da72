"""What is checked and decided of a run before its first step."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.run.processes import is_first, world_size

if TYPE_CHECKING:
    from hf_vit.training.finetuning import FinetuneOptions, Run

_LARGEST_MICRO_BATCH = 128
_BF16_FROM_WIDTH = 128


def work_folder(output: Path) -> Path:
    """OUTPUT/checkpoints, as an absolute path: checkpoints remember where the best one is."""
    from hf_vit.subjects.checkpoint_folders import WORK_FOLDER

    return output.absolute() / WORK_FOLDER


def open_output(output: Path, resume: bool, say: Callable[[str], None]) -> Path | None:
    """Make sure that the output folder is free, or holds a run to be resumed.

    Returns:
        The checkpoint to go on from; None to start.

    Raises:
        UserError: it holds something else, or is no folder.
    """
    from hf_vit.training.run.checkpoints import RUN_NAME, last_complete, remove_incomplete

    if output.exists() and not output.is_dir():
        raise UserError(f"the output {output} is a file; choose a new or empty folder")
    inside = sorted(path.name for path in output.iterdir()) if output.exists() else []
    work = work_folder(output)
    if not is_first():  # the first process has looked
        return last_complete(work) if resume else None
    if not inside:
        if resume:
            say(f"{output} holds no run to resume; it is started anew")
        return None
    if not (work / RUN_NAME).is_file():
        finished = {"config.json", "facts.json"} <= set(inside)
        held = "a finished model" if finished else f"something else ({', '.join(inside[:3])})"
        more = " (there is nothing to resume)" if finished and resume else ""
        raise UserError(f"the output folder {output} holds {held}{more}; choose a new or empty one")
    if not resume:
        raise UserError(f"{output} holds an unfinished run; go on with --resume, or delete the folder")
    for name in remove_incomplete(work):
        say(f"removed {name}, which was not written to its end")
    checkpoint = last_complete(work)
    say(f"going on from {checkpoint.name}" if checkpoint else "no checkpoint is complete yet: starting from step 0")
    return checkpoint


def micro_batch_size(batch_size: int, asked: int | None) -> int:
    """Images a forward pass of one process.

    Raises:
        UserError: the processes, or the asked number, do not divide the batch.
    """
    share, rest = divmod(batch_size, world_size())
    if rest:
        raise UserError(
            f"{world_size()} processes do not divide the batch size {batch_size}; choose a multiple of their number"
        )
    if asked is None:
        return next(size for size in range(min(share, _LARGEST_MICRO_BATCH), 0, -1) if share % size == 0)
    if share % asked:
        of_each = "" if world_size() == 1 else f" of which each of {world_size()} processes has {share}"
        raise UserError(
            f"micro batch size {asked} does not divide the batch size {batch_size}{of_each}; choose a divisor of it"
        )
    return asked


def total_steps(recipe: Recipe, images: int | None) -> int:
    """Optimizer steps of a recipe.

    Raises:
        UserError: epochs of a stream whose length is unknown.
    """
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    if images is None:
        raise UserError("the length of this stream is unknown, so epochs cannot be counted; give --steps instead")
    return max(1, math.ceil(recipe.epochs * math.ceil(images / recipe.batch_size)))


def use_bf16(options: "FinetuneOptions", model: Any) -> bool:
    """Whether to compute in bfloat16.

    Raises:
        UserError: bf16 was asked for and the GPU has none.
    """
    import torch

    from hf_vit.subjects.device import pick_device

    device = pick_device(options.device)
    if options.precision == "fp32":
        return False
    if device.type == "cuda":
        if options.precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise UserError("this GPU cannot compute in bf16; use --precision fp32")
        return torch.cuda.is_bf16_supported()
    if options.precision == "bf16":
        return True
    # CPUs without matrix units are slower in bf16, and narrow models lose more by casts than products gain.
    return bool(_cpu_capabilities().get("amx_bf16")) and model.config.hidden_size >= _BF16_FROM_WIDTH


def _cpu_capabilities() -> Mapping[str, Any]:
    import torch

    # Not in torch 2.11, the oldest supported.
    read = getattr(torch.cpu, "get_capabilities", None)
    return read() if read is not None else {}


def check_disk(run: "Run") -> None:
    """Raise before training if the disk has no room for the finished model and three checkpoints (one being written).

    Raises:
        UserError: see `need_space`.
    """
    from hf_vit.training.run.checkpoints import need_space

    weights = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    state = weights * {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}[run.recipe.optimizer]
    if run.recipe.average_decay is not None or run.recipe.tune == "lora":
        state += weights  # what training goes on from, beside what is released
    # 16 MiB for processor, code, pictures and the files' own overhead.
    need_space(run.output, weights + 3 * (weights + state) + (16 << 20))


def enter_run(run: "Run", objective: Mapping[str, Any]) -> None:
    """Record how the run is started, or make sure that it is resumed with the same settings."""
    if not is_first():
        return
    from hf_vit.data.files import tell_changes
    from hf_vit.training.run.checkpoints import read_files, read_run, refuse_other_settings, write_files, write_run

    settings = {
        **objective,
        **{name: value for name, value in run.recipe.settings().items() if name not in ("name", "source")},
        "model": run.source.name if run.source.checkpoint is None else Path(run.source.name).name,
        "data": f"{run.data.name} {run.data.fingerprint}",
        "image_size": list(_pair(run.model.config.image_size)),
        "micro_batch_size": run.micro_batch_size,
        "total_steps": run.steps,
        "bf16": run.bf16,
        "seed": run.options.seed,
        "streaming": run.options.streaming,
        "world_size": world_size(),
    }
    if run.options.streaming:
        settings["num_workers"] = run.options.num_workers
    started = read_run(run.work)
    if started is None or run.checkpoint is None:  # nothing is lost by other settings
        write_run(run.work, settings)
        write_files(run.work, run.data.files)
    else:
        before = read_files(run.work)
        changes = "" if before is None else tell_changes(before, run.data.files)
        refuse_other_settings(started, settings, run.output, changes)


def describe(run: "Run") -> str:
    """What is about to be trained, in one line."""
    config = run.model.config
    height, width = _pair(config.image_size)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    images = run.data.num_examples("train")
    teacher = f", taught by {run.objective['teacher']}" if "teacher" in run.objective else ""
    return (
        f"{run.source.name} ({parameters:,} parameters, {height}x{width} px{teacher}) on {run.data.name}: "
        f"{'a stream' if images is None else f'{images:,} images'} of {len(run.data.label_names)} classes, "
        f"recipe {run.recipe.name}, {run.steps:,} steps of {run.recipe.batch_size} images in "
        f"{'bf16' if run.bf16 else 'fp32'}"
    )


def _pair(value: Any) -> tuple[int, int]:
    from hf_vit.models.configuration_hf_vit import as_pair

    return as_pair(value)
