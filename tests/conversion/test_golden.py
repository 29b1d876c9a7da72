"""Converted models give the digits of Google's original code; `--verify` names the first stage that differs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid.reference import stem_forward
from originals.google import make_checkpoint, reference_forward
from originals.pytorch import measure_difference, pixels
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.errors import UserError

VITS = ("vit_tok", "vit_tok_rep", "vit_gap", "vit_optprefix", "vit_lneps")
HYBRIDS = ("hybrid_rti", "hybrid_stdeps", "hybrid_r50")
CASES = (
    *VITS, *HYBRIDS, "bv_gap_learn", "bv_gap_learn_bf16", "bv_gap_sincos_rep", "bv_map_learn",
    "bv_map_sincos_rep_scan", "bv_tok_learn_rep", "bv_tok_sincos", "mixer", "bit_v1",
)  # fmt: skip
# Case -> the size that must be declared, because the file has do not record the image size, or several sizes fit.
SIZES = {"bv_gap_sincos_rep": (48, 80), "bv_map_sincos_rep_scan": (64, 48), "bv_tok_sincos": (64, 64)}
RESIZED = [
    ("vit_tok", 48), ("vit_tok", 96), ("vit_tok", 112), ("vit_gap", 96), ("vit_gap", 112), ("bv_gap_learn", 96),
    ("bv_tok_learn_rep", 80), ("hybrid_r50", 96),
]  # fmt: skip
POOLINGS = {"tok": "token", "gap": "gap", "map": "map"}
POSITIONS = {"learn": "learned", "sincos2d": "sincos_2d"}
# A hybrid and a ResNet normalize again and again, and float32 rounds differently on other processors.
FLOAT32 = {"hybrid": 6e-5, "bit": 6e-5}


def fields_of(case: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config that the facts beside a recording give."""
    model = facts["model"]
    fields: dict[str, Any] = {"num_labels": model["num_classes"]}
    if case == "bit_v1":
        fields |= {"stage_depths": tuple(model["depth"]), "stem_width": 64 * model["width"]}
        return fields | {"pre_activation": False}
    fields |= {"nominal_size": tuple(facts["image_size"]), "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    if case == "mixer":
        fields |= {"hidden_size": model["hidden_dim"], "num_hidden_layers": model["num_blocks"]}
        fields |= {"patch_stride": tuple(model["patches"]), "intermediate_size": model["channels_mlp_dim"]}
        return fields | {"token_intermediate_size": model["tokens_mlp_dim"]}
    if case.startswith("bv"):
        fields |= {"pooling": POOLINGS[model["pool_type"]], "position_embedding": POSITIONS[model["posemb"]]}
        fields |= {"representation_size": model["width"] if model["rep_size"] else None}
        fields |= {"num_hidden_layers": model["depth"], "num_attention_heads": model["num_heads"]}
        fields |= {"hidden_size": model["width"], "intermediate_size": model["mlp_dim"] or 4 * model["width"]}
        return fields | {"position_on_class_token": False}
    encoder = model["transformer"]
    fields |= {"hidden_size": model["hidden_size"], "num_hidden_layers": encoder["num_layers"]}
    fields |= {"num_attention_heads": encoder["num_heads"], "intermediate_size": encoder["mlp_dim"]}
    fields |= {"pooling": model["classifier"], "representation_size": model["representation_size"]}
    if "resnet" in model:
        fields |= {"stage_depths": tuple(model["resnet"]["num_layers"]), "stem_patch_size": model["patches"][0]}
        fields |= {"stem_width": 64 * model["resnet"]["width_factor"]}
    return fields


@pytest.mark.parametrize("case", CASES)
def test_saved_model_gives_the_originals_digits(case: str, golden: Path, tmp_path: Path):
    """One conversion: every recorded stage, the saved model loaded again, the config, the facts, and every key."""
    source, recording, report = golden / f"{case}.ckpt.npz", golden / f"{case}.io.npz", tmp_path / "report.json"
    options = {"image_size": SIZES.get(case), "recording": recording, "report": report}
    result = conversion.convert(source, tmp_path / "model", **options)
    theirs = np.load(recording)
    assert {one.array for one in result.verification.checks} == set(theirs) - {"images"}
    assert not result.verification.skipped
    assert {one.tolerance for one in result.verification.checks if one.precision == "float64"} == {1e-10}
    float32 = FLOAT32.get(case.partition("_")[0], 1e-5)
    model = AutoModelForImageClassification.from_pretrained(result.output).eval()
    images = pixels(theirs["images"])
    for ending, tolerance in {"": float32, "_f64": 1e-10}.items():
        if ending:
            model, images = model.double(), images.double()
        with torch.no_grad():
            logits, body = model(images).logits, model.base_model(images)
        ours = {"logits": logits, "pre_logits": body.pooler_output.flatten(1), "encoded": body.last_hidden_state}
        for stage, value in ours.items():
            if f"{stage}{ending}" in theirs:
                assert measure_difference(value, theirs[f"{stage}{ending}"]) <= tolerance, stage

    facts = json.loads((golden / f"{case}.json").read_text())
    assert sorted(result.plan.ignored) == sorted(facts["ckpt"]["ignored_keys"])
    told = fields_of(case, facts)
    assert {name: getattr(result.plan.config, name) for name in told} == told
    values = json.loads((result.output / "facts.json").read_text())[0]["values"]
    assert values["verification"]["float64"]["largest_difference"] <= 1e-10
    rows = json.loads(report.read_text())["keys"]
    assert {row["source"] for row in rows} == set(np.load(source))
    assert sorted(row["target"] for row in rows if "target" in row) == sorted(model.state_dict())
    stacked = [row for row in rows if row["source"].endswith("encoderblock/LayerNorm_0/bias")]
    names = [(index, f"vit.layers.{index}.layernorm_before.bias") for index in range(3 if "scan" in case else 0)]
    assert [(row["block"], row["target"]) for row in stacked] == names
    assert all((row["shape"], row["target_shape"]) == ([3, 32], [32]) for row in stacked)
    if case.startswith("hybrid"):
        blocks = {f"block{stage + 1}" for stage in range(len(result.plan.config.stage_depths))}
        assert {"conv_root", "gn_root"} | blocks <= {one.stage for one in result.verification.checks}


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize(("case", "size"), RESIZED)
def test_resized_positions_are_the_originals(case: str, size: int, resize: bool, golden: Path, tmp_path: Path):
    """Both ways of reaching another size: resampled once at conversion, or on the fly by the model of native size."""
    recording, resized = golden / f"resize_{case}.io.npz", {"resize_to": (size, size)} if resize else {}
    result = conversion.convert(golden / f"{case}.ckpt.npz", tmp_path / "model", recording=recording, **resized)
    compared = {one.array: one.difference for one in result.verification.checks}
    float32 = FLOAT32.get(case.partition("_")[0], 1e-5)
    assert max(compared[f"posemb_out_f64_{size}"], compared[f"logits_f64_{size}"]) <= 1e-10
    assert compared[f"posemb_out_{size}"] <= 1e-5
    assert compared[f"logits_{size}"] <= float32
    assert ("posemb_in" in compared) is not resize
    if resize:
        theirs, model = np.load(recording), AutoModelForImageClassification.from_pretrained(result.output).eval()
        assert model.config.grid == (size // 16, size // 16)
        assert measure_difference(model.vit.embeddings.position_embeddings, theirs[f"posemb_out_{size}"]) <= 1e-7
        with torch.no_grad():
            logits = model(pixels(theirs[f"images_{size}"])).logits
        assert measure_difference(logits, theirs[f"logits_{size}"]) <= float32
        assert AutoImageProcessor.from_pretrained(result.output).size == {"height": size, "width": size}


@pytest.mark.parametrize("case", [*VITS, *HYBRIDS])
def test_reference_gives_the_goldens_digits(case: str, golden: Path):
    """What stands for the original in the tests of other forms of its files."""
    weights, theirs = dict(np.load(golden / f"{case}.ckpt.npz")), np.load(golden / f"{case}.io.npz")
    features = theirs["images"]
    if case in HYBRIDS:
        stages = stem_forward(weights, features)
        features = stages.pop("features")
        for stage, value in stages.items():
            (recorded,) = (theirs[array] for array in theirs if array.startswith(f"{stage}_0"))
            np.testing.assert_allclose(value[:1, ..., : recorded.shape[-1]], recorded, rtol=0, atol=1e-4)
    ours = reference_forward(weights, features)
    np.testing.assert_allclose(ours["logits"], theirs["logits_f64"], rtol=0, atol=1e-10)


def test_golden_data_stays_small(golden: Path):
    assert sum(file.stat().st_size for file in golden.iterdir()) <= 14 * 2**20


BLOCK = "Transformer/encoderblock_"
# Case -> weight that is disturbed in the checkpoint -> the stage where that first shows.
FIRST_STAGE = {
    "vit_tok_rep": {"embedding/kernel": "embedding", "embedding/bias": "embedding", "cls": "with_posemb",
        f"{BLOCK}0/MultiHeadDotProductAttention_1/query/bias": "layer_0_attn",
        f"{BLOCK}0/MultiHeadDotProductAttention_1/out/kernel": "layer_0_attn",
        f"{BLOCK}0/LayerNorm_2/scale": "layer_0_mlp", f"{BLOCK}0/MlpBlock_3/Dense_1/bias": "layer_0_mlp",
        f"{BLOCK}1/LayerNorm_0/bias": "layer_1", f"{BLOCK}1/MlpBlock_3/Dense_0/kernel": "layer_1",
        "Transformer/encoder_norm/scale": "encoded", "pre_logits/kernel": "pre_logits", "head/bias": "logits"},
    "hybrid_stdeps": {"conv_root/kernel": "conv_root", "gn_root/bias": "gn_root", "block1/unit1/conv2/kernel": "block1",
        "block1/unit1/gn_proj/scale": "block1", "block2/unit1/gn3/bias": "block2", "embedding/kernel": "embedding",
        "pre_logits/kernel": "pre_logits"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "key", "stage"), [(case, *row) for case, rows in FIRST_STAGE.items() for row in rows.items()]
)
def test_first_stage_that_differs_is_named(case, key, stage, golden: Path, write_npz, tmp_path: Path):
    weights = dict(np.load(golden / f"{case}.ckpt.npz"))
    weights[key].flat[-1 if case == "vit_tok_rep" else 0] += 0.01 if case == "vit_tok_rep" else 0.1
    with pytest.raises(UserError, match=rf"the first stage that differs is '{stage}' .*float32 differs by"):
        conversion.convert(write_npz(weights), tmp_path / "model", recording=golden / f"{case}.io.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz"]


@pytest.fixture
def golden_case(golden: Path):
    return dict(np.load(golden / "vit_tok_rep.ckpt.npz")), dict(np.load(golden / "vit_tok_rep.io.npz"))


DISTURBED = [
    *(
        (f"{stage}_f64", 2e-10, f"{stage}_f64: float64 differs by 2.0e-10, tolerance 1e-10")
        for stage in ("encoded", "pre_logits", "logits")
    ),
    ("logits", None, "the first stage that differs is 'logits'"),
]


@pytest.mark.parametrize(("array", "difference", "told"), DISTURBED)
def test_each_precision_has_its_tolerance(array, difference, told, golden_case, write_npz, tmp_path: Path):
    weights, recording = golden_case
    limit = 1e-5 * max(1, np.abs(recording["logits"]).max())
    assert limit < 3e-5
    recording[array].flat[3] += difference or 1.5 * limit
    with pytest.raises(UserError, match=told):
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


def test_rectangular_recording_of_an_independent_reference(write_npz, tmp_path: Path):
    weights = make_checkpoint(grid=(2, 5), patch=(4, 2), depth=3)
    images = np.random.default_rng(2).uniform(-1, 1, (2, 8, 10, 3)).astype(np.float32)
    recording = {"images": images}
    for stage, value in reference_forward(weights, images).items():
        recording |= {stage: value.astype(np.float32), f"{stage}_f64": value}
    result = conversion.convert(
        write_npz(weights), tmp_path / "model", image_size=(8, 10), recording=write_npz(recording, "recording.npz")
    )
    assert len(result.verification.checks) == 2 * 9
    assert not result.verification.skipped


def test_headless_model_is_judged_by_what_it_gives(write_npz, tmp_path: Path):
    weights = make_checkpoint(labels=None, representation=6)
    images = np.random.default_rng(2).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    recording = {"images": images, "logits_f64": reference_forward(weights, images)["logits"]}
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
    images, logits, source = recording["images"], recording["logits"], write_npz(weights)
    bad = {
        "has no float array 'images'": {"logits": logits},
        "has no array that can be compared .it has only images": {"images": images},
        "has no array that can be compared .no stage": {"images": images, "logit": logits},
        "'images' in recording.npz has the shape 1x64x64; write it as": {"images": images[..., 0], "logits": logits},
        "'logits' .* has the shape 1x9, but the converted .* has 1x10": {"images": images, "logits": logits[:, :9]},
        "do not fit the model: image 6x64": {"images": images[:, :6], "logits": logits},
        "do not fit the model: pixel_values have shape": {"images": images[..., :1], "logits": logits},
        "NaN or infinite": {"images": images * np.float32(np.nan), "logits": logits},
    }
    for told, arrays in bad.items():
        with pytest.raises(UserError, match=told):
            conversion.convert(source, tmp_path / "model", recording=write_npz(arrays, "recording.npz"))
        assert not (tmp_path / "model").exists()
    recorded = write_npz(recording, "recording.npz")
    with pytest.raises(UserError, match="its image size is not that of --resize-to"):
        conversion.convert(source, tmp_path / "model", resize_to=(96, 96), recording=recorded)


def test_recording_must_be_readable(golden_case, write_npz, tmp_path: Path):
    source = write_npz(golden_case[0])
    for path in (tmp_path / "none.npz", tmp_path / "text.npz"):
        (tmp_path / "text.npz").write_text("hello")
        with pytest.raises(UserError, match=path.name):
            conversion.convert(source, tmp_path / "model", recording=path)


def test_dropped_representation_layer(golden: Path, tmp_path: Path, command):
    source = golden / "vit_tok_rep.ckpt.npz"
    assert command("convert", source, tmp_path / "model", "--drop-pre-logits")[0] == 0
    theirs = np.load(golden / "vit_tok_rep.io.npz")
    images = torch.from_numpy(theirs["images"]).permute(0, 3, 1, 2)
    model = hf_vit.HfViTModel.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        output = model(images)
    assert model.config.representation_size is None
    assert float((output.last_hidden_state - torch.from_numpy(theirs["encoded"])).abs().max()) <= 1e-5
    assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])
    (record,) = json.loads((tmp_path / "model" / "facts.json").read_text())
    ignored = {"dropped representation layer": 2, "head of the dropped representation layer": 2}
    assert record["values"]["ignored"] == ignored
