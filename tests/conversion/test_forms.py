"""Every form of the files of Google's codes, against slow references of their mathematics; options, report, output."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid.reference import stem_forward
from models.families import RESNETS
from originals.cases import CASES, stem
from originals.google import (
    MAP,
    PRE_LINEN,
    as_big_transfer,
    as_tower,
    make_checkpoint,
    make_hybrid,
    make_mixer,
    make_resnet_v2,
    reference_forward,
    renamed,
    resnet_v2_forward,
    shapes_of,
    stacked,
)
from originals.pytorch import hybrid_for_stem, measure_difference, pixels
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.api import build_report, run_stages
from hf_vit.conversion.origins.origin import TRANSFORMS
from hf_vit.conversion.readers import Companions

FORMS = {
    "plain": {},
    "linen names": {"linen": True},
    "many heads": {"heads": 5, "head_size": 3},
    "one head": {"heads": 1, "head_size": 8},
    "deep": {"depth": 12},
    "GAP": {"token": False},
    "representation layer": {"representation": 7},
    "representation layer and GAP, linen": {"representation": 8, "token": False, "linen": True},
    "no head": {"labels": None},
    "no head but a representation layer": {"labels": None, "representation": 6},
    "one label": {"labels": 1},
    "opt/target": {"prefix": "opt/target/"},
    "params": {"prefix": "params/", "linen": True},
    "non-square patch": {"patch": (2, 5)},
    "one channel": {"channels": 1},
    "four channels": {"channels": 4},
    "float16": {"dtype": "float16"},
    "float64": {"dtype": "float64"},
    "big endian": {"dtype": ">f4"},
    "Fortran order": {"order": "F"},
    "Fortran order, stored": {"order": "F", "prefix": "params/"},
    "rectangular": {"grid": (2, 3)},
    "rectangular GAP": {"grid": (2, 3), "token": False},
    "patches, which do not form a square": {"grid": (2, 8)},
}  # fmt: skip


def images_for(arrays, grid, count=2, seed=1):
    kernel = next(value for key, value in arrays.items() if key.endswith("embedding/kernel"))
    p, q, channels = kernel.shape[:3]
    shape = (count, grid[0] * p, grid[1] * q, channels)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def run(model, images, dtype=torch.float64):
    with torch.no_grad():
        return model.to(dtype)(torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2))


def assert_same_digits(arrays, output, grid=(3, 3)):
    """The saved model in float64 against the reference on the same weights, rounded to float32 as the file says."""
    plain = renamed(arrays, ("^(opt/target|params)/", ""))
    arrays = {key: value.astype(np.float32) for key, value in plain.items()}
    images = images_for(arrays, grid)
    expected = reference_forward(arrays, images)
    if "head/kernel" in arrays:
        model = AutoModelForImageClassification.from_pretrained(output)
        np.testing.assert_allclose(run(model, images).logits, expected["logits"], rtol=0, atol=1e-10)
        model = model.vit
    else:
        model = AutoModel.from_pretrained(output)
    found = run(model, images)
    np.testing.assert_allclose(found.last_hidden_state, expected["encoded"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.pooler_output, expected["pre_logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form_gives_the_references_digits(form, write_npz, tmp_path: Path):
    form = dict(form)
    grid, order = form.setdefault("grid", (3, 3)), form.pop("order", "C")
    arrays = {key: np.array(value, order=order) for key, value in make_checkpoint(**form).items()}
    patch = form.get("patch", (4, 4))
    size = None if grid == (3, 3) else (grid[0] * patch[0], grid[1] * patch[1])
    stored = "prefix" in form
    result = conversion.convert(write_npz(arrays, stored=stored), tmp_path / "model", image_size=size)
    assert_same_digits(arrays, tmp_path / "model", grid)
    assert sorted(result.plan.consumed) == sorted(arrays)
    assert not result.plan.ignored
    height, width = grid[0] * patch[0], grid[1] * patch[1]
    assert AutoImageProcessor.from_pretrained(result.output).size == {"height": height, "width": width}


# (form of the file, options, grid, size of the head's input).
NEW_HEADS = [
    ({}, {"num_labels": 3}, (3, 3), 8),
    ({"labels": None, "representation": 6}, {"labels": ["cat", "dog", "ant"]}, (3, 3), 6),
    ({"representation": 6}, {"resize_to": (16, 24), "labels": ["cat", "dog", "ant"], "drop_pre_logits": True}, (4, 6),
        8),
]  # fmt: skip


@pytest.mark.parametrize(("form", "options", "grid", "width"), NEW_HEADS, ids=range(len(NEW_HEADS)))
def test_new_head_is_zero_and_accounted_for(form, options, grid, width, write_npz, tmp_path: Path):
    arrays = make_checkpoint(**form)
    result = conversion.convert(write_npz(arrays), tmp_path / "model", **options)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert (model.config.grid, model.classifier.weight.shape) == (grid, (3, width))
    assert model.config.id2label == dict(enumerate(options.get("labels", ["LABEL_0", "LABEL_1", "LABEL_2"])))
    assert not run(model, images_for(arrays, grid)).logits.any()
    replaced = {key for key, reason in result.plan.ignored.items() if reason == "replaced by a new head"}
    assert replaced == {key for key in arrays if key.startswith("head/")}
    if not options.get("resize_to"):
        images = images_for(arrays, grid)
        tokens = reference_forward(arrays, images)["encoded"]
        np.testing.assert_allclose(run(model.vit, images).last_hidden_state, tokens, rtol=0, atol=1e-10)


def test_optimizer_state_is_ignored_by_rule(write_npz, tmp_path: Path):
    arrays = make_checkpoint(prefix="opt/target/")
    state = {
        "opt/state/step": np.int32(7),
        "opt/state/param_states/head/bias/momentum": np.full(5, np.nan, np.float32),  # never read
        "extra/accum_train_time": np.float64(1.5),
    }
    result = conversion.convert(write_npz(arrays | state), tmp_path / "model")
    assert_same_digits(arrays, tmp_path / "model")
    assert result.plan.ignored == {
        "opt/state/step": "optimizer state",
        "opt/state/param_states/head/bias/momentum": "optimizer state",
        "extra/accum_train_time": "training progress",
    }


def test_values_that_float32_cannot_hold_are_counted(write_npz, tmp_path: Path):
    arrays = make_checkpoint(dtype="float64")
    result = conversion.convert(write_npz(arrays), tmp_path / "model")
    assert sum(result.rounded.values()) == sum((value != value.astype("f4")).sum() for value in arrays.values()) > 0
    facts = json.loads((tmp_path / "model" / "facts.json").read_text())[0]
    assert facts["values"]["rounded_to_float32"] == sum(result.rounded.values())
    exact = {key: value.astype("f4").astype("f8") for key, value in arrays.items()}
    assert not conversion.convert(write_npz(exact), tmp_path / "exact").rounded


def test_output_is_complete(write_npz, tmp_path: Path):
    path = write_npz(make_checkpoint())
    conversion.convert(path, tmp_path / "new" / "model")
    output = tmp_path / "new" / "model"
    processor = json.loads((output / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "ViTImageProcessor"
    assert processor["image_mean"] == processor["image_std"] == [0.5, 0.5, 0.5]
    assert processor["do_convert_rgb"] is True
    assert processor["size"] == {"height": 12, "width": 12}
    (record,) = json.loads((output / "facts.json").read_text())
    assert record["kind"] == "conversion"
    values = record["values"]
    assert values["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (values["source"], values["origin"]) == ("model.npz", "vit_jax")
    assert values["keys"] == {"in_file": 40, "used": 40, "ignored": 0}
    assert "auto_map" in json.loads((output / "config.json").read_text())
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["model"]


@pytest.mark.parametrize("name", CASES)
def test_report_tells_every_key_of_every_origin(name: str):
    case = CASES[name]
    shapes = shapes_of(case.make(make_checkpoint))
    beside = case.beside() if case.beside else {}
    companions = Companions(beside.get("config.json"), beside.get("preprocessor_config.json"))
    plan = conversion.plan(shapes, companions=companions, **case.options)
    report = json.loads(build_report(plan, shapes))
    assert report["origin"] == plan.origin == name.split()[0]
    assert {row["source"]: tuple(row["shape"]) for row in report["keys"] if row["source"]} == shapes
    state = plan.model_class(plan.config).state_dict()
    assert sorted(row["target"] for row in report["keys"] if "target" in row) == sorted(state)
    for row in report["keys"]:
        if row["source"] is None:  # the bias of a projection that has none
            assert row["transform"] == "zeros"
            continue
        assert ("ignored" in row) != (row.get("transform") in TRANSFORMS), row
        if "target" in row:
            assert tuple(row["target_shape"]) == tuple(state[row["target"]].shape)
            parts = row["piece"][1] if "piece" in row else row["shape"][0] if "block" in row else 1
            assert math.prod(row["target_shape"]) * parts == math.prod(row["shape"])


HYBRIDS = {
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
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:images of 19x19 px hold 2x2 whole patches:UserWarning")
@pytest.mark.parametrize("form", HYBRIDS.values(), ids=HYBRIDS)
def test_form_of_a_hybrid_gives_the_references_digits(form, write_npz, tmp_path: Path):
    form = {"grid": (2, 2), **form}
    more_px = form.pop("more_px", 0)
    arrays = make_hybrid(**form)
    (h, w), depths = form["grid"], form.get("depths", (1, 2))
    stride = 4 * 2 ** max(len(depths) - 1, 0) * form.get("side", 1)
    size = (h * stride + more_px, w * stride + more_px)
    result = conversion.convert(write_npz(arrays), tmp_path / "model", image_size=size)
    assert sorted(result.plan.consumed) == sorted(arrays)
    assert tuple(result.plan.config.stage_depths) == depths
    plain = renamed(arrays, ("^opt/target/", ""))
    images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    features = stem_forward(plain, images)["features"][:, : h * form.get("side", 1), : w * form.get("side", 1)]
    expected = reference_forward(plain, features)
    model = result.plan.model_class.from_pretrained(tmp_path / "model").double().eval()
    with torch.no_grad():
        found = model(pixels(images).double())
    found = found.logits if "head/kernel" in plain else found.pooler_output
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-10)


# Forms of one and the same model, as this code wrote it over the years.
BIG_VISION = {
    "params": lambda a: renamed(a, ("^", "params/")),
    "opt/target": lambda a: renamed(a, ("^", "opt/target/")),
    "image tower": lambda a: as_tower(a, "params/"),
    "image tower without prefix": lambda a: as_tower(a, ""),
    "stacked blocks": stacked,
    "numbers of before linen": lambda a: renamed(a, *PRE_LINEN),
    "table in the encoder": lambda a: renamed(a, ("^pos_emb", "Transformer/pos_emb")),
    "table in a module of the encoder": lambda a: renamed(a, ("^pos_emb", "Transformer/posembed_input/pos_emb")),
    "MAP head inlined": lambda a: renamed(a, (f"^{MAP}", "")),
    "all that is old": lambda a: renamed(a, *PRE_LINEN, (f"^{MAP}", ""), ("^pos_emb",
        "Transformer/posembed_input/pos_emb"), ("^", "opt/target/")),
}  # fmt: skip


@pytest.fixture(scope="module")
def map_model(golden: Path):
    return dict(np.load(golden / "bv_map_learn.ckpt.npz"))


@pytest.mark.parametrize("form", BIG_VISION.values(), ids=BIG_VISION)
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


def test_class_tokens_row_of_an_older_table(golden: Path, write_npz, tmp_path: Path):
    """Older files attach the class token before the table is added; the loader of today adds its row to the token."""
    arrays = {key: value.astype(np.float64) for key, value in np.load(golden / "bv_tok_learn_rep.ckpt.npz").items()}
    row = np.random.default_rng(0).normal(size=(1, 1, 48))
    table = arrays["opt/target/pos_embedding"]
    arrays["opt/target/pos_embedding"] = np.concatenate([row, table], axis=1)
    arrays["opt/target/cls"] -= row
    recording = golden / "bv_tok_learn_rep.io.npz"
    result = conversion.convert(write_npz(arrays), tmp_path / "model", recording=recording)
    assert result.plan.config.position_on_class_token
    assert {one.array for one in result.verification.checks} == set(np.load(recording)) - {"images"}
    for declared, grid in (((48, 48), (3, 3)), ((16, 144), (1, 9))):
        assert conversion.plan(shapes_of(arrays), image_size=declared).config.grid == grid
    declared = conversion.plan(shapes_of(arrays), image_size=(32, 80)).config  # ten rows may also be a grid of 2x5
    assert (declared.grid, declared.position_on_class_token) == ((2, 5), False)


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
        assert measure_difference(loaded(pixels(recorded["images"])).logits, wanted) <= 1e-5
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
def test_command_prints_what_googles_files_do_not_tell(case, declared, assumed, golden: Path, tmp_path: Path, command):
    size = ["--image-size", "48x80"] if case == "bv_gap_sincos_rep" else []
    code, _, err = command("convert", golden / f"{case}.ckpt.npz", tmp_path / "out", *size, *declared)
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("assumed, ")]
    texts = (
        line.removeprefix("assumed, as the checkpoint does not record it: ")
        .partition("; if that is wrong")[0]
        .split("; ")
    )
    assert len(texts) == len(assumed)
    assert all(text.startswith(begin) for text, begin in zip(texts, assumed, strict=True))
    facts = json.loads((tmp_path / "out" / "facts.json").read_text())[0]["values"]
    assert sorted(facts["assumed"].values()) == sorted(texts)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_stem_gives_the_maps_of_the_converted_resnet(dtype, tolerance, golden: Path):
    """Whose digits are the original's, stage by stage: test_golden.py."""
    model, resnet = hybrid_for_stem(), hf_vit.from_hub(golden / "bit_v1.ckpt.npz")
    conversion.load_stem(model, golden / "bit_v1.ckpt.npz")
    images = pixels(np.load(golden / "bit_v1.io.npz")["images"]).to(dtype)
    maps = model.to(dtype).vit.embeddings.patch_embeddings.stem(images)
    wanted = resnet.to(dtype).base_model(images).last_hidden_state
    torch.testing.assert_close(maps.flatten(2).mT, wanted, rtol=0, atol=tolerance)


