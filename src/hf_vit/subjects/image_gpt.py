"""ImageGPT reads colours of a palette, one token a pixel, and knows no classes: what a linear probe sees of it."""

import copy
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from hf_vit.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@final
class ImageGPTFeatures(nn.Module):
    """The lower half of an ImageGPT: pixels -> colour tokens -> the middle layer, averaged over the tokens.

    The middle block's first layer norm ends it (Chen et al., Generative Pretraining from Pixels, 2020: the features of
    linear probes are layer-normed inputs of a block, averaged over the sequence; the best lie in the middle).

    The palette is part of the model, so that it takes pixels [B, 3, H, W] like any other. Choosing a colour has no
    gradient.

    Args:
        model: transformers' ImageGPT, bare or with a head.
        clusters: the palette [V, 3], colours as the processor scales them.
        size: (H, W) px of the images.

    Raises:
        UserError: the model has no place for so many pixels.
    """

    clusters: torch.Tensor

    def __init__(self, model: Any, clusters: "ArrayLike", size: tuple[int, int]) -> None:
        super().__init__()
        self.config = model.config
        if size[0] * size[1] > self.config.n_positions:
            raise UserError(
                f"the image processor makes {size[0]}x{size[1]} px, a token each, and the ImageGPT takes "
                f"{self.config.n_positions}; give the processor the size it was trained with"
            )
        # A shallow copy: the model that was given keeps all its layers.
        body = copy.copy(model if hasattr(model, "h") else model.transformer)
        body._modules = dict(body._modules)
        middle = len(body.h) // 2
        body.ln_f, body.h = body.h[middle].ln_1, body.h[:middle]
        self.body = body
        self.register_buffer("clusters", torch.as_tensor(clusters, dtype=torch.float32))

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, H*W, D] of pixels [B, 3, H, W]."""
        from transformers.models.imagegpt.image_processing_imagegpt import color_quantize_torch

        pixels = pixel_values.float().permute(0, 2, 3, 1).reshape(-1, 3)
        tokens = color_quantize_torch(pixels, self.clusters.float()).reshape(len(pixel_values), -1)
        return self.body(input_ids=tokens, use_cache=False).last_hidden_state

    def forward_head(self, hidden_states: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """[B, D]: the mean over the tokens; the names of these two methods are timm's."""
        return hidden_states.mean(dim=1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Features [B, D]: there is no head."""
        return self.forward_head(self.forward_features(pixel_values))
