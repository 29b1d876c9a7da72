"""Masks and boxes from folders as COCO's and ADE20K's and from parquet: as pycocotools and transformers read them."""

import io
import json
import struct
import sys
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
from data.conftest import encoded, make_table, picture, tags, write_rooms
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.mask import encode, toBbox
from transformers import SegformerImageProcessor

from hf_vit.data import load_data
from hf_vit.data.load import load_unlabeled
from hf_vit.errors import UserError


def refuses(source, target, said, **options) -> str:
    with pytest.raises(UserError) as error:
        load_data(str(source), target=target, **options)
    message = str(error.value)
    assert said in message.replace(f"{source}/", "")
    assert "\n" not in message
    return message


# ---- folders as COCO's

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "owl"}]
WIDTH, HEIGHT = 40, 30


def encode_mask(drawn: np.ndarray) -> dict:
    """The same mask in numbers, as COCO has them of crowds."""
    flat = drawn.ravel(order="F")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
    return {"size": [HEIGHT, WIDTH], "counts": np.diff(np.concatenate([[0], edges])).tolist()}


def annotations(seed: int, images: int, first: int = 0) -> dict:
    """Every kind of segmentation: one and two polygons, run lengths as text and, of a crowd, as numbers."""
    random, sides = np.random.RandomState(seed), {"width": WIDTH, "height": HEIGHT}
    listed = [{"id": 100 + i, "file_name": f"{first + i:03d}.png", **sides} for i in range(images)]
    told = []
    for image in listed[1:]:  # the first has no objects
        for kind in range(1 + random.randint(4)):
            left, top = random.uniform(0, 20), random.uniform(0, 15)
            wide, high = random.uniform(5, 19), random.uniform(5, 14)
            segmentation, box = [[left, top, left + wide, top, left + wide / 2, top + high]], [left, top, wide, high]
            if kind == 1:
                segmentation.append([1.0, 1.0, 6.0, 1.5, 5.0, 7.5, 2.0, 6.0])
            if kind >= 2:
                drawn = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
                drawn[int(top) : int(top + high), int(left) : int(left + wide)] = 1
                coded = encode(drawn)
                box = toBbox(coded).tolist()
                segmentation = encode_mask(drawn) if kind == 3 else coded | {"counts": coded["counts"].decode()}
            category, area = CATEGORIES[random.randint(3)]["id"], float(random.uniform(20, 200))
            told.append(
                {"id": len(told) + 1, "image_id": image["id"], "category_id": category, "bbox": box, "area": area,
                 "iscrowd": int(kind == 3), "segmentation": segmentation}
            )  # fmt: skip
    return {"images": listed, "annotations": told, "categories": CATEGORIES}


@pytest.fixture
def coco(tmp_path):
    """annotations/instances_{train,val}2017.json with train2017/ and val2017/."""
    root = tmp_path / "beasts"
    (root / "annotations").mkdir(parents=True)
    for seed, (split, images) in enumerate({"train2017": 12, "val2017": 5}.items()):
        told = annotations(seed, images, first=100 * seed)
        (root / split).mkdir()
        for number, image in enumerate(told["images"]):
            picture(100 * seed + number, (WIDTH, HEIGHT)).save(root / split / image["file_name"])
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(told))
    (root / "annotations" / "captions_val2017.json").write_text("{}")
    return root


def rewrite(root: Path, change, split="train2017") -> Path:
    place = root / "annotations" / f"instances_{split}.json"
    told = json.loads(place.read_text())
    change(told)
    place.write_text(json.dumps(told))
    return root


