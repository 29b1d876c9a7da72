"""The Local-ViT beside dense attention under the pattern's mask, on a plain ViT with the same weights."""

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from models.families import FAMILIES
from models.patterns import pairs_that_see, patches_seen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_vit

LOCAL, PLAIN = FAMILIES["local"], FAMILIES["plain"]
PATTERNS: dict[str, dict[str, Any]] = {
    "window_3": {"attention_window": 3},
    "window_7": {"attention_window": 7},
    "itself": {"attention_window": 1},
    "window_over_all": {"attention_window": 99},
    "criss_cross": {"attention_pattern": "criss_cross"},
    "stride_3": {"attention_pattern": "strided", "attention_stride": 3},
    "stride_5": {"attention_pattern": "strided", "attention_stride": 5},
    "stride_1": {"attention_pattern": "strided", "attention_stride": 1},
    "stride_over_all": {"attention_pattern": "strided", "attention_stride": 10**9},
}
# One patch; less than a tile of 8 x 8 and not square; a tile and a bit in one direction, more than two in the other.
GRIDS = [(1, 1), (3, 5), (9, 17)]
TOKENS: dict[str, dict[str, Any]] = {
    "class_token": {},
    "no_token": {"pooling": "gap"},
    "registers": {"num_register_tokens": 2, "use_distillation_token": True},
}


def dense_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
    """The textbook's formula over all pairs, those that do not see each other left out."""
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~module.pairs, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2), None


def dense(local: Any, grid: tuple[int, int]) -> Any:
    """A plain ViT of the same weights whose attention knows the pattern."""
    ALL_ATTENTION_FUNCTIONS.register("dense_attention", dense_attention)
    names = {"model_type", "architectures", "attention_pattern", "attention_window", "attention_stride"}
    fields = {name: value for name, value in local.config.to_dict().items() if name not in names}
    plain = hf_vit.HfViTModel._from_config(hf_vit.HfViTConfig(**fields), attn_implementation="dense_attention").double()
    plain.load_state_dict(local.state_dict())
    for layer in plain.layers:
        layer.attention.pairs = pairs_that_see(local.config, grid)
    return plain.eval()


def results(model: Any, images: torch.Tensor, gradients: bool) -> dict[str, torch.Tensor]:
    images = images.clone().requires_grad_(gradients)
    model.zero_grad()
    with torch.set_grad_enabled(gradients), torch.compiler.set_stance("force_eager"):
        outputs = model(images)
        if gradients:
            outputs.last_hidden_state.square().sum().backward()
            outputs.pixels = images.grad
    of_weights = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"tokens": outputs.last_hidden_state, "pooled": outputs.pooler_output} | (
        {"pixels": images.grad, **of_weights} if gradients else {}
    )


# Upstream: torch tells that uncompiled flex attention is slow (compiling takes 20 s on a CPU).
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_to_dense_attention_under_the_mask(pattern: str, grid: tuple[int, int], tokens: str):
    """Outputs, and gradients of pixels and weights; flex has none on a CPU, and is slow beyond a few tokens there."""
    sizes = {"image_size": (4 * grid[0], 4 * grid[1]), **PATTERNS[pattern], **TOKENS[tokens]}
    model = LOCAL.build("model", dtype=torch.float64, attn_implementation="sdpa", **sizes)
    images = LOCAL.images(model.config, dtype=torch.float64)
    expected = results(dense(model, grid), images, gradients=True)
    for implementation in ("sdpa", "eager", *(["flex_attention"] if grid == (3, 5) else [])):
        model.set_attn_implementation(implementation)
        given = results(model, images, gradients=implementation != "flex_attention")
        assert given.keys() == expected.keys() or implementation == "flex_attention"
        for name, tensor in given.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-10, msg=f"{implementation} {name}")


@pytest.mark.parametrize("pattern", ["window_3", "criss_cross", "stride_3"])
def test_gradients_are_those_of_finite_differences(pattern: str):
    """Of all projections by torch's gradcheck, on 3 x 3 patches and a class token."""
    small = {"image_size": 6, "patch_size": 2, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 4}
    model = LOCAL.build("model", dtype=torch.float64, num_hidden_layers=1, **small, **PATTERNS[pattern])
    tokens = model.embed(LOCAL.images(model.config, 1, dtype=torch.float64), None)
    mask, attention = model._attention_mask(tokens), model.layers[0].attention
    assert torch.autograd.gradcheck(
        lambda hidden: attention(hidden, mask, grid=tokens.grid)[0], tokens.hidden_states.detach().requires_grad_()
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_maps_are_0_where_nothing_is_seen(pattern: str):
    """Under eager attention as an output, under sdpa recomputed; the analyses take both for dense ones."""
    model = LOCAL.build("model", attn_implementation="eager", num_register_tokens=1, **PATTERNS[pattern])
    images = LOCAL.images(model.config, grid=(3, 5))
    given = model(images, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    seen = pairs_that_see(model.config, (3, 5))
    for maps in (given, [model.attention_maps(images)[layer] for layer in range(2)]):
        for layer in maps:
            assert layer.shape == (2, 4, 17, 17)
            assert torch.equal(layer > 0, seen.expand_as(layer))
            torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 17))


def test_windows_of_the_paper():
    """1906.05909, figure 1: 3 x 3 around a pixel; at a corner what is there."""
    config = LOCAL.config()
    assert patches_seen(config, (0, 0), (5, 5)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(patches_seen(config, (2, 2), (5, 5))) == 9


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
@pytest.mark.parametrize("pattern", ["window_7", "criss_cross", "stride_16"])
def test_no_tensor_holds_all_pairs(pattern: str):
    """A window's largest tensor grows as the tokens do; that of a row and a column as their number times a side."""
    largest = {}
    for side in (16, 32, 64):
        choice = {"attention_pattern": "strided", "attention_stride": side}
        model = LOCAL.build(image_size=side, patch_size=1, num_hidden_layers=1, **PATTERNS.get(pattern, choice))
        model.set_attn_implementation("sdpa")
        with LargestTensor() as computed:
            model(LOCAL.images(model.config, 1))
        largest[side] = computed.size
        assert side == 16 or computed.size < side**4
    growth = 4 if pattern == "window_7" else 8
    assert largest[64] <= 1.05 * growth * largest[32]


@torch.no_grad()
@pytest.mark.parametrize("choice", ["default", "gap", "map_with_class_token", "distillation", "swiglu", "one_channel"])
def test_from_a_vit(choice: str, tmp_path):
    """With a window over the whole grid the logits stay; with a smaller one they are another model's."""
    vit = PLAIN.build("classification", choice, dtype=torch.float64)
    images = PLAIN.images(vit.config, dtype=torch.float64)
    wide = hf_vit.HfLocalViTForImageClassification.from_vit(vit, attention_window=7).eval()
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide(images).logits, vit(images).logits, rtol=0, atol=1e-10)
    vit.save_pretrained(tmp_path)
    narrow = hf_vit.HfLocalViTForImageClassification.from_vit(str(tmp_path), attention_window=3).eval()
    assert narrow.config.attention_window == 3
    assert (narrow(images).logits - vit(images).logits).abs().max() > 1e-3


@pytest.mark.parametrize("choice", ["causal", "relative", "relative_bias"])
def test_from_a_vit_that_has_what_a_local_model_has_not(choice: str):
    with pytest.raises(StrictDataclassError, match="does not go with a local model"):
        hf_vit.HfLocalViTForImageClassification.from_vit(PLAIN.build("classification", choice))
