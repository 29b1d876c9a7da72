"""Images, masks and boxes go together through every transform; tiles cover an image, and joined they are the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode
from torchvision.ops import batched_nms
from transformers import ViTImageProcessor

from hf_vit.data import (
    AugmentationConfig,
    Tiles,
    dense_collator,
    dense_transforms,
    load_data,
    train_transform,
    transform_split,
)
from hf_vit.errors import UserError

VARIED = AugmentationConfig(scale_jitter=(0.5, 2.0), horizontal_flip=0.5, color_jitter=0.2)


def processor(height=48, width=64, **more):
    half = [0.5] * 3
    return ViTImageProcessor(size={"height": height, "width": width}, image_mean=half, image_std=half, **more)


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
    assert judged > 10_000
    assert equal == judged


def test_boxes_stay_around_their_masks(objects):
    train, _ = dense_transforms(processor(), "objects", VARIED)
    split = transform_split(objects, "train", train)
    split.set_epoch(3)
    seen = 0
    for example in split.__getitems__(range(24)):
        boxes, drawn = example["boxes"], example["masks"]
        assert example["pixel_values"].shape == (3, 48, 64)
        assert (drawn.shape[1:], drawn.dtype, example["original_size"]) == ((48, 64), torch.uint8, (56, 56))
        assert len(boxes) == len(drawn) == len(example["class_labels"])
        assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()
        assert (boxes >= 0).all()
        assert (boxes <= torch.tensor([64, 48, 64, 48])).all()
        for (left, top, right, bottom), mask in zip(boxes.tolist(), drawn, strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            assert left - 2 <= columns.min() <= columns.max() <= right + 2
            assert top - 2 <= rows.min() <= rows.max() <= bottom + 2
            seen += 1
    assert seen > 30


def test_evaluation_scales_boxes_and_masks_as_the_processor_does_images(objects, masks):
    _, judging = dense_transforms(processor(112, 28), "objects")
    row, example = objects.splits["test"][0], transform_split(objects, "test", judging)[0]
    expected = [[x / 2, 2 * y, (x + w) / 2, 2 * (y + h)] for x, y, w, h in row["objects"]["bbox"]]
    assert torch.equal(example["boxes"], torch.tensor(expected))
    pixels = processor(112, 28)(images=row["image"], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(example["pixel_values"], pixels)
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
    loader = torch.utils.data.DataLoader(splits[0], 8, num_workers=2, collate_fn=lambda examples: examples)
    by_workers = [example for batch in loader for example in batch]
    batch = dense_collator(by_workers[:8])
    assert batch["pixel_values"].shape == (8, 3, 48, 64)
    if target == "mask":
        assert (batch["labels"].shape, batch["labels"].dtype) == ((8, 48, 64), torch.int64)
    else:
        assert [label["image_id"] for label in batch["labels"]] == list(range(8))
    splits[1].set_epoch(1)
    other = splits[1][5]
    for one, *others in zip(backwards, alone, [by_workers[index] for index in (5, 3, 1)], strict=True):
        for same in others:
            assert one.keys() == same.keys()
            for name in one:
                equal = torch.equal(one[name], same[name]) if torch.is_tensor(one[name]) else one[name] == same[name]
                assert equal, name
    assert not torch.equal(other["pixel_values"], alone[0]["pixel_values"])


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


# ---- tiles

LAYOUTS = [
    Tiles((100, 140), (32, 48), 8), Tiles((33, 47), (32, 46), 31), Tiles((64, 64), (64, 64), 10),
    Tiles((20, 200), (64, 64), 16, margin=4), Tiles((101, 97), (40, 40), 17, margin=8), Tiles((50, 50), (7, 9), 0),
]  # fmt: skip


@pytest.mark.parametrize("tiles", LAYOUTS)
def test_weights_sum_to_one_everywhere_and_neighbours_overlap(tiles):
    total = torch.zeros(tiles.image_size)
    lefts, tops = set(), set()
    for (left, top, right, bottom), weight in zip(tiles.boxes, tiles.weights(), strict=True):
        assert weight.shape == (bottom - top, right - left)
        assert weight.shape == tuple(min(pair) for pair in zip(tiles.tile_size, tiles.image_size, strict=True))
        assert (weight >= 0).all()
        total[top:bottom, left:right] += weight
        lefts.add(left)
        tops.add(top)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)
    for starts, side in ((sorted(tops), weight.shape[0]), (sorted(lefts), weight.shape[1])):
        assert all(after + tiles.overlap <= before + side for before, after in pairwise(starts))
    assert len(tiles) == len(tops) * len(lefts)
    image = picture(*tiles.image_size)  # a function of the pixel gives the same joined
    joined = tiles.join_maps(tensor(crop).log1p() for crop in tiles.crops(image))
    assert torch.allclose(joined, tensor(image).log1p(), rtol=1e-5)


def picture(height, width):
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8))


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


@pytest.mark.parametrize("margin", [0, 4])
def test_a_network_gives_the_same_joined_when_its_margin_is_left_out(margin):
    """Two convolutions that see 4 px around; without the margin the edges of tiles differ."""
    torch.manual_seed(0)
    first, second = torch.nn.Conv2d(3, 8, 5, padding=2), torch.nn.Conv2d(8, 5, 5, padding=2)
    network = torch.nn.Sequential(first, torch.nn.GELU(), second)
    tiles = Tiles((90, 70), (40, 32), 12, margin)
    image = picture(90, 70)
    with torch.no_grad():
        whole = network(tensor(image)[None] / 255)[0]
        joined = tiles.join_maps(network(tensor(crop)[None] / 255)[0] for crop in tiles.crops(image))
    error = (joined - whole).abs().max()
    assert error < 1e-5 if margin else error > 1e-2


def test_arrays_are_read_tile_by_tile(tmp_path):
    array = np.asarray(picture(60, 50))
    np.save(tmp_path / "scan.npy", array)

    class Counting:
        largest = 0

        def __init__(self):
            self.array = np.load(tmp_path / "scan.npy", mmap_mode="r")

        def __getitem__(self, part):
            read = self.array[part]
            self.largest = max(self.largest, read.shape[0] * read.shape[1])
            return read

    source, tiles = Counting(), Tiles((60, 50), (16, 20), 4)
    for one, other in zip(tiles.crops(source), tiles.crops(Image.fromarray(array)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert source.largest == 16 * 20
    out = torch.from_file(str(tmp_path / "maps"), shared=True, size=3 * 60 * 50).reshape(3, 60, 50)
    joined = tiles.join_maps((tensor(crop) for crop in tiles.crops(source)), out)
    assert joined is out
    assert torch.allclose(joined, tensor(Image.fromarray(array)), rtol=1e-5)


def answers(tiles, objects, beyond=0, doubt=0.0):
    """What a perfect detector says of every tile: objects cut at its edges (or `beyond` px outside).

    It is less sure of what it sees less of; with `doubt` above 1 of what it sees more of.
    """
    found = []
    for left, top, right, bottom in tiles.boxes:
        rows = []
        for (x1, y1, x2, y2), label in objects:
            seen = max(x1, left), max(y1, top), min(x2, right), min(y2, bottom)
            if seen[0] < seen[2] and seen[1] < seen[3]:
                share = (seen[2] - seen[0]) * (seen[3] - seen[1]) / ((x2 - x1) * (y2 - y1))
                low = max(x1, left - beyond), max(y1, top - beyond)
                high = min(x2, right + beyond), min(y2, bottom + beyond)
                corners = low[0] - left, low[1] - top, high[0] - left, high[1] - top
                rows.append((*corners, abs(share - doubt), label))
        table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
        found.append({"boxes": table[:, :4], "scores": table[:, 4], "labels": table[:, 5].long()})
    return found


@pytest.mark.parametrize(("beyond", "doubt"), [(0, 0.0), (3, 0.0), (0, 1.1)])
def test_boxes_of_all_tiles_are_one_list(beyond, doubt):
    """Objects no larger than the overlap come back whole, once, whatever tiles see parts of them."""
    random = np.random.RandomState(4)
    tiles = Tiles((200, 260), (80, 90), 30)
    objects = []
    while len(objects) < 40:
        x, y, w, h = random.randint(230), random.randint(170), random.randint(8, 29), random.randint(8, 29)
        box = (x, y, x + w, y + h)
        if all(box[2] < o[0] or o[2] < box[0] or box[3] < o[1] or o[3] < box[1] for o, _ in objects):
            objects.append((box, random.randint(3)))
    joined = tiles.join_boxes(answers(tiles, objects, beyond, doubt))
    boxes = [tuple(map(int, box)) for box in joined["boxes"].tolist()]
    assert sorted(zip(boxes, joined["labels"].tolist(), strict=True)) == sorted(objects)
    assert torch.allclose(joined["scores"], torch.tensor(abs(1 - doubt)))
    larger = Tiles((100, 100), (40, 40), 10)  # than a tile: its parts stay
    assert len(larger.join_boxes(answers(larger, [((0, 0, 100, 100), 0)]))["boxes"]) == len(larger)


def test_one_tile_is_torchvisions_batched_nms():
    random = torch.Generator().manual_seed(1)
    corners = torch.rand(60, 2, generator=random) * 50
    boxes = torch.cat([corners, corners + 5 + 30 * torch.rand(60, 2, generator=random)], 1)
    scores, labels = torch.rand(60, generator=random), torch.randint(3, (60,), generator=random)
    joined = Tiles((100, 100), (100, 100)).join_boxes([{"boxes": boxes, "scores": scores, "labels": labels}], 0.4)
    kept = batched_nms(boxes, scores, labels, 0.4)
    assert torch.equal(joined["boxes"], boxes[kept])
    assert torch.equal(joined["scores"], scores[kept])
    none = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    assert Tiles((100, 100), (50, 50)).join_boxes([none] * 4)["boxes"].shape == (0, 4)


def test_many_boxes_of_half_precision_are_joined_in_little_memory():
    """As a detector that keeps every box finds on a satellite's image; n x n boxes would be many gigabytes."""

    class Largest(TorchFunctionMode):
        values = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            self.values = max(self.values, result.numel() if isinstance(result, torch.Tensor) else 0)
            return result

    tiles, random = Tiles((640, 640), (64, 64), 16), torch.Generator().manual_seed(0)
    found = []
    for _ in tiles.boxes:
        corners = torch.rand(20, 2, generator=random) * 60
        boxes, labels = torch.cat([corners, corners + 4], 1), torch.arange(20)
        found.append({"boxes": boxes, "scores": torch.rand(20, generator=random).bfloat16(), "labels": labels})
    with Largest() as largest:
        joined = tiles.join_boxes(found)
    assert len(joined["boxes"]) > 3000
    assert largest.values < len(joined["boxes"]) ** 2
    assert joined["scores"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Tiles((10, 10), (4, 4), 4), "the tiles overlap by 4 px, but tiles of this size need 0 to 3 px"),
        (lambda: Tiles((10, 10), (4, 4), 2, 2), "overlap by 2 px, less than twice their margin"),
        (lambda: Tiles((10, 10), (0, 4)), "give sides of at least 1 px"),
        (lambda: dense_transforms(processor(), "mask", AugmentationConfig(rotation_degrees=10)),
         "augmentation rotation_degrees does not transform masks and boxes"),
        (lambda: dense_transforms(processor(do_center_crop=True, crop_size=16), "mask"),
         "crops images, but not their masks and boxes; set its do_center_crop"),
        (lambda: train_transform(processor(), AugmentationConfig(scale_jitter=(0.5, 1))),
         "scale_jitter needs segmentation or detection"),
        (lambda: AugmentationConfig(scale_jitter=(0.5, 1), random_resized_crop=(0.5, 1)),
         "cannot be combined with random_resized_crop"),
    ],
)  # fmt: skip
def test_tiles_and_variations_that_cannot_be_are_refused(make, said):
    with pytest.raises(UserError, match=said):
        make()
