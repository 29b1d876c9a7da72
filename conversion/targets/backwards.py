"""Key tables backwards: from a model's parameters to the arrays of an origin's file."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_vit.conversion.origins.origin import KeyRule, Origin
from hf_vit.conversion.origins.transforms import COMPUTATIONS, TRANSFORMS
from hf_vit.conversion.planning.layout import axis_factor
from hf_vit.conversion.planning.plan import POSITION_TABLE


def rules_for(origin: Origin, config: PreTrainedConfig) -> list[KeyRule]:
    """The key table for a model of this config, one rule a key; without what is computed from several arrays."""
    rules = tuple(rule for rule in origin.rules if rule.transform not in COMPUTATIONS)
    if origin.rules_of is not None:  # for a stem of these depths
        depths = getattr(config, "stage_depths", ())
        units = [(stage, unit) for stage, depth in enumerate(depths, start=1) for unit in range(1, depth + 1)]
        numbered = {one.key: () for unit in units for rule in rules if (one := rule.in_unit(*unit)) != rule}
        rules = origin.rules_of(rules, numbered)
    blocks = range(config.num_hidden_layers)
    return [one for rule in rules for one in ([rule.at(i) for i in blocks] if rule.in_block else [rule])]


def array_of(rule: KeyRule, state: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> torch.Tensor:
    """The array that `rule` makes these parameters of."""
    sizes = _sizes(config, state)
    shape = [factor * (sizes[letter] if letter else 1) for factor, letter in map(axis_factor, rule.axes)]
    shape[0] //= len(rule.parameters)
    return torch.cat([TRANSFORMS[rule.transform].revert(state[name], shape) for name in rule.parameters])


def _sizes(config: Any, state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Size of every letter that the legends of key tables use."""
    patch = config.patch_stride
    if hasattr(config, "stem_patch_size"):
        patch = (config.stem_patch_size, config.stem_patch_size)
    heads = getattr(config, "num_attention_heads", 1)
    return {
        "P": patch[0],
        "Q": patch[1],
        "C": config.num_channels,
        "D": config.hidden_size,
        "T": state[POSITION_TABLE].shape[1] if POSITION_TABLE in state else math.prod(config.grid),
        "G": getattr(config, "num_register_tokens", 0),
        "A": heads,
        "K": config.hidden_size // heads,
        "S": getattr(config, "token_intermediate_size", 0),
        "M": config.intermediate_size,
        "R": getattr(config, "representation_size", None) or config.hidden_size,
        "L": config.num_labels,
        "W": getattr(config, "stem_width", 0),
    }
