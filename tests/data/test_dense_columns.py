"""Parquet files with a column of masks or of objects, as `datasets` and other programs write them."""

import io

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from hf_vit.data import load_data
from hf_vit.errors import UserError


def file_of(picture: Image.Image) -> dict:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def masks_of(count: int, make) -> tuple[list[dict], list[dict]]:
    random = np.random.RandomState(0)
    drawn = [Image.fromarray(random.randint(0, 3, (9, 12)).astype(np.uint8)) for _ in range(count)]
    return [file_of(make.picture(number, (12, 9))) for number in range(count)], list(map(file_of, drawn))


def boxes_of(count: int) -> list[dict]:
    """COCO's lists, as the Hub's data sets for detection have them."""
    random = np.random.RandomState(1)
    rows = []
    for number in range(count):
        boxes = [[float(random.randint(4)), 1.0, 5.0, float(2 + random.randint(5))] for _ in range(number % 3)]
        rows.append(
            {"bbox": boxes, "category": [random.randint(2) for _ in boxes], "area": [b[2] * b[3] for b in boxes]}
        )
    return rows


@pytest.mark.parametrize(("image", "column"), [("image", "mask"), ("image", "annotation"), ("pixel_values", "label")])
@pytest.mark.parametrize("typed", [True, False])
def test_masks_in_parquet(tmp_path, make, image, column, typed):
    pictures, drawn = masks_of(20, make)
    features = Features({image: ImageFeature(), column: ImageFeature()}) if typed else None
    path = tmp_path / "rooms.parquet"
    Dataset.from_dict({image: pictures, column: drawn}, features=features).to_parquet(path)
    data = load_data(str(path), target="mask")
    assert data.label_names == ["0", "1", "2"]
    read = {row["image"].tobytes(): np.array(row["mask"]) for split in data.splits.values() for row in split}
    for picture, mask in zip(pictures, drawn, strict=True):
        pixels = Image.open(io.BytesIO(picture["bytes"])).tobytes()
        assert (read[pixels] == np.array(Image.open(io.BytesIO(mask["bytes"])))).all()
    if typed:
        assert load_data(str(path), target=None).target == "mask"


@pytest.mark.parametrize("shape", ["lists", "entries"])
@pytest.mark.parametrize("names", [["cat", "dog"], None])
def test_objects_in_parquet(tmp_path, make, shape, names):
    pictures, _ = masks_of(20, make)
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
    for picture, row in zip(pictures, rows, strict=True):
        objects = read[Image.open(io.BytesIO(picture["bytes"])).tobytes()]
        assert objects == {**row, "iscrowd": [0] * len(row["bbox"])}
    assert any("images of train have no objects" in note for note in data.notes)


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


BAD = {
    "no category": ({"bbox": [[1.0, 1, 2, 2]]}, "has the fields bbox; needed: 'bbox' (x, y, width and height in px)"),
    "outside": ({"bbox": [[1.0, 1, 20, 2]], "category": [0]}, "train image 0' has object 1 with a box from (1, 1) to"),
    "uneven": ({"bbox": [[1.0, 1, 2, 2]], "category": [0, 1]}, "has 1 boxes, but 2 of 'category'"),
    "floats": ({"bbox": [[1.0, 1, 2, 2]], "category": [0.5]}, "are of type float; needed: whole numbers or names"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_objects_are_refused_in_one_line(tmp_path, make, what):
    objects, said = BAD[what]
    path = tmp_path / "pets.parquet"
    features = Features({"image": ImageFeature(), "objects": Dataset.from_list([objects] * 9).features})
    pictures, _ = masks_of(9, make)
    Dataset.from_dict({"image": pictures, "objects": [objects] * 9}, features=features).to_parquet(path)
    with pytest.raises(UserError) as error:
        load_data(str(path), target="objects")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_of_labels_is_refused_for_masks(tmp_path, make, folder):
    path = tmp_path / "pets.parquet"
    make.table(folder).to_parquet(path)
    for target, said in (
        ("mask", "needed: one of images and one of masks"),
        ("objects", "needed: one such as 'objects'"),
    ):
        with pytest.raises(UserError, match=said):
            load_data(str(path), target=target)
    assert load_data(str(path), target=None).target == "label"


@pytest.mark.parametrize("target", ["mask", "objects"])
def test_a_split_that_hides_its_annotations_is_left_out(tmp_path, make, target):
    pictures, drawn = masks_of(20, make)
    if target == "mask":
        features, borne = Features({"image": ImageFeature(), "mask": ImageFeature()}), drawn
    else:
        fields = {
            "bbox": List(List(Value("float64"))),
            "category": List(Value("int64")),
            "area": List(Value("float64")),
        }
        features, borne = Features({"image": ImageFeature(), "objects": fields}), boxes_of(20)
    column = list(features)[1]
    Dataset.from_dict({"image": pictures, column: borne}, features=features).to_parquet(tmp_path / "train.parquet")
    hidden = {"image": pictures[:5], column: [None] * 5}
    Dataset.from_dict(hidden, features=features).to_parquet(tmp_path / "test.parquet")
    data = load_data(str(tmp_path), target=target)
    assert f"split 'test' of '{tmp_path.name}' has nothing in '{column}' and was left out" in data.notes
    assert data.cut == ("validation", "test")


@pytest.mark.parametrize("target", ["mask", "objects"])
def test_a_strangers_table_that_names_files_is_refused(tmp_path, make, monkeypatch, target):
    """Images, masks and objects' masks of a Hub data set must be in it: nothing else of this machine is read."""
    secret = tmp_path / "secret.png"
    Image.new("L", (12, 9)).save(secret)
    pictures, drawn = masks_of(4, make)
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
    monkeypatch.setattr(
        "hf_vit.data.dense.reading.open_hub", lambda source, streaming: ({"train": table}, [], "a" * 40)
    )
    with pytest.raises(UserError, match=r"names a file in place of an image|with a mask that is not in the table"):
        load_data("user/rooms", target=target)
