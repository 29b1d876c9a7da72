"""Generated scenes: exact masks and boxes, correct occlusion, the same from a seed in every process."""

import hashlib
import re

import numpy as np
import pytest

from hf_vit.data import load_data
from hf_vit.data.builtin import photograph_tiles
from hf_vit.data.scenes import HELD_OUT, SHAPES, Scenes
from hf_vit.errors import UserError

SMALL = "scenes:images=30,size=48"


@pytest.fixture(scope="module")
def objects():
    return load_data(SMALL, target="objects")


@pytest.fixture(scope="module")
def masks():
    return load_data(SMALL, target="mask")


def test_both_targets_tell_of_the_same_scenes(objects, masks):
    assert objects.label_names == list(SHAPES)
    assert masks.label_names == ["background", *SHAPES]
    for one, other in zip(objects.splits["train"], masks.splits["train"], strict=True):
        assert one["image"].tobytes() == other["image"].tobytes()
        classes = np.zeros((48, 48), dtype=int)
        shapes = one["objects"]
        for category, mask in zip(shapes["category"], shapes["segmentation"], strict=True):
            assert mask.mode == "1"
            assert not classes[np.array(mask)].any(), "masks of one scene do not overlap"
            classes[np.array(mask)] = category + 1
        assert other["mask"].mode == "L"
        assert (classes == np.array(other["mask"])).all()


def test_boxes_and_areas_are_those_of_the_masks(objects):
    for row in objects.splits["validation"]:
        shapes = row["objects"]
        for (left, top, width, height), area, mask in zip(
            shapes["bbox"], shapes["area"], shapes["segmentation"], strict=True
        ):
            pixels = [(x, y) for y in range(48) for x in range(48) if mask.getpixel((x, y))]
            columns, rows = zip(*pixels, strict=True)
            assert (left, top) == (min(columns), min(rows))
            assert (left + width, top + height) == (max(columns) + 1, max(rows) + 1)
            assert area == len(pixels)
        assert shapes["iscrowd"] == [0] * len(shapes["bbox"])
        assert 1 <= len(shapes["bbox"]) <= 3


def test_without_clutter_shapes_are_of_one_colour_whole_and_apart():
    """No border or other shape takes anything away from them."""
    numbers = list[int]()
    for number in range(100):
        scene = Scenes(seed=2).render("train", number, 96)
        numbers.append(len(scene.shapes))
        for shape, mask in zip(scene.shapes, scene.masks, strict=True):
            assert (scene.image[mask] == scene.image[mask][0]).all()
            assert mask[1:-1, 1:-1].sum() == mask.sum()
            columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
            sides = np.ptp(columns) + 1, np.ptp(rows) + 1
            assert min(sides) >= 0.25 * 96
            if SHAPES[shape] in ("disc", "ring"):  # what these cover follows from their boxes
                full = np.pi * sides[0] * sides[1] / 4 * (0.7 if SHAPES[shape] == "ring" else 1)
                assert abs(mask.sum() - full) < 0.06 * full
    assert set(numbers) == {1, 2, 3}


def test_what_lies_on_top_is_what_is_seen():
    """A plain shape shows its one colour on every pixel of its mask, also where it lies over another."""
    plain = overlapping = 0
    scenes = Scenes(clutter=1)
    for number in range(60):
        scene = scenes.render("train", number, 64)
        last = scene.image[scene.masks[-1]]
        if (last == last[0]).all():
            plain += 1
            left, top = np.flatnonzero(scene.masks[-1].any(0)), np.flatnonzero(scene.masks[-1].any(1))
            around = scene.instances[top[0] : top[-1] + 1, left[0] : left[-1] + 1]
            overlapping += len(set(np.unique(around)) - {0, len(scene.shapes)}) > 0
    assert plain >= 15
    assert overlapping >= 5


def test_an_earlier_shape_keeps_half_of_itself_and_discs_are_round():
    """A disc that nothing hides covers pi r^2 within a few percent, and its box is as wide as high."""
    whole = 0
    for number in range(200):
        scene = Scenes(clutter=1, seed=3).render("test", number, 128)
        for shape, mask in zip(scene.shapes, scene.masks, strict=True):
            columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
            inside = min(columns[0], rows[0]) > 0 and max(columns[-1], rows[-1]) < 127
            width, height = np.ptp(columns) + 1, np.ptp(rows) + 1
            if SHAPES[shape] == "disc" and inside and abs(width - height) <= 1:
                full = np.pi * (width / 2) ** 2
                assert mask.sum() >= 0.45 * full
                whole += abs(mask.sum() - full) < 0.05 * full
    assert whole >= 10


def test_a_larger_set_continues_a_smaller_one_and_other_seeds_differ(objects):
    larger = load_data("scenes:images=40,size=48", target="objects")
    pixels = [row["image"].tobytes() for row in objects.splits["train"]]
    assert [row["image"].tobytes() for row in larger.splits["train"]][:30] == pixels
    assert len(set(pixels)) == 30
    other = load_data("scenes:images=30,size=48,seed=1", target="objects")
    assert not {row["image"].tobytes() for row in other.splits["train"]} & set(pixels)
    assert other.fingerprint != objects.fingerprint != larger.fingerprint


def test_splits_have_tiles_of_their_own(objects):
    assert [objects.num_examples(split) for split in ("train", "validation", "test")] == [30, HELD_OUT, HELD_OUT]
    tiles = {split: {tile.tobytes() for tile in photograph_tiles(split)} for split in objects.splits}
    assert {split: len(content) for split, content in tiles.items()} == {"train": 64, "validation": 32, "test": 32}
    assert not tiles["train"] & tiles["test"]
    assert not tiles["validation"] & (tiles["train"] | tiles["test"])


def test_masks_are_the_same_in_every_process_and_order():
    """As in the process in which this digest was recorded."""
    scenes = [Scenes(clutter=1, seed=5).render("train", number, 40) for number in reversed(range(20))][::-1]
    content = b"".join(scene.instances.tobytes() + bytes(scene.shapes) for scene in scenes)
    digest = hashlib.sha256(content).hexdigest()
    assert digest == "94304f972245a02ecf26b00c19cc0b0cc8a9bca1d9f107c3f57c897fce125898"


def test_a_scene_is_the_same_at_every_size():
    small, large = (Scenes().render("train", 4, size) for size in (40, 120))
    assert small.shapes == large.shapes
    assert (small.instances == large.instances[1::3, 1::3]).mean() == 1.0  # the middles of 3 x 3 px are the same places


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("scenes:images=0", "mask", "images is 0; choose 1 to 1000000"),
        ("scenes:shapes=3", "mask", "'shapes=3' is not understood; write scenes:images=1000,size=64,clutter=0,seed=0"),
        ("scenes", "label", "scenes have no label an image"),
        ("photos", "mask", "'photos' has neither masks nor objects"),
        ("scenes:images=500000,size=512", "mask", "366.2 GiB; ask for fewer or smaller ones"),
    ],
)
def test_wrong_names_and_targets_are_refused_in_one_line(name, target, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load_data(name, target=target)
