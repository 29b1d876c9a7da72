"""BiT ResNets as classifiers: the digits of the original, of a slow reference, and of transformers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from models.families import RESNETS
from originals.bit_paper import as_big_transfer, make_resnet_v2, resnet_v2_forward
from originals.recordings import pixels
from transformers import AutoImageProcessor, AutoModelForImageClassification, BitConfig, BitForImageClassification

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.verification.stages import run_stages
from hf_vit.errors import UserError

LAYOUTS = {
    "big_vision": dict,
    "big_vision below a prefix": lambda arrays: {f"opt/target/{key}": array for key, array in arrays.items()},
    "big_transfer": as_big_transfer,
    "big_transfer, numbered": lambda arrays: as_big_transfer(arrays, numbered=True),
}


@pytest.fixture(scope="module")
def arrays():
    return make_resnet_v2()


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, (2, height, width, channels))


def test_recorded_results_of_the_post_activation_network(golden: Path, tmp_path: Path):
    recording = golden / "bit_v1.io.npz"
    result = conversion.convert(golden / "bit_v1.ckpt.npz", tmp_path / "model", recording=recording)
    assert {one.array for one in result.verification.checks} == set(np.load(recording)) - {"images"}
    assert result.verification.largest("float64").difference <= 1e-10
    assert result.plan.config.pre_activation is False


@pytest.mark.parametrize("size", [(32, 32), (37, 46)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_stage_is_the_references(layout, size, arrays, write_npz, tmp_path: Path):
    result = conversion.convert(write_npz(layout(arrays)), tmp_path / "model", image_size=size)
    expected = resnet_v2_forward(arrays, noise(*size))
    model = AutoModelForImageClassification.from_pretrained(result.output).double().eval()
    assert type(model) is hf_vit.HfBitForImageClassification
    found = run_stages(model, pixels(noise(*size)), result.plan)
    for stage, values in expected.items():
        np.testing.assert_allclose(found[stage], values, rtol=0, atol=1e-10, err_msg=stage)
    with torch.no_grad():
        logits = model.float()(pixels(noise(*size)).float()).logits
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=6e-5)


def test_zeros_around_the_pooled_map_as_big_transfer(arrays, write_npz, tmp_path: Path):
    conversion.convert(write_npz(arrays), tmp_path / "model")
    expected = resnet_v2_forward(arrays, noise(33, 40), pool_fill=0.0)["logits"]
    assert np.abs(expected - resnet_v2_forward(arrays, noise(33, 40))["logits"]).max() > 1e-3
    model = hf_vit.HfBitForImageClassification.from_pretrained(tmp_path / "model", zero_padded_pool=True)
    with torch.no_grad():
        found = model.double().eval()(pixels(noise(33, 40))).logits
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


TRANSFORMERS_NAMES = (
    (r"resnet\.encoder\.root_conv", "bit.embedder.convolution"),
    (r"resnet\.encoder\.norm", "bit.norm"),
    (r"resnet\.encoder\.stages\.(\d+)\.(\d+)", r"bit.encoder.stages.\1.layers.\2"),
    ("projection", "downsample.conv"),
    ("classifier", "classifier.1"),
)


def test_transformers_bit_gives_the_same(arrays, write_npz, tmp_path: Path):
    """Its kernels get 1e-8 where the original's get 1e-10: ten times the kernel makes the two the same."""
    conversion.convert(write_npz(arrays), tmp_path / "model")
    ours = hf_vit.HfBitForImageClassification.from_pretrained(tmp_path / "model", zero_padded_pool=True).double().eval()
    config = BitConfig(embedding_size=32, hidden_sizes=[128, 256], depths=[2, 1], num_labels=5)
    theirs = BitForImageClassification(config).double().eval()
    state = {}
    for name, value in ours.state_dict().items():
        for pattern, theirs_name in TRANSFORMERS_NAMES:
            name = re.sub(pattern, theirs_name, name)
        state[name] = 10 * value if value.ndim == 4 else value
    assert theirs.load_state_dict(state)
    with torch.no_grad():
        images = pixels(noise(64, 64))
        torch.testing.assert_close(ours(images).logits, theirs(images).logits, rtol=0, atol=1e-10)


