"""Masked and next patch prediction: a head that tells the colours of patches the model did not see.

Legend: B batch, C channels, H x W px, h x w patch grid, N = h*w patches, D hidden size, M patches that count.
Source: arXiv 2010.11929, section 4.6 and appendix B.1.2. Next patch prediction is the same head on causal attention, in
raster order, as GPT's (the question its conclusion leaves open).
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
from .modeling_hf_vit import HfViTBaseModel, HfViTModel, HfViTPreTrainedModel, patch_token_slice

LEVELS = 8  # 3 bits a channel
MAX_CHANNELS = 4  # 8**4 = 4,096 classes; every further channel would multiply them by 8


def image_patches(pixel_values: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
    """Cut images [B, C, H, W] into patches [B, N, C, P, P'], row by row; what makes no whole patch is left out."""
    h, w = pixel_values.shape[2] // stride[0], pixel_values.shape[3] // stride[1]
    whole = pixel_values[:, :, : h * stride[0], : w * stride[1]]
    rows = whole.unflatten(2, (h, stride[0])).unflatten(4, (w, stride[1]))
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join_patches(patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return the way back: [B, N, C, P, P'] to images [B, C, h*P, w*P']."""
    return patches.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def colour_classes(colours: torch.Tensor) -> torch.Tensor:
    """Colours [..., C] in [0, 1] to class numbers [...]: 3 bits a channel, the first channel's the highest."""
    classes = torch.zeros(colours.shape[:-1], dtype=torch.int64, device=colours.device)
    for level in (colours * LEVELS).floor().clamp(0, LEVELS - 1).long().unbind(-1):
        classes = classes * LEVELS + level
    return classes


def class_colours(classes: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Class numbers [...] to the colours [..., C] in the middle of each class."""
    powers = LEVELS ** torch.arange(num_channels - 1, -1, -1, device=classes.device)
    return ((classes[..., None] // powers) % LEVELS + 0.5) / LEVELS


class ColourClasses:
    """A patch shrunk to side x side colours (area means), each one of 8**C classes.

    `prediction_target` "mean_color" is side 1, "downsampled" side 4 (16 classifications in parallel).

    Raises:
        ValueError: too many channels, or a patch smaller than what it is shrunk to.
    """

    def __init__(self, config: HfViTBaseConfig, side: int) -> None:
        if config.num_channels > MAX_CHANNELS:
            raise ValueError(
                f"prediction_target='{config.prediction_target}' classifies colors of 3 bits per channel, "
                f"which makes {LEVELS}**{config.num_channels} classes with "
                f"num_channels={config.num_channels}; it takes at most {MAX_CHANNELS} channels: use "
                "prediction_target='pixels'"
            )
        self.config, self.side = config, side
        self.num_classes = LEVELS**config.num_channels
        self.num_outputs = side * side * self.num_classes
        self.check_patch(config.patch_stride)

    def check_patch(self, stride: tuple[int, int]) -> None:
        if min(stride) < self.side:
            raise ValueError(
                f"prediction_target='downsampled' shrinks patches to {self.side}x{self.side}; a patch of "
                f"{stride[0]}x{stride[1]} px is smaller: use prediction_target='mean_color' or 'pixels'"
            )

    def targets(self, patches: torch.Tensor) -> torch.Tensor:
        """Patches [M, C, P, P'] of pixel values to classes [M, side * side]."""
        mean, std = self._scale(patches)
        shrunk = F.adaptive_avg_pool2d(patches, self.side)
        return colour_classes((shrunk * std + mean).flatten(2).transpose(1, 2))

    def loss(self, outputs: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy (nats) of outputs [M, num_outputs] over patches and their colours; 0 of no patch."""
        targets = self.targets(patches).flatten()
        total = F.cross_entropy(outputs.reshape(-1, self.num_classes), targets, reduction="sum")
        return total / torch.ones_like(targets).sum().clamp(min=1)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[B, N, num_outputs] -> [B, N, 8**C], or [B, N, 16, 8**C]."""
        return outputs if self.side == 1 else outputs.unflatten(-1, (self.side**2, self.num_classes))

    def pictures(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the likeliest colours as patches of pixel values: [B, N, num_outputs] -> [B, N, C, P, P']."""
        batch, channels = outputs.shape[:2], self.config.num_channels
        classes = outputs.reshape(-1, self.side**2, self.num_classes).argmax(-1)
        colours = class_colours(classes, channels).to(outputs.dtype).transpose(1, 2)
        mean, std = self._scale(outputs)
        planes = (colours.reshape(-1, channels, self.side, self.side) - mean) / std
        return F.interpolate(planes, size=self.config.patch_stride, mode="nearest").unflatten(0, batch)

    def _scale(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean, std) of the image processor, each [C or 1, 1, 1]."""
        mean, std = self.config.image_mean, self.config.image_std
        return like.new_tensor(mean).reshape(-1, 1, 1), like.new_tensor(std).reshape(-1, 1, 1)


class PixelValues:
    """All pixel values of a patch, judged by the squared error (`prediction_target` "pixels")."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        self.config = config
        height, width = self.patch = config.patch_stride
        self.num_outputs = config.num_channels * height * width

    def check_patch(self, stride: tuple[int, int]) -> None:
        if tuple(stride) != self.patch:
            raise ValueError(
                f"the head predicts all pixels of patches of {self.patch[0]}x{self.patch[1]} px and does not fit "
                f"patch_size={stride[0]}x{stride[1]}; load the checkpoint into another class, such as the bare model"
            )

    def loss(self, outputs: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Mean squared error of outputs [M, num_outputs], in the units of `pixel_values`; 0 of no patch."""
        return F.mse_loss(outputs, patches.flatten(1), reduction="sum") / torch.ones_like(outputs).sum().clamp(min=1)

    def logits(self, outputs: torch.Tensor) -> None:
        """There are no classes."""
        return None

    def pictures(self, outputs: torch.Tensor) -> torch.Tensor:
        """[B, N, num_outputs] -> [B, N, C, P, P']."""
        return outputs.unflatten(-1, (self.config.num_channels, *self.patch))


def build_target(config: HfViTBaseConfig) -> ColourClasses | PixelValues:
    """Return what `prediction_target` stands for."""
    if config.prediction_target == "pixels":
        return PixelValues(config)
    return ColourClasses(config, side={"mean_color": 1, "downsampled": 4}[config.prediction_target])


@dataclass
class HfViTMaskedPatchPredictionOutput(MaskedImageModelingOutput):
    """`MaskedImageModelingOutput`, and the scores of the color classes [B, N, 8**C] or [B, N, 16, 8**C]."""

    logits: torch.Tensor | None = None


class HfViTBaseForMaskedPatchPrediction(HfViTPreTrainedModel):
    """Abstract: a family's model with a [mask] embedding and a zero-initialised linear head on every patch token."""

    model_class: ClassVar[type[HfViTBaseModel]]
    accepts_loss_kwargs = False  # a mean over the patches that count, of which every image has equally many

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
        """As every model's, where the head fits the new patch; a ValueError where it does not."""
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
            pixel_values: [B, C, H, W]; what makes no whole patch is not seen, with a warning.
            bool_masked_pos: [B, N], True where a patch is corrupted; these patches are what the loss is made of.
            patch_sources: [B, N], what is put in place of a corrupted patch's embedding: -1 [mask], else the number of
                a patch of the same image (its own keeps it). None is [mask] everywhere, as in transformers.
            patch_attention_mask: [B, h, w], as in `HfViTModel.forward`.

        Returns:
            loss with `bool_masked_pos` (0 where it marks no patch); reconstruction [B, C, H, W] of what is seen, in the
            units of `pixel_values`, of color classes the middle of the likeliest; logits (see the output class).
            While training with a mask the head runs on the patches that count alone, and there is only the loss. With
            `predict_next_patch` the prediction of a patch is made at the one before it; the first patch gets the head's
            bias.

        Raises:
            ValueError: a mask that does not fit the image; see also `check_corruption`.
        """
        if bool_masked_pos is not None:
            self._check(pixel_values, bool_masked_pos, patch_attention_mask)
        corruption = {"bool_masked_pos": bool_masked_pos, "patch_sources": patch_sources}
        outputs = self.vit(
            pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True, **corruption, **kwargs
        )
        hidden = outputs.last_hidden_state[:, patch_token_slice(self.config)]
        if self.config.predict_next_patch:
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        found: dict[str, Any] = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        counting = None if bool_masked_pos is None else bool_masked_pos.bool()
        if counting is not None and self.training:
            chosen = wide(self.prediction_head(hidden[counting]))
        else:
            predicted = wide(self.prediction_head(hidden))
            found["logits"] = self.target.logits(predicted)
            grid = self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3])
            images = join_patches(self.target.pictures(predicted), grid)
            found["reconstruction"] = images[:, :, : pixel_values.shape[2], : pixel_values.shape[3]]
            chosen = predicted if counting is None else predicted[counting]
        if counting is not None:
            patches = image_patches(pixel_values.to(chosen.dtype), self.config.patch_stride)[counting]
            found["loss"] = self.target.loss(chosen, patches)
        return HfViTMaskedPatchPredictionOutput(**found)

    def _check(
        self, pixel_values: torch.Tensor, bool_masked_pos: torch.Tensor, patch_attention_mask: torch.Tensor | None
    ) -> None:
        """Refuse before anything is computed what no loss can be made of; the embeddings check the rest of a mask."""
        h, w = self.vit.embeddings.patch_grid(pixel_values)
        height, width = pixel_values.shape[2:]
        stride_h, stride_w = self.config.patch_stride
        if h * stride_h > height or w * stride_w > width:
            raise ValueError(
                f"image {height}x{width} px is not a whole number of patches of {stride_h}x{stride_w} px: "
                "the stem pads it, so not every patch has colors to predict; resize or pad it first"
            )
        if not self.config.predict_next_patch:
            return
        if patch_attention_mask is not None:
            raise ValueError(
                "predict_next_patch=True follows the raster order, which runs through the padding of "
                "patch_attention_mask; give images of one size"
            )
        # A graph cannot look at values.
        if not torch.compiler.is_compiling() and bool(bool_masked_pos[..., :1].any()):
            raise ValueError("bool_masked_pos marks patch 0, which predict_next_patch=True has nothing to predict from")


def wide(outputs: torch.Tensor) -> torch.Tensor:
    """Return a tensor in at least float32, which cross-entropy and colors need."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


class HfViTForMaskedPatchPrediction(HfViTBaseForMaskedPatchPrediction):
    """The Vision Transformer with a head that predicts the colours of patches (2010.11929, B.1.2).

    Config fields: `prediction_target`, `image_mean` and `image_std`, and `predict_next_patch` (with `is_causal`). How
    patches are chosen and corrupted in training is `hf_vit.training.tasks.patch_prediction`'s.
    """

    config: HfViTConfig
    model_class = HfViTModel
