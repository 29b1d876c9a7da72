"""A stream through a transform: shuffled, dealt out to processes and workers, and taken up where it was left."""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_vit.data.transforms import EvalTransform, TrainTransform

if TYPE_CHECKING:
    from datasets import IterableDataset

    # Where an example ends: block, the stream's state before that block, chunk of it, examples of that chunk.
    Place = dict[str, Any]

_PREPARED_AT_ONCE = 64


class TransformedStream(torch.utils.data.IterableDataset[dict[str, Any]]):
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
        self.stream = stream
        self.transform = transform
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.reader = reader
        # Shared, so that loader workers that live on see the next epoch too.
        self._epoch = torch.tensor(0).share_memory_()

    @property
    def num_shards(self) -> int:
        """Parts that can be read side by side: more workers than that have nothing to read."""
        return self.stream.num_shards

    def split(self, rank: int, world_size: int) -> "TransformedStream":
        """The part of one process: whole shards if their number is a multiple of `world_size`, else every n-th row."""
        from datasets.distributed import split_dataset_by_node

        part = copy.copy(self)
        part.stream = split_dataset_by_node(self.stream, rank=rank, world_size=world_size)
        part._epoch = self._epoch.clone().share_memory_()
        return part

    def set_epoch(self, epoch: int) -> None:
        """From now on shuffle and vary as in this epoch."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (example for example, _ in self.examples(int(self._epoch)))

    def examples(self, epoch: int, place: "Place | None" = None) -> "Iterator[tuple[dict[str, Any], Place]]":
        """One pass over this process' and this worker's part, or what is left of it.

        Args:
            epoch: decides about order and variation.
            place: where to go on, as it came with an example of the same epoch.

        Yields:
            Every example, and the place behind it.
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

    def _transformed(self, rows: Sequence[Any], transform: TrainTransform | EvalTransform) -> list[dict[str, Any]]:
        batch: Mapping[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        if self.reader is not None:
            batch = self.reader(batch)
        made = transform(batch) if batch["label"] else {"pixel_values": [], "label": []}
        return [
            {"pixel_values": values, "label": label, "mixable": transform.mixable}
            for values, label in zip(made["pixel_values"], made["label"], strict=True)
        ]
