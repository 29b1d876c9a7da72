"""FLOPs of a configuration, counted by torch while the model computes on the meta device: no weights, no arithmetic.

torch's `FlopCounterMode` counts matrix products and convolutions, a multiply-add (MAC) as 2; norms, activations,
softmax and the resampling of position tables are left out. Causal attention counts in full, as most kernels compute it.
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

from hf_vit.errors import UserError, first_line
from hf_vit.families import AUTO_CLASSES, FAMILIES, Door, Family, family_of
from hf_vit.models.configuration_hf_vit import HfBaseConfig, as_pair
from hf_vit.repositories.reading import loading

Macs = dict[str, int]

# Part of a model -> what the names of its modules hold; the first that does. What no name tells is a ResNet's body.
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
    """Count the multiply-adds of one image's forward pass in evaluation, by part of the model.

    Args:
        config: of any family of the package.
        image_size: px, int or (height, width); by default the configuration's own.
        task: which class: with classifier, bare, with the head that predicts all patches, or as a backbone.

    Raises:
        UserError: a configuration of another package, a task that its family does not have, or an image that does not
            fit the patch.
    """
    family = family_of(getattr(config, "model_type", None))
    if family is None:
        raise UserError(
            f"the FLOPs of a '{getattr(config, 'model_type', 'unknown')}' model are not counted here; give a "
            f"configuration of {', '.join(family.model_type for family in FAMILIES.values())}"
        )
    if task in family.not_applicable:
        raise UserError(family.why_not(task))
    size = as_pair(config.image_size if image_size is None else image_size)
    try:
        config.grid_of(*size)
        return dict(_count(family, config.to_json_string(use_diff=False), size, task))
    except (StrictDataclassError, ValueError) as error:
        raise UserError(first_line(error)) from error


def forward_flops(
    config: HfBaseConfig, image_size: int | tuple[int, int] | None = None, task: Door = "classification"
) -> int:
    """Count the FLOPs of one image's forward pass, 2 a multiply-add; the arguments are those of `forward_macs`."""
    return 2 * sum(forward_macs(config, image_size, task).values())


def training_flops(
    config: HfBaseConfig, images: float, image_size: int | tuple[int, int] | None = None, task: Door = "classification"
) -> float:
    """Count the FLOPs of a training that sees so many images, every epoch's counted: 6 a multiply-add.

    2 forward, and 4 backward: for the gradients of inputs and of weights. This reproduces the compute of
    arXiv 2010.11929, table 6.
    """
    if not images > 0:
        raise UserError(f"a training on {images:g} images has no cost; give a number of images above 0")
    return 3.0 * forward_flops(config, image_size, task) * images


@functools.lru_cache
def _count(family: Family, config: str, size: tuple[int, int], task: Door) -> Macs:
    """Count for a configuration as JSON; the cost of a training asks for the same count again and again."""
    auto_class: Any = getattr(transformers, AUTO_CLASSES[task])
    how = {"attn_implementation": "sdpa"} if family.is_vit else {}
    with torch.device("meta"), loading(f"the configuration of '{family.model_type}'"):
        model = auto_class.from_config(family.config_class.from_dict(json.loads(config)), **how)
    model.eval().requires_grad_(False)  # the counter looks for gradient functions, which `no_grad` leaves out
    pixel_values = torch.zeros(1, model.config.num_channels, *size, dtype=model.dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(pixel_values)
    macs = {name: sum(ops.values()) // 2 for name, ops in counter.get_flop_counts().items() if name != "Global"}
    parts = Counter[str]()  # a module's MACs include those of the modules inside it
    for name, number in macs.items():
        part, around = _part_of(name), name.rpartition(".")[0]
        while around and around not in macs:
            around = around.rpartition(".")[0]
        parts[part] += number
        if around:
            parts[_part_of(around)] -= number
    return {part: number for part, number in parts.items() if number}


def _part_of(name: str) -> str:
    return next(part for part, pattern in _PARTS.items() if re.search(pattern, name))
