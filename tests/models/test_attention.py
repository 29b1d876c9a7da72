"""Attention: every implementation gives the same, and the maps are what the blocks really used."""

import copy

import pytest
import torch
from models.families import ATTENTION, FAMILIES, OTHERS, Family, pad
from models.patterns import pairs_that_see
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit.models.modeling_hf_vit import HfViTAttention, eager_attention_forward


@pytest.fixture(params=["whole", "padded"])
def inputs(request, family: Family, choice: str) -> dict[str, torch.Tensor]:
    config = family.config(choice)
    if request.param == "whole":
        return {"pixel_values": family.images(config, dtype=torch.float64)}
    grids = [(2, 3), (4, 1)]
    singles = [family.images(config, 1, grid, torch.float64) for grid in grids]
    images, mask = pad(config, singles, grids, (4, 3))
    return {"pixel_values": images, "patch_attention_mask": mask}


def real_tokens(config, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, N] bool: True on special tokens and on patches that are not padding."""
    (stride_h, stride_w), images = config.patch_stride, inputs["pixel_values"]
    everything = torch.ones(len(images), images.shape[2] // stride_h, images.shape[3] // stride_w)
    patches = inputs.get("patch_attention_mask", everything).bool().flatten(1)
    special = torch.ones(len(patches), config.num_special_tokens, dtype=torch.bool)
    return torch.cat([patches, special] if config.is_causal else [special, patches], dim=1)


# Upstream: transformers.masking_utils.flex_attention_mask still passes `_compile`, which torch 2.15 deprecates, and
# torch tells that uncompiled flex attention is slow (compiling takes 20 s on a CPU; the gpu tests do that).
@pytest.mark.choices(*ATTENTION)
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_implementations_agree(family: Family, choice: str, inputs):
    """Outputs of all, and gradients of those that have them on a CPU; two are functions of one's own, without masks."""
    ALL_ATTENTION_FUNCTIONS.register("own_eager", eager_attention_forward)
    ALL_ATTENTION_FUNCTIONS.register("own_sdpa", sdpa_attention_forward)
    model = family.build("model", choice, "eager", torch.float64)
    real = real_tokens(model.config, inputs)
    results = {}
    for implementation in ("eager", "sdpa", "flex_attention", "own_eager", "own_sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with torch.set_grad_enabled(implementation != "flex_attention"), torch.compiler.set_stance("force_eager"):
            outputs = model(**inputs)
        if implementation != "flex_attention":
            outputs.pooler_output.square().sum().backward()
        gradients = {f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        results[implementation] = {
            "tokens": outputs.last_hidden_state[real],
            "pooled": outputs.pooler_output,
            **gradients,
        }
    wanted = results.pop("eager")
    assert results["sdpa"].keys() == wanted.keys()
    for implementation, given in results.items():
        for name, tensor in given.items():
            torch.testing.assert_close(
                tensor, wanted[name], rtol=0, atol=1e-11, msg=lambda m, n=f"{implementation}, {name}": f"{n}: {m}"
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("plain", kind) for kind in ("default", "relative", "relative_bias", "causal")), ("local", "gap")],
)
def test_compiled_flex_agrees(name: str, kind: str):
    """The fused kernel itself; torch compiles it for about 20 s a kind on a CPU, where it has no gradients."""
    family = FAMILIES[name]
    model = family.build("model", kind, "eager")
    images = family.images(model.config)
    with torch.no_grad():
        wanted = model(images).last_hidden_state
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(model(images).last_hidden_state, wanted, rtol=0, atol=1e-5)


