"""A folder for transformers: its ViT, DeiT, CLIP, SigLIP or DINOv2, whichever has what the model has."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import Origin
from hf_vit.conversion.planning.plan import HEADS
from hf_vit.conversion.targets.target import OutgoingModel, Target, has_head, largest_difference
from hf_vit.conversion.targets.transformers_classes import CLIP, DINOV2, SIGLIP, VIT, kind_of

VIT_TYPE = "hf_vit"
_OWN_HEADS = (*HEADS, "visual_projection.")  # outside of the bare model


@final
class TransformersFolder(Target):
    """config.json and weights of transformers, checked there."""

    name = "transformers"
    title = "transformers"
    tables = MappingProxyType({VIT_TYPE: VIT.table})

    def table_of(self, config: PreTrainedConfig) -> Origin:
        return kind_of(config).table

    def expressed(self, config: PreTrainedConfig) -> Mapping[str, Sequence[Any]]:
        return kind_of(config).expresses

    def title_of(self, config: PreTrainedConfig) -> str:
        return kind_of(config).title if config.model_type == VIT_TYPE else self.title

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        return kind_of(config).objections(config, has_head)

    def write(self, outgoing: OutgoingModel) -> None:
        ours = outgoing.config
        model_class = _model_class(ours, outgoing.has_head)
        fields = kind_of(ours).config_fields(ours)
        two_towers = "vision_config" in model_class.config_class.sub_configs  # that of a classifier of SigLIP
        config = model_class.config_class(**({"vision_config": fields} if two_towers else fields))
        if outgoing.has_head:
            config.id2label = dict(ours.id2label)
            config.label2id = dict(ours.label2id or {label: index for index, label in ours.id2label.items()})
        model = model_class(config, **_options(outgoing))
        model.load_state_dict(_arrays(outgoing), strict=True)
        model.to(outgoing.model.dtype).save_pretrained(outgoing.folder)
        outgoing.processor.save_pretrained(outgoing.folder)

    @torch.no_grad()
    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        model_class = _model_class(outgoing.config, outgoing.has_head)
        model = model_class.from_pretrained(outgoing.folder, **_options(outgoing)).eval()
        images, ours = outgoing.probe()
        output = model(images)
        if outgoing.has_head:
            difference = largest_difference(ours, output["image_embeds" if "image_embeds" in output else "logits"])
        else:
            difference = largest_difference(ours, output.last_hidden_state)
            if output.pooler_output is not None:
                pooled = outgoing.model(images).pooler_output
                difference = max(difference, largest_difference(pooled, output.pooler_output))
        return difference, f"transformers {version('transformers')}"

    def spell(self, key: str, model: PreTrainedModel) -> str:
        config = model.config
        if key.startswith(_OWN_HEADS):
            return f"cls_{key}" if config.has_distillation_head and key.startswith("classifier.") else key
        if not has_head(model):
            return key
        is_tower = kind_of(config) in (CLIP, SIGLIP)
        return f"{'vision_model' if is_tower else _model_class(config, True).base_model_prefix}.{key}"


def _model_class(config: PreTrainedConfig, has_head: bool) -> Any:
    import transformers

    return getattr(transformers, kind_of(config).class_name(config, has_head))


def _options(outgoing: OutgoingModel) -> dict[str, Any]:
    """Arguments of the class beside the config: a bare ViT has a pooler or not; a classifier has none."""
    if outgoing.has_head or kind_of(outgoing.config) is not VIT:
        return {}
    return {"add_pooling_layer": outgoing.config.representation_size is not None}


def _arrays(outgoing: OutgoingModel) -> dict[str, torch.Tensor]:
    """With what only transformers' classes have: of DINOv2 a mask token, and a head that reads class token and mean."""
    arrays, config = outgoing.arrays, outgoing.config
    if kind_of(config) is not DINOV2:
        return arrays
    if outgoing.has_head:
        weight = arrays["classifier.weight"]
        halves = [weight, torch.zeros_like(weight)]
        arrays = arrays | {"classifier.weight": torch.cat(halves if config.pooling == "token" else halves[::-1], dim=1)}
    if config.num_register_tokens:
        name = next(key for key in arrays if key.endswith("embeddings.register_tokens"))
        mask = torch.zeros(1, config.hidden_size, dtype=arrays[name].dtype)
        arrays = arrays | {name.replace("register_tokens", "mask_token"): mask}
    return arrays
