"""Equivariance, patch order and receptive fields beside closed forms: what moves exactly, what reaches how far."""

import math

import numpy as np
import pytest
import timm
import torch
from analysis.test_maps import THEIRS, TINY
from evaluation.tiny import make_images
from models.families import FAMILIES, OTHERS, randomise
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import (
    BitConfig,
    BitModel,
    ConvNextConfig,
    ConvNextModel,
    RegNetConfig,
    RegNetModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_vit import (
    HfAxialResNetConfig,
    HfAxialResNetModel,
    HfBitConfig,
    HfBitForImageClassification,
    HfBitModel,
    HfViTForImageClassification,
)
from hf_vit.analysis import AnalysisSettings, analyze
from hf_vit.analysis.analysis import MapComparison, read_features
from hf_vit.analysis.equivariance import Move, make_moves, shift_maps
from hf_vit.analysis.permutation import SHARES, patch_sources, permute_patches
from hf_vit.analysis.receptive_field import compute_field_energy, compute_field_metrics
from hf_vit.errors import UserError
from hf_vit.loading.model import LoadedModel

NEW = ["equivariance", "patch_permutation", "receptive_field"]
SETTINGS = AnalysisSettings(num_images=5, batch_size=2)


def look(model, only=NEW, settings=SETTINGS, side=16):
    def prepare(images):
        return torch.stack([pil_to_tensor(image.resize((side, side))) / 127.5 - 1 for image in images])

    return analyze(LoadedModel(model.eval(), prepare, "toy"), make_images(5), only=only, settings=settings)


class Convolutions(nn.Module):
    """Blocks that are found as a ResNet's: layer1.0, layer1.1, ..."""

    def __init__(self, *blocks):
        super().__init__()
        self.layer1 = nn.Sequential(*blocks)

    def forward(self, pixel_values):
        return self.layer1(pixel_values).mean(dim=(2, 3))


def circular(channels, width, stride=1):
    return nn.Conv2d(channels, width, 3, stride, padding=1, padding_mode="circular")


def patch_means(patch=4):
    """A patch embedding whose filters are constant."""
    made = nn.Conv2d(3, 3, patch, patch, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(3)[:, :, None, None].expand_as(made.weight) / patch**2)
    return made


def without_positions(kind):
    """A model of transformers whose position embeddings of the patches are zero, so that it has none."""
    config_class, model_class, _ = THEIRS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**TINY, "image_size": 16})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
        if name.endswith("position_embeddings"):
            nn.init.zeros_(parameter)
    return model


