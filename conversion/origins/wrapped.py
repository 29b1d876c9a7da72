"""Read the keys of PyTorch checkpoints: remove prefixes of wrappers, and sort out keys that are not weights."""

import re
from collections.abc import Callable, Mapping, Sequence

from hf_vit.conversion.origins.origin import KeyNames
from hf_vit.conversion.readers import Shapes
from hf_vit.errors import UserError

# Names that training code and libraries put before keys; a prefix consists of any number of them, each with a dot.
WRAPPERS = (
    *("model", "state_dict", "module", "teacher", "student", "model_ema", "backbone", "encoder", "timm_model"),
    "state_dict_ema",  # of timm's train.py
)
_PREFIX = re.compile(rf"(?:(?:{'|'.join(WRAPPERS)})\.)*")

# Keys that training code writes beside the model -> why they are ignored.
OTHER_KEYS = {
    r"(optimizer|lr_scheduler|scheduler|scaler|loss_scaler|fp16_scaler|amp)(\..+)?": "state of the optimizer",
    r"(optimizer_states|lr_schedulers|amp_scaler|MixedPrecision\w*)(\..+)?": "state of the optimizer",
    r"(epoch|step|global_step|n_averaged|args|dino_loss|best_acc1)(\..+)?": "training progress",
    r"(callbacks|loops|hyper_parameters|datamodule_hyper_parameters|metric)(\..+)?": "training progress",
    r"student\..+": "the student of a self-distillation, whose teacher is converted",
    r"model_ema\..+": "moving average (EMA) of the model that is converted",
}


def make_recognizer(anchor: str, bases: Sequence[str], *patterns: str, lacks: str = "") -> Callable[[Shapes], bool]:
    """Return a function that recognizes files by their keys.

    A file must have the anchor below a base, a key for every regular expression of `patterns`, and none for `lacks`.
    """

    def recognize(shapes: Shapes) -> bool:
        if find_base(shapes, anchor, bases) is None or (lacks and any(re.search(lacks, key) for key in shapes)):
            return False
        return all(any(re.search(pattern, key) for key in shapes) for pattern in patterns)

    return recognize


def unwrap(
    shapes: Shapes,
    anchor: str,
    ignored: Mapping[str, str],
    bases: Sequence[str] = ("",),
    outside: tuple[str, ...] | None = None,
) -> KeyNames:
    """Remove the prefix of all keys, and sort out keys that are not weights.

    Args:
        shapes: key -> shape.
        anchor: a key, without prefix, that every model of the origin has.
        ignored: regular expression of a key without prefix -> why it is ignored.
        bases: names, with a dot, that the bare model may have inside the file's model; the first that exists is
            removed.
        outside: beginnings of keys beside the bare model, which lack the base. None: there are no such keys.

    Raises:
        UserError: the file has several models, and it is not clear which one to convert.
    """
    base = find_base(shapes, anchor, bases) or ""
    prefix = _choose_prefix(find_prefixes(shapes, base + anchor))
    names = KeyNames(
        {}, {}, lambda name: prefix + (name if outside is not None and name.startswith(outside) else base + name)
    )
    for key in shapes:
        has_prefix = key.startswith(prefix)
        # For keys outside of the model, ignore their own wrappers.
        name = key.removeprefix(prefix) if has_prefix else _PREFIX.sub("", key, count=1)
        reason = find_first_reason(ignored, name)
        if reason is None and not (has_prefix and prefix):  # below a prefix, there are only keys of the model
            reason = find_first_reason(OTHER_KEYS, key)
        if reason is not None:
            names.ignored[key] = reason
        elif not has_prefix or (outside is None and not name.startswith(base)):
            names.normal[f"/{name if has_prefix else key}"] = key  # no rule has such a name, so it is left over
        else:
            names.normal[name.removeprefix(base)] = key
    return names


def _choose_prefix(prefixes: Sequence[str]) -> str:
    """Return the prefix of the model to convert: rather the teacher than its student, rather the model than its EMA."""
    for other in ("student.", "model_ema."):
        preferred = [prefix for prefix in prefixes if not prefix.startswith(other)]
        prefixes = preferred or prefixes
    if len(prefixes) == 1:
        return prefixes[0]
    choices = " or ".join(prefix or repr("") for prefix in prefixes[:4])
    raise UserError(
        f"the file holds {len(prefixes)} models, with the prefixes {', '.join(map(repr, prefixes[:4]))}; select one "
        f"with --prefix ({choices})"
    )


def rename_keys(names: KeyNames, spellings: Mapping[str, str]) -> KeyNames:
    """Return the same keys with parts of their normal names replaced; `spellings` maps normal parts to the file's.

    A part that begins with a dot is inside of a name, any other at its beginning.
    """

    def replace_part(name: str, parts: Mapping[str, str]) -> str:
        for part, replacement in parts.items():
            if part in name if part.startswith(".") else name.startswith(part):
                return name.replace(part, replacement, 1)
        return name

    normal_parts = {old: new for new, old in spellings.items()}
    normal: dict[str, str] = {}
    for name, key in names.normal.items():
        new = replace_part(name, normal_parts)
        if new in normal:
            raise UserError(f"'{key}' and '{normal[new]}' name the same weight; remove one of them from the file")
        normal[new] = key
    return KeyNames(normal, names.ignored, lambda name: names.spell(replace_part(name, spellings)))


def ignore_keys(names: KeyNames, beginning: str, reason: str) -> None:
    for name in [name for name in names.normal if name.startswith(beginning)]:
        names.ignored[names.normal.pop(name)] = reason


def find_base(shapes: Shapes, anchor: str, bases: Sequence[str]) -> str | None:
    """Return the name, with a dot, of the bare model inside the file's model; None if there is no such model."""
    return next((base for base in bases if find_prefixes(shapes, base + anchor)), None)


def find_prefixes(shapes: Shapes, anchor: str) -> list[str]:
    """Return all prefixes below which the file has the anchor."""
    candidates = [key.removesuffix(anchor) for key in shapes if key.endswith(anchor)]
    return sorted(prefix for prefix in candidates if _PREFIX.fullmatch(prefix))


def strip_wrappers(shapes: Shapes) -> list[str]:
    """Return all keys without wrappers."""
    return [_PREFIX.sub("", key, count=1) for key in shapes]


def find_first_reason(patterns: Mapping[str, str], key: str) -> str | None:
    """Return why a key is ignored, by the first pattern that matches; None if it is not."""
    return next((reason for pattern, reason in patterns.items() if re.fullmatch(pattern, key)), None)
