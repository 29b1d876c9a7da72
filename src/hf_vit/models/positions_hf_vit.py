"""Position tables: learned, sinusoidal and relative, and their resampling to another patch grid.

Legend: B batch, N = h*w patch tokens, D hidden size, K head size; a grid is (h, w) in patches, never a square root.
Sources: arXiv 2010.11929 section 3.2 (resampling) and appendix D.4 (kinds); sin-cos as in arXiv 2205.01580.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTBaseConfig

Grid = tuple[int, int]
# For patches [1, h*w, D] and for special tokens [1, T, D].
Rows = tuple[torch.Tensor | None, torch.Tensor | None]


def is_grid(grid: Grid, other: Grid) -> bool:
    """Whether two grids are one; no for sides that a trace holds as symbols or tensors, which stand for any size."""
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
    """A parameter of other values, and maybe another shape, that is frozen if the old one is."""
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


class PositionTable(nn.Module):
    """Abstract: owns the position parameters of an embedding layer under the names of transformers' ViT.

    Parameters, by `config.position_embedding`:
        learned: position_embeddings [1, T + h*w, D] (T rows for special tokens if `position_on_class_token`).
        learned_2d: row_position_embeddings [1, h, D/2], column_position_embeddings [1, w, D/2], and
            class_position_embedding [1, T, D] if there is a special token that gets a position.
        sincos_2d, sincos_1d, relative, relative_bias, none: nothing here.
    """

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.hidden_size = config.hidden_size
        self.interpolation = config.position_interpolation
        self.num_special_rows = config.num_special_positions
        h, w = config.grid
        kind = config.position_embedding
        if kind == "learned":
            self.position_embeddings = nn.Parameter(torch.zeros(1, self.num_special_rows + h * w, self.hidden_size))
        elif kind == "learned_2d":
            half = self.hidden_size // 2
            self.row_position_embeddings = nn.Parameter(torch.zeros(1, h, half))
            self.column_position_embeddings = nn.Parameter(torch.zeros(1, w, half))
            if self.num_special_rows:
                self.class_position_embedding = nn.Parameter(torch.zeros(1, self.num_special_rows, self.hidden_size))
        self.initializer_range = config.initializer_range
        self._rows = ROWS[kind]

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if "position" in name:
                init.normal_(parameter, std=self.initializer_range)
            else:
                init.zeros_(parameter)

    def position_table(self, grid: Grid, like: torch.Tensor) -> Rows:
        """The rows to add for a grid: patches [1, h*w, D] and special tokens [1, T, D]; None where nothing is added."""
        return self._rows(self, grid, like)

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


def learned_rows(table: PositionTable, grid: Grid, like: torch.Tensor) -> Rows:
    special = table.num_special_rows
    rows = resample_position_table(table.position_embeddings, table.grid, grid, special, table.interpolation)
    return rows[:, special:], rows[:, :special] if special else None


def learned_2d_rows(table: PositionTable, grid: Grid, like: torch.Tensor) -> Rows:
    rows, columns = table.row_position_embeddings[0], table.column_position_embeddings[0]
    if not is_grid(grid, table.grid):
        # A one-axis table is a grid of height 1; of width 1 torch antialiases wrongly (seen in 2.15).
        rows = resample_grid(rows[None], (1, grid[0]), table.interpolation)[0]
        columns = resample_grid(columns[None], (1, grid[1]), table.interpolation)[0]
    h, w = grid
    both = torch.cat([rows[:, None].expand(h, w, -1), columns[None].expand(h, w, -1)], dim=-1)
    return both.reshape(1, h * w, -1), getattr(table, "class_position_embedding", None)


def sincos_2d_rows(table: PositionTable, grid: Grid, like: torch.Tensor) -> Rows:
    return sincos_2d_table(grid, table.hidden_size, like.device)[None].to(like.dtype), None


def sincos_1d_rows(table: PositionTable, grid: Grid, like: torch.Tensor) -> Rows:
    return sincos_1d_table(grid, table.hidden_size, like.device)[None].to(like.dtype), None


def no_rows(table: PositionTable, grid: Grid, like: torch.Tensor) -> Rows:
    return None, None


ROWS: dict[str, Callable[[PositionTable, Grid, torch.Tensor], Rows]] = {
    "learned": learned_rows,
    "learned_2d": learned_2d_rows,
    "sincos_2d": sincos_2d_rows,
    "sincos_1d": sincos_1d_rows,
    "relative": no_rows,
    "relative_bias": no_rows,
    "none": no_rows,
}


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
