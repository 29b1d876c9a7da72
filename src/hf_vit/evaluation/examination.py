"""`Examination`: a model with the labeled data to evaluate it on, and the loop over a split that all protocols use."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BatchFeature

from hf_vit.data import ImageData
from hf_vit.data.fingerprints import hash_file, refuse_changed, shorten_digests
from hf_vit.data.images import undecode_images
from hf_vit.data.labels import list_column
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.frame import make_thumbnail
from hf_vit.evaluation.reading import (
    Collate,
    check_features,
    compute_features,
    compute_layer_features,
    compute_logits,
    evaluation_mode,
    explain_model_errors,
    iterate_batches,
    show_progress,
)
from hf_vit.loading.model import LoadedModel, match_labels
from hf_vit.loading.outputs import PRE_LOGITS, FeatureChoice, compute_depth_features
from hf_vit.results.facts import DataFact

if TYPE_CHECKING:
    from PIL.Image import Image

    from hf_vit.evaluation.ray_runner import RayRunner

Features = dict[str, NDArray[np.float32]]
# Computes an output from a model and pixel values.
Compute = Callable[[torch.nn.Module, torch.Tensor | BatchFeature], Any]


@final
@dataclass(frozen=True)
class Examination:
    """A model and the data to evaluate it on; only a batch of pixels is in memory, never a split.

    Attributes:
        loaded: the model, see `load_model`.
        data: labeled images, see `load_data`.
        split: the split to evaluate.
        num_images: evaluate only so many images, drawn by `seed` (of a stream the first ones); None for all.
        batch_size: images per forward pass.
        seed: of all random draws.
        progress: show a progress bar on standard error.
        num_workers: processes that read and prepare images; streams are read in this process.
        remote: Ray, whose processes run the same model; they return only thumbnails of images.
        draft_side: decode JPEG files at a smaller scale, see `LoadedModel.draft_side`.
        choice: the features that protocols read in place of the head's input.
    """

    loaded: LoadedModel
    data: ImageData
    split: str = "test"
    num_images: int | None = None
    batch_size: int = 32
    seed: int = 0
    progress: bool = True
    num_workers: int = 0
    remote: "RayRunner | None" = None
    draft_side: int | None = None
    choice: FeatureChoice | None = None

    def __post_init__(self) -> None:
        """Raise a UserError for a number that is out of range, an unknown split, or a stream with `draft_side`."""
        for name, value in (("batch size", self.batch_size), ("number of images", self.num_images)):
            if value is not None and value < 1:
                raise UserError(f"the {name} is {value}, but it must be at least 1; choose a larger number")
        self.data.split(self.split)
        if self.draft_side is not None and self.data.readers:
            raise UserError("--draft cannot be combined with --streaming; leave one of them out")

    @cached_property
    def model_label_names(self) -> list[str]:
        """The names of the model's classes, in the order of its logits."""
        if not self.loaded.label_sets:
            raise UserError(
                f"{self.loaded.name} has no class names to compare with the labels; choose --protocol few-shot, "
                "linear-probe or knn, which only need features, or fine-tune it first (hf-vit finetune)"
            )
        return self.loaded.label_names(self.data.label_names)

    @cached_property
    def model_classes(self) -> list[int]:
        """The index of the model's class for every class of the data, matched by name."""
        return match_labels(self.data.label_names, self.model_label_names)

    def require_fit_split(self, name: str) -> str:
        """Return `name`; raise UserError if the data has no such split or it is the evaluated one."""
        self.data.split(name)
        if name == self.split:
            raise UserError(f"split '{name}' is already used for fitting; evaluate another one with --split")
        return name

    def describe_images(self, num_images: int) -> str:
        """Describe the evaluated images, such as "digits, split test, 360 images"."""
        left_out = f" ({len(self.data.skipped):,} unreadable images left out)" if self.data.skipped else ""
        return f"{self.data.name}, split {self.split}, {num_images:,} images{left_out}"

    def fact(self, size: int | None = None) -> DataFact:
        """Return the entry of the data in facts.json; `size` is the number of evaluated images."""
        names = {name: getattr(self.data, name) for name in ("name", "fingerprint", "revision")}
        return DataFact(**names, split=self.split, size=size)

    def list_digests(self) -> list[str]:
        """Return the SHA-256 of the evaluated images; [] for streams, whose images are not scanned."""
        scans = self.data.seen.get(self.split)
        return [scans[row].digest for row in self.list_rows()] if scans else []

    def iterate_pixels(self, title: str = "evaluating") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (pixel values [B, C, H, W], the model's classes [B]) of the evaluated images.

        Legend: B batch, C channels, H x W px (height, width). Pixel values have at least float32.
        """
        for pixel_values, labels, _ in self.iterate(self._collate(self.model_classes), title=title):
            assert isinstance(pixel_values, torch.Tensor), "protocols that change pixels need images of one size"
            yield pixel_values, labels.to(self.loaded.device)

    def iterate_logits(self, split: str, title: str = "evaluating") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (logits [B, K] float32, the model's classes [B]) of a split, on the CPU (K classes)."""
        return ((logits, labels) for logits, labels, _ in self.iterate_logits_with_images(split, title))

    def iterate_logits_with_images(
        self, split: str | None = None, title: str = "evaluating"
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, "list[Image]"]]:
        """Iterate over (logits, the model's classes, images) of a split, by default the evaluated one."""
        return self.iterate(self._collate(self.model_classes), split, title=title, compute=_compute_logits)

    def iterate_data_logits(self, rows: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over (logits [B, K] float32, classes of the data [B]) of some rows of the evaluated split."""
        batches = self.iterate(self._collate(), rows=rows, compute=_compute_logits)
        return ((logits, labels) for logits, labels, _ in batches)

    def list_rows(self) -> Sequence[int]:
        """Return the rows of the evaluated images of a table, ascending."""
        total = len(cast(datasets.Dataset, self.data.split(self.split)))
        if self.num_images is None or self.num_images >= total:
            return range(total)
        return sorted(np.random.default_rng(self.seed).permutation(total)[: self.num_images].tolist())

    def list_file_names(self) -> list[str]:
        """Return the file name of every image of the evaluated split; raise UserError if images are not files."""
        self.labels(self.split)  # raises for streams
        paths = [row["path"] for row in undecode_images(self.data.split(self.split))["image"]]
        if any(path is None for path in paths):
            raise UserError(f"the images of '{self.data.name}' have no file names; give a folder of images")
        return [Path(path).name for path in paths]

    def file_name(self, index: int) -> str | None:
        """Return the file name of an evaluated image, or None if it is not a file."""
        table = self.data.split(self.split)
        if not isinstance(table, datasets.Dataset):
            return None
        path = undecode_images(table)[self.list_rows()[index]]["image"]["path"]
        return None if path is None else Path(path).name

    def labels(self, split: str) -> NDArray[np.int64]:
        """Return the class numbers of all n images of a split, [n], without reading the images."""
        table: Any = self.data.split(split)
        if not hasattr(table, "__len__"):
            raise UserError(f"'{self.data.name}' is a stream, so images cannot be selected; leave --streaming out")
        return np.asarray(list_column(table, "label"), dtype=np.int64)

    def features(self, split: str, rows: Sequence[int] | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Compute pre-logits [n, D] of n images (hidden size D) and their classes [n], for a split or some rows.

        With `choice` they are those features.
        """
        features, labels = self._compute_features(partial(_compute_last_features, self.choice), split, rows)
        return features[PRE_LOGITS], labels

    def compute_depth_features(self, split: str) -> tuple[Features, NDArray[np.int64]]:
        """Compute the features [n, D] of every layer and the classes [n]; with `choice` only those features.

        `hf_vit.loading.outputs.compute_depth_features` describes them.
        """
        if self.choice is not None:
            features, labels = self.features(split)
            return {f"{self.choice.kind} of {self.choice.layers}": features}, labels
        return self._compute_features(_compute_depth_features, split)

    def _compute_features(
        self, compute: Compute, split: str, rows: Sequence[int] | None = None
    ) -> tuple[Features, NDArray[np.int64]]:
        """Compute features by name, and the classes of the data."""
        parts: dict[str, list[NDArray[np.float32]]] = {}
        classes: list[NDArray[np.int64]] = []
        for features, labels, _ in self.iterate(self._collate(), split, rows, f"features of {split}", compute):
            for name, values in features.items():
                parts.setdefault(name, []).append(values)
            classes.append(labels.numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}, np.concatenate(classes)

    def _collate(self, classes: Sequence[int] | None = None) -> Collate:
        mapping = range(len(self.data.label_names)) if classes is None else classes  # of the data, without a head
        return Collate(self.loaded.prepare, mapping, self.data.multi_label, self.draft_side)

    def iterate(
        self,
        collate: Callable[[Any], tuple[Any, Any, "list[Image]"]],
        split: str | None = None,
        rows: Sequence[int] | None = None,
        title: str = "evaluating",
        compute: Compute | None = None,
    ) -> Iterator[tuple[Any, Any, "list[Image]"]]:
        """Iterate over the batches of a split, with the model in evaluation mode.

        Args:
            collate: rows -> (pixel values, labels, images).
            split: by default the evaluated one, with at most `num_images` images.
            rows: rows of the split; None for all.
            title: of the progress bar.
            compute: replaces pixel values with an output of the model, without gradients.

        Raises:
            UserError: the split has no image.
        """
        split = split or self.split
        table = undecode_images(self.data.split(split))
        is_stream = not hasattr(table, "__len__")
        if rows is None and split == self.split and self.num_images is not None:
            if is_stream:
                table = table.take(self.num_images)
            else:
                rows = self.list_rows()
        if rows is not None:
            table = table.select(rows)
        if self.remote is not None and compute is not None:
            digests = shorten_digests(self.data.seen[split]) if split in self.data.seen else None
            if digests is not None and rows is not None:
                digests = digests[list(rows)]
            work = _RowWork(compute, table, collate, self.batch_size, digests)
            batches: Any = (answer for _, answer in self.remote.run(work, work.parts(), self.loaded))
        else:
            prepared_batches = iterate_batches(table, self.batch_size, collate, self.num_workers)
            batches = ((compute_output(compute, values, self.loaded), *rest) for values, *rest in prepared_batches)
        num_rows = None if is_stream else len(table)
        count = 0
        with evaluation_mode(self.loaded.model):
            for batch in show_progress(batches, num_rows, title, self.progress):
                yield batch
                count += len(batch[-1])
        if not count:
            raise UserError(f"split '{split}' holds no image; choose another one with --split")


def compute_output(compute: Compute | None, pixel_values: torch.Tensor | BatchFeature, loaded: LoadedModel) -> Any:
    """Run `compute` on the model's device without gradients; without it return the pixel values."""
    pixel_values = pixel_values.to(loaded.device, torch.promote_types(loaded.dtype, torch.float32))
    if compute is None:
        return pixel_values
    with torch.inference_mode():
        return compute(loaded.model, pixel_values)


@dataclass(frozen=True)
class _RowWork:
    """A `Work` whose parts are ranges of rows; `digests` hold the expected digests of their images, if known."""

    compute: Compute
    table: datasets.Dataset
    collate: Callable[[Any], Any]
    batch_size: int
    digests: NDArray[np.uint64] | None

    def parts(self) -> list[range]:
        size = 8 * self.batch_size
        return [range(first, min(first + size, len(self.table))) for first in range(0, len(self.table), size)]

    def batches(self, part: range, prepare: Callable[..., Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield prepared batches of a part, with labels and thumbnails; refuse files that have changed."""
        rows = self.table.select(part)
        if self.digests is not None:
            for stored_image, digest in zip(rows["image"], self.digests[part], strict=True):
                if stored_image["bytes"] is None:  # images inside the table cannot have changed
                    refuse_changed(stored_image["path"], hash_file(stored_image["path"]), digest)
        for pixel_values, labels, images in iterate_batches(rows, self.batch_size, self.collate):
            yield pixel_values, (labels, [make_thumbnail(image) for image in images])

    def answer(self, pixel_values: Any, rest: tuple[Any, ...], loaded: LoadedModel) -> tuple[Any, ...]:
        return (compute_output(self.compute, pixel_values, loaded), *rest)


def _compute_logits(model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    return compute_logits(model, pixel_values).cpu()


def _compute_last_features(
    choice: FeatureChoice | None, model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature
) -> Features:
    if choice is not None:
        return {PRE_LOGITS: np.stack(compute_layer_features(model, pixel_values, choice))}
    return {PRE_LOGITS: compute_features(model, pixel_values)}


def _compute_depth_features(model: torch.nn.Module, pixel_values: torch.Tensor | BatchFeature) -> Features:
    """Return the features after every layer by name, checked to be finite."""
    assert isinstance(pixel_values, torch.Tensor), "reading layers needs images of one size"
    with explain_model_errors(pixel_values):
        features = compute_depth_features(model, pixel_values.to(next(model.parameters()).dtype))
    return {name: check_features(values) for name, values in features.items()}
