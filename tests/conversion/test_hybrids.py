"""Hybrids of vit_jax: the original's digits, every form of their stems, and refusals by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid.reference import stem_forward, stem_shapes
from originals.recordings import largest_difference, pixels
from transformers import AutoModelForImageClassification

import hf_vit.conversion as conversion
from hf_vit.conversion.origins.google.vit_jax_hybrid import RULES
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTForImageClassification

CASES = ("hybrid_rti", "hybrid_stdeps", "hybrid_r50")
UNIT = "block2/unit1"


@pytest.fixture
def hybrid(checkpoint):
    """A checkpoint of random weights as vit_jax would write it; `flat` GroupNorm parameters are (C,)."""

    def make(depths=(1, 2), side=1, flat=False, prefix="", seed=0, width=32, **form):
        rng = np.random.default_rng(seed)
        last = 4 * width * 2 ** (len(depths) - 1) if depths else width
        arrays = checkpoint(patch=(side, side), channels=last, prefix=prefix, **form)
        for key, shape in stem_shapes(depths, width).items():
            shape = shape[-1:] if flat and "/gn" in f"/{key}" else shape
            arrays[prefix + key] = (rng.normal(0, 0.3, shape) + key.endswith("scale")).astype(np.float32)
        return arrays

    return make


def shapes_of(arrays) -> dict[str, tuple[int, ...]]:
    return {key: value.shape for key, value in arrays.items()}


@pytest.mark.parametrize("case", CASES)
def test_saved_model_gives_the_originals_digits(case: str, golden: Path, tmp_path: Path):
    result = conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / "model")
    theirs = np.load(golden / f"{case}.io.npz")
    model = HfHybridViTForImageClassification.from_pretrained(result.output).eval()
    with torch.no_grad():
        images = pixels(theirs["images"])
        assert largest_difference(model(images).logits, theirs["logits"]) <= 6e-5
        assert largest_difference(model.vit(images).pooler_output, theirs["pre_logits"]) <= 6e-5
        model.double()
        body = model.vit(images.double())
        assert largest_difference(body.last_hidden_state, theirs["encoded_f64"]) <= 1e-10
        assert largest_difference(body.pooler_output, theirs["pre_logits_f64"]) <= 1e-10
        assert largest_difference(model(images.double()).logits, theirs["logits_f64"]) <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_every_stage_is_verified(case: str, golden: Path, tmp_path: Path):
    recording = golden / f"{case}.io.npz"
    result = conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / "model", recording=recording)
    compared = {one.array for one in result.verification.checks}
    assert compared == set(np.load(recording)) - {"images"}
    facts = json.loads((golden / f"{case}.json").read_text())["model"]
    config = result.plan.config
    blocks = {f"block{stage + 1}" for stage in range(len(config.stage_depths))}
    assert {"conv_root", "gn_root"} | blocks <= {one.stage for one in result.verification.checks}
    assert list(config.stage_depths) == facts["resnet"]["num_layers"]
    assert config.stem_width == 64 * facts["resnet"]["width_factor"]
    assert config.stem_patch_size == facts["patches"][0]
    assert config.representation_size == facts["representation_size"]


# Weight that is disturbed in the checkpoint -> the stage where that first shows.
FIRST_STAGE = {
    "conv_root/kernel": "conv_root",
    "gn_root/bias": "gn_root",
    "block1/unit1/conv2/kernel": "block1",
    "block1/unit1/gn_proj/scale": "block1",
    "block2/unit1/gn3/bias": "block2",
    "embedding/kernel": "embedding",
    "pre_logits/kernel": "pre_logits",
}


@pytest.mark.parametrize(("key", "stage"), FIRST_STAGE.items())
def test_first_stage_that_differs_is_named(key, stage, golden: Path, write_npz, tmp_path: Path):
    weights = dict(np.load(golden / "hybrid_stdeps.ckpt.npz"))
    weights[key].flat[0] += 0.1
    recording = golden / "hybrid_stdeps.io.npz"
    with pytest.raises(UserError, match=rf"the first stage that differs is '{stage}' "):
        conversion.convert(write_npz(weights), tmp_path / "model", recording=recording)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("resize", [False, True])
def test_resized_positions_are_the_originals(resize: bool, golden: Path, tmp_path: Path):
    """Both ways of reaching another size: resampled once at conversion, or on the fly by the model of native size."""
    result = conversion.convert(
        golden / "hybrid_r50.ckpt.npz",
        tmp_path / "model",
        resize_to=(96, 96) if resize else None,
        recording=golden / "resize_hybrid_r50.io.npz",
    )
    compared = {one.array: one.difference for one in result.verification.checks}
    assert compared["posemb_out_96"] <= 1e-5
    assert compared["logits_96"] <= 6e-5
    assert max(compared["posemb_out_f64_96"], compared["logits_f64_96"]) <= 1e-10
    assert ("posemb_in" in compared) is not resize
    assert result.plan.config.grid == ((6, 6) if resize else (4, 4))


FORMS = {
    "two stages": {},
    "root alone": {"depths": (), "side": 2},
    "one stage and patches": {"depths": (3,), "side": 2},
    "four stages": {"depths": (1, 1, 2, 1)},
    "flat GroupNorm": {"flat": True, "linen": True},
    "GAP and representation layer": {"token": False, "representation": 7},
    "no head": {"labels": None},
    "opt/target": {"prefix": "opt/target/"},
    "rectangular": {"grid": (2, 3)},
    "wide": {"depths": (1,), "width": 96},
    "pixels that the stem rounds up": {"more_px": -3},
    "places that make no patch": {"depths": (3,), "side": 2, "more_px": 3},
}


@pytest.mark.filterwarnings("ignore:images of 19x19 px hold 2x2 patches:UserWarning")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form_gives_the_references_digits(form, hybrid, reference, write_npz, tmp_path: Path):
    form = {"grid": (2, 2), **form}
    more_px = form.pop("more_px", 0)
    arrays = hybrid(**form)
    (h, w), depths = form["grid"], form.get("depths", (1, 2))
    stride = 4 * 2 ** max(len(depths) - 1, 0) * form.get("side", 1)
    size = (h * stride + more_px, w * stride + more_px)
    result = conversion.convert(write_npz(arrays), tmp_path / "model", image_size=size)
    assert sorted(result.plan.consumed) == sorted(arrays)
    assert tuple(result.plan.config.stage_depths) == depths
    plain = {key.removeprefix("opt/target/"): value for key, value in arrays.items()}
    images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    features = stem_forward(plain, images)["features"][:, : h * form.get("side", 1), : w * form.get("side", 1)]
    expected = reference(plain, features)
    model = result.plan.model_class.from_pretrained(tmp_path / "model").double().eval()
    with torch.no_grad():
        found = model(pixels(images).double())
    found = found.logits if "head/kernel" in plain else found.pooler_output
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-10)


def test_reference_gives_the_goldens_digits(golden: Path, reference):
    for case in CASES:
        weights, theirs = dict(np.load(golden / f"{case}.ckpt.npz")), np.load(golden / f"{case}.io.npz")
        stages = stem_forward(weights, theirs["images"])
        for stage in set(stages) - {"features"}:
            (recorded,) = (theirs[array] for array in theirs if array.startswith(f"{stage}_0"))
            np.testing.assert_allclose(stages[stage][:1, ..., : recorded.shape[-1]], recorded, rtol=0, atol=1e-4)
        ours = reference(weights, stages["features"])
        np.testing.assert_allclose(ours["logits"], theirs["logits_f64"], rtol=0, atol=1e-10)


def test_auto_class_finds_the_family(hybrid, write_npz, tmp_path: Path):
    conversion.convert(write_npz(hybrid()), tmp_path / "model", num_labels=3)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert isinstance(model, HfHybridViTForImageClassification)
    assert model.classifier.weight.shape == (3, 8)
    assert not model.classifier.weight.any()


def without(*parts):
    return lambda s: {key: shape for key, shape in s.items() if not any(part in key for part in parts)}


MISFITS = {
    "missing projection": (
        without("unit1/conv_proj", "unit1/gn_proj"),
        ["6 keys missing: block1/unit1/conv_proj/kernel, block1/unit1/gn_proj/scale, block1/unit1/gn_proj/bias"],
    ),
    "missing root": (without("gn_root"), ["2 keys missing: gn_root/scale, gn_root/bias"]),
    "gap between units": (without("block2/unit1/"), ["12 keys missing: block2/unit1/conv1/kernel"]),
    "missing stage": (without("block1/"), ["12 keys missing: block1/unit1/conv1/kernel"]),
    "projection in the second unit": (
        lambda s: s | {"block2/unit2/conv_proj/kernel": (1, 1, 256, 256)},
        ["1 keys left over: block2/unit2/conv_proj/kernel"],
    ),
    "absurd stage": (
        lambda s: s | {"block999/unit1/conv1/kernel": (1, 1, 8, 8)},
        ["1 keys left over: block999/unit1/conv1/kernel"],
    ),
    "kernel in PyTorch's order": (
        lambda s: s | {f"{UNIT}/conv2/kernel": (64, 64, 3, 3)},
        [f"1 keys of a wrong shape: {UNIT}/conv2/kernel is 64x64x3x3 (needs 3x3x64x64, it looks transposed)"],
    ),
    "stage of another width": (
        lambda s: s | {f"{UNIT}/gn2/scale": (1, 1, 1, 96)},
        [f"1 keys of a wrong shape: {UNIT}/gn2/scale is 1x1x1x96 (needs 1x1x1x64)"],
    ),
    "norm of two axes": (lambda s: s | {"gn_root/bias": (1, 32)}, ["gn_root/bias is 1x32 (needs 32)"]),
    "patches of other features": (
        lambda s: s | {"embedding/kernel": (1, 1, 128, 8)},
        ["embedding/kernel is 1x1x128x8 (needs 1x1x256x8)"],
    ),
    "rectangular patch of features": (
        lambda s: s | {"embedding/kernel": (1, 2, 256, 8)},
        ["embedding/kernel is 1x2x256x8"],
    ),
    "no Transformer block": (without("encoderblock"), ["holds no encoder block"]),
}


@pytest.mark.parametrize(("edit", "told"), MISFITS.values(), ids=MISFITS)
def test_misfit_is_named(edit, told, hybrid):
    with pytest.raises(UserError) as error:
        conversion.plan(edit(shapes_of(hybrid())))
    for text in told:
        assert text in str(error.value)


def test_width_that_groups_do_not_divide_is_refused(hybrid):
    with pytest.raises(UserError, match="the stem is 40 wide, which GroupNorm's 32 groups do not divide"):
        conversion.plan(shapes_of(hybrid(width=40)))


def test_every_rule_of_the_stem_is_in_the_table():
    """The table in the documentation is the one that is applied: one line a kind of key."""
    written = {key.replace("block1/unit1", "block{s}/unit{u}") for key in stem_shapes((1,), 32)}
    assert written == {rule.key for rule in RULES if rule.key.startswith(("block", "conv_root", "gn_root"))}
