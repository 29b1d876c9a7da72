"""The order of images: by seed and epoch, over workers and processes, of tables and of streams."""

import multiprocessing
import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from training.conftest import Rows, write_numbers

from hf_vit import UserError
from hf_vit.data import AugmentationConfig, ImageCollator, TransformedImages, load_data, make_processor
from hf_vit.data.batches import TransformedStream
from hf_vit.data.transforms import TrainTransform
from hf_vit.results.facts import Facts
from hf_vit.training.trainer.sampling import (
    EpochBatches,
    EpochSampler,
    SeededDataset,
    SeededStream,
    StreamCollator,
    derive_seed,
    make_stream_loader,
    return_unchanged,
    seeded,
)


class Noisy(Dataset):
    """Every access draws from the global generators, as careless transforms do."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"index": index, "noise": (torch.rand(()).item(), random.random(), np.random.rand())}


def collate_noisy(examples):
    return [(example["index"], example["noise"]) for example in examples], torch.rand(()).item()


def batches(workers, epoch, seed=3, batch_size=4):
    sampler = EpochSampler(10, seed)
    sampler.set_epoch(epoch)
    dataset = SeededDataset(Noisy(), collate_noisy, seed)
    return list(DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=return_unchanged))


def test_batches_depend_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = batches(0, epoch=0)
    torch.rand(17)
    assert batches(0, epoch=0) == first
    assert batches(2, epoch=0) == first
    assert batches(0, epoch=1) != first
    assert batches(0, epoch=0, seed=4) != first
    orders = [tuple(index for batch, _ in batches(0, epoch) for index, _ in batch) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders), "every example comes once an epoch"
    assert len(set(orders)) == 3


def test_variation_of_images_does_not_depend_on_the_batch_size():
    """Where the data set varies by epoch and image, it is told the epoch."""
    for size in (2, 5):
        dataset, sampler = SeededDataset(VariedImages(10), list, 3), EpochSampler(10, 3)
        sampler.set_epoch(7)
        loader = DataLoader(dataset, sampler=sampler, batch_size=size, num_workers=1, collate_fn=return_unchanged)
        assert sorted(example for batch in loader for example in batch) == [(index, 7) for index in range(10)]


class VariedImages(Dataset):
    """Gives every image as it is varied in a pass."""

    number = None

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def set_epoch(self, number):
        self.number = number

    def __getitem__(self, index):
        return index, self.number


@pytest.mark.parametrize("workers", [0, 1])
def test_repeated_augmentation_shows_few_images_in_several_variations(workers):
    """As many examples as images; each image three times in a row of the sampler, and not beside its own copy."""
    dataset = SeededDataset(VariedImages(12), list, seed=3)
    seen = {}
    for epoch in (0, 1):
        sampler = EpochSampler(12, seed=3, repeats=3)
        sampler.set_epoch(epoch)
        assert len(sampler) == 12
        batches = list(DataLoader(dataset, 6, sampler=sampler, num_workers=workers, collate_fn=return_unchanged))
        assert [len(batch) for batch in batches] == [6, 6]
        for batch in batches:
            for (image, _), (neighbour, _) in zip(batch, batch[-1:] + batch[:-1], strict=True):
                assert image != neighbour, "mixup would mix an image with itself"
        seen[epoch] = sorted(example for batch in batches for example in batch)
        assert len({image for image, _ in seen[epoch]}) == 4
        assert all(sum(image == other for other, _ in seen[epoch]) == 3 for image, _ in seen[epoch])
        assert {number for _, number in seen[epoch]} == {3 * epoch, 3 * epoch + 1, 3 * epoch + 2}
    assert {image for image, _ in seen[0]} != {image for image, _ in seen[1]}


class Meeting(TrainTransform):
    """Workers wait for each other between the choice of a pass and its augmentation."""

    workers = multiprocessing.get_context("fork").Barrier(2)

    def prepare(self, images):
        if get_worker_info() is not None:
            self.workers.wait(60)
        return super().prepare(images)


def test_workers_at_different_copies_augment_each_in_its_own_way(tiny_config):
    table = load_data("digits").splits["train"].select(range(8))
    transform = Meeting(make_processor(tiny_config()), AugmentationConfig(shift_px=2))
    dataset = SeededDataset(TransformedImages(table, transform, cache_bytes=0), ImageCollator(10), seed=3)
    sampler = EpochSampler(8, seed=3, repeats=2)
    loaders = (DataLoader(dataset, 1, sampler=sampler, num_workers=n, collate_fn=return_unchanged) for n in (0, 2))
    alone, together = ([batch["pixel_values"] for batch in each] for each in loaders)
    assert all(map(torch.equal, together, alone))


def test_an_epoch_of_copies_ends_where_the_images_would():
    assert len(list(EpochSampler(10, seed=0, repeats=3))) == 10
    assert list(EpochSampler(10, seed=0, repeats=1)) == list(EpochSampler(10, seed=0))
    together = list(EpochBatches(EpochSampler(10, 0, repeats=3), 4))
    shared = [list(EpochBatches(EpochSampler(10, 0, repeats=3), 2, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*shared, strict=True)] == together


def test_global_generators_are_left_alone():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with seeded(5):
        inside = torch.rand(()).item(), random.random(), np.random.rand()
    with seeded(5):
        assert (torch.rand(()).item(), random.random(), np.random.rand()) == inside
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


def test_seeds_are_not_sums():
    assert len({derive_seed(a, b) for a in range(50) for b in range(50)}) == 2500


def test_stream_goes_on_epoch_after_epoch_with_new_variation():
    def first(count):
        return list(islice(SeededStream(Plain(5), seed=1), count))

    seen = first(12)
    assert [example["label"] for example in seen] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    epochs, noise = zip(*(example["pixel_values"] for example in seen), strict=True)
    assert list(epochs) == [0] * 5 + [1] * 5 + [2] * 2
    assert len(set(noise)) == 12
    torch.rand(9)
    assert first(12) == seen


def test_stream_batches_are_collated_under_their_own_seed():
    def first(count):
        collator = StreamCollator(lambda rows: ([row["label"] for row in rows], torch.rand(()).item(), rows))
        return list(islice(DataLoader(SeededStream(Plain(5), 1), batch_size=2, collate_fn=collator), count))

    one = first(3)
    torch.rand(5)
    assert first(3) == one
    assert len({draw for _, draw, _ in one}) == 3
    assert set(one[0][2][0]) == {"label", "pixel_values"}


def test_empty_stream_says_so():
    with pytest.raises(UserError, match="holds no image"):
        next(iter(SeededStream(Plain(0), 1)))


@pytest.mark.parametrize("size", [1, 5, 8, 9, 11, 12, 16, 23])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_an_epoch(size, world):
    """Together the batches of a single process, in its order; no more images than there are, no process without one."""
    whole = EpochSampler(size, 3)
    whole.set_epoch(2)
    parts = []
    for rank in range(world):
        sampler = EpochSampler(size, 3)
        sampler.set_epoch(2)
        batches = EpochBatches(sampler, 4, rank=rank, world_size=world)
        parts.append(list(batches))
        assert len(parts[-1]) == len(batches)
    together = [key for step in zip(*parts, strict=True) for batch in step for key in batch]
    order = list(whole)
    assert together[:size] == order
    assert len(together) == size or len(together) - size < world
    assert all(1 <= len(batch) <= 4 for part in parts for batch in part)
    full = [list(EpochBatches(whole, 4, True, rank, world)) for rank in range(world)]
    kept = size // (4 * world) * 4 * world
    assert [key for step in zip(*full, strict=True) for batch in step for key in batch] == order[:kept]


class Plain(IterableDataset):
    """A stream of another kind: cannot be split, nor go on by itself; varied by torch's generator."""

    def __init__(self, size=30):
        self.size = size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.size):
            yield {"label": number, "pixel_values": (self.epoch, torch.rand(()).item())}


