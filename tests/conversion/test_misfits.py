"""Files of Google's codes that do not fit: every misfit is named in one line, and nothing is written or changed."""

import dataclasses
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from originals.google import (
    BLOCK,
    MAP,
    PRE_LINEN,
    as_big_transfer,
    class_token_apart,
    make_checkpoint,
    make_hybrid,
    make_mixer,
    make_resnet_v2,
    renamed,
    shapes_of,
    with_map_head,
)
from originals.pytorch import STEM, hybrid_for_stem

import hf_vit
import hf_vit.conversion as conversion
from hf_vit.conversion.origins.registry import ORIGINS
from hf_vit.conversion.planning import check_accounting
from hf_vit.errors import UserError

Shapes = dict[str, tuple[int, ...]]
Edit = Callable[[Shapes], Shapes]
BIG_VISION = {"depth": 2, "heads": 2, "head_size": 4, "mlp": 12, "patch": (4, 4), "grid": (3, 3), "linen": True}


def without(*parts: str) -> Edit:
    return lambda shapes: {key: shape for key, shape in shapes.items() if not any(part in key for part in parts)}


def with_key(key: str, *shape: int) -> Edit:
    return lambda shapes: shapes | {key: shape}


def replaced(pattern: str, new: str) -> Edit:
    return lambda shapes: renamed(shapes, (pattern, new))


def stack(shapes: Shapes) -> Shapes:
    """The blocks of a scan: every array of the first one, with an axis of 2."""
    first = {key.replace("_0/", "/", 1): (2, *shape) for key, shape in shapes.items() if f"{BLOCK}0/" in key}
    return without(BLOCK)(shapes) | first


def small(pooling: str = "token", **options: Any) -> Shapes:
    """A file of today's big_vision."""
    arrays = class_token_apart(make_checkpoint(**BIG_VISION | {"token": pooling == "token"} | options))
    return shapes_of(with_map_head(arrays) if pooling == "map" else arrays)


