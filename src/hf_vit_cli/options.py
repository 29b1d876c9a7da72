"""The options that commands share; those of trainings come from the fields of `hf_vit_settings`.

A command ends in `**shared`, and `takes` puts the options in its place:

    @takes("device", *RECIPE_FIELDS.values())
    def finetune(context: typer.Context, model: str = MODEL, **shared: Any) -> None: ...
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import Field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer

from hf_vit_settings import (
    AUGMENTATION_FIELDS,
    DISTILLATION_FIELDS,
    RECIPE_FIELDS,
    RUN_FIELDS,
    SELF_TRAINING_FIELDS,
    UserError,
    option_name,
)


def opt(default: Any, help: str, *flags: str, panel: str | None = None, **settings: Any) -> Any:
    """Return an option of a command: default (... requires a value), help, flags where its name gives others, panel."""
    return typer.Option(default, *flags, help=help, rich_help_panel=panel, **settings)


def arg(default: Any, help: str, **settings: Any) -> Any:
    """Return an argument of a command."""
    return typer.Argument(default, help=help, show_default=False, **settings)


MODEL = arg(..., "Variant (S/16), or a checkpoint: folder, file, Hub id, timm:NAME.")
CHECKPOINT = arg(..., "Model: folder, Hub id, timm:NAME, or a checkpoint file.")
DATA = opt(
    ...,
    "Data set: a built-in one (digits, photos, fractals, scenes), a folder (classes, COCO or ADE20K), a .csv, .jsonl, "
    ".parquet or .tar file, or a Hub id.",
    show_default=False,
)
OUTPUT = opt(..., "New or empty folder for the finished model.", show_default=False)
JSON = opt(False, "Print JSON.", "--json")

# Options of commands that read a model and images -> type and option.
SHARED: dict[str, tuple[Any, Any]] = {
    "split": (str, opt("test", "Split: train, validation or test.")),
    "batch_size": (int, opt(32, "Images per forward pass.", min=1)),
    "seed": (int, opt(0, "Random seed for splits, sampling and noise.", min=0)),
    "optimize": (
        bool,
        opt(True, "Optimize the model for inference if the number of images repays it.", "--optimize/--no-optimize"),
    ),
    "runner": (str, opt("local", "local, or ray: run on a Ray cluster (extra ray).")),
    "address": (
        str | None,
        opt(None, "Running Ray cluster: HOST:PORT, or auto. Default: start Ray on this machine."),
    ),
    "max_num_patches": (
        int | None,
        opt(None, "Keep each image's size and shape; shrink those with more patches than this.", min=1),
    ),
    "draft": (
        bool,
        opt(False, "Decode JPEG files at the smallest scale that covers the model's: faster, not exact.", "--draft"),
    ),
}


# Fields whose options are None where they are left out: the recipe, or the kind of teaching, has the value.
_LEFT_OUT = {
    *(*RECIPE_FIELDS.values(), *AUGMENTATION_FIELDS.values()),
    *(*DISTILLATION_FIELDS.values(), *SELF_TRAINING_FIELDS.values()),
}


def takes(*shared: "str | Field[Any]") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options in the place of its `**shared`: names of `SHARED` or `RUN_FIELDS`, or fields."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[*own, *map(_parameter, shared)]
        )
        return command

    return decorated


def _parameter(shared: "str | Field[Any]") -> inspect.Parameter:
    kind: Any
    if isinstance(shared, str) and shared in SHARED:
        name, (kind, option) = shared, SHARED[shared]
    else:
        field, panel = (RUN_FIELDS[shared], None) if isinstance(shared, str) else (shared, shared.metadata["panel"])
        details, name, parts = field.metadata, option_name(field), (*get_args(field.type), field.type)
        default = None if field in _LEFT_OUT else field.default
        kind = details["typed"] or next(each for each in parts if each is not NoneType)
        if any(get_origin(part) is Literal for part in parts):
            kind = str
        elif get_origin(field.type) is tuple:
            kind = field.type
        flag = f"--{name.replace('_', '-')}"
        flags = details["flags"] or (f"{flag}/--no-{flag[2:]}" if field in _LEFT_OUT else flag)
        least = details["at_least"] if name in RUN_FIELDS else None
        switch = [flags] if kind is bool else []
        option = opt(default, details["help"], *switch, panel=panel, min=least, show_default=default is not None)
        kind = kind if default is not None else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def parse_size(text: str | None, option: str = "--image-size") -> tuple[int, int] | None:
    """Read "S" or "HxW" (px) as (height, width)."""
    if text is None:
        return None
    sides = re.fullmatch(r"([1-9][0-9]{0,5})(?:[xX]([1-9][0-9]{0,5}))?", text.strip())
    if sides is None:
        raise UserError(f"{option} '{text}' cannot be read; give one side in pixels (384) or HEIGHTxWIDTH (224x320)")
    return int(sides[1]), int(sides[2] or sides[1])
