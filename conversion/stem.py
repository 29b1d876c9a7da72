"""A BiT ResNet into the stem of a hybrid: the network without a Transformer fills the part before it."""

from pathlib import Path
from typing import Any

from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.origins import google
from hf_vit.conversion.origins.registry import likely_kind
from hf_vit.conversion.planning import Wishes, make_plan
from hf_vit.conversion.readers import open_checkpoint
from hf_vit.errors import UserError


def load_stem(model: Any, source: str | Path) -> dict[str, str]:
    """Fill the stem of a hybrid with a BiT ResNet, in place; every other parameter stays as it is.

    Args:
        model: any model of the hybrid family whose stem has the file's depths, width and channels.
        source: the checkpoint file.

    Returns:
        For every key of the file the parameter of the stem that it filled, or why it is left out.

    Raises:
        UserError: the model has no such stem, or the file is damaged or no BiT of that form. The model is unchanged.
    """
    body, name = model.base_model, Path(source).name
    stem = getattr(getattr(getattr(body, "embeddings", None), "patch_embeddings", None), "stem", None)
    if stem is None:
        raise UserError(
            f"{type(model).__name__} has no ResNet stem; give a model of the hybrid family, such as R50+B/16"
        )
    with open_checkpoint(source) as reader:
        if not google.BIT.recognises(reader.shapes):
            is_paper = google.BIT_PAPER.recognises(reader.shapes)
            kind = "a BiT ResNetV2" if is_paper else likely_kind(reader.shapes) or "no BiT ResNet"
            raise UserError(f"{name} looks like {kind}; a stem takes a BiT ResNet of post-activation units")
        plan = make_plan(reader.shapes, Wishes(), file_name=name)
        sizes = {field: getattr(plan.config, field) for field in ("stage_depths", "stem_width", "num_channels")}
        wrong = [
            f"{field}={value} (the model has {there})"
            for field, value in {**sizes, "layer_norm_eps": google.BIT_EPSILON}.items()
            if (there := getattr(body.config, field)) != value
        ]
        if wrong:
            raise UserError(f"{name} needs a hybrid with {', '.join(wrong)}; build the model with that config")
        state = load_weights(reader, plan).state
    body_rows = [row for row in plan.rows if row.parameter.startswith("encoder.")]
    stem.load_state_dict({row.parameter.removeprefix("encoder."): state[plan.parameter_name(row)] for row in body_rows})
    account = dict.fromkeys(plan.consumed, "head of the ResNet") | dict(plan.ignored)
    return account | {str(row.key): row.parameter.replace("encoder", google.STEM, 1) for row in body_rows}
