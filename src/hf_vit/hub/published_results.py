"""Results in the Hub's two formats: `model-index` in the card, and `.eval_results/*.yaml` beside it.

The second format feeds the leaderboards of data sets on the Hub, so it contains only results on those.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_vit.errors import to_one_line
from hf_vit.results.facts import FACTS_NAME, DataFact, Record, as_fraction
from hf_vit.results.redaction import redact_message

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, EvalResultEntry

RESULTS_FILE = ".eval_results/hf_vit.yaml"
# Key of a metric in a record -> its published name.
ACCURACIES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
# Protocols that evaluate features and need no head.
FEATURE_PROTOCOLS = ("few-shot", "linear-probe", "knn", "vtab")
# Protocol -> the Hub's metric type, and its published metrics.
PUBLISHED = {
    "top1": ("accuracy", ACCURACIES),
    "segmentation": ("mean_iou", {"mean_iou": "Mean IoU"}),
    "detection": (
        "mean_average_precision",
        {"ap": "Box AP", "ap50": "Box AP50", "mask_ap": "Mask AP", "mask_ap50": "Mask AP50"},
    ),
}
# Protocol -> the Hub's name of the task.
TASK_TYPES = {"top1": "image-classification", "segmentation": "image-segmentation", "detection": "object-detection"}
_DECIMALS = 4  # of published metrics
_USER_AND_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")


def find_protocol(record: Record) -> str | None:
    """Return the protocol of an evaluation if it is one of `PUBLISHED`, else None."""
    name = record.values.get("protocol", "top1")
    if name == "top1" and not isinstance(record.values.get("top1"), float | int):
        return None
    return name if isinstance(name, str) and name in PUBLISHED else None


def parse_hub_id(name: str) -> str | None:
    """Return `user/name` if a name has the form "user/name" or "user/name:configuration", else None."""
    repository = name.partition(":")[0]
    return repository if _USER_AND_NAME.fullmatch(repository) else None


def find_hub_dataset(data: DataFact) -> str | None:
    """Return the Hub id of a data set, or None; data with a recorded commit is always from the Hub."""
    return parse_hub_id(data.name) or (data.name.partition(":")[0] if data.revision else None)


def make_index_entries(records: Sequence[Record], repo: str) -> "list[EvalResult]":
    """Return the `model-index` entries of evaluations, one per published metric, with links to facts.json in `repo`."""
    from huggingface_hub import EvalResult

    source = _make_facts_url(repo)
    entries: list[EvalResult] = []
    for record in records:
        protocol = find_protocol(record)
        if protocol is None:
            continue
        data = record.data or DataFact(name="unnamed")
        name = to_one_line(data.name)
        metric_type, titles = PUBLISHED[protocol]
        data_arguments = {"fingerprint": data.fingerprint, "num_images": data.size}
        fields: dict[str, Any] = {
            "task_type": TASK_TYPES[protocol],
            "dataset_type": find_hub_dataset(data) or re.sub(r"[^\w.\-]+", "-", name),
            "dataset_name": name,
            "dataset_config": _find_configuration(data),
            "dataset_split": to_one_line(data.split) if data.split else None,
            "dataset_revision": data.revision,
            "dataset_args": {key: value for key, value in data_arguments.items() if value is not None} or None,
            "metric_type": metric_type,
            "source_url": source,
            "source_name": to_one_line(record.command) if source else None,
        }
        for key, title in titles.items():
            value = as_fraction(record.values.get(key))
            if value is not None:
                entries.append(EvalResult(**fields, metric_name=title, metric_value=round(value, _DECIMALS)))
    return entries


def make_result_entries(records: Sequence[Record], repo: str) -> "list[EvalResultEntry]":
    """Return the entries of `.eval_results`: top-1 accuracy on Hub data sets."""
    from huggingface_hub import EvalResultEntry

    source = _make_facts_url(repo)
    entries: list[EvalResultEntry] = []
    for record in records:
        data, value = record.data, as_fraction(record.values.get("top1"))
        dataset = None if data is None else find_hub_dataset(data)
        if data is None or dataset is None or value is None:
            continue
        notes = (  # what the format has no field for
            "top-1 accuracy",
            f"split {data.split}" if data.split else None,
            f"{data.size:,} images" if data.size else None,
            f"fingerprint {data.fingerprint}" if data.fingerprint else None,
            to_one_line(record.command),
        )
        entry = EvalResultEntry(
            dataset_id=dataset,
            task_id=_find_configuration(data) or "default",
            value=round(value, _DECIMALS),
            dataset_revision=data.revision,
            date=record.date.isoformat(),
            source_url=source,
            source_name=FACTS_NAME if source else None,
            notes="; ".join(filter(None, notes)),
        )
        entries.append(entry)
    return entries


def make_results_file(records: Sequence[Record], repo: str) -> bytes | None:
    """Return the content of `.eval_results/hf_vit.yaml`; None if it has no entries."""
    import yaml
    from huggingface_hub import eval_result_entries_to_yaml

    rows: list[dict[str, Any]] = eval_result_entries_to_yaml(make_result_entries(records, repo))
    return yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=120).encode() if rows else None


def _find_configuration(data: DataFact) -> str | None:
    """Return the configuration of a Hub data set, such as "plain_text" in "user/name:plain_text"; None if not given."""
    return (data.name.partition(":")[2] or None) if find_hub_dataset(data) else None


def _make_facts_url(repo: str) -> str | None:
    """Return the URL of facts.json in the repository; None for a name without a user."""
    from huggingface_hub import constants

    repository_url = f"{redact_message(constants.ENDPOINT)}/{repo}"
    return f"{repository_url}/blob/main/{FACTS_NAME}" if _USER_AND_NAME.fullmatch(repo) else None
