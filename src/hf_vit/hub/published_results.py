"""Results in the two forms that the Hub reads: `model-index` in the card, and `.eval_results/*.yaml` beside it.

The second is for the leaderboards of the Hub's data sets, so it holds results on those alone.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_vit.errors import one_line
from hf_vit.results.facts import FACTS_NAME, DataFact, Record, fraction
from hf_vit.results.redaction import redact_message

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

RESULTS_FILE = ".eval_results/hf_vit.yaml"
# The measurements of a record that are published -> their names there.
ACCURACIES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
# Protocols that look at features: their model needs no head.
ON_FEATURES = ("few-shot", "linear-probe", "knn", "vtab")
# Protocol -> the Hub's type of its metrics, and its measurements with their names.
PUBLISHED = {
    "top1": ("accuracy", ACCURACIES),
    "segmentation": ("mean_iou", {"mean_iou": "Mean IoU"}),
    "detection": (
        "mean_average_precision",
        {"ap": "Box AP", "ap50": "Box AP50", "mask_ap": "Mask AP", "mask_ap50": "Mask AP50"},
    ),
}
# What a model does -> the Hub's name of the task.
TASK_TYPES = {"top1": "image-classification", "segmentation": "image-segmentation", "detection": "object-detection"}
_USER_AND_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def protocol_of(record: Record) -> str | None:
    """Return which of these protocols a record is of; None: another."""
    if isinstance(record.values.get("top1"), float | int):
        return "top1"
    name = record.values.get("protocol")
    return name if isinstance(name, str) and name in PUBLISHED and name != "top1" else None


def rounded(value: float) -> float:
    """Return an accuracy as it is published."""
    return round(float(value), 4)


def hub_id(name: str) -> str | None:
    """`user/name` of a Hub repository (without its configuration), or None for other names."""
    plain = name.partition(":")[0]
    return plain if _USER_AND_NAME.fullmatch(plain) else None


def hub_dataset(data: DataFact) -> str | None:
    """Return the Hub's id of a data set: what has a commit is one, whatever its name looks like."""
    return hub_id(data.name) or (data.name.partition(":")[0] if data.revision else None)


def index_entries(records: Sequence[Record], repo: str) -> "list[EvalResult]":
    """`model-index` entries of evaluations; `repo`: user/name, for links to the facts, or a name without a place."""
    return [entry for record in records for entry in _entries(record, repo)]


def _entries(record: Record, repo: str) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    if (protocol := protocol_of(record)) is None:
        return []
    data = record.data or DataFact(name="unnamed")
    name, source = one_line(data.name), _facts_of(repo)
    metric, measured = PUBLISHED[protocol]
    known = {"fingerprint": data.fingerprint, "num_images": data.size}
    return [
        EvalResult(
            task_type=TASK_TYPES[protocol],
            dataset_type=hub_dataset(data) or re.sub(r"[^\w.\-]+", "-", name),
            dataset_name=name,
            dataset_config=_configuration(data),
            dataset_split=one_line(data.split) if data.split else None,
            dataset_revision=data.revision,
            dataset_args={key: value for key, value in known.items() if value is not None} or None,
            metric_type=metric,
            metric_name=title,
            metric_value=rounded(value),
            source_url=source,
            source_name=one_line(record.command) if source else None,
        )
        for key, title in measured.items()
        if (value := fraction(record.values.get(key))) is not None
    ]


def results_file(records: Sequence[Record], repo: str) -> bytes | None:
    """`.eval_results/hf_vit.yaml`: top-1 accuracy on data sets of the Hub; None where there is none."""
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    source = _facts_of(repo)
    entries = [
        EvalResultEntry(
            dataset_id=dataset,
            task_id=_configuration(data) or "default",
            value=rounded(value),
            dataset_revision=data.revision,
            date=record.date.isoformat(),
            source_url=source,
            source_name=FACTS_NAME if source else None,
            notes=_notes(data, record.command),
        )
        for record in records
        if (data := record.data) is not None and (dataset := hub_dataset(data)) is not None
        if (value := fraction(record.values.get("top1"))) is not None
    ]
    plain: list[dict[str, Any]] = eval_result_entries_to_yaml(entries)
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120).encode() if plain else None


def _notes(data: DataFact, command: str) -> str:
    """Return what the form has no field for: metric, split, images, fingerprint and the command."""
    parts = ["top-1 accuracy", f"split {data.split}" if data.split else None]
    parts += [f"{data.size:,} images" if data.size else None]
    parts += [f"fingerprint {data.fingerprint}" if data.fingerprint else None, one_line(command)]
    return "; ".join(part for part in parts if part)


def _configuration(data: DataFact) -> str | None:
    return (data.name.partition(":")[2] or None) if hub_dataset(data) else None


def _facts_of(repo: str) -> str | None:
    """Return the address of the record behind a number."""
    from huggingface_hub import constants

    place = f"{redact_message(constants.ENDPOINT)}/{repo}"
    return f"{place}/blob/main/{FACTS_NAME}" if _USER_AND_NAME.fullmatch(repo) else None
