"""What is kept of an evaluation: a record in facts.json with its warnings, numbers as JSON, and pictures."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.families import problem_type_of
from hf_vit.hub.card_metadata import select_current
from hf_vit.loading.optimizing import record_engine
from hf_vit.results.facts import Facts, Record, append_record, new_record
from hf_vit.results.figures import save_figure
from hf_vit.results.redaction import redact_values
from hf_vit.results.trained_images import count_trained
from hf_vit.results.writing import write_atomically

logger = logging.getLogger(__name__)
PICTURE_PREFIX = "evaluation_"
EACH_BY_ITSELF = "this is a multi-label model; loss, calibration error and confidence assume one class per image"
# How images were fed otherwise than the model's image processor says, by the settings of an evaluation.
_FED = {
    "max_num_patches": "images kept their size and shape, with at most {} patches",
    "draft": "JPEG files were decoded at a smaller scale (draft={})",
}


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
            shows them, unless they would stand there for what they are not (see `replaces_pictures`). Pictures that no
            evaluation has drawn are left as they are.
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
        document = Path(output) / f"{name}.json"
        drawn = _draw(run, Path(output), name, drawn_before(document))
        write_atomically(document, _document(run, drawn))
    elif home is not None and replaces_pictures(run.examination, run.protocol, home):
        drawn = [record.values.get("pictures") for record in Facts.load(home).filter_kind("evaluation")]
        ours = [each for names in drawn if isinstance(names, list | dict) for each in names]
        pictures = _draw(run, home, f"{PICTURE_PREFIX}{name}", ours)
    if home is None:
        return None
    values = run.result.record(run.protocol, run.settings, pictures) | record_engine(run.engine)
    record = new_record(
        "evaluation",
        values=values | warnings_of(run.examination, run.protocol, home, run.settings),
        command=command,
        seed=run.examination.seed,
        data=run.examination.fact(run.result.num_images),
        seconds=run.seconds,
        device=device,
    )
    append_record(home, record)
    return record


def _draw(run: ProtocolRun, folder: Path, stem: str, ours: Collection[object] | None) -> list[str]:
    """Write the pictures and return the names of the files; of those that exist, replace `ours` (None: all) alone."""
    figures = run.result.figures(stem, f"{run.examination.data.name} {run.examination.split}")
    written: list[str] = []
    for name, figure in figures.items():
        path = folder / name
        if ours is not None and name not in ours and path.exists():
            logger.warning(
                "%s is not a plot of an evaluation and is kept; write plots elsewhere with --output FOLDER", path
            )
        elif figure is None:
            path.unlink(missing_ok=True)
        else:
            save_figure(figure, path)
            written.append(name)
    return written


def drawn_before(document: Path) -> Sequence[str] | None:
    """Return the pictures beside NAME.json that its evaluation drew; None for all: that of version 0.2 names none."""
    try:
        content = json.loads(document.read_text(encoding="utf-8"))
        return content.get("pictures") if content["protocol"] else None
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{document} is not a result of hf-vit evaluate; move it, or choose another output") from error


def _document(run: ProtocolRun, pictures: Sequence[str]) -> str:
    """Return NAME.json: nothing in it depends on when or where it was made."""
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
        "pictures": pictures,
    }
    plain = json.loads(json.dumps(content, allow_nan=False))
    return json.dumps(redact_values(plain), indent=2, ensure_ascii=False) + "\n"


def warnings_of(examination: Examination, protocol: str, folder: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record of an evaluation says of it, given how the model of `folder` was trained.

    Besides `warnings`: `trained_images`, how many were learned from; `fed`, how images were fed otherwise than usual.
    Streams are compared by their files alone, and with the training of a stream alone.
    """
    digests, data = examination.judged_digests(), examination.data
    known, training, warnings = count_trained(folder, digests), _training(Facts.load(folder)), list[str]()
    if known:
        warnings.append(f"{known:,} of the {len(digests):,} images were trained on, so the result is too good")
    if training is not None and training.data is not None and training.data.name == data.name:
        is_same_kind = bool(training.values.get("streaming")) == bool(data.readers)
        before = training.data.fingerprint
        if is_same_kind and before not in (None, data.fingerprint):
            warnings.append(
                f"{data.name} has changed since the training (fingerprint {data.fingerprint}, then {before})"
            )
    is_multi_label = problem_type_of(examination.subject.model) == "multi_label_classification"
    if protocol in ("top1", "calibration") and is_multi_label:
        warnings.append(EACH_BY_ITSELF)
    fed = {name: settings[name] for name in _FED if name in settings}
    warnings += [_FED[name].format(value) for name, value in fed.items()]
    values = {"warnings": warnings, "trained_images": known, "fed": fed}
    return {name: value for name, value in values.items() if value}


def replaces_pictures(examination: Examination, protocol: str, folder: Any) -> bool:
    """Return whether pictures of this result may lie beside the weights, where the card shows them.

    Not those of training images; nor those of other data in place of those of the data that the model was trained for.
    """
    if examination.split == "train":
        return False
    facts = Facts.load(folder)
    training = _training(facts)
    if protocol != "top1" or training is None or training.data is None:
        return True
    own = training.data.fingerprint
    shown = [record for record in select_current(facts) if isinstance(record.values.get("pictures"), list)]
    is_shown = any(record.data is not None and record.data.fingerprint == own for record in shown)
    return not is_shown or examination.data.fingerprint == own


def _training(facts: Facts) -> Record | None:
    return next(iter(reversed(facts.filter_kind("training"))), None)
