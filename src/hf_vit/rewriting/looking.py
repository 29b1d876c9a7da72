"""The look at a whole model before any of it is rewritten: what a rewriting would lose is refused, in one line."""

import torch
from torch import nn

from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_axial_resnet import DenseNorm, HfAxialResNetAttention
from hf_vit.models.modeling_hf_mixer import HfMixerMLP
from hf_vit.models.modeling_hf_vit import (
    AttentionPooling,
    HfViTDropPath,
    HfViTLayer,
    HfViTLayerScale,
    HfViTMLP,
    HfViTSwiGLU,
)
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel
from hf_vit.rewriting.planning import REPLACEMENTS, replacement
from hf_vit.rewriting.transformer import FUSED_ATTENTIONS, FUSED_MLPS

# What becomes part of something else, by exact types: a forward pass calls these modules no more.
_Kinds = dict[str, type[nn.Module] | tuple[type[nn.Module], ...]]
_LINEARS: _Kinds = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), nn.Linear)
_PARTS: dict[type[nn.Module], _Kinds] = {
    HfViTLayer: {
        "attention": tuple(FUSED_ATTENTIONS),
        "mlp": tuple(FUSED_MLPS),
        "layer_scale1": HfViTLayerScale,
        "layer_scale2": HfViTLayerScale,
        "dropout": nn.Dropout,
        "drop_path": HfViTDropPath,
    },
    **dict.fromkeys(FUSED_ATTENTIONS, _LINEARS),
    HfViTMLP: {"fc1": nn.Linear, "fc2": nn.Linear, "dropout": nn.Dropout},
    HfViTSwiGLU: {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), nn.Linear), "dropout": nn.Dropout},
    AttentionPooling: {"attention": nn.ModuleDict, "mlp": HfViTMLP},
    nn.ModuleDict: _LINEARS,  # of the pooling's attention
    HfMixerMLP: {"fc1": nn.Linear, "fc2": nn.Linear},
    DenseNorm: {"dense": nn.Linear, "norm": nn.BatchNorm1d},
}
_WITH_BATCH_NORMS = (DenseNorm, HfAxialResNetAttention)
# Where a class comes from -> what to do first. No library is imported to know its classes.
_REMEDIES = {
    "peft.": "merge its adapters first: model = model.merge_and_unload()",
    "torch.nn.utils.parametrize": "first take that off by torch.nn.utils.parametrize.remove_parametrizations",
    "torch.ao.": "give the model before it is quantised",
    "torchao.": "give the model before it is quantised",
    "bitsandbytes.": "give the model before it is quantised",
    "torch._dynamo.": "give the model before it is compiled",
    "torch.jit.": "give the model before it is traced",
    "torch.nn.parallel.": "give the model inside it: model.module",
    "torch.distributed.": "give the model before it is distributed",
    "hf_vit.rewriting.": "it was rewritten before; load it again with from_pretrained",
    "transformers_modules.": "its classes are not the package's: import hf_vit, then load it without "
    "trust_remote_code, or import your own class from its file and load it with that",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AS_LOADED = "give the model as from_pretrained loads it"


def check_rewritable(model: object) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of a model of which rewriting would drop nothing.

    Types are compared exactly: a subclass may compute anything. What stays in its place (a head, say) may be anything.

    Raises:
        UserError: there is nothing to rewrite, or something that would be lost: an adapter, a hook, a parametrisation,
            a quantised, compiled or patched part; or weights of several dtypes or devices, or without values.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a {type(model).__name__} is no model; give one of hf_vit's")
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _check_origin(name, module)
    if not any(isinstance(module, HfPreTrainedModel) or type(module) in REPLACEMENTS for module in modules.values()):
        raise UserError(f"{type(model).__name__} is no model of hf_vit and holds none; there is nothing to rewrite")
    placement = _one_dtype_and_device(model)
    for name, module in modules.items():
        if type(module) in _WITH_BATCH_NORMS:
            _check_batch_norms(name, module)
        owner, _, place = name.rpartition(".")
        if replacement(modules[owner], place, module) is not None:
            for part_name, part in module.named_modules(prefix=name):
                _check_untouched(part_name, part)
        elif isinstance(module, tuple(REPLACEMENTS)):
            raise UserError(
                f"{_described(name, module)}, which may compute otherwise than its base class; {_AS_LOADED}"
            )
    return placement


def _check_batch_norms(name: str, module: nn.Module) -> None:
    """They become scales and shifts, which those of a batch are not known beforehand."""
    for part_name, part in module.named_children():
        if isinstance(part, nn.BatchNorm1d) and any(each is None for each in (part.running_mean, part.weight)):
            raise UserError(f"{name}.{part_name} is a batch norm without running statistics or weights; {_AS_LOADED}")


def _described(name: str, thing: object) -> str:
    kind = type(thing)
    return f"{name or 'the model'} is a {kind.__module__}.{kind.__qualname__}"


def _remedy(thing: object) -> str | None:
    origin = f"{type(thing).__module__}."
    return next((remedy for prefix, remedy in _REMEDIES.items() if origin.startswith(prefix)), None)


def _check_origin(name: str, module: nn.Module) -> None:
    remedy = _remedy(module)
    if remedy is not None:
        raise UserError(f"{_described(name, module)}; {remedy}")
    if module._compiled_call_impl is not None:
        raise UserError(f"{name or 'the model'} is compiled; {_REMEDIES['torch._dynamo.']}")


def _check_untouched(name: str, module: nn.Module) -> None:
    """The module's parts are torch's and the package's, and nobody listens to it or has changed what it does."""
    for part_name, kinds in _PARTS.get(type(module), {}).items():
        part, kinds = getattr(module, part_name, None), kinds if isinstance(kinds, tuple) else (kinds,)
        if part is not None and type(part) not in kinds:
            plain = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{_described(f'{name}.{part_name}', part)}, not the plain {plain}; {_AS_LOADED}")
    for kind in _HOOKS:
        # transformers records hidden states and attentions by hooks of its own; they move to the new part.
        if any(hook.__module__ != "transformers.utils.output_capturing" for hook in vars(module)[kind].values()):
            raise UserError(
                f"{name} has a hook, which would see nothing any more; remove it first, or put it elsewhere"
            )
    patched = [key for key in vars(module) if callable(getattr(type(module), key, None))]
    if patched:
        raise UserError(f"{name}.{patched[0]} was replaced on this one object (accelerate does so, too); {_AS_LOADED}")


def _one_dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        if type(tensor) not in (nn.Parameter, torch.Tensor):
            raise UserError(f"{_described(name, tensor)}, no plain tensor; {_remedy(tensor) or _AS_LOADED}")
        if tensor.is_meta:
            raise UserError(f"{name} is on the meta device, without values; load the model's weights first")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    devices = {tensor.device for tensor in tensors.values()}
    for kind, several in (("dtype", dtypes), ("device", devices)):
        if len(several) > 1:
            names = " and ".join(sorted(map(str, several)))
            raise UserError(
                f"the model's weights are of more than one {kind}, {names}; bring them to one by model.to(…)"
            )
    return dtypes.pop(), devices.pop()