@pytest.mark.choices(*ATTENTION)
def test_attention_maps_equal_eager_attentions(family: Family, choice: str, inputs):
    """Under eager attention and under sdpa."""
    model = family.build("model", choice, "eager", torch.float64)
    attentions = list(model(**inputs, output_attentions=True).attentions)
    eager = model.attention_maps(**inputs)
    model.set_attn_implementation("sdpa")
    maps = model.attention_maps(**inputs)
    assert list(maps) == list(eager) == list(range(model.config.num_hidden_layers))
    real = family.attentions_of(real_tokens(model.config, inputs), maps.grid)
    for layer in maps:
        modules = (family.attentions_of(each[layer], maps.grid) for each in (maps, eager))
        for given, same, seen in zip(*modules, real, strict=True):
            attention = attentions.pop(0)
            torch.testing.assert_close(given, same, rtol=0, atol=1e-12)
            assert given.shape == attention.shape
            torch.testing.assert_close(given.sum(-1), torch.ones_like(given.sum(-1)), rtol=0, atol=1e-12)
            rows = seen[:, None].expand(given.shape[:-1])
            torch.testing.assert_close(given[rows], attention[rows], rtol=0, atol=1e-12)
            padding = ~seen[:, None, None].expand_as(given) & seen[:, None, :, None].expand_as(given)
            assert not given[padding].any(), "padding is attended to"
            if model.config.is_causal:
                assert not given.triu(1).any(), "a token sees a later one"
    assert attentions == []


@pytest.mark.choices(*ATTENTION)
def test_attention_maps_equal_torchs_own_attention(family: Family, choice: str):
    """Independent: torch's multi_head_attention_forward on each block's input, with masks and offsets made here."""
    model = family.build("model", choice, "sdpa", torch.float64)
    images = family.images(model.config, dtype=torch.float64)
    maps, seen = model.attention_maps(images), []
    for module in model.modules():
        if isinstance(module, HfViTAttention):
            module.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs[0])))
    model(images)
    for layer in maps:
        for given in family.attentions_of(maps[layer], maps.grid):
            attention, normed = seen.pop(0)
            torch.testing.assert_close(given, torchs_map(model.config, attention, normed), rtol=0, atol=1e-12)
    assert seen == []


def torchs_map(config, attention, normed: torch.Tensor) -> torch.Tensor:
    """[B, A, N, N] of an attention module's input [B, N, D]."""
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    normed = normed.transpose(0, 1)
    return F.multi_head_attention_forward(
        query=normed,
        key=normed,
        value=normed,
        embed_dim_to_check=32,
        num_heads=4,
        in_proj_weight=torch.cat([projection.weight for projection in projections]),
        in_proj_bias=torch.cat([normed.new_zeros(32) if p.bias is None else p.bias for p in projections]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=attention.o_proj.weight,
        out_proj_bias=attention.o_proj.bias,
        training=False,
        attn_mask=additive_mask(config, attention, normed),
        average_attn_weights=False,
    )[1]


def additive_mask(config, attention, normed: torch.Tensor) -> torch.Tensor | None:
    """[B*A, N, N]: causal order, q . (embedding of the offset) or its bias by a loop over pairs of patches, or what a
    local model sees.
    """
    tokens, batch = normed.shape[:2]
    if config.model_type == "hf_local_vit":
        return torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(~pairs_that_see(config), -torch.inf)
    if config.is_causal:
        return torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)
    if not config.position_embedding.startswith("relative"):
        return None
    (h, w), special = config.grid, config.num_special_tokens
    table = attention.relative_position.offset_embeddings
    queries = attention.q_proj(normed).reshape(tokens, batch, 4, 8) * 8**-0.5
    mask = torch.zeros(batch, 4, tokens, tokens, dtype=torch.float64)
    for query in range(h * w):
        for key in range(h * w):
            down, right = query // w - key // w, query % w - key % w
            offset = table[(down + h - 1) * (2 * w - 1) + right + w - 1]
            is_bias = config.position_embedding == "relative_bias"
            mask[:, :, special + query, special + key] = offset if is_bias else queries[special + query] @ offset
    return mask.flatten(0, 1)


def test_attention_maps_of_some_layers(family: Family):
    model = family.build("model", num_hidden_layers=4)
    images = family.images(model.config)
    everything = model.attention_maps(images)
    some = model.attention_maps(images, layers=[-1, 0])
    assert sorted(some) == [0, 3]
    assert len(some) == 2
    for layer in some:
        torch.testing.assert_close(some.dense(layer), everything.dense(layer), rtol=0, atol=0)
    with pytest.raises(KeyError, match=r"layer 1 was not asked for; there are \[0, 3\]"):
        some[1]
    for wrong in ([4], [-5], []):
        with pytest.raises(ValueError, match=r"of a model with 4 layers; indices run from -4 to 3"):
            model.attention_maps(images, layers=wrong)


