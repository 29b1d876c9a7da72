"""A plan carried out: the weights, and the model and image processor that they make."""

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.origins.origin import COMPUTATIONS, TRANSFORMS
from hf_vit.conversion.planning import Plan, Row
from hf_vit.conversion.readers import CheckpointReader
from hf_vit.errors import UserError, first_line
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.embeddings_hf_vit import resample_position_table

if TYPE_CHECKING:
    from transformers import ViTImageProcessor

THREADS, AHEAD = 2, 3  # that read, and arrays that they may hold before they are moved


@dataclass
class Weights:
    """The parameters of a converted model."""

    state: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])  # by name in the model
    rounded: dict[str, int] = field(default_factory=dict[str, int])  # source key -> values the dtype cannot hold


def load_weights(
    reader: CheckpointReader,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    advance: Callable[[int], None] = lambda size: None,
) -> Weights:
    """Read and move every array of the plan; `advance` is told the size of each in the unit of `Plan.size`.

    Raises:
        UserError: an array is damaged, holds no floats, NaN or infinite values, or values too large for `dtype`.
    """
    weights = Weights()
    # An array of all blocks is read once.
    groups = [(key, list(rows)) for key, rows in groupby(plan.rows, key=lambda row: row.key)]
    waiting = deque(key for key, _ in groups if key is not None)
    with ThreadPoolExecutor(THREADS) as pool:
        reads = deque[Future[torch.Tensor]]()
        try:
            for key, rows in groups:
                if key is None:
                    for row in rows:
                        weights.state[plan.parameter_name(row)] = torch.zeros(row.parameter_shape, dtype=dtype)
                    continue
                while waiting and len(reads) < AHEAD:
                    reads.append(pool.submit(reader.read_floats, waiting.popleft()))
                source = reads.popleft().result()
                for row in rows:
                    weights.state[plan.parameter_name(row)] = (
                        _compute(reader, row, plan.config.grid, dtype) if row.beside else _move(source, row, dtype)
                    )
                if source.dtype == torch.float64 and dtype != torch.float64:
                    held = source.to(dtype)
                    if not bool(torch.isfinite(held).all()):
                        raise UserError(
                            f"'{key}' holds values beyond the range of {dtype}; the file is damaged or is "
                            "not a checkpoint"
                        )
                    if lost := int((held.double() != source).sum()):
                        weights.rounded[key] = lost
                advance(4 * source.numel())
        finally:
            pool.shutdown(cancel_futures=True)
    return weights


def _compute(reader: CheckpointReader, row: Row, grid: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    arrays = [reader.read_floats(key) for key in (row.key or "", *row.beside)]
    computed = COMPUTATIONS[row.transform](arrays, grid).to(dtype)
    if not bool(torch.isfinite(computed).all()):
        raise UserError(f"'{row.key}' and its related arrays give values beyond the range of {dtype}")
    return computed


def _move(source: torch.Tensor, row: Row, dtype: torch.dtype) -> torch.Tensor:
    """Return the row's parameter, contiguous, and of its own memory where only a part of the source was taken."""
    tensor = TRANSFORMS[row.transform].apply(row.taken(source))
    if row.resample is not None:
        # The original resamples in double precision (scipy.ndimage.zoom) and rounds once, at the end.
        one = row.resample
        tensor = resample_position_table(tensor.double(), one.old_grid, one.new_grid, one.prefix, one.mode, one.offset)
    tensor = tensor.to(dtype).contiguous()
    shares = tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return tensor.clone() if shares and tensor.numel() < source.numel() else tensor  # what shares is not saved


def build_model(plan: Plan, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return the model with exactly this state, in its dtype; no parameter is initialized first."""
    dtype = next(iter(state.values())).dtype
    loaded: Any = plan.model_class.from_pretrained(
        None, config=copy.deepcopy(plan.config), state_dict=state, dtype=dtype, output_loading_info=True
    )
    model, info = loaded
    if wrong := {problem: names for problem, names in info.items() if names}:
        raise RuntimeError(f"the planned state does not load: {wrong}")
    return model.eval()


def build_processor(plan: Plan) -> "ViTImageProcessor":
    """Return the `ViTImageProcessor` that makes the pixels the source was made for.

    Google's code scales pixels to [-1, 1] and resizes bilinearly (vit_jax/input_pipeline.py); other sources bring their
    own. A model that was resampled to another size gets images of that size.
    """
    from transformers import ViTImageProcessor

    height, width = as_pair(plan.config.image_size)
    channels = plan.config.num_channels
    half = [0.5] * channels
    fields: dict[str, Any] = {"image_mean": half, "image_std": half, "do_convert_rgb": channels == 3}
    fields |= plan.processor or {}
    if plan.resample or "size" not in fields:
        fields = {name: value for name, value in fields.items() if name not in ("crop_size", "do_center_crop")}
        fields["size"] = {"height": height, "width": width}
    try:
        return ViTImageProcessor(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"preprocessor_config.json makes no image processor: {first_line(error)}") from error
