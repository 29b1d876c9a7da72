"""Order and randomness of the training data as functions of (seed, epoch, position), not of what ran before.

A training that was killed and resumed then sees the same images, in the same order, with the same augmentation as an
unbroken one, at any step and with any number of workers.
"""

import hashlib
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from hf_vit.errors import UserError

Collator = Callable[[list[Any]], Any]
# How an example of a stream carries the seed of its batch to the collator.
_SEED_KEY = "hf_vit_random_seed"


def derive_seed(*numbers: int) -> int:
    """A 32-bit seed from several numbers, without the collisions of adding them."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the CPU generators of torch, Python and numpy, and put their old states back at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed: that one also resets the accelerator's generator, from which dropout draws.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class EpochSampler(Sampler[tuple[int, int]]):
    """Every example once an epoch, in an order fixed by (seed, epoch). Yields (epoch, index)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration runs through."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        for index in torch.randperm(self.size, generator=generator).tolist():
            yield epoch, index


class SeededDataset(Dataset[Any]):
    """Serves the keys of `EpochSampler`: batches whose transforms and collator draw from a seed of their own.

    Args:
        dataset: has a length and gives an example for an index; random transforms are applied on access. If it has
            `set_epoch`, that is called before every batch: loader workers then need no word from the main process.
        collator: makes a batch of a list of examples.
        seed: of the whole training.
    """

    def __init__(self, dataset: Any, collator: Collator, seed: int) -> None:
        self.dataset = dataset
        self.collator = collator
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """A whole batch at once, collated: the data loader's own collator has nothing left to do."""
        epoch, first = keys[0]
        indices = [index for _, index in keys]
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        fetch = getattr(self.dataset, "__getitems__", None)
        with seeded(derive_seed(self.seed, epoch, first)):
            examples = fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]
            return self.collator(examples)


def as_is(batch: Any) -> Any:
    """The collator of batches that are already collated."""
    return batch


class SeededStream(IterableDataset[Any]):
    """An endless stream over an iterable data set, epoch after epoch; every example is read under its own seed.

    Endless, because a resumed training finds its place by counting batches from the start of the stream.

    Args:
        dataset: an iterable data set; if it has `set_epoch`, that is called at every pass.
        seed: of the whole training.

    Raises:
        UserError: the stream holds no example.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rank = 0 if worker is None else worker.id
        epoch, count = 0, 0
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            before, examples = count, iter(self.dataset)
            while True:
                number = derive_seed(self.seed, rank, count)
                with seeded(number):
                    example = next(examples, None)
                if example is None:
                    break
                yield {**example, _SEED_KEY: number}
                count += 1
            if count == before:
                if rank == 0:
                    raise UserError("the training stream holds no image; check the data files and their split names")
                return  # fewer shards than workers: this worker has nothing to read
            epoch += 1


class StreamCollator:
    """Runs a collator under the seed that the first example of a `SeededStream` batch brought along."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        plain = [{key: value for key, value in example.items() if key != _SEED_KEY} for example in examples]
        with seeded(int(examples[0][_SEED_KEY])):
            return self.collator(plain)
