"""Batches of mixed sizes in one sequence: every image gets what the plain model gives it alone, and no padding runs."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from inference.conftest import attend_to_twice_the_values
from models.families import FAMILIES
from torch.nn.attention import varlen

import hf_vit
from hf_vit.inference import mixed_sizes
from hf_vit.inference.mixed_sizes import UnpaddedModel, without_padding

GRIDS = [(4, 4), (2, 6), (4, 4), (1, 1), (5, 3)]  # one of them twice
CHOICES: list[dict[str, Any]] = [
    {},
    {"pooling": "gap"},
    {"pooling": "map", "num_register_tokens": 2},
    {"use_distillation_token": True, "position_embedding": "learned_2d"},
    {"position_embedding": "sincos_2d", "norm_before_layers": True, "norm_after_pooling": True},
    {"is_causal": True},
    {"num_hidden_layers": 4, "num_hidden_groups": 2},
    {"rotary_embedding": "axial", "rotary_coordinates": "centered", "num_register_tokens": 2},
    {"rotary_embedding": "mixed", "is_causal": True},
    {"pooling": "token_and_gap", "rotary_embedding": "axial", "rotary_pairing": "halves"},
    {"rotary_embedding": "axial", "rotary_reference_grid": 7, "rotary_register_base": 10.0, "num_register_tokens": 4},
]


def classifier(family: str = "plain", **choices: Any) -> Any:
    torch.manual_seed(3)
    model: Any = FAMILIES[family].build("classification", **choices).eval()
    for parameter in model.parameters():  # a head and position tables that count
        if parameter.ndim < 4:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch(model: Any, grids: Any = GRIDS) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Images [C, H, W], and the same padded with noise, which must not be seen."""
    patch_h, patch_w = model.config.patch_stride
    generator = torch.Generator().manual_seed(5)
    images = [torch.randn(3, h * patch_h, w * patch_w, generator=generator) for h, w in grids]
    rows, columns = max(h for h, _ in grids), max(w for _, w in grids)
    pixels = 9 * torch.randn(len(grids), 3, rows * patch_h, columns * patch_w, generator=generator)
    mask = torch.zeros(len(grids), rows, columns, dtype=torch.int64)
    for number, ((h, w), image) in enumerate(zip(grids, images, strict=True)):
        pixels[number, :, : h * patch_h, : w * patch_w] = image
        mask[number, :h, :w] = 1
    return images, {"pixel_values": pixels, "patch_attention_mask": mask}