# Kind of file -> its good shapes.
GOOD: dict[str, Callable[[], Shapes]] = {
    "vit_jax": lambda: shapes_of(make_checkpoint(depth=3)),
    "linen": lambda: shapes_of(make_checkpoint(linen=True, prefix="opt/target/")),
    "hybrid": lambda: shapes_of(make_hybrid()),
    "mixer": lambda: shapes_of(make_mixer()),
    "token": lambda: small("token"),
    "gap": lambda: small("gap"),
    "map": lambda: small("map"),
    "bit_paper": lambda: shapes_of(as_big_transfer(make_resnet_v2())),
}  # fmt: skip
ONE, UNIT = f"{BLOCK}1", "block2/unit1"
# (kind of file, what is done to its shapes, what the refusal must say).
MISFITS: tuple[tuple[str, Edit, list[str]], ...] = (
    ("vit_jax", without(ONE), [f"16 keys missing: {ONE}/*"]),
    ("vit_jax", with_key(f"{BLOCK}3/LayerNorm_0/scale", 8), [f"15 keys missing: {BLOCK}3/LayerNorm_0/bias"]),
    ("vit_jax", replaced("block_1/", "block_01/"), [f"16 keys missing: {ONE}/*", f"16 keys left over: {BLOCK}01/"]),
    ("vit_jax", with_key("embedding/kernel", 8, 3, 4, 4),
        ["1 keys of a wrong shape: embedding/kernel is 8x3x4x4 (needs 8x3x4x8)"]),
    ("vit_jax", with_key(f"{ONE}/MultiHeadDotProductAttention_1/out/kernel", 4, 2, 8),
        ["out/kernel is 4x2x8 (needs 2x4x8, it looks transposed)"]),
    ("vit_jax", with_key(f"{ONE}/MultiHeadDotProductAttention_1/key/kernel", 8, 8),
        ["key/kernel is 8x8 (needs 8x2x4)"]),
    ("vit_jax", with_key("embedding/bias"), ["embedding/bias is scalar (needs 8)"]),
    ("vit_jax", with_key("cls", 1, 0, 8), ["cls is 1x0x8 (needs 1x1x8)"]),
    ("vit_jax", with_key("cls", 1, 2, 8), ["cls is 1x2x8 (needs 1x1x8)"]),
    ("vit_jax", lambda s: without("embedding/bias")(s) | {"x": (1,), "cls": (8,)}, ["1 keys missing: embedding/bias",
        "1 keys left over: x", "cls is 8 (needs 1x1x8)"],),
    ("vit_jax", without("block"), ["holds no encoder block"]),
    ("vit_jax", lambda s: s | replaced("^", "opt/target/")(s), ["select one with --prefix"]),
    ("vit_jax", with_key("Transformer/posembed_input/pos_embedding", 1, 1, 8), ["has no rows for patches"]),
    ("linen", without("1/LayerNorm_1/bias"), [f"1 keys missing: opt/target/{ONE}/LayerNorm_1/bias"]),
    ("hybrid", without("unit1/conv_proj", "unit1/gn_proj"),
        ["6 keys missing: block1/unit1/conv_proj/kernel, block1/unit1/gn_proj/scale, block1/unit1/gn_proj/bias"]),
    ("hybrid", without("gn_root"), ["2 keys missing: gn_root/scale, gn_root/bias"]),
    ("hybrid", without("block2/unit1/"), ["12 keys missing: block2/unit1/conv1/kernel"]),
    ("hybrid", without("block1/"), ["12 keys missing: block1/unit1/conv1/kernel"]),
    ("hybrid", with_key("block2/unit2/conv_proj/kernel", 1, 1, 256, 256),
        ["1 keys left over: block2/unit2/conv_proj/kernel"]),
    ("hybrid", with_key("block999/unit1/conv1/kernel", 1, 1, 8, 8), ["1 keys left over: block999/unit1/conv1/kernel"]),
    ("hybrid", with_key(f"{UNIT}/conv2/kernel", 64, 64, 3, 3),
        [f"1 keys of a wrong shape: {UNIT}/conv2/kernel is 64x64x3x3 (needs 3x3x64x64, it looks transposed)"]),
    ("hybrid", with_key("gn_root/bias", 1, 32), ["gn_root/bias is 1x32 (needs 32)"]),
    ("hybrid", with_key("embedding/kernel", 1, 1, 128, 8), ["embedding/kernel is 1x1x128x8 (needs 1x1x256x8)"]),
    ("hybrid", with_key("embedding/kernel", 1, 2, 256, 8), ["embedding/kernel is 1x2x256x8"]),
    ("hybrid", without("encoderblock"), ["holds no encoder block"]),
    ("hybrid", lambda _: shapes_of(make_hybrid(width=40)), ["the stem has 40 channels"]),
    ("gap", with_key("embedding/kernel", 48, 8), ["pos_embedding is 1x9x8 (needs "]),
    ("token", without("pos_embedding"), ["do not record the image size", "sincos2d", "--image-size"]),
    ("map", with_key("cls", 1, 1, 8), ["a class token and a MAP head"]),
    ("gap", lambda s: s | replaced("^", "params/img/")(s), ["encoders below 2 prefixes", "select one with --prefix"]),
    ("gap", replaced("^", "model/"), ["encoders below the prefix 'model/'", "--prefix model/"]),
    ("gap", with_key("Transformer/pos_embedding", 1, 9, 8), ["holds pos_embedding under an old"]),
    ("map", without(f"{MAP}Mlp"), [f"4 keys missing: {MAP}MlpBlock_0/Dense_0/kernel, {MAP}MlpBlock_0/Dense_0/bias"]),
    ("map", lambda s: replaced(f"^{MAP}", "")(without("Head_0/Layer")(s)),
        ["2 keys missing: LayerNorm_0/scale, LayerNorm_0/bias"]),
    ("map", without("probe"), [f"1 keys missing: {MAP}probe"]),
    ("map", with_key(f"{MAP}MultiHeadDotProductAttention_0/out/kernel", 4, 2, 8),
        ["out/kernel is 4x2x8 (needs 2x4x8, it looks transposed)"]),
    ("gap", with_key("pos_embedding", 9, 8), ["pos_embedding is 9x8 (needs 1xTx8)"]),
    ("gap", with_key("pos_embedding", 1, 10, 8), ["10 patches, which do not form a square"]),
    ("gap", lambda s: stack(s) | {f"{BLOCK[:-1]}/LayerNorm_0/bias": (3, 8)},
        ["encoderblock/LayerNorm_0/bias is 3x8 (needs 2x8)"]),
    ("gap", lambda s: s | stack(s), [f"32 keys left over: {BLOCK}0/"]),
    ("gap", lambda s: without("embedding/bias")(stack(s)), ["1 keys missing: embedding/bias"]),
    ("gap", lambda s: {key: (10**6, *v[1:]) if "encoderblock/" in key else v for key, v in stack(s).items()},
        ["holds 1000000 encoder blocks"]),
    ("gap", with_key("txt/head/bias", 3), ["1 keys left over: txt/head/bias"]),
    ("map", lambda s: without("MAPHead_0/LayerNorm_1/bias")(renamed(s, *PRE_LINEN)),
        ["1 keys missing: MAPHead_0/LayerNorm_1/bias"]),
    ("bit_paper", without("resnet/group_norm/beta"), ["1 keys missing: resnet/group_norm/beta"]),
    ("bit_paper", without("block1/unit01"), ["10 keys missing: resnet/block1/unit01/a/group_norm/gamma"]),
    ("bit_paper", without("root_block"), ["part of a BiT ResNet, whose root is missing"]),
    ("bit_paper", without("conv2d/bias"), ["1 keys missing: resnet/head/conv2d/bias"]),
    ("bit_paper", with_key("resnet/x", 2), ["1 keys left over: resnet/x"]),
    ("bit_paper", with_key("resnet/block1/unit02/conv1/kernel", 2),
        ["1 keys left over: resnet/block1/unit02/conv1/kernel"]),
    ("bit_paper", replaced("unit02", "unit2"), ["9 keys left over: resnet/block1/unit2/"]),
    ("bit_paper", with_key("resnet/block1/unit02/a/standardized_conv2d_7/kernel", 1, 1, 128, 32),
        ["the same array under two names"]),
    ("bit_paper", with_key("resnet/block1/unit02/c/standardized_conv2d/kernel", 1, 1, 128, 32),
        ["kernel is 1x1x128x32 (needs 1x1x32x128, it looks transposed"]),
    ("bit_paper", with_key("resnet/block1/unit02/a/proj/standardized_conv2d/kernel", 1, 1, 128, 128),
        ["1 keys left over: resnet/block1/unit02/a/proj"]),
    ("bit_paper", lambda _: shapes_of(make_resnet_v2((1,), 48)), ["48 channels"]),
    ("bit_paper", lambda _: (one := shapes_of(make_resnet_v2((1,)))) | replaced("^", "params/")(one),
        ["holds ResNets below 2 prefixes"],),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "edit", "told"), MISFITS, ids=[f"{kind}: {told[0]}" for kind, _, told in MISFITS])
