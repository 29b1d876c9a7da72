"""FLOPs of a configuration, by hand, as published, as another library counts; time, money and published prices."""

import math

import pytest
import timm
import torch
from models.families import FAMILIES, MIXERS, RESNETS
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig

import hf_vit
from hf_vit import variant_config
from hf_vit.cost import (
    blog_estimate,
    corrected_estimate,
    estimate,
    forward_flops,
    forward_macs,
    matmul_flops_per_second,
    training_flops,
)
from hf_vit.errors import UserError

# arXiv 2010.11929, table 6: epochs on the 303 million images of JFT, and exaFLOPs of this pre-training.
PUBLISHED = [
    ("B/32", 7, 55), ("B/16", 7, 224), ("L/32", 7, 196), ("L/16", 14, 1567), ("H/14", 14, 4262),
    ("R50+B/16", 7, 274), ("R50+L/32", 7, 246), ("R50+L/16", 7, 859), ("R50+L/16", 14, 1668),
]  # fmt: skip


@pytest.mark.parametrize(("name", "epochs", "published"), PUBLISHED)
def test_training_compute_of_the_paper(name: str, epochs: int, published: int) -> None:
    """6 FLOPs a multiply-add and image."""
    computed = training_flops(variant_config(name), 303e6 * epochs) / 1e18
    assert computed == pytest.approx(published, rel=0.03 if name in ("B/32", "R50+L/16") else 0.005)


def test_bit_is_counted_as_timms() -> None:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = timm.create_model("resnetv2_50x1_bit", num_classes=1000).eval().requires_grad_(False)
        model(torch.zeros(1, 3, 224, 200))
    assert forward_flops(hf_vit.HfBitConfig(num_labels=1000), (224, 200)) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("choice", "registers", "dense"),
    [
        ({}, 0, 2),
        (
            {"num_register_tokens": 3, "mlp_type": "swiglu", "norm_before_layers": True, "norm_after_pooling": True},
            3,
            3,
        ),
        ({"rotary_embedding": "axial"}, 0, 2),
    ],
)
def test_parts_by_hand(choice: dict, registers: int, dense: int) -> None:
    """A ViT of 2 layers on 3 x 2 patches; registers are tokens of every layer, a SwiGLU has three dense layers."""
    width, tokens, mlp, layers = 32, 6 + 1 + registers, 48, 2
    macs = forward_macs(FAMILIES["plain"].config(image_size=(12, 8), **choice))
    parts = {
        "patch embeddings": 6 * 3 * 4 * 4 * width, "attention projections": layers * 4 * tokens * width**2,
        "attention": layers * 2 * tokens**2 * width, "MLPs": layers * dense * tokens * width * mlp, "head": 3 * width,
    }  # fmt: skip
    assert list(macs.items()) == list(parts.items()), "always in one order"
    if not choice:
        pooled = forward_macs(FAMILIES["plain"].config(pooling="map", image_size=(12, 8)))
        assert list(pooled)[:3] == ["patch embeddings", "pooling", "attention projections"]
        relative = forward_macs(FAMILIES["plain"].config("relative", image_size=(12, 8)))
        assert relative == {**macs, "attention": macs["attention"] + layers * 6**2 * width}
        axial = forward_macs(FAMILIES["axial"].config(image_size=(12, 8)))
        assert axial["attention"] == layers * (3 * 2 * 2**2 + 2 * 2 * 3**2) * width
        assert axial["MLPs"] == 2 * layers * 2 * 6 * width * mlp


def test_local_attention_by_hand() -> None:
    """What is computed: tiles of 8 x 8 queries and the keys around them; rows and columns; a token that sees all."""
    choice, width, layers = {"image_size": (64, 36), "attention_window": 5}, 32, 2  # 16 x 9 patches, 2 x 2 tiles
    local = forward_macs(FAMILIES["local"].config(**choice))
    tiles, keys = 4, (8 + 4) * 9 + 1  # of the 9 columns a tile sees all
    assert local["attention"] == layers * 2 * (tiles * 8 * 8 * keys + (16 * 9 + 1)) * width
    plain = forward_macs(FAMILIES["plain"].config(image_size=(64, 36)))
    assert {**local, "attention": 0} == {**plain, "attention": 0}
    cross = forward_macs(FAMILIES["local"].config("criss_cross", **choice))
    assert cross["attention"] == layers * 2 * (16 * 9 * (1 + 9 + 16) + (16 * 9 + 1)) * width


