"""What was measured about a training, from its folder's config.json and facts.json: FLOPs, seconds and error."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hf_vit.conversion.loading import find_config
from hf_vit.cost.flops import training_flops
from hf_vit.errors import UserError
from hf_vit.results.facts import Facts, Record, fraction

# Of an image: contrastive training runs two views through the model, and forward through a second, slower one.
_CONTRASTIVE = 2 * (3 + 1) / 3


@final
@dataclass(frozen=True)
class MeasuredRun:
    """A finished training.

    Attributes:
        folder: of the model.
        images: seen in training, every epoch's counted.
        training_flops: that they cost by `hf_vit.cost.training_flops`.
        seconds: spent training, evaluations and checkpoints included.
        hardware: the device it ran on.
        error: 1 - top-1 accuracy of the last evaluation after it; None without one.
    """

    folder: str
    images: float
    training_flops: float
    seconds: float | None
    hardware: str | None
    error: float | None

    @property
    def flops_per_second(self) -> float | None:
        """What the training sustained, all its time counted."""
        return self.training_flops / self.seconds if self.seconds else None


def measured_run(folder: str | os.PathLike[str]) -> MeasuredRun | None:
    """The last training of a model folder; None when its facts.json tells of none.

    Raises:
        UserError: facts.json or config.json is damaged, or the record does not tell how many images were seen.
    """
    records = Facts.load(folder).records
    places = [place for place, record in enumerate(records) if record.kind == "training"]
    if not places:
        return None
    training = records[places[-1]]
    config, task = find_config(folder)
    images = _images(training, folder)
    passes = _CONTRASTIVE if training.values.get("objective") == "contrastive" else 1
    errors = [_error(record) for record in records[places[-1] :] if record.kind == "evaluation"]
    return MeasuredRun(
        folder=Path(folder).name,
        images=images,
        training_flops=passes * training_flops(config, images, task=task),
        seconds=training.seconds,
        hardware=str(training.hardware["name"]) if "name" in training.hardware else None,
        error=next((error for error in reversed(errors) if error is not None), None),
    )


def _images(training: Record, folder: str | os.PathLike[str]) -> float:
    seen = training.values.get("images_seen")  # older records do not tell it
    if isinstance(seen, int | float):
        return float(seen)
    recipe = training.values.get("recipe")
    steps, batch = training.values.get("steps"), recipe.get("batch_size") if isinstance(recipe, dict) else None
    if not isinstance(steps, int | float) or not isinstance(batch, int | float):
        raise UserError(
            f"the training record in {Path(folder).name}/facts.json lacks steps or recipe.batch_size, so "
            "its images cannot be counted; give --images"
        )
    beside = training.values.get("unlabelled_ratio", 0)  # a batch counts labelled images
    return float(steps * batch * (1 + (beside if isinstance(beside, int) else 0)))


def _error(record: Record) -> float | None:
    top1 = fraction(record.values.get("top1"))
    return None if top1 is None else 1 - top1
