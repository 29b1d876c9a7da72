"""Distance, entropy, rollout and head maps beside closed forms and slow loops over single numbers."""

import math

import pytest
import torch

from hf_vit.analysis.analyses.distance import attention_distances, grid_distances
from hf_vit.analysis.analyses.entropy import attention_entropies
from hf_vit.analysis.analyses.head_maps import query_maps
from hf_vit.analysis.analyses.rollout import rollout_step
from hf_vit.models.modeling_hf_vit import AttentionMaps

GRID, PATCH = (3, 4), (16, 8)  # px; nothing is square
H, W = GRID
N = H * W


def dense(probabilities: torch.Tensor, prefix: int = 0) -> AttentionMaps:
    return AttentionMaps({0: probabilities}, GRID, slice(prefix, None))


def random_map(*shape: int, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def random_axial(batch: int = 2, heads: int = 3) -> AttentionMaps:
    pair = random_map(batch, heads, H, W, W), random_map(batch, heads, W, H, H, seed=1)
    return AttentionMaps({0: pair}, GRID, slice(0, None))


def uniform_distance() -> float:
    """Mean distance of two patches drawn independently."""
    places = [(i * PATCH[0], j * PATCH[1]) for i in range(H) for j in range(W)]
    return sum(math.dist(a, b) for a in places for b in places) / len(places) ** 2


def slow_distance(probabilities: torch.Tensor, prefix: int, renormalize: bool) -> float:
    """Of one head of one image, number by number in double precision."""
    total = 0.0
    for query in range(N):
        row = probabilities[prefix + query, prefix:].double().tolist()
        scale = sum(row) if renormalize else 1.0
        for key, weight in enumerate(row):
            (i, j), (k, m) = divmod(query, W), divmod(key, W)
            total += weight / scale * math.hypot((i - k) * PATCH[0], (j - m) * PATCH[1])
    return total / N


def test_distance_of_uniform_attention():
    found = attention_distances(dense(torch.full((1, 1, N, N), 1 / N)), 0, PATCH)
    assert found["distance"].item() == pytest.approx(uniform_distance(), rel=1e-6)
    assert found["distance_renormalized"].item() == pytest.approx(uniform_distance(), rel=1e-6)
    assert found["prefix_attention"].item() == pytest.approx(0, abs=1e-6)


def test_distance_of_uniform_attention_with_prefix_tokens():
    """Two prefix tokens take 2 / (N + 2) of the attention away, which renormalising gives back."""
    found = attention_distances(dense(torch.full((1, 1, N + 2, N + 2), 1 / (N + 2)), prefix=2), 0, PATCH)
    assert found["distance"].item() == pytest.approx(uniform_distance() * N / (N + 2), rel=1e-6)
    assert found["distance_renormalized"].item() == pytest.approx(uniform_distance(), rel=1e-6)
    assert found["prefix_attention"].item() == pytest.approx(2 / (N + 2), rel=1e-5)


def test_distance_of_identity_is_zero():
    found = attention_distances(dense(torch.eye(N).expand(2, 3, N, N)), 0, PATCH)
    assert torch.equal(found["distance"], torch.zeros(2, 3))


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (1, 2)])
def test_distance_of_a_shift_is_its_length(rows, columns):
    """Every patch looks at the one `rows` down and `columns` right; at the border at itself."""
    probabilities, moved = torch.zeros(1, 1, N, N), 0
    for query in range(N):
        i, j = divmod(query, W)
        inside = i + rows < H and j + columns < W
        moved += inside
        probabilities[0, 0, query, (i + rows) * W + j + columns if inside else query] = 1
    found = attention_distances(dense(probabilities), 0, PATCH)["distance"].item()
    assert found == pytest.approx(moved / N * math.hypot(rows * PATCH[0], columns * PATCH[1]), rel=1e-6)


def test_distance_equals_the_slow_loop():
    probabilities = random_map(2, 3, N + 1, N + 1)
    found = attention_distances(dense(probabilities, prefix=1), 0, PATCH)
    for image in range(2):
        for head in range(3):
            for name, renormalize in (("distance", False), ("distance_renormalized", True)):
                slow = slow_distance(probabilities[image, head], 1, renormalize)
                assert found[name][image, head].item() == pytest.approx(slow, rel=1e-5)


