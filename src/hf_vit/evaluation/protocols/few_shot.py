"""Few-shot accuracy: a linear regression on frozen features of a few images a class, in closed form.

Legend: n images, D features, K classes.
Source: arXiv 2010.11929, section 4.1 (features of the frozen network onto {-1, 1}^K, solved exactly); the numbers are
those of the authors' code: features whitened one by one, a constant feature of 100, l2 = 2^10.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.curves import Line, curves
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BIAS = 100.0
L2 = 2.0**10
_STD_OFFSET = 1e-5


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
        """[n, K] of features [n, D]; the largest is the answer."""
        return _design(np.asarray(features, dtype=np.float64), self.mean, self.std) @ self.weights


def _design(rows: NDArray[np.float64], mean: NDArray[np.float64], std: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([(rows - mean) / std, np.full((len(rows), 1), BIAS)], axis=1)


@final
@dataclass(frozen=True, repr=False)
class FewShotResult(OneTableResult):
    """What `few_shot` measured.

    Attributes:
        num_images: images that judged.
        shots: labelled images a class, [S].
        accuracy: [S, trials]: share of right answers, for every number of shots and draw.
    """

    title: ClassVar[str] = "Few-shot linear regression"
    source: ClassVar[str] = "arXiv 2010.11929, section 4.1"
    num_images: int
    shots: list[int]
    accuracy: list[list[float]]

    def values(self) -> dict[str, Any]:
        return {"shots": self.shots, "accuracy": self.accuracy}

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
        line = Line("", shots, [100 * mean for mean in means], [100 * spread for spread in deviations])
        return curves([line], "labelled images a class", "accuracy (%)", log_x=True)

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
    """Accuracy of a closed-form linear regression on the pre-logits of a few labelled images a class.

    Trial t draws by seed + t; what it draws for few shots is part of what it draws for more.

    Args:
        examination: the model and the data; the model needs no head.
        shots: images a class.
        trials: draws of them.
        l2: of the ridge.
        learn_split: where they are drawn.

    Raises:
        UserError: a class has too few images, or the split is a stream.
    """
    if trials < 1 or not shots or min(shots) < 1 or l2 <= 0:
        raise UserError(f"few-shot with {trials} trials, shots {shots}, l2 {l2}; give at least 1, and an l2 above 0")
    labels = examination.labels(examination.learning_split(learn_split))
    names, sizes = examination.data.label_names, sorted(set(shots))
    draws = [draw_shots(labels, names, sizes[-1], examination.seed + trial) for trial in range(trials)]
    rows = np.unique(np.stack(draws))
    place = {row: index for index, row in enumerate(rows.tolist())}
    features, _ = examination.features(learn_split, rows.tolist())
    judged, truth = examination.features(examination.split)
    accuracy = [
        [
            _accuracy(features, [place[row] for row in drawn[:, :size].ravel()], labels[drawn[:, :size].ravel()],
                      judged, truth, len(names), l2)
            for drawn in draws
        ]
        for size in sizes
    ]  # fmt: skip
    return FewShotResult(len(truth), sizes, accuracy)


def draw_shots(labels: NDArray[np.int64], names: Sequence[str], shots: int, seed: int) -> NDArray[np.int64]:
    """Rows [K', shots] of images for every class that has any, in random order.

    Raises:
        UserError: a class has fewer images.
    """
    counts = np.bincount(labels, minlength=len(names))
    present = np.flatnonzero(counts)
    if short := [index for index in present.tolist() if counts[index] < shots]:
        fewest = min(short, key=lambda index: counts[index])
        raise UserError(
            f"class '{names[fewest]}' has {counts[fewest]} images to learn from, {shots} shots need {shots} a class; "
            f"choose at most {counts[fewest]} with --shots"
        )
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(np.flatnonzero(labels == index))[:shots] for index in present])


def _accuracy(
    features: NDArray[np.float32],
    rows: list[int],
    labels: NDArray[np.int64],
    judged: NDArray[np.float32],
    truth: NDArray[np.int64],
    num_classes: int,
    l2: float,
) -> float:
    scores = FewShotRegression.fit(features[rows], labels, num_classes, l2).scores(judged)
    return float((scores.argmax(axis=1) == truth).mean())
