"""Every architecture in timm's modules of ViTs, hybrids, Mixers and BiT: converted exactly, or refused by name.

`docs/timm.md` is made from the recorded result: `python -m campaigns.timm_page`.
"""

import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import timm
import torch
from timm.models import save_for_hf
from torch import nn

import hf_vit.conversion as conversion
from campaigns.engine import Campaign, forget_peak, resident_memory
from campaigns.timm_page import EXACT, REFUSED
from hf_vit.conversion.fill import build_model, load_weights
from hf_vit.conversion.readers import open_checkpoint
from hf_vit.errors import UserError

MODULES = (
    *("vision_transformer", "deit", "vision_transformer_relpos", "vision_transformer_hybrid", "mlp_mixer", "resnetv2"),
    *("eva", "beit", "naflexvit", "vision_transformer_sam"),
)
NAMES = sorted({name for module in MODULES for name in timm.list_models(module=module)})
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# As everywhere: a ResNet normalizes again and again, and float32 rounds each time.
FLOAT32_TOLERANCE = {"hybrid": 6e-5, "bit": 6e-5}
# timm computes the angles of rotary positions in float32, also for a model in float64.
ROTARY_TOLERANCE = 1e-7
MEMORY = 6e9  # bytes, at any time
WIDE = 1700  # channels; two blocks of a model that is wider do not fit


def weights_that_show(model: nn.Module) -> nn.Module:
    """Random weights of ordinary size; heads, norms, positions and special tokens too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            is_matrix = parameter.ndim > 1 and parameter.shape[0] > 1
            parameter.mul_(1 / math.sqrt(parameter[0].numel()) if is_matrix else 0.3)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def build(name: str) -> tuple[nn.Module, dict[str, int]]:
    """The architecture of two blocks (each stage of a ResNet: one), or of one where it is wide; and its arguments."""
    with torch.device("meta"):
        whole = timm.create_model(name)
    depth = 1 if getattr(whole, "embed_dim", 0) > WIDE or hasattr(whole, "stages") else 2
    try:
        return timm.create_model(name, depth=depth), {"depth": depth}
    except (TypeError, AssertionError):  # no such argument, or another with an entry for each block
        for part in (whole, *getattr(whole, "stages", ())):
            if hasattr(part, "blocks"):
                part.blocks = part.blocks[:depth]
        return whole.to_empty(device="cpu"), {}


def in_dtype(ours: nn.Module, result: conversion.ConversionResult, source: Path, dtype: torch.dtype) -> nn.Module:
    """The model that was written; or its plan carried out in the dtype, where it computes what writing rounds."""
    if dtype == torch.float32 or not any(row.other_keys for row in result.plan.rows):
        return ours.to(dtype)
    with open_checkpoint(source) as reader:
        return build_model(result.plan, load_weights(reader, result.plan, dtype).state)


@torch.no_grad()
def attempt(name: str, folder: Path) -> str:
    """Convert one architecture and compare; "exact", or "refused: " and why."""
    model, arguments = build(name)
    weights_that_show(model)
    save_for_hf(model, folder / "saved", model_config={"model_args": arguments}, safe_serialization=True)
    try:
        result = conversion.convert(folder / "saved", folder / "converted")
    except UserError as error:
        line = str(error)
        assert "\n" not in line
        assert not (folder / "converted").exists()
        return REFUSED + line.removeprefix("saved: ").replace(f"'{name}'", "architecture")
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    pixels = torch.randn(1, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(1))
    tolerances = TOLERANCE | {torch.float32: FLOAT32_TOLERANCE.get(result.plan.family, TOLERANCE[torch.float32])}
    if getattr(result.plan.config, "rotary_embedding", None) is not None:
        tolerances[torch.float64] = ROTARY_TOLERANCE
    for dtype, tolerance in tolerances.items():
        model.to(dtype)
        ours = in_dtype(ours, result, folder / "saved", dtype)
        # Let timm's NaFlexVit resize its tables in float64, which it casts to float32 for that.
        is_wide = (dtype, result.plan.origin) == (torch.float64, "timm_naflex")
        with patch.object(torch.Tensor, "float", lambda tensor: tensor) if is_wide else nullcontext():
            expected = model(pixels.to(dtype))
        found = ours(pixels.to(dtype))
        found = found.logits if result.plan.has_head else found.pooler_output
        difference = float((found - expected).abs().max()) / float(expected.abs().max())
        assert difference <= tolerance, f"{dtype}: {difference:.1e}"
    return EXACT


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    def alone(name: str) -> str:
        forget_peak()
        try:
            outcome = attempt(name, folder / name)
        finally:
            shutil.rmtree(folder / name, ignore_errors=True)
        peak = resident_memory("HWM")
        assert peak <= MEMORY, f"{peak / 1e9:.1f} GB"
        return outcome

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "images of .* px hold")  # 384 px in patches of 14
        yield alone


CAMPAIGN = Campaign(
    name="timm_sweep",
    promise="an architecture of timm converts with exactly its logits, or is refused in one line that says why",
    cases=lambda: NAMES,
    prepare=prepare,
    settings={"timm": timm.__version__, "blocks": 2, "memory_gb": MEMORY / 1e9},
    is_quick=lambda name: name.startswith("test_vit") or "_tiny_" in name or "_xsmall_" in name,
)
