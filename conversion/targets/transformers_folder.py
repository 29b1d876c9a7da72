"""A folder for transformers: its ViT or, with a distillation token, its DeiT; bare where there is no head."""

from importlib.metadata import version
from typing import Any, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.transformers import transformers_deit
from hf_vit.conversion.planning.plan import HEADS
from hf_vit.conversion.sizes import square_or_pair
from hf_vit.conversion.targets.target import ANY, SIZES, OutgoingModel, Target, has_head, largest_difference

_COPIED = (
    *("num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "layer_norm_eps", "qkv_bias", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("initializer_range", "problem_type"),
)

# transformers_vit's rules, and those of the second token.
_TABLES = {"hf_vit": transformers_deit.ORIGIN}
_EXPRESSED = {
    **SIZES,
    **dict.fromkeys(("hidden_act", "layer_norm_eps", "qkv_bias", "representation_size"), ANY),
    **dict.fromkeys(("use_distillation_token", "use_distillation_head"), ANY),
}


@final
class TransformersFolder(Target):
    """config.json and weights of transformers, checked there."""

    name = "transformers"
    title = "transformers' ViT and DeiT"
    tables = _TABLES
    expresses = _EXPRESSED

    def write(self, outgoing: OutgoingModel) -> None:
        ours = outgoing.config
        model_class = _model_class(ours, outgoing.has_head)
        config = model_class.config_class(
            **{name: getattr(ours, name) for name in _COPIED},
            image_size=_size(outgoing.nominal_size),
            patch_size=_size(ours.patch_stride),
            pooler_output_size=ours.representation_size or ours.hidden_size,
            pooler_act="tanh",
        )
        if outgoing.has_head:
            config.id2label, config.label2id = dict(ours.id2label), dict(ours.label2id)
        model = model_class(config, **_options(outgoing))
        model.load_state_dict(outgoing.arrays, strict=True)
        model.to(outgoing.model.dtype).save_pretrained(outgoing.folder)
        outgoing.processor.save_pretrained(outgoing.folder)

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        model_class = _model_class(outgoing.config, outgoing.has_head)
        model = model_class.from_pretrained(outgoing.folder, **_options(outgoing)).eval()
        images, ours = outgoing.probe()
        output = model(images)
        theirs = output.logits if outgoing.has_head else output.last_hidden_state
        difference = largest_difference(ours, theirs)
        if not outgoing.has_head and outgoing.config.representation_size:
            difference = max(difference, largest_difference(outgoing.model(images).pooler_output, output.pooler_output))
        return difference, f"transformers {version('transformers')}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        config = model.config
        if key.startswith(HEADS):
            return f"cls_{key}" if config.has_distillation_head and key.startswith("classifier.") else key
        return f"{_model_class(config, True).base_model_prefix}.{key}" if has_head(model) else key

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        if has_head and config.representation_size is not None:
            return [f"representation_size={config.representation_size} before a classifier"]
        return []


def _model_class(config: PreTrainedConfig, has_head: bool) -> Any:
    import transformers

    if not config.use_distillation_token:
        return transformers.ViTForImageClassification if has_head else transformers.ViTModel
    if not has_head:
        return transformers.DeiTModel
    if config.has_distillation_head:
        return transformers.DeiTForImageClassificationWithTeacher
    return transformers.DeiTForImageClassification


def _options(outgoing: OutgoingModel) -> dict[str, Any]:
    """Arguments of the class beside the config: a classifier has no pooler, and no argument for it."""
    return {} if outgoing.has_head else {"add_pooling_layer": outgoing.config.representation_size is not None}


def _size(pair: tuple[int, int]) -> int | list[int]:
    size = square_or_pair(pair)
    return size if isinstance(size, int) else list(size)
