"""`hf-vit pretrain`."""

import shlex
from pathlib import Path
from typing import Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import CONFIG, collect_options, format_command, handle_interrupt, print_safely
from hf_vit_cli.options import opt
from hf_vit_settings import (
    AUGMENTATION_FIELDS,
    CONTRASTIVE_FIELDS,
    RECIPE_FIELDS,
    RUN_FIELDS,
    ContrastiveOptions,
    get_option_name,
)

_PATCHES = "Options of masked and next patch prediction"
_FINETUNE_OPTIONS = ("push", "private", "license", "share_images", "cache_features")
_RECIPE_OPTIONS = (
    *("epochs", "steps", "batch_size", "learning_rate", "weight_decay", "schedule", "warmup", "cooldown"),
    *("min_learning_rate", "clip", "dropout", "drop_path", "evaluations"),
)
_AUGMENTATION_OPTIONS = ("random_resized_crop", "horizontal_flip", "shift_px")


@options.with_options(
    *CONTRASTIVE_FIELDS.values(),
    *(field for name, field in RUN_FIELDS.items() if name not in _FINETUNE_OPTIONS),
    *map(RECIPE_FIELDS.__getitem__, _RECIPE_OPTIONS),
    *map(AUGMENTATION_FIELDS.__getitem__, _AUGMENTATION_OPTIONS),
)
def pretrain(
    context: typer.Context,
    model: str = options.MODEL,
    data: str = options.DATA,
    output: Path = options.OUTPUT,
    config: Path | None = CONFIG,
    objective: str = opt("masked-patch", "Objective: masked-patch, next-patch or contrastive."),
    recipe: str | None = opt(
        None, "Training recipe; hf-vit recipes lists all. Default: the small recipe of the objective."
    ),
    class_token: bool | None = opt(
        None,
        "Use a class token, or --no-class-token. Default: the model's.",
        "--class-token/--no-class-token",
        show_default=False,
    ),
    num_hidden_groups: int | None = opt(None, "Number of groups of layers; layers of a group share weights."),
    causal: bool = opt(False, "Use causal attention (next-patch always uses it).", "--causal"),
    target: str = opt("mean_color", "What masked patches predict: mean_color, downsampled or pixels.", panel=_PATCHES),
    mask_rate: float = opt(0.5, "Share of patches that are masked or replaced, above 0 and at most 1.", panel=_PATCHES),
    mask_share: float = opt(0.8, "Share of these patches that become the mask token.", panel=_PATCHES),
    swap_share: float = opt(0.1, "Share of these patches that become other patches of the image.", panel=_PATCHES),
    static_masks: bool = opt(False, "Use the same mask for an image in every epoch.", "--static-masks", panel=_PATCHES),
    **shared: Any,
) -> None:
    """Pre-train without labels; hf-vit finetune --model OUTPUT continues from there."""
    values = collect_options(locals(), "config", "mask_rate", "mask_share", "swap_share")
    from hf_vit.training import pretrain as run
    from hf_vit.training.processes import is_main
    from hf_vit.training.run import describe_resume
    from hf_vit.training.tasks.patch_prediction import RandomMasking

    values["image_size"] = options.parse_size(values["image_size"])
    values["masking"] = RandomMasking(mask_rate, mask_share, swap_share)
    contrastive_options = {name: values.pop(get_option_name(field)) for name, field in CONTRASTIVE_FIELDS.items()}
    values["contrastive"] = ContrastiveOptions(**contrastive_options)
    with handle_interrupt(lambda: describe_resume(output)):
        result = run(**values, command=format_command(context), report=print_safely)
    if not is_main():
        return
    loss = result.overview()["validation loss"]
    print_safely(f"validation loss {loss} after {result.steps:,} steps, {result.seconds:,.1f} s of training")
    print_safely(f"saved in {result.folder}: model, processor, facts.json, {result.picture.name}, README.md")
    folder = shlex.quote(str(result.folder))
    print_safely(f"next, fine-tune it on labels: hf-vit finetune --model {folder} --data DATA --output OUTPUT")
