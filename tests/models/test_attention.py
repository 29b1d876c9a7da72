"""Every implementation gives the same, maps are what blocks used, and sparse families equal dense masked attention."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from models.families import ATTENTION, FAMILIES, OTHERS, Family, pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_vit
from hf_vit.models.modeling_hf_vit import HfViTAttention, eager_attention_forward

PLAIN, AXIAL, LOCAL = (FAMILIES[name] for name in ("plain", "axial", "local"))


Place = tuple[int, int]


def patches_seen(config: Any, place: Place, grid: Place) -> set[Place]:
    """The places that the patch at (row, column) attends to."""
    (row, column), (h, w) = place, grid
    if config.attention_pattern == "local":  # 1906.05909, section 3.1: N_k(i, j)
        reach = (config.attention_window - 1) // 2
        near = range(-reach, reach + 1)
        square = {(row + down, column + right) for down in near for right in near}
        return {(y, x) for y, x in square if 0 <= y < h and 0 <= x < w}
    if config.attention_pattern == "criss_cross":  # 1811.11721, section 3.2: H + W - 1 places
        return {(row, x) for x in range(w)} | {(y, column) for y in range(h)}
    # 1904.10509, section 4.3: A1 = {t, ..., i} with t = max(0, i - l), A2 = {j : (i - j) mod l = 0}; and after i, too.
    stride, i = config.attention_stride, row * w + column
    before = {*range(max(0, i - stride), i + 1)} | {j for j in range(i + 1) if (i - j) % stride == 0}
    after = {*range(i, min(h * w, i + stride + 1))} | {j for j in range(i, h * w) if (j - i) % stride == 0}
    return {divmod(j, w) for j in before | after}


def pairs_that_see(config: Any, grid: Place | None = None) -> torch.Tensor:
    """[N, N] bool, special tokens first: they see all and are seen by all."""
    (h, w), special = grid or config.grid, config.num_special_tokens
    pairs = torch.ones(special + h * w, special + h * w, dtype=torch.bool)
    for query in range(h * w):
        seen = patches_seen(config, divmod(query, w), (h, w))
        for key in range(h * w):
            pairs[special + query, special + key] = divmod(key, w) in seen
    return pairs


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
    """Outputs of all, and gradients of eager and sdpa; two are these, registered as functions of one's own."""
    ALL_ATTENTION_FUNCTIONS.register("own_eager", eager_attention_forward)
    ALL_ATTENTION_FUNCTIONS.register("own_sdpa", sdpa_attention_forward)
    model = family.build("model", choice, "eager", torch.float64)
    real = real_tokens(model.config, inputs)
    results = {}
    for implementation in ("eager", "sdpa", "flex_attention", "own_eager", "own_sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        learns = implementation in ("eager", "sdpa")
        with torch.set_grad_enabled(learns), torch.compiler.set_stance("force_eager"):
            outputs = model(**inputs)
        if learns:
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
    if config.rotary_embedding is not None:
        return rotated_map(config, attention, normed)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    normed = normed.transpose(0, 1)
    attend = torch.nn.MultiheadAttention(32, 4, dtype=torch.float64)
    biases = [normed.new_zeros(32) if p.bias is None else p.bias for p in projections]
    attend.in_proj_weight = torch.nn.Parameter(torch.cat([projection.weight for projection in projections]))
    attend.in_proj_bias = torch.nn.Parameter(torch.cat(biases))
    mask = make_additive_mask(config, attention, normed)
    return attend(normed, normed, normed, attn_mask=mask, average_attn_weights=False)[1]


def rotated_map(config, attention, normed: torch.Tensor) -> torch.Tensor:
    """The same with rotary positions: channels as complex numbers that are turned token by token."""
    turned = []
    of_tokens = [[turn_of(config, attention, head, token) for token in range(normed.shape[1])] for head in range(4)]
    turns = torch.stack([torch.stack(of_head) for of_head in of_tokens])
    for projection, norm in ((attention.q_proj, attention.q_layernorm), (attention.k_proj, attention.k_layernorm)):
        heads = projection(normed).unflatten(-1, (4, 8)).transpose(1, 2)
        if norm is not None:
            heads = heads / (heads.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt() * norm.weight
        halves = config.rotary_pairing == "halves"
        pairs = heads.unflatten(-1, (2, 4)).transpose(-1, -2) if halves else heads.unflatten(-1, (4, 2))
        turned.append(torch.view_as_complex(pairs.contiguous()) * turns)
    logits = (turned[0] @ turned[1].conj().mT).real * 8**-0.5
    mask = make_additive_mask(config, attention, normed.transpose(0, 1))
    return (logits if mask is None else logits + mask).softmax(-1)


def turn_of(config, attention, head: int, token: int) -> torch.Tensor:
    """The complex numbers [4] that turn the four pairs of a head's channels, of one token."""
    (h, w), registers = config.grid, config.num_register_tokens
    if config.model_type == "hf_axial_vit":  # one place along a line of four, that turns all pairs
        place = 2 * torch.pi * (2 * token - 3) / 4
        return torch.exp(1j * place / config.rotary_base ** (torch.arange(4, dtype=torch.float64) / 4))
    special = 0 if config.is_causal else config.num_special_tokens
    number, base, reference = token - special, config.rotary_base, config.rotary_reference_grid
    if config.rotary_register_base is not None and -registers <= number < 0:
        place, base = divmod(number + registers, round(registers**0.5)), config.rotary_register_base
    elif not 0 <= number < h * w:
        place = (0, 0)  # angle 0, whatever the periods
    elif config.rotary_coordinates == "centered":
        place = tuple(
            2 * torch.pi * (-1 + (2 * at + 1) / side) for at, side in zip(divmod(number, w), (h, w), strict=True)
        )
    else:
        scales = (1, 1) if reference is None else (reference / h, reference / w)
        place = tuple(at * by + config.rotary_offset for at, by in zip(divmod(number, w), scales, strict=True))
    first, second = place if config.rotary_axis_order == "row_column" else place[::-1]
    if config.rotary_embedding == "mixed":
        of_first, of_second = attention.rotary_frequencies[:, 4 * head : 4 * head + 4]
        return torch.exp(1j * (first * of_first + second * of_second))
    periods = config.rotary_periods or (1, base**0.5)
    return torch.exp(1j * torch.tensor([at / p for at in (first, second) for p in periods], dtype=torch.float64))


def make_additive_mask(config, attention, normed: torch.Tensor) -> torch.Tensor | None:
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
    head = family.shared("classification")
    of_head, of_model = (each.attention_maps(images, layers=[1]) for each in (head, head.vit))
    torch.testing.assert_close(of_head.dense(1), of_model.dense(1), rtol=0, atol=0)
    for layer in some:
        torch.testing.assert_close(some.dense(layer), everything.dense(layer), rtol=0, atol=0)
    with pytest.raises(KeyError, match=r"layer 1 was not requested; the maps have the layers \[0, 3\]"):
        some[1]
    for wrong in ([4], [-5], []):
        with pytest.raises(ValueError, match=r"does not fit a model with 4 layers; give indices from -4 to 3"):
            model.attention_maps(images, layers=wrong)


@pytest.mark.choices(*ATTENTION)
def test_attention_maps_name_the_patches(family: Family, choice: str):
    model = family.shared("model", choice)
    maps = model.attention_maps(family.images(model.config, grid=(2, 3)))
    assert maps.grid == (2, 3)
    tokens = torch.arange(family.num_tokens(model.config, (2, 3)))
    first = 0 if model.config.is_causal else model.config.num_special_tokens
    assert tokens[maps.patch_tokens].tolist() == list(range(first, first + 6))


def test_attentions_under_sdpa_are_missing_with_advice(family: Family, head: str):
    """As with transformers' ViT: everything else is answered; a function of others may give them."""
    model = family.build(head, attn_implementation="sdpa")
    images = family.images(model.config)
    advice = r"output_attentions=True.*'(sdpa|of_others)'.*maps\(pixel_values\).*set_attn_implementation\('eager'\)"
    wanted = model(images)
    with pytest.warns(UserWarning, match=advice):
        given = model(images, output_attentions=True)
    assert given.attentions == ()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted if isinstance(wanted[name], torch.Tensor))
    ALL_ATTENTION_FUNCTIONS.register("of_others", eager_attention_forward)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for implementation in ("eager", "of_others"):
        model.set_attn_implementation(implementation)
        if implementation == "of_others" and family.name == "local":  # whose windows give it no maps
            with pytest.warns(UserWarning, match=advice):
                assert model(images).attentions == ()
            continue
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
        message = f'a single attention implementation; leave attn_implementation="{implementation}" out'
        with pytest.raises(ValueError, match=message):
            OTHERS[name].build("backbone", attn_implementation=implementation)
        if name != "axial_resnet":  # which transformers leaves as it is, with a warning
            with pytest.raises(ValueError, match=message):
                model.set_attn_implementation(implementation)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FAMILIES for kind in ("relative", "relative_bias") if kind in FAMILIES[name].choices],
)
def test_flash_refuses_relative_positions(name: str, kind: str):
    family = FAMILIES[name]
    model = family.build("model", kind)
    # Stands in for a machine that has flash attention: the choice is refused before any kernel is looked for.
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=rf"position_embedding='{kind}'.*flash.*'sdpa', 'flex_attention' or 'eager'"):
        model(family.images(model.config))


