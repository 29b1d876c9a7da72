"""Small random models of transformers, timm and CLIP, as sources of conversions."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.layers import StdConv2d
from timm.models import save_for_hf
from timm.models.mlp_mixer import _create_mixer
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer_hybrid import _create_vision_transformer_hybrid, _resnetv2
from torch import nn

import hf_vit

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20, "image_size": 12,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip

STEM = {"image_size": 48, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def hybrid_for_stem(**fields: Any) -> Any:
    """A classifier here whose stem is that of the recorded ResNet."""
    config = hf_vit.HfHybridViTConfig(**STEM | {"stage_depths": (2, 1), "stem_width": 32, "num_labels": 3} | fields)
    return hf_vit.HfHybridViTForImageClassification(config).eval()


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that show every mistake: no zeros, no ones, nothing small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.ndim == 1 and name.endswith("weight")))
    return model.eval()


def of_transformers(name: str, build: Callable[[Any], nn.Module] | None = None, **fields: Any) -> nn.Module:
    """A model of transformers by its class's name; `build` makes it otherwise from its config."""
    made = getattr(transformers, name)
    fields = {**SIZES, **fields}
    if "vision_config" in made.config_class.sub_configs:  # a classifier on the image tower of two
        labels = {name: fields.pop(name) for name in ("num_labels", "id2label", "label2id") if name in fields}
        fields = {"vision_config": fields, **labels}
    return randomise((build or made)(made.config_class(**fields)))


def vit_hybrid_parts(labels: Sequence[str] = [f"LABEL_{i}" for i in range(5)]) -> "ViTHybrid":
    """transformers' former ViTHybrid, put together from what is still there: BiT, and the blocks of ViT."""
    bit = {
        "embedding_size": 32, "hidden_sizes": [128, 256], "depths": [2, 1], "layer_type": "bottleneck",
        "global_padding": "same", "embedding_dynamic_padding": True, "out_features": ["stage2"],
    }  # fmt: skip
    return randomise(ViTHybrid(transformers.BitConfig(**bit), labels))


class ViTHybrid(nn.Module):
    """Its classifier, under the names its files have; 16 px of the image are behind a token."""

    def __init__(self, bit: Any, labels: Sequence[str]) -> None:
        super().__init__()
        fields = {**SIZES, "image_size": 32, "patch_size": 8}
        self.config, self.bit, self.labels = transformers.ViTConfig(**fields), bit, labels
        self.vit = transformers.ViTModel(self.config, add_pooling_layer=False)
        width = self.config.hidden_size
        patches = nn.Module()
        patches.backbone = nn.Module()
        patches.backbone.bit = transformers.BitModel(bit)
        patches.projection = nn.Conv2d(bit.hidden_sizes[-1], width, kernel_size=1)
        self.vit.embeddings.patch_embeddings = patches
        self.classifier = nn.Linear(width, len(labels))

    def tokens(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embeddings, bit = self.vit.embeddings, self.vit.embeddings.patch_embeddings.backbone.bit
        features = bit.encoder(bit.embedder(pixel_values)).last_hidden_state
        patches = embeddings.patch_embeddings.projection(features).flatten(2).transpose(1, 2)
        special = embeddings.cls_token.expand(len(patches), -1, -1)
        hidden = torch.cat([special, patches], dim=1) + embeddings.position_embeddings
        for layer in self.vit.layers:
            hidden = layer(hidden)
        return self.vit.layernorm(hidden)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.tokens(pixel_values)[:, 0])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """In the old spelling, the only one there was."""
        return {
            old_spelling(name): value
            for name, value in super().state_dict(*args, **kwargs).items()
            if "pooler" not in name
        }

    def json(self) -> dict[str, Any]:
        """The config.json of its time."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
        backbone = self.bit.to_dict() | {"global_padding": "same"}
        return {name: getattr(self.config, name) for name in (*names, "layer_norm_eps")} | {
            "model_type": "vit-hybrid",
            "image_size": 32,
            "patch_size": 1,
            "backbone_config": backbone,
            "id2label": {str(i): label for i, label in enumerate(self.labels)},
        }

    def files(self, **steps: Any) -> dict[str, Any]:
        """What lies beside the weights."""
        processor = {"image_processor_type": "ViTHybridImageProcessor", **steps}
        return {"config.json": self.json(), "preprocessor_config.json": processor}

    def save(self, folder: Path, **steps: Any) -> None:
        folder.mkdir()
        save_file(self.state_dict(), folder / "model.safetensors")
        for name, content in self.files(**steps).items():
            (folder / name).write_text(json.dumps(content))


def old_spelling(name: str) -> str:
    if ".backbone." in name:
        return name
    for new, old in (
        ("vit.layers.", "vit.encoder.layer."),
        ("attention.q_proj", "attention.attention.query"),
        ("attention.k_proj", "attention.attention.key"),
        ("attention.v_proj", "attention.attention.value"),
        ("attention.o_proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ):
        name = name.replace(new, old)
    return name


def of_timm(architecture: str = "vit_tiny_patch16_224", **arguments: Any) -> nn.Module:
    """A plain ViT of timm, made small."""
    small = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return randomise(timm.create_model(architecture, **{**small, **arguments}))


def hybrid_of_timm(layers: tuple[int, ...] = (2, 1), patch_size: int = 1, **arguments: Any) -> nn.Module:
    """A hybrid of timm; its stem cannot be made narrower than 64."""
    small = {"img_size": 32, "embed_dim": 128, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = _create_vision_transformer_hybrid(
        "vit_tiny_r_s16_p8_224", backbone=_resnetv2(layers), patch_size=patch_size, **{**small, **arguments}
    )
    return randomise(model)


def mixer_of_timm(name: str = "mixer_b16_224", **arguments: Any) -> nn.Module:
    """One of timm's, small unless `arguments` say otherwise."""
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 2, "num_classes": 5}
    return randomise(_create_mixer(name, **{**small, **arguments}))


