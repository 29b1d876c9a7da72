"""`hf-vit finetune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_vit.training import FinetuneResult

_RECIPE = "Recipe values (defaults: the recipe's)"
_IMAGES = "Variation of the training images (defaults: the recipe's)"


def finetune(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Variant (S/16, Ti/4), folder or Hub id.", show_default=False)],
    data: Annotated[
        str,
        typer.Option(
            help="digits, photos, a folder of class folders, parquet or webdataset files, or a Hub id.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option(help="New or empty folder for the finished model.", show_default=False)],
    recipe: Annotated[str, typer.Option(help="Settings by name; hf-vit recipes shows them.")] = "default-small",
    image_size: Annotated[str | None, typer.Option(help="px, S or HxW; positions are resampled.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, order, variation and dropout.", min=0)] = 0,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Images a forward pass; gradients are accumulated exactly.")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    num_workers: Annotated[int, typer.Option(help="Processes that prepare images.", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="torch device; by default a GPU where there is one.")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while training.")] = False,
    skip_bad_images: Annotated[bool, typer.Option("--skip-bad-images", help="Leave out unreadable images.")] = False,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep OUTPUT/checkpoints when done.")
    ] = False,
    push: Annotated[str | None, typer.Option(help="Share the finished model on the Hub: user/name.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a private repository.")] = False,
    epochs: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)] = None,
    steps: Annotated[int | None, typer.Option(rich_help_panel=_RECIPE, help="Instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_RECIPE, help="Images a step.")] = None,
    optimizer: Annotated[str | None, typer.Option(rich_help_panel=_RECIPE, help="adamw or sgd.")] = None,
    learning_rate: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="After warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)] = None,
    momentum: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of SGD.")] = None,
    beta1: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of AdamW.")] = None,
    beta2: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Of AdamW.")] = None,
    schedule: Annotated[str | None, typer.Option(rich_help_panel=_RECIPE, help="cosine, linear, constant.")] = None,
    warmup: Annotated[
        float | None, typer.Option(rich_help_panel=_RECIPE, help="Share of all steps if below 1, else steps.")
    ] = None,
    clip: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Largest gradient norm; 0: off.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)] = None,
    dropout: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE)] = None,
    drop_path: Annotated[float | None, typer.Option(rich_help_panel=_RECIPE, help="Stochastic depth.")] = None,
    evaluations: Annotated[
        int | None, typer.Option(rich_help_panel=_RECIPE, help="Evaluations and checkpoints in all.")
    ] = None,
    patience: Annotated[
        int | None, typer.Option(rich_help_panel=_RECIPE, help="Evaluations without a better one before stopping.")
    ] = None,
    mixup_alpha: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="0: off.")] = None,
    cutmix_alpha: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="0: off.")] = None,
    random_resized_crop: Annotated[
        tuple[float, float] | None,
        typer.Option(rich_help_panel=_IMAGES, help="Smallest and largest share of the area; 0 0: off."),
    ] = None,
    randaugment: Annotated[
        tuple[int, int] | None, typer.Option(rich_help_panel=_IMAGES, help="Layers and magnitude; 0 0: off.")
    ] = None,
    horizontal_flip: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Probability.")] = None,
    shift_px: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest shift.")] = None,
    rotation_degrees: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest turn.")] = None,
    shear_degrees: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest slant.")] = None,
    zoom: Annotated[float | None, typer.Option(rich_help_panel=_IMAGES, help="Largest change of size (share).")] = None,
) -> None:
    """Train an image classifier: fine-tune a checkpoint, or a variant from scratch."""
    from hf_vit.cli.command_line import command_line
    from hf_vit.training import FinetuneOptions
    from hf_vit.training import finetune as run
    from hf_vit.training.recipes import OVERRIDABLE

    options = FinetuneOptions(
        image_size=parse_size(image_size),
        micro_batch_size=micro_batch_size,
        precision=precision,  # pyright: ignore[reportArgumentType] - checked by the class
        seed=seed,
        num_workers=num_workers,
        streaming=streaming,
        skip_bad_images=skip_bad_images,
        resume=resume,
        keep_checkpoints=keep_checkpoints,
        device=device,
        push=push,
        private=private,
    )
    overrides = {name: value for name, value in context.params.items() if name in OVERRIDABLE}
    try:
        result = run(
            model,
            data,
            output,
            recipe=recipe,
            options=options,
            command=command_line(context),
            report=typer.echo,
            **overrides,
        )
    except KeyboardInterrupt:
        typer.echo(f"hf-vit: stopped; the last complete checkpoint is in {output}, --resume goes on from it", err=True)
        raise typer.Exit(130) from None
    print_result(result)
    if result.pushed is not None:
        from hf_vit.hub.push import describe

        typer.echo(describe(result.pushed))


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Read "S" or "HxW" (px) as (height, width).

    Raises:
        UserError: neither.
    """
    from hf_vit.errors import UserError

    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UserError(f"image size '{text}' is not understood; give one side in px (384) or HEIGHTxWIDTH (224x320)")
    return int(sides[0]), int(sides[-1])


def print_result(result: "FinetuneResult") -> None:
    """The table at the end."""
    from rich.console import Console
    from rich.table import Table

    from hf_vit.cli.cost import rate_of, time_rows
    from hf_vit.cost import cost_report

    test = result.test
    table = Table(title="test split, looked at once", title_justify="left", show_header=False)
    rows = [("test accuracy", f"{test.top1:.2%} of {test.num_images:,} images")]
    if test.top5 is not None:
        rows.append(("test top-5 accuracy", f"{test.top5:.2%}"))
    rows += [
        ("test loss (nats)", f"{test.loss:.4f}"),
        ("expected calibration error", f"{test.ece:.2%}"),
        ("validation accuracy", f"{result.validation['accuracy']:.2%}"),
        ("best checkpoint", f"step {result.best_step:,} of {result.steps:,}"),
        *time_rows(cost_report(result.folder, device_flops=rate_of(result.model.device.type))),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"saved in {result.folder}: model, processor, facts.json, README.md", soft_wrap=True, markup=False)
