"""A BiT ResNet into the stem of a hybrid: the network without a Transformer fills the part before it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_vit.conversion.origins.google import bit, bit_paper
from hf_vit.conversion.origins.registry import likely_kind
from hf_vit.conversion.origins.transforms import TRANSFORMS
from hf_vit.conversion.planning.layout import Layout, naming
from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.readers.opening import open_checkpoint
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_base import HfBaseConfig

HEAD = "head of the ResNet"


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
    body = model.base_model
    stem = getattr(getattr(getattr(body, "embeddings", None), "patch_embeddings", None), "stem", None)
    if stem is None:
        raise UserError(
            f"{type(model).__name__} has no ResNet stem; give a model of the hybrid family, such as R50+B/16"
        )
    source = Path(source)
    with open_checkpoint(source) as reader:
        _refuse_other_kind(reader.shapes, source.name)
        layout = Layout(bit.ORIGIN, bit.names(reader.shapes), reader.shapes)
        with naming(source.name):
            layout.refuse_misfits()
        _refuse_other_stem(layout, body.config, source.name)
        account, filled = dict(layout.names.ignored), dict[str, torch.Tensor]()
        for name, rule in layout.present.items():
            key = layout.names.normal[name]
            if rule.part == "head":
                account[key] = HEAD
            else:
                name = rule.parameter.removeprefix("encoder.")
                account[key] = f"embeddings.patch_embeddings.stem.{name}"
                filled[name] = TRANSFORMS[rule.transform].apply(reader.read_floats(key))
    with torch.no_grad():
        parameters = dict(stem.named_parameters())
        if parameters.keys() != filled.keys():
            raise RuntimeError(f"the stem's parameters are not the file's: {sorted(parameters.keys() ^ filled.keys())}")
        for name, parameter in parameters.items():
            parameter.copy_(filled[name])
    return account


def _refuse_other_kind(shapes: Mapping[str, Shape], file_name: str) -> None:
    if bit.recognises(shapes):
        return
    family = "a BiT ResNetV2" if bit_paper.recognises(shapes) else likely_kind(shapes) or "no BiT ResNet"
    raise UserError(f"{file_name} looks like {family}; a stem takes a BiT ResNet of post-activation units")


def _refuse_other_stem(layout: Layout, config: HfBaseConfig, file_name: str) -> None:
    sizes = bit.stem_sizes(layout.dims, layout.normal_shapes)
    needed = sizes | {"layer_norm_eps": bit.EPSILON}
    there = {name: getattr(config, name) for name in needed} | {"stage_depths": tuple(config.stage_depths)}
    wrong = {name: value for name, value in needed.items() if there[name] != value}
    if wrong:
        told = ", ".join(f"{name}={value} (the model has {there[name]})" for name, value in wrong.items())
        raise UserError(f"{file_name} needs a hybrid with {told}; build the model with that config")
