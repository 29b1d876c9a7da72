"""A folder for transformers: its ViT or, with a distillation token, its DeiT; bare where there is no head."""

from importlib.metadata import version
from typing import Any

import torch

from hf_vit.conversion.exporting import ANY, SIZES, Exported, Target, has_head, largest_difference, probe
from hf_vit.conversion.origins import transformers_deit
from hf_vit.conversion.plan.planning import HEADS
from hf_vit.conversion.sizes import square_or_pair

_COPIED = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "layer_norm_eps", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("initializer_range", "problem_type"),
)


def _write(exported: Exported) -> None:
    ours = exported.config
    model_class = _model_class(ours, exported.has_head)
    config = model_class.config_class(
        **{name: getattr(ours, name) for name in _COPIED},
        image_size=_size(exported.nominal_size),
        patch_size=_size(ours.patch_stride),
        pooler_output_size=ours.representation_size or ours.hidden_size,
        pooler_act="tanh",
    )
    if exported.has_head:
        config.id2label, config.label2id = dict(ours.id2label), dict(ours.label2id)
    model = model_class(config, **_options(exported))
    model.load_state_dict(exported.arrays, strict=True)
    model.to(exported.model.dtype).save_pretrained(exported.folder)
    exported.processor.save_pretrained(exported.folder)


def _model_class(config: Any, has_head: bool) -> Any:
    import transformers

    if not config.use_distillation_token:
        return transformers.ViTForImageClassification if has_head else transformers.ViTModel
    if not has_head:
        return transformers.DeiTModel
    if config.has_distillation_head:
        return transformers.DeiTForImageClassificationWithTeacher
    return transformers.DeiTForImageClassification


def _options(exported: Exported) -> dict[str, Any]:
    """Arguments of the class beside the config: a classifier has no pooler, and no argument for it."""
    return {} if exported.has_head else {"add_pooling_layer": exported.config.representation_size is not None}


def _spell(key: str, model: Any) -> str:
    config = model.config
    if key.startswith(HEADS):
        return f"cls_{key}" if config.has_distillation_head and key.startswith("classifier.") else key
    return f"{_model_class(config, True).base_model_prefix}.{key}" if has_head(model) else key


def _size(pair: tuple[int, int]) -> int | list[int]:
    size = square_or_pair(pair)
    return size if isinstance(size, int) else list(size)


@torch.no_grad()
def _compare(exported: Exported) -> tuple[float, str]:
    model_class = _model_class(exported.config, exported.has_head)
    model = model_class.from_pretrained(exported.folder, **_options(exported)).eval()
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
    title="transformers' ViT and DeiT",
    write=_write,
    compare=_compare,
    tables={"hf_vit": transformers_deit.ORIGIN},  # transformers_vit's rules, and those of the second token
    expresses={
        **SIZES,
        **dict.fromkeys(("hidden_act", "layer_norm_eps", "qkv_bias", "representation_size"), ANY),
        **dict.fromkeys(("use_distillation_token", "use_distillation_head"), ANY),
    },
    objections=_objections,
    spell=_spell,
)
