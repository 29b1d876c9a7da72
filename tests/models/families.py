"""The table that the contract tests run over: families x heads x choices. A new family or head is one more row here."""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.initialization import no_init_weights

from hf_vit import families

Batch = dict[str, torch.Tensor]
Grid = tuple[int, int]


@dataclass(frozen=True)
class Head:
    """One task class: its main output, the Auto class that finds it, and the inputs that give it a loss."""

    output: str
    auto_class: str
    labels: Callable[[Any, torch.Tensor], Batch]


def class_labels(config: Any, pixel_values: torch.Tensor) -> Batch:
    if not config.num_labels:  # no head: the pooled features come out, and there is no loss
        return {}
    return {"labels": torch.arange(len(pixel_values)) % config.num_labels}


def corruption(config: Any, pixel_values: torch.Tensor) -> Batch:
    """Every second patch corrupted: by [mask], by another patch, kept."""
    h, w = config.grid_of(*pixel_values.shape[2:])
    masked = (torch.arange(len(pixel_values))[:, None] + torch.arange(h * w)) % 2 == 0
    if config.predict_next_patch:
        masked[:, 0] = False
    sources = torch.arange(h * w).repeat(len(pixel_values), 1)
    sources[:, 1::4] = -1
    sources[:, 2::4] = (sources[:, 2::4] + 1) % (h * w)
    return {"bool_masked_pos": masked, "patch_sources": sources}


HEADS = {
    "model": Head("last_hidden_state", "AutoModel", lambda config, pixel_values: {}),
    "classification": Head("logits", "AutoModelForImageClassification", class_labels),
    "masked_prediction": Head("reconstruction", "AutoModelForMaskedImageModeling", corruption),
    "backbone": Head("feature_maps", "AutoBackbone", lambda config, pixel_values: {}),
}

# Sizes that keep a test in milliseconds; every number differs from the others where it can, so that mix-ups show.
TINY = {
    "image_size": 16, "num_channels": 3, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "num_labels": 3,
}  # fmt: skip

CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "gap": {"pooling": "gap"},
    "map": {"pooling": "map"},
    "gap_with_class_token": {"pooling": "gap", "use_class_token": True},
    "map_with_class_token": {"pooling": "map", "use_class_token": True},
    "token_and_gap": {"pooling": "token_and_gap", "num_register_tokens": 3},
    "learned_2d": {"position_embedding": "learned_2d"},
    "learned_2d_gap": {"position_embedding": "learned_2d", "pooling": "gap"},
    "sincos_1d": {"position_embedding": "sincos_1d"},
    "sincos_2d": {"position_embedding": "sincos_2d"},
    "relative": {"position_embedding": "relative"},
    "relative_gap": {"position_embedding": "relative", "pooling": "gap"},
    "relative_bias": {"position_embedding": "relative_bias"},
    "relative_bias_gap": {"position_embedding": "relative_bias", "pooling": "gap"},
    "no_position": {"position_embedding": "none"},
    "bicubic": {"position_interpolation": "bicubic"},
    "table_before_class_token": {"position_on_class_token": False},
    "table_2d_before_class_token": {"position_on_class_token": False, "position_embedding": "learned_2d"},
    "layer_scale": {"layer_scale_init_value": 1e-4},
    "one_group": {"num_hidden_groups": 1},
    "two_groups_of_three": {"num_hidden_groups": 2, "num_hidden_layers": 3},
    "causal": {"is_causal": True},
    "causal_gap": {"is_causal": True, "pooling": "gap"},
    "causal_map_2d": {"is_causal": True, "pooling": "map", "position_embedding": "learned_2d"},
    "distillation": {"use_distillation_token": True},
    "causal_distillation": {"use_distillation_token": True, "is_causal": True},
    "registers": {"num_register_tokens": 3},
    "registers_gap": {"num_register_tokens": 3, "pooling": "gap", "position_embedding": "learned_2d"},
    "registers_map": {"num_register_tokens": 3, "pooling": "map", "position_embedding": "relative"},
    "map_with_registers": {"num_register_tokens": 3, "pooling": "map_with_registers", "use_class_token": True},
    "positions_of_registers": {"num_register_tokens": 3, "position_on_class_token": "with_registers"},
    "positions_of_registers_alone": {"num_register_tokens": 3, "position_on_class_token": "with_registers",
        "position_embedding": "learned_2d", "pooling": "gap"},
    "registers_distillation": {"num_register_tokens": 2, "use_distillation_token": True,
        "position_on_class_token": False},
    "norm_before_layers": {"norm_before_layers": True},
    "norm_after_pooling": {"norm_after_pooling": True},
    "norm_after_gap": {"norm_after_pooling": True, "pooling": "gap", "use_class_token": True},
    "norm_after_map": {"norm_after_pooling": True, "norm_before_layers": True, "pooling": "map"},
    "no_last_norm": {"norm_after_pooling": None},
    "swiglu": {"mlp_type": "swiglu", "layer_scale_init_value": 1e-4},
    "swiglu_with_norms": {"mlp_type": "swiglu", "norm_in_mlp": True, "norm_in_attention": True, "key_bias": False},
    "norm_after_branches": {"norm_after_branches": True, "layer_scale_init_value": 1e-4, "norm_in_mlp": True},
    "rmsnorm": {
        **{"norm_type": "rmsnorm", "norm_on_patches": True, "position_embedding": "sincos_2d_mae", "pooling": "gap"},
        **{"qkv_bias": False, "projection_bias": False, "mlp_bias": False},
    },
    "sizes_of_pooling": {"pooling": "map", "pooling_num_heads": 2, "pooling_intermediate_size": 24},
    "rotary": {
        **{"rotary_embedding": "axial", "rotary_coordinates": "centered", "rotary_pairing": "halves"},
        **{"position_embedding": "none", "num_register_tokens": 3, "rotary_periods": (1.0, 3.0)},
    },
    "rotary_gap": {
        **{"rotary_embedding": "axial", "rotary_reference_grid": 7, "rotary_axis_order": "column_row"},
        **{"pooling": "gap", "rotary_offset": 1},
    },
    "rotary_mixed": {"rotary_embedding": "mixed", "rotary_base": 10.0, "use_distillation_token": True},
    "rotary_registers": {
        **{"rotary_embedding": "axial", "rotary_register_base": 10.0, "num_register_tokens": 4, "use_qk_norm": True},
        **{"norm_type": "rmsnorm", "position_on_class_token": False},
    },
    "rotary_causal": {"rotary_embedding": "axial", "is_causal": True},
    "representation": {"representation_size": 20},
    "no_qkv_bias": {"qkv_bias": False},
    "one_channel": {"num_channels": 1},
    "rectangular": {"image_size": (16, 24)},
    "no_labels": {"num_labels": 0},
    "downsampled": {"prediction_target": "downsampled", "image_mean": (0.4, 0.5, 0.6)},
    "pixels": {"prediction_target": "pixels"},
}  # fmt: skip

# What a test has to run over, where not every choice (and every choice with every head) can make a difference.
# Each is the list of what reaches the thing under test; a family runs those it has, and always its default.

