"""Make and check the metadata of a model card, which the Hub reads."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hf_vit.errors import UserError, to_one_line
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig
from hf_vit.hub.published_results import (
    FEATURE_PROTOCOLS,
    PUBLISHED,
    TASK_TYPES,
    find_hub_dataset,
    find_protocol,
    make_index_entries,
    parse_hub_id,
)
from hf_vit.loading.outputs import get_dense_task
from hf_vit.repositories.reading import guard_hub_access
from hf_vit.results.facts import DataFact, Facts, Record
from hf_vit.results.redaction import redact_message
from hf_vit.variants import looks_like_variant

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

NO_LICENSE = (
    "the model's license is unknown; give one, for example --license apache-2.0, mit or cc-by-4.0 (the "
    "license of a base model is used if its card declares it)"
)
_METADATA_BLOCK = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"https?://\S+|[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
# Fields of a result in model-index that the Hub accepts only as text.
_TEXTS = (
    *("task_type", "dataset_type", "dataset_name", "dataset_config", "dataset_split", "dataset_revision"),
    "metric_type",
)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LICENSE_FIELDS = ("license", "license_name", "license_link")  # the name and the link are those of the license "other"
# Settings of an evaluation that change what a protocol is fed.
_INPUTS = ("features", "layers", "norm", "max_num_patches", "draft")


def load_facts(folder: str | os.PathLike[str], config: ModelConfig) -> Facts:
    """Return the facts of a model folder, without accuracies that earlier versions measured for regression models."""
    facts = Facts.load(folder)
    for record in facts.filter_kind("evaluation") if config.is_regression else ():
        if record.values.get("protocol") not in FEATURE_PROTOCOLS:
            facts.records.remove(record)
    return facts


def select_evaluations(facts: Facts, protocols: Sequence[str] = ("top1",)) -> list[Record]:
    """Return the last evaluation of the current weights by these protocols, for every data set and split.

    Another fingerprint means another data set. An evaluation of fewer images, or of images that were not preprocessed
    by the image processor, does not replace a complete one. Results on the training split are left out.
    """

    def rank(evaluation: Record) -> tuple[bool, int]:
        return not evaluation.values.get("fed"), (evaluation.data and evaluation.data.size) or 0

    latest: dict[object, Record] = {}
    for record in facts.select_current():
        if record.kind == "evaluation" and find_protocol(record) in protocols:
            data = record.data or DataFact(name="unnamed")
            key = (data.name, data.split, data.fingerprint)
            if data.split == "train" or (key in latest and rank(record) < rank(latest[key])):
                continue
            latest.pop(key, None)  # the order is that of the records
            latest[key] = record
    return list(latest.values())


def describe_inputs(record: Record) -> str:
    """Return the settings that changed what an evaluation was fed, such as " (features mean, layers 4, norm True)"."""
    settings: Any = record.values.get("settings")
    names = [name for name in _INPUTS if name in settings] if isinstance(settings, dict) else []
    named = [f"{name.replace('_', ' ')} {settings[name]}" for name in names]
    return f" ({', '.join(named)})" if named else ""


def select_main_evaluation(facts: Facts) -> Record | None:
    """Return the evaluation on the training's data set, or else the last evaluation; None if there is none."""
    results = select_evaluations(facts)
    fingerprint = _find_trained_fingerprint(facts)
    matching = [record for record in results if record.data and record.data.fingerprint == fingerprint]
    return next(reversed(matching or results), None)


def select_comparable(facts: Facts) -> list[Record]:
    """Return the evaluations that can be compared with other models.

    Left out are results on images that the model was trained on, and on images not preprocessed by the image processor.
    If a data set has changed, the version used in training is preferred, otherwise the last one.
    """
    fingerprint = _find_trained_fingerprint(facts)
    selected_records = dict[object, Record]()
    for record in select_evaluations(facts, tuple(PUBLISHED)):
        if record.values.get("trained_images") or record.values.get("fed"):
            continue
        data = record.data or DataFact(name="unnamed")
        previous = selected_records.get((data.name, data.split))
        if previous is None or previous.data is None or previous.data.fingerprint != fingerprint:
            selected_records[data.name, data.split] = record
    return list(selected_records.values())


