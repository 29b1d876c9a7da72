"""Every head of dense prediction on every family's backbone, of sizes that keep a test in milliseconds."""

from typing import Any

import torch
from transformers.backbone_utils import BackboneMixin

import hf_vit
from hf_vit.families import DENSE_HEADS
from hf_vit.loading.start import find_model
from hf_vit.training.tasks.dense import build_dense_model

SIDE = 64
VIT = {
    "image_size": SIDE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "num_labels": 5,
}  # fmt: skip
FAMILIES = {
    "plain": lambda: hf_vit.HfViTConfig(**VIT, patch_size=16),
    "hybrid": lambda: hf_vit.HfHybridViTConfig(**VIT, stage_depths=(1, 1, 1), stem_width=32),
    "axial": lambda: hf_vit.HfAxialViTConfig(**VIT, patch_size=16),
    "local": lambda: hf_vit.HfLocalViTConfig(**VIT, patch_size=16, attention_window=3, rotary_embedding="mixed"),
    "axial_resnet": lambda: hf_vit.HfAxialResNetConfig(image_size=SIDE, stem_width=16, stage_depths=(1,) * 4),
    "bit": lambda: hf_vit.HfBitConfig(image_size=SIDE, stem_width=32, stage_depths=(1,) * 4),
    "mixer": lambda: hf_vit.HfMixerConfig(image_size=SIDE, patch_size=16, hidden_size=32, num_hidden_layers=2),
}
DETR = {
    **{"encoder_layers": 1, "decoder_layers": 2, "num_queries": 5, "dropout": 0.0},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
}
SMALL: dict[str, dict[str, Any]] = {
    "linear": {},
    "upernet": {"width": 16},
    "mask2former": {
        **{"width": 32, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 4, "num_attention_heads": 2},
        **{"dim_feedforward": 32, "encoder_feedforward_dim": 32, "train_num_points": 64},
    },
    "mask-rcnn": {"width": 16, "representation_size": 32, "mask_channels": (16,), "box_score_threshold": 0.0},
    "detr": {"width": 32, **DETR},
    "deformable-detr": {"width": 64, **DETR},  # more channels than groups: a map may be of one place
}
ONE_STRIDE = [("mixer", head) for head in ("upernet", "mask2former", "mask-rcnn")]
CASES = [(family, head) for head in DENSE_HEADS for family in FAMILIES if (family, head) not in ONE_STRIDE]
# The norm after the last block, where the maps are read before it.
UNREAD = {"bit": "resnet.encoder.norm.", "mixer": "mixer.layernorm."}


def build(family: str, head: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return build_dense_model(find_model(FAMILIES[family]()), head, ["sky", "cat"], **{**SMALL[head], **options})


def batch_for(head: str) -> dict[str, Any]:
    """Two images: one with a square of class 1, one with nothing but the background."""
    torch.manual_seed(1)
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.long)
    masks[0, 16:48, 8:40] = 1
    pixel_values = torch.randn(2, 3, SIDE, SIDE) * 0.1 + masks[:, None]
    if DENSE_HEADS[head].task == "segmentation":
        masks[:, :4] = 255
        return {"pixel_values": pixel_values, "labels": masks}
    one = {
        "boxes": torch.tensor([[8.0, 16.0, 40.0, 48.0]]),
        "class_labels": torch.tensor([1]),
        "masks": masks[:1].to(torch.uint8),
    }
    return {"pixel_values": pixel_values, "labels": [one, {name: value[:0] for name, value in one.items()}]}


def backbone_of(model: Any) -> Any:
    (backbone,) = (module for module in model.modules() if isinstance(module, BackboneMixin))
    return backbone
