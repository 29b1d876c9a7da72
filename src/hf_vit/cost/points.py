"""Reading (compute, error) of runs: tables in CSV or JSON, or the folders of trained models."""

import csv
import json
import os
from pathlib import Path
from typing import Any

from hf_vit.cost.runs import measured_run
from hf_vit.errors import UserError

COLUMNS = ("compute", "error")


def read_points(source: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """(compute, error) of every run in one source.

    Args:
        source: a CSV file with the columns compute and error; a JSON file, a list of [compute, error] or of objects
            with these two; or the folder (or its facts.json) of a trained model, which gives exaFLOPs of its training
            and 1 - top-1 accuracy of the evaluation after it.

    Raises:
        UserError: it is none of these, or a value in it is no number.
    """
    from hf_vit.results.facts import FACTS_NAME

    path = Path(source).expanduser()
    if path.is_dir() or path.name == FACTS_NAME:
        return [_point_of_run(path if path.is_dir() else path.parent)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"there is no {source}; give CSV or JSON files, or folders of trained models") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text; give CSV or JSON files, or folders of trained models") from error
    entries = _json_entries(text, path) if text.lstrip()[:1] in ("[", "{") else _csv_entries(text, path)
    if not entries:
        raise UserError(f"{source} holds no runs; give lines with compute and error")
    return [_numbers(entry, f"{path.name}, run {place}") for place, entry in enumerate(entries, start=1)]


def _point_of_run(folder: Path) -> tuple[float, float]:
    run = measured_run(folder)
    if run is None:
        raise UserError(f"{folder} has no training record in facts.json; give the folder of a trained model")
    if run.error is None:
        raise UserError(f"{folder} has no evaluation record after its training; run hf-vit evaluate on it first")
    return run.training_flops / 1e18, run.error


def _json_entries(text: str, path: Path) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is not valid JSON ({error}); write it again") from error
    if not isinstance(found, list):
        raise UserError(f'{path.name} holds no list; write [{{"compute": 1, "error": 0.5}}, ...] or [[1, 0.5], ...]')
    return found


def _csv_entries(text: str, path: Path) -> list[Any]:
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        raise UserError(
            f"{path.name} has the columns {', '.join(rows.fieldnames or ()) or '(none)'}; a first line must name "
            f"{' and '.join(COLUMNS)}"
        )
    return list(rows)


def _numbers(entry: Any, where: str) -> tuple[float, float]:
    try:
        compute, error = (entry[name] for name in COLUMNS) if isinstance(entry, dict) else entry
        return float(compute), float(error)
    except (KeyError, TypeError, ValueError) as reason:
        raise UserError(f"{where}: {entry!r:.80} is not a pair of numbers (compute and error)") from reason
