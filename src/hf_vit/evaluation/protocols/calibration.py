"""Calibration: whether a classifier is right as often as it is sure, before and after one temperature is fitted.

Legend: n images, K classes, M bins.
Source: arXiv 1706.04599 (reliability diagrams, expected calibration error, temperature scaling).
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent
from hf_vit.results.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15
# A temperature outside of this range means that there is nothing to fit: no mistake at all, or chance.
_TEMPERATURES = (1e-2, 1e2)


@final
class ConfidenceBins:
    """Running sums over M bins of equal width, (0, 1/M], (1/M, 2/M], ..., by the probability of the predicted class."""

    def __init__(self, num_bins: int) -> None:
        self._edges = np.linspace(0.0, 1.0, num_bins + 1)
        self.images, self.confidence, self.hits = np.zeros((3, num_bins))

    def add(self, confidences: NDArray[np.floating[Any]], hits: NDArray[np.bool_]) -> None:
        """Add a batch: probability of the predicted class [B], and whether it was the true one [B]."""
        size = len(self.images)
        bins = np.clip(np.searchsorted(self._edges, confidences, side="left") - 1, 0, size - 1)
        self.images += np.bincount(bins, minlength=size)
        self.confidence += np.bincount(bins, weights=confidences, minlength=size)
        self.hits += np.bincount(bins, weights=hits, minlength=size)

    def expected_error(self) -> float:
        """Return the mean over images of their bin's |accuracy - mean confidence| (equation 3)."""
        # |hits/n - confidence/n| * n/N: the number of images in the bin cancels.
        return float(np.abs(self.hits - self.confidence).sum() / self.images.sum())


@final
@dataclass(frozen=True)
class Reliability:
    """How sure and how right a classifier is, bin by bin of confidence, (0, 1/M], (1/M, 2/M], ..."""

    images: list[int]  # [M]
    confidence: list[float]  # [M], mean probability of the predicted class; 0 where a bin is empty
    accuracy: list[float]  # [M], likewise
    ece: float  # expected calibration error: mean of |accuracy - confidence| over images
    mce: float  # the largest gap of a bin
    loss: float  # mean negative log-likelihood, nats


@final
class ReliabilitySums:
    """Running sums of a reliability diagram; memory does not depend on the number of images."""

    def __init__(self, num_bins: int = BINS) -> None:
        self._bins, self._loss = ConfidenceBins(num_bins), 0.0

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """Add a batch of logits [B, K] and true classes [B]."""
        log_probabilities = log_softmax(logits, axis=1)
        self._bins.add(np.exp(log_probabilities.max(axis=1)), log_probabilities.argmax(axis=1) == labels)
        self._loss -= float(log_probabilities[np.arange(len(labels)), labels].sum())

    def result(self) -> Reliability:
        """Return the diagram of everything that was added."""
        bins = self._bins
        divisor = np.maximum(bins.images, 1)
        return Reliability(
            images=bins.images.astype(int).tolist(),
            confidence=(bins.confidence / divisor).tolist(),
            accuracy=(bins.hits / divisor).tolist(),
            ece=bins.expected_error(),
            mce=float((np.abs(bins.hits - bins.confidence) / divisor).max()),
            loss=self._loss / float(bins.images.sum()),
        )


@final
@dataclass(frozen=True, repr=False)
class CalibrationResult(OneTableResult):
    """What `calibration` measured; `scaled`: of logits divided by the fitted temperature, if one was asked for."""

    title: ClassVar[str] = "Calibration"
    source: ClassVar[str] = "arXiv 1706.04599"
    num_images: int
    top1: float  # which a temperature does not change
    plain: Reliability
    temperature: float | None
    scaled: Reliability | None

    def values(self) -> dict[str, Any]:
        scaled = {} if self.scaled is None else {"temperature": self.temperature, "scaled": asdict(self.scaled)}
        return asdict(self.plain) | scaled

    def headline(self) -> dict[str, float]:
        scaled = {} if self.scaled is None else {"calibration error, temperature fitted": self.scaled.ece}
        return {"calibration error": self.plain.ece, **scaled}

    def table(self) -> Table:
        rows = [
            [temperature, percent(one.ece), percent(one.mce), f"{one.loss:.4f}"]
            for temperature, one in (("1", self.plain), (f"{self.temperature or 1:.3f}", self.scaled))
            if one is not None
        ]
        return Table(["temperature", "calibration error", "largest gap of a bin", "loss (nats)"], rows)

    def draw(self) -> "Figure":
        """Draw accuracy over confidence, a panel each."""
        panels = [("as it is", self.plain)]
        if self.scaled is not None:
            panels.append((f"temperature {self.temperature:.3f}", self.scaled))
        figure = new_figure(4.6 * len(panels), 4.6)
        for place, (name, one) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1)
            width, share = 1 / len(one.accuracy), np.array(one.images) / self.num_images
            middles = (np.arange(len(one.accuracy)) + 0.5) * width
            axes.bar(middles, one.accuracy, width=width, edgecolor="white", label="accuracy")
            axes.step(np.append(middles - width / 2, 1), np.append(share, share[-1]), where="post", color="tab:orange",
                      label="share of the images")  # fmt: skip
            axes.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1, label="perfect calibration")
            axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
            axes.set_title(f"{name}: error {percent(one.ece)}", fontsize=10)
            axes.legend(fontsize=8, loc="upper left")
        return figure


def calibration(
    examination: Examination, *, temperature: bool = True, bins: int = BINS, fit_split: str = "validation"
) -> CalibrationResult:
    """Measure calibration errors before and after temperature scaling.

    The logits of `fit_split` are in memory, n x K x 8 bytes; those of the images that judge are not.
    """
    if bins < 1:
        raise UserError(f"{bins} bins; needed: at least 1")
    fitted = None
    if temperature:
        try:
            examination.learning_split(fit_split)
        except UserError as error:
            raise UserError(f"the temperature cannot be fitted: {error}; add --no-temperature") from error
        batches = list(examination.logits(fit_split, f"logits of {fit_split}"))
        fitted = fit_temperature(
            np.concatenate([logits.double().numpy() for logits, _ in batches]),
            np.concatenate([labels.numpy() for _, labels in batches]),
        )
    plain, scaled, hits, images = ReliabilitySums(bins), ReliabilitySums(bins), 0, 0
    for logits, labels in examination.logits(examination.split):
        rows, truth = logits.double().numpy(), labels.numpy()
        plain.add(rows, truth)
        if fitted is not None:
            scaled.add(rows / fitted, truth)
        hits += int((rows.argmax(axis=1) == truth).sum())
        images += len(truth)
    return CalibrationResult(images, hits / images, plain.result(), fitted, None if fitted is None else scaled.result())


def fit_temperature(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the temperature T of least negative log-likelihood of softmax(logits / T), within 0.01 to 100."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        scaled = log_softmax(logits / np.exp(log_temperature), axis=1)
        return -float(scaled[np.arange(len(labels)), labels].mean())

    bounds = tuple(np.log(_TEMPERATURES))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))
