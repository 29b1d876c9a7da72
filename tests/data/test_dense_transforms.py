"""Images, masks and boxes go together through every transform, as functions of seed, epoch and image."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessor

from hf_vit.data import (
    AugmentationConfig,
    dense_collator,
    dense_transforms,
    load_data,
    train_transform,
    transform_split,
)
from hf_vit.errors import UserError

VARIED = AugmentationConfig(scale_jitter=(0.5, 2.0), horizontal_flip=0.5, color_jitter=0.2)


def processor(height=48, width=64):
    half = [0.5] * 3
    return ViTImageProcessor(size={"height": height, "width": width}, image_mean=half, image_std=half)


@pytest.fixture(scope="module")
def objects():
    return load_data("scenes:images=24,size=56", target="objects")


@pytest.fixture(scope="module")
def masks():
    return load_data("scenes:images=24,size=56", target="mask")


def painted(mask: np.ndarray) -> Image.Image:
    """Every class as its own gray: a picture from which its mask can be read."""
    return Image.fromarray(np.stack([mask * 40] * 3, axis=-1).astype(np.uint8))


@pytest.mark.parametrize("augmentation", [None, VARIED, AugmentationConfig(random_resized_crop=(0.3, 1.0))])
def test_masks_move_with_their_pixels(masks, augmentation):
    """The image is its own mask, painted; resized by the nearest pixel both stay equal whatever is varied."""
    nearest = ViTImageProcessor(
        size={"height": 40, "width": 40}, image_mean=[0.0] * 3, image_std=[1.0] * 3, resample=Image.Resampling.NEAREST
    )
    if augmentation is VARIED:  # colours would change the painting
        augmentation = AugmentationConfig(scale_jitter=(0.5, 2.0), horizontal_flip=0.5)
    train, _ = dense_transforms(nearest, "mask", augmentation)
    train.set_epoch(0)
    rows = masks.splits["train"][:16]
    pictures = {"image": [painted(np.array(mask)) for mask in rows["mask"]], "mask": rows["mask"]}
    equal = judged = 0
    for example in train.finish(train.prepare(pictures), np.arange(16, dtype=np.uint64)):
        assert example["pixel_values"].shape == (3, 40, 40)
        assert example["labels"].shape == (40, 40)
        seen = example["labels"] != 255
        read = (example["pixel_values"][0] * 255 / 40).round().long()
        equal += int((read == example["labels"])[seen].sum())
        judged += int(seen.sum())
    # v2 resizes masks by "nearest", images here by "nearest-exact", half a pixel apart
    assert judged > 10_000
    assert equal > 0.93 * judged


def test_boxes_stay_around_their_masks(objects):
    train, _ = dense_transforms(processor(), "objects", VARIED)
    split = transform_split(objects, "train", train)
    split.set_epoch(3)
    seen = 0
    for example in split.__getitems__(range(24)):
        boxes, drawn = example["boxes"], example["masks"]
        assert example["pixel_values"].shape == (3, 48, 64)
        assert drawn.shape[1:] == (48, 64)
        assert drawn.dtype == torch.uint8
        assert len(boxes) == len(drawn) == len(example["class_labels"])
        assert example["original_size"] == (56, 56)
        assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()
        assert (boxes >= 0).all()
        assert (boxes <= torch.tensor([64, 48, 64, 48])).all()
        for (left, top, right, bottom), mask in zip(boxes.tolist(), drawn, strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            assert left - 2 <= columns.min()
            assert columns.max() <= right + 2
            assert top - 2 <= rows.min()
            assert rows.max() <= bottom + 2
            seen += 1
    assert seen > 30


def test_evaluation_scales_boxes_and_masks_as_the_processor_does_images(objects, masks):
    _, judging = dense_transforms(processor(112, 28), "objects")
    row, example = objects.splits["test"][0], transform_split(objects, "test", judging)[0]
    expected = [[x / 2, 2 * y, (x + w) / 2, 2 * (y + h)] for x, y, w, h in row["objects"]["bbox"]]
    assert torch.equal(example["boxes"], torch.tensor(expected))
    assert torch.equal(
        example["pixel_values"], processor(112, 28)(images=row["image"], return_tensors="pt")["pixel_values"][0]
    )
    assert example["area"].tolist() == row["objects"]["area"]
    halves = np.stack([np.array(mask)[:, 1::2].repeat(2, axis=0) for mask in row["objects"]["segmentation"]])
    assert (example["masks"].numpy() == halves).all()
    _, judging = dense_transforms(processor(112, 28), "mask")
    labels = transform_split(masks, "test", judging)[0]["labels"]
    assert labels.dtype == torch.int64
    assert (labels.numpy() == np.array(masks.splits["test"][0]["mask"])[:, 1::2].repeat(2, axis=0)).all()


@pytest.mark.parametrize("target", ["mask", "objects"])
def test_the_variation_is_of_seed_epoch_and_image_alone(objects, masks, target):
    data = objects if target == "objects" else masks
    splits = [
        transform_split(data, "train", dense_transforms(processor(), target, VARIED, seed=7)[0], cache_bytes=cache)
        for cache in (0, 1 << 30)
    ]
    assert [split.is_cached for split in splits] == [False, True]
    for split in splits:
        split.set_epoch(2)
    backwards = splits[0].__getitems__([5, 3, 1])
    torch.manual_seed(0)
    alone = [splits[1][index] for index in (5, 3, 1)]
    splits[1].set_epoch(1)
    other = splits[1][5]
    for one, same in zip(backwards, alone, strict=True):
        assert one.keys() == same.keys()
        for name in one:
            equal = torch.equal(one[name], same[name]) if torch.is_tensor(one[name]) else one[name] == same[name]
            assert equal, name
    assert not torch.equal(other["pixel_values"], alone[0]["pixel_values"])


@pytest.mark.parametrize("target", ["mask", "objects"])
def test_workers_of_a_loader_make_the_same_batches(objects, masks, target):
    data = objects if target == "objects" else masks
    split = transform_split(data, "train", dense_transforms(processor(), target, VARIED)[0])
    split.set_epoch(0)
    batches = [
        list(torch.utils.data.DataLoader(split, batch_size=8, num_workers=workers, collate_fn=dense_collator))
        for workers in (0, 2)
    ]
    for one, same in zip(*batches, strict=True):
        assert one["pixel_values"].shape == (8, 3, 48, 64)
        assert torch.equal(one["pixel_values"], same["pixel_values"])
        if target == "mask":
            assert (one["labels"].shape, one["labels"].dtype) == ((8, 48, 64), torch.int64)
            assert torch.equal(one["labels"], same["labels"])
            continue
        for left, right in zip(one["labels"], same["labels"], strict=True):
            assert left["image_id"] == right["image_id"]
            assert all(torch.equal(left[name], right[name]) for name in ("boxes", "masks"))


def test_crowds_are_judged_but_not_learnt(objects):
    row = objects.splits["train"][0]
    crowd = {**row["objects"], "iscrowd": [1] + [0] * (len(row["objects"]["bbox"]) - 1)}
    rows = {"image": [row["image"]], "objects": [crowd]}
    training, judging = dense_transforms(processor(), "objects")
    number = len(crowd["bbox"])
    assert len(training.finish(training.prepare(rows), np.zeros(1, dtype=np.uint64))[0]["boxes"]) == number - 1
    judged = judging.prepare(rows)[0]
    assert len(judged["boxes"]) == number
    assert judged["iscrowd"].tolist() == crowd["iscrowd"]


def test_an_image_without_objects_and_a_sliver_pass(objects):
    none = {"bbox": [], "category": [], "area": [], "iscrowd": [], "segmentation": []}
    rows = {"image": [Image.new("RGB", (2000, 3)), Image.new("L", (5, 5))], "objects": [none, none]}
    for transform in dense_transforms(processor(), "objects", AugmentationConfig(scale_jitter=(0.1, 0.1))):
        for example in transform.finish(transform.prepare(rows), np.arange(2, dtype=np.uint64)):
            assert example["pixel_values"].shape == (3, 48, 64)
            assert example["boxes"].shape == (0, 4)
            assert example["masks"].shape == (0, 48, 64)


def test_what_does_not_move_masks_along_is_refused():
    with pytest.raises(UserError, match="augmentation rotation_degrees does not move masks and boxes along"):
        dense_transforms(processor(), "mask", AugmentationConfig(rotation_degrees=10))
    with pytest.raises(UserError, match="scale_jitter is of segmentation and detection"):
        train_transform(processor(), AugmentationConfig(scale_jitter=(0.5, 1)))
    with pytest.raises(UserError, match="one of scale_jitter and random_resized_crop"):
        AugmentationConfig(scale_jitter=(0.5, 1), random_resized_crop=(0.5, 1))
