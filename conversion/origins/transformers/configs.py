"""What config.json and preprocessor_config.json of transformers say, whatever the class."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from hf_vit.conversion.labels import names_of
from hf_vit.conversion.origins.beside import Count, Number, Text, checked, pair_of
from hf_vit.conversion.origins.origin import Declared
from hf_vit.conversion.origins.preprocessing import IMAGENET_MEAN, IMAGENET_STD, from_transformers
from hf_vit.conversion.readers.checkpoint import Companions
from hf_vit.conversion.sizes import Pair, square_or_pair
from hf_vit.errors import UserError


class TransformersConfig(BaseModel):
    """What is read of a config.json; null where the weights or the class's default tell, which has no null."""

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


class Classes(BaseModel):
    """The names of the classes in a config.json."""

    id2label: dict[str, Text] | None = None


# Field of their config -> field here.
CARRIED = {
    **{
        name: name
        for name in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
            *("layer_norm_eps", "num_channels", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob"),
            *("initializer_range", "problem_type", "drop_path_rate", "num_register_tokens"),
        )
    },
    "attention_dropout": "attention_probs_dropout_prob",
    "layerscale_value": "layer_scale_init_value",
}
# What a config.json leaves out is what its class defaults to.
_VIT: dict[str, Any] = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224}
_DINOV2 = _VIT | {"layer_norm_eps": 1e-6, "layerscale_value": 1.0}
DEFAULTS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("vit", "vit_mae", "deit", "vit-hybrid"), _VIT),
    "vit_msn": _VIT | {"layer_norm_eps": 1e-6},
    "clip_vision_model": _VIT | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32},
    "siglip_vision_model": _VIT | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "patch_size": 16},
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"patch_size": 16, "num_register_tokens": 4},
}
# Of a model of two towers, whose config.json holds that of the image tower.
IMAGE_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}


def read_config(companions: Companions, model_types: tuple[str, ...]) -> Declared:
    """What lies beside the weights says; nothing, for a file that stands alone.

    Raises:
        UserError: the model is of another kind.
    """
    whole = companions.config
    if whole is None:
        return Declared()
    kind, config = whole.get("model_type"), whole
    if not isinstance(kind, str) or kind not in model_types:
        known = " or ".join(model_types)
        raise UserError(f"config.json says model_type {kind!r:.80}, but the keys are those of {known}")
    if kind in IMAGE_TOWERS:
        inner: object = whole.get("vision_config") or {}
        if not isinstance(inner, Mapping):
            raise UserError(f"config.json gives vision_config={inner!r:.80}; it needs the fields of the image tower")
        kind, config = IMAGE_TOWERS[kind], {str(name): value for name, value in inner.items()}
    given = checked(TransformersConfig, DEFAULTS[kind] | dict(config), "config.json").model_dump(exclude_none=True)
    fields = {ours: given[theirs] for theirs, ours in CARRIED.items() if theirs in given}
    if "patch_size" in given:
        fields["patch_size"] = square_or_pair(pair_of(given["patch_size"]))
    size = pair_of(given.get("image_size"))
    labels = labels_of(checked(Classes, whole, "config.json").id2label or {})
    return Declared(fields, size, labels, _processor(companions.processor, kind, size))


def _processor(processor: Mapping[str, Any] | None, kind: str, size: Pair) -> dict[str, Any] | None:
    """What the file says; without one, the steps of the released models of that kind."""
    if processor is not None:
        return from_transformers(processor)
    whole = {"height": size[0], "width": size[1]}
    if kind == "clip_vision_model":
        steps = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": min(size)}, "crop_size": whole}
    elif kind == "siglip_vision_model":
        steps = {"image_processor_type": "SiglipImageProcessor", "size": whole}
    elif kind in ("dinov2", "dinov2_with_registers"):
        colours = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
        steps = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}, **colours}
    else:
        return None
    return from_transformers(steps)


def labels_of(id2label: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names of the classes, where there are any but transformers' own LABEL_0, LABEL_1, ...

    Raises:
        UserError: a class of a lower number than another has no name.
    """
    names = [id2label.get(str(index)) for index in range(len(id2label))]
    if None in names:
        raise UserError(f"config.json gives id2label no name for class {names.index(None)}; get the file again")
    return None if names == [f"LABEL_{i}" for i in range(len(names))] else names_of(names)
