"""Turn images into tokens: patches, position tables, rotary positions, special tokens, batches of mixed sizes.

Legend: B batch, C channels, H x W px, P x P' patch px, N tokens, D hidden size, A heads, K head size, T special tokens;
a grid is (h, w) in patches.
Sources: arXiv 2010.11929, section 3.1, 3.2 (resampling) and appendices B.1.2 (corrupted patches) and D.4 (positions);
sin-cos as in arXiv 2205.01580.
"""

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTBaseConfig, as_pair
from .pretrained_hf_vit import check_images

Grid = tuple[int, int]
# Position embeddings of patches [1, h*w, D] and of special tokens [1, T, D].
Rows = tuple[torch.Tensor | None, torch.Tensor | None]
# Rotation of the tokens of a pass: complex numbers [B or 1, 1, N, K/2], or their parts, cosine and sine; or the
# coordinates [B or 1, N, 2], from which each layer computes its own.
Rotation = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def is_same_grid(grid: Grid, other: Grid) -> bool:
    """Return whether two grids are equal; False if a trace holds a side as a symbol or tensor (it may be any size)."""
    sides: list[Any] = [*grid, *other]
    return all(isinstance(side, int) for side in sides) and tuple(grid) == tuple(other)


def resample_grid(table: torch.Tensor, new_grid: Grid, mode: str, offset: float = 0.0) -> torch.Tensor:
    """Resample [h, w, D] to [h', w', D]; compute in at least float32, return the dtype of `table`.

    With an offset, the scale is (h' + offset) / h, as in DINOv2's code. A mode with "_square" resamples to the square
    of the longer side and takes its top left part.
    """
    (h, w), (new_h, new_w) = table.shape[:2], new_grid
    if mode.endswith("_square"):
        maximum: Any = torch.maximum if isinstance(new_h, torch.Tensor) else torch.sym_max  # torch.jit traces tensors
        side = maximum(new_h, new_w)
        square = resample_grid(table, (side, side), mode.removesuffix("_square"), offset)[:new_h, :new_w]
        if h == w or not is_graph():
            return square
        rows = torch.arange(new_h, device=table.device).clamp(max=h - 1)
        columns = torch.arange(new_w, device=table.device).clamp(max=w - 1)
        return torch.where(_is_same_size(new_grid, (h, w)).to(table.device), table[rows][:, columns], square)
    if is_same_grid((new_w, new_w), (1, 1)) and new_h != 1:  # torch 2.15 antialiases maps of one column wrongly
        return resample_grid(table.transpose(0, 1), (1, new_h), mode, offset).transpose(0, 1)
    wide = table if table.dtype == torch.float64 else table.float()
    planes = wide.permute(2, 0, 1)[None]
    antialias = mode in ("bicubic_antialias", "flexivit")  # "flexivit" is the "linear" of jax.image.resize
    if offset and not is_graph():
        scales = [(new + offset) / old for new, old in zip(new_grid, table.shape, strict=False)]
        stretched = F.interpolate(planes, scale_factor=scales, mode="bicubic", antialias=antialias)
    elif offset and antialias:
        raise ValueError(
            "position_interpolation_offset with position_interpolation='bicubic_antialias' cannot be traced for images "
            "of any size; trace it for one size, or leave the offset out"
        )
    elif offset:  # a graph would keep the scale of the traced size
        is_same = _is_same_size(new_grid, (h, w))  # then the table stays unchanged
        same_rows = (torch.arange(new_h)[:, None] == torch.arange(h)).double()
        same_columns = (torch.arange(new_w)[:, None] == torch.arange(w)).double()
        down = torch.where(is_same, same_rows, _compute_bicubic_weights(h, new_h, offset)).to(wide)
        across = torch.where(is_same, same_columns, _compute_bicubic_weights(w, new_w, offset)).to(wide)
        stretched = down @ planes @ across.T
    else:
        kernel, corners = "bicubic" if mode.startswith("bicubic") else "bilinear", mode == "bilinear_corners"
        stretched = F.interpolate(planes, size=new_grid, mode=kernel, align_corners=corners, antialias=antialias)
    return stretched[0].permute(1, 2, 0).to(table.dtype)


def _is_same_size(grid: Grid, other: Grid) -> torch.Tensor:
    """Return whether two grids are equal, as a tensor, as a graph may hold their sides as symbols."""
    return (torch.full((), grid[0]) == other[0]) & (torch.full((), grid[1]) == other[1])


