"""A model for dense prediction: the backbone of a variant or a checkpoint, with a new head on its maps.

Legend: B batch, H x W px, n objects.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torchvision.ops import box_convert
from transformers import PreTrainedModel

from hf_vit.conversion.loading import Source
from hf_vit.errors import UserError, strict_reason
from hf_vit.families import DENSE_HEADS, DenseHead, family_of
from hf_vit.loading.start import build_model, build_processor, dense_model, find_backbone
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_mixer import HfMixerConfig
from hf_vit.models.configuration_hf_resnet import HfResNetBaseConfig
from hf_vit.models.configuration_hf_vit import HfBaseConfig
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone


class _Reads(NamedTuple):
    """The maps that a head reads: their strides in px, the fewest it takes; and the fields that its width sets."""

    strides: tuple[int, ...]  # empty: the last map alone
    fewest: int
    widths: tuple[str, ...]


_HEADS = {
    "linear": _Reads((), 0, ()),
    "upernet": _Reads((4, 8, 16, 32), 2, ("hidden_size", "auxiliary_channels")),
    "mask2former": _Reads((4, 8, 16, 32), 4, ("feature_size", "mask_feature_size", "hidden_dim")),
    "mask-rcnn": _Reads((4, 8, 16, 32), 2, ("fpn_hidden_size",)),
    "detr": _Reads((), 0, ("d_model",)),
    "deformable-detr": _Reads((8, 16, 32), 1, ("d_model",)),
}


def build_dense_model(
    source: Source,
    head: str,
    label_names: Sequence[str],
    *,
    image_size: tuple[int, int] | None = None,
    width: int | None = None,
    use_masks: bool = True,
    backbone_dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> tuple[PreTrainedModel, Any]:
    """Build a model in float32 with a new head, and its image processor; of a checkpoint with this head with that one.

    A head that reads maps of several strides gets them from a plain, axial or local backbone by ViTDet's pyramid
    (arXiv 2203.16527), from a hybrid by the stages of its stem and its last block, from a ResNet by its stages.

    Args:
        source: from `find_model`; a checkpoint's weights go into the backbone. What its own head decides about classes
            by starts anew where they are others.
        head: a key of `hf_vit.families.DENSE_HEADS`.
        label_names: the classes, in the order of their numbers.
        width: channels of the head and of the pyramid; None is the checkpoint's, or what the head's library takes.
        use_masks: of "mask-rcnn": whether it has a branch for masks.
        **fields: of the head's configuration. None of the others keeps the source's.
    """
    kind = DENSE_HEADS.get(head)
    if kind is None:
        raise UserError(f"unknown head '{head}'; choose from {', '.join(DENSE_HEADS)}")
    own = dense_model(source) if source.dense_head is kind else None
    maps = {} if own is not None else _maps(source, head)
    maps |= {} if width is None or not _has_pyramid(source) else {"fpn_hidden_size": width}
    rates = {"dropout": backbone_dropout, "drop_path": drop_path}
    backbone: Any = build_model(source, "backbone", image_size=image_size, **rates, **maps)
    stored = {} if own is None else own.config.to_dict()
    given = _fields(head, backbone, use_masks)
    given = {name: value for name, value in given.items() if name not in stored or name == "use_masks"}
    given |= dict.fromkeys(_HEADS[head].widths if width else (), width) | fields
    unknown = sorted(set(given) - set(kind.config_class().to_dict()))
    if unknown:
        raise UserError(f"the head '{head}' has no {', '.join(unknown)}")
    names = {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
    try:
        config_class: Any = kind.config_class
        config = config_class.from_dict({**stored, "backbone_config": backbone.config.to_dict(), **names, **given})
        model = getattr(transformers, kind.auto_class).from_config(config, dtype=torch.float32)
    except (StrictDataclassError, ValueError) as error:
        reason = strict_reason(error) if isinstance(error, StrictDataclassError) else error
        raise UserError(f"{source.name} with the head '{head}': {reason}") from error
    if own is not None:
        _take_head(model, own, source.name)
    _take_weights(model, backbone)
    return model, _processor(kind, source, backbone.config)


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model's forward takes of a collator's batch: pixel_values, and labels in the form that it learns.

    Labels are class maps [B, H, W] with 255 where a pixel does not count, or for every image a dictionary with "boxes"
    [n, 4] (x1, y1, x2, y2 in px), "class_labels" [n] and maybe "masks" and "iscrowd" [n], whose crowds are left out.
    """
    pixel_values, labels = batch["pixel_values"], batch.get("labels")
    if labels is None:
        return {"pixel_values": pixel_values}
    config: Any = model.config
    model_type = config.model_type
    if model_type == DENSE_HEADS["mask2former"].model_type:
        classes = [each.unique() for each in labels]
        classes = [each[each != config.ignore_value] for each in classes]
        masks = [(each[None] == of[:, None, None]).float() for each, of in zip(labels, classes, strict=True)]
        return {"pixel_values": pixel_values, "mask_labels": masks, "class_labels": classes}
    if model_type in (DENSE_HEADS["detr"].model_type, DENSE_HEADS["deformable-detr"].model_type):
        height, width = pixel_values.shape[2:]
        scale = torch.tensor([width, height, width, height], device=pixel_values.device)
        learnt = [each["iscrowd"] == 0 if "iscrowd" in each else slice(None) for each in labels]
        labels = [
            {
                "class_labels": each["class_labels"][kept],
                "boxes": box_convert(each["boxes"][kept], "xyxy", "cxcywh") / scale,
            }
            for each, kept in zip(labels, learnt, strict=True)
        ]
    return {"pixel_values": pixel_values, "labels": labels}


