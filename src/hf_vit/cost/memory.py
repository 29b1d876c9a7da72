"""What a training holds in memory on each of many devices: planned from a step on tensors without values."""

import os
import weakref
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

from hf_vit.conversion.loading import find_config
from hf_vit.cost.flops import forward_macs
from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.models.configuration_hf_vit import as_pair

_FLOAT32, _BFLOAT16 = 4, 2
_ADAM = 2  # numbers a weight


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device: DDP; FSDP2 by blocks; the same with activation checkpointing (None of a family without)."""

    devices: int
    replicated: int
    sharded: int
    checkpointed: int | None


@final
@dataclass(frozen=True)
class MemoryPlan:
    """A training with AdamW, weights and its state in float32; images on a device at once, bytes, rows by devices.

    `states` are weights, gradients and AdamW's averages, `activations` what a step holds at most beyond them with all
    weights on the device, `checkpointed` the same with activation checkpointing (None of a family without).
    """

    model: str
    image_size: tuple[int, int]
    batch_size: int
    precision: str
    parameters: int
    states: int
    activations: int
    checkpointed: int | None
    rows: tuple[DeviceMemory, ...]


def memory_plan(
    model: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    batch_size: int = 1,
    precision: str = "fp32",
    devices: int = 64,
) -> MemoryPlan:
    """Plan the memory of a training; no weight is made, whatever the model's size.

    A forward and a backward pass run on fake tensors, and what operators make of them is counted. Beside DDP's weights
    and state stand its buckets, which hold every gradient once more; beside FSDP2's share of them two blocks that are
    whole (one computes, the next arrives), the gradient of one, and what is in no block. Images, libraries and what the
    allocator leaves unused are not counted.

    Args:
        model: a variant such as "L/16", or the folder of a saved model.
        image_size: (height, width) px; by default the model's own.
        batch_size: images on a device at once.
        precision: fp32, or bf16 as trainings have it (autocast; FSDP2 gathers weights in bfloat16).
        devices: plan for 1, 2, 4, … devices, up to this number.

    Raises:
        UserError: bad input, or a model that is no classifier of a family of hf_vit.
    """
    for name, value in {"--batch-size": batch_size, "--devices": devices}.items():
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    if precision not in ("fp32", "bf16"):
        raise UserError(f"precision '{precision}' has no plan; choose fp32 or bf16")
    config, _ = find_config(model)
    forward_macs(config, image_size)  # refuses what has no classifier, and images that do not fit
    family: Any = family_of(config.model_type)
    size = as_pair(config.image_size if image_size is None else image_size)
    model_class, in_bfloat16 = family.classes["classification"], precision == "bf16"

    def hold(checkpointing: bool) -> tuple[int, int]:
        """Return the bytes that a step holds at most beyond weights and gradients, and what of them FSDP2 holds.

        That is what grows with the images; the rest are autocast's copies of weights, which arrive in bfloat16 there.
        """
        shapes = ((images, config.num_channels, *size) for images in (batch_size, 2 * batch_size))
        most, of_twice = (_peak(model_class, config, shape, in_bfloat16, checkpointing) for shape in shapes)
        return most, min(most, of_twice - most)

    most, of_images = hold(checkpointing=False)
    least = hold(checkpointing=True) if model_class.supports_gradient_checkpointing else None
    with torch.device("meta"), no_init_weights():
        whole = model_class(config)
    parameters, *blocks = (
        sum(parameter.numel() for parameter in part.parameters())
        for part in (whole, *(each for each in whole.modules() if isinstance(each, family.blocks)))
    )
    states = parameters * _FLOAT32 * (2 + _ADAM)
    gathered = (3 * max(blocks) + parameters - sum(blocks)) * (_BFLOAT16 if in_bfloat16 else _FLOAT32)

    def on(count: int) -> DeviceMemory:
        if count == 1:
            return DeviceMemory(1, states + most, states + most, least and states + least[0])
        share = -(-states // count) + gathered
        buckets = parameters * _FLOAT32
        return DeviceMemory(count, states + buckets + most, share + of_images, least and share + least[1])

    counts = sorted({2**power for power in range(devices.bit_length())} | {devices})
    return MemoryPlan(
        model=str(model),
        image_size=size,
        batch_size=batch_size,
        precision=precision,
        parameters=parameters,
        states=states,
        activations=most,
        checkpointed=least and least[0],
        rows=tuple(map(on, counts)),
    )


def _peak(model_class: Any, config: Any, shape: tuple[int, ...], in_bfloat16: bool, checkpointing: bool) -> int:
    """Return the bytes that a training step of fake weights holds at most beyond them and their gradients."""
    with FakeTensorMode():
        with no_init_weights():
            model = model_class(config).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        for parameter in model.parameters():  # gradients are counted apart
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        images = torch.empty(shape)
        with _Held(model) as held:
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
                logits = model(images).logits
            logits.float().logsumexp(1).sum().backward()
    return held.most


class _Held(TorchDispatchMode):
    """Bytes of what operators made and is still there, and the most there was; a model's own are left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._own = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._known = set(map(id, self._own))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and id(storage := result.untyped_storage()) not in self._known:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return results

    def _forget(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size
