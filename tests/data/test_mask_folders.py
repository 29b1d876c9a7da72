"""Folders of images and masks as ADE20K's, and tables with a column of masks: read, checked, in any mode."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers import SegformerImageProcessor

from hf_vit.data import load_data
from hf_vit.data.load import load_unlabelled
from hf_vit.errors import UserError

INFO = """Idx\tRatio\tTrain\tVal\tStuff\tName
1\t0.1\t3\t1\t1\twall
2\t0.1\t3\t1\t0\tbuilding, edifice
3\t0\t1\t0\t1\tsky
"""


def mask(seed: int, values: int = 4, size=(20, 16)) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, values, (size[1], size[0])).astype(np.uint8)


@pytest.fixture
def ade(tmp_path, make):
    """images/ and annotations/ of 12 training and 4 validation images, and objectInfo150.txt."""
    root = tmp_path / "rooms"
    for split, count, first in (("training", 12, 0), ("validation", 4, 50)):
        for folder in ("images", "annotations"):
            (root / folder / split).mkdir(parents=True)
        for number in range(first, first + count):
            make.picture(number, (20, 16)).save(root / "images" / split / f"{number:03d}.jpg")
            Image.fromarray(mask(number)).save(root / "annotations" / split / f"{number:03d}.png")
    (root / "objectInfo150.txt").write_text(INFO)
    return root


def first_mask(root):
    return root / "annotations" / "training" / "000.png"


def test_labels_are_reduced_as_transformers_does(ade):
    data = load_data(str(ade), target="mask")
    assert data.target == "mask"
    assert data.label_names == ["wall", "building", "sky"]
    assert data.cut == ("test",)
    reduce = SegformerImageProcessor(do_reduce_labels=True, do_resize=False)
    for number, row in zip(range(50, 54), data.splits["validation"], strict=True):
        assert row["mask"].mode == "L"
        expected = reduce(row["image"], segmentation_maps=Image.fromarray(mask(number)), return_tensors="np")
        assert (np.array(row["mask"]) == expected["labels"][0]).all()
        assert {255, 0, 1, 2} == set(np.unique(row["mask"]))


def test_pixels_of_every_class_are_counted(ade):
    data = load_data(str(ade), target="mask")
    amounts = data.seen["validation"][0].annotation.amounts
    assert amounts == {value - 1: int((mask(50) == value).sum()) for value in (1, 2, 3)}


@pytest.mark.parametrize("named", ["classes.txt", "id2label.json", None])
def test_without_ade20ks_list_values_are_classes(ade, named):
    (ade / "objectInfo150.txt").unlink()
    names = ["ground", "wall", "floor", "sky"]
    if named == "classes.txt":
        (ade / named).write_text("\n".join(names) + "\n")
    if named == "id2label.json":
        (ade / named).write_text(json.dumps(dict(enumerate(names))))
    data = load_data(str(ade), target="mask")
    assert data.label_names == (names if named else ["0", "1", "2", "3"])
    assert (np.array(data.splits["validation"][0]["mask"]) == mask(50)).all()
    assert ("nothing names the classes, so they are called 0 to 3" in data.notes) == (named is None)


@pytest.mark.parametrize("mode", ["P", "1", "I;16", "L"])
def test_masks_of_any_mode_hold_the_same_classes(ade, mode):
    """A palette's indices count, not its colours."""
    (ade / "objectInfo150.txt").unlink()
    for path in ade.rglob("*.png"):
        number = int(path.stem)
        values = mask(number, 2)
        picture = Image.fromarray(values * 255 if mode == "1" else values).convert("L")
        if mode == "P":
            picture.putpalette([200, 0, 0, 0, 90, 255] * 3)
        elif mode == "1":
            picture = picture.convert("1")
        elif mode != "L":
            picture = Image.fromarray(values.astype(np.uint16))
        picture.save(path)
        with Image.open(path) as saved:
            assert saved.mode.startswith(mode[0])
    data = load_data(str(ade), target="mask")
    assert data.label_names == ["0", "1"]
    assert (np.array(data.splits["validation"][1]["mask"]) == mask(51, 2)).all()


