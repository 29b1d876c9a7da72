"""What facts.json says of a training, whatever it learnt."""

import math
from typing import Any

from hf_vit.hub.licenses import license_of
from hf_vit.results.facts import DataFact
from hf_vit.training.processes import world_size
from hf_vit.training.run.decisions import Run


def recipe_values(run: Run) -> dict[str, Any]:
    """The recipe as it was used: what it left to the model is the model's."""
    of_the_model = {
        "image_size": run.config.image_size,
        "dropout": getattr(run.config, "hidden_dropout_prob", None),  # a ResNet has none
        "drop_path": getattr(run.config, "drop_path_rate", None),
        "architecture": {name: getattr(run.config, name, None) for name in run.recipe.architecture},
    }
    return run.recipe.settings() | of_the_model


def run_values(run: Run, parameters: int, steps: int, seconds: float, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The values that every task's record has."""
    images_seen = _images_seen(run, steps)
    logged = [entry["loss"] for entry in history if "loss" in entry]
    values: dict[str, Any] = {
        "recipe": recipe_values(run),
        "steps": steps,
        "planned_steps": run.steps,
        "parameters": parameters,
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
    if run.source.foreign is not None:
        values["origin"] = run.source.foreign.plan.origin
    if run.options.streaming:
        values["streaming"] = True
    if run.data.skipped:
        values["skipped_images"] = len(run.data.skipped)
    return values


def _images_seen(run: Run, steps: int) -> int:
    """In all epochs, of which the last batch is what is left; not so where others come beside, and in contrast."""
    batch, images, beside = run.recipe.batch_size, run.data.num_examples("train"), run.task.get("unlabelled_ratio", 0)
    if not images or beside or run.task.get("objective") == "contrastive":
        return steps * batch * (1 + beside)
    epochs, rest = divmod(steps, math.ceil(images / batch))
    return epochs * images + rest * batch


def data_fact(run: Run, split: str, size: int | None) -> DataFact:
    """The data of a run, as a record names it."""
    data = run.data
    return DataFact(name=data.name, fingerprint=data.fingerprint, split=split, size=size, revision=data.revision)