def rows(tmp_path, sizes):
    return write_numbers(tmp_path / "rows", sizes)


def collate(examples):
    return [(example["label"], example["pixel_values"]) for example in examples]


def take(batches, count):
    return list(islice(batches, count))


def loader(dataset, workers=0, **place):
    options = {"multiprocessing_context": "fork"} if workers else {}
    return make_stream_loader(SeededStream(dataset, 7, **place), collate, batch_size=4, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shards", "plain"])
def test_goes_on_in_any_epoch(tmp_path, workers, kind):
    made = Plain() if kind == "plain" else TransformedStream(rows(tmp_path, [60, 50, 40]), Rows(), 16, seed=2)
    unbroken = loader(made, workers)
    batches = iter(unbroken)
    for count in (3, 50):
        take(batches, count)
        state = unbroken.state_dict()
        expected = take(batches, 5)
        resumed = loader(made, workers)
        resumed.load_state_dict(state)
        assert take(iter(resumed), 5) == expected


def keep_from_4(batch):
    """As a reader that cuts off other splits, here all rows of the first shard."""
    rows = [row for row in batch["label"] if row >= 4]
    return {"image": rows, "label": rows}


def test_a_worker_without_an_image_in_the_first_epoch_reads_its_part_of_others(tmp_path):
    made = TransformedStream(rows(tmp_path, [4, 8]), Rows(), 4, seed=2, reader=keep_from_4)
    seen = Counter((epoch, label) for batch in take(loader(made, 2), 24) for label, (epoch, _) in batch)
    assert [[seen[epoch, label] for label in range(4, 12)] for epoch in range(5)] == [[1] * 8] * 5


def test_only_the_block_in_hand_is_prepared_again(tmp_path):
    made = TransformedStream(rows(tmp_path, [300, 300]), Rows(), 100, seed=2)
    first = loader(made)
    take(iter(first), 130)  # 520 of 600 rows
    resumed = loader(made)
    resumed.load_state_dict(first.state_dict())
    Rows.prepared = 0
    take(iter(resumed), 1)
    assert Rows.prepared == 64  # of the block of 100, as many as are prepared at once


def test_no_more_workers_than_shards(tmp_path):
    made = TransformedStream(rows(tmp_path, [5, 5]), Rows(), 4)
    assert loader(made, 8).num_workers == 2
    assert loader(made, 8, rank=1, world_size=2).num_workers == 1
    # Two shards over three processes: each reads all, and keeps every third row.
    assert loader(made, 8, rank=1, world_size=3).num_workers == 2


def test_streams_that_cannot_be_split_are_read_by_all():
    parts = [take(iter(loader(Plain(), rank=rank, world_size=3)), 10) for rank in range(3)]
    for part in parts:
        labels = [label for batch in part for label, _ in batch]
        assert labels[:10] == sorted(labels[:10])
    first = [label for part in parts for batch in part for label, (epoch, _) in batch if epoch == 0]
    assert sorted(first) == list(range(30))


def test_a_process_without_images_says_so(tmp_path):
    made = TransformedStream(rows(tmp_path, [1]), Rows(), 4)
    assert len(take(iter(loader(made, rank=0, world_size=2)), 2)) == 2
    with pytest.raises(UserError, match="holds no image in the part of process 1 of 2"):
        next(iter(loader(made, rank=1, world_size=2)))


def test_a_classifier_learns_fractals_that_are_made_meanwhile(succeeds, tmp_path):
    out = succeeds(
        *("finetune", "Ti/8", "--data", "fractals:classes=2,images=8,size=16", "--image-size", "16", "--streaming"),
        *("--epochs", "2", "--evaluations", "1", "--batch-size", "12", "--output", tmp_path / "out", "--device", "cpu"),
    )
    assert "on fractals:classes=2,images=8,seed=0: 16 images of 2 classes, recipe default-small, 4 steps" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (record,) = Facts.load(tmp_path / "out").filter_kind("training")
    assert record.values["images_seen"] == 4 * 12, "the batches of a stream go on over the end of an epoch"