def test_images_and_masks_without_splits_and_in_a_folder_of_masks(ade, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    (ade / "images" / "training").rename(flat / "images")
    (ade / "annotations" / "training").rename(flat / "masks")
    (flat / "classes.txt").write_text("a\nb\nc\nd\n")
    data = load_data(str(flat), target=None)
    assert data.target == "mask"
    assert data.cut == ("validation", "test")
    assert sum(data.num_examples(split) for split in data.splits) == 12


def test_the_fingerprint_is_of_images_masks_and_names(ade):
    before = load_data(str(ade), target="mask").fingerprint
    Image.fromarray(mask(0)).save(first_mask(ade), compress_level=1)
    assert load_data(str(ade), target="mask").fingerprint == before
    changed = mask(0)
    changed[0, 0] = 1 + changed[0, 0] % 3
    Image.fromarray(changed).save(first_mask(ade))
    assert load_data(str(ade), target="mask").fingerprint != before


def test_names_that_repeat_are_told_apart_by_their_folders(ade):
    """Two towns number their streets alike; what is hidden is none of them."""
    for town, shift in (("rome", 0), ("bonn", 6)):
        for folder, suffix in (("images", ".jpg"), ("annotations", ".png")):
            (ade / folder / "training" / town).mkdir()
            for number in range(6):
                old = ade / folder / "training" / f"{number + shift:03d}{suffix}"
                old.rename(ade / folder / "training" / town / f"{number}{suffix}")
    (ade / "annotations" / "training" / ".thumbs").mkdir()
    (ade / "annotations" / "training" / ".thumbs" / "0.png").write_text("none")
    (ade / "objectInfo150.txt").unlink()
    data = load_data(str(ade), target="mask")
    pixels = {
        make_pixels(ade, town, number): mask(number + shift)
        for town, shift in (("rome", 0), ("bonn", 6))
        for number in range(6)
    }
    rows = [row for split in ("train", "test") for row in data.splits[split]]
    assert len(rows) == 12
    for row in rows:
        assert (np.array(row["mask"]) == pixels[row["image"].tobytes()]).all()


def make_pixels(root, town, number) -> bytes:
    with Image.open(root / "images" / "training" / town / f"{number}.jpg") as opened:
        return opened.tobytes()


def break_file(path):
    path.write_bytes(path.read_bytes()[:60])


BAD = {
    "another size": (
        lambda path: Image.fromarray(mask(0, size=(10, 16))).save(path),
        "image 'training/000.jpg' has a mask of 16x10 px, but is 16x20 px; both must be of one size",
    ),
    "an unknown class": (
        lambda path: Image.fromarray(np.full((16, 20), 9, np.uint8)).save(path),
        "has a mask with the class 8; there are classes 0 to 2 (wall, building, sky), and 255 for what is not judged",
    ),
    "colour": (
        lambda path: Image.new("RGB", (20, 16)).save(path),
        "has a mask in colour (mode RGB); needed: one channel of class numbers, such as mode L",
    ),
    "too many": (
        lambda path: Image.fromarray(np.full((16, 20), 999, np.uint16)).save(path),
        "has a mask with the value 999; needed: classes 0 to 254, or 255 for what is not judged",
    ),
    "no image": (lambda path: path.write_text("a mask"), "has a mask that is not an image"),
    "cut off": (break_file, "has a mask that is corrupt or cannot be read"),
    "none": (lambda path: path.unlink(), "has no mask; add one of the same name"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_masks_are_refused_in_one_line_or_left_out(ade, what):
    change, said = BAD[what]
    change(first_mask(ade))
    with pytest.raises(UserError) as error:
        load_data(str(ade), target="mask")
    message = str(error.value).replace(str(ade / "images") + "/", "")
    assert said in message
    assert message.startswith("image 'training/000.jpg' has ")
    assert message.endswith("(--skip-bad-images) to go on without it")
    data = load_data(str(ade), target="mask", skip_bad_images=True)
    assert data.skipped == ["training/000.jpg"]


def test_classes_that_no_training_image_has_are_told(ade):
    """Also where the cut took the only image that has one."""
    data = load_data(str(ade), target="mask")
    assert not any("in no training image" in note for note in data.notes)
    (row,) = [row for row, seen in enumerate(data.seen["test"]) if seen.name.endswith(".jpg")][:1]
    name = data.seen["test"][row].name.replace("images", "annotations").replace(".jpg", ".png")
    for path in ade.rglob("*.png"):
        values = mask(int(path.stem))
        Image.fromarray(values if str(path) == name else np.where(values == 3, 1, values).astype(np.uint8)).save(path)
    assert "1 of 3 classes (sky) are in no training image" in load_data(str(ade), target="mask").notes


def test_masks_of_nothing_but_the_ignored_are_refused(ade):
    for path in ade.rglob("training/*.png"):
        Image.new("L", (20, 16), 0).save(path)
    with pytest.raises(UserError, match="the training images have no pixels of any class; annotate some of them"):
        load_data(str(ade), target="mask")


def test_other_tasks_and_streams_are_refused_in_one_line(ade, folder):
    with pytest.raises(UserError, match=r"is a folder for segmentation .images and masks., not for classification"):
        load_data(str(ade))
    with pytest.raises(UserError, match="not streamed"):
        load_data(str(ade), target="mask", streaming=True)
    with pytest.raises(UserError, match=r"'pets' .folder. has labels, but nothing for segmentation"):
        load_data(str(folder), target="mask")
    with pytest.raises(UserError, match="has no column 'x'"):
        load_data(str(ade), target="mask", label_column="x")
    (ade / "id2label.json").write_text('{"1": "a"}')
    (ade / "objectInfo150.txt").unlink()
    with pytest.raises(UserError, match=r"id2label\.json cannot be read"):
        load_data(str(ade), target="mask")


def test_masks_are_no_images_to_learn_from(ade):
    assert len(load_unlabelled(str(ade)).table) == 12


def test_masks_are_found_in_either_unicode_form(ade):
    before = load_data(str(ade), target="mask").fingerprint
    for path in list(ade.glob("*/*/*.*")):
        path.rename(path.with_name(("cr\u00e8me" if path.suffix == ".jpg" else "cre\u0300me") + path.name))
    assert load_data(str(ade), target="mask").fingerprint == before
