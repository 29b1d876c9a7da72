"""What a card must have before it is shared: facts about where the weights come from, and metadata the Hub accepts."""

import os
import re
from typing import Any, cast

from hf_vit.results.facts import FACTS_NAME, Facts

_FRONT = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"https?://\S+|[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def missing_facts(folder: str | os.PathLike[str]) -> list[str]:
    """The required facts that facts.json does not hold, in words."""
    facts = Facts.load(folder)
    origins = [record for record in facts.records if record.kind in ("training", "conversion")]
    if not origins:
        return [f"the origin of the weights (no record of a training or a conversion in {FACTS_NAME})"]
    missing: list[str] = []
    latest = origins[-1]
    if latest.kind == "training" and not (latest.data and latest.data.name):
        missing.append("the training data (data.name of the training record)")
    if latest.kind == "conversion" and not latest.values.get("source"):
        missing.append("the converted checkpoint (source of the conversion record)")
    if not latest.command:
        missing.append(f"the command of the {latest.kind}")
    return missing


def card_errors(card: str) -> list[str]:
    """What the Hub would refuse in a card's metadata, field by field; checked without a connection."""
    import yaml

    found = _FRONT.match(card)
    if not found:
        return ["README.md has no metadata (a block between two lines of ---); it needs a license at least"]
    try:
        metadata: Any = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return [f"README.md: {' '.join(str(error).split())}"]
    if not isinstance(metadata, dict):
        return ["README.md: the metadata is not a list of fields"]
    fields = cast(dict[str, Any], metadata)
    return [*_field_errors(fields), *_index_errors(fields.get("model-index"))]


def _field_errors(metadata: dict[str, Any]) -> list[str]:
    errors = [] if metadata.get("license") else ["license is missing"]
    for field in ("license", "tags", "datasets", "base_model", "metrics"):
        value = metadata.get(field)
        values = cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]
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


def _index_errors(index: Any) -> list[str]:
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
