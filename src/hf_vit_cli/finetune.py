"""`hf-vit finetune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import (
    CONFIG,
    collect_options,
    format_command,
    handle_interrupt,
    print_safely,
    print_table,
    print_tables,
)
from hf_vit_cli.cost import make_measured_rows, measure_rate
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
    get_option_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_vit.training import FinetuneResult


@options.with_options(
    *(*DISTILLATION_FIELDS.values(), *SELF_TRAINING_FIELDS.values()),
    *(*RUN_FIELDS.values(), *RECIPE_FIELDS.values(), *AUGMENTATION_FIELDS.values()),
)
def finetune(
    context: typer.Context,
    model: str = options.MODEL,
    data: str = options.DATA,
    output: Path = options.OUTPUT,
    config: Path | None = CONFIG,
    task: str = opt(
        "classification", "Task: classification, segmentation (masks) or detection (boxes); see docs/dense.md."
    ),
    head: str | None = opt(
        None,
        "Head for segmentation: linear (the default), upernet or mask2former; for detection: mask-rcnn (the "
        "default), detr or deformable-detr.",
    ),
    head_width: int | None = opt(
        None, "Number of channels of the head. Default: the head's own default in transformers.", panel=RUN
    ),
    recipe: str | None = opt(
        None, "Training recipe; hf-vit recipes lists all. Default: default-small, or the recipe of the task or method."
    ),
    teacher: str | None = opt(
        None, "Teacher model for distillation, an image classifier: folder, Hub id or timm:NAME.", panel=TEACHER
    ),
    unlabeled: str | None = opt(
        None, "Unlabeled images: a folder, or a data set as in --data, whose labels are ignored.", panel=UNLABELED
    ),
    lr_sweep: bool = opt(
        False, "Try the recipe's grid of learning rates and keep the best on the validation split.", "--lr-sweep"
    ),
    sweep_rates: str | None = opt(
        None,
        "Try these learning rates (0.001,0.003) and keep the best on the validation split.",
        panel=RUN,
        metavar="RATE,RATE...",
    ),
    runner: str = opt(
        "local",
        "Where to run a sweep: local (one rate after another) or ray (all at once; needs the extra ray).",
        panel=RUN,
    ),
    address: str | None = opt(
        None, "Address of a running Ray cluster: HOST:PORT, or auto. Default: start Ray on this machine.", panel=RUN
    ),
    **shared: Any,
) -> None:
    """Train a model on labels, masks or boxes: fine-tune a checkpoint, or a variant from scratch."""
    values = collect_options(locals(), "config", "teacher", "unlabeled", "sweep_rates")
    from hf_vit.training import finetune as run
    from hf_vit.training.processes import is_main
    from hf_vit.training.run import describe_resume

    values["image_size"] = options.parse_size(values["image_size"])
    values["distillation"], values["self_training"] = parse_teaching(teacher, unlabeled, values)
    if sweep_rates is not None:
        values["lr_sweep"] = parse_rates(sweep_rates)
    with handle_interrupt(lambda: describe_resume(output)):
        result = run(**values, command=format_command(context), report=print_safely)
    if not is_main():
        return
    print_result(result)
    print_safely(f"saved in {result.folder}: model, processor, facts.json, README.md")
    if result.pushed is not None:
        print_safely(result.pushed.describe())


def parse_teaching(
    teacher: str | None, unlabeled: str | None, values: dict[str, Any]
) -> tuple[DistillationOptions | None, SelfTrainingOptions | None]:
    """Return the options of distillation or of self-training, removed from the command's options.

    At most one of the two results is not None. A teacher alone means distillation, a teacher with unlabeled images
    self-training.

    Raises:
        UserError: an option lacks another one that it needs.
    """
    distillation = _pop(DISTILLATION_FIELDS, values)
    self_training = _pop(SELF_TRAINING_FIELDS, values)
    distillation_flags = _list_flags(DISTILLATION_FIELDS, distillation)
    self_training_flags = [] if unlabeled is None else ["--unlabeled"]
    self_training_flags += _list_flags(SELF_TRAINING_FIELDS, self_training)
    if not self_training_flags:
        if teacher is None and distillation_flags:
            raise UserError(f"{distillation_flags[0]} only works with --teacher; add --teacher, or leave it out")
        return None if teacher is None else DistillationOptions(teacher, **distillation), None
    if teacher is None or unlabeled is None:
        raise UserError(f"{self_training_flags[0]} needs --teacher and --unlabeled; add both, or leave it out")
    if distillation_flags:
        raise UserError(f"{distillation_flags[0]} cannot be combined with --unlabeled; leave one of them out")
    return None, SelfTrainingOptions(teacher, unlabeled, **self_training)


def _pop(fields: "Mapping[str, Any]", values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of these fields from `values`, and return those that were given by field name."""
    options = {name: values.pop(get_option_name(field)) for name, field in fields.items()}
    return {name: value for name, value in options.items() if value is not None}


def _list_flags(fields: "Mapping[str, Any]", values: "Mapping[str, Any]") -> list[str]:
    """Return the options that set these values, such as "--distillation-weight"."""
    return [f"--{get_option_name(fields[name]).replace('_', '-')}" for name in values]


def parse_rates(text: str) -> list[float]:
    """Return learning rates from text such as "0.001,0.01"."""
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"--sweep-rates '{text}' is not a list of numbers; give for example --sweep-rates 0.001,0.003,0.01"
        ) from error


def print_result(result: "FinetuneResult") -> None:
    """Print the results of a training."""
    from hf_vit.cost import cost_summary
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.processes import world_size

    test = result.test
    device = result.model.device.type
    if not isinstance(test, ClassificationResult):
        print_tables(test.tables("test split (evaluated once)"))
        return
    devices = 1 if device == "cpu" else world_size()  # processes on a CPU share its cores
    rows = [("test accuracy", f"{test.top1:.2%} of {test.num_images:,} images")]
    if test.top5 is not None:
        rows.append(("test top-5 accuracy", f"{test.top5:.2%}"))
    rows += [
        ("test loss (nats)", f"{test.loss:.4f}"),
        ("expected calibration error", f"{test.ece:.2%}"),
        ("validation accuracy", f"{result.validation['accuracy']:.2%}"),
        ("best checkpoint", f"step {result.best_step:,} of {result.steps:,}"),
        *make_measured_rows(cost_summary(result.folder, device_flops=measure_rate(device), devices=devices)),
    ]
    if result.trials:
        name = "tune" if "tune" in result.trials[0] else "learning_rate"
        header = (name.replace("_", " "), "accuracy", "loss (nats)", "")
        best = getattr(result.recipe, name)
        title = f"{'trials of --tune auto' if name == 'tune' else 'learning rates'}, validation split"
        print_table([_make_trial_row(trial, trial[name], best) for trial in result.trials], *header, title=title)
    print_table(rows, title="test split (evaluated once)")


def _make_trial_row(trial: "Mapping[str, Any]", value: float | str, best: float | str) -> list[str]:
    """Return a row of the trials: the value that was tried, its results, and whether it was chosen."""
    scores = ("diverged", "-") if trial["score"] is None else (f"{trial['accuracy']:.2%}", f"{trial['loss']:.4f}")
    return [value if isinstance(value, str) else f"{value:g}", *scores, "best" if value == best else ""]
