"""Every plain ViT of timm: converted with exactly its logits, or refused in one line that names what it has.

    python -m pytest tests/campaigns/test_timm_sweep.py -m slow -s

`docs/timm.md` is made from the recorded result: `python tests/campaigns/timm_page.py`.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import timm
import torch
from campaigns.ledger import RESULTS, Campaign, failures
from campaigns.timm_page import EXACT, PAGE, REFUSED, render
from timm.models import save_for_hf
from torch import nn

import hf_vit.conversion as conversion
from hf_vit.conversion.building.model import build_model
from hf_vit.conversion.building.weights import load_weights
from hf_vit.conversion.readers.opening import open_checkpoint
from hf_vit.errors import UserError

NAMES = [name for name in timm.list_models() if name.startswith(("vit_", "deit", "flexivit", "test_vit"))]
TOLERANCE = {"plain": {torch.float32: 1e-5, torch.float64: 1e-10}}
# As everywhere: a stem normalises again and again, and float32 rounds each time.
TOLERANCE["hybrid"] = TOLERANCE["plain"] | {torch.float32: 6e-5}
MEMORY = 3e9  # bytes, at any time
WIDE = 2048  # channels; two blocks of a model that is wider do not fit


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
    """The architecture of two blocks, or of one where it is wide; and the arguments that make it so."""
    with torch.device("meta"):
        whole = timm.create_model(name)
    arguments = {"depth": 1 if getattr(whole, "embed_dim", 0) > WIDE else 2}
    if "sapiens2" in name:  # has an argument with an entry for each of its blocks
        whole.blocks = whole.blocks[: arguments["depth"]]
        return whole.to_empty(device="cpu"), arguments
    return timm.create_model(name, **arguments), arguments


def converted_or_refusal(folder: Path) -> conversion.ConversionResult | str:
    try:
        return conversion.convert(folder / "saved", folder / "converted")
    except UserError as error:
        return str(error)


def in_dtype(ours: nn.Module, result: conversion.ConversionResult, source: Path, dtype: torch.dtype) -> nn.Module:
    """The model that was written; or its plan carried out in the dtype, where it computes what writing rounds."""
    if dtype == torch.float32 or not any(row.beside for row in result.plan.rows):
        return ours.to(dtype)
    with open_checkpoint(source) as reader:
        return build_model(result.plan, load_weights(reader, result.plan, dtype).state)


@torch.no_grad()
def attempt(name: str, folder: Path) -> str:
    """Convert one architecture and compare; "exact", or "refused: " and why."""
    model, arguments = build(name)
    weights_that_show(model)
    save_for_hf(model, folder / "saved", model_config={"model_args": arguments}, safe_serialization=True)
    result = converted_or_refusal(folder)
    if isinstance(result, str):
        assert "\n" not in result
        assert not (folder / "converted").exists()
        return REFUSED + result.removeprefix("saved: ").replace(f"'{name}'", "architecture")
    ours = result.plan.model_class.from_pretrained(result.output).eval()
    pixels = torch.randn(1, *model.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in TOLERANCE[result.plan.family].items():
        model.to(dtype)
        ours = in_dtype(ours, result, folder / "saved", dtype)
        expected, found = model(pixels.to(dtype)), ours(pixels.to(dtype))
        found = found.logits if result.plan.has_head else found.pooler_output
        difference = float((found - expected).abs().max()) / float(expected.abs().max())
        assert difference <= tolerance, f"{dtype}: {difference:.1e}"
    return EXACT


def peak_memory() -> int:
    """The most that this process has held at once since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_some_of_them(tmp_path: Path):
    for name in ("test_vit", "test_vit2", "test_vit3", "test_vit_relpos", "vit_xsmall_patch16_clip_224"):
        assert attempt(name, tmp_path / name) == EXACT
    assert "rotary" in attempt("vit_small_patch16_rope_224", tmp_path / "rope")


def test_the_page_tells_the_recorded_sweep():
    record = json.loads((RESULTS / "timm_sweep.json").read_text())
    assert {row["group"] for row in record["rows"]} == set(NAMES)
    assert PAGE.read_text(encoding="utf-8") == render(record), "run python tests/campaigns/timm_page.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:images of .* px hold")  # 384 px in patches of 14
@pytest.mark.timeout(3 * 3600)
def test_all_of_them(tmp_path: Path):
    def alone(name: str) -> str:
        forget_peak()
        try:
            outcome = attempt(name, tmp_path / name)
        finally:
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        assert peak_memory() <= MEMORY, f"{peak_memory() / 1e9:.1f} GB"
        return outcome

    command = "python -m pytest tests/campaigns/test_timm_sweep.py -m slow -s"
    counts = Campaign("timm_sweep", command, timm=timm.__version__, blocks=2, memory_gb=MEMORY / 1e9).run(NAMES, alone)
    assert not failures(counts)
    exact = [name for name, outcome in counts if outcome == EXACT]
    of_another_kind = [
        name for name, outcome in counts if "rotary positions" in outcome or "relative positions" in outcome
    ]
    assert len(exact) >= 0.7 * len(NAMES)
    assert len(exact) >= 0.8 * (len(NAMES) - len(of_another_kind))
