"""Configuration of BiT's ResNets, with GroupNorm and standardized kernels (arXiv 1912.11370)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_resnet import HfResNetBaseConfig, check_stem


@strict
class HfBitConfig(HfResNetBaseConfig):
    """Configuration of `HfBitModel` and its classifier; the default is BiT's R50x1 at 224 px.

    Args:
        image_size: nominal image in px, int or (height, width). Other sizes work too, of any number of px.
        num_channels: of the image.
        stage_depths: bottleneck units in each stage: (3, 4, 6, 3) is R50, (3, 4, 23, 3) R101, (3, 8, 36, 3) R152.
        stem_width: channels of the root; stage i puts out 4 * stem_width * 2**i. A multiple of 32 (GroupNorm's groups).
        pre_activation: True for the paper's ResNetV2, whose units normalize before each convolution (big_vision's
            bit_paper.py); False for the network of the hybrids' stem, which normalizes after it (its bit.py).
        zero_padded_pool: whether the root's max-pool of a pre-activation network sees zeros beyond the border, as in
            the code the released weights were trained with (big_transfer), in timm and in transformers, or nothing, as
            in big_vision.
        weight_standardization: of a pre-activation network: "original" (variance + 1e-10), or "variance" (+ 1e-8) as
            timm and transformers have it.
    """

    model_type = "hf_bit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_bit.HfBitConfig",
        "AutoModel": "modeling_hf_bit.HfBitModel",
        "AutoModelForImageClassification": "modeling_hf_bit.HfBitForImageClassification",
        "AutoBackbone": "modeling_hf_bit.HfBitBackbone",
    }
    group_norm_eps: ClassVar[float] = 1e-6  # of a post-activation network; a constant of the original code

    pre_activation: bool = True
    zero_padded_pool: bool = False
    weight_standardization: Literal["original", "variance"] = "original"

    def validate_form(self) -> None:
        check_stem(self.stage_depths, self.stem_width, 32, "GroupNorm's groups")
        if self.zero_padded_pool and not self.pre_activation:
            raise ValueError("zero_padded_pool=True needs pre_activation=True; after a ReLU zeros change nothing")
        if self.weight_standardization != "original" and not self.pre_activation:
            raise ValueError(f"weight_standardization='{self.weight_standardization}' needs pre_activation=True")
