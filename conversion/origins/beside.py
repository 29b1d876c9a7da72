"""Read and validate the files beside weights: config.json, preprocessor_config.json, labels."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from hf_vit.conversion.origins.origin import Declared, Fields, Pair, shorten_pair
from hf_vit.conversion.readers import Companions
from hf_vit.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(gt=0, le=2**20)]  # px, channels, layers, ...
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
_Size = Count | dict[str, Count]

# Pillow's numbers of the filters, which transformers uses.
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
CLIP_PIXELS: Fields = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3}
IMAGENET_PIXELS = CLIP_PIXELS | {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
# Preprocessing of Google's code and of most others.
ORIGINAL_PIXELS = "pixels in [-1, 1], resized bilinearly"


def validate_values(model: type[Model], values: Mapping[str, Any], file_name: str) -> Model:
    """Validate the values that `model` names, without conversions ("4" is not a number)."""
    try:
        json_values = json.loads(json.dumps(dict(values), default=str))  # turns tuples of Python's configs into lists
        return model.model_validate(json_values, strict=True)
    except ValidationError as error:
        first_error = error.errors()[0]
        path = ".".join(str(part) for part in first_error["loc"][:3])
        raise UserError(
            f"{file_name} has {path}={first_error['input']!r:.80}, which is not valid: {first_error['msg']}; correct it"
        ) from error


def read_size(value: object) -> Pair:
    """Return (height, width) in px from one number or two; raise a UserError for anything else."""
    sides = tuple(value) if isinstance(value, list | tuple) else (value, value)
    counts = [side for side in sides if isinstance(side, int) and side is not True and 0 < side <= 2**20]
    if len(sides) != 2 or len(counts) != 2:
        raise UserError(f"config.json has the size {value!r:.80}; write one number of pixels, or height and width")
    return counts[0], counts[1]


def read_labels(path: str | Path) -> list[str]:
    """Read different class names in order, from a text file with one name per line or a JSON list of strings."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no label file {path}; give a text file with a class name per line, or a JSON list")
    try:
        text = path.read_text(encoding="utf-8-sig")
        names: object = json.loads(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines()]
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(
            f"{path.name} cannot be read as a label file: {error}; save it as UTF-8 text with one class name per line"
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path.name} is JSON, but not a list of class names; write a list such as ["cat", "dog"]')
    labels: list[str] = names
    if not labels or not all(label.strip() for label in labels):
        raise UserError(f"{path.name} holds {'an empty' if labels else 'no'} class name; write one name per line")
    repeated_labels = sorted(label for label, count in Counter(labels).items() if count > 1)
    if repeated_labels:
        raise UserError(
            f"{path.name} has {', '.join(repeated_labels[:3])} more than once; give every class a different name"
        )
    return labels


def read_class_names(names: object) -> tuple[str, ...] | None:
    """Return the names of a source's classes in order; None for anything but a list of names.

    A name may occur twice, like "crane" in ImageNet.
    """
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        return None
    labels: list[str] = names
    return tuple(labels)


class TransformersPixels(BaseModel):
    """The fields of preprocessor_config.json that `ViTImageProcessor` has too."""

    do_resize: bool | None = None
    size: _Size | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None
    do_center_crop: bool | None = None
    crop_size: _Size | None = None
    do_rescale: bool | None = None
    rescale_factor: Positive | None = None
    do_normalize: bool | None = None
    image_mean: list[Number] | None = None
    image_std: list[Positive] | None = None
    do_pad: bool | None = None
    max_num_patches: Count | None = None