def test_misfit_is_named(kind: str, edit: Edit, told: list[str]):
    if kind != "token":
        conversion.plan(GOOD[kind]())
    with pytest.raises(UserError) as error:
        conversion.plan(edit(GOOD[kind]()))
    assert "\n" not in str(error.value)
    for text in told:
        assert text in str(error.value)


def test_heads_that_do_not_split_the_width_are_refused():
    shapes = shapes_of(make_checkpoint(heads=2, head_size=4))
    of_attention = {key for key in shapes if "Attention" in key and "out/bias" not in key}
    wide = {key: tuple(3 if side == 4 else side for side in shapes[key]) for key in of_attention}
    with pytest.raises(UserError, match=r"2 heads of size 3 have 6 channels, .* 8"):
        conversion.plan(shapes | wide)
    with pytest.raises(UserError, match="hidden_size=6 into 4 parts"):
        conversion.plan(without("pos_embedding")(small("gap", heads=1, head_size=6)), image_size=(12, 12))


# (shapes, options, what the refusal must say).
BAD_OPTIONS: tuple[tuple[Callable[[], Shapes], dict[str, Any], str], ...] = (
    (GOOD["vit_jax"], {"num_labels": 3, "labels": ["a", "b", "c"]}, "cannot be combined"),
    (GOOD["vit_jax"], {"resize_to": (3, 12)}, "image_size=(3, 12) does not fit patch_size=4"),
    (GOOD["vit_jax"], {"num_heads": 4}, "checkpoints of vit_jax have num_attention_heads=2"),
    (GOOD["vit_jax"], {"hidden_act": "gelu"}, "checkpoints of vit_jax have hidden_act='gelu_pytorch_tanh'"),
    (GOOD["vit_jax"], {"pooling": "map"}, "checkpoints of vit_jax have pooling='token'"),
    (GOOD["vit_jax"], {"position_embedding": "none"}, "--position-embedding none contradicts"),
    (GOOD["mixer"], {"resize_to": (64, 64)}, "An MLP-Mixer has no position embeddings to resample and only takes"),
    (GOOD["mixer"], {"num_heads": 4}, "An MLP-Mixer has no num_attention_heads; leave --num-heads out"),
    (GOOD["mixer"], {"pooling": "gap"}, "An MLP-Mixer has no pooling; leave --pooling out"),
    (GOOD["mixer"], {"hidden_act": "gelu"}, "checkpoints of mixer have hidden_act='gelu_pytorch_tanh'"),
    (GOOD["mixer"], {"image_size": (8, 8)},
        "has 2x4 = 8 patches of 4x2 px, but the token MLP has 4; give one of the sizes that fit: 8x4"),
    (GOOD["bit_paper"], {"resize_to": (64, 64)}, "A BiT ResNet has no position embeddings to resample"),
    (GOOD["bit_paper"], {"drop_pre_logits": True}, "no representation layer"),
    (lambda: small("gap", grid=(2, 3)), {"image_size": (12, 12)}, "9 patches of 4x4 px, but the position table has 6"),
    (lambda: shapes_of(make_checkpoint(grid=(2, 3))), {"image_size": (12, 12)},
        "12x12 has 3x3 = 9 patches of 4x4 px, but the position table has 6"),
    (lambda: shapes_of(make_checkpoint(grid=(2, 3))), {"image_size": (3, 12)}, "smaller than one patch, 4x4 px"),
)  # fmt: skip


