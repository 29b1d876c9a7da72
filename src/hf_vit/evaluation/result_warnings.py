"""What makes a result other than it seems: images that the model learnt from or saw otherwise, changed data."""

from collections.abc import Mapping
from typing import Any

from hf_vit.evaluation.examination import Examination
from hf_vit.families import problem_type_of
from hf_vit.hub.card_metadata import current_records
from hf_vit.results.facts import Facts, Record
from hf_vit.results.trained_images import count_trained

EACH_BY_ITSELF = (
    "the model judges each class by itself, and the loss, the calibration error and what follows from confidence take "
    "its answers for probabilities of one class an image"
)
# How images were fed otherwise than the model's image processor says, by the settings of an evaluation.
_FED = {
    "max_num_patches": "images were fed in their own size and shape, of {} patches at most",
    "draft": "JPEG files were decoded at a smaller scale (draft={})",
}


def warnings_of(examination: Examination, protocol: str, folder: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a record of an evaluation says of it, given how the model of `folder` was trained; empty if all is well.

    Besides `warnings`: `trained_images`, how many were learnt from; `fed`, how images were fed otherwise than usual.
    Streams are compared by their files alone, and with the training of a stream alone.
    """
    digests, data = examination.judged_digests(), examination.data
    known = count_trained(folder, digests)
    warnings: list[str] = []
    if known:
        warnings.append(
            f"{known:,} of the {len(digests):,} images were trained on: the result says little of new images"
        )
    training = _training(Facts.load(folder))
    if training is not None and training.data is not None and training.data.name == data.name:
        is_same_kind = bool(training.values.get("streaming")) == bool(data.readers)
        before = training.data.fingerprint
        if is_same_kind and before not in (None, data.fingerprint):
            warnings.append(
                f"{data.name} has changed since the training (fingerprint {data.fingerprint}, then {before})"
            )
    kind = problem_type_of(examination.subject.model)
    if protocol in ("top1", "calibration") and kind == "multi_label_classification":
        warnings.append(EACH_BY_ITSELF)
    fed = {name: settings[name] for name in _FED if name in settings}
    warnings += [_FED[name].format(value) for name, value in fed.items()]
    found = {"warnings": warnings, "trained_images": known, "fed": fed}
    return {name: value for name, value in found.items() if value}


def replaces_pictures(examination: Examination, protocol: str, folder: Any) -> bool:
    """Whether pictures of this result may lie beside the weights, where the card shows them.

    Not those of training images; nor those of other data in place of those of the data that the model was trained for.
    """
    if examination.split == "train":
        return False
    facts = Facts.load(folder)
    training = _training(facts)
    if protocol != "top1" or training is None or training.data is None:
        return True
    own = training.data.fingerprint
    shown = [record for record in current_records(facts) if isinstance(record.values.get("pictures"), list)]
    is_shown = any(record.data is not None and record.data.fingerprint == own for record in shown)
    return not is_shown or examination.data.fingerprint == own


def _training(facts: Facts) -> Record | None:
    return next(iter(reversed(facts.of_kind("training"))), None)