def test_masks_boxes_and_areas_are_those_of_pycocotools(coco):
    data = load_data(str(coco), target="objects", seed=0)
    assert (data.target, data.label_names) == ("objects", ["cat", "dog", "owl"])
    reference = COCO(coco / "annotations" / "instances_val2017.json")
    for row, number in zip(data.splits["validation"], reference.getImgIds(), strict=True):
        expected, objects = reference.loadAnns(reference.getAnnIds([number])), row["objects"]
        for field in ("bbox", "area", "iscrowd"):
            assert objects[field] == [each[field] for each in expected]
        names = [reference.loadCats([each["category_id"]])[0]["name"] for each in expected]
        assert [data.label_names[number] for number in objects["category"]] == names
        for mask, each in zip(objects["segmentation"], expected, strict=True):
            assert mask.mode == "1"
            assert (np.array(mask) == reference.annToMask(each).astype(bool)).all()
    kinds = {(type(each["segmentation"]), each["iscrowd"]) for each in reference.anns.values()}
    assert kinds == {(list, 0), (dict, 0), (dict, 1)}
    rewrite(coco, lambda told: [each.pop("area") for each in told["annotations"]], "val2017")
    for row in load_data(str(coco), target="objects").splits["validation"]:  # then it is that of the mask
        assert row["objects"]["area"] == [np.count_nonzero(mask) for mask in row["objects"]["segmentation"]]


def test_the_training_images_are_dealt_out_and_those_without_objects_are_counted(coco):
    data = load_data(str(coco), target="objects")
    assert sum(data.num_examples(split) for split in ("train", "test")) == 12
    assert data.cut == ("test",)
    assert "1 of 12 images in train have no objects" in data.notes
    told = json.loads((coco / "annotations" / "instances_train2017.json").read_text())["annotations"]
    crowds = f"{sum(each['iscrowd'] for each in told)} of {len(told)} objects in train are crowds (iscrowd 1)"
    assert f"{crowds}, which a training leaves out and AP ignores" in data.notes
    assert load_data(str(coco), target=None).fingerprint == data.fingerprint


@pytest.mark.parametrize("layout", ["beside", "images", "one file", "roboflow", "windows"])
def test_images_are_found_where_people_put_them(coco, tmp_path, layout):
    data = load_data(str(coco), target="objects")
    source = root = tmp_path / "other"
    root.mkdir()
    if layout == "windows":
        (coco / "annotations").rename(root / "annotations")
        for split in ("train2017", "val2017"):
            (coco / split).rename(root / split)
            rewrite(root, lambda told, split=split: [
                image.update(file_name=f"{split}\\{image['file_name']}") for image in told["images"]
            ], split)  # fmt: skip
    elif layout == "roboflow":
        for old, new in (("train2017", "train"), ("val2017", "valid")):
            (coco / old).rename(root / new)
            (coco / "annotations" / f"instances_{old}.json").rename(root / new / "_annotations.coco.json")
    else:
        (coco / "annotations" / "instances_train2017.json").rename(root / "labels.json")
        (coco / "train2017").rename(root / "images")
        if layout == "beside":
            for path in (root / "images").iterdir():
                path.rename(root / path.name)
        if layout == "one file":
            source = root / "labels.json"
    other = load_data(str(source), target="objects")
    images, found = ({image.digest for seen in each.seen.values() for image in seen} for each in (data, other))
    is_whole = layout in ("roboflow", "windows")
    assert found == images if is_whole else found < images
    assert (other.fingerprint == data.fingerprint) == is_whole


def test_the_fingerprint_is_of_images_boxes_and_masks(coco):
    before = load_data(str(coco), target="objects").fingerprint
    rewrite(coco, lambda told: told["annotations"].reverse())
    assert load_data(str(coco), target="objects").fingerprint == before
    moved = [[1.0, 1.0, 9.0, 1.5, 5.0, 7.5, 2.0, 6.0]]
    assert load_data(str(rewrite(coco, set_first(segmentation=moved))), target="objects").fingerprint != before


