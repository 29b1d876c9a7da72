"""BiT's ResNets (arXiv 1912.11370) as big_vision has them in models/bit.py: the network of a hybrid's stem.

A ResNet alone is no vision transformer, so such a file fills the stem of a hybrid that exists. Only the post-activation
form is that network. The ResNetV2 of the paper (models/bit_paper.py, names `resnet/root_block/...` or `root_block/...`)
normalises before each convolution, has another epsilon in its standardised kernels and pads differently: it is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_vit.errors import UserError

from . import vit_jax
from .checkpoint import Shape
from .families import likely_family
from .layout import Layout
from .opening import open_checkpoint
from .origins import Dims, KeyNames, KeyRule, Origin
from .sizes import Pair
from .transforms import TRANSFORMS
from .vit_jax_hybrid import LEGEND, ROOT_RULES, STEM, UNIT_RULES, rules_of, stage_depths

HEAD = "head of the ResNet"
RULES = (
    *ROOT_RULES,
    *UNIT_RULES,
    KeyRule("head/kernel", "FL", "transpose", HEAD, part="head"),
    KeyRule("head/bias", "L", "keep", HEAD, part="head"),
)
EPSILON = 1e-6  # of GroupNorm in the original


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
    body = getattr(model, model.base_model_prefix, model)
    stem = getattr(body.embeddings.patch_embeddings, "stem", None)
    if stem is None:
        raise UserError(
            f"{type(model).__name__} has no ResNet stem; give a model of the hybrid family, such as R50+B/16"
        )
    source = Path(source)
    with open_checkpoint(source) as reader:
        if not recognises(reader.shapes):
            family = likely_family(reader.shapes) or "no BiT ResNet"
            raise UserError(f"{source.name} looks like {family}; a stem takes a BiT ResNet of post-activation units")
        layout = Layout(ORIGIN, names(reader.shapes), reader.shapes)
        layout.refuse_misfits()
        _refuse_other_stem(layout, body.config, source.name)
        account, filled = dict(layout.names.ignored), dict[str, torch.Tensor]()
        for name, rule in layout.present.items():
            key, target = layout.names.normal[name], rule.target.removeprefix(f"{STEM}.")
            account[key] = HEAD if rule.target == HEAD else rule.target
            if rule.target != HEAD:
                filled[target] = TRANSFORMS[rule.transform].apply(reader.read_floats(key))
    with torch.no_grad():
        parameters = dict(stem.named_parameters())
        if parameters.keys() != filled.keys():
            raise RuntimeError(f"the stem's parameters are not the file's: {sorted(parameters.keys() ^ filled.keys())}")
        for name, parameter in parameters.items():
            parameter.copy_(filled[name])
    return account


def recognises(shapes: Mapping[str, Shape]) -> bool:
    """A root under the names of the hybrid's stem, and no Transformer after it."""
    return any(f"{prefix}conv_root/kernel" in shapes for prefix in vit_jax.PREFIXES) and not any(
        "Transformer/" in key for key in shapes
    )


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    """Strip the prefix and sort out what is no weight."""
    found = [prefix for prefix in vit_jax.PREFIXES if f"{prefix}conv_root/kernel" in shapes]
    if len(found) != 1:
        raise UserError(f"the file holds {len(found)} ResNets, under {found}; exactly one is needed")
    weights, ignored = vit_jax.sorted_out(shapes, found[0], vit_jax.IGNORED)
    return KeyNames(weights, ignored, lambda name: found[0] + name)


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """The fields of `HfHybridViTConfig` that the stem needs."""
    return {
        "stage_depths": stage_depths(shapes),
        "stem_width": dims["W"],
        "num_channels": dims["C"],
        "layer_norm_eps": EPSILON,
    }


def _refuse_other_stem(layout: Layout, config: Any, file_name: str) -> None:
    needed = configure(layout.dims, layout.parts, layout.normal_shapes, None)
    there = {name: getattr(config, name) for name in needed} | {"stage_depths": tuple(config.stage_depths)}
    wrong = {name: value for name, value in needed.items() if there[name] != value}
    if wrong:
        told = ", ".join(f"{name}={value} (the model has {there[name]})" for name, value in wrong.items())
        raise UserError(f"{file_name} needs a hybrid with {told}; build the model with that config")


ORIGIN = Origin(
    name="bit",
    title="BiT ResNets of big_vision (models/bit.py) .npz, into the stem of a hybrid: `hf_vit.conversion.load_stem`",
    legend={letter: LEGEND[letter] for letter in ("C", "W", "U", "O", "I", "F")} | {"L": "labels of the ResNet"},
    rules=RULES,
    block_pattern=r"(?!)",  # no Transformer, no blocks
    without={},
    ignored=vit_jax.IGNORED,
    recognises=recognises,
    names=names,
    configure=configure,
    family="hybrid",
    rules_of=rules_of,
    notes=(
        "A ResNet alone is no vision transformer: `hf-vit convert` refuses it, and `load_stem(model, file)` fills the "
        "stem of a hybrid with it. Its head is left out.",
        "The ResNetV2 of the BiT paper (`resnet/root_block/...`, `standardized_conv2d_<n>`) is refused by name: it "
        "normalises before each convolution, which the hybrid's stem does not.",
        "Keys, prefixes and shapes are those of the hybrids' stem.",
    ),
)
