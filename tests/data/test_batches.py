"""What a loader iterates over: cached or not, with or without workers, resumed or not, the same batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_vit.data import (
    AugmentationConfig,
    ImageCollator,
    TransformedImages,
    eval_transform,
    load_data,
    make_processor,
    train_transform,
    transform_split,
)

CONFIG = SimpleNamespace(image_size=16, num_channels=3, patch_size=4)
VARIED = AugmentationConfig(shift_px=2, rotation_degrees=10, horizontal_flip=0.5)
CROPPED = AugmentationConfig(random_resized_crop=(0.5, 1.0), randaugment=(1, 10))


@pytest.fixture(scope="module")
def digits():
    return load_data("digits")


def some(digits, count: int = 64):
    return digits.splits["train"].select(range(count))


def loader(dataset, *, workers: int = 0, batch_size: int = 16, order=None, collator=None, **options) -> DataLoader:
    collator = collator or ImageCollator(10, mixup_alpha=0.4, cutmix_alpha=0.4, seed=7)
    return DataLoader(
        dataset, batch_size=batch_size, sampler=order, num_workers=workers, collate_fn=collator, **options
    )


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
    for epoch in (0, 1):
        cached.set_epoch(epoch)
        uncached.set_epoch(epoch)
        assert_same(run(loader(cached)), run(loader(uncached)))


def test_a_cache_of_images_of_many_sizes_keeps_to_its_bytes():
    photos = load_data("photos").splits["validation"].select(range(0, 160, 4))
    total = sum(3 * image.width * image.height for image in photos["image"])
    transform = train_transform(make_processor(CONFIG), AugmentationConfig(random_resized_crop=(0.5, 1.0)))
    assert TransformedImages(photos, transform, total).is_cached
    assert not TransformedImages(photos, transform, total - 1).is_cached


def test_workers_see_every_epoch_and_do_not_change_the_batches(digits):
    dataset = TransformedImages(some(digits), train_transform(make_processor(CONFIG), VARIED, seed=3))
    living = loader(dataset, workers=2, persistent_workers=True, multiprocessing_context="fork")
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
        return Accelerator(cpu=True).prepare_data_loader(loader(dataset, order=order))

    unbroken = prepared()
    unbroken.set_epoch(2)
    whole = run(unbroken)
    torch.manual_seed(99)  # another process, another state of every generator
    resumed = skip_first_batches(prepared(), 2)
    resumed.set_epoch(2)
    rest = run(resumed)
    assert_same((whole[0][32:], whole[1][32:]), rest)


def test_accelerate_announces_the_epochs(digits):
    from accelerate import Accelerator

    dataset = TransformedImages(some(digits, 16), train_transform(make_processor(CONFIG), VARIED))
    batches = Accelerator(cpu=True).prepare_data_loader(
        DataLoader(dataset, 16, shuffle=False, collate_fn=ImageCollator(10))
    )
    first, second = run(batches), run(batches)
    assert not torch.equal(first[0], second[0]), "every epoch is varied anew"


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
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path),
            num_train_epochs=3,
            remove_unused_columns=False,
            learning_rate=0.01,
            save_strategy="no",
            per_device_train_batch_size=32,
            use_cpu=True,
            disable_tqdm=True,
        ),
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
    collator = ImageCollator(10)

    def epoch(number: int, workers: int):
        dataset.set_epoch(number)
        options = {"multiprocessing_context": "fork"} if workers else {}
        return run(loader(dataset, workers=workers, collator=collator, **options))

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


def test_mixup_mixes_labels_as_it_mixes_pixels():
    plain, mixed = ImageCollator(5)(examples()), ImageCollator(5, mixup_alpha=1.0)(examples())
    one_hot = torch.nn.functional.one_hot(plain["labels"], 5).float()
    assert mixed["labels"].shape == (8, 5)
    assert mixed["labels"].dtype == torch.float32
    # Neighbours in the batch are mixed; lambda is read off the labels, and must explain the pixels.
    share = mixed["labels"][1, 1].item()
    assert 0 < share < 1
    torch.testing.assert_close(mixed["labels"], share * one_hot + (1 - share) * one_hot.roll(1, 0))
    expected = share * plain["pixel_values"] + (1 - share) * plain["pixel_values"].roll(1, 0)
    torch.testing.assert_close(mixed["pixel_values"], expected)


def test_cutmix_weighs_labels_by_area():
    plain, mixed = ImageCollator(5)(examples()), ImageCollator(5, cutmix_alpha=1.0, seed=1)(examples())
    own = mixed["pixel_values"] == plain["pixel_values"]
    other = mixed["pixel_values"] == plain["pixel_values"].roll(1, 0)
    assert (own | other).all()
    area = own.float().mean((1, 2, 3))
    assert 0 < area[0] < 1
    one_hot = torch.nn.functional.one_hot(plain["labels"], 5).float()
    torch.testing.assert_close(
        mixed["labels"], area[:, None] * one_hot + (1 - area[:, None]) * one_hot.roll(1, 0), atol=1e-5, rtol=0
    )


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


def test_both_kinds_of_mixing_are_used():
    kinds = set()
    for seed in range(20):
        mixed = ImageCollator(5, mixup_alpha=1.0, cutmix_alpha=1.0, seed=seed)(examples())["pixel_values"]
        plain = ImageCollator(5)(examples())["pixel_values"]
        kinds.add(bool(((mixed == plain) | (mixed == plain.roll(1, 0))).all()))
    assert kinds == {True, False}
