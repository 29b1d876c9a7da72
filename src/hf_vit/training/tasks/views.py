"""Several variations of every image, as the transform of a split (see `hf_vit.data.transform_split`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.data.transforms import TrainTransform


class Views:
    """n variations of every image, [n, 3, H, W], which one collator does not mix.

    Args:
        views: they prepare images in the same way.
    """

    mixable = False

    def __init__(self, *views: TrainTransform) -> None:
        self.views = views

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """The part without chance."""
        return self.views[0].prepare(images)

    def finish(self, prepared: Sequence[torch.Tensor], indices: NDArray[np.uint64]) -> list[torch.Tensor]:
        """All views of each image."""
        return [
            torch.stack(made) for made in zip(*(view.finish(prepared, indices) for view in self.views), strict=True)
        ]

    def set_epoch(self, epoch: int) -> None:
        """From now on vary as in this epoch."""
        for view in self.views:
            view.set_epoch(epoch)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        made = [view(batch) for view in self.views]
        together = zip(*(view["pixel_values"] for view in made), strict=True)
        return {"pixel_values": [torch.stack(views) for views in together], "label": made[0]["label"]}
