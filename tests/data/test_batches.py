"""What a loader iterates over: cached or not, with or without workers, resumed or not, the same batches."""

import pickle
import shutil
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.conftest import encoded, make_folder, make_tar, picture
from datasets import Dataset
from torch.utils.data import DataLoader
from training.conftest import Rows, write_numbers, write_parquet

from hf_vit.data import (
    AugmentationConfig,
    ImageCollator,
    TransformedImages,
    TransformedStream,
    check_images,
    eval_transform,
    load_data,
    make_processor,
    train_transform,
    transform_split,
)
from hf_vit.environment import measure_free_memory

CONFIG, SMALL = (SimpleNamespace(image_size=size, num_channels=3, patch_size=4) for size in (16, 8))
VARIED = AugmentationConfig(shift_px=2, rotation_degrees=10, horizontal_flip=0.5)
CROPPED = AugmentationConfig(random_resized_crop=(0.5, 1.0), randaugment=(1, 10))


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


def some(digits, count: int = 64):
    return digits.splits["train"].select(range(count))


def loader(dataset, *, workers: int = 0, collator=None, **options) -> DataLoader:
    collator = collator or ImageCollator(10, mixup_alpha=0.4, cutmix_alpha=0.4, seed=7)
    start = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(dataset, batch_size=16, num_workers=workers, collate_fn=collator, **start, **options)


def run(batches) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(batches)
    return torch.cat([b["pixel_values"] for b in batches]), torch.cat([b["labels"] for b in batches])


def assert_same(first, second):
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("augmentation", [VARIED, CROPPED])
def test_cached_and_uncached_are_the_same(digits, augmentation):
    cached, uncached = (
        TransformedImages(some(digits), train_transform(make_processor(CONFIG), augmentation), cache_bytes)
        for cache_bytes in (1 << 20, 0)
    )
    assert cached.is_cached
    assert not uncached.is_cached
    assert cached[-1]["index"] == uncached[-1]["index"] == len(cached) - 1
    for epoch in (0, 1):
        cached.set_epoch(epoch)
        uncached.set_epoch(epoch)
        assert_same(run(loader(cached)), run(loader(uncached)))
    sent = pickle.loads(pickle.dumps(cached))  # as to a worker that is not forked: a tensor is an open file, of few
    assert not sent.is_cached
    assert_same(run(loader(sent)), run(loader(cached)))


def test_a_cache_of_images_of_many_sizes_keeps_to_its_bytes():
    photos = load_data("photos").splits["validation"].select(range(0, 160, 4))
    total = sum(3 * image.width * image.height for image in photos["image"])
    transform = train_transform(make_processor(CONFIG), AugmentationConfig(random_resized_crop=(0.5, 1.0)))
    assert TransformedImages(photos, transform, total).is_cached
    assert not TransformedImages(photos, transform, total - 1).is_cached


def test_workers_see_every_epoch_and_do_not_change_the_batches(digits):
    dataset = TransformedImages(some(digits), train_transform(make_processor(CONFIG), VARIED, seed=3))
    living = loader(dataset, workers=2, persistent_workers=True)
    seen = []
    for epoch in (4, 1, 4):
        dataset.set_epoch(epoch)
        seen.append(run(living))
        assert_same(run(loader(dataset)), seen[-1])
    assert_same(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[1][0])


def test_resuming_inside_an_epoch_continues_the_same_batches(digits):
    from accelerate import Accelerator, skip_first_batches

    def prepared():
        dataset = TransformedImages(some(digits), train_transform(make_processor(CONFIG), VARIED))
        order = np.random.RandomState(0).permutation(64).tolist()
        return Accelerator(cpu=True).prepare_data_loader(loader(dataset, sampler=order))

    unbroken = prepared()
    unbroken.set_epoch(2)
    whole = run(unbroken)
    torch.manual_seed(99)  # another process, another state of every generator
    resumed = skip_first_batches(prepared(), 2)
    resumed.set_epoch(2)
    rest = run(resumed)
    assert_same((whole[0][32:], whole[1][32:]), rest)
    assert not torch.equal(run(unbroken)[0], whole[0]), "accelerate announces the next epoch"


