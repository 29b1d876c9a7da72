"""VTAB-1k (arXiv 1910.04867): 19 tasks, 1,000 labelled images each. Here a linear probe of frozen features.

Legend: n images, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.frame import ProtocolResult, Table, percent
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe
from hf_vit.evaluation.protocols.vtab.data import VtabData
from hf_vit.evaluation.protocols.vtab.tasks import GROUPS, PUBLISHED, TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERALL = "all 19 tasks"
_MEMBERS = {group: [task.name for task in TASKS if task.group == group] for group in GROUPS}
_MEMBERS[OVERALL] = [task.name for task in TASKS]


@final
@dataclass(frozen=True, repr=False)
class VtabResult(ProtocolResult):
    """What `vtab` measured.

    Attributes:
        num_images: images that judged, of all tasks.
        accuracy: task -> share of right answers.
        strengths: task -> scikit-learn's C that the 200 images chose.
        missing: tasks that were not there.
        unfinished: regressions that stopped after 1,000 steps before they had converged.
    """

    title: ClassVar[str] = "VTAB-1k, linear probe of frozen features"
    source: ClassVar[str] = "tasks and 800/200 split of arXiv 1910.04867, which fine-tunes the whole model instead"
    num_images: int
    accuracy: dict[str, float]
    strengths: dict[str, float]
    missing: list[str]
    unfinished: int

    def means(self) -> dict[str, float]:
        """Mean accuracy of every group that is complete, and of all tasks."""
        return group_means(self.accuracy)

    def values(self) -> dict[str, Any]:
        return {
            "adaptation": "logistic regression on frozen features",
            "accuracy": self.accuracy,
            "means": self.means(),
            "missing": self.missing,
            "strengths": self.strengths,
            "unfinished": self.unfinished,
        }

    def headline(self) -> dict[str, float]:
        shown = self.means() or self.accuracy
        return {f"VTAB-1k linear probe accuracy, {name}": value for name, value in shown.items()}

    def tables(self, judged: str) -> list[Table]:
        published = {
            name: dict(zip((task.name for task in TASKS), (value / 100 for value in values), strict=True))
            for name, values in PUBLISHED.items()
        }
        columns = [self.accuracy, *published.values()]
        header = ["", "linear probe", *published]
        means = [group_means(column) for column in columns]

        def mean(group: str) -> list[str]:
            return ["mean", *(_shown(column, group) for column in means)]

        groups = [
            Table(
                header,
                [[name, *(_shown(column, name) for column in columns)] for name in members] + [mean(group)],
                group,
            )
            for group, members in _MEMBERS.items()
            if group != OVERALL
        ]
        lack = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        title = f"{self.title}: {judged}; published models are fine-tuned{lack}"
        return [*groups, Table(header, [mean(OVERALL)], f"{OVERALL}; {title}")]

    def figures(self, stem: str, judged: str) -> "dict[str, Figure | None]":
        return {}


def group_means(accuracy: dict[str, float]) -> dict[str, float]:
    """Mean of every group of which each task is there, and of all tasks if all are."""
    return {
        group: float(np.mean([accuracy[name] for name in names]))
        for group, names in _MEMBERS.items()
        if set(names) <= set(accuracy)
    }


def _shown(values: dict[str, float], name: str) -> str:
    return percent(values[name]) if name in values else "-"


def vtab(examination: Examination, *, strengths: Sequence[float] = STRENGTHS) -> VtabResult:
    """Accuracy of a logistic regression on the pre-logits, standardised, for every task that is there.

    It learns from 800 images, the other 200 choose its strength, and it learns again from all 1,000, as in the paper;
    but the model stays as it is, where the paper fine-tunes all of it.

    Args:
        examination: the model and what `load_vtab` gave; the model needs no head. `num_images` judge in each task.
        strengths: scikit-learn's C to choose from; of equals the smallest.

    Raises:
        UserError: the data are no tasks of VTAB, there is no strength, or the 800 images are of one class.
    """
    data = examination.data
    if not isinstance(data, VtabData):
        raise UserError(f"'{data.name}' is no folder of VTAB's tasks; give the path of one with --data")
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
        best = max(probes, key=lambda probe, other=other, classes=classes: probe.score(other, classes))
        final_probe = Probe.fit(np.concatenate([learned, other]), np.concatenate([labels, classes]), best.strength)
        judged, truth = each.features("test")
        accuracy[name], chosen[name] = final_probe.score(judged, truth), best.strength
        num_images += len(truth)
        unfinished += sum(not probe.finished for probe in (*probes, final_probe))
    return VtabResult(num_images, accuracy, chosen, data.missing, unfinished)