def test_masks_need_pycocotools_and_boxes_do_not(coco, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    refuses(coco, "objects", 'reading masks of objects needs pycocotools; install with pip install "hf-vit[dense]"')
    for split in ("train2017", "val2017"):
        rewrite(coco, lambda told: [each.pop("segmentation") for each in told["annotations"]], split)
    assert "segmentation" not in load_data(str(coco), target="objects").splits["train"][0]["objects"]


def set_first(**values):
    return lambda told: told["annotations"][0].update(values)


def masked(size, counts):
    return set_first(segmentation={"size": size, "counts": counts})


BAD_COCO = [
    (set_first(bbox=[3, 4, 0, 5]), "'train2017/001.png' has object 1 with an empty box of 0x5 px"),
    (lambda told: [each.update(bbox=[0.6, 0.5, 0.8, 0.9]) for each in told["annotations"]],
     "all boxes of train are in the first two pixels, as if they were shares of width and height; write x, y, width"),
    (set_first(bbox=[30, 4, 20, 5]), "with a box from (30, 4) to (50, 9) px, outside the image of 40x30"),
    (set_first(bbox=[1, 2, 3]), "with the box [1, 2, 3]; write x, y, width and height in px"),
    (set_first(bbox=[1, 2, 3, "x"]), "with the box [1, 2, 3, 'x']"),
    (set_first(category_id=8), "object 1 of the unknown class 8; use one of 3 classes (3, 7, 90)"),
    (set_first(image_id=5), "has the image_id 5, which 'images' does not list"),
    (set_first(segmentation=[[1, 1, 5, 5]]), "a polygon with fewer than three corners"),
    (masked([30, 40], [4, 5]), "a run-length encoded mask that does not fill 30x40"),
    (masked([30, 40], "PPYo1"), "a run-length encoded mask that does not fill 30x40"),
    (masked([3, 4], [4, 8]), "object 1 with a mask of 3x4 px for an image of 30x40 px"),
    (masked([30, 40], [1200]), "object 1 with an empty mask"),
    (lambda told: told["images"][1].update(width=80), "001.png' is 30x40 px, but its annotations are for 30x80 px"),
    (lambda told: told["images"][2].update(file_name="none.png"), "'train2017/none.png' is missing"),
    (lambda told: [image.update(file_name="x" + image["file_name"]) for image in told["images"]],
     "the images of instances_train2017.json of 'beasts', such as x000.png, do not exist"),
    (lambda told: told["annotations"].clear(), "no training image has objects besides crowds (iscrowd 1); annotate"),
    (lambda told: [each.update(iscrowd=1) for each in told["annotations"]], "no training image has objects besides"),
    (lambda told: told["annotations"][3].pop("category_id"),
     "entry 3 of 'annotations' in instances_train2017.json of 'beasts' has no category_id"),
    (set_first(image_id={}), "of 'beasts' has the image_id {}; write a whole number or text"),
    (set_first(category_id=[1]), "has the category_id [1]; write"),
    (set_first(area="9"), "object 1 with the area '9' and iscrowd 0; write a number for area"),
    (set_first(iscrowd="0"), "and iscrowd '0'; write a number"),
    (set_first(bbox=[1, 2, 3, 10**400]), "write x, y, width and height in px"),
    (set_first(segmentation=[[1, 1, 1e8, 1, 1e8, 1e8]]), "a polygon that is far outside the image of 30x40 px"),
    (masked([30, 40], [-1, 1201]), "a run-length encoded mask that does not fill 30x40"),
    (lambda told: told["images"][1].update(id=100), "have the id 100; give them different ids"),
    (lambda told: told["categories"].append({"id": 8, "name": "cat"}), "are named 'cat'; give them different names"),
    (lambda told: told.update(annotations={}), "is not a COCO annotation file, which is an object with"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), BAD_COCO, ids=[said[:30] for _, said in BAD_COCO])
def test_bad_annotations_are_refused_in_one_line(coco, change, said):
    refuses(rewrite(coco, change), "objects", said)
    if said.startswith("'train2017/001.png' has"):
        data = load_data(str(coco), target="objects", skip_bad_images=True)
        assert data.skipped == ["train2017/001.png"]
        assert sum(data.num_examples(split) for split in ("train", "test")) == 11


def test_what_rounding_put_outside_is_cut_off(coco):
    data = load_data(str(rewrite(coco, set_first(bbox=[-0.4, 10, 40.6, 20.5]), "val2017")), target="objects")
    assert data.splits["validation"][1]["objects"]["bbox"][0] == [0.0, 10.0, 40.0, 20.0]


def test_other_tasks_streams_and_broken_json_are_refused_in_one_line(coco):
    for target, task in (("label", "classification"), ("mask", "segmentation")):
        refuses(coco, target, f"is a folder for detection (COCO), not for {task}; choose --task detection")
    refuses(coco, "objects", "cannot be read as a stream", streaming=True)
    place = coco / "annotations" / "instances_val2017.json"
    place.write_text(place.read_text()[:-40])
    refuses(coco, "objects", "instances_val2017.json of 'beasts' cannot be read as JSON")


def test_names_are_found_in_either_unicode_form(coco):
    """Of images on the disk, and of categories in two files."""
    before = load_data(str(coco), target="objects")
    name, other = "cr\u00e8me", "cre\u0300me"
    for split, spelled in (("train2017", name), ("val2017", other)):

        def spell(told, spelled=spelled):
            told["categories"] = [{**CATEGORIES[0], "name": f"{spelled} "}, *CATEGORIES[1:]]
            for image in told["images"]:
                image["file_name"] = name + image["file_name"]

        rewrite(coco, spell, split)
        for path in list((coco / split).iterdir()):
            path.rename(path.with_name(other + path.name))
    data = load_data(str(coco), target="objects")
    assert sorted(data.label_names) == sorted([name, *(each["name"] for each in CATEGORIES[1:])])
    assert [len(table) for table in data.splits.values()] == [len(table) for table in before.splits.values()]


# ---- folders as ADE20K's

INFO = """Idx\tRatio\tTrain\tVal\tStuff\tName
1\t0.1\t3\t1\t1\twall
2\t0.1\t3\t1\t0\tbuilding, edifice
3\t0\t1\t0\t1\tsky
"""


def mask(seed: int, values: int = 4, size=(20, 16)) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, values, (size[1], size[0])).astype(np.uint8)


