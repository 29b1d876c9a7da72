"""`hf-vit finetune`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import Config, command_line, print_tables, stoppable
from hf_vit_cli.cost import rate_of, time_rows
from hf_vit_cli.options import opt
from hf_vit_settings import AUGMENTATION_FIELDS, RECIPE_FIELDS, RUN, RUN_FIELDS, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from hf_vit.training import DistillationOptions, FinetuneResult, SelfTrainingOptions

_TEACHER = "Distillation from a teacher (docs/training.md)"
_UNLABELED = "Self-training on unlabeled images (docs/training.md)"
_OF_DISTILLATION = ("distillation", "temperature", "distillation_weight")
_OF_SELF_TRAINING = (
    *("self_training", "unlabeled", "unlabeled_ratio", "pseudo_labels", "confidence", "images_per_class"),
    *("head_dropout", "uda_weight", "uda_temperature", "uda_threshold"),
)


@options.takes(*RUN_FIELDS.values(), *RECIPE_FIELDS.values(), *AUGMENTATION_FIELDS.values())
def finetune(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    output: options.Output,
    config: Config = None,
    task: Annotated[
        str, opt("classification, segmentation (masks) or detection (boxes); docs/dense.md.")
    ] = "classification",
    head: Annotated[
        str | None,
        opt(
            "segmentation: linear (the default), upernet, mask2former; detection: mask-rcnn (the default), "
            "detr, deformable-detr."
        ),
    ] = None,
    head_width: Annotated[int | None, opt("Channels of that head; default: its library's.", panel=RUN)] = None,
    recipe: Annotated[
        str | None, opt("Recipe; hf-vit recipes lists them. Default: default-small, or the task's or method's.")
    ] = None,
    teacher: Annotated[str | None, opt("Image classifier: folder, Hub id or timm:NAME.", panel=_TEACHER)] = None,
    distillation: Annotated[
        str | None, opt("hard or soft (DeiT's token), or logit (the default).", panel=_TEACHER)
    ] = None,
    temperature: Annotated[float | None, opt("Temperature of soft targets; default 3.", panel=_TEACHER)] = None,
    distillation_weight: Annotated[
        float | None, opt("Share of distillation in the loss; default .5 (hard) or .1.", panel=_TEACHER)
    ] = None,
    self_training: Annotated[
        str | None, opt("noisy-student (the default) or meta-pseudo-labels.", panel=_UNLABELED)
    ] = None,
    unlabeled: Annotated[
        str | None, opt("Unlabeled images: a folder, or as --data; labels are ignored.", panel=_UNLABELED)
    ] = None,
    unlabeled_ratio: Annotated[
        int | None, opt("Unlabeled images per labeled one; default 3, or 4 (meta-pseudo-labels).", panel=_UNLABELED)
    ] = None,
    pseudo_labels: Annotated[str | None, opt("noisy-student: soft (the default) or hard.", panel=_UNLABELED)] = None,
    confidence: Annotated[
        float | None, opt("noisy-student: smallest confidence of a label; default .3.", panel=_UNLABELED)
    ] = None,
    images_per_class: Annotated[
        int | None, opt("noisy-student: most images per class; default: those of the largest class.", panel=_UNLABELED)
    ] = None,
    head_dropout: Annotated[
        float | None, opt("noisy-student: dropout before the head; default .5.", panel=_UNLABELED)
    ] = None,
    uda_weight: Annotated[
        float | None, opt("meta-pseudo-labels: weight of the UDA consistency loss; default 1.", panel=_UNLABELED)
    ] = None,
    uda_temperature: Annotated[
        float | None, opt("meta-pseudo-labels: temperature of the UDA targets; default .75.", panel=_UNLABELED)
    ] = None,
    uda_threshold: Annotated[
        float | None, opt("meta-pseudo-labels: smallest confidence of UDA targets; default .6.", panel=_UNLABELED)
    ] = None,
    lr_sweep: Annotated[
        bool, opt("Try the recipe's grid of learning rates on the validation split.", "--lr-sweep")
    ] = False,
    sweep_rates: Annotated[
        str | None,
        opt("Try these learning rates on the validation split: 0.001,0.003.", panel=RUN, metavar="RATE,RATE..."),
    ] = None,
    runner: Annotated[str, opt("With a sweep: local, or ray (extra ray), all rates at once.", panel=RUN)] = "local",
    address: Annotated[
        str | None, opt("Running Ray cluster: HOST:PORT, or auto. Default: start Ray on this machine.", panel=RUN)
    ] = None,
    **shared: Any,
) -> None:
    """Train a model on labels, masks or boxes: fine-tune a checkpoint, or a variant from scratch."""
    from hf_vit.training import finetune as run
    from hf_vit.training.processes import is_first
    from hf_vit.training.run import way_on

    shared["image_size"] = options.parse_size(shared["image_size"])
    labelling = parse_self_training(context.params)
    with stoppable(lambda: way_on(output)):
        result = run(
            model,
            data,
            output,
            task=task,
            head=head,
            head_width=head_width,
            recipe=recipe,
            distillation=None if labelling else parse_distillation(context.params),
            self_training=labelling,
            lr_sweep=lr_sweep if sweep_rates is None else parse_rates(sweep_rates),
            runner=runner,
            address=address,
            command=command_line(context),
            report=typer.echo,
            **shared,
        )
    if not is_first():
        return
    print_result(result)
    if result.pushed is not None:
        from hf_vit.hub.push_result import describe

        typer.echo(describe(result.pushed))


def parse_distillation(parameters: "Mapping[str, Any]") -> "DistillationOptions | None":
    """Return what the options say of a teacher; None without one.

    Raises:
        UserError: the others without a teacher, or a value out of range.
    """
    teacher, kind, temperature, weight = (parameters[name] for name in ("teacher", *_OF_DISTILLATION))
    if teacher is None:
        if (kind, temperature, weight) != (None, None, None):
            raise UserError("--distillation, --temperature and --distillation-weight need a --teacher")
        return None
    from hf_vit.training import DistillationOptions

    return DistillationOptions(teacher, kind or "logit", temperature, weight)


def parse_self_training(parameters: "Mapping[str, Any]") -> "SelfTrainingOptions | None":
    """Return what the options say of unlabeled images; None where none was given.

    Raises:
        UserError: one is missing, is of distillation, or is out of range.
    """
    given = {name: parameters[name] for name in _OF_SELF_TRAINING if parameters[name] is not None}
    if not given:
        return None
    if parameters["teacher"] is None or "unlabeled" not in given:
        raise UserError(f"--{next(iter(given)).replace('_', '-')} needs --teacher and --unlabeled")
    if others := [name.replace("_", "-") for name in _OF_DISTILLATION if parameters[name] is not None]:
        raise UserError(f"--{others[0]} cannot be combined with --unlabeled; leave one of the two out")
    from hf_vit.training import SelfTrainingOptions

    kind = given.pop("self_training", "noisy-student")
    settings = {name.replace("unlabeled", "unlabelled"): value for name, value in given.items()}
    return SelfTrainingOptions(parameters["teacher"], kind=kind, **settings)


def parse_rates(text: str) -> list[float]:
    """Read "0.001,0.01".

    Raises:
        UserError: that is not a list of numbers.
    """
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise UserError(f"--sweep-rates '{text}' cannot be read; give numbers: 0.001,0.003,0.01") from error


def print_result(result: "FinetuneResult") -> None:
    """The table at the end."""
    from rich.console import Console
    from rich.table import Table

    from hf_vit.cost import cost_summary
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.processes import world_size

    test, device = result.test, result.model.device.type
    if not isinstance(test, ClassificationResult):
        print_tables(test.tables("test split (evaluated once)"))
        typer.echo(f"saved in {result.folder}: model, processor, facts.json, README.md")
        return
    devices = 1 if device == "cpu" else world_size()  # on a CPU the processes share its cores
    table = Table(title="test split (evaluated once)", title_justify="left", show_header=False)
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
