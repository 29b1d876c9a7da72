"""Plans on names and shapes alone: complete mappings, and one clear line for everything that does not fit."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import hf_vit.conversion as conversion
from hf_vit import variant_config
from hf_vit.conversion import documentation
from hf_vit.conversion.planning.accounting import check_accounting
from hf_vit.errors import UserError

BLOCK = "Transformer/encoderblock_1"


def shapes_of(arrays) -> dict[str, tuple[int, ...]]:
    return {key: value.shape for key, value in arrays.items()}


@pytest.fixture(scope="module")
def published(golden: Path):
    """Name -> entry with the key -> shape of every published file."""
    found = json.loads(gzip.decompress((golden / "published_layouts.json.gz").read_bytes()))
    for entry in found.values():
        entry["keys"] = {key: tuple(shape) for key, shape in entry["keys"].items()}
    return found


def test_published_files_plan_completely(published):
    vits = {name: entry for name, entry in published.items() if "mixer" not in name}
    assert len(vits) == 31
    for name, entry in vits.items():
        shapes = entry["keys"]
        plan = conversion.plan(shapes, file_name=name)
        assert sorted(plan.consumed) == sorted(shapes), name
        assert not plan.ignored
        assert plan.config.image_size == entry["resolution"], name
        assert plan.config.num_labels == entry["classes"], name
        assert plan.config.representation_size == entry["pre_logits"], name
        assert (sum(int(np.prod(row.parameter_shape)) for row in plan.rows)) == sum(map(np.prod, shapes.values()))


def test_published_mixers_plan_completely(published):
    """As the paper's sizes by name, which lie in no file."""
    mixers = {name: entry for name, entry in published.items() if "mixer" in name}
    assert len(mixers) == 6
    for name, entry in mixers.items():
        shapes = entry["keys"]
        plan = conversion.plan(shapes, file_name=name)
        assert sorted(plan.consumed) == sorted(shapes), name
        assert not plan.ignored
        config = plan.config
        assert (config.image_size, config.num_labels) == (entry["resolution"], entry["classes"]), name
        assert (sum(int(np.prod(row.parameter_shape)) for row in plan.rows)) == sum(map(np.prod, shapes.values()))
        variant = variant_config(name.rpartition("/")[2].removesuffix(".npz").replace("_", "/"))
        fields = ("hidden_size", "num_hidden_layers", "token_intermediate_size", "intermediate_size", "patch_size")
        assert [getattr(config, field) for field in fields] == [getattr(variant, field) for field in fields], name


# What is done to the shapes of a good file, and what the refusal must say.
MISFITS = {
    "missing block": (
        lambda s: {key: shape for key, shape in s.items() if BLOCK not in key},
        [f"16 keys missing: {BLOCK}/*"],
    ),
    "missing key": (
        lambda s: {key: shape for key, shape in s.items() if key != f"{BLOCK}/LayerNorm_2/scale"},
        [f"1 keys missing: {BLOCK}/LayerNorm_2/scale"],
    ),
    "extra block with a gap": (
        lambda s: s | {key.replace("block_1", "block_7"): shape for key, shape in s.items()},
        ["64 keys missing: Transformer/encoderblock_3/*, Transformer/encoderblock_4/*"],
    ),
    "half an extra block": (
        lambda s: s | {"Transformer/encoderblock_3/LayerNorm_0/scale": (8,)},
        ["15 keys missing: Transformer/encoderblock_3/LayerNorm_0/bias"],
    ),
    "absurd block number": (
        lambda s: s | {"Transformer/encoderblock_99999999999/LayerNorm_0/scale": (8,)},
        ["1 keys left over: Transformer/encoderblock_99999999999/LayerNorm_0/scale"],
    ),
    "block number with a zero before it": (
        lambda s: {key.replace("block_1/", "block_01/"): shape for key, shape in s.items()},
        [f"16 keys missing: {BLOCK}/*", "16 keys left over: Transformer/encoderblock_01/"],
    ),
    "a third LayerNorm": (
        lambda s: s | {f"{BLOCK}/LayerNorm_9/scale": (8,)},
        [f"1 keys left over: {BLOCK}/LayerNorm_9/scale"],
    ),
    "unknown key": (lambda s: s | {"temperature": ()}, ["1 keys left over: temperature"]),
    "transposed kernel": (
        lambda s: s | {f"{BLOCK}/MlpBlock_3/Dense_0/kernel": (12, 8)},
        [f"1 keys of a wrong shape: {BLOCK}/MlpBlock_3/Dense_0/kernel is 12x8 (needs 8x12, it looks transposed)"],
    ),
    "transposed head": (
        lambda s: s | {"head/kernel": (5, 8)},
        ["1 keys of a wrong shape: head/kernel is 5x8 (needs 8x5, it looks transposed)"],
    ),
    "kernel in PyTorch's order": (
        lambda s: s | {"embedding/kernel": (8, 3, 4, 4)},
        ["1 keys of a wrong shape: embedding/kernel is 8x3x4x4 (needs 8x3x4x8)"],
    ),
    "heads swapped": (
        lambda s: s | {f"{BLOCK}/MultiHeadDotProductAttention_1/out/kernel": (4, 2, 8)},
        ["out/kernel is 4x2x8 (needs 2x4x8, it looks transposed)"],
    ),
    "flat attention kernel": (
        lambda s: s | {f"{BLOCK}/MultiHeadDotProductAttention_1/key/kernel": (8, 8)},
        ["key/kernel is 8x8 (needs 8x2x4)"],
    ),
    "scalar bias": (lambda s: s | {"embedding/bias": ()}, ["embedding/bias is scalar (needs 8)"]),
    "empty array": (lambda s: s | {"cls": (1, 0, 8)}, ["cls is 1x0x8 (needs 1x1x8)"]),
    "two class tokens": (lambda s: s | {"cls": (1, 2, 8)}, ["cls is 1x2x8 (needs 1x1x8)"]),
    "bias of another width": (lambda s: s | {"head/bias": (6,)}, ["head/kernel is 8x5 (needs 8x6)"]),
    "half a head": (lambda s: {k: v for k, v in s.items() if k != "head/bias"}, ["1 keys missing: head/bias"]),
    "several things at once": (
        lambda s: {k: v for k, v in s.items() if k != "embedding/bias"} | {"x": (1,), "cls": (8,)},
        ["1 keys missing: embedding/bias", "1 keys left over: x", "cls is 8 (needs 1x1x8)"],
    ),
    "no block": (lambda s: {k: v for k, v in s.items() if "block" not in k}, ["holds no encoder block"]),
    "two sets of weights": (
        lambda s: s | {f"opt/target/{k}": v for k, v in s.items()},
        ["exactly one set of weights is needed"],
    ),
    "no patch rows": (
        lambda s: s | {"Transformer/posembed_input/pos_embedding": (1, 1, 8)},
        ["has no row for any patch"],
    ),
}