def _compute_bicubic_weights(old: int, new: Any, offset: float) -> torch.Tensor:
    """Return the weights [new, old] of torch's bicubic resize of a side by the scale (new + offset) / old."""
    positions = torch.arange(-2, old + 2, dtype=torch.float64)  # the border is repeated beyond it
    scale = old / (torch.full((), new, dtype=torch.float64) + offset)  # exporters cannot add to a symbolic size
    centers = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    distance = (positions + 0.5 - centers[:, None]).abs()
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    weights = torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))
    return weights @ F.one_hot(positions.long().clamp(0, old - 1), old).double()


def resample_position_table(
    table: torch.Tensor,
    old_grid: Grid,
    new_grid: Grid,
    num_prefix_tokens: int = 1,
    mode: str = "bilinear_corners",
    offset: float = 0.0,
) -> torch.Tensor:
    """Resample a learned position table to a new patch grid; keep the rows of the special tokens.

    The default is bilinear with aligned corners, as in the original fine-tuning code (arXiv 2010.11929, section 3.2).

    Args:
        table: [1, T + h*w, D], rows of special tokens first, then patches row by row.
        old_grid: (h, w) in patches, not pixels.
        new_grid: (h', w') in patches.
        num_prefix_tokens: T, the number of rows to copy unchanged.
        mode: the method; see `HfViTConfig.position_interpolation`.
        offset: see `HfViTConfig.position_interpolation_offset`.

    Returns:
        [1, T + h'*w', D] in the dtype of `table`.

    Raises:
        ValueError: `table` does not have T + h*w rows.
    """
    num_rows = num_prefix_tokens + old_grid[0] * old_grid[1]
    if table.ndim != 3 or table.shape[1] != num_rows:
        raise ValueError(
            f"the position table has shape {tuple(table.shape)}, but a grid of {old_grid[0]}x{old_grid[1]} patches "
            f"with {num_prefix_tokens} special tokens needs [1, {num_rows}, D]"
        )
    if is_same_grid(old_grid, new_grid):
        return table
    prefix, patches = table[:, :num_prefix_tokens], table[0, num_prefix_tokens:]
    stretched = resample_grid(patches.reshape(*old_grid, -1), new_grid, mode, offset)
    return torch.cat([prefix, stretched.reshape(1, -1, table.shape[-1])], dim=1)


def resample_patch_kernel(kernel: torch.Tensor, new_patch: Grid, antialias: bool = True) -> torch.Tensor:
    """Fit a patch projection to another patch size by the pseudo-inverse of the image resize (FlexiViT, 2212.08013).

    Bilinearly resized patches keep their embedding: exactly if enlarged, by least squares if shrunk.

    Args:
        kernel: [D, C, P, P'].
        new_patch: (height, width) in px.
        antialias: whether the inverted resize smooths when it shrinks; FlexiViT's does not.

    Returns:
        [D, C, *new_patch] in the dtype of `kernel`.
    """
    old_patch = (kernel.shape[2], kernel.shape[3])
    if old_patch == tuple(new_patch):
        return kernel
    basis = torch.eye(old_patch[0] * old_patch[1], dtype=torch.float64, device="cpu").unflatten(0, old_patch)
    resized = resample_grid(basis, new_patch, "flexivit" if antialias else "bilinear").flatten(0, 1).T
    fitted_kernel = kernel.detach().cpu().double().flatten(2) @ torch.linalg.pinv(resized).T
    return fitted_kernel.reshape(*kernel.shape[:2], *new_patch).to(kernel.device, kernel.dtype)


def replace_parameter(old: torch.Tensor, values: torch.Tensor) -> nn.Parameter:
    """Return a parameter with new values, of any shape, that is frozen if the old one is."""
    return nn.Parameter(values.detach(), requires_grad=old.requires_grad)


def _compute_phases(positions: torch.Tensor, width: int, includes_last: bool = True) -> torch.Tensor:
    """Return the angles [M, width] of positions [M], with frequencies on a logarithmic scale that begins at 1.

    Args:
        includes_last: whether the last frequency is 1/10000; otherwise 1/10000 would be the next one after the last.
    """
    exponents = torch.arange(width, dtype=torch.float64, device=positions.device) / (width - includes_last)
    return positions[:, None] * (1.0 / 10_000**exponents)