def test_account_head_and_size(arrays, write_npz, tmp_path: Path):
    source = write_npz(as_big_transfer(arrays))
    result = conversion.convert(
        source, tmp_path / "model", image_size=(40, 48), num_labels=3, report=tmp_path / "report.json"
    )
    rows = json.loads((tmp_path / "report.json").read_text())["keys"]
    assert {row["source"] for row in rows if row["source"]} == set(np.load(source))
    assert [row["source"] for row in rows if "ignored" in row] == [
        "resnet/head/conv2d/kernel",
        "resnet/head/conv2d/bias",
    ]
    assert {row["target"] for row in rows if "target" in row} == set(
        result.plan.model_class(result.plan.config).state_dict()
    )
    assert AutoImageProcessor.from_pretrained(result.output).size == {"height": 40, "width": 48}
    assert "bit_paper: 2+1 pre-activation units, 256 wide, 40x48 px, 3 labels (new head)" in conversion.describe(result)
    bare = {key: array for key, array in arrays.items() if not key.startswith("head/")}
    assert conversion.convert(write_npz(bare), tmp_path / "bare").plan.model_class is hf_vit.HfBitModel


UNIT = "resnet/block1/unit02"
MISFITS = {
    "missing norm": (lambda a: drop(a, "resnet/group_norm/beta"), "1 keys missing: resnet/group_norm/beta"),
    "missing unit": (lambda a: drop(a, "block1/unit01"), "10 keys missing: resnet/block1/unit01/a/group_norm/gamma"),
    "missing root": (lambda a: drop(a, "root_block"), "part of a BiT ResNet, whose root is missing"),
    "half a head": (lambda a: drop(a, "conv2d/bias"), "1 keys missing: resnet/head/conv2d/bias"),
    "key left over": (lambda a: a | {"resnet/x": np.ones(2)}, "1 keys left over: resnet/x"),
    "name of big_vision": (
        lambda a: a | {f"{UNIT}/conv1/kernel": np.ones(2)},
        f"1 keys left over: {UNIT}/conv1/kernel",
    ),
    "unit of one digit": (
        lambda a: {key.replace("unit02", "unit2"): array for key, array in a.items()},
        "9 keys left over: resnet/block1/unit2/",
    ),
    "array named twice": (
        lambda a: a | {f"{UNIT}/a/standardized_conv2d_7/kernel": a[f"{UNIT}/a/standardized_conv2d/kernel"]},
        "which are the same array's; one is needed",
    ),
    "transposed kernel": (
        lambda a: a | {f"{UNIT}/c/standardized_conv2d/kernel": np.ones((1, 1, 128, 32))},
        "kernel is 1x1x128x32 .needs 1x1x32x128, it looks transposed",
    ),
    "projection too many": (
        lambda a: a | {f"{UNIT}/a/proj/standardized_conv2d/kernel": np.ones((1, 1, 128, 128))},
        f"1 keys left over: {UNIT}/a/proj",
    ),
    "NaN": (lambda a: a | {"resnet/group_norm/beta": np.full(256, np.nan)}, "NaN or infinite values"),
    "groups do not divide": (lambda a: make_resnet_v2((1,), 48), "48 wide, which GroupNorm's 32 groups do not divide"),
    "two networks": (
        lambda a: {f"{prefix}{key}": v for prefix in ("", "params/") for key, v in make_resnet_v2((1,)).items()},
        "holds 2 ResNets",
    ),
}


def drop(arrays, part):
    return {key: array for key, array in arrays.items() if part not in key}


@pytest.mark.parametrize(("edit", "told"), MISFITS.values(), ids=MISFITS)
def test_misfit_is_named_and_nothing_written(edit, told, arrays, write_npz, tmp_path: Path):
    with pytest.raises(UserError, match=told):
        conversion.convert(write_npz(edit(as_big_transfer(arrays))), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resize_to": (64, 64)}, "A BiT ResNet has no positions to resample"),
        ({"drop_pre_logits": True}, "no representation layer"),
    ],
)
def test_option_that_a_resnet_has_no_use_for(options, told, arrays, write_npz, tmp_path: Path):
    with pytest.raises(UserError, match=told):
        conversion.convert(write_npz(arrays), tmp_path / "model", **options)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("resnetv2_50x1_bit", {}),
        ("resnetv2_50x3_bit", {"stem_width": 192}),
        ("resnetv2_101x1_bit", {"stage_depths": (3, 4, 23, 3)}),
        ("resnetv2_152x2_bit", {"stage_depths": (3, 8, 36, 3), "stem_width": 128}),
    ],
)
def test_published_sizes_have_timms_number_of_parameters(name: str, fields):
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
        ours = hf_vit.HfBitForImageClassification(hf_vit.HfBitConfig(num_labels=1000, **fields))
    assert ours.num_parameters() == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("choice", ["default", "post_activation"])
def test_a_loss_reaches_every_parameter(choice: str):
    model = RESNETS["bit"].build("classification", choice).train()
    model(RESNETS["bit"].images(model.config), labels=torch.tensor([0, 2])).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