@pytest.fixture
def ade(tmp_path):
    """images/ and annotations/ of 12 training and 4 validation images, and objectInfo150.txt."""
    numbers = [*(("training", n) for n in range(12)), *(("validation", n) for n in range(50, 54))]
    masks = {f"{split}/{number:03d}": mask(number) for split, number in numbers}
    root = write_rooms(tmp_path / "rooms", masks, ".jpg")
    (root / "objectInfo150.txt").write_text(INFO)
    return root


def first_mask(root):
    return root / "annotations" / "training" / "000.png"


def test_labels_are_reduced_as_transformers_does(ade):
    data = load_data(str(ade), target="mask")
    assert (data.target, data.label_names, data.cut) == ("mask", ["wall", "building", "sky"], ("test",))
    reduce = SegformerImageProcessor(do_reduce_labels=True, do_resize=False)
    for number, row in zip(range(50, 54), data.splits["validation"], strict=True):
        assert row["mask"].mode == "L"
        expected = reduce(row["image"], segmentation_maps=Image.fromarray(mask(number)), return_tensors="np")
        assert (np.array(row["mask"]) == expected["labels"][0]).all()
        assert {255, 0, 1, 2} == set(np.unique(row["mask"]))
    amounts = data.seen["validation"][0].annotation.amounts
    assert amounts == {value - 1: int((mask(50) == value).sum()) for value in (1, 2, 3)}


@pytest.mark.parametrize("named", ["classes.txt", "id2label.json", None])
def test_without_ade20ks_list_values_are_classes(ade, tmp_path, named):
    """Also of a flat folder, whose masks lie in masks/, beside annotations/ of another kind."""
    (ade / "objectInfo150.txt").unlink()
    names = ["ground", "wall", "floor", "sky"]
    text = {"classes.txt": "\n".join(names) + "\n", "id2label.json": json.dumps(dict(enumerate(names)))}
    if named is not None:
        (ade / named).write_text(text[named])
    data = load_data(str(ade), target="mask")
    assert data.label_names == (names if named else ["0", "1", "2", "3"])
    assert (np.array(data.splits["validation"][0]["mask"]) == mask(50)).all()
    assert ("the data has no class names, so the classes are named 0 to 3" in data.notes) == (named is None)
    if named is not None:
        (ade / named).write_text(text[named].replace("sky", "wall"))
        refuses(ade, "mask", f"two classes of '{ade.name}' are named 'wall'; give them different names")
    flat = tmp_path / "flat"
    flat.mkdir()
    (ade / "images" / "training").rename(flat / "images")
    (ade / "annotations" / "training").rename(flat / "masks")
    (flat / "annotations").mkdir()
    (flat / "annotations" / "000.xml").touch()
    data = load_data(str(flat), target=None)
    assert (data.target, data.cut) == ("mask", ("validation", "test"))
    assert sum(data.num_examples(split) for split in data.splits) == 12


