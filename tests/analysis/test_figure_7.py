"""Patch filters and position embeddings beside what can be computed by hand."""

import math

import numpy as np
import pytest
import torch
from models.families import FAMILIES
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig, ViTModel

from hf_vit import HfAxialResNetConfig, HfAxialResNetModel, HfBitConfig, HfBitModel
from hf_vit.analysis.analyses.filters import patch_filters, principal_components
from hf_vit.analysis.analyses.positions import patch_positions, position_similarity


def test_components_of_filters_of_known_directions():
    """Filters spread along two directions, the first three times as far: these are the components, in this order."""
    first, second = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    first[0, 0, 0], second[2, 1, 1] = 1, 1
    angles = torch.linspace(0, 2 * math.pi, 41)[:-1]
    filters = 3 * torch.cos(angles)[:, None, None, None] * first + torch.sin(angles)[:, None, None, None] * second + 5
    components, variance = principal_components(filters, count=2)
    np.testing.assert_allclose(np.abs(components), torch.stack([first, second]).numpy(), atol=1e-6)
    np.testing.assert_allclose(variance, [0.9, 0.1], rtol=1e-5)


def test_components_span_the_filters():
    filters = torch.randn(20, 3, 2, 2)
    components, variance = principal_components(filters)
    assert components.shape == (12, 3, 2, 2)
    assert variance.sum() == pytest.approx(1, rel=1e-5)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(filters.flatten(1).double().T)).flip(0)
    np.testing.assert_allclose(variance, eigenvalues / eigenvalues.sum(), rtol=1e-4)


def test_filters_of_every_family():
    shapes = {
        family: {name: tuple(found.shape) for name, found in patch_filters(FAMILIES[family].build()).items()}
        for family in FAMILIES
    }
    assert shapes["plain"] == {"embedding": (32, 3, 4, 4)}
    assert shapes["axial"] == {"embedding": (32, 3, 4, 4)}
    assert shapes["hybrid"] == {"embedding": (32, 256, 1, 1), "root": (32, 3, 7, 7)}


def test_root_filters_are_the_standardised_ones():
    root = patch_filters(FAMILIES["hybrid"].build())["root"]
    torch.testing.assert_close(root.mean((1, 2, 3)), torch.zeros(32), rtol=0, atol=1e-5)


def test_a_resnet_has_the_filters_of_its_root():
    tiny = {"image_size": 32, "stage_depths": (1,), "stem_width": 32}
    bit, axial = HfBitModel(HfBitConfig(**tiny)), HfAxialResNetModel(HfAxialResNetConfig(**tiny))
    (root,) = patch_filters(bit).values()
    torch.testing.assert_close(root.mean((1, 2, 3)), torch.zeros(32), rtol=0, atol=1e-5)
    (root,) = patch_filters(axial).values()
    (wanted,) = (value for name, value in axial.named_parameters() if name.endswith("root_conv.weight"))
    assert torch.equal(root, wanted)


def test_similarity_equals_a_loop():
    table = torch.randn(2, 3, 5)
    found = position_similarity(table)
    for place in np.ndindex(2, 3):
        for other in np.ndindex(2, 3):
            cosine = torch.dot(table[place], table[other]) / (table[place].norm() * table[other].norm())
            assert found[(*place, *other)].item() == pytest.approx(cosine.item(), rel=1e-5)
    torch.testing.assert_close(found.flatten(0, 1).flatten(1).diagonal(), torch.ones(6, dtype=torch.float64))


def test_positions_leave_the_rows_of_other_tokens_out():
    plain = FAMILIES["plain"].build()
    torch.testing.assert_close(patch_positions(plain).flatten(0, 1), plain.embeddings.position_embeddings[0, 1:])
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    for model in (
        ViTModel(ViTConfig(**tiny)),
        Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**tiny, num_register_tokens=3)),
    ):
        torch.nn.init.normal_(model.embeddings.position_embeddings)
        found = patch_positions(model)
        assert found.shape == (2, 2, 16)
        torch.testing.assert_close(found.flatten(0, 1), model.embeddings.position_embeddings[0, 1:])


@pytest.mark.parametrize("choice", ["learned_2d", "sincos_2d", "sincos_1d", "gap", "rectangular"])
def test_positions_of_every_kind(choice):
    model = FAMILIES["plain"].build(choice=choice)
    assert patch_positions(model).shape == (*model.config.grid, 32)


@pytest.mark.parametrize("choice", ["relative", "no_position"])
def test_models_without_added_positions_have_none(choice):
    assert patch_positions(FAMILIES["plain"].build(choice=choice)) is None