def test_stock_trainer_trains_and_evaluates(digits, tmp_path):
    from transformers import Trainer, TrainingArguments

    class Linear(torch.nn.Module):
        """The smallest model a Trainer takes; hard labels in evaluation, soft ones in training."""

        def __init__(self):
            super().__init__()
            self.classifier = torch.nn.Linear(3 * 16 * 16, 10)
            self.seen: dict[bool, set] = {True: set(), False: set()}

        def forward(self, pixel_values, labels):
            self.seen[self.training].add((labels.dtype, labels.ndim))
            logits = self.classifier(pixel_values.flatten(1))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    processor, model = make_processor(CONFIG), Linear()
    quiet = dict(remove_unused_columns=False, save_strategy="no", use_cpu=True, disable_tqdm=True)
    learning = dict(num_train_epochs=3, learning_rate=0.01, per_device_train_batch_size=32)
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **learning, **quiet),
        train_dataset=transform_split(digits, "train", train_transform(processor, VARIED)),
        eval_dataset=transform_split(digits, "validation", eval_transform(processor)),
        data_collator=ImageCollator(10, mixup_alpha=0.2),
        compute_metrics=lambda result: {"accuracy": (result.predictions.argmax(-1) == result.label_ids).mean()},
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.5
    assert model.seen == {True: {(torch.float32, 2)}, False: {(torch.int64, 1)}}


# ---- streams


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_every_image_once_varied_by_its_content(digits, workers):
    streamed = load_data("digits", streaming=True)
    transform = train_transform(make_processor(CONFIG), VARIED)
    dataset = transform_split(streamed, "test", transform, shuffle_buffer=50)

    def epoch(number: int, workers: int):
        dataset.set_epoch(number)
        return run(loader(dataset, workers=workers, collator=ImageCollator(10)))

    first, again = epoch(0, workers), epoch(0, 0)
    assert len(first[0]) == 360
    assert torch.equal(first[1].bincount(), again[1].bincount())
    as_set = lambda values: {image.numpy().tobytes() for image in values}  # noqa: E731
    assert as_set(first[0]) == as_set(again[0]), "the same images, varied alike, whatever the number of workers"
    evaluated = transform_split(streamed, "test", eval_transform(make_processor(CONFIG)))
    assert run(loader(evaluated))[1].tolist() == [row["label"] for row in streamed.splits["test"]], "in their order"
    other = epoch(1, workers)
    assert len(as_set(first[0]) & as_set(other[0])) < 36
    assert not torch.equal(first[1], other[1]), "shuffled anew"


# ---- the collator


