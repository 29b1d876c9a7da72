"""`model.npz` for Google's vision_transformer (vit_jax), in the newer (linen) spelling of its keys or the older."""

import math
import re
from typing import Any, final

import numpy as np
import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.origins.google import MIXER, VIT_JAX, VIT_JAX_HYBRID
from hf_vit.conversion.planning import plan
from hf_vit.conversion.readers import NpzReader
from hf_vit.conversion.targets.target import ANY, SIZES, OutgoingModel, Target

FILE = "model.npz"

# The older spelling numbers the modules of a block in one sequence; released files have it, and timm reads it alone.
_OLDER = {
    "/MultiHeadDotProductAttention_0/": "/MultiHeadDotProductAttention_1/",
    "/LayerNorm_1/": "/LayerNorm_2/",
    "/MlpBlock_0/": "/MlpBlock_3/",
}
_GROUP_NORM = re.compile(r"(^|/)gn(\d|_root|_proj)/(scale|bias)$")
_TABLES = {"hf_vit": VIT_JAX, "hf_hybrid_vit": VIT_JAX_HYBRID, "hf_mixer": MIXER}
_EXPRESSED = {
    **SIZES,
    "pooling": ("token", "gap"),
    "representation_size": ANY,
    **dict.fromkeys(("stage_depths", "stem_width", "stem_patch_size", "token_intermediate_size"), ANY),
}


@final
class VitJaxFile(Target):
    """`model.npz`, checked by the way back."""

    name = "vit_jax"
    title = "Google's vision_transformer"
    tables = _TABLES
    expresses = _EXPRESSED
    options = ("spelling",)
    problem_types = ("single_label_classification", "multi_label_classification")  # it has no regression

    def write(self, outgoing: OutgoingModel) -> None:
        others = _OLDER if outgoing.spelling == "older" else {}
        arrays: dict[str, Any] = {}
        for key, value in outgoing.arrays.items():
            if _GROUP_NORM.search(key):  # maps have four axes there
                value = value.reshape(1, 1, 1, -1)
            part = next((part for part in others if part in key), "")
            arrays[key.replace(part, others[part]) if part else key] = value.numpy()
        np.savez(outgoing.folder / FILE, **arrays)
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """Convert the file back, which must give the very same parameters: the original needs JAX."""
        with NpzReader(outgoing.folder / FILE) as reader:
            state = load_weights(reader, plan(reader.shapes, image_size=outgoing.nominal_size)).state
        ours = {name: value.float() for name, value in outgoing.model.state_dict().items()}
        same = state.keys() == ours.keys() and all(torch.equal(value, ours[name]) for name, value in state.items())
        return 0.0 if same else float("nan"), "the way back, parameter by parameter"

    def objections(self, config: PreTrainedConfig, has_head: bool) -> list[str]:
        """Name the grids that the original reads as a square's, which fails or goes wrong, at another image size."""
        (h, w), side = config.grid, math.isqrt(math.prod(config.grid))
        if h == w or side**2 != h * w or config.model_type == "hf_mixer":
            return []
        return [f"a patch grid of {h}x{w} (the original takes its {h * w} rows for {side}x{side})"]
