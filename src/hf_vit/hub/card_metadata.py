"""The metadata of a model card, which the Hub reads: made from facts and config, and checked before it is sent."""

import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hf_vit.errors import UserError, one_line
from hf_vit.hub.energy import emissions
from hf_vit.hub.model_folder import ModelConfig
from hf_vit.hub.published_results import (
    ON_FEATURES,
    PUBLISHED,
    TASK_TYPES,
    hub_dataset,
    hub_id,
    index_entries,
    protocol_of,
)
from hf_vit.results.facts import DataFact, Facts, Record

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

_FRONT = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"https?://\S+|[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def check_license(license: str) -> None:
    """Refuse what the Hub knows for no license id.

    Raises:
        UserError: it does not look like one.
    """
    if not _LICENSE.fullmatch(license):
        raise UserError(
            f"license '{license}' is not a license id of the Hub; use for example apache-2.0, mit or cc-by-4.0"
        )


def load_facts(folder: str | os.PathLike[str], config: ModelConfig) -> Facts:
    """Return the facts of a model folder, of a regression model without accuracies: earlier versions measured some."""
    facts = Facts.load(folder)
    if not config.is_regression:
        return facts
    kept = [each for each in facts.records if each.kind != "evaluation" or each.values.get("protocol") in ON_FEATURES]
    return Facts(records=kept)


def current_records(facts: Facts) -> list[Record]:
    """The records from the last change of the weights on."""
    changed = [place for place, record in enumerate(facts.records) if record.kind in ("training", "conversion")]
    return facts.records[changed[-1] if changed else 0 :]


def latest_evaluations(facts: Facts, protocols: Sequence[str] = ("top1",)) -> list[Record]:
    """The last evaluation of every data split, of those made after the weights were last changed.

    Data that has changed is other data. Neither images that were fed otherwise than the image processor says, nor fewer
    of them, take the place of what was measured in full. Results of training images are left out.

    Args:
        facts: of the model's folder.
        protocols: by which.
    """
    latest: dict[object, Record] = {}
    for record in current_records(facts):
        if record.kind == "evaluation" and protocol_of(record) in protocols:
            data = record.data or DataFact(name="unnamed")
            key = (data.name, data.split, data.fingerprint)
            if key in latest and _fullness(record) < _fullness(latest[key]):
                continue
            latest.pop(key, None)
            if data.split != "train":
                latest[key] = record
    return list(latest.values())


def _fullness(evaluation: Record) -> tuple[bool, int]:
    return not evaluation.values.get("fed"), (evaluation.data and evaluation.data.size) or 0


def own_evaluation(facts: Facts) -> Record | None:
    """Of these the one of the data that the model was trained for, else the last."""
    results, trained = latest_evaluations(facts), _trained_fingerprint(facts)
    own = [record for record in results if record.data and record.data.fingerprint == trained]
    return next(reversed(own or results), None)


def indexed_evaluations(facts: Facts) -> list[Record]:
    """Of these what others may compare by: no image of it was trained on, or fed otherwise than the image processor
    says, and of data that has changed one state.

    That is the state of the training, or the last one.
    """
    trained, chosen = _trained_fingerprint(facts), dict[object, Record]()
    for record in latest_evaluations(facts, tuple(PUBLISHED)):
        if record.values.get("trained_images") or record.values.get("fed"):
            continue
        data = record.data or DataFact(name="unnamed")
        before = chosen.get((data.name, data.split))
        if before is None or before.data is None or before.data.fingerprint != trained:
            chosen[data.name, data.split] = record
    return list(chosen.values())


def _trained_fingerprint(facts: Facts) -> str | None:
    data = [record.data for record in facts.of_kind("training")]
    return data[-1].fingerprint if data and data[-1] else None