def examples(count: int = 8, **extra) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.rand(3, 12, 12, generator=generator), "label": index % 5, **extra}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("collator", "given"),
    [
        (ImageCollator(5), examples()),
        (ImageCollator(5), [{"pixel_values": e["pixel_values"], "labels": e["label"]} for e in examples()]),
        (ImageCollator(5, mixup_alpha=1.0), examples(mixable=False)),  # what a model is judged by
    ],
)
def test_hard_labels(collator, given):
    batch = collator(given)
    assert torch.equal(batch["pixel_values"], torch.stack([example["pixel_values"] for example in examples()]))
    assert batch["labels"].dtype == torch.int64
    assert batch["labels"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("label", [2.7, [0.0, 1.0, 1.0]], ids=["a target of regression", "zeros and ones"])
def test_what_is_no_class_number_is_not_rounded_to_one(label):
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        ImageCollator(5)(examples(label=label))


@pytest.mark.parametrize(("kind", "seed"), [("mixup", 0), ("cutmix", 1)])
def test_labels_are_mixed_as_pixels_are(kind, seed):
    """Neighbours in the batch: mixup's share is read off the labels and explains the pixels, cutmix's is an area."""
    plain, mixed = ImageCollator(5)(examples()), ImageCollator(5, **{f"{kind}_alpha": 1.0}, seed=seed)(examples())
    images, others = plain["pixel_values"], plain["pixel_values"].roll(1, 0)
    one_hot = torch.nn.functional.one_hot(plain["labels"], 5).float()
    if kind == "mixup":
        share = mixed["labels"][1, 1]
        torch.testing.assert_close(mixed["pixel_values"], share * images + (1 - share) * others)
    else:
        own = mixed["pixel_values"] == images
        assert (own | (mixed["pixel_values"] == others)).all()
        share = own.float().mean((1, 2, 3))[:, None]
    assert ((share > 0) & (share < 1)).all()
    torch.testing.assert_close(mixed["labels"], share * one_hot + (1 - share) * one_hot.roll(1, 0), atol=1e-5, rtol=0)


def test_mixing_depends_on_seed_and_batch_alone():
    collator = ImageCollator(5, mixup_alpha=0.8, cutmix_alpha=0.8)
    first = collator(examples())
    torch.rand(5)
    state = torch.get_rng_state()
    again = collator(examples())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    other = ImageCollator(5, mixup_alpha=0.8, cutmix_alpha=0.8, seed=1)(examples())
    assert not torch.equal(first["pixel_values"], other["pixel_values"])
    assert not torch.equal(first["labels"], collator(examples()[1:] + examples()[:1])["labels"].roll(1, 0))
    plain, kinds = ImageCollator(5)(examples())["pixel_values"], set()
    for seed in range(20):
        mixed = ImageCollator(5, mixup_alpha=1.0, cutmix_alpha=1.0, seed=seed)(examples())["pixel_values"]
        kinds.add(bool(((mixed == plain) | (mixed == plain.roll(1, 0))).all()))
    assert kinds == {True, False}, "both kinds are used"


# ---- streams: every row once, dealt out to processes and workers, and taken up at any example


@pytest.fixture
def parquet(tmp_path):
    """A stream of parquet shards with so many rows each, numbered through, and the number of rows."""
    return lambda sizes: (write_numbers(tmp_path / "rows", sizes), sum(sizes))


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
    again, other = (TransformedStream(stream, Rows(), 10, seed=seed).examples(2) for seed in (1, 2))
    assert [e for e, _ in again] == [e for e, _ in first.examples(2)] != [e for e, _ in other]
    shards = [numbers(islice((e for e, _ in first.examples(epoch)), 1))[0] // 30 for epoch in range(8)]
    assert len(set(shards)) > 1, "the shards are shuffled too"
    assert numbers(TransformedStream(stream, Rows())) == list(range(total)), "unshuffled"


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
    living = loader(whole, workers=2, persistent_workers=True, collator=list)
    for epoch in (0, 5):
        whole.set_epoch(epoch)
        seen = [example for batch in living for example in batch]
        assert sorted(numbers(seen)) == list(range(total))
        assert {example["pixel_values"][0] for example in seen} == {epoch}


@pytest.mark.parametrize("kind", ["parquet", "parquet of names", "webdataset"])
def test_cut_splits_of_a_stream_in_shards(tmp_path, kind):
    """Images cut to validation and test, those of the table, are left out of all parts, which hold the rest once."""
    (tmp_path / "data").mkdir()
    images = [picture(seed) for seed in range(60)]
    for shard in range(3):
        rows = [(encoded(images[i]), i % 2) for i in range(shard * 20, shard * 20 + 20)]
        if kind != "webdataset":
            stored = [{"image": {"bytes": content, "path": None}, "label": "ab"[label]} for content, label in rows]
            for number, row in enumerate(stored if kind == "parquet of names" else ()):
                path = tmp_path / f"{shard}-{number}.png"
                path.write_bytes(row["image"]["bytes"])
                row["image"] = {"bytes": None, "path": str(path)}
            Dataset.from_list(stored).to_parquet(tmp_path / "data" / f"{shard}.parquet")
        else:
            samples = [{"png": content, "cls": b"%d" % label} for content, label in rows]
            make_tar(tmp_path / "data" / f"{shard}.tar", samples)
    data = load_data(str(tmp_path / "data"), streaming=True)
    transform = train_transform(make_processor(SMALL), AugmentationConfig(shift_px=2))
    whole = transform_split(data, "train", transform, shuffle_buffer=8)
    expected = {image["pixel_values"].numpy().tobytes() for image in whole}
    counts = {split: len(list(data.splits[split])) for split in ("train", "validation", "test")}
    table = load_data(str(tmp_path / "data"))
    for split, number in counts.items():
        read, listed = (sorted(hash(row["image"].tobytes()) for row in each.splits[split]) for each in (data, table))
        assert read == listed
        assert len(read) == number
    assert counts["train"] == len(expected) < 60
    parts = [list(whole.split(rank, 2).examples(0)) for rank in (0, 1)]
    seen = [image["pixel_values"].numpy().tobytes() for part in parts for image, _ in part]
    assert sorted(seen) == sorted(expected)
    behind = parts[1][len(parts[1]) // 2][1]
    rest = [image["pixel_values"].numpy().tobytes() for image, _ in whole.split(1, 2).examples(0, behind)]
    assert rest == seen[-len(rest) :]
    assert len(rest) == len(parts[1]) - len(parts[1]) // 2 - 1


def test_kept_pixels_are_not_read_again(tmp_path):
    """The files may go after they are checked, and training sees what it would read from them."""
    folder = make_folder(tmp_path / "data", {"a": 12, "b": 12})
    picture(5, mode="L").save(folder / "a" / "gray.png")
    read, kept = (load_data(folder, keep=keep) for keep in (False, True))
    transforms = [eval_transform(make_processor(SMALL)), train_transform(make_processor(SMALL), CROPPED)]
    transforms[1].set_epoch(1)
    splits = [(split, transform) for split in read.splits for transform in transforms]
    expected = [transform_split(read, *each, cache_bytes=0)[0]["pixel_values"] for each in splits]
    shutil.rmtree(folder)
    for each, pixels in zip(splits, expected, strict=True):
        assert torch.equal(transform_split(kept, *each, cache_bytes=0)[0]["pixel_values"], pixels)


# Of a class number: the other one of two, or one of an image without a class.
RELABELINGS = (lambda label: 1 - label, lambda label: label - 1, lambda label: label or None)


@pytest.mark.parametrize("kind", ["files", "parquet"])
def test_a_table_in_place_of_the_loaded_one_is_what_is_read(tmp_path, kind):
    """Images that were kept, and the fingerprint, are those of the rows that were there before."""
    source = make_folder(tmp_path / "data", {"a": 12, "b": 12})
    if kind == "parquet":
        write_parquet(tmp_path / "train.parquet", sorted(source.rglob("*.png")), ("a", "b"))
        source = tmp_path / "train.parquet"
    data, transform = load_data(source, keep=True), eval_transform(make_processor(SMALL))
    assert load_data(data) is data
    data.splits["train"] = data.splits["train"].shuffle(seed=1)
    assert load_data(data).fingerprint == data.fingerprint, "which does not depend on the order"
    found, expected = transform_split(data, "train", transform), data.splits["train"].with_transform(transform)
    assert all(torch.equal(found[row]["pixel_values"], expected[row]["pixel_values"]) for row in range(len(expected)))
    loaded = data.splits["train"]
    relabeled = [loaded.map(lambda row, label=label: {"label": label(row["label"])}) for label in RELABELINGS]
    for other in (loaded.select(range(9)), *relabeled):
        data.splits["train"] = other
        assert load_data(data).fingerprint != data.fingerprint


def test_a_stream_in_place_of_the_loaded_one_is_what_is_read(tmp_path):
    data = load_data(make_folder(tmp_path / "data", {"a": 12, "b": 12}), streaming=True)
    transform = eval_transform(make_processor(SMALL))
    whole = [example["pixel_values"] for example in transform_split(data, "train", transform)]
    assert data.num_examples("train") == len(whole)
    data.splits["train"] = data.splits["train"].take(3)
    assert data.num_examples("train") is None, "which is not that of the whole stream"
    for each in (data, check_images(data)):
        found = [example["pixel_values"] for example in transform_split(each, "train", transform)]
        assert torch.equal(torch.stack(found), torch.stack(whole[:3]))


def test_images_that_do_not_fit_are_not_read_to_learn_that(tmp_path):
    """The scans of photographs tell their sizes, and each takes a tenth of a second to decode."""
    folder = make_folder(tmp_path / "pets", {"cat": 9, "dog": 9})
    data = load_data(folder)
    shutil.rmtree(folder)
    settings = dict(transform=train_transform(make_processor(CONFIG), CROPPED), cache_bytes=100)
    assert not transform_split(data, "train", **settings).is_cached


@pytest.mark.parametrize("augmentation", [VARIED, CROPPED])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_is_decoded_once_by_all_workers(tmp_path, augmentation, workers):
    """Too many to decode before the first batch: after the first epoch the files may go, as all images are kept."""
    folder = make_folder(tmp_path / "pets", {"cat": 24, "dog": 24})
    picture(5, size=(30, 17), mode="L").save(folder / "cat" / "gray.png")
    data = load_data(folder)
    kept, decoded = (
        transform_split(data, "train", train_transform(make_processor(CONFIG), augmentation), cache_bytes=cache_bytes)
        for cache_bytes in (1, 0)
    )
    expected = []
    for epoch in range(3):
        decoded.set_epoch(epoch)
        expected.append(run(loader(decoded)))
    living = loader(kept, workers=workers, persistent_workers=bool(workers))
    for epoch in range(3):
        assert kept.is_cached == (epoch > 0)
        kept.set_epoch(epoch)
        assert_same(run(living), expected[epoch])
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(FileNotFoundError):
        decoded[0]
    with pytest.raises(FileNotFoundError):  # a process that is not forked shares no memory
        pickle.loads(pickle.dumps(kept))[0]


def test_images_are_kept_within_a_quarter_of_the_free_memory(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "pets", {"cat": 24, "dog": 24})
    data = load_data(folder)
    total = sum(3 * image.width * image.height for image in data.splits["train"]["image"])

    def is_kept(free: int, processes: int) -> bool:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        images = transform_split(data, "train", train_transform(make_processor(CONFIG), CROPPED), cache_bytes=1)
        run(loader(images))
        return images.is_cached

    assert is_kept(4 * total, 1)
    assert is_kept(8 * total, 2)
    assert not is_kept(4 * total - 1, 1)
    assert not is_kept(8 * total - 1, 2)


@pytest.mark.parametrize("form", ["machine", "unlimited", "job", "pages", "first version"])
def test_free_memory_is_that_of_the_control_groups(tmp_path, monkeypatch, form):
    """A job of 8 GB on a machine of 64 may not keep a quarter of 64; files in its memory may go."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * 10**9))
    group, job = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup/memory/slurm/job_1"
    (group.parent).mkdir(parents=True)
    limit, used, kind = "memory.max", "memory.current", ""
    if form == "first version":
        limit, used, kind = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    else:
        job = tmp_path / "sys/fs/cgroup/slurm/job_1"
    if form != "machine":
        (job / "step_0").mkdir(parents=True)
        group.write_text("4:cpu:/slurm\n" + ("3:memory:" if kind else "0::") + "/slurm/job_1/step_0\n")
        (job / "step_0" / limit).write_text("max\n")
        (job / limit).write_text("max\n" if form == "unlimited" else f"{8 * 10**9}\n")
        (job / used).write_text(f"{3 * 10**9}\n")
        pages = 2 * 10**9 if form == "pages" else 0
        (job / "memory.stat").write_text(f"anon {10**9}\n{kind}inactive_file {pages}\n")
    expected = {"machine": 64, "unlimited": 64, "job": 5, "pages": 7, "first version": 5}[form]
    assert measure_free_memory(tmp_path) == expected * 10**9


def test_a_file_that_changes_after_it_is_checked_is_read_as_it_is(tmp_path):
    folder = make_folder(tmp_path / "pets", {"cat": 24, "dog": 24})
    data = load_data(folder)
    images = transform_split(data, "train", train_transform(make_processor(CONFIG), CROPPED), cache_bytes=1)
    images.set_epoch(0)
    before = images[0]["pixel_values"]
    for size in ((1, 1), (40, 30)):
        for path in folder.rglob("*.png"):
            picture(7, size=size).save(path)
        assert torch.equal(images[0]["pixel_values"], before)  # it was read already
        pixels = images[1]["pixel_values"]
        fresh = transform_split(data, "train", images.transform, cache_bytes=0)
        assert torch.equal(pixels, fresh[1]["pixel_values"])
