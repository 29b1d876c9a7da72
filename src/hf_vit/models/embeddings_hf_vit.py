"""From images to tokens: patches, positions, special tokens; batches of mixed sizes.

Legend: B batch, C channels, H x W px, h x w patch grid, N tokens, D hidden size.
Source: arXiv 2010.11929, section 3.1; corrupted patches: appendix B.1.2.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTBaseConfig
from .positions_hf_vit import Grid, PositionTable, own_places, replace_parameter, resample_patch_kernel
from .pretrained_hf_vit import check_images


class HfViTPatchEmbeddings(nn.Module):
    """Cut an image into patches and project each: [B, C, H, W] -> [B, h*w, D], row by row."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        patch = config.patch_stride
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, patch, stride=patch, bias=not config.norm_before_layers
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(pixel_values).flatten(2).transpose(1, 2)

    def resize_to(self, config: HfViTBaseConfig) -> None:
        """Stretch the kernel to the patch of another config."""
        stride, kernel = config.patch_stride, self.projection.weight
        if stride == self.projection.kernel_size:
            return
        resampled = resample_patch_kernel(kernel, stride, antialias=config.position_interpolation != "flexivit")
        self.projection.weight = replace_parameter(kernel, resampled)
        self.projection.kernel_size = self.projection.stride = stride


@dataclass
class Tokens:
    """What the embeddings hand to the blocks.

    Attributes:
        hidden_states: [B, N, D].
        grid: (h, w), the patch grid of the (padded) image.
        token_mask: [B, N] bool, False on padding; None when nothing is padded.
        image_grids: the part of the grid that each image fills; None when all fill it.
    """

    hidden_states: torch.Tensor
    grid: Grid
    token_mask: torch.Tensor | None = None
    image_grids: list[Grid] | None = None


