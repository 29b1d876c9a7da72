"""Training on streams: every process and worker on its own part, taken up in the middle of an epoch at the right image.

Where a stream stood is kept in every checkpoint, a file a process, by torchdata's StatefulDataLoader.
"""

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_vit.errors import UserError
from hf_vit.training.trainer.sampling import Collator, derive_seed, seeded

# How an example carries the seed of its batch to the collator.
_SEED_KEY = "hf_vit_random_seed"


class SeededStream(IterableDataset[Any]):
    """An endless stream over an iterable data set, epoch after epoch; every example is read under its own seed.

    Every process and worker begins the next epoch of its own part when it has seen all of it: within a part every
    example comes once an epoch, and no process waits for one that has more.

    Args:
        dataset: an iterable data set. With `split` and `examples` (see `TransformedStream`) it is divided by shards and
            goes on where it was left; any other is read by every process, which keeps every n-th example, and read
            again up to the place where it was left. If it has `set_epoch`, that is called at every pass.
        seed: of the whole training.
        rank: this process.
        world_size: processes.

    Raises:
        UserError: this process' part holds no example.
    """

    def __init__(self, dataset: Any, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._splits = hasattr(dataset, "split") and hasattr(dataset, "examples")
        self.dataset = dataset.split(rank, world_size) if self._splits and world_size > 1 else dataset
        self._state: dict[str, Any] = {"epoch": 0, "first": 0, "done": 0, "place": None}

    @property
    def num_shards(self) -> int | None:
        """Parts that workers can read side by side, where the data set tells."""
        return getattr(self.dataset, "num_shards", None)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: epoch, examples before it and in it, and the data set's own place."""
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
    """Batches of a stream on a device, from a loader that knows where it stands (`state_dict`, `load_state_dict`).

    Args:
        stream: this process' part.
        collator: makes a batch of a list of examples.
        device: where the batches go; None leaves them.
        **options: of torch's DataLoader; more workers than the stream has shards are not started.
    """
    from accelerate.data_loader import prepare_data_loader

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


class StreamingTrainer(Trainer):
    """A `Trainer` whose checkpoints hold the place in `stream`, the loader of a training stream if there is one."""

    stream: Any = None

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: object,
    ) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self.remove_callback(_StreamEpoch)
        if self.stream is None:
            return epochs, batches
        self.add_callback(_StreamEpoch)
        if resume_from_checkpoint is not None and (place := self._place_file(resume_from_checkpoint)).is_file():
            self.stream.load_state_dict(torch.load(place, weights_only=True))
            return epochs, 0
        return epochs, batches

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.stream is not None:
            torch.save(self.stream.state_dict(), self._place_file(output_dir))

    def _place_file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"stream_{self.args.process_index}.pt"


class _StreamEpoch(TrainerCallback):
    """The share of the training that is done, in place of the epochs that an endless stream does not have."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        state.epoch = state.global_step / state.max_steps
