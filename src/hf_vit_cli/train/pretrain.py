"""`hf-vit pretrain`."""

from typing import Annotated

import typer

from hf_vit_cli import options
from hf_vit_cli.config_file import Config
from hf_vit_cli.stopping import stoppable

_PATCHES = "Masked and next patch prediction"
_CONTRAST = "Momentum contrast"


def pretrain(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    output: options.Output,
    config: Config = None,
    objective: Annotated[str, typer.Option(help="masked-patch, next-patch or contrastive.")] = "masked-patch",
    recipe: Annotated[
        str | None, typer.Option(help="Settings by name (hf-vit recipes); by default the objective's small one.")
    ] = None,
    image_size: options.ImageSize = None,
    class_token: Annotated[
        bool | None, typer.Option("--class-token/--no-class-token", help="By default the model's.", show_default=False)
    ] = None,
    num_hidden_groups: Annotated[int | None, typer.Option(help="Layers share weights in so many groups.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention (next-patch always has it).")] = False,
    resume: options.Resume = False,
    seed: Annotated[int, typer.Option(help="Of weights, order, variation, masks and dropout.", min=0)] = 0,
    micro_batch_size: Annotated[int | None, typer.Option(help="Images a forward pass; not for contrastive.")] = None,
    precision: options.Precision = "auto",
    num_workers: options.NumWorkers = 0,
    device: options.Device = None,
    streaming: options.Streaming = False,
    skip_bad_images: options.SkipBadImages = False,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    keep_checkpoints: options.KeepCheckpoints = False,
    process_timeout: options.ProcessTimeout = 1800,
    report_to: options.ReportTo = "none",
    target: Annotated[
        str, typer.Option(rich_help_panel=_PATCHES, help="mean_color, downsampled or pixels.")
    ] = "mean_color",
    mask_rate: Annotated[float, typer.Option(rich_help_panel=_PATCHES, help="Share of patches corrupted.")] = 0.5,
    mask_share: Annotated[float, typer.Option(rich_help_panel=_PATCHES, help="Of these, share of [mask].")] = 0.8,
    swap_share: Annotated[float, typer.Option(rich_help_panel=_PATCHES, help="Of these, other patches.")] = 0.1,
    static_masks: Annotated[
        bool, typer.Option("--static-masks", rich_help_panel=_PATCHES, help="An image keeps its mask.")
    ] = False,
    temperature: Annotated[float, typer.Option(rich_help_panel=_CONTRAST)] = 0.2,
    encoder_momentum: Annotated[float, typer.Option(rich_help_panel=_CONTRAST, help="At the first step.")] = 0.99,
    projection_size: Annotated[int, typer.Option(rich_help_panel=_CONTRAST)] = 256,
    hidden_size: Annotated[int | None, typer.Option(rich_help_panel=_CONTRAST, help="Of projector, predictor.")] = None,
    normalization: Annotated[str, typer.Option(rich_help_panel=_CONTRAST, help="batch, layer or none.")] = "batch",
    freeze_patches: Annotated[
        bool, typer.Option("--freeze-patches/--train-patches", rich_help_panel=_CONTRAST, help="Patch projection.")
    ] = True,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    learning_rate: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    schedule: options.Schedule = None,
    warmup: options.Warmup = None,
    cooldown: options.Cooldown = None,
    min_learning_rate: options.MinLearningRate = None,
    clip: options.Clip = None,
    dropout: options.Dropout = None,
    drop_path: options.DropPath = None,
    evaluations: options.Evaluations = None,
    random_resized_crop: options.RandomResizedCrop = None,
    horizontal_flip: options.HorizontalFlip = None,
    shift_px: options.ShiftPx = None,
) -> None:
    """Pre-train without labels; hf-vit finetune --model OUTPUT goes on from there."""
    from hf_vit.training import pretrain as run
    from hf_vit.training.processes import is_first
    from hf_vit.training.recipes.registry import OVERRIDABLE
    from hf_vit.training.run import way_on
    from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions
    from hf_vit.training.tasks.patch_prediction import RandomMasking
    from hf_vit_cli.command_line import command_line

    chosen = options.finetune_options(context.params)
    contrastive = ContrastiveOptions(
        temperature=temperature,
        momentum=encoder_momentum,
        projection_size=projection_size,
        hidden_size=hidden_size,
        normalization=normalization,  # pyright: ignore[reportArgumentType] - checked by the class
        freeze_patches=freeze_patches,
    )
    with stoppable(lambda: way_on(output)):
        result = run(
            model,
            data,
            output,
            objective=objective,
            recipe=recipe,
            target=target,
            masking=RandomMasking(mask_rate, mask_share, swap_share),
            static_masks=static_masks,
            contrastive=contrastive,
            class_token=class_token,
            num_hidden_groups=num_hidden_groups,
            causal=causal,
            options=chosen,
            command=command_line(context),
            report=typer.echo,
            **{name: value for name, value in context.params.items() if name in OVERRIDABLE},
        )
    if not is_first():
        return
    loss = "not evaluated" if result.validation_loss is None else f"{result.validation_loss:.4f}"
    typer.echo(f"validation loss {loss} after {result.steps:,} steps, {result.seconds:,.1f} s of training")
    typer.echo(f"saved in {result.folder}: model, processor, facts.json, {result.picture.name}, README.md")
    typer.echo(f"go on with: hf-vit finetune --model {result.folder} --data {data} --output OUTPUT")
