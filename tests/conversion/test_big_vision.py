"""Models of big_vision: the original's digits, every form of its files, and refusals by name."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from originals.big_vision import BLOCK, MAP, as_tower, class_token_apart, stacked, with_map_head
from originals.recordings import largest_difference, pixels
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit.conversion as conversion
from hf_vit.errors import UserError
from hf_vit_cli.main import main

# Case -> the size that must be declared, because the file has no position table.
CASES = {
    "bv_gap_learn": None,
    "bv_gap_learn_bf16": None,
    "bv_gap_sincos_rep": (48, 80),
    "bv_map_learn": None,
    "bv_map_sincos_rep_scan": (64, 48),
    "bv_tok_learn_rep": None,
    "bv_tok_sincos": (64, 64),
}
RESIZED = [("bv_gap_learn", 96), ("bv_tok_learn_rep", 80)]


@pytest.mark.parametrize("case", CASES)
def test_saved_model_gives_the_originals_digits(case, golden: Path, tmp_path: Path):
    recording = golden / f"{case}.io.npz"
    source = golden / f"{case}.ckpt.npz"
    result = conversion.convert(source, tmp_path / "model", image_size=CASES[case], recording=recording)
    theirs = np.load(recording)
    assert {one.array for one in result.verification.checks} == set(theirs) - {"images"}
    assert {one.tolerance for one in result.verification.checks if one.precision == "float64"} == {1e-10}
    model = AutoModelForImageClassification.from_pretrained(result.output).eval()
    images = pixels(theirs["images"])
    with torch.no_grad():
        assert largest_difference(model(images).logits, theirs["logits"]) <= 1e-5
        assert largest_difference(model.vit(images).pooler_output, theirs["pre_logits"]) <= 1e-5
        found = model.double()(images.double()).logits
    assert largest_difference(found, theirs["logits_f64"]) <= 1e-10

    facts = json.loads((golden / f"{case}.json").read_text())
    original, config = facts["model"], result.plan.config
    assert sorted(result.plan.ignored) == sorted(facts["ckpt"]["ignored_keys"])
    assert config.grid == tuple(side // 16 for side in facts["image_size"])
    assert config.pooling == {"tok": "token", "gap": "gap", "map": "map"}[original["pool_type"]]
    assert config.position_embedding == {"learn": "learned", "sincos2d": "sincos_2d"}[original["posemb"]]
    assert not config.position_on_class_token
    assert config.representation_size == (original["width"] if original["rep_size"] else None)
    assert (config.num_hidden_layers, config.num_attention_heads) == (original["depth"], original["num_heads"])
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize(("case", "size"), RESIZED)
def test_resized_positions_are_the_originals(case, size, resize, golden: Path, tmp_path: Path):
    """Both ways of reaching another size: resampled once at conversion, or on the fly by the model of native size."""
    result = conversion.convert(
        golden / f"{case}.ckpt.npz",
        tmp_path / "model",
        resize_to=(size, size) if resize else None,
        recording=golden / f"resize_{case}.io.npz",
    )
    compared = {one.array: one.difference for one in result.verification.checks}
    for array in (f"posemb_out_{size}", f"posemb_out_f64_{size}", f"logits_{size}", f"logits_f64_{size}"):
        assert compared[array] <= (1e-10 if "f64" in array else 1e-5)
    assert ("posemb_in" in compared) is not resize
    if resize:
        theirs = np.load(golden / f"resize_{case}.io.npz")
        model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
        table = model.vit.embeddings.position_embeddings
        assert largest_difference(table, theirs[f"posemb_out_{size}"]) <= 1e-7
        assert AutoImageProcessor.from_pretrained(result.output).size == {"height": size, "width": size}


def renamed(arrays, *pairs):
    """The same arrays, with every pattern replaced in their names."""
    for pattern, new in pairs:
        arrays = {re.sub(pattern, new, key): value for key, value in arrays.items()}
    return arrays


PRE_LINEN = (
    (r"encoderblock_(\d)/LayerNorm_1", r"encoderblock_\1/LayerNorm_2"),
    (r"encoderblock_(\d)/MultiHeadDotProductAttention_0", r"encoderblock_\1/MultiHeadDotProductAttention_1"),
    (r"encoderblock_(\d)/MlpBlock_0", r"encoderblock_\1/MlpBlock_3"),
    ("MAPHead_0/LayerNorm_0", "MAPHead_0/LayerNorm_1"),
    ("MAPHead_0/MlpBlock_0", "MAPHead_0/MlpBlock_2"),
)
# Forms of one and the same model, as this code wrote it over the years.
FORMS = {
    "params": lambda a: renamed(a, ("^", "params/")),
    "opt/target": lambda a: renamed(a, ("^", "opt/target/")),
    "image tower": lambda a: as_tower(a, "params/"),
    "image tower without prefix": lambda a: as_tower(a, ""),
    "stacked blocks": stacked,
    "numbers of before linen": lambda a: renamed(a, *PRE_LINEN),
    "table in the encoder": lambda a: renamed(a, ("^pos_emb", "Transformer/pos_emb")),
    "table in a module of the encoder": lambda a: renamed(a, ("^pos_emb", "Transformer/posembed_input/pos_emb")),
    "MAP head inlined": lambda a: renamed(a, (f"^{MAP}", "")),
    "all that is old": lambda a: renamed(
        a, *PRE_LINEN, (f"^{MAP}", ""), ("^pos_emb", "Transformer/posembed_input/pos_emb"), ("^", "opt/target/")
    ),
}


@pytest.fixture(scope="module")
def map_model(golden: Path):
    return dict(np.load(golden / "bv_map_learn.ckpt.npz"))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_originals_digits(form, map_model, golden: Path, write_npz, tmp_path: Path):
    arrays = form(map_model)
    source, recording = write_npz(arrays), golden / "bv_map_learn.io.npz"
    result = conversion.convert(source, tmp_path / "model", recording=recording, report=tmp_path / "report.json")
    assert len(result.verification.checks) == len(np.load(recording).files) - 1
    lines = json.loads((tmp_path / "report.json").read_text())["keys"]
    assert {line["source"] for line in lines} == set(arrays)
    others = [key for key in arrays if key.removeprefix("params/").startswith("txt/")]
    losses = [key for key in arrays if key.removeprefix("params/") in ("t", "b")]
    assert result.plan.ignored == {
        **dict.fromkeys(others, "the text tower"),
        **dict.fromkeys(losses, "temperature and bias of the contrastive loss"),
    }


def test_blocks_that_are_not_stacked(golden: Path, write_npz, tmp_path: Path):
    """The other way round: the recorded scan with one array a block."""
    arrays = {}
    for key, value in np.load(golden / "bv_map_sincos_rep_scan.ckpt.npz").items():
        if "/encoderblock/" in key:
            arrays |= {key.replace("/encoderblock/", f"/encoderblock_{i}/"): part for i, part in enumerate(value)}
        else:
            arrays[key] = value
    recording = golden / "bv_map_sincos_rep_scan.io.npz"
    conversion.convert(write_npz(arrays), tmp_path / "model", image_size=(64, 48), recording=recording)


def test_class_tokens_row_of_an_older_table(golden: Path, write_npz, tmp_path: Path):
    """Older files attach the class token before the table is added; the loader of today adds its row to the token."""
    arrays = {key: value.astype(np.float64) for key, value in np.load(golden / "bv_tok_learn_rep.ckpt.npz").items()}
    row = np.random.default_rng(0).normal(size=(1, 1, 48))
    table = arrays["opt/target/pos_embedding"]
    arrays["opt/target/pos_embedding"] = np.concatenate([row, table], axis=1)
    arrays["opt/target/cls"] -= row
    recorded = dict(np.load(golden / "bv_tok_learn_rep.io.npz"))
    del recorded["with_posemb"]  # that is without the class token, which has a position here
    recording = write_npz(recorded, "recording.npz")
    source = write_npz(arrays)
    result = conversion.convert(source, tmp_path / "model", recording=recording)
    assert result.plan.config.position_on_class_token
    for declared, grid in (((48, 48), (3, 3)), ((16, 144), (1, 9))):
        shapes = {key: value.shape for key, value in arrays.items()}
        assert conversion.plan(shapes, image_size=declared).config.grid == grid
    declared = conversion.plan(shapes, image_size=(32, 80)).config  # ten rows may also be a grid of 2x5
    assert (declared.grid, declared.position_on_class_token) == ((2, 5), False)


def test_report_names_the_block_of_a_stacked_array(golden: Path, tmp_path: Path):
    source = golden / "bv_map_sincos_rep_scan.ckpt.npz"
    conversion.convert(source, tmp_path / "model", image_size=(64, 48), report=tmp_path / "report.json")
    lines = json.loads((tmp_path / "report.json").read_text())["keys"]
    norms = [line for line in lines if line["source"].endswith("encoderblock/LayerNorm_0/bias")]
    assert [(line["block"], line["target"]) for line in norms] == [
        (i, f"vit.layers.{i}.layernorm_before.bias") for i in range(3)
    ]
    assert {(tuple(line["shape"]), tuple(line["target_shape"])) for line in norms} == {((3, 32), (32,))}


SIZES = {"depth": 2, "heads": 2, "head_size": 4, "mlp": 12, "patch": (4, 4), "grid": (3, 3), "linen": True}


@pytest.fixture
def small(checkpoint):
    """Shapes of a small model with the given pooling; a file of today."""

    def make(pooling="token", **options):
        arrays = class_token_apart(checkpoint(**SIZES | {"token": pooling == "token"} | options))
        arrays = with_map_head(arrays) if pooling == "map" else arrays
        return {key: value.shape for key, value in arrays.items()}

    return make


def without(*parts):
    return lambda s: {key: shape for key, shape in s.items() if not any(part in key for part in parts)}


def stack(s):
    rest = {key: shape for key, shape in s.items() if BLOCK not in key}
    return rest | {key.replace("_0/", "/", 1): (2, *shape) for key, shape in s.items() if f"{BLOCK}0/" in key}


MISFITS = {
    "no table and no size": ("token", without("pos_embedding"), ["no position table", "sincos2d", "--image-size HxW"]),
    "class token and MAP head": ("map", lambda s: s | {"cls": (1, 1, 8)}, ["a class token and a MAP head"]),
    "two encoders": (
        "gap",
        lambda s: s | {f"params/img/{key}": shape for key, shape in s.items()},
        ["encoders under 2 of the prefixes", "exactly one set of weights"],
    ),
    "unknown prefix": ("gap", lambda s: {f"model/{k}": v for k, v in s.items()}, ["encoders under 0 of the prefixes"]),
    "two tables": (
        "gap",
        lambda s: s | {"Transformer/pos_embedding": (1, 9, 8)},
        ["holds pos_embedding in an older place and in today's"],
    ),
    "half a MAP head": (
        "map",
        without(f"{MAP}Mlp"),
        [f"4 keys missing: {MAP}MlpBlock_0/Dense_0/kernel, {MAP}MlpBlock_0/Dense_0/bias"],
    ),
    "half an inlined MAP head": (
        "map",
        lambda s: renamed(without("Head_0/Layer")(s), (f"^{MAP}", "")),
        ["2 keys missing: LayerNorm_0/scale, LayerNorm_0/bias"],
    ),
    "no probe": ("map", without("probe"), [f"1 keys missing: {MAP}probe"]),
    "heads of the MAP head swapped": (
        "map",
        lambda s: s | {f"{MAP}MultiHeadDotProductAttention_0/out/kernel": (4, 2, 8)},
        ["out/kernel is 4x2x8 (needs 2x4x8, it looks transposed)"],
    ),
    "table of two axes": ("gap", lambda s: s | {"pos_embedding": (9, 8)}, ["pos_embedding is 9x8 (needs 1xTx8)"]),
    "table that is no square": ("gap", lambda s: s | {"pos_embedding": (1, 6, 8)}, ["6 patches, which make no square"]),
    "row for a class token that is not there": (
        "gap",
        lambda s: s | {"pos_embedding": (1, 10, 8)},
        ["10 patches, which make no square"],
    ),
    "stacked array of another depth": (
        "gap",
        lambda s: stack(s) | {"Transformer/encoderblock/LayerNorm_0/bias": (3, 8)},
        ["encoderblock/LayerNorm_0/bias is 3x8 (needs 2x8)"],
    ),
    "stacked and not": (
        "gap",
        lambda s: s | stack(s),
        ["32 keys left over: Transformer/encoderblock_0/"],
    ),
    "key missing beside stacked blocks": (
        "gap",
        lambda s: without("embedding/bias")(stack(s)),
        ["1 keys missing: embedding/bias"],
    ),
    "absurd depth": (
        "gap",
        lambda s: {k: (10**6, *v[1:]) if "encoderblock/" in k else v for k, v in stack(s).items()},
        ["stacks 1000000 encoder blocks"],
    ),
    "text tower left over": ("gap", lambda s: s | {"txt/head/bias": (3,)}, ["1 keys left over: txt/head/bias"]),
    "names of a file of before linen": (
        "map",
        lambda s: without("MAPHead_0/LayerNorm_1/bias")(renamed(s, *PRE_LINEN)),
        ["1 keys missing: MAPHead_0/LayerNorm_1/bias"],
    ),
}


@pytest.mark.parametrize(("pooling", "edit", "told"), MISFITS.values(), ids=MISFITS)
def test_misfit_is_named(pooling, edit, told, small):
    conversion.plan(small(pooling))
    with pytest.raises(UserError) as error:
        conversion.plan(edit(small(pooling)))
    for text in told:
        assert text in str(error.value)


def test_hidden_size_that_sincos_cannot_split(small):
    shapes = without("pos_embedding")(small("gap", heads=1, head_size=6))
    with pytest.raises(UserError, match="hidden_size=6 into 4 parts"):
        conversion.plan(shapes, image_size=(12, 12))


def test_rectangular_table_needs_its_size_declared(small):
    shapes = small("gap", grid=(2, 3))
    with pytest.raises(UserError, match=r"6 patches, which make no square.*8x12"):
        conversion.plan(shapes)
    assert conversion.plan(shapes, image_size=(8, 12)).config.grid == (2, 3)
    with pytest.raises(UserError, match="9 patches of 4x4 px, but the position table has 6"):
        conversion.plan(shapes, image_size=(12, 12))


@pytest.mark.parametrize("table", ["pos_embedding", "Transformer/posembed_input/pos_embedding"])
@pytest.mark.parametrize("pooling", ["token", "first_patch"])
def test_first_patch_is_declared(pooling: str, table: str, golden: Path, write_npz, tmp_path: Path):
    """big_vision's pool_type "0": the head on the first of the tokens that the original recorded."""
    arrays, recorded = dict(np.load(golden / "bv_gap_learn.ckpt.npz")), np.load(golden / "bv_gap_learn.io.npz")
    source = write_npz(renamed(arrays, ("pos_embedding", table)))
    result = conversion.convert(source, tmp_path / "model", pooling=pooling)
    assert "pooling" not in result.plan.assumed
    wanted = recorded["encoded"][:, 0] @ arrays["params/head/kernel"] + arrays["params/head/bias"]
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert largest_difference(loaded(pixels(recorded["images"])).logits, wanted) <= 1e-5
    mean = conversion.convert(source, tmp_path / "mean", pooling="gap")
    assert "pooling" not in mean.plan.assumed


