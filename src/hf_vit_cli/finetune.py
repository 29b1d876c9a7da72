"""`hf-vit finetune`."""

from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import CONFIG, command_line, print_table, print_tables, stoppable
from hf_vit_cli.cost import rate_of, time_rows
from hf_vit_cli.options import opt
from hf_vit_settings import AUGMENTATION_FIELDS, RECIPE_FIELDS, RUN, RUN_FIELDS, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    model: str = options.MODEL,
    data: str = options.DATA,
    output: Path = options.OUTPUT,
    config: Path | None = CONFIG,
    task: str = opt("classification", "classification, segmentation (masks) or detection (boxes); docs/dense.md."),
    head: str | None = opt(
        None,
        "segmentation: linear (the default), upernet, mask2former; detection: mask-rcnn (the default), "
        "detr, deformable-detr.",
    ),
    head_width: int | None = opt(None, "Channels of the head. Default: its library's.", panel=RUN),
    recipe: str | None = opt(
        None, "Recipe; hf-vit recipes lists them. Default: default-small, or the task's or method's."
    ),
    teacher: str | None = opt(None, "Teacher, an image classifier: folder, Hub id or timm:NAME.", panel=_TEACHER),
    distillation: str | None = opt(None, "hard or soft (DeiT's token), or logit (the default).", panel=_TEACHER),
    temperature: float | None = opt(None, "Temperature of soft targets; default 3.", panel=_TEACHER),
    distillation_weight: float | None = opt(
        None, "Share of distillation in the loss; default .5 (hard) or .1.", panel=_TEACHER
    ),
    self_training: str | None = opt(None, "noisy-student (the default) or meta-pseudo-labels.", panel=_UNLABELED),
    unlabeled: str | None = opt(
        None, "Unlabeled images: a folder, or as in --data; labels are ignored.", panel=_UNLABELED
    ),
    unlabeled_ratio: int | None = opt(
        None, "Unlabeled images per labeled one; default 3, or 4 (meta-pseudo-labels).", panel=_UNLABELED
    ),
    pseudo_labels: str | None = opt(None, "noisy-student: soft (the default) or hard.", panel=_UNLABELED),
    confidence: float | None = opt(
        None, "noisy-student: smallest confidence of a label; default .3.", panel=_UNLABELED
    ),
    images_per_class: int | None = opt(
        None, "noisy-student: most images per class; default: those of the largest class.", panel=_UNLABELED
    ),
    head_dropout: float | None = opt(None, "noisy-student: dropout before the head; default .5.", panel=_UNLABELED),
    uda_weight: float | None = opt(
        None, "meta-pseudo-labels: weight of the UDA consistency loss; default 1.", panel=_UNLABELED
    ),
    uda_temperature: float | None = opt(
        None, "meta-pseudo-labels: temperature of the UDA targets; default .75.", panel=_UNLABELED
    ),
    uda_threshold: float | None = opt(
        None, "meta-pseudo-labels: smallest confidence of UDA targets; default .6.", panel=_UNLABELED
    ),
    lr_sweep: bool = opt(False, "Try the recipe's grid of learning rates on the validation split.", "--lr-sweep"),
    sweep_rates: str | None = opt(
        None, "Try these learning rates on the validation split: 0.001,0.003.", panel=RUN, metavar="RATE,RATE..."
    ),
    runner: str = opt("local", "With a sweep: local, or ray (extra ray), all rates at once.", panel=RUN),
    address: str | None = opt(
        None, "Running Ray cluster: HOST:PORT, or auto. Default: start Ray on this machine.", panel=RUN
    ),
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
    """Return what the options say of a teacher; None without one."""
    teacher, kind, temperature, weight = (parameters[name] for name in ("teacher", *_OF_DISTILLATION))
    if teacher is None:
        if (kind, temperature, weight) != (None, None, None):
            raise UserError("--distillation, --temperature and --distillation-weight need a --teacher")
        return None
    from hf_vit.training import DistillationOptions

    return DistillationOptions(teacher, kind or "logit", temperature, weight)


def parse_self_training(parameters: "Mapping[str, Any]") -> "SelfTrainingOptions | None":
    """Return what the options say of unlabeled images; None where none was given."""
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
    """Read "0.001,0.01"."""
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise UserError(f"--sweep-rates '{text}' cannot be read; give numbers: 0.001,0.003,0.01") from error


def print_result(result: "FinetuneResult") -> None:
    """The table at the end."""
    from hf_vit.cost import cost_summary
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.processes import world_size

    test, device = result.test, result.model.device.type
    if not isinstance(test, ClassificationResult):
        print_tables(test.tables("test split (evaluated once)"))
        typer.echo(f"saved in {result.folder}: model, processor, facts.json, README.md")
        return
    devices = 1 if device == "cpu" else world_size()  # on a CPU the processes share its cores
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
    if result.trials:
        header, title = ("learning rate", "accuracy", "loss (nats)", ""), "learning rates, validation split"
        print_table(map(_sweep_row, result.trials, repeat(result.recipe.learning_rate)), *header, title=title)
    print_table(rows, title="test split (evaluated once)")
    typer.echo(f"saved in {result.folder}: model, processor, facts.json, README.md")


def _sweep_row(trial: "Mapping[str, Any]", kept: float) -> list[str]:
    rate = trial["learning_rate"]
    shown = ("diverged", "-") if trial["score"] is None else (f"{trial['accuracy']:.2%}", f"{trial['loss']:.4f}")
    return [f"{rate:g}", *shown, "kept" if rate == kept else ""]
