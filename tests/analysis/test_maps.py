"""Attention maps beside the models' own; distance, entropy, rollout, filters and positions beside closed forms."""

import math

import numpy as np
import pytest
import torch
from models.families import FAMILIES
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from hf_vit import HfAxialResNetConfig, HfAxialResNetModel, HfBitConfig, HfBitModel
from hf_vit.analysis import AttentionReader
from hf_vit.analysis.distance import compute_attention_distances
from hf_vit.analysis.entropy import compute_attention_entropies
from hf_vit.analysis.filters import compute_principal_components, list_patch_filters
from hf_vit.analysis.head_maps import query_maps
from hf_vit.analysis.positions import compute_position_similarity, get_patch_positions
from hf_vit.analysis.rollout import add_rollout_layer
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_vit import AttentionMaps

GRID, PATCH = (3, 4), (16, 8)  # px; nothing is square
H, W = GRID
N = H * W


def dense(probabilities, prefix=0):
    return AttentionMaps({0: probabilities}, GRID, slice(prefix, None))


def random_map(*shape, seed=0):
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def random_axial(batch=2, heads=3):
    pair = random_map(batch, heads, H, W, W), random_map(batch, heads, W, H, H, seed=1)
    return AttentionMaps({0: pair}, GRID, slice(0, None))


def slow_distance(probabilities, prefix, renormalize):
    """Of one head of one image, number by number in double precision."""
    total = 0.0
    for query in range(N):
        row = probabilities[prefix + query, prefix:].double().tolist()
        scale = sum(row) if renormalize else 1.0
        for key, weight in enumerate(row):
            (i, j), (k, m) = divmod(query, W), divmod(key, W)
            total += weight / scale * math.hypot((i - k) * PATCH[0], (j - m) * PATCH[1])
    return total / N


def test_distance_equals_the_slow_loop():
    """Also where prefix tokens stand last, as in causal models; without attention among patches it is 0."""
    probabilities = random_map(2, 3, N + 1, N + 1)
    found = compute_attention_distances(dense(probabilities, prefix=1), 0, PATCH)
    for image in range(2):
        for head in range(3):
            for name, renormalize in (("distance", False), ("distance_renormalized", True)):
                slow = slow_distance(probabilities[image, head], 1, renormalize)
                assert found[name][image, head].item() == pytest.approx(slow, rel=1e-5)
    turned = AttentionMaps({0: probabilities.roll((-1, -1), dims=(2, 3))}, GRID, slice(0, -1))
    torch.testing.assert_close(compute_attention_distances(turned, 0, PATCH), found)
    probabilities = torch.zeros(1, 1, N + 1, N + 1)
    probabilities[..., 0] = 1
    found = compute_attention_distances(dense(probabilities, prefix=1), 0, PATCH)
    assert (found["distance_renormalized"].item(), found["prefix_attention"].item()) == (0, 1)


def test_axial_distances_equal_those_of_the_dense_map():
    """And of lines: of n places, 1 apart and alike, two are (n^2 - 1) / 3n apart on average."""
    maps = random_axial()
    found = compute_attention_distances(maps, 0, PATCH)["distance"]
    torch.testing.assert_close(found, compute_attention_distances(dense(maps.dense(0)), 0, PATCH)["distance"])
    pair = torch.full((1, 1, H, W, W), 1 / W), torch.full((1, 1, W, H, H), 1 / H)
    found = compute_attention_distances(AttentionMaps({0: pair}, GRID, slice(0, None)), 0, PATCH)
    assert found["distance_rows"].item() == pytest.approx(PATCH[1] * (W**2 - 1) / (3 * W), rel=1e-6)
    assert found["distance_columns"].item() == pytest.approx(PATCH[0] * (H**2 - 1) / (3 * H), rel=1e-6)


def test_entropy_of_uniform_identity_and_a_slow_loop():
    uniform = compute_attention_entropies(dense(torch.full((1, 1, N, N), 1 / N)), 0)["entropy"]
    assert uniform.item() == pytest.approx(math.log(N), rel=1e-6)
    assert compute_attention_entropies(dense(torch.eye(N)[None, None]), 0)["entropy"].item() == 0
    probabilities = random_map(1, 1, N + 1, N + 1)
    slow = -sum(p * math.log(p) for row in probabilities[0, 0, 1:].tolist() for p in row) / N
    found = compute_attention_entropies(dense(probabilities, prefix=1), 0)["entropy"]
    assert found.item() == pytest.approx(slow, rel=1e-5)


def test_axial_entropy_equals_that_of_the_dense_map():
    maps = random_axial()
    found = compute_attention_entropies(maps, 0)
    torch.testing.assert_close(found["entropy"], compute_attention_entropies(dense(maps.dense(0)), 0)["entropy"])
    rows = -(maps[0][0] * maps[0][0].log()).sum(-1).mean((2, 3))
    torch.testing.assert_close(found["entropy_rows"], rows)


