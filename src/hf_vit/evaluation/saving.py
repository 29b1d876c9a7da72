"""What is kept of an evaluation: a record in facts.json, numbers as JSON, and pictures, which the card shows."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.result_warnings import replaces_pictures, warnings_of
from hf_vit.results.facts import Record, append_record, new_record
from hf_vit.results.figures import save_figure
from hf_vit.results.redaction import redact_values
from hf_vit.results.writing import write_atomically
from hf_vit.subjects.optimizing import engine_fact

PICTURE_PREFIX = "evaluation_"


def save_protocol(
    run: ProtocolRun,
    output: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    command: str | Sequence[str] | None = None,
    device: str | None = None,
) -> Record | None:
    """Append the result to the facts of the model's folder; write its numbers and its pictures.

    Args:
        run: from `evaluate_protocol`.
        output: folder for NAME.json and NAME.png. Without one the pictures go beside the weights, where the card
            shows them, unless they would stand there for what they are not (see `replaces_pictures`).
        folder: the model's; by default the one it was loaded from.
        command: what was typed; this process' own arguments by default.
        device: torch device it ran on.

    Returns:
        The record; None for a model without a folder.
    """
    if folder is None:
        run.examination.subject.need_same_folder()
    home = run.examination.subject.folder if folder is None else Path(folder)
    name, pictures = run.protocol.replace("-", "_"), list[str]()
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        _draw(run, Path(output), name)
        write_atomically(Path(output) / f"{name}.json", _document(run))
    elif home is not None and replaces_pictures(run.examination, run.protocol, home):
        pictures = _draw(run, home, f"{PICTURE_PREFIX}{name}")
    if home is None:
        return None
    record = new_record(
        "evaluation",
        values=run.result.record(run.protocol, run.settings, pictures)
        | warnings_of(run.examination, run.protocol, home, run.settings)
        | engine_fact(run.engine),
        command=command,
        seed=run.examination.seed,
        data=run.examination.fact(run.result.num_images),
        seconds=run.seconds,
        device=device,
    )
    append_record(home, record)
    return record


def _draw(run: ProtocolRun, folder: Path, stem: str) -> list[str]:
    """Write the pictures; returns the names of the files. A picture of an earlier run is replaced."""
    figures = run.result.figures(stem, f"{run.examination.data.name} {run.examination.split}")
    for name, figure in figures.items():
        if figure is None:
            (folder / name).unlink(missing_ok=True)
        else:
            save_figure(figure, folder / name)
    return [name for name, figure in figures.items() if figure is not None]


def _document(run: ProtocolRun) -> str:
    """NAME.json: nothing in it depends on when or where it was made."""
    content: Mapping[str, Any] = {
        "format": 1,
        "protocol": run.protocol,
        "title": run.result.title,
        "source": run.result.source,
        "model": run.examination.subject.describe(),
        "data": run.examination.fact(run.result.num_images).model_dump(),
        "seed": run.examination.seed,
        "settings": run.settings,
        "values": run.result.values(),
        "headline": run.result.headline(),
    }
    plain = json.loads(json.dumps(content, allow_nan=False))
    return json.dumps(redact_values(plain), indent=2, ensure_ascii=False) + "\n"
