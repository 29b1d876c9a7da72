"""Options shared by commands; options of trainings are made from the fields of `hf_vit_settings`.

A command ends with `**shared`, which `with_options` replaces by options:

    @with_options("device", *RECIPE_FIELDS.values())
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
    get_option_name,
)


def opt(default: Any, help: str, *flags: str, panel: str | None = None, **settings: Any) -> Any:
    """Declare an option of a command.

    Args:
        default: default value; ... makes the option required.
        help: help text.
        flags: flags, if they differ from the parameter's name.
        panel: panel of the help in which the option appears.
    """
    return typer.Option(default, *flags, help=help, rich_help_panel=panel, **settings)


def arg(default: Any, help: str, **settings: Any) -> Any:
    """Declare a positional argument of a command."""
    return typer.Argument(default, help=help, show_default=False, **settings)


MODEL = arg(..., "Variant (such as S/16), or a checkpoint: folder, file, Hub id or timm:NAME.")
CHECKPOINT = arg(..., "Model: folder, Hub id, timm:NAME or checkpoint file.")
DATA = opt(
    ...,
    "Data set: a built-in one (digits, photos, fractals, scenes), a folder (classes, IDX, COCO or ADE20K), a .csv, "
    ".jsonl, .parquet or .tar file, or a Hub id.",
    show_default=False,
)
OUTPUT = opt(..., "New or empty folder for the finished model.", show_default=False)
JSON = opt(False, "Print JSON.", "--json")

# Name of an option for commands that read a model and images -> its type and declaration.
SHARED: dict[str, tuple[Any, Any]] = {
    "split": (str, opt("test", "Split of the data set: train, validation or test.")),
    "batch_size": (int, opt(32, "Images per forward pass.", min=1)),
    "seed": (int, opt(0, "Random seed for splits, sampling and noise.", min=0)),
    "optimize": (
        bool,
        opt(
            True,
            "Optimize the model for inference if there are enough images to save time.",
            "--optimize/--no-optimize",
        ),
    ),
    "runner": (str, opt("local", "Where to run: local, or ray for a Ray cluster (needs the extra ray).")),
    "address": (
        str | None,
        opt(None, "Address of a running Ray cluster: HOST:PORT, or auto. Default: start Ray on this machine."),
    ),
    "max_num_patches": (
        int | None,
        opt(
            None,
            "Feed images at their own size and aspect ratio; shrink those with more than this many patches.",
            min=1,
        ),
    ),
    "draft": (
        bool,
        opt(
            False,
            "Decode JPEG files at the smallest scale that covers the model's input size: faster, but pixels "
            "differ slightly.",
            "--draft",
        ),
    ),
    "features": (
        Literal["class", "mean", "class+mean", "patches"] | None,
        opt(
            None,
            "Features of the last layers instead of the head's input: class (class tokens), mean (means of the patch "
            "tokens), class+mean or, for embed only, patches (all patch tokens).",
        ),
    ),
    "layers": (int, opt(1, "With --features: number of last layers.", min=1)),
    "norm": (bool, opt(True, "With --features: apply the model's last norm to every layer.", "--norm/--no-norm")),
}


# Fields whose options default to None, as the recipe or method supplies the value.
_OPTIONAL_FIELDS = {
    *(*RECIPE_FIELDS.values(), *AUGMENTATION_FIELDS.values()),
    *(*DISTILLATION_FIELDS.values(), *SELF_TRAINING_FIELDS.values()),
}


def with_options(*shared: "str | Field[Any]") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces `**shared` of a command by options.

    Args:
        shared: names in `SHARED` or `RUN_FIELDS`, or fields of `hf_vit_settings`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[*parameters, *map(_make_parameter, shared)]
        )
        return command

    return decorate


def _make_parameter(shared: "str | Field[Any]") -> inspect.Parameter:
    """Return the signature parameter of a shared option, made from a declaration or from a settings field."""
    if isinstance(shared, str) and shared in SHARED:
        kind, option = SHARED[shared]
        return inspect.Parameter(shared, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
    # By name, an option of trainings stands among the main options of another command.
    field, panel = (RUN_FIELDS[shared], None) if isinstance(shared, str) else (shared, shared.metadata["panel"])
    details = field.metadata
    name = get_option_name(field)
    kind = _find_option_type(field)
    default = None if field in _OPTIONAL_FIELDS else field.default
    flag = f"--{name.replace('_', '-')}"
    flags = details["flags"] or (f"{flag}/--no-{flag[2:]}" if field in _OPTIONAL_FIELDS else flag)
    switch = [flags] if kind is bool else []
    minimum = details["at_least"] if name in RUN_FIELDS else None
    option = opt(default, details["help"], *switch, panel=panel, min=minimum, show_default=default is not None)
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _find_option_type(field: "Field[Any]") -> Any:
    """Return the type that typer parses; choices are text, because the settings refuse others with all choices."""
    types = (*get_args(field.type), field.type)
    if any(get_origin(kind) is Literal for kind in types):
        return str
    if get_origin(field.type) is tuple:
        return field.type
    return field.metadata["typed"] or next(kind for kind in types if kind is not NoneType)


def parse_size(text: str | None, option: str = "--image-size") -> tuple[int, int] | None:
    """Return (height, width) in pixels from "S" or "HxW"; None stays None."""
    if text is None:
        return None
    sides = re.fullmatch(r"([1-9][0-9]{0,5})(?:[xX]([1-9][0-9]{0,5}))?", text.strip())
    if sides is None:
        raise UserError(f"{option} '{text}' is not a size; give one side in pixels (384) or HEIGHTxWIDTH (224x320)")
    return int(sides[1]), int(sides[2] or sides[1])
