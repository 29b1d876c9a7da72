"""Models of other libraries, converted in memory: `hf_vit.from_hub("google/vit-base-patch16-224")`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.account import assumption
from hf_vit.conversion.building.model import build_model, build_processor
from hf_vit.conversion.building.weights import load_weights
from hf_vit.conversion.fetch.addresses import HUB_ID, TIMM, LocalCheckpoint, fetch, is_local
from hf_vit.conversion.planning.plan import Plan, PlanOptions, Wishes
from hf_vit.conversion.planning.planner import make_plan
from hf_vit.conversion.progress import without_transformers_bars, without_transformers_report
from hf_vit.conversion.readers.json import read_json
from hf_vit.conversion.readers.opening import CONFIG
from hf_vit.errors import UserError
from hf_vit.families import Door, dense_head_of, family_of, refuse_own_class
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.repositories.reading import check_folder, loading

_logger = logging.getLogger("hf_vit.conversion")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another code that is at hand and can be converted; its weights are not read yet.

    Attributes:
        checkpoint: where it is, and what it is called.
        plan: what its conversion does.
    """

    checkpoint: LocalCheckpoint
    plan: Plan

    def state(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """The parameters of the converted model.

        Raises:
            UserError: an array is damaged.
        """
        with self.checkpoint.open() as reader:
            return load_weights(reader, self.plan, dtype).state

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The converted model, in evaluation mode; raises as `state`."""
        with without_transformers_bars():
            return build_model(self.plan, self.state(dtype))

    def processor(self) -> Any:
        """The `ViTImageProcessor` that makes the pixels it was trained on."""
        return build_processor(self.plan)


def convert_on_the_way(source: str | Path) -> ForeignCheckpoint:
    """What a name stands for, planned as `hf-vit convert` does; that is told in one line (logging, level INFO).

    The one door for whatever takes a model and has got a checkpoint of another code.

    Args:
        source: whatever `hf-vit convert` reads, or owner/name of a model on the Hub.

    Raises:
        UserError: it cannot be had, or is nothing that converts.
    """
    try:
        converted = _planned(_fetched(source, None), Wishes())
    except UserError as error:
        hint = "; hf-vit convert takes these options" if " --" in str(error) else ""
        raise UserError(f"{error}{hint}") from error
    _tell(converted)
    return converted


def open_model(source: str | Path) -> tuple[PreTrainedModel, Any]:
    """A model of this package, converted on the way where it is another code's, and its image processor.

    Raises:
        UserError: as `from_hub`.
    """
    if _class_of_this_package(_fetched(source, None)) is not None:
        return from_hub(source), image_processor_from_hub(source)
    converted = convert_on_the_way(source)
    return converted.model(), converted.processor()


def config_of(source: str | Path) -> tuple[HfBaseConfig, Door]:
    """The configuration of a model of this package, or of what its checkpoint becomes, and what its head does.

    Raises:
        UserError: as `from_hub`.
    """
    checkpoint = _fetched(source, None)
    model_class = _class_of_this_package(checkpoint)
    if model_class is None:
        plan = convert_on_the_way(source).plan
        return plan.config, "classification" if plan.has_head else "model"
    family = family_of(read_json(checkpoint.path / CONFIG)["model_type"])
    if family is None:
        raise UserError(f"{checkpoint.name} has a head of dense prediction, which is not counted; give its backbone's")
    with loading(checkpoint.name):
        config: Any = family.config_class.from_pretrained(checkpoint.path)
    return config, family.door_of(model_class.__name__) or "model"


def _tell(converted: ForeignCheckpoint) -> None:
    assumed, name = assumption(converted.plan), converted.checkpoint.name
    more = "" if assumed is None else f"; {assumed}"
    _logger.info("%s is a checkpoint of %s, converted on the way%s", name, converted.plan.origin, more)


def _planned(checkpoint: LocalCheckpoint, wishes: Wishes) -> ForeignCheckpoint:
    with checkpoint.open() as reader:
        return ForeignCheckpoint(checkpoint, make_plan(reader.shapes, wishes, reader.companions, checkpoint.name))


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
        with loading(checkpoint.name), without_transformers_report():
            loaded: Any = model_class.from_pretrained(checkpoint.path, dtype=dtype, output_loading_info=True)
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"the weights of {checkpoint.name} lack {missing[0]}{more}; save the model again")
        return model.eval()
    return _planned(checkpoint, wishes).model(dtype)


def image_processor_from_hub(source: str | Path, *, revision: str | None = None) -> Any:
    """The `ViTImageProcessor` that makes the pixels a source was trained on; see `from_hub`."""
    checkpoint = _fetched(source, revision)
    if _class_of_this_package(checkpoint) is not None:
        from transformers import AutoImageProcessor

        with loading(checkpoint.name):
            return AutoImageProcessor.from_pretrained(checkpoint.path, trust_remote_code=False)
    return _planned(checkpoint, Wishes()).processor()


def _fetched(source: str | Path, revision: str | None) -> LocalCheckpoint:
    if is_local(source) or "://" in str(source) or str(source).startswith(TIMM):
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
    check_folder(checkpoint.path, checkpoint.name)
    config = read_json(checkpoint.path / CONFIG)
    refuse_own_class(config, checkpoint.name)
    kind: object = config.get("model_type")
    if (head := dense_head_of(kind)) is not None:
        return head.model_class
    family = family_of(kind) if isinstance(kind, str) else None
    if family is None:
        return None
    names: object = config.get("architectures")
    door = family.door_of(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    if door is None:
        raise UserError(f"config.json of {checkpoint.name} names no class of hf_vit (architectures: {names})")
    return family.classes[door]