def make_sincos_2d_table(
    grid: Grid, hidden_size: int, device: torch.device | None = None, includes_last: bool = True
) -> torch.Tensor:
    """Return the fixed 2-D table [h*w, D] in float64: sin and cos of x, then of y (arXiv 2205.01580; big_vision's
    order).
    """
    sides = [torch.arange(side, dtype=torch.float64, device=device) for side in grid]
    y, x = torch.meshgrid(*sides, indexing="ij")
    x_angles, y_angles = (_compute_phases(axis.flatten(), hidden_size // 4, includes_last) for axis in (x, y))
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)


def make_sincos_1d_table(grid: Grid, hidden_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the fixed 1-D table [h*w, D] in float64 over the raster order: sin, then cos."""
    angles = _compute_phases(torch.arange(grid[0] * grid[1], dtype=torch.float64, device=device), hidden_size // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


FIXED_TABLES = {
    "sincos_2d": make_sincos_2d_table,
    "sincos_2d_mae": partial(make_sincos_2d_table, includes_last=False),
    "sincos_1d": make_sincos_1d_table,
}


def compute_patch_coordinates(
    config: HfViTBaseConfig, grid: Grid, like: torch.Tensor, moves: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the coordinates [h*w, 2] of every patch for rotary positions, in the order of axes and dtype of `like`.

    Args:
        moves: shift and factor [2] of rows and columns, by which training changes centered coordinates.
    """
    sides: list[torch.Tensor] = []
    for axis, side in enumerate(grid):
        indices = torch.arange(side, dtype=like.dtype, device=like.device)
        if config.rotary_coordinates == "centered":
            positions = (indices + 0.5) / side * 2 - 1  # from -1 to 1
            if moves is not None:
                shift, factor = moves
                positions = (positions + shift[axis]) * factor[axis]
            positions = positions * (2 * math.pi)
        else:
            positions = indices + config.rotary_offset
            if config.rotary_reference_grid is not None:
                positions = positions / side * as_pair(config.rotary_reference_grid)[axis]
        sides.append(positions)
    (h, w), (rows, columns) = grid, sides
    axes = [rows[:, None].expand(h, w), columns[None].expand(h, w)]
    return torch.stack(axes[::-1] if config.rotary_axis_order == "column_row" else axes, dim=-1).flatten(0, 1)


def draw_moves(config: HfViTBaseConfig, like: torch.Tensor) -> list[torch.Tensor]:
    """Draw how a training pass changes centered coordinates: shift and factor [2] of rows and columns.

    Factors are uniform on a logarithmic scale.
    """

    def draw(count: int, limit: float) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype, device=like.device).uniform_(-limit, limit)

    shift = config.rotary_shift or 0.0
    jitter = config.rotary_jitter or 1.0
    rescale = config.rotary_rescale or 1.0
    return [draw(2, shift), (draw(2, math.log(jitter)) + draw(1, math.log(rescale))).exp()]


def compute_angles(
    config: HfViTBaseConfig, coordinates: torch.Tensor, base: float, periods: Any = None
) -> torch.Tensor:
    """Return the angles [.., N, K/2] of coordinates [.., N, axes], those of the first axis first (K: head size).

    Args:
        base: base of the geometric periods; unused if `periods` are given.
        periods: the periods of an axis, K/2/axes numbers.
    """
    count = config.hidden_size // config.num_attention_heads // (2 * config.num_rotary_axes)
    if periods is None:
        periods = base ** (torch.arange(count, dtype=coordinates.dtype, device=coordinates.device) / count)
    else:
        periods = torch.tensor(periods, dtype=coordinates.dtype, device=coordinates.device)
    return (coordinates[..., None] / periods).flatten(-2)


def make_rotation(
    config: HfViTBaseConfig, hidden_states: torch.Tensor, grid: Grid, image_grids: list[Grid] | None, training: bool
) -> Rotation | None:
    """Return the rotation of the tokens [B, N, D] of a pass; None without rotary positions.

    Special tokens have angle 0. Everything is float32, or float64 for tokens of float64.
    """
    if config.rotary_embedding is None:
        return None
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    special = config.num_special_tokens
    like = torch.empty(0, dtype=dtype, device=hidden_states.device)
    is_moved = any((config.rotary_shift, config.rotary_jitter, config.rotary_rescale))
    moves = draw_moves(config, like) if training and is_moved else None
    if image_grids is None:
        coordinates = compute_patch_coordinates(config, grid, like, moves)[None]
    else:
        coordinates = like.new_zeros(hidden_states.shape[0], grid[0] * grid[1], 2)
        for image_grid, images in group_images(image_grids, like.device):
            indices = images[:, None], compute_top_left_indices(image_grid, grid, like.device)
            coordinates = coordinates.index_put(indices, compute_patch_coordinates(config, image_grid, like, moves))
    # Special tokens come first, or last if attention is causal.
    padding = (0, 0, 0, special) if config.is_causal else (0, 0, special, 0)
    if config.rotary_embedding == "mixed" or config.num_rotary_axes == 1:
        return F.pad(coordinates, padding)
    angles = F.pad(compute_angles(config, coordinates, config.rotary_base, config.rotary_periods), padding)
    if config.rotary_register_base is not None:  # registers are the last special tokens, before the patches
        side = math.isqrt(config.num_register_tokens)
        first = special - config.num_register_tokens
        register_coordinates = compute_patch_coordinates(config, (side, side), like, moves)
        register_angles = compute_angles(config, register_coordinates, config.rotary_register_base)
        register_angles = register_angles.expand(angles.shape[0], -1, -1)
        angles = torch.cat([angles[:, :first], register_angles, angles[:, special:]], dim=1)
    return to_rotation(angles[:, None])


def is_graph() -> bool:
    """Return whether a graph is recorded, for which exporters and compilers do not take complex numbers."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def to_rotation(angles: torch.Tensor) -> Rotation:
    """Return the rotation by angles [B or 1, A or 1, N, K/2]."""
    parts = angles.cos(), angles.sin()
    return parts if is_graph() else torch.complex(*parts)


def rotate(states: torch.Tensor, rotation: Rotation, pairing: str) -> torch.Tensor:
    """Rotate the pairs of channels of queries or keys [B, A, N, K].

    The order of the rotated channels is the same for queries and keys, which is all that their products read.
    """
    if isinstance(rotation, torch.Tensor) and not is_graph():
        return _rotate_as_complex(states, rotation, pairing)
    cosine, sine = (rotation.real, rotation.imag) if isinstance(rotation, torch.Tensor) else rotation
    if pairing == "halves":
        first, second = states.chunk(2, dim=-1)
        rotated_pairs = (
            torch.addcmul(first * cosine, second, sine, value=-1),
            torch.addcmul(second * cosine, first, sine),
        )
        return torch.cat(rotated_pairs, dim=-1).to(states.dtype)
    first, second = states.unflatten(-1, (-1, 2)).unbind(-1)
    rotated_pairs = first * cosine - second * sine, second * cosine + first * sine
    return torch.stack(rotated_pairs, dim=-1).flatten(-2).to(states.dtype)


def _rotate_as_complex(states: torch.Tensor, rotation: torch.Tensor, pairing: str) -> torch.Tensor:
    """Rotate as `rotate` by one complex product, with the fewest passes over memory."""
    wide_dtype = rotation.real.dtype
    # Heads apart in memory: the product then takes all tokens of a head at once, and attention needs no copy.
    layout = torch.contiguous_format if states.dtype != wide_dtype else torch.preserve_format
    wide = states.to(wide_dtype, memory_format=layout)
    if pairing == "halves":
        pairs = torch.complex(*wide.chunk(2, dim=-1))
    else:
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    is_copy = pairing == "halves" or wide is not states
    try:
        # A copy may be overwritten: new memory costs more than the product.
        rotated = pairs.mul_(rotation) if is_copy else pairs * rotation
    except RuntimeError:  # vmap over rotations: the products do not fit into one copy
        rotated = pairs * rotation
    return torch.view_as_real(rotated).flatten(-2).to(states.dtype)


def build_norm(config: HfViTBaseConfig, width: int | None = None) -> nn.Module:
    """Build a norm of the config's kind over `width` channels; default: the hidden size."""
    kind = nn.RMSNorm if config.norm_type == "rmsnorm" else nn.LayerNorm
    return kind(width or config.hidden_size, eps=config.layer_norm_eps)


class RelativePositions(nn.Module):
    """Abstract: learned embeddings of the offsets p_q - p_k between patches, added to a layer's attention logits.

    Each layer has one table, offset_embeddings [(2h-1)*(2w-1), width]. Pairs with a special token get 0.
    """

    def __init__(self, config: HfViTBaseConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.grid = config.grid
        h, w = config.grid
        self.offset_embeddings = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), width))

    def init_weights(self) -> None:
        init.normal_(self.offset_embeddings, std=self.config.initializer_range)

    def resize_to(self, config: HfViTBaseConfig) -> None:
        """Resample the offsets, and keep them, at the grid of another config."""
        if self.grid == config.grid:
            return
        self.offset_embeddings = replace_parameter(self.offset_embeddings, self._get_table(config.grid).flatten(0, 1))
        self.grid = config.grid

    def _get_table(self, grid: Grid) -> torch.Tensor:
        """Return the offset embeddings [2h-1, 2w-1, width] for a grid."""
        table = self.offset_embeddings.reshape(2 * self.grid[0] - 1, 2 * self.grid[1] - 1, -1)
        if is_same_grid(grid, self.grid):
            return table
        (h, w), (top, left) = grid, (1 // side for side in grid)  # one patch has offset 0, the middle of three
        new_grid = (2 * h - 1 + 2 * top, 2 * w - 1 + 2 * left)
        resampled = resample_grid(table, new_grid, self.config.position_interpolation)
        return resampled[top : top + 2 * h - 1, left : left + 2 * w - 1]

    def embed_pairs(self, grid: Grid) -> torch.Tensor:
        """Return the embedding of every pair's offset on a grid, [h*w (queries), h*w (keys), width]."""
        table = self._get_table(grid)
        h, w = grid
        y = torch.arange(h * w, device=table.device) // w
        x = torch.arange(h * w, device=table.device) % w
        return table[y[:, None] - y[None] + h - 1, x[:, None] - x[None] + w - 1]

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Compute the bias [B or 1, A, h*w, h*w] from the scaled queries of patches [B, A, h*w, K]."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: use a class of RELATIVE_POSITIONS")

    def forward(self, query: torch.Tensor, grid: Grid, scaling: float, image_grids: list[Grid] | None) -> torch.Tensor:
        """Compute the bias [B, A, N, N] from queries [B, A, N, K], special tokens first.

        `image_grids` is the part of a padded grid that each image fills; each gets the bias it has without padding.
        """
        h, w = grid
        num_special = query.shape[2] - h * w
        patch_query = query[:, :, num_special:] * scaling
        if image_grids is None:
            bias = self.bias(patch_query, grid)
        else:  # write the bias of each image's own grid to the rows and columns of its patches
            bias = patch_query.new_zeros(*query.shape[:2], h * w, h * w)
            for image_grid, images in group_images(image_grids, query.device):
                patches = compute_top_left_indices(image_grid, grid, query.device)
                image_bias = self.bias(patch_query[images][:, :, patches], image_grid)
                heads = torch.arange(query.shape[1], device=query.device)
                index = (images[:, None, None, None], heads[:, None, None], patches[:, None], patches)
                bias = bias.index_put(index, image_bias.expand(len(images), -1, -1, -1))
        return F.pad(bias, (num_special, 0, num_special, 0)).expand(query.shape[0], -1, -1, -1)