@pytest.mark.parametrize("identity", [0.0, 0.5])
def test_rollout_equals_the_product_of_mixed_layers(identity):
    layers = [random_map(2, 3, N + 1, N + 1, seed=seed) for seed in range(3)]
    wanted = torch.eye(N + 1, dtype=torch.float64).expand(2, -1, -1)
    for layer in layers:
        mixed = (1 - identity) * layer.double().mean(1) + identity * torch.eye(N + 1, dtype=torch.float64)
        wanted = mixed @ wanted
    rolled = None
    for layer in layers:
        rolled = add_rollout_layer(rolled, dense(layer, prefix=1), 0, identity)
    torch.testing.assert_close(rolled.double(), wanted, rtol=1e-5, atol=1e-7)


def test_axial_rollout_equals_two_dense_layers():
    """A row and a column attention, each as the dense matrix that hides all other lines."""
    maps, identity = random_axial(batch=1), 0.3
    rows, columns = (part[0].mean(0) for part in maps[0])
    along_rows, along_columns = torch.zeros(N, N), torch.zeros(N, N)
    for i in range(H):
        for j in range(W):
            for other in range(W):
                along_rows[i * W + j, i * W + other] = rows[i, j, other]
            for other in range(H):
                along_columns[i * W + j, other * W + j] = columns[j, i, other]
    wanted = torch.eye(N)
    for matrix in (along_rows, along_columns, along_rows, along_columns):
        wanted = ((1 - identity) * matrix + identity * torch.eye(N)) @ wanted
    rolled = add_rollout_layer(add_rollout_layer(None, maps, 0, identity), maps, 0, identity)
    torch.testing.assert_close(rolled[0], wanted)


