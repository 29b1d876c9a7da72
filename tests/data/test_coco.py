"""Folders and files as COCO's: masks, boxes and areas as pycocotools reads them; what is wrong is told in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools import mask as coded
from pycocotools.coco import COCO
from transformers import ViTImageProcessor

from hf_vit.data import AugmentationConfig, dense_transforms, load_data, transform_split
from hf_vit.errors import UserError

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 90, "name": "owl"}]
WIDTH, HEIGHT = 40, 30


def annotations(seed: int, images: int, first: int = 0) -> dict:
    """Every kind of segmentation: one and two polygons, run lengths as numbers and as text, a crowd."""
    random = np.random.RandomState(seed)
    listed = [
        {"id": 100 + i, "file_name": f"{first + i:03d}.png", "width": WIDTH, "height": HEIGHT} for i in range(images)
    ]
    told = []
    for image in listed[1:]:  # the first has no objects
        for kind in range(1 + random.randint(4)):
            left, top = random.uniform(0, 20), random.uniform(0, 15)
            wide, high = random.uniform(5, 19), random.uniform(5, 14)
            corners = [left, top, left + wide, top, left + wide / 2, top + high]
            segmentation, box, crowd = [corners], [left, top, wide, high], 0
            if kind == 1:
                segmentation = [corners, [1.0, 1.0, 6.0, 1.5, 5.0, 7.5, 2.0, 6.0]]
            if kind >= 2:
                drawn = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
                drawn[int(top) : int(top + high), int(left) : int(left + wide)] = 1
                segmentation, crowd = coded.encode(drawn), int(kind == 3)
                box = coded.toBbox(segmentation).tolist()
                segmentation["counts"] = segmentation["counts"].decode()
            if kind == 3:
                flat = drawn.ravel(order="F")
                edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
                segmentation = {"size": [HEIGHT, WIDTH], "counts": np.diff(np.concatenate([[0], edges])).tolist()}
            told.append(
                {
                    "id": len(told) + 1,
                    "image_id": image["id"],
                    "category_id": CATEGORIES[random.randint(3)]["id"],
                    "bbox": box,
                    "area": float(random.uniform(20, 200)),
                    "iscrowd": crowd,
                    "segmentation": segmentation,
                }
            )
    return {"images": listed, "annotations": told, "categories": CATEGORIES}


@pytest.fixture
def coco(tmp_path, make):
    """annotations/instances_{train,val}2017.json with train2017/ and val2017/."""
    root = tmp_path / "beasts"
    (root / "annotations").mkdir(parents=True)
    for seed, (split, images) in enumerate({"train2017": 12, "val2017": 5}.items()):
        told = annotations(seed, images, first=100 * seed)
        (root / split).mkdir()
        for number, image in enumerate(told["images"]):
            make.picture(100 * seed + number, (WIDTH, HEIGHT)).save(root / split / image["file_name"])
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
    assert data.target == "objects"
    assert data.label_names == ["cat", "dog", "owl"]
    for split, year in (("validation", "val2017"),):
        reference = COCO(coco / "annotations" / f"instances_{year}.json")
        table = data.splits[split]
        assert len(table) == len(reference.getImgIds())
        for row, number in zip(table, reference.getImgIds(), strict=True):
            expected = reference.loadAnns(reference.getAnnIds([number]))
            objects = row["objects"]
            assert objects["bbox"] == [each["bbox"] for each in expected]
            assert objects["area"] == [each["area"] for each in expected]
            assert objects["iscrowd"] == [each["iscrowd"] for each in expected]
            names = [reference.loadCats([each["category_id"]])[0]["name"] for each in expected]
            assert [data.label_names[number] for number in objects["category"]] == names
            for mask, each in zip(objects["segmentation"], expected, strict=True):
                assert mask.mode == "1"
                assert (np.array(mask) == reference.annToMask(each).astype(bool)).all()
    kinds = {type(each["segmentation"]) for each in reference.anns.values()}
    assert kinds == {list, dict}
    assert {each["iscrowd"] for each in reference.anns.values()} == {0, 1}


def test_the_training_images_are_dealt_out_and_those_without_objects_are_counted(coco):
    data = load_data(str(coco), target="objects")
    assert sum(data.num_examples(split) for split in ("train", "test")) == 12
    assert data.cut == ("test",)
    assert "1 of 12 images of train have no objects" in data.notes
    assert load_data(str(coco), target=None).fingerprint == data.fingerprint


def test_they_are_trained_on_like_any_others(coco):
    """Run lengths become masks [n, H, W] of the image in the model's size."""
    data = load_data(str(coco), target="objects")
    processor = ViTImageProcessor(
        size={"height": 2 * HEIGHT, "width": 2 * WIDTH}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    training, judging = dense_transforms(processor, "objects", AugmentationConfig(horizontal_flip=1.0))
    flipped, whole = (transform_split(data, "validation", transform)[1] for transform in (training, judging))
    reference = [np.array(mask) for mask in data.splits["validation"][1]["objects"]["segmentation"]]
    assert (whole["masks"].numpy() == [mask.repeat(2, 0).repeat(2, 1) for mask in reference]).all()
    single = whole["iscrowd"] == 0
    assert torch.equal(flipped["masks"], whole["masks"][single].flip(-1))
    assert flipped["class_labels"].tolist() == whole["class_labels"][single].tolist()


@pytest.mark.parametrize("layout", ["beside", "images", "one file", "roboflow"])
def test_images_are_found_where_people_put_them(coco, tmp_path, layout):
    data = load_data(str(coco), target="objects")
    root = tmp_path / "other"
    root.mkdir()
    source = root
    train = coco / "train2017"
    if layout == "roboflow":
        for old, new in (("train2017", "train"), ("val2017", "valid")):
            (coco / old).rename(root / new)
            (coco / "annotations" / f"instances_{old}.json").rename(root / new / "_annotations.coco.json")
    else:
        (coco / "annotations" / "instances_train2017.json").rename(root / "labels.json")
        train.rename(root / "images")
        if layout == "beside":
            for path in (root / "images").iterdir():
                path.rename(root / path.name)
        if layout == "one file":
            source = root / "labels.json"
    other = load_data(str(source), target="objects")
    images = {image.digest for seen in data.seen.values() for image in seen}
    found = {image.digest for seen in other.seen.values() for image in seen}
    assert found == images if layout == "roboflow" else found < images
    assert (other.fingerprint == data.fingerprint) == (layout == "roboflow")


def test_the_fingerprint_is_of_images_boxes_and_masks(coco):
    before = load_data(str(coco), target="objects").fingerprint
    assert (
        load_data(str(rewrite(coco, lambda told: told["annotations"].reverse())), target="objects").fingerprint
        == before
    )

    def move(told):
        told["annotations"][0]["segmentation"][0][0] += 4

    assert load_data(str(rewrite(coco, move)), target="objects").fingerprint != before


def test_boxes_without_masks_do_without_pycocotools(coco, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    for split in ("train2017", "val2017"):
        rewrite(coco, lambda told: [each.pop("segmentation") for each in told["annotations"]], split)
    data = load_data(str(coco), target="objects")
    assert "segmentation" not in data.splits["train"][0]["objects"]


def test_masks_need_pycocotools_and_the_error_says_so(coco, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    with pytest.raises(UserError, match=r"masks of objects need pycocotools; pip install 'hf-vit\[dense\]'"):
        load_data(str(coco), target="objects")


def set_first(**values):
    return lambda told: told["annotations"][0].update(values)


BAD = {
    "an empty box": (set_first(bbox=[3, 4, 0, 5]), "'train2017/001.png' has object 1 with an empty box of 0x5 px"),
    "a box outside": (
        set_first(bbox=[30, 4, 20, 5]),
        "with a box from (30, 4) to (50, 9) px, outside the image of 40x30",
    ),
    "no box": (set_first(bbox=[1, 2, 3]), "with the box [1, 2, 3]; needed: x, y, width and height in px"),
    "not a number": (set_first(bbox=[1, 2, 3, "x"]), "with the box [1, 2, 3, 'x']"),
    "an unknown class": (set_first(category_id=8), "object 1 of the unknown class 8; there are 3 (3, 7, 90)"),
    "a lonely annotation": (set_first(image_id=5), "entry 0 of 'annotations' is of the image 5, which is not listed"),
    "two corners": (set_first(segmentation=[[1, 1, 5, 5]]), "a polygon that is not three or more corners"),
    "run lengths": (set_first(segmentation={"size": [30, 40], "counts": [4, 5]}), "run lengths that do not fill 30x40"),
    "broken run lengths": (
        set_first(segmentation={"size": [30, 40], "counts": "PPYo1"}),
        "run lengths that do not fill 30x40",
    ),
    "a mask of another size": (
        set_first(segmentation={"size": [3, 4], "counts": [4, 8]}),
        "object 1 with a mask of 3x4 px, where the image is 30x40 px",
    ),
    "an empty mask": (set_first(segmentation={"size": [30, 40], "counts": [1200]}), "object 1 with an empty mask"),
    "another image": (
        lambda told: told["images"][1].update(width=80),
        "'train2017/001.png' is 30x40 px, but its annotations are for 30x80 px",
    ),
    "no image": (lambda told: told["images"][2].update(file_name="none.png"), "'train2017/none.png' is not there"),
    "no images": (
        lambda told: [image.update(file_name="x" + image["file_name"]) for image in told["images"]],
        "the images of instances_train2017.json of 'beasts', such as x000.png, are not there",
    ),
    "no objects": (lambda told: told["annotations"].clear(), "the training images have no objects; annotate some"),
    "a lost field": (
        lambda told: told["annotations"][3].pop("category_id"),
        "instances_train2017.json of 'beasts': entry 3 of 'annotations' has no category_id",
    ),
    "a repeated id": (lambda told: told["images"][1].update(id=100), "two images have the id 100"),
    "a repeated name": (
        lambda told: told["categories"].append({"id": 8, "name": "cat"}),
        "two categories are called 'cat'",
    ),
    "a list": (lambda told: told.update(annotations={}), "is no file of COCO annotations; needed: lists of images"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_annotations_are_refused_in_one_line(coco, what):
    change, said = BAD[what]
    with pytest.raises(UserError) as error:
        load_data(str(rewrite(coco, change)), target="objects")
    assert said in str(error.value).replace(str(coco) + "/", "")
    assert "\n" not in str(error.value)


def test_bad_images_can_be_left_out(coco):
    data = load_data(str(rewrite(coco, set_first(bbox=[3, 4, 0, 5]))), target="objects", skip_bad_images=True)
    assert data.skipped == ["train2017/001.png"]
    assert sum(data.num_examples(split) for split in ("train", "test")) == 11


def test_what_rounding_put_outside_is_cut_off(coco):
    data = load_data(str(rewrite(coco, set_first(bbox=[-0.4, 10, 40.6, 20.5]), "val2017")), target="objects")
    assert data.splits["validation"][1]["objects"]["bbox"][0] == [0.0, 10.0, 40.0, 20.0]


def test_other_tasks_are_refused_in_one_line(coco):
    for target, task in (("label", "classification"), ("mask", "segmentation")):
        with pytest.raises(
            UserError, match=rf"is a folder for detection .COCO., not for {task}; choose --task detection"
        ):
            load_data(str(coco), target=target)
    with pytest.raises(UserError, match="has objects, which are not streamed"):
        load_data(str(coco), target="objects", streaming=True)


def test_broken_json_is_no_traceback(coco):
    place = coco / "annotations" / "instances_val2017.json"
    place.write_text(place.read_text()[:-40])
    with pytest.raises(UserError, match=r"instances_val2017\.json of 'beasts' cannot be read as JSON"):
        load_data(str(coco), target="objects")


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
