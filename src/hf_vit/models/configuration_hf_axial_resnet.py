"""Define the configuration of AxialResNet: axial attention replaces a ResNet's 3x3 convolutions (arXiv 2003.07853)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_resnet import HfResNetBaseConfig, check_stem

HEADS = 8  # in every layer (2003.07853, section 4)


@strict
class HfAxialResNetConfig(HfResNetBaseConfig):
    """Configuration of `HfAxialResNetModel` and its classifier; the default is AxialResNet-L at 224 px.

    Args:
        image_size: nominal image in px, int or (height, width). At this size the relative positions of each layer span
            its whole map. Other sizes work too, of any number of px.
        num_channels: channels of the image.
        stage_depths: bottleneck units in each stage.
        stem_width: channels of the root, a multiple of 8 (the number of heads): 32 is AxialResNet-S, 48 M, 64 L.
            Stage i attends with 2 * stem_width * 2**i channels and has twice as many output channels.
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
