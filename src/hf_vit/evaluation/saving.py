"""What is kept of an evaluation: a record in facts.json, and pictures, which the card shows."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.protocols.top1 import ClassificationResult
from hf_vit.evaluation.protocols.top1_figures import draw_evaluation
from hf_vit.results.facts import DataFact, Record, append_record, new_record
from hf_vit.results.figures import save_figure
from hf_vit.results.writing import write_atomically

PICTURE_PREFIX = "evaluation_"


def save_evaluation(
    folder: str | os.PathLike[str],
    result: ClassificationResult,
    *,
    data: DataFact,
    command: str | Sequence[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    pictures: str | os.PathLike[str] | None = None,
) -> Record:
    """Append an evaluation to `folder/facts.json` and draw its pictures.

    Args:
        folder: the model's folder.
        data: which images were evaluated; its size is taken from the result.
        command: what was typed; this process' own arguments by default.
        seed: seed of the data split.
        device: torch device the evaluation ran on.
        pictures: another folder for the pictures; they then do not appear in the card.
    """
    here = pictures is None or Path(pictures).resolve() == Path(folder).resolve()
    names = draw_evaluation(folder if pictures is None else pictures, result, data)
    values = result.values() | ({"pictures": names} if here and names else {})
    data = data.model_copy(update={"size": result.num_images})
    record = new_record(
        "evaluation", values=values, command=command, seed=seed, data=data, seconds=result.seconds, device=device
    )
    append_record(folder, record)
    return record


def save_protocol(
    run: ProtocolRun,
    output: str | os.PathLike[str] | None = None,
    *,
    command: str | Sequence[str] | None = None,
    device: str | None = None,
) -> Record | None:
    """Append the result to the facts of the model's folder; write its numbers and its picture.

    Args:
        run: from `evaluate_protocol`.
        output: folder for NAME.json and NAME.png. Without one the picture goes beside the weights, where the card
            shows it.
        command: what was typed; this process' own arguments by default.
        device: torch device it ran on.

    Returns:
        The record; None for a model without a folder.
    """
    folder, name = run.examination.subject.folder, run.protocol.replace("-", "_")
    pictures: dict[str, str] = {}
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        save_figure(run.result.draw(), Path(output) / f"{name}.png")
        write_atomically(Path(output) / f"{name}.json", _document(run))
    elif folder is not None:
        pictures[f"{PICTURE_PREFIX}{name}.png"] = run.result.title
        save_figure(run.result.draw(), folder / f"{PICTURE_PREFIX}{name}.png")
    if folder is None:
        return None
    values = {"protocol": run.protocol, "settings": run.settings, **run.result.values()}
    values |= {"headline": run.result.headline(), "pictures": pictures}
    record = new_record(
        "evaluation",
        values=values,
        command=command,
        seed=run.examination.seed,
        data=run.examination.fact(run.result.num_images),
        seconds=run.seconds,
        device=device,
    )
    append_record(folder, record)
    return record


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
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
