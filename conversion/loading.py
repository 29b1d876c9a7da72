"""What the name of a model stands for; and checkpoints of other codes, converted in memory (`hf_vit.from_hub`)."""

import logging
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, final

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.api import assumption
from hf_vit.conversion.fetching import HUB_ID, TIMM, LocalCheckpoint, fetch, is_local
from hf_vit.conversion.fill import build_model, build_processor, load_weights
from hf_vit.conversion.planning import Plan, PlanOptions, Wishes, make_plan
from hf_vit.conversion.progress import quiet_transformers
from hf_vit.errors import UserError
from hf_vit.families import DenseHead, Door, Family, dense_head_of, family_of, refuse_own_class
from hf_vit.models.configuration_hf_vit import HfBaseConfig
from hf_vit.repositories.reading import CONFIG, check_references, download_model, explain_load_errors, read_json_object
from hf_vit.variants import looks_like_variant, variant_config

_logger = logging.getLogger("hf_vit.conversion")
_AT_REVISION = re.compile(rf"(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>[\w./-]+))?")


@final
@dataclass(frozen=True)
class Source:
    """What the name of a model stands for; see `find_source`. Nothing is loaded yet."""

    name: str
    # File or folder; of a model of the Hub its folder in the cache; None for fresh weights, and for an address or a
    # name of timm, of which nothing is fetched yet.
    path: Path | None = None
    stored: dict[str, Any] = field(default_factory=dict[str, Any])  # config.json of the folder; {} without one
    is_on_hub: bool = False
    fresh: HfBaseConfig | None = None  # the configuration of a variant, whose weights are fresh

    @property
    def has_weights(self) -> bool:
        """Whether it is a checkpoint."""
        return self.fresh is None

    @property
    def folder(self) -> Path | None:
        """The user's own folder, if that is what the name stands for."""
        is_own = self.path is not None and self.path.is_dir() and not self.is_on_hub and not self.name.startswith(TIMM)
        return self.path if is_own else None

    @property
    def dense_head(self) -> DenseHead | None:
        """The head of a checkpoint of this package for masks or boxes."""
        return dense_head_of(self.stored.get("model_type"))

    @property
    def _fields(self) -> dict[str, Any]:
        inner: Any = self.stored if self.dense_head is None else self.stored.get("backbone_config")
        return inner if isinstance(inner, dict) else {}

    @property
    def family(self) -> Family | None:
        """The family of a checkpoint of this package, of one for masks or boxes its backbone's; None for all others."""
        return family_of(self._fields.get("model_type"))

    @property
    def model_class(self) -> type[PreTrainedModel] | None:
        """The class of this package that saved the folder; None for anything else.

        Raises:
            UserError: config.json names none of its family's.
        """
        if self.dense_head is not None:
            return self.dense_head.model_class
        if self.family is None:
            return None
        names: Any = self.stored.get("architectures")
        door = self.family.door_of(names[0]) if isinstance(names, list) and names else None
        if door is None:
            raise UserError(f"config.json of {self.name} names no class of hf_vit (architectures: {names})")
        return self.family.classes[door]

    @property
    def door(self) -> Door | None:
        """What the checkpoint's head does; None where that is not known, or there is no checkpoint."""
        if self.dense_head is not None:
            return "backbone"
        if self.fresh is None and self.family is None:
            return "classification" if self.plan.has_head else "model"
        family = family_of(self.config.model_type)
        return None if family is None else family.door_of((self.config.architectures or [""])[0])

    @cached_property
    def config(self) -> HfBaseConfig:
        """The configuration of its family, or of what it becomes; of a checkpoint for masks or boxes its backbone's.

        Raises:
            UserError: it is not valid, or the checkpoint does not convert.
        """
        if self.fresh is not None:
            return self.fresh
        if self.family is None:
            return self.plan.config
        with explain_load_errors(self.name):
            config = self.family.config_class.from_dict(self._fields)
            config.to_dict()  # whoever saves it asks for it
        return config

    @cached_property
    def checkpoint(self) -> LocalCheckpoint:
        """The checkpoint at hand, fetched where it is not; raises as `fetch`."""
        if self.is_on_hub:
            assert self.path is not None
            return LocalCheckpoint(self.path, f"hf://{self.name}")
        return fetch(self.name if self.path is None or self.name.startswith(TIMM) else self.path)

    @cached_property
    def plan(self) -> Plan:
        """How a checkpoint of another code converts, as `hf-vit convert` plans it; logged in a line of level INFO.

        Raises:
            UserError: it cannot be fetched, or does not convert.
        """
        try:
            plan = _plan(self.checkpoint, Wishes())
        except UserError as error:
            hint = "; hf-vit convert takes these options" if " --" in str(error) else ""
            raise UserError(f"{error}{hint}") from error
        _tell(self.checkpoint.name, plan)
        return plan

    def converted_state(self) -> dict[str, torch.Tensor]:
        """Return the parameters of a converted checkpoint in float32; raise a UserError where an array is damaged."""
        return _state(self.checkpoint, self.plan, torch.float32)

    def load(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return a model of this package with all its weights, in evaluation mode, converted where it is another's.

        Raises:
            UserError: the weights are damaged or incomplete.
        """
        model_class: Any = self.model_class
        if model_class is None:
            return _build(self.checkpoint, self.plan, dtype)
        with explain_load_errors(self.name), quiet_transformers():
            model, report = model_class.from_pretrained(self.path, dtype=dtype, output_loading_info=True)
        if missing := sorted(report["missing_keys"]):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(f"the weights of {self.name} lack {missing[0]}{more}; save the model again")
        return model.eval()

    def processor(self) -> Any:
        """Return the image processor that makes the pixels it was trained on."""
        if self.model_class is None:
            return build_processor(self.plan)
        from transformers import AutoImageProcessor

        with explain_load_errors(self.name):
            return AutoImageProcessor.from_pretrained(self.path, trust_remote_code=False)

    def need_config(self) -> None:
        """Raise a UserError for a folder without config.json, which says where one may be meant."""
        if self.path is not None and self.path.is_dir() and not (self.path / CONFIG).is_file():
            inside = sorted(str(config.parent) for config in self.path.glob(f"*/{CONFIG}"))
            hint = f"did you mean {inside[-1]}?" if inside else "give the folder of a saved model"
            raise UserError(f"{self.name} holds no model: there is no config.json in it; {hint}")


def find_source(name: str | os.PathLike[str], *, revision: str | None = None, with_variants: bool = False) -> Source:
    """Find out what the name of a model stands for; all commands do it here.

    A file or folder comes first, then an address or a name of timm, a variant ("S/16"), and a model of the Hub, whose
    config, processor and weights are fetched. Nothing is loaded, and no code of a checkpoint is run.

    Args:
        name: a path, an address, timm:NAME, timm:NAME@FILE, timm:FOLDER, owner/name or owner/name@REVISION.
        revision: branch, tag or commit of a model of the Hub.
        with_variants: take variants.

    Raises:
        UserError: there is no such model, or its files name other places, or code outside this package.
    """
    name = str(name)
    path, is_timm = Path(name.removeprefix(TIMM)).expanduser(), name.startswith(TIMM)
    is_here = is_local(path) and (not is_timm or (name != TIMM and path.is_dir()))
    is_fetched_later = is_timm or "://" in name
    if revision is not None and (is_here or is_fetched_later):
        raise UserError(f"revision {revision!r} needs a repository on the Hub, and {name} is a local path")
    if is_here:
        return _in_folder(name, path) if path.is_dir() else Source(name, path)
    if is_fetched_later:
        return Source(name)
    if with_variants and looks_like_variant(name):
        return Source(name, fresh=variant_config(name))
    match = _AT_REVISION.fullmatch(name)
    if match is None:
        raise UserError(f"there is no folder {name} and no such file; give a path, or owner/name of a model on the Hub")
    try:
        path = download_model(match["repo"], revision or match["revision"])
    except UserError as error:
        hint = " and no variant (S/16)" if with_variants else ""
        raise UserError(f"there is no folder {name}{hint}, and as a model of the Hub: {error}") from error
    return _in_folder(f"{name}@{revision}" if revision else name, path, is_on_hub=True)


def _in_folder(name: str, folder: Path, is_on_hub: bool = False) -> Source:
    check_references(folder, name)
    config = read_json_object(folder / CONFIG, name) if (folder / CONFIG).is_file() else {}
    refuse_own_class(config, name)
    return Source(name, folder, config, is_on_hub)


def open_model(name: str | Path) -> tuple[PreTrainedModel, Any]:
    """Return a model of this package, converted where it is another code's, and its processor; raise as `from_hub`."""
    source = find_source(name)
    return source.load(), source.processor()


def find_config(model: str | os.PathLike[str]) -> tuple[Any, Door]:
    """Return the configuration of a variant, a model or what a checkpoint becomes, and what its head does.

    Raises:
        UserError: there is no such model, its config.json is damaged, or it does not convert.
    """
    source = find_source(model, with_variants=True)
    source.need_config()
    if source.dense_head is not None:
        raise UserError(f"{source.name} has a head of dense prediction, whose FLOPs are not counted; give its backbone")
    if source.fresh is not None:
        return source.fresh, "classification"
    try:
        return source.config, source.door or "model"
    except UserError as error:
        if source.family is not None:
            raise
        kind = source.stored.get("model_type")
        raise UserError(
            f"FLOPs are counted for the families of hf_vit and what converts to them, and {source.name} "
            f"(model_type {kind!r:.80}) does not: {error}"
        ) from error


def _tell(name: str, plan: Plan) -> None:
    assumed = assumption(plan)
    more = "" if assumed is None else f"; {assumed}"
    _logger.info("%s is a checkpoint of %s, converted on the way%s", name, plan.origin, more)


def _plan(checkpoint: LocalCheckpoint, wishes: Wishes) -> Plan:
    with checkpoint.open() as reader:
        return make_plan(reader.shapes, wishes, reader.beside, checkpoint.name)


def _state(checkpoint: LocalCheckpoint, plan: Plan, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with checkpoint.open() as reader:
        return load_weights(reader, plan, dtype).state


def _build(checkpoint: LocalCheckpoint, plan: Plan, dtype: torch.dtype) -> PreTrainedModel:
    with quiet_transformers():
        return build_model(plan, _state(checkpoint, plan, dtype))


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
    wishes, found = Wishes(**options), find_source(source, revision=revision)
    if found.model_class is None:
        return _build(found.checkpoint, _plan(found.checkpoint, wishes), dtype)
    if wishes != Wishes():
        name = found.model_class.__name__
        raise UserError(f"{found.name} is a model of hf_vit already; load it with {name}.from_pretrained")
    return found.load(dtype)


def image_processor_from_hub(source: str | Path, *, revision: str | None = None) -> Any:
    """Return the `ViTImageProcessor` that makes the pixels a source was trained on; see `from_hub`."""
    found = find_source(source, revision=revision)
    if found.model_class is None:
        return build_processor(_plan(found.checkpoint, Wishes()))
    return found.processor()
