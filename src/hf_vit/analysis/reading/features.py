"""Features by depth: what every layer of a model makes of an image, as maps over the image.

Legend: B batch, C channels, D feature channels (they may differ by depth), h x w places of a map.
"""

import re
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from hf_vit.analysis.frame import Analysis, Arrays, Context
from hf_vit.analysis.reading.encoder import KNOWN, TokenLayout, kind_of
from hf_vit.errors import UserError
from hf_vit.subjects.layers import layer_tensor, layers_of

_RESNET_LAYERS = r"layer\d\.\d+"  # timm's and torchvision's
CONVOLUTIONAL = ("resnet", "bit", "regnet", "convnext")  # transformers' families whose layers give [B, D, h, w]


def feature_obstacle(model: nn.Module) -> str | None:
    """Why the feature maps of a model cannot be read; None if they can."""
    kind = kind_of(model)
    if kind in (*KNOWN, *CONVOLUTIONAL) or all(re.fullmatch(_RESNET_LAYERS, name) for name in layers_of(model)):
        return None
    known = ", ".join((*KNOWN, *CONVOLUTIONAL))
    return f"it reads feature maps, which it knows how to find in {known} and timm's ResNets, not in {kind}"


@final
class FeatureReader:
    """Reads the feature map [B, D, h, w] of every depth from one ordinary forward.

    Depth 0 of a vision transformer is its embeddings (a hybrid's stem included), the others are its layers, patches
    alone; of a convolutional network they are its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = TokenLayout(model) if kind_of(model) in KNOWN else None

    def maps(self, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Run the model on [B, C, H, W]: the maps of all depths, and what the model returns."""
        found: list[torch.Tensor] = []
        grid = None if self.layout is None else self.layout.grid(pixel_values)

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            if (features := layer_tensor(output)) is not None:
                found.append(features if grid is None else self._patches(features, grid))

        handles = [module.register_forward_hook(keep) for module in layers_of(self.model).values()]
        keywords = {} if self.layout is None else self.layout.keywords(pixel_values)
        try:
            output = self.model(pixel_values, **keywords)
        finally:
            for handle in handles:
                handle.remove()
        return found, output

    def _patches(self, tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        assert self.layout is not None
        return tokens[:, self.layout.patch_tokens].transpose(1, 2).unflatten(2, grid)


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
