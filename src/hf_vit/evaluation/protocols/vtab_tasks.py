"""The 19 tasks of VTAB-1k (arXiv 1910.04867) in their three groups, and how each is read from a copy of its data.

Nothing is downloaded. Images are decoded when they are asked for. What a class means stands in the paper's code
(github.com/google-research/task_adaptation, data/*.py).
"""

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, final

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

from hf_vit.data.images import decode_image
from hf_vit.errors import UserError

# Of the cuts that were never published as a list of files: the same on every machine, whatever --seed is.
CUT_SEED = 0


# A row is (Pillow image, class number), as in torchvision's data sets of classes.
LabelledImages = Any


class Parts(NamedTuple):
    """The images of a task."""

    train: LabelledImages  # to learn from
    validation: LabelledImages | None  # to choose by, where the paper's code takes them from elsewhere than `train`
    test: LabelledImages  # that judge


@final
@dataclass(frozen=True)
class ImageFiles:
    """Images that are files of their own, with their classes; `shown` makes the picture of the decoded file."""

    files: Sequence[Path]
    labels: Sequence[int]
    shown: Callable[[Image.Image], Image.Image] | None = None

    @classmethod
    def listed(cls, dataset: Any) -> "ImageFiles":
        """Return those of a torchvision data set opened with `loader=Path`, which tells the files and decodes none."""
        pairs = sorted((Path(path), int(label)) for path, label in (dataset[row] for row in range(len(dataset))))
        return cls([path for path, _ in pairs], [label for _, label in pairs])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        try:
            image = decode_image(self.files[row])
            return self.shown(image) if self.shown else image, self.labels[row]
        except OSError as error:
            raise UserError(f"{self.files[row]} cannot be read as an image ({error}); copy it again") from error

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "ImageFiles":
        return ImageFiles([self.files[row] for row in rows], [self.labels[row] for row in rows], self.shown)

    def cut(self, percent: int) -> Parts:
        """Let so many percent judge, drawn once and for all; the others are to learn from."""
        test, train = cut_rows(len(self), len(self) * percent // 100)
        return Parts(self.take(train), None, self.take(test))


def cut_rows(total: int, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw (`first` rows of `total`, the others), each ascending."""
    rows = np.random.default_rng(CUT_SEED).permutation(total)
    return np.sort(rows[:first]), np.sort(rows[first:])


FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
SIZES = (1, 3, 6, 40, 32, 32)  # values of color, shape, scale, orientation, x, y
_AT_ONCE = 4096


@final
class DSprites(Dataset[tuple[Image.Image, int]]):
    """Pictures, white on black, and one of their factors in `num_classes` equal bins."""

    def __init__(self, folder: Path, factor: int, num_classes: int) -> None:
        self.file = folder / FILE
        with zipfile.ZipFile(self.file) as archive, archive.open("imgs.npy") as file:
            shape = _shape(file)
        with np.load(self.file, allow_pickle=False) as arrays:
            factors: NDArray[np.int64] = arrays["latents_classes"]
        self.labels = (factors[:, factor] // (SIZES[factor] / num_classes)).astype(np.int64)
        if len(shape) != 3 or shape[0] != len(factors):
            raise ValueError(f"pictures {shape} and {len(factors):,} rows of factors do not belong together")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        bits, (height, width) = _pictures(self.file)
        pixels = np.unpackbits(bits[index], count=height * width).reshape(height, width) * np.uint8(255)
        return Image.fromarray(pixels), int(self.labels[index])


@lru_cache(maxsize=1)  # two tasks look at the same pictures, and reading them takes a while
def _pictures(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Return all pictures as bits [n, h * w / 8], and (h, w)."""
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        total, height, width = _shape(file)
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, total, _AT_ONCE):
            count = min(_AT_ONCE, total - start)
            pixels = np.frombuffer(file.read(count * height * width), np.uint8).reshape(count, height * width)
            parts.append(np.packbits(pixels, axis=1))
    return np.concatenate(parts), (height, width)


def _shape(file: IO[bytes]) -> tuple[int, ...]:
    """Read the head of a .npy of bytes."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("imgs.npy is of another version of the format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran or dtype != np.uint8:
        raise ValueError(f"imgs.npy holds {dtype}, bytes in C's order are needed")
    return shape


_BYTES_LIST, _INT64_LIST = 1, 3


@final
class RecordedImages:
    """Pictures ("image", an encoded file) and classes ("label") of all files NAME.tfrecord* of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        files = sorted(folder.glob(f"{name}.tfrecord*"))
        if not files:
            raise ValueError(f"there is no {name}.tfrecord")
        self.places = [(file, start, size) for file in files for start, size in record_places(file)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        path, start, size = self.places[row]
        try:
            with path.open("rb") as file:
                file.seek(start)
                values = example(file.read(size))
            image, label = values["image"], values["label"]
            if not isinstance(image, bytes) or not isinstance(label, int):
                raise ValueError("image or label is of another type")
            picture = decode_image(io.BytesIO(image))
        except (OSError, ValueError, LookupError) as error:
            raise UserError(
                f"record {row:,} of {path} is not an image with a class ({error}); copy it again"
            ) from error
        return picture, label


def record_places(path: Path) -> Iterator[tuple[int, int]]:
    """Iterate over (offset, size) in bytes of the content of every record."""
    end, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while place < end:
            file.seek(place)
            size = int.from_bytes(file.read(8), "little")
            if place + 16 + size > end:
                raise ValueError(f"{path.name} ends within a record")
            yield place + 12, size
            place += 16 + size


def example(message: bytes) -> dict[str, bytes | int]:
    """Return the first value of every feature of an Example, by name."""
    values: dict[str, bytes | int] = {}
    for _, features in _fields(message):
        for _, entry in _fields(_message(features)):
            named = dict(_fields(_message(entry)))
            for kind, stored in _fields(_message(named[2])):
                first = next((value for _, value in _fields(_message(stored))), b"")
                if kind == _INT64_LIST and isinstance(first, bytes):  # packed
                    first = _varint(first, 0)[0]
                if kind in (_BYTES_LIST, _INT64_LIST):
                    values[_message(named[1]).decode()] = first
    return values


def _message(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where a message is needed")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Iterate over (number of the field, value) of a protobuf message of integers and of what has a length."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value, place = _varint(message, place)
        if key & 7 == 2:
            if place + value > len(message):
                raise ValueError("a message ends within a field")
            yield key >> 3, message[place : place + value]
            place += value
        elif key & 7 == 0:
            yield key >> 3, value
        else:
            raise ValueError(f"a field of wire type {key & 7}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return (number, where the next field begins): seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        if place >= len(message):
            raise ValueError("a message ends within a number")
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


_LEARNT_A_CLASS = 30


def caltech101(root: Path) -> Parts:
    # 30 images a class to learn from, the others judge, as in TensorFlow Datasets. With the background class, the
    # 102nd, which VTAB has and torchvision's class of this name leaves out.
    images = ImageFiles.listed(ImageFolder(root / "caltech101" / "101_ObjectCategories", loader=Path))
    labels, generator = np.asarray(images.labels), np.random.default_rng(CUT_SEED)
    drawn = [generator.permutation(np.flatnonzero(labels == label))[:_LEARNT_A_CLASS] for label in np.unique(labels)]
    train = np.sort(np.concatenate(drawn))
    return Parts(images.take(train), None, images.take(np.setdiff1d(np.arange(len(labels)), train)))


def cifar100(root: Path) -> Parts:
    return Parts(CIFAR100(root, train=True), None, CIFAR100(root, train=False))


def published(root: Path, dataset: Callable[..., Any]) -> Parts:
    """Return the published split; of DTD the first of the ten."""
    return Parts(*(ImageFiles.listed(dataset(root, split=split, loader=Path)) for split in ("train", "val", "test")))


def pets(root: Path) -> Parts:
    def part(split: str) -> ImageFiles:
        listed = vars(OxfordIIITPet(root, split=split))  # takes no loader, and would decode every image for its class
        return ImageFiles(listed["_images"], listed["_labels"])

    return Parts(part("trainval"), None, part("test"))


# 20% of the images of Sun397, EuroSAT and Resisc45 judge: no split was published, or with TensorFlow Datasets alone.
def sun397(root: Path) -> Parts:
    return ImageFiles.listed(SUN397(root, loader=Path)).cut(20)


def svhn(root: Path) -> Parts:
    return Parts(SVHN(root / "svhn", split="train"), None, SVHN(root / "svhn", split="test"))


RETINA_RADIUS = 300  # px
_KEPT = 0.9  # of the radius
_GRAY = 128


def camelyon(root: Path) -> Parts:
    return Parts(PCAM(root, split="train"), PCAM(root, split="val"), PCAM(root, split="test"))


def eurosat(root: Path) -> Parts:
    return ImageFiles.listed(EuroSAT(root, loader=lambda path: Path(path))).cut(20)


def resisc45(root: Path) -> Parts:
    return ImageFiles.listed(ImageFolder(root / "NWPU-RESISC45", loader=Path)).cut(20)


def retinopathy(root: Path) -> Parts:
    # Kaggle's training images, those of its public and those of its private leaderboard.
    folder = root / "diabetic-retinopathy-detection"

    def part(images: str, table: str, usage: str | None) -> ImageFiles:
        with (folder / table).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if usage is None or row["Usage"] == usage]
        files = [folder / images / f"{row['image']}.jpeg" for row in rows]
        return ImageFiles(files, [int(row["level"]) for row in rows], scaled_retina)

    solution = "retinopathy_solution.csv"
    return Parts(
        part("train", "trainLabels.csv", None), part("test", solution, "Public"), part("test", solution, "Private")
    )


def scaled_retina(image: Image.Image) -> Image.Image:
    """Return the picture as the winner of the competition prepared it, which VTAB takes ("btgraham-300").

    The eye's radius becomes 300 px, the local mean is subtracted, and what lies outside 90% of the radius goes. Filters
    are Pillow's and SciPy's where the original has OpenCV's, and no JPEG is written in between.
    """
    from scipy.ndimage import gaussian_filter

    pixels = np.asarray(image)
    middle = pixels[len(pixels) // 2].sum(axis=1, dtype=np.float64)
    radius = (middle > middle.mean() / 10).sum() / 2
    scale = RETINA_RADIUS / (radius if radius >= 1 else len(pixels) / 2)
    size = round(image.width * scale), round(image.height * scale)
    scaled = np.asarray(image.resize(size, Image.Resampling.BILINEAR), dtype=np.float64)
    sigma = RETINA_RADIUS / 30
    blurred = np.rint(gaussian_filter(scaled, (sigma, sigma, 0), mode="mirror", truncate=3))
    height, width = scaled.shape[:2]
    rows, columns = np.ogrid[:height, :width]
    kept = int(RETINA_RADIUS * _KEPT)
    inside = (rows - height // 2) ** 2 + (columns - width // 2) ** 2 <= kept**2
    shown = np.where(inside[..., None], np.clip(4 * (scaled - blurred) + _GRAY, 0, 255), _GRAY).astype(np.uint8)
    top, left = max(height // 2 - kept, 0), max(width // 2 - kept, 0)
    return Image.fromarray(shown[top : height // 2 + kept, left : width // 2 + kept])


# Lower ends of the bins of a distance.
CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
_NORB = "smallnorb-5x{}x9x18x6x2x96x96-{}-{}.mat"
_NORB_PARTS = {"training": "46789", "testing": "01235"}
_NORB_TYPES = {507333717: np.dtype("u1"), 507333716: np.dtype("<i4")}


def bin_of(value: float, lower_ends: Sequence[float]) -> int:
    """Return the bin of a value that is larger than its lower end."""
    return int(np.searchsorted(lower_ends, value, side="left")) - 1


def clevr_count(root: Path) -> Parts:
    def part(split: str) -> ImageFiles:
        images = ImageFiles.listed(CLEVRClassification(root, split=split, loader=Path))
        return ImageFiles(images.files, [count - 3 for count in images.labels])  # 3 to 10 objects

    return Parts(part("train"), None, part("val"))


def clevr_distance(root: Path) -> Parts:
    def part(split: str) -> ImageFiles:
        files = ImageFiles.listed(CLEVRClassification(root, split=split, loader=Path)).files
        place = root / "clevr" / "CLEVR_v1.0" / "scenes" / f"CLEVR_{split}_scenes.json"
        scenes: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))["scenes"]
        depth = {scene["image_filename"]: min(each["pixel_coords"][2] for each in scene["objects"]) for scene in scenes}
        return ImageFiles(files, [bin_of(depth[file.name], CLEVR_DEPTHS) for file in files])  # of the closest object

    return Parts(part("train"), None, part("val"))


def dmlab(root: Path) -> Parts:
    return Parts(*(RecordedImages(root / "dmlab", f"dmlab-{split}") for split in ("train", "validation", "test")))


def dsprites(root: Path, factor: int) -> Parts:
    images = DSprites(root / "dsprites", factor, num_classes=16)  # 10% judge
    test, train = cut_rows(len(images), len(images) - len(images) * 80 // 100 - len(images) * 10 // 100)
    return Parts(Subset(images, train.tolist()), None, Subset(images, test.tolist()))


def kitti(root: Path) -> Parts:
    """Return KITTI's images by distance of the closest vehicle: below 8 m, below 20 m, farther, none.

    Parts are those of TensorFlow Datasets, by drives, so that frames of one drive never stand on both sides; which
    frame is of which drive stands in the development kit's `mapping`.
    """
    data = Kitti(root, train=True)
    if lost := [Path(name).name for name in data.targets if not Path(name).is_file()]:
        raise ValueError(f"{lost[0]} and {len(lost) - 1:,} other label files lack")
    pairs: list[tuple[Path, int]] = []
    for row, file in enumerate(data.images):
        image, objects = data[row]
        image.close()
        pairs.append((Path(file), closest_vehicle(objects)))
    pairs.sort()
    images = ImageFiles([file for file, _ in pairs], [label for _, label in pairs])
    return Parts(*(images.take(rows) for rows in _drives(root / "Kitti" / "raw" / "mapping", len(images))))


def closest_vehicle(objects: Sequence[Mapping[str, Any]]) -> int:
    """Return the class of an image, given the objects of its label file: 0 to 3."""
    metres = [float(each["location"][2]) for each in objects if each["type"] in _VEHICLES]
    return bin_of(min(metres, default=_NO_VEHICLE), KITTI_METRES)


def _drives(mapping: Path, total: int) -> tuple[list[int], list[int], list[int]]:
    """Return rows of train, validation and test, as TensorFlow Datasets draws drives for them (NumPy's seed 123)."""
    lines = (mapping / "train_mapping.txt").read_text().splitlines()
    numbers = [int(number) - 1 for number in (mapping / "train_rand.txt").read_text().split(",")]
    if len(numbers) != total:
        raise ValueError(f"train_rand.txt tells of {len(numbers):,} images, there are {total:,}")
    drive_of = [lines[number].split()[1] for number in numbers]
    drives, random = sorted(set(drive_of)), np.random.RandomState(123)
    tenth = max(1, len(drives) // 10)
    test: set[str] = set(random.choice(drives, tenth, replace=False).tolist())
    validation: set[str] = set(random.choice(sorted(set(drives) - test), tenth, replace=False).tolist())
    train = set(drives) - test - validation
    rows = [[row for row, drive in enumerate(drive_of) if drive in part] for part in (train, validation, test)]
    return rows[0], rows[1], rows[2]


@final
class NorbImages(Dataset[tuple[Image.Image, int]]):
    """Pictures of the first camera and one column of what is known of them; azimuths are numbered by twos."""

    def __init__(self, folder: Path, part: str, column: int, unit: int) -> None:
        pixels, known = (read_norb(folder / _NORB.format(_NORB_PARTS[part], part, kind)) for kind in ("dat", "info"))
        if pixels.ndim != 4 or known.ndim != 2 or len(pixels) != len(known):
            raise ValueError(f"pixels {pixels.shape} and facts {known.shape} of {part} do not belong together")
        self.pixels = pixels[:, 0]
        self.labels = known[:, column] // unit

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.array(self.pixels[index])), int(self.labels[index])


def small_norb(root: Path, column: int, unit: int) -> Parts:
    train = NorbImages(root / "smallnorb", "training", column, unit)
    testing = NorbImages(root / "smallnorb", "testing", column, unit)
    validation, test = cut_rows(len(testing), len(testing) // 2)  # no images to choose by were published
    return Parts(train, Subset(testing, validation.tolist()), Subset(testing, test.tolist()))


def read_norb(path: Path) -> NDArray[Any]:
    """Read a matrix of small NORB: type, number of sizes, at least three sizes, all of four bytes; then its numbers."""
    head = np.fromfile(path, "<i4", 2)
    if len(head) < 2 or int(head[0]) not in _NORB_TYPES:
        raise ValueError(f"{path.name} is no matrix of small NORB")
    sizes = np.fromfile(path, "<i4", int(head[1]), offset=8)
    shape = tuple(int(size) for size in sizes)
    return np.memmap(path, _NORB_TYPES[int(head[0])], "r", 8 + 4 * max(3, len(shape)), shape)


GROUPS = ("natural", "specialized", "structured")
TRAIN, VALIDATION = 800, 200


@final
@dataclass(frozen=True)
class Task:
    """One task."""

    name: str  # as the papers' tables have it
    group: str  # of `GROUPS`
    num_classes: int  # of the task, present in the images or not
    num_test: int  # images that judge, in the paper
    folder: str  # under the root
    needs: str  # what lies there, and where it comes from
    open: Callable[[Path], Parts]  # reads it, given the root


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
         "101_ObjectCategories/ (data.caltech.edu/records/mzrjq-6wc02)", caltech101),
    Task("CIFAR-100", "natural", 100, 10_000, "cifar-100-python",
         "train, test and meta (cs.toronto.edu/~kriz/cifar-100-python.tar.gz)", cifar100),
    Task("DTD", "natural", 47, 1880, "dtd",
         "dtd/ with images/ and labels/ (robots.ox.ac.uk/~vgg/data/dtd)", partial(published, dataset=DTD)),
    Task("Flowers102", "natural", 102, 6149, "flowers-102", _FLOWERS, partial(published, dataset=Flowers102)),
    Task("Pets", "natural", 37, 3669, "oxford-iiit-pet",
         "images/ and annotations/ (robots.ox.ac.uk/~vgg/data/pets)", pets),
    Task("Sun397", "natural", 397, 21_750, "SUN397",
         "a/ to z/ and ClassName.txt (vision.princeton.edu/projects/2010/SUN)", sun397),
    Task("SVHN", "natural", 10, 26_032, "svhn",
         "train_32x32.mat and test_32x32.mat (ufldl.stanford.edu/housenumbers)", svhn),
    Task("Camelyon", "specialized", 2, 32_768, "pcam",
         "camelyonpatch_level_2_split_*.h5 (github.com/basveeling/pcam) and pip install 'hf-vit[vtab]'",
         camelyon),
    Task("EuroSAT", "specialized", 10, 5400, "eurosat", "2750/ (github.com/phelber/eurosat, RGB)", eurosat),
    Task("Resisc45", "specialized", 45, 6300, "NWPU-RESISC45",
         "a folder a class (NWPU-RESISC45.rar of its authors)", resisc45),
    Task("Retinopathy", "specialized", 5, 42_670, "diabetic-retinopathy-detection", _RETINOPATHY,
         retinopathy),
    Task("Clevr-Count", "structured", 8, 15_000, "clevr", _CLEVR, clevr_count),
    Task("Clevr-Dist", "structured", 6, 15_000, "clevr", _CLEVR, clevr_distance),
    Task("DMLab", "structured", 6, 22_735, "dmlab", _DMLAB, dmlab),
    Task("dSpr-Loc", "structured", 16, 73_728, "dsprites", _DSPRITES, partial(dsprites, factor=4)),
    Task("dSpr-Ori", "structured", 16, 73_728, "dsprites", _DSPRITES, partial(dsprites, factor=3)),
    Task("KITTI-Dist", "structured", 4, 711, "Kitti", _KITTI, kitti),
    Task("sNORB-Azim", "structured", 18, 12_150, "smallnorb", _NORB_FILES, partial(small_norb, column=2, unit=2)),
    Task("sNORB-Elev", "structured", 9, 12_150, "smallnorb", _NORB_FILES, partial(small_norb, column=1, unit=1)),
)  # fmt: skip

# Percents by task in the order of `TASKS`, all of fine-tuned models. ViT: arXiv 2010.11929, table 9; ResNet-50: the
# authors' page of results (google-research/task_adaptation, docs/data/results.csv, 1,000 examples).
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
