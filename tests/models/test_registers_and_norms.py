"""Registers, the norm before the layers, the norm after pooling and SwiGLU: as the libraries that have them compute."""

import re
from typing import Any

import pytest
import timm.layers
import torch
import transformers
from models.families import FAMILIES, randomise
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from hf_vit.models.modeling_hf_axial_vit import HfAxialViTForImageClassification
from hf_vit.models.positions_hf_vit import resample_position_table

PLAIN = FAMILIES["plain"]
State = dict[str, torch.Tensor]

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
# Their names, pieces of names at a time, in this package's words.
RENAMED = {
    r"^(vision_model|dinov2|dinov2_with_registers)\.": "",
    r"^(encoder\.)?(layers?|blocks)\.": "layers.",
    r"\b(layer_norm|norm)1\b": "layernorm_before",
    r"\b(layer_norm|norm)2\b": "layernorm_after",
    r"\bself_attn\b": "attention",
    r"\.attn\.proj\b": ".attention.o_proj",
    r"^(layers.*)\bout_proj\b": r"\1o_proj",
    r"\bls([12])\.gamma": r"layer_scale\1.lambda1",
    r"^(pre_layrnorm|norm_pre)\b": "embeddings.layernorm",
    r"^(post_layernorm|fc_norm|norm)\b": "layernorm",
    r"^(embeddings\.patch_embedding|patch_embed\.proj)\b": "embeddings.patch_embeddings.projection",
    r"^(embeddings\.position_embedding\.weight|pos_embed)$": "embeddings.position_embeddings",
    r"^(embeddings\.class_embedding|cls_token)$": "embeddings.cls_token",
    r"^reg_token$": "embeddings.register_tokens",
    r"^(head\.(?=probe|attention|layernorm|mlp)|attn_pool\.)": "pooler.map.",
    r"^pooler\.map\.norm\b": "pooler.map.layernorm",
    r"^pooler\.map\.latent$": "pooler.map.probe",
    r"^pooler\.map\.(attention\.out_proj|proj)\b": "pooler.map.attention.o_proj",
    r"^pooler\.map\.q\b": "pooler.map.attention.q_proj",
}
# Several of this package's products that they keep as one.
PACKED = {
    "attn.qkv.": ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    "attention.in_proj_": ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    "pooler.map.kv.": ("pooler.map.attention.k_proj.", "pooler.map.attention.v_proj."),
}


def load(ours: Any, theirs: nn.Module, **packed: tuple[str, ...]) -> None:
    """Copy all of their weights into ours, under its own names; nothing of either may be left over."""
    state: State = {}
    for name, value in theirs.state_dict().items():
        for pattern, word in RENAMED.items():
            name = re.sub(pattern, word, name)
        old = next((old for old in (*PACKED, *packed) if old in name), None)
        if old is None:
            state[name] = value
        else:
            parts = ({**PACKED, **packed})[old]
            state |= {name.replace(old, new): part for new, part in zip(parts, value.chunk(len(parts)), strict=True)}
    state = {name: value for name, value in state.items() if name not in ("embeddings.mask_token", "head.weight")}
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    ours.load_state_dict({name: state[name].reshape(shapes[name]) for name in state})


def assert_equal(given: torch.Tensor, wanted: torch.Tensor) -> None:
    assert given.shape == wanted.shape
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-10 * wanted.abs().max().item())


