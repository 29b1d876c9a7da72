"""Calibration: compare a classifier's confidence with its accuracy, before and after temperature scaling.

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
from hf_vit.evaluation.protocols.frame import SingleTableResult, Table, percent
from hf_vit.results.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 15
# A temperature outside of this range cannot be fitted, because there are no mistakes or all predictions are random.
_TEMPERATURES = (1e-2, 1e2)


@final
@dataclass(frozen=True)
class Reliability:
    """A reliability diagram over M bins of confidence, (0, 1/M], (1/M, 2/M], ...

    Attributes:
        images: [M] number of images.
        confidence: [M] mean probability of the predicted class; 0 for an empty bin.
        accuracy: [M] accuracy; 0 for an empty bin.
        ece: expected calibration error, the mean of |accuracy - confidence| over images.
        mce: maximum calibration error, the largest |accuracy - confidence| of a bin.
        loss: mean negative log-likelihood, nats.
    """

    images: list[int]
    confidence: list[float]
    accuracy: list[float]
    ece: float
    mce: float
    loss: float


@final
class ReliabilitySums:
    """Running sums over M bins of equal width, (0, 1/M], (1/M, 2/M], ..., by the probability of the predicted class.

    Their memory does not depend on the number of images.
    """

    def __init__(self, num_bins: int = BINS) -> None:
        self._edges = np.linspace(0.0, 1.0, num_bins + 1)
        self.images, self.confidence, self.hits = np.zeros((3, num_bins))
        self.loss = 0.0  # the sum over all images

    def add(self, logits: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """Add a batch of logits [B, K] and true classes [B]."""
        log_probabilities = log_softmax(logits, axis=1)
        is_hit = log_probabilities.argmax(axis=1) == labels
        losses = -log_probabilities[np.arange(len(labels)), labels]
        self.add_confidences(np.exp(log_probabilities.max(axis=1)), is_hit, losses)

    def add_confidences(
        self, confidences: NDArray[np.floating[Any]], hits: NDArray[np.bool_], losses: NDArray[np.floating[Any]]
    ) -> None:
        """Add B images: the probability of the predicted class, whether it is correct, and the loss, [B] each."""
        size = len(self.images)
        bins = np.clip(np.searchsorted(self._edges, confidences, side="left") - 1, 0, size - 1)
        self.images += np.bincount(bins, minlength=size)
        self.confidence += np.bincount(bins, weights=confidences, minlength=size)
        self.hits += np.bincount(bins, weights=hits, minlength=size)
        self.loss += float(losses.sum(dtype=np.float64))

    def result(self) -> Reliability:
        """Return the diagram of all images that were added."""
        divisor = np.maximum(self.images, 1)
        gaps = np.abs(self.hits - self.confidence)  # times the images of the bin
        return Reliability(
            images=self.images.astype(int).tolist(),
            confidence=(self.confidence / divisor).tolist(),
            accuracy=(self.hits / divisor).tolist(),
            ece=float(gaps.sum() / self.images.sum()),  # equation 3
            mce=float((gaps / divisor).max()),
            loss=self.loss / float(self.images.sum()),
        )


@final
@dataclass(frozen=True, repr=False)
class CalibrationResult(SingleTableResult):
    """The result of `calibration`; `scaled` is the diagram of logits divided by the fitted temperature, or None."""

    title: ClassVar[str] = "Calibration"
    source: ClassVar[str] = "arXiv 1706.04599"
    top1: float  # not changed by a temperature
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
        scaled_by = f"{self.temperature or 1:.3f}"
        if (self.temperature or 1) < 1.001 * _TEMPERATURES[0]:
            scaled_by += " (the lowest: the fit has no mistakes)"
        rows = [
            [temperature, percent(diagram.ece), percent(diagram.mce), f"{diagram.loss:.4f}"]
            for temperature, diagram in (("1", self.plain), (scaled_by, self.scaled))
            if diagram is not None
        ]
        return Table(["temperature", "calibration error", "largest gap of a bin", "loss (nats)"], rows)

    def draw(self) -> "Figure":
        """Draw accuracy over confidence, in one panel without and one with temperature."""
        panels = [("no temperature", self.plain)]
        if self.scaled is not None:
            panels.append((f"temperature {self.temperature:.3f}", self.scaled))
        figure = make_figure(4.6 * len(panels), 4.6)
        for index, (name, diagram) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1)
            width = 1 / len(diagram.accuracy)
            share = np.array(diagram.images) / self.num_images
            centers = (np.arange(len(diagram.accuracy)) + 0.5) * width
            axes.bar(centers, diagram.accuracy, width=width, edgecolor="white", label="accuracy")
            axes.step(np.append(centers - width / 2, 1), np.append(share, share[-1]), where="post", color="tab:orange",
                      label="share of the images")  # fmt: skip
            axes.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1, label="perfect calibration")
            axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
            axes.set_title(f"{name}: error {percent(diagram.ece)}", fontsize=10)
            axes.legend(fontsize=8, loc="upper left")
        return figure


def calibration(
    examination: Examination, *, temperature: bool = True, bins: int = BINS, fit_split: str = "validation"
) -> CalibrationResult:
    """Measure calibration errors before and after temperature scaling.

    Only the logits of `fit_split` are in memory, n x K x 8 bytes.
    """
    if bins < 1:
        raise UserError(f"bins={bins} is too small; give at least 1 bin")
    fitted = None
    if temperature:
        try:
            examination.require_fit_split(fit_split)
        except UserError as error:
            raise UserError(f"the temperature cannot be fitted: {error}; or add --no-temperature") from error
        batches = list(examination.iterate_logits(fit_split, f"logits of {fit_split}"))
        fit_logits = np.concatenate([logits.double().numpy() for logits, _ in batches])
        fitted = fit_temperature(fit_logits, np.concatenate([labels.numpy() for _, labels in batches]))
    plain, scaled = ReliabilitySums(bins), ReliabilitySums(bins)
    for logits, labels in examination.iterate_logits(examination.split):
        rows, truth = logits.double().numpy(), labels.numpy()
        plain.add(rows, truth)
        if fitted is not None:
            scaled.add(rows / fitted, truth)
    images = plain.images.sum()
    scaled_result = None if fitted is None else scaled.result()
    return CalibrationResult(int(images), float(plain.hits.sum() / images), plain.result(), fitted, scaled_result)


def fit_temperature(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the temperature T in 0.01..100 with the lowest negative log-likelihood of softmax(logits / T)."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        log_probabilities = log_softmax(logits / np.exp(log_temperature), axis=1)
        return -float(log_probabilities[np.arange(len(labels)), labels].mean())

    bounds = tuple(np.log(_TEMPERATURES))
    solution = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return float(np.exp(solution.x))
