"""What a vision model makes of images before its head: pre-logits, and one vector an image at every depth.

Legend: B batch, C channels, H x W px, N tokens, D hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers import BatchFeature

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import class_token_index, patch_token_slice
from hf_vit.subjects.layers import watch_layers

PRE_LOGITS = "pre_logits"


def called(model: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> Any:
    """What a model says of a batch: of images of one size [B, C, H, W], or of mixed sizes (see `at_own_size`)."""
    return model(**pixel_values) if isinstance(pixel_values, BatchFeature) else model(pixel_values)


def pre_logits(model: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    """[B, D]: what the classification head sees; of a model without a head its pooled output.

    A model without a pooled output gives its class token, without one the mean of its patches.

    Args:
        model: of hf_vit, transformers or timm.
        pixel_values: [B, C, H, W] on the model's device, in the dtype of its weights; or a batch of mixed sizes.

    Raises:
        UserError: the model is of another library.
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
        return _pooled_output(model, called(encoder, pixel_values))
    return _input_of_head(model, encoder, pixel_values)


def _pooled_output(model: nn.Module, output: Any) -> torch.Tensor:
    pooled = getattr(output, "pooler_output", None)
    return pool(model, output.last_hidden_state) if pooled is None else pooled.flatten(1)


def _input_of_head(model: nn.Module, encoder: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    """What reaches the first module that runs after the encoder."""
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
    """[B, D] after every layer (see `layers_of`), in the order they run, and last the `pre_logits`.

    A layer that runs several times (shared weights) has an entry a run, the later ones numbered: "layers.0 (2)".

    Args:
        model: of hf_vit, transformers or timm.
        pixel_values: [B, C, H, W] on the model's device, in the dtype of its weights.
    """
    found: dict[str, torch.Tensor] = {}
    runs: dict[str, int] = {}
    num_patches = _num_patches(model, pixel_values)

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
    token = class_token(model)
    return features[:, _patches(model)].mean(dim=1) if token is None else features[:, token]


def class_token(model: nn.Module) -> int | None:
    """Index of the class token among the tokens; None for a model without one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "has_class_token"):
        return class_token_index(config) if config.has_class_token else None
    return 0 if any(name.rpartition(".")[2] == "cls_token" for name, _ in model.named_parameters()) else None


def _patches(model: nn.Module) -> slice:
    """Where the patches stand among the tokens of a model without a class token: after its registers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_special_tokens"):
        return patch_token_slice(config)
    return slice(getattr(model, "num_prefix_tokens", 0), None)  # timm's


def _num_patches(model: nn.Module, pixel_values: torch.Tensor) -> int | None:
    """Of an image of a batch, by timm's patch embeddings; None for other models."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is None:
        return None
    (down, across), (height, width) = as_pair(patch), pixel_values.shape[2:]
    return (height // down) * (width // across)


def is_channels_last(model: nn.Module) -> bool:
    """Whether the feature maps of a model are [B, H, W, C]."""
    if getattr(getattr(model, "config", None), "model_type", None) == "hf_axial_resnet":
        return True
    return str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")
