"""Small copies of VTAB's data sets; a tenth of the gray of an image tells which it is: mostly its class."""

import csv
import hashlib
import importlib.util
import io
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from evaluation.tiny import fit_probe, make_classifier, make_processor, pixels_of
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image
from torchvision.datasets import CIFAR100, DTD, SVHN, Flowers102

from hf_vit.errors import UserError
from hf_vit.evaluation import evaluate_protocol
from hf_vit.evaluation.protocols import vtab
from hf_vit.evaluation.protocols.vtab import GROUPS, PUBLISHED, TASKS, VtabResult, group_means
from hf_vit.results.facts import Facts


def picture(number: int, side: int = 4) -> Image.Image:
    """All of one gray, which survives JPEG."""
    return Image.fromarray(np.full((side, side, 3), 10 * (number % 25), dtype=np.uint8))


def number_of(image: Image.Image) -> int:
    return round(np.asarray(image.convert("RGB"))[0, 0, 0] / 10)


def folders(root: Path, classes: list[str], images: int) -> None:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(images):
            picture(label).save(root / name / f"{name}_{number:04d}.jpg")


def _fingerprint(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def caltech101(root: Path) -> None:
    place = root / "caltech101/101_ObjectCategories"
    folders(place, ["BACKGROUND_Google", "Faces", "accordion"], 34)
    (place / "BACKGROUND_Google/tmp").write_text("as in the archive")


def cifar100(root: Path, patch: pytest.MonkeyPatch) -> None:
    place = root / "cifar-100-python"
    place.mkdir(parents=True)
    lists = {"train": 12, "test": 5}
    for name, count in lists.items():
        data = np.stack([np.full(3072, 10 * row, dtype=np.uint8) for row in range(count)])
        with (place / name).open("wb") as file:
            pickle.dump({"data": data, "fine_labels": [99 - row for row in range(count)]}, file)
    with (place / "meta").open("wb") as file:
        pickle.dump({"fine_label_names": [str(label) for label in range(100)]}, file)
    patch.setattr(CIFAR100, "train_list", [["train", _fingerprint(place / "train")]])
    patch.setattr(CIFAR100, "test_list", [["test", _fingerprint(place / "test")]])
    patch.setattr(CIFAR100, "meta", dict(CIFAR100.meta, md5=_fingerprint(place / "meta")))


def dtd(root: Path) -> None:
    place = root / "dtd/dtd"
    folders(place / "images", ["banded", "dotted", "woven"], 3)
    (place / "labels").mkdir()
    for number, split in enumerate(("train", "val", "test")):
        lines = [f"{name}/{name}_{number:04d}.jpg\n" for name in ("banded", "dotted", "woven")]
        (place / f"labels/{split}1.txt").write_text("".join(lines))


def flowers102(root: Path, patch: pytest.MonkeyPatch) -> None:
    place = root / "flowers-102"
    (place / "jpg").mkdir(parents=True)
    labels = [3, 1, 2, 2, 1, 3]
    for number, label in enumerate(labels, 1):
        picture(label - 1).save(place / f"jpg/image_{number:05d}.jpg")
    scipy.io.savemat(place / "imagelabels.mat", {"labels": np.array([labels])})
    scipy.io.savemat(place / "setid.mat", {"trnid": [[1, 4]], "valid": [[2, 3]], "tstid": [[6, 5]]})
    for name in ("label", "setid"):
        file = Flowers102._file_dict[name][0]
        patch.setitem(Flowers102._file_dict, name, (file, _fingerprint(place / file)))


def pets(root: Path) -> None:
    place = root / "oxford-iiit-pet"
    (place / "images").mkdir(parents=True)
    (place / "annotations").mkdir()
    for split, numbers in {"trainval": (1, 2), "test": (7,)}.items():
        lines = []
        for label, name in enumerate(("Abyssinian", "american_bulldog")):
            for number in numbers:
                picture(label).save(place / f"images/{name}_{number}.jpg")
                lines.append(f"{name}_{number} {label + 1} {label + 1} 1\n")
        (place / f"annotations/{split}.txt").write_text("".join(lines))


def sun397(root: Path) -> None:
    place = root / "SUN397"
    names = ["/a/abbey", "/b/badlands", "/d/door/indoor"]
    for label, name in enumerate(names):
        folder = place / name[1:]
        folder.mkdir(parents=True)
        for number in range(5):
            picture(label).save(folder / f"sun_{label}{number}.jpg")
    (place / "ClassName.txt").write_text("".join(f"{name}\n" for name in names))


def svhn(root: Path, patch: pytest.MonkeyPatch) -> None:
    place = root / "svhn"
    place.mkdir(parents=True)
    for split, count in {"train": 10, "test": 4}.items():
        digits = np.arange(1, count + 1)  # the digit 0 is published as 10
        pixels = np.stack([np.full((32, 32, 3), 10 * (digit % 10), dtype=np.uint8) for digit in digits], axis=-1)
        path = place / f"{split}_32x32.mat"
        scipy.io.savemat(path, {"X": pixels, "y": digits[:, None].astype(np.uint8)})
        patch.setitem(SVHN.split_list, split, [*SVHN.split_list[split][:2], _fingerprint(path)])


def eurosat(root: Path) -> None:
    folders(root / "eurosat/2750", ["AnnualCrop", "Forest", "SeaLake"], 10)


def resisc45(root: Path) -> None:
    folders(root / "NWPU-RESISC45", ["airplane", "airport", "wetland"], 5)


def retinopathy(root: Path) -> None:
    place = root / "diabetic-retinopathy-detection"
    for folder in ("train", "test"):
        (place / folder).mkdir(parents=True)
    levels = {"train": [("10_left", 0), ("10_right", 4)], "test": [("1_left", 1), ("1_right", 2), ("2_left", 3)]}
    usage = {"1_left": "Private", "1_right": "Public", "2_left": "Private"}
    for folder, rows in levels.items():
        for name, _ in rows:
            picture(9, side=60).save(place / folder / f"{name}.jpeg")
    with (place / "trainLabels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "level"), *levels["train"]])
    with (place / "retinopathy_solution.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "level", "Usage"), *((*row, usage[row[0]]) for row in levels["test"])])


def clevr(root: Path) -> None:
    """Scene n has 3 + n objects, the closest of which is 7.9 + n / 2 away."""
    place = root / "clevr/CLEVR_v1.0"
    (place / "scenes").mkdir(parents=True)
    for split, count in {"train": 8, "val": 3, "test": 2}.items():
        (place / "images" / split).mkdir(parents=True)
        scenes = []
        for number in range(count):
            name = f"CLEVR_{split}_{number:06d}.png"
            picture(number).save(place / "images" / split / name)
            depths = [20.0] * (number + 2) + [7.9 + number / 2]
            scenes.append({"image_filename": name, "objects": [{"pixel_coords": [1, 2, depth]} for depth in depths]})
        if split != "test":
            (place / f"scenes/CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": scenes[::-1]}))


def dsprites(root: Path) -> None:
    """Sprite n of 320 has x = n mod 32 and orientation n mod 40, and the bits of n in its first row."""
    place = root / "dsprites"
    place.mkdir(parents=True)
    numbers = np.arange(320)
    classes = np.stack([0 * numbers, 0 * numbers, 0 * numbers, numbers % 40, numbers % 32, 0 * numbers], axis=1)
    images = np.zeros((320, 64, 64), dtype=np.uint8)
    images[:, 0, :9] = (numbers[:, None] >> np.arange(9)) & 1
    name = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
    author = np.array({"author": "x"}, dtype=object)
    np.savez_compressed(place / name, metadata=author, imgs=images, latents_classes=classes)


KITTI_LINE = "{} 0.00 0 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.2 1.0 1.5 {} -1.5\n"
# What is in front of the camera in image n, and the class of that.
KITTI_SCENES = (
    ([("Car", 7.5), ("Truck", 40.0)], 0), ([("Pedestrian", 2.0), ("Van", 8.5)], 1),
    ([("Truck", 20.5), ("Tram", 3.0)], 2), ([("Cyclist", 4.0), ("DontCare", -1000.0)], 3), ([], 3),
)  # fmt: skip


def kitti(root: Path, images: int = 40) -> None:
    """Four images a drive."""
    place = root / "Kitti/raw"
    for folder in ("training/image_2", "training/label_2", "mapping"):
        (place / folder).mkdir(parents=True)
    for number in range(images):
        picture(number % 5).save(place / f"training/image_2/{number:06d}.png")
        lines = [KITTI_LINE.format(*each) for each in KITTI_SCENES[number % 5][0]]
        (place / f"training/label_2/{number:06d}.txt").write_text("".join(lines))
    order = np.random.default_rng(1).permutation(images)
    drives = [f"2011_09_26 2011_09_26_drive_{number // 4:04d}_sync {number:010d}\n" for number in range(images)]
    (place / "mapping/train_mapping.txt").write_text("".join(drives))
    (place / "mapping/train_rand.txt").write_text(",".join(str(number + 1) for number in order))


def small_norb(root: Path, count: int = 36) -> None:
    """Image n: elevation n mod 9, azimuth 2 (n mod 18); what the second camera sees is black."""
    place = root / "smallnorb"
    place.mkdir(parents=True)
    for part, instances in {"training": "46789", "testing": "01235"}.items():
        numbers = np.arange(count)
        pixels = np.zeros((count, 2, 6, 6), dtype=np.uint8)
        pixels[:, 0] = (10 * (numbers % 18))[:, None, None]
        info = np.stack([0 * numbers, numbers % 9, 2 * (numbers % 18), 0 * numbers], axis=1).astype("<i4")
        for kind, array in {"dat": pixels, "info": info, "cat": info[:, 0]}.items():
            code = 507333717 if kind == "dat" else 507333716
            sizes = [*array.shape, *[1] * (3 - array.ndim)]
            head = struct.pack(f"<{2 + len(sizes)}i", code, array.ndim, *sizes)
            name = f"smallnorb-5x{instances}x9x18x6x2x96x96-{part}-{kind}.mat"
            (place / name).write_bytes(head + array.tobytes())


def dmlab(root: Path, example: Callable[[bytes, int, str], bytes]) -> None:
    """Two images a split, in two files where they are of training; `example` writes a tf.train.Example."""
    place = root / "dmlab"
    place.mkdir(parents=True)
    for split, numbers in {"train": (0, 5), "validation": (1,), "test": (2, 3, 4)}.items():
        records = []
        for number in numbers:
            stream = io.BytesIO()
            picture(number, side=16).save(stream, "JPEG", quality=95)
            content = example(stream.getvalue(), number, f"{split}-{number}")
            records.append(struct.pack("<Q", len(content)) + b"crc." + content + b"crc.")
        if split == "train":
            for shard, record in enumerate(records):
                (place / f"dmlab-train.tfrecord-0000{shard}-of-00002").write_bytes(record)
        else:
            (place / f"dmlab-{split}.tfrecord").write_bytes(b"".join(records))


NAMES = [task.name for task in TASKS]


def pairs(images):
    """(what the picture shows, its class) of every row."""
    return [(number_of(image), label) for image, label in (images[row] for row in range(len(images)))]


def test_the_tasks_are_those_of_the_paper():
    assert [sum(task.group == group for task in TASKS) for group in GROUPS] == [7, 4, 8]
    assert len(set(NAMES)) == 19
    classes = [[task.num_classes for task in TASKS if task.group == group] for group in GROUPS]
    means = {"ViT-H/14, JFT": 77.63, "ViT-L/16, ImageNet-21k": 72.72, "ResNet-50, ImageNet": 66.37}
    # Of ViT: arXiv 2010.11929, table 2; of ResNet-50 the mean of the page's unrounded numbers.
    assert {model: np.mean(PUBLISHED[model]) for model in means} == pytest.approx(means, abs=0.05)
    assert {len(values) for values in PUBLISHED.values()} == {19}
    assert classes == [[102, 100, 47, 102, 37, 397, 10], [2, 10, 45, 5], [8, 6, 6, 16, 16, 4, 18, 9]]


@pytest.mark.parametrize(
    ("copy", "read", "test"),
    [(sun397, vtab.read_sun397, 3), (eurosat, vtab.read_eurosat, 6), (resisc45, vtab.read_resisc45, 3)],
)
def test_sets_without_published_parts(tmp_path, copy, read, test):
    copy(tmp_path)
    parts, again = read(tmp_path), read(tmp_path)
    assert parts.validation is None
    assert len(parts.test) == test == (len(parts.train) + test) * 20 // 100
    assert not set(parts.train.files) & set(parts.test.files)
    assert parts.test.files == again.test.files
    assert all(seen == label for images in (parts.train, parts.test) for seen, label in pairs(images))


def test_camelyon_is_read_with_h5py_or_asks_for_it(tmp_path):
    place = tmp_path / "pcam"
    place.mkdir()
    if importlib.util.find_spec("h5py") is None:
        with pytest.raises(UserError, match=r"Camelyon needs .* pip install 'hf-vit\[vtab\]'"):
            vtab.load_vtab(tmp_path)
        return
    import h5py

    for number, split in enumerate(("train", "valid", "test")):
        images = np.stack([np.asarray(picture(number + row)) for row in range(2)])
        for kind, key, array in (("x", "x", images), ("y", "y", np.array([1, 0]).reshape(2, 1, 1, 1))):
            with h5py.File(place / f"camelyonpatch_level_2_split_{split}_{kind}.h5", "w") as file:
                file[key] = array
    parts = vtab.read_camelyon(tmp_path)
    assert [pairs(part) for part in parts] == [[(n, 1), (n + 1, 0)] for n in range(3)]


def test_a_retina_is_scaled_centred_and_freed_of_its_mean():
    """An eye of 50 px on black, with a bright spot: 300 px of it are shown to 90%, gray but for the spot."""
    rows, columns = np.ogrid[:120, :160]
    distance = np.hypot(rows - 60, columns - 80)
    pixels = np.where(distance <= 50, 150, 0)[..., None].repeat(3, axis=-1).astype(np.uint8)
    pixels[58:62, 88:92] = 220
    shown = np.asarray(vtab.scale_retina(Image.fromarray(pixels))).astype(int)
    assert shown.shape == (540, 540, 3)
    assert (shown[0, 0] == 128).all()
    assert abs(int(shown[270, 150, 0]) - 128) <= 4
    assert shown[270, 330].min() > 200  # (90 - 80) px * 300/50 right of the middle


def same(*numbers):
    return [(number, number) for number in numbers]


# Copy -> reader -> (what the picture shows, its class) of the published parts.
PARTS = {
    "cifar100": (cifar100, vtab.read_cifar100,
                 [[(row, 99 - row) for row in range(12)], [(row, 99 - row) for row in range(5)]]),
    "dtd": (dtd, partial(vtab.read_published, dataset=DTD), [same(0, 1, 2)] * 3),
    "flowers102": (flowers102, partial(vtab.read_published, dataset=Flowers102), [same(2, 1), same(0, 1), same(0, 2)]),
    "pets": (pets, vtab.read_pets, [same(0, 0, 1, 1), same(0, 1)]),
    "svhn": (svhn, vtab.read_svhn, [same(*range(1, 10), 0), same(1, 2, 3, 4)]),
    "objects": (clevr, vtab.read_clevr_count, [None, None, same(0, 1, 2)]),
    "records": (lambda root: dmlab(root, example_writer()), vtab.read_dmlab,
                [same(0, 5), same(1), same(2, 3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_published_parts_are_read(tmp_path, monkeypatch, name):
    copy, read, expected = PARTS[name]
    copy(tmp_path, monkeypatch) if copy in (cifar100, flowers102, svhn) else copy(tmp_path)
    parts = read(tmp_path)
    found = [parts.train, *([parts.validation] if len(expected) == 3 else []), parts.test]
    for part, wanted in zip(found, expected, strict=True):
        assert wanted is None or pairs(part) == wanted
    if name == "objects":
        assert pairs(parts.train) == same(*range(8))
        # Depths 7.9, 8.4, 8.9, ... 11.4 against the ends 0, 8, 8.5, 9, 9.5, 10.
        assert pairs(vtab.read_clevr_distance(tmp_path).train) == list(enumerate([0, 1, 2, 3, 4, 5, 5, 5]))


def test_retinopathy_takes_its_parts_from_the_leaderboards(tmp_path):
    retinopathy(tmp_path)
    parts = vtab.read_retinopathy(tmp_path)
    assert [[label for _, label in (part[row] for row in range(len(part)))] for part in parts] == [[0, 4], [2], [1, 3]]


def test_caltech101_has_thirty_images_a_class_to_learn_from(tmp_path):
    caltech101(tmp_path)
    parts = vtab.read_caltech101(tmp_path)
    for images, count in ((parts.train, 30), (parts.test, 4)):
        assert np.bincount([label for _, label in pairs(images)]).tolist() == [count] * 3
        assert all(seen == label for seen, label in pairs(images))


@pytest.mark.parametrize(("value", "label"), [(0.1, 0), (8.0, 0), (8.0001, 1), (10.0, 4), (10.5, 5)])
def test_a_depth_on_the_end_of_a_bin_is_of_the_nearer_one(value, label):
    thresholds = np.array([0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0])
    assert vtab.find_bin(value, vtab.CLEVR_DEPTHS) == label
    assert label == np.where((thresholds - value) < 0)[0].max()  # as the paper's code says it


def example_writer():
    """tf.train.Example as protobuf's own library writes it, from the published description of the message."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields):
        described = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            described.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)
        return described

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    message("BytesList", ("value", 1, kinds.TYPE_BYTES, many, ""))
    message("Int64List", ("value", 1, kinds.TYPE_INT64, many, ""))
    lists = (("bytes_list", 1, "BytesList"), ("int64_list", 3, "Int64List"))
    message("Feature", *((name, number, kinds.TYPE_MESSAGE, one, f".tf.{of}") for name, number, of in lists))
    features = message("Features", ("feature", 1, kinds.TYPE_MESSAGE, many, ".tf.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, label=one, type_name=".tf.Feature")
    message("Example", ("features", 1, kinds.TYPE_MESSAGE, one, ".tf.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    class_of = message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))

    def write(image, label, name):
        values = class_of()
        values.features.feature["image"].bytes_list.value.append(image)
        values.features.feature["filename"].bytes_list.value.append(name.encode())
        values.features.feature["label"].int64_list.value.append(label)
        return values.SerializeToString()

    return write


def test_dsprites_bins_positions_by_two_and_angles_by_two_and_a_half(tmp_path):
    dsprites(tmp_path)
    for read, label_of in (
        (partial(vtab.read_dsprites, factor=4), lambda number: number % 32 // 2),
        (partial(vtab.read_dsprites, factor=3), lambda number: int(number % 40 / 2.5)),
    ):
        parts = read(tmp_path)
        assert (len(parts.train), len(parts.test)) == (288, 32)
        seen = []
        for images in (parts.train, parts.test):
            for image, label in (images[row] for row in range(len(images))):
                bits = np.asarray(image)[0, :9] // 255
                seen.append(int((bits.astype(int) << np.arange(9)).sum()))
                assert label == label_of(seen[-1])
        assert sorted(seen) == list(range(320))


def test_kitti_bins_the_closest_vehicle_and_parts_by_drives(tmp_path):
    kitti(tmp_path)
    parts = vtab.read_kitti(tmp_path)
    order = np.random.default_rng(1).permutation(40)
    drives = []
    for images in (parts.train, parts.validation, parts.test):
        assert all(label == KITTI_SCENES[seen][1] for seen, label in pairs(images))
        drives.append({int(order[int(file.stem)]) // 4 for file in images.files})
    assert [len(each) for each in drives] == [8, 1, 1]
    assert set.union(*drives) == set(range(10))
    names = np.array([f"2011_09_26_drive_{number:04d}_sync" for number in range(10)])
    np.random.seed(123)  # as TensorFlow Datasets does it
    assert drives[2] == {int(np.random.choice(names, 1, replace=False)[0].split("_")[4])}


def test_small_norb_reads_the_first_camera(tmp_path):
    small_norb(tmp_path)
    parts = vtab.read_small_norb(tmp_path, column=2, unit=2)
    assert pairs(parts.train) == [(number % 18, number % 18) for number in range(36)]
    assert (len(parts.validation), len(parts.test)) == (18, 18)
    parts = vtab.read_small_norb(tmp_path, column=1, unit=1)
    assert all(seen % 9 == label for part in parts for seen, label in pairs(part))
    assert {label for _, label in pairs(parts.train)} == set(range(9))


@pytest.fixture
def small(monkeypatch):
    """The tasks judge by so many images as the small copies have; 20 and 10 images are drawn."""

    def shrink(**num_test):
        tasks = [replace(task, num_test=num_test.get(task.folder.replace("-", "_"), task.num_test)) for task in TASKS]
        monkeypatch.setattr(vtab, "TASKS", tuple(tasks))
        monkeypatch.setattr(vtab, "TRAIN", 20)
        monkeypatch.setattr(vtab, "VALIDATION", 10)

    return shrink


def features_of(model, images):
    with torch.no_grad():
        return model.vit(pixels_of(image.convert("RGB") for image in images)).last_hidden_state[:, 0].numpy()


def test_the_probe_learns_from_800_chooses_by_200_and_learns_again_from_all(tmp_path, small):
    small_norb(tmp_path, count=60)
    small(smallnorb=30)
    data, model = vtab.load_vtab(tmp_path, seed=3), make_classifier()
    run = evaluate_protocol("vtab", (model, make_processor()), str(tmp_path), seed=3, progress=False)
    for name, task in data.tasks.items():
        found = {}
        for split in ("train", "validation", "test"):
            rows = [task.split(split)[row] for row in range(task.num_examples(split))]
            found[split] = features_of(model, [row["image"] for row in rows]), np.array([row["label"] for row in rows])
        assert [len(labels) for _, labels in found.values()] == [20, 10, 30]
        train, validation = found["train"], found["validation"]
        both = [np.concatenate(each) for each in zip(train, validation, strict=True)]
        strength = max((0.01, 0.1, 1.0, 10.0), key=lambda c: fit_probe(*train, c).score(*validation))
        assert run.result.strengths[name] == strength
        assert run.result.accuracy[name] == pytest.approx(fit_probe(*both, strength).score(*found["test"]))
    assert run.result.num_images == 60
    assert list(run.result.accuracy) == ["sNORB-Azim", "sNORB-Elev"]


def test_the_draw_is_of_the_seed_and_takes_no_image_twice(tmp_path, small):
    eurosat(tmp_path)
    with pytest.raises(UserError, match="6 test images instead of the published 5,400; download the task again"):
        vtab.load_vtab(tmp_path)
    small(eurosat=6)
    with pytest.raises(UserError, match="too few images to draw 20 training and 10 validation images"):
        vtab.load_vtab(tmp_path)
    folders(tmp_path / "eurosat/2750", ["Highway", "River"], 10)
    small(eurosat=10)
    first, again, other = (vtab.load_vtab(tmp_path, seed).tasks["EuroSAT"] for seed in (0, 0, 1))
    rows = {
        name: [list(data.split(split).with_format(None)["row"]) for split in ("train", "validation", "test")]
        for name, data in {"first": first, "again": again, "other": other}.items()
    }
    assert rows["first"] == rows["again"] != rows["other"]
    assert rows["first"][2] == rows["other"][2]
    assert not set(rows["first"][0]) & set(rows["first"][1])
    assert first.fingerprint == again.fingerprint
    for path in tmp_path.rglob("*.jpg"):
        path.write_bytes(b"no image")
    subject = (make_classifier(), make_processor())
    with pytest.raises(UserError, match=r"eurosat/2750/.*\.jpg cannot be read as an image"):
        evaluate_protocol("vtab", subject, str(tmp_path), progress=False)


def test_means_are_of_complete_groups_alone():
    accuracy = {task.name: (index + 1) / 20 for index, task in enumerate(TASKS)}
    means = {"natural": 0.2, "specialized": 0.475, "structured": 0.775, "all 19 tasks": 0.5}
    assert group_means(accuracy) == pytest.approx(means)
    lacking = {name: value for name, value in accuracy.items() if name != "DMLab"}
    assert group_means(lacking) == pytest.approx({"natural": 0.2, "specialized": 0.475})
    result = VtabResult(9, lacking, dict.fromkeys(lacking, 1.0), ["DMLab"], 0)
    assert set(result.headline()) == {f"VTAB-1k linear probe accuracy, {name}" for name in ("natural", "specialized")}
    *groups, overall = result.tables("somewhere")
    assert [table.title for table in groups] == list(GROUPS)
    dmlab = next(row for row in groups[-1].rows if row[0] == "DMLab")
    assert dmlab[1:] == ["-", "26.60%", "36.30%", "41.90%", "53.10%"]
    assert [table.rows[-1][:2] for table in groups] == [["mean", "20.00%"], ["mean", "47.50%"], ["mean", "-"]]
    assert list(overall.rows[0])[::5] == ["mean", "77.63%"]
    assert overall.rows[0][1] == "-"
    assert overall.title.endswith("; missing: DMLab")


TYPED = ("evaluate", "--protocol", "vtab", "--device", "cpu")


@pytest.mark.filterwarnings("ignore:The number of unique classes")  # of 20 images in place of 800
def test_typed(command, fails, tmp_path, small, save_classifier):
    small_norb(tmp_path / "vtab", count=60)
    small(smallnorb=30)
    model = save_classifier()
    words = (*TYPED, model, "--data", tmp_path / "vtab")
    code, out, err = command(*words, "--output", tmp_path / "out", "--num-images", 7)
    assert code == 0, err
    assert "note: 17 of 19 tasks are missing: Caltech101, CIFAR-100" in err
    assert "linear probe" in out
    assert "fine-tuned" in out
    (record,) = Facts.load(model).filter_kind("evaluation")
    assert record.values["missing"] == [name for name in NAMES if not name.startswith("sNORB")]
    assert record.values["means"] == {}
    assert record.data is not None
    assert record.data.size == 14
    assert (tmp_path / "out/vtab.json").is_file()
    for option, told in (
        (["--split", "validation"], "has no split 'validation'"),
        (["--streaming"], "read as published; leave --streaming out"),
        (["--label-column", "x", "--skip-bad-images"], "leave --skip-bad-images, --label-column out"),
    ):
        fails((*words, *option), told)


def _without(name):
    def remove(root):
        place = root / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return remove


def _text(name):
    def write(root):
        (root / name).write_bytes(b"no such thing")

    return write


def _cut(name):
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-9])


NORB = "smallnorb/smallnorb-5x01235x9x18x6x2x96x96-testing-{}.mat"
SPRITES = "dsprites/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
DAMAGE = {
    "norb lacks a file": (small_norb, _without(NORB.format("info")), "sNORB-Azim needs"),
    "norb of text": (small_norb, _text(NORB.format("dat")), "is not a matrix file of small NORB"),
    "norb of one number": (small_norb, lambda root: (root / NORB.format("dat")).write_bytes(b"\x55\x4c\x3d\x1e"),
                           "is not a matrix file of small NORB"),
    "norb cut": (small_norb, _cut(NORB.format("dat")), "sNORB-Azim needs"),
    "norb packed": (small_norb, _text(NORB.format("info")), "unpacked"),
    "sprites of text": (dsprites, _text(SPRITES), "dSpr-Loc needs"),
    "sprites cut": (dsprites, _cut(SPRITES), "dSpr-Loc needs"),
    "no sprites": (dsprites, _without(SPRITES), "github.com/google-deepmind/dsprites-dataset"),
    "records cut": (lambda root: dmlab(root, example_writer()), _cut("dmlab/dmlab-test.tfrecord"),
                    "dmlab-test.tfrecord ends in the middle of a record"),
    "records lack": (lambda root: dmlab(root, example_writer()), _without("dmlab/dmlab-validation.tfrecord"),
                     "dmlab-validation.tfrecord does not exist"),
    "no mapping": (kitti, _without("Kitti/raw/mapping"), "raw/mapping/ of devkit_object.zip"),
    "no labels": (kitti, _without("Kitti/raw/training/label_2/000003.txt"), "000003.txt"),
    "no kitti": (kitti, _without("Kitti/raw"), "Dataset not found); download the task again"),
    "no class": (eurosat, _without("eurosat/2750"), "Dataset not found); download the task again"),
    "csv of text": (retinopathy, _text("diabetic-retinopathy-detection/trainLabels.csv"), "Retinopathy needs"),
    "no solution": (retinopathy, _without("diabetic-retinopathy-detection/retinopathy_solution.csv"),
                    "posted there, with the column Usage"),
    "no scenes": (clevr, _without("clevr/CLEVR_v1.0/scenes/CLEVR_val_scenes.json"), "Clevr-Count needs"),
    "no names": (sun397, _without("SUN397/ClassName.txt"), "Sun397 needs"),
    "no list": (dtd, _without("dtd/dtd/labels/val1.txt"), "DTD needs"),
    "no annotations": (pets, _without("oxford-iiit-pet/annotations"), "Pets needs"),
    "a set of text": (small_norb, lambda root: (shutil.rmtree(root / "smallnorb"), _text("smallnorb")(root)),
                      "sNORB-Azim needs"),
}  # fmt: skip


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_copy_is_refused_in_one_line_before_any_work(tmp_path, damage):
    copy, harm, told = DAMAGE[damage]
    copy(tmp_path)
    harm(tmp_path)
    with pytest.raises(UserError) as error:
        vtab.load_vtab(tmp_path)
    message = str(error.value)
    assert told in message
    assert "download the task again" in message
    assert "download=True" not in message
    assert "\n" not in message


def test_a_file_that_a_list_names_is_missed_before_any_work(tmp_path, small):
    retinopathy(tmp_path)
    place = tmp_path / "diabetic-retinopathy-detection"
    with (place / "trainLabels.csv").open("a") as file:
        file.writelines(f"{number}_left,0\n" for number in range(11, 31))
    with (place / "retinopathy_solution.csv").open("a") as file:
        file.writelines(f"{number}_left,0,Public\n" for number in range(31, 51))
    small(diabetic_retinopathy_detection=2)
    with pytest.raises(UserError, match=r"retinopathy-detection/train/\d+_left.jpeg is missing \(missing files: \d+\)"):
        vtab.load_vtab(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "notes.txt", "empty"])
def test_a_root_without_tasks_is_refused(fails, tmp_path, name, save_classifier, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("notes")
    Path("empty").mkdir()
    fails((*TYPED, save_classifier(), "--data", name), "at least one of the folders caltech101, cifar-100-python")
