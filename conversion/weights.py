"""Carrying out a plan: the state dict of the converted model."""

from dataclasses import dataclass, field
from itertools import groupby

import torch

from hf_vit.errors import UserError

from .checkpoint import CheckpointReader
from .planning import Plan, Row
from .transforms import TRANSFORMS


@dataclass
class Weights:
    """The parameters of a converted model.

    Attributes:
        state: parameter name in the model -> contiguous tensor of the wanted dtype.
        rounded: source key -> how many of its values the wanted dtype cannot hold exactly.
    """

    state: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    rounded: dict[str, int] = field(default_factory=dict[str, int])


def load_weights(reader: CheckpointReader, plan: Plan, dtype: torch.dtype = torch.float32) -> Weights:
    """Read and move every array of the plan.

    Raises:
        UserError: an array is damaged, holds no floats, NaN or infinite values, or values too large for `dtype`.
    """
    weights = Weights()
    for key, rows in groupby(plan.rows, key=lambda row: row.source):  # an array of all blocks is read once
        if key is None:
            weights.state |= {plan.parameter_name(row): torch.zeros(row.target_shape, dtype=dtype) for row in rows}
            continue
        source = reader.read_floats(key)
        for row in rows:
            weights.state[plan.parameter_name(row)] = _move(row.taken(source), row, dtype)
        if source.dtype == torch.float64 and dtype != torch.float64:
            _account_for_rounding(weights, source, key, dtype)
    return weights


def _move(source: torch.Tensor, row: Row, dtype: torch.dtype) -> torch.Tensor:
    tensor = TRANSFORMS[row.transform].apply(source)
    if row.resample is not None:
        from hf_vit.models.positions_hf_vit import resample_position_table

        # The original resamples in double precision (scipy.ndimage.zoom) and rounds once, at the end.
        one = row.resample
        tensor = resample_position_table(tensor.double(), one.old_grid, one.new_grid, one.prefix, one.mode)
    moved = tensor.to(dtype).contiguous()
    # A model whose parameters share memory is not saved.
    return moved.clone() if row.piece is not None and moved.data_ptr() == tensor.data_ptr() else moved


def _account_for_rounding(weights: Weights, source: torch.Tensor, key: str, dtype: torch.dtype) -> None:
    held = source.to(dtype)
    if not bool(torch.isfinite(held).all()):
        raise UserError(f"'{key}' holds values beyond the range of {dtype}; the file is damaged or no checkpoint")
    lost = int((held.double() != source).sum())
    if lost:
        weights.rounded[key] = lost
