"""Define masked and next patch prediction: a head that predicts the colors of patches that the model did not see.

Legend: B batch, C channels, H x W px, P x P' patch px, h x w patch grid, N = h*w patches, D hidden size, M patches that
count for the loss.
Source: arXiv 2010.11929, section 4.6 and appendix B.1.2. Next patch prediction is the same head on causal attention, in
raster order, like GPT (the paper's conclusion leaves this open).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import MaskedImageModelingOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .configuration_hf_vit import HfViTBaseConfig, HfViTConfig, as_pair
from .modeling_hf_vit import HfViTBaseModel, HfViTModel, HfViTPreTrainedModel, get_patch_token_slice

LEVELS = 8  # 3 bits per channel
MAX_CHANNELS = 4  # 8**4 = 4,096 classes; each further channel would multiply them by 8


def cut_patches(pixel_values: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
    """Cut images [B, C, H, W] into patches [B, N, C, P, P'], row by row; incomplete patches are ignored."""
    h, w = pixel_values.shape[2] // stride[0], pixel_values.shape[3] // stride[1]
    cropped = pixel_values[:, :, : h * stride[0], : w * stride[1]]
    rows = cropped.unflatten(2, (h, stride[0])).unflatten(4, (w, stride[1]))
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join_patches(patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Join patches [B, N, C, P, P'] to images [B, C, h*P, w*P']."""
    return patches.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def number_colors(colors: torch.Tensor) -> torch.Tensor:
    """Return the class numbers [...] of colors [..., C] in [0, 1]: 3 bits per channel, the first
    channel's the highest.
    """
    classes = torch.zeros(colors.shape[:-1], dtype=torch.int64, device=colors.device)
    for level in (colors * LEVELS).floor().clamp(0, LEVELS - 1).long().unbind(-1):
        classes = classes * LEVELS + level
    return classes


def get_class_colors(classes: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return the colors [..., C] in the middle of each class [...]."""
    powers = LEVELS ** torch.arange(num_channels - 1, -1, -1, device=classes.device)
    return ((classes[..., None] // powers) % LEVELS + 0.5) / LEVELS


class ColorClasses:
    """Prediction of a patch shrunk to side x side colors (area means), each one of 8**C classes.

    `prediction_target` "mean_color" is side 1, "downsampled" side 4 (16 classifications in parallel).

    Raises:
        ValueError: there are too many channels, or a patch is smaller than side x side px.
    """

    def __init__(self, config: HfViTBaseConfig, side: int) -> None:
        if config.num_channels > MAX_CHANNELS:
            raise ValueError(
                f"prediction_target='{config.prediction_target}' with num_channels={config.num_channels} would need "
                f"{LEVELS}**{config.num_channels} color classes; use prediction_target='pixels', or at most "
                f"{MAX_CHANNELS} channels"
            )
        self.config = config
        self.side = side
        self.num_classes = LEVELS**config.num_channels
        self.num_outputs = side * side * self.num_classes
        self.check_patch(config.patch_stride)

    def check_patch(self, stride: tuple[int, int]) -> None:
        """Raise a ValueError if a patch is too small for the colors to predict."""
        if min(stride) < self.side:
            raise ValueError(
                f"prediction_target='downsampled' shrinks patches to {self.side}x{self.side}; a patch of "
                f"{stride[0]}x{stride[1]} px is smaller: use prediction_target='mean_color' or 'pixels'"
            )

    def targets(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the classes [M, side * side] of patches [M, C, P, P'] of pixel values."""
        mean, std = self._scale(patches)
        shrunk = F.adaptive_avg_pool2d(patches, self.side)
        return number_colors((shrunk * std + mean).flatten(2).transpose(1, 2))

    def loss(self, outputs: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy (nats) of outputs [M, num_outputs] over patches and their colors; 0 without
        patches.
        """
        targets = self.targets(patches).flatten()
        total = F.cross_entropy(outputs.reshape(-1, self.num_classes), targets, reduction="sum")
        return total / torch.ones_like(targets).sum().clamp(min=1)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Reshape outputs [B, N, num_outputs] to [B, N, 8**C], or [B, N, 16, 8**C]."""
        return outputs if self.side == 1 else outputs.unflatten(-1, (self.side**2, self.num_classes))

    def to_patches(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the most likely colors of outputs [B, N, num_outputs] as patches of pixel values [B, N, C, P, P']."""
        channels = self.config.num_channels
        classes = outputs.reshape(-1, self.side**2, self.num_classes).argmax(-1)
        colors = get_class_colors(classes, channels).to(outputs.dtype).transpose(1, 2)
        mean, std = self._scale(outputs)
        planes = (colors.reshape(-1, channels, self.side, self.side) - mean) / std
        return F.interpolate(planes, size=self.config.patch_stride, mode="nearest").unflatten(0, outputs.shape[:2])

    def _scale(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and std of the image processor, each [C or 1, 1, 1]."""
        mean, std = self.config.image_mean, self.config.image_std
        return like.new_tensor(mean).reshape(-1, 1, 1), like.new_tensor(std).reshape(-1, 1, 1)


class PixelValues:
    """Prediction of all pixel values of a patch, with the squared error as loss (`prediction_target` "pixels")."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        self.config = config
        height, width = self.patch = config.patch_stride
        self.num_outputs = config.num_channels * height * width

    def check_patch(self, stride: tuple[int, int]) -> None:
        """Raise a ValueError if the patch size changes, as the head has an output for every pixel."""
        if tuple(stride) != self.patch:
            raise ValueError(
                f"the head predicts all pixels of patches of {self.patch[0]}x{self.patch[1]} px, which does not fit "
                f"patch_size={stride[0]}x{stride[1]}; load the checkpoint without the head, for example with AutoModel"
            )

    def loss(self, outputs: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of outputs [M, num_outputs], in the units of
        `pixel_values`; 0 without patches.
        """
        return F.mse_loss(outputs, patches.flatten(1), reduction="sum") / torch.ones_like(outputs).sum().clamp(min=1)

    def logits(self, outputs: torch.Tensor) -> None:
        """Return None, as there are no classes."""
        return None

    def to_patches(self, outputs: torch.Tensor) -> torch.Tensor:
        """Reshape outputs [B, N, num_outputs] to patches [B, N, C, P, P']."""
        return outputs.unflatten(-1, (self.config.num_channels, *self.patch))


def build_target(config: HfViTBaseConfig) -> ColorClasses | PixelValues:
    """Return the kind of prediction that `prediction_target` names."""
    if config.prediction_target == "pixels":
        return PixelValues(config)
    return ColorClasses(config, side={"mean_color": 1, "downsampled": 4}[config.prediction_target])


@dataclass
class HfViTMaskedPatchPredictionOutput(MaskedImageModelingOutput):
    """`MaskedImageModelingOutput` with the scores of the color classes, [B, N, 8**C] or [B, N, 16, 8**C]."""

    logits: torch.Tensor | None = None


class HfViTBaseForMaskedPatchPrediction(HfViTPreTrainedModel):
    """Abstract: a family's model with a [mask] embedding and a zero-initialized linear head on every patch token."""

    model_class: ClassVar[type[HfViTBaseModel]]
    accepts_loss_kwargs = False  # the loss is a mean over patches, and every image has equally many that count

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config)
        self.target = build_target(config)
        self.vit = self.model_class(config, add_pooling_layer=False, use_mask_token=True)
        self.prediction_head = nn.Linear(config.hidden_size, self.target.num_outputs)
        self.post_init()

    def init_heads(self) -> None:
        init.zeros_(self.prediction_head.weight)

    def resize_to(
        self, image_size: int | Iterable[int] | None = None, patch_size: int | Iterable[int] | None = None
    ) -> None:
        """Change the image or patch size in place, as for every model.

        Raises:
            ValueError: the head does not fit the new patch size.
        """
        if patch_size is not None:
            self.target.check_patch(as_pair(patch_size if isinstance(patch_size, int) else list(patch_size)))
        super().resize_to(image_size, patch_size)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        patch_sources: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTMaskedPatchPredictionOutput:
        """Predict patches.

        Args:
            pixel_values: [B, C, H, W]; incomplete patches at the bottom and right are ignored, with a warning.
            bool_masked_pos: [B, N], True where a patch is corrupted; the loss covers these patches.
            patch_sources: [B, N], the replacement of a corrupted patch's embedding: -1 [mask], else the index of a
                patch of the same image (its own index leaves it unchanged). None is [mask] everywhere, as in
                transformers.
            patch_attention_mask: [B, h, w], as in `HfViTModel.forward`.

        Returns:
            loss with `bool_masked_pos` (0 if it marks no patch); reconstruction [B, C, H, W] of the whole patches, in
                the units of `pixel_values` (for color classes the middle of the most likely one); logits (see the
                output class). In training with a mask the head only runs on the corrupted patches, and only the loss is
                returned. With `predict_next_patch` each patch is predicted from the one before it, the first patch by
                the head's bias alone.

        Raises:
            ValueError: a mask does not fit the image; see also `check_corruption`.
        """
        if bool_masked_pos is not None:
            self._check_mask(pixel_values, bool_masked_pos, patch_attention_mask)
        corruption = {"bool_masked_pos": bool_masked_pos, "patch_sources": patch_sources}
        outputs = self.vit(
            pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **corruption, **kwargs
        )
        hidden = outputs.last_hidden_state[:, get_patch_token_slice(self.config)]
        if self.config.predict_next_patch:
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        results: dict[str, Any] = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        masked = None if bool_masked_pos is None else bool_masked_pos.bool()
        is_loss_alone = masked is not None and self.training
        predictions = self.prediction_head(hidden[masked] if is_loss_alone else hidden)
        predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))  # for colors and their loss
        if not is_loss_alone:
            results["logits"] = self.target.logits(predictions)
            grid = self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3])
            images = join_patches(self.target.to_patches(predictions), grid)
            results["reconstruction"] = images[:, :, : pixel_values.shape[2], : pixel_values.shape[3]]
        if masked is not None:
            patches = cut_patches(pixel_values.to(predictions.dtype), self.config.patch_stride)[masked]
            results["loss"] = self.target.loss(predictions if is_loss_alone else predictions[masked], patches)
        return HfViTMaskedPatchPredictionOutput(**results)

    def _check_mask(
        self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor, patch_attention_mask: torch.Tensor | None
    ) -> None:
        """Raise a ValueError before any computation if the mask allows no loss; the embeddings check the rest."""
        h, w = self.vit.embeddings.compute_patch_grid(pixel_values)
        height, width = pixel_values.shape[2:]
        stride_h, stride_w = self.config.patch_stride
        if h * stride_h > height or w * stride_w > width:
            raise ValueError(
                f"image {height}x{width} px is not a whole number of patches of {stride_h}x{stride_w} px, so the stem "
                "adds patches without colors to predict; resize or pad the image first"
            )
        if not self.config.predict_next_patch:
            return
        if patch_attention_mask is not None:
            raise ValueError(
                "predict_next_patch=True cannot be combined with patch_attention_mask, as the raster order includes "
                "the padding; give images of one size"
            )
        # A compiled graph cannot read values.
        if not torch.compiler.is_compiling() and bool(bool_masked_pos[..., :1].any()):
            raise ValueError(
                "bool_masked_pos marks patch 0, which has no patch before it for predict_next_patch=True; mark only "
                "patches from 1 on"
            )


class HfViTForMaskedPatchPrediction(HfViTBaseForMaskedPatchPrediction):
    """The Vision Transformer with a head that predicts the colors of patches (2010.11929, B.1.2).

    Config fields: `prediction_target`, `image_mean` and `image_std`, and `predict_next_patch` (with `is_causal`).
    `hf_vit.training.tasks.patch_prediction` selects and corrupts patches in training.
    """

    config: HfViTConfig
    model_class = HfViTModel
