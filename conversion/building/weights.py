"""Carrying out a plan: the state dict of the converted model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import torch

from hf_vit.conversion.origins.transforms import COMPUTATIONS, TRANSFORMS
from hf_vit.conversion.planning.plan import Plan, Row
from hf_vit.conversion.readers.checkpoint import CheckpointReader
from hf_vit.errors import UserError
from hf_vit.models.positions_hf_vit import resample_position_table

AHEAD = 3  # arrays that other threads may inflate, the one in use included


@dataclass
class Weights:
    """The parameters of a converted model.

    Attributes:
        state: parameter name in the model -> tensor of the wanted dtype.
        rounded: source key -> how many of its values the wanted dtype cannot hold exactly.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    rounded: dict[str, int] = field(default_factory=dict[str, int])


def load_weights(
    reader: CheckpointReader,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    mapped: bool = False,
    advance: Callable[[int], None] = lambda size: None,
) -> Weights:
    """Read and move every array of the plan.

    Args:
        mapped: leave arrays in the file's mapping where that can be, not yet checked: for a state that is saved at
            once, and then needs `CheckpointReader.confirm`.
        advance: told the size of every array that was read, in the unit of `Plan.size`.

    Raises:
        UserError: an array is damaged, holds no floats, NaN or infinite values, or values too large for `dtype`.
    """
    weights = Weights()
    # An array of all blocks is read once.
    groups = [(key, list(rows)) for key, rows in groupby(plan.rows, key=lambda row: row.key)]
    for place, (key, rows) in enumerate(groups):
        if key is None:
            weights.state |= {plan.parameter_name(row): torch.zeros(row.parameter_shape, dtype=dtype) for row in rows}
            continue
        reader.read_ahead(each for each, _ in groups[place : place + AHEAD] if each is not None)
        source = reader.map_floats(key)
        for row in rows:
            if row.beside:
                weights.state[plan.parameter_name(row)] = _computed(reader, row, plan.config.grid, dtype)
                continue
            moved = _moved(row.taken(source), row, dtype)
            view = mapped and reader.is_mapped(key) and row.block is None and row.piece is None
            weights.state[plan.parameter_name(row)] = moved if view else _apart(moved, source)
        if source.dtype == torch.float64 and dtype != torch.float64:
            _account_for_rounding(weights, source, key, dtype)
        advance(4 * source.numel())
    if not mapped:
        reader.confirm()
    return weights


def _computed(reader: CheckpointReader, row: Row, grid: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    arrays = [reader.read_floats(key) for key in (row.key or "", *row.beside)]
    computed = COMPUTATIONS[row.transform].compute(arrays, grid).to(dtype)
    if not bool(torch.isfinite(computed).all()):
        raise UserError(f"'{row.key}' and what lies beside it make values beyond the range of {dtype}")
    return computed


def _moved(source: torch.Tensor, row: Row, dtype: torch.dtype) -> torch.Tensor:
    tensor = TRANSFORMS[row.transform].apply(source)
    if row.resample is not None:
        # The original resamples in double precision (scipy.ndimage.zoom) and rounds once, at the end.
        one = row.resample
        tensor = resample_position_table(tensor.double(), one.old_grid, one.new_grid, one.prefix, one.mode)
    return tensor.to(dtype)


def _apart(moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Contiguous, and of its own memory where only a part of the source was taken: a model that shares is not saved."""
    moved = moved.contiguous()
    shares = moved.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return moved.clone() if shares and moved.numel() < source.numel() else moved


def _account_for_rounding(weights: Weights, source: torch.Tensor, key: str, dtype: torch.dtype) -> None:
    held = source.to(dtype)
    if not bool(torch.isfinite(held).all()):
        raise UserError(f"'{key}' holds values beyond the range of {dtype}; the file is damaged or no checkpoint")
    lost = int((held.double() != source).sum())
    if lost:
        weights.rounded[key] = lost