def write_gray(path: Path, values: np.ndarray, bits: int) -> None:
    """A gray PNG of few bits, which Pillow reads but does not write."""
    packed = np.packbits((values[..., None] >> np.arange(bits)[::-1] & 1).reshape(len(values), -1), axis=1)
    head = struct.pack(">IIBBBBB", values.shape[1], len(values), bits, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed))
    chunks = [kind + data for kind, data in ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b""))]
    parts = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("mode", ["P", "1", "I;16", "L", "2 bits", "4 bits"])
def test_masks_of_any_mode_hold_the_same_classes(ade, mode):
    """A palette's indices count, not its colours, and gray values of few bits as they are."""
    (ade / "objectInfo150.txt").unlink()
    for path in ade.rglob("*.png"):
        number = int(path.stem)
        values = mask(number, 2)
        picture = Image.fromarray(values * 255 if mode == "1" else values).convert("L")
        if mode == "P":
            picture.putpalette([200, 0, 0, 0, 90, 255] * 3)
        elif mode == "1":
            picture = picture.convert("1")
        elif "bits" in mode:
            write_gray(path, values, int(mode[0]))
            continue
        elif mode != "L":
            picture = Image.fromarray(values.astype(np.uint16))
        picture.save(path)
        with Image.open(path) as saved:
            assert saved.mode.startswith(mode[0])
    data = load_data(str(ade), target="mask")
    assert data.label_names == ["0", "1"]
    assert (np.array(data.splits["validation"][1]["mask"]) == mask(51, 2)).all()


def test_the_fingerprint_is_of_images_masks_and_names(ade):
    before = load_data(str(ade), target="mask").fingerprint
    Image.fromarray(mask(0)).save(first_mask(ade), compress_level=1)
    assert load_data(str(ade), target="mask").fingerprint == before
    changed = mask(0)
    changed[0, 0] = 1 + changed[0, 0] % 3
    Image.fromarray(changed).save(first_mask(ade))
    assert load_data(str(ade), target="mask").fingerprint != before


