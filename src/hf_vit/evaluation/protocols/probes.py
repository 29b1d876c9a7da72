"""Simple classifiers on frozen features: linear probes of all layers, nearest neighbors, and few-shot regression.

Legend: n images, D features, L depths, K classes, S settings.
Few-shot: arXiv 2010.11929, section 4.1, a linear regression onto {-1, 1}^K in closed form. As in the authors' code,
features are standardized, a constant feature of 100 is added, and l2 = 2^10.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import Line, SingleTableResult, Table, draw_curves, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from sklearn.pipeline import Pipeline

STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # scikit-learn's C
_MAX_ITERATIONS = 1000
TEMPERATURE = 0.07  # of the weighted vote in DINO's evaluation
BIAS, L2, _STD_OFFSET = 100.0, 2.0**10, 1e-5


@final
@dataclass(frozen=True, repr=False)
class LinearProbeResult(SingleTableResult):
    """The result of `linear_probe`.

    Attributes:
        depths: [L] names of the layers in running order; the last is "pre_logits".
        accuracy: [L].
        strengths: [L] selected values of scikit-learn's C.
        unfinished: number of regressions that stopped before they converged.
    """

    title: ClassVar[str] = "Linear probe by depth"
    source: ClassVar[str] = "logistic regression of scikit-learn on frozen features, as arXiv 1610.01644 probes layers"
    depths: list[str]
    accuracy: list[float]
    strengths: list[float]
    unfinished: int

    def headline(self) -> dict[str, float]:
        return {"linear probe accuracy": self.accuracy[-1]}

    def table(self) -> Table:
        rows = zip(self.depths, self.accuracy, self.strengths, strict=True)
        return Table(["features", "accuracy", "C"], [[name, percent(value), f"{c:g}"] for name, value, c in rows])

    def draw(self) -> "Figure":
        positions = range(len(self.depths))
        figure = draw_curves([Line("", positions, self.accuracy)], "features after", "accuracy of a linear probe (%)")
        figure.axes[0].set_xticks(positions, self.depths, rotation=60, ha="right", fontsize=7, parse_math=False)
        return figure


def linear_probe(
    examination: Examination,
    *,
    strengths: Sequence[float] = STRENGTHS,
    learn_split: str = "train",
    choose_split: str | None = "validation",
) -> LinearProbeResult:
    """Measure the accuracy of a logistic regression on the standardized features of every layer.

    Features are the class token, or the mean over tokens or pixels, and last the pre-logits. The features of all
    layers are in memory together, n x D x L x 4 bytes.
    """
    if not strengths or min(strengths) <= 0 or (choose_split is None and len(strengths) != 1):
        raise UserError(
            f"strengths={list(strengths)} cannot be used; give numbers above 0, and only one if the data has no "
            "validation split"
        )
    for split in (learn_split, choose_split):
        if split is not None:
            examination.require_fit_split(split)
    train_features, labels = examination.compute_depth_features(learn_split)
    validation_features, validation_labels = (
        (train_features, labels) if choose_split is None else examination.compute_depth_features(choose_split)
    )
    if len(np.unique(labels)) < 2:
        raise UserError(
            f"all images of split '{learn_split}' have the same class, but a probe needs two classes; add "
            "images of another class to it"
        )
    test_features, truth = examination.compute_depth_features(examination.split)
    best: list[Probe] = []
    num_unfinished = 0
    for name in train_features:
        probes = [Probe.fit(train_features[name], labels, strength) for strength in sorted(strengths)]
        num_unfinished += sum(not probe.finished for probe in probes)
        best.append(choose_best_probe(probes, validation_features[name], validation_labels))
    accuracy = [probe.score(test_features[name], truth) for name, probe in zip(train_features, best, strict=True)]
    return LinearProbeResult(
        len(truth), list(train_features), accuracy, [probe.strength for probe in best], num_unfinished
    )


@final
@dataclass(frozen=True)
class Probe:
    """A logistic regression on standardized features.

    Attributes:
        pipeline: scikit-learn's scaler and regression.
        strength: scikit-learn's C.
        finished: whether the regression converged.
    """

    pipeline: "Pipeline"
    strength: float
    finished: bool

    @classmethod
    def fit(cls, features: NDArray[np.float32], labels: NDArray[np.int64], strength: float) -> "Probe":
        """Fit a regression to features [n, D] and classes [n]."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        regression = LogisticRegression(C=strength, max_iter=_MAX_ITERATIONS)
        pipeline = make_pipeline(StandardScaler(), regression)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # recorded in `finished`
            pipeline.fit(features, labels)
        return cls(pipeline, strength, bool(np.max(regression.n_iter_) < _MAX_ITERATIONS))

    def score(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
        """Return the accuracy."""
        return float((self.pipeline.predict(features) == labels).mean())


def choose_best_probe(probes: Sequence[Probe], features: NDArray[np.float32], labels: NDArray[np.int64]) -> Probe:
    """Return the first probe with the highest accuracy."""
    return max(probes, key=lambda probe: probe.score(features, labels))


@final
@dataclass(frozen=True, repr=False)
class NeighborsResult(SingleTableResult):
    """The result of `nearest_neighbors`.

    Attributes:
        neighbors: [S] numbers of neighbors that vote.
        plain: [S] accuracy if every neighbor has one vote.
        weighted: [S] accuracy if a neighbor with cosine similarity s has exp(s / 0.07) votes.
    """

    title: ClassVar[str] = "Nearest neighbors"
    source: ClassVar[str] = "weighted vote: arXiv 2104.14294, appendix F.1"
    neighbors: list[int]
    plain: list[float]
    weighted: list[float]

    def values(self) -> dict[str, Any]:
        return {"neighbors": self.neighbors, "accuracy": self.plain, "weighted_accuracy": self.weighted}

    def headline(self) -> dict[str, float]:
        number = 20 if 20 in self.neighbors else self.neighbors[-1]
        # Must not change, because records of version 0.2 have this name.
        return {f"{number}-nearest-neighbour accuracy, weighted vote": self.weighted[self.neighbors.index(number)]}

    def table(self) -> Table:
        columns = zip(self.neighbors, self.plain, self.weighted, strict=True)
        rows = [[str(number), percent(plain), percent(weighted)] for number, plain, weighted in columns]
        return Table(["neighbors", "accuracy", "accuracy, weighted vote"], rows)

    def draw(self) -> "Figure":
        votes = (("one vote each", self.plain), ("weighted vote", self.weighted))
        return draw_curves([Line(name, self.neighbors, values) for name, values in votes], "neighbors", log_x=True)


def nearest_neighbors(
    examination: Examination, *, neighbors: Sequence[int] = (1, 5, 10, 20), learn_split: str = "train"
) -> NeighborsResult:
    """Measure the accuracy of a vote among the nearest training images, by cosine similarity of the pre-logits."""
    from sklearn.neighbors import NearestNeighbors

    sizes = sorted(set(neighbors))
    if not sizes or sizes[0] < 1:
        raise UserError(f"--neighbors {list(neighbors)} cannot be used; give numbers of at least 1")
    features, labels = examination.features(examination.require_fit_split(learn_split))
    if sizes[-1] > len(labels):
        raise UserError(f"split '{learn_split}' has only {len(labels)} images; give at most {len(labels)} --neighbors")
    test_features, truth = examination.features(examination.split)
    index = NearestNeighbors(n_neighbors=sizes[-1], metric="cosine").fit(features)
    distances, neighbor_rows = index.kneighbors(test_features)
    weights = np.exp((1 - distances) / TEMPERATURE)
    classes = labels[neighbor_rows]

    def accuracy(size: int, weights: NDArray[np.float64]) -> float:
        votes = np.zeros((len(classes), len(examination.data.label_names)))
        np.add.at(votes, (np.arange(len(classes))[:, None], classes[:, :size]), weights[:, :size])
        return float((votes.argmax(axis=1) == truth).mean())

    plain = [accuracy(size, np.ones_like(weights)) for size in sizes]
    weighted = [accuracy(size, weights) for size in sizes]
    return NeighborsResult(len(truth), sizes, plain, weighted)


def score_few_shots(
    features: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    num_classes: int,
    test_features: NDArray[np.floating[Any]],
    l2: float = L2,
) -> NDArray[np.float64]:
    """Return the scores [m, K] of m test images: a ridge regression of features [n, D] onto {-1, 1}^K, in float64."""
    from sklearn.linear_model import Ridge

    rows, test_rows = (np.asarray(values, dtype=np.float64) for values in (features, test_features))
    mean, std = rows.mean(axis=0), rows.std(axis=0) + _STD_OFFSET

    def make_design(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([(rows - mean) / std, np.full((len(rows), 1), BIAS)], axis=1)

    # In closed form with min(D + 1, n) unknowns.
    ridge: Any = Ridge(alpha=l2, fit_intercept=False, solver="cholesky")
    return ridge.fit(make_design(rows), 2.0 * np.eye(num_classes)[labels] - 1.0).predict(make_design(test_rows))


@final
@dataclass(frozen=True, repr=False)
class FewShotResult(SingleTableResult):
    """The result of `few_shot`.

    Attributes:
        shots: [S] labeled images per class.
        accuracy: [S, trials].
    """

    title: ClassVar[str] = "Few-shot linear regression"
    source: ClassVar[str] = "arXiv 2010.11929, section 4.1"
    shots: list[int]
    accuracy: list[list[float]]

    def headline(self) -> dict[str, float]:
        return {f"{shots}-shot accuracy": mean for shots, mean, _ in self._summarize()}

    def table(self) -> Table:
        """Return a row for each number of images per class."""
        has_trials = len(self.accuracy[0]) > 1
        summary = self._summarize()
        rows = [[str(shots), percent(mean), percent(std) if has_trials else "-"] for shots, mean, std in summary]
        return Table(["images per class", "accuracy", "deviation over draws"], rows)

    def draw(self) -> "Figure":
        shots, means, deviations = zip(*self._summarize(), strict=True)
        return draw_curves([Line("", shots, means, deviations)], "labeled images per class", log_x=True)

    def _summarize(self) -> list[tuple[int, float, float]]:
        """Return (shots, mean accuracy, standard deviation over trials) for every number of shots."""
        return [
            (shots, float(np.mean(accuracies)), float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0)
            for shots, accuracies in zip(self.shots, self.accuracy, strict=True)
        ]


def few_shot(
    examination: Examination,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    trials: int = 3,
    l2: float = L2,
    learn_split: str = "train",
) -> FewShotResult:
    """Measure the accuracy of a closed-form linear regression on the pre-logits of a few labeled images per class.

    Trial t draws with the seed + t; the images of fewer shots are among those of more shots.
    """
    if trials < 1 or not shots or min(shots) < 1 or l2 <= 0:
        raise UserError(
            f"--trials {trials}, --shots {list(shots)} and l2={l2} cannot be used; give at least 1 trial and 1 shot, "
            "and an l2 above 0"
        )
    labels = examination.labels(examination.require_fit_split(learn_split))
    names = examination.data.label_names
    sizes = sorted(set(shots))
    draws = [draw_shots(labels, names, sizes[-1], examination.seed + trial) for trial in range(trials)]
    rows = np.unique(np.stack(draws))
    features, _ = examination.features(learn_split, rows.tolist())
    test_features, truth = examination.features(examination.split)

    def accuracy(drawn_rows: NDArray[np.int64]) -> float:
        train_features = features[np.searchsorted(rows, drawn_rows)]
        scores = score_few_shots(train_features, labels[drawn_rows], len(names), test_features, l2)
        return float((scores.argmax(axis=1) == truth).mean())

    accuracies = [[accuracy(drawn[:, :size].ravel()) for drawn in draws] for size in sizes]
    return FewShotResult(len(truth), sizes, accuracies)


def draw_shots(labels: NDArray[np.int64], names: Sequence[str], shots: int, seed: int) -> NDArray[np.int64]:
    """Draw the rows of `shots` images for each of the K' classes with images, [K', shots]."""
    counts = np.bincount(labels, minlength=len(names))
    present = np.flatnonzero(counts)
    smallest = min(present.tolist(), key=lambda index: counts[index])
    if counts[smallest] < shots:
        raise UserError(
            f"class '{names[smallest]}' has {counts[smallest]} training images, too few for {shots} shots; "
            f"give --shots of at most {counts[smallest]}"
        )
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(np.flatnonzero(labels == index))[:shots] for index in present])
