"""Define the configuration of the MLP-Mixer: no attention, two MLPs per block (Tolstikhin et al., arXiv 2105.01601)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfBaseConfig


@strict
class HfMixerConfig(HfBaseConfig):
    """Configuration of `HfMixerModel` and its heads; the default is Mixer-B/16 at 224 px (arXiv 2105.01601, table 1).

    Args:
        image_size: int or (height, width) in px. The model takes no other size, as the token MLP has a weight for every
            patch. Incomplete patches are padded with zeros on both sides (SAME), as in the original code.
        patch_size: px, int or (height, width).
        num_channels: channels of the image.
        hidden_size: channels of a token, the paper's C.
        num_hidden_layers: number of blocks.
        token_intermediate_size: hidden width of the MLP across the tokens, the paper's D_S.
        intermediate_size: hidden width of the MLP across the channels, the paper's D_C.
        hidden_act: activation of the MLPs; default: the original code's tanh GELU (timm's is the exact GELU).
        layer_norm_eps: 1e-6 is the original code's value.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 with depth.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value has a wrong type or cannot be combined with another; the
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
        """Return (h, w), how many patches an image of height x width px has.

        Raises:
            ValueError: the image has another size than `image_size`.
        """
        if (height, width) != self.nominal_size:
            nominal = "x".join(map(str, self.nominal_size))
            raise ValueError(
                f"this MLP-Mixer takes images of {nominal} px only, as its token MLP has a weight for every patch; the "
                f"image has {height}x{width} px: resize it first"
            )
        stride_h, stride_w = self.patch_stride
        return -(-height // stride_h), -(-width // stride_w)

    validate_choices = HfBaseConfig.validate_rates  # by the name of version 0.2