@pytest.mark.parametrize(("make", "options", "told"), BAD_OPTIONS, ids=[row[2] for row in BAD_OPTIONS])
def test_bad_options_are_refused(make: Callable[[], Shapes], options: dict[str, Any], told: str):
    with pytest.raises(UserError, match=re.escape(told)) as error:
        conversion.plan(make(), **options)
    assert "\n" not in str(error.value)


RECTANGULAR = {
    "vit_jax": (lambda: shapes_of(make_checkpoint(grid=(2, 3))), (8, 12), (2, 3), r"6 patches.*--image-size.*8x12"),
    "no token": (lambda: shapes_of(make_checkpoint(grid=(2, 3), token=False)), (8, 12), (2, 3), "6 patches.*8x12"),
    "big_vision": (lambda: small("gap", grid=(2, 3)), (8, 12), (2, 3), r"6 patches, which do not form a square.*8x12"),
    "mixer": (lambda: shapes_of(make_mixer(grid=(1, 3))), (4, 6), (1, 3), "MLP has 3 patches, which do not form"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECTANGULAR)
def test_a_grid_that_is_no_square_is_declared(case: str):
    make, size, grid, told = RECTANGULAR[case]
    with pytest.raises(UserError, match=told):
        conversion.plan(make())
    assert conversion.plan(make(), image_size=size).config.grid == grid


def without_arrays(*parts: str) -> Callable[[dict], dict]:
    return lambda arrays: {key: array for key, array in arrays.items() if not any(part in key for part in parts)}


# What is done to the arrays of a ResNet of post-activation units, which a stem then refuses.
STEM_MISFITS: tuple[tuple[Callable[[dict], dict], str], ...] = (
    (without_arrays("block1/unit1"), "12 keys missing: params/block1/unit1/conv1/kernel"),
    (without_arrays("gn_root/bias"), "1 keys missing: params/gn_root/bias"),
    (without_arrays("head/bias"), "1 keys missing: params/head/bias"),
    (lambda a: a | {"params/x": np.ones(2)}, "1 keys left over: params/x"),
    (lambda a: a | {"params/block2/unit1/conv1/kernel": a["params/block2/unit1/conv1/kernel"].swapaxes(2, 3)},
        "conv1/kernel is 1x1x64x128 .needs 1x1x128x64, it looks transposed"),
    (lambda a: a | {"params/gn_root/bias": a["params/gn_root/bias"] * np.nan}, "NaN or infinite values"),
    (lambda a: a | {"conv_root/kernel": np.ones((7, 7, 3, 32))}, "holds ResNets below 2 prefixes"),
    (lambda a: a | {"params/Transformer/encoder_norm/bias": np.ones(8)},
        "only a BiT ResNet with post-activation units fits a stem"),
    (lambda a: {f"root_block/{key.removeprefix('params/')}": array for key, array in a.items()},
        "looks like a BiT ResNetV2"),
    (lambda a: {"weights": np.ones(3)}, "looks like another kind of checkpoint"),
)  # fmt: skip


@pytest.mark.parametrize(("edit", "told"), STEM_MISFITS, ids=[told for _, told in STEM_MISFITS])
def test_misfit_of_a_stem_is_named_and_changes_nothing(edit, told, golden: Path, write_npz):
    model = hybrid_for_stem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=told):
        conversion.load_stem(model, write_npz(edit(dict(np.load(golden / "bit_v1.ckpt.npz")))))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stage_depths": (2, 2)}, r"stage_depths=\(2, 1\) \(the model has \(2, 2\)\)"),
        ({"stem_width": 64}, r"stem_width=32 \(the model has 64\)"),
        ({"num_channels": 1}, r"num_channels=3 \(the model has 1\)"),
        ({"layer_norm_eps": 1e-5}, r"layer_norm_eps=1e-06 \(the model has 1e-05\)"),
        ({"group_norm_eps": 1e-5}, r"group_norm_eps=1e-06 \(the model has 1e-05\)"),
        ({"weight_standardization": "variance"}, r"weight_standardization=std \(the model has variance\)"),
        (None, "HfViTModel has no ResNet stem"),
    ],
)
def test_model_with_another_stem_is_refused(fields: dict[str, Any] | None, told: str, golden: Path):
    model = hf_vit.HfViTModel(hf_vit.HfViTConfig(**STEM)) if fields is None else hybrid_for_stem(**fields)
    with pytest.raises(UserError, match=told):
        conversion.load_stem(model, golden / "bit_v1.ckpt.npz")