def test_distance_without_any_attention_among_patches_is_zero():
    probabilities = torch.zeros(1, 1, N + 1, N + 1)
    probabilities[..., 0] = 1
    found = attention_distances(dense(probabilities, prefix=1), 0, PATCH)
    assert found["distance_renormalized"].item() == 0
    assert found["prefix_attention"].item() == 1


def test_prefix_tokens_may_stand_last():
    """As in causal models."""
    probabilities = random_map(1, 2, N + 1, N + 1)
    turned = probabilities.roll((-1, -1), dims=(2, 3))
    last = attention_distances(AttentionMaps({0: turned}, GRID, slice(0, -1)), 0, PATCH)
    torch.testing.assert_close(last, attention_distances(dense(probabilities, prefix=1), 0, PATCH))


def test_axial_distance_equals_that_of_the_dense_map():
    maps = random_axial()
    found = attention_distances(maps, 0, PATCH)
    wanted = attention_distances(dense(maps.dense(0)), 0, PATCH)["distance"]
    torch.testing.assert_close(found["distance"], wanted)


def test_axial_distances_of_uniform_lines():
    """Along a line of n places, 1 apart, two of them are (n^2 - 1) / 3n apart on average."""
    pair = torch.full((1, 1, H, W, W), 1 / W), torch.full((1, 1, W, H, H), 1 / H)
    found = attention_distances(AttentionMaps({0: pair}, GRID, slice(0, None)), 0, PATCH)
    assert found["distance_rows"].item() == pytest.approx(PATCH[1] * (W**2 - 1) / (3 * W), rel=1e-6)
    assert found["distance_columns"].item() == pytest.approx(PATCH[0] * (H**2 - 1) / (3 * H), rel=1e-6)
    assert found["distance"].item() == pytest.approx(uniform_distance(), rel=1e-6)


def test_grid_distances_are_in_px():
    assert grid_distances((2, 2), (3, 4)).tolist() == [[0, 4, 3, 5], [4, 0, 5, 3], [3, 5, 0, 4], [5, 3, 4, 0]]


def test_entropy_of_uniform_identity_and_a_slow_loop():
    uniform = attention_entropies(dense(torch.full((1, 1, N, N), 1 / N)), 0)["entropy"]
    assert uniform.item() == pytest.approx(math.log(N), rel=1e-6)
    assert attention_entropies(dense(torch.eye(N)[None, None]), 0)["entropy"].item() == 0
    probabilities = random_map(1, 1, N + 1, N + 1)
    slow = -sum(p * math.log(p) for row in probabilities[0, 0, 1:].tolist() for p in row) / N
    assert attention_entropies(dense(probabilities, prefix=1), 0)["entropy"].item() == pytest.approx(slow, rel=1e-5)


def test_axial_entropy_equals_that_of_the_dense_map():
    maps = random_axial()
    found = attention_entropies(maps, 0)
    torch.testing.assert_close(found["entropy"], attention_entropies(dense(maps.dense(0)), 0)["entropy"])
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
        rolled = rollout_step(rolled, dense(layer, prefix=1), 0, identity)
    torch.testing.assert_close(rolled.double(), wanted, rtol=1e-5, atol=1e-7)


def test_rollout_of_identity_and_of_uniform_attention():
    identity = rollout_step(None, dense(torch.eye(N)[None, None]), 0, 0.5)
    torch.testing.assert_close(identity[0], torch.eye(N))
    uniform = torch.full((1, 1, N, N), 1 / N)
    twice = rollout_step(rollout_step(None, dense(uniform), 0, 0.0), dense(uniform), 0, 0.0)
    torch.testing.assert_close(twice, uniform[:, 0])
    mixed = rollout_step(rollout_step(None, dense(uniform), 0, 0.5), dense(uniform), 0, 0.5)
    torch.testing.assert_close(mixed[0], 0.25 * torch.eye(N) + 0.75 / N)


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
    rolled = rollout_step(rollout_step(None, maps, 0, identity), maps, 0, identity)
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
