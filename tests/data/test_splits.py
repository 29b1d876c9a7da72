"""Splits: the built-in sets' exact and in proportion, others by content; refused where a class is too small."""

import hashlib

import numpy as np
import pytest

from hf_vit.data.splits import cut_rows, missing_splits, part_of, split_name, stratified_parts
from hf_vit.errors import UserError


def uneven_labels() -> np.ndarray:
    return np.random.RandomState(3).permutation(np.repeat([0, 1, 2], [10, 100, 390]))


def test_parts_are_a_partition_in_proportion():
    labels = uneven_labels()
    parts = stratified_parts(labels, {"validation": 50, "test": 100}, seed=1)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(500))
    assert [np.bincount(labels[parts[name]]).tolist() for name in ("validation", "test", "train")] == [
        [1, 10, 39],
        [2, 20, 78],
        [7, 70, 273],
    ]
    first, again, other = (stratified_parts(labels, {"test": 50}, seed=seed)["test"].tolist() for seed in (0, 0, 1))
    assert first == again != other


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def cut(images: list[str], labels: list[int], missing=("validation", "test"), seed: int = 0):
    """{name of an image: its split}, and the notes."""
    names = [f"class {number}" for number in range(max(labels) + 1)]
    parts, notes = cut_rows([digest(image) for image in images], labels, names, missing, seed=seed)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(images)))
    return {images[row]: part for part, rows in parts.items() for row in rows}, notes


@pytest.mark.parametrize("counts", [[3, 3], [3, 500], [4, 7, 9, 3, 3], [3] * 400, [900, 3, 3, 3]])
@pytest.mark.parametrize("missing", [("validation", "test"), ("test",), ("validation",)])
def test_no_class_loses_its_training_images_and_no_split_is_empty(counts, missing):
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    images = [f"{label}-{place}" for place, label in enumerate(labels)]
    parts, notes = cut(images, labels, missing)
    trained = {labels[place] for place, image in enumerate(images) if parts[image] == "train"}
    assert trained == set(range(len(counts)))
    assert set(parts.values()) == {"train", *missing}
    plain = {image: part_of(digest(image), missing, seed=0) for image in images}
    assert bool(notes) == (parts != plain), "what is not by content alone is told"


def test_an_image_is_never_moved_by_others():
    """Sets that grow, are renamed and shuffled: what was trained on is never in another split later."""
    random = np.random.RandomState(0)
    labels = {f"image {number}": number % 3 for number in range(300)}
    some = sorted(labels)
    for _ in range(20):
        random.shuffle(some)
        few, notes = cut(some[:150], [labels[image] for image in some[:150]])
        many, later = cut(some, [labels[image] for image in some])
        assert notes == later == []
        assert all(many[image] == part for image, part in few.items())


def test_tiny_sets_that_grow_never_test_on_what_they_trained_on():
    """Splits that would be empty get the images that are last to be given back."""
    random = np.random.RandomState(0)
    moved = 0
    for trial in range(200):
        images = [f"{trial}-{number}" for number in range(30)]
        labels = {image: number % 3 for number, image in enumerate(images)}
        before, notes = cut(images[:15], [labels[image] for image in images[:15]])
        after, _ = cut(images, [labels[image] for image in images])
        moved += bool(notes)
        if not any("no training image" in note for note in notes):
            assert all(after[image] == "train" for image, part in before.items() if part == "train"), trial
        random.shuffle(images)
    assert moved > 50


def test_a_split_that_is_given_leaves_the_others_where_they_were():
    """Whoever adds a folder of validation images later has the same test images."""
    digests = [digest(number) for number in range(500)]
    both, one = (
        [part_of(each, missing, seed=0) for each in digests] for missing in (("validation", "test"), ("test",))
    )
    assert [part == "test" for part in both] == [part == "test" for part in one]


def test_a_class_with_one_image_is_refused_with_the_remedy():
    pets, few = [digest(number) for number in range(21)], [0] * 20 + [1]
    with pytest.raises(UserError, match=r"class 'owl' has 1 image; to cut validation and test .* at least 3: add"):
        cut_rows(pets, few, ["cat", "owl"], ["validation", "test"], seed=0)
    with pytest.raises(UserError, match=r"class 'cat' has 2 different images \(2 classes are that small\)"):
        cut_rows(pets[:3], [0, 0, 1], ["cat", "owl"], ["validation", "test"], seed=0)
    with pytest.raises(UserError, match="class 'owl' has 1 image"):
        cut_rows([*pets[:20], *pets[:1] * 5], [0] * 20 + [1] * 5, ["cat", "owl"], ["test"], seed=0)
    parts, _ = cut_rows(pets[:4], [0, 0, 1, 1], ["cat", "owl"], ["test"], seed=0)
    assert len(parts["train"]) + len(parts["test"]) == 4
    parts, _ = cut_rows(pets[:10], [0] * 5 + [2] * 5, ["cat", "dog", "owl"], ["test"], seed=0)
    assert parts["test"].size, "a class that only a bigger data set has needs no images"


def test_names_of_splits():
    assert [split_name(text) for text in ("Val", "TRAIN", "testing", "a")] == ["validation", "train", "test", None]
    assert missing_splits(["train"]) == ["validation", "test"]
    assert missing_splits(["train", "test"]) == ["validation"]
    assert missing_splits(["test"]) == []


def test_ten_percent_each_by_content():
    digests = [digest(number) for number in range(4000)]
    parts = [part_of(each, ["validation", "test"], seed=0) for each in digests]
    # Binomial(4000, 0.1): standard deviation 19.
    assert abs(parts.count("validation") - 400) < 95
    assert abs(parts.count("test") - 400) < 95
    other = [part_of(each, ["validation", "test"], seed=1) for each in digests]
    # Independent cuts agree on .8 x .8 + .1 x .1 + .1 x .1 of the images.
    assert np.mean([a == b for a, b in zip(parts, other, strict=True)]) == pytest.approx(0.66, abs=0.04)


def test_the_rule_is_frozen():
    """By other means: splits of published models must be the same in ten years."""
    for number in range(200):
        place = int(digest(f"0 {digest(number)}")[:12], 16) / 16**12
        part = "validation" if place < 0.1 else "test" if place < 0.2 else "train"
        assert part_of(digest(number), ("validation", "test"), seed=0) == part
