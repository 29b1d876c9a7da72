"""Define the Hybrid-ViT: a ResNet stem (root and bottleneck stages) whose feature map is cut into patches.

Legend: B batch, C channels, H x W px, h x w patch grid, D hidden size.
Sources: arXiv 2010.11929 section 3.1 and table 6; the stem is BiT's (arXiv 1912.11370, see `resnet_hf_vit`).
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_outputs import BackboneOutput
from transformers.utils.output_capturing import OutputRecorder

from .backbone_hf_vit import HfViTBaseBackbone
from .configuration_hf_hybrid_vit import HfHybridViTConfig
from .embeddings_hf_vit import Grid
from .modeling_hf_vit import HfViTBaseForImageClassification, HfViTBaseModel, HfViTPreTrainedModel
from .pretraining_hf_vit import HfViTBaseForMaskedPatchPrediction
from .resnet_hf_vit import ResNetStem


class HfHybridViTPatchEmbeddings(nn.Module):
    """Stem, then patches of its feature map, each projected: [B, C, H, W] -> [B, h*w, D], row by row."""

    def __init__(self, config: HfHybridViTConfig) -> None:
        super().__init__()
        self.stem = ResNetStem(config)
        side = config.stem_patch_size
        self.projection = nn.Conv2d(
            self.stem.out_channels, config.hidden_size, side, stride=side, bias=not config.norm_before_layers
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(self.stem(pixel_values)).flatten(2).transpose(1, 2)


class HfHybridViTPreTrainedModel(HfViTPreTrainedModel):
    """Abstract: what every model of the hybrid family shares."""

    config: HfHybridViTConfig
    config_class = HfHybridViTConfig
    _no_split_modules: ClassVar[list[str]] = ["ResNetBottleneck", "HfViTLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        **HfViTPreTrainedModel._can_record_outputs,
        "stem_maps": OutputRecorder(nn.Sequential, layer_name="stem.stages"),
    }


class HfHybridViTModel(HfHybridViTPreTrainedModel, HfViTBaseModel):
    """The bare Hybrid-ViT, which returns tokens and a pooled output."""

    def build_patch_embeddings(self, config: HfHybridViTConfig) -> nn.Module:
        return HfHybridViTPatchEmbeddings(config)


class HfHybridViTForImageClassification(HfHybridViTPreTrainedModel, HfViTBaseForImageClassification):
    """The Hybrid-ViT with a linear classifier on the pooled output."""

    model_class = HfHybridViTModel


class HfHybridViTForMaskedPatchPrediction(HfHybridViTPreTrainedModel, HfViTBaseForMaskedPatchPrediction):
    """The Hybrid-ViT with a head that predicts patches; see `HfViTForMaskedPatchPrediction`."""

    model_class = HfHybridViTModel


class HfHybridViTBackbone(HfHybridViTPreTrainedModel, HfViTBaseBackbone):
    """The Hybrid-ViT as a backbone; see `HfViTBackbone`.

    Config field:
        stem_stages: stages of the stem (1, 2, ...) whose maps precede those of `out_features`, with strides 4, 8, 16 px
            and 4, 8, 16 times `stem_width` channels. All images must have one size.
    """

    model_class = HfHybridViTModel

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BackboneOutput:
        """Return the feature maps.

        Raises:
            ValueError: `patch_attention_mask` is given with `stem_stages`, as the stem processes each size separately.
        """
        if patch_attention_mask is not None and self.config.stem_stages:
            raise ValueError(
                f"patch_attention_mask cannot be combined with stem_stages={self.config.stem_stages}; give images of "
                "one size without a mask, or set stem_stages=()"
            )
        return super().forward(pixel_values, patch_attention_mask, **kwargs)

    @property
    def channels(self) -> list[int]:
        width = self.config.stem_width
        return [*(4 * width * 2 ** (stage - 1) for stage in self.config.stem_stages), *super().channels]

    @property
    def strides(self) -> list[int]:
        return [*(4 * 2 ** (stage - 1) for stage in self.config.stem_stages), *super().strides]

    def feature_maps(self, outputs: Any, grid: Grid) -> tuple[torch.Tensor, ...]:
        stem_maps = (outputs.stem_maps[stage - 1].contiguous() for stage in self.config.stem_stages)
        return *stem_maps, *super().feature_maps(outputs, grid)
