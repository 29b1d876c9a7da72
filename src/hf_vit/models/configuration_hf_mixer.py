"""Configuration of the MLP-Mixer: no attention, two MLPs a block (Tolstikhin et al., arXiv 2105.01601)."""

import math
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN

from .configuration_hf_base import HfBaseConfig

MAX_LAYERS = 10_000  # what a crafted config may ask for before anything is built


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
    code_files: ClassVar[tuple[str, ...]] = (
        "configuration_hf_base",
        "configuration_hf_mixer",
        "pretrained_hf_vit",
        "loss_hf_vit",
        "modeling_hf_mixer",
    )

    image_size: int | tuple[int, int] | list[int] = 224
    patch_size: int | tuple[int, int] | list[int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    token_intermediate_size: int = 384
    intermediate_size: int = 3072
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float | int = 1e-6
    drop_path_rate: float | int = 0.0
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("image_size", "patch_size"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, tuple(getattr(self, name)))
        self.take_stages(kwargs)
        super().__post_init__(**kwargs)

    @property
    def num_stages(self) -> int:
        return self.num_hidden_layers

    @property
    def patch_stride(self) -> tuple[int, int]:
        """(height, width) in px of the image area behind one token."""
        side = self.patch_size
        return (side, side) if isinstance(side, int) else (side[0], side[1])

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
        return self.grid

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w): patches of an image."""
        (height, width), (stride_h, stride_w) = self.nominal_size, self.patch_stride
        return -(-height // stride_h), -(-width // stride_w)

    def validate_sizes(self) -> None:
        widths = ("hidden_size", "token_intermediate_size", "intermediate_size")
        for name in ("num_channels", "num_hidden_layers", *widths):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_hidden_layers > MAX_LAYERS:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} is more than {MAX_LAYERS}, the most there can be"
            )

    def validate_image_fits_patch(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            sides = (value,) if isinstance(value, int) else value
            if (not isinstance(value, int) and len(value) != 2) or min(sides) < 1:
                raise ValueError(f"{name}={value} must be one int or (height, width), of at least 1 px")

    def validate_choices(self) -> None:
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(
                f"drop_path_rate={self.drop_path_rate} is not a probability; it needs 0 <= drop_path_rate < 1"
            )
        if not (self.layer_norm_eps > 0 and math.isfinite(self.layer_norm_eps)):
            raise ValueError(f"layer_norm_eps={self.layer_norm_eps} must be a finite number above 0")
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act='{self.hidden_act}' is not an activation of transformers; "
                "use a name of transformers.activations.ACT2FN"
            )