def test_no_positions_are_declared(golden: Path, write_npz, tmp_path: Path):
    """vit_jax's add_position_embedding=False: as a table of zeros."""
    arrays = dict(np.load(golden / "vit_tok.ckpt.npz"))
    name = next(key for key in arrays if key.endswith("pos_embedding"))
    images, logits = pixels(np.load(golden / "vit_tok.io.npz")["images"]), {}
    without_table = {key: value for key, value in arrays.items() if key != name}
    forms = {"zeros": (arrays | {name: np.zeros_like(arrays[name])}, {})}
    forms["none"] = (without_table, {"image_size": (64, 64), "position_embedding": "none"})
    forms["sincos_2d"] = (without_table, {"image_size": (64, 64), "position_embedding": "sincos_2d"})
    for form, (held, options) in forms.items():
        result = conversion.convert(write_npz(held, f"{form}.npz"), tmp_path / form, **options)
        assert "position_embedding" not in result.plan.assumed
        with torch.no_grad():
            logits[form] = AutoModelForImageClassification.from_pretrained(tmp_path / form).eval()(images).logits
    assert torch.equal(logits["none"], logits["zeros"])
    assert not torch.allclose(logits["sincos_2d"], logits["zeros"], atol=1e-3)
    with pytest.raises(
        UserError, match="--position-embedding none: files of vit_jax have position_embedding='learned'"
    ):
        conversion.convert(golden / "vit_tok.ckpt.npz", tmp_path / "out", position_embedding="none")


