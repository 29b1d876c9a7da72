"""Features by depth: what every layer of a model makes of an image, as maps over the image.

Legend: B batch, C channels, D feature channels (they may differ by depth), h x w places of a map.
"""

import re
from functools import partial
from typing import Any, final

import torch
from torch import nn

from hf_vit.analysis.reading.token_layout import KNOWN, TokenLayout, kind_of
from hf_vit.families import FAMILIES
from hf_vit.loading.outputs import is_channels_last, layers_of, watch_layers

_RESNET_LAYERS = r"layer\d\.\d+"  # timm's and torchvision's
# Families whose layers give maps: ours, and transformers'.
_RESNETS = (
    *(family.model_type for family in FAMILIES.values() if not family.has_tokens),
    *("resnet", "bit", "regnet", "convnext"),
)


def feature_obstacle(model: nn.Module) -> str | None:
    """Why the feature maps of a model cannot be read; None if they can."""
    kind = kind_of(model)
    if kind in (*KNOWN, *_RESNETS) or all(re.fullmatch(_RESNET_LAYERS, name) for name in layers_of(model)):
        return None
    known = ", ".join((*KNOWN, *_RESNETS))
    return f"it reads feature maps, which it knows how to find in {known} and timm's ResNets, not in {kind}"


@final
class FeatureReader:
    """Reads the feature map [B, D, h, w] of every depth from one ordinary forward.

    Depth 0 of a model of tokens is its embeddings (a hybrid's stem included), the others are its layers, patches
    alone; of a ResNet they are its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = TokenLayout(model) if kind_of(model) in KNOWN else None
        self._channels_last = is_channels_last(model)

    def maps(self, pixel_values: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Run the model on [B, C, H, W]: the maps of all depths, and what the model returns."""
        maps: list[torch.Tensor] = []
        to_map = self._map_of_grid if self.layout is None else partial(self._map_of_tokens, self.layout, pixel_values)
        keywords = {} if self.layout is None else self.layout.keywords(pixel_values)
        with watch_layers(self.model, lambda name, features: maps.append(to_map(features))):
            output = self.model(pixel_values, **keywords)
        return maps, output

    def _map_of_grid(self, features: torch.Tensor) -> torch.Tensor:
        return features.permute(0, 3, 1, 2) if self._channels_last else features

    @staticmethod
    def _map_of_tokens(layout: TokenLayout, pixel_values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, layout.patch_tokens].transpose(1, 2).unflatten(2, layout.grid(pixel_values))
