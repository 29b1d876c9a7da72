"""Keys of PyTorch checkpoints: what is wrapped around a model is taken off, what lies beside it sorted out."""

import re
from collections.abc import Callable, Mapping, Sequence

from hf_vit.conversion.origins.origin import KeyNames
from hf_vit.conversion.readers import Shapes
from hf_vit.errors import UserError

# What training code and libraries put around a model; a prefix is any number of them, each with its dot.
WRAPPERS = (
    *("model", "state_dict", "module", "teacher", "student", "model_ema", "backbone", "encoder", "timm_model"),
    *("_orig_mod", "state_dict_ema"),  # of torch.compile; of timm's train.py
)
_PREFIX = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")

# Keys beside the model, as training code of these origins writes them.
BESIDE = {
    r"(optimizer|lr_scheduler|scheduler|scaler|loss_scaler|fp16_scaler|amp)(\..+)?": "state of the optimizer",
    r"(optimizer_states|lr_schedulers|amp_scaler|MixedPrecision\w*)(\..+)?": "state of the optimizer",
    r"(epoch|step|global_step|args|dino_loss|best_acc1)(\..+)?": "training progress",
    r"(callbacks|loops|hyper_parameters|datamodule_hyper_parameters|metric)(\..+)?": "training progress",
    r"student\..+": "the student of a self-distillation, whose teacher is converted",
    r"model_ema\..+": "a moving average of the model that is converted",
}


def has(anchor: str, bases: Sequence[str], *marks: str, lacks: str = "") -> Callable[[Shapes], bool]:
    """Return whether a file has the anchor below a base, each mark in some key, and `lacks` in none (expressions)."""

    def recognises(shapes: Shapes) -> bool:
        if find_base(shapes, anchor, bases) is None or (lacks and any(re.search(lacks, key) for key in shapes)):
            return False
        return all(any(re.search(mark, key) for key in shapes) for mark in marks)

    return recognises


def unwrapped(
    shapes: Shapes,
    anchor: str,
    ignored: Mapping[str, str],
    bases: Sequence[str] = ("",),
    outside: tuple[str, ...] | None = None,
) -> KeyNames:
    """Take the prefix off, and sort out what is no weight.

    Args:
        anchor: a key that every model of the origin has, without prefix.
        ignored: regular expression of a key without prefix -> why it is ignored.
        bases: what the bare model may be called inside the file's, with its dot; the first that is there is taken off.
        outside: beginnings of keys beside the bare model, which lack the base. None: no key is outside of it.

    Raises:
        UserError: there are several models in the file, and it is not clear which one is meant.
    """
    base = find_base(shapes, anchor, bases) or ""
    found = prefixes(shapes, base + anchor)
    for other in ("student.", "model_ema."):  # the teacher rather than its student, the model rather than its average
        if len(found) > 1:
            found = [prefix for prefix in found if not prefix.startswith(other)] or found
    if len(found) != 1:
        raise UserError(
            f"the file holds {len(found)} models, below {', '.join(map(repr, found[:4]))}; give a file with "
            "exactly one set of weights: choose it by --prefix "
            f"({' or '.join(prefix or repr('') for prefix in found[:4])}), or save it alone"
        )
    prefix = found[0]
    names = KeyNames(
        {}, {}, lambda name: prefix + (name if outside is not None and name.startswith(outside) else base + name)
    )
    for key in shapes:
        inside = key.startswith(prefix)
        # What lies beside the model is judged by its name below its own wrappers.
        name = key.removeprefix(prefix) if inside else _PREFIX.sub("", key, count=1)
        reason = _first_reason(ignored, name)
        if reason is None and not (inside and prefix):
            reason = _first_reason(BESIDE, key)
        if reason is not None:
            names.ignored[key] = reason
        elif not inside or (outside is None and not name.startswith(base)):
            names.normal[f"/{name if inside else key}"] = key  # no rule knows "/...": left over
        else:
            names.normal[name.removeprefix(base)] = key
    return names


def renamed(names: KeyNames, spelt: Mapping[str, str]) -> KeyNames:
    """Return the same keys, parts of their names replaced: part of a normal name -> what the file has instead.

    A part that begins with a dot is inside of a name, another begins it.
    """

    def replaced(name: str, parts: Mapping[str, str]) -> str:
        there = (part for part in parts if (part in name if part[0] == "." else name.startswith(part)))
        part = next(there, None)
        return name if part is None else name.replace(part, parts[part], 1)

    inward = {old: new for new, old in spelt.items()}
    normal: dict[str, str] = {}
    for name, key in names.normal.items():
        new = replaced(name, inward)
        if new in normal:
            raise UserError(f"'{key}' and '{normal[new]}' are two names of the same weight; keep one of them")
        normal[new] = key
    return KeyNames(normal, names.ignored, lambda name: names.spell(replaced(name, spelt)))


def leave_out(names: KeyNames, beginning: str, reason: str) -> None:
    """Ignore the keys of a part."""
    for name in [name for name in names.normal if name.startswith(beginning)]:
        names.ignored[names.normal.pop(name)] = reason


def find_base(shapes: Shapes, anchor: str, bases: Sequence[str]) -> str | None:
    """Return the name of the bare model inside the file's, with its dot; None where there is none."""
    return next((base for base in bases if prefixes(shapes, base + anchor)), None)


def prefixes(shapes: Shapes, anchor: str) -> list[str]:
    """Return all prefixes below which there is the anchor."""
    ends = [key.removesuffix(anchor) for key in shapes if key.endswith(anchor)]
    return sorted(prefix for prefix in ends if _PREFIX.fullmatch(prefix))


def bare_names(shapes: Shapes) -> list[str]:
    """Return the keys without what is wrapped around each."""
    return [_PREFIX.sub("", key, count=1) for key in shapes]


def _first_reason(patterns: Mapping[str, str], key: str) -> str | None:
    return next((reason for pattern, reason in patterns.items() if re.fullmatch(pattern, key)), None)
