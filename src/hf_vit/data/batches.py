"""What a loader iterates over: a table or a stream through a transform; and the collators."""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hf_vit.data.augmentation import seeded
from hf_vit.data.image_data import ImageData
from hf_vit.data.transforms import DenseEvalTransform, DenseTrainTransform, EvalTransform, Example, TrainTransform

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    # Where an example ends: block, the stream's state before that block, chunk of it, examples of that chunk.
    Place = dict[str, Any]

CACHE_BYTES = 512 << 20
_PREPARED_AT_ONCE = 64


class TransformedImages(torch.utils.data.Dataset[Example]):
    """A table of images and labels through a transform, fetched in batches; a small one is decoded only once.

    What does not depend on chance is kept in memory as far as `cache_bytes` reach, decided before the first batch, so
    loader workers share it. Call `set_epoch` at the start of every epoch (accelerate does it in a single process).

    Args:
        table: with the columns "image" and "label"; without labels they are None.
        transform: from `train_transform` or `eval_transform`.
        cache_bytes: memory for prepared images; 0 keeps nothing.
    """

    def __init__(self, table: "Dataset", transform: Any, cache_bytes: int = CACHE_BYTES) -> None:
        from datasets import Image

        self.table, self.transform = table, transform
        self.labels: list[Any] = list(table["label"]) if "label" in table.column_names else [None] * len(table)
        self._rows = table.select_columns(self._columns())
        if isinstance(table.features["image"], Image):  # the transform decodes it, in threads
            self._rows = self._rows.cast_column("image", Image(decode=False))
        self._prepared = self._prepare_all(len(table), cache_bytes)

    def _columns(self) -> list[str]:
        return ["image"]

    @property
    def is_cached(self) -> bool:
        """Whether all that is prepared is in memory."""
        return self._prepared is not None

    def __len__(self) -> int:
        return len(self.table)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose augmentation is drawn from now on."""
        self.transform.set_epoch(epoch)

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        """Return the example of each index; torch's loader fetches whole batches so."""
        return self.varied(indices, indices)

    def varied(self, indices: Sequence[int], keys: Sequence[int]) -> list[Example]:
        """Return them varied by other numbers than their own: an image that comes twice in an epoch differs then."""
        prepared = self._load(indices) if self._prepared is None else [self._prepared[index] for index in indices]
        return self._examples(self.transform.finish(prepared, np.asarray(keys, dtype=np.uint64)), indices)

    def _load(self, indices: Sequence[int]) -> list[Any]:
        return self.transform.prepare(self._rows[list(indices)]["image"])

    def _examples(self, finished: Sequence[Any], indices: Sequence[int]) -> list[Example]:
        mixable = self.transform.mixable
        return [
            {"pixel_values": value, "label": self.labels[index], "index": index, "mixable": mixable}
            for value, index in zip(finished, indices, strict=True)
        ]

    def _prepare_all(self, total: int, cache_bytes: int) -> list[Any] | None:
        """Return all examples prepared, or None where they are more than `cache_bytes`."""
        if total == 0 or cache_bytes <= 0:
            return None
        # A few images tell whether all will fit; sizes may vary, so the sum is watched as well.
        sample = self._load(range(0, total, max(1, total // 16)))
        if sum(map(_bytes, sample)) / len(sample) * total > cache_bytes:
            return None
        prepared: list[Any] = []
        used = 0
        for start in range(0, total, _PREPARED_AT_ONCE):
            chunk = self._load(range(start, min(total, start + _PREPARED_AT_ONCE)))
            used += sum(map(_bytes, chunk))
            if used > cache_bytes:
                return None
            prepared.extend(chunk)
        return prepared


def _bytes(prepared: torch.Tensor | Example) -> int:
    tensors = [prepared] if isinstance(prepared, torch.Tensor) else prepared.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


class AnnotatedImages(TransformedImages):
    """The same for a table with the column "mask" or "objects"; the transform is from `dense_transforms`.

    Examples are as it gives them, with their index as "image_id".
    """

    def _columns(self) -> list[str]:
        return ["image", self.transform.target]

    def _load(self, indices: Sequence[int]) -> list[Any]:
        return self.transform.prepare(self._rows[list(indices)])

    def _examples(self, finished: Sequence[Any], indices: Sequence[int]) -> list[Example]:
        return [{**example, "image_id": int(index)} for example, index in zip(finished, indices, strict=True)]


class TransformedStream(torch.utils.data.IterableDataset[Example]):
    """A stream through a transform; shuffled and varied by epoch, and every image by its own content.

    The shards are shuffled whole, and the rows inside them block by block. Unlike a rolling buffer a block can be read
    again, so a pass goes on at any example for the price of one block. Rows are decoded after the shuffle: a block
    of encoded images is small.

    Args:
        stream: of {"image", "label"}, or of what `reader` reads.
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
        self.stream, self.transform, self.reader = stream, transform, reader
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        # Shared, so that loader workers that live on see the next epoch too.
        self._epoch = torch.tensor(0).share_memory_()

    @property
    def num_shards(self) -> int:
        """Parts that can be read side by side: more workers than that have nothing to read."""
        return self.stream.num_shards

    def split(self, rank: int, world_size: int) -> "TransformedStream":
        """Return the part of one process: whole shards if their number is a multiple of `world_size`, else every
        n-th row.
        """
        from datasets.distributed import split_dataset_by_node

        part = copy.copy(self)
        part.stream = split_dataset_by_node(self.stream, rank=rank, world_size=world_size)
        part._epoch = self._epoch.clone().share_memory_()
        return part

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation are drawn from now on."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Example]:
        return (example for example, _ in self.examples(int(self._epoch)))

    def examples(self, epoch: int, place: "Place | None" = None) -> "Iterator[tuple[Example, Place]]":
        """Yield every example of this process' and this worker's part, and the place behind it.

        Args:
            epoch: decides about order and variation.
            place: where to go on, as it came with an example of the same epoch.
        """
        # Copies, because workers share the memory of an epoch's number and one may be a pass ahead of another.
        transform = copy.deepcopy(self.transform)
        transform.set_epoch(epoch)
        behind = place or {"block": 0, "state": None, "chunk": 0, "example": 0}
        for number, state, rows in self._blocks(epoch, behind["block"], behind["state"]):
            chunks = range(0, len(rows), _PREPARED_AT_ONCE)
            begin = behind["chunk"] if number == behind["block"] else 0
            for chunk in range(begin, len(chunks)):
                done = behind["example"] if (number, chunk) == (behind["block"], behind["chunk"]) else 0
                made = self._transformed(rows[chunks[chunk] : chunks[chunk] + _PREPARED_AT_ONCE], transform)
                for position, example in enumerate(made[done:], start=done + 1):
                    yield example, {"block": number, "state": state, "chunk": chunk, "example": position}

    def _blocks(
        self, epoch: int, number: int, state: dict[str, Any] | None
    ) -> Iterator[tuple[int, dict[str, Any] | None, Sequence[Any]]]:
        """(number, the stream's state before it, rows in shuffled order) of every block from `number` on."""
        stream = copy.deepcopy(self.stream)
        if self.shuffle_buffer:
            # A stream orders its shards by the number of its epoch alone, and leaves those of epoch 0 as they are.
            stream.set_epoch(1 + zlib.crc32(repr((self.seed, epoch)).encode()))
        if state is not None:
            stream.load_state_dict(state)
        rows = iter(stream)
        while block := list(islice(rows, self.shuffle_buffer or _PREPARED_AT_ONCE)):
            if self.shuffle_buffer:
                random = np.random.RandomState(zlib.crc32(repr((self.seed, epoch, number)).encode()))
                block = [block[index] for index in random.permutation(len(block))]
            yield number, state, block
            number, state = number + 1, stream.state_dict()

    def _transformed(self, rows: Sequence[Any], transform: TrainTransform | EvalTransform) -> list[Example]:
        batch: Mapping[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if self.reader is not None:
            batch = self.reader(batch)
        made = transform(batch) if batch["label"] else {"pixel_values": [], "label": []}
        return [
            {"pixel_values": values, "label": label, "mixable": transform.mixable}
            for values, label in zip(made["pixel_values"], made["label"], strict=True)
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
    """Return one split through a transform, as a `Trainer` takes it (with remove_unused_columns=False and a collator).

    Args:
        data: from `load_data`.
        split: "train", "validation" or "test".
        transform: from `train_transform` or `eval_transform`; of data with masks or objects from `dense_transforms`.
        cache_bytes: memory for prepared images of a table.
        shuffle_buffer: images of a training stream to shuffle among, each process' and worker's apart (tables are
            shuffled by the loader's sampler).
        seed: of that shuffle.
    """
    chosen = data.split(split)
    if isinstance(transform, DenseTrainTransform | DenseEvalTransform):
        return AnnotatedImages(cast("Dataset", chosen), transform, cache_bytes)
    if hasattr(chosen, "__len__"):
        return TransformedImages(cast("Dataset", chosen), transform, cache_bytes)
    buffer = shuffle_buffer if isinstance(transform, TrainTransform) else 0
    stream, reader = data.readers.get(split, (cast("IterableDataset", chosen), None))
    return TransformedStream(stream, transform, buffer, seed, reader)


class ImageCollator:
    """Examples to one batch: `pixel_values` [B, C, H, W] float32 and `labels`, [B] int64 or, mixed, [B, K] float32.

    Mixup and cutmix are torchvision's. Their draws depend on the batch's content and the seed alone, so workers and
    interruptions do not change them. Examples marked "mixable": False (`eval_transform` marks its own) stay as they
    are: one collator serves a Trainer's training and evaluation. Lists of classes become 0 and 1 for each, [B, K], and
    are not mixed.

    Args:
        num_labels: K.
        mixup_alpha, cutmix_alpha: see `AugmentationConfig`.
        seed: of the mixing.
    """

    def __init__(self, num_labels: int, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, seed: int = 0) -> None:
        from torchvision.transforms import v2

        self.num_labels, self.seed = num_labels, seed
        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        self._mixes: list[Any] = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha > 0]

    def __call__(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        pixel_values = torch.stack([torch.as_tensor(example["pixel_values"]) for example in examples])
        key = "label" if "label" in examples[0] else "labels"
        if isinstance(examples[0][key], list):
            labels = torch.zeros(len(examples), self.num_labels)
            for row, example in enumerate(examples):
                labels[row, example[key]] = 1.0
            return {"pixel_values": pixel_values, "labels": labels}
        labels = torch.tensor([int(example[key]) for example in examples])
        if self._mixes and all(example.get("mixable", True) for example in examples):
            # About 1,000 numbers of every image: enough to tell batches apart, and quick.
            flat = pixel_values.detach().flatten(1)
            sample: Any = flat[:, :: max(1, flat.shape[1] // 1000)].contiguous().numpy()
            with seeded(zlib.crc32(sample, self.seed & 0xFFFFFFFF)):
                mix = self._mixes[int(torch.randint(len(self._mixes), ()))]
                pixel_values, labels = mix(pixel_values, labels)
        return {"pixel_values": pixel_values, "labels": labels}


def dense_collator(examples: Sequence[Example]) -> dict[str, Any]:
    """Examples with masks or objects to one batch: `pixel_values` [B, 3, H, W] and `labels`.

    Of segmentation `labels` are [B, H, W] int64; of detection a list of one dict an image, as transformers' detectors
    take it ("boxes", "class_labels", ...), whose boxes are still x1 y1 x2 y2 px.
    """
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    if "labels" in examples[0]:
        return {"pixel_values": pixel_values, "labels": torch.stack([example["labels"] for example in examples])}
    labels = [{name: value for name, value in example.items() if name != "pixel_values"} for example in examples]
    return {"pixel_values": pixel_values, "labels": labels}
