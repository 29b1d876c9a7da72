"""A folder with local copies of VTAB's data sets -> the 800, 200 and test images of every task that is there."""

import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
from numpy.typing import NDArray

from hf_vit.data import ImageData
from hf_vit.data.fingerprints import states_fingerprint
from hf_vit.errors import UserError, first_line
from hf_vit.evaluation.protocols.vtab.images import ImageFiles, LabelledImages, Parts
from hf_vit.evaluation.protocols.vtab.tasks import TASKS, TRAIN, VALIDATION, Task

# What readers of files that are missing, damaged or of another layout raise.
_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(repr=False)
class VtabData(ImageData):
    """The tasks of a folder; its one split, "test", counts the images that judge of all of them.

    Attributes:
        tasks: name -> data with the splits "train" (800 images), "validation" (200) and "test".
        missing: names of the tasks that the folder lacks.
    """

    tasks: dict[str, ImageData] = field(default_factory=dict[str, ImageData])
    missing: list[str] = field(default_factory=list[str])


def load_vtab(root: str | os.PathLike[str], seed: int = 0) -> VtabData:
    """Open every task whose folder is there, and check it: that its images are as many as published, files by name.

    Nothing is downloaded. The paper's 1,000 examples are the first ones in the order of TensorFlow Datasets, which
    needs that library; here they are drawn by `seed`, from the parts that the paper's code takes them from.

    Args:
        root: holds the folders of `TASKS`.
        seed: of the draw of 800 and 200 images.

    Raises:
        UserError: there is no such folder, no task in it, or one that is incomplete or of another layout.
    """
    folder = Path(root)
    present = [task for task in TASKS if (folder / task.folder).exists()]
    if not present:
        folders = ", ".join(dict.fromkeys(task.folder for task in TASKS))
        what = "holds no task of VTAB" if folder.is_dir() else "is no folder"
        raise UserError(
            f"'{folder}' {what}; it needs at least one of the folders {folders}, downloaded beforehand (the page "
            "'Measuring a model' says what lies in each)"
        )
    tasks = {task.name: _open(task, folder, seed) for task in present}
    missing = [task.name for task in TASKS if task.name not in tasks]
    return VtabData(
        name=f"VTAB-1k ({folder.resolve().name})",
        fingerprint=states_fingerprint({name: task.fingerprint for name, task in tasks.items()}),
        splits={
            "test": datasets.concatenate_datasets([cast(datasets.Dataset, t.split("test")) for t in tasks.values()])
        },
        label_names=[],
        notes=[f"{len(missing)} of {len(TASKS)} tasks are missing: {', '.join(missing)}"] if missing else [],
        tasks=tasks,
        missing=missing,
    )


def _open(task: Task, root: Path, seed: int) -> ImageData:
    place = root / task.folder
    lacks = f"{task.name} needs {task.needs} in '{place}'"
    try:
        parts = task.open(root)
    except UserError:
        raise
    except _UNREADABLE as error:
        reason = first_line(error).split(". You")[0]  # torchvision goes on with its own remedy, to download
        raise UserError(f"{lacks}, which is incomplete or of another layout ({reason}); copy all of it") from error
    if len(parts.test) != task.num_test:
        raise UserError(
            f"{lacks}, which has {len(parts.test):,} images that judge instead of the published {task.num_test:,}; "
            "copy all of it"
        )
    rows = _drawn(parts, np.random.default_rng(seed), lacks)
    splits = {
        split: _table(images, chosen)
        for split, (images, chosen) in zip(("train", "validation", "test"), rows, strict=True)
    }
    for images, chosen in rows:
        if isinstance(images, ImageFiles):
            lost = [images.files[row] for row in chosen.tolist() if not images.files[row].is_file()]
            if lost:
                raise UserError(
                    f"{lacks}, where {lost[0].relative_to(root)} and {len(lost) - 1:,} others lack; copy all of it"
                )
    states = {
        path.relative_to(root).as_posix(): f"{path.stat().st_size}" for path in place.rglob("*") if path.is_file()
    }
    names = [str(label) for label in range(task.num_classes)]
    return ImageData(task.name, states_fingerprint(states), splits, names)


def _drawn(parts: Parts, generator: np.random.Generator, lacks: str) -> list[tuple[LabelledImages, NDArray[np.int64]]]:
    """(images, rows) of the 800 to learn from, the 200 to choose by, and those that judge."""
    learnt = generator.permutation(len(parts.train))
    if parts.validation is None:
        other, chosen = parts.train, learnt[TRAIN : TRAIN + VALIDATION]
    else:
        other, chosen = parts.validation, generator.permutation(len(parts.validation))[:VALIDATION]
    if len(learnt[:TRAIN]) < TRAIN or len(chosen) < VALIDATION:
        raise UserError(f"{lacks}, which has too few images to draw {TRAIN} and {VALIDATION} from; copy all of it")
    return [(parts.train, learnt[:TRAIN]), (other, chosen), (parts.test, np.arange(len(parts.test)))]


def _table(images: LabelledImages, rows: NDArray[np.int64]) -> datasets.Dataset:
    """Rows with "image" and "label" that are read when they are asked for."""
    return datasets.Dataset.from_dict({"row": rows.tolist()}).with_transform(partial(_read, images))


def _read(images: LabelledImages, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    pairs = [images[row] for row in batch["row"]]
    return {"image": [image for image, _ in pairs], "label": [label for _, label in pairs]}