def _has_pyramid(source: Source) -> bool:
    return hasattr(source.config, "use_feature_pyramid") and not isinstance(source.config, HfHybridViTConfig)


def _maps(source: Source, head: str) -> dict[str, Any]:
    """Return the fields of the backbone's configuration that give the maps that a head reads, if it has them."""
    config: HfBaseConfig = source.config
    strides = _HEADS[head].strides
    if isinstance(config, HfResNetBaseConfig):
        stages = range(1, len(config.stage_depths) + 1)
        known = [f"stage{stage}" for stage in stages if 4 * 2 ** (stage - 1) in strides]
        several = {"out_features": known or [f"stage{stage}" for stage in stages]}
        _refuse_few(source, head, len(several["out_features"]))
        return several if strides or head == "linear" else {"out_features": None}
    plain: dict[str, Any] = {"out_features": None}
    if isinstance(config, HfMixerConfig):
        _refuse_few(source, head, 1)
        return plain
    plain |= {"use_feature_pyramid": False, "reshape_hidden_states": True, "apply_layernorm": True}
    if isinstance(config, HfHybridViTConfig):
        stages = [i for i in range(1, len(config.stage_depths) + 1) if 4 * 2 ** (i - 1) in strides]
        _refuse_few(source, head, len(stages) + 1)
        return plain | {"stem_stages": tuple(stages)}
    return plain | ({"use_feature_pyramid": True, "pyramid_strides": strides} if strides else {})


def _refuse_few(source: Source, head: str, maps: int) -> None:
    if maps < (fewest := _HEADS[head].fewest):
        family = family_of(source.config.model_type)
        kind = "it" if family is None else family.label.lower()
        raise UserError(
            f"{source.name}: the head '{head}' reads {fewest} maps of different strides, and {kind} of these "
            f"stages gives {maps}; use another head, such as linear or detr"
        )


def _fields(head: str, backbone: Any, use_masks: bool) -> dict[str, Any]:
    """Fields of the head's configuration that follow from the maps."""
    strides = backbone.strides
    # One anchor size a map, of eight of its places, as torchvision's; two maps may share a stride.
    sizes = [8 * strides[0] * 2**index for index in range(len(strides))]
    fields: dict[str, dict[str, Any]] = {
        "linear": {"use_norm": isinstance(backbone.config, HfResNetBaseConfig | HfMixerConfig)},
        "upernet": {"use_auxiliary_head": len(strides) > 2},
        "mask2former": {"feature_strides": strides},
        "mask-rcnn": {"use_masks": use_masks, "anchor_sizes": sizes},
        "detr": {"num_channels": backbone.config.num_channels},
    }
    return fields.get(head, {})


def _take_head(model: Any, own: Any, name: str) -> None:
    """Go on with a checkpoint's head, but for what is new: a branch, or what decides about classes that are others."""
    mine, theirs = model.state_dict(), own.state_dict()
    if list(own.config.id2label.values()) != list(model.config.id2label.values()):
        more = type(own.config).from_dict({**own.config.to_dict(), "num_labels": own.config.num_labels + 1})
        wider = type(own)(more).state_dict()
        theirs = {key: value for key, value in theirs.items() if wider[key].shape == value.shape}
    inside = next(key for key, module in model.named_modules() if isinstance(module, HfBaseBackbone))
    theirs = {key: value for key, value in theirs.items() if key in mine and not key.startswith(f"{inside}.")}
    if other := next((key for key, value in theirs.items() if mine[key].shape != value.shape), None):
        raise UserError(
            f"the head of {name} has another shape ({other}); leave --head-width and the fields of the "
            "recipe's architecture out, or choose another --head"
        )
    model.load_state_dict(theirs, strict=False)


def _take_weights(model: Any, backbone: Any) -> None:
    report = find_backbone(model).load_state_dict(backbone.state_dict(), strict=False)
    # DETRs replace batch norms by frozen ones, which count nothing.
    wrong = [*report.missing_keys, *(key for key in report.unexpected_keys if "num_batches_tracked" not in key)]
    assert not wrong, wrong


def _processor(kind: DenseHead, source: Source, config: HfBaseConfig) -> Any:
    """Return the image processor for this size, of the class that post-processes the head's outputs."""
    plain = build_processor(source, config).to_dict()
    fields = {name: plain[name] for name in ("size", "image_mean", "image_std", "resample", "do_convert_rgb")}
    unpadded = {"do_pad": False} if kind.name in ("detr", "deformable-detr", "mask2former") else {}
    return getattr(transformers, kind.processor)(**fields, **unpadded)
