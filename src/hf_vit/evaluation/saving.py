"""Save an evaluation: a record in facts.json with its warnings, metrics as JSON, and plots."""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.families import get_problem_type
from hf_vit.loading.optimizing import record_engine
from hf_vit.results.facts import Facts, Record, append_record, make_record, redact_json
from hf_vit.results.figures import save_figure
from hf_vit.results.trained_images import count_trained, note_trained
from hf_vit.writing import is_writable, write_atomically

logger = logging.getLogger(__name__)
PICTURE_PREFIX = "evaluation_"
MULTI_LABEL_WARNING = (
    "this is a multi-label model, but loss, calibration error and confidence assume one class per image"
)
# Settings that change the preparation of images, with their warnings.
_INPUT_SETTINGS = {
    "max_num_patches": "images kept their size and shape, with at most {} patches",
    "draft": "JPEG files were decoded at a smaller scale (draft={})",
    "features": "features of the last layers (--features {}) took the place of the head's input",
}


def save_protocol(
    run: ProtocolRun,
    output: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    command: str | Sequence[str] | None = None,
    device: str | None = None,
) -> Record | None:
    """Append the result to facts.json of the model's folder, and write its metrics and plots.

    Args:
        run: from `evaluate_protocol`.
        output: folder for NAME.json and NAME.png. Without it, plots are written beside the weights for the model card,
            unless they would replace more important ones (see `may_replace_plots`). Images of other origin are never
            overwritten.
        folder: the model's folder; by default the one that it was loaded from.
        command: the command line for the record; by default that of this process.
        device: torch device of the evaluation.

    Returns:
        The record, or None for a model without a folder. In a folder that is read-only it is not written.
    """
    if folder is None:
        run.examination.loaded.check_same_folder()
    model_folder = run.examination.loaded.folder if folder is None else Path(folder)
    name = run.protocol.replace("-", "_")
    if output is not None:
        document = Path(output, f"{name}.json")
        document.parent.mkdir(parents=True, exist_ok=True)
        plots = _draw_plots(run, document.parent, name, find_own_plots(document))
        write_atomically(document, _make_document(run, plots))
    if model_folder is None:
        return None
    card_plots: list[str] = []
    if output is None and may_replace_plots(run.examination, run.protocol, model_folder):
        evaluations = Facts.load(model_folder).filter_kind("evaluation")
        recorded: list[Any] = [record.values.get("pictures") for record in evaluations]
        own_plots = [file for files in recorded if isinstance(files, list | dict) for file in files]
        card_plots = _draw_plots(run, model_folder, f"{PICTURE_PREFIX}{name}", own_plots)
    values = run.result.record(run.protocol, run.settings, card_plots) | record_engine(run.engine)
    record = make_record(
        "evaluation",
        values=values | collect_warnings(run.examination, run.protocol, model_folder, run.settings),
        command=command,
        seed=run.examination.seed,
        data=run.examination.fact(run.result.num_images),
        seconds=run.seconds,
        device=device,
    )
    if output is None or is_writable(model_folder):
        append_record(model_folder, record)
    return record


def _draw_plots(run: ProtocolRun, folder: Path, stem: str, own_plots: Collection[object] | None) -> list[str]:
    """Write the plots and return their names; only existing files in `own_plots` are replaced (None: all)."""
    figures = run.result.figures(stem, f"{run.examination.data.name} {run.examination.split}")
    names: list[str] = []
    for name, figure in figures.items():
        path = folder / name
        if own_plots is not None and name not in own_plots and path.exists():
            logger.warning(
                "%s is not a plot of an evaluation, so it was not replaced; write the plots elsewhere with "
                "--output FOLDER",
                path,
            )
        elif figure is None:
            path.unlink(missing_ok=True)
        else:
            save_figure(figure, path)
            names.append(name)
    return names


def find_own_plots(document: Path) -> Sequence[str] | None:
    """Return the plots that NAME.json lists; () without such a file, None (all) for files of version 0.2."""
    try:
        content = json.loads(document.read_text(encoding="utf-8"))
        return content.get("pictures") if content["protocol"] else None
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{document} is not a result of hf-vit evaluate; move it, or choose another output") from error


def _make_document(run: ProtocolRun, pictures: Sequence[str]) -> str:
    """Return the content of NAME.json, which depends neither on time nor on the machine."""
    content: Mapping[str, Any] = {
        "format": 1,
        "protocol": run.protocol,
        "title": run.result.title,
        "source": run.result.source,
        "model": run.examination.loaded.describe(),
        "data": run.examination.fact(run.result.num_images).model_dump(),
        "seed": run.examination.seed,
        "settings": run.settings,
        "values": run.result.values(),
        "headline": run.result.headline(),
        "pictures": pictures,
    }
    return json.dumps(redact_json(content), indent=2, ensure_ascii=False) + "\n"


def collect_warnings(
    examination: Examination, protocol: str, folder: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the warnings of an evaluation for its record, given the training of the model in `folder`.

    Besides `warnings` there may be `trained_images`, the number of evaluated images that were in the training, and
    `fed`, the settings that changed the preparation of images. A stream's fingerprint is compared with that of a
    training on a stream only.
    """
    digests = examination.list_digests()
    data = examination.data
    training = Facts.load(folder).find_latest("training")
    warnings = note_trained(folder, digests)
    trained_images = count_trained(folder, digests) if warnings else 0
    if training is not None and training.data is not None and training.data.name == data.name:
        is_same_kind = bool(training.values.get("streaming")) == bool(data.readers)
        old_fingerprint = training.data.fingerprint
        if is_same_kind and old_fingerprint not in (None, data.fingerprint):
            warnings.append(
                f"{data.name} has changed since the training (its fingerprint is {data.fingerprint}, and was "
                f"{old_fingerprint})"
            )
    is_multi_label = get_problem_type(examination.loaded.model) == "multi_label_classification"
    if protocol in ("top1", "calibration") and is_multi_label:
        warnings.append(MULTI_LABEL_WARNING)
    input_settings = {name: settings[name] for name in _INPUT_SETTINGS if name in settings}
    warnings += [_INPUT_SETTINGS[name].format(value) for name, value in input_settings.items()]
    values = {"warnings": warnings, "trained_images": trained_images, "fed": input_settings}
    return {name: value for name, value in values.items() if value}


def may_replace_plots(examination: Examination, protocol: str, folder: Any) -> bool:
    """Return whether plots of this result may be written beside the weights, where the model card shows them.

    Plots of training images may not, and plots of other data may not replace those of the training's data.
    """
    if examination.split == "train":
        return False
    facts = Facts.load(folder)
    training = facts.find_latest("training")
    if protocol != "top1" or training is None or training.data is None:
        return True
    training_fingerprint = training.data.fingerprint
    plotted = [record for record in facts.select_current() if isinstance(record.values.get("pictures"), list)]
    fingerprints = [record.data.fingerprint for record in plotted if record.data is not None]
    return training_fingerprint not in fingerprints or examination.data.fingerprint == training_fingerprint
