"""Order and random numbers of the training data as functions of (seed, epoch, position).

So a resumed training sees the same images in the same order with the same augmentation as an uninterrupted one, with
any number of workers. For a stream, torchdata's StatefulDataLoader stores the position in every checkpoint, in one file
for every process.
"""

import hashlib
import os
import random
import signal
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
# Key of the seed of a stream's example, which the collator uses for the batch.
_SEED_KEY = "hf_vit_random_seed"
_TRIED_EPOCHS = 10  # without an image, after which a part counts as empty; every epoch divides the shards anew


def derive_seed(*numbers: int) -> int:
    """Hash several numbers to a 32-bit seed, without the collisions of a sum."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the CPU generators of torch, Python and numpy for a block of code, and restore their states afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # Not torch.manual_seed, which also resets the accelerator's generator, from which dropout draws.
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
    """Yields (pass, index) for every example once per epoch, in an order that depends on (seed, epoch).

    The pass is the epoch of the augmentation. With `weights` [size], `size` examples are drawn with replacement; an
    example that is drawn again gets a pass 2**32 higher, so that its augmentation differs. With `repeats`, every
    example is repeated in a row with different passes (epoch * repeats + copy), and the epoch ends after `size`
    examples, as in repeated augmentation (arXiv 2012.12877).
    """

    def __init__(self, size: int, seed: int, weights: Sequence[float] | None = None, repeats: int = 1) -> None:
        self.size, self.seed, self.repeats = size, seed, repeats
        self.weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        if self.weights is not None and len(self.weights) != size:
            raise UserError(
                f"sampling_weights has {len(self.weights)} values, but there are {size} training images; give one for "
                "every image"
            )
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        if self.weights is None:
            order = torch.randperm(self.size, generator=generator)
        else:
            order = torch.multinomial(self.weights, self.size, replacement=True, generator=generator)
        yield from islice(self._repeat(order.tolist()), self.size)

    def _repeat(self, order: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the repetitions of every index with their passes."""
        draws: Counter[int] = Counter()
        for index in order:
            first = self.epoch * self.repeats + (draws[index] << 32)
            draws[index] += 1
            yield from ((first + copy, index) for copy in range(self.repeats))


