"""A transformed stream: every row once, dealt out to processes and workers, and taken up at any example."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, load_dataset
from torch.utils.data import DataLoader

from hf_vit.data import (
    AugmentationConfig,
    TransformedStream,
    load_data,
    make_processor,
    train_transform,
    transform_split,
)

CONFIG = SimpleNamespace(image_size=8, num_channels=3, patch_size=4)


class Rows:
    """A transform that hands the rows through and tells the epoch; as those of `hf_vit.data.transforms`."""

    mixable = True

    def __init__(self):
        self._epoch = torch.tensor(-1).share_memory_()

    def set_epoch(self, epoch):
        self._epoch.fill_(epoch)

    def __call__(self, batch):
        return {"pixel_values": [(int(self._epoch), row) for row in batch["image"]], "label": batch["label"]}


@pytest.fixture
def parquet(tmp_path):
    """A stream of parquet shards with so many rows each, numbered through, and the number of rows."""

    def make(sizes):
        first = 0
        for shard, size in enumerate(sizes):
            numbers = list(range(first, first + size))
            Dataset.from_dict({"image": numbers, "label": numbers}).to_parquet(tmp_path / f"{shard}.parquet")
            first += size
        files = [str(tmp_path / f"{shard}.parquet") for shard in range(len(sizes))]
        return load_dataset("parquet", data_files=files, streaming=True, split="train"), first

    return make


def numbers(examples):
    return [int(example["label"]) for example in examples]


@pytest.mark.parametrize("buffer", [0, 7])
@pytest.mark.parametrize(("sizes", "world"), [([90, 20], 1), ([40, 30, 50, 5], 2), ([70, 30, 9], 2), ([150], 3)])
def test_goes_on_at_any_example(parquet, sizes, world, buffer):
    stream, total = parquet(sizes)
    whole = TransformedStream(stream, Rows(), buffer, seed=3)
    seen = []
    for rank in range(world):
        part = whole.split(rank, world) if world > 1 else whole
        pairs = list(part.examples(1))
        seen += numbers(example for example, _ in pairs)
        for position in {0, 1, 63, 64, len(pairs) // 2, len(pairs) - 1} & set(range(len(pairs))):
            rest = [example for example, _ in part.examples(1, pairs[position][1])]
            assert rest == [example for example, _ in pairs[position + 1 :]]
    assert sorted(seen) == list(range(total))


def test_order_depends_on_seed_and_epoch_alone(parquet):
    stream, total = parquet([30, 30, 30])
    first = TransformedStream(stream, Rows(), 10, seed=1)
    orders = {tuple(numbers(e for e, _ in first.examples(epoch))) for epoch in range(3)}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(total)) for order in orders)
    again = TransformedStream(stream, Rows(), 10, seed=1)
    other = TransformedStream(stream, Rows(), 10, seed=2)
    assert [e for e, _ in again.examples(2)] == [e for e, _ in first.examples(2)]
    assert [e for e, _ in other.examples(2)] != [e for e, _ in first.examples(2)]
    shards = [numbers(islice((e for e, _ in first.examples(epoch)), 1))[0] // 30 for epoch in range(8)]
    assert len(set(shards)) > 1, "the shards are shuffled too"
    unshuffled = TransformedStream(stream, Rows())
    assert numbers(unshuffled) == list(range(total))


def test_a_worker_may_be_an_epoch_ahead_of_another(parquet):
    """The number of a stream's epoch lies in memory that workers share; nobody may read another's."""
    stream, _ = parquet([8, 8])
    whole = TransformedStream(stream, Rows(), 4)
    slow = whole.examples(0)
    first, _ = next(slow)
    ahead = list(whole.examples(1))
    assert first["pixel_values"][0] == 0
    assert {example["pixel_values"][0] for example, _ in ahead} == {1}
    assert {example["pixel_values"][0] for example, _ in slow} == {0}
    assert int(whole._epoch) == 0


def test_living_workers_see_the_next_epoch(parquet):
    stream, total = parquet([6, 6])
    whole = TransformedStream(stream, Rows(), 4)
    loader = DataLoader(
        whole, 4, num_workers=2, persistent_workers=True, collate_fn=list, multiprocessing_context="fork"
    )
    for epoch in (0, 5):
        whole.set_epoch(epoch)
        seen = [example for batch in loader for example in batch]
        assert sorted(numbers(seen)) == list(range(total))
        assert {example["pixel_values"][0] for example in seen} == {epoch}


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_cut_splits_of_a_stream_in_shards(make, tmp_path, kind):
    """Images cut to validation and test are left out of every part, and the parts hold the rest once."""
    (tmp_path / "data").mkdir()
    images = [make.picture(seed) for seed in range(60)]
    for shard in range(3):
        chosen = range(shard * 20, shard * 20 + 20)
        if kind == "parquet":
            rows = {"image": [{"bytes": make.encoded(images[i]), "path": None} for i in chosen]}
            table = Dataset.from_dict(rows | {"label": ["ab"[i % 2] for i in chosen]})
            table.to_parquet(tmp_path / "data" / f"{shard}.parquet")
        else:
            samples = [{"png": make.encoded(images[i]), "cls": b"%d" % (i % 2)} for i in chosen]
            make.tar(tmp_path / "data" / f"{shard}.tar", samples)
    data = load_data(str(tmp_path / "data"), streaming=True)
    transform = train_transform(make_processor(CONFIG), AugmentationConfig(shift_px=2))
    whole = transform_split(data, "train", transform, shuffle_buffer=8)
    expected = {image["pixel_values"].numpy().tobytes() for image in whole}
    counts = {split: len(list(data.splits[split])) for split in ("train", "validation", "test")}
    assert sum(counts.values()) == 60
    assert counts["train"] == len(expected) < 60
    parts = [list(whole.split(rank, 2).examples(0)) for rank in (0, 1)]
    seen = [image["pixel_values"].numpy().tobytes() for part in parts for image, _ in part]
    assert sorted(seen) == sorted(expected)
    behind = parts[1][len(parts[1]) // 2][1]
    rest = [image["pixel_values"].numpy().tobytes() for image, _ in whole.split(1, 2).examples(0, behind)]
    assert rest == seen[-len(rest) :]
    assert len(rest) == len(parts[1]) - len(parts[1]) // 2 - 1
