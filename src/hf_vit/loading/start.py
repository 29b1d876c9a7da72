"""Where a training starts from: a named variant with fresh weights, or a checkpoint whose head is replaced."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, ViTImageProcessor
from transformers.utils import logging as transformers_logging

from hf_vit.conversion.fetch.addresses import TIMM
from hf_vit.conversion.loading import ForeignCheckpoint, convert_on_the_way
from hf_vit.data.labels import plain_name
from hf_vit.errors import UserError, strict_reason
from hf_vit.families import AUTO_CLASSES, DenseHead, Door, dense_head_of, family_of, problem_type_of, refuse_own_class
from hf_vit.loading.graphs import graph_file
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit.repositories.reading import CONFIG, check_folder, loading, model_folder, read_object
from hf_vit.variants import looks_like_variant, variant_config

_HEADS = ("classifier", "distillation_classifier")
_POOLER = ("vit.pooler.", "pooler.")  # which checkpoints of patch prediction do not have
_COUNTED = "num_batches_tracked"  # by a batch norm, and by nobody used; DETRs' frozen ones do not
# What starts afresh behind a door.
_NEW: Mapping[Door, tuple[str, ...]] = {
    "model": (),
    "backbone": ("pyramid.",),
    "masked_prediction": ("prediction_head.", "vit.embeddings.mask_token"),
}


@dataclass(frozen=True)
class ModelSource:
    """What the name after `--model` stands for.

    Attributes:
        name: as given.
        config: of the variant or the checkpoint, before the data's classes are known.
        checkpoint: folder of a model of this package, to read weights from; of one on the Hub that in the cache.
        foreign: a checkpoint of another code, which is converted on the way. A variant has neither.
        dense: the head of a checkpoint for masks or boxes, whose backbone's `config` is.
    """

    name: str
    config: HfBaseConfig
    checkpoint: Path | None = None
    foreign: ForeignCheckpoint | None = None
    dense: DenseHead | None = None

    def dense_model(self) -> PreTrainedModel:
        """The model for masks or boxes, in float32."""
        assert self.dense is not None
        with loading(self.name):
            return getattr(transformers, self.dense.auto_class).from_pretrained(self.checkpoint, dtype=torch.float32)

    @property
    def has_weights(self) -> bool:
        """Whether it is a checkpoint; a variant starts with fresh weights."""
        return self.checkpoint is not None or self.foreign is not None

    @property
    def door(self) -> Door | None:
        """What the checkpoint's head does; None where that is not known, or there is no checkpoint."""
        if self.foreign is not None:
            return "classification" if self.foreign.plan.has_head else "model"
        if self.dense is not None:
            return "backbone"
        family = family_of(self.config.model_type)
        return None if family is None else family.door_of((self.config.architectures or [""])[0])


def find_model(name: str | HfBaseConfig) -> ModelSource:
    """Find out what a name stands for: an existing folder or file first, then a variant ("S/16"), then a Hub id.

    A configuration stands for fresh weights of its own. A checkpoint of another code is converted on the way.

    Raises:
        UserError: none of these, or a checkpoint that cannot be converted.
    """
    if not isinstance(name, str):
        family = type(name).__name__.removeprefix("Hf").removesuffix("Config")
        parts = "layers" if hasattr(name, "num_hidden_layers") else "stages"  # a ResNet's
        return ModelSource(f"{family} of {name.num_stages} {parts}, {name.hidden_size} wide", name)
    if graph_file(name) is not None:
        raise UserError(f"{name} is a graph, which does not learn; give the model that was exported")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{name} holds no model (no config.json); give the folder of a saved model, or a variant")
        return _of_checkpoint(path, name)
    if path.exists() or "://" in name or name.startswith(TIMM):
        return _of_foreign(name)
    if looks_like_variant(name):
        return ModelSource(name, variant_config(name))
    try:
        location = model_folder(name)
    except UserError as error:
        raise UserError(f"'{name}' is no folder and no variant (S/16), and as a model of the Hub: {error}") from error
    return _of_checkpoint(location, name)


