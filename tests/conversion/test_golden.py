"""Converted models give the digits of Google's original code."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from originals.recordings import largest_difference, pixels
from transformers import AutoImageProcessor

import hf_vit.conversion as conversion
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification

CASES = ("vit_tok", "vit_tok_rep", "vit_gap", "vit_optprefix", "vit_lneps")
RESIZED = [("vit_tok", 48), ("vit_tok", 96), ("vit_tok", 112), ("vit_gap", 96), ("vit_gap", 112)]


@pytest.fixture(params=CASES)
def converted(request, golden: Path, tmp_path: Path):
    result = conversion.convert(golden / f"{request.param}.ckpt.npz", tmp_path / "model")
    return request.param, result, np.load(golden / f"{request.param}.io.npz")


def test_saved_model_gives_the_originals_digits(converted):
    _, result, theirs = converted
    model = HfViTForImageClassification.from_pretrained(result.output).eval()
    with torch.no_grad():
        ours = model(pixels(theirs["images"]))
        body = model.vit(pixels(theirs["images"]))
        assert largest_difference(ours.logits, theirs["logits"]) <= 1e-5
        assert largest_difference(body.pooler_output, theirs["pre_logits"]) <= 1e-5
        assert largest_difference(body.last_hidden_state, theirs["encoded"]) <= 1e-5
        model.double()
        body = model.vit(pixels(theirs["images"]).double())
        assert largest_difference(body.last_hidden_state, theirs["encoded_f64"]) <= 1e-10
        assert largest_difference(body.pooler_output, theirs["pre_logits_f64"]) <= 1e-10
        assert largest_difference(model(pixels(theirs["images"]).double()).logits, theirs["logits_f64"]) <= 1e-10


def test_config_is_the_originals(converted, golden: Path):
    case, result, _ = converted
    facts = json.loads((golden / f"{case}.json").read_text())
    model, config = facts["model"], result.plan.config
    assert config.grid == tuple(side // 16 for side in facts["image_size"])
    assert (config.hidden_size, config.num_hidden_layers) == (model["hidden_size"], model["transformer"]["num_layers"])
    assert config.num_attention_heads == model["transformer"]["num_heads"]
    assert config.intermediate_size == model["transformer"]["mlp_dim"]
    assert (config.pooling, config.representation_size) == (model["classifier"], model["representation_size"])
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)
    assert config.num_labels == model["num_classes"]


def test_every_stage_is_verified(golden: Path, tmp_path: Path):
    for case in CASES:
        result = conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / case, recording=golden / f"{case}.io.npz")
        theirs = np.load(golden / f"{case}.io.npz")
        compared = {one.array for one in result.verification.checks}
        assert compared == set(theirs) - {"images"}
        assert not result.verification.skipped
        assert all(one.tolerance <= 1e-10 for one in result.verification.checks if one.precision == "float64")
        facts = json.loads((result.output / "facts.json").read_text())[0]["values"]
        assert facts["verification"]["float64"]["largest_difference"] <= 1e-10


@pytest.mark.parametrize(("case", "size"), RESIZED)
def test_resized_positions_are_the_originals(case: str, size: int, golden: Path, tmp_path: Path):
    theirs = np.load(golden / f"resize_{case}.io.npz")
    result = conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / "model", resize_to=(size, size))
    model = HfViTForImageClassification.from_pretrained(result.output).eval()
    assert model.config.grid == (size // 16, size // 16)
    table = model.vit.embeddings.position_embeddings
    assert largest_difference(table, theirs[f"posemb_out_{size}"]) <= 1e-7
    with torch.no_grad():
        logits = model(pixels(theirs[f"images_{size}"])).logits
    assert largest_difference(logits, theirs[f"logits_{size}"]) <= 1e-5
    assert AutoImageProcessor.from_pretrained(result.output).size == {"height": size, "width": size}


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize(("case", "size"), RESIZED)
def test_resize_cases_verify_in_both_precisions(case: str, size: int, resize: bool, golden: Path, tmp_path: Path):
    """Both ways of reaching another size: resampled once at conversion, or on the fly by the model of native size."""
    result = conversion.convert(
        golden / f"{case}.ckpt.npz",
        tmp_path / "model",
        resize_to=(size, size) if resize else None,
        recording=golden / f"resize_{case}.io.npz",
    )
    compared = {one.array: one for one in result.verification.checks}
    for array in (f"posemb_out_{size}", f"posemb_out_f64_{size}", f"logits_{size}", f"logits_f64_{size}"):
        assert compared[array].difference <= (1e-10 if "f64" in array else 1e-5)
    assert ("posemb_in" in compared) is not resize


def test_golden_data_stays_small(golden: Path):
    assert sum(file.stat().st_size for file in golden.iterdir()) <= 6 * 2**20