class HfViTEmbeddings(PositionTable):
    """Patches + position table + special tokens (class, distillation, registers): image [B, C, H, W] -> `Tokens`.

    Args:
        patch_embeddings: [B, C, H, W] -> [B, h*w, D]; the hybrid's holds its ResNet stem.
        use_mask_token: whether there is a [mask] embedding, so that patches can be corrupted.
    """

    def __init__(self, config: HfViTBaseConfig, patch_embeddings: nn.Module, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.patch_embeddings = patch_embeddings
        self.config = config
        if config.has_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        if config.use_distillation_token:
            self.distillation_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        if config.num_register_tokens:
            self.register_tokens = nn.Parameter(torch.zeros(1, config.num_register_tokens, config.hidden_size))
        if use_mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.norm_before_layers else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def init_weights(self) -> None:
        """Registers begin next to zero, as in the code of DINOv2, but each its own way."""
        super().init_weights()
        if hasattr(self, "register_tokens"):
            init.normal_(self.register_tokens, std=1e-6)

    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        patch_sources: torch.Tensor | None = None,
    ) -> Tokens:
        grid, token_mask, image_grids = self.patch_grid(pixel_values), None, None
        if patch_attention_mask is None:
            patches = self.patch_embeddings(pixel_values)
            positions, special_rows = self.position_table(grid, like=patches)
        else:
            image_grids = image_grids_of(patch_attention_mask, pixel_values.shape[0], grid)
            patches, positions, special_rows = self._padded_patches(pixel_values, grid, image_grids)
            flat = patch_attention_mask.flatten(1).bool()
            token_mask = self._attach_special(flat, [flat.new_ones(flat.shape[0], 1)] * self.config.num_special_tokens)
        if bool_masked_pos is not None or patch_sources is not None:
            patches = self._corrupt(patches, bool_masked_pos, patch_sources, patch_attention_mask)
        if positions is not None:
            patches = patches + positions
        hidden_states = self.dropout(
            self._attach_special(patches, self._special_tokens(patches.shape[0], special_rows))
        )
        if self.layernorm is not None:
            hidden_states = self.layernorm(hidden_states)
        return Tokens(hidden_states, grid, token_mask, image_grids)

    def patch_grid(self, pixel_values: torch.Tensor) -> Grid:
        """(h, w) of a batch; what is no batch of images raises with what was given and what is needed."""
        check_images(pixel_values, self.config.num_channels)
        grid = self.config.grid_of(pixel_values.shape[2], pixel_values.shape[3])
        if not torch.compiler.is_compiling():  # sizes may be symbols there, which a question would fix
            self._warn_about_unseen(pixel_values, grid)
        return grid

    def _warn_about_unseen(self, pixel_values: torch.Tensor, grid: Grid) -> None:
        """The original leaves out silently what makes no whole patch; Python shows a warning once."""
        (height, width), (stride_h, stride_w) = pixel_values.shape[2:], self.config.patch_stride
        if grid[0] * stride_h < height or grid[1] * stride_w < width:
            warnings.warn(
                f"images of {height}x{width} px hold {grid[0]}x{grid[1]} patches of {stride_h}x{stride_w} "
                "px; the rest at the bottom and right is ignored: resize or pad the images if it matters",
                UserWarning,
                stacklevel=2,
            )

    def _padded_patches(
        self, pixel_values: torch.Tensor, grid: Grid, image_grids: list[Grid]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Patches and positions [B, h*w, D] of a padded batch, and the position rows of the special tokens.

        Every image is embedded at its own size and placed at the top left.
        """
        batch, (stride_h, stride_w) = pixel_values.shape[0], self.config.patch_stride
        patches = positions = pixel_values.new_zeros(batch, grid[0] * grid[1], self.config.hidden_size)
        table = special_rows = None
        for own in sorted(set(image_grids)):
            images = torch.tensor([i for i, g in enumerate(image_grids) if g == own], device=pixel_values.device)
            places = images[:, None], own_places(own, grid, pixel_values.device)
            found = self.patch_embeddings(pixel_values[images, :, : own[0] * stride_h, : own[1] * stride_w])
            patches = patches.to(found.dtype).index_put(places, found)
            table, special_rows = self.position_table(own, like=found)
            if table is not None:
                positions = positions.to(table.dtype).index_put(places, table.expand(len(images), -1, -1))
        return patches, None if table is None else positions, special_rows

    def _corrupt(
        self,
        patches: torch.Tensor,
        bool_masked_pos: torch.Tensor | None,
        patch_sources: torch.Tensor | None,
        patch_attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if not hasattr(self, "mask_token"):
            raise ValueError(
                "bool_masked_pos was given to a model without a [mask] embedding; load the checkpoint with "
                "AutoModelForMaskedImageModeling"
            )
        masked = check_corruption(patches.shape[:2], bool_masked_pos, patch_sources, patch_attention_mask)
        return corrupt_patches(patches, self.mask_token, masked, patch_sources)

    def _special_tokens(self, batch: int, rows: torch.Tensor | None) -> list[torch.Tensor]:
        names = ("cls_token", "distillation_token", "register_tokens")
        tokens = [getattr(self, name) for name in names if hasattr(self, name)]
        if not tokens:
            return []
        special = torch.cat(tokens, dim=1)
        if rows is not None:  # of the first ones
            special = special + F.pad(rows, (0, 0, 0, special.shape[1] - rows.shape[1]))
        return [special.expand(batch, -1, -1)]

    def _attach_special(self, patches: torch.Tensor, special: list[torch.Tensor]) -> torch.Tensor:
        if not special:
            return patches
        return torch.cat([patches, *special] if self.config.is_causal else [*special, patches], dim=1)


def image_grids_of(patch_attention_mask: torch.Tensor, batch: int, grid: Grid) -> list[Grid]:
    """Read from a mask [B, h, w] the (h_i, w_i) that every image fills at the top left of a padded batch.

    Raises:
        ValueError: the mask has another shape, or an image is empty or not a top-left rectangle.
    """
    if tuple(patch_attention_mask.shape) != (batch, *grid):
        raise ValueError(
            f"patch_attention_mask of shape {tuple(patch_attention_mask.shape)}; it needs {[batch, *grid]}, "
            "one entry a patch, 1 on the image and 0 on padding"
        )
    mask = patch_attention_mask.bool()
    heights, widths = mask.any(dim=2).sum(dim=1).tolist(), mask.any(dim=1).sum(dim=1).tolist()
    for index, (h, w) in enumerate(zip(heights, widths, strict=True)):
        if not h or int(mask[index].sum()) != h * w or not bool(mask[index, :h, :w].all()):
            raise ValueError(
                f"patch_attention_mask of image {index} is not a rectangle at the top left; "
                "pad every image at its right and bottom"
            )
    return list(zip(heights, widths, strict=True))


def check_corruption(
    shape: tuple[int, ...] | torch.Size,
    bool_masked_pos: torch.Tensor | None,
    patch_sources: torch.Tensor | None,
    patch_attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`bool_masked_pos` as bool [B, h*w], after a look at both inputs of the corruption.

    Raises:
        ValueError: a wrong shape or type, a mask or a source on padding, a source that is no patch.
    """
    if bool_masked_pos is None:
        raise ValueError("patch_sources needs bool_masked_pos; give both")
    for name, given in (("bool_masked_pos", bool_masked_pos), ("patch_sources", patch_sources)):
        if given is not None and tuple(given.shape) != tuple(shape):
            raise ValueError(f"{name} of shape {tuple(given.shape)}; it needs {list(shape)}, one entry a patch")
    if patch_sources is not None and patch_sources.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"patch_sources are {patch_sources.dtype}; they are indices of patches: int64")
    masked = bool_masked_pos.bool()
    if torch.compiler.is_compiling():  # a graph cannot look at values
        return masked
    if patch_sources is not None and not bool(((patch_sources >= -1) & (patch_sources < shape[1])).all()):
        raise ValueError(
            f"patch_sources run from {int(patch_sources.min())} to {int(patch_sources.max())}; they need -1 ([mask]) "
            f"or the index of a patch, 0 to {shape[1] - 1}"
        )
    if patch_attention_mask is not None:
        on_image = patch_attention_mask.flatten(1).bool()
        sources_on_image = True
        if patch_sources is not None:
            sources_on_image = bool((on_image.gather(1, patch_sources.long().clamp(min=0)) | ~masked).all())
        if bool((masked & ~on_image).any()) or not sources_on_image:
            raise ValueError("bool_masked_pos or patch_sources name padding; patch_attention_mask is 0 there")
    return masked


