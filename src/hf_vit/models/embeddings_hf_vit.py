"""From images to tokens: patches, position tables and their resampling, special tokens, batches of mixed sizes.

Legend: B batch, C channels, H x W px, N tokens, D hidden size, T special tokens, K head size; a grid is (h, w) in
patches, never a square root.
Sources: arXiv 2010.11929, section 3.1, 3.2 (resampling) and appendices B.1.2 (corrupted patches) and D.4 (positions);
sin-cos as in arXiv 2205.01580.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTBaseConfig
from .pretrained_hf_vit import check_images

Grid = tuple[int, int]
# For patches [1, h*w, D] and for special tokens [1, T, D].
Rows = tuple[torch.Tensor | None, torch.Tensor | None]


def is_grid(grid: Grid, other: Grid) -> bool:
    """Return whether two grids are one; no for sides that a trace holds as symbols or tensors, which stand for any
    size.
    """
    sides: list[Any] = [*grid, *other]
    return all(isinstance(side, int) for side in sides) and tuple(grid) == tuple(other)


def resample_grid(table: torch.Tensor, new_grid: Grid, mode: str) -> torch.Tensor:
    """Stretch [h, w, D] to [h', w', D]; computed in at least float32, returned in the dtype of `table`."""
    wide = table if table.dtype == torch.float64 else table.float()
    planes = wide.permute(2, 0, 1)[None]
    if mode.startswith("bicubic"):
        stretched = F.interpolate(planes, size=new_grid, mode="bicubic", antialias=mode == "bicubic_antialias")
    elif mode == "flexivit":  # jax.image.resize, "linear"
        stretched = F.interpolate(planes, size=new_grid, mode="bilinear", antialias=True)
    else:
        stretched = F.interpolate(planes, size=new_grid, mode="bilinear", align_corners=True)
    return stretched[0].permute(1, 2, 0).to(table.dtype)


def resample_position_table(
    table: torch.Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int = 1, mode: str = "bilinear_corners"
) -> torch.Tensor:
    """Stretch a learned position table to a new patch grid; keep the rows of the special tokens.

    Bilinear with corners aligned, as the original fine-tuning code (arXiv 2010.11929, section 3.2).

    Args:
        table: [1, T + h*w, D], rows of special tokens first, then patches row by row.
        old_grid: (h, w) in patches, not pixels.
        new_grid: (h', w') in patches.
        num_prefix_tokens: T, rows that are copied unchanged.
        mode: how patches' rows are stretched; see `HfViTConfig.position_interpolation`.

    Returns:
        [1, T + h'*w', D] in the dtype of `table`.

    Raises:
        ValueError: `table` does not hold T + h*w rows.
    """
    expected = num_prefix_tokens + old_grid[0] * old_grid[1]
    if table.ndim != 3 or table.shape[1] != expected:
        raise ValueError(
            f"position table of shape {tuple(table.shape)} does not fit grid {old_grid[0]}x{old_grid[1]} with "
            f"{num_prefix_tokens} special tokens; it needs [1, {expected}, D]"
        )
    if is_grid(old_grid, new_grid):
        return table
    prefix, patches = table[:, :num_prefix_tokens], table[0, num_prefix_tokens:]
    stretched = resample_grid(patches.reshape(*old_grid, -1), new_grid, mode)
    return torch.cat([prefix, stretched.reshape(1, -1, table.shape[-1])], dim=1)


def resample_patch_kernel(kernel: torch.Tensor, new_patch: Grid, antialias: bool = True) -> torch.Tensor:
    """Fit a patch projection to another patch side by the pseudo-inverse of the image resize (FlexiViT, 2212.08013).

    Patches that were resized bilinearly keep their embedding, exactly when enlarged, by least squares when shrunk.

    Args:
        kernel: [D, C, P, P'].
        new_patch: (height, width) in px.
        antialias: whether the resize that is inverted smooths what it shrinks; FlexiViT's own does not.

    Returns:
        [D, C, *new_patch] in the dtype of `kernel`.
    """
    old_patch = (kernel.shape[2], kernel.shape[3])
    if old_patch == tuple(new_patch):
        return kernel
    size = old_patch[0] * old_patch[1]
    basis = torch.eye(size, dtype=torch.float64).reshape(size, 1, *old_patch)
    resized = F.interpolate(basis, size=new_patch, mode="bilinear", antialias=antialias).reshape(size, -1)
    fitted = kernel.detach().double().cpu().flatten(2) @ torch.linalg.pinv(resized).T
    return fitted.reshape(*kernel.shape[:2], *new_patch).to(kernel.device, kernel.dtype)


def replace_parameter(old: torch.Tensor, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter of other values, and maybe another shape, that is frozen if the old one is."""
    return nn.Parameter(values.detach(), requires_grad=old.requires_grad)


def _angles(positions: torch.Tensor, width: int) -> torch.Tensor:
    """[M] positions -> [M, width] angles, frequencies 1 ... 1/10000 spread evenly on a logarithmic scale."""
    exponents = torch.arange(width, dtype=torch.float64, device=positions.device) / (width - 1)
    return positions[:, None] * (1.0 / 10_000**exponents)


def sincos_2d_table(grid: Grid, hidden_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Fixed 2-D table [h*w, D] in float64: sin and cos of x, then of y (arXiv 2205.01580; big_vision's order)."""
    y, x = torch.meshgrid(
        torch.arange(grid[0], dtype=torch.float64, device=device),
        torch.arange(grid[1], dtype=torch.float64, device=device),
        indexing="ij",
    )
    x_angles, y_angles = (_angles(axis.flatten(), hidden_size // 4) for axis in (x, y))
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)


def sincos_1d_table(grid: Grid, hidden_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Fixed 1-D table [h*w, D] in float64 over the raster order: sin, then cos."""
    angles = _angles(torch.arange(grid[0] * grid[1], dtype=torch.float64, device=device), hidden_size // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


FIXED_TABLES = {"sincos_2d": sincos_2d_table, "sincos_1d": sincos_1d_table}


class RelativePositions(nn.Module):
    """Abstract: learned offsets p_q - p_k between patches, which are added to a layer's attention logits.

    One table a layer: offset_embeddings [(2h-1)*(2w-1), width]. Pairs with a special token get 0.
    """

    def __init__(self, config: HfViTBaseConfig, width: int) -> None:
        super().__init__()
        self.grid = config.grid
        self.interpolation = config.position_interpolation
        h, w = config.grid
        self.offset_embeddings = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), width))
        self.initializer_range = config.initializer_range

    def init_weights(self) -> None:
        init.normal_(self.offset_embeddings, std=self.initializer_range)

    def resize_to(self, config: HfViTBaseConfig) -> None:
        """Resample the offsets to the grid of another config and make it the table's own."""
        if self.grid == config.grid:
            return
        self.offset_embeddings = replace_parameter(self.offset_embeddings, self._table(config.grid).flatten(0, 1))
        self.grid = config.grid

    def _table(self, grid: Grid) -> torch.Tensor:
        """[2h-1, 2w-1, width] for a grid."""
        table = self.offset_embeddings.reshape(2 * self.grid[0] - 1, 2 * self.grid[1] - 1, -1)
        if is_grid(grid, self.grid):
            return table
        return resample_grid(table, (2 * grid[0] - 1, 2 * grid[1] - 1), self.interpolation)

    def pairs(self, grid: Grid) -> torch.Tensor:
        """[h*w (queries), h*w (keys), width]: the embedding of every pair's offset on a grid."""
        table = self._table(grid)
        h, w = grid
        y = torch.arange(h * w, device=table.device) // w
        x = torch.arange(h * w, device=table.device) % w
        return table[y[:, None] - y[None] + h - 1, x[:, None] - x[None] + w - 1]

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Scaled queries of patches [B, A, h*w, K] -> [B or 1, A, h*w, h*w]."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: use a class of RELATIVE_POSITIONS")

    def forward(self, query: torch.Tensor, grid: Grid, scaling: float, image_grids: list[Grid] | None) -> torch.Tensor:
        """[B, A, N, K] queries (special tokens first) -> bias [B, A, N, N].

        `image_grids` names the part of a padded grid that each image fills; each gets the bias it has on its own.
        """
        h, w = grid
        batch, special = query.shape[0], query.shape[2] - h * w
        query = query[:, :, special:] * scaling
        if image_grids is None:
            bias = self.bias(query, grid)
        else:
            bias = query.new_zeros(*query.shape[:2], h * w, h * w)
            for own in set(image_grids):
                images = torch.tensor([i for i, g in enumerate(image_grids) if g == own], device=query.device)
                places = own_places(own, grid, query.device)
                filled = self.bias(query[images][:, :, places], own)
                heads = torch.arange(query.shape[1], device=query.device)
                index = (images[:, None, None, None], heads[:, None, None], places[:, None], places)
                bias = bias.index_put(index, filled.expand(len(images), -1, -1, -1))
        return F.pad(bias, (special, 0, special, 0)).expand(batch, -1, -1, -1)


class RelativePositionKeys(RelativePositions):
    """Offsets as keys, which the heads share: q . r (arXiv 2010.11929, appendix D.4)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config, config.hidden_size // config.num_attention_heads)

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        return torch.einsum("bnqd,qkd->bnqk", query, self.pairs(grid))


class RelativePositionBias(RelativePositions):
    """A number an offset and head, whatever the query (Swin, arXiv 2103.14030, section 3.2)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config, config.num_attention_heads)

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        if query.shape[1] != self.offset_embeddings.shape[1]:
            raise ValueError(
                f"position_embedding='relative_bias' has a column for each of {self.offset_embeddings.shape[1]} heads, "
                f"of which {query.shape[1]} are here; tensor parallelism shares them out: run without it"
            )
        return self.pairs(grid).permute(2, 0, 1)[None].to(query.dtype)


RELATIVE_POSITIONS = {"relative": RelativePositionKeys, "relative_bias": RelativePositionBias}


def own_places(own: Grid, grid: Grid, device: torch.device) -> torch.Tensor:
    """Raster indices in a padded `grid` of the patches of an image that fills its top left (h, w) = `own`."""
    rows = torch.arange(own[0], device=device)[:, None] * grid[1]
    return (rows + torch.arange(own[1], device=device)).flatten()


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


class HfViTEmbeddings(nn.Module):
    """Patches + position table + special tokens (class, distillation, registers): image [B, C, H, W] -> `Tokens`.

    Args:
        patch_embeddings: [B, C, H, W] -> [B, h*w, D]; the hybrid's holds its ResNet stem.
        use_mask_token: whether there is a [mask] embedding, so that patches can be corrupted.

    Parameters, under the names of transformers' ViT, by `config.position_embedding`:
        learned: position_embeddings [1, T + h*w, D] (T rows for special tokens if `position_on_class_token`).
        learned_2d: row_position_embeddings [1, h, D/2], column_position_embeddings [1, w, D/2], and
            class_position_embedding [1, T, D] if there is a special token that gets a position.
        sincos_2d, sincos_1d, relative, relative_bias, none: nothing here.
    """

    def __init__(self, config: HfViTBaseConfig, patch_embeddings: nn.Module, use_mask_token: bool = False) -> None:
        super().__init__()
        self.grid, self.interpolation = config.grid, config.position_interpolation
        self.num_special_rows = config.num_special_positions
        (h, w), width = config.grid, config.hidden_size

        def zeros(rows: int, channels: int = width) -> nn.Parameter:
            return nn.Parameter(torch.zeros(1, rows, channels))

        if config.position_embedding == "learned":
            self.position_embeddings = zeros(self.num_special_rows + h * w)
        elif config.position_embedding == "learned_2d":
            self.row_position_embeddings = zeros(h, width // 2)
            self.column_position_embeddings = zeros(w, width // 2)
            if self.num_special_rows:
                self.class_position_embedding = zeros(self.num_special_rows)
        self.patch_embeddings = patch_embeddings
        self.config = config
        if config.has_class_token:
            self.cls_token = zeros(1)
        if config.use_distillation_token:
            self.distillation_token = zeros(1)
        if config.num_register_tokens:
            self.register_tokens = zeros(config.num_register_tokens)
        if use_mask_token:
            self.mask_token = zeros(1)
        self.layernorm = nn.LayerNorm(width, config.layer_norm_eps) if config.norm_before_layers else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def init_weights(self) -> None:
        """Registers begin next to zero, as in the code of DINOv2, but each its own way."""
        for name, parameter in self.named_parameters(recurse=False):
            if "position" in name:
                init.normal_(parameter, std=self.config.initializer_range)
            elif name == "register_tokens":
                init.normal_(parameter, std=1e-6)
            else:
                init.zeros_(parameter)

    def position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        """Return the rows to add for a grid: patches [1, h*w, D] and special tokens [1, T, D]; None where nothing
        is added.
        """
        kind = self.config.position_embedding
        if kind == "learned":
            special = self.num_special_rows
            rows = resample_position_table(self.position_embeddings, self.grid, grid, special, self.interpolation)
            return rows[:, special:], rows[:, :special] if special else None
        if kind == "learned_2d":
            rows, columns = self.row_position_embeddings[0], self.column_position_embeddings[0]
            if not is_grid(grid, self.grid):
                # A one-axis table is a grid of height 1; of width 1 torch antialiases wrongly (seen in 2.15).
                rows = resample_grid(rows[None], (1, grid[0]), self.interpolation)[0]
                columns = resample_grid(columns[None], (1, grid[1]), self.interpolation)[0]
            h, w = grid
            both = torch.cat([rows[:, None].expand(h, w, -1), columns[None].expand(h, w, -1)], dim=-1)
            return both.reshape(1, h * w, -1), getattr(self, "class_position_embedding", None)
        if kind in FIXED_TABLES:
            return FIXED_TABLES[kind](grid, self.config.hidden_size, like.device)[None].to(like.dtype), None
        return None, None

    def resize_to(self, config: HfViTBaseConfig) -> None:
        """Resample the learned tables to the grid of another config and make it the table's own."""
        if self.grid == config.grid:
            return
        if hasattr(self, "position_embeddings"):
            table = resample_position_table(
                self.position_embeddings, self.grid, config.grid, self.num_special_rows, self.interpolation
            )
            self.position_embeddings = replace_parameter(self.position_embeddings, table)
        elif hasattr(self, "row_position_embeddings"):
            for name, side in (("row", config.grid[0]), ("column", config.grid[1])):
                table = getattr(self, f"{name}_position_embeddings")
                resampled = resample_grid(table, (1, side), self.interpolation)
                setattr(self, f"{name}_position_embeddings", replace_parameter(table, resampled))
        self.grid = config.grid

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
    """Return what is added to logits: 0 where attention is allowed, the lowest number elsewhere.

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