def test_names_that_repeat_are_told_apart_by_their_folders(ade):
    """Two towns number their streets alike; what is hidden is none of them. A folder beside the splits is refused."""
    for town, shift in (("rome", 0), ("bonn", 6)):
        for folder, suffix in (("images", ".jpg"), ("annotations", ".png")):
            (ade / folder / "training" / town).mkdir()
            for number in range(6):
                old = ade / folder / "training" / f"{number + shift:03d}{suffix}"
                old.rename(ade / folder / "training" / town / f"{number}{suffix}")
    hidden = ade / "annotations" / "training" / ".thumbs"
    hidden.mkdir()
    (hidden / "0.png").write_text("none")
    (ade / "objectInfo150.txt").unlink()
    data = load_data(str(ade), target="mask")
    rows, pixels = [row for split in ("train", "test") for row in data.splits[split]], {}
    for number in range(12):
        file = ade / "images" / "training" / ("rome", "bonn")[number // 6] / f"{number % 6}.jpg"
        pixels[Image.open(file).tobytes()] = mask(number)
    assert len(rows) == 12
    assert all((np.array(row["mask"]) == pixels[row["image"].tobytes()]).all() for row in rows)
    for folder in ("images", "annotations"):
        (ade / folder / "validation").rename(ade / folder / "holdout")
    refuses(ade, "mask", "'rooms/images' holds split folders and 'holdout', which is not a split; move it away")


def filled(value, kind, size=(16, 20)):
    return lambda path: Image.fromarray(np.full(size, value, kind)).save(path)


BAD_MASKS = [
    (filled(0, np.uint8, (16, 10)), "has a mask of 16x10 px, but is 16x20 px; both must have the same size"),
    (filled(9, np.uint8), "has a mask with the class 8; there are classes 0 to 2 (wall, building, sky), and 255 for"),
    (lambda path: Image.fromarray(mask(0)).save(path, "JPEG"), "has a mask saved as JPEG, which changes class numbers"),
    (lambda path: Image.new("RGB", (20, 16)).save(path), "has a color mask (mode RGB); save masks with one channel of"),
    (filled(999, np.uint16), "has a mask with the value 999; write classes as 0 to 254, and ignored pixels as 255"),
    (lambda path: path.write_text("a mask"), "has a mask that is not an image"),
    (
        lambda path: path.write_bytes(path.read_bytes()[:60]),
        "has a mask that is damaged or cannot be read (image file is trunc",
    ),
    (lambda path: path.unlink(), "has no mask; add a mask with the same name"),
]


@pytest.mark.parametrize(("change", "said"), BAD_MASKS, ids=[said[:30] for _, said in BAD_MASKS])
def test_bad_masks_are_refused_in_one_line_or_left_out(ade, change, said):
    change(first_mask(ade))
    message = refuses(ade, "mask", said).replace(str(ade / "images") + "/", "")
    assert message.startswith("image 'training/000.jpg' has ")
    assert message.endswith("to leave them out")
    assert load_data(str(ade), target="mask", skip_bad_images=True).skipped == ["training/000.jpg"]


@pytest.mark.parametrize(("drawn", "said"), [(255, "255 is ignored, so write objects with 1"), (1, "annotate")])
def test_masks_of_one_class_are_refused(ade, drawn, said):
    (ade / "objectInfo150.txt").unlink()
    for path in ade.rglob("*.png"):
        Image.fromarray(np.where(mask(int(path.stem)) == 3, drawn, 1).astype(np.uint8)).save(path)
    refuses(ade, "mask", f"the training masks hold only one class (1); {said}")


@pytest.mark.parametrize("orientation", [3, 6])
def test_annotations_of_images_that_exif_turns_are_told(ade, coco, orientation):
    for path in (*ade.glob("images/training/*"), *coco.glob("train2017/*")):
        Image.open(path).save(path, exif=tags(orientation))
    for source, target in ((ade, "mask"), (coco, "objects")):
        if orientation == 6:
            refuses(source, target, "px after its EXIF orientation rotated it")
        else:
            notes = load_data(str(source), target=target).notes
            assert sum("12 images were rotated as the EXIF orientation says" in note for note in notes) == 1


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


def test_other_tasks_and_streams_are_refused_in_one_line(ade, folder):
    refuses(ade, "label", "is a folder for segmentation (images and masks), not for classification")
    refuses(ade, "mask", "cannot be read as a stream", streaming=True)
    refuses(folder, "mask", "'pets' (folder) has labels, but no annotations for segmentation")
    refuses(ade, "mask", "has no column 'x'", label_column="x")
    for path in ade.rglob("training/*.png"):
        Image.new("L", (20, 16), 0).save(path)
    refuses(ade, "mask", "no training image has pixels of any class; annotate some")
    (ade / "id2label.json").write_text('{"1": "a"}')
    (ade / "objectInfo150.txt").unlink()
    refuses(ade, "mask", "id2label.json cannot be read")


def test_masks_are_no_images_to_learn_from_and_are_found_in_either_unicode_form(ade):
    assert len(load_unlabeled(str(ade)).table) == 12
    before = load_data(str(ade), target="mask").fingerprint
    for path in list(ade.glob("*/*/*.*")):
        path.rename(path.with_name(("cr\u00e8me" if path.suffix == ".jpg" else "cre\u0300me") + path.name))
    assert load_data(str(ade), target="mask").fingerprint == before


# ---- parquet files, as `datasets` and other programs write them


def stored(picture: Image.Image) -> dict:
    return {"bytes": encoded(picture), "path": None}


def masks_of(count: int) -> tuple[list[dict], list[dict]]:
    drawn = [Image.fromarray(mask(number, 3, (12, 9))) for number in range(count)]
    pictures = [picture(number, (12, 9)) for number in range(count)]
    return [stored(each) for each in pictures], [stored(each) for each in drawn]


def boxes_of(count: int) -> list[dict]:
    """COCO's lists, as the Hub's data sets for detection have them."""
    random = np.random.RandomState(1)
    rows = []
    for number in range(count):
        boxes = [[float(random.randint(4)), 1.0, 5.0, float(2 + random.randint(5))] for _ in range(number % 3)]
        categories, areas = [random.randint(2) for _ in boxes], [box[2] * box[3] for box in boxes]
        rows.append({"bbox": boxes, "category": categories, "area": areas})
    return rows


@pytest.mark.parametrize(("image", "column"), [("image", "mask"), ("image", "annotation"), ("pixel_values", "label")])
@pytest.mark.parametrize("typed", [True, False])
def test_masks_in_parquet(tmp_path, image, column, typed):
    pictures, drawn = masks_of(20)
    features = Features({image: ImageFeature(), column: ImageFeature()}) if typed else None
    path = tmp_path / "rooms.parquet"
    Dataset.from_dict({image: pictures, column: drawn}, features=features).to_parquet(path)
    data = load_data(str(path), target="mask")
    assert data.label_names == ["0", "1", "2"]
    read = {row["image"].tobytes(): np.array(row["mask"]) for split in data.splits.values() for row in split}
    for file, mask in zip(pictures, drawn, strict=True):
        pixels = Image.open(io.BytesIO(file["bytes"])).tobytes()
        assert (read[pixels] == np.array(Image.open(io.BytesIO(mask["bytes"])))).all()
    if typed:
        assert load_data(str(path), target=None).target == "mask"


@pytest.mark.parametrize("shape", ["lists", "entries"])
@pytest.mark.parametrize("names", [["cat", "dog"], None])
def test_objects_in_parquet(tmp_path, shape, names):
    pictures, _ = masks_of(20)
    rows = boxes_of(20)
    category = ClassLabel(names=names) if names else Value("int64")
    fields = {"bbox": List(Value("float64")), "category": category, "area": Value("float64")}
    if shape == "lists":
        feature, stored = {key: List(value) for key, value in fields.items()}, rows
    else:
        feature = List(fields)
        stored = [[dict(zip(row, entry, strict=True)) for entry in zip(*row.values(), strict=True)] for row in rows]
    features = Features({"image": ImageFeature(), "image_id": Value("int64"), "objects": feature})
    path = tmp_path / "pets.parquet"
    columns = {"image": pictures, "image_id": list(range(20)), "objects": stored}
    Dataset.from_dict(columns, features=features).to_parquet(path)
    data = load_data(str(path), target="objects")
    assert load_data(str(path), target=None).fingerprint == data.fingerprint
    assert data.label_names == (names or ["0", "1"])
    read = {row["image"].tobytes(): row["objects"] for split in data.splits.values() for row in split}
    for file, row in zip(pictures, rows, strict=True):
        objects = read[Image.open(io.BytesIO(file["bytes"])).tobytes()]
        assert objects == {**row, "iscrowd": [0] * len(row["bbox"])}
    assert any("images in train have no objects" in note for note in data.notes)


def test_generated_scenes_come_back_from_parquet(tmp_path):
    """Masks of objects, too."""
    scenes = load_data("scenes:images=20,size=32", target="objects")
    for split in ("train", "validation", "test"):
        scenes.splits[split].select(range(20)).to_parquet(tmp_path / f"{split}.parquet")
    data = load_data(str(tmp_path), target="objects")
    assert data.label_names == scenes.label_names
    for old, new in zip(scenes.splits["validation"].select(range(20)), data.splits["validation"], strict=True):
        masks = [row["objects"].pop("segmentation") for row in (old, new)]
        assert old["objects"] == new["objects"]
        for one, other in zip(*masks, strict=True):
            assert one.tobytes() == other.tobytes()


def test_masks_of_folders_come_back_from_parquet_in_another_process(ade, coco, monkeypatch):
    read = {"mask": load_data(str(ade), target="mask"), "objects": load_data(str(coco), target="objects")}
    for target, data in read.items():
        (ade.parent / target).mkdir()
        for split, table in data.splits.items():
            table.to_parquet(ade.parent / target / f"{split}.parquet")
    for name in ("ClassMask", "RunLengthMask"):  # which only the package knows
        monkeypatch.delitem(datasets.features.features._FEATURE_TYPES, name)
    monkeypatch.delitem(sys.modules, "hf_vit.data.mask_features")
    for target, data in read.items():
        again = load_data(str(ade.parent / target), target=target)
        for split, seen in data.seen.items():
            assert [scan.annotation for scan in again.seen[split]] == [scan.annotation for scan in seen]


ONE_BOX = [[1.0, 1, 2, 2]]


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"bbox": ONE_BOX}, "has the fields bbox, but every object needs 'bbox' (x, y, width and height in px)"),
        ({"bbox": [[1.0, 1, 20, 2]], "category": [0]}, "train image 0' has object 1 with a box from (1, 1) to"),
        ({"bbox": ONE_BOX, "category": [0, 1]}, "has 1 boxes, but 2 of 'category'"),
        ({"bbox": ONE_BOX, "category": [0.5]}, "have the type float; write whole numbers or names"),
    ],
)
def test_bad_objects_are_refused_in_one_line(tmp_path, objects, said):
    features = Features({"image": ImageFeature(), "objects": Dataset.from_list([objects] * 9).features})
    columns = {"image": masks_of(9)[0], "objects": [objects] * 9}
    Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "pets.parquet")
    refuses(tmp_path / "pets.parquet", "objects", said)


