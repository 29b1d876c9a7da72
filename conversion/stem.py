"""Load a BiT ResNet into the stem of a hybrid."""

from pathlib import Path
from typing import Any

import torch

from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.origins import google
from hf_vit.conversion.origins.registry import guess_kind
from hf_vit.conversion.planning import PlanSettings, make_plan
from hf_vit.conversion.readers import open_checkpoint
from hf_vit.errors import UserError


def load_stem(model: Any, source: str | Path) -> dict[str, str]:
    """Fill the stem of a hybrid with a BiT ResNet, in place; all other parameters stay as they are.

    Args:
        model: a model of the hybrid family whose stem has the file's depths, width and channels.
        source: the checkpoint file.

    Returns:
        For every key of the file, the parameter of the stem that it filled, or why it was left out.

    Raises:
        UserError: the model has no such stem, or the file is damaged or not such a BiT. The model is unchanged.
    """
    body = model.base_model
    name = Path(source).name
    stem = getattr(getattr(getattr(body, "embeddings", None), "patch_embeddings", None), "stem", None)
    if stem is None:
        raise UserError(f"{type(model).__name__} has no ResNet stem to fill; give a hybrid model, such as R50+B/16")
    with open_checkpoint(source) as reader:
        if not google.BIT.recognizes(reader.shapes):
            is_paper = google.BIT_PAPER.recognizes(reader.shapes)
            kind = "a BiT ResNetV2" if is_paper else guess_kind(reader.shapes) or "another kind of checkpoint"
            raise UserError(
                f"{name} looks like {kind}, but only a BiT ResNet with post-activation units fits a stem; give "
                "such a checkpoint"
            )
        plan = make_plan(reader.shapes, PlanSettings(), file_name=name)
        _refuse_other_sizes(body.config, plan.config, name)
        state = load_weights(reader, plan).state
    report = dict.fromkeys(plan.consumed, "head of the ResNet") | dict(plan.ignored)
    stem_state: dict[str, torch.Tensor] = {}
    for row in plan.rows:
        if row.parameter.startswith("encoder."):
            stem_state[row.parameter.removeprefix("encoder.")] = state[plan.parameter_name(row)]
            report[str(row.key)] = row.parameter.replace("encoder", google.STEM, 1)
    stem.load_state_dict(stem_state)
    return report


def _refuse_other_sizes(config: Any, resnet_config: Any, name: str) -> None:
    """Raise a UserError unless the stem of a hybrid has the sizes and constants of the ResNet named `name`."""
    needed = {field: getattr(resnet_config, field) for field in ("stage_depths", "stem_width", "num_channels")}
    epsilon = "layer_norm_eps" if config.group_norm_eps is None else "group_norm_eps"
    needed |= {epsilon: google.BIT_EPSILON, "weight_standardization": "std"}
    differing = [field for field, value in needed.items() if getattr(config, field) != value]
    if differing:
        mismatches = [f"{field}={needed[field]} (the model has {getattr(config, field)})" for field in differing]
        raise UserError(
            f"{name} fits only a hybrid model with {', '.join(mismatches)}; build the model with these config values"
        )
