"""What models of any library give: their layers, features before the head, class maps and objects.

Legend: B batch, C channels, H x W px, N tokens, D hidden size, n objects.
"""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature

from hf_vit.errors import UserError
from hf_vit.families import DenseTask
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.detection_hf_vit import HfMaskRCNNForObjectDetection, HfMaskRCNNOutput
from hf_vit.models.modeling_hf_vit import class_token_index, patch_token_slice

# Names of the modules whose outputs stand for the layers; the first line that finds more than one module counts.
LAYER_NAMES = (
    r"(\w+\.)*(stages|layers)\.\d+\.(blocks|layers)\.\d+",  # transformers' ResNet, Swin; timm's BiT, Swin
    r"layer\d\.\d+",  # timm's and torchvision's ResNets
    r"(resnet\.)?encoder\.stages\.\d+\.\d+",  # our ResNets
    r"(\w+\.)?embeddings|(\w+\.)*(layers?|blocks)\.\d+",  # vision transformers, MLP-Mixer
    r"\w+\.\d+|\w+",  # anything else: its upper modules
)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose outputs stand for a model's layers, by name, in the order they are defined."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in LAYER_NAMES:
        found = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
        if len(found) > 1:
            return found
    return modules


@contextmanager
def watch_layers(model: nn.Module, receive: Callable[[str, torch.Tensor], None]) -> Generator[None]:
    """Meanwhile `receive(name, features)` gets what every layer gives, in the order they run."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[object, ...], output: object) -> None:
            if (features := layer_tensor(output)) is not None:
                receive(name, features)

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in layers_of(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_tensor(output: object) -> torch.Tensor | None:
    """Return the tensor of a module's output: itself, the first of a tuple, the hidden states of an embedding."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "hidden_states", output)
    return output if isinstance(output, torch.Tensor) and output.ndim > 1 else None


PRE_LOGITS = "pre_logits"


