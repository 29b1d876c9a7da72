"""Carry out a plan: load the weights, and build the model and its image processor."""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import COMPUTATIONS, TRANSFORMS
from hf_vit.conversion.planning import Plan, Row
from hf_vit.conversion.readers import CheckpointReader
from hf_vit.errors import UserError, get_first_line
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.embeddings_hf_vit import resample_position_table

if TYPE_CHECKING:
    from transformers import ViTImageProcessor

THREADS, AHEAD = 2, 3  # reading threads, and how many arrays they read ahead


@dataclass
class Weights:
    """The parameters of a converted model."""

    state: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # by name in the model
    rounded: dict[str, int] = field(default_factory=dict[str, int])  # source key -> number of inexact values


def load_weights(
    reader: CheckpointReader,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    advance: Callable[[int], None] = lambda size: None,
) -> Weights:
    """Read and transform all arrays of a plan to parameters of this dtype.

    `advance` is called with the size of each array, in the unit of `Plan.size`.

    Raises:
        UserError: an array is damaged, not floating point, has NaN or infinite values, or values too large for `dtype`.
    """
    weights = Weights()
    # Group the rows by array, so that an array that stacks all blocks is read once.
    groups = [(key, list(rows)) for key, rows in groupby(plan.rows, key=lambda row: row.key)]
    arrays = _read_ahead(reader, [key for key, _ in groups if key is not None])
    with closing(arrays):
        for key, rows in groups:
            if key is None:
                for row in rows:
                    weights.state[plan.parameter_name(row)] = torch.zeros(row.parameter_shape, dtype=dtype)
                continue
            source = next(arrays)
            for row in rows:
                weights.state[plan.parameter_name(row)] = (
                    _compute(reader, row, plan.config.grid, dtype) if row.other_keys else _move(source, row, dtype)
                )
            if source.dtype == torch.float64 and dtype != torch.float64:
                num_inexact = _count_inexact_values(source, dtype, key)
                if num_inexact:
                    weights.rounded[key] = num_inexact
            advance(4 * source.numel())
    return weights


def _read_ahead(reader: CheckpointReader, keys: Iterable[str]) -> Generator[torch.Tensor]:
    """Yield arrays in the order of the keys, while threads read the next ones; closing it drops the unread ones."""
    with ThreadPoolExecutor(THREADS) as pool:
        reads = deque[Future[torch.Tensor]]()
        try:
            for key in keys:
                reads.append(pool.submit(reader.read_floats, key))
                if len(reads) == AHEAD:
                    yield reads.popleft().result()
            while reads:
                yield reads.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _count_inexact_values(source: torch.Tensor, dtype: torch.dtype, key: str) -> int:
    """Return how many values change in a narrower dtype; raise a UserError if one is beyond its range."""
    rounded = source.to(dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise UserError(f"'{key}' holds values beyond the range of {dtype}; the file is damaged: download it again")
    return int((rounded.double() != source).sum())


def _compute(reader: CheckpointReader, row: Row, grid: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Compute a parameter from several arrays."""
    arrays = [reader.read_floats(key) for key in (row.key or "", *row.other_keys)]
    parameter = COMPUTATIONS[row.transform](arrays, grid).to(dtype)
    if not bool(torch.isfinite(parameter).all()):
        raise UserError(
            f"the parameter computed from '{row.key}' has values beyond the range of {dtype}, so the file is "
            "damaged; download it again"
        )
    return parameter


def _move(source: torch.Tensor, row: Row, dtype: torch.dtype) -> torch.Tensor:
    """Return the row's parameter, contiguous, and a copy if it is only a part of the source array."""
    values = TRANSFORMS[row.transform].apply(row.select(source))
    if row.resample is not None:
        # The original resamples in double precision (scipy.ndimage.zoom) and rounds once, at the end.
        resample = row.resample
        values = resample_position_table(
            values.double(), resample.old_grid, resample.new_grid, resample.prefix, resample.mode, resample.offset
        )
    parameter = values.to(dtype).contiguous()
    shares_memory = parameter.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    # A view of a larger array would keep all of it in memory, and could not be saved.
    return parameter.clone() if shares_memory and parameter.numel() < source.numel() else parameter


def build_model(plan: Plan, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the planned model with this state, in the state's dtype, without initializing parameters first."""
    dtype = next(iter(state.values())).dtype
    model_class: Any = plan.model_class
    model, info = model_class.from_pretrained(
        None, config=copy.deepcopy(plan.config), state_dict=state, dtype=dtype, output_loading_info=True
    )
    problems = {problem: names for problem, names in info.items() if names}  # such as "missing_keys"
    if problems:
        raise RuntimeError(f"the converted weights do not fit the model ({problems}); please report this")
    return model.eval()


def build_processor(plan: Plan) -> "ViTImageProcessor":
    """Build the image processor that makes the pixels that the source's model was trained with.

    Google's code scales pixels to [-1, 1] and resizes bilinearly (vit_jax/input_pipeline.py); other sources bring their
    own settings. Without a size there, images get the model's.
    """
    from transformers import ViTImageProcessor

    height, width = as_pair(plan.config.image_size)
    channels = plan.config.num_channels
    half = [0.5] * channels
    fields: dict[str, Any] = {"image_mean": half, "image_std": half, **plan.processor}
    fields["do_convert_rgb"] = channels == 3
    fields.setdefault("size", {"height": height, "width": width})
    try:
        return ViTImageProcessor(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"preprocessor_config.json is not valid: {get_first_line(error)}; correct that value, or remove the file"
        ) from error
