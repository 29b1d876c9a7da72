"""Plan the memory that a training needs on each of many devices, from a training step on tensors without values."""

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
from hf_vit.families import find_family
from hf_vit.models.configuration_hf_vit import as_pair

_FLOAT32, _BFLOAT16 = 4, 2  # bytes per value
_ADAM = 2  # averages that AdamW keeps for each weight


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device with DDP, with FSDP2, and with FSDP2 and activation checkpointing.

    `checkpointed` is None for families without activation checkpointing.
    """

    devices: int
    replicated: int
    sharded: int
    checkpointed: int | None


@final
@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a training with AdamW; weights and optimizer state are in float32. Sizes are in bytes.

    Attributes:
        batch_size: images per device and step.
        states: weights, gradients and AdamW's two averages.
        activations: largest additional memory of a step if the device holds all weights.
        checkpointed: the same with activation checkpointing; None for families without it.
        rows: memory by number of devices.
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
    """Plan the memory of a training without creating weights.

    A forward and a backward pass run on fake tensors, and the memory of their results is counted. DDP also needs
    buckets with a copy of every gradient. FSDP2 needs, besides its share, two whole blocks (one computes, the next
    arrives), the gradient of one block, and all weights outside blocks. Images, libraries and unused memory of the
    allocator are not counted.

    Args:
        model: a variant such as "L/16", or the folder of a saved model.
        image_size: (height, width) px; by default the model's.
        batch_size: images per device and step.
        precision: fp32, or bf16 with autocast (FSDP2 gathers weights in bfloat16).
        devices: largest number of devices; the plan covers 1, 2, 4, ... up to it.

    Raises:
        UserError: an argument is out of range, or the model is not a classifier of hf_vit.
    """
    for name, value in {"--batch-size": batch_size, "--devices": devices}.items():
        if value < 1:
            raise UserError(f"{name} {value} is too small; give at least 1")
    if precision not in ("fp32", "bf16"):
        raise UserError(f"--precision {precision} is unknown; use fp32 or bf16")
    config, _ = find_config(model)
    forward_macs(config, image_size)  # raises for models without a classifier, and for image sizes that do not fit
    family: Any = find_family(config.model_type)
    size = as_pair(config.image_size if image_size is None else image_size)
    model_class = family.classes["classification"]
    in_bfloat16 = precision == "bf16"
    step = model_class, config, (batch_size, config.num_channels, *size), in_bfloat16
    peak, image_bytes = _measure_parts(*step, checkpointing=False)
    supports_checkpointing = model_class.supports_gradient_checkpointing
    checkpointed_peak = checkpointed_bytes = 0
    if supports_checkpointing:
        checkpointed_peak, checkpointed_bytes = _measure_parts(*step, checkpointing=True)
    with torch.device("meta"), no_init_weights():
        full_model = model_class(config)
    parameters = _count_parameters(full_model)
    blocks = [_count_parameters(module) for module in full_model.modules() if isinstance(module, family.blocks)]
    states = parameters * _FLOAT32 * (2 + _ADAM)  # a weight, its gradient and AdamW's averages
    # With FSDP2: two whole blocks and the gradient of one, and the weights outside blocks.
    gathered_bytes = (3 * max(blocks) + parameters - sum(blocks)) * (_BFLOAT16 if in_bfloat16 else _FLOAT32)

    def plan_devices(count: int) -> DeviceMemory:
        """Return the memory of each of this many devices."""
        if count == 1:
            replicated = sharded = states + peak
            checkpointed = states + checkpointed_peak
        else:
            replicated = states + parameters * _FLOAT32 + peak  # with DDP's buckets
            shard = -(-states // count) + gathered_bytes
            sharded, checkpointed = shard + image_bytes, shard + checkpointed_bytes
        return DeviceMemory(count, replicated, sharded, checkpointed if supports_checkpointing else None)

    counts = sorted({2**power for power in range(devices.bit_length())} | {devices})  # 1, 2, 4, ... and the last
    return MemoryPlan(
        model=str(model),
        image_size=size,
        batch_size=batch_size,
        precision=precision,
        parameters=parameters,
        states=states,
        activations=peak,
        checkpointed=checkpointed_peak if supports_checkpointing else None,
        rows=tuple(map(plan_devices, counts)),
    )


def _count_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _measure_parts(
    model_class: Any, config: Any, shape: tuple[int, ...], in_bfloat16: bool, checkpointing: bool
) -> tuple[int, int]:
    """Return the peak bytes of a step beyond weights and gradients, and the part of them that FSDP2 also holds.

    FSDP2 holds the part that grows with the images; the rest are autocast's copies of weights, which FSDP2 gathers
    in bfloat16.
    """
    peak = measure_step(model_class, config, shape, in_bfloat16, checkpointing)
    peak_of_double = measure_step(model_class, config, (2 * shape[0], *shape[1:]), in_bfloat16, checkpointing)
    return peak, min(peak, peak_of_double - peak)


def measure_step(
    model_class: Any, config: Any, shape: tuple[int, ...], in_bfloat16: bool, checkpointing: bool = False
) -> int:
    """Return the peak bytes of a training step with fake weights, beyond weights and gradients."""
    with FakeTensorMode():
        with no_init_weights():
            model = model_class(config).train()
        if checkpointing:
            # transformers below 5.23 has the old name only.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        for parameter in model.parameters():  # gradients are counted separately, so each is freed at once
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        images = torch.empty(shape)
        with _PeakMemory(model) as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
                logits = model(images).logits
            logits.float().logsumexp(1).sum().backward()
    return memory.peak


class _PeakMemory(TorchDispatchMode):
    """Tracks the current and the peak bytes of all tensors that operators create, except the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._model_storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._known_ids = set(map(id, self._model_storages))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add the storages of its results."""
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
            if storage is not None and id(storage) not in self._known_ids:
                self._known_ids.add(id(storage))
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._release, id(storage), storage.nbytes())
        return results

    def _release(self, storage_id: int, size: int) -> None:
        """Subtract a storage that was freed."""
        self._known_ids.discard(storage_id)
        self.current -= size
