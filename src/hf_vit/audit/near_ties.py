"""Near ties: images that other machines and batch sizes, which add up in another order, may answer otherwise."""

from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.metrics import PrecisionRecall
from hf_vit.evaluation.reading import largest

# Two classes whose logits are closer than this share of the largest may change places by rounding.
NEAR_TIE = 1e-4
# Losses, calibration errors and other protocols' fractions that differ by less are equal.
SAME = 1e-6


@final
class NearTies:
    """Those of a classifier's answers; they are asked for when first needed, and once.

    Args:
        examination: the classifier and the images that judge it.
    """

    def __init__(self, examination: Examination) -> None:
        self._examination = examination

    def count(self, place: int) -> int:
        """Images whose logits at `place`, 1 or 5, and the next one are closer than `NEAR_TIE` of the largest."""
        return int(self._answers[f"tied_{place}"].sum())

    def may_give(self, metric: str, published: float, measured: float) -> bool:
        """Whether "precision", "recall", "f1" or "ece" may be `published` elsewhere where it is `measured` here."""
        if metric == "ece":  # an image that turns moves its bin's hits by one
            return abs(published - measured) <= self.count(1) / len(self._answers["references"])
        lowest, highest = self._extremes.get(metric, (measured, measured))
        return lowest - SAME <= published <= highest + SAME

    @cached_property
    def _extremes(self) -> dict[str, tuple[float, float]]:
        """Each metric where all near ties turn that lower it, and where all do that raise it."""
        references, (first, second) = self._answers["references"], self._answers["best"].T
        tied = np.flatnonzero(self._answers["tied_1"])

        def turned(rows: NDArray[Any]) -> dict[str, float]:
            predictions = first.copy()
            predictions[rows] = second[rows]
            return PrecisionRecall().compute(references=references, predictions=predictions)

        # Images of one class that are answered alike do alike.
        kinds, which = np.unique(np.stack([references, first, second])[:, tied], axis=1, return_inverse=True)
        alone = [turned(tied[which == kind][:1]) for kind in range(kinds.shape[1])]
        extremes: dict[str, tuple[float, float]] = {}
        for metric, value in turned(tied[:0]).items():
            effects = np.array([each[metric] - value for each in alone])[which]
            extremes[metric] = (turned(tied[effects < 0])[metric], turned(tied[effects > 0])[metric])
        return extremes

    @cached_property
    def _answers(self) -> dict[str, NDArray[Any]]:
        """Of every image the true class, the two most likely [2], and whether those places and 5 and 6 are tied."""
        batches = [_of(*batch) for batch in self._examination.logits(self._examination.split)]
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _of(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, NDArray[Any]]:
    best = largest(logits, 6)
    ranked = logits.gather(1, best)
    is_tied = ranked[:, :-1] - ranked[:, 1:] <= NEAR_TIE * logits.abs().amax(dim=-1, keepdim=True)
    at = {f"tied_{place}": is_tied[:, place - 1 : place].any(dim=1).numpy() for place in (1, 5)}
    return {"references": labels.numpy(), "best": best[:, [0, min(1, best.shape[1] - 1)]].numpy(), **at}
