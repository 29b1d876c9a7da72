"""Several variations of every image, as the transform of a split (see `hf_vit.data.transform_split`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.data.transforms import TrainTransform


class Views:
    """n variations of every image, [n, 3, H, W], which are not mixed; all `views` prepare images in the same way."""

    mixable = False

    def __init__(self, *views: TrainTransform) -> None:
        self.views = views

    def prepare(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Return the images after the part without chance."""
        return self.views[0].prepare(images)

    def finish(self, prepared: Sequence[torch.Tensor], indices: NDArray[np.uint64]) -> list[torch.Tensor]:
        """Return all views of each image."""
        views = (view.finish(prepared, indices) for view in self.views)
        return [torch.stack(views_of_one) for views_of_one in zip(*views, strict=True)]

    def set_epoch(self, epoch: int) -> None:
        """Augment as in this epoch from now on."""
        for view in self.views:
            view.set_epoch(epoch)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        batches = [view(batch) for view in self.views]
        together = zip(*(each["pixel_values"] for each in batches), strict=True)
        return {"pixel_values": [torch.stack(views) for views in together], "label": batches[0]["label"]}
