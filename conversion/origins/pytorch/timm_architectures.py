"""What the name of an architecture of timm tells and no weight does: facts of timm 1.0, as data."""

import re
from collections.abc import Mapping
from typing import Any

from hf_vit.errors import UserError

KNOWN = re.compile(r"(vit|deit|deit3|flexivit|test_vit)\d?(_[\w-]+)?")

# timm's heads are 64 wide, its GELU is the exact one and its eps 1e-6, but for these (the first that fits).
EXCEPTIONS: dict[str, dict[str, Any]] = {
    r"vit_so400m_patch16_siglip_(gap_)?\d+": {"num_attention_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    r"vit_so400m_.+": {"num_attention_heads": 16},
    r"vit_giantopt_.+": {"num_attention_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    r"(vit_large_patch16_siglip_(gap_)?512|vit_base_patch32_siglip_(gap_)?256)": {"hidden_act": "gelu_pytorch_tanh"},
    r"vit_base_patch16_gap_224": {"num_attention_heads": 16},
    r"vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)": {"hidden_act": "silu"},
    r"test_vit2?": {"num_attention_heads": 2},
    r"test_vit3": {"num_attention_heads": 3},
    r"vit_\w+_clip_quickgelu_\d+": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    r"vit_\w+_clip_\d+": {"layer_norm_eps": 1e-5},
}
# Arguments that an architecture has without its config.json naming them.
ARGUMENTS: dict[str, dict[str, Any]] = {
    r"vit_\w+_radio_.+|vit_intern300m_.+": {"final_norm": False},
    r"test_vit3": {"pool_include_prefix": True},
}
HEADS_OF_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16}

_RMS = "norms that do not subtract the mean (RMSNorm)"
# What an architecture does that no model here does, even where its keys are those of a plain ViT.
NOT_HERE: dict[str, str] = {
    r"vit_.*(rope|dinov3|lingbot|sapiens2|pe_core|pe_lang|pe_spatial)(_.*)?|eva(02)?_.+": "rotary positions (RoPE)",
    r"(beitv?2?|beit3)(_.+)?": "a learned bias of relative positions, of the class token too, in its attention",
    r"samvit_.+": "attention in windows with relative positions (SAM)",
    r"naflexvit_.+": "patches of many grids in one sequence (NaFlex)",
    r"vit_\w+_rpn_\d+": "LayerNorms after attention and MLP instead of before them",
    r"vit_\w+_xp_\d+": f"attention and MLP side by side, and {_RMS}",
    r"vit_dp\w+|vit_pwee_.+|vit_\w+_\d+x[2-9]_\d+": "attention and MLP side by side in a block",
    r"vit_d(little|wee)_.+": "differential attention",
    r"vit_\w+_(mci|resnet\d+d)(_.+)?": "another stem than BiT's ResNet (ResNet-D, MobileCLIP)",
    r"test_vit4": _RMS,
}


def refuse_foreign(architecture: str) -> None:
    """Raise a UserError for what timm builds otherwise than the models here."""
    feature = next((feature for name, feature in NOT_HERE.items() if re.fullmatch(name, architecture)), None)
    if feature is not None:
        raise UserError(f"timm's '{architecture:.80}' has {feature}, which no model here has; use it with timm itself")


def refuse_unknown(architecture: str) -> None:
    """Raise a UserError for a name of timm that says too little of what it builds."""
    if not KNOWN.fullmatch(architecture):
        raise UserError(
            f"timm's architecture '{architecture:.80}' is none of vit_*, deit_*, deit3_* and flexivit_*: its heads and "
            "its activation are unknown here"
        )


def exceptions_of(architecture: str) -> dict[str, Any]:
    """Fields of the config that timm's rule does not tell of an architecture, or in which it departs from that."""
    return {"layer_norm_eps": 1e-6} | _first(EXCEPTIONS, architecture)


def arguments_of(architecture: str) -> dict[str, Any]:
    """Arguments of timm that an architecture has and its config.json does not name."""
    return _first(ARGUMENTS, architecture)


def _first(table: Mapping[str, dict[str, Any]], architecture: str) -> dict[str, Any]:
    return next((dict(values) for name, values in table.items() if re.fullmatch(name, architecture)), {})
