"""How a recipe is run; only the seed changes what is learnt."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from transformers.integrations.integration_utils import (
    is_tensorboard_available,
    is_trackio_available,
    is_wandb_available,
)

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair

Precision = Literal["auto", "fp32", "bf16"]
# Where the Trainer's log can go -> whether that is installed.
_REPORTERS = {
    "none": lambda: True,
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "trackio": is_trackio_available,
}


@dataclass(frozen=True)
class FinetuneOptions:
    """How to run a recipe; only the seed changes what is learnt.

    Attributes:
        image_size: (height, width) px; None takes the recipe's, else the model's. Learned positions are resampled.
        micro_batch_size: images a forward pass; gradients are accumulated exactly up to the recipe's batch size. None
            chooses the largest divisor of it up to 128.
        precision: "bf16" computes in bfloat16 (weights stay float32); "auto" does where it pays.
        seed: of weights, order, augmentation and dropout.
        num_workers: processes that prepare images; 0 prepares them in this one.
        streaming: read the data while training; needs a recipe with `steps`, or data that tell their size.
        skip_bad_images: leave out unreadable images, and of the training images those smaller than a patch, instead of
            stopping.
        resume: go on from the last complete checkpoint in the output folder.
        keep_checkpoints: keep OUTPUT/checkpoints when the run is complete.
        image_column, label_column: of lists and tables that call them otherwise, see `load_data`.
        device: torch device; by default a GPU where there is one.
        process_timeout: seconds that a process waits for the others before the training ends with an error.
        report_to: "tensorboard" (into OUTPUT/runs), "wandb" or "trackio" gets the Trainer's log, too.
        push: repository on the Hub to share the finished model in; looked at before the training.
        private: make that repository private.
        license: of the shared model; by default that of the checkpoint it begins with.
        share_images: show pictures with images of the data in the card and share them, too.
    """

    image_size: tuple[int, int] | None = None
    micro_batch_size: int | None = None
    precision: Precision = "auto"
    seed: int = 0
    num_workers: int = 0
    streaming: bool = False
    skip_bad_images: bool = False
    resume: bool = False
    keep_checkpoints: bool = False
    image_column: str | None = None
    label_column: str | None = None
    device: str | None = None
    process_timeout: int = 1800
    report_to: str = "none"
    push: str | None = None
    private: bool = False
    license: str | None = None
    share_images: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UserError(f"micro batch size {self.micro_batch_size} must be at least 1")
        if self.process_timeout < 1:
            raise UserError(f"process timeout {self.process_timeout} must be at least 1 second")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UserError(f"precision '{self.precision}' is unknown; choose auto, fp32 or bf16")
        if self.report_to not in _REPORTERS:
            raise UserError(f"report_to '{self.report_to}' is unknown; choose {', '.join(_REPORTERS)}")
        if not _REPORTERS[self.report_to]():
            raise UserError(
                f"--report-to {self.report_to} needs the package {self.report_to}, which is not installed; "
                f"pip install {self.report_to}"
            )
        if self.image_size is not None and min(self.image_size) < 1:
            raise UserError(f"image size {self.image_size[0]}x{self.image_size[1]} px must be at least 1x1")
        if self.num_workers < 0 or self.seed < 0:
            raise UserError(f"seed ({self.seed}) and number of workers ({self.num_workers}) cannot be negative")


def chosen_options(
    options: FinetuneOptions | None, settings: Mapping[str, Any]
) -> tuple[FinetuneOptions, dict[str, Any]]:
    """Options with those among keyword arguments that bear the name of one; and the others, which are the recipe's."""
    known = {field.name for field in fields(FinetuneOptions)}
    given = {name: value for name, value in settings.items() if name in known and value is not None}
    if isinstance(given.get("image_size"), int):
        given["image_size"] = as_pair(given["image_size"])
    rest = {name: value for name, value in settings.items() if name not in known}
    return replace(options or FinetuneOptions(), **given), rest