MODELS = {
    "ours": lambda: FAMILIES["plain"].build("classification", "no_position"),
    "ours with registers": lambda: FAMILIES["plain"].build("classification", "no_position", num_register_tokens=3),
    **{kind: lambda kind=kind: without_positions(kind) for kind in THEIRS},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_vit_without_positions_does_not_see_where_patches_are(name):
    """Whatever tokens stand before the patches: they move exactly with whole patches, and in any order."""
    run = look(MODELS[name](), NEW[:2])
    assert run["equivariance"]["patch_shift_error"].shape == (2, 3)
    assert run["equivariance"]["patch_shift_error"].max() < 1e-4
    assert run["equivariance"]["patch_shift_cosine"].min() > 1 - 1e-6
    assert run["equivariance"]["pixel_shift_error"].min() > 0.1
    order = run["patch_permutation"]
    assert order["feature_error"].shape == (len(SHARES), 3)
    assert order["feature_error"].max() < 1e-4
    assert order["output_error"].max() < 1e-5
    if "same_prediction" in order:
        assert (order["same_prediction"] == 1).all()
    assert ("same_prediction" in order) == (name != "dinov2")


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_and_borders_are_seen(family):
    model = FAMILIES[family].build("classification")
    run = look(model, NEW[:2], side=model.config.image_size)
    assert run["equivariance"]["patch_shift_error"].min() > 0.1
    assert run["patch_permutation"]["feature_error"].min() > 0.1
    assert run["patch_permutation"]["output_error"].min() > 1e-3


@pytest.mark.parametrize("name", NEW)
def test_places_of_incomplete_patches_are_refused(name, with_processor):
    """40 px are two and a half places of 16 px, so that the middle of the map is not that of the image."""
    model = OTHERS["bit"].build("classification", image_size=40, stage_depths=(1, 1, 1))
    with pytest.raises(UserError, match=f"{name} needs images of whole patches, but some of the 3x3 patches of 40x40"):
        analyze(with_processor(model), make_images(2, side=40), only=[name], settings=FEW)


def test_a_head_of_zeros_has_no_defined_error(tmp_path, with_processor):
    """As every classifier here begins; nothing is drawn, and nothing is warned of."""
    model = HfViTForImageClassification(FAMILIES["plain"].config())
    subject, only = with_processor(model), ["patch_permutation"]
    run = analyze(subject, make_images(2), tmp_path, only=only, settings=FEW)
    assert np.isnan(run["patch_permutation"]["output_error"]).all()
    assert np.isfinite(run["patch_permutation"]["feature_error"]).all()


def test_axial_lines_are_an_order_even_without_positions():
    """Whole lines may change places, single patches may not."""
    run = look(FAMILIES["axial"].build("classification", "no_position"), NEW[:2])
    assert run["equivariance"]["patch_shift_error"].max() < 1e-4
    assert run["patch_permutation"]["feature_error"][:, 0].max() < 1e-4
    assert run["patch_permutation"]["feature_error"][:, 1:].min() > 0.05


def test_circular_convolutions_move_with_the_image():
    """Whole places of every depth: 1 px where the stride is 1, two where it is 2, whole patches everywhere."""
    torch.manual_seed(0)
    run = look(Convolutions(circular(3, 5), circular(5, 6, stride=2), circular(6, 7, stride=2)))
    found = run["equivariance"]
    np.testing.assert_array_equal(found["pixel_shift"], [[1, 1], [2, 2]])
    np.testing.assert_array_equal(found["patch_shift"], [[4, 4], [8, 8]])
    assert found["pixel_shift_error"][0, 0] < 1e-5 < 0.1 < found["pixel_shift_error"][0, 1:].min()
    assert found["pixel_shift_error"][1, :2].max() < 1e-5 < 0.1 < found["pixel_shift_error"][1, 2]
    assert found["patch_shift_error"].max() < 1e-5
    assert run["patch_permutation"]["feature_error"].min() > 0.1  # they mix over the borders of patches


def test_means_of_a_slanted_plane_move_exactly():
    """A linear image and its patches' means: linear interpolation is exact for every shift, turn and zoom."""
    height, width = 48, 32
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = torch.stack([0.3 * rows + 0.1 * columns, columns - 0.5 * rows, 2.0 * rows]).float()[None]
    features = patch_means()(image)
    for move in make_moves((4, 4)):
        comparison, inside = MapComparison(), move.make_valid_mask((12, 8), (height, width))
        assert inside.sum() >= 8, move
        comparison.add(0, 0, patch_means()(move(image, (height, width))), move(features, (height, width)), inside)
        assert comparison.arrays()["error"].item() < 1e-3, move
        if move.value in ((10.0,), (45.0,)):  # elsewhere something else came in
            everywhere = MapComparison()
            moved = move(image, (height, width)), move(features, (height, width))
            everywhere.add(0, 0, patch_means()(moved[0]), moved[1], inside | True)
            assert everywhere.arrays()["error"].item() > 1e-2, move


def test_a_right_angle_is_a_turn_of_the_array():
    maps = torch.randn(2, 3, 6, 6)
    move = Move("rotation", (90.0,))
    torch.testing.assert_close(move(maps, (24, 24)), maps.rot90(1, (2, 3)), rtol=1e-4, atol=1e-5)
    assert move.make_valid_mask((6, 6), (24, 24)).all()


def test_shift_equals_numbers_interpolated_on_a_circle():
    line = torch.randn(7)
    for places in (0, 2, 0.25, 3.5, -1.75):
        wanted = np.interp(np.arange(7) - places, np.arange(7), line.numpy(), period=7)
        found = shift_maps(line.view(1, 1, 7, 1), places, 0).flatten()
        torch.testing.assert_close(found, torch.from_numpy(wanted).float())
        torch.testing.assert_close(shift_maps(line.view(1, 1, 1, 7), 0, places).flatten(), found)


def test_places_inside_a_shift_hold_what_was_there_before():
    """Number by number: a place is inside if all its pixels and all it interpolates come from the image itself."""
    image, grid = (12, 16), (3, 4)
    for px in ((1.0, 1.0), (4.0, 4.0), (6.0, 2.0), (8.0, 8.0)):
        inside = Move("patch_shift", px).make_valid_mask(grid, image)
        for i in range(3):
            for j in range(4):
                assert bool(inside[i, j]) == (i * 4 - px[0] >= 0 and j * 4 - px[1] >= 0)


def test_a_comparison_is_a_share_of_the_variance():
    """Half the size is an error of a half; the mean everywhere an error of 1; another sign of 2 and a cosine of -1."""
    wanted, inside = torch.randn(2, 5, 4, 4), torch.ones(4, 4, dtype=torch.bool)
    mean = wanted.mean(dim=(2, 3), keepdim=True)
    for factor, error, cosine in ((1, 0, 1), (0.5, 0.5, 1), (0, 1, 0), (-1, 2, -1)):
        comparison = MapComparison()
        comparison.add(0, 0, wanted, mean + factor * (wanted - mean), inside)
        found = comparison.arrays("some_")
        assert found["some_error"].item() == pytest.approx(error, abs=1e-5)
        assert found["some_cosine"].item() == pytest.approx(cosine, abs=1e-5)
    for places, maps in ((inside, torch.ones(2, 5, 4, 4)), (~inside, wanted)):
        comparison = MapComparison()
        comparison.add(0, 0, maps, maps, places)
        assert np.isnan(comparison.arrays()["error"]).all()


def test_permuted_patches_equal_a_loop():
    generator = np.random.default_rng(0)
    maps, grid = torch.randn(2, 3, 6, 20), (2, 4)
    sources = torch.from_numpy(np.stack([generator.permutation(8) for _ in range(2)]))
    found = permute_patches(maps, sources, grid)
    for image in range(2):
        for place, source in enumerate(sources[image].tolist()):
            (i, j), (k, m) = divmod(place, 4), divmod(source, 4)
            there = found[image, :, i * 3 : i * 3 + 3, j * 5 : j * 5 + 5]
            assert torch.equal(there, maps[image, :, k * 3 : k * 3 + 3, m * 5 : m * 5 + 5])


def test_chosen_patches_really_move():
    for share in SHARES:
        sources = patch_sources(40, share, (0, 1))
        assert sorted(sources) == list(range(40))
        moved = set(np.flatnonzero(sources != np.arange(40)))
        assert len(moved) == round(40 * share)
        assert moved <= set(np.flatnonzero(patch_sources(40, 1.0, (0, 1)) != np.arange(40)))
    assert (patch_sources(40, 1.0, (0, 1)) != patch_sources(40, 1.0, (0, 2))).any()


def test_the_field_of_a_patch_embedding_is_its_patch():
    """A constant filter: all P x P pixels alike, whose mean squared distance from the middle is (P^2 - 1) / 6."""
    run = look(Convolutions(patch_means(), nn.Identity()), ["receptive_field"])
    found = run["receptive_field"]
    np.testing.assert_allclose(found["size"], 4)
    np.testing.assert_allclose(found["radius"], math.sqrt((4**2 - 1) / 6), rtol=1e-6)
    np.testing.assert_array_equal(found["outside"], 0)
    wanted = np.zeros((16, 16))
    wanted[8:12, 8:12] = 1
    np.testing.assert_allclose(found["maps"], [wanted, wanted], atol=1e-6)


def test_the_field_grows_by_one_ring_a_convolution():
    torch.manual_seed(0)
    blocks = [circular(3, 64), circular(64, 64), circular(64, 64)]
    found = look(Convolutions(*blocks), ["receptive_field"])["receptive_field"]["maps"]
    for depth, reach in enumerate((1, 2, 3)):
        rows, columns = np.nonzero(found[depth])
        assert (rows.min(), rows.max()) == (columns.min(), columns.max()) == (8 - reach, 8 + reach)


@pytest.mark.parametrize("name", [*FAMILIES, *THEIRS])
def test_fields_of_transformers(name):
    """Embeddings see their own patch (a hybrid's stem more), and layers that mix nothing see no more than they do."""
    if name in FAMILIES:
        model = FAMILIES[name].build("model", image_size=16)
        assert model.config.grid == ((2, 2) if name == "hybrid" else (4, 4))
    else:
        model = without_positions(name)
    found = look(model, ["receptive_field"])["receptive_field"]
    assert (found["outside"][0] > 0) == (name == "hybrid")
    assert (found["outside"][1:] > 0.01).all()
    for module_name, parameter in model.named_parameters():
        if module_name.endswith(("o_proj.weight", "attention.output.dense.weight")):
            nn.init.zeros_(parameter)
    alone = look(model, ["receptive_field"])["receptive_field"]
    np.testing.assert_allclose(alone["outside"], found["outside"][0] if name != "hybrid" else alone["outside"])
    if name != "hybrid":
        np.testing.assert_allclose(alone["size"], 4, atol=0.6)


def test_energy_equals_the_jacobian():
    """Of one channel the squared derivatives; of many, on average over signs, their sum."""
    torch.manual_seed(0)
    one, many = (nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.Tanh()) for width in (1, 4))
    pixels = torch.randn(1, 2, 4, 4, requires_grad=True)
    for model, tolerance in ((one, 1e-5), (many, 0.15)):
        width = model[0].out_channels
        full = torch.func.jacrev(lambda x, model=model: model(x)[0, :, 2, 2])(pixels)
        wanted = full.square().sum(dim=(0, 1, 2))
        draws = 1 if width == 1 else 400
        signs = (torch.randint(2, (1, width)) * 2.0 - 1 for _ in range(draws))
        found = sum(compute_field_energy(model(pixels), pixels, each) for each in signs)
        torch.testing.assert_close(found.float() / draws, wanted, rtol=tolerance, atol=1e-6)