def test_published_files_plan_completely(golden: Path):
    """Key -> shape of every published file; the Mixers have the sizes that the paper names, which no file holds."""
    published = json.loads(gzip.decompress((golden / "published_layouts.json.gz").read_bytes()))
    assert (len(published), sum("mixer" in name for name in published)) == (37, 6)
    for name, entry in published.items():
        shapes = {key: tuple(shape) for key, shape in entry["keys"].items()}
        plan = conversion.plan(shapes, file_name=name)
        config = plan.config
        assert sorted(plan.consumed) == sorted(shapes), name
        assert not plan.ignored
        assert (config.image_size, config.num_labels) == (entry["resolution"], entry["classes"]), name
        assert (sum(int(np.prod(row.parameter_shape)) for row in plan.rows)) == sum(map(np.prod, shapes.values()))
        if "mixer" in name:
            variant = hf_vit.variant_config(name.rpartition("/")[2].removesuffix(".npz").replace("_", "/"))
            fields = ("hidden_size", "num_hidden_layers", "token_intermediate_size", "intermediate_size", "patch_size")
            assert [getattr(config, field) for field in fields] == [getattr(variant, field) for field in fields], name
        else:
            assert config.representation_size == entry["pre_logits"], name


OTHERS = {
    "part of an MLP-Mixer": ["MixerBlock_0/token_mixing/Dense_0/kernel", "head/kernel"],
    "hybrid ViT": ["conv_root/kernel", "pos_embedding", "Transformer/encoder_norm/bias"],
    "part of a BiT ResNet": ["resnet/block1/unit01/a/standardized_conv2d/kernel", "resnet/group_norm/beta"],
    "text tower of big_vision": ["params/txt/Encoder_0/encoder_norm/bias", "params/t"],
    "ViT of timm": ["blocks.0.norm1.weight", "pos_embed"],
    "ViT of transformers": ["vit.encoder.layer.0.attention.attention.query.weight"],
    "an unknown checkpoint": ["weights", "biases"],
}


