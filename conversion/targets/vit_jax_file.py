"""Export to `model.npz` for Google's vision_transformer (vit_jax), with newer (linen) or older names of keys."""

import math
import re
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.origins.google import MIXER, VIT_JAX, VIT_JAX_HYBRID
from hf_vit.conversion.planning import plan
from hf_vit.conversion.readers import NpzReader
from hf_vit.conversion.targets.target import OutgoingModel, Part, Target, express

FILE = "model.npz"

# Older names number the modules of a block in one sequence, as released files do; timm reads only these.
_OLDER_NAMES = {
    "/MultiHeadDotProductAttention_0/": "/MultiHeadDotProductAttention_1/",
    "/LayerNorm_1/": "/LayerNorm_2/",
    "/MlpBlock_0/": "/MlpBlock_3/",
}
_GROUP_NORM = re.compile(r"(^|/)gn(\d|_root|_proj)/(scale|bias)$")
_TABLES = {"hf_vit": VIT_JAX, "hf_hybrid_vit": VIT_JAX_HYBRID, "hf_mixer": MIXER}
_STEM_AND_MIXER = ("stage_depths", "stem_width", "stem_patch_size", "token_intermediate_size")
_EXPRESSED = express("representation_size", *_STEM_AND_MIXER, pooling=("token", "gap"))


def _list_objections(config: Any, has_head: bool) -> Mapping[str, object]:
    """Name grids that the original code would resample wrongly, as it takes them for square ones."""
    h, w = config.grid
    side = math.isqrt(h * w)
    is_misread = h != w and side**2 == h * w and config.model_type != "hf_mixer"
    return {f"a patch grid of {h}x{w} (the original code reads its {h * w} rows as {side}x{side})": is_misread}


@final
class VitJaxFile(Target):
    """`model.npz`, which is checked by converting it back."""

    name = "vit_jax"
    title = "Google's vision_transformer"
    model_types = tuple(_TABLES)
    options = ("spelling",)
    problem_types = ("single_label_classification", "multi_label_classification")  # vit_jax has no regression

    def part_for(self, config: PreTrainedConfig) -> Part:
        return Part(self.title, _TABLES[config.model_type], _EXPRESSED, _list_objections)

    def write(self, outgoing: OutgoingModel) -> None:
        """Write the arrays, in older or newer spelling, and the image processor."""
        replacements = _OLDER_NAMES if outgoing.spelling == "older" else {}
        arrays: dict[str, Any] = {}
        for key, value in outgoing.arrays.items():
            # GroupNorm's arrays have four axes in vit_jax.
            array = value.reshape(1, 1, 1, -1) if _GROUP_NORM.search(key) else value
            part = next((part for part in replacements if part in key), "")  # at most one part of a key is respelled
            arrays[key.replace(part, replacements[part]) if part else key] = array.numpy()
        np.savez(outgoing.folder / FILE, **arrays)
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """Convert the file back and require the same parameters, as running the original code would need JAX."""
        with NpzReader(outgoing.folder / FILE) as reader:
            state = load_weights(reader, plan(reader.shapes, image_size=outgoing.nominal_size)).state
        expected_state = {name: value.float() for name, value in outgoing.model.state_dict().items()}
        is_same = state.keys() == expected_state.keys() and all(
            torch.equal(value, expected_state[name]) for name, value in state.items()
        )
        return 0.0 if is_same else float("nan"), "a conversion back, parameter by parameter"
