"""Small copies of VTAB's data sets in the layouts of their archives; each says which class every image is of.

A tenth of the gray of an image tells which it is: mostly its class.
"""

import csv
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image
from torchvision.datasets import CIFAR100, SVHN, Flowers102


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
    np.savez_compressed(
        place / name, metadata=np.array({"author": "x"}, dtype=object), imgs=images, latents_classes=classes
    )


KITTI_LINE = "{} 0.00 0 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.2 1.0 1.5 {} -1.5\n"
# What is in front of the camera in image n, and the class of that.
KITTI_SCENES = (
    ([("Car", 7.5), ("Truck", 40.0)], 0),
    ([("Pedestrian", 2.0), ("Van", 8.5)], 1),
    ([("Truck", 20.5), ("Tram", 3.0)], 2),
    ([("Cyclist", 4.0), ("DontCare", -1000.0)], 3),
    ([], 3),
)


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