@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("name", ["plain", "hybrid"])
@torch.no_grad()
def test_every_image_gets_what_it_gets_alone(name: str, choices: dict[str, Any]) -> None:
    model = classifier(name, **choices)
    images, padded = batch(model)
    alone = [model(image[None]) for image in images]
    engines = ["torch", *(["onnxruntime"] if not choices else [])]
    optimized = [hf_vit.optimize_for_inference(copy.deepcopy(model), engine=engine) for engine in engines]
    for given in (model, *optimized):
        form = without_padding(given)
        assert isinstance(form.vit, UnpaddedModel)
        torch.testing.assert_close(form(**padded).logits, torch.cat([each.logits for each in alone]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("choices", [{}, {"pooling": "gap", "use_class_token": True}, {"is_causal": True}], ids=str)
@torch.no_grad()
def test_tokens_stand_where_those_of_a_padded_batch_do(choices: dict[str, Any]) -> None:
    model = classifier(**choices).vit
    _, padded = batch(model)
    plain, unpadded = model(**padded), without_padding(model)(**padded)
    on_image = model.embed(*padded.values()).token_mask
    torch.testing.assert_close(
        unpadded.last_hidden_state[on_image], plain.last_hidden_state[on_image], rtol=0, atol=1e-5
    )
    assert unpadded.last_hidden_state.shape == plain.last_hidden_state.shape
    assert not unpadded.last_hidden_state[~on_image].any()
    torch.testing.assert_close(
        without_padding(model)(**padded, return_dict=False)[1], plain.pooler_output, rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_no_layer_sees_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = classifier(), list[tuple[int, ...]]()
    _, padded = batch(model)
    forward = type(model.vit.layers[0]).forward

    def watched(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(hidden_states.shape))
        return forward(layer, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(model.vit.layers[0]), "forward", watched)
    without_padding(model)(**padded)
    assert seen == [(1, sum(1 + h * w for h, w in GRIDS), 32)] * 2
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_from_many_threads() -> None:
    """Beside passes of the model itself, whose configuration is the same."""
    model = classifier()
    _, padded = batch(model)
    unpadded, wanted = without_padding(model), model(**padded).logits

    def differences(form: Any) -> list[float]:
        with torch.no_grad():
            return [float((form(**padded).logits - wanted).abs().max()) for _ in range(40)]

    with ThreadPoolExecutor(4) as pool:
        found = [each for part in pool.map(differences, [unpadded, model, unpadded, model]) for each in part]
    assert max(found) < 1e-4
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_an_attention_of_ones_own_goes_on_with_padding() -> None:
    model = classifier()
    _, padded = batch(model)
    attend_to_twice_the_values(model)
    assert torch.equal(without_padding(model)(**padded).logits, model(**padded).logits)


@torch.no_grad()
def test_what_shows_tokens_in_their_places_goes_on_with_padding() -> None:
    model = classifier()
    _, padded = batch(model)
    plain, unpadded = (form(**padded, output_hidden_states=True) for form in (model, without_padding(model)))
    torch.testing.assert_close(unpadded.hidden_states, plain.hidden_states, rtol=0, atol=1e-5)
    heard = list[torch.Size]()
    model.vit.layers[0].register_forward_hook(lambda layer, args, output: heard.append(output.shape))
    without_padding(model)(**padded)
    assert heard == [plain.hidden_states[0].shape]


@pytest.mark.parametrize(
    ("name", "choices"),
    [("plain", {"position_embedding": "relative_bias"}), ("axial", {}), ("local", {})],
    ids=["relative positions", "axial", "local"],
)
def test_models_that_need_the_grid_keep_it(name: str, choices: dict[str, Any]) -> None:
    model = classifier(name, **choices)
    assert without_padding(model) is model
    merging = hf_vit.optimize_for_inference(classifier(), merge_tokens=1)
    assert without_padding(merging) is merging


def test_a_model_without_padding_shares_its_weights_and_leaves_the_other_as_it_is() -> None:
    model = classifier()
    unpadded = without_padding(model)
    assert [id(each) for each in unpadded.parameters()] == [id(each) for each in model.parameters()]
    assert not isinstance(model.vit, UnpaddedModel)
    assert type(unpadded) is type(model)


class OnGPU(torch.Tensor):
    device = property(lambda self: torch.device("cuda:0"))  # pyright: ignore[reportIncompatibleVariableOverride, reportAssignmentType]


@pytest.mark.parametrize(("capability", "width"), [((7, 5), 8), ((8, 0), 4)])
def test_gpus_without_the_kernel_attend_to_one_image_after_the_other(
    capability: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
):
    """It needs Ampere or later, and heads of a multiple of 8 channels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    states = [torch.randn(1, 2, 9, width).half().as_subclass(OnGPU) for _ in range(3)]
    found, _ = mixed_sizes.attend_within_images(torch.nn.Module(), *states, None, 0.5, images=[(1, 4), (1, 5)])
    assert found.shape == (1, 9, 2, width)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_kernel_for_gpus_is_called_with_the_bounds_of_every_image(causal: bool, monkeypatch: pytest.MonkeyPatch):
    """No GPU here: in the kernel's place stands its definition, softmax over the keys between two bounds."""

    def kernel(query: Any, key: Any, value: Any, bounds: Any, key_bounds: Any, *longest: int, **options: Any) -> Any:
        assert bounds.dtype == torch.int32
        assert torch.equal(bounds, key_bounds)
        lengths = [end - start for start, end in pairwise(bounds.tolist())]
        assert longest == (max(lengths),) * 2
        assert options == {"scale": 0.5, "window_size": (-1, 0) if causal else (-1, -1)}
        parts = []
        for states in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
            q, k, v = (each.transpose(0, 1) for each in states)
            logits = q @ k.mT * 0.5
            hidden = torch.ones_like(logits, dtype=torch.bool).triu(1) if causal else torch.zeros_like(logits).bool()
            parts.append((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    module: Any = torch.nn.Module()
    module.is_causal = causal
    query, key, value = torch.randn(3, 1, 2, 13, 4, generator=torch.Generator().manual_seed(0))
    images = [(2, 4), (1, 5)]
    expected, _ = mixed_sizes.attend_within_images(module, query, key, value, None, 0.5, images=images)
    found = mixed_sizes._attend_by_varlen(query, key, value, 0.5, images, causal)
    torch.testing.assert_close(found, expected)
