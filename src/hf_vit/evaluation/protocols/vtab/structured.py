"""The eight structured tasks of VTAB: counts, distances, positions, angles. Nothing is downloaded.

What a class means stands in the paper's code (github.com/google-research/task_adaptation, data/*.py).
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets import CLEVRClassification, Kitti

from hf_vit.evaluation.protocols.vtab.dsprites import DSprites
from hf_vit.evaluation.protocols.vtab.images import ImageFiles, Parts, cut_rows
from hf_vit.evaluation.protocols.vtab.tfrecords import RecordedImages

# Lower ends of the bins of a distance.
CLEVR_DEPTHS = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
KITTI_METRES = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
_NORB = "smallnorb-5x{}x9x18x6x2x96x96-{}-{}.mat"
_NORB_PARTS = {"training": "46789", "testing": "01235"}
_NORB_TYPES = {507333717: np.dtype("u1"), 507333716: np.dtype("<i4")}


def bin_of(value: float, lower_ends: Sequence[float]) -> int:
    """The bin of a value that is larger than its lower end."""
    return int(np.searchsorted(lower_ends, value, side="left")) - 1


def clevr_count(root: Path) -> Parts:
    """Number of objects, 3 to 10."""

    def part(split: str) -> ImageFiles:
        images = ImageFiles.listed(CLEVRClassification(root, split=split, loader=Path))
        return ImageFiles(images.files, [count - 3 for count in images.labels])

    return Parts(part("train"), None, part("val"))


def clevr_distance(root: Path) -> Parts:
    """Depth of the closest object, in six bins."""

    def part(split: str) -> ImageFiles:
        files = ImageFiles.listed(CLEVRClassification(root, split=split, loader=Path)).files
        place = root / "clevr" / "CLEVR_v1.0" / "scenes" / f"CLEVR_{split}_scenes.json"
        scenes: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))["scenes"]
        depth = {scene["image_filename"]: min(each["pixel_coords"][2] for each in scene["objects"]) for scene in scenes}
        return ImageFiles(files, [bin_of(depth[file.name], CLEVR_DEPTHS) for file in files])

    return Parts(part("train"), None, part("val"))


def dmlab(root: Path) -> Parts:
    """Three distances of a reward, good or bad, seen by an agent in DeepMind Lab."""
    return Parts(*(RecordedImages(root / "dmlab", f"dmlab-{split}") for split in ("train", "validation", "test")))


def dsprites(root: Path, factor: int) -> Parts:
    """Factor 4: the sprite's x in 16 bins of two places; 3: its orientation in 16 bins of 2.5 angles. 10% judge."""
    images = DSprites(root / "dsprites", factor, num_classes=16)
    test, train = cut_rows(len(images), len(images) - len(images) * 80 // 100 - len(images) * 10 // 100)
    return Parts(images.take(train), None, images.take(test))


dsprites_location = partial(dsprites, factor=4)
dsprites_orientation = partial(dsprites, factor=3)


def kitti(root: Path) -> Parts:
    """Distance of the closest vehicle: below 8 m, below 20 m, farther, none.

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
    """The class of an image, given the objects of its label file: 0 to 3."""
    metres = [float(each["location"][2]) for each in objects if each["type"] in _VEHICLES]
    return bin_of(min(metres, default=_NO_VEHICLE), KITTI_METRES)


def _drives(mapping: Path, total: int) -> tuple[list[int], list[int], list[int]]:
    """Rows of train, validation and test, as TensorFlow Datasets draws drives for them (NumPy's seed 123)."""
    lines = (mapping / "train_mapping.txt").read_text().splitlines()
    numbers = [int(number) - 1 for number in (mapping / "train_rand.txt").read_text().split(",")]
    if len(numbers) != total:
        raise ValueError(f"train_rand.txt tells of {len(numbers):,} images, there are {total:,}")
    drive_of = [lines[number].split()[1] for number in numbers]
    drives, random = sorted(set(drive_of)), np.random.RandomState(123)
    tenth = max(1, len(drives) // 10)
    test: set[str] = set(random.choice(drives, tenth, replace=False).tolist())
    others = sorted(set(drives) - test)
    validation: set[str] = set(random.choice(others, tenth, replace=False).tolist())
    rows = range(total)
    return (
        [row for row in rows if drive_of[row] not in test | validation],
        [row for row in rows if drive_of[row] in validation],
        [row for row in rows if drive_of[row] in test],
    )


@final
class NorbImages:
    """Pictures of the first camera and one column of what is known of them, `unit` steps a class."""

    def __init__(self, folder: Path, part: str, column: int, unit: int) -> None:
        pixels, known = (read_norb(folder / _NORB.format(_NORB_PARTS[part], part, kind)) for kind in ("dat", "info"))
        if pixels.ndim != 4 or known.ndim != 2 or len(pixels) != len(known):
            raise ValueError(f"pixels {pixels.shape} and facts {known.shape} of {part} do not belong together")
        self.pixels = pixels[:, 0]
        self.labels = known[:, column] // unit
        self.rows = np.arange(len(pixels))

    def take(self, rows: NDArray[np.int64]) -> "NorbImages":
        """Those of some rows."""
        part = object.__new__(NorbImages)
        part.pixels, part.labels, part.rows = self.pixels, self.labels, self.rows[rows]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        at = self.rows[row]
        return Image.fromarray(np.array(self.pixels[at])), int(self.labels[at])


def small_norb(root: Path, column: int, unit: int) -> Parts:
    """Half of the published test images are to choose by, the other half judge."""
    train = NorbImages(root / "smallnorb", "training", column, unit)
    testing = NorbImages(root / "smallnorb", "testing", column, unit)
    validation, test = cut_rows(len(testing), len(testing) // 2)
    return Parts(train, testing.take(validation), testing.take(test))


norb_azimuth = partial(small_norb, column=2, unit=2)  # published as 0, 2, ... 34
norb_elevation = partial(small_norb, column=1, unit=1)


def read_norb(path: Path) -> NDArray[Any]:
    """A matrix of small NORB: type, number of sizes, at least three sizes, all of four bytes; then its numbers."""
    head = np.fromfile(path, "<i4", 2)
    if len(head) < 2 or int(head[0]) not in _NORB_TYPES:
        raise ValueError(f"{path.name} is no matrix of small NORB")
    sizes = np.fromfile(path, "<i4", int(head[1]), offset=8)
    shape = tuple(int(size) for size in sizes)
    return np.memmap(path, _NORB_TYPES[int(head[0])], "r", 8 + 4 * max(3, len(shape)), shape)