def build_classifier(
    source: ModelSource,
    label_names: Sequence[str],
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    new_head: bool = False,
    head_bias: float = 0.0,
    **fields: Any,
) -> PreTrainedModel:
    """A classifier in float32: of a checkpoint for these very classes with its head, else with a new zero head.

    With a new head a representation layer before the old one is dropped (arXiv 2010.11929, section 3.2). Learned
    positions are resampled where `image_size` differs from the checkpoint's.

    Args:
        source: from `find_model`.
        label_names: the classes, in the order of their numbers.
        image_size: (height, width) in px; None keeps the source's.
        dropout, drop_path: rates; None keeps the source's.
        new_head: for the checkpoint's own classes, too.
        head_bias: first value of a new head's bias.
        **fields: of the configuration; they replace the source's.

    Raises:
        UserError: a value does not fit the model, the family has no such head, or the weights do not fit.
    """
    rows = None if new_head else rows_of_head(source, label_names)
    changes: dict[str, Any] = {
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: index for index, name in enumerate(label_names)},
        "problem_type": None,
        **({"representation_size": None} if rows is None and hasattr(source.config, "representation_size") else {}),
        **fields,
        **_rates(source, dropout, drop_path),
    }
    new = _HEADS if rows is None else () if getattr(source.config, "has_distillation_head", False) else _HEADS[1:]
    model = _build(source, "classification", changes, image_size, new=new)
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            _start_head(head, None if name in new else rows, head_bias)
    return model


def rows_of_head(source: ModelSource, label_names: Sequence[str]) -> list[int] | None:
    """For every one of these classes its row in the head of the checkpoint; None where that is for other classes."""
    if source.door != "classification" or problem_type_of(source.config) == "regression":
        return None
    labels = cast(dict[int, str], source.config.id2label)
    names = [plain_name(str(labels[row])) for row in sorted(labels)]
    wanted = list(map(plain_name, label_names))
    if names == wanted:  # in which a name may stand twice
        return list(range(len(names)))
    rows = {name: row for row, name in enumerate(names)}
    return [rows[name] for name in wanted] if sorted(rows) == sorted(wanted) else None


def _start_head(head: nn.Linear, rows: list[int] | None, bias: float) -> None:
    with torch.no_grad():
        if rows is None:
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, bias)
        else:
            head.weight.copy_(head.weight[rows])
            head.bias.copy_(head.bias[rows])


