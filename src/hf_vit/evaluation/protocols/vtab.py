"""VTAB-1k (arXiv 1910.04867), 19 tasks with 1,000 labeled images each, as a linear probe of frozen features.

Nothing is downloaded, and images are decoded when they are accessed. The paper's code defines the classes
(github.com/google-research/task_adaptation, data/*.py).

Legend: n images, D features.
"""

import csv
import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, cast, final

import datasets
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset, Subset
from torchvision.datasets import (
    CIFAR100,
    DTD,
    PCAM,
    SUN397,
    SVHN,
    CLEVRClassification,
    EuroSAT,
    Flowers102,
    ImageFolder,
    Kitti,
    OxfordIIITPet,
)

from hf_vit.data import ImageData
from hf_vit.data.fingerprints import hash_states
from hf_vit.data.images import decode_image
from hf_vit.errors import UserError, get_first_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe, choose_best_probe

# Seed of splits that were not published as a list of files; independent of --seed.
CUT_SEED = 0


# Rows are (Pillow image, class number), as in torchvision's data sets.
LabelledImages = Any


class Parts(NamedTuple):
    """The images of a task; `validation` is None if the paper's code takes validation images from `train`."""

    train: LabelledImages
    validation: LabelledImages | None
    test: LabelledImages


@final
@dataclass(frozen=True)
class ImageFiles:
    """Image files with their classes; `transform` is applied to the decoded images."""

    files: Sequence[Path]
    labels: Sequence[int]
    transform: Callable[[Image.Image], Image.Image] | None = None

    @classmethod
    def from_dataset(cls, dataset: Any) -> "ImageFiles":
        """List the files of a torchvision data set that was opened with `loader=Path`, so that it decodes nothing."""
        pairs = sorted((Path(path), int(label)) for path, label in (dataset[row] for row in range(len(dataset))))
        return cls([path for path, _ in pairs], [label for _, label in pairs])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        """Return an image, transformed if the task does so, and its label."""
        try:
            image = decode_image(self.files[row])
            return self.transform(image) if self.transform else image, self.labels[row]
        except OSError as error:
            raise UserError(f"{self.files[row]} cannot be read as an image ({error}); download it again") from error

    def select(self, rows: Sequence[int] | NDArray[np.int64]) -> "ImageFiles":
        """Return the images of some rows."""
        return ImageFiles([self.files[row] for row in rows], [self.labels[row] for row in rows], self.transform)

    def split(self, percent: int) -> Parts:
        """Draw so many percent as test images, always the same; all others are training images."""
        test, train = cut_rows(len(self), len(self) * percent // 100)
        return Parts(self.select(train), None, self.select(test))


def cut_rows(total: int, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw `first` of `total` rows; return them and the others, both ascending."""
    rows = np.random.default_rng(CUT_SEED).permutation(total)
    return np.sort(rows[:first]), np.sort(rows[first:])


FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
SIZES = (1, 3, 6, 40, 32, 32)  # values of color, shape, scale, orientation, x, y
_AT_ONCE = 4096


@final
class DSprites(Dataset[tuple[Image.Image, int]]):
    """The images of dSprites, with one factor in `num_classes` equal bins as the class."""

    def __init__(self, folder: Path, factor: int, num_classes: int) -> None:
        self.file = folder / FILE
        with zipfile.ZipFile(self.file) as archive, archive.open("imgs.npy") as file:
            shape = _read_shape(file)
        with np.load(self.file, allow_pickle=False) as arrays:
            factors: NDArray[np.int64] = arrays["latents_classes"]
        self.labels = (factors[:, factor] // (SIZES[factor] / num_classes)).astype(np.int64)
        if len(shape) != 3 or shape[0] != len(factors):
            raise ValueError(f"imgs.npy holds images of shape {shape}, but there are {len(factors):,} rows of factors")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        bits, (height, width) = _read_bits(self.file)
        pixels = np.unpackbits(bits[index], count=height * width).reshape(height, width) * np.uint8(255)
        return Image.fromarray(pixels), int(self.labels[index])


@lru_cache(maxsize=1)  # two tasks use the same images, which take long to read
def _read_bits(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Read all n images of h x w px as bits, [n, h * w / 8], and return them with (h, w)."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        total, height, width = _read_shape(file)
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, total, _AT_ONCE):
            count = min(_AT_ONCE, total - start)
            pixels = np.frombuffer(file.read(count * height * width), np.uint8).reshape(count, height * width)
            parts.append(np.packbits(pixels, axis=1))
    return np.concatenate(parts), (height, width)


def _read_shape(file: IO[bytes]) -> tuple[int, ...]:
    """Read the shape in the header of a .npy file of bytes."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("imgs.npy is not of version 1.0 of the .npy format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran or dtype != np.uint8:
        raise ValueError(f"imgs.npy holds {dtype}, but uint8 in C order is needed")
    return shape


_BYTES_LIST, _INT64_LIST = 1, 3


@final
class RecordedImages:
    """The images ("image", an encoded file) and classes ("label") in all files NAME.tfrecord* of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        files = sorted(folder.glob(f"{name}.tfrecord*"))
        if not files:
            raise ValueError(f"{name}.tfrecord does not exist")
        self.positions = [(file, start, size) for file in files for start, size in find_records(file)]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        """Return an image and its label, read from its position in the TFRecord file."""
        path, start, size = self.positions[row]
        try:
            with path.open("rb") as file:
                file.seek(start)
                values = parse_example(file.read(size))
            image, label = values["image"], values["label"]
            if not isinstance(image, bytes) or not isinstance(label, int):
                raise ValueError("its image is not bytes, or its label is not a number")
            picture = decode_image(io.BytesIO(image))
        except (OSError, ValueError, LookupError) as error:
            raise UserError(
                f"record {row:,} of {path} is not an image with a class ({error}); download the file again"
            ) from error
        return picture, label


def find_records(path: Path) -> Iterator[tuple[int, int]]:
    """Iterate over the records of a TFRecord file: (offset, size) of their content in bytes."""
    end = path.stat().st_size
    position = 0
    with path.open("rb") as file:
        while position < end:
            file.seek(position)
            size = int.from_bytes(file.read(8), "little")
            if position + 16 + size > end:
                raise ValueError(f"{path.name} ends in the middle of a record")
            yield position + 12, size
            position += 16 + size


def parse_example(message: bytes) -> dict[str, bytes | int]:
    """Return the first value of every feature of a serialized tf.train.Example by name.

    An Example has the field Features, which has entries of a name (field 1) and a list of values (field 2) of a kind.
    """
    values: dict[str, bytes | int] = {}
    for _, features in _iterate_fields(message):
        for _, entry in _iterate_fields(_require_message(features)):
            entry_fields = dict(_iterate_fields(_require_message(entry)))
            for kind, stored_values in _iterate_fields(_require_message(entry_fields[2])):
                first = next((value for _, value in _iterate_fields(_require_message(stored_values))), b"")
                if kind == _INT64_LIST and isinstance(first, bytes):  # packed
                    first = _decode_varint(first, 0)[0]
                if kind in (_BYTES_LIST, _INT64_LIST):
                    values[_require_message(entry_fields[1]).decode()] = first
    return values


def _require_message(value: bytes | int) -> bytes:
    """Return a value that must be a protobuf message; raise ValueError for a number."""
    if not isinstance(value, bytes):
        raise ValueError("a field holds a number instead of nested data")
    return value


def _iterate_fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Iterate over (field number, value) of a protobuf message with integers (wire type 0) and bytes (wire type 2)."""
    position = 0
    while position < len(message):
        key, position = _decode_varint(message, position)
        value, position = _decode_varint(message, position)
        if key & 7 == 2:
            if position + value > len(message):
                raise ValueError("the record ends in the middle of a field")
            yield key >> 3, message[position : position + value]
            position += value
        elif key & 7 == 0:
            yield key >> 3, value
        else:
            raise ValueError(f"a field has the unknown protobuf wire type {key & 7}")


def _decode_varint(message: bytes, position: int) -> tuple[int, int]:
    """Decode an integer with seven bits in every byte, the lowest first; return it and the position after it."""
    value = shift = 0
    while True:
        if position >= len(message):
            raise ValueError("the record ends in the middle of a number")
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


_TRAIN_PER_CLASS = 30


def read_caltech101(root: Path) -> Parts:
    """Draw 30 training images per class as TensorFlow Datasets does; all others are test images.

    VTAB includes the background class, the 102nd, which torchvision's class leaves out.
    """
    images = ImageFiles.from_dataset(ImageFolder(root / "caltech101" / "101_ObjectCategories", loader=Path))
    labels = np.asarray(images.labels)
    generator = np.random.default_rng(CUT_SEED)
    rows = [generator.permutation(np.flatnonzero(labels == label))[:_TRAIN_PER_CLASS] for label in np.unique(labels)]
    train = np.sort(np.concatenate(rows))
    return Parts(images.select(train), None, images.select(np.setdiff1d(np.arange(len(labels)), train)))


def read_cifar100(root: Path) -> Parts:
    return Parts(CIFAR100(root, train=True), None, CIFAR100(root, train=False))


def read_published(root: Path, dataset: Callable[..., Any]) -> Parts:
    """Return the published split; DTD's is the first of ten."""
    splits = [dataset(root, split=split, loader=Path) for split in ("train", "val", "test")]
    return Parts(*map(ImageFiles.from_dataset, splits))


def read_pets(root: Path) -> Parts:
    """Return the images of Oxford-IIIT Pet by their breed."""

    def part(split: str) -> ImageFiles:
        attributes = vars(OxfordIIITPet(root, split=split))  # it takes no loader, and reading labels decodes images
        return ImageFiles(attributes["_images"], attributes["_labels"])

    return Parts(part("trainval"), None, part("test"))


# Sun397, EuroSAT and Resisc45 have no published split, or only in TensorFlow Datasets; 20% are test images.
def read_sun397(root: Path) -> Parts:
    return ImageFiles.from_dataset(SUN397(root, loader=Path)).split(20)


def read_svhn(root: Path) -> Parts:
    return Parts(SVHN(root / "svhn", split="train"), None, SVHN(root / "svhn", split="test"))


RETINA_RADIUS = 300  # px
_VISIBLE_RADIUS = 0.9  # share of the radius
_GRAY = 128


def read_camelyon(root: Path) -> Parts:
    return Parts(PCAM(root, split="train"), PCAM(root, split="val"), PCAM(root, split="test"))


def read_eurosat(root: Path) -> Parts:
    return ImageFiles.from_dataset(EuroSAT(root, loader=lambda path: Path(path))).split(20)


def read_resisc45(root: Path) -> Parts:
    return ImageFiles.from_dataset(ImageFolder(root / "NWPU-RESISC45", loader=Path)).split(20)


def read_retinopathy(root: Path) -> Parts:
    """Return Kaggle's training images, and those of its public and private leaderboard as validation and test."""
    folder = root / "diabetic-retinopathy-detection"

    def part(images: str, table: str, usage: str | None) -> ImageFiles:
        with (folder / table).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if usage is None or row["Usage"] == usage]
        files = [folder / images / f"{row['image']}.jpeg" for row in rows]
        return ImageFiles(files, [int(row["level"]) for row in rows], scale_retina)

    train = part("train", "trainLabels.csv", None)
    solution = "retinopathy_solution.csv"
    return Parts(train, part("test", solution, "Public"), part("test", solution, "Private"))


def scale_retina(image: Image.Image) -> Image.Image:
    """Prepare an image as the winner of the competition did, which VTAB uses ("btgraham-300").

    The eye is scaled to a radius of 300 px, the local mean is subtracted, and everything outside of 90% of the radius
    becomes gray. The original uses OpenCV's filters, and writes a JPEG in between.
    """
    from scipy.ndimage import gaussian_filter

    pixels = np.asarray(image)
    middle_row = pixels[len(pixels) // 2].sum(axis=1, dtype=np.float64)
    radius = (middle_row > middle_row.mean() / 10).sum() / 2
    scale = RETINA_RADIUS / (radius if radius >= 1 else len(pixels) / 2)
    size = round(image.width * scale), round(image.height * scale)
    scaled_pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR), dtype=np.float64)
    sigma = RETINA_RADIUS / 30
    blurred = np.rint(gaussian_filter(scaled_pixels, (sigma, sigma, 0), mode="mirror", truncate=3))
    height, width = scaled_pixels.shape[:2]
    rows, columns = np.ogrid[:height, :width]
    visible_radius = int(RETINA_RADIUS * _VISIBLE_RADIUS)
    is_visible = (rows - height // 2) ** 2 + (columns - width // 2) ** 2 <= visible_radius**2
    result = np.where(is_visible[..., None], np.clip(4 * (scaled_pixels - blurred) + _GRAY, 0, 255), _GRAY)
    top = max(height // 2 - visible_radius, 0)
    left = max(width // 2 - visible_radius, 0)
    visible = result[top : height // 2 + visible_radius, left : width // 2 + visible_radius]
    return Image.fromarray(visible.astype(np.uint8))


# Lower bounds of the bins of distances.
CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
_NORB = "smallnorb-5x{}x9x18x6x2x96x96-{}-{}.mat"
_NORB_PARTS = {"training": "46789", "testing": "01235"}
_NORB_TYPES = {507333717: np.dtype("u1"), 507333716: np.dtype("<i4")}


def find_bin(value: float, lower_ends: Sequence[float]) -> int:
    """Return the bin of a value; lower bounds are exclusive."""
    return int(np.searchsorted(lower_ends, value, side="left")) - 1


def read_clevr_count(root: Path) -> Parts:
    """Return the images of CLEVR by their number of objects, 3 to 10."""

    def part(split: str) -> ImageFiles:
        images = ImageFiles.from_dataset(CLEVRClassification(root, split=split, loader=Path))
        return ImageFiles(images.files, [count - 3 for count in images.labels])

    return Parts(part("train"), None, part("val"))


def read_clevr_distance(root: Path) -> Parts:
    """Return the images of CLEVR by the distance of the closest object."""

    def part(split: str) -> ImageFiles:
        files = ImageFiles.from_dataset(CLEVRClassification(root, split=split, loader=Path)).files
        path = root / "clevr" / "CLEVR_v1.0" / "scenes" / f"CLEVR_{split}_scenes.json"
        scenes: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["scenes"]
        depth = {scene["image_filename"]: min(item["pixel_coords"][2] for item in scene["objects"]) for scene in scenes}
        return ImageFiles(files, [find_bin(depth[file.name], CLEVR_DEPTHS) for file in files])

    return Parts(part("train"), None, part("val"))


def read_dmlab(root: Path) -> Parts:
    return Parts(*(RecordedImages(root / "dmlab", f"dmlab-{split}") for split in ("train", "validation", "test")))


def read_dsprites(root: Path, factor: int) -> Parts:
    """Return the images of dSprites by one factor, with 10% as test images."""
    images = DSprites(root / "dsprites", factor, num_classes=16)
    test, train = cut_rows(len(images), len(images) - len(images) * 80 // 100 - len(images) * 10 // 100)
    return Parts(Subset(images, train.tolist()), None, Subset(images, test.tolist()))


def read_kitti(root: Path) -> Parts:
    """Return the images of KITTI by the distance of the closest vehicle: below 8 m, below 20 m, farther, none.

    The splits are those of TensorFlow Datasets, which keep all frames of a drive in one split; `mapping` of the
    development kit lists the drive of every frame.
    """
    data = Kitti(root, train=True)
    missing = [Path(name).name for name in data.targets if not Path(name).is_file()]
    if missing:
        raise ValueError(f"the label file {missing[0]} is missing (missing files: {len(missing):,})")
    pairs: list[tuple[Path, int]] = []
    for row, file in enumerate(data.images):
        image, objects = data[row]
        image.close()
        pairs.append((Path(file), classify_closest_vehicle(objects)))
    pairs.sort()
    images = ImageFiles([file for file, _ in pairs], [label for _, label in pairs])
    return Parts(*(images.select(rows) for rows in _split_drives(root / "Kitti" / "raw" / "mapping", len(images))))


def classify_closest_vehicle(objects: Sequence[Mapping[str, Any]]) -> int:
    """Return the class of an image, 0 to 3, from the objects of its label file."""
    meters = [float(entry["location"][2]) for entry in objects if entry["type"] in _VEHICLES]
    return find_bin(min(meters, default=_NO_VEHICLE), KITTI_METRES)


def _split_drives(mapping: Path, total: int) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of train, validation and test, drawn by drives as in TensorFlow Datasets (NumPy's seed 123)."""
    lines = (mapping / "train_mapping.txt").read_text().splitlines()
    numbers = [int(number) - 1 for number in (mapping / "train_rand.txt").read_text().split(",")]
    if len(numbers) != total:
        raise ValueError(f"train_rand.txt lists {len(numbers):,} images, but there are {total:,}")
    drive_of = [lines[number].split()[1] for number in numbers]
    drives = sorted(set(drive_of))
    random = np.random.RandomState(123)
    tenth = max(1, len(drives) // 10)
    test: set[str] = set(random.choice(drives, tenth, replace=False).tolist())
    validation: set[str] = set(random.choice(sorted(set(drives) - test), tenth, replace=False).tolist())
    train = set(drives) - test - validation
    rows = [[row for row, drive in enumerate(drive_of) if drive in part] for part in (train, validation, test)]
    return rows[0], rows[1], rows[2]


@final
class NorbImages(Dataset[tuple[Image.Image, int]]):
    """The images of the first camera of small NORB; the class is a column of the info file divided by `unit`."""

    def __init__(self, folder: Path, part: str, column: int, unit: int) -> None:
        pixels, info = (read_norb(folder / _NORB.format(_NORB_PARTS[part], part, kind)) for kind in ("dat", "info"))
        if pixels.ndim != 4 or info.ndim != 2 or len(pixels) != len(info):
            raise ValueError(
                f"the images have the shape {pixels.shape} and their labels {info.shape} in the {part} files, "
                "which do not fit"
            )
        self.pixels = pixels[:, 0]
        self.labels = info[:, column] // unit

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.array(self.pixels[index])), int(self.labels[index])


def read_small_norb(root: Path, column: int, unit: int) -> Parts:
    """Return the images of small NORB by a column of their info files, divided by `unit`."""
    train = NorbImages(root / "smallnorb", "training", column, unit)
    testing = NorbImages(root / "smallnorb", "testing", column, unit)
    validation, test = cut_rows(len(testing), len(testing) // 2)  # no validation images were published
    return Parts(train, Subset(testing, validation.tolist()), Subset(testing, test.tolist()))


def read_norb(path: Path) -> NDArray[Any]:
    """Read a matrix file of small NORB: type, number of sizes, at least three sizes (4 bytes each), and the values."""
    head = np.fromfile(path, "<i4", 2)
    if len(head) < 2 or int(head[0]) not in _NORB_TYPES:
        raise ValueError(f"{path.name} is not a matrix file of small NORB")
    sizes = np.fromfile(path, "<i4", int(head[1]), offset=8)
    shape = tuple(int(size) for size in sizes)
    return np.memmap(path, _NORB_TYPES[int(head[0])], "r", 8 + 4 * max(3, len(shape)), shape)


GROUPS = ("natural", "specialized", "structured")
TRAIN, VALIDATION = 800, 200


@final
@dataclass(frozen=True)
class Task:
    """A task of VTAB.

    Attributes:
        name: name in the paper's tables.
        group: one of `GROUPS`.
        num_classes: number of classes, which need not all have images.
        num_test: number of test images in the paper.
        folder: folder below the root.
        needs: content of the folder and its source.
        open: reads the images below a root.
    """

    name: str
    group: str
    num_classes: int
    num_test: int
    folder: str
    needs: str
    open: Callable[[Path], Parts]


_FLOWERS = "jpg/, imagelabels.mat and setid.mat (robots.ox.ac.uk/~vgg/data/flowers/102)"
_RETINOPATHY = (
    "train/, test/, trainLabels.csv (kaggle.com/c/diabetic-retinopathy-detection) and retinopathy_solution.csv (posted "
    "there, with the column Usage)"
)
_CLEVR = "CLEVR_v1.0/ with images/ and scenes/ (cs.stanford.edu/people/jcjohns/clevr)"
_DMLAB = "dmlab-train, -validation and -test.tfrecord (storage.googleapis.com/dmlab-vtab/dmlab.tar.gz)"
_DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz (github.com/google-deepmind/dsprites-dataset)"
_KITTI = (
    "raw/training/ with image_2/ and label_2/, and raw/mapping/ of devkit_object.zip (cvlibs.net/datasets/kitti, "
    "object detection)"
)
_NORB_FILES = "smallnorb-5x...-dat.mat and -info.mat, unpacked (cs.nyu.edu/~ylclab/data/norb-v1.0-small)"
TASKS = (
    Task("Caltech101", "natural", 102, 6084, "caltech101",
         "101_ObjectCategories/ (data.caltech.edu/records/mzrjq-6wc02)", read_caltech101),
    Task("CIFAR-100", "natural", 100, 10_000, "cifar-100-python",
         "train, test and meta (cs.toronto.edu/~kriz/cifar-100-python.tar.gz)", read_cifar100),
    Task("DTD", "natural", 47, 1880, "dtd",
         "dtd/ with images/ and labels/ (robots.ox.ac.uk/~vgg/data/dtd)", partial(read_published, dataset=DTD)),
    Task("Flowers102", "natural", 102, 6149, "flowers-102", _FLOWERS, partial(read_published, dataset=Flowers102)),
    Task("Pets", "natural", 37, 3669, "oxford-iiit-pet",
         "images/ and annotations/ (robots.ox.ac.uk/~vgg/data/pets)", read_pets),
    Task("Sun397", "natural", 397, 21_750, "SUN397",
         "a/ to z/ and ClassName.txt (vision.princeton.edu/projects/2010/SUN)", read_sun397),
    Task("SVHN", "natural", 10, 26_032, "svhn",
         "train_32x32.mat and test_32x32.mat (ufldl.stanford.edu/housenumbers)", read_svhn),
    Task("Camelyon", "specialized", 2, 32_768, "pcam",
         "camelyonpatch_level_2_split_*.h5 (github.com/basveeling/pcam) and pip install 'hf-vit[vtab]'",
         read_camelyon),
    Task("EuroSAT", "specialized", 10, 5400, "eurosat", "2750/ (github.com/phelber/eurosat, RGB)", read_eurosat),
    Task("Resisc45", "specialized", 45, 6300, "NWPU-RESISC45",
         "a folder a class (NWPU-RESISC45.rar of its authors)", read_resisc45),
    Task("Retinopathy", "specialized", 5, 42_670, "diabetic-retinopathy-detection", _RETINOPATHY,
         read_retinopathy),
    Task("Clevr-Count", "structured", 8, 15_000, "clevr", _CLEVR, read_clevr_count),
    Task("Clevr-Dist", "structured", 6, 15_000, "clevr", _CLEVR, read_clevr_distance),
    Task("DMLab", "structured", 6, 22_735, "dmlab", _DMLAB, read_dmlab),
    Task("dSpr-Loc", "structured", 16, 73_728, "dsprites", _DSPRITES, partial(read_dsprites, factor=4)),
    Task("dSpr-Ori", "structured", 16, 73_728, "dsprites", _DSPRITES, partial(read_dsprites, factor=3)),
    Task("KITTI-Dist", "structured", 4, 711, "Kitti", _KITTI, read_kitti),
    Task("sNORB-Azim", "structured", 18, 12_150, "smallnorb", _NORB_FILES, partial(read_small_norb, column=2, unit=2)),
    Task("sNORB-Elev", "structured", 9, 12_150, "smallnorb", _NORB_FILES, partial(read_small_norb, column=1, unit=1)),
)  # fmt: skip

# Accuracy of fine-tuned models in percent, in the order of `TASKS`. ViT: arXiv 2010.11929, table 9; ResNet-50: the
# authors' results (google-research/task_adaptation, docs/data/results.csv, 1,000 examples).
PUBLISHED = {
    "ResNet-50, from scratch": (38.2, 13.2, 20.6, 40.2, 12.1, 5.0, 66.1, 75.6, 85.0, 42.6, 72.6,
                                38.8, 55.2, 26.6, 78.4, 39.2, 42.7, 30.1, 37.6),
    "ResNet-50, ImageNet": (91.0, 57.0, 66.0, 88.6, 89.9, 34.4, 87.3, 80.6, 95.3, 80.8, 73.2,
                            41.0, 56.1, 36.3, 85.7, 46.0, 70.6, 45.7, 35.4),
    "ViT-L/16, ImageNet-21k": (90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3,
                               70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
    "ViT-H/14, JFT": (95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6,
                      91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
}  # fmt: skip


# Errors of readers if files are missing, damaged or of another layout.
_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(repr=False)
class VtabData(ImageData):
    """The VTAB tasks of a folder; the split "test" has the test images of all of them.

    Attributes:
        tasks: name -> data with the splits "train" (800 images), "validation" (200) and "test".
        missing: tasks without a folder.
    """

    tasks: dict[str, ImageData] = field(default_factory=dict[str, ImageData])
    missing: list[str] = field(default_factory=list[str])


def load_vtab(root: str | os.PathLike[str], seed: int = 0) -> VtabData:
    """Open every task that has a folder, and check the number of its images and that its files exist.

    Nothing is downloaded. The paper uses the first 1,000 examples in the order of TensorFlow Datasets; here they are
    drawn by `seed` from the same splits.

    Raises:
        UserError: the folder has no task, or a task is incomplete.
    """
    folder = Path(root)
    present = [task for task in TASKS if (folder / task.folder).exists()]
    if not present:
        folders = ", ".join(dict.fromkeys(task.folder for task in TASKS))
        problem = "holds no task of VTAB" if folder.is_dir() else "is not a folder"
        raise UserError(
            f"'{folder}' {problem}; download at least one of the folders {folders} into it (the page 'Measuring a "
            "model' lists their content)"
        )
    tasks = {task.name: _open_task(task, folder, seed) for task in present}
    missing = [task.name for task in TASKS if task.name not in tasks]
    test = datasets.concatenate_datasets([cast(datasets.Dataset, task.split("test")) for task in tasks.values()])
    return VtabData(
        name=f"VTAB-1k ({folder.resolve().name})",
        fingerprint=hash_states({name: task.fingerprint for name, task in tasks.items()}),
        splits={"test": test},
        label_names=[],
        notes=[f"{len(missing)} of {len(TASKS)} tasks are missing: {', '.join(missing)}"] if missing else [],
        tasks=tasks,
        missing=missing,
    )


def _open_task(task: Task, root: Path, seed: int) -> ImageData:
    """Open a task, check it, and draw its 800 training and 200 validation images."""
    folder = root / task.folder
    problem = f"{task.name} needs {task.needs} in '{folder}'"
    try:
        parts = task.open(root)
    except UserError:
        raise
    except _UNREADABLE as error:
        reason = get_first_line(error).split(". You")[0]  # without torchvision's own remedy, which is to download
        raise UserError(f"{problem}, but it cannot be read ({reason}); download the task again") from error
    if len(parts.test) != task.num_test:
        raise UserError(
            f"{problem}, but it has {len(parts.test):,} test images instead of the published "
            f"{task.num_test:,}; download the task again"
        )
    rows_by_split = _draw_rows(parts, seed)
    if len(rows_by_split["train"]) < TRAIN or len(rows_by_split["validation"]) < VALIDATION:
        raise UserError(
            f"{problem}, but it has too few images to draw {TRAIN} training and {VALIDATION} validation "
            "images; download the task again"
        )
    validation = parts.train if parts.validation is None else parts.validation
    images_by_split = {"train": parts.train, "validation": validation, "test": parts.test}
    splits: dict[str, datasets.Dataset] = {}
    for split, rows in rows_by_split.items():
        images = images_by_split[split]
        paths = [images.files[row] for row in rows] if isinstance(images, ImageFiles) else []
        missing_files = [path for path in paths if not path.is_file()]
        if missing_files:
            raise UserError(
                f"{problem}, but the file {missing_files[0].relative_to(root)} is missing (missing files: "
                f"{len(missing_files):,}); download the task again"
            )
        # Images are read when a row is accessed.
        splits[split] = datasets.Dataset.from_dict({"row": rows}).with_transform(partial(_read, images))
    files = (path for path in folder.rglob("*") if path.is_file())
    states = {path.relative_to(root).as_posix(): f"{path.stat().st_size}" for path in files}
    return ImageData(task.name, hash_states(states), splits, [str(label) for label in range(task.num_classes)])


def _draw_rows(parts: Parts, seed: int) -> dict[str, list[int]]:
    """Draw the rows of training and validation, and list those of the test; fewer if a part has too few images."""
    generator = np.random.default_rng(seed)
    train_rows = generator.permutation(len(parts.train)).tolist()
    if parts.validation is None:  # it gets other rows of the training images
        validation_rows = train_rows[TRAIN : TRAIN + VALIDATION]
    else:
        validation_rows = generator.permutation(len(parts.validation))[:VALIDATION].tolist()
    return {"train": train_rows[:TRAIN], "validation": validation_rows, "test": list(range(len(parts.test)))}


def _read(images: LabelledImages, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    """Read the images and labels of a batch of rows."""
    pairs = [images[row] for row in batch["row"]]
    return {"image": [image for image, _ in pairs], "label": [label for _, label in pairs]}


OVERALL = "all 19 tasks"
_MEMBERS = {group: [task.name for task in TASKS if task.group == group] for group in GROUPS}
_MEMBERS[OVERALL] = [task.name for task in TASKS]


@final
@dataclass(frozen=True, repr=False)
class VtabResult(ProtocolResult):
    """The result of `vtab`.

    Attributes:
        num_images: number of evaluated images of all tasks.
        accuracy: task -> accuracy.
        strengths: task -> scikit-learn's C with the best accuracy on the 200 validation images.
        missing: tasks without data.
        unfinished: number of regressions that stopped before they converged.
    """

    title: ClassVar[str] = "VTAB-1k, linear probe of frozen features"
    source: ClassVar[str] = "tasks and 800/200 split of arXiv 1910.04867, which fine-tunes the whole model instead"
    num_images: int
    accuracy: dict[str, float]
    strengths: dict[str, float]
    missing: list[str]
    unfinished: int

    def values(self) -> dict[str, Any]:
        adaptation = "logistic regression on frozen features"
        return {"adaptation": adaptation, **super().values(), "means": group_means(self.accuracy)}

    def headline(self) -> dict[str, float]:
        fractions = group_means(self.accuracy) or self.accuracy
        return {f"VTAB-1k linear probe accuracy, {name}": value for name, value in fractions.items()}

    def tables(self, judged: str) -> list[Table]:
        """Return a table of accuracies for each group of tasks, beside published results, and one for all tasks."""
        published = [
            {task.name: value / 100 for task, value in zip(TASKS, percentages, strict=True)}
            for percentages in PUBLISHED.values()
        ]
        columns = [values | group_means(values) for values in (self.accuracy, *published)]
        header = ["", "linear probe", *PUBLISHED]

        def make_row(name: str, title: str) -> list[str]:
            return [title, *(percent(column.get(name)) for column in columns)]

        tables: list[Table] = []
        for group in GROUPS:
            rows = [make_row(name, name) for name in _MEMBERS[group]]
            tables.append(Table(header, [*rows, make_row(group, "mean")], group))
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        title = f"{self.title}: {judged}; published models are fine-tuned{missing}"
        return [*tables, Table(header, [make_row(OVERALL, "mean")], f"{OVERALL}; {title}")]


def group_means(accuracy: dict[str, float]) -> dict[str, float]:
    """Return the mean accuracy of every group of tasks (including that of all tasks) without missing ones."""
    return {
        group: float(np.mean([accuracy[name] for name in names]))
        for group, names in _MEMBERS.items()
        if set(names) <= set(accuracy)
    }


def vtab(examination: Examination, *, strengths: Sequence[float] = STRENGTHS) -> VtabResult:
    """Measure the accuracy of a logistic regression on the standardized pre-logits for every task.

    As in the paper, the regression is fitted to 800 images, 200 images select its strength, and it is fitted again to
    all 1,000. The paper fine-tunes the whole model, which is frozen here.
    """
    data = examination.data
    if not isinstance(data, VtabData):
        raise UserError(f"'{data.name}' is not a VTAB folder; give the folder with VTAB's tasks with --data")
    if not strengths or min(strengths) <= 0:
        raise UserError(f"strengths={list(strengths)} cannot be used; give numbers above 0")
    accuracy: dict[str, float] = {}
    strengths_by_task: dict[str, float] = {}
    num_images = unfinished = 0
    for name, task in data.tasks.items():
        task_examination = replace(examination, data=task)
        train_features, labels = task_examination.features("train")
        validation_features, classes = task_examination.features("validation")
        if len(np.unique(labels)) < 2:
            raise UserError(f"all training images drawn of {name} have the same class; choose another --seed")
        probes = [Probe.fit(train_features, labels, strength) for strength in sorted(strengths)]
        best = choose_best_probe(probes, validation_features, classes)
        all_features = np.concatenate([train_features, validation_features])
        final_probe = Probe.fit(all_features, np.concatenate([labels, classes]), best.strength)
        test_features, truth = task_examination.features("test")
        accuracy[name] = final_probe.score(test_features, truth)
        strengths_by_task[name] = best.strength
        num_images += len(truth)
        unfinished += sum(not probe.finished for probe in (*probes, final_probe))
    return VtabResult(num_images, accuracy, strengths_by_task, data.missing, unfinished)
