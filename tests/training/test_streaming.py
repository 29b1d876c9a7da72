"""Streams in place: a loader goes on at its image, whatever the workers; a part without images is refused."""

import pytest
import torch
from torch.utils.data import IterableDataset

from hf_vit import UserError
from hf_vit.data.transformed_stream import TransformedStream
from hf_vit.training.trainer.streaming import SeededStream, stream_loader


class Varied:
    """A transform of rows that are numbers; counts them."""

    mixable = True
    prepared = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __call__(self, batch):
        Varied.prepared += len(batch["image"])
        return {"pixel_values": [(self.epoch, row) for row in batch["image"]], "label": batch["label"]}


class Plain(IterableDataset):
    """A stream of another kind: cannot be split, nor go on by itself; varied by torch's generator."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(30):
            yield {"label": number, "pixel_values": (self.epoch, torch.rand(()).item())}


def rows(tmp_path, sizes):
    from datasets import Dataset, load_dataset

    files = [str(tmp_path / f"{shard}.parquet") for shard in range(len(sizes))]
    for shard, (file, size) in enumerate(zip(files, sizes, strict=True)):
        numbers = [1000 * shard + row for row in range(size)]
        Dataset.from_dict({"image": numbers, "label": numbers}).to_parquet(file)
    return load_dataset("parquet", data_files=files, streaming=True, split="train")


def collate(examples):
    return [(example["label"], example["pixel_values"]) for example in examples]


def loader(dataset, workers=0, **place):
    options = {"multiprocessing_context": "fork"} if workers else {}
    return stream_loader(SeededStream(dataset, 7, **place), collate, batch_size=4, num_workers=workers, **options)


def take(batches, count):
    return [batch for batch, _ in zip(batches, range(count), strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shards", "plain"])
def test_goes_on_in_any_epoch(tmp_path, workers, kind):
    made = Plain() if kind == "plain" else TransformedStream(rows(tmp_path, [60, 50, 40]), Varied(), 16, seed=2)
    unbroken = loader(made, workers)
    batches = iter(unbroken)
    for count in (3, 50):
        take(batches, count)
        state = unbroken.state_dict()
        expected = take(batches, 5)
        resumed = loader(made, workers)
        resumed.load_state_dict(state)
        assert take(iter(resumed), 5) == expected


def test_only_the_block_in_hand_is_prepared_again(tmp_path):
    made = TransformedStream(rows(tmp_path, [300, 300]), Varied(), 100, seed=2)
    first = loader(made)
    take(iter(first), 130)  # 520 of 600 rows
    resumed = loader(made)
    resumed.load_state_dict(first.state_dict())
    Varied.prepared = 0
    take(iter(resumed), 1)
    assert Varied.prepared == 64  # of the block of 100, as many as are prepared at once


def test_no_more_workers_than_shards(tmp_path):
    made = TransformedStream(rows(tmp_path, [5, 5]), Varied(), 4)
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
    made = TransformedStream(rows(tmp_path, [1]), Varied(), 4)
    assert len(take(iter(loader(made, rank=0, world_size=2)), 2)) == 2
    with pytest.raises(UserError, match="in the part of process 1 of 2, holds no image"):
        next(iter(loader(made, rank=1, world_size=2)))


def test_a_classifier_learns_fractals_that_are_made_meanwhile(command, tmp_path):
    code, out, err = command(
        *("finetune", "Ti/8", "--data", "fractals:classes=2,images=8,size=16", "--image-size", "16", "--streaming"),
        *("--epochs", "2", "--evaluations", "1", "--batch-size", "8", "--output", tmp_path / "out", "--device", "cpu"),
    )
    assert code == 0, err
    assert "on fractals:classes=2,images=8,seed=0: 16 images of 2 classes, recipe default-small, 4 steps" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
