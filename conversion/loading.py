"""Models of other libraries, converted in memory: `hf_vit.from_hub("google/vit-base-patch16-224")`."""

from pathlib import Path
from typing import Any, Unpack

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.building.model import build_model, build_processor
from hf_vit.conversion.building.weights import load_weights
from hf_vit.conversion.fetch.addresses import HUB_ID, LocalCheckpoint, fetch, is_local
from hf_vit.conversion.planning.plan import PlanOptions, Wishes
from hf_vit.conversion.planning.planner import make_plan
from hf_vit.conversion.progress import without_transformers_bars
from hf_vit.conversion.readers.json import read_json
from hf_vit.conversion.readers.opening import CONFIG, open_checkpoint
from hf_vit.errors import UserError
from hf_vit.families import family_of


def from_hub(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Unpack[PlanOptions],
) -> PreTrainedModel:
    """Load a vision transformer of any origin as a model of this package, with identical results.

    The class follows from the weights: a classifier where there is a head, otherwise the bare model. Nothing is
    written but the Hub's cache. `image_processor_from_hub` gives the pixels that belong to it.

    Args:
        source: `owner/name` on the Hub, a folder that transformers, timm or this package saved, or anything else that
            `hf-vit convert` reads.
        revision: branch, tag or commit of the Hub's repository.
        dtype: of the model's parameters.
        options: what is declared of the source and wanted of the model; see `planning.plan.Wishes`.

    Raises:
        UserError: the source cannot be had or read, or is no model that can be expressed here.
    """
    wishes, checkpoint = Wishes(**options), _fetched(source, revision)
    model_class = _class_of_this_package(checkpoint)
    if model_class is not None:
        if wishes != Wishes():
            name = model_class.__name__
            raise UserError(f"{checkpoint.name} is a model of hf_vit already; load it with {name}.from_pretrained")
        return model_class.from_pretrained(checkpoint.path, dtype=dtype).eval()
    with open_checkpoint(checkpoint.path) as reader, without_transformers_bars():
        plan = make_plan(reader.shapes, wishes, reader.companions, checkpoint.name)
        return build_model(plan, load_weights(reader, plan, dtype).state)


def image_processor_from_hub(source: str | Path, *, revision: str | None = None) -> Any:
    """The `ViTImageProcessor` that makes the pixels a source was trained on; see `from_hub`."""
    checkpoint = _fetched(source, revision)
    if _class_of_this_package(checkpoint) is not None:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(checkpoint.path)
    with open_checkpoint(checkpoint.path) as reader:
        return build_processor(make_plan(reader.shapes, Wishes(), reader.companions, checkpoint.name))


def _fetched(source: str | Path, revision: str | None) -> LocalCheckpoint:
    if is_local(source) or "://" in str(source):
        if revision is not None:
            raise UserError(f"revision {revision!r} belongs to a repository of the Hub, and {source} is none")
        return fetch(source)
    if not HUB_ID.fullmatch(str(source)):
        raise UserError(f"there is no file or folder {source}; give a path, or owner/name of a model on the Hub")
    return fetch(f"hf://{source}@{revision}" if revision else f"hf://{source}")


def _class_of_this_package(checkpoint: LocalCheckpoint) -> type[PreTrainedModel] | None:
    """The class of this package that a folder was saved by, or None."""
    if not (checkpoint.path / CONFIG).is_file():
        return None
    config = read_json(checkpoint.path / CONFIG)
    family = family_of(config.get("model_type"))
    if family is None:
        return None
    names: object = config.get("architectures")
    door = family.door_of(names[0]) if isinstance(names, list) and names else None
    if door is None:
        raise UserError(f"config.json of {checkpoint.name} names no class of hf_vit (architectures: {names})")
    return family.classes[door]
