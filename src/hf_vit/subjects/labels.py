"""The names of classes: data and heads are matched by them, never by number."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_vit.data.labels import plain_name
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def label_names_of(model: "nn.Module") -> list[str]:
    """The names of a classifier's classes as its config tells them (`id2label`), in the order of its logits."""
    names: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return [str(names[index]) for index in sorted(names)]


def match_labels(data_names: Sequence[str], model_names: Sequence[str]) -> list[int]:
    """For every class of the data, the index of the model's class of that name, in whichever Unicode form.

    Raises:
        UserError: the model has no class of that name, or several.
    """
    if list(data_names) == list(model_names):
        return list(range(len(model_names)))
    data_names, model_names = list(map(plain_name, data_names)), list(map(plain_name, model_names))
    index = {name: position for position, name in enumerate(model_names)}
    if unknown := [name for name in data_names if name not in index]:
        raise UserError(
            f"the data has classes the model does not know: {_some(unknown)}; the model's are {_some(model_names)}; "
            "use data with these class names, or rename the classes"
        )
    counts = Counter(model_names)
    if twice := [name for name in data_names if counts[name] > 1]:
        raise UserError(f"the model has several classes called {_some(twice)}; rename them in its config (id2label)")
    return [index[name] for name in data_names]


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, those that occur twice followed by their index: ImageNet has two classes "crane"."""
    counts = Counter(names)
    return [f"{name} ({index})" if counts[name] > 1 else name for index, name in enumerate(names)]


def _some(names: Sequence[str], limit: int = 10) -> str:
    shown = ", ".join(repr(str(name)) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
