"""Models of other libraries, converted in memory: `hf_vit.from_hub("google/vit-base-patch16-224")`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.api import plan
from hf_vit.conversion.fetch.addresses import Source, fetch
from hf_vit.conversion.opening import CONFIG, open_checkpoint, read_json
from hf_vit.conversion.plan.building import build_model, build_processor, without_progress_bars
from hf_vit.conversion.plan.weights import load_weights
from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError
from hf_vit.families import family_of


def from_hub(
    source: str | Path,
    *,
    revision: str | None = None,
    image_size: Pair | None = None,
    resize_to: Pair | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Load a vision transformer of any origin as a model of this package, with identical results.

    The class follows from the weights: a classifier where there is a head, otherwise the bare model. Nothing is
    written but the Hub's cache. `image_processor_from_hub` gives the pixels that belong to it.

    Args:
        source: `owner/name` on the Hub, a folder that transformers, timm or this package saved, or anything else that
            `hf-vit convert` reads.
        revision: branch, tag or commit of the Hub's repository.
        image_size, resize_to, num_labels, labels: see `conversion.plan`.
        dtype: of the model's parameters.

    Raises:
        UserError: the source cannot be had or read, or is no model that can be expressed here.
    """
    found = _fetched(source, revision)
    options: dict[str, Any] = {
        "image_size": image_size,
        "resize_to": resize_to,
        "num_labels": num_labels,
        "labels": labels,
    }
    own = _own_class(found)
    if own is not None:
        if any(value is not None for value in options.values()):
            raise UserError(f"{found.name} is a model of hf_vit already; load it with {own.__name__}.from_pretrained")
        return own.from_pretrained(found.path, dtype=dtype).eval()
    with open_checkpoint(found.path) as reader, without_progress_bars():
        made = plan(reader.shapes, file_name=found.name, companions=reader.companions, **options)
        return build_model(made, load_weights(reader, made, dtype).state)


def image_processor_from_hub(source: str | Path, *, revision: str | None = None) -> Any:
    """The `ViTImageProcessor` that makes the pixels a source was trained on; see `from_hub`."""
    found = _fetched(source, revision)
    if _own_class(found) is not None:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(found.path)
    with open_checkpoint(found.path) as reader:
        return build_processor(plan(reader.shapes, file_name=found.name, companions=reader.companions))


def _fetched(source: str | Path, revision: str | None) -> Source:
    if Path(source).exists() or "://" in str(source):
        if revision is not None:
            raise UserError(f"revision {revision!r} belongs to a repository of the Hub, and {source} is none")
        return fetch(source)
    return fetch(f"hf://{source}@{revision}" if revision else f"hf://{source}")


def _own_class(found: Source) -> Any:
    """The class of this package that a folder was saved by, or None."""
    if not (found.path / CONFIG).is_file():
        return None
    config = read_json(found.path / CONFIG)
    family = family_of(config.get("model_type"))
    if family is None:
        return None
    names: Any = config.get("architectures") or [None]
    door = family.door_of(names[0])
    if door is None:
        raise UserError(f"config.json of {found.name} names no class of hf_vit (architectures: {names})")
    return family.classes[door]
