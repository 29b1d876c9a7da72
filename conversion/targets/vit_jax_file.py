"""`model.npz` for Google's vision_transformer (vit_jax), in the newer (linen) spelling of its keys."""

from typing import Any

import numpy as np
import torch

from hf_vit.conversion.api import plan
from hf_vit.conversion.exporting import ANY, SIZES, Exported, Target
from hf_vit.conversion.origins import vit_jax, vit_jax_hybrid
from hf_vit.conversion.plan.weights import load_weights
from hf_vit.conversion.readers.npz import NpzReader

FILE = "model.npz"


def _write(exported: Exported) -> None:
    arrays: dict[str, Any] = {key: value.numpy() for key, value in exported.arrays.items()}
    np.savez(exported.folder / FILE, **arrays)
    exported.processor.save_pretrained(exported.folder)


def _compare(exported: Exported) -> tuple[float, str]:
    """The original needs JAX; what runs here is the way back, which must give the very same parameters."""
    with NpzReader(exported.folder / FILE) as reader:
        state = load_weights(reader, plan(reader.shapes, image_size=exported.nominal_size)).state
    ours = {name: value.float() for name, value in exported.model.state_dict().items()}
    same = state.keys() == ours.keys() and all(torch.equal(value, ours[name]) for name, value in state.items())
    return 0.0 if same else float("nan"), "the way back, parameter by parameter"


def _objections(config: Any, has_head: bool) -> list[str]:
    h, w = config.grid
    return [] if h == w else [f"a patch grid of {h}x{w} (the original reads a table as a square)"]


TARGET = Target(
    name="vit_jax",
    title="Google's vision_transformer",
    write=_write,
    compare=_compare,
    tables={"hf_vit": vit_jax.ORIGIN, "hf_hybrid_vit": vit_jax_hybrid.ORIGIN},
    expresses={
        **SIZES,
        "pooling": ("token", "gap"),
        "representation_size": ANY,
        **dict.fromkeys(("stage_depths", "stem_width", "stem_patch_size"), ANY),
    },
    objections=_objections,
)
