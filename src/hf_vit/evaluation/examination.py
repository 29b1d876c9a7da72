"""A model and labeled data that it is measured on, and the one loop over a split that every measurement runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BatchFeature

from hf_vit.data import ImageData
from hf_vit.data.fingerprints import hash_file, refuse_changed, short_digests
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.frame import thumbnail_of
from hf_vit.evaluation.reading import (
    Collate,
    answering,
    evaluating,
    finite_features,
    finite_logits,
    image_batches,
    last_features,
    shown,
    undecoded,
)
from hf_vit.loading.model import LoadedModel, match_labels
from hf_vit.loading.outputs import PRE_LOGITS, depth_features
from hf_vit.results.facts import DataFact

if TYPE_CHECKING:
    from PIL.Image import Image

    from hf_vit.evaluation.ray_runner import RayRunner

Features = dict[str, NDArray[np.float32]]
# What is made of model and pixel values.
Ask = Callable[[torch.nn.Module, torch.Tensor | BatchFeature], Any]


@final
@dataclass(frozen=True)
class Examination:
    """A model, the data, and how they are read. Everything streams: a batch of pixels is in memory, never a split.

    Attributes:
        subject: the model; see `load_model`.
        data: labeled images; see `load_data`.
        split: the one that judges.
        num_images: judge by so many images of it, drawn by `seed` (of a stream: its first); None for all.
        batch_size: images a forward.
        seed: of every draw.
        progress: show a bar on standard error.
        num_workers: processes that read and prepare images; streams are read in this one.
        remote: Ray, whose processes hold the same model and answer in its place; images come back small.
        draft_side: of images that are decoded smaller than they are, see `LoadedModel.draft_side`.
    """

    subject: LoadedModel
    data: ImageData
    split: str = "test"
    num_images: int | None = None
    batch_size: int = 32
    seed: int = 0
    progress: bool = True
    num_workers: int = 0
    remote: "RayRunner | None" = None
    draft_side: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch size", self.batch_size), ("number of images", self.num_images)):
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")
        self.data.split(self.split)
        if self.draft_side is not None and self.data.readers:
            raise UserError("--draft does not work on streams; leave --streaming or --draft out")

    @cached_property
    def answers(self) -> list[str]:
        """The names of the model's classes, in the order of its logits."""
        if not self.subject.label_sets:
            raise UserError(
                f"{self.subject.name} has no named classes to predict; choose few-shot, linear-probe or "
                "knn, which need features only, or fine-tune it first (hf-vit finetune)"
            )
        return self.subject.label_names(self.data.label_names)

    @cached_property
    def model_classes(self) -> list[int]:
        """Return the index of the model's class for every class of the data, matched by name."""
        return match_labels(self.data.label_names, self.answers)

    @property
    def data_classes(self) -> list[int]:
        """The classes of the data as they are, for protocols that need no head."""
        return list(range(len(self.data.label_names)))

    def learning_split(self, name: str) -> str:
        """Return `name`, a split that something is fitted on."""
        self.data.split(name)
        if name == self.split:
            raise UserError(f"split '{name}' is used for fitting; choose another --split to evaluate on")
        return name

    def judged(self, num_images: int) -> str:
        """Describe the images: "digits, split test, 360 images"."""
        left_out = f" ({len(self.data.skipped):,} unreadable left out)" if self.data.skipped else ""
        return f"{self.data.name}, split {self.split}, {num_images:,} images{left_out}"

    def fact(self, size: int | None = None) -> DataFact:
        """Return the data as facts.json names them; `size`: images that judged."""
        names = {name: getattr(self.data, name) for name in ("name", "fingerprint", "revision")}
        return DataFact(**names, split=self.split, size=size)

    def judged_digests(self) -> list[str]:
        """Return SHA-256 of the files of the images that judge; of those not looked at before, as in a stream, none."""
        seen = self.data.seen.get(self.split, [])
        rows = self._chosen() if seen else None
        return [image.digest for image in (seen if rows is None else [seen[row] for row in rows])]

    def judging(self, what: str = "evaluating") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (pixel values [B, C, H, W] in at least float32, the model's classes [B]) of what judges."""
        for pixel_values, labels, _ in self.iterate(self._collate(self.model_classes), what=what):
            assert isinstance(pixel_values, torch.Tensor), "protocols that change pixels need images of one size"
            yield pixel_values, labels.to(self.subject.device)

    def logits(self, split: str, what: str = "evaluating") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (logits [B, K] float32, the model's classes [B]), on the CPU, of a split."""
        return ((logits, labels) for logits, labels, _ in self.pictured_logits(split, what))

    def pictured_logits(
        self, split: str | None = None, what: str = "evaluating"
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, "list[Image]"]]:
        """Yield the logits of a batch with its images [B]; by default of the evaluated split."""
        return self.iterate(self._collate(self.model_classes), split, what=what, ask=_logits)

    def data_logits(self, rows: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (logits [B, K] float32, classes of the data [B]) of rows of the split that judges."""
        batches = self.iterate(self._collate(self.data_classes), rows=rows, ask=_logits)
        return ((logits, labels) for logits, labels, _ in batches)

    def judged_rows(self) -> list[int]:
        """Return the rows of the images that judge, ascending."""
        chosen = self._chosen()
        return list(range(len(self.labels(self.split)))) if chosen is None else chosen

    def file_names(self) -> list[str]:
        """Return the names of the files of all images of the split that judges, row by row."""
        self.labels(self.split)  # refuses streams
        paths = [row["path"] for row in undecoded(self.data.split(self.split))["image"]]
        if any(path is None for path in paths):
            raise UserError(f"the images of '{self.data.name}' have no file names; give a folder of images")
        return [Path(path).name for path in paths]

    def file_name(self, index: int) -> str | None:
        """Return the name of the file of one of the images that judge; None where the data is not made of files."""
        table = self.data.split(self.split)
        if not isinstance(table, datasets.Dataset):
            return None
        rows = self._chosen()
        path = undecoded(table)[index if rows is None else rows[index]]["image"]["path"]
        return None if path is None else Path(path).name

    def labels(self, split: str) -> NDArray[np.int64]:
        """Return the classes of the data [n] of all images of a split, without reading them."""
        table: Any = self.data.split(split)
        if not hasattr(table, "__len__"):
            raise UserError(
                f"'{self.data.name}' is a stream, from which images cannot be drawn; load it without streaming"
            )
        return np.asarray(table["label"], dtype=np.int64)

    def features(self, split: str, rows: Sequence[int] | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return pre-logits [n, D] and classes of the data [n] of a split, or of its `rows`."""
        features, labels = self._features(_last_features, split, rows)
        return features[PRE_LOGITS], labels

    def depth_features(self, split: str) -> tuple[Features, NDArray[np.int64]]:
        """Return features [n, D] of every depth, see `depth_features`, and classes of the data [n]."""
        return self._features(_depth_features, split)

    def _features(self, ask: Ask, split: str, rows: Sequence[int] | None = None) -> tuple[Features, NDArray[np.int64]]:
        parts: dict[str, list[NDArray[np.float32]]] = {}
        classes: list[NDArray[np.int64]] = []
        collate = self._collate(self.data_classes)
        for features, labels, _ in self.iterate(collate, split, rows, f"features of {split}", ask):
            for name, values in features.items():
                parts.setdefault(name, []).append(values)
            classes.append(labels.numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}, np.concatenate(classes)

    def _chosen(self) -> list[int] | None:
        """Return the rows of the images that judge, ascending; None for all."""
        table: Any = self.data.split(self.split)
        if self.num_images is None or not hasattr(table, "__len__") or self.num_images >= len(table):
            return None
        return sorted(np.random.default_rng(self.seed).permutation(len(table))[: self.num_images].tolist())

    def _collate(self, classes: Sequence[int]) -> Collate:
        return Collate(self.subject.prepare, classes, self.data.multi_label, self.draft_side)

    def iterate(
        self,
        collate: Callable[[Any], tuple[Any, Any, "list[Image]"]],
        split: str | None = None,
        rows: Sequence[int] | None = None,
        what: str = "evaluating",
        ask: Ask | None = None,
    ) -> Iterator[tuple[Any, Any, "list[Image]"]]:
        """Iterate over a split, a batch at a time, with the model in evaluation mode.

        Args:
            collate: rows -> (pixel values, what is true of the images, the images).
            split: by default the one that judges, of which `num_images` may be fewer than all.
            rows: of the split; None for all.
            what: names the bar.
            ask: (model, pixel values) -> what comes in place of the pixel values, computed without gradients.
        """
        split = split or self.split
        table = undecoded(self.data.split(split))
        if rows is None and split == self.split:
            rows = self._chosen()
            if self.num_images is not None and not hasattr(table, "__len__"):
                table = table.take(self.num_images)
        if rows is not None:
            table = table.select(rows)
        total, seen = len(table) if hasattr(table, "__len__") else None, 0
        if self.remote is not None and ask is not None:
            digests = short_digests(self.data.seen[split]) if split in self.data.seen else None
            if digests is not None and rows is not None:
                digests = digests[list(rows)]
            work = _Asking(ask, table, collate, self.batch_size, digests)
            batches: Any = (answer for _, answer in self.remote.answers(work, work.parts(), self.subject))
        else:
            loaded = image_batches(table, self.batch_size, collate, self.num_workers)
            batches = ((answer_of(ask, values, self.subject), *rest) for values, *rest in loaded)
        with evaluating(self.subject.model):
            for batch in shown(batches, total, what, self.progress):
                yield batch
                seen += len(batch[-1])
        if not seen:
            raise UserError(f"split '{split}' holds no image; choose another")


def answer_of(ask: Ask | None, pixel_values: torch.Tensor | BatchFeature, subject: LoadedModel) -> Any:
    """Return what `ask` makes of pixel values on the model's device; None: these."""
    pixel_values = pixel_values.to(subject.device, torch.promote_types(subject.dtype, torch.float32))
    if ask is None:
        return pixel_values
    with torch.inference_mode():
        return ask(subject.model, pixel_values)


@dataclass(frozen=True)
class _Asking:
    """A `Work` whose parts are ranges of rows; `digests` tell which images these must have, where that is known."""

    ask: Ask
    table: datasets.Dataset
    collate: Callable[[Any], Any]
    batch_size: int
    digests: NDArray[np.uint64] | None

    def parts(self) -> list[range]:
        size = 8 * self.batch_size
        return [range(first, min(first + size, len(self.table))) for first in range(0, len(self.table), size)]

    def batches(self, part: range, prepare: Callable[..., Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        rows = self.table.select(part)
        if self.digests is not None:
            for stored, wanted in zip(rows["image"], self.digests[part], strict=True):
                if stored["bytes"] is None:  # else it came with the table
                    refuse_changed(stored["path"], hash_file(stored["path"]), wanted)
        for pixel_values, labels, images in image_batches(rows, self.batch_size, self.collate):
            yield pixel_values, (labels, [thumbnail_of(image) for image in images])

    def answer(self, pixel_values: Any, rest: tuple[Any, ...], subject: LoadedModel) -> tuple[Any, ...]:
        return (answer_of(self.ask, pixel_values, subject), *rest)


def _logits(model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    return finite_logits(model, pixel_values).cpu()


def _last_features(model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature) -> Features:
    return {PRE_LOGITS: last_features(model, pixel_values)}


def _depth_features(model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature) -> Features:
    assert isinstance(pixel_values, torch.Tensor), "every layer is read at one image size"
    with answering(pixel_values):
        features = depth_features(model, pixel_values.to(next(model.parameters()).dtype))
    return {name: finite_features(values) for name, values in features.items()}
