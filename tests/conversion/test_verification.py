"""`--verify` names the first stage that differs, and says what it did not compare."""

from pathlib import Path

import numpy as np
import pytest

import hf_vit.conversion as conversion
from hf_vit.errors import UserError

BLOCK = "Transformer/encoderblock_1"

# Weight that is disturbed in the checkpoint -> the stage where that first shows.
FIRST_STAGE = {
    "embedding/kernel": "embedding",
    "embedding/bias": "embedding",
    "cls": "with_posemb",
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/bias": "layer_0_attn",
    "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/out/kernel": "layer_0_attn",
    "Transformer/encoderblock_0/LayerNorm_2/scale": "layer_0_mlp",
    "Transformer/encoderblock_0/MlpBlock_3/Dense_1/bias": "layer_0_mlp",
    f"{BLOCK}/LayerNorm_0/bias": "layer_1",
    f"{BLOCK}/MlpBlock_3/Dense_0/kernel": "layer_1",
    "Transformer/encoder_norm/scale": "encoded",
    "pre_logits/kernel": "pre_logits",
    "head/bias": "logits",
}


@pytest.fixture
def golden_case(golden: Path):
    return dict(np.load(golden / "vit_tok_rep.ckpt.npz")), dict(np.load(golden / "vit_tok_rep.io.npz"))


@pytest.mark.parametrize(("key", "stage"), FIRST_STAGE.items())
def test_first_stage_that_differs_is_named(key, stage, golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    weights[key].flat[-1] += 0.01
    with pytest.raises(UserError, match=rf"the first stage that differs is '{stage}' .*float32 differs by"):
        conversion.convert(write_npz(weights), tmp_path / "model", recording=write_npz(recording, "recording.npz"))
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.parametrize("array", ["encoded_f64", "pre_logits_f64", "logits_f64"])
def test_float64_is_judged_by_its_own_tolerance(array, golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    recording[array].flat[3] += 2e-10
    with pytest.raises(UserError, match=rf"{array}: float64 differs by 2.0e-10, tolerance 1e-10"):
        conversion.convert(write_npz(weights), tmp_path / "model", recording=write_npz(recording, "recording.npz"))


def test_float32_tolerance(golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    limit = 1e-5 * max(1, np.abs(recording["logits"]).max())
    assert limit < 3e-5
    recording["logits"].flat[3] += 1.5 * limit
    with pytest.raises(UserError, match="first stage that differs is 'logits'"):
        conversion.convert(write_npz(weights), tmp_path / "model", recording=write_npz(recording, "recording.npz"))


def test_endings_of_names(golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    recording = {
        "images": recording["images"],
        "layer_1_0": recording["layer_1"][:1],
        "embedding_c8": recording["embedding"][..., :8],
        "layer_0_0_c8": recording["layer_0"][:1, :, :8],
        "encoded_f64_0": recording["encoded_f64"][:1],
        "encoded_0_f64": recording["encoded_f64"][:1],
        "conv_root_0_c8": np.zeros(3, np.float32),
        "logits_2d": np.zeros(3, np.float32),
    }
    result = conversion.convert(write_npz(weights), tmp_path / "model", recording=write_npz(recording, "recording.npz"))
    stages = {one.array: (one.stage, one.precision) for one in result.verification.checks}
    assert stages == {
        "embedding_c8": ("embedding", "float32"),
        "layer_0_0_c8": ("layer_0", "float32"),
        "layer_1_0": ("layer_1", "float32"),
        "encoded_f64_0": ("encoded", "float64"),
        "encoded_0_f64": ("encoded", "float64"),
    }
    assert set(result.verification.skipped) == {"conv_root_0_c8", "logits_2d"}
    assert "not compared: logits_2d (no stage of this model" in conversion.describe(result)


def test_rectangular_recording_of_an_independent_reference(checkpoint, reference, write_npz, tmp_path: Path):
    weights = checkpoint(grid=(2, 5), patch=(4, 2), depth=3)
    images = np.random.default_rng(2).uniform(-1, 1, (2, 8, 10, 3)).astype(np.float32)
    recording = {"images": images}
    for stage, value in reference(weights, images).items():
        recording |= {stage: value.astype(np.float32), f"{stage}_f64": value}
    result = conversion.convert(
        write_npz(weights), tmp_path / "model", image_size=(8, 10), recording=write_npz(recording, "recording.npz")
    )
    assert len(result.verification.checks) == 2 * 9
    assert not result.verification.skipped


def test_headless_model_is_judged_by_what_it_gives(checkpoint, reference, write_npz, tmp_path: Path):
    weights = checkpoint(labels=None, representation=6)
    images = np.random.default_rng(2).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    recording = {"images": images, "logits_f64": reference(weights, images)["logits"]}
    recorded = write_npz(recording, "recording.npz")
    result = conversion.convert(write_npz(weights), tmp_path / "model", recording=recorded)
    assert [one.array for one in result.verification.checks] == ["logits_f64"]


def test_new_head_is_not_compared_and_said_so(golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    recorded = write_npz(recording, "recording.npz")
    result = conversion.convert(write_npz(weights), tmp_path / "model", num_labels=3, recording=recorded)
    assert result.verification.skipped == dict.fromkeys(("logits", "logits_f64"), "the head is new")
    assert {one.stage for one in result.verification.checks} >= {"embedding", "encoded", "pre_logits"}


def test_nothing_to_compare_is_no_success(golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    images = recording["images"]
    source = write_npz(weights)
    bad = {
        "holds no 'images'": {"logits": recording["logits"]},
        "holds no result that can be compared .it has images only": {"images": images},
        "holds no result that can be compared .no stage": {"images": images, "logit": recording["logits"]},
        "are 1x64x64, not": {"images": images[..., 0], "logits": recording["logits"]},
        r"'logits' in recording.npz is 1x9, the converted model gives 1x10": {
            "images": images,
            "logits": recording["logits"][:, :9],
        },
        "do not fit the model: image 6x64": {"images": images[:, :6], "logits": recording["logits"]},
        "do not fit the model: pixel_values of shape": {"images": images[..., :1], "logits": recording["logits"]},
        "NaN or infinite": {"images": images * np.float32(np.nan), "logits": recording["logits"]},
    }
    for told, arrays in bad.items():
        with pytest.raises(UserError, match=told):
            conversion.convert(source, tmp_path / "model", recording=write_npz(arrays, "recording.npz"))
        assert not (tmp_path / "model").exists()
    recorded = write_npz(recording, "recording.npz")
    with pytest.raises(UserError, match="of another image size than --resize-to"):
        conversion.convert(source, tmp_path / "model", resize_to=(96, 96), recording=recorded)


def test_recording_must_be_readable(golden_case, write_npz, tmp_path: Path):
    source = write_npz(golden_case[0])
    for path in (tmp_path / "none.npz", tmp_path / "text.npz"):
        (tmp_path / "text.npz").write_text("hello")
        with pytest.raises(UserError, match=path.name):
            conversion.convert(source, tmp_path / "model", recording=path)