def test_numbers_of_a_field_without_a_gradient():
    found = compute_field_metrics(torch.zeros(8, 8, dtype=torch.float64), (2, 2))
    assert all(map(math.isnan, found.values()))


FEW = AnalysisSettings(num_images=2, batch_size=2)


def test_what_cannot_be_looked_at_is_refused():
    mixer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2))
    with pytest.raises(UserError, match=r"equivariance cannot be applied: it needs feature maps, .* from Sequential"):
        look(mixer, ["equivariance"])
    # Also where the parts are alike: a BiT with a stride of 8 px makes 3 of 21 px.
    for model, side in (
        (Convolutions(nn.Conv2d(3, 4, 5, 5), nn.Identity()), 16),
        (HfBitModel(HfBitConfig(**OURS)), 21),
    ):
        for name in ("patch_permutation", "equivariance"):
            with pytest.raises(UserError, match=rf"some of the 3x3 patches of {side}x{side} px are incomplete; set"):
                look(model, [name], side=side)


OURS = {"image_size": 96, "stage_depths": (1, 2), "stem_width": 32}
RESNETS = {
    "resnet": lambda: ResNetForImageClassification(ResNetConfig(**SMALL, layer_type="basic")),
    "regnet": lambda: RegNetModel(RegNetConfig(**SMALL, groups_width=8)),
    "bit": lambda: BitModel(BitConfig(**SMALL, num_groups=2)),
    "convnext": lambda: ConvNextModel(
        ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 2], num_stages=2, layer_scale_init_value=1.0)
    ),
    "our bit": lambda: HfBitForImageClassification(HfBitConfig(**OURS)),
    "timm": lambda: timm.create_model("resnet10t", num_classes=3),
}
SMALL = {"hidden_sizes": [8, 16], "depths": [1, 2], "embedding_size": 8}


