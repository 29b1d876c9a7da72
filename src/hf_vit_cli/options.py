"""Flags that several commands share: what each means, and how it is read, is said once, here.

A command writes `epochs: options.Epochs = None`; its signature stays the list of its flags.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_vit.training import FinetuneOptions

_RECIPE = "Recipe values (defaults: the recipe's)"
_WEIGHTS = "Which weights learn, and how far (defaults: the recipe's)"
_IMAGES = "Variation of the training images (defaults: the recipe's)"

Model = Annotated[
    str, typer.Argument(help="Variant (S/16), or a checkpoint: folder, file, Hub id, timm:NAME.", show_default=False)
]
Data = Annotated[
    str,
    typer.Option(
        help="digits, photos, fractals, scenes, class, COCO or ADE20K folders, .csv, .jsonl, parquet, .tar, a Hub id.",
        show_default=False,
    ),
]
ImageColumn = Annotated[str | None, typer.Option(help="Column of images, or of their files, in a list or table.")]
LabelColumn = Annotated[
    str | None,
    typer.Option(help="Column of classes in a list or table (of 0 and 1 several, cat,dog), of masks or of objects."),
]
Output = Annotated[Path, typer.Option(help="New or empty folder for the finished model.", show_default=False)]
ImageSize = Annotated[str | None, typer.Option(help="px, S or HxW; positions are resampled.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")]
Precision = Annotated[str, typer.Option(help="auto, fp32 or bf16.")]
NumWorkers = Annotated[int, typer.Option(help="Processes that prepare images.", min=0)]
Device = Annotated[str | None, typer.Option(help="torch device; by default a GPU where there is one.")]
Streaming = Annotated[bool, typer.Option("--streaming", help="Read the data while training.")]
Optimize = Annotated[
    bool, typer.Option("--optimize/--no-optimize", help="Make the model faster where so many images repay it.")
]
Runner = Annotated[str, typer.Option(help="local, or ray: on the machines of a cluster (the extra ray).")]
Address = Annotated[str | None, typer.Option(help="Of Ray's cluster, HOST:PORT or auto; by default this machine.")]
SkipBadImages = Annotated[
    bool,
    typer.Option("--skip-bad-images", help="Leave out unreadable images, and training images smaller than a patch."),
]
MaxNumPatches = Annotated[
    int | None,
    typer.Option(help="Feed images in their own size and shape, shrunk where they hold more patches.", min=1),
]
Draft = Annotated[
    bool,
    typer.Option(
        "--draft",
        help="Decode JPEG files at the smallest of their own scales that covers the model's: faster, not exact.",
    ),
]
ShareImages = Annotated[
    bool, typer.Option("--share-images", help="Show pictures with images of the data in the card, too.")
]
ProcessTimeout = Annotated[
    int, typer.Option(help="Seconds that a process waits for the others (torchrun) before it gives up.")
]
KeepCheckpoints = Annotated[bool, typer.Option("--keep-checkpoints", help="Keep OUTPUT/checkpoints when done.")]
ReportTo = Annotated[str, typer.Option(help="tensorboard (OUTPUT/runs), wandb, trackio or none.")]

Epochs = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)]
Steps = Annotated[int | None, typer.Option(rich_help_panel=_RECIPE, help="Instead of epochs.")]
BatchSize = Annotated[int | None, typer.Option(rich_help_panel=_RECIPE, help="Images a step.")]
Optimizer = Annotated[str | None, typer.Option(rich_help_panel=_RECIPE, help="adamw, sgd, lamb, lion or muon.")]
LearningRate = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="After warm-up.")]
WeightDecay = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)]
Momentum = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of SGD and Muon.")]
Beta1 = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of the others, and of Muon's AdamW.")]
Beta2 = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of the others, and of Muon's AdamW.")]
Schedule = Annotated[
    str | None, typer.Option(rich_help_panel=_RECIPE, help="cosine, linear, constant or warmup_stable_decay.")
]
Cooldown = Annotated[
    float | None, typer.Option(rich_help_panel=_RECIPE, help="Of warmup_stable_decay: share if below 1, else steps.")
]
MinLearningRate = Annotated[
    float | None, typer.Option(rich_help_panel=_RECIPE, help="Where cosine and warmup_stable_decay end.")
]
Warmup = Annotated[
    float | None, typer.Option(rich_help_panel=_RECIPE, help="Share of all steps if below 1, else steps.")
]
Clip = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Largest gradient norm; 0: off.")]
Loss = Annotated[str | None, typer.Option(rich_help_panel=_RECIPE, help="ce, or bce (one answer a class).")]
BceThreshold = Annotated[
    float | None, typer.Option(rich_help_panel=_RECIPE, help="With bce: mixed targets above it become 1.")
]
ClassWeights = Annotated[
    bool | None,
    typer.Option(
        "--class-weights/--no-class-weights",
        rich_help_panel=_RECIPE,
        help="Errors count by how rare the class is.",
        show_default=False,
    ),
]
BalancedSampling = Annotated[
    bool | None,
    typer.Option(
        "--balanced-sampling/--no-balanced-sampling",
        rich_help_panel=_RECIPE,
        help="Every class is drawn as often as the others.",
        show_default=False,
    ),
]
RepeatedAugmentation = Annotated[
    int | None, typer.Option(rich_help_panel=_RECIPE, help="How often an image comes in its batch, varied anew.")
]
NewHead = Annotated[
    bool | None,
    typer.Option(
        "--new-head/--keep-head",
        rich_help_panel=_RECIPE,
        help="A head for the same classes is kept, or started anew.",
        show_default=False,
    ),
]
HeadBias = Annotated[
    float | None, typer.Option(rich_help_panel=_RECIPE, help="A new one's, at first; 0, with bce -log(classes).")
]
LabelSmoothing = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)]
Dropout = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)]
DropPath = Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Stochastic depth.")]
Evaluations = Annotated[int | None, typer.Option(rich_help_panel=_RECIPE, help="Evaluations and checkpoints in all.")]
Patience = Annotated[
    int | None,
    typer.Option(rich_help_panel=_RECIPE, help="Evaluations after warm-up without a better one before stopping."),
]

Tune = Annotated[str | None, typer.Option(rich_help_panel=_WEIGHTS, help="all, head, or lora (the extra peft).")]
LoraRank = Annotated[int | None, typer.Option(rich_help_panel=_WEIGHTS)]
LoraAlpha = Annotated[float | None, typer.Option(rich_help_panel=_WEIGHTS, help="Updates are scaled by alpha / rank.")]
LayerDecay = Annotated[
    float | None, typer.Option(rich_help_panel=_WEIGHTS, help="Factor on the rate from a layer to the one below.")
]
AverageDecay = Annotated[
    float | None, typer.Option(rich_help_panel=_WEIGHTS, help="Of averaged weights (0.9999), which are released.")
]
SamRho = Annotated[
    float | None, typer.Option(rich_help_panel=_WEIGHTS, help="Radius of sharpness-aware minimisation; 0: off.")
]
SamMicroBatches = Annotated[
    bool | None,
    typer.Option(
        "--sam-micro-batches/--sam-batch",
        rich_help_panel=_WEIGHTS,
        help="A perturbation for every micro-batch, or for the step.",
        show_default=False,
    ),
]

MixupAlpha = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="0: off.")]
CutmixAlpha = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="0: off.")]
RandomResizedCrop = Annotated[
    tuple[float, float] | None,
    typer.Option(rich_help_panel=_IMAGES, help="Smallest and largest share of the area; 0 0: off."),
]
Randaugment = Annotated[
    tuple[int, int] | None, typer.Option(rich_help_panel=_IMAGES, help="Layers and magnitude; 0 0: off.")
]
RandomCrop = Annotated[
    int | None, typer.Option(rich_help_panel=_IMAGES, help="Of the whole image and so many px of reflected edge.")
]
ScaleJitter = Annotated[
    tuple[float, float] | None,
    typer.Option(rich_help_panel=_IMAGES, help="Masks, boxes: smallest and largest scale, then a crop; 0 0: off."),
]
AutoAugment = Annotated[
    str | None,
    typer.Option(rich_help_panel=_IMAGES, help="timm's policy: rand-m9-mstd0.5-inc1, 3a; none: off."),
]
ColorJitter = Annotated[
    float | None, typer.Option(rich_help_panel=_IMAGES, help="Of brightness, contrast, saturation; 0: off.")
]
RandomErasing = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Probability.")]
HorizontalFlip = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Probability.")]
ShiftPx = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest shift.")]
RotationDegrees = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest turn.")]
ShearDegrees = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest slant.")]
Zoom = Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest change of size (share).")]


def parse_size(text: str | None, option: str = "--image-size") -> tuple[int, int] | None:
    """Read "S" or "HxW" (px) as (height, width).

    Raises:
        UserError: neither.
    """
    from hf_vit.errors import UserError

    if text is None:
        return None
    sides = re.fullmatch(r"([1-9][0-9]{0,5})(?:[xX]([1-9][0-9]{0,5}))?", text.strip())
    if sides is None:
        raise UserError(f"{option} '{text}' is not understood; give one side in px (384) or HEIGHTxWIDTH (224x320)")
    return int(sides[1]), int(sides[2] or sides[1])


def finetune_options(parameters: Mapping[str, Any]) -> "FinetuneOptions":
    """How to run a training, from those parameters of a command that bear the names of its fields."""
    from dataclasses import fields

    from hf_vit.training import FinetuneOptions

    given = {field.name: parameters[field.name] for field in fields(FinetuneOptions) if field.name in parameters}
    given["image_size"] = parse_size(parameters["image_size"])
    return FinetuneOptions(**given)
