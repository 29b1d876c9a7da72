"""`hf-vit finetune`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hf_vit_cli import options
from hf_vit_cli.config_file import Config
from hf_vit_cli.cost_rows import rate_of, time_rows
from hf_vit_cli.result_tables import print_tables
from hf_vit_cli.stopping import stoppable

if TYPE_CHECKING:
    from rich.table import Table

    from hf_vit.training import FinetuneResult
    from hf_vit.training.tasks.distillation import DistillationOptions

_TEACHER = "Learning from a teacher (docs/distillation.md)"


def finetune(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    output: options.Output,
    config: Config = None,
    recipe: Annotated[str, typer.Option(help="Settings by name; hf-vit recipes shows them.")] = "default-small",
    image_size: options.ImageSize = None,
    teacher: Annotated[
        str | None, typer.Option(rich_help_panel=_TEACHER, help="Image classifier: folder, Hub id or timm:NAME.")
    ] = None,
    distillation: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TEACHER, help="hard or soft (DeiT's token), or logit (the default)."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(rich_help_panel=_TEACHER, help="Of soft targets; by default 3.")
    ] = None,
    distillation_weight: Annotated[
        float | None, typer.Option(rich_help_panel=_TEACHER, help="Share of the loss; by default .5 (hard) or .1.")
    ] = None,
    lr_sweep: Annotated[
        bool, typer.Option("--lr-sweep", help="Try the recipe's grid of learning rates on the validation split.")
    ] = False,
    sweep_rates: Annotated[
        str | None, typer.Option(metavar="RATE,RATE...", help="The same with these learning rates.")
    ] = None,
    resume: options.Resume = False,
    seed: Annotated[int, typer.Option(help="Of weights, order, variation and dropout.", min=0)] = 0,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Images a forward pass; gradients are accumulated exactly.")
    ] = None,
    precision: options.Precision = "auto",
    num_workers: options.NumWorkers = 0,
    device: options.Device = None,
    streaming: options.Streaming = False,
    skip_bad_images: options.SkipBadImages = False,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    keep_checkpoints: options.KeepCheckpoints = False,
    report_to: options.ReportTo = "none",
    push: Annotated[str | None, typer.Option(help="Share the finished model on the Hub: user/name.")] = None,
    license: Annotated[str | None, typer.Option(help="With --push: Hub license id; else the base model's.")] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a private repository.")] = False,
    share_images: options.ShareImages = False,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    optimizer: options.Optimizer = None,
    learning_rate: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    momentum: options.Momentum = None,
    beta1: options.Beta1 = None,
    beta2: options.Beta2 = None,
    schedule: options.Schedule = None,
    warmup: options.Warmup = None,
    clip: options.Clip = None,
    loss: options.Loss = None,
    bce_threshold: options.BceThreshold = None,
    class_weights: options.ClassWeights = None,
    balanced_sampling: options.BalancedSampling = None,
    new_head: options.NewHead = None,
    head_bias: options.HeadBias = None,
    label_smoothing: options.LabelSmoothing = None,
    dropout: options.Dropout = None,
    drop_path: options.DropPath = None,
    evaluations: options.Evaluations = None,
    patience: options.Patience = None,
    tune: options.Tune = None,
    lora_rank: options.LoraRank = None,
    lora_alpha: options.LoraAlpha = None,
    layer_decay: options.LayerDecay = None,
    average_decay: options.AverageDecay = None,
    sam_rho: options.SamRho = None,
    sam_micro_batches: options.SamMicroBatches = None,
    mixup_alpha: options.MixupAlpha = None,
    cutmix_alpha: options.CutmixAlpha = None,
    random_resized_crop: options.RandomResizedCrop = None,
    randaugment: options.Randaugment = None,
    random_erasing: options.RandomErasing = None,
    horizontal_flip: options.HorizontalFlip = None,
    shift_px: options.ShiftPx = None,
    rotation_degrees: options.RotationDegrees = None,
    shear_degrees: options.ShearDegrees = None,
    zoom: options.Zoom = None,
) -> None:
    """Train an image classifier: fine-tune a checkpoint, or a variant from scratch."""
    from hf_vit.training import finetune as run
    from hf_vit.training.processes import is_first
    from hf_vit.training.recipes.registry import OVERRIDABLE
    from hf_vit.training.run.resuming import way_on
    from hf_vit_cli.command_line import command_line

    chosen = options.finetune_options(context.params)
    overrides = {name: value for name, value in context.params.items() if name in OVERRIDABLE}
    learning = parse_distillation(teacher, distillation, temperature, distillation_weight)
    with stoppable(lambda: way_on(output)):
        result = run(
            model,
            data,
            output,
            recipe=recipe,
            distillation=learning,
            lr_sweep=lr_sweep if sweep_rates is None else parse_rates(sweep_rates),
            options=chosen,
            command=command_line(context),
            report=typer.echo,
            **overrides,
        )
    if not is_first():
        return
    print_result(result)
    if result.pushed is not None:
        from hf_vit.hub.push import describe

        typer.echo(describe(result.pushed))


def parse_distillation(
    teacher: str | None, kind: str | None, temperature: float | None, weight: float | None
) -> "DistillationOptions | None":
    """What the flags say of a teacher; None without one.

    Raises:
        UserError: the others without a teacher, or a value out of range.
    """
    from hf_vit.errors import UserError

    if teacher is None:
        if (kind, temperature, weight) != (None, None, None):
            raise UserError("--distillation, --temperature and --distillation-weight need a --teacher")
        return None
    from hf_vit.training.tasks.distillation import DistillationOptions

    return DistillationOptions(teacher, kind or "logit", temperature, weight)  # pyright: ignore[reportArgumentType]


def parse_rates(text: str) -> list[float]:
    """Read "0.001,0.01".

    Raises:
        UserError: that is not a list of numbers.
    """
    from hf_vit.errors import UserError

    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise UserError(f"sweep rates '{text}' are not understood; give numbers: 0.001,0.003,0.01") from error


def print_result(result: "FinetuneResult") -> None:
    """The table at the end."""
    from rich.console import Console
    from rich.table import Table

    from hf_vit.cost import cost_summary
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.processes import world_size

    test, device = result.test, result.model.device.type
    if not isinstance(test, ClassificationResult):
        print_tables(test.tables("test split, looked at once"))
        typer.echo(f"saved in {result.folder}: model, processor, facts.json, README.md")
        return
    devices = 1 if device == "cpu" else world_size()  # on a CPU the processes share its cores
    table = Table(title="test split, looked at once", title_justify="left", show_header=False)
    rows = [("test accuracy", f"{test.top1:.2%} of {test.num_images:,} images")]
    if test.top5 is not None:
        rows.append(("test top-5 accuracy", f"{test.top5:.2%}"))
    rows += [
        ("test loss (nats)", f"{test.loss:.4f}"),
        ("expected calibration error", f"{test.ece:.2%}"),
        ("validation accuracy", f"{result.validation['accuracy']:.2%}"),
        ("best checkpoint", f"step {result.best_step:,} of {result.steps:,}"),
        *time_rows(cost_summary(result.folder, device_flops=rate_of(device), devices=devices)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console = Console()
    if result.trials:
        console.print(_sweep_table(result))
    console.print(table)
    console.print(f"saved in {result.folder}: model, processor, facts.json, README.md", soft_wrap=True, markup=False)


def _sweep_table(result: "FinetuneResult") -> "Table":
    from rich.table import Table

    table = Table(
        "learning rate", "accuracy", "loss (nats)", "", title="learning rates, validation split", title_justify="left"
    )
    for trial in result.trials:
        rate = trial["learning_rate"]
        shown = ("diverged", "-") if trial["score"] is None else (f"{trial['accuracy']:.2%}", f"{trial['loss']:.4f}")
        table.add_row(f"{rate:g}", *shown, "kept" if rate == result.recipe.learning_rate else "")
    return table
