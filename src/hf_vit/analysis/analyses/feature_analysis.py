"""What the analyses of feature maps share: their reader, how two maps are compared, and how numbers by depth are drawn.

Legend: B batch, C channels, D feature channels (they may differ by depth), h x w places of a map.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from hf_vit.analysis.analyses.analysis import Analysis, Arrays, Context
from hf_vit.analysis.reading.features import FeatureReader, feature_obstacle
from hf_vit.errors import UserError
from hf_vit.results.figures import integer_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FeatureAnalysis(Analysis):
    """Abstract: looks at the feature maps of all depths."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.reader = FeatureReader(context.subject.model)

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        return feature_obstacle(context.subject.model)

    def patch_px(self, pixel_values: torch.Tensor, last: torch.Tensor) -> tuple[int, int]:
        """(height, width) in px of the image area behind one place of the last map; the patch of a transformer.

        Raises:
            UserError: the image is not a whole number of them.
        """
        (height, width), (h, w) = pixel_values.shape[2:], last.shape[2:]
        if height % h or width % w:
            raise UserError(
                f"{self.name} needs images of whole patches; {height}x{width} px do not divide into {h}x{w} of them: "
                "use a processor that resizes to a multiple"
            )
        return height // h, width // w


@final
class MapComparison:
    """How well moved feature maps predict the found ones, over images and places, for every (case, depth).

    The mean of the found map over its places is taken out of both: what all places share says nothing about them.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], NDArray[np.float64]] = {}

    def add(self, case: int, depth: int, found: torch.Tensor, wanted: torch.Tensor, inside: torch.Tensor) -> None:
        """Maps [B, D, h, w]; `inside` [h, w] bool: the places that count."""
        found, wanted = found.float()[:, :, inside], wanted.float()[:, :, inside]  # [B, D, places]
        mean = found.mean(dim=2, keepdim=True)
        found, wanted = found - mean, wanted - mean
        values = [
            (found - wanted).square().sum(),
            found.square().sum(),
            F.cosine_similarity(found, wanted, dim=1).sum(),
        ]
        sums = [value.double().item() for value in values] + [float(len(found) * found.shape[2])]
        self._sums[case, depth] = self._sums.get((case, depth), np.zeros(4)) + sums

    def arrays(self, prefix: str = "") -> Arrays:
        """`error` and `cosine` [case, depth]; NaN where no place counts, or all places are found alike.

        `error` is the root of the squared difference as a share of the found map's variance over its places: 0 is
        equal, 1 as wrong as the found map's mean everywhere. `cosine` is the mean over places.
        """
        cases, depths = (max(key[axis] for key in self._sums) + 1 for axis in (0, 1))
        sums = np.array([[self._sums[case, depth] for depth in range(depths)] for case in range(cases)])
        defined = (sums[..., 1] > 0) & (sums[..., 3] > 0)
        difference, variance, cosine, places = np.where(defined[..., None], sums, np.nan).transpose(2, 0, 1)
        return {
            f"{prefix}error": np.sqrt(difference / variance).astype(np.float32),
            f"{prefix}cosine": (cosine / places).astype(np.float32),
        }


def curves(
    panels: "Mapping[str, Mapping[str, NDArray[np.float32]]]",
    xlabel: str,
    ylabel: str,
    x: "NDArray[np.float32] | None" = None,
) -> "Figure":
    """One panel a title, one line a label over `x`, by default the place in the array; undefined values leave gaps."""
    figure = new_figure(4.4 * len(panels), 3.6)
    for place, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for label, values in lines.items():
            axes.plot(np.arange(len(values)) if x is None else x, values, marker=".", label=label or None)
        if x is None:
            integer_ticks(axes.xaxis)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if any(lines):
            axes.legend(fontsize=8)
    return figure