# What sees what: a family, and fields.
PATTERNS: dict[str, tuple[Family, dict[str, Any]]] = {
    "axial": (AXIAL, {}),
    "axial_map": (AXIAL, {"pooling": "map", "position_embedding": "learned"}),
    "axial_sincos": (AXIAL, {"position_embedding": "sincos_2d", "layer_scale_init_value": 0.3}),
    "window_3": (LOCAL, {"attention_window": 3}),
    "window_7": (LOCAL, {"attention_window": 7, "pooling": "gap"}),
    "itself": (LOCAL, {"attention_window": 1}),
    "window_over_all": (LOCAL, {"attention_window": 35}),
    "criss_cross": (LOCAL, {"attention_pattern": "criss_cross", "num_register_tokens": 2}),
    "stride_3": (LOCAL, {"attention_pattern": "strided", "attention_stride": 3, "num_register_tokens": 2,
        "use_distillation_token": True}),
    "stride_5": (LOCAL, {"attention_pattern": "strided", "attention_stride": 5, "pooling": "gap"}),
    "stride_1": (LOCAL, {"attention_pattern": "strided", "attention_stride": 1}),
    "stride_over_all": (LOCAL, {"attention_pattern": "strided", "attention_stride": 10**9}),
}  # fmt: skip
# One patch, a row, a column; less than a tile of 8 x 8 and not square; a tile and a bit in one direction, more than two
# in the other.
GRIDS = [(1, 1), (1, 6), (6, 1), (3, 5), (9, 17)]