def build_model(
    source: ModelSource,
    door: Door,
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """A bare model, a backbone or a patch predictor in float32; `fields` of its configuration replace the source's.

    A backbone's pyramid and a patch predictor's head are new.

    Raises:
        UserError: a value does not fit the model, the family has no such class, or the weights do not fit.
    """
    return _build(source, door, fields | _rates(source, dropout, drop_path), image_size, new=_NEW[door])


def own_head(name: object, task: str) -> str | None:
    """The head of a checkpoint for this very task, which can be trained on; None for all others, and what is none."""
    path = Path(name).expanduser() if isinstance(name, str) else Path()
    if not (path / CONFIG).is_file() or not isinstance(name, str):
        return None
    head = dense_head_of(read_object(path / CONFIG, name).get("model_type"))
    return head.name if head is not None and head.task == task else None


def backbone_in(model: nn.Module) -> HfBaseBackbone:
    """That of a model for masks or boxes."""
    (inside,) = (module for module in model.modules() if isinstance(module, HfBaseBackbone))
    return inside


def _rates(source: ModelSource, dropout: float | None, drop_path: float | None) -> dict[str, float]:
    """The rates as fields of the configuration; 0 is what a family without them has.

    Raises:
        UserError: the family has no such rate.
    """
    given = {"hidden_dropout_prob": dropout, "drop_path_rate": drop_path}
    rates = {field: value for field, value in given.items() if value is not None}
    absent = [field for field in rates if not hasattr(source.config, field)]
    if wrong := [field for field in absent if rates[field]]:
        names = " and ".join(
            {"hidden_dropout_prob": "dropout", "drop_path_rate": "drop path"}[field] for field in wrong
        )
        raise UserError(f"{source.name} has no {names}; give 0, or a recipe without")
    return {field: value for field, value in rates.items() if field not in absent}


def _class_behind(door: Door, source: ModelSource) -> Any:
    """The class of the source's family.

    Raises:
        UserError: there is none.
    """
    family = family_of(source.config.model_type)
    assert family is not None
    if door in family.not_applicable:
        raise UserError(f"{source.name}: {family.why_not(door)}")
    return family.classes[door]


def _build(
    source: ModelSource,
    door: Door,
    changes: dict[str, Any],
    image_size: tuple[int, int] | None,
    new: tuple[str, ...],
) -> PreTrainedModel:
    """A variant with fresh weights or a checkpoint with its own, but for those whose names begin as in `new`."""
    side = None if image_size is None else image_size[0] if image_size[0] == image_size[1] else image_size
    model_class = _class_behind(door, source)
    try:
        if not source.has_weights:
            sizes = {} if side is None else {"image_size": side}
            config = type(source.config).from_dict({**source.config.to_dict(), **changes, **sizes})
            auto_class: Any = getattr(transformers, AUTO_CLASSES[door])
            return auto_class.from_config(config, dtype=torch.float32)
        config = type(source.config).from_dict({**source.config.to_dict(), **changes})
        if image_size is not None:
            config.grid_of(*image_size)  # an MLP-Mixer takes one size
        return _load(source, model_class, config, side, new)
    except StrictDataclassError as error:
        raise UserError(f"{source.name}: {strict_reason(error)}") from error
    except UserError:
        raise
    except ValueError as error:  # a head that the configuration cannot have
        raise UserError(f"{source.name}: {error}") from error


def build_processor(source: ModelSource, config: PreTrainedConfig) -> ViTImageProcessor:
    """The checkpoint's image processor at the model's size; the original's (pixels in [-1, 1]) for a variant.

    Steps that the checkpoint's leaves out, or a factor other than 1/255, become part of mean and standard deviation.
    """
    from hf_vit.data import make_processor
    from hf_vit.data.transforms import pixel_scale

    if not source.has_weights:
        return make_processor(config)
    with loading(source.name):
        if source.foreign is not None:
            stored = source.foreign.processor().to_dict()
        else:
            try:
                stored = ViTImageProcessor.get_image_processor_dict(cast(Path, source.checkpoint))[0]
            except OSError:
                return make_processor(config)
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
        known = ViTImageProcessor(**{name: stored[name] for name in names if stored.get(name) is not None})
        factor, *of_channels = pixel_scale(known, config.num_channels)
        mean, std = ([value / (255 * factor) for value in values] for values in of_channels)
        processor = make_processor(config, image_mean=mean, image_std=std, resample=known.resample)
        processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")
    return processor


def _of_checkpoint(folder: Path, name: str) -> ModelSource:
    """Of a folder, in the cache for a model of the Hub."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{name} holds no model (no config.json); give another, or a variant such as S/16")
    check_folder(folder, name)
    stored = read_object(folder / CONFIG, name)
    refuse_own_class(stored, name)
    kind = stored.get("model_type")
    dense = dense_head_of(kind)
    if dense is not None:
        stored = dict(stored.get("backbone_config") or {})
        kind = stored.get("model_type")
    family = family_of(kind) if isinstance(kind, str) else None
    if family is None:
        return _of_foreign(name, f", a checkpoint of another architecture ('{kind or 'unknown'}'),")
    with loading(name):
        return ModelSource(name, family.config_class.from_dict(stored), checkpoint=folder, dense=dense)


def _of_foreign(name: str, what: str = "") -> ModelSource:
    try:
        converted = convert_on_the_way(name)
    except UserError as error:
        raise UserError(
            f"{name}{what} cannot be converted to hf_vit on the way: {error}; give another, or start from a variant "
            "such as S/16"
        ) from error
    return ModelSource(name, converted.plan.config, foreign=converted)


def _load(
    source: ModelSource,
    model_class: Any,
    config: HfBaseConfig,
    image_size: int | tuple[int, int] | None,
    new: tuple[str, ...],
) -> PreTrainedModel:
    sizes = {} if image_size is None else {"image_size": image_size}
    state: dict[str, Any] = {}
    if source.foreign is not None:
        state = {"state_dict": source.foreign.state()}
    elif source.dense is not None:
        state = {"state_dict": backbone_in(source.dense_model()).state_dict()}
    verbosity = transformers_logging.get_verbosity()
    # Its report would tell of the head that is replaced on purpose; what else does not fit is raised below.
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with loading(source.name):
            model, report = model_class.from_pretrained(
                None if state else source.checkpoint,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **state,
                **sizes,
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if source.door == "masked_prediction":
        new = (*new, *_POOLER)
    mismatched = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    missing = {key for key in report["missing_keys"] if not key.endswith(_COUNTED)}
    wrong = sorted(key for key in {*missing, *mismatched} if not key.startswith(new))
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise UserError(f"the weights of {source.name} lack or do not fit {shown}; save the checkpoint again")
    return model
