"""A BiT ResNet of post-activation units, in a hybrid's stem: the original's digits, and refusals by name."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hf_vit.conversion as conversion
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTForImageClassification, HfHybridViTModel
from hf_vit.models.modeling_hf_vit import HfViTModel

SMALL = {"image_size": 48, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def hybrid(model_class=HfHybridViTModel, **fields):
    return model_class(HfHybridViTConfig(**SMALL | {"stage_depths": (2, 1), "stem_width": 32} | fields)).eval()


@pytest.fixture(scope="module")
def checkpoint(golden: Path):
    return dict(np.load(golden / "bit_v1.ckpt.npz"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 6e-5), (torch.float64, 1e-10)])
def test_stem_gives_the_originals_digits(dtype, tolerance, checkpoint, golden: Path):
    """Stage by stage, and through the ResNet's mean and head, applied here, up to its logits."""
    model = hybrid()
    conversion.load_stem(model, golden / "bit_v1.ckpt.npz")
    stem, found = model.to(dtype).embeddings.patch_embeddings.stem, {}
    stem.stages[0].register_forward_pre_hook(lambda module, inputs: found.update(stem=inputs[0].clone()))
    stem.stages[0].register_forward_hook(lambda module, inputs, output: found.update(block1=output.clone()))
    theirs = np.load(golden / "bit_v1.io.npz")
    with torch.no_grad():
        found["block2"] = stem(torch.from_numpy(theirs["images"]).to(dtype).permute(0, 3, 1, 2))
    stages = {name: features.permute(0, 2, 3, 1).numpy() for name, features in found.items()}
    pooled = stages["block2"].mean((1, 2))
    logits = pooled @ checkpoint["params/head/kernel"].astype(pooled.dtype) + checkpoint["params/head/bias"]
    if dtype == torch.float64:
        compared = {"pre_logits_f64": pooled, "logits_f64": logits}
    else:
        compared = {"stem_0_c8": stages["stem"][..., :8], "block1_0_c8": stages["block1"][..., :8]}
        compared |= {"block2_0": stages["block2"], "pooled": pooled, "pre_logits": pooled, "logits": logits}
    for array, ours in compared.items():
        np.testing.assert_allclose(ours, theirs[array], rtol=0, atol=tolerance, err_msg=array)


def test_every_key_is_accounted_for_and_nothing_else_changes(checkpoint, golden: Path):
    model = hybrid(HfHybridViTForImageClassification, num_labels=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    account = conversion.load_stem(model, golden / "bit_v1.ckpt.npz")
    assert set(account) == set(checkpoint)
    heads = {"params/head/kernel", "params/head/bias"}
    assert {key for key, what in account.items() if what == "head of the ResNet"} == heads
    after = model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    stem = {name for name in after if ".stem." in name}
    assert changed == stem == {f"vit.{what}" for key, what in account.items() if key not in heads}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stage_depths": (2, 2)}, r"stage_depths=\(2, 1\) \(the model has \(2, 2\)\)"),
        ({"stem_width": 64}, r"stem_width=32 \(the model has 64\)"),
        ({"num_channels": 1}, r"num_channels=3 \(the model has 1\)"),
        ({"layer_norm_eps": 1e-5}, r"layer_norm_eps=1e-06 \(the model has 1e-05\)"),
    ],
)
def test_hybrid_with_another_stem_is_refused(fields, told, golden: Path):
    with pytest.raises(UserError, match=told):
        conversion.load_stem(hybrid(**fields), golden / "bit_v1.ckpt.npz")


def test_model_without_a_stem_is_refused(golden: Path):
    with pytest.raises(UserError, match="HfViTModel has no ResNet stem"):
        conversion.load_stem(HfViTModel(HfViTConfig(**SMALL)), golden / "bit_v1.ckpt.npz")


def without(*parts):
    return lambda a: {key: array for key, array in a.items() if not any(part in key for part in parts)}


MISFITS = {
    "missing unit": (without("block1/unit1"), "12 keys missing: params/block1/unit1/conv1/kernel"),
    "missing norm": (without("gn_root/bias"), "1 keys missing: params/gn_root/bias"),
    "half a head": (without("head/bias"), "1 keys missing: params/head/bias"),
    "key left over": (lambda a: a | {"params/x": np.ones(2)}, "1 keys left over: params/x"),
    "transposed kernel": (
        lambda a: a | {"params/block2/unit1/conv1/kernel": a["params/block2/unit1/conv1/kernel"].swapaxes(2, 3)},
        "conv1/kernel is 1x1x64x128 .needs 1x1x128x64, it looks transposed",
    ),
    "NaN": (lambda a: a | {"params/gn_root/bias": a["params/gn_root/bias"] * np.nan}, "NaN or infinite values"),
    "two ResNets": (lambda a: a | {"conv_root/kernel": np.ones((7, 7, 3, 32))}, "holds 2 ResNets"),
    "hybrid": (
        lambda a: a | {"params/Transformer/encoder_norm/bias": np.ones(8)},
        "a stem takes a BiT ResNet of post-activation units",
    ),
    "ResNetV2": (
        lambda a: {f"root_block/{key.removeprefix('params/')}": array for key, array in a.items()},
        "looks like a BiT ResNetV2",
    ),
    "something else": (lambda a: {"weights": np.ones(3)}, "looks like no BiT ResNet"),
}


@pytest.mark.parametrize(("edit", "told"), MISFITS.values(), ids=MISFITS)
def test_misfit_is_named_and_changes_nothing(edit, told, checkpoint, write_npz):
    model = hybrid()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=told):
        conversion.load_stem(model, write_npz(edit(checkpoint)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
