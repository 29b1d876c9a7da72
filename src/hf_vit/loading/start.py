"""Build the initial model of a training: a named variant with fresh weights, or a checkpoint with a new head."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, ViTImageProcessor

from hf_vit.conversion.loading import Source, find_source
from hf_vit.conversion.progress import quiet_transformers
from hf_vit.data.labels import normalize_name
from hf_vit.data.transforms import get_pixel_scale, make_processor
from hf_vit.display import shorten_list
from hf_vit.errors import UserError, get_strict_reason
from hf_vit.families import AUTO_CLASSES, Door, find_family, get_problem_type, refuse_diverged
from hf_vit.loading.graphs import find_graph
from hf_vit.models.configuration_hf_vit import HfBaseConfig, as_pair
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit.repositories.reading import COUNTER, explain_load_errors, refuse_unread_weights

_HEADS = ("classifier", "distillation_classifier")
_POOLER = ("vit.pooler.", "pooler.")
WITHOUT_POOLER: tuple[Door, ...] = ("masked_prediction", "backbone")  # doors whose checkpoints have none
# Prefixes of parameters that are initialized for a door (kind of model) even if a checkpoint is loaded.
_NEW: Mapping[Door, tuple[str, ...]] = {
    "model": (),
    "backbone": ("pyramid.",),
    "masked_prediction": ("prediction_head.", "vit.embeddings.mask_token"),
}


def find_model(name: str | HfBaseConfig) -> Source:
    """Return the initial model of a training by name, see `find_source`; a configuration stands for fresh weights.

    A checkpoint of another library will be converted.
    """
    if not isinstance(name, str | HfBaseConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            f"the model is a {type(name).__name__}; give a folder (save_pretrained writes one), a Hub id, a variant "
            "such as S/16, or a configuration of hf_vit"
        )
    if not isinstance(name, str):
        family = type(name).__name__.removeprefix("Hf").removesuffix("Config")
        parts = "layers" if hasattr(name, "num_hidden_layers") else "stages"  # ResNets have stages
        return Source(f"{family} of {name.num_stages} {parts}, {name.hidden_size} wide", fresh=name)
    if find_graph(name) is not None:
        raise UserError(f"{name} is an exported graph, which cannot be trained; give the original model")
    source = find_source(name, with_variants=True)
    source.require_config()
    try:
        _ = source.config  # plans the conversion
    except UserError as error:
        if source.family is not None:
            raise
        kind = source.stored.get("model_type") or "unknown"
        is_folder = source.path is not None and source.path.is_dir()
        description = f", a checkpoint of another architecture ('{kind}')," if is_folder else ""
        raise UserError(
            f"{name}{description} cannot be converted to hf_vit: {error}; give another checkpoint, or start from a "
            "variant such as S/16"
        ) from error
    return source


def load_dense_model(source: Source) -> PreTrainedModel:
    """Load a segmentation or detection model in float32."""
    assert source.dense_head is not None
    with explain_load_errors(source.name):
        auto_class: Any = getattr(transformers, source.dense_head.auto_class)
        return auto_class.from_pretrained(source.path, dtype=torch.float32)


def build_classifier(
    source: Source,
    label_names: Sequence[str],
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    new_head: bool = False,
    head_bias: float = 0.0,
    **fields: Any,
) -> PreTrainedModel:
    """Build a classifier in float32.

    A checkpoint for the same classes keeps its head. Otherwise the head is new with zero weights, and a representation
    layer before it is removed (arXiv 2010.11929, section 3.2). Position embeddings are resampled to `image_size`.

    Args:
        source: from `find_model`.
        label_names: the classes, in the order of their numbers.
        image_size: (height, width) px; None keeps the source's size.
        dropout, drop_path: rates; None keeps the source's rates.
        new_head: replace the head even if the checkpoint has the same classes.
        head_bias: initial value of a new head's bias.
        **fields: fields of the configuration that replace the source's.

    Raises:
        UserError: a value does not fit the model, the family has no such head, or the weights do not fit.
    """
    rows = None if new_head else match_head_rows(source, label_names)
    changes: dict[str, Any] = {
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: index for index, name in enumerate(label_names)},
        "problem_type": None,
    }
    if rows is None and hasattr(source.config, "representation_size"):
        changes["representation_size"] = None
    changes |= fields | _make_rate_fields(source, dropout, drop_path)
    new_heads = _HEADS
    if rows is not None:  # a distillation token may be new in a checkpoint whose head is kept
        new_heads = () if getattr(source.config, "has_distillation_head", False) else _HEADS[1:]
    model = _build(source, "classification", changes, image_size, new=new_heads)
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            with torch.no_grad():
                if rows is None or name in new_heads:
                    nn.init.zeros_(head.weight)
                    nn.init.constant_(head.bias, head_bias)
                else:
                    head.weight.copy_(head.weight[rows])
                    head.bias.copy_(head.bias[rows])
    return model


def match_head_rows(source: Source, label_names: Sequence[str]) -> list[int] | None:
    """Return the row of every class in the checkpoint's head, or None if the head has other classes."""
    if source.door != "classification" or get_problem_type(source.config) == "regression":
        return None
    labels = cast(dict[int, str], source.config.id2label)
    names = [normalize_name(str(labels[row])) for row in sorted(labels)]
    wanted_names = list(map(normalize_name, label_names))
    if names == wanted_names:  # a name may occur twice
        return list(range(len(names)))
    rows = {name: row for row, name in enumerate(names)}
    return [rows[name] for name in wanted_names] if sorted(rows) == sorted(wanted_names) else None


