"""CLIP in torch's own modules, under the names of OpenAI's code: a second implementation of the image tower."""

from collections import OrderedDict

import torch
from originals.pytorch import randomise
from torch import nn


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
