"""Keys of PyTorch checkpoints: what is wrapped around a model is taken off, what lies beside it sorted out."""

import re
from collections.abc import Mapping

from hf_vit.conversion.origins.origin import KeyNames
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.errors import UserError

# What training code and libraries put around a model; a prefix is any number of them, each with its dot.
WRAPPERS = ("model", "state_dict", "module", "teacher", "student", "model_ema", "backbone", "encoder", "timm_model")
_PREFIX = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")

# Keys beside the model, as training code of these origins writes them.
BESIDE = {
    r"(optimizer|lr_scheduler|scheduler|scaler|loss_scaler|fp16_scaler|amp)(\..+)?": "state of the optimizer",
    r"(epoch|step|global_step|args|dino_loss|best_acc1)(\..+)?": "training progress",
    r"student\..+": "the student of a self-distillation, whose teacher is converted",
    r"model_ema\..+": "a moving average of the model that is converted",
}


def unwrapped(shapes: Mapping[str, Shape], anchor: str, ignored: Mapping[str, str]) -> KeyNames:
    """Take the prefix off, and sort out what is no weight.

    Args:
        anchor: a key that every model of the origin has, without prefix.
        ignored: regular expression of a key without prefix -> why it is ignored.

    Raises:
        UserError: there are several models in the file, and it is not clear which one is meant.
    """
    prefix = find_prefix(shapes, anchor)
    names = KeyNames({}, {}, lambda name: prefix + name)
    for key in shapes:
        inside = key.startswith(prefix)
        # What lies beside the model is judged by its name below its own wrappers.
        reason = first_reason(ignored, key.removeprefix(prefix) if inside else _PREFIX.sub("", key, count=1))
        if reason is None and not (inside and prefix):
            reason = first_reason(BESIDE, key)
        if reason is None:
            names.normal[key.removeprefix(prefix) if inside else f"/{key}"] = key  # no rule knows "/...": left over
        else:
            names.ignored[key] = reason
    return names


def renamed(names: KeyNames, spelt: Mapping[str, str]) -> KeyNames:
    """The same keys, parts of their names replaced; `spelt` is part of a normal name -> what the file has instead."""

    def replaced(name: str, parts: Mapping[str, str]) -> str:
        part = next((part for part in parts if part in name), None)
        return name if part is None else name.replace(part, parts[part])

    inward = {old: new for new, old in spelt.items()}
    normal = {replaced(name, inward): key for name, key in names.normal.items()}
    if len(normal) != len(names.normal):
        raise UserError("the file holds one weight in two spellings; which of them counts is unknown")
    return KeyNames(normal, names.ignored, lambda name: names.spell(replaced(name, spelt)))


def find_prefix(shapes: Mapping[str, Shape], anchor: str) -> str:
    """What stands before the anchor; of a teacher rather than its student, of the model rather than its average."""
    found = prefixes(shapes, anchor)
    for other in ("student.", "model_ema."):
        if len(found) > 1:
            found = [prefix for prefix in found if not prefix.startswith(other)] or found
    if len(found) != 1:
        raise UserError(
            f"the file holds {len(found)} models, below {', '.join(map(repr, found[:4]))}; exactly one set of weights "
            "is needed: save that one alone"
        )
    return found[0]


def prefixes(shapes: Mapping[str, Shape], anchor: str) -> list[str]:
    """All prefixes below which there is the anchor."""
    ends = [key.removesuffix(anchor) for key in shapes if key.endswith(anchor)]
    return sorted(prefix for prefix in ends if _PREFIX.fullmatch(prefix))


def bare_names(shapes: Mapping[str, Shape]) -> list[str]:
    """The keys without what is wrapped around each."""
    return [_PREFIX.sub("", key, count=1) for key in shapes]


def first_reason(patterns: Mapping[str, str], key: str) -> str | None:
    return next((reason for pattern, reason in patterns.items() if re.fullmatch(pattern, key)), None)
