"""What a comparison keeps in files, and the choices that it was made with.

`models/NAME.json` is a `ModelResult`: the same model, images and settings give the same bytes. `speed.json` is a
`SpeedResult`: what depends on the machine and its load. Accuracies and errors are fractions in [0, 1]. The JSON schemas
are `ModelResult.model_json_schema()` and `SpeedResult.model_json_schema()`.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, final

from pydantic import BaseModel, Field

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.robustness import known_corruptions
from hf_vit.results.documents import Document, ModelInput
from hf_vit.results.facts import DataFact
from hf_vit.speed.measuring import ForwardSpeed, Quartiles


@final
@dataclass(frozen=True)
class ComparisonSettings:
    """Choices of a comparison; all but those of the speed are written into every result.

    Attributes:
        corruptions: names of common corruptions; none leaves them out.
        severity: of the corruptions, 1 to 5.
        epsilons: of FGSM, in 1/255 of the pixels' range; none leaves it out.
        robustness_images: corrupt and attack so many images, drawn by `seed`; None for all.
        probe_images: train a linear probe on so many images at most, drawn by `seed`; None for all.
        batch_size: images a forward.
        seed: of every draw and of noise.
        speed_turns: turns in which every model is timed; 0 leaves speed and memory out.
        speed_batch_size: images a forward while speed and memory are measured.
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
        known_corruptions(self.corruptions)
        if not 1 <= self.severity <= 5:
            raise UserError(f"severity {self.severity} is out of range; choose 1 to 5")
        if min(self.epsilons, default=1.0) <= 0:
            raise UserError(f"epsilons {list(self.epsilons)} must be above 0 (1/255 of the pixels' range each)")
        for name in ("robustness_images", "probe_images", "batch_size", "speed_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")
        if self.speed_turns < 0:
            raise UserError(f"speed_turns {self.speed_turns} must be 0 (none) or more")

    def kept(self) -> dict[str, Any]:
        """Return what a model's result depends on."""
        names = ("corruptions", "severity", "epsilons", "robustness_images", "probe_images", "batch_size", "seed")
        return {name: list(value) if isinstance(value := getattr(self, name), tuple) else value for name in names}


@final
class Share(BaseModel):
    """A share of images, and the 95% interval around it (Wilson's, for independent images)."""

    value: float
    low: float
    high: float


@final
class JudgedModel(ModelInput):
    """A model that was measured; `judged_by` is "head" or "linear probe"."""

    judged_by: str


@final
class ComparisonInputs(BaseModel):
    """All that a result depends on."""

    model: JudgedModel
    data: DataFact
    settings: dict[str, Any]


@final
class ModelResult(Document):
    """What was measured about one model.

    Attributes:
        image_size: (H, W) px that the model is fed with.
        parameters: of the model with what answers; None of a graph.
        flops: of one image's forward pass, 2 a multiply-add, as torch counts them; None of a graph.
        top1: share of images whose most likely class is right.
        top5: share whose class is among the five most likely; None below five classes.
        loss: mean negative log-likelihood of the true class, nats; None of a probe that never saw a class.
        ece: expected calibration error, 15 bins (arXiv 1706.04599).
        clean: top-1 accuracy on the images that are corrupted and attacked.
        corruptions: corruption -> top-1 accuracy.
        fgsm: epsilon in 1/255 -> top-1 accuracy after FGSM; None where there is no gradient.
        notes: what else must be said.
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
        """Of the model."""
        return self.inputs.model.name

    @property
    def mean_corrupted(self) -> float | None:
        """Accuracy averaged over the corruptions."""
        return sum(self.corruptions.values()) / len(self.corruptions) if self.corruptions else None


@final
class Spread(BaseModel):
    """Median and quartiles over the turns."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, quartiles: Quartiles) -> Self:
        """Return a value rounded to its meaningful digits."""
        return cls(**{name: float(f"{value:.4g}") for name, value in asdict(quartiles).items()})


@final
class ModelSpeed(BaseModel):
    """One model's speed: images/s, how many times as fast as the first model (paired by turns), and memory.

    Memory is what torch holds at most in a forward pass beyond weights and input, bytes; None of a graph.
    """

    images_per_second: Spread
    times_as_fast: Spread
    peak_memory: int | None

    @classmethod
    def of(cls, speed: ForwardSpeed) -> Self:
        """Return it as files keep it."""
        images_per_second, times_as_fast = Spread.of(speed.images_per_second), Spread.of(speed.times_as_fast)
        return cls(images_per_second=images_per_second, times_as_fast=times_as_fast, peak_memory=speed.peak_memory)


@final
class SpeedResult(Document):
    """The models timed in turns in one process; `quiet` tells whether other processes kept the machine busy."""

    command: ClassVar[str] = "hf-vit compare"

    models: list[JudgedModel]
    batch_size: int
    turns: int
    threads: int
    hardware: dict[str, Any]
    others_load: float
    quiet: bool
    rows: dict[str, ModelSpeed]
