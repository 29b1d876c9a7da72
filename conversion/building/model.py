"""From a plan and its weights to the model and the image processor that go with it."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.planning.plan import Plan
from hf_vit.errors import UserError, first_line
from hf_vit.models.configuration_hf_vit import as_pair

if TYPE_CHECKING:
    from transformers import ViTImageProcessor


def build_model(plan: Plan, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with exactly this state, in its dtype; no parameter is initialised first."""
    dtype = next(iter(state.values())).dtype
    loaded: Any = plan.model_class.from_pretrained(
        None, config=copy.deepcopy(plan.config), state_dict=state, dtype=dtype, output_loading_info=True
    )
    model, info = loaded
    wrong = {problem: names for problem, names in info.items() if names}
    if wrong:
        raise RuntimeError(f"the planned state does not load: {wrong}")
    return model.eval()


def build_processor(plan: Plan) -> "ViTImageProcessor":
    """The `ViTImageProcessor` that makes the pixels the source was made for.

    Google's own code scales pixels to [-1, 1] and resizes bilinearly (vit_jax/input_pipeline.py); other sources bring
    their own. A model that was resampled to another size gets images of that size.
    """
    from transformers import ViTImageProcessor

    height, width = as_pair(plan.config.image_size)
    channels = plan.config.num_channels
    fields: dict[str, Any] = {
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
        "do_convert_rgb": channels == 3,
    }
    fields |= plan.processor or {}
    if plan.resample or "size" not in fields:
        fields = {name: value for name, value in fields.items() if name not in ("crop_size", "do_center_crop")}
        fields["size"] = {"height": height, "width": width}
    try:
        return ViTImageProcessor(**fields)
    except (TypeError, ValueError) as error:
        raise UserError(f"preprocessor_config.json makes no image processor: {first_line(error)}") from error
