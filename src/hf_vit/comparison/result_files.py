"""The settings of a comparison and the files of its results.

`models/NAME.json` is a `ModelResult`: the same model, images and settings give the same bytes. `speed.json` is a
`SpeedResult`, which depends on the machine and its load. Accuracies and errors are fractions in [0, 1]. The JSON
schemas are `ModelResult.model_json_schema()` and `SpeedResult.model_json_schema()`.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast, final

from pydantic import BaseModel, Field

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.robustness import list_corruptions
from hf_vit.results.documents import Document, ModelInput
from hf_vit.results.facts import DataFact, redact_json
from hf_vit.speed.measuring import ForwardSpeed


@final
@dataclass(frozen=True)
class ComparisonSettings:
    """The settings of a comparison; all but those of the speed are stored in every result.

    Attributes:
        corruptions: names of common corruptions; an empty tuple omits them.
        severity: severity of the corruptions, 1 to 5.
        epsilons: step sizes of FGSM, in 1/255 of the range of pixels; an empty tuple omits it.
        robustness_images: number of images to corrupt and attack, drawn by `seed`; None is all.
        probe_images: largest number of images to fit a linear probe on, drawn by `seed`; None is all.
        batch_size: images per forward pass.
        seed: seed of draws and noise.
        speed_turns: number of times that every model is timed; 0 omits speed and memory.
        speed_batch_size: images per forward pass while speed and memory are measured.
    """

    corruptions: tuple[str, ...] = ("gaussian_noise", "defocus_blur", "contrast", "jpeg_compression")
    severity: int = 3
    epsilons: tuple[float, ...] = (1.0, 4.0)
    robustness_images: int | None = 500
    probe_images: int | None = 10_000
    batch_size: int = 32
    seed: int = 0
    speed_turns: int = 10
    speed_batch_size: int = 8

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        list_corruptions(self.corruptions)
        if not 1 <= self.severity <= 5:
            raise UserError(f"the severity {self.severity} is out of range; choose 1 to 5")
        if min(self.epsilons, default=1.0) <= 0:
            raise UserError(
                f"the epsilons {list(self.epsilons)} are not all above 0; give the sizes of FGSM's steps in units of "
                "1/255, such as 1 and 4"
            )
        for name in ("robustness_images", "probe_images", "batch_size", "speed_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, but at least 1 is needed; choose a positive number")
        if self.speed_turns < 0:
            raise UserError(
                f"speed_turns is {self.speed_turns}, but it cannot be negative; choose a number of turns, or 0 to omit "
                "the speed"
            )

    def kept(self) -> dict[str, Any]:
        """Return the settings on which the result of a model depends."""
        values = {name: value for name, value in asdict(self).items() if not name.startswith("speed_")}
        return cast(dict[str, Any], redact_json(values))


@final
class Share(BaseModel):
    """A share of images with its 95% interval (Wilson's, which assumes independent images)."""

    value: float
    low: float
    high: float


@final
class JudgedModel(ModelInput):
    """A measured model; `judged_by` names its classifier, "head" or "linear probe"."""

    judged_by: str


@final
class ComparisonInputs(BaseModel):
    """Everything on which a result depends."""

    model: JudgedModel
    data: DataFact
    settings: dict[str, Any]


@final
class ModelResult(Document):
    """The measurements of one model.

    Attributes:
        image_size: (H, W) px of the model's input.
        parameters: number of parameters, with those of a probe; None for a graph.
        flops: FLOPs of the forward pass of one image as torch counts them, 2 per multiply-add; None for a graph.
        top1: share of images whose most likely class is right.
        top5: share of images whose class is among the five most likely; None for fewer than five classes.
        loss: mean negative log-likelihood of the true class in nats; None if a probe had no training image of a class.
        ece: expected calibration error with 15 bins (arXiv 1706.04599).
        clean: top-1 accuracy on the images that are then corrupted and attacked.
        corruptions: corruption -> top-1 accuracy.
        fgsm: epsilon in 1/255 -> top-1 accuracy after FGSM; None for a model without gradient.
        notes: remarks about the measurement.
    """

    command: ClassVar[str] = "hf-vit compare"

    inputs: ComparisonInputs
    image_size: tuple[int, int]
    parameters: int | None
    flops: int | None
    top1: Share
    top5: Share | None
    loss: float | None
    ece: float
    clean: float | None
    corruptions: dict[str, float]
    fgsm: dict[str, float] | None
    notes: list[str] = Field(default_factory=list[str])

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.inputs.model.name

    @property
    def mean_corrupted(self) -> float | None:
        """The accuracy averaged over the corruptions; None without corruptions."""
        return sum(self.corruptions.values()) / len(self.corruptions) if self.corruptions else None


@final
class SpeedResult(Document):
    """The speed of models that were timed in turns in one process.

    Speeds are rounded to four digits, which is finer than their noise. `others_load` is the number of cores that other
    processes used; `quiet` is True if they hardly used any.
    """

    command: ClassVar[str] = "hf-vit compare"

    models: list[JudgedModel]
    batch_size: int
    turns: int
    threads: int
    hardware: dict[str, Any]
    others_load: float
    quiet: bool
    rows: dict[str, ForwardSpeed]
