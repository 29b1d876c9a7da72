"""The models against other people's code with the same weights: transformers and timm; and against written formulas."""

import math
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

from hf_vit.models.embeddings_hf_vit import resample_position_table
from hf_vit.models.modeling_hf_vit import HfViTDropPath

PLAIN = FAMILIES["plain"]
TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
SIZES = {"image_size": (16, 24), "hidden_act": "gelu"}  # theirs is the exact GELU
# Their names, pieces of names at a time, in this package's words.
RENAMED = {
    r"^(vision_model|dinov2|dinov2_with_registers)\.": "", r"^(encoder\.)?(layers?|blocks)\.": "layers.",
    r"\b(layer_norm|norm)1\b": "layernorm_before", r"\b(layer_norm|norm)2\b": "layernorm_after",
    r"\bself_attn\b": "attention", r"\.attn\.proj\b": ".attention.o_proj", r"^(layers.*)\bout_proj\b": r"\1o_proj",
    r"\bls([12])\.gamma": r"layer_scale\1.lambda1", r"^(pre_layrnorm|norm_pre)\b": "embeddings.layernorm",
    r"^(post_layernorm|fc_norm|norm)\b": "layernorm",
    r"^(embeddings\.patch_embedding|patch_embed\.proj)\b": "embeddings.patch_embeddings.projection",
    r"^(embeddings\.position_embedding\.weight|pos_embed)$": "embeddings.position_embeddings",
    r"^(embeddings\.class_embedding|cls_token)$": "embeddings.cls_token", r"^reg_token$": "embeddings.register_tokens",
    r"^(head\.(?=probe|attention|layernorm|mlp)|attn_pool\.)": "pooler.map.",
    r"^pooler\.map\.norm\b": "pooler.map.layernorm", r"^pooler\.map\.latent$": "pooler.map.probe",
    r"^pooler\.map\.(attention\.out_proj|proj)\b": "pooler.map.attention.o_proj",
    r"^pooler\.map\.q\b": "pooler.map.attention.q_proj",
}  # fmt: skip
# Several of this package's products that they keep as one.
PACKED = {
    "attn.qkv.": ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    "attention.in_proj_": ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
    "pooler.map.kv.": ("pooler.map.attention.k_proj.", "pooler.map.attention.v_proj."),
}
GATED = {
    "mlp.fc1.": ("mlp.gate_proj.", "mlp.up_proj."),
    "mlp.fc1_g.": ("mlp.gate_proj.",),
    "mlp.fc1_x.": ("mlp.up_proj.",),
    "mlp.fc2.": ("mlp.down_proj.",),
}


def load(ours: Any, theirs: nn.Module, **packed: tuple[str, ...]) -> None:
    """Copy all of their weights into ours, under its own names; nothing of either may be left over."""
    state: dict[str, torch.Tensor] = {}
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
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12 * max(1, wanted.abs().max().item()))


def images_of(size: tuple[int, int] = (16, 24)) -> torch.Tensor:
    return torch.rand(3, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1


def of_transformers(name: str, kind: str = "Model", **fields: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**TINY, **fields)
    return randomise(getattr(transformers, name + kind)(config)).double().eval()


def of_timm(**options: Any) -> VisionTransformer:
    sizes = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    theirs = VisionTransformer(**{**sizes, **options}, num_classes=0)
    if options.get("global_pool") == "map":
        theirs.attn_pool = timm.layers.AttentionPoolLatent(32, num_heads=4, mlp_ratio=1.5, norm_layer=norm_of_ours)
    return randomise(theirs).double().eval()


def norm_of_ours(width: int, **options: Any) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6, **options)


def ours_like(**fields: Any) -> Any:
    sizes = {**TINY, "intermediate_size": 48, "position_interpolation": "bicubic"}
    return PLAIN.classes["model"](PLAIN.config_class(**{**sizes, **fields})).double().eval()


def test_transformers_vit_takes_our_state_dict():
    """Under the very names: logits, loss, hidden states and every gradient."""
    ours = PLAIN.build("classification", dtype=torch.float64, hidden_act="gelu")
    fields = {"num_labels": 3, "intermediate_size": 48, "layer_norm_eps": 1e-6}
    theirs = of_transformers("ViT", "ForImageClassification", **fields)
    theirs.load_state_dict(ours.state_dict())
    labels = torch.tensor([0, 1, 2])
    given, wanted = (m(images_of((16, 16)), labels=labels, output_hidden_states=True) for m in (ours, theirs))
    for outputs in (given, wanted):
        outputs.loss.backward()
    assert_equal(given.logits, wanted.logits)
    assert_equal(given.loss, wanted.loss)
    for state, other in zip(given.hidden_states, wanted.hidden_states, strict=True):
        assert_equal(state, other)
    for name, parameter in ours.named_parameters():
        assert_equal(parameter.grad, theirs.get_parameter(name).grad)


