"""What a loader iterates over: a table or a stream through a transform; and the collators."""

import copy
import mmap
import operator
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.data.augmentation import seeded
from hf_vit.data.image_data import ImageData, find_stream, match_scans
from hf_vit.data.images import ImageScan, undecode_images, view_pixels
from hf_vit.data.labels import list_column
from hf_vit.data.transforms import (
    DenseEvalTransform,
    DenseTrainTransform,
    EvalTransform,
    Example,
    TrainTransform,
    get_input_size,
    pad_to_patches,
)
from hf_vit.environment import measure_free_memory

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Position after an example: block, state of the stream before that block, chunk in it, examples of the chunk.
Position = dict[str, Any]
CACHE_BYTES = 512 << 20
_SHARE_OF_FREE = 4  # a quarter of the free memory holds images that are kept as they are read
_PREPARED_AT_ONCE = 64
_SAMPLED_AT_ONCE = 4
_SMALL_BYTES = 1 << 20  # of a prepared image
_LARGE_BYTES = 8 << 20  # of a decoded image; the system clears so much memory anew for each that is held
_LOADED_AT_ONCE = 8  # images of a batch that are decoded together, which may be photographs of 50 MB each


class TransformedImages(torch.utils.data.Dataset[Example]):
    """A table of images and labels with a transform, fetched in batches.

    The part of the transform without random numbers is computed once for all images if its results fit into
    `cache_bytes`; it runs before the first batch, so forked workers share it. More training images of known sizes are
    kept in shared memory as they are first read, so that later epochs do not decode. Call `set_epoch` at the start of
    every epoch (accelerate does so in a single process).

    Args:
        table: with the column "image" and, for labels, "label".
        transform: from `train_transform` or `eval_transform`.
        cache_bytes: memory for images prepared before the first batch. More may take a quarter of the free memory,
            divided by the training processes of this machine; with 0 none are kept.
        scans: of all rows; images whose pixels they keep are not decoded again.
    """

    def __init__(
        self, table: "Dataset", transform: Any, cache_bytes: int = CACHE_BYTES, scans: Sequence[ImageScan] = ()
    ) -> None:
        self.table = table
        self.transform = transform
        self.labels: list[Any] = list_column(table, "label") if "label" in table.column_names else [None] * len(table)
        self._rows = undecode_images(table.select_columns(self._columns()))  # the transform decodes in threads
        has_pixels = bool(scans) and all(scan.pixels is not None for scan in scans)
        self._scans = scans if has_pixels else None
        decoded_bytes = sum(3 * scan.height * scan.width for scan in scans)
        self._is_large = decoded_bytes > _LARGE_BYTES * len(scans)  # on average
        # Where a prepared image is the decoded one, the scans tell without a sample that the images do not fit.
        may_fit = not self._decodes_only or decoded_bytes <= cache_bytes
        self._prepared = self._prepare_all(len(table), cache_bytes) if may_fit else None
        sizes = self._list_sizes(scans) if self._prepared is None and len(table) and cache_bytes > 0 else None
        self._kept = None if sizes is None else _KeptImages.reserve(sizes)

    def _columns(self) -> list[str]:
        return ["image"]

    @property
    def _decodes_only(self) -> bool:
        """Whether a prepared image is the decoded one, so that scans tell its size."""
        return type(self.transform) is TrainTransform and self.transform.keeps_pixels

    def _list_sizes(self, scans: Sequence[ImageScan]) -> NDArray[np.int64] | None:
        """Return (height, width) px of all prepared images, [n, 2], where that is known before they are read."""
        if self._decodes_only:
            is_known = scans and self._scans is None  # else the scans keep the pixels
            return np.asarray([(scan.height, scan.width) for scan in scans]) if is_known else None
        if type(self.transform) is not TrainTransform or self.transform.augmentation.random_crop is not None:
            return None
        return np.tile(get_input_size(self.transform.processor), (len(self), 1))

    def __getstate__(self) -> dict[str, Any]:
        # Memory is shared by a fork only; torch would send every tensor as an open file, of which there may be few.
        return self.__dict__ | {"_prepared": None, "_kept": None}

    @property
    def is_cached(self) -> bool:
        """Whether all prepared images are in memory."""
        return self._prepared is not None or (self._kept is not None and bool(self._kept.is_written.all()))

    def __len__(self) -> int:
        return len(self.table)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose augmentation is drawn from now on."""
        self.transform.set_epoch(epoch)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([range(len(self))[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples of a batch; torch's loader calls this for whole batches."""
        return self.varied(indices, indices)

    def varied(self, indices: Sequence[int], keys: Sequence[int]) -> list[Example]:
        """Return examples whose augmentation depends on `keys`, so that an image can differ within an epoch."""
        threads = torch.get_num_threads()
        loaded_at_once = threads if self._is_large else max(_LOADED_AT_ONCE, 2 * threads)
        size = loaded_at_once if self._prepared is None else len(indices)
        examples: list[Example] = []
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            prepared = self._load(part) if self._prepared is None else [self._prepared[index] for index in part]
            finished = self.transform.finish(prepared, np.asarray(keys[start : start + size], dtype=np.uint64))
            examples += self._examples(finished, part)
        return examples

    def _load(self, indices: Sequence[int]) -> list[Any]:
        return self._read(indices) if self._kept is None else self._kept.load(indices, self._read)

    def _read(self, indices: Sequence[int]) -> list[Any]:
        if self._scans is not None:
            scans = [self._scans[index] for index in indices]
            if self._decodes_only:
                return [view_pixels(scan.pixels or b"", scan.height, scan.width) for scan in scans]
            return self.transform.prepare([scan.stored_image() for scan in scans])
        return self.transform.prepare(self._rows[list(indices)]["image"])

    def _examples(self, finished: Sequence[Any], indices: Sequence[int]) -> list[Example]:
        mixable = self.transform.mixable
        return [
            {"pixel_values": value, "label": self.labels[index], "index": index, "mixable": mixable}
            for value, index in zip(finished, indices, strict=True)
        ]

    def _prepare_all(self, total: int, cache_bytes: int) -> list[Any] | None:
        """Return all prepared images, or None if they need more than `cache_bytes`."""
        if total == 0 or cache_bytes <= 0:
            return None
        # A sample predicts whether all will fit; as sizes may vary, the sum is checked below as well.
        sample: list[Any] = []
        mean_bytes = 0.0
        rows = range(0, total, max(1, total // 16))
        for start in range(0, len(rows), _SAMPLED_AT_ONCE):
            sample += self._read(rows[start : start + _SAMPLED_AT_ONCE])
            mean_bytes = sum(map(_count_bytes, sample)) / len(sample)
            if mean_bytes * total > 2 * cache_bytes:  # photographs: the rest of the sample would take seconds
                return None
        if mean_bytes * total > cache_bytes:
            return None
        prepared: list[Any] = []
        used_bytes = 0
        is_small = self._scans is not None or mean_bytes < _SMALL_BYTES
        chunk_size = _PREPARED_AT_ONCE if is_small else _LOADED_AT_ONCE
        for start in range(0, total, chunk_size):
            chunk = self._read(range(start, min(total, start + chunk_size)))
            used_bytes += sum(map(_count_bytes, chunk))
            if used_bytes > cache_bytes:
                return None
            prepared.extend(chunk)
        return prepared


def _count_bytes(prepared: torch.Tensor | Example) -> int:
    tensors = [prepared] if isinstance(prepared, torch.Tensor) else prepared.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


class _KeptImages:
    """Images in memory that forked loader workers share; each is written when it is first read.

    Args:
        sizes: (height, width) px of every image, [n, 2].
    """

    def __init__(self, sizes: NDArray[np.int64]) -> None:
        self._sizes, self._ends = sizes, np.cumsum(3 * sizes.prod(axis=1))
        self._pixels = torch.frombuffer(mmap.mmap(-1, int(self._ends[-1])), dtype=torch.uint8)
        self.is_written = torch.frombuffer(mmap.mmap(-1, len(sizes)), dtype=torch.bool)

    @classmethod
    def reserve(cls, sizes: NDArray[np.int64]) -> "_KeptImages | None":
        """Reserve memory, which the system gives as it is written; return None if the images do not all fit."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():  # other trainings of this machine may take as much
            return None
        max_bytes = measure_free_memory() // (_SHARE_OF_FREE * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if not 0 < 3 * int(sizes.prod(axis=1).sum()) <= max_bytes:
            return None
        try:
            return cls(sizes)
        except (OSError, OverflowError):  # a limit of the process
            return None

    def load(self, indices: Sequence[int], read: Callable[[Sequence[int]], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return images, uint8 [3, H, W] each, of which `read` reads those that are not in memory."""
        missing = [index for index in indices if not self.is_written[index]]
        images = dict(zip(missing, read(missing), strict=True)) if missing else {}
        for index, image in images.items():
            place = self._find_place(index)
            if (image.shape, image.dtype) == (place.shape, place.dtype):  # else the file has changed
                place.copy_(image)
                self.is_written[index] = True  # after the pixels, as another worker may look now
        return [images[index] if index in images else self._find_place(index) for index in indices]

    def _find_place(self, index: int) -> torch.Tensor:
        height, width = self._sizes[index].tolist()
        end = int(self._ends[index])
        # In the order of a decoded image, in which torchvision resizes fastest.
        return self._pixels[end - 3 * height * width : end].view(height, width, 3).permute(2, 0, 1)


class AnnotatedImages(TransformedImages):
    """A table with the column "mask" or "objects" and a transform from `dense_transforms`.

    Every example of the transform also has its index as "image_id".
    """

    def _columns(self) -> list[str]:
        return ["image", self.transform.target]

    def _read(self, indices: Sequence[int]) -> list[Any]:
        return self.transform.prepare(self._rows[list(indices)])

    def _examples(self, finished: Sequence[Any], indices: Sequence[int]) -> list[Example]:
        return [{**example, "image_id": int(index)} for example, index in zip(finished, indices, strict=True)]


class TransformedStream(torch.utils.data.IterableDataset[Example]):
    """A stream with a transform; order and augmentation depend on the epoch.

    Shards are shuffled as a whole, and the rows inside them in blocks. A block, unlike a rolling buffer, can be read
    again, so an epoch can resume at any example by reading one block. Rows are decoded after the shuffle, because
    encoded images need little memory.

    Args:
        stream: rows {"image", "label"}, or undecoded rows for `reader`.
        transform: from `train_transform` or `eval_transform`.
        shuffle_buffer: rows of a block; 0 keeps the order.
        seed: of the shuffle, which differs in every epoch.
        reader: decodes {column: values of a few rows}, see `StreamReader`.
    """

    def __init__(
        self,
        stream: "IterableDataset",
        transform: TrainTransform | EvalTransform,
        shuffle_buffer: int = 0,
        seed: int = 0,
        reader: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        self.stream = stream
        self.transform = transform
        self.reader = reader
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        # In shared memory, so that persistent loader workers see the next epoch too.
        self._epoch = torch.tensor(0).share_memory_()

    @property
    def num_shards(self) -> int:
        """Number of parts that can be read in parallel; further workers would have nothing to read."""
        return self.stream.num_shards

    def split(self, rank: int, world_size: int) -> "TransformedStream":
        """Return the part of one process: whole shards if `world_size` divides their number, else every n-th row."""
        from datasets.distributed import split_dataset_by_node

        part = copy.copy(self)
        part.stream = split_dataset_by_node(self.stream, rank=rank, world_size=world_size)
        part._epoch = self._epoch.clone().share_memory_()
        return part

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines order and augmentation."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Example]:
        return (example for example, _ in self.examples(int(self._epoch)))

    def examples(self, epoch: int, place: Position | None = None) -> Iterator[tuple[Example, Position]]:
        """Yield the examples of this process and worker, each with the position after it.

        Args:
            epoch: determines order and augmentation.
            place: where to resume, as yielded with an example of the same epoch.
        """
        # A copy, because workers share the memory of the epoch and one may be an epoch ahead of another.
        transform = copy.deepcopy(self.transform)
        transform.set_epoch(epoch)
        start = place or {"block": 0, "state": None, "chunk": 0, "example": 0}
        first_chunk, skipped = start["chunk"], start["example"]  # 0 after the first block, and after its first chunk
        for block, state, rows in self._read_blocks(epoch, start["block"], start["state"]):
            chunks = [rows[first : first + _PREPARED_AT_ONCE] for first in range(0, len(rows), _PREPARED_AT_ONCE)]
            for chunk in range(first_chunk, len(chunks)):
                examples = self._transform_rows(chunks[chunk], transform)
                for count, example in enumerate(examples[skipped:], start=skipped + 1):
                    yield example, {"block": block, "state": state, "chunk": chunk, "example": count}
                skipped = 0
            first_chunk = skipped = 0

    def _read_blocks(
        self, epoch: int, number: int, state: dict[str, Any] | None
    ) -> Iterator[tuple[int, dict[str, Any] | None, Sequence[Any]]]:
        """Yield (number, state of the stream before it, rows in shuffled order) for every block from `number` on."""
        stream = copy.deepcopy(self.stream)
        if self.shuffle_buffer:
            # `datasets` shuffles shards by the epoch alone and not in epoch 0, so the seed goes into the epoch.
            stream.set_epoch(1 + zlib.crc32(repr((self.seed, epoch)).encode()))
        if state is not None:
            stream.load_state_dict(state)
        rows = iter(stream)
        while block := list(islice(rows, self.shuffle_buffer or _PREPARED_AT_ONCE)):
            if self.shuffle_buffer:
                random = np.random.RandomState(zlib.crc32(repr((self.seed, epoch, number)).encode()))
                block = [block[index] for index in random.permutation(len(block))]
            yield number, state, block
            number += 1
            state = stream.state_dict()

    def _transform_rows(self, rows: Sequence[Any], transform: TrainTransform | EvalTransform) -> list[Example]:
        """Decode and transform rows; a reader may leave rows out."""
        batch: Mapping[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if self.reader is not None:
            batch = self.reader(batch)
        columns = transform(batch) if batch["label"] else {"pixel_values": [], "label": []}
        return [
            {"pixel_values": values, "label": label, "mixable": transform.mixable}
            for values, label in zip(columns["pixel_values"], columns["label"], strict=True)
        ]


def transform_split(
    data: ImageData,
    split: str,
    transform: TrainTransform | EvalTransform | DenseTrainTransform | DenseEvalTransform,
    *,
    cache_bytes: int = CACHE_BYTES,
    shuffle_buffer: int = 1000,
    seed: int = 0,
) -> TransformedImages | TransformedStream | AnnotatedImages:
    """Return one split with a transform, for a `Trainer` with remove_unused_columns=False and a collator.

    Args:
        data: from `load_data`.
        split: "train", "validation" or "test".
        transform: from `train_transform` or `eval_transform`; for masks or objects from `dense_transforms`.
        cache_bytes: memory for prepared images of a table, see `TransformedImages`.
        shuffle_buffer: images that a training stream shuffles in every process and worker; the loader's sampler
            shuffles tables.
        seed: of the shuffle of a stream.
    """
    dataset = data.split(split)
    if isinstance(transform, DenseTrainTransform | DenseEvalTransform):
        return AnnotatedImages(cast("Dataset", dataset), transform, cache_bytes)
    if hasattr(dataset, "__len__"):
        return TransformedImages(cast("Dataset", dataset), transform, cache_bytes, match_scans(data, split))
    buffer = shuffle_buffer if isinstance(transform, TrainTransform) or transform.mixable else 0  # as two views are
    stream, reader = find_stream(data, split)
    return TransformedStream(stream, transform, buffer, seed, reader)


class ImageCollator:
    """Collate examples to a batch, with mixup and cutmix.

    A batch has `pixel_values` [B, C, H, W] float32 (batch, channels, height, width) and `labels`: [B] int64, or [B, K]
    float32 after mixing and for multi-label data, which is not mixed. The random numbers of torchvision's mixup and
    cutmix depend only on the content of the batch and the seed, so workers and interruptions do not change them.
    Examples with "mixable": False, which `eval_transform` sets, are not mixed, so one collator serves training and
    evaluation.

    Args:
        num_labels: K, the number of classes.
        mixup_alpha, cutmix_alpha: see `AugmentationConfig`.
        seed: of the mixing.
        patch: (height, width) px of the patches to which images of several sizes are padded; their
            `patch_attention_mask` [B, h, w] comes with them. None: all images have one size.
    """

    def __init__(
        self,
        num_labels: int,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        seed: int = 0,
        patch: tuple[int, int] | None = None,
    ) -> None:
        from torchvision.transforms import v2

        self.num_labels, self.seed, self.patch = num_labels, seed, patch
        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        self._mixes: list[Any] = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha > 0]

    def __call__(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Stack the images of examples [B, C, H, W] with their labels, and mix them if mixup or cutmix is on.

        Raises TypeError for a label that is not a whole number.
        """
        images = [torch.as_tensor(example["pixel_values"]) for example in examples]
        inputs: Any = (
            {"pixel_values": torch.stack(images)} if self.patch is None else pad_to_patches(images, self.patch)
        )
        pixel_values = inputs["pixel_values"]
        key = "label" if "label" in examples[0] else "labels"
        if isinstance(examples[0][key], list):
            multi_hot = torch.zeros(len(examples), self.num_labels)
            for row, example in enumerate(examples):
                multi_hot[row, list(map(operator.index, example[key]))] = 1.0
            return {**inputs, "labels": multi_hot}
        labels = torch.tensor([operator.index(example[key]) for example in examples])
        if self._mixes and all(example.get("mixable", True) for example in examples):
            # About 1,000 values of every image identify the batch quickly.
            flat = pixel_values.detach().flatten(1)
            every_nth = max(1, flat.shape[1] // 1000)
            sample: Any = flat[:, ::every_nth].contiguous().numpy()
            with seeded(zlib.crc32(sample, self.seed & 0xFFFFFFFF)):
                mix = self._mixes[int(torch.randint(len(self._mixes), ()))]
                pixel_values, labels = mix(pixel_values, labels)
        return {**inputs, "pixel_values": pixel_values, "labels": labels}


def dense_collator(examples: Sequence[Example]) -> dict[str, Any]:
    """Collate examples with masks or objects to a batch of `pixel_values` [B, 3, H, W] and `labels`.

    For segmentation `labels` are [B, H, W] int64 (batch, height, width). For detection they are one dictionary for
    every image with the keys of transformers' detectors ("boxes", "class_labels", ...); boxes are x1 y1 x2 y2 px.
    """
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    if "labels" in examples[0]:
        return {"pixel_values": pixel_values, "labels": torch.stack([example["labels"] for example in examples])}
    labels = [{name: value for name, value in example.items() if name != "pixel_values"} for example in examples]
    return {"pixel_values": pixel_values, "labels": labels}