def test_head_maps_are_rows_of_the_attention():
    probabilities = random_map(2, 3, N + 1, N + 1)
    found = query_maps(dense(probabilities, prefix=1), 0, class_token=0)
    torch.testing.assert_close(found.flatten(2), probabilities[:, :, 0, 1:])
    central = query_maps(dense(probabilities, prefix=1), 0, class_token=None)
    torch.testing.assert_close(central.flatten(2), probabilities[:, :, 1 + (H // 2) * W + W // 2, 1:])
    maps = random_axial()
    axial = query_maps(maps, 0, class_token=None)
    torch.testing.assert_close(axial.flatten(2), maps.dense(0)[:, :, (H // 2) * W + W // 2])


def test_components_span_the_filters():
    filters = torch.randn(20, 3, 2, 2)
    components, variance = compute_principal_components(filters)
    assert components.shape == (12, 3, 2, 2)
    assert variance.sum() == pytest.approx(1, rel=1e-5)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(filters.flatten(1).double().T)).flip(0)
    np.testing.assert_allclose(variance, eigenvalues / eigenvalues.sum(), rtol=1e-4)
    first, second = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)  # spread along two directions, the first thrice as far
    first[0, 0, 0], second[2, 1, 1] = 1, 1
    angles = torch.linspace(0, 2 * math.pi, 41)[:-1]
    filters = 3 * torch.cos(angles)[:, None, None, None] * first + torch.sin(angles)[:, None, None, None] * second + 5
    components, variance = compute_principal_components(filters, count=2)
    np.testing.assert_allclose(np.abs(components), torch.stack([first, second]).numpy(), atol=1e-6)
    np.testing.assert_allclose(variance, [0.9, 0.1], rtol=1e-5)


def test_filters_of_every_family():
    shapes = {
        family: {name: tuple(found.shape) for name, found in list_patch_filters(FAMILIES[family].build()).items()}
        for family in FAMILIES
    }
    assert shapes["plain"] == {"embedding": (32, 3, 4, 4)}
    assert shapes["axial"] == {"embedding": (32, 3, 4, 4)}
    assert shapes["hybrid"] == {"embedding": (32, 256, 1, 1), "root": (32, 3, 7, 7)}
    root = list_patch_filters(FAMILIES["hybrid"].build())["root"]
    torch.testing.assert_close(root.mean((1, 2, 3)), torch.zeros(32), rtol=0, atol=1e-5)  # standardized


def test_a_resnet_has_the_filters_of_its_root():
    tiny = {"image_size": 32, "stage_depths": (1,), "stem_width": 32}
    bit, axial = HfBitModel(HfBitConfig(**tiny)), HfAxialResNetModel(HfAxialResNetConfig(**tiny))
    (root,) = list_patch_filters(bit).values()
    torch.testing.assert_close(root.mean((1, 2, 3)), torch.zeros(32), rtol=0, atol=1e-5)
    (root,) = list_patch_filters(axial).values()
    (wanted,) = (value for name, value in axial.named_parameters() if name.endswith("root_conv.weight"))
    assert torch.equal(root, wanted)


def test_similarity_equals_a_loop():
    table = torch.randn(2, 3, 5)
    found = compute_position_similarity(table)
    for place in np.ndindex(2, 3):
        for other in np.ndindex(2, 3):
            cosine = torch.dot(table[place], table[other]) / (table[place].norm() * table[other].norm())
            assert found[(*place, *other)].item() == pytest.approx(cosine.item(), rel=1e-5)
    torch.testing.assert_close(found.flatten(0, 1).flatten(1).diagonal(), torch.ones(6, dtype=torch.float64))


def test_positions_leave_the_rows_of_other_tokens_out():
    plain = FAMILIES["plain"].build()
    torch.testing.assert_close(get_patch_positions(plain).flatten(0, 1), plain.embeddings.position_embeddings[0, 1:])
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    registers = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**tiny, num_register_tokens=3))
    for model in (ViTModel(ViTConfig(**tiny)), registers):
        torch.nn.init.normal_(model.embeddings.position_embeddings)
        found = get_patch_positions(model)
        assert found.shape == (2, 2, 16)
        torch.testing.assert_close(found.flatten(0, 1), model.embeddings.position_embeddings[0, 1:])
    for choice in ("learned_2d", "sincos_2d", "sincos_1d", "gap", "rectangular"):
        model = FAMILIES["plain"].build(choice=choice)
        assert get_patch_positions(model).shape == (*model.config.grid, 32)
    for choice in ("relative", "no_position"):
        assert get_patch_positions(FAMILIES["plain"].build(choice=choice)) is None


TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
THEIRS = {
    "vit": (ViTConfig, ViTForImageClassification, 1),
    "deit": (DeiTConfig, DeiTForImageClassification, 2),
    "dinov2": (Dinov2Config, Dinov2Model, 1),
    "registers": (Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification, 5),
}


def read_maps(model, pixel_values):
    """Layer -> map, and the last AttentionMaps."""
    found, last = {}, None

    def receive(layer, maps):
        nonlocal last
        found[layer], last = maps[layer], maps

    with torch.inference_mode():
        AttentionReader(model).read(pixel_values, receive)
    return found, last


CASES = [
    *((family, "default", head) for family in FAMILIES for head in ("model", "classification", "masked_prediction")),
    *(
        (family, choice, "model")
        for family in FAMILIES
        for choice in (
            *("representation", "two_groups_of_three", "relative", "causal", "gap", "registers", "swiglu"),
            *("rotary", "rotary_gap", "rotary_mixed", "rotary_registers", "rotary_causal"),
        )
        if choice in FAMILIES[family].choices
    ),
]


@pytest.mark.parametrize(("family", "choice", "head"), CASES)
def test_ours_equal_attention_maps(family, choice, head):
    model = FAMILIES[family].build(head, choice)
    pixel_values = FAMILIES[family].images(model.config)
    with torch.inference_mode():
        wanted = model.base_model.attention_maps(pixel_values)
    found, last = read_maps(model, pixel_values)
    assert list(found) == list(wanted)
    assert last.grid == wanted.grid
    assert last.patch_tokens == wanted.patch_tokens
    for layer in found:
        torch.testing.assert_close(found[layer], wanted[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", THEIRS)
def test_theirs_equal_output_attentions(kind):
    """Of another size than nominal too: then ViT and DeiT have to be told."""
    config_class, model_class, prefix = THEIRS[kind]
    model = model_class(config_class(**TINY)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.7)
    pixel_values = torch.randn(2, 3, 12, 8)
    keywords = {"interpolate_pos_encoding": True} if kind in ("vit", "deit") else {}
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        wanted = model(pixel_values, output_attentions=True, **keywords).attentions
    model.set_attn_implementation("sdpa")
    found, last = read_maps(model, pixel_values)
    assert last.grid == (3, 2)
    assert last.patch_tokens == slice(prefix, None)
    assert AttentionReader(model).layout.class_token == 0
    assert wanted[0].std() > 0.05  # maps that are all alike would prove nothing
    torch.testing.assert_close(tuple(found.values()), tuple(wanted))


def test_hooks_are_gone_afterwards_even_after_an_error():
    model = FAMILIES["plain"].build()
    pixel_values = FAMILIES["plain"].images(model.config)

    def fail(layer, maps):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        AttentionReader(model).read(pixel_values, fail)
    model(pixel_values)  # would stop again


def test_other_models_are_refused():
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    with pytest.raises(UserError, match=r"not from resnet; choose other analyses with --only"):
        AttentionReader(model)