def called(model: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> Any:
    """Return what a model says of a batch: of images of one size [B, C, H, W], or of mixed sizes (see
    `at_own_size`).
    """
    return model(**pixel_values) if isinstance(pixel_values, BatchFeature) else model(pixel_values)


def pre_logits(model: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    """Return [B, D]: what the classification head sees; of a model without a head its pooled output.

    A model without a pooled output gives its class token, without one the mean of its patches.
    """
    if hasattr(model, "forward_head") and hasattr(model, "forward_features"):
        timm_model: Any = model
        return timm_model.forward_head(timm_model.forward_features(pixel_values), pre_logits=True)
    if not hasattr(model, "base_model"):
        raise UserError(
            f"the features of a {type(model).__name__} cannot be read; needed: a model of hf_vit, transformers or timm "
            "(of a graph, the one that was exported)"
        )
    encoder: Any = model.base_model
    if encoder is model:
        output = called(encoder, pixel_values)
        pooled = getattr(output, "pooler_output", None)
        return pool(model, output.last_hidden_state) if pooled is None else pooled.flatten(1)

    # What reaches the first module that runs after the encoder.
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append(arguments[0])

    handles = [head.register_forward_pre_hook(keep) for head in model.children() if head is not encoder]
    try:
        called(model, pixel_values)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise UserError(f"{type(model).__name__} has no module after its encoder; give its encoder alone")
    return seen[0].mean(dim=1) if seen[0].ndim == 3 else seen[0].flatten(1)


def depth_features(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return [B, D] after every layer (see `layers_of`), in the order they run, and last the `pre_logits`.

    A layer that runs several times (shared weights) has an entry a run, the later ones numbered: "layers.0 (2)".
    """
    found: dict[str, torch.Tensor] = {}
    runs: dict[str, int] = {}
    patch, num_patches = getattr(getattr(model, "patch_embed", None), "patch_size", None), None
    if patch is not None:  # timm's
        (down, across), (height, width) = as_pair(patch), pixel_values.shape[2:]
        num_patches = (height // down) * (width // across)

    def keep(name: str, features: torch.Tensor) -> None:
        if features.ndim > 2 and len(features) == len(pixel_values):
            runs[name] = runs.get(name, 0) + 1
            found[name if runs[name] == 1 else f"{name} ({runs[name]})"] = pool(model, features, num_patches)

    with watch_layers(model, keep):
        last = pre_logits(model, pixel_values)
    return {**found, PRE_LOGITS: last}


def pool(model: nn.Module, features: torch.Tensor, num_patches: int | None = None) -> torch.Tensor:
    """One vector an image, [B, D]: the class token where the model has one, else the mean over patches or pixels.

    Where there are as many tokens as patches, the class token has not joined them yet, as in CaiT and XCiT: the mean.

    Args:
        model: tells where class token and patches stand, and in timm's case the order of a map's axes.
        features: [B, N, D] or a map, [B, C, H, W] ([B, H, W, C] of AxialResNets and of timm's "NHWC" models).
        num_patches: of an image, where that is known.
    """
    if features.ndim == 4:
        return features.mean(dim=(1, 2) if is_channels_last(model) else (2, 3))
    if features.shape[1] == num_patches:
        return features.mean(dim=1)
    if (token := class_token(model)) is not None:
        return features[:, token]
    config: Any = getattr(model, "config", None)  # the patches stand after the registers
    is_ours = hasattr(config, "num_special_tokens")
    patches = patch_token_slice(config) if is_ours else slice(getattr(model, "num_prefix_tokens", 0), None)
    return features[:, patches].mean(dim=1)


def class_token(model: nn.Module) -> int | None:
    """Return the index of the class token among the tokens; None for a model without one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "has_class_token"):
        return class_token_index(config) if config.has_class_token else None
    return 0 if any(name.rpartition(".")[2] == "cls_token" for name, _ in model.named_parameters()) else None


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the feature maps of a model are [B, H, W, C]."""
    if getattr(getattr(model, "config", None), "model_type", None) == "hf_axial_resnet":
        return True
    return str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")


# What the names of transformers' classes end in, and the Auto classes' behind "AutoModel".
TASKS: dict[str, DenseTask] = {
    "ForSemanticSegmentation": "segmentation",
    "ForUniversalSegmentation": "segmentation",
    "ForObjectDetection": "detection",
}


def dense_task_of(model: nn.Module) -> DenseTask | None:
    """Return what a model of transformers or of this package predicts for the places of an image; None: nothing."""
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)


@torch.no_grad()
def segment(
    model: nn.Module, processor: Any, pixel_values: torch.Tensor, sizes: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the class of every pixel, [H, W] for each image of `sizes` (height, width) px, by the processor's own
    rule.
    """
    return class_maps(model(pixel_values=pixel_values), processor, sizes)


def class_maps(outputs: Any, processor: Any, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the class maps from a model's outputs; see `segment`."""
    return processor.post_process_semantic_segmentation(outputs, target_sizes=[tuple(size) for size in sizes])


@torch.no_grad()
def detect(
    model: nn.Module,
    processor: Any,
    pixel_values: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    threshold: float = 0.0,
) -> list[dict[str, torch.Tensor]]:
    """Return the objects of each image of `sizes` (height, width) px, by the processor's own rule, or torchvision's.

    Scores must exceed `threshold`; Mask R-CNN has one of its own besides.

    Returns:
        boxes [n, 4] (x1, y1, x2, y2 in px of the image), labels [n] and scores [n], the best first; of a Mask R-CNN
        that has them, masks [n, H, W], bool.
    """
    targets = [(int(height), int(width)) for height, width in sizes]
    in_image = {"target_sizes": targets} if isinstance(model, HfMaskRCNNForObjectDetection) else {}
    return detections(model(pixel_values=pixel_values, **in_image), processor, targets, threshold)


def detections(
    outputs: Any, processor: Any, sizes: Sequence[tuple[int, int]], threshold: float = 0.0
) -> list[dict[str, torch.Tensor]]:
    """Return the detections from a model's outputs; see `detect`. Mask R-CNN's are in the sizes it was given."""
    if isinstance(outputs, HfMaskRCNNOutput):
        told = outputs.detections or []
        return [_sorted({name: value[each["scores"] > threshold] for name, value in each.items()}) for each in told]
    return list(map(_sorted, processor.post_process_object_detection(outputs, threshold, list(sizes))))


def _sorted(objects: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = objects["scores"].argsort(descending=True, stable=True)
    ordered = {name: value[order] for name, value in objects.items()}
    return ordered | ({"masks": ordered["masks"][:, 0] >= 0.5} if "masks" in ordered else {})
