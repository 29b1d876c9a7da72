"""`hf-vit finetune`."""

from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import CONFIG, command_line, print_table, print_tables, stoppable, tell
from hf_vit_cli.cost import rate_of, time_rows
from hf_vit_cli.options import opt
from hf_vit_settings import (
    AUGMENTATION_FIELDS,
    DISTILLATION_FIELDS,
    RECIPE_FIELDS,
    RUN,
    RUN_FIELDS,
    SELF_TRAINING_FIELDS,
    TEACHER,
    UNLABELED,
    DistillationOptions,
    SelfTrainingOptions,
    UserError,
    option_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_vit.training import FinetuneResult


@options.takes(
    *(*DISTILLATION_FIELDS.values(), *SELF_TRAINING_FIELDS.values()),
    *(*RUN_FIELDS.values(), *RECIPE_FIELDS.values(), *AUGMENTATION_FIELDS.values()),
)
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
    teacher: str | None = opt(None, "Teacher, an image classifier: folder, Hub id or timm:NAME.", panel=TEACHER),
    unlabeled: str | None = opt(
        None, "Unlabeled images: a folder, or as in --data; labels are ignored.", panel=UNLABELED
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
    distillation, self_training = parse_teaching(teacher, unlabeled, shared)
    with stoppable(lambda: way_on(output)):
        result = run(
            model,
            data,
            output,
            task=task,
            head=head,
            head_width=head_width,
            recipe=recipe,
            distillation=distillation,
            self_training=self_training,
            lr_sweep=lr_sweep if sweep_rates is None else parse_rates(sweep_rates),
            runner=runner,
            address=address,
            command=command_line(context),
            report=tell,
            **shared,
        )
    if not is_first():
        return
    print_result(result)
    if result.pushed is not None:
        tell(result.pushed.describe())


def parse_teaching(
    teacher: str | None, unlabeled: str | None, values: dict[str, Any]
) -> tuple[DistillationOptions | None, SelfTrainingOptions | None]:
    """Take the options of a teacher out of those of a command; one of the two results is None, or both are."""
    distilling, labelling = (_pop(each, values) for each in (DISTILLATION_FIELDS, SELF_TRAINING_FIELDS))
    names = [name for name in ("unlabeled",) if unlabeled is not None]
    names += [option_name(SELF_TRAINING_FIELDS[name]).replace("_", "-") for name in labelling]
    if not names:
        if teacher is None and distilling:
            raise UserError("--distillation, --temperature and --distillation-weight need a --teacher")
        return None if teacher is None else DistillationOptions(teacher, **distilling), None
    if teacher is None or unlabeled is None:
        raise UserError(f"--{names[0]} needs --teacher and --unlabeled")
    if distilling:
        name = option_name(DISTILLATION_FIELDS[next(iter(distilling))]).replace("_", "-")
        raise UserError(f"--{name} cannot be combined with --unlabeled; leave one of the two out")
    return None, SelfTrainingOptions(teacher, unlabeled, **labelling)


def _pop(fields: "Mapping[str, Any]", values: dict[str, Any]) -> dict[str, Any]:
    options = {name: values.pop(option_name(field)) for name, field in fields.items()}
    return {name: value for name, value in options.items() if value is not None}


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
        tell(f"saved in {result.folder}: model, processor, facts.json, README.md")
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
    tell(f"saved in {result.folder}: model, processor, facts.json, README.md")


def _sweep_row(trial: "Mapping[str, Any]", kept: float) -> list[str]:
    rate = trial["learning_rate"]
    shown = ("diverged", "-") if trial["score"] is None else (f"{trial['accuracy']:.2%}", f"{trial['loss']:.4f}")
    return [f"{rate:g}", *shown, "kept" if rate == kept else ""]