def corrupt_patches(
    patches: torch.Tensor, mask_token: torch.Tensor, bool_masked_pos: torch.Tensor, patch_sources: torch.Tensor | None
) -> torch.Tensor:
    """Replace the embeddings of corrupted patches (2010.11929, B.1.2); positions are added afterwards.

    Args:
        patches: [B, h*w, D].
        mask_token: [1, 1, D], the learned [mask].
        bool_masked_pos: [B, h*w] bool, True where a patch is corrupted.
        patch_sources: [B, h*w], read where a patch is corrupted: -1 puts [mask] there, any other number the embedding
            of that patch of the same image (its own number keeps it). None is [mask] everywhere.
    """
    replaced = mask_token.to(patches.dtype).expand_as(patches)
    if patch_sources is not None:
        index = patch_sources.long().clamp(min=0)[..., None].expand_as(patches)
        replaced = torch.where((patch_sources < 0)[..., None], replaced, patches.gather(1, index))
    return torch.where(bool_masked_pos[..., None], replaced, patches)


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to logits: 0 where attention is allowed, the lowest number elsewhere.

    What may see nothing, padding, sees everything: nothing is NaN.
    """
    allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def additive_mask(hidden_states: torch.Tensor, token_mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """[B or 1, 1, N, N] of tokens [B, N, D], of which `token_mask` [B, N] says where no padding is."""
    length = hidden_states.shape[1]
    allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden_states.device)
    if is_causal:
        allowed = allowed.tril()
    if token_mask is not None:
        allowed = allowed & token_mask[:, None, None, :]
    return additive(allowed, hidden_states.dtype)
