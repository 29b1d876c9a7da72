"""The models against other people's code with the same weights: transformers, timm, scipy."""

import functools
import math

import numpy as np
import pytest
import timm.layers
import torch
import transformers
from models.families import FAMILIES, randomise
from timm.models.vision_transformer import VisionTransformer

PLAIN = FAMILIES["plain"]
# What the other libraries do where they differ from the original.
EXACT_GELU = {"hidden_act": "gelu"}
SIZES = {"image_size": (16, 24), "patch_size": 4, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.fixture
def images() -> torch.Tensor:
    return PLAIN.images(PLAIN.config(**SIZES), batch=3, dtype=torch.float64)


def assert_equal(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)


def transformers_config(name: str, **fields):
    common = {"hidden_size": 32, "num_attention_heads": 4, "num_labels": 3, "layer_norm_eps": 1e-6}
    return getattr(transformers, f"{name}Config")(**{**common, **SIZES, **fields})


def test_transformers_vit_takes_our_state_dict(images):
    ours = PLAIN.build("classification", dtype=torch.float64, **SIZES, **EXACT_GELU)
    theirs = transformers.ViTForImageClassification(transformers_config("ViT")).double().eval()
    theirs.load_state_dict(ours.state_dict())
    labels = torch.tensor([0, 1, 2])
    given, wanted = ours(images, labels=labels), theirs(images, labels=labels)
    assert_equal(given.logits, wanted.logits)
    assert_equal(given.loss, wanted.loss)
    given.loss.backward()
    wanted.loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_equal(parameter.grad, gradients[name].grad)
    hidden, others = (model(images, output_hidden_states=True).hidden_states for model in (ours, theirs))
    for state, other in zip(hidden, others, strict=True):
        assert_equal(state, other)


def test_transformers_bicubic_interpolation_is_ours():
    square = {**SIZES, "image_size": 16}  # theirs takes the square root of the number of patches
    ours = PLAIN.build("classification", dtype=torch.float64, **square, **EXACT_GELU, position_interpolation="bicubic")
    theirs = transformers.ViTForImageClassification(transformers_config("ViT", image_size=16)).double().eval()
    theirs.load_state_dict(ours.state_dict())
    for height, width in ((28, 20), (16, 24), (12, 8)):
        images = torch.rand(2, 3, height, width, dtype=torch.float64)
        assert_equal(ours(images).logits, theirs(images, interpolate_pos_encoding=True).logits)


def test_transformers_deit_takes_our_distillation(images):
    ours = PLAIN.build("classification", "distillation", dtype=torch.float64, **SIZES, **EXACT_GELU)
    theirs = transformers.DeiTForImageClassificationWithTeacher(transformers_config("DeiT")).double().eval()
    state = {key.replace("vit.", "deit."): value for key, value in ours.state_dict().items()}
    state = {("cls_" + key if key.startswith("classifier") else key): value for key, value in state.items()}
    theirs.load_state_dict(state)
    given, wanted = ours(images), theirs(images)
    for name in ("logits", "cls_logits", "distillation_logits"):
        assert_equal(given[name], wanted[name])


def test_transformers_siglip_pooling_is_our_map(images):
    ours = PLAIN.build("model", "map", dtype=torch.float64, **SIZES, **EXACT_GELU)
    from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

    config = transformers.SiglipVisionConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, hidden_act="gelu", layer_norm_eps=1e-6
    )
    theirs = SiglipMultiheadAttentionPoolingHead(config).double()
    state = {key: value for key, value in ours.pooler.map.state_dict().items() if "attention" not in key}
    projections = ours.pooler.map.attention
    for kind in ("weight", "bias"):
        three = [getattr(projections[name], kind) for name in ("q_proj", "k_proj", "v_proj")]
        state[f"attention.in_proj_{kind}"] = torch.cat(three)
        state[f"attention.out_proj.{kind}"] = getattr(projections["o_proj"], kind)
    theirs.load_state_dict(state)
    outputs = ours(images)
    assert_equal(outputs.pooler_output, theirs(outputs.last_hidden_state))


TIMM_NAMES = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "attention.o_proj": "attn.proj",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.cls_token": "cls_token",
    "layers.": "blocks.",
    "layernorm.": "norm.",
    "classifier": "head",
}