def bit_of_timm(layers: tuple[int, ...] = (2, 1), **arguments: Any) -> nn.Module:
    """A BiT of timm as its `resnetv2_*_bit` are, made small."""
    small = {"layers": layers, "channels": (128, 256)[: len(layers)], "stem_chs": 32, "num_classes": 5}
    small |= {"stem_type": "fixed", "conv_layer": partial(StdConv2d, eps=1e-8)}
    model = ResNetV2(**small | arguments)
    model.pretrained_cfg = timm.get_pretrained_cfg("resnetv2_50x1_bit").to_dict()
    return randomise(model)


def bit_of_transformers(name: str = "BitForImageClassification", **fields: Any) -> nn.Module:
    small = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [2, 1], "num_labels": 5}
    made = getattr(transformers, name)
    return randomise(made(transformers.BitConfig(**{**small, **fields})))


def save_timm(model: nn.Module, folder: Path, **config: Any) -> Path:
    """As timm writes a repository of the Hub."""
    save_for_hf(model, folder, model_config=config or None, safe_serialization=True)
    return folder


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        layers = {"c_fc": nn.Linear(width, mlp), "gelu": nn.GELU(), "c_proj": nn.Linear(mlp, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.ln_1(tokens)
        tokens = tokens + self.attn(normed, normed, normed, need_weights=False)[0]
        return tokens + self.mlp(self.ln_2(tokens))


class _Blocks(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int, depth: int) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(*[_Block(width, heads, mlp) for _ in range(depth)])


class OpenClipTower(nn.Module):
    """[B, 3, H, W] -> (tokens, embedding of the image)."""

    def __init__(self, width: int = 64, heads: int = 1, mlp: int = 20, grid: int = 3, patch: int = 4, common: int = 7):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(grid * grid + 1, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = _Blocks(width, heads, mlp, depth=2)
        self.proj = nn.Parameter(torch.zeros(width, common))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        patches = self.conv1(images).flatten(2).mT
        tokens = torch.cat([self.class_embedding.expand(len(images), 1, -1), patches], dim=1)
        tokens = self.transformer.resblocks(self.ln_pre(tokens + self.positional_embedding))
        return tokens, self.ln_post(tokens[:, 0]) @ self.proj


def open_clip_tower(**sizes: int) -> OpenClipTower:
    tower = OpenClipTower(**sizes)
    randomise(tower)
    return tower


def both_towers(tower: OpenClipTower, prefix: str = "") -> dict[str, torch.Tensor]:
    """As the whole CLIP is saved: the image tower below `visual.`, the text tower beside it under the same names."""
    text = {f"transformer.{name}": value for name, value in tower.transformer.state_dict().items()}
    text |= {"positional_embedding": torch.ones(5, 64), "text_projection": torch.ones(64, 7)}
    text |= {"token_embedding.weight": torch.ones(9, 64), "ln_final.bias": torch.ones(64)}
    image = {f"visual.{name}": value for name, value in tower.state_dict().items()}
    return {prefix + name: value for name, value in (text | image | {"logit_scale": torch.tensor(1.0)}).items()}


def pixels(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def measure_difference(ours: torch.Tensor, theirs: np.ndarray) -> float:
    assert tuple(ours.shape) == theirs.shape
    return float((ours.detach().double() - torch.from_numpy(theirs).double()).abs().max())


def largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value where that exceeds 1."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def load(result: Any) -> Any:
    return result.plan.model_class.from_pretrained(result.output).eval()
