"""The Hub's rules for a card's metadata: the main ones, and its commonest licenses."""

import re
from typing import Any

import yaml

_FRONT = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"(https?://\S+)|([A-Za-z0-9][\w.-]*(/[\w.-]+)?)")
LICENSES = {
    "apache-2.0", "mit", "openrail", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "agpl-3.0",
    "gpl-3.0", "lgpl-3.0", "mpl-2.0", "odbl", "unlicense", "unknown", "other",
}  # fmt: skip


def metadata_of(card: str) -> Any:
    """The metadata as parsed, None without any; raises yaml.YAMLError."""
    found = _FRONT.match(card)
    return yaml.safe_load(found[1]) if found else None


def card_errors(card: str, is_space: bool = False) -> list[str]:
    """What the Hub would refuse the card for."""
    try:
        metadata = metadata_of(card)
    except yaml.YAMLError as error:
        return [f"Invalid YAML: {error}"]
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return ['"metadata" must be an object']
    sdk = [] if not is_space or metadata.get("sdk") in ("static", "gradio", "docker") else ['"sdk" is required']
    return [*sdk, *_value_errors(metadata), *_index_errors(metadata.get("model-index"))]


def eval_results(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """`.eval_results/*.yaml` as the Hub reads them (hub-docs, eval-results.md): an entry each, or what is wrong."""
    answers: list[dict[str, Any]] = []
    for name, data in sorted(files.items()):
        if not re.fullmatch(r"\.eval_results/[^/]+\.ya?ml", name):
            continue
        try:
            entries = yaml.safe_load(data)
            for entry in entries:
                if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", entry["dataset"]["id"]) or not entry["dataset"]["task_id"]:
                    raise ValueError("dataset.id is no data set")
                if not isinstance(entry["value"], float | int):
                    raise ValueError("value is no number")
                if "source" in entry and not entry["source"].get("url"):
                    raise ValueError("source.url is required")
                answers.append({"filename": name, "data": entry})
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            answers.append({"filename": name, "error": str(error)})
    return answers


def _value_errors(metadata: dict[str, Any]) -> list[str]:
    errors: list[str] = []
    for field in ("license", "tags", "datasets", "base_model", "language"):
        values = metadata.get(field)
        for place, value in enumerate(values if isinstance(values, list) else [] if values is None else [values]):
            if not isinstance(value, str):
                errors.append(f'"{field}[{place}]" must be a string')
            elif field == "license" and value not in LICENSES:
                errors.append(f'"license" must be one of [{", ".join(sorted(LICENSES))}]')
            elif field in ("datasets", "base_model") and not _REPO_ID.fullmatch(value):
                errors.append(f'"{field}[{place}]" with value "{value}" is not valid.')
    for field in ("pipeline_tag", "library_name"):
        if field in metadata and not isinstance(metadata[field], str):
            errors.append(f'"{field}" must be a string')
    return errors


def _index_errors(index: Any) -> list[str]:
    if index is None:
        return []
    if not isinstance(index, list):
        return ['"model-index" must be an array']
    errors: list[str] = []
    for place, entry in enumerate(index):
        for field in ("name", "results"):
            if not isinstance(entry, dict) or not entry.get(field):
                errors.append(f'"model-index[{place}].{field}" is required')
        for number, result in enumerate(entry.get("results") or [] if isinstance(entry, dict) else []):
            where = f"model-index[{place}].results[{number}]"
            for outer, inner in (("task", "type"), ("dataset", "type"), ("dataset", "name")):
                if not (result.get(outer) or {}).get(inner):
                    errors.append(f'"{where}.{outer}.{inner}" is required')
            for position, metric in enumerate(result.get("metrics") or [{}]):
                missing = [field for field in ("type", "value") if field not in metric]
                errors += [f'"{where}.metrics[{position}].{field}" is required' for field in missing]
    return errors