# A head takes from its model where the patch tokens stand and on which grid, the pooled output, and fields of its own.
# All else that a choice changes lies in the model, which every head shares: the head "model" runs over all of them.
READ_BY_HEADS = {
    "classification": (
        *("gap", "map", "gap_with_class_token", "map_with_class_token", "relative", "causal", "causal_map_2d"),
        *("distillation", "causal_distillation", "representation", "no_labels", "registers", "registers_gap"),
        *("registers_map", "registers_distillation", "norm_after_pooling", "norm_after_gap", "norm_after_map"),
        *("relative_bias", "map_with_registers", "no_last_norm", "token_and_gap"),
    ),
    "masked_prediction": (
        *("gap", "gap_with_class_token", "causal", "causal_gap", "distillation", "causal_distillation"),
        *("one_channel", "rectangular", "rectangular_patch", "root_alone", "patches_of_the_stem", "resnet_stem"),
        *("downsampled", "pixels", "registers", "norm_before_layers", "norm_after_pooling", "no_last_norm", "rotary"),
    ),
    "backbone": (
        *("gap", "gap_with_class_token", "causal", "distillation", "causal_distillation", "two_groups_of_three"),
        *("rectangular", "rectangular_patch", "root_alone", "patches_of_the_stem", "registers", "norm_after_pooling"),
        *("no_last_norm", "rotary"),
    ),
}
# Attention sees how many tokens there are, on which grid, in which order, a bias of positions, and what shares a block;
# of the poolings, "map" attends as well.
ATTENTION = (
    *("gap", "map", "map_with_class_token", "relative", "relative_gap", "causal", "causal_map_2d", "distillation"),
    *("two_groups_of_three", "no_qkv_bias", "rectangular", "rectangular_patch", "registers_map", "relative_bias"),
    *("relative_bias_gap", "map_with_registers", "causal_distillation", "criss_cross", "strided", "rotary"),
    *("rotary_gap", "rotary_mixed", "rotary_registers", "rotary_causal", "swiglu_with_norms", "sizes_of_pooling"),
)
# What a block holds and how often it runs.
BLOCKS = (
    *("relative", "relative_bias", "causal", "layer_scale", "no_qkv_bias", "one_group", "two_groups_of_three"),
    *("swiglu", "swiglu_with_norms", "norm_after_branches", "rmsnorm", "rotary_mixed"),
)
# Tables that are derived from parameters: position embeddings at another size than nominal, by every formula.
TABLES = (
    *("learned", "learned_2d", "sincos_1d", "sincos_2d", "relative", "no_position", "bicubic"),
    *("table_before_class_token", "table_2d_before_class_token", "distillation", "causal_map_2d", "map", "resnet_stem"),
    *("registers", "registers_gap", "registers_distillation", "relative_bias"),
    *("positions_of_registers", "positions_of_registers_alone", "rotary", "rotary_gap", "rotary_mixed"),
    *("rotary_registers", "rotary_causal", "rmsnorm"),
)


def whole(tensor: Any, grid: Grid) -> list[Any]:
    """One attention a layer, over all tokens."""
    return [tensor]


def lines_of(tensor: Any, grid: Grid) -> list[torch.Tensor]:
    """A token mask [B, N] or an axial pair of maps -> what rows and columns see, one line a row of the batch."""
    if isinstance(tensor, tuple):
        return [maps.transpose(1, 2).flatten(0, 1) for maps in tensor]
    return [tensor.reshape(-1, grid[1]), tensor.unflatten(1, grid).transpose(1, 2).reshape(-1, grid[0])]


