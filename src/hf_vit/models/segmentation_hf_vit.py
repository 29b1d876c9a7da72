"""Define semantic segmentation: a linear head, and transformers' UperNet and Mask2Former, on the package's backbones.

Legend: B batch, C channels, H x W px, h x w cells of a map, K labels.
Sources: the linear decoder of Segmenter (arXiv 2105.05633, section 3.2); concatenated maps of several stages as in
hypercolumns (1411.5752); UperNet: 1807.10221; Mask2Former: 2112.01527.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoBackbone,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from .backbone_hf_vit import ChannelLayerNorm
from .dense_hf_vit import HfDenseConfig, HfDenseMixin


@strict
class HfLinearSegmentationConfig(HfDenseConfig):
    """Configuration of `HfLinearForSemanticSegmentation`.

    Args:
        backbone_config: configuration of one of the package's backbones; the head reads all its maps.
        use_norm: whether a LayerNorm over the channels precedes the head, for maps without one (ResNets').
        loss_ignore_index: label of pixels that the loss ignores.
    """

    model_type = "hf_linear_segmentation"

    backbone_config: Any = None
    use_norm: bool = False
    loss_ignore_index: int = 255


class HfLinearForSemanticSegmentation(HfDenseMixin, PreTrainedModel):
    """Classify every cell of a map by a linear layer on its channels, and enlarge the scores to the image."""

    config: HfLinearSegmentationConfig
    config_class = HfLinearSegmentationConfig
    _auto_class = "AutoModelForSemanticSegmentation"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.backbone: Any = AutoBackbone.from_config(config.backbone_config)
        channels = sum(self.backbone.channels)
        self.norm = ChannelLayerNorm(channels) if config.use_norm else nn.Identity()
        self.classifier = nn.Conv2d(channels, config.num_labels, kernel_size=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> SemanticSegmenterOutput:
        """Segment images.

        Args:
            pixel_values: [B, C, H, W].
            labels: [B, H, W], the class of every pixel, or `loss_ignore_index`.

        Returns:
            logits [B, K, H, W], and with labels the loss: the mean cross-entropy of the labeled pixels, 0 if there are
                none.

        Raises:
            ValueError: labels for a model of one class.
        """
        by_config = {name: getattr(self.config, name) for name in ("output_hidden_states", "output_attentions")}
        outputs = self.backbone(pixel_values, return_dict=True, **by_config | kwargs)
        largest, *smaller = outputs.feature_maps
        resized = [F.interpolate(each, largest.shape[2:], mode="bilinear", align_corners=False) for each in smaller]
        logits = self.classifier(self.norm(torch.cat([largest, *resized], dim=1)))
        logits = F.interpolate(logits, pixel_values.shape[2:], mode="bilinear", align_corners=False)
        loss = None
        if labels is not None:
            if self.config.num_labels == 1:
                raise ValueError("the loss compares classes, but num_labels=1; make the background a class as well")
            ignore_index = self.config.loss_ignore_index
            loss = F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")
            loss = loss / (labels != ignore_index).sum().clamp(min=1)
        return SemanticSegmenterOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@strict
class HfUperNetConfig(HfDenseConfig, UperNetConfig):
    """transformers' configuration of UperNet with one of the package's backbones."""

    model_type = "hf_upernet"


class HfUperNetForSemanticSegmentation(HfDenseMixin, UperNetForSemanticSegmentation):
    """transformers' UperNet on one of the package's backbones, which must return several maps."""

    config: HfUperNetConfig
    config_class = HfUperNetConfig
    _auto_class = "AutoModelForSemanticSegmentation"


@strict
class HfMask2FormerConfig(HfDenseConfig, Mask2FormerConfig):
    """transformers' configuration of Mask2Former with one of the package's backbones."""

    model_type = "hf_mask2former"

    def validate_architecture(self) -> None:
        """Skip transformers' check, which warns about all backbones but its Swin."""


class HfMask2FormerForUniversalSegmentation(HfDenseMixin, Mask2FormerForUniversalSegmentation):
    """transformers' Mask2Former on one of the package's backbones, whose maps have the strides `feature_strides`."""

    config: HfMask2FormerConfig
    config_class = HfMask2FormerConfig
    _auto_class = "AutoModelForUniversalSegmentation"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = False  # the decoder has a single implementation
