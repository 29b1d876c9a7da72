"""The Axial-ViT equals dense attention under masks that hide every other line, written out here in plain formulas."""

import copy
import math
from pathlib import Path

import pytest
import torch
from models.families import randomise
from torch.nn import functional as F

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfAxialViTModel,
    HfViTConfig,
    HfViTForImageClassification,
)

TINY = {
    "image_size": (12, 20),
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 3,
}
GRIDS = [(3, 5), (5, 3), (1, 6), (6, 1), (1, 1), (2, 17)]


def make_model(**overrides) -> HfAxialViTModel:
    return randomise(HfAxialViTModel(HfAxialViTConfig(**{**TINY, **overrides}))).double().eval()


def images_of(grid: tuple[int, int], batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 4 * grid[0], 4 * grid[1], dtype=torch.float64)


def visible(grid: tuple[int, int], axis: str) -> torch.Tensor:
    """[N, N] bool: which tokens of a grid see each other along an axis, by a loop over all pairs."""
    h, w = grid
    seen = torch.zeros(h * w, h * w, dtype=torch.bool)
    for i in range(h * w):
        for j in range(h * w):
            seen[i, j] = i // w == j // w if axis == "row" else i % w == j % w
    return seen


def dense_maps(block, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """[B, A, N, N]: softmax over all tokens, the hidden ones at minus infinity."""
    normed = F.layer_norm(tokens, tokens.shape[-1:], block.layernorm_before.weight, block.layernorm_before.bias, 1e-6)
    query, key = (
        F.linear(normed, part.weight, part.bias).unflatten(-1, (4, 8)).transpose(1, 2)
        for part in (block.attention.q_proj, block.attention.k_proj)
    )
    logits = torch.einsum("baqd,bakd->baqk", query, key) / math.sqrt(8)
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def dense_block(block, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """A pre-norm block with dense attention under a mask; tanh GELU spelt out."""
    attention, mlp = block.attention, block.mlp
    normed = F.layer_norm(tokens, tokens.shape[-1:], block.layernorm_before.weight, block.layernorm_before.bias, 1e-6)
    value = F.linear(normed, attention.v_proj.weight, attention.v_proj.bias).unflatten(-1, (4, 8)).transpose(1, 2)
    mixed = (dense_maps(block, tokens, seen) @ value).transpose(1, 2).flatten(2)
    tokens = tokens + F.linear(mixed, attention.o_proj.weight, attention.o_proj.bias)
    normed = F.layer_norm(tokens, tokens.shape[-1:], block.layernorm_after.weight, block.layernorm_after.bias, 1e-6)
    hidden = F.linear(normed, mlp.fc1.weight, mlp.fc1.bias)
    hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    return tokens + F.linear(hidden, mlp.fc2.weight, mlp.fc2.bias)


def dense_model(model: HfAxialViTModel, tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    for layer in model.layers:
        tokens = dense_block(layer.row, tokens, visible(grid, "row"))
        tokens = dense_block(layer.column, tokens, visible(grid, "column"))
    return F.layer_norm(tokens, tokens.shape[-1:], model.layernorm.weight, model.layernorm.bias, 1e-6)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("grid", GRIDS)
@torch.no_grad()
def test_equals_dense_attention_that_hides_every_other_line(grid, attn_implementation):
    model, images = make_model(), images_of(grid)
    model.set_attn_implementation(attn_implementation)
    expected = dense_model(model, model.embed(images, None).hidden_states, grid)
    found = model(images)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.pooler_output, expected.mean(1), rtol=0, atol=1e-12)


@torch.no_grad()
def test_equals_dense_attention_on_a_large_grid():
    grid = (16, 24)
    model, images = make_model(num_hidden_layers=1), images_of(grid, batch=1)
    expected = dense_model(model, model.embed(images, None).hidden_states, grid)
    torch.testing.assert_close(model(images).last_hidden_state, expected, rtol=0, atol=1e-12)


def gradient_of(output: torch.Tensor, model: HfAxialViTModel) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return list(torch.autograd.grad((output * weight).sum(), list(model.layers.parameters())))


def test_gradients_equal_those_of_dense_attention():
    model, images = make_model(), images_of((3, 5))
    found = gradient_of(model(images).last_hidden_state, model)
    expected = gradient_of(dense_model(model, model.embed(images, None).hidden_states, (3, 5)), model)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def table_by_loop(model: HfAxialViTModel, kind: str) -> torch.Tensor:
    """[h*w, D] on the nominal 3x5 grid, one token after another."""
    embeddings, rows = model.embeddings, []
    for i in range(3):
        for j in range(5):
            if kind == "learned":
                rows.append(embeddings.position_embeddings[0, i * 5 + j])
            elif kind == "learned_2d":
                row, column = embeddings.row_position_embeddings[0, i], embeddings.column_position_embeddings[0, j]
                rows.append(torch.cat([row, column]))
            elif kind == "sincos_2d":
                frequencies = [10_000 ** (-n / 7) for n in range(8)]
                parts = [[f(at * n) for n in frequencies] for at in (j, i) for f in (math.sin, math.cos)]
                rows.append(torch.tensor([value for part in parts for value in part], dtype=torch.float64))
            else:
                rows.append(torch.zeros(32, dtype=torch.float64))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["learned", "learned_2d", "sincos_2d", "none"])
@torch.no_grad()
def test_position_tables(kind: str):
    model, images = make_model(position_embedding=kind), images_of((3, 5))
    patches = model.embeddings.patch_embeddings(images) + table_by_loop(model, kind)
    torch.testing.assert_close(model.embed(images, None).hidden_states, patches, rtol=0, atol=1e-12)
    expected = dense_model(model, patches, (3, 5))
    torch.testing.assert_close(model(images).last_hidden_state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pooling", ["gap", "map"])
@torch.no_grad()
def test_padded_batch_gives_what_every_image_gives_alone(pooling: str):
    model = make_model(pooling=pooling)
    grids, padded = [(3, 5), (1, 1), (4, 2), (2, 6)], (5, 6)
    images = torch.full((len(grids), 3, 4 * padded[0], 4 * padded[1]), 7.0, dtype=torch.float64)
    mask = torch.zeros(len(grids), *padded, dtype=torch.long)
    singles = [images_of(grid, batch=1) for grid in grids]
    for index, (grid, single) in enumerate(zip(grids, singles, strict=True)):
        images[index, :, : single.shape[2], : single.shape[3]] = single[0]
        mask[index, : grid[0], : grid[1]] = 1
    found = model(images, patch_attention_mask=mask)
    assert bool(torch.isfinite(found.last_hidden_state).all())
    maps = model.attention_maps(images, patch_attention_mask=mask)
    for index, (grid, single) in enumerate(zip(grids, singles, strict=True)):
        alone = model(single)
        own = found.last_hidden_state[index].unflatten(0, padded)[: grid[0], : grid[1]].flatten(0, 1)
        torch.testing.assert_close(own, alone.last_hidden_state[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(found.pooler_output[index], alone.pooler_output[0], rtol=0, atol=1e-12)
        rows, columns = model.attention_maps(single)[1]
        h, w = grid
        torch.testing.assert_close(maps[1][0][index, :, :h, :w, :w], rows[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(maps[1][1][index, :, :w, :h, :h], columns[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_attention_maps_are_the_dense_ones_line_by_line():
    grid, model = (3, 5), make_model()
    images = images_of(grid)
    tokens, maps = model.embed(images, None).hidden_states, model.attention_maps(images)
    assert maps.axes == (("batch", "head", "row", "query", "key"), ("batch", "head", "column", "query", "key"))
    for index, layer in enumerate(model.layers):
        rows, columns = maps[index]
        assert rows.shape == (2, 4, 3, 5, 5)
        assert columns.shape == (2, 4, 5, 3, 3)
        dense = dense_maps(layer.row, tokens, visible(grid, "row"))
        for i in range(3):
            line = slice(5 * i, 5 * i + 5)
            torch.testing.assert_close(rows[:, :, i], dense[:, :, line, line], rtol=0, atol=1e-12)
        tokens = dense_block(layer.row, tokens, visible(grid, "row"))
        dense = dense_maps(layer.column, tokens, visible(grid, "column"))
        for j in range(5):
            torch.testing.assert_close(columns[:, :, j], dense[:, :, j::5, j::5], rtol=0, atol=1e-12)
        tokens = dense_block(layer.column, tokens, visible(grid, "column"))


@torch.no_grad()
def test_dense_map_composes_both_axes():
    model, images = make_model(), images_of((3, 5))
    maps = model.attention_maps(images, layers=[-1])
    (rows, columns), dense = maps[1], maps.dense(1)
    assert dense.shape == (2, 4, 15, 15)
    for i in range(3):
        for j in range(5):
            for k in range(3):
                for m in range(5):
                    through = columns[:, :, j, i, k] * rows[:, :, k, j, m]
                    torch.testing.assert_close(dense[:, :, 5 * i + j, 5 * k + m], through, rtol=0, atol=1e-14)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, 4, 15, dtype=torch.float64), rtol=0, atol=1e-12)


@torch.no_grad()
def test_attention_maps_equal_the_outputs_of_eager_attention():
    model, images = make_model(), images_of((3, 5))
    maps = model.attention_maps(images)
    model.set_attn_implementation("eager")
    attentions = model(images, output_attentions=True).attentions
    assert len(attentions) == 4  # rows and columns of two layers
    for index in range(2):
        for pair, found in zip(maps[index], attentions[2 * index : 2 * index + 2], strict=True):
            lines = pair.transpose(1, 2).flatten(0, 1)
            torch.testing.assert_close(found, lines, rtol=0, atol=1e-12)


def make_vit(**overrides) -> HfViTForImageClassification:
    return randomise(HfViTForImageClassification(HfViTConfig(**{**TINY, **overrides}))).double().eval()


VITS = {
    "class token": {},
    "gap": {"pooling": "gap"},
    "map": {"pooling": "map"},
    "gap with class token": {"pooling": "gap", "use_class_token": True},
    "learned_2d": {"position_embedding": "learned_2d"},
    "sincos_2d": {"position_embedding": "sincos_2d", "pooling": "gap"},
    "table before class token": {"position_on_class_token": False},
    "distillation": {"use_distillation_token": True},
    "representation": {"representation_size": 20},
    "groups": {"num_hidden_groups": 1},
    "layer scale": {"layer_scale_init_value": 0.1},
    "no labels": {"num_labels": 0},
}


@pytest.mark.parametrize("choice", VITS.values(), ids=VITS)
def test_from_vit_copies_the_blocks_into_both_axes(choice):
    vit = make_vit(**choice)
    given = copy.deepcopy(vit.state_dict())
    axial = HfAxialViTForImageClassification.from_vit(vit)
    assert axial.dtype == torch.float64
    for theirs, ours in zip(vit.vit.layers, axial.vit.layers, strict=True):
        for half in (ours.row, ours.column):
            for name, parameter in half.named_parameters():
                assert torch.equal(parameter, theirs.get_parameter(name))
    for name, value in axial.state_dict().items():
        if ".layers." not in name and not name.endswith("position_embeddings"):
            assert torch.equal(value, given[name])
    if "position_embeddings" in dict(vit.vit.embeddings.named_parameters()):
        special = vit.vit.embeddings.num_special_rows
        assert torch.equal(
            axial.vit.embeddings.position_embeddings, vit.vit.embeddings.position_embeddings[:, special:]
        )
    with torch.no_grad():
        assert bool(torch.isfinite(axial.eval()(images_of((3, 5))).logits).all())
        for parameter in axial.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, given[name]) for name, value in vit.state_dict().items())


@torch.no_grad()
def silence(block) -> None:
    """Nothing is added to the tokens by this half."""
    for dense in (block.attention.o_proj, block.mlp.fc2):
        dense.weight.zero_()
        dense.bias.zero_()


@pytest.mark.parametrize(
    "choice", [{"pooling": "gap"}, {"pooling": "map"}, {"pooling": "gap", "representation_size": 9}]
)
@pytest.mark.parametrize(("grid", "silent"), [((1, 7), "column"), ((7, 1), "row")])
@torch.no_grad()
def test_on_a_single_line_it_is_the_plain_vit(choice, grid, silent):
    """The one line is the whole image; with the other axis silent, nothing else is left."""
    vit = make_vit(image_size=(4 * grid[0], 4 * grid[1]), **choice)
    axial = HfAxialViTForImageClassification.from_vit(vit).eval()
    for layer in axial.vit.layers:
        silence(getattr(layer, silent))
    images = images_of(grid)
    torch.testing.assert_close(axial(images).logits, vit(images).logits, rtol=0, atol=1e-12)


@torch.no_grad()
def test_on_a_single_patch_it_is_the_plain_vit_with_every_block_twice():
    vit = make_vit(image_size=4, pooling="gap")
    axial = HfAxialViTForImageClassification.from_vit(vit).eval()
    twice = make_vit(image_size=4, pooling="gap", num_hidden_layers=4)
    twice.load_state_dict(vit.state_dict(), strict=False)
    for index, layer in enumerate(twice.vit.layers):
        layer.load_state_dict(vit.vit.layers[index // 2].state_dict())
    images = images_of((1, 1))
    torch.testing.assert_close(axial(images).logits, twice(images).logits, rtol=0, atol=1e-12)


@torch.no_grad()
def test_from_vit_reads_a_folder_and_takes_overrides(tmp_path: Path):
    vit = make_vit().float()
    vit.save_pretrained(tmp_path)
    axial = HfAxialViTForImageClassification.from_vit(str(tmp_path), drop_path_rate=0.3)
    assert axial.config.drop_path_rate == 0.3
    assert (axial.config.model_type, axial.config.pooling) == ("hf_axial_vit", "gap")
    assert axial.config.id2label == vit.config.id2label
    axial.resize_to(image_size=(48, 40))
    assert axial.config.grid == (12, 10)
    axial.save_pretrained(tmp_path / "axial")
    again = HfAxialViTForImageClassification.from_pretrained(tmp_path / "axial").eval()
    images = images_of((12, 10)).float()
    assert torch.equal(again(images).logits, axial.eval()(images).logits)


@pytest.mark.parametrize("choice", [{"is_causal": True}, {"position_embedding": "relative"}])
def test_from_vit_refuses_what_a_grid_cannot_hold(choice):
    with pytest.raises(Exception, match="does not go with an axial model"):
        HfAxialViTForImageClassification.from_vit(make_vit(**choice))


def peak_memory(model, images: torch.Tensor) -> int:
    """Bytes that torch holds at most during a forward pass, beyond what it held before."""
    with torch.inference_mode():
        model(images)
        with torch.profiler.profile(profile_memory=True) as profile:
            model(images)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_grows_with_the_lines_not_with_all_pairs():
    """At 64x64 tokens all pairs of 4 heads are 268 MB; the lines of this narrow model need a few."""
    model = make_model(num_hidden_layers=1).float()
    small, large = (peak_memory(model, images_of((side, side), batch=1).float()) for side in (32, 64))
    assert large < 10e6
    assert large < 6 * small
    model.set_attn_implementation("eager")
    assert peak_memory(model, images_of((64, 64), batch=1).float()) < 30e6
