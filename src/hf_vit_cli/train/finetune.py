"""`hf-vit finetune`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.config_file import Config
from hf_vit_cli.cost_rows import rate_of, time_rows
from hf_vit_cli.result_tables import print_tables
from hf_vit_cli.stopping import stoppable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from hf_vit.training import FinetuneResult
    from hf_vit.training.tasks.distillation import DistillationOptions
    from hf_vit.training.tasks.self_training import SelfTrainingOptions

_TEACHER = "Learning from a teacher (docs/distillation.md)"
_UNLABELLED = "Learning from images that the teacher labels (docs/self_training.md)"


def finetune(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    output: options.Output,
    config: Config = None,
    task: Annotated[
        str, typer.Option(help="classification; segmentation, of masks; or detection, of boxes (docs/dense.md).")
    ] = "classification",
    head: Annotated[
        str | None,
        typer.Option(
            help="segmentation: linear (the default), upernet, mask2former; detection: mask-rcnn (the default), detr, "
            "deformable-detr."
        ),
    ] = None,
    head_width: Annotated[int | None, typer.Option(help="Channels of that head; by default its library's.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Settings by name; hf-vit recipes shows them. By default default-small, or that of its name or task."
        ),
    ] = None,
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
    self_training: Annotated[
        str | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="noisy-student (the default) or meta-pseudo-labels."),
    ] = None,
    unlabelled: Annotated[
        str | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="A folder of images, or as --data; labels do not count."),
    ] = None,
    unlabelled_ratio: Annotated[
        int | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="Unlabelled images a labelled one; by default 3, or 4 (meta)."),
    ] = None,
    pseudo_labels: Annotated[
        str | None, typer.Option(rich_help_panel=_UNLABELLED, help="Noisy student: soft (the default) or hard.")
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="Noisy student: how sure a label must be; by default .3."),
    ] = None,
    images_per_class: Annotated[
        int | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="Noisy student: at most; by default of the largest class."),
    ] = None,
    head_dropout: Annotated[
        float | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="Noisy student: before the head; by default .5."),
    ] = None,
    uda_weight: Annotated[
        float | None,
        typer.Option(rich_help_panel=_UNLABELLED, help="Meta pseudo labels: of consistency; by default 1."),
    ] = None,
    uda_temperature: Annotated[
        float | None, typer.Option(rich_help_panel=_UNLABELLED, help="Of its targets; by default .75.")
    ] = None,
    uda_threshold: Annotated[
        float | None, typer.Option(rich_help_panel=_UNLABELLED, help="How sure they must be; by default .6.")
    ] = None,
    lr_sweep: Annotated[
        bool, typer.Option("--lr-sweep", help="Try the recipe's grid of learning rates on the validation split.")
    ] = False,
    sweep_rates: Annotated[
        str | None, typer.Option(metavar="RATE,RATE...", help="The same with these learning rates.")
    ] = None,
    runner: options.Runner = "local",
    address: options.Address = None,
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
    process_timeout: options.ProcessTimeout = 1800,
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
    cooldown: options.Cooldown = None,
    min_learning_rate: options.MinLearningRate = None,
    clip: options.Clip = None,
    loss: options.Loss = None,
    bce_threshold: options.BceThreshold = None,
    class_weights: options.ClassWeights = None,
    balanced_sampling: options.BalancedSampling = None,
    repeated_augmentation: options.RepeatedAugmentation = None,
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
    random_crop: options.RandomCrop = None,
    scale_jitter: options.ScaleJitter = None,
    randaugment: options.Randaugment = None,
    auto_augment: options.AutoAugment = None,
    color_jitter: options.ColorJitter = None,
    random_erasing: options.RandomErasing = None,
    horizontal_flip: options.HorizontalFlip = None,
    shift_px: options.ShiftPx = None,
    rotation_degrees: options.RotationDegrees = None,
    shear_degrees: options.ShearDegrees = None,
    zoom: options.Zoom = None,
) -> None:
    """Train a model on labels, masks or boxes: fine-tune a checkpoint, or a variant from scratch."""
    from hf_vit.training import finetune as run
    from hf_vit.training.processes import is_first
    from hf_vit.training.recipes.registry import OVERRIDABLE
    from hf_vit.training.run import way_on
    from hf_vit_cli.command_line import command_line

    chosen = options.finetune_options(context.params)
    overrides = {name: value for name, value in context.params.items() if name in OVERRIDABLE}
    labelling = parse_self_training(context.params)
    learning = None if labelling else parse_distillation(teacher, distillation, temperature, distillation_weight)
    with stoppable(lambda: way_on(output)):
        result = run(
            model,
            data,
            output,
            task=task,
            head=head,
            head_width=head_width,
            recipe=recipe,
            distillation=learning,
            self_training=labelling,
            lr_sweep=lr_sweep if sweep_rates is None else parse_rates(sweep_rates),
            runner=runner,
            address=address,
            options=chosen,
            command=command_line(context),
            report=typer.echo,
            **overrides,
        )
    if not is_first():
        return
    print_result(result)
    if result.pushed is not None:
        from hf_vit.hub.push_result import describe

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


def parse_self_training(parameters: "Mapping[str, Any]") -> "SelfTrainingOptions | None":
    """What the flags say of images without labels; None where none was given.

    Raises:
        UserError: one is missing, is of distillation, or is out of range.
    """
    from dataclasses import fields

    from hf_vit.errors import UserError
    from hf_vit.training.tasks.self_training import SelfTrainingOptions

    names = ["self_training", *(field.name for field in fields(SelfTrainingOptions) if field.name in parameters)]
    given = {name: parameters[name] for name in names if name != "teacher" and parameters[name] is not None}
    if not given:
        return None
    if parameters["teacher"] is None or "unlabelled" not in given:
        raise UserError(f"--{next(iter(given)).replace('_', '-')} needs a --teacher and --unlabelled images")
    if others := [
        name for name in ("distillation", "temperature", "distillation_weight") if parameters[name] is not None
    ]:
        flag = others[0].replace("_", "-")
        raise UserError(f"--{flag} is of a teacher without --unlabelled images; leave one of the two out")
    kind = given.pop("self_training", "noisy-student")
    return SelfTrainingOptions(parameters["teacher"], kind=kind, **given)


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