def metadata_of(
    config: ModelConfig, facts: Facts, repo: str, license: str | None, examples: Sequence[str] = ()
) -> "ModelCardData":
    """The card's metadata.

    Args:
        config, facts: of the model's folder.
        repo: user/name, or the model's name alone.
        license: Hub license id.
        examples: images of the repository that its page offers to try.
    """
    from huggingface_hub import ModelCardData

    trainings, results = facts.of_kind("training"), index_entries(indexed_evaluations(facts), repo)
    datasets = {name for record in trainings if record.data and (name := hub_dataset(record.data))}
    bases, relation = _base_models(config, trainings)
    carbon = emissions(trainings[-1]) if trainings else None
    task = _task_of(config)
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=[task or "image-regression", "vision", one_line(config.model_type) or "vit"],
        datasets=sorted(datasets) or None,
        base_model=bases[0] if len(bases) == 1 else bases or None,
        base_model_relation=relation if bases else None,
        metrics=list(dict.fromkeys(entry.metric_type for entry in results)) or None,
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
        widget=_widget(repo, examples) or None,
        co2_eq_emissions=carbon,
    )


def _task_of(config: ModelConfig) -> str | None:
    """In the Hub's words, which has none for the regression of images."""
    if config.dense_head is not None:
        return TASK_TYPES[config.dense_head.task]
    if config.is_regression:
        return None
    return "image-classification" if config.is_classifier else "image-feature-extraction"


def _widget(repo: str, examples: Sequence[str]) -> list[dict[str, str]]:
    """The images that the Hub's page shows for trying the model; a name without a place has no such page."""
    from huggingface_hub import constants

    if hub_id(repo) is None:
        return []
    address = f"{constants.ENDPOINT}/{repo}/resolve/main"
    return [{"src": f"{address}/{quote(path)}", "example_title": one_line(PurePath(path).stem)} for path in examples]


def inherited_license(facts: Facts) -> str | None:
    """That of the checkpoint which the last training began with, as its card declared it."""
    trainings = facts.of_kind("training")
    license = trainings[-1].values.get("base_license") if trainings else None
    return license if isinstance(license, str) and _LICENSE.fullmatch(license) else None


def _base_models(config: ModelConfig, trainings: Sequence[Record]) -> tuple[list[str], str]:
    """What of the Hub the weights were made of, and how: the words are the Hub's (docs/hub/model-cards)."""
    recipe = trainings[-1].values.get("recipe") if trainings else None
    if isinstance(recipe, dict) and recipe.get("soup"):
        names = map(hub_id, str(recipe.get("ingredients", "")).split(", "))
        return sorted({name for name in names if name}), "merge"
    bases = [name for record in trainings if (name := hub_id(str(record.values.get("base_model", ""))))]
    relation = "quantized" if "quantization_config" in (config.model_extra or {}) else "finetune"
    return bases[-1:], relation


def metadata_errors(card: str) -> list[str]:
    """What the Hub would refuse in a card's metadata, field by field; checked without a connection."""
    import yaml

    front = _FRONT.match(card)
    if not front:
        return ["README.md has no metadata (a block between two lines of ---); it needs a license at least"]
    try:
        metadata: object = yaml.safe_load(front[1])
    except yaml.YAMLError as error:
        return [f"README.md: {' '.join(str(error).split())}"]
    if not isinstance(metadata, dict):
        return ["README.md: the metadata is not a list of fields"]
    fields: dict[str, Any] = metadata
    return [*_field_errors(fields), *_index_errors(fields.get("model-index"))]


def _field_errors(metadata: dict[str, Any]) -> list[str]:
    errors = [] if metadata.get("license") else ["license is missing"]
    for field in ("license", "tags", "datasets", "base_model", "metrics"):
        value = metadata.get(field)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if not isinstance(item, str):
                errors.append(f"{field}: {item!r} is not text")
            elif field == "license" and not _LICENSE.fullmatch(item):
                errors.append(f"license: '{item}' is not a license id of the Hub (such as apache-2.0, mit, cc-by-4.0)")
            elif field in ("datasets", "base_model") and not _REPO_ID.fullmatch(item):
                errors.append(f"{field}: '{item}' is not the name of a repository")
    for field in ("library_name", "pipeline_tag"):
        if field in metadata and not isinstance(metadata[field], str):
            errors.append(f"{field}: {metadata[field]!r} is not text")
    return errors


def _index_errors(index: list[dict[str, Any]] | None) -> list[str]:
    """`model-index` must be what huggingface_hub itself can read back."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    if index is None:
        return []
    try:
        model_index_to_eval_results(index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return [f"model-index: {reason}"]
    return []
