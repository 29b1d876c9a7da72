"""The metadata of a model card, which the Hub reads: made from facts and config, and checked before it is sent."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hf_vit.errors import UserError, one_line
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig
from hf_vit.hub.published_results import (
    ON_FEATURES,
    PUBLISHED,
    TASK_TYPES,
    hub_dataset,
    hub_id,
    index_entries,
    protocol_of,
)
from hf_vit.repositories.reading import reading
from hf_vit.results.facts import DataFact, Facts, Record
from hf_vit.results.redaction import redact_message
from hf_vit.variants import looks_like_variant

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

NO_LICENSE = (
    "the license is unknown; give one, for example --license apache-2.0, mit or cc-by-4.0 (a base model's "
    "license is inherited if its card declares it)"
)
_FRONT = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"https?://\S+|[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


# Which records count


def load_facts(folder: str | os.PathLike[str], config: ModelConfig) -> Facts:
    """Return the facts of a model folder, of a regression model without accuracies: earlier versions measured some."""
    facts = Facts.load(folder)
    if not config.is_regression:
        return facts
    kept = [each for each in facts.records if each.kind != "evaluation" or each.values.get("protocol") in ON_FEATURES]
    return Facts(records=kept)


def current_records(facts: Facts) -> list[Record]:
    """Return the records from the last change of the weights on."""
    changed = [place for place, record in enumerate(facts.records) if record.kind in ("training", "conversion")]
    return facts.records[changed[-1] if changed else 0 :]


def latest_evaluations(facts: Facts, protocols: Sequence[str] = ("top1",)) -> list[Record]:
    """Return the last evaluation by these protocols of every data split, made after the weights were last changed.

    Data that has changed is other data. Neither images that were fed otherwise than the image processor says, nor fewer
    of them, take the place of what was measured in full. Results of training images are left out.
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
    """Return of these the one of the data that the model was trained for, else the last."""
    results, trained = latest_evaluations(facts), _trained_fingerprint(facts)
    own = [record for record in results if record.data and record.data.fingerprint == trained]
    return next(reversed(own or results), None)


def indexed_evaluations(facts: Facts) -> list[Record]:
    """Return of these what others may compare by: no image of it was trained on, or fed in another way.

    Of data that has changed the state of the training counts, or the last one.
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


# The license: what a card declares; nobody's is assumed


def check_license(license: str) -> None:
    """Refuse what the Hub knows for no license id."""
    if not _LICENSE.fullmatch(license):
        raise UserError(
            f"license '{license}' is not a license id of the Hub; use for example apache-2.0, mit or cc-by-4.0"
        )


def declared_license(folder: Path) -> str | None:
    """Return the license in the metadata of `folder/README.md`; None without card, metadata or license."""
    import yaml
    from huggingface_hub import ModelCard

    if not (folder / CARD_NAME).is_file():
        return None
    try:
        license = ModelCard.load(folder / CARD_NAME).data.get("license")
    except (ValueError, TypeError, yaml.YAMLError):  # no readable metadata: nothing is declared
        return None
    return license if isinstance(license, str) else None


def inherited_license(facts: Facts) -> str | None:
    """Return that of the checkpoint which the last training began with, as its card declared it."""
    trainings = facts.of_kind("training")
    license = trainings[-1].values.get("base_license") if trainings else None
    return license if isinstance(license, str) and _LICENSE.fullmatch(license) else None


def license_of(model: str) -> str | None:
    """Return the license of a folder or repository to start from; None if none is declared or the Hub is silent."""
    from huggingface_hub import hf_hub_download

    if (folder := Path(model).expanduser()).is_dir():
        return declared_license(folder)
    if looks_like_variant(model) or hub_id(model) != model:
        return None
    try:
        with reading(model):
            return declared_license(Path(hf_hub_download(model, CARD_NAME)).parent)
    except UserError:
        return None


def common_license(models: list[str]) -> str | None:
    """Return the one license of several checkpoints; None where they differ, or one declares none."""
    licenses = {license_of(model) for model in models}
    return licenses.pop() if len(licenses) == 1 else None


def need_license(license: str | None, base: str | None) -> None:
    """Ask for a license before work that ends with sharing is begun."""
    if license is not None:
        check_license(license)
    elif base is None or license_of(base) is None:
        raise UserError(NO_LICENSE)


# The metadata


def metadata_of(
    config: ModelConfig, facts: Facts, repo: str, license: str | None, examples: Sequence[str] = ()
) -> "ModelCardData":
    """Return the card's metadata.

    Args:
        config, facts: of the model's folder.
        repo: user/name, or the model's name alone.
        license: Hub license id.
        examples: images of the repository that its page offers to try.
    """
    from huggingface_hub import ModelCardData, constants

    trainings, results = facts.of_kind("training"), index_entries(indexed_evaluations(facts), repo)
    datasets = {name for record in trainings if record.data and (name := hub_dataset(record.data))}
    bases, relation = _base_models(config, trainings)
    carbon = _emissions(trainings[-1]) if trainings else None
    task = _task_of(config)
    files = f"{redact_message(constants.ENDPOINT)}/{repo}/resolve/main"
    widget = [
        {"src": f"{files}/{quote(path)}", "example_title": one_line(PurePath(path).stem)}
        for path in (examples if hub_id(repo) else ())
    ]
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
        widget=widget or None,
        co2_eq_emissions=carbon,
    )


def _task_of(config: ModelConfig) -> str | None:
    """Return the task in the Hub's words, which has none for the regression of images."""
    if config.dense_head is not None:
        return TASK_TYPES[config.dense_head.task]
    if config.is_regression:
        return None
    return "image-classification" if config.is_classifier else "image-feature-extraction"


