"""A model that other processes hold: opened by its name, and asked about a table by Ray."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import torch

from hf_vit.data.fingerprints import digest_of, refuse_changed
from hf_vit.evaluation.protocols.top1_figures import thumbnail_of
from hf_vit.evaluation.reading import image_batches
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import optimize
from hf_vit.loading.pixels import at_own_size

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import nn

    from hf_vit.evaluation.ray_runner import RayRunner

    Answer = tuple[Any, torch.Tensor, list[Image]]

_BATCHES = 8  # of a part


@dataclass(frozen=True)
class NamedModel:
    """How any process opens a model as it is used here.

    Attributes:
        model: see `load_model`.
        max_num_patches: of images in their own size and shape (`at_own_size`); None for one size.
        engine: that computes it; None: as it is loaded.
    """

    model: str
    max_num_patches: int | None = None
    engine: str | None = None

    def opened(self, device: str | None) -> LoadedModel:
        """The model on a device."""
        subject = load_model(self.model, device)
        if self.max_num_patches is not None:
            subject = at_own_size(subject, self.max_num_patches)
        if self.engine is not None:
            optimize(subject, self.engine)
        return subject


@dataclass(frozen=True)
class RemoteModel:
    """A model that actors of Ray hold."""

    runner: "RayRunner"
    model: NamedModel

    def answers(
        self,
        ask: "Callable[[nn.Module, Any], Any]",
        table: "Dataset",
        collate: Callable[[Any], Any],
        batch_size: int,
        subject: LoadedModel,
        digests: "NDArray[np.uint64] | None",
    ) -> "Iterator[Answer]":
        """(what `ask` makes of model and pixel values, labels [B], small copies of the images) of every batch.

        `digests` tell which images the rows must have, where that is known.
        """
        work, size = _Asking(self.model, ask, table, collate, batch_size, digests), _BATCHES * batch_size
        parts = [range(first, min(first + size, len(table))) for first in range(0, len(table), size)]
        for answers in self.runner.in_order(work, parts, subject):
            yield from answers


@dataclass(frozen=True)
class _Asking:
    """A `Work` whose parts are ranges of rows."""

    model: NamedModel
    ask: "Callable[[nn.Module, Any], Any]"
    table: "Dataset"
    collate: Callable[[Any], Any]
    batch_size: int
    digests: "NDArray[np.uint64] | None"

    def opened(self, device: str | None) -> LoadedModel:
        return self.model.opened(device)

    def batches(self, part: range, prepare: Callable[..., Any]) -> "Iterator[Answer]":
        rows = self.table.select(part)
        if self.digests is not None:
            files = rows.cast_column("image", datasets.Image(decode=False))["image"]
            for stored, wanted in zip(files, self.digests[part], strict=True):
                if stored["bytes"] is None:  # else it came with the table
                    refuse_changed(stored["path"], digest_of(stored["path"]), wanted)
        for pixel_values, labels, images in image_batches(rows, self.batch_size, self.collate):
            yield pixel_values, labels, [thumbnail_of(image) for image in images]

    def done(self, part: range, batches: "Iterator[Answer]", subject: LoadedModel) -> "list[Answer]":
        dtype = torch.promote_types(subject.dtype, torch.float32)
        with torch.inference_mode():
            return [
                (self.ask(subject.model, pixel_values.to(subject.device, dtype)), labels, images)
                for pixel_values, labels, images in batches
            ]
