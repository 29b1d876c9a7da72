"""The seven natural tasks of VTAB, as torchvision's classes read them; nothing is downloaded."""

from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR100, DTD, SUN397, SVHN, Flowers102, ImageFolder, OxfordIIITPet

from hf_vit.evaluation.protocols.vtab.images import CUT_SEED, ImageFiles, Parts

_LEARNT_A_CLASS = 30


def caltech101(root: Path) -> Parts:
    """30 images a class to learn from, the others judge, as in TensorFlow Datasets.

    With the background class, the 102nd, which VTAB has and torchvision's class of this name leaves out.
    """
    images = ImageFiles.listed(ImageFolder(root / "caltech101" / "101_ObjectCategories", loader=Path))
    labels, generator = np.asarray(images.labels), np.random.default_rng(CUT_SEED)
    drawn = [generator.permutation(np.flatnonzero(labels == label))[:_LEARNT_A_CLASS] for label in np.unique(labels)]
    train = np.sort(np.concatenate(drawn))
    return Parts(images.take(train), None, images.take(np.setdiff1d(np.arange(len(labels)), train)))


def cifar100(root: Path) -> Parts:
    """50,000 images to learn from, 10,000 that judge."""
    return Parts(CIFAR100(root, train=True), None, CIFAR100(root, train=False))


def dtd(root: Path) -> Parts:
    """The first of the ten published partitions."""
    return Parts(*(ImageFiles.listed(DTD(root, split=split, loader=Path)) for split in ("train", "val", "test")))


def flowers102(root: Path) -> Parts:
    """The published split."""
    return Parts(*(ImageFiles.listed(Flowers102(root, split=split, loader=Path)) for split in ("train", "val", "test")))


def pets(root: Path) -> Parts:
    """The published split."""

    def part(split: str) -> ImageFiles:
        listed = vars(OxfordIIITPet(root, split=split))  # takes no loader, and would decode every image for its class
        return ImageFiles(listed["_images"], listed["_labels"])

    return Parts(part("trainval"), None, part("test"))


def sun397(root: Path) -> Parts:
    """20% judge; the paper's list of them came with TensorFlow Datasets alone."""
    return ImageFiles.listed(SUN397(root, loader=Path)).cut(20)


def svhn(root: Path) -> Parts:
    """Cropped digits; the extra images are left alone, as in the paper."""
    return Parts(SVHN(root / "svhn", split="train"), None, SVHN(root / "svhn", split="test"))