@pytest.mark.choices(*ATTENTION)
def test_attention_maps_name_the_patches(family: Family, choice: str):
    model = family.shared("model", choice)
    maps = model.attention_maps(family.images(model.config, grid=(2, 3)))
    assert maps.grid == (2, 3)
    tokens = torch.arange(family.num_tokens(model.config, (2, 3)))
    first = 0 if model.config.is_causal else model.config.num_special_tokens
    assert tokens[maps.patch_tokens].tolist() == list(range(first, first + 6))


def test_heads_give_the_maps_of_their_model(family: Family):
    model = family.build("classification")
    images = family.images(model.config)
    given, wanted = model.attention_maps(images, layers=[1]), model.vit.attention_maps(images, layers=[1])
    torch.testing.assert_close(given.dense(1), wanted.dense(1), rtol=0, atol=0)


def test_attentions_under_sdpa_are_missing_with_advice(family: Family, head: str):
    """As with transformers' ViT: everything else is answered."""
    model = family.build(head, attn_implementation="sdpa")
    images = family.images(model.config)
    advice = r"output_attentions=True.*'sdpa'.*attention_maps\(pixel_values\).*set_attn_implementation\('eager'\)"
    wanted = model(images)
    with pytest.warns(UserWarning, match=advice):
        given = model(images, output_attentions=True)
    assert given.attentions == ()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted if isinstance(wanted[name], torch.Tensor))
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert len(model(images).attentions) == 2 * len(family.attentions_of(torch.zeros(1, 1), (1, 1)))
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match=advice):
        model(images)
    assert model(images, output_attentions=False).attentions is None


def test_unknown_implementation_names_the_choices(family: Family, head: str):
    with pytest.raises(ValueError, match=r'attn_implementation="foo"') as error:
        family.build(head, attn_implementation="foo")
    assert "sdpa" in str(error.value)
    model = family.build(head)
    with pytest.raises(ValueError, match=r'attn_implementation="foo"'):
        model.set_attn_implementation("foo")


@pytest.mark.parametrize("name", OTHERS)
def test_families_without_a_choice_of_attention(name: str):
    """They answer as they are; a choice is refused in our words, when the model is made and later."""
    model = OTHERS[name].build("classification", attn_implementation="eager")
    assert not model(OTHERS[name].images(model.config), output_attentions=True).attentions
    for implementation in ("sdpa", "flash_attention_2", "flex_attention"):
        message = f'no choice of attention; leave attn_implementation="{implementation}" out'
        with pytest.raises(ValueError, match=message):
            OTHERS[name].build("backbone", attn_implementation=implementation)
        if name != "axial_resnet":  # which transformers leaves as it is, with a warning
            with pytest.raises(ValueError, match=message):
                model.set_attn_implementation(implementation)


@pytest.mark.parametrize("kind", ["relative", "relative_bias"])
def test_flash_refuses_relative_positions(family: Family, kind: str):
    if kind not in family.choices:
        pytest.skip("this family has no relative positions")
    model = family.build("model", kind)
    # Stands in for a machine that has flash attention: the choice is refused before any kernel is looked for.
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=rf"position_embedding='{kind}'.*flash.*'sdpa', 'flex_attention' or 'eager'"):
        model(family.images(model.config))


def test_attention_functions_of_others_that_give_weights():
    """Only the implementations that are known to give none are refused."""
    eager = FAMILIES["plain"].build("model", "default", "eager")
    images = FAMILIES["plain"].images(eager.config)
    ALL_ATTENTION_FUNCTIONS.register("of_others", eager_attention_forward)
    other = copy.deepcopy(eager)
    other.set_attn_implementation("of_others")
    given, wanted = (model(images, output_attentions=True).attentions for model in (other, eager))
    assert len(given) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))
