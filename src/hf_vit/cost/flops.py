"""Count the FLOPs of a configuration with torch while the model runs on the meta device, without weights or arithmetic.

torch's `FlopCounterMode` counts matrix products and convolutions, a multiply-add (MAC) as 2; norms, activations,
softmax and the resampling of position tables are not counted. Causal attention counts in full, as most kernels compute
it.
"""

import functools
import json
import re
from collections import Counter
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode

from hf_vit.errors import UserError, get_first_line
from hf_vit.families import AUTO_CLASSES, FAMILIES, Door, Family, find_family
from hf_vit.models.configuration_hf_vit import HfBaseConfig, as_pair
from hf_vit.repositories.reading import explain_load_errors

Macs = dict[str, int]

# Part of a model -> pattern of its module names; the first match counts. Other modules are a ResNet's convolutions.
_PARTS = {
    "stem": r"\.embeddings\..*\.stem\b",
    "patch embeddings": r"\.embeddings\b",
    "pooling": r"\.pooler\b",
    "attention projections": r"\.[qkvo]_proj$",
    "attention": r"\.(attention|row|column|relative_position)$",
    "token MLPs": r"\.token_mlp\b",
    "MLPs": r"\.mlp\b",
    "feature pyramid": r"\.pyramid\b",
    "head": r"\.\w*(classifier|prediction_head)\b",
    "convolutions": "",
}


def forward_macs(
    config: HfBaseConfig, image_size: int | tuple[int, int] | None = None, task: Door = "classification"
) -> Macs:
    """Count the multiply-adds of a forward pass for one image in evaluation mode, by part of the model.

    Args:
        config: configuration of a family of hf_vit.
        image_size: px, int or (height, width); by default the configuration's.
        task: the model class: with classifier, without head, with the head for masked patches, or as a backbone.

    Raises:
        UserError: the configuration belongs to another package, its family does not support the task, or the image size
            does not fit the patch size.
    """
    family = find_family(getattr(config, "model_type", None))
    if family is None:
        raise UserError(
            f"FLOPs of a '{getattr(config, 'model_type', 'unknown')}' model cannot be counted; give a configuration of "
            f"{', '.join(family.model_type for family in FAMILIES.values())}"
        )
    if task in family.not_applicable:
        raise UserError(family.explain_missing_class(task))
    size = as_pair(config.image_size if image_size is None else image_size)
    try:
        config.grid_of(*size)
        return dict(_count(family, config.to_json_string(use_diff=False), size, task))
    except (StrictDataclassError, ValueError) as error:
        raise UserError(get_first_line(error)) from error


def forward_flops(
    config: HfBaseConfig, image_size: int | tuple[int, int] | None = None, task: Door = "classification"
) -> int:
    """Count the FLOPs of a forward pass for one image (2 per multiply-add); see `forward_macs` for the arguments."""
    return 2 * sum(forward_macs(config, image_size, task).values())


def training_flops(
    config: HfBaseConfig, images: float, image_size: int | tuple[int, int] | None = None, task: Door = "classification"
) -> float:
    """Count the FLOPs of a training: 6 per multiply-add, 2 for the forward and 4 for the backward pass.

    This reproduces the compute in arXiv 2010.11929, table 6.

    Args:
        config, image_size, task: see `forward_macs`.
        images: number of images in all epochs together.

    Raises:
        UserError: `images` is not above 0, or an error of `forward_macs`.
    """
    if not images > 0:
        raise UserError(f"the number of training images is {images:g}; give a number above 0")
    return 3.0 * forward_flops(config, image_size, task) * images


@functools.lru_cache
def _count(family: Family, config: str, size: tuple[int, int], task: Door) -> Macs:
    """Count the multiply-adds of a configuration given as JSON; the cache helps trainings, which count repeatedly."""
    auto_class: Any = getattr(transformers, AUTO_CLASSES[task])
    options = {"attn_implementation": "sdpa"} if family.is_vit else {}
    with torch.device("meta"), explain_load_errors(f"the configuration of '{family.model_type}'"):
        model = auto_class.from_config(family.config_class.from_dict(json.loads(config)), **options)
    model.eval().requires_grad_(False)  # the counter inspects gradient functions, which do not exist under `no_grad`
    pixel_values = torch.zeros(1, model.config.num_channels, *size, dtype=model.dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(pixel_values)
    macs = {name: sum(ops.values()) // 2 for name, ops in counter.get_flop_counts().items() if name != "Global"}
    # The MACs of a module include those of its children, which are subtracted from its part.
    parts = Counter[str]()
    for name, number in macs.items():
        parts[_find_part(name)] += number
        parent = name.rpartition(".")[0]
        while parent and parent not in macs:
            parent = parent.rpartition(".")[0]
        if parent:
            parts[_find_part(parent)] -= number
    return {part: parts[part] for part in _PARTS if parts[part]}  # torch counts nested modules in no fixed order


def _find_part(name: str) -> str:
    """Return the part of the model that a module belongs to."""
    return next(part for part, pattern in _PARTS.items() if re.search(pattern, name))
