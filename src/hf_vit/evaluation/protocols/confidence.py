"""Bins of confidence: how sure and how right a classifier is (arXiv 1706.04599, section 2)."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
class ConfidenceBins:
    """Running sums over M bins of equal width, (0, 1/M], (1/M, 2/M], ..., by the probability of the predicted class.

    Attributes:
        images: [M].
        confidence: [M], sums of the images' confidences.
        hits: [M], images that were classified right.
    """

    def __init__(self, num_bins: int) -> None:
        self._edges = np.linspace(0.0, 1.0, num_bins + 1)
        self.images, self.confidence, self.hits = np.zeros((3, num_bins))

    def add(self, confidences: NDArray[np.floating[Any]], hits: NDArray[np.bool_]) -> None:
        """A batch: probability of the predicted class [B], and whether it was the true one [B]."""
        size = len(self.images)
        bins = np.clip(np.searchsorted(self._edges, confidences, side="left") - 1, 0, size - 1)
        self.images += np.bincount(bins, minlength=size)
        self.confidence += np.bincount(bins, weights=confidences, minlength=size)
        self.hits += np.bincount(bins, weights=hits, minlength=size)

    def expected_error(self) -> float:
        """Mean over images of their bin's |accuracy - mean confidence| (equation 3)."""
        # |hits/n - confidence/n| * n/N: the number of images in the bin cancels.
        return float(np.abs(self.hits - self.confidence).sum() / self.images.sum())
