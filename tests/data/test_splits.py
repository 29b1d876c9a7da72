"""Cutting splits: exact sizes, in proportion, seeded, and refused where a class is too small."""

import numpy as np
import pytest

from hf_vit.data.splits import cut_rows, missing_splits, split_name, stratified_parts, streamed_part
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


def test_the_seed_chooses():
    labels = uneven_labels()
    first, again, other = (stratified_parts(labels, {"test": 50}, seed=seed)["test"].tolist() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("counts", [[3, 3], [3, 500], [4, 7, 9, 3, 3], [3] * 40, [900, 3, 3, 3]])
def test_every_class_is_in_every_split(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    names = [f"class {i}" for i in range(len(counts))]
    parts = cut_rows(labels, names, ["validation", "test"], seed=0)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(sum(counts)))
    for rows in parts.values():
        assert set(labels[rows]) == set(range(len(counts)))
    if sum(counts) >= 10 * len(counts):
        assert len(parts["validation"]) == len(parts["test"]) == round(sum(counts) / 10)


def test_a_class_with_one_image_is_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"class 'owl' has 1 image; to cut validation and test .* at least 3: add"):
        cut_rows(np.asarray([0] * 20 + [1]), ["cat", "owl"], ["validation", "test"], seed=0)
    with pytest.raises(UserError, match=r"class 'cat' has 2 images \(2 classes are that small\)"):
        cut_rows(np.asarray([0, 0, 1]), ["cat", "owl"], ["validation", "test"], seed=0)
    parts = cut_rows(np.asarray([0, 0, 1, 1]), ["cat", "owl"], ["test"], seed=0)
    assert len(parts["train"]) == len(parts["test"]) == 2


def test_a_class_that_only_the_bigger_data_set_has_needs_no_images():
    parts = cut_rows(np.asarray([0] * 5 + [2] * 5), ["cat", "dog", "owl"], ["test"], seed=0)
    assert len(parts["test"]) == 2


def test_only_splits_beside_train_are_missing():
    assert missing_splits(["train"]) == ["validation", "test"]
    assert missing_splits(["train", "test"]) == ["validation"]
    assert missing_splits(["test"]) == []


@pytest.mark.parametrize(
    ("text", "name"), [("Val", "validation"), ("TRAIN", "train"), ("testing", "test"), ("a", None)]
)
def test_split_names(text, name):
    assert split_name(text) == name


def test_streams_are_dealt_ten_percent_each_by_content():
    contents = [f"image {i}".encode() * 20 for i in range(4000)]
    parts = [streamed_part(content, ["validation", "test"], seed=0) for content in contents]
    # Binomial(4000, 0.1): standard deviation 19.
    assert abs(parts.count("validation") - 400) < 95
    assert abs(parts.count("test") - 400) < 95
    other = [streamed_part(content, ["validation", "test"], seed=1) for content in contents]
    agreement = np.mean([a == b for a, b in zip(parts, other, strict=True)])
    assert agreement < 0.75, "another seed, another cut"