def test_a_table_of_labels_is_refused_for_masks(tmp_path, folder):
    path = tmp_path / "pets.parquet"
    make_table(folder).to_parquet(path)
    refuses(path, "mask", "name them 'image' and 'mask'")
    refuses(path, "objects", "none is named 'objects'")
    assert load_data(str(path), target=None).target == "label"
    table = make_table(folder)
    table.add_column("depth", table["image"], feature=table.features["image"]).to_parquet(path)
    assert load_data(str(path), target=None, label_column="label").target == "label"
    with pytest.raises(UserError, match="which ones hold images and masks is unclear"):
        load_data(str(path), target="mask", label_column="label")


@pytest.mark.parametrize("divided", [False, True], ids=["files", "column"])
@pytest.mark.parametrize("target", ["mask", "objects"])
def test_a_split_that_hides_its_annotations_is_left_out(tmp_path, target, divided):
    pictures, drawn = masks_of(20)
    if target == "mask":
        features, borne = Features({"image": ImageFeature(), "mask": ImageFeature()}), drawn
    else:
        kinds = {"bbox": List(Value("float64")), "category": Value("int64"), "area": Value("float64")}
        fields = {name: List(kind) for name, kind in kinds.items()}
        features, borne = Features({"image": ImageFeature(), "objects": fields}), boxes_of(20)
    column = list(features)[1]
    if divided:
        columns = {"image": pictures + pictures[:5], column: [*borne[:9], *[None] * 5, *borne[9:]]}
        columns["split"] = ["train"] * 9 + ["test"] * 5 + ["train"] * (len(pictures) - 9)
        features = Features({**features, "split": Value("string")})
        Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "rows.parquet")
    else:
        Dataset.from_dict({"image": pictures, column: borne}, features=features).to_parquet(tmp_path / "train.parquet")
        hidden = {"image": pictures[:5], column: [None] * 5}
        Dataset.from_dict(hidden, features=features).to_parquet(tmp_path / "test.parquet")
    data = load_data(str(tmp_path), target=target)
    assert f"split 'test' of '{tmp_path.name}' was left out, because '{column}' is empty there" in data.notes
    assert data.cut == ("validation", "test")