def test_transformers_deit_takes_our_distillation():
    ours = PLAIN.build("classification", "distillation", dtype=torch.float64, hidden_act="gelu")
    fields = {"num_labels": 3, "intermediate_size": 48, "layer_norm_eps": 1e-6}
    theirs = of_transformers("DeiT", "ForImageClassificationWithTeacher", **fields)
    state = {key.replace("vit.", "deit."): value for key, value in ours.state_dict().items()}
    theirs.load_state_dict({("cls_" + key if key.startswith("cl") else key): value for key, value in state.items()})
    given, wanted = ours(images_of((16, 16))), theirs(images_of((16, 16)))
    for name in ("logits", "cls_logits", "distillation_logits"):
        assert_equal(given[name], wanted[name])


CLIP = {"norm_before_layers": True, "norm_after_pooling": True, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
DINOV2 = {"layer_scale_init_value": 1.0, "hidden_act": "gelu", "intermediate_size": 64}
REGISTERS = {"num_register_tokens": 3}
TOWERS = [
    ("CLIPVision", {"intermediate_size": 48}, CLIP),
    ("SiglipVision", {"intermediate_size": 48}, {"pooling": "map"}),
    ("Dinov2", {"mlp_ratio": 2}, DINOV2),
    # Two thirds of 4 * 32, rounded up to a multiple of 8.
    ("Dinov2", {"use_swiglu_ffn": True}, {**DINOV2, "mlp_type": "swiglu", "intermediate_size": 88}),
    ("Dinov2WithRegisters", {"mlp_ratio": 2, **REGISTERS}, {**DINOV2, **REGISTERS}),
    ("ViTMSN", {"intermediate_size": 48}, {"hidden_act": "gelu"}),
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
        if name != "ViTMSN":
            assert_equal(given.pooler_output, wanted.pooler_output)
        for state, other in zip(given.hidden_states, wanted.hidden_states, strict=True):
            assert_equal(state, other)


def test_antialiased_tables_of_timm_and_of_dinov2_with_registers():
    """Both stretch in float32, larger or smaller."""
    tower = of_transformers("Dinov2WithRegisters", mlp_ratio=2, **REGISTERS)
    model = ours_like(**DINOV2, **REGISTERS, position_interpolation="bicubic_antialias")
    load(model, tower)
    for size in ((24, 20), (8, 12)):
        given, wanted = (each(images_of(size)).last_hidden_state for each in (model, tower))
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    table = torch.randn(1, 1 + 4 * 6, 8)
    for grid in ((7, 9), (3, 5)):
        given = resample_position_table(table, (4, 6), grid, 1, "bicubic_antialias")
        torch.testing.assert_close(given, resample_abs_pos_embed(table, list(grid), [4, 6]), rtol=0, atol=1e-6)


GAP = {"class_token": False, "global_pool": "avg"}
MAP = {"class_token": False, "global_pool": "map"}
TIMM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"img_size": 14}, {"image_size": 14}),  # 3 patches of 4 px: SigLIP's so400m has 384 and 14
    ({"qkv_bias": False}, {"qkv_bias": False}),
    ({"no_embed_class": True}, {"position_on_class_token": False}),
    ({"pos_embed": "none"}, {"position_embedding": "none"}),
    ({**GAP, "fc_norm": False}, {"pooling": "gap"}),
    ({"global_pool": "avg", "fc_norm": False}, {"pooling": "gap", "use_class_token": True}),
    (MAP, {"pooling": "map"}),
    # Registers and the norm after pooling (vit_*_reg4_gap), positions for the patches alone.
    (
        {**GAP, "reg_tokens": 4, "no_embed_class": True, "fc_norm": True},
        {"pooling": "gap", "num_register_tokens": 4, "norm_after_pooling": True},
    ),
    # A class token among them (DINOv2 in timm).
    (
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 1.0},
        {"num_register_tokens": 2, "position_on_class_token": False, "layer_scale_init_value": 1.0},
    ),
    ({"pre_norm": True}, {"norm_before_layers": True}),
    (GAP, {"pooling": "gap", "norm_after_pooling": True}),
    ({"global_pool": "avg"}, {"pooling": "gap", "use_class_token": True, "norm_after_pooling": True}),
    ({"fc_norm": True}, {"norm_after_pooling": True}),
    ({**MAP, "reg_tokens": 4, "no_embed_class": True}, {"pooling": "map", "num_register_tokens": 4}),
    ({**MAP, "no_embed_class": True, "fc_norm": True}, {"pooling": "map", "norm_after_pooling": True}),
    ({"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU}, {"mlp_type": "swiglu", "intermediate_size": 24}),
    ({"mlp_layer": timm.layers.SwiGLU, "act_layer": nn.SiLU}, {"mlp_type": "swiglu"}),
]


@pytest.mark.filterwarnings("ignore:images of .* px hold .* patches:UserWarning")
@pytest.mark.parametrize(("options", "fields"), TIMM)
def test_timms_options(options: dict[str, Any], fields: dict[str, Any]):
    theirs, model = of_timm(**options), ours_like(**{**SIZES, **fields})
    images = images_of((14, 14)) if "img_size" in options else images_of()
    load(model, theirs, **(GATED if "mlp_type" in fields else {}))
    given, tokens = model(images), theirs.forward_features(images)
    assert_equal(given.last_hidden_state, tokens)
    assert_equal(given.pooler_output, theirs.forward_head(tokens))


def test_registers_begin_next_to_zero_each_its_own_way():
    """Equal ones would stay equal for ever: nothing tells them apart."""
    for head in PLAIN.classes.values():
        registers = head(PLAIN.config("registers")).base_model.embeddings.register_tokens
        assert 3e-7 < registers.std() < 3e-6
        assert len({tuple(register) for register in registers[0].tolist()}) == 3


def test_last_norm_of_heads_without_a_pooling():
    """A backbone's maps and masked prediction take it on every token, whichever side of the pooling it stands on."""
    for head, key in {"masked_prediction": "reconstruction", "backbone": "feature_maps"}.items():
        before, after = (PLAIN.build(head, dtype=torch.float64, norm_after_pooling=value) for value in (False, True))
        given, wanted = (model(images_of())[key] for model in (after, before))
        assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


def test_shared_groups_equal_a_model_with_copied_blocks():
    shared = PLAIN.build("model", dtype=torch.float64, num_hidden_layers=5, num_hidden_groups=2)
    plain = PLAIN.build("model", dtype=torch.float64, num_hidden_layers=5)
    rest = {key: value for key, value in shared.state_dict().items() if not key.startswith("layers.")}
    for layer, group in enumerate([0, 0, 0, 1, 1]):
        block = shared.layers[group].state_dict()
        rest |= {f"layers.{layer}.{key}": value for key, value in block.items()}
    plain.load_state_dict(rest)
    assert_equal(shared(images_of()).last_hidden_state, plain(images_of()).last_hidden_state)


def test_blocks_that_were_cut_off_or_added_run_once_each():
    """As in transformers, where the list of blocks alone says which run."""
    longer, shorter = (PLAIN.build("model", dtype=torch.float64, num_hidden_layers=count) for count in (4, 2))
    shorter.load_state_dict(longer.state_dict(), strict=False)
    wanted_of_4, wanted_of_2 = (model(images_of()).last_hidden_state for model in (longer, shorter))
    shorter.layers.extend(longer.layers[2:])
    del longer.layers[2:]
    assert_equal(shorter(images_of()).last_hidden_state, wanted_of_4)
    assert_equal(longer(images_of()).last_hidden_state, wanted_of_2)
    assert list(longer.attention_maps(images_of(), layers=[0, -1])) == [0, 1]


def test_causal_tokens_see_only_what_stands_before():
    model, images = PLAIN.build("model", "causal_distillation", dtype=torch.float64), images_of()
    before = model(images).last_hidden_state
    images[:, :, 4:8, 8:12] += 1.0  # patch (1, 2) of a grid of 4 x 6: the ninth in raster order
    after = model(images)
    difference = (after.last_hidden_state - before).abs().amax(dim=(0, 2))
    assert not difference[:8].any()
    assert (difference[8:] > 1e-3).all(), "later patches and both special tokens, which stand last, see it"
    # The class token is read by the head: the first of the last two.
    assert_equal(after.pooler_output, after.last_hidden_state[:, -2])


@pytest.mark.parametrize("rate", [0.25, 0.6])
def test_drop_path_drops_whole_images_and_keeps_the_mean(rate: float):
    branch, drop = torch.randn(20_000, 3, 2), HfViTDropPath(rate).train()
    dropped = drop(branch)
    kept = dropped.abs().amax(dim=(1, 2)) > 0
    torch.testing.assert_close(dropped[kept], branch[kept] / (1 - rate))
    assert not dropped[~kept].any()
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / len(branch))
    assert torch.equal(drop.eval()(branch), branch)
    first, *others = (layer.drop_path for layer in PLAIN.build(num_hidden_layers=5, drop_path_rate=rate).layers)
    assert first is None
    assert [drop.rate for drop in others] == pytest.approx([rate * part for part in (0.25, 0.5, 0.75, 1)])


def test_drop_path_drops_all_lines_of_an_image():
    model = randomise(FAMILIES["axial"].build(drop_path_rate=0.5)).train()
    for name, parameter in model.layers[1].named_parameters():
        if not name.startswith("row.attention") and ("o_proj" in name or "fc2" in name):
            nn.init.zeros_(parameter)  # then only attention along rows changes the tokens
    states = model(torch.randn(32, 3, 16, 16), output_hidden_states=True).hidden_states
    is_changed = (states[2] != states[1]).any(dim=2)
    assert 0 < is_changed.any(dim=1).sum() < 32
    assert torch.equal(is_changed.any(dim=1), is_changed.all(dim=1))


def test_randomise_leaves_nothing_at_zero():
    """The helper that all of these tests stand on."""
    for choice in PLAIN.choices:
        model = randomise(PLAIN.classes["classification"](PLAIN.config(choice)))
        assert all(parameter.abs().min() > 0 for parameter in model.parameters())
