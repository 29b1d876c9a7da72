"""The papers' named sizes as a table, and their configurations by name.

Sources: B, L, H: arXiv 2010.11929, table 1; Ti, S: arXiv 2106.10270; So400m, g, G, e: arXiv 2106.04560, 2305.13035
and 2209.06794 with the numbers of the original code's table.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import HfViTConfig


@dataclass(frozen=True)
class Variant:
    """A named size: depth, width D, MLP width, heads, and the patch sides in px that were published."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    patches: tuple[int, ...]


VARIANTS: dict[str, Variant] = {
    "Ti": Variant(12, 192, 768, 3, (16,)),
    "S": Variant(12, 384, 1536, 6, (32, 16)),
    "B": Variant(12, 768, 3072, 12, (32, 16, 8)),
    "L": Variant(24, 1024, 4096, 16, (32, 16)),
    "H": Variant(32, 1280, 5120, 16, (14,)),
    "So400m": Variant(27, 1152, 4304, 16, (14,)),
    "g": Variant(40, 1408, 6144, 16, (14,)),
    "G": Variant(48, 1664, 8192, 16, (14,)),
    "e": Variant(56, 1792, 15360, 16, (14,)),
}


def variant_config(name: str, **overrides: Any) -> HfViTConfig:
    """The configuration of a variant such as "B/16"; any patch side is allowed ("Ti/4"), any field may be overridden.

    Raises:
        UserError: there is no such variant; the message names the nearest.
    """
    match = re.fullmatch(r"(?:ViT-)?([A-Za-z0-9]+)/(\d+)", name)
    if match is None or match[1] not in VARIANTS:
        known = [f"{size}/{patch}" for size, variant in VARIANTS.items() for patch in variant.patches]
        nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known
        raise UserError(f"no variant '{name}'; the name is SIZE/PATCH, for example {', '.join(nearest)}")
    variant = VARIANTS[match[1]]
    fields: dict[str, Any] = {
        "num_hidden_layers": variant.num_hidden_layers,
        "hidden_size": variant.hidden_size,
        "intermediate_size": variant.intermediate_size,
        "num_attention_heads": variant.num_attention_heads,
        "patch_size": int(match[2]),
    }
    return HfViTConfig(**{**fields, **overrides})
