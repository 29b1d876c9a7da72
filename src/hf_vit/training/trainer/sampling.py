"""Order and randomness of the training data as functions of (seed, epoch, position), not of what ran before.

A training that was killed and resumed then sees the same images, in the same order, with the same augmentation as an
unbroken one, at any step and with any number of workers. Of a stream every checkpoint keeps the place, a file a
process, by torchdata's StatefulDataLoader.
"""

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from hf_vit.errors import UserError

Collator = Callable[[list[Any]], Any]
# How an example of a stream carries the seed of its batch to the collator.
_SEED_KEY = "hf_vit_random_seed"


def derive_seed(*numbers: int) -> int:
    """Return a 32-bit seed from several numbers, without the collisions of adding them."""
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
    """Every example once an epoch, in an order fixed by (seed, epoch). Yields (pass, index); passes are epochs.

    With `weights` [size] as many are drawn, with repetition; one that is drawn again comes in a pass of its own, 2**32
    later, so that it is varied anew. With `repeats` every example comes so often in a row, in as many passes (pass =
    epoch * repeats + copy), and the epoch ends after `size` of them: repeated augmentation, as arXiv 2012.12877's
    sampler does it.
    """

    def __init__(self, size: int, seed: int, weights: Sequence[float] | None = None, repeats: int = 1) -> None:
        self.size, self.seed, self.repeats = size, seed, repeats
        self.weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration runs through."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        if self.weights is None:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.multinomial(self.weights, self.size, replacement=True, generator=generator)
        yield from islice(self._copies(order.tolist()), self.size)

    def _copies(self, order: list[int]) -> Iterator[tuple[int, int]]:
        drawn: Counter[int] = Counter()
        for index in order:
            first = self.epoch * self.repeats + (drawn[index] << 32)
            drawn[index] += 1
            yield from ((first + copy, index) for copy in range(self.repeats))


class EpochBatches(BatchSampler):
    """One process' batches of an `EpochSampler`: together, the processes see what a single one would.

    Batch i goes to process i modulo `world_size`. The rest of an epoch is dealt out evenly, so that every process has
    as many batches and every example comes once; examples are repeated only where fewer are left than there are
    processes. `drop_last` leaves out what does not fill a batch of every process.
    """

    def __init__(
        self, sampler: EpochSampler, batch_size: int, drop_last: bool = False, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(cast(Any, sampler), batch_size, drop_last)
        self.keys, self.rank, self.world_size = sampler, rank, world_size

    def __len__(self) -> int:
        whole, left = divmod(len(self.keys), self.batch_size * self.world_size)
        return whole if self.drop_last or not left else whole + 1

    def __iter__(self) -> Iterator[list[Any]]:
        keys = list(self.keys)
        together = self.batch_size * self.world_size
        for start in range(0, len(keys) - together + 1, together):
            own = start + self.rank * self.batch_size
            yield keys[own : own + self.batch_size]
        left = keys[len(keys) - len(keys) % together :]
        if left and not self.drop_last:
            left += islice(cycle(keys), max(0, self.world_size - len(left)))
            size, more = divmod(len(left), self.world_size)
            begin = self.rank * size + min(self.rank, more)
            yield left[begin : begin + size + (self.rank < more)]


class SeededDataset(Dataset[Any]):
    """Serves the keys of `EpochSampler`: batches whose transforms and collator draw from a seed of their own.

    `set_epoch` of a data set that varies images is called with the pass before its examples are fetched.
    """

    def __init__(self, dataset: Any, collator: Collator, seed: int) -> None:
        self.dataset, self.collator, self.seed = dataset, collator, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return a collated batch, fetched pass after pass: mixup must not mix an image with a copy of its own."""
        with seeded(derive_seed(self.seed, *keys[0])):
            examples: list[Any] = []
            for number in dict.fromkeys(number for number, _ in keys):
                examples += self._pass(number, [index for each, index in keys if each == number])
            return self.collator(examples)

    def _pass(self, number: int, indices: list[int]) -> list[Any]:
        """Examples as they are varied in this pass over the data."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(number)
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]


