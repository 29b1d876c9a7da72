"""All protocols by name, how one is carried out, and what is kept of it."""

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from hf_vit.data import ImageData, load_data
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.plots import save_figure
from hf_vit.evaluation.protocols.attacks import robustness
from hf_vit.evaluation.protocols.calibration import calibration
from hf_vit.evaluation.protocols.corrupted_accuracy import corruptions
from hf_vit.evaluation.protocols.few_shot import few_shot
from hf_vit.evaluation.protocols.frame import ProtocolResult
from hf_vit.evaluation.protocols.occlusion import patch_drop
from hf_vit.evaluation.protocols.probes import linear_probe, nearest_neighbors
from hf_vit.results.facts import Facts, Record, append_record, new_record, write_atomically
from hf_vit.subjects.subject import open_subject

PICTURE_PREFIX = "evaluation_"

PROTOCOLS: dict[str, Callable[..., ProtocolResult]] = {
    "few-shot": few_shot,
    "linear-probe": linear_probe,
    "knn": nearest_neighbors,
    "calibration": calibration,
    "robustness": robustness,
    "corruptions": corruptions,
    "patch-drop": patch_drop,
}


@final
@dataclass(frozen=True)
class ProtocolRun:
    """A protocol that was carried out.

    Attributes:
        protocol: its name.
        result: what it measured.
        examination: the model and the data.
        settings: every option, those that were not given too.
        seconds: wall time, reading and preparing the images included.
    """

    protocol: str
    result: ProtocolResult
    examination: Examination
    settings: dict[str, Any]
    seconds: float


def evaluate_protocol(
    protocol: str,
    model: Any,
    data: str | ImageData,
    *,
    split: str = "test",
    num_images: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    streaming: bool = False,
    skip_bad_images: bool = False,
    **options: Any,
) -> ProtocolRun:
    """Measure a model by a protocol.

    Args:
        protocol: of `PROTOCOLS`.
        model: see `open_subject`: a folder, a Hub id, "timm:NAME", or (model, image processor).
        data: see `load_data`, or what it gave.
        split: the one that judges.
        num_images: judge by so many images of it; None for all.
        batch_size: images a forward.
        seed: of every draw.
        device: torch device; by default a GPU where there is one.
        progress: show a bar on standard error.
        streaming: read the data while measuring, see `load_data`.
        skip_bad_images: leave out unreadable images, see `load_data`.
        **options: of the protocol, the keyword arguments of its function.

    Raises:
        UserError: an unknown protocol or option, or whatever the protocol cannot do with the model or the data.
    """
    function = _protocol(protocol)
    settings = _settings(protocol, function, options)
    subject = open_subject(model, device)
    if subject.folder is not None:
        Facts.load(subject.folder)  # damaged facts are told before the work, not after it
    if isinstance(data, str):
        size = subject.image_size
        data = load_data(data, streaming=streaming, skip_bad_images=skip_bad_images, image_size=size, seed=seed)
    examination = Examination(subject, data, split, num_images, batch_size, seed, progress)
    started = time.perf_counter()
    result = function(examination, **options)
    return ProtocolRun(protocol, result, examination, settings, time.perf_counter() - started)


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


def _protocol(name: str) -> Callable[..., ProtocolResult]:
    if name not in PROTOCOLS:
        raise UserError(f"there is no protocol '{name}'; there are top1 (by default), {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def _settings(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a protocol, given or not.

    Raises:
        UserError: one that the protocol does not have.
    """
    known = {
        key: parameter.default
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if unknown := sorted(set(options) - set(known)):
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in unknown)
        raise UserError(
            f"protocol {name} has no {shown}; it has {', '.join('--' + key.replace('_', '-') for key in known)}"
        )
    return {
        key: list(value) if isinstance(value, tuple | list) else value for key, value in {**known, **options}.items()
    }
