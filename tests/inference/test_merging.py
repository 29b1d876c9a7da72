"""Token merging beside a reference that goes token by token through the paper's section 3."""

import copy
import itertools
from typing import Any

import pytest
import torch
from inference.conftest import attend_to_twice_the_values
from models.families import FAMILIES, OTHERS, Family
from torch import nn

import hf_vit
from hf_vit.inference import optimize
from hf_vit.models.modeling_hf_vit import HfViTLayer

Group = tuple[torch.Tensor, list[int]]  # a token's state [D], and the places in the image that it stands for


def merged(groups: list[Group], keys: torch.Tensor, count: int, special: int) -> list[Group]:
    """The paper's steps: the `count` strongest edges, from tokens of A to the most alike of B, become means."""
    count = min(count, (len(groups) - special) // 2)
    first, second = (list(range(special, len(groups)))[(special + start) % 2 :: 2] for start in (0, 1))
    edges: list[tuple[float, int, int]] = []
    for a in first:
        alike = {b: float(torch.cosine_similarity(keys[a], keys[b], dim=0)) for b in second}
        partner = max(alike, key=lambda b: alike[b])
        edges.append((alike[partner], a, partner))
    strongest = sorted(edges, reverse=True)[:count]
    gone = {a for _, a, _ in strongest}
    result = list[Group]()
    for place in [*range(special), *(a for a in first if a not in gone), *second]:
        members = [groups[place], *(groups[a] for _, a, partner in strongest if partner == place)]
        weights = torch.tensor([float(len(members)) for _, members in members], dtype=torch.float64)
        states = torch.stack([state for state, _ in members])
        mean = (states * weights[:, None]).sum(0) / weights.sum()
        result.append((mean, list(itertools.chain.from_iterable(places for _, places in members))))
    return result


def block(layer: HfViTLayer, groups: list[Group], count: int | None, special: int) -> tuple[list[Group], torch.Tensor]:
    """One image through one block of the plain model, and its attention over all N x N places; no merging by None."""
    attention: Any = layer.attention
    states = torch.stack([state for state, _ in groups])
    normed = layer.layernorm_before(states)
    query, key, value = (
        projection(normed).unflatten(-1, (-1, attention.head_dim))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    sizes = torch.tensor([len(places) for _, places in groups], dtype=torch.float64)
    heads = list[torch.Tensor]()
    total = int(sizes.sum())
    maps = torch.zeros(query.shape[1], total, total, dtype=torch.float64)
    for head in range(query.shape[1]):
        weights = sizes * (query[:, head] @ key[:, head].T * attention.head_dim**-0.5).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        heads.append(weights @ value[:, head])
        for (row, (_, rows)), (column, (_, columns)) in itertools.product(enumerate(groups), enumerate(groups)):
            for i, j in itertools.product(rows, columns):
                maps[head, i, j] = weights[row, column] / len(columns)
    attended = attention.o_proj(torch.stack(heads, dim=1).flatten(1))
    scales = [nn.Identity() if scale is None else scale for scale in (layer.layer_scale1, layer.layer_scale2)]
    states = states + scales[0](attended)
    groups = [(state, places) for state, (_, places) in zip(states, groups, strict=True)]
    if count is not None:
        groups = merged(groups, key.mean(1), count, special)
    states = torch.stack([state for state, _ in groups])
    states = states + scales[1](layer.mlp(layer.layernorm_after(states)))
    return [(state, places) for state, (_, places) in zip(states, groups, strict=True)], maps


def reference(vit: Any, images: torch.Tensor, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All tokens [B, N, D] before the last norm, and the attention of every layer [B, A, N, N]."""
    states, maps = list[torch.Tensor](), list[list[torch.Tensor]]()
    for tokens in vit.embed(images, None).hidden_states:
        groups, of_image = [(token, [place]) for place, token in enumerate(tokens)], list[torch.Tensor]()
        for index, layer in enumerate(vit.layers):
            is_last = index == len(vit.layers) - 1
            groups, probabilities = block(layer, groups, None if is_last else count, vit.config.num_special_tokens)
            of_image.append(probabilities)
        every = {place: state for state, places in groups for place in places}
        states.append(torch.stack([every[place] for place in range(len(every))]))
        maps.append(of_image)
    return torch.stack(states), [torch.stack(layer) for layer in zip(*maps, strict=True)]


CHOICES = {
    "class_token": {"pooling": "token"},
    "mean": {"pooling": "gap"},
    "attention_pooling": {"pooling": "map"},
    "registers": {"num_register_tokens": 2, "layer_scale_init_value": 0.5},
    "distilled": {"use_distillation_token": True},
}


def merging_model(name: str, **options: Any) -> tuple[Family, Any, Any]:
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build("classification", num_hidden_layers=4, **options).double()
    return family, model, copy.deepcopy(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "hybrid"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("count", [1, 3, 100])
def test_equal_to_the_paper_token_by_token(name: str, choice: str, count: int) -> None:
    family, model, fast = merging_model(name, **CHOICES[choice])
    images = family.images(model.config, grid=(3, 5), dtype=torch.float64)
    states, maps = reference(model.vit, images, count)
    hidden = model.vit.layernorm(states)
    pooled = model.vit.pooler(hidden, None)
    fast = hf_vit.optimize_for_inference(fast, merge_tokens=count)
    output = fast.vit(images)
    torch.testing.assert_close(output.last_hidden_state, hidden, rtol=0, atol=1e-10)
    if not model.config.has_distillation_head:
        torch.testing.assert_close(fast(images).logits, model.classifier(pooled), rtol=0, atol=1e-10)
    given = fast.attention_maps(images)
    for layer, wanted in enumerate(maps):
        torch.testing.assert_close(given[layer], wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(fast.attention_maps(images, layers=[-1])[3], maps[3], rtol=0, atol=1e-10)


@torch.no_grad()
def test_blocks_have_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: 16 patches and a class token, of which three patches go in each block, but the last."""
    family, model, fast = merging_model("plain", pooling="token")
    lengths = list[tuple[int, int]]()
    merge = optimize.TokenGroups.merge

    def record(self: Any, hidden_states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        fewer = merge(self, hidden_states, keys)
        lengths.append((hidden_states.shape[1], fewer.shape[1]))
        return fewer

    monkeypatch.setattr(optimize.TokenGroups, "merge", record)
    images = family.images(model.config, grid=(4, 4), dtype=torch.float64)
    hf_vit.optimize_for_inference(fast, merge_tokens=3)(images)
    assert lengths == [(17, 14), (14, 11), (11, 8)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    family, model, fast = merging_model("plain")
    images = family.images(model.config, grid=(4, 4))
    wanted = hf_vit.optimize_for_inference(model, merge_tokens=3)(images.double()).logits
    given = hf_vit.optimize_for_inference(fast.to(dtype), merge_tokens=3)(images.to(dtype)).logits
    assert given.dtype == dtype
    assert (given.double() - wanted).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype] * wanted.std()


@pytest.mark.parametrize(
    ("other", "head", "options", "message"),
    [
        *((each, "classification", {}, ".*; (leave|give)") for each in (*OTHERS.values(), FAMILIES["axial"])),
        (FAMILIES["plain"], "classification", {"is_causal": True}, "causal attention"),
        (FAMILIES["plain"], "classification", {"rotary_embedding": "axial"}, "rotary positions"),
        (FAMILIES["plain"], "classification", {"use_qk_norm": True}, "norms inside or after attention"),
        (FAMILIES["plain"], "classification", {"position_embedding": "relative_bias"},
            "position_embedding='relative_bias'"),
        (FAMILIES["plain"], "classification", {"num_hidden_groups": 1}, "layers that share blocks"),
        (FAMILIES["plain"], "classification", {}, "a custom attention function"),
        (FAMILIES["plain"], "backbone", {}, r"HfViTBackbone; give a Vision Transformer without a head"),
    ],
)  # fmt: skip
def test_what_needs_every_token_is_refused(other: Family, head: str, options: dict[str, Any], message: str) -> None:
    model = other.build(head, **options)
    if "function" in message:
        attend_to_twice_the_values(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hf_vit.UserError, match=f"merge_tokens does not work with {message}"):
        hf_vit.optimize_for_inference(model, merge_tokens=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.no_grad()
def test_what_would_show_fewer_tokens_is_refused() -> None:
    family, model, _ = merging_model("plain")
    images = family.images(model.config, dtype=torch.float64)
    fast = hf_vit.optimize_for_inference(model, merge_tokens=1)
    with pytest.raises(hf_vit.UserError, match="output_hidden_states is not available"):
        fast(images, output_hidden_states=True)
    h, w = model.config.grid_of(*images.shape[2:])
    for method in (fast, fast.attention_maps):
        with pytest.raises(hf_vit.UserError, match="give images of one size"):
            method(images, patch_attention_mask=torch.ones(len(images), h, w))
    attend_to_twice_the_values(fast)
    with pytest.raises(hf_vit.UserError, match="does not work with a custom attention function"):
        fast(images)


@pytest.mark.slow  # the compiler needs a minute
@torch.no_grad()
def test_compiled() -> None:
    family, model, fast = merging_model("plain")
    images = family.images(model.config, grid=(4, 4), dtype=torch.float64)
    wanted = hf_vit.optimize_for_inference(model, merge_tokens=3)(images).logits
    fast = hf_vit.optimize_for_inference(fast, merge_tokens=3, compile=True)
    torch.testing.assert_close(fast(images).logits, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("count", "left"), [(1, None), (4, None), (5, 3), (8, 2)])
def test_too_few_tokens_left_are_told(count: int, left: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Of 16 patches three of four blocks merge: 4 each leave 4; 5 each merge 5, 5 and, of the 6 left, but 3."""
    _, model, _ = merging_model("plain", image_size=64, patch_size=16)
    hf_vit.optimize_for_inference(model, merge_tokens=count)
    texts = [record.getMessage() for record in caplog.records if "merge_tokens" in record.getMessage()]
    assert [f"leaves {left} of the 16 patch tokens" in text and "at most 4" in text for text in texts] == [True] * (
        left is not None
    )


@torch.no_grad()
def test_too_few_tokens_of_smaller_images_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of a DINOv2 that says 518 px and gets 112: of 64 patches of 256, the third block finds but 30."""
    _, model, _ = merging_model("plain", image_size=64, patch_size=4)
    model = hf_vit.optimize_for_inference(model, merge_tokens=17)
    assert not caplog.records
    for _ in range(2):
        model(torch.zeros(1, 3, 32, 32))
    (record,) = caplog.records
    assert "leaves 15 of the 64 patch tokens" in record.getMessage()