@dataclass(frozen=True)
class Family:
    """One architecture of the package's table, as tests build it: small, and with the choices that it has.

    Attributes:
        name: a key of `hf_vit.families.FAMILIES`.
        tiny: overrides of `TINY`.
        choices: name -> config overrides; every test over choices runs for each.
        attentions_of: a layer's map, or a token mask, as its attention modules see it: a list, one entry a module.
        any_size: images of any size fit (SAME padding).
        one_size: images of the nominal size alone fit; any other grid that is asked for is that one.
        sizes: what `tiny` overrides.
    """

    name: str
    tiny: dict[str, Any]
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    attentions_of: Callable[[Any, Grid], list[Any]] = whole
    any_size: bool = False
    one_size: bool = False
    sizes: dict[str, Any] = field(default_factory=lambda: TINY)

    @property
    def config_class(self) -> Any:
        return families.FAMILIES[self.name].config_class

    @property
    def classes(self) -> dict[str, Any]:
        """Head -> class."""
        return dict(families.FAMILIES[self.name].classes)

    def config(self, choice: str = "default", **overrides: Any) -> Any:
        return self.config_class(**{**self.sizes, **self.tiny, **self.choices[choice], **overrides})

    def build(
        self,
        head: str = "model",
        choice: str = "default",
        attn_implementation: str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **overrides: Any,
    ) -> Any:
        """A model in evaluation mode whose parameters are all far from zero, so that nothing is tested on zeros."""
        with no_init_weights():  # `randomise` writes every parameter
            config = self.config(choice, **overrides)
            model = self.classes[head]._from_config(config, attn_implementation=attn_implementation)
        return randomise(model, seed).to(dtype).eval()

    def shared(self, head: str = "model", choice: str = "default", dtype: torch.dtype = torch.float32) -> Any:
        """What `build` gives, built once: for tests that read it only. conftest.py checks after each that it did."""
        model = built_once(self.name, head, choice, dtype)
        SHARED.setdefault((self.name, head, choice, dtype), (model, fingerprint(model)))
        return model

    def images(
        self, config: Any, batch: int = 2, grid: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """[B, C, H, W] with values in [-1, 1]; `grid` in patches, by default the nominal one."""
        grid = None if self.one_size else grid
        (h, w), (stride_h, stride_w) = grid or config.grid, config.patch_stride
        generator = torch.Generator().manual_seed(1)
        images = torch.rand(batch, config.num_channels, h * stride_h, w * stride_w, generator=generator) * 2 - 1
        return images.to(dtype)

    def num_tokens(self, config: Any, grid: tuple[int, int] | None = None) -> int:
        h, w = grid or config.grid
        return config.num_special_tokens + h * w


def some(*names: str) -> dict[str, dict[str, Any]]:
    """The choices that touch what a family does in its own way; the plain family runs them all."""
    return {name: CHOICES[name] for name in ("default", "representation", "one_channel", "two_groups_of_three", *names)}


FAMILIES = {
    "plain": Family(
        name="plain",
        tiny={"patch_size": 4},
        choices={**CHOICES, "rectangular_patch": {"image_size": (12, 16), "patch_size": (3, 4)}},
    ),
    "hybrid": Family(
        name="hybrid",
        tiny={"image_size": 32, "stage_depths": (1, 1), "stem_width": 32},
        choices={
            **some("gap", "map_with_class_token", "learned_2d", "relative", "causal", "distillation", "registers_gap"),
            **some("norm_before_layers", "norm_after_pooling", "swiglu", "relative_bias", "no_last_norm", "rotary"),
            "rectangular": {"image_size": (32, 48)},
            "root_alone": {"image_size": 16, "stage_depths": ()},
            "patches_of_the_stem": {"stage_depths": (2,), "stem_patch_size": 2},
        },
        any_size=True,
    ),
    "axial": Family(
        name="axial",
        tiny={"patch_size": 4},
        choices={
            **some("map", "sincos_1d", "sincos_2d", "no_position", "layer_scale", "norm_after_map", "swiglu"),
            "no_last_norm": CHOICES["no_last_norm"],
            "rotary_gap": {"rotary_embedding": "axial", "rotary_coordinates": "centered", "rotary_pairing": "halves"},
            "norm_after_branches": CHOICES["norm_after_branches"],
            "learned": {"position_embedding": "learned"},
            "rectangular_patch": {"image_size": (12, 16), "patch_size": (3, 4)},
            "resnet_stem": {"stage_depths": (1,), "stem_width": 16},
        },
        attentions_of=lines_of,
    ),
    "local": Family(
        name="local",
        tiny={"patch_size": 4, "attention_window": 3, "attention_stride": 3},
        choices={
            **some("gap", "map_with_class_token", "learned_2d", "sincos_2d", "distillation", "registers_gap", "swiglu"),
            **some("norm_after_pooling", "no_qkv_bias", "rotary", "rotary_mixed"),
            "rectangular_patch": {"image_size": (12, 16), "patch_size": (3, 4)},
            "criss_cross": {"attention_pattern": "criss_cross"},
            "strided": {"attention_pattern": "strided"},
        },
    ),
}

RESNETS = {
    "axial_resnet": Family(
        name="axial_resnet",
        tiny={"image_size": 32, "stage_depths": (1, 2), "stem_width": 16},
        choices={
            "default": {},
            "root_alone": {"stage_depths": ()},
            "rectangular": {"image_size": (32, 24), "num_channels": 1},
        },
        any_size=True,
        sizes={"num_channels": 3, "num_labels": 3},
    ),
    "bit": Family(
        name="bit",
        tiny={"image_size": 32, "stage_depths": (1, 2), "stem_width": 32},
        choices={
            "default": {},
            "post_activation": {"pre_activation": False},
            "zero_padded_pool": {"zero_padded_pool": True},
            "rectangular": {"image_size": (32, 24), "num_channels": 1, "stage_depths": ()},
        },
        any_size=True,
        sizes={"num_channels": 3, "num_labels": 3},
    ),
}

MIXERS = {
    "mixer": Family(
        name="mixer",
        tiny={"patch_size": 4},
        choices={
            "default": {},
            "exact_gelu": {"hidden_act": "gelu"},
            "no_labels": {"num_labels": 0},
            "rectangular_patch": {"image_size": (12, 16), "patch_size": (3, 4), "num_channels": 1},
        },
        one_size=True,
        sizes={
            **{name: size for name, size in TINY.items() if name != "num_attention_heads"},
            "token_intermediate_size": 24,
        },
    )
}

# No Vision Transformers: of the contract, what any model keeps. A test module asks for them by `OTHER_FAMILIES`.
OTHERS = RESNETS | MIXERS


@functools.cache
def built_once(name: str, head: str, choice: str, dtype: torch.dtype) -> Any:
    return (FAMILIES | OTHERS)[name].build(head, choice, dtype=dtype)


# The shared models that the test in progress has asked for, as they were.
SHARED: dict[tuple[str, str, str, torch.dtype], tuple[Any, Any]] = {}


def fingerprint(model: Any) -> tuple[Any, ...]:
    """What a test may leave behind in a model: numbers, gradients, modes, settings; hooks are transformers' own too."""
    numbers = [zlib.crc32(tensor.detach().numpy().tobytes()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [parameter.grad is None and parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    return numbers, gradients, modes, str(vars(model.config)), model.dtype


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter values that matter: matrices scaled by fan-in, norms near 1, everything else N(0, 0.3)."""
    generator = torch.Generator().manual_seed(seed)
    norms = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm | torch.nn.GroupNorm)
    }
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in norms:
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("proj.weight"):
            parameter.copy_(noise * 2 * parameter[0].numel() ** -0.5)  # sharp attention, not a uniform one
        elif parameter.ndim in (2, 4) and "position" not in name:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
        else:
            parameter.copy_(0.3 * noise)
    return model


def checkpoint_activations(model: Any) -> None:
    """By the name that transformers 5.23 brought, or the one before it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def pad(
    config: Any, singles: list[torch.Tensor], grids: list[tuple[int, int]], padded: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of several grids at the top left of one padded batch whose padding is garbage, and its mask [B, h, w]."""
    (stride_h, stride_w), (h, w) = config.patch_stride, padded
    images = torch.full((len(singles), config.num_channels, h * stride_h, w * stride_w), 7.0, dtype=torch.float64)
    mask = torch.zeros(len(singles), h, w, dtype=torch.long)
    for index, (single, grid) in enumerate(zip(singles, grids, strict=True)):
        images[index, :, : single.shape[2], : single.shape[3]] = single[0]
        mask[index, : grid[0], : grid[1]] = 1
    return images, mask


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Every tensor of a model output, in order; those of its tuples too."""
    found = []
    for value in outputs.to_tuple():
        found += [value] if isinstance(value, torch.Tensor) else list(value)
    return found


def assert_same_bits(given: Any, wanted: Any) -> None:
    """Of two model outputs."""
    for left, right in zip(tensors_of(given), tensors_of(wanted), strict=True):
        assert torch.equal(left, right)


def assert_near(given: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    """As the documentation states it: relative to the largest value where that exceeds 1."""
    bound = tolerance * max(1.0, float(wanted.nan_to_num().abs().max()))
    torch.testing.assert_close(given, wanted, rtol=0, atol=bound, equal_nan=True)


def training_loss(family: Family, head: str, model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """The head's own loss, or for a model without one a fixed random projection of all that it returns."""
    outputs = model(pixel_values=pixel_values, **HEADS[head].labels(model.config, pixel_values))
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    generator = torch.Generator().manual_seed(2)
    return sum((each * torch.randn(each.shape, generator=generator).to(each)).mean() for each in tensors_of(outputs))