def test_every_key_is_accounted_for_and_nothing_else_changes(golden: Path):
    model = hybrid_for_stem(layer_norm_eps=1e-5, group_norm_eps=1e-6)  # only the latter is the stem's
    before = {name: value.clone() for name, value in model.state_dict().items()}
    account = conversion.load_stem(model, golden / "bit_v1.ckpt.npz")
    assert set(account) == set(np.load(golden / "bit_v1.ckpt.npz"))
    heads = {"params/head/kernel", "params/head/bias"}
    assert {key for key, what in account.items() if what == "head of the ResNet"} == heads
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    stem = {name for name in after if ".stem." in name}
    assert changed == stem == {f"vit.{what}" for key, what in account.items() if key not in heads}


LAYOUTS = {
    "big_vision": dict,
    "big_vision below a prefix": lambda arrays: {f"opt/target/{key}": array for key, array in arrays.items()},
    "big_transfer": as_big_transfer,
    "big_transfer, numbered": lambda arrays: as_big_transfer(arrays, numbered=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def resnet():
    return make_resnet_v2()


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, (2, height, width, channels))


@pytest.mark.parametrize("size", [(32, 32), (37, 46)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_stage_is_the_references(layout, size, resnet, write_npz, tmp_path: Path):
    result = conversion.convert(write_npz(layout(resnet)), tmp_path / "model", image_size=size)
    expected = resnet_v2_forward(resnet, noise(*size))
    model = AutoModelForImageClassification.from_pretrained(result.output).double().eval()
    assert type(model) is hf_vit.HfBitForImageClassification
    found = run_stages(model, pixels(noise(*size)), result.plan)
    for stage, values in expected.items():
        np.testing.assert_allclose(found[stage], values, rtol=0, atol=1e-10, err_msg=stage)
    with torch.no_grad():
        logits = model.float()(pixels(noise(*size)).float()).logits
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=6e-5)


def test_zeros_around_the_pooled_map_as_big_transfer(resnet, write_npz, tmp_path: Path):
    conversion.convert(write_npz(resnet), tmp_path / "model")
    expected = resnet_v2_forward(resnet, noise(33, 40), pool_fill=0.0)["logits"]
    assert np.abs(expected - resnet_v2_forward(resnet, noise(33, 40))["logits"]).max() > 1e-3
    model = hf_vit.HfBitForImageClassification.from_pretrained(tmp_path / "model", zero_padded_pool=True)
    with torch.no_grad():
        found = model.double().eval()(pixels(noise(33, 40))).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_head_and_size_of_a_resnet(resnet, write_npz, tmp_path: Path):
    source = write_npz(as_big_transfer(resnet))
    result = conversion.convert(source, tmp_path / "model", image_size=(40, 48), num_labels=3)
    assert list(result.plan.ignored) == ["resnet/head/conv2d/kernel", "resnet/head/conv2d/bias"]
    assert AutoImageProcessor.from_pretrained(result.output).size == {"height": 40, "width": 48}
    assert "bit_paper: 2+1 pre-activation units, 256 wide, 40x48 px, 3 labels (new head)" in conversion.describe(result)
    bare = {key: array for key, array in resnet.items() if not key.startswith("head/")}
    assert conversion.convert(write_npz(bare), tmp_path / "bare").plan.model_class is hf_vit.HfBitModel


@pytest.mark.parametrize("choice", ["default", "post_activation"])
def test_a_loss_reaches_every_parameter(choice: str):
    model = RESNETS["bit"].build("classification", choice).train()
    model(RESNETS["bit"].images(model.config), labels=torch.tensor([0, 2])).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("name", ["golden", "headless", "not square", "below a prefix"])
def test_the_way_back_is_bit_for_bit(name: str, golden: Path, write_npz, tmp_path: Path):
    options: dict[str, Any] = {"image_size": (4, 6)} if name == "not square" else {}
    others = {"headless": {"labels": None}, "not square": {"grid": (1, 3)}, "below a prefix": {"prefix": "opt/target/"}}
    arrays = dict(np.load(golden / "mixer.ckpt.npz")) if name == "golden" else make_mixer(**others[name])
    result = conversion.convert(write_npz(arrays), tmp_path / "model", **options)
    assert (result.plan.model_class is hf_vit.HfMixerModel) == (name == "headless")
    conversion.export(result.output, tmp_path / "back", "vit_jax")
    back = np.load(tmp_path / "back/model.npz")
    arrays = renamed(arrays, ("^opt/target/", ""))
    assert set(back) == set(arrays)
    for key, array in arrays.items():
        assert (back[key].dtype, back[key].shape) == (array.dtype, array.shape)
        assert back[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("make", [make_checkpoint, make_hybrid, make_mixer, make_resnet_v2, stem])
def test_the_image_tower_of_lit_is_the_plain_model(make, write_npz):
    arrays = make()
    plain, tower = (
        hf_vit.from_hub(write_npz(a, name)) for a, name in ((arrays, "a.npz"), (as_tower(arrays, ""), "b.npz"))
    )
    assert type(plain) is type(tower)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in tower.state_dict().items())


def test_a_mixer_pads_what_its_patch_does_not_divide(write_npz):
    """As the original's convolution (SAME): half of the zeros before, what is uneven after."""
    arrays = make_mixer(patch=(4, 4), grid=(2, 3))
    sizes = {"odd": (7, 10), "whole": (8, 12)}
    ours = {name: hf_vit.from_hub(write_npz(arrays), image_size=size).double() for name, size in sizes.items()}
    images = torch.randn(2, 3, *sizes["odd"], dtype=torch.float64)
    padded = torch.nn.functional.pad(images, (1, 1, 0, 1))
    with torch.no_grad():
        expected, found = ours["whole"](padded).logits, ours["odd"](images).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
