"""What a model folder says of its accuracy, by the card and by `.eval_results`, beside the records it comes from.

Whoever wrote the folder is not trusted: what cannot be read is said to be so, and nothing but numbers is taken from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_vit.errors import first_line, one_line
from hf_vit.hub.card_metadata import current_records, latest_evaluations
from hf_vit.hub.model_folder import CARD_NAME, check_inside
from hf_vit.hub.published_results import ACCURACIES, hub_dataset, index_entries, rounded
from hf_vit.results.facts import Facts, Record


@dataclass(frozen=True)
class Claim:
    """A number that is told of a model.

    Attributes:
        place: the file that tells it.
        what: of which data and split, by which metric.
        value: as it stands there; None where it is no number.
    """

    place: str
    what: str
    value: float | None


def records_to_measure(facts: Facts) -> list[Record]:
    """Of the weights as they are: the evaluations of the card's table, and the latest of every other protocol."""
    latest: dict[object, Record] = {}
    for record in current_records(facts):
        if record.kind == "evaluation" and isinstance(record.values.get("headline"), dict):
            data = record.data
            key = (str(record.values.get("protocol")), data and (data.name, data.split, data.fingerprint))
            latest[key] = record
    return [*latest_evaluations(facts), *latest.values()]


def without_record(folder: Path, facts: Facts) -> tuple[list[Claim], list[str]]:
    """The claims that no record of facts.json bears out, and the files that cannot be read."""
    borne_out = {
        (claim.what, claim.value)
        for record in current_records(facts)
        for claim in (*_of_index(index_entries([record], folder.name)), *_of_record(record))
        if record.kind == "evaluation"
    }
    told, unreadable = list[Claim](), list[str]()
    for path in (folder / CARD_NAME, *sorted((folder / ".eval_results").glob("*.y*ml"))):
        if not path.is_file():
            continue
        check_inside(folder, path)
        try:
            told += _of_card(path) if path.name == CARD_NAME else _of_results(path)
        except Exception as error:  # YAML of any shape, read by huggingface_hub
            unreadable.append(f"{path.relative_to(folder)} cannot be read ({first_line(error):.120})")
    return [claim for claim in told if (claim.what, claim.value) not in borne_out], unreadable


def _of_card(path: Path) -> Iterator[Claim]:
    from huggingface_hub import ModelCard

    if path.read_text(encoding="utf-8").lstrip().startswith("---"):
        data: Any = ModelCard.load(path).data
        yield from _of_index(data.eval_results or [])


def _of_index(entries: Any) -> Iterator[Claim]:
    """Of `EvalResult`s, whose fields may hold anything."""
    for entry in entries:
        data = f"{entry.dataset_name}, split {entry.dataset_split}"
        yield _claim(CARD_NAME, data, entry.metric_name, entry.metric_value)


def _of_results(path: Path) -> Iterator[Claim]:
    import yaml
    from huggingface_hub import parse_eval_result_entries

    for entry in parse_eval_result_entries(yaml.safe_load(path.read_bytes())):
        task = _task(entry.dataset_id, entry.task_id)
        yield _claim(f".eval_results/{path.name}", task, ACCURACIES["top1"], entry.value)


def _of_record(record: Record) -> Iterator[Claim]:
    """What the record would stand for in `.eval_results`."""
    data, value = record.data, record.values.get("top1")
    if data is not None and isinstance(value, float | int) and (dataset := hub_dataset(data)) is not None:
        task = _task(dataset, data.name.partition(":")[2] or "default")
        yield _claim("", task, ACCURACIES["top1"], rounded(value))


def _task(dataset: object, task: object) -> str:
    return f"{dataset}, task {task}"


def _claim(place: str, data: str, metric: object, value: object) -> Claim:
    number = float(value) if isinstance(value, float | int) else None
    return Claim(place, one_line(f"{metric} on {data}"), number)