@pytest.mark.parametrize(("family", "keys"), OTHERS.items(), ids=OTHERS)
def test_other_families_are_named(family, keys):
    with pytest.raises(UserError, match=family):
        conversion.plan({key: (1,) for key in keys})


def test_accounting_notices_every_breach():
    shapes = shapes_of(make_checkpoint())
    plan = conversion.plan(shapes)
    targets = {row.parameter: row.parameter_shape for row in plan.rows}
    check_accounting(plan, shapes, targets)
    first, second = plan.rows[0], plan.rows[1]
    breaches = {
        "1 keys left over: embedding/kernel; 1 parameters not filled": plan.rows[1:],
        "keys used twice: embedding/bias": (dataclasses.replace(first, key=second.key), *plan.rows[1:]),
        "parameters filled twice": (dataclasses.replace(first, parameter=second.parameter), *plan.rows[1:]),
        "keys used but missing from the file: x": (dataclasses.replace(first, key="x"), *plan.rows[1:]),
        "parameters that the model does not have: x": (dataclasses.replace(first, parameter="x"), *plan.rows[1:]),
        "parameters of another shape": (dataclasses.replace(first, parameter_shape=(1,)), *plan.rows[1:]),
    }
    for told, rows in breaches.items():
        with pytest.raises(UserError, match=told):
            check_accounting(dataclasses.replace(plan, rows=rows), shapes, targets)


def test_readme_names_every_origin():
    page = (Path(conversion.__file__).parent / "README.md").read_text()
    assert [origin.name for origin in ORIGINS if f"**{origin.name}**" not in page] == []


@pytest.mark.parametrize(
    ("make", "origin"),
    [
        (make_checkpoint, "position tables"),
        (lambda: make_resnet_v2(depths=(1,), labels=4), "bit_paper"),
        (make_mixer, "mixer"),
    ],
)
def test_a_prefix_that_is_unknown_is_named(make: Callable[[], dict[str, np.ndarray]], origin: str):
    """What the message asks for converts."""
    shapes = {f"my_code/net/{key}": array.shape for key, array in make().items()}
    with pytest.raises(UserError, match=rf"{origin} .*'my_code/net/'.*--prefix my_code/net/"):
        conversion.plan(shapes)
    assert conversion.plan(shapes, prefix="my_code/net/").rows
    both = shapes | {f"my_ema/{key}": array.shape for key, array in make().items()}
    choice = "my_code/net/" if origin == "position tables" else "my_ema/ or my_code/net/"
    with pytest.raises(UserError, match=rf"--prefix {choice}$"):
        conversion.plan(both)