def timm_state(model) -> dict[str, torch.Tensor]:
    """Our state dict in timm's layout: fused qkv, other names."""
    state, found = model.state_dict(), {}
    for key, value in state.items():
        if key.startswith("vit.pooler.map"):
            continue
        name = key.removeprefix("vit.")
        for ours, theirs in TIMM_NAMES.items():
            name = name.replace(ours, theirs)
        if "q_proj" in name:
            three = [state[key.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            name, value = name.replace("attention.q_proj", "attn.qkv"), torch.cat(three)
        elif "k_proj" in name or "v_proj" in name:
            continue
        found[name] = value
    return found


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ("default", {}),
        ("layer_scale", {"init_values": 1.0}),
        ("no_qkv_bias", {"qkv_bias": False}),
        ("gap", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        ("gap_with_class_token", {"global_pool": "avg", "fc_norm": False}),
        ("table_before_class_token", {"no_embed_class": True}),
        ("no_position", {"pos_embed": "none"}),
        ("map", {"class_token": False, "global_pool": "map"}),
    ],
)
def test_timm_takes_our_weights(images, choice: str, options: dict):
    ours = PLAIN.build("classification", choice, dtype=torch.float64, **SIZES, **EXACT_GELU)
    theirs = VisionTransformer(
        **{"img_size": (16, 24), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5},
        **{"num_classes": 3, **options},
    )
    state = timm_state(ours)
    if choice == "map":
        state |= timm_map_state(ours.vit.pooler.map)
        norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
        theirs.attn_pool = timm.layers.AttentionPoolLatent(32, num_heads=4, mlp_ratio=1.5, norm_layer=norm)
    theirs = theirs.double().eval()
    theirs.load_state_dict(state)
    assert_equal(ours(images).logits, theirs(images))


def timm_map_state(pooling) -> dict[str, torch.Tensor]:
    found = {"attn_pool.latent": pooling.probe}
    for kind in ("weight", "bias"):
        found[f"attn_pool.q.{kind}"] = getattr(pooling.attention["q_proj"], kind)
        found[f"attn_pool.kv.{kind}"] = torch.cat([getattr(pooling.attention[n], kind) for n in ("k_proj", "v_proj")])
        found[f"attn_pool.proj.{kind}"] = getattr(pooling.attention["o_proj"], kind)
        found[f"attn_pool.norm.{kind}"] = getattr(pooling.layernorm, kind)
        for layer in ("fc1", "fc2"):
            found[f"attn_pool.mlp.{layer}.{kind}"] = getattr(getattr(pooling.mlp, layer), kind)
    return found


def test_shared_groups_equal_a_model_with_copied_blocks(images):
    shared = PLAIN.build("model", dtype=torch.float64, **{**SIZES, "num_hidden_layers": 5, "num_hidden_groups": 2})
    plain = PLAIN.build("model", dtype=torch.float64, **{**SIZES, "num_hidden_layers": 5})
    rest = {key: value for key, value in shared.state_dict().items() if not key.startswith("layers.")}
    for layer, group in enumerate([0, 0, 0, 1, 1]):
        block = shared.layers[group].state_dict()
        rest |= {f"layers.{layer}.{key}": value for key, value in block.items()}
    plain.load_state_dict(rest)
    assert_equal(shared(images).last_hidden_state, plain(images).last_hidden_state)
    assert_equal(shared(images).pooler_output, plain(images).pooler_output)


def test_causal_tokens_see_only_what_stands_before(images):
    model = PLAIN.build("model", "causal_distillation", dtype=torch.float64, **SIZES)
    before = model(images).last_hidden_state
    changed = images.clone()
    changed[:, :, 4:8, 8:12] += 1.0  # patch (1, 2) of a grid of 4 x 6: the ninth in raster order
    difference = (model(changed).last_hidden_state - before).abs().amax(dim=(0, 2))
    assert not difference[:8].any()
    assert (difference[8:] > 1e-3).all(), "later patches and both special tokens, which stand last, see it"
    # The class token is read by the head: the first of the last two.
    assert_equal(model(images).pooler_output, before[:, -2])


def test_representation_is_tanh_of_a_dense_layer(images):
    model = PLAIN.build("model", "representation", dtype=torch.float64, **SIZES)
    outputs = model(images)
    dense = model.pooler.dense
    assert_equal(outputs.pooler_output, torch.tanh(outputs.last_hidden_state[:, 0] @ dense.weight.T + dense.bias))


@pytest.mark.parametrize("rate", [0.25, 0.6])
def test_drop_path_drops_whole_images_and_keeps_the_mean(rate: float):
    from hf_vit.models.modeling_hf_vit import HfViTDropPath

    branch, drop = torch.randn(20_000, 3, 2), HfViTDropPath(rate).train()
    dropped = drop(branch)
    kept = dropped.abs().amax(dim=(1, 2)) > 0
    torch.testing.assert_close(dropped[kept], branch[kept] / (1 - rate))
    assert not dropped[~kept].any()
    deviation = math.sqrt(rate * (1 - rate) / len(branch))
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * deviation
    assert torch.equal(drop.eval()(branch), branch)


def test_drop_path_grows_with_depth():
    model = PLAIN.build("model", num_hidden_layers=5, drop_path_rate=0.2)
    first, *others = (layer.drop_path for layer in model.layers)
    assert first is None
    assert [drop.rate for drop in others] == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_golden_default_is_the_originals_activation():
    """tanh GELU, written out, in place of ACT2FN's."""
    model = PLAIN.build("model", dtype=torch.float64)
    x = torch.linspace(-3, 3, 200, dtype=torch.float64)
    wanted = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
    np.testing.assert_allclose(model.layers[0].mlp.activation_fn(x).numpy(), wanted, rtol=0, atol=1e-14)


def test_randomise_leaves_nothing_at_zero():
    """The helper that all of these tests stand on."""
    for choice in PLAIN.choices:
        model = randomise(PLAIN.classes["classification"](PLAIN.config(choice)))
        assert all(parameter.abs().min() > 0 for parameter in model.parameters())