@pytest.mark.parametrize(("edit", "told"), MISFITS.values(), ids=MISFITS)
def test_misfit_is_named(edit, told, checkpoint):
    with pytest.raises(UserError) as error:
        conversion.plan(edit(shapes_of(checkpoint(depth=3))))
    for text in told:
        assert text in str(error.value)


def test_names_of_what_is_missing_follow_the_file(checkpoint):
    linen = shapes_of(checkpoint(linen=True, prefix="opt/target/"))
    del linen[f"opt/target/{BLOCK}/LayerNorm_1/bias"]
    with pytest.raises(UserError, match=rf"missing: opt/target/{BLOCK}/LayerNorm_1/bias$"):
        conversion.plan(linen)


def test_heads_that_do_not_split_the_width_are_refused(checkpoint):
    shapes = shapes_of(checkpoint(heads=2, head_size=4))
    wide = {key: shape for key, shape in shapes.items() if "Attention" not in key or "out/bias" in key}
    for key, shape in shapes.items():
        if key not in wide:
            wide[key] = tuple(3 if side == 4 else side for side in shape)
    with pytest.raises(UserError, match="2 heads of size 3 make 6, but the hidden size is 8"):
        conversion.plan(wide)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_labels": 0}, "0 labels make no classifier"),
        ({"num_labels": 3, "labels": ["a", "b", "c"]}, "not both"),
        ({"resize_to": (3, 12)}, "sizes make no model: image_size=.3, 12. does not fit patch_size=4"),
    ],
)
def test_bad_options_are_refused(options, told, checkpoint):
    with pytest.raises(UserError, match=told):
        conversion.plan(shapes_of(checkpoint()), **options)


OTHERS = {
    "part of an MLP-Mixer": ["MixerBlock_0/token_mixing/Dense_0/kernel", "head/kernel"],
    "hybrid ViT": ["conv_root/kernel", "pos_embedding", "Transformer/encoder_norm/bias"],
    "part of a BiT ResNet": ["resnet/block1/unit01/a/standardized_conv2d/kernel", "resnet/group_norm/beta"],
    "text tower of big_vision": ["params/txt/Encoder_0/encoder_norm/bias", "params/t"],
    "ViT of timm": ["blocks.0.norm1.weight", "pos_embed"],
    "ViT of transformers": ["vit.encoder.layer.0.attention.attention.query.weight"],
    "no checkpoint that is known here": ["weights", "biases"],
}


@pytest.mark.parametrize(("family", "keys"), OTHERS.items(), ids=OTHERS)
def test_other_families_are_named(family, keys):
    with pytest.raises(UserError, match=family):
        conversion.plan({key: (1,) for key in keys})


def test_accounting_notices_every_breach(checkpoint):
    shapes = shapes_of(checkpoint())
    plan = conversion.plan(shapes)
    targets = {row.parameter: row.parameter_shape for row in plan.rows}
    check_accounting(plan, shapes, targets)
    first, second = plan.rows[0], plan.rows[1]
    breaches = {
        "1 keys left over: embedding/kernel; 1 parameters not filled": plan.rows[1:],
        "keys used twice: embedding/bias": (dataclasses.replace(first, key=second.key), *plan.rows[1:]),
        "parameters filled twice": (dataclasses.replace(first, parameter=second.parameter), *plan.rows[1:]),
        "keys used that are not there: x": (dataclasses.replace(first, key="x"), *plan.rows[1:]),
        "parameters that the model does not have: x": (dataclasses.replace(first, parameter="x"), *plan.rows[1:]),
        "parameters of another shape": (dataclasses.replace(first, parameter_shape=(1,)), *plan.rows[1:]),
    }
    for told, rows in breaches.items():
        with pytest.raises(UserError, match=told):
            check_accounting(dataclasses.replace(plan, rows=rows), shapes, targets)


def test_readme_is_up_to_date():
    assert documentation.README.read_text(encoding="utf-8") == documentation.render(), (
        "run python -m hf_vit.conversion.documentation"
    )
