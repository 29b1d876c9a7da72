"""hf_vit and its peers with random weights and identical shapes, each as a module from images to logits.

Legend: B batch, C channels, H x W px, N tokens, D hidden size, K labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.conversion.targets.graphs.tracing import only_whole_patches
from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.inference.compiling import compile_frozen
from hf_vit.inference.optimize import optimize_for_inference
from hf_vit.inference.packing import pack
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, HfViTConfig
from hf_vit.rewriting.dense import Dense
from hf_vit.rewriting.planning import plan_for
from hf_vit.speed.engines import FORMS, INT8, obstacle_of, on_engine, without_form
from hf_vit.variants import variant_config

NUM_LABELS = 1000
# What timm calls the hybrids that it has; the stride of R50+B/16 is 16 px there too.
_TIMM_HYBRIDS = {"R26+S/32": "vit_small_r26_s32_224", "R50+B/16": "vit_base_r50_s16_384"}
_TIMM_WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large"}


@dataclass(frozen=True)
class Shape:
    """What all contestants of a comparison share: a variant's sizes at an image size (px a side)."""

    variant: str
    image_size: int = 224

    def config(self, **fields: Any) -> HfViTBaseConfig:
        config = self.any_config(**fields)
        if not isinstance(config, HfViTBaseConfig):
            raise UserError(f"{self.variant} is no Vision Transformer and has no such peer; give a size like S/16")
        return config

    def any_config(self, **fields: Any) -> HfBaseConfig:
        """The same, of any family."""
        return variant_config(self.variant, image_size=self.image_size, num_labels=NUM_LABELS, **fields)

    @property
    def is_plain(self) -> bool:
        return type(self.any_config()) is HfViTConfig

    def images(self, batch: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        """[B, 3, H, W] of noise."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch, 3, self.image_size, self.image_size, generator=generator)
        return images.to(device, dtype)


@final
class Logits(nn.Module):
    """A transformers classifier as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits


@final
class TorchViT(nn.Module):
    """torch.nn.TransformerEncoder (its fast path in inference) between patches and a head."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + config.grid[0] * config.grid[1], width))
        layer = nn.TransformerEncoderLayer(
            width, config.num_attention_heads, config.intermediate_size, 0.0, "gelu", 1e-6, True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_hidden_layers, nn.LayerNorm(width, eps=1e-6), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, NUM_LABELS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])


def _random_dense(inputs: int, outputs: int) -> Dense:
    linear = nn.Linear(inputs, outputs)
    return Dense(linear.weight, linear.bias)


@final
class MatrixProducts(nn.Module):
    """A plain ViT's own matrix products and nothing else: what no ViT can be faster than by the same library.

    Every layer has weights of its own, as they come from memory. The classifier's head is not among them.
    """

    def __init__(self, config: HfViTBaseConfig, dense: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        width, mlp = config.hidden_size, config.intermediate_size
        self.depth, self.heads, self.patch = config.num_hidden_layers, config.num_attention_heads, config.patch_size
        self.patches = dense(3 * self.patch**2, width)
        sizes = {"qkv": (width, 3 * width), "output": (width, width), "fc1": (width, mlp), "fc2": (mlp, width)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: dense(*size) for name, size in sizes.items()}) for _ in range(self.depth)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        batch = images.shape[0]
        tokens = self.patches(images.reshape(batch, -1, 3 * self.patch**2))
        tokens = F.pad(tokens, (0, 0, 1, 0))
        layers: Any = self.layers
        for layer in layers:
            query, key, value = layer["qkv"](tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            attended = torch.matmul(torch.matmul(query, key.transpose(2, 3)), value)
            tokens = layer["fc2"](layer["fc1"](layer["output"](attended.transpose(1, 2).flatten(2))))
        return tokens


def _hf_vit(shape: Shape, attention: str = "sdpa", **fields: Any) -> nn.Module:
    family: Any = family_of(shape.any_config().model_type)
    config = shape.any_config(**{name: value for name, value in fields.items() if hasattr(family.config_class, name)})
    how = {"attn_implementation": attention} if family.is_vit else {}
    return Logits(family.classes["classification"]._from_config(config, **how))


def _transformers(shape: Shape, attention: str) -> nn.Module:
    own = shape.config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "image_size")
    config = ViTConfig(**{name: getattr(own, name) for name in names}, num_labels=NUM_LABELS)  # pyright: ignore[reportCallIssue]
    return Logits(ViTForImageClassification._from_config(config, attn_implementation=attention))


def _timm(shape: Shape) -> nn.Module:
    import timm

    if shape.variant in _TIMM_HYBRIDS:
        return timm.create_model(_TIMM_HYBRIDS[shape.variant], img_size=shape.image_size)
    if shape.variant.startswith("BiT-"):
        return timm.create_model(_timm_bit(shape.variant), num_classes=NUM_LABELS)
    options: dict[str, Any] = {"img_size": shape.image_size, "num_classes": NUM_LABELS}
    if shape.variant.startswith("Mixer-"):
        return timm.create_model(_timm_mixer(shape.variant), **options)
    config = shape.config()
    if config.hidden_size not in _TIMM_WIDTHS:  # a shape of no name: any of its ViTs with these sizes
        sizes = {"embed_dim": config.hidden_size, "depth": config.num_hidden_layers, "patch_size": config.patch_size}
        return timm.models.VisionTransformer(**options, **sizes, num_heads=config.num_attention_heads)  # pyright: ignore
    options["patch_size"] = config.patch_size
    return timm.create_model(f"vit_{_TIMM_WIDTHS[config.hidden_size]}_patch16_224", **options)


def _timm_bit(variant: str) -> str:
    """BiT-R50x1 -> resnetv2_50x1_bit."""
    return f"resnetv2_{variant.removeprefix('BiT-R')}_bit"


def _timm_mixer(variant: str) -> str:
    """Mixer-B/16 -> mixer_b16_224."""
    return f"{variant.replace('Mixer-', 'mixer_').replace('/', '').lower()}_224"


def _vit_pytorch(shape: Shape) -> nn.Module:
    from vit_pytorch import ViT

    config = shape.config()
    heads = config.num_attention_heads
    return ViT(
        image_size=shape.image_size,
        patch_size=config.patch_size,
        num_classes=NUM_LABELS,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=heads,
        dim_head=config.hidden_size // heads,
        mlp_dim=config.intermediate_size,
    )


# hf_vit's contestants: as loaded with the peers' GELU, with the original's, with explicit attention.
OURS: dict[str, Callable[[Shape], nn.Module]] = {
    "hf_vit": lambda shape: _hf_vit(shape, hidden_act="gelu"),
    "hf_vit eager": lambda shape: _hf_vit(shape, "eager", hidden_act="gelu"),
    "hf_vit flash": lambda shape: _hf_vit(shape, "flash_attention_2", hidden_act="gelu"),
    "hf_vit tanh": lambda shape: _hf_vit(shape),
    "hf_vit optimized": lambda shape: _hf_vit(shape, hidden_act="gelu"),
    "hf_vit optimized, compiled": lambda shape: _hf_vit(shape, hidden_act="gelu"),
    "hf_vit optimized, int8": lambda shape: _hf_vit(shape, hidden_act="gelu"),
}
PEERS: dict[str, Callable[[Shape], nn.Module]] = {
    "transformers eager": lambda shape: _transformers(shape, "eager"),
    "transformers": lambda shape: _transformers(shape, "sdpa"),
    "timm": _timm,
    "vit-pytorch": _vit_pytorch,
    "torch encoder": lambda shape: TorchViT(shape.config()),
}
# By torch's own products; packed by oneDNN; with ", openvino" at its end by OpenVINO's.
PRODUCTS, PACKED = "products alone", ", packed by oneDNN"
_PACKAGES = {"timm": "timm", "vit-pytorch": "vit_pytorch", "hf_vit flash": "flash_attn"}
COMPILED = ", compiled"
# As `optimize_for_inference(model, compile=True)` compiles: with the weights frozen into the graph.
FROZEN = ", compiled and frozen"


def obstacle(
    name: str, shape: Shape, training: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> str | None:
    """Why a contestant cannot take part; None if it can."""
    name, form = without_form(name)
    plain = _plain(name)
    if form and training:
        return "it is for inference"
    if form and (engine_obstacle := obstacle_of(form, dtype, device)) is not None:
        return engine_obstacle
    package = _PACKAGES.get(plain)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    if training and ("optimized" in name or name.endswith((FROZEN, PACKED))):
        return "it is for inference"
    config = shape.any_config()
    if plain in ("hf_vit eager", "hf_vit flash") and not isinstance(config, HfViTBaseConfig):
        return f"{shape.variant} has no attention"
    if plain == "hf_vit tanh" and not hasattr(config, "hidden_act"):
        return f"{shape.variant} has no GELU"
    mixer = shape.variant.startswith("Mixer-") and shape.variant != "Mixer-H/14"
    has_timm = shape.variant in _TIMM_HYBRIDS or shape.variant.startswith("BiT-") or mixer
    if not shape.is_plain and plain in (PRODUCTS, *PEERS) and not (plain == "timm" and has_timm):
        return f"{plain} has no {shape.variant}"
    return None


def compiled_forms(names: Sequence[str]) -> list[str]:
    """Each of these contestants compiled, frozen and not; what is optimized is always frozen."""
    plain = [name for name in names if name == _plain(name) != PRODUCTS and not without_form(name)[1]]
    return [name + form for name in plain for form in ((COMPILED,) if "optimized" in name else (COMPILED, FROZEN))]


def _plain(name: str) -> str:
    return name.removesuffix(COMPILED).removesuffix(FROZEN).removesuffix(PACKED).removesuffix(INT8)


def engine_forms(names: Sequence[str]) -> list[str]:
    """Each of these contestants by every engine that is installed, in float and in int8."""
    return [name + form for form, (engine, _) in FORMS.items() if not engine.missing() for name in names]


def build(name: str, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """A contestant with random weights, [B, 3, H, W] -> [B, K] ("products alone": to tokens).

    Args:
        name: of `OURS`, `PEERS` or `PRODUCTS`; with `COMPILED` or `FROZEN` at its end through `torch.compile`, with a
            key of `FORMS` by an engine (hf_vit's optimized by `optimize_for_inference`), products with `PACKED` packed.

    Raises:
        UserError: there is no such contestant.
    """
    whole, (name, form) = name, without_form(name)
    if form and not (name == "hf_vit optimized" and INT8 not in form):
        plain_model = build("hf_vit" if name == "hf_vit optimized" else name, shape).eval()
        if name == "hf_vit optimized":  # packed for torch, it could not be exported
            plan_for(plain_model, torch.float32).carry_out()
        # OpenVINO 2026.4 crashes on kernels that are standardised in the graph, as its own converter has them.
        through_onnx = only_whole_patches(shape.any_config())
        return on_engine(plain_model, shape.images(8, torch.float32, "cpu"), form, dtype, through_onnx=through_onnx)
    plain = name if name in OURS else _plain(name)
    torch.manual_seed(0)
    if plain == PRODUCTS:
        model: nn.Module = MatrixProducts(shape.config(), _random_dense if name.endswith(PACKED) else nn.Linear)
    elif plain in OURS | PEERS:
        model = (OURS | PEERS)[plain](shape)
    else:
        known = ", ".join([*OURS, *PEERS, PRODUCTS])
        raise UserError(f"no contestant '{whole}'; there are {known}, and hf-vit bench saved for saved models")
    model = model.to(device, dtype)
    if "optimized" in plain:
        engine, quantize = form.removeprefix(", ") or "torch", "int8" if name.endswith(INT8) else None
        return optimize_for_inference(model, engine=engine, compile=plain.endswith(COMPILED), quantize=quantize)
    if name.endswith(PACKED):
        return pack(model)
    if name.endswith(FROZEN):
        compile_frozen(model.eval().requires_grad_(False))
    elif name.endswith(COMPILED):
        model.compile()
    return model
