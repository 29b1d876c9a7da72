"""Configuration of AxialResNet: a ResNet whose 3x3 convolutions are row and column attention (arXiv 2003.07853)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_resnet import HfResNetBaseConfig, check_stem

HEADS = 8  # in every layer (2003.07853, section 4)


@strict
class HfAxialResNetConfig(HfResNetBaseConfig):
    """Configuration of `HfAxialResNetModel` and its classifier; the default is AxialResNet-L at 224 px.

    Args:
        image_size: nominal image in px, int or (height, width): each layer's span of relative positions is its whole
            map at this size. Other sizes work too, of any number of px.
        num_channels: of the image.
        stage_depths: bottleneck units in each stage.
        stem_width: channels of the root; stage i attends with 2 * stem_width * 2**i and puts out twice as many. 32 is
            AxialResNet-S, 48 is M, 64 is L. A multiple of 8, the number of heads.
    """

    model_type = "hf_axial_resnet"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_axial_resnet.HfAxialResNetConfig",
        "AutoModel": "modeling_hf_axial_resnet.HfAxialResNetModel",
        "AutoModelForImageClassification": "modeling_hf_axial_resnet.HfAxialResNetForImageClassification",
        "AutoBackbone": "modeling_hf_axial_resnet.HfAxialResNetBackbone",
    }

    def validate_sizes(self) -> None:
        super().validate_sizes()
        check_stem(self.stage_depths, self.stem_width, HEADS, "the number of heads")
