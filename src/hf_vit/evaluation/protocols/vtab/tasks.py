"""The 19 tasks of VTAB-1k (arXiv 1910.04867) in their three groups, where each lies, and what was published of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hf_vit.evaluation.protocols.vtab import natural, specialized, structured
from hf_vit.evaluation.protocols.vtab.images import Parts

GROUPS = ("natural", "specialized", "structured")
TRAIN, VALIDATION = 800, 200


@final
@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as the papers' tables have it.
        group: of `GROUPS`.
        num_classes: of the task, present in the images or not.
        num_test: images that judge, in the paper.
        folder: under the root.
        needs: what lies there, and where it comes from.
        open: reads it, given the root.
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
_NORB = "smallnorb-5x...-dat.mat and -info.mat, unpacked (cs.nyu.edu/~ylclab/data/norb-v1.0-small)"
TASKS = (
    Task("Caltech101", "natural", 102, 6084, "caltech101",
         "101_ObjectCategories/ (data.caltech.edu/records/mzrjq-6wc02)", natural.caltech101),
    Task("CIFAR-100", "natural", 100, 10_000, "cifar-100-python",
         "train, test and meta (cs.toronto.edu/~kriz/cifar-100-python.tar.gz)", natural.cifar100),
    Task("DTD", "natural", 47, 1880, "dtd",
         "dtd/ with images/ and labels/ (robots.ox.ac.uk/~vgg/data/dtd)", natural.dtd),
    Task("Flowers102", "natural", 102, 6149, "flowers-102", _FLOWERS, natural.flowers102),
    Task("Pets", "natural", 37, 3669, "oxford-iiit-pet",
         "images/ and annotations/ (robots.ox.ac.uk/~vgg/data/pets)", natural.pets),
    Task("Sun397", "natural", 397, 21_750, "SUN397",
         "a/ to z/ and ClassName.txt (vision.princeton.edu/projects/2010/SUN)", natural.sun397),
    Task("SVHN", "natural", 10, 26_032, "svhn",
         "train_32x32.mat and test_32x32.mat (ufldl.stanford.edu/housenumbers)", natural.svhn),
    Task("Camelyon", "specialized", 2, 32_768, "pcam",
         "camelyonpatch_level_2_split_*.h5 (github.com/basveeling/pcam) and pip install 'hf-vit[vtab]'",
         specialized.camelyon),
    Task("EuroSAT", "specialized", 10, 5400, "eurosat", "2750/ (github.com/phelber/eurosat, RGB)", specialized.eurosat),
    Task("Resisc45", "specialized", 45, 6300, "NWPU-RESISC45",
         "a folder a class (NWPU-RESISC45.rar of its authors)", specialized.resisc45),
    Task("Retinopathy", "specialized", 5, 42_670, "diabetic-retinopathy-detection", _RETINOPATHY,
         specialized.retinopathy),
    Task("Clevr-Count", "structured", 8, 15_000, "clevr", _CLEVR, structured.clevr_count),
    Task("Clevr-Dist", "structured", 6, 15_000, "clevr", _CLEVR, structured.clevr_distance),
    Task("DMLab", "structured", 6, 22_735, "dmlab", _DMLAB, structured.dmlab),
    Task("dSpr-Loc", "structured", 16, 73_728, "dsprites", _DSPRITES, structured.dsprites_location),
    Task("dSpr-Ori", "structured", 16, 73_728, "dsprites", _DSPRITES, structured.dsprites_orientation),
    Task("KITTI-Dist", "structured", 4, 711, "Kitti", _KITTI, structured.kitti),
    Task("sNORB-Azim", "structured", 18, 12_150, "smallnorb", _NORB, structured.norb_azimuth),
    Task("sNORB-Elev", "structured", 9, 12_150, "smallnorb", _NORB, structured.norb_elevation),
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