def _find_trained_fingerprint(facts: Facts) -> str | None:
    """Return the fingerprint of the last training's data; None if unknown."""
    training = facts.find_latest("training")
    return training.data.fingerprint if training and training.data else None


def check_license(license: str) -> None:
    """Raise a UserError if the text does not have the form of a Hub license id."""
    if not _LICENSE.fullmatch(license):
        raise UserError(f"'{license}' is not a license id of the Hub; give one such as apache-2.0, mit or cc-by-4.0")


def read_license(folder: Path) -> dict[str, str]:
    """Return license, license_name and license_link, as far as the metadata of `folder/README.md` declares them."""
    import yaml

    if not (folder / CARD_NAME).is_file():
        return {}
    try:
        return parse_license((folder / CARD_NAME).read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, TypeError, yaml.YAMLError):  # unreadable metadata declares no license
        return {}


def parse_license(card: str) -> dict[str, str]:
    """Return license, license_name and license_link, as far as the metadata of a card declares them."""
    from huggingface_hub import ModelCard

    return _select_license(vars(ModelCard(card).data))


def _select_license(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the fields of a license among values, whose names begin with the prefix; none without a license."""
    fields = {name: values.get(f"{prefix}{name}") for name in _LICENSE_FIELDS}
    return {name: text for name, text in fields.items() if isinstance(text, str) and isinstance(fields["license"], str)}


def find_base_license(facts: Facts) -> dict[str, str]:
    """Return the license of the base model of the last training, as its card declared it, see `read_license`."""
    training = facts.find_latest("training")
    license = _select_license(training.values if training else {}, "base_")
    return license if _LICENSE.fullmatch(license.get("license", "")) else {}


def record_base_license(license: Mapping[str, str]) -> dict[str, str]:
    """Return the values that record the license of a base model; without a link that is a file of its repository."""
    return {f"base_{name}": text for name, text in license.items() if name != "license_link" or "://" in text}


def find_license(model: str) -> dict[str, str]:
    """Return the license of a model folder or Hub repository, see `read_license`; empty if it cannot be reached."""
    from huggingface_hub import hf_hub_download

    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_license(folder)
    repo, _, revision = model.removeprefix("hf://").partition("@")
    if looks_like_variant(model) or parse_hub_id(repo) != repo:
        return {}
    try:
        with guard_hub_access(repo):
            return read_license(Path(hf_hub_download(repo, CARD_NAME, revision=revision or None)).parent)
    except UserError:
        return {}


def find_common_license(models: list[str]) -> dict[str, str]:
    """Return the license of several checkpoints, see `read_license`; empty if they differ or one declares none."""
    first, *others = map(find_license, models)
    return first if all(license == first for license in others) else {}


def require_license(license: str | None, base: str | None) -> None:
    """Raise a UserError if the license of a model to be shared is unknown, before the training begins."""
    if license is not None:
        check_license(license)
    elif base is None or not find_license(base):
        raise UserError(NO_LICENSE)


def make_metadata(
    config: ModelConfig, facts: Facts, repo: str, license: Mapping[str, Any], examples: Sequence[str] = ()
) -> "ModelCardData":
    """Return the card's metadata; `repo` is user/name or only the name, `examples` are images for the Hub's page."""
    from huggingface_hub import ModelCardData, constants

    trainings = facts.filter_kind("training")
    results = make_index_entries(select_comparable(facts), repo)
    dataset_names = {find_hub_dataset(record.data) for record in trainings if record.data}
    bases, relation = _find_base_models(config, trainings)
    emissions = _describe_emissions(trainings[-1]) if trainings else None
    task: str | None = "image-classification" if config.is_classifier else "image-feature-extraction"
    if dense_task := get_dense_task(config.architecture):
        task = TASK_TYPES[dense_task]
    elif config.is_regression:
        task = None  # the Hub has no name for it
    files = f"{redact_message(constants.ENDPOINT)}/{repo}/resolve/main"
    widget = [
        {"src": f"{files}/{quote(path)}", "example_title": to_one_line(PurePath(path).stem)}
        for path in examples
        if parse_hub_id(repo)  # otherwise the URLs of the files are unknown
    ]
    return ModelCardData(  # the Hub wants a field to be absent, None here, rather than empty
        **license,
        library_name="transformers",
        pipeline_tag=task,
        tags=[task or "image-regression", "vision", to_one_line(config.model_type) or "vit"],
        datasets=sorted(name for name in dataset_names if name) or None,
        base_model=(bases[0] if len(bases) == 1 else bases) or None,
        base_model_relation=relation if bases else None,
        metrics=list(dict.fromkeys(entry.metric_type for entry in results)) or None,
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
        widget=widget or None,
        co2_eq_emissions=emissions,
    )


def _find_base_models(config: ModelConfig, trainings: Sequence[Record]) -> tuple[list[str], str]:
    """Return the Hub models that the weights were made from, and the relation in words of docs/hub/model-cards.

    These are all ingredients of a soup, else the base model of the last training that had one on the Hub.
    """
    recipe = trainings[-1].values.get("recipe") if trainings else None
    if isinstance(recipe, dict) and recipe.get("soup"):
        return sorted({*_list_hub_ids(str(recipe.get("ingredients", "")).split(", "))}), "merge"
    bases = _list_hub_ids([str(record.values.get("base_model", "")) for record in trainings])
    relation = "quantized" if config.quantization_config else "finetune"
    return bases[-1:], relation


def _list_hub_ids(names: Sequence[str]) -> list[str]:
    """Return those of the names that are models of the Hub, without their revisions (user/name@REVISION)."""
    ids = (parse_hub_id(name.removeprefix("hf://").partition("@")[0]) for name in names)
    return [name for name in ids if name]


def _describe_emissions(training: Record) -> dict[str, Any] | None:
    """Return the metadata for grams of CO2 (docs/hub/model-cards-co2); None if no power was stated."""
    energy: Any = training.values.get("energy")
    if not isinstance(energy, dict) or not isinstance(energy.get("grams_co2"), float | int):
        return None
    factors = f"{energy.get('stated_watts')} W x {energy.get('stated_grams_co2_per_kwh')} g/kWh"
    metadata: dict[str, Any] = {
        "emissions": energy["grams_co2"],
        "source": f"{training.seconds:g} s measured by hf-vit x {factors}, which the author states",
        "training_type": "fine-tuning" if training.values.get("base_model") else "pre-training",
    }
    if training.hardware.get("name"):
        metadata["hardware_used"] = str(training.hardware["name"])
    return metadata


def find_metadata_errors(card: str) -> list[str]:
    """Return the errors for which the Hub would refuse a card's metadata; no connection is needed."""
    import yaml
    from huggingface_hub.repocard_data import model_index_to_eval_results

    block = _METADATA_BLOCK.match(card)
    if not block:
        return ["README.md has no metadata; add a block between two lines of --- with at least a license"]
    try:
        metadata: Any = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"README.md: {' '.join(str(error).split())}"]
    if not isinstance(metadata, dict):
        return ["README.md: the metadata is not a mapping of field names to values"]
    fields: dict[str, Any] = metadata
    errors = _find_field_errors(fields)
    try:
        if fields.get("model-index") is not None:
            name, results = model_index_to_eval_results(fields["model-index"])
            texts = [("name", name), *((key, vars(result)[key]) for result in results for key in _TEXTS)]
            not_texts = [(key, value) for key, value in texts if not isinstance(value, str | None)]
            errors += [f"model-index: {key} is {value!r}, not text" for key, value in not_texts]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        errors.append(f"model-index: {f'{error} is missing' if isinstance(error, KeyError) else error}")
    return errors


def _find_field_errors(metadata: dict[str, Any]) -> list[str]:
    """Return an error for every field whose value the Hub would refuse."""
    errors = [] if metadata.get("license") else ["license is missing"]
    for field in ("license", "language", "tags", "datasets", "base_model", "metrics"):
        value = metadata.get(field)
        if value is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str):
                errors.append(f"{field}: {item!r} is not text")
            elif field == "license" and not _LICENSE.fullmatch(item):
                errors.append(f"license: '{item}' is not a license id of the Hub, such as apache-2.0 or cc-by-4.0")
            elif field in ("datasets", "base_model") and not _REPO_ID.fullmatch(item):
                errors.append(f"{field}: '{item}' is not the name of a repository")
    for field in ("library_name", "pipeline_tag"):
        if field in metadata and not isinstance(metadata[field], str):
            errors.append(f"{field}: {metadata[field]!r} is not text")
    return errors
