"""Synthetic images of any number: what the formula says, the same everywhere, and data like any other."""

import hashlib
import math

import numpy as np
import pytest
from PIL import Image

from hf_vit.data import load_data
from hf_vit.data.fractals import HELD_OUT, Fractals
from hf_vit.errors import UserError

# ---- the formula once more, number by number

M = 2**64


def stream(state, position):
    """SplitMix64 in plain integers."""
    value = (state + (position + 1) * 0x9E3779B97F4A7C15) % M
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % M
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % M
    return value ^ (value >> 31)


def key_of(seed, epoch, number):
    return stream(stream(stream(0, seed), epoch), number)


def uniform(key, position):
    return (stream(key, position) >> 11) * 2.0**-53


def system(key):
    """Maps and cumulative shares of the first attempt that contracts and fills a tenth of 32 x 32 px."""
    for attempt in range(100_000):
        draws = [uniform(key_of(key, attempt, 0), position) for position in range(50)]
        count = 2 + int(draws[0] * 7)
        maps = [[2 * draws[2 + 6 * row + column] - 1 for column in range(6)] for row in range(count)]
        sums, largest = 0.0, 0.0
        for a, b, c, d, _, _ in maps:
            values = np.linalg.svd([[a, b], [c, d]], compute_uv=False)
            sums, largest = sums + values[0] + 2 * values[1], max(largest, values[0])
        scale = (5 + count + draws[1]) / 2 / sums
        if scale * largest * 1.2 >= 1:
            continue
        areas = [abs(a * d - b * c) for a, b, c, d, _, _ in maps]
        shares = [sum(areas[: row + 1]) / sum(areas) for row in range(count)]
        scaled = [[a * scale, b * scale, c * scale, d * scale, e, f] for a, b, c, d, e, f in maps]
        if sum(any(pixel) for pixel in image(scaled, shares, key, 32)) >= 0.1 * 32 * 32:
            return scaled, shares
    raise AssertionError