@pytest.mark.parametrize("target", ["mask", "objects"])
def test_a_strangers_table_that_names_files_is_refused(tmp_path, monkeypatch, target):
    """Images, masks and objects' masks of a Hub data set must be in it: nothing else of this machine is read."""
    secret = tmp_path / "secret.png"
    Image.new("L", (12, 9)).save(secret)
    pictures, drawn = masks_of(4)
    elsewhere = {"bytes": None, "path": str(secret)}
    if target == "mask":
        features = Features({"image": ImageFeature(), "mask": ImageFeature()})
        columns = {"image": pictures, "mask": [*drawn[:3], elsewhere]}
    else:
        fields = {"bbox": List(List(Value("float64"))), "category": List(Value("int64"))}
        features = Features({"image": ImageFeature(), "objects": {**fields, "segmentation": List(ImageFeature())}})
        objects = {"bbox": [[1.0, 1, 3, 3]], "category": [0], "segmentation": [elsewhere]}
        columns = {"image": pictures, "objects": [objects] * 4}
    table = Dataset.from_dict(columns, features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda *given, **more: {"train": table})
    info = type("Info", (), {"sha": "abc", "siblings": ()})
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *given, **more: info)
    with pytest.raises(UserError, match=r"names a file instead of an image|with a mask that only names"):
        load_data("user/rooms", target=target)