_COMMON: Fields = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CROPPED: Fields = {"resample": 3, "do_center_crop": True}
_CLIP = {**_CROPPED, "size": {"shortest_edge": 224}, "crop_size": 224, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
# Kind of processor (class name without its suffix) -> its defaults.
_PROCESSORS: dict[str, Fields] = {
    "ViT": {**_COMMON, "size": 224, "resample": 2},
    "DeiT": {**_COMMON, **_CROPPED, "size": 256, "crop_size": 224},
    **dict.fromkeys(("ViTHybrid", "CLIP", "Bit"), _CLIP),  # all three have CLIP's constants
    "Siglip": {**_COMMON, "size": {"height": 224, "width": 224}, "resample": 3},
    "Siglip2": {**_COMMON, "resample": 2, "max_num_patches": 256},  # the size is the model's
    # DINOv3's does not round to whole pixel values after resizing, which moves them by at most 0.5/255.
    "DINOv3ViT": {**_COMMON, "size": 224, "resample": 2, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD},
}


def from_transformers(processor: Mapping[str, Any]) -> Fields:
    """Return the fields for `ViTImageProcessor` from a preprocessor_config.json of any version."""
    names = (processor.get(field) for field in ("image_processor_type", "feature_extractor_type"))
    class_name = next((name for name in names if name is not None), None)
    kind = "ViT" if class_name is None else str(class_name)
    for ending in ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor"):
        kind = kind.removesuffix(ending)
    if kind not in _PROCESSORS:
        raise UserError(
            f"preprocessor_config.json is for {class_name!s:.80}, which hf_vit does not support; change it to one of "
            + ", ".join(f"{name}ImageProcessor" for name in _PROCESSORS)
        )
    values = validate_values(TransformersPixels, processor, "preprocessor_config.json").model_dump(exclude_none=True)
    if values.pop("do_pad", False):
        raise UserError(
            "preprocessor_config.json has do_pad=true, but hf_vit's image processors do not pad; set it to false"
        )
    if not values and class_name is None:
        raise UserError(
            "preprocessor_config.json has no known field, such as image_mean; download the file again, or remove it"
        )
    fields = {**_PROCESSORS[kind], **values}
    # Older files give one number, which for some processors is the shorter side, for the others both sides.
    if isinstance(fields.get("size"), int) and kind in ("ViTHybrid", "CLIP", "Bit", "Siglip"):
        fields["size"] = {"shortest_edge": fields["size"]}
    for name in ("size", "crop_size"):
        if isinstance(fields.get(name), int):
            fields[name] = {"height": fields[name], "width": fields[name]}
    if not fields.get("do_center_crop"):
        fields.pop("crop_size", None)
    return fields


class TimmPixels(BaseModel):
    """The fields of timm's pretrained_cfg that affect pixels."""

    input_size: Annotated[list[Count], Field(min_length=3, max_length=3)] = [3, 224, 224]
    fixed_input_size: bool | None = None
    crop_mode: str | None = None
    crop_pct: Positive | None = None
    interpolation: str | None = None
    mean: Annotated[list[Number], Field(min_length=1)] | None = None
    std: Annotated[list[Positive], Field(min_length=1)] | None = None
    label_names: list[Text] | None = None


def from_timm(pretrained: Mapping[str, Any], arguments: Mapping[str, Any]) -> Fields:
    """Return the fields for `ViTImageProcessor` of timm's evaluation transform (timm/data/transforms_factory.py).

    The argument img_size of the model applies if the model takes no other size than that of its pretrained_cfg.
    """
    pixels = validate_values(TimmPixels, pretrained, "config.json")
    _, height, width = pixels.input_size
    takes_other_sizes = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
    if pixels.fixed_input_size and not takes_other_sizes and arguments.get("img_size") is not None:
        height, width = read_size(arguments["img_size"])
    mode, interpolation = pixels.crop_mode or "center", pixels.interpolation or "bicubic"
    crop = pixels.crop_pct or 0.875
    if mode not in ("center", "squash") or interpolation not in RESAMPLE or (mode == "center" and height != width):
        raise UserError(
            f"timm's preprocessing crop_mode='{mode:.80}', interpolation='{interpolation:.80}' for "
            f"{height}x{width} px has no equivalent in ViTImageProcessor; use the model with timm"
        )
    resized = {"height": math.floor(height / crop), "width": math.floor(width / crop)}
    return {
        "size": {"shortest_edge": resized["height"]} if mode == "center" else resized,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "resample": RESAMPLE[interpolation],
        "image_mean": pixels.mean or IMAGENET_MEAN,
        "image_std": pixels.std or IMAGENET_STD,
    }


class TransformersConfig(BaseModel):
    """The fields of transformers' config.json that are read; None: the weights or the class's default decide."""

    hidden_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count = 12
    intermediate_size: Count | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: Number = 1e-12
    num_channels: Count | None = None
    qkv_bias: bool | None = None
    hidden_dropout_prob: Number | None = None
    attention_probs_dropout_prob: Number | None = None
    initializer_range: Number | None = None
    problem_type: str | None = None
    drop_path_rate: Number | None = None
    num_register_tokens: Annotated[int, Field(ge=0, le=2**20)] | None = None
    attention_dropout: Number | None = None
    layerscale_value: Number | None = None
    image_size: object = 224
    patch_size: object = None
    id2label: dict[str, Text] | None = None


# Field of transformers' config -> field of hf_vit's.
_RENAMED = {"attention_dropout": "attention_probs_dropout_prob", "layerscale_value": "layer_scale_init_value"}
_READ_APART = ("image_size", "patch_size", "id2label")
FIELD_NAMES = {name: _RENAMED.get(name, name) for name in TransformersConfig.model_fields if name not in _READ_APART}
# Defaults of transformers' config classes, for fields that config.json leaves out.
_VIT: Fields = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224}
_SIGLIP = _VIT | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "patch_size": 16}
_DINOV2 = _VIT | {"layer_norm_eps": 1e-6, "layerscale_value": 1.0}
DEFAULTS: Mapping[str, Fields] = {
    **dict.fromkeys(("vit", "vit_mae", "deit", "vit-hybrid"), _VIT),
    "vit_msn": _VIT | {"layer_norm_eps": 1e-6},
    "clip_vision_model": _VIT | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32},
    **dict.fromkeys(("siglip_vision_model", "siglip2_vision_model"), _SIGLIP),
    "bit": {},
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"patch_size": 16, "num_register_tokens": 4},
    "ijepa": _VIT,
    "aimv2_vision_model": {"num_attention_heads": 8, "image_size": 224, "patch_size": 14},
    "dinov3_vit": _DINOV2
    | {"num_attention_heads": 6, "layer_norm_eps": 1e-5, "patch_size": 16, "num_register_tokens": 0},
}
# model_type of a model with two towers -> that of its image tower, whose config is inside.
IMAGE_TOWERS = {name: f"{name}_vision_model" for name in ("clip", "siglip", "siglip2", "aimv2")}