def images_of(size: tuple[int, int] = (16, 16)) -> torch.Tensor:
    return torch.rand(3, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1


def of_transformers(name: str, **fields: Any) -> Any:
    config = getattr(transformers, name.replace("Model", "Config"))(**TINY, **fields)
    return randomise(getattr(transformers, name)(config)).double().eval()


def ours_like(**fields: Any) -> Any:
    sizes = {**TINY, "intermediate_size": 48, "position_interpolation": "bicubic"}
    return PLAIN.classes["model"](PLAIN.config_class(**{**sizes, **fields})).double().eval()


CLIP = {"norm_before_layers": True, "norm_after_pooling": True, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
DINOV2 = {"layer_scale_init_value": 1.0, "hidden_act": "gelu"}
TOWERS = [
    ("CLIPVisionModel", {"intermediate_size": 48}, CLIP),
    ("SiglipVisionModel", {"intermediate_size": 48}, {"pooling": "map"}),
    ("Dinov2Model", {"mlp_ratio": 2}, {**DINOV2, "intermediate_size": 64}),
    # Two thirds of 4 * 32, rounded up to a multiple of 8.
    ("Dinov2Model", {"use_swiglu_ffn": True}, {**DINOV2, "mlp_type": "swiglu", "intermediate_size": 88}),
    (
        "Dinov2WithRegistersModel",
        {"mlp_ratio": 2, "num_register_tokens": 3},
        {**DINOV2, "intermediate_size": 64, "num_register_tokens": 3},
    ),
    ("ViTMSNModel", {"intermediate_size": 48}, {"hidden_act": "gelu"}),
]


@pytest.mark.parametrize(("name", "theirs", "fields"), TOWERS)
def test_towers_of_transformers(name: str, theirs: dict[str, Any], fields: dict[str, Any]):
    """Every hidden state and the pooled output; at another size too, but DINOv2's tables are stretched in float32."""
    tower, model = of_transformers(name, **theirs), ours_like(**fields)
    load(model, tower)
    any_size = not name.startswith("Dinov2")
    for size in ((16, 16), (24, 20)) if any_size else ((16, 16),):
        given = model(images_of(size), output_hidden_states=True)
        options = {"interpolate_pos_encoding": True} if any_size else {}
        wanted = tower(images_of(size), output_hidden_states=True, **options)
        assert_equal(given.last_hidden_state, wanted.last_hidden_state)
        if name != "ViTMSNModel":
            assert_equal(given.pooler_output, wanted.pooler_output)
        for state, other in zip(given.hidden_states, wanted.hidden_states, strict=True):
            assert_equal(state, other)


def test_antialiased_tables_of_timm_and_of_dinov2_with_registers():
    """Both stretch in float32, larger or smaller."""
    fields = {
        **DINOV2,
        "intermediate_size": 64,
        "num_register_tokens": 3,
        "position_interpolation": "bicubic_antialias",
    }
    tower = of_transformers("Dinov2WithRegistersModel", mlp_ratio=2, num_register_tokens=3)
    model = ours_like(**fields)
    load(model, tower)
    for size in ((24, 20), (8, 12)):
        given, wanted = (each(images_of(size)).last_hidden_state for each in (model, tower))
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    table = torch.randn(1, 1 + 4 * 6, 8)
    for grid in ((7, 9), (3, 5)):
        given = resample_position_table(table, (4, 6), grid, 1, "bicubic_antialias")
        torch.testing.assert_close(given, resample_abs_pos_embed(table, list(grid), [4, 6]), rtol=0, atol=1e-6)


TIMM = [
    # Registers and the norm after pooling (vit_*_reg4_gap), positions for the patches alone.
    (
        {"class_token": False, "reg_tokens": 4, "no_embed_class": True, "global_pool": "avg", "fc_norm": True},
        {"pooling": "gap", "num_register_tokens": 4, "norm_after_pooling": True},
    ),
    # A class token among them (DINOv2 in timm).
    (
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 1.0},
        {"num_register_tokens": 2, "position_on_class_token": False, "layer_scale_init_value": 1.0},
    ),
    ({"pre_norm": True}, {"norm_before_layers": True}),
    ({"class_token": False, "global_pool": "avg"}, {"pooling": "gap", "norm_after_pooling": True}),
    ({"global_pool": "avg"}, {"pooling": "gap", "use_class_token": True, "norm_after_pooling": True}),
    ({"fc_norm": True}, {"norm_after_pooling": True}),
    (
        {"class_token": False, "reg_tokens": 4, "no_embed_class": True, "global_pool": "map"},
        {"pooling": "map", "num_register_tokens": 4},
    ),
    (
        {"class_token": False, "no_embed_class": True, "global_pool": "map", "fc_norm": True},
        {"pooling": "map", "norm_after_pooling": True},
    ),
    ({"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU}, {"mlp_type": "swiglu", "intermediate_size": 24}),
    ({"mlp_layer": timm.layers.SwiGLU, "act_layer": nn.SiLU}, {"mlp_type": "swiglu"}),
]
GATED = {
    "mlp.fc1.": ("mlp.gate_proj.", "mlp.up_proj."),
    "mlp.fc1_g.": ("mlp.gate_proj.",),
    "mlp.fc1_x.": ("mlp.up_proj.",),
    "mlp.fc2.": ("mlp.down_proj.",),
}


@pytest.mark.parametrize(("options", "fields"), TIMM)
def test_timms_options(options: dict[str, Any], fields: dict[str, Any]):
    """The tokens that come out, and what the head is given."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    theirs = VisionTransformer(**sizes, num_classes=0, **options)
    if options.get("global_pool") == "map":
        theirs.attn_pool = timm.layers.AttentionPoolLatent(32, num_heads=4, mlp_ratio=1.5, norm_layer=theirs_norm)
    theirs, model = randomise(theirs).double().eval(), ours_like(**{"hidden_act": "gelu", **fields})
    load(model, theirs, **(GATED if "mlp_type" in fields else {}))
    given = model(images_of())
    tokens = theirs.forward_features(images_of())
    assert_equal(given.last_hidden_state, tokens)
    assert_equal(given.pooler_output, theirs.forward_head(tokens))


def theirs_norm(width: int, **options: Any) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6, **options)


def test_a_register_takes_its_position_along():
    """timm gives registers positions too; a register and its row are one constant, so that the sum is a register."""
    options = {"class_token": False, "reg_tokens": 2, "global_pool": "avg", "fc_norm": False}
    theirs = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=0, **options)
    theirs = randomise(theirs).double().eval()
    tokens = theirs.forward_features(images_of())
    theirs.reg_token.data += theirs.pos_embed.data[:, :2]
    theirs.pos_embed.data = theirs.pos_embed.data[:, 2:]
    model = ours_like(pooling="gap", num_register_tokens=2, hidden_act="gelu", intermediate_size=128)
    load(model, theirs)
    assert_equal(model(images_of()).last_hidden_state, tokens)


def test_a_class_token_that_no_pooling_reads_is_a_register():
    """timm's map pooling leaves a class token out."""
    options = {"global_pool": "map", "no_embed_class": True}
    theirs = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=0, **options)
    theirs = randomise(theirs).double().eval()
    model = ours_like(pooling="map", num_register_tokens=1, hidden_act="gelu", intermediate_size=128)
    theirs.reg_token, theirs.cls_token = theirs.cls_token, None
    load(model, theirs)
    theirs.cls_token, theirs.reg_token = theirs.reg_token, None
    assert_equal(model(images_of()).pooler_output, theirs.forward_head(theirs.forward_features(images_of())))


def test_registers_begin_next_to_zero_each_its_own_way():
    """Equal ones would stay equal for ever: nothing tells them apart."""
    for head in PLAIN.classes.values():
        registers = head(PLAIN.config("registers")).base_model.embeddings.register_tokens
        assert 3e-7 < registers.std() < 3e-6
        assert len({tuple(register) for register in registers[0].tolist()}) == 3


def test_last_norm_of_heads_without_a_pooling():
    """A backbone's maps and masked prediction take it on every token, whichever side of the pooling it stands on."""
    for head in ("masked_prediction", "backbone"):
        before, after = (
            PLAIN.build(head, dtype=torch.float64, norm_after_pooling=value, seed=3) for value in (False, True)
        )
        key = "reconstruction" if head == "masked_prediction" else "feature_maps"
        given, wanted = (model(images_of())[key] for model in (after, before))
        assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


def test_an_axial_model_starts_without_registers():
    vit = PLAIN.build("classification", "registers", mlp_type="swiglu", norm_before_layers=True)
    axial = HfAxialViTForImageClassification.from_vit(vit)
    assert (axial.config.num_register_tokens, axial.config.mlp_type) == (0, "swiglu")
    state = vit.state_dict()
    assert torch.equal(axial.vit.layers[1].column.mlp.gate_proj.weight, state["vit.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(axial.vit.embeddings.position_embeddings, state["vit.embeddings.position_embeddings"][:, 1:])
    assert torch.equal(axial.vit.embeddings.layernorm.weight, state["vit.embeddings.layernorm.weight"])
