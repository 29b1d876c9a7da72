"""What a simple classifier makes of frozen features: logistic regression by depth, and nearest neighbours.

Legend: n images, D features, L depths.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.curves import Line, curves, named_curve
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from sklearn.pipeline import Pipeline

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
_MAX_ITERATIONS = 1000
# Temperature of the weighted vote in DINO's evaluation.
TEMPERATURE = 0.07


@final
@dataclass(frozen=True, repr=False)
class LinearProbeResult(OneTableResult):
    """What `linear_probe` measured.

    Attributes:
        num_images: images that judged.
        depths: names of the layers [L], in the order they run; the last is "pre_logits".
        accuracy: [L], share of right answers.
        strengths: [L], scikit-learn's C that was chosen.
        unfinished: regressions that stopped after 1,000 steps before they had converged.
    """

    title: ClassVar[str] = "Linear probe by depth"
    source: ClassVar[str] = "logistic regression of scikit-learn on frozen features, as arXiv 1610.01644 probes layers"
    num_images: int
    depths: list[str]
    accuracy: list[float]
    strengths: list[float]
    unfinished: int

    def values(self) -> dict[str, Any]:
        return {
            "depths": self.depths,
            "accuracy": self.accuracy,
            "strengths": self.strengths,
            "unfinished": self.unfinished,
        }

    def headline(self) -> dict[str, float]:
        return {"linear probe accuracy": self.accuracy[-1]}

    def table(self) -> Table:
        found = zip(self.depths, self.accuracy, self.strengths, strict=True)
        return Table(["features", "accuracy", "C"], [[name, percent(value), f"{c:g}"] for name, value, c in found])

    def draw(self) -> "Figure":
        line = Line("", range(len(self.depths)), [100 * value for value in self.accuracy])
        return named_curve(self.depths, [line], "features after", "accuracy of a linear probe (%)")


def linear_probe(
    examination: Examination,
    *,
    strengths: Sequence[float] = STRENGTHS,
    learn_split: str = "train",
    choose_split: str | None = "validation",
) -> LinearProbeResult:
    """Accuracy of a logistic regression on the features of every depth, standardised.

    Features are the class token, without one the mean over tokens or pixels; the last are the pre-logits. Those of all
    depths are in memory at once, n x D x L x 4 bytes.

    Args:
        examination: the model and the data; the model needs no head.
        strengths: scikit-learn's C, of which `choose_split` chooses at every depth; of equals the smallest.
        learn_split: what the regression learns from.
        choose_split: None takes the only one of `strengths`.

    Raises:
        UserError: a split is missing or judges as well, or there is no strength to choose.
    """
    if not strengths or min(strengths) <= 0 or (choose_split is None and len(strengths) != 1):
        raise UserError(f"strengths {list(strengths)}: give positive numbers, and one alone where no split chooses")
    used = [examination.learning_split(name) for name in (learn_split, choose_split) if name is not None]
    (learned, labels), *chosen = (examination.depth_features(name) for name in used)
    if len(np.unique(labels)) < 2:
        raise UserError(f"split '{learn_split}' has images of one class only; a probe needs at least two")
    judged, truth = examination.depth_features(examination.split)
    found: list[tuple[float, float, int]] = []
    for name in learned:
        probes = [Probe.fit(learned[name], labels, strength) for strength in sorted(strengths)]
        best = max(probes, key=lambda probe: probe.score(chosen[0][0][name], chosen[0][1])) if chosen else probes[0]
        unfinished = sum(not probe.finished for probe in probes)
        found.append((best.score(judged[name], truth), best.strength, unfinished))
    accuracy, chosen_strengths, unfinished = zip(*found, strict=True)
    return LinearProbeResult(len(truth), list(learned), list(accuracy), list(chosen_strengths), sum(unfinished))


@final
@dataclass(frozen=True)
class Probe:
    """A logistic regression on standardised features.

    Attributes:
        pipeline: scikit-learn's scaler and regression.
        strength: its C.
        finished: whether it converged.
    """

    pipeline: "Pipeline"
    strength: float
    finished: bool

    @classmethod
    def fit(cls, features: NDArray[np.float32], labels: NDArray[np.int64], strength: float) -> "Probe":
        """Learn from features [n, D] and classes [n]."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        regression = LogisticRegression(C=strength, max_iter=_MAX_ITERATIONS)
        pipeline = make_pipeline(StandardScaler(), regression)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # counted, and told
            pipeline.fit(features, labels)
        return cls(pipeline, strength, bool(np.max(regression.n_iter_) < _MAX_ITERATIONS))

    def score(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Share of right answers."""
        return float((self.pipeline.predict(features) == labels).mean())


@final
@dataclass(frozen=True, repr=False)
class NeighborsResult(OneTableResult):
    """What `nearest_neighbors` measured.

    Attributes:
        num_images: images that judged.
        neighbors: numbers of neighbours that vote, [S].
        plain: [S], accuracy where every neighbour has one vote.
        weighted: [S], accuracy where a neighbour of cosine similarity s has exp(s / 0.07) votes.
    """

    title: ClassVar[str] = "Nearest neighbours"
    source: ClassVar[str] = "weighted vote: arXiv 2104.14294, appendix F.1"
    num_images: int
    neighbors: list[int]
    plain: list[float]
    weighted: list[float]

    def values(self) -> dict[str, Any]:
        return {"neighbors": self.neighbors, "accuracy": self.plain, "weighted_accuracy": self.weighted}

    def headline(self) -> dict[str, float]:
        number = 20 if 20 in self.neighbors else self.neighbors[-1]
        return {f"{number}-nearest-neighbour accuracy, weighted vote": self.weighted[self.neighbors.index(number)]}

    def table(self) -> Table:
        found = zip(self.neighbors, self.plain, self.weighted, strict=True)
        return Table(
            ["neighbours", "accuracy", "accuracy, weighted vote"],
            [[str(number), percent(plain), percent(weighted)] for number, plain, weighted in found],
        )

    def draw(self) -> "Figure":
        lines = [
            Line(name, self.neighbors, [100 * value for value in values])
            for name, values in (("one vote each", self.plain), ("weighted vote", self.weighted))
        ]
        return curves(lines, "neighbours", "accuracy (%)", log_x=True)


def nearest_neighbors(
    examination: Examination, *, neighbors: Sequence[int] = (1, 5, 10, 20), learn_split: str = "train"
) -> NeighborsResult:
    """Accuracy of the vote of the nearest training images, by cosine of the pre-logits.

    Args:
        examination: the model and the data; the model needs no head.
        neighbors: how many vote.
        learn_split: the images that vote.

    Raises:
        UserError: there are fewer images than neighbours, or the split judges as well.
    """
    from sklearn.neighbors import NearestNeighbors

    sizes = sorted(set(neighbors))
    if not sizes or sizes[0] < 1:
        raise UserError(f"neighbors {list(neighbors)} must be at least 1")
    features, labels = examination.features(examination.learning_split(learn_split))
    if sizes[-1] > len(labels):
        raise UserError(f"{sizes[-1]} neighbours are asked for, split '{learn_split}' has {len(labels)} images")
    judged, truth = examination.features(examination.split)
    nearest = NearestNeighbors(n_neighbors=sizes[-1], metric="cosine").fit(features)
    distances, places = nearest.kneighbors(judged)
    similarity, classes = 1 - distances, labels[places]
    accuracy: list[list[float]] = [[], []]
    for size in sizes:
        weights = np.exp(similarity[:, :size] / TEMPERATURE)
        for found, one in zip(accuracy, (np.ones_like(weights), weights), strict=True):
            found.append(float((_elected(classes[:, :size], one, len(examination.data.label_names)) == truth).mean()))
    return NeighborsResult(len(truth), sizes, *accuracy)


def _elected(classes: NDArray[np.int64], weights: NDArray[np.float64], num_classes: int) -> NDArray[np.int64]:
    """The class with the most votes [n], of equals the first; classes and weights [n, neighbours]."""
    votes = np.zeros((len(classes), num_classes))
    np.add.at(votes, (np.arange(len(classes))[:, None], classes), weights)
    return votes.argmax(axis=1)
