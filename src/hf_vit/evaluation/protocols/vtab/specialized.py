"""The four specialized tasks of VTAB: pictures of instruments. Nothing is downloaded."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import PCAM, EuroSAT, ImageFolder

from hf_vit.evaluation.protocols.vtab.images import ImageFiles, Parts

RETINA_RADIUS = 300  # px
_KEPT = 0.9  # of the radius
_GRAY = 128


def camelyon(root: Path) -> Parts:
    """The published split of PatchCamelyon; torchvision reads it with h5py."""
    return Parts(PCAM(root, split="train"), PCAM(root, split="val"), PCAM(root, split="test"))


def eurosat(root: Path) -> Parts:
    """20% judge; no split was published."""
    return ImageFiles.listed(EuroSAT(root, loader=lambda path: Path(path))).cut(20)


def resisc45(root: Path) -> Parts:
    """20% judge; no split was published."""
    return ImageFiles.listed(ImageFolder(root / "NWPU-RESISC45", loader=Path)).cut(20)


def retinopathy(root: Path) -> Parts:
    """Kaggle's training images, those of its public and those of its private leaderboard; see `scaled_retina`."""
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
    """The picture as the winner of the competition prepared it, which VTAB takes ("btgraham-300").

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
