"""What a simple classifier makes of frozen features: by depth, by nearest neighbors, and of a few images a class.

Legend: n images, D features, L depths, K classes, S settings.
Few-shot: arXiv 2010.11929, section 4.1 (a linear regression onto {-1, 1}^K, solved exactly); the numbers are those of
the authors' code: features whitened one by one, a constant feature of 100, l2 = 2^10.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Line, OneTableResult, Table, curves, named_curve, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from sklearn.pipeline import Pipeline

STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # scikit-learn's C
_MAX_ITERATIONS = 1000
TEMPERATURE = 0.07  # of the weighted vote in DINO's evaluation
BIAS, L2, _STD_OFFSET = 100.0, 2.0**10, 1e-5


@final
@dataclass(frozen=True, repr=False)
class LinearProbeResult(OneTableResult):
    """What `linear_probe` measured of every depth; `unfinished` regressions stopped before they had converged."""

    title: ClassVar[str] = "Linear probe by depth"
    source: ClassVar[str] = "logistic regression of scikit-learn on frozen features, as arXiv 1610.01644 probes layers"
    num_images: int
    depths: list[str]  # names of the layers [L], in the order they run; the last is "pre_logits"
    accuracy: list[float]  # [L]
    strengths: list[float]  # [L], scikit-learn's C that was chosen
    unfinished: int

    def headline(self) -> dict[str, float]:
        return {"linear probe accuracy": self.accuracy[-1]}

    def table(self) -> Table:
        found = zip(self.depths, self.accuracy, self.strengths, strict=True)
        return Table(["features", "accuracy", "C"], [[name, percent(value), f"{c:g}"] for name, value, c in found])

    def draw(self) -> "Figure":
        return named_curve(self.depths, self.accuracy, "features after", "accuracy of a linear probe (%)")


def linear_probe(
    examination: Examination,
    *,
    strengths: Sequence[float] = STRENGTHS,
    learn_split: str = "train",
    choose_split: str | None = "validation",
) -> LinearProbeResult:
    """Measure the accuracy of a logistic regression on the features of every depth, standardized.

    Features are the class token, without one the mean over tokens or pixels; the last are the pre-logits. Those of all
    depths are in memory at once, n x D x L x 4 bytes.
    """
    if not strengths or min(strengths) <= 0 or (choose_split is None and len(strengths) != 1):
        raise UserError(
            f"strengths {list(strengths)}: give positive numbers, and only one where there is no split to select on"
        )
    used = [examination.learning_split(name) for name in (learn_split, choose_split) if name is not None]
    (learned, labels), *chosen = (examination.depth_features(name) for name in used)
    if len(np.unique(labels)) < 2:
        raise UserError(f"split '{learn_split}' has images of one class only; a probe needs at least two")
    judged, truth = examination.depth_features(examination.split)
    best: list[Probe] = []
    unfinished = 0
    for name in learned:
        probes = [Probe.fit(learned[name], labels, strength) for strength in sorted(strengths)]
        best.append(best_probe(probes, chosen[0][0][name], chosen[0][1]) if chosen else probes[0])
        unfinished += sum(not probe.finished for probe in probes)
    accuracy = [probe.score(judged[name], truth) for name, probe in zip(learned, best, strict=True)]
    return LinearProbeResult(len(truth), list(learned), accuracy, [probe.strength for probe in best], unfinished)


@final
@dataclass(frozen=True)
class Probe:
    """A logistic regression on standardized features."""

    pipeline: "Pipeline"  # scikit-learn's scaler and regression
    strength: float  # its C
    finished: bool  # whether it converged

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
        """Return the share of right answers."""
        return float((self.pipeline.predict(features) == labels).mean())


def best_probe(probes: Sequence[Probe], features: NDArray[np.float32], labels: NDArray[np.int64]) -> Probe:
    """Return the probe with the most right answers, of equals the first."""
    return max(probes, key=lambda probe: probe.score(features, labels))


@final
@dataclass(frozen=True, repr=False)
class NeighborsResult(OneTableResult):
    """What `nearest_neighbors` measured."""

    title: ClassVar[str] = "Nearest neighbours"
    source: ClassVar[str] = "weighted vote: arXiv 2104.14294, appendix F.1"
    num_images: int
    neighbors: list[int]  # that vote, [S]
    plain: list[float]  # [S], accuracy where every neighbor has one vote
    weighted: list[float]  # [S], accuracy where a neighbor of cosine similarity s has exp(s / 0.07) votes

    def values(self) -> dict[str, Any]:
        return {"neighbors": self.neighbors, "accuracy": self.plain, "weighted_accuracy": self.weighted}

    def headline(self) -> dict[str, float]:
        number = 20 if 20 in self.neighbors else self.neighbors[-1]
        # The name under which records of 0.2 are found again.
        return {f"{number}-nearest-neighbour accuracy, weighted vote": self.weighted[self.neighbors.index(number)]}

    def table(self) -> Table:
        found = zip(self.neighbors, self.plain, self.weighted, strict=True)
        rows = [[str(number), percent(plain), percent(weighted)] for number, plain, weighted in found]
        return Table(["neighbours", "accuracy", "accuracy, weighted vote"], rows)

    def draw(self) -> "Figure":
        votes = (("one vote each", self.plain), ("weighted vote", self.weighted))
        return curves([Line(name, self.neighbors, values) for name, values in votes], "neighbours", log_x=True)


def nearest_neighbors(
    examination: Examination, *, neighbors: Sequence[int] = (1, 5, 10, 20), learn_split: str = "train"
) -> NeighborsResult:
    """Measure the accuracy of the vote of the nearest training images, by cosine of the pre-logits."""
    from sklearn.neighbors import NearestNeighbors

    sizes = sorted(set(neighbors))
    if not sizes or sizes[0] < 1:
        raise UserError(f"neighbors {list(neighbors)} must be at least 1")
    features, labels = examination.features(examination.learning_split(learn_split))
    if sizes[-1] > len(labels):
        raise UserError(f"{sizes[-1]} neighbors requested, but split '{learn_split}' has {len(labels)} images")
    judged, truth = examination.features(examination.split)
    nearest = NearestNeighbors(n_neighbors=sizes[-1], metric="cosine").fit(features)
    distances, places = nearest.kneighbors(judged)
    weights, classes = np.exp((1 - distances) / TEMPERATURE), labels[places]

    def accuracy(size: int, weights: NDArray[np.float64]) -> float:
        votes = np.zeros((len(classes), len(examination.data.label_names)))
        np.add.at(votes, (np.arange(len(classes))[:, None], classes[:, :size]), weights[:, :size])
        return float((votes.argmax(axis=1) == truth).mean())

    plain, weighted = ([accuracy(size, each) for size in sizes] for each in (np.ones_like(weights), weights))
    return NeighborsResult(len(truth), sizes, plain, weighted)


@final
@dataclass(frozen=True)
class FewShotRegression:
    """Whitening and weights [D + 1, K] of a ridge regression onto {-1, 1}^K."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def fit(
        cls, features: NDArray[np.floating[Any]], labels: NDArray[np.int64], num_classes: int, l2: float = L2
    ) -> "FewShotRegression":
        """Solve for features [n, D] and labels [n]: in the smaller of D + 1 and n unknowns, in float64."""
        from scipy.linalg import solve

        rows = np.asarray(features, dtype=np.float64)
        mean, std = rows.mean(axis=0), rows.std(axis=0) + _STD_OFFSET
        design = _design(rows, mean, std)
        targets = 2.0 * np.eye(num_classes)[labels] - 1.0
        samples, size = design.shape
        if samples >= size:
            weights = solve(design.T @ design + l2 * np.eye(size), design.T @ targets, assume_a="pos")
        else:
            weights = design.T @ solve(design @ design.T + l2 * np.eye(samples), targets, assume_a="pos")
        return cls(mean, std, weights)

    def scores(self, features: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return [n, K] of features [n, D]; the largest is the answer."""
        return _design(np.asarray(features, dtype=np.float64), self.mean, self.std) @ self.weights


def _design(rows: NDArray[np.float64], mean: NDArray[np.float64], std: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([(rows - mean) / std, np.full((len(rows), 1), BIAS)], axis=1)


@final
@dataclass(frozen=True, repr=False)
class FewShotResult(OneTableResult):
    """What `few_shot` measured."""

    title: ClassVar[str] = "Few-shot linear regression"
    source: ClassVar[str] = "arXiv 2010.11929, section 4.1"
    num_images: int
    shots: list[int]  # labeled images a class, [S]
    accuracy: list[list[float]]  # [S, trials], for every number of shots and draw

    def headline(self) -> dict[str, float]:
        return {f"{shots}-shot accuracy": mean for shots, mean, _ in self._spread()}

    def table(self) -> Table:
        several = len(self.accuracy[0]) > 1
        rows = [
            [str(shots), percent(mean), percent(spread) if several else "-"] for shots, mean, spread in self._spread()
        ]
        return Table(["images a class", "accuracy", "deviation over draws"], rows)

    def draw(self) -> "Figure":
        shots, means, deviations = zip(*self._spread(), strict=True)
        return curves([Line("", shots, means, deviations)], "labelled images a class", log_x=True)

    def _spread(self) -> list[tuple[int, float, float]]:
        return [
            (shots, float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else 0.0)
            for shots, found in zip(self.shots, self.accuracy, strict=True)
        ]


def few_shot(
    examination: Examination,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    trials: int = 3,
    l2: float = L2,
    learn_split: str = "train",
) -> FewShotResult:
    """Measure the accuracy of a closed-form linear regression on the pre-logits of a few labeled images a class.

    Trial t draws by seed + t; what it draws for few shots is part of what it draws for more.
    """
    if trials < 1 or not shots or min(shots) < 1 or l2 <= 0:
        raise UserError(f"few-shot with {trials} trials, shots {shots}, l2 {l2}; give at least 1, and an l2 above 0")
    labels = examination.labels(examination.learning_split(learn_split))
    names, sizes = examination.data.label_names, sorted(set(shots))
    draws = [draw_shots(labels, names, sizes[-1], examination.seed + trial) for trial in range(trials)]
    rows = np.unique(np.stack(draws))
    features, _ = examination.features(learn_split, rows.tolist())
    judged, truth = examination.features(examination.split)

    def accuracy(drawn: NDArray[np.int64]) -> float:
        learned = features[np.searchsorted(rows, drawn)]
        scores = FewShotRegression.fit(learned, labels[drawn], len(names), l2).scores(judged)
        return float((scores.argmax(axis=1) == truth).mean())

    return FewShotResult(len(truth), sizes, [[accuracy(each[:, :size].ravel()) for each in draws] for size in sizes])


def draw_shots(labels: NDArray[np.int64], names: Sequence[str], shots: int, seed: int) -> NDArray[np.int64]:
    """Draw rows [K', shots] of images for every class that has any, in random order."""
    counts = np.bincount(labels, minlength=len(names))
    present = np.flatnonzero(counts)
    fewest = min(present.tolist(), key=lambda index: counts[index])
    if counts[fewest] < shots:
        raise UserError(
            f"class '{names[fewest]}' has {counts[fewest]} images to learn from, {shots} shots need {shots} a class; "
            f"choose at most {counts[fewest]} with --shots"
        )
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(np.flatnonzero(labels == index))[:shots] for index in present])
