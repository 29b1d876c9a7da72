"""Configuration of the MLP-Mixer: no attention, two MLPs a block (Tolstikhin et al., arXiv 2105.01601)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfBaseConfig


@strict
class HfMixerConfig(HfBaseConfig):
    """Configuration of `HfMixerModel` and its heads; the default is Mixer-B/16 at 224 px (arXiv 2105.01601, table 1).

    Args:
        image_size: int or (height, width) in px. It is the only size that a model takes: the token MLP has a weight for
            every patch. What is no multiple of the patch is padded with zeros on both sides (SAME), as in the original.
        patch_size: px, int or (height, width).
        num_channels: of the image.
        hidden_size: channels of a token, the paper's C.
        num_hidden_layers: blocks.
        token_intermediate_size: hidden width of the MLP across the tokens, the paper's D_S.
        intermediate_size: hidden width of the MLP across the channels, the paper's D_C.
        hidden_act: between the two layers of an MLP; the original's tanh GELU by default, timm's is the exact one.
        layer_norm_eps: 1e-6, the original's value.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 with depth.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value is of a wrong type or does not go with another; the
            message names field, value and remedy.
    """

    model_type = "hf_mixer"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_mixer.HfMixerConfig",
        "AutoModel": "modeling_hf_mixer.HfMixerModel",
        "AutoModelForImageClassification": "modeling_hf_mixer.HfMixerForImageClassification",
        "AutoBackbone": "modeling_hf_mixer.HfMixerBackbone",
    }

    patch_size: int | tuple[int, int] | list[int] = 16
    hidden_size: int = 768
    num_hidden_layers: int = 12
    token_intermediate_size: int = 384
    intermediate_size: int = 3072
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float | int = 1e-6
    drop_path_rate: float | int = 0.0

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w): the patches of an image of height x width px.

        Raises:
            ValueError: the image is of another size than `image_size`.
        """
        if (height, width) != self.nominal_size:
            nominal = "x".join(map(str, self.nominal_size))
            raise ValueError(
                f"image {height}x{width} px for an MLP-Mixer of {nominal} px, which takes no other size: its token MLP "
                "has a weight for every patch; resize the image first"
            )
        stride_h, stride_w = self.patch_stride
        return -(-height // stride_h), -(-width // stride_w)

    validate_choices = HfBaseConfig.validate_rates  # by the name of version 0.2
