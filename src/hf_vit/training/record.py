"""What is left of a training, whatever it learnt: its record in facts.json, and its learning curve."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_vit.hub.licenses import license_of
from hf_vit.results.figures import new_figure, save_figure
from hf_vit.training.plan import Run
from hf_vit.training.processes import world_size

# What is logged of the validation split -> the label of the axis.
_SCORES = {
    "eval_accuracy": "accuracy",
    "eval_top1": "accuracy",
    "eval_mean_iou": "mean intersection over union",
    "eval_ap50": "AP50",
}


def run_values(run: Run, model: nn.Module, steps: int, seconds: float, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that every task's record has; what the recipe left to the model is the model's."""
    batch, images, beside = run.recipe.batch_size, run.data.num_examples("train"), run.task.get("unlabelled_ratio", 0)
    images_seen = steps * batch * (1 + beside)
    if images and not beside and run.task.get("objective") != "contrastive":  # an epoch's last batch is smaller
        epochs, rest = divmod(steps, math.ceil(images / batch))
        images_seen = epochs * images + rest * batch
    of_the_model = {
        "image_size": run.config.image_size,
        "dropout": getattr(run.config, "hidden_dropout_prob", None),  # a ResNet has none
        "drop_path": getattr(run.config, "drop_path_rate", None),
        "architecture": {name: getattr(run.config, name, None) for name in run.recipe.architecture},
    }
    logged = [entry["loss"] for entry in history if "loss" in entry]
    values: dict[str, Any] = {
        "recipe": run.recipe.settings() | of_the_model,
        "steps": steps,
        "planned_steps": run.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "micro_batch_size": run.micro_batch_size,
        "world_size": world_size(),
        "precision": "bf16" if run.bf16 else "fp32",
        "images_seen": images_seen,
        "images_per_second": round(images_seen / seconds, 2) if seconds else None,
    }
    if logged:
        values["training_loss"] = logged[-1]
    values["base_model" if run.source.has_weights else "variant"] = run.source.name
    if run.bf16:  # while training; the test split is judged in the precision of the saved weights
        values["validation_precision"] = "bf16"
    if run.source.has_weights and (license := license_of(run.source.name)):
        values["base_license"] = license
    if run.source.has_weights and run.source.family is None:
        values["origin"] = run.source.plan.origin
    if run.options.streaming:
        values["streaming"] = True
    if run.data.skipped:
        values["skipped_images"] = len(run.data.skipped)
    return values


def plot_learning_curve(log_history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw loss and score over the epochs from a log; return False, without a file, where there is no loss."""

    def series(key: str) -> list[tuple[float, float]]:
        return [(entry["epoch"], entry[key]) for entry in log_history if key in entry and "epoch" in entry]

    losses = {"training": series("loss"), "validation": series("eval_loss")}
    scores = {name: points for key, name in _SCORES.items() if (points := series(key))}
    if not any(losses.values()):
        return False
    panels = [("loss (nats)", losses)]
    for name, points in list(scores.items())[:1]:
        panels.append((f"{name} (%)", {"validation": [(epoch, 100 * value) for epoch, value in points]}))
    figure = new_figure(9 if scores else 5, 3.6)
    for number, (label, curves) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for name, points in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
                axes.set_xlabel("epoch")
                axes.grid(visible=True, alpha=0.3)
        axes.set_ylabel(label)
        axes.legend()
    save_figure(figure, path)
    return True