def image(maps, shares, key, size, jitter=0.0):
    """size * size colours of a chaos game of 2 size walkers and 2 size steps after the first 16."""
    parameter, factor = int(uniform(key, 0) * 6), 0.8 + uniform(key, 1) * 0.4
    varied = [[v * (factor if column == parameter else 1) for column, v in enumerate(row)] for row in maps]
    points = []
    for walker in range(2 * size):
        x = y = 0.0
        for step in range(16 + 2 * size):
            draw = math.floor(uniform(key, 7 + step * 2 * size + walker) * 256)
            taken = next((row for row, share in enumerate(shares) if share * 256 > draw), len(shares) - 1)
            a, b, c, d, e, f = varied[taken]
            x, y = a * x + b * y + e, c * x + d * y + f
            if step >= 16:
                points.append((x, y))
    turn, shrink, right, down = (uniform(key, 7 + (16 + 2 * size) * 2 * size + draw) for draw in range(4))
    angle = 2 * math.atan(jitter * (2 * turn - 1))
    points = [(math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y) for x, y in points]
    side = size * (1 - 0.5 * jitter * shrink)
    corner_x, corner_y = ((size - side) / 2 * (1 + jitter * (2 * draw - 1)) for draw in (right, down))
    left, top = min(x for x, _ in points), min(y for _, y in points)
    width, height = max(x for x, _ in points) - left, max(y for _, y in points) - top
    longest = max(width, height)
    counts = {}
    for x, y in points:
        column = min(size - 1, int(corner_x + (x - left + (longest - width) / 2) / longest * side))
        row = min(size - 1, int(corner_y + (y - top + (longest - height) / 2) / longest * side))
        column = column if uniform(key, 2) < 0.5 else size - 1 - column
        row = row if uniform(key, 3) < 0.5 else size - 1 - row
        counts[row, column] = counts.get((row, column), 0) + 1
    colour = [96 + int(uniform(key, channel) * 160) for channel in (4, 5, 6)]
    levels = [round(255 * math.sqrt(min(16, points) / 16)) for points in range(17)]
    places = ((row, column) for row in range(size) for column in range(size))
    return [tuple(levels[min(16, counts.get(place, 0))] * value // 255 for value in colour) for place in places]


@pytest.mark.parametrize(
    ("classes", "seed", "label", "size", "jitter"),
    [(3, 0, 0, 32, 0), (3, 0, 2, 24, 0), (5, 7, 4, 32, 0), (3, 0, 1, 32, 100), (5, 7, 4, 24, 30)],
)
def test_images_are_those_of_the_plain_formula(classes, seed, label, size, jitter):
    fractals = Fractals(classes, images=2, seed=seed, jitter=jitter)
    maps, shares = system(key_of(seed, 0, label))
    assert np.allclose(fractals.systems[0][label, : len(maps)], maps, rtol=1e-12)
    for split, epoch, index in (("train", 1, 0), ("train", 1, 1), ("test", 3, 0)):
        number = np.asarray([index * classes + label])
        made = fractals.render(split, number, size)[0].reshape(-1, 3)
        key = key_of(seed, epoch, label * 2**32 + index)
        plain = np.asarray(image(maps, shares, key, size, jitter / 100), dtype=np.uint8)
        # The scale comes from another singular value decomposition here: a point may fall into the next pixel.
        assert (made != plain).any(1).mean() < 0.01


def digest(fractals, split="train", count=20, size=32):
    return hashlib.sha256(fractals.render(split, np.arange(count), size).tobytes()).hexdigest()[:16]


def test_the_same_images_on_every_machine():
    # Recorded once. A change here makes every accuracy measured before incomparable.
    assert digest(Fractals(10, seed=0)) == "6c5ca343970acdb8"
    assert digest(Fractals(10, seed=0, jitter=50)) == "42b1d9da1ed89541"


def test_an_image_does_not_depend_on_how_many_there_are_nor_on_its_batch():
    few, many = Fractals(4, images=3, seed=2), Fractals(9, images=50, seed=2)
    # Image 2 of class 3.
    alone = few.render("train", np.asarray([2 * 4 + 3]), 24)
    assert np.array_equal(alone, many.render("train", np.asarray([2 * 9 + 3]), 24))
    together = few.render("train", np.arange(12), 24)
    assert np.array_equal(together[11:], alone)
    assert digest(few) != digest(Fractals(4, images=3, seed=3))
    assert digest(few, "test") != digest(few, "train")


def test_images_of_a_class_are_alike_and_no_two_are_equal():
    fractals = Fractals(6, images=30)
    pictures = fractals.render("train", np.arange(180), 32).max(-1).reshape(30, 6, -1) > 0
    assert len({picture.tobytes() for row in pictures for picture in row}) == 180
    assert (pictures.mean(-1) > 0.02).all(), "no empty image"
    # Mirrored ones look otherwise: the nearest of several is of the same class far more often than chance.
    train, test = pictures[:25].reshape(150, -1).astype(float), pictures[25:].reshape(30, -1).astype(float)
    distances = ((test[:, None] - train[None]) ** 2).sum(-1)
    right = (distances.argmin(1) % 6 == np.arange(30) % 6).mean()
    assert right > 0.5


# ---- as data


def test_fractals_are_data_like_any_other():
    data = load_data("fractals:classes=3,images=4,seed=1", image_size=(16, 16))
    assert {split: data.num_examples(split) for split in data.splits} == {
        "train": 12, "validation": 3 * HELD_OUT, "test": 3 * HELD_OUT,
    }  # fmt: skip
    assert data.label_names == ["fractal-00000", "fractal-00001", "fractal-00002"]
    assert list(data.splits["train"]["label"]) == [0, 1, 2] * 4
    expected = Fractals(3, seed=1).render("test", np.arange(60), 16)
    for row, pixels in zip(data.splits["test"], expected, strict=True):
        assert np.array_equal(np.asarray(row["image"]), pixels)
    digests = [seen.digest for images in data.seen.values() for seen in images]
    assert len(set(digests)) == len(digests)
    # The size changes pixels, not identity.
    assert load_data("fractals:classes=3,images=4,seed=1").fingerprint == data.fingerprint
    assert load_data("fractals:classes=3,images=4,seed=2").fingerprint != data.fingerprint
    turned = load_data("fractals:classes=3,images=4,seed=1,jitter=50", image_size=(16, 16))
    assert turned.name == "fractals:classes=3,images=4,seed=1,jitter=50"
    assert turned.fingerprint != data.fingerprint
    sized = load_data("fractals:classes=3,images=4,seed=1,size=24", image_size=(16, 16))
    assert sized.splits["train"][0]["image"].size == (24, 24)
    assert Fractals.parse("fractals") == Fractals(100, images=100, size=None, seed=0)


def test_a_stream_makes_the_same_images_as_a_table():
    name = "fractals:classes=3,images=11"
    table, data = load_data(name), load_data(name, streaming=True)
    assert data.num_examples("train") == 33
    for split in ("train", "test"):
        stored = {(row["label"], np.asarray(row["image"]).tobytes()) for row in table.splits[split]}
        streamed = [(row["label"], np.asarray(row["image"]).tobytes()) for row in data.splits[split]]
        assert len(streamed) == len(stored)
        assert set(streamed) == stored
    assert data.splits["train"].num_shards == 16
    # A million of them are no more to hold than ten.
    many = load_data("fractals:classes=10,images=1000000", streaming=True)
    assert many.num_examples("train") == 10**7
    first = next(iter(many.splits["train"]))["image"]
    assert isinstance(first, Image.Image)
    assert first.size == (32, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fractals:classes=1", "classes is 1; choose 2 to 10000"),
        ("fractals:images=0", "images is 0; choose"),
        ("fractals:size=7", "size is 7; choose 8 to 512"),
        ("fractals:colour=3", "'colour=3' is not understood; write fractals:classes=100"),
        ("fractals:classes", "'classes' is not understood"),
        ("fractals:classes=-3", "'classes=-3' is not understood"),
        (
            "fractals:classes=10,images=100000",
            "images=100000,seed=0: 1,000,000 images of 32x32 px are 2.9 GiB; read them with",
        ),
    ],
)
def test_names_that_mean_nothing_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_data(name)
