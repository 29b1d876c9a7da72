"""Images whose sides are no multiples of the patch: cut as the original code cuts them (VALID), with a warning."""

import re
import warnings

import numpy as np
import pytest
import torch
from hybrid.reference import original_names, stem_forward
from models.families import FAMILIES, HEADS, Family, corruption

from hf_vit.inference.optimize import optimize_for_inference

PLAIN = FAMILIES["plain"]
CUT = pytest.mark.filterwarnings("ignore:images of .* px hold .* patches:UserWarning")


def pixels(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, height, width, dtype=torch.float64, generator=generator) * 2 - 1


@CUT
def test_patches_by_hand():
    model, images = PLAIN.build("model", dtype=torch.float64), pixels(18, 27)
    embeddings = model.embeddings.patch_embeddings
    kernel, bias = (part.detach().numpy() for part in (embeddings.projection.weight, embeddings.projection.bias))
    windows = [images.numpy()[:, :, y : y + 4, x : x + 4] for y in (0, 4, 8, 12) for x in (0, 4, 8, 12, 16, 20)]
    wanted = np.stack([np.einsum("bcpq,dcpq->bd", window, kernel) + bias for window in windows], axis=1)
    np.testing.assert_allclose(embeddings(images).detach().numpy(), wanted, rtol=0, atol=1e-12)
    assert model.config.grid_of(18, 27) == (4, 6)
    assert model(images).last_hidden_state.shape == (2, 25, 32)
    maps, of_whole = model.attention_maps(images), model.attention_maps(images[:, :, :16, :24])
    assert maps.grid == (4, 6)
    assert all(torch.equal(maps[layer], of_whole[layer]) for layer in maps)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.resize_to(image_size=(18, 19))  # within a patch
    assert (model.config.image_size, model.config.grid) == ((18, 19), (4, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@CUT
@pytest.mark.parametrize(("depths", "side"), [((2,), 2), ((1, 1), 1), ((), 3)], ids=str)
def test_a_stem_rounds_up_and_its_patches_down(depths: tuple[int, ...], side: int):
    """The slow reference's map, cut window by window."""
    sizes = {"image_size": 72, "stage_depths": depths, "stem_patch_size": side}
    model = FAMILIES["hybrid"].build("model", dtype=torch.float64, **sizes)
    embeddings = model.embeddings.patch_embeddings
    kernel, bias = (part.detach().numpy() for part in (embeddings.projection.weight, embeddings.projection.bias))
    for size in ((72, 72), (37, 61)):
        images = pixels(*size)
        feature_map = stem_forward(original_names(embeddings.stem), images.permute(0, 2, 3, 1).numpy())["features"]
        h, w = (places // side for places in feature_map.shape[1:3])
        assert model.config.grid_of(*size) == (h, w)
        wanted = [
            np.einsum("bpqc,dcpq->bd", feature_map[:, y : y + side, x : x + side], kernel) + bias
            for y in range(0, h * side, side)
            for x in range(0, w * side, side)
        ]
        given = embeddings(images).detach().numpy()
        np.testing.assert_allclose(given, np.stack(wanted, axis=1), rtol=0, atol=1e-10)
        assert model(images).last_hidden_state.shape == (2, 1 + h * w, 32)
    # 72 px of the original's R50 stem: 4.5 places of 16 px are 5.
    config = FAMILIES["hybrid"].config(image_size=72, stage_depths=(1, 1, 1))
    assert (config.patch_size, config.grid) == (16, (5, 5))
    # 13 px are 4 places of an axial stem of stride 4, and so 2 patches of 8 px, though they are not twice 8 px.
    axial = FAMILIES["axial"].build("model", "resnet_stem", dtype=torch.float64, patch_size=8)
    assert axial.config.grid_of(13, 20) == (2, 2)
    assert axial(pixels(13, 20)).last_hidden_state.shape == (2, 4, 32)


@CUT
@pytest.mark.choices(
    *("gap", "relative", "relative_bias", "causal", "distillation", "registers", "rectangular_patch", "sincos_2d"),
    "rotary",
)
def test_what_is_left_over_has_no_part_in_anything(family: Family, head: str, choice: str):
    """Outputs and losses are those of the image without it; at nominal and at other sizes."""
    if family.any_size:  # a SAME-padded stem sees all of the image
        return
    model = family.shared(head, choice, dtype=torch.float64)
    (stride_h, stride_w), key = model.config.patch_stride, HEADS[head].output
    for h, w in (model.config.grid, (5, 3)):
        images = pixels(h * stride_h + 2, w * stride_w + stride_w - 1)
        seen = images[:, :, : h * stride_h, : w * stride_w]
        given, wanted = (
            model(each, **HEADS[head].labels(model.config, each)) if head != "model" else model(each)
            for each in (images, seen)
        )
        for name in (key, "loss"):
            pairs = given.get(name), wanted.get(name)
            for one, other in zip(*(p if isinstance(p, tuple) else (p,) for p in pairs), strict=True):
                assert one is other is None or torch.equal(one, other), name
        mask = torch.ones(2, h, w)
        given, wanted = (model(each, patch_attention_mask=mask)[key][0] for each in (images, seen))
        assert torch.equal(given, wanted)


@CUT
def test_what_is_predicted_of_masked_patches():
    """The reconstruction is of what is seen; its colours are judged by those of the patch, not of its neighbour."""
    model = PLAIN.build("masked_prediction", "pixels", dtype=torch.float64)
    images = pixels(18, 27)
    given = model(images, **corruption(model.config, images))
    assert given.reconstruction.shape == (2, 3, 16, 24)
    masked = corruption(model.config, images)["bool_masked_pos"].view(2, 4, 6)
    squares = (given.reconstruction - images[:, :, :16, :24]).square()
    counting = masked.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None].expand_as(squares)
    torch.testing.assert_close(given.loss, squares[counting].mean(), rtol=0, atol=1e-12)


def test_a_warning_once(family: Family):
    """By Python's own rule: a text once from one place. What fits is not told about."""
    model = family.build("classification", dtype=torch.float64)
    whole, size = family.images(model.config, dtype=torch.float64), model.config.patch_stride[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        model(whole)
        for _ in range(3):
            model(pixels(4 * size + size // 2, 4 * size))
    if family.any_size:
        assert told == []
    else:
        (only,) = told
        expected = f"images of {4 * size + size // 2}x{4 * size} px hold 4x4 whole patches of .* ignores"
        assert re.match(expected, str(only.message))


@CUT
@torch.no_grad()
def test_compiled_exported_and_optimized():
    model, images = PLAIN.build("classification", num_hidden_layers=1), pixels(22, 27).float()
    wanted = model(images).logits
    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(graph(images).logits, wanted, rtol=0, atol=1e-5)
    free = torch.export.Dim("height", min=20, max=99), torch.export.Dim("width", min=8, max=99)
    program = torch.export.export(model, (images,), dynamic_shapes={"pixel_values": {2: free[0], 3: free[1]}})
    for shape in (images.shape[2:], (31, 22), (20, 50)):
        others = pixels(*shape).float()
        torch.testing.assert_close(program.module()(others).logits, model(others).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(optimize_for_inference(model, engine="torch")(images).logits, wanted, rtol=0, atol=1e-5)
