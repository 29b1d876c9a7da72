"""The layers of any vision model, and what they give."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import nn

# Names of the modules whose outputs stand for the layers; the first line that finds more than one module counts.
LAYER_NAMES = (
    r"(\w+\.)*(stages|layers)\.\d+\.(blocks|layers)\.\d+",  # transformers' ResNet, Swin; timm's BiT, Swin
    r"layer\d\.\d+",  # timm's and torchvision's ResNets
    r"(resnet\.)?encoder\.stages\.\d+\.\d+",  # our ResNets
    r"(\w+\.)?embeddings|(\w+\.)*(layers?|blocks)\.\d+",  # vision transformers, MLP-Mixer
    r"\w+\.\d+|\w+",  # anything else: its upper modules
)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs stand for a model's layers, by name, in the order they are defined."""
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
    """The tensor of a module's output: itself, the first of a tuple, the hidden states of an embedding."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "hidden_states", output)
    return output if isinstance(output, torch.Tensor) and output.ndim > 1 else None