def read_config(companions: Companions, model_types: tuple[str, ...], ignored: Collection[str] = ()) -> Declared:
    """Return the facts in transformers' files, of one of these `model_types`; empty for a single weight file.

    `ignored` are fields that config.json has or defaults to, but that do not hold for the model.
    """
    config_file = companions.config
    if config_file is None:
        return Declared()
    file_type = config_file.get("model_type")
    if not isinstance(file_type, str) or file_type not in model_types:
        raise UserError(
            f"config.json has model_type {file_type!r:.80}, but the weights have the keys of "
            f"{' or '.join(model_types)}; give the config.json that belongs to these weights"
        )
    config = _select_tower_config(config_file) if file_type in IMAGE_TOWERS else config_file
    model_type = IMAGE_TOWERS.get(file_type, file_type)
    head = {name: config_file.get(name) for name in ("problem_type", "id2label")}  # the tower has no head
    head["problem_type"] = head["problem_type"] or config.get("problem_type")
    validated = validate_values(TransformersConfig, DEFAULTS[model_type] | dict(config) | head, "config.json")
    values = validated.model_dump(exclude_none=True)
    fields = {ours: values[name] for name, ours in FIELD_NAMES.items() if name in values and ours not in ignored}
    if "patch_size" in values:
        fields["patch_size"] = shorten_pair(read_size(values["patch_size"]))
    size = read_size(values.get("image_size"))
    labels = _read_config_labels(validated.id2label or {})
    processor = companions.processor
    if processor is None and values.get("num_channels", 3) == 3:  # released models take colors
        processor = _assume_processor(model_type, size)
    return Declared(fields, size, labels, None if processor is None else from_transformers(processor))


def _select_tower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image tower's part of the config of a model with two towers."""
    tower_config: object = config.get("vision_config") or {}
    if not isinstance(tower_config, Mapping):
        raise UserError(
            f"config.json has vision_config={tower_config!r:.80}, but an object with the vision model's "
            "fields is needed; download the file again"
        )
    return {str(name): value for name, value in tower_config.items()}


def _read_config_labels(id2label: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of the classes in their order; None for transformers' default names or for none."""
    class_names = [id2label.get(str(index)) for index in range(len(id2label))]
    if None in class_names:
        raise UserError(
            f"config.json has no name for class {class_names.index(None)} in id2label; add it, or download it again"
        )
    default_names = [f"LABEL_{i}" for i in range(len(class_names))]
    return None if class_names == default_names else read_class_names(class_names)


def _assume_processor(model_type: str, size: Pair) -> Fields | None:
    """Return the fields of released models' preprocessor_config.json for (height, width); None if they have none."""
    whole_image = {"height": size[0], "width": size[1]}
    enlarged = {side: 256 * length // 224 for side, length in whole_image.items()}
    shortest, colors = {"shortest_edge": min(size)}, {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
    processors: dict[str, Fields] = {
        "clip": {"image_processor_type": "CLIPImageProcessor", "size": shortest, "crop_size": whole_image},
        "siglip": {"image_processor_type": "SiglipImageProcessor", "size": whole_image},
        "siglip2": {"image_processor_type": "Siglip2ImageProcessor"},
        "dinov2": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}, **colors},
        "aimv2": {"image_processor_type": "CLIPImageProcessor", "size": shortest, "crop_size": whole_image},
        "dinov3_vit": {"image_processor_type": "DINOv3ViTImageProcessor"},
        "deit": {"image_processor_type": "DeiTImageProcessor", "size": enlarged, "crop_size": whole_image, **colors},
        **{name: {"size": whole_image, **colors} for name in ("vit_mae", "vit_msn", "ijepa")},
    }
    return processors.get(re.sub(r"_vision_model|_with_registers", "", model_type))