class RelativePositionKeys(RelativePositions):
    """Offset embeddings that act as keys and that the heads share: q . r (arXiv 2010.11929, appendix D.4)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config, config.hidden_size // config.num_attention_heads)

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        return torch.einsum("bnqd,qkd->bnqk", query, self.embed_pairs(grid))


class RelativePositionBias(RelativePositions):
    """One value for each offset and head, independent of the query (Swin, arXiv 2103.14030, section 3.2)."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__(config, config.num_attention_heads)

    def bias(self, query: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the bias of every pair [1, A, h*w, h*w]; raise a ValueError if some of the heads are in another
        process.
        """
        if query.shape[1] != self.offset_embeddings.shape[1]:
            raise ValueError(
                f"position_embedding='relative_bias' needs all {self.offset_embeddings.shape[1]} heads in one process, "
                f"which has {query.shape[1]} under tensor parallelism; load the model without tp_plan"
            )
        return self.embed_pairs(grid).permute(2, 0, 1)[None].to(query.dtype)


RELATIVE_POSITIONS = {"relative": RelativePositionKeys, "relative_bias": RelativePositionBias}


def compute_top_left_indices(image_grid: Grid, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the raster indices in a padded `grid` of the patches of an image that fills its top left `image_grid`."""
    rows = torch.arange(image_grid[0], device=device)[:, None] * grid[1]
    return (rows + torch.arange(image_grid[1], device=device)).flatten()


def group_images(image_grids: list[Grid], device: torch.device) -> list[tuple[Grid, torch.Tensor]]:
    """Return every grid of a padded batch, and the indices [n] of the images that fill it."""
    groups: dict[Grid, list[int]] = {}
    for index, image_grid in enumerate(image_grids):
        groups.setdefault(image_grid, []).append(index)
    return [(image_grid, torch.tensor(images, device=device)) for image_grid, images in sorted(groups.items())]


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
        """Resample the kernel to the patch size of another config."""
        stride = config.patch_stride
        kernel = self.projection.weight
        if stride == kernel.shape[2:]:  # the projection may be a layer of peft, which has no kernel_size
            return
        resampled = resample_patch_kernel(kernel, stride, antialias=config.position_interpolation != "flexivit")
        self.projection.weight = replace_parameter(kernel, resampled)
        self.projection.kernel_size = self.projection.stride = stride


@dataclass
class Tokens:
    """Output of the embeddings, which the blocks read.

    Attributes:
        hidden_states: [B, N, D].
        grid: (h, w), the patch grid of the (padded) image.
        token_mask: [B, N] bool, False on padding; None when nothing is padded.
        image_grids: the part of the grid that each image fills; None when all fill it.
        rotation: see `make_rotation`; None without rotary positions.
    """

    hidden_states: torch.Tensor
    grid: Grid
    token_mask: torch.Tensor | None = None
    image_grids: list[Grid] | None = None
    rotation: Rotation | None = None


class HfViTEmbeddings(nn.Module):
    """Patches, position table and special tokens (class, distillation, registers): image [B, C, H, W] -> `Tokens`.

    Args:
        patch_embeddings: [B, C, H, W] -> [B, h*w, D]; the Hybrid-ViT's contains its ResNet stem.
        use_mask_token: whether there is a [mask] embedding, so that patches can be corrupted.

    Parameters, with the names of transformers' ViT, by `config.position_embedding`:
        learned: position_embeddings [1, T + h*w, D] (T rows for special tokens if `position_on_class_token`).
        learned_2d: row_position_embeddings [1, h, D/2], column_position_embeddings [1, w, D/2], and
            class_position_embedding [1, T, D] if a special token has a position.
        the others: none here.
    """

    def __init__(self, config: HfViTBaseConfig, patch_embeddings: nn.Module, use_mask_token: bool = False) -> None:
        super().__init__()
        self.grid = config.grid
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
        self.patch_layernorm = build_norm(config) if config.norm_on_patches else None
        self.layernorm = build_norm(config) if config.norm_before_layers else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def init_weights(self) -> None:
        """Initialize positions by a normal distribution, the other tokens with zeros.

        Registers start near zero, as in DINOv2's code, but differ from each other.
        """
        for name, parameter in self.named_parameters(recurse=False):
            if "position" in name:
                init.normal_(parameter, std=self.config.initializer_range)
            elif name == "register_tokens":
                init.normal_(parameter, std=1e-6)
            else:
                init.zeros_(parameter)

    def compute_position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        """Return the position embeddings of a grid: for patches [1, h*w, D] and for special tokens [1, T, D], each or
        None.
        """
        kind = self.config.position_embedding
        if kind == "learned":
            special = self.num_special_rows
            rows = self._resample_learned_table(grid)
            return rows[:, special:], rows[:, :special] if special else None
        if kind == "learned_2d":
            rows, columns = self.row_position_embeddings[0], self.column_position_embeddings[0]
            if not is_same_grid(grid, self.grid):
                resampling = self.config.position_interpolation, self.config.position_interpolation_offset
                rows = resample_grid(rows[None], (1, grid[0]), *resampling)[0]
                columns = resample_grid(columns[None], (1, grid[1]), *resampling)[0]
            h, w = grid
            table = torch.cat([rows[:, None].expand(h, w, -1), columns[None].expand(h, w, -1)], dim=-1)
            return table.reshape(1, h * w, -1), getattr(self, "class_position_embedding", None)
        if kind in FIXED_TABLES:
            device = None if like.device.type == "mps" else like.device  # Apple's GPUs have no float64
            table = FIXED_TABLES[kind](grid, self.config.hidden_size, device)[None]
            return table.to(like.dtype).to(like.device), None
        return None, None

    def rotation(self, grid: Grid, like: torch.Tensor, image_grids: list[Grid] | None = None) -> Rotation | None:
        """Return the rotation of tokens `like` [B, N, D]; see `make_rotation`."""
        return make_rotation(self.config, like, grid, image_grids, self.training)

    def _resample_learned_table(self, grid: Grid) -> torch.Tensor:
        """Return the learned table for a grid, [1, T + h*w, D]."""
        resampling = self.config.position_interpolation, self.config.position_interpolation_offset
        return resample_position_table(self.position_embeddings, self.grid, grid, self.num_special_rows, *resampling)

    def resize_to(self, config: HfViTBaseConfig) -> None:
        """Resample the learned tables, and keep them, at the grid of another config."""
        if self.grid == config.grid:
            return
        if hasattr(self, "position_embeddings"):
            resampled = self._resample_learned_table(config.grid)
            self.position_embeddings = replace_parameter(self.position_embeddings, resampled)
        elif hasattr(self, "row_position_embeddings"):
            resampling = config.position_interpolation, config.position_interpolation_offset
            for name, side in zip(("row_position_embeddings", "column_position_embeddings"), config.grid, strict=True):
                table = getattr(self, name)
                setattr(self, name, replace_parameter(table, resample_grid(table, (1, side), *resampling)))
        self.grid = config.grid

    def forward(
        self,
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        patch_sources: torch.Tensor | None = None,
    ) -> Tokens:
        """Embed images [B, C, H, W] with positions and special tokens; `HfViTBaseModel.forward`
        explains the arguments.
        """
        grid = self.compute_patch_grid(pixel_values)
        token_mask = image_grids = None
        if patch_attention_mask is None:
            patches = self.patch_embeddings(pixel_values)
            positions, special_rows = self.compute_position_table(grid, like=patches)
        else:
            image_grids = find_image_grids(patch_attention_mask, pixel_values.shape[0], grid)
            patches, positions, special_rows = self._embed_padded(pixel_values, grid, image_grids)
            patch_mask = patch_attention_mask.flatten(1).bool()
            special_mask = patch_mask.new_ones(patch_mask.shape[0], self.config.num_special_tokens)
            token_mask = self._attach_special(patch_mask, [special_mask])
        if self.patch_layernorm is not None:
            patches = self.patch_layernorm(patches)
        if bool_masked_pos is not None or patch_sources is not None:
            if not hasattr(self, "mask_token"):
                raise ValueError(
                    "bool_masked_pos needs a model with a [mask] embedding; load the checkpoint with "
                    "AutoModelForMaskedImageModeling"
                )
            masked = check_corruption(patches.shape[:2], bool_masked_pos, patch_sources, patch_attention_mask)
            patches = corrupt_patches(patches, self.mask_token, masked, patch_sources)
        if positions is not None:
            patches = patches + positions
        special_tokens = self._make_special_tokens(patches.shape[0], special_rows)
        hidden_states = self.dropout(self._attach_special(patches, special_tokens))
        if self.layernorm is not None:
            hidden_states = self.layernorm(hidden_states)
        rotation = self.rotation(grid, hidden_states, image_grids)
        return Tokens(hidden_states, grid, token_mask, image_grids, rotation)

    def compute_patch_grid(self, pixel_values: torch.Tensor) -> Grid:
        """Return the (h, w) of a batch in patches; raise a ValueError for anything but a batch of images."""
        check_images(pixel_values, self.config.num_channels)
        height, width = pixel_values.shape[2:]
        stride_h, stride_w = self.config.patch_stride
        h, w = self.config.grid_of(height, width)
        # As the original code, the model ignores incomplete patches. In a graph, a comparison would fix the sizes.
        if not torch.compiler.is_compiling() and (h * stride_h < height or w * stride_w < width):
            warnings.warn(
                f"images of {height}x{width} px hold {h}x{w} whole patches of {stride_h}x{stride_w} px, so the model "
                "ignores pixels at the bottom or right; resize or pad the images to avoid this",
                UserWarning,
                stacklevel=1,
            )
        return h, w

    def _embed_padded(
        self, pixel_values: torch.Tensor, grid: Grid, image_grids: list[Grid]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return patches and positions [B, h*w, D] of a padded batch, and the positions of the special tokens.

        Every image is embedded at its own size and put at the top left of the grid.
        """
        stride_h, stride_w = self.config.patch_stride
        patches = positions = pixel_values.new_zeros(pixel_values.shape[0], grid[0] * grid[1], self.config.hidden_size)
        table = special_rows = None
        for image_grid, images in group_images(image_grids, pixel_values.device):
            indices = images[:, None], compute_top_left_indices(image_grid, grid, pixel_values.device)
            embedded_patches = self.patch_embeddings(
                pixel_values[images, :, : image_grid[0] * stride_h, : image_grid[1] * stride_w]
            )
            patches = patches.to(embedded_patches.dtype).index_put(indices, embedded_patches)
            table, special_rows = self.compute_position_table(image_grid, like=embedded_patches)
            if table is not None:
                positions = positions.to(table.dtype).index_put(indices, table.expand(len(images), -1, -1))
        return patches, None if table is None else positions, special_rows

    def _make_special_tokens(self, batch: int, positions: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the special tokens [B, T, D] with their positions, in a list that is empty if there are none."""
        names = ("cls_token", "distillation_token", "register_tokens")
        tokens = [getattr(self, name) for name in names if hasattr(self, name)]
        if not tokens:
            return []
        special = torch.cat(tokens, dim=1)
        if positions is not None:  # the last tokens may have none
            special = special + F.pad(positions, (0, 0, 0, special.shape[1] - positions.shape[1]))
        return [special.expand(batch, -1, -1)]

    def _attach_special(self, patches: torch.Tensor, special: list[torch.Tensor]) -> torch.Tensor:
        """Join special tokens and patches along the token axis: special tokens first, or last if
        attention is causal.
        """
        if not special:
            return patches
        return torch.cat([patches, *special] if self.config.is_causal else [*special, patches], dim=1)


def find_image_grids(patch_attention_mask: torch.Tensor, batch: int, grid: Grid) -> list[Grid]:
    """Return the (h_i, w_i) in patches that each image fills at the top left, from a mask [B, h, w] of a padded batch.

    Raises:
        ValueError: the mask has another shape, or an image is empty or not a top-left rectangle.
    """
    if tuple(patch_attention_mask.shape) != (batch, *grid):
        raise ValueError(
            f"patch_attention_mask has shape {tuple(patch_attention_mask.shape)}; it needs {[batch, *grid]}, "
            "one entry per patch: 1 on the image and 0 on padding"
        )
    mask = patch_attention_mask.bool().cpu()  # a GPU would be waited for at every value that is read below
    heights, widths = mask.any(dim=2).sum(dim=1).tolist(), mask.any(dim=1).sum(dim=1).tolist()
    for index, (h, w) in enumerate(zip(heights, widths, strict=True)):
        if not h or int(mask[index].sum()) != h * w or not bool(mask[index, :h, :w].all()):
            raise ValueError(
                f"patch_attention_mask of image {index} is not a rectangle at the top left; "
                "pad images only at the right and bottom"
            )
    return list(zip(heights, widths, strict=True))


def check_corruption(
    shape: tuple[int, ...] | torch.Size,
    bool_masked_pos: torch.Tensor | None,
    patch_sources: torch.Tensor | None,
    patch_attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check the inputs of `corrupt_patches`; return `bool_masked_pos` as bool [B, h*w].

    Raises:
        ValueError: a shape or type is wrong, a mask or source is on padding, or a source is not a patch.
    """
    if bool_masked_pos is None:
        raise ValueError("patch_sources needs bool_masked_pos; give both")
    for name, tensor in (("bool_masked_pos", bool_masked_pos), ("patch_sources", patch_sources)):
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it needs {list(shape)}, one entry per patch")
    if patch_sources is not None and patch_sources.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"patch_sources are {patch_sources.dtype}; give the indices of patches as int64")
    masked = bool_masked_pos.bool()
    if torch.compiler.is_compiling():  # a graph cannot read values
        return masked
    if patch_sources is not None and not bool(((patch_sources >= -1) & (patch_sources < shape[1])).all()):
        raise ValueError(
            f"patch_sources run from {int(patch_sources.min())} to {int(patch_sources.max())}; give -1 for [mask], "
            f"or the index of a patch, 0 to {shape[1] - 1}"
        )
    if patch_attention_mask is not None:
        on_image = patch_attention_mask.flatten(1).bool()
        sources_on_image = True
        if patch_sources is not None:
            sources_on_image = bool((on_image.gather(1, patch_sources.long().clamp(min=0)) | ~masked).all())
        if bool((masked & ~on_image).any()) or not sources_on_image:
            raise ValueError(
                "bool_masked_pos or patch_sources select patches of padding, where patch_attention_mask is 0; select "
                "only patches of the image"
            )
    return masked


def corrupt_patches(
    patches: torch.Tensor, mask_token: torch.Tensor, bool_masked_pos: torch.Tensor, patch_sources: torch.Tensor | None
) -> torch.Tensor:
    """Replace the embeddings of corrupted patches (2010.11929, B.1.2); positions are added afterwards.

    Args:
        patches: [B, h*w, D].
        mask_token: [1, 1, D], the learned [mask].
        bool_masked_pos: [B, h*w] bool, True where a patch is corrupted.
        patch_sources: [B, h*w], the replacement of each corrupted patch: -1 is [mask], any other number the embedding
            of that patch of the same image (its own number leaves it unchanged). None is [mask] everywhere.
    """
    replacement = mask_token.to(patches.dtype).expand_as(patches)
    if patch_sources is not None:
        index = patch_sources.long().clamp(min=0)[..., None].expand_as(patches)
        replacement = torch.where((patch_sources < 0)[..., None], replacement, patches.gather(1, index))
    return torch.where(bool_masked_pos[..., None], replacement, patches)


def make_additive(may_attend: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a bool mask to a mask that is added to logits: 0 where attention is allowed, the lowest number elsewhere.

    Queries that may not attend to anything, such as padding, attend to everything, which avoids NaN.
    """
    may_attend = may_attend | ~may_attend.any(dim=-1, keepdim=True)
    return torch.zeros_like(may_attend, dtype=dtype).masked_fill(~may_attend, torch.finfo(dtype).min)


def make_additive_mask(hidden_states: torch.Tensor, token_mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    """Return the mask [B or 1, 1, N, N] added to the logits of tokens [B, N, D].

    Args:
        hidden_states: [B, N, D], for its shape, device and dtype.
        token_mask: [B, N] bool, False on padding; None: nothing is padded.
        is_causal: whether tokens may attend only to earlier ones and themselves.
    """
    length = hidden_states.shape[1]
    may_attend = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden_states.device)
    if is_causal:
        may_attend = may_attend.tril()
    if token_mask is not None:
        may_attend = may_attend & token_mask[:, None, None, :]
    return make_additive(may_attend, hidden_states.dtype)