def build_model(
    source: Source,
    door: Door,
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Build a bare model, a backbone or a patch predictor in float32; `fields` replace fields of the configuration.

    The pyramid of a backbone and the head of a patch predictor are new.
    """
    # A classifier's classes are left out with its head.
    changes: dict[str, Any] = dict.fromkeys(("id2label", "label2id", "problem_type"))
    changes |= fields | _make_rate_fields(source, dropout, drop_path)
    return _build(source, door, changes, image_size, new=_NEW[door])


def find_dense_head(name: str | HfBaseConfig, task: str) -> str | None:
    """Return the head's name if a checkpoint has a head for this task; None for everything else.

    A name that cannot be found gives None too: settings are checked before the model is looked for again.
    """
    try:
        head = find_source(name, with_variants=True).dense_head if isinstance(name, str) else None
    except UserError:
        return None
    return head.name if head is not None and head.task == task else None


def find_backbone(model: nn.Module) -> HfBaseBackbone:
    """Return the backbone of a segmentation or detection model."""
    (backbone,) = (module for module in model.modules() if isinstance(module, HfBaseBackbone))
    return backbone


def _make_rate_fields(source: Source, dropout: float | None, drop_path: float | None) -> dict[str, float]:
    """Return the given rates as fields of the configuration; raise UserError if a family cannot have one above 0."""
    fields: dict[str, float] = {}
    unsupported: list[str] = []
    for field, name, rate in (("hidden_dropout_prob", "dropout", dropout), ("drop_path_rate", "drop path", drop_path)):
        if rate is not None and hasattr(source.config, field):
            fields[field] = rate
        elif rate:
            unsupported.append(name)
    if unsupported:
        raise UserError(f"{source.name} has no {' and '.join(unsupported)}; set it to 0, or choose a recipe without it")
    return fields


def _build(
    source: Source, door: Door, changes: dict[str, Any], image_size: tuple[int, int] | None, new: tuple[str, ...]
) -> PreTrainedModel:
    """Build a variant with fresh weights, or load a checkpoint and initialize only parameters with a prefix in `new`.

    `changes` are fields of the configuration that replace the source's.
    """
    family = find_family(source.config.model_type)
    assert family is not None
    if door in family.not_applicable:
        raise UserError(f"{source.name} cannot be used for this task: {family.explain_missing_class(door)}")
    if missing := [name for name in changes if not hasattr(source.config, name)]:
        raise UserError(
            f"the recipe or an option sets {' and '.join(missing)} of the model, but {source.name} does not have this "
            "setting; leave the option out, or choose another --recipe or model"
        )
    sizes: dict[str, Any] = {}
    if image_size is not None:
        sizes = {"image_size": image_size[0] if image_size[0] == image_size[1] else image_size}
    try:
        fields = {**source.config.to_dict(), **changes, **({} if source.has_weights else sizes)}
        config = type(source.config).from_dict(fields)
        if not source.has_weights:
            return getattr(transformers, AUTO_CLASSES[door]).from_config(config, dtype=torch.float32)
        if image_size is not None:
            config.grid_of(*image_size)  # raises for an MLP-Mixer, which has a fixed size
        return _load(source, family.classes[door], config, sizes, new)
    except UserError:
        raise
    except (StrictDataclassError, ValueError) as error:  # the configuration may not allow this head
        reason = get_strict_reason(error) if isinstance(error, StrictDataclassError) else error
        raise UserError(f"{source.name} cannot be built with these settings: {reason}") from error


def choose_image_size(
    source: Source, requested: tuple[int, int] | None, recommended: tuple[int, int] | None
) -> tuple[tuple[int, int], list[str]]:
    """Return the image size (height, width) px of a training, and notes.

    It is the requested one, else the recipe's, rounded down to whole patches, else that of the checkpoint's image
    processor, to which its other users resize images, else that of the configuration.
    """
    stride = source.config.patch_stride
    nominal = as_pair(source.config.image_size)
    prepared = _find_prepared_size(source)
    size = as_pair(requested or recommended or prepared or nominal)
    notes: list[str] = []
    family = find_family(source.config.model_type)
    whole = (size[0] // stride[0] * stride[0], size[1] // stride[1] * stride[1])
    grid = (0, 0)
    if family is not None and family.is_vit and min(whole) > 0:
        grid = source.config.grid_of(*size)  # a stem fills up incomplete patches
    if any(0 < count * px < side for count, px, side in zip(grid, stride, size, strict=True)):
        if requested is None and size == recommended:
            notes.append(f"the recipe's images of {_px(size)} become {_px(whole)}, whole patches of {_px(stride)}")
            size = whole
        else:
            notes.append(
                f"images of {_px(size)} do not divide into whole patches of {_px(stride)}, so the model ignores the "
                f"rest; --image-size {whole[0]}x{whole[1]} fits"
            )
    if requested is None and recommended is None and prepared not in (None, nominal):
        notes.append(
            f"{source.name} is trained at the {_px(prepared)} of its image processor; its config says {_px(nominal)}, "
            f"which --image-size {nominal[0]}x{nominal[1]} gives"
        )
    return size, notes


def get_least_size(source: Source) -> tuple[int, int]:
    """Return the (height, width) px that images need: those of a patch, or 1 px for a ResNet, which has none."""
    family = find_family(source.config.model_type)
    return source.config.patch_stride if family is None or family.has_tokens else (1, 1)


def _find_prepared_size(source: Source) -> tuple[int, int] | None:
    """Return the (height, width) px to which the image processor of a checkpoint prepares images, if it is fixed."""
    if not source.has_weights or source.path is None or not source.path.is_dir():
        return None
    try:
        stored: dict[str, Any] = ViTImageProcessor.get_image_processor_dict(source.path)[0]
    except (OSError, ValueError):
        return None
    if stored.get("max_num_patches") is not None or stored.get("do_resize") is False:
        return None
    size = stored.get("crop_size") if stored.get("do_center_crop") else stored.get("size")
    height, width = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    return (height, width) if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0 else None


def _px(size: Any) -> str:
    return f"{size[0]}x{size[1]} px"


def build_processor(source: Source, config: PreTrainedConfig, own_shapes: bool = False) -> ViTImageProcessor:
    """Build the image processor of a model, at the model's size; with `own_shapes` for images in their own shape too.

    It scales pixels as the checkpoint's image processor does, or as the config of a variant says. Steps that the
    checkpoint's processor skips, and a factor other than 1/255, become part of mean and standard deviation.
    """
    if not source.has_weights:
        return make_processor(config)
    with explain_load_errors(source.name):
        if source.family is None:
            stored_settings = source.processor().to_dict()
        else:
            try:
                stored_settings = ViTImageProcessor.get_image_processor_dict(cast(Path, source.path))[0]
            except OSError:
                problem = "has no preprocessor_config.json, so pixels are normalized as its config says"
                remedy = "save the image processor beside the weights if they were trained on other pixels"
                logging.getLogger("hf_vit.conversion").warning("%s %s; %s", source.name, problem, remedy)
                return make_processor(config)
        # Only these fields scale pixels; the others (size, crop) do not fit the new model.
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
        stored_scaling = {name: stored_settings[name] for name in names if stored_settings.get(name) is not None}
        scaling = ViTImageProcessor(**stored_scaling)
        factor, means, stds = get_pixel_scale(scaling, config.num_channels)
        settings: dict[str, Any] = {
            "image_mean": [mean / (255 * factor) for mean in means],
            "image_std": [std / (255 * factor) for std in stds],
            "resample": scaling.resample,
        }
        if own_shapes and stored_settings.get("max_num_patches") is not None:
            settings["max_num_patches"] = stored_settings["max_num_patches"]
        processor = make_processor(config, **settings)
        processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")  # raises now if a value cannot be used
    return processor


def _load(
    source: Source, model_class: Any, config: HfBaseConfig, sizes: Mapping[str, Any], new: tuple[str, ...]
) -> PreTrainedModel:
    """Load the weights of a checkpoint; raise UserError if others than those with a prefix in `new` are missing."""
    state = source.load_converted_state() if source.family is None else None
    if source.dense_head is not None:
        state = find_backbone(load_dense_model(source)).state_dict()
    weights: dict[str, Any] = {} if state is None else {"state_dict": state}
    # transformers would report the head that is replaced on purpose; all other misfits raise an error below.
    with quiet_transformers(), explain_load_errors(source.name):
        model, report = model_class.from_pretrained(
            source.path if state is None else None,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **weights,
            **sizes,
        )
    refuse_diverged(model, source.name, "trained")
    if unread := report["unexpected_keys"]:  # those of the checkpoint's own config are left out on purpose
        with torch.device("meta"):
            own = cast(Any, find_family(config.model_type)).classes["model"](source.config).state_dict()
        prefix = f"{model.base_model_prefix}."
        refuse_unread_weights(model, [key for key in unread if key.removeprefix(prefix) not in own], source.name)
    allowed = (*new, *_POOLER) if source.door in WITHOUT_POOLER else new
    mismatched_keys = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    missing_keys = {key for key in report["missing_keys"] if not key.endswith(COUNTER)}
    misfits = sorted(key for key in {*missing_keys, *mismatched_keys} if not key.startswith(allowed))
    if misfits:
        keys = shorten_list(misfits, 3)
        raise UserError(
            f"the weights {keys} of {source.name} are missing or have other shapes; download the checkpoint "
            "again, or save it again with save_pretrained"
        )
    return model