def test_a_stem_by_hand() -> None:
    """Root to 16 x 16, pool to 8 x 8, a unit 1x1, 3x3, 1x1, then one that halves; 32 channels at the root."""
    root, first = 16**2 * 3 * 49 * 32, 8**2 * (32 * 32 + 9 * 32**2 + 32 * 128 + 32 * 128)
    second = 8**2 * 128 * 64 + 4**2 * (9 * 64**2 + 64 * 256 + 128 * 256)
    macs = forward_macs(FAMILIES["hybrid"].config())
    assert macs["stem"] == root + first + second
    assert macs["patch embeddings"] == 4**2 * 256 * 32
    parts = {"convolutions": root + first + second, "head": 256 * 3}
    assert forward_macs(RESNETS["bit"].config(stage_depths=(1, 1))) == parts


def test_a_mixer_by_hand() -> None:
    """2 layers on 4 x 4 patches, 32 wide: an MLP across 16 tokens for every channel, one across channels a token."""
    width, tokens, across, mlp, layers = 32, 16, 24, 48, 2
    assert forward_macs(MIXERS["mixer"].config()) == {
        "patch embeddings": tokens * 3 * 4 * 4 * width,
        "token MLPs": layers * 2 * width * tokens * across,
        "MLPs": layers * 2 * tokens * width * mlp,
        "head": 3 * width,
    }
    with pytest.raises(UserError, match="takes images of 16x16 px only"):
        forward_macs(MIXERS["mixer"].config(), 32)


def test_an_axial_resnet_by_hand() -> None:
    """Along columns, then rows: q.k, q.r and k.r in half the width, values and their offsets in all of it."""
    root = 16**2 * 3 * 49 * 16
    dense = 8**2 * (16 * 32 + 2 * 32 * 64 + 32 * 64 + 16 * 64)
    dense += 8**2 * (64 * 64 + 2 * 64 * 128) + 4**2 * (64 * 128 + 64 * 128)
    attention = 8**2 * (8 + 8) * (3 * 16 + 2 * 32) + 8**2 * (8 + 8) * (3 * 32 + 2 * 64)
    macs = forward_macs(RESNETS["axial_resnet"].config(stage_depths=(1, 1)))
    assert macs == {"convolutions": root + dense, "attention": attention, "head": 128 * 3}
    stem = forward_macs(FAMILIES["axial"].config(stage_depths=(1, 1), stem_width=16, image_size=32, patch_size=8))
    assert stem["stem"] == root + dense + attention


def test_every_head_has_its_part() -> None:
    """Of 4 x 4 patches 32 wide: pooling by a probe, a representation, predictions of all patches, a pyramid."""
    pooled = forward_macs(FAMILIES["plain"].config(pooling="map", representation_size=20), task="model")
    assert pooled["pooling"] == (2 * 16 + 2) * 32**2 + 2 * 16 * 32 + 2 * 32 * 48 + 32 * 20
    predicted = forward_macs(FAMILIES["plain"].config(prediction_target="downsampled"), task="masked_prediction")
    assert predicted["head"] == 16 * 32 * 16 * 512
    fields = dict(use_feature_pyramid=True, fpn_hidden_size=20, out_features=["stage2"])
    pyramid = FAMILIES["plain"].config(patch_size=16, image_size=64, **fields)
    # Strides 4, 8, 16 and 32 px of 16 px: two halvings of the width by 2x2 deconvolutions, one, none, and a pooling.
    up = [16 * 4 * 32 * 16 + 64 * 4 * 16 * 8, 16 * 4 * 32 * 16, 0, 0]
    levels = [(256, 8), (64, 16), (16, 32), (4, 32)]
    by_hand = sum(up) + sum(places * (width * 20 + 9 * 20**2) for places, width in levels)
    assert forward_macs(pyramid, task="backbone")["feature pyramid"] == by_hand
    assert "pooling" not in forward_macs(pyramid, task="backbone")


def test_the_image_counts_and_not_how_attention_is_computed() -> None:
    config = FAMILIES["plain"].config()
    wide = forward_macs(config, (16, 24))
    assert wide["MLPs"] * (16 + 1) == forward_macs(config)["MLPs"] * (24 + 1)
    config._attn_implementation = "flash_attention_2"
    assert forward_macs(config, (16, 24)) == wide
    assert config._attn_implementation == "flash_attention_2"


