"""A BiT ResNet into the stem of a hybrid: the network without a Transformer fills the part before it."""

from pathlib import Path
from typing import Any

import torch

from hf_vit.conversion.origins import google
from hf_vit.conversion.origins.origin import TRANSFORMS
from hf_vit.conversion.origins.registry import likely_kind
from hf_vit.conversion.planning import Layout, naming
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
        layout = Layout(google.BIT, google.BIT.names(reader.shapes), reader.shapes)
        with naming(name):
            layout.refuse_misfits()
        needed = google.bit_sizes(layout.network(layout.parts, None)) | {"layer_norm_eps": google.BIT_EPSILON}
        there = {field: getattr(body.config, field) for field in needed}
        there |= {"stage_depths": tuple(body.config.stage_depths)}
        if wrong := [
            f"{field}={value} (the model has {there[field]})"
            for field, value in needed.items()
            if there[field] != value
        ]:
            raise UserError(f"{name} needs a hybrid with {', '.join(wrong)}; build the model with that config")
        account, filled = dict(layout.names.ignored), dict[str, torch.Tensor]()
        for normal, rule in layout.present.items():
            key, parameter = layout.names.normal[normal], rule.parameter.removeprefix("encoder.")
            if rule.part == "head":
                account[key] = "head of the ResNet"
            else:
                account[key] = f"{google.STEM}.{parameter}"
                filled[parameter] = TRANSFORMS[rule.transform].apply(reader.read_floats(key))
    with torch.no_grad():
        parameters = dict(stem.named_parameters())
        if parameters.keys() != filled.keys():
            raise RuntimeError(f"the stem's parameters are not the file's: {sorted(parameters.keys() ^ filled.keys())}")
        for parameter, tensor in parameters.items():
            tensor.copy_(filled[parameter])
    return account