@pytest.mark.parametrize("kind", RESNETS)
def test_convolutional_networks_to_compare_with(kind):
    """Their stride stands for the patch; convolutions with zeros around are equivariant but for the borders."""
    torch.manual_seed(0)
    run = look(RESNETS[kind](), settings=FEW, side=96)
    depths = 4 if kind == "timm" else 3
    shifts = run["equivariance"]
    assert shifts["patch_shift"][0].tolist() == [32 if kind == "timm" else 8] * 2
    assert shifts["patch_shift_cosine"].shape == (2, depths)
    assert shifts["patch_shift_cosine"][0, 0] > run["patch_permutation"]["feature_cosine"][-1, 0]
    assert run["receptive_field"]["radius"][-1] > 1.5 * run["receptive_field"]["radius"][0]


@pytest.mark.parametrize(
    "model",
    [HfAxialResNetModel(HfAxialResNetConfig(**OURS)), HfBitModel(HfBitConfig(**OURS, pre_activation=False))],
    ids=lambda model: type(model).__name__,
)
def test_maps_of_our_resnets_are_what_they_return_row_by_row(model):
    """Whatever the order of the axes inside is. (A BiT with pre-activation ends in a norm, which no unit gives.)"""
    with torch.inference_mode():
        maps, output = read_features(randomise(model).eval(), torch.randn(2, 3, 64, 96))
    assert [tuple(one.shape[2:]) for one in maps] == [(16, 24), (8, 12), (8, 12)]
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), output.last_hidden_state)


def test_hooks_are_gone_afterwards():
    model = FAMILIES["plain"].build()
    pixel_values = FAMILIES["plain"].images(model.config)
    found, _ = read_features(model, pixel_values)
    model(pixel_values)
    assert len(found) == 3
    with torch.inference_mode():
        wanted = model(pixel_values, output_hidden_states=True).hidden_states
    for maps, tokens in zip(found, wanted, strict=True):
        torch.testing.assert_close(maps.flatten(2).transpose(1, 2), tokens[:, 1:])
