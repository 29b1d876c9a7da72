"""What makes a result less than it seems: images that the model learnt from, data that has changed meanwhile."""

from typing import Any

from hf_vit.evaluation.examination import Examination
from hf_vit.hub.card_metadata import current_records
from hf_vit.results.facts import Facts, Record
from hf_vit.results.trained_images import count_trained


def warnings_of(examination: Examination, folder: Any) -> dict[str, Any]:
    """What a record of an evaluation says of it, given how the model of `folder` was trained; empty if all is well.

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
    return ({"warnings": warnings} if warnings else {}) | ({"trained_images": known} if known else {})


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
