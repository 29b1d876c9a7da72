"""Find the model that a name refers to, and convert checkpoints of other libraries in memory (`hf_vit.from_hub`)."""

import logging
import os
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, final

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.api import assumption
from hf_vit.conversion.fetching import HUB_ID, TIMM, LocalCheckpoint, fetch, is_local
from hf_vit.conversion.fill import build_model, build_processor, load_weights
from hf_vit.conversion.planning import Plan, PlanOptions, PlanSettings, make_plan
from hf_vit.conversion.progress import quiet_transformers
from hf_vit.conversion.readers import check_archive, name_in_errors
from hf_vit.errors import UserError
from hf_vit.families import DenseHead, Door, Family, find_family, find_head_type, get_first_class_name, refuse_own_class
from hf_vit.models.configuration_hf_vit import HfBaseConfig
from hf_vit.repositories.reading import (
    CONFIG,
    WEIGHTS,
    check_references,
    download_model,
    explain_load_errors,
    list_shards,
    read_json_object,
    refuse_unread_weights,
)
from hf_vit.variants import looks_like_variant, variant_config

_logger = logging.getLogger("hf_vit.conversion")
_AT_REVISION = re.compile(rf"(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>[\w./-]+))?")


@final
@dataclass(frozen=True)
class Source:
    """The model that a name refers to, not loaded yet; see `find_source`."""

    name: str
    # File or folder, or the cached folder of a Hub model; None for a variant, and for a URL or a name of timm, of which
    # nothing is downloaded yet.
    path: Path | None = None
    stored: dict[str, Any] = field(default_factory=dict[str, Any])  # content of the folder's config.json, or {}
    is_on_hub: bool = False
    fresh: HfBaseConfig | None = None  # the configuration of a variant, whose weights are initialized
    settings: PlanSettings | None = None  # options of a conversion; None where a command takes none

    @property
    def has_weights(self) -> bool:
        """Return whether it is a checkpoint, rather than a variant."""
        return self.fresh is None

    @property
    def folder(self) -> Path | None:
        """Return the user's local folder, if the name is one."""
        return None if self.is_on_hub or self.name.startswith(TIMM) else self.facts_folder

    @property
    def facts_folder(self) -> Path | None:
        """Return the folder in which its facts.json would be, for a Hub model in the Hub's cache."""
        return self.path if self.path is not None and self.path.is_dir() else None

    @property
    def dense_head(self) -> DenseHead | None:
        """Return the head of a checkpoint of this package for segmentation or detection."""
        return find_head_type(self.stored.get("model_type"))

    @property
    def _model_fields(self) -> dict[str, Any]:
        """Return the fields of the model's config, or of the backbone's for a dense prediction head."""
        fields: Any = self.stored if self.dense_head is None else self.stored.get("backbone_config")
        return fields if isinstance(fields, dict) else {}

    @property
    def family(self) -> Family | None:
        """Return the family of a checkpoint of this package, or of its backbone; None for all others."""
        return find_family(self._model_fields.get("model_type"))

    @property
    def model_class(self) -> type[PreTrainedModel] | None:
        """Return the class of this package that saved the folder; None for anything else."""
        if self.dense_head is not None:
            return self.dense_head.model_class
        if self.family is None:
            return None
        architectures: Any = self.stored.get("architectures")
        door = self.family.find_task(get_first_class_name(architectures))
        if door is None:
            raise UserError(
                f"config.json of {self.name} has architectures={architectures}, which is not a model class of hf_vit; "
                "give a folder that save_pretrained of an hf_vit model wrote"
            )
        return self.family.classes[door]

    @property
    def door(self) -> Door | None:
        """Return the task of the checkpoint's head; None if it is unknown or there is no checkpoint."""
        if self.dense_head is not None:
            return "backbone"
        if self.fresh is None and self.family is None:
            return "classification" if self.plan.has_head else "model"
        family = find_family(self.config.model_type)
        return None if family is None else family.find_task(get_first_class_name(self.config.architectures))

    @cached_property
    def config(self) -> HfBaseConfig:
        """Return the configuration of the model, of what it converts to, or of a dense prediction head's backbone."""
        if self.fresh is not None:
            return self.fresh
        if self.family is None:
            return self.plan.config
        with explain_load_errors(self.name):
            config = self.family.config_class.from_dict(self._model_fields)
            config.to_dict()  # raises now what saving would raise later
        return config

    @cached_property
    def checkpoint(self) -> LocalCheckpoint:
        """Return the local checkpoint, downloaded if necessary; raises the errors of `fetch`."""
        if self.is_on_hub:
            assert self.path is not None
            return LocalCheckpoint(self.path, f"hf://{self.name}")
        return fetch(self.name if self.path is None or self.name.startswith(TIMM) else self.path)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the conversion; logged in one line, at level WARNING if something is assumed."""
        settings = self.settings or PlanSettings()
        try:
            checkpoint = self.checkpoint
            with checkpoint.open() as reader:
                plan = make_plan(reader.shapes, settings, reader.readable_companions, checkpoint.name)
        except UserError as error:
            if self.settings is not None or " --" not in str(error):
                raise
            raise UserError(f"{error}; these are options of hf-vit convert") from error
        note = assumption(plan)
        text = f"{checkpoint.name} is a checkpoint of {plan.origin} and is converted in memory"
        _logger.log(logging.WARNING if note else logging.INFO, f"{text}; {note}" if note else text)
        return plan

    def load_converted_state(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Return the parameters of a converted checkpoint; raise a UserError if an array is damaged."""
        with self.checkpoint.open() as reader:
            return load_weights(reader, self.plan, dtype).state

    def load(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Load the model with all weights, in evaluation mode, and convert it if it is another library's."""
        model_class: Any = self.model_class
        if model_class is None:
            plan, state = self.plan, self.load_converted_state(dtype)
            with quiet_transformers():
                return build_model(plan, state)
        with explain_load_errors(self.name), quiet_transformers():
            model, report = model_class.from_pretrained(self.path, dtype=dtype, output_loading_info=True)
        refuse_unread_weights(model, report["unexpected_keys"], self.name)
        if missing := sorted(report["missing_keys"]):
            more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
            raise UserError(
                f"{self.name} lacks the weight '{missing[0]}'{more}; download the model again, or save it again "
                "with save_pretrained"
            )
        return model.eval()

    def processor(self) -> Any:
        """Return the image processor that makes the pixels that the model was trained on."""
        if self.model_class is None:
            return build_processor(self.plan)
        from transformers import AutoImageProcessor

        with explain_load_errors(self.name):
            return AutoImageProcessor.from_pretrained(self.path, trust_remote_code=False)

    def require_config(self) -> None:
        """Raise a UserError for a folder without config.json, and suggest a folder inside that has one."""
        if self.path is None or not self.path.is_dir() or (self.path / CONFIG).is_file():
            return
        hint = "give a folder that save_pretrained or hf-vit wrote"
        patterns = (f"*/{CONFIG}", f"checkpoints/checkpoint-*/{CONFIG}")  # of a model folder, and of an unfinished run
        if folders := [config.parent for pattern in patterns for config in self.path.glob(pattern)]:
            last = max(folders, key=lambda folder: (int("0" + re.sub(r"\D", "", folder.name)), folder.name))  # by step
            hint = f"did you mean {last}?"
        raise UserError(f"{self.name} is not the folder of a model, because it has no config.json; {hint}")


def find_source(name: str | os.PathLike[str], *, revision: str | None = None, with_variants: bool = False) -> Source:
    """Find the model that a name refers to; all commands use this function.

    A file or folder comes first, then a URL or a name of timm, a variant ("S/16"), and a model of the Hub, whose
    config, processor and weights are downloaded. Nothing is loaded, and no code of a checkpoint is run.

    Args:
        name: a path, a URL, timm:NAME, timm:NAME@FILE, timm:FOLDER, owner/name or owner/name@REVISION.
        revision: branch, tag or commit of a model on the Hub.
        with_variants: accept variants.

    Raises:
        UserError: there is no such model, or its files refer to other paths or to code outside this package.
    """
    if not isinstance(name, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            f"the model is a {type(name).__name__}; give a path, a Hub id or, to measure a model from Python, the pair "
            "(model, image processor)"
        )
    name = str(name)
    is_timm = name.startswith(TIMM)
    path = Path(name.removeprefix(TIMM)).expanduser()
    is_local_model = is_local(path)
    if is_timm:  # what follows may only be a folder; nothing would be the working folder
        is_local_model = is_local_model and name != TIMM and path.is_dir()
    is_downloaded_later = not is_local_model and (is_timm or "://" in name)
    if revision is not None and (is_local_model or is_downloaded_later):
        raise UserError(
            f"revision {revision!r} can only be used with a model on the Hub, but {name} is not one; leave revision out"
        )
    if is_local_model:
        return _open_source_folder(name, path) if path.is_dir() else Source(name, path)
    if is_downloaded_later:
        return Source(name)  # it is downloaded when the checkpoint is first read
    if with_variants and looks_like_variant(name):
        return Source(name, fresh=variant_config(name))
    match = _AT_REVISION.fullmatch(name)
    if match is None:
        raise UserError(f"there is no file or folder {name}; give a path, or owner/name of a model on the Hub")
    try:
        folder = download_model(match["repo"], revision or match["revision"])
    except UserError as error:
        variant = " or variant" if with_variants else ""
        raise UserError(f"there is no folder{variant} {name}, and it cannot be loaded from the Hub: {error}") from error
    return _open_source_folder(f"{name}@{revision}" if revision else name, folder, is_on_hub=True)


def _open_source_folder(name: str, folder: Path, is_on_hub: bool = False) -> Source:
    """Return the source for a folder, after checking its files and its class."""
    check_references(folder, name)
    single_files = [file for file in WEIGHTS if (folder / file).is_file()][:1]
    with name_in_errors(name):
        for file in list_shards(folder, name) or single_files:
            if file.endswith(".bin") and (folder / file).is_file():
                check_archive(folder / file)
    config = read_json_object(folder / CONFIG, name) if (folder / CONFIG).is_file() else {}
    refuse_own_class(config, name)
    return Source(name, folder, config, is_on_hub)


def open_model(name: str | Path) -> tuple[PreTrainedModel, Any]:
    """Load a model, converted if necessary, and its image processor; raises the errors of `from_hub`."""
    source = find_source(name)
    return source.load(), source.processor()


def find_config(model: str | os.PathLike[str]) -> tuple[Any, Door]:
    """Return the configuration and the task of a variant, of a model, or of what a checkpoint converts to."""
    source = find_source(model, with_variants=True)
    source.require_config()
    if source.dense_head is not None:
        raise UserError(
            f"{source.name} has a segmentation or detection head, and FLOPs are only counted for classifiers "
            "and bare models; give the model without its head"
        )
    if source.fresh is not None:
        return source.fresh, "classification"
    try:
        return source.config, source.door or "model"
    except UserError as error:
        if source.family is not None:
            raise
        kind = source.stored.get("model_type")
        raise UserError(
            f"FLOPs cannot be counted for {source.name} (model_type {kind!r:.80}), because it does not "
            f"convert to a model of hf_vit: {error}"
        ) from error


def from_hub(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Unpack[PlanOptions],
) -> PreTrainedModel:
    """Load a vision transformer of any supported library as a model of this package, with identical results.

    The class follows from the weights: a classifier if there is a head, otherwise the bare model. Nothing is written
    except the Hub's cache. `image_processor_from_hub` returns the matching image processor.

    Args:
        source: `owner/name` on the Hub, a folder that transformers, timm or this package saved, or anything else that
            `hf-vit convert` reads.
        revision: branch, tag or commit of the Hub's repository.
        dtype: dtype of the model's parameters.
        options: facts about the source and changes to the model; see `planning.PlanSettings`.

    Raises:
        UserError: the source cannot be downloaded or read, or no model of this package can express it.
    """
    settings = PlanSettings(**options)
    model_source = replace(find_source(source, revision=revision), settings=settings)
    if model_source.model_class is not None and settings != PlanSettings():
        name = model_source.model_class.__name__
        raise UserError(
            f"{model_source.name} is already an hf_vit model, so options of a conversion do not apply; load "
            f"it with {name}.from_pretrained"
        )
    return model_source.load(dtype)


def image_processor_from_hub(source: str | Path, *, revision: str | None = None, **options: Unpack[PlanOptions]) -> Any:
    """Return the `ViTImageProcessor` for the model that `from_hub` loads with the same options."""
    model_source = find_source(source, revision=revision)
    return replace(model_source, settings=PlanSettings(**options)).processor()