@pytest.mark.parametrize(
    ("case", "declared", "assumed"),
    [
        ("bv_gap_sincos_rep", [], ["sincos2d positions", "the mean of the patches", "pixels in [-1, 1]", "no names"]),
        ("bv_gap_sincos_rep", ["--position-embedding", "sincos_2d", "--pooling", "gap"], ["pixels in", "no names"]),
        ("bv_map_learn", [], ["pixels in", "images of 64x64 px", "no names"]),
        ("bv_map_learn", ["--image-size", "64", "--num-labels", "3"], ["pixels in"]),
        ("vit_tok", [], ["pixels in", "images of 64x64 px", "no names"]),
        ("vit_gap", [], ["the mean of the patches", "pixels in", "images of 64x64 px", "no names"]),
        ("hybrid_rti", [], ["pixels in", "images of 64x64 px", "no names"]),
        ("mixer", [], ["pixels in", "images of 64x64 px", "no names"]),
        ("bit_v1", [], ["pixels in", "images of 224x224 px", "no names"]),
    ],
)
def test_command_prints_what_files_of_google_do_not_tell(case, declared, assumed, golden: Path, tmp_path: Path, capsys):
    size = ["--image-size", "48x80"] if case == "bv_gap_sincos_rep" else []
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(golden / f"{case}.ckpt.npz"), str(tmp_path / "out"), *size, *declared])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("assumed, ")]
    texts = (
        line.removeprefix("assumed, as the source does not tell: ").partition("; where that is wrong")[0].split("; ")
    )
    assert len(texts) == len(assumed)
    assert all(text.startswith(begin) for text, begin in zip(texts, assumed, strict=True))
    facts = json.loads((tmp_path / "out" / "facts.json").read_text())[0]["values"]
    assert sorted(facts["assumed"].values()) == sorted(texts)