def dense_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
    """The textbook's formula over all pairs, those that do not see each other left out."""
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~module.pairs, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2), None


def in_plain(name: str) -> str:
    """Where a plain ViT has a parameter: of an axial model rows and columns are layers of their own."""
    return re.sub(r"layers\.(\d+)\.(row|column)\.", lambda m: f"layers.{2 * int(m[1]) + (m[2] == 'column')}.", name)


def pairs_of(model: Any, grid: tuple[int, int], layer: int) -> torch.Tensor:
    """[N, N] bool: which tokens see each other in a layer of `dense`, by a loop over all pairs."""
    if model.config.model_type == "hf_local_vit":
        return pairs_that_see(model.config, grid)
    line = (lambda token: token % grid[1]) if layer % 2 else (lambda token: token // grid[1])
    tokens = range(grid[0] * grid[1])
    return torch.tensor([[line(query) == line(key) for key in tokens] for query in tokens])


def dense(model: Any, grid: tuple[int, int]) -> Any:
    """A plain ViT of the same weights whose attention knows the pattern."""
    ALL_ATTENTION_FUNCTIONS.register("dense_attention", dense_attention)
    names = hf_vit.HfViTConfig().to_dict().keys() - {"model_type", "architectures", "auto_map"}
    fields = {name: value for name, value in model.config.to_dict().items() if name in names}
    fields["num_hidden_layers"] *= 2 if model.config.model_type == "hf_axial_vit" else 1
    plain = hf_vit.HfViTModel._from_config(hf_vit.HfViTConfig(**fields), attn_implementation="dense_attention").double()
    plain.load_state_dict({in_plain(name): value for name, value in model.state_dict().items()})
    for index, layer in enumerate(plain.layers):
        layer.attention.pairs = pairs_of(model, grid, index)
    return plain.eval()


def results(model: Any, images: torch.Tensor, gradients: bool) -> dict[str, torch.Tensor]:
    images = images.clone().requires_grad_(gradients)
    model.zero_grad()
    with torch.set_grad_enabled(gradients), torch.compiler.set_stance("force_eager"):
        outputs = model(images)
        if gradients:
            (outputs.last_hidden_state.square().sum() + outputs.pooler_output.sum()).backward()
    found = {"tokens": outputs.last_hidden_state, "pooled": outputs.pooler_output}
    if gradients:
        found |= {"pixels": images.grad, **{in_plain(name): p.grad for name, p in model.named_parameters()}}
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_to_dense_attention_under_the_mask(pattern: str, grid: tuple[int, int]):
    """Outputs, and gradients of pixels and weights; flex has none on a CPU, and is slow beyond a few tokens there."""
    family, fields = PATTERNS[pattern]
    sizes = {"image_size": (4 * grid[0], 4 * grid[1]), **fields}
    model = family.build("model", dtype=torch.float64, attn_implementation="sdpa", **sizes)
    images = family.images(model.config, dtype=torch.float64)
    expected = results(dense(model, grid), images, gradients=True)
    for implementation in ("sdpa", "eager", *(["flex_attention"] if grid == (3, 5) else [])):
        model.set_attn_implementation(implementation)
        given = results(model, images, gradients=implementation != "flex_attention")
        assert given.keys() == expected.keys() or implementation == "flex_attention"
        for name, tensor in given.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-10, msg=f"{implementation} {name}")