def test_what_makes_no_whole_patch_costs_nothing() -> None:
    config = FAMILIES["plain"].config()
    with pytest.warns(UserWarning, match="images of 18x27 px hold 4x6 whole patches of 4x4 px"):
        assert forward_macs(config, (18, 27)) == forward_macs(config, (16, 24))


def test_what_cannot_be_counted_is_refused() -> None:
    config = variant_config("Ti/16")
    with pytest.raises(UserError, match="a 'vit' model"):
        forward_flops(ViTConfig())
    with pytest.raises(UserError, match="image 15x15 px is smaller than a patch of 16x16 px"):
        forward_flops(config, 15)
    with pytest.raises(UserError, match=r"no ResNet with axial attention for masked prediction: .* no patches"):
        forward_flops(hf_vit.HfAxialResNetConfig(), task="masked_prediction")
    with pytest.raises(UserError, match="no BiT ResNet for masked prediction"):
        forward_flops(hf_vit.HfBitConfig(), task="masked_prediction")
    config.auto_map = None
    with pytest.raises(UserError, match=r"the configuration of 'hf_vit' cannot be loaded \(TypeError"):
        forward_flops(config)
    config = variant_config("Ti/16")
    for images in (0, -1, float("nan")):
        with pytest.raises(UserError, match="above 0"):
            training_flops(config, images)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"training_flops": 0.0}, "FLOPs of the training"), ({"training_flops": math.inf}, "FLOPs of the training"),
        ({"device_flops": -1.0}, "device FLOP/s"), ({"device_flops": math.nan}, "device FLOP/s"),
        ({"devices": 0}, "devices is 0"), ({"utilisation": 0.0}, "utilization 0"), ({"utilisation": 40.0}, "at most 1"),
        ({"price": -2.0}, "price -2"), ({"price": math.nan}, "price nan"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(wrong: dict[str, float], message: str) -> None:
    given = {"training_flops": 1e18, "device_flops": 1e12, **wrong}
    with pytest.raises(UserError, match=message):
        estimate(given.pop("training_flops"), **given)


def test_corrections_are_said_and_lead_to_the_result() -> None:
    large, huge = corrected_estimate("L/16"), corrected_estimate("H/14")
    # 680 core-days are 85 days of devices with 8 cores, 2,500 are 312.5.
    assert (large.device_days, huge.device_days) == (85, 312.5)
    assert f"{large.tpu_dollars:,.0f}" == "5,090"
    assert huge.tpu_dollars == pytest.approx(312.5 * 24 * 2.495)
    # FLOPs of the paper's table 6 over its table 2's core-days.
    assert large.sustained_flops / 1e12 == pytest.approx(1567e18 / (680 * 86400) / 1e12, rel=0.005)
    assert huge.sustained_flops / 1e12 == pytest.approx(4262e18 / (2500 * 86400) / 1e12, rel=0.005)
    devices, price, twice, core = large.corrections
    blog = blog_estimate("L/16")
    assert [fix.assumption for fix in large.corrections] == list(blog.assumptions[:4])
    assert (devices.before, devices.after) == (blog.tpu_dollars, large.tpu_dollars)
    assert f"{price.after:,.0f}" == "32,855"
    assert price.before == blog.gpu_dollars
    assert (twice.before, twice.after) == (blog.gpu_days, pytest.approx(680 / 3.8))
    assert core.before == twice.after
    assert core.after == large.gpu_days == pytest.approx(680 / (4 * 0.95 * 125 / 61.5))
    assert large.gpu_dollars == pytest.approx(large.gpu_days * 24 * 12.24)
    for fix in large.corrections:
        assert fix.before != fix.after
        assert fix.instead


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fastest of its products but the first, within 0.1 s of a clock that products move."""
    now, seconds, sides = 0.0, iter([1 / 128, 1 / 32, 1 / 64, 1 / 32, 1 / 32]), list[int]()

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal now
        now += next(seconds)
        sides.append(*{*left.shape, *right.shape})

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    assert matmul_flops_per_second("cpu") == 2 * sides[0] ** 3 * 64


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    assert matmul_flops_per_second("cuda", "bf16") > 3 * matmul_flops_per_second("cuda", "fp32")
