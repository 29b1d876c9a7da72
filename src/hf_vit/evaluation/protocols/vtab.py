"""VTAB-1k (arXiv 1910.04867): 19 tasks, 1,000 labeled images each. Here a linear probe of frozen features.

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

# What readers of files that are missing, damaged or of another layout raise.
_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(repr=False)
class VtabData(ImageData):
    """The tasks of a folder; its one split, "test", counts the images that judge of all of them."""

    # name -> data with the splits "train" (800 images), "validation" (200) and "test"
    tasks: dict[str, ImageData] = field(default_factory=dict[str, ImageData])
    missing: list[str] = field(default_factory=list[str])  # tasks that the folder lacks


def load_vtab(root: str | os.PathLike[str], seed: int = 0) -> VtabData:
    """Open every task whose folder is there, and check it: that its images are as many as published, files by name.

    Nothing is downloaded. The paper's 1,000 examples are the first ones in the order of TensorFlow Datasets, which
    needs that library; here they are drawn by `seed`, from the parts that the paper's code takes them from.
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
            f"{lacks}, which has {len(parts.test):,} test images instead of the published "
            f"{task.num_test:,}; copy all of it"
        )
    generator = np.random.default_rng(seed)
    learned = generator.permutation(len(parts.train))
    if parts.validation is None:
        other, chosen = parts.train, learned[TRAIN : TRAIN + VALIDATION]
    else:
        other, chosen = parts.validation, generator.permutation(len(parts.validation))[:VALIDATION]
    if len(learned[:TRAIN]) < TRAIN or len(chosen) < VALIDATION:
        raise UserError(f"{lacks}, which has too few images to draw {TRAIN} and {VALIDATION} from; copy all of it")
    splits: dict[str, tuple[LabelledImages, NDArray[np.int64]]] = {
        "train": (parts.train, learned[:TRAIN]),
        "validation": (other, chosen),
        "test": (parts.test, np.arange(len(parts.test))),
    }
    for images, rows in splits.values():
        if isinstance(images, ImageFiles):
            lost = [images.files[row] for row in rows.tolist() if not images.files[row].is_file()]
            if lost:
                raise UserError(
                    f"{lacks}, where {lost[0].relative_to(root)} and {len(lost) - 1:,} other files are "
                    "missing; copy all of it"
                )
    files = (path for path in place.rglob("*") if path.is_file())
    states = {path.relative_to(root).as_posix(): f"{path.stat().st_size}" for path in files}
    return ImageData(
        task.name,
        states_fingerprint(states),
        {  # rows are read when they are asked for
            split: datasets.Dataset.from_dict({"row": rows.tolist()}).with_transform(partial(_read, images))
            for split, (images, rows) in splits.items()
        },
        [str(label) for label in range(task.num_classes)],
    )


def _read(images: LabelledImages, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    pairs = [images[row] for row in batch["row"]]
    return {"image": [image for image, _ in pairs], "label": [label for _, label in pairs]}


OVERALL = "all 19 tasks"
_MEMBERS = {group: [task.name for task in TASKS if task.group == group] for group in GROUPS}
_MEMBERS[OVERALL] = [task.name for task in TASKS]


@final
@dataclass(frozen=True, repr=False)
class VtabResult(ProtocolResult):
    """What `vtab` measured; `unfinished` regressions stopped before they had converged."""

    title: ClassVar[str] = "VTAB-1k, linear probe of frozen features"
    source: ClassVar[str] = "tasks and 800/200 split of arXiv 1910.04867, which fine-tunes the whole model instead"
    num_images: int
    accuracy: dict[str, float]  # task -> share of right answers
    strengths: dict[str, float]  # task -> scikit-learn's C that the 200 images chose
    missing: list[str]
    unfinished: int

    def means(self) -> dict[str, float]:
        """Return the mean accuracy of every group that is complete, and of all tasks."""
        return group_means(self.accuracy)

    def values(self) -> dict[str, Any]:
        adaptation = "logistic regression on frozen features"
        return {"adaptation": adaptation, **super().values(), "means": self.means()}

    def headline(self) -> dict[str, float]:
        shown = self.means() or self.accuracy
        return {f"VTAB-1k linear probe accuracy, {name}": value for name, value in shown.items()}

    def tables(self, judged: str) -> list[Table]:
        tasks = [task.name for task in TASKS]
        published = [dict(zip(tasks, (value / 100 for value in row), strict=True)) for row in PUBLISHED.values()]
        columns = [values | group_means(values) for values in (self.accuracy, *published)]
        header = ["", "linear probe", *PUBLISHED]

        def row(name: str, shown: str) -> list[str]:
            return [shown, *(percent(column.get(name)) for column in columns)]

        groups = [
            Table(header, [*(row(name, name) for name in members), row(group, "mean")], group)
            for group, members in _MEMBERS.items()
            if group != OVERALL
        ]
        lack = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        title = f"{self.title}: {judged}; published models are fine-tuned{lack}"
        return [*groups, Table(header, [row(OVERALL, "mean")], f"{OVERALL}; {title}")]


def group_means(accuracy: dict[str, float]) -> dict[str, float]:
    """Return the mean of every group of which each task is there, and of all tasks if all are."""
    return {
        group: float(np.mean([accuracy[name] for name in names]))
        for group, names in _MEMBERS.items()
        if set(names) <= set(accuracy)
    }


def vtab(examination: Examination, *, strengths: Sequence[float] = STRENGTHS) -> VtabResult:
    """Measure the accuracy of a logistic regression on the pre-logits, standardized, for every task that is there.

    It learns from 800 images, the other 200 choose its strength, and it learns again from all 1,000, as in the paper;
    but the model stays as it is, where the paper fine-tunes all of it.
    """
    data = examination.data
    if not isinstance(data, VtabData):
        raise UserError(f"'{data.name}' is not a VTAB folder; give one with --data")
    if not strengths or min(strengths) <= 0:
        raise UserError(f"strengths {list(strengths)}: give positive numbers")
    accuracy: dict[str, float] = {}
    chosen: dict[str, float] = {}
    num_images = unfinished = 0
    for name, task in data.tasks.items():
        each = replace(examination, data=task)
        (learned, labels), (other, classes) = each.features("train"), each.features("validation")
        if len(np.unique(labels)) < 2:
            raise UserError(f"the images to learn {name} from are of one class only; choose another --seed")
        probes = [Probe.fit(learned, labels, strength) for strength in sorted(strengths)]
        best = best_probe(probes, other, classes)
        final_probe = Probe.fit(np.concatenate([learned, other]), np.concatenate([labels, classes]), best.strength)
        judged, truth = each.features("test")
        accuracy[name], chosen[name] = final_probe.score(judged, truth), best.strength
        num_images += len(truth)
        unfinished += sum(not probe.finished for probe in (*probes, final_probe))
    return VtabResult(num_images, accuracy, chosen, data.missing, unfinished)