@torch.no_grad()
def test_dense_map_of_an_axial_model_composes_both_axes():
    model = AXIAL.build("model", dtype=torch.float64)
    maps = model.attention_maps(AXIAL.images(model.config, grid=(3, 5), dtype=torch.float64), layers=[-1])
    assert maps.axes == (("batch", "head", "row", "query", "key"), ("batch", "head", "column", "query", "key"))
    (rows, columns), composed = maps[1], maps.dense(1)
    assert (rows.shape, columns.shape, composed.shape) == ((2, 4, 3, 5, 5), (2, 4, 5, 3, 3), (2, 4, 15, 15))
    for i, j, k, m in ((i, j, k, m) for i in range(3) for j in range(5) for k in range(3) for m in range(5)):
        through = columns[:, :, j, i, k] * rows[:, :, k, j, m]
        torch.testing.assert_close(composed[:, :, 5 * i + j, 5 * k + m], through, rtol=0, atol=1e-14)


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that is computed."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return output


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["window_7", "criss_cross", "stride_16", "axial", "axial under eager"])
def test_no_tensor_holds_all_pairs(pattern: str):
    """A window's largest tensor grows as the tokens do; that of a row and a column as their number times a side."""
    largest = {}
    for side in (16, 32, 64):
        family = AXIAL if "axial" in pattern else LOCAL
        strided = {"attention_pattern": "strided", "attention_stride": side} if family is LOCAL else {}
        fields = PATTERNS[pattern][1] if pattern in PATTERNS else strided
        model = family.build(image_size=side, patch_size=1, num_hidden_layers=1, **fields)
        model.set_attn_implementation("eager" if "eager" in pattern else "sdpa")
        with LargestTensor() as computed:
            model(family.images(model.config, 1))
        largest[side] = computed.size
        assert side == 16 or computed.size < side**4
    assert largest[64] <= 1.05 * (4 if pattern == "window_7" else 8) * largest[32]


VITS = (
    *("default", "gap", "map", "gap_with_class_token", "map_with_class_token", "learned_2d", "sincos_2d", "no_labels"),
    *(
        "table_before_class_token", "distillation", "representation", "one_group", "layer_scale", "swiglu",
        "one_channel", "registers", "norm_before_layers",
    ),
    *("token_and_gap", "rotary", "rotary_gap", "rotary_registers"),
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("choice", VITS)
def test_from_a_vit(choice: str, tmp_path: Path):
    """A window over the whole grid leaves the logits; an axial model's blocks begin as the ViT's, twice."""
    has_head = choice == "distillation" or None  # as it is by default
    vit = PLAIN.build("classification", choice, dtype=torch.float64, use_distillation_head=has_head)
    images, given = PLAIN.images(vit.config, dtype=torch.float64), copy.deepcopy(vit.state_dict())
    wanted = vit(images).logits
    if "token" not in choice and "learned" not in choice:
        wide = hf_vit.HfLocalViTForImageClassification.from_vit(vit, attention_window=7)
        torch.testing.assert_close(wide(images).logits, wanted, rtol=0, atol=1e-10)
    vit.save_pretrained(tmp_path)
    narrow = hf_vit.HfLocalViTForImageClassification.from_vit(tmp_path, attention_window=3)
    axial = hf_vit.HfAxialViTForImageClassification.from_vit(tmp_path, initializer_range=0.3)
    assert not any(model.training for model in (narrow, axial))
    assert narrow.config.attention_window == 3
    assert (narrow(images).logits - wanted).abs().max() > 1e-3
    assert axial.dtype == torch.float64
    assert (axial.config.model_type, axial.config.initializer_range) == ("hf_axial_vit", 0.3)
    axial = hf_vit.HfAxialViTForImageClassification.from_vit(vit)
    for name, value in axial.state_dict().items():
        theirs = given.get(re.sub(r"\.(row|column)\.", ".", name))
        if name.endswith(".position_embeddings"):
            theirs = theirs[:, vit.vit.embeddings.num_special_rows :]
        if name == "classifier.weight":
            theirs = theirs[:, -32:]  # of both class token and mean the mean's
        if theirs is not None and theirs.shape == value.shape:
            assert torch.equal(value, theirs), name
        else:
            assert name.endswith("position_embeddings"), name
    assert axial(images).logits.isfinite().all()
    for parameter in axial.parameters():
        parameter.add_(1.0)
    assert all(torch.equal(value, given[name]) for name, value in vit.state_dict().items())


@pytest.mark.parametrize("choice", ["causal", "relative", "relative_bias"])
def test_from_a_vit_that_has_what_they_have_not(choice: str):
    vit = PLAIN.build("classification", choice)
    for kind, name in {"axial": "HfAxialViT", "local": "HfLocalViT"}.items():
        with pytest.raises(StrictDataclassError, match=f"not possible for an? {kind.capitalize()}-ViT"):
            getattr(hf_vit, f"{name}ForImageClassification").from_vit(vit)