class EpochBatches(BatchSampler):
    """The batches of one process from an `EpochSampler`; all processes together see what a single one would see.

    Batch i goes to process i modulo `world_size`. The rest of an epoch is divided evenly, so that all processes have
    the same number of batches and every example occurs once; examples are repeated only if fewer remain than there are
    processes. `drop_last` drops examples that do not fill a batch of every process.
    """

    def __init__(
        self, sampler: EpochSampler, batch_size: int, drop_last: bool = False, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(cast(Any, sampler), batch_size, drop_last)
        self.keys, self.rank, self.world_size = sampler, rank, world_size

    def __len__(self) -> int:
        complete, remaining = divmod(len(self.keys), self.batch_size * self.world_size)
        return complete if self.drop_last or not remaining else complete + 1

    def __iter__(self) -> Iterator[list[Any]]:
        # Without a generator of its own, torch's loader would draw this number, but only once with persistent workers.
        torch.empty((), dtype=torch.int64).random_()
        keys = list(self.keys)
        images_per_round = self.batch_size * self.world_size
        for start in range(0, len(keys) - images_per_round + 1, images_per_round):
            first = start + self.rank * self.batch_size
            yield keys[first : first + self.batch_size]
        rest = keys[len(keys) - len(keys) % images_per_round :]
        if rest and not self.drop_last:
            rest += islice(cycle(keys), max(0, self.world_size - len(rest)))
            size, larger_parts = divmod(len(rest), self.world_size)
            first_of_rest = self.rank * size + min(self.rank, larger_parts)
            yield rest[first_of_rest : first_of_rest + size + (self.rank < larger_parts)]


class SeededDataset(Dataset[Any]):
    """Returns collated batches for the keys of `EpochSampler`, with a seed for every batch.

    If the data set has `set_epoch`, it is called with the pass before examples are fetched.
    """

    def __init__(self, dataset: Any, collator: Collator, seed: int) -> None:
        self.dataset = dataset
        self.collator = collator
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return a collated batch, ordered by pass, so that mixup does not mix an image with its own copy."""
        with seeded(derive_seed(self.seed, *keys[0])):
            examples: list[Any] = []
            indices_by_pass: dict[int, list[int]] = {}
            for pass_number, index in keys:
                indices_by_pass.setdefault(pass_number, []).append(index)
            for pass_number, indices in indices_by_pass.items():
                if hasattr(self.dataset, "set_epoch"):
                    self.dataset.set_epoch(pass_number)
                fetch = getattr(self.dataset, "__getitems__", None)
                examples += fetch(indices) if fetch is not None else [self.dataset[index] for index in indices]
            return self.collator(examples)


def ignore_sigterm_during(is_training: torch.Tensor, worker: int) -> None:
    """Ignore SIGTERM in a loader's worker during a training: schedulers signal all processes, but its step has to end.

    Afterwards it ends the worker, as Python waits for that before it exits. `is_training` is in shared memory.
    """

    def end(*_: object) -> None:
        if not is_training:
            os._exit(0)  # as torch's own handler; it takes another status for a failure

    signal.signal(signal.SIGTERM, end)


def return_unchanged(batch: object) -> object:
    """Return a batch that is already collated, in place of a collator."""
    return batch


class SeededStream(IterableDataset[Any]):
    """An endless stream over the epochs of an iterable data set, in which every example has its own seed.

    Every process and worker starts the next epoch of its part without waiting for others. A data set with `split` and
    `examples` (see `TransformedStream`) is divided by shards, and resumes at its position. Any other data set is read
    by all processes, of which each takes every n-th example, and is read again up to the position. A part without
    examples raises UserError.
    """

    def __init__(self, dataset: Any, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self._splits = hasattr(dataset, "split") and hasattr(dataset, "examples")
        self.dataset = dataset.split(rank, world_size) if self._splits and world_size > 1 else dataset
        self._state: dict[str, Any] = {"epoch": 0, "first": 0, "done": 0, "place": None}

    @property
    def num_shards(self) -> int | None:
        """Number of parts that workers can read in parallel, or None if it is unknown."""
        return getattr(self.dataset, "num_shards", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, examples before the epoch and in it, and the data set's own position."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position."""
        self._state = dict(state)

    def __iter__(self) -> Iterator[Any]:
        """Yield augmented examples without end; each has a seed of its own, so that a resumed run continues exactly."""
        worker = get_worker_info()
        part = self.rank if worker is None else self.rank * worker.num_workers + worker.id
        # `first` counts the examples of all epochs before, `resume_position` those of this epoch already yielded.
        epoch, first, resume_position, dataset_position = (
            self._state[name] for name in ("epoch", "first", "done", "place")
        )
        while True:
            examples = self._iterate_epoch(epoch, dataset_position)
            position = 0 if dataset_position is None else resume_position  # without a position it is read again
            while True:
                seed = derive_seed(self.seed, part, first + position)
                with seeded(seed):
                    example, dataset_position = next(examples, (None, None))
                if example is None:
                    break
                position += 1
                if position > resume_position:
                    self._state = {"epoch": epoch, "first": first, "done": position, "place": dataset_position}
                    yield {**example, _SEED_KEY: seed}
            if first + position == 0 and epoch + 1 == _TRIED_EPOCHS:
                self._refuse_empty_part(worker)
                return
            epoch += 1
            first += position
            resume_position = 0
            dataset_position = None

    def _iterate_epoch(self, epoch: int, dataset_position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over (example, position after it) of this process in an epoch.

        A data set without positions (None) is read from the beginning of the epoch.
        """
        if self._splits:
            return self.dataset.examples(epoch, dataset_position)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return ((example, None) for example in islice(iter(self.dataset), self.rank, None, self.world_size))

    def _refuse_empty_part(self, worker: Any) -> None:
        """Raise UserError for a part without images, unless a stream has fewer shards than workers."""
        if worker is not None and worker.id > 0:
            return
        part = "" if self.world_size == 1 else f" in the part of process {self.rank} of {self.world_size}"
        raise UserError(
            f"the training stream holds no image{part}; check the data files and their split names"
            + ("" if self.world_size == 1 else ", or use fewer processes")
        )


class StreamCollator:
    """Runs a collator with the seed of the first example of a `SeededStream` batch."""

    def __init__(self, collator: Collator) -> None:
        self.collator = collator

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        clean_examples = [{key: value for key, value in example.items() if key != _SEED_KEY} for example in examples]
        with seeded(int(examples[0][_SEED_KEY])):
            return self.collator(clean_examples)


def make_stream_loader(
    stream: SeededStream, collator: Collator, device: torch.device | None = None, **options: Any
) -> DataLoader[Any]:
    """Return a loader of a stream's batches that can store and resume its position (`state_dict`, `load_state_dict`).

    `options` are those of torch's DataLoader; there are at most as many workers as the stream has shards.
    """
    workers: int = options.pop("num_workers", 0)
    if stream.num_shards is not None:
        workers = min(workers, stream.num_shards)
    if workers == 0:
        options |= {"persistent_workers": False, "prefetch_factor": None}
    loader = DataLoader(stream, collate_fn=StreamCollator(collator), num_workers=workers, **options)
    with warnings.catch_warnings():
        # torchdata 0.11 still uses torch's "vitals", which torch 2.15 deprecates.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        # num_processes=1, because the stream already is the part of this process.
        return prepare_data_loader(
            loader,
            device,
            num_processes=1,
            process_index=0,
            put_on_device=device is not None,
            dispatch_batches=False,
            use_stateful_dataloader=True,
        )
