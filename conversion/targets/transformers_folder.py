"""A folder for transformers: `ViTForImageClassification`, or `ViTModel` where there is no head."""

from importlib.metadata import version
from typing import Any

import torch

from .. import transformers_vit
from ..exporting import ANY, SIZES, Exported, Target, largest_difference, probe
from ..sizes import square_or_pair

_COPIED = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "layer_norm_eps", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("initializer_range", "problem_type"),
)


def _write(exported: Exported) -> None:
    import transformers

    ours = exported.config
    config = transformers.ViTConfig(
        **{name: getattr(ours, name) for name in _COPIED},
        image_size=_size(exported.nominal_size),
        patch_size=_size(ours.patch_stride),
        pooler_output_size=ours.representation_size or ours.hidden_size,
        pooler_act="tanh",
    )
    if exported.has_head:
        config.id2label, config.label2id = dict(ours.id2label), dict(ours.label2id)
        model: Any = transformers.ViTForImageClassification(config)
    else:
        model = transformers.ViTModel(config, add_pooling_layer=ours.representation_size is not None)
    prefix = f"{model.base_model_prefix}." if exported.has_head else ""
    bare = {key if key.startswith("classifier.") else prefix + key: value for key, value in exported.arrays.items()}
    model.load_state_dict(bare, strict=True)
    model.to(exported.model.dtype).save_pretrained(exported.folder)
    exported.processor.save_pretrained(exported.folder)


def _size(pair: tuple[int, int]) -> int | list[int]:
    size = square_or_pair(pair)
    return size if isinstance(size, int) else list(size)


@torch.no_grad()
def _compare(exported: Exported) -> tuple[float, str]:
    import transformers

    kind = transformers.ViTForImageClassification if exported.has_head else transformers.ViTModel
    options: dict[str, Any] = (
        {} if exported.has_head or exported.config.representation_size else {"add_pooling_layer": False}
    )
    model = kind.from_pretrained(exported.folder, **options).eval()
    images, ours = probe(exported)
    output = model(images)
    theirs = output.logits if exported.has_head else output.last_hidden_state
    difference = largest_difference(ours, theirs)
    if not exported.has_head and exported.config.representation_size:
        difference = max(difference, largest_difference(exported.model(images).pooler_output, output.pooler_output))
    return difference, f"transformers {version('transformers')}"


def _objections(config: Any, has_head: bool) -> list[str]:
    if has_head and config.representation_size is not None:
        return [f"representation_size={config.representation_size} before a classifier"]
    return []


TARGET = Target(
    name="transformers",
    title="transformers' ViT",
    write=_write,
    compare=_compare,
    tables={"hf_vit": transformers_vit.ORIGIN},
    expresses={
        **SIZES,
        **dict.fromkeys(("hidden_act", "layer_norm_eps", "qkv_bias", "representation_size"), ANY),
    },
    objections=_objections,
)
