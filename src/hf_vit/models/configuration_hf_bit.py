"""Configuration of BiT's ResNets, with GroupNorm and standardized kernels (arXiv 1912.11370)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_resnet import HfResNetBaseConfig, check_stem


@strict
class HfBitConfig(HfResNetBaseConfig):
    """Configuration of `HfBitModel` and its classifier; the default is BiT's R50x1 at 224 px.

    Args:
        image_size: nominal image in px, int or (height, width). Other sizes work too, of any number of px.
        num_channels: channels of the image.
        stage_depths: bottleneck units in each stage: (3, 4, 6, 3) is R50, (3, 4, 23, 3) R101, (3, 8, 36, 3) R152.
        stem_width: channels of the root, a multiple of 32 (GroupNorm's groups); stage i has 4 * stem_width * 2**i.
        pre_activation: True for the paper's ResNetV2, whose units normalize before each convolution (big_vision's
            bit_paper.py); False for the network of the hybrids' stem, which normalizes after it (bit.py).
        zero_padded_pool: whether the root's max-pool of a pre-activation network pads with zeros, as in big_transfer
            (which trained the released weights), timm and transformers; big_vision ignores the padding.
        weight_standardization: what a pre-activation network adds to the variance of its kernels: "original" 1e-10, or
            "variance" 1e-8, as timm and transformers.
    """

    model_type = "hf_bit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_bit.HfBitConfig",
        "AutoModel": "modeling_hf_bit.HfBitModel",
        "AutoModelForImageClassification": "modeling_hf_bit.HfBitForImageClassification",
        "AutoBackbone": "modeling_hf_bit.HfBitBackbone",
    }
    group_norm_eps: ClassVar[float] = 1e-6  # the original code's constant for post-activation networks

    pre_activation: bool = True
    zero_padded_pool: bool = False
    weight_standardization: Literal["original", "variance"] = "original"

    def validate_form(self) -> None:
        """Raise a ValueError for an invalid stem, and for options that only pre-activation networks have."""
        check_stem(self.stage_depths, self.stem_width, 32, "GroupNorm's groups")
        if self.zero_padded_pool and not self.pre_activation:
            raise ValueError(
                "zero_padded_pool=True has no effect with pre_activation=False, whose max-pool follows a ReLU; set "
                "pre_activation=True or zero_padded_pool=False"
            )
        if self.weight_standardization != "original" and not self.pre_activation:
            raise ValueError(
                f"weight_standardization='{self.weight_standardization}' needs pre_activation=True; set it, or "
                "weight_standardization='original'"
            )