def as_is(batch: object) -> object:
    """Return the collator of batches that are already collated."""
    return batch


class SeededStream(IterableDataset[Any]):
    """An endless stream over an iterable data set, epoch after epoch; every example is read under its own seed.

    Every process and worker begins the next epoch of its own part when it has seen all of it, and waits for nobody. A
    data set with `split` and `examples` (see `TransformedStream`) is divided by shards and continues where it was left;
    any other is read by every process, which keeps every n-th example, and read again up to that place. A part without
    examples is refused.
    """

    def __init__(self, dataset: Any, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self._splits = hasattr(dataset, "split") and hasattr(dataset, "examples")
        self.dataset = dataset.split(rank, world_size) if self._splits and world_size > 1 else dataset
        self._state: dict[str, Any] = {"epoch": 0, "first": 0, "done": 0, "place": None}

    @property
    def num_shards(self) -> int | None:
        """Parts that workers can read side by side, where the data set tells."""
        return getattr(self.dataset, "num_shards", None)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: epoch, examples before it and in it, and the data set's own place."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._state = dict(state)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        lane = self.rank if worker is None else self.rank * worker.num_workers + worker.id
        epoch, first, done, place = (self._state[name] for name in ("epoch", "first", "done", "place"))
        while True:
            examples = self._pass(epoch, place)
            position = 0 if place is None else done
            while True:
                number = derive_seed(self.seed, lane, first + position)
                with seeded(number):
                    example, place = next(examples, (None, None))
                if example is None:
                    break
                position += 1
                if position > done:
                    self._state = {"epoch": epoch, "first": first, "done": position, "place": place}
                    yield {**example, _SEED_KEY: number}
            if first + position == 0:
                self._refuse_nothing(worker)
                return
            epoch, first, done, place = epoch + 1, first + position, 0, None

    def _pass(self, epoch: int, place: Any) -> Iterator[tuple[Any, Any]]:
        if self._splits:
            return self.dataset.examples(epoch, place)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return ((example, None) for example in islice(iter(self.dataset), self.rank, None, self.world_size))

    def _refuse_nothing(self, worker: Any) -> None:
        if worker is not None and worker.id > 0:
            return  # fewer shards than workers: this one has nothing to read
        part = "" if self.world_size == 1 else f", in the part of process {self.rank} of {self.world_size},"
        raise UserError(
            f"the training stream{part} holds no image; check the data files and their split names"
            + ("" if self.world_size == 1 else ", or use fewer processes")
        )


class StreamCollator:
    """Runs a collator under the seed that the first example of a `SeededStream` batch brought along."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        plain = [{key: value for key, value in example.items() if key != _SEED_KEY} for example in examples]
        with seeded(int(examples[0][_SEED_KEY])):
            return self.collator(plain)


def stream_loader(
    stream: SeededStream, collator: Collator, device: torch.device | None = None, **options: Any
) -> DataLoader[Any]:
    """Return a loader of a stream's batches on a device; it knows where it stands (`state_dict`, `load_state_dict`).

    `options` are torch's DataLoader's; it starts no more workers than the stream has shards.
    """
    workers: int = options.pop("num_workers", 0)
    if stream.num_shards is not None:
        workers = min(workers, stream.num_shards)
    if workers == 0:
        options |= {"persistent_workers": False, "prefetch_factor": None}
    # A generator of its own: beginning anew, after a checkpoint, must not draw from the model's random numbers.
    options["generator"] = torch.Generator()
    loader = DataLoader(stream, collate_fn=StreamCollator(collator), num_workers=workers, **options)
    with warnings.catch_warnings():
        # torchdata 0.11 still reports to torch's "vitals", which torch 2.15 calls deprecated.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        # As for a single process: the stream is this process' part already.
        return prepare_data_loader(
            loader,
            device,
            num_processes=1,
            process_index=0,
            put_on_device=device is not None,
            dispatch_batches=False,
            use_stateful_dataloader=True,
        )
