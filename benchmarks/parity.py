"""Measure how far the logits of hf_vit, transformers and timm are from the original code's, on the same checkpoints.

The checkpoints, images and results are those of tests/golden (Google's original JAX code on random weights; see the
README there). hf_vit converts the file; transformers' ViT takes the converted weights under its own names, with its
own defaults; timm reads the original file with its own loader. Printed is the largest absolute difference of a logit.
"""

from pathlib import Path

import numpy as np
import torch
from departures import GOLDEN, record_cases
from script import Script
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HfViTForImageClassification
from hf_vit.conversion import convert

CASES = (
    "vit_tok", "vit_tok_rep", "vit_gap", "vit_optprefix", "vit_lneps", "vit_tok at 48 px", "vit_tok at 96 px",
    "vit_tok at 112 px", "vit_gap at 96 px", "vit_gap at 112 px",
)  # fmt: skip


def transformers_model(ours: HfViTForImageClassification) -> ViTForImageClassification | None:
    """Return transformers' ViT with its own defaults, or None if it lacks the pooling or layer."""
    config = ours.config
    if config.pooling != "token" or config.representation_size is not None:
        return None
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "num_labels")
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    model = ViTForImageClassification(ViTConfig(image_size=size, **{name: getattr(config, name) for name in names}))
    model.load_state_dict(ours.state_dict())
    return model.eval()


def timm_model(case: str, ours: HfViTForImageClassification, image_size: int | None = None) -> VisionTransformer:
    config = ours.config
    native = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    has_token = config.pooling == "token"
    model = VisionTransformer(
        img_size=native, patch_size=config.patch_size, num_classes=config.num_labels, embed_dim=config.hidden_size,
        global_pool="token" if has_token else "avg", class_token=has_token, fc_norm=False,
        depth=config.num_hidden_layers, num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
    )  # fmt: skip
    model.load_pretrained(str(GOLDEN / f"{case}.ckpt.npz"), "opt/target/" if case == "vit_optprefix" else "")
    if image_size is not None:
        side = image_size // config.patch_size
        table = resample_abs_pos_embed(model.pos_embed.data, [side, side], num_prefix_tokens=model.num_prefix_tokens)
        model.pos_embed = torch.nn.Parameter(table)
        model.patch_embed.set_input_size((image_size, image_size))
    return model.eval()


@torch.no_grad()
def compare(report: Script, name: str, folder: Path) -> None:
    case, *sizes = name.removesuffix(" px").split(" at ")
    image_size = int(sizes[0]) if sizes else None
    prefix, suffix = ("resize_", f"_{image_size}") if sizes else ("", "")
    recorded = np.load(GOLDEN / f"{prefix}{case}.io.npz")
    images = torch.from_numpy(recorded[f"images{suffix}"]).permute(0, 3, 1, 2)
    expected = torch.from_numpy(recorded[f"logits{suffix}"]).double()
    wide = torch.from_numpy(recorded[f"logits_f64{suffix}"])

    def difference(logits: torch.Tensor, target: torch.Tensor = expected) -> float:
        return (logits.double() - target).abs().max().item()

    convert(GOLDEN / f"{case}.ckpt.npz", folder / case)
    ours = HfViTForImageClassification.from_pretrained(folder / case).eval()
    row: dict[str, float | None] = {"hf_vit": difference(ours(images).logits)}
    theirs = transformers_model(ours)
    stretch = {"interpolate_pos_encoding": True} if sizes else {}
    row["transformers"] = None if theirs is None else difference(theirs(images, **stretch).logits)
    row["timm"] = None
    if ours.config.representation_size is None:
        row["timm"] = difference(timm_model(case, ours, image_size)(images))
    row["hf_vit, float64"] = difference(ours.double()(images.double()).logits, wide)
    report.record(case=name, **row)


if __name__ == "__main__":
    record_cases(__doc__, CASES, compare)
