"""VTAB-1k (arXiv 1910.04867), 19 tasks with 1,000 labeled images each, as a linear probe of frozen features.

Legend: n images, D features.
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast, final

import datasets
import numpy as np
from numpy.typing import NDArray

from hf_vit.data import ImageData
from hf_vit.data.fingerprints import states_fingerprint
from hf_vit.errors import UserError, first_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe, best_probe
from hf_vit.evaluation.protocols.vtab_tasks import (
    GROUPS,
    PUBLISHED,
    TASKS,
    TRAIN,
    VALIDATION,
    ImageFiles,
    LabelledImages,
    Task,
)

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


def _open_task(task: Task, root: Path, seed: int) -> ImageData:
    """Open a task, check it, and draw its 800 training and 200 validation images."""
    folder = root / task.folder
    problem = f"{task.name} needs {task.needs} in '{folder}'"
    try:
        parts = task.open(root)
    except UserError:
        raise
    except _UNREADABLE as error:
        reason = first_line(error).split(". You")[0]  # without torchvision's own remedy, which is to download
        raise UserError(f"{problem}, which is incomplete or of another layout ({reason}); copy all of it") from error
    if len(parts.test) != task.num_test:
        raise UserError(
            f"{problem}, which has {len(parts.test):,} test images instead of the published "
            f"{task.num_test:,}; copy all of it"
        )
    generator = np.random.default_rng(seed)
    train_rows = generator.permutation(len(parts.train))
    if parts.validation is None:
        validation_images, validation_rows = parts.train, train_rows[TRAIN : TRAIN + VALIDATION]
    else:
        validation_images, validation_rows = parts.validation, generator.permutation(len(parts.validation))[:VALIDATION]
    if len(train_rows[:TRAIN]) < TRAIN or len(validation_rows) < VALIDATION:
        raise UserError(f"{problem}, which has too few images to draw {TRAIN} and {VALIDATION}; copy all of it")
    splits: dict[str, tuple[LabelledImages, NDArray[np.int64]]] = {
        "train": (parts.train, train_rows[:TRAIN]),
        "validation": (validation_images, validation_rows),
        "test": (parts.test, np.arange(len(parts.test))),
    }
    for images, rows in splits.values():
        if isinstance(images, ImageFiles):
            missing_files = [images.files[row] for row in rows.tolist() if not images.files[row].is_file()]
            if missing_files:
                raise UserError(
                    f"{problem}, where {missing_files[0].relative_to(root)} and {len(missing_files) - 1:,} other files "
                    "are missing; copy all of it"
                )
    files = (path for path in folder.rglob("*") if path.is_file())
    states = {path.relative_to(root).as_posix(): f"{path.stat().st_size}" for path in files}
    return ImageData(
        task.name,
        states_fingerprint(states),
        {  # images are read when a row is accessed
            split: datasets.Dataset.from_dict({"row": rows.tolist()}).with_transform(partial(_read, images))
            for split, (images, rows) in splits.items()
        },
        [str(label) for label in range(task.num_classes)],
    )


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

    def means(self) -> dict[str, float]:
        """Return the mean accuracy of every complete group of tasks."""
        return group_means(self.accuracy)

    def values(self) -> dict[str, Any]:
        adaptation = "logistic regression on frozen features"
        return {"adaptation": adaptation, **super().values(), "means": self.means()}

    def headline(self) -> dict[str, float]:
        fractions = self.means() or self.accuracy
        return {f"VTAB-1k linear probe accuracy, {name}": value for name, value in fractions.items()}

    def tables(self, judged: str) -> list[Table]:
        tasks = [task.name for task in TASKS]
        published = [dict(zip(tasks, (value / 100 for value in row), strict=True)) for row in PUBLISHED.values()]
        columns = [values | group_means(values) for values in (self.accuracy, *published)]
        header = ["", "linear probe", *PUBLISHED]

        def row(name: str, title: str) -> list[str]:
            return [title, *(percent(column.get(name)) for column in columns)]

        groups = [
            Table(header, [*(row(name, name) for name in members), row(group, "mean")], group)
            for group, members in _MEMBERS.items()
            if group != OVERALL
        ]
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        title = f"{self.title}: {judged}; published models are fine-tuned{missing}"
        return [*groups, Table(header, [row(OVERALL, "mean")], f"{OVERALL}; {title}")]


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
        raise UserError(f"'{data.name}' is not a VTAB folder; give a VTAB folder with --data")
    if not strengths or min(strengths) <= 0:
        raise UserError(f"--strengths is {list(strengths)}; give positive numbers")
    accuracy: dict[str, float] = {}
    strengths_by_task: dict[str, float] = {}
    num_images = unfinished = 0
    for name, task in data.tasks.items():
        task_examination = replace(examination, data=task)
        (train_features, labels), (validation_features, classes) = (
            task_examination.features("train"),
            task_examination.features("validation"),
        )
        if len(np.unique(labels)) < 2:
            raise UserError(f"the training images of {name} have only one class; choose another --seed")
        probes = [Probe.fit(train_features, labels, strength) for strength in sorted(strengths)]
        best = best_probe(probes, validation_features, classes)
        final_probe = Probe.fit(
            np.concatenate([train_features, validation_features]), np.concatenate([labels, classes]), best.strength
        )
        test_features, truth = task_examination.features("test")
        accuracy[name], strengths_by_task[name] = final_probe.score(test_features, truth), best.strength
        num_images += len(truth)
        unfinished += sum(not probe.finished for probe in (*probes, final_probe))
    return VtabResult(num_images, accuracy, strengths_by_task, data.missing, unfinished)