def _base_models(config: ModelConfig, trainings: Sequence[Record]) -> tuple[list[str], str]:
    """Return what of the Hub the weights were made of, and how: the words are the Hub's (docs/hub/model-cards)."""
    recipe = trainings[-1].values.get("recipe") if trainings else None
    if isinstance(recipe, dict) and recipe.get("soup"):
        names = map(hub_id, str(recipe.get("ingredients", "")).split(", "))
        return sorted({name for name in names if name}), "merge"
    bases = [name for record in trainings if (name := hub_id(str(record.values.get("base_model", ""))))]
    relation = "quantized" if "quantization_config" in (config.model_extra or {}) else "finetune"
    return bases[-1:], relation


def _emissions(training: Record) -> dict[str, Any] | None:
    """Return grams of CO2, and how they were reckoned (docs/hub/model-cards-co2); None where nothing was stated."""
    energy = training.values.get("energy")
    if not isinstance(energy, dict) or not isinstance(grams := energy.get("grams_co2"), float | int):
        return None
    watts, intensity = energy.get("stated_watts"), energy.get("stated_grams_co2_per_kwh")
    told: dict[str, Any] = {
        "emissions": grams,
        "source": f"{training.seconds:g} s measured by hf-vit x {watts} W x {intensity} g/kWh, which the author states",
        "training_type": "fine-tuning" if training.values.get("base_model") else "pre-training",
    }
    return told | ({"hardware_used": str(name)} if (name := training.hardware.get("name")) else {})


def metadata_errors(card: str) -> list[str]:
    """Return what the Hub would refuse in a card's metadata, field by field; checked without a connection."""
    import yaml
    from huggingface_hub.repocard_data import model_index_to_eval_results

    front = _FRONT.match(card)
    if not front:
        return ["README.md has no metadata (a block between two lines of ---); it needs a license at least"]
    try:
        metadata: Any = yaml.safe_load(front[1])
    except yaml.YAMLError as error:
        return [f"README.md: {' '.join(str(error).split())}"]
    if not isinstance(metadata, dict):
        return ["README.md: the metadata is not a list of fields"]
    errors = _field_errors(metadata)  # pyright: ignore[reportUnknownArgumentType]
    try:
        if (index := metadata.get("model-index")) is not None:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            model_index_to_eval_results(index)  # pyright: ignore[reportUnknownArgumentType]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        errors.append(f"model-index: {f'{error} is missing' if isinstance(error, KeyError) else error}")
    return errors


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
