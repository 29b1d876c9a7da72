"""Check a whole model before it changes, and list the changes that make it fast.

A change that would lose something is refused; everything new is built before the first change is made.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_vit.errors import UserError, to_one_line
from hf_vit.inference.freezing import RECORDING, REMEDY, Guarded, add_base, guard_of
from hf_vit.inference.layers import (
    FUSED_ATTENTIONS,
    FUSED_MLPS,
    ChannelwiseGroupNorm,
    Dense,
    FusedLayer,
    FusedMLP,
    PatchProduct,
    StandardizedConv2d,
    fuse_pooling,
)
from hf_vit.models.embeddings_hf_vit import HfViTPatchEmbeddings
from hf_vit.models.modeling_hf_axial_resnet import DenseNorm, HfAxialResNetAttention
from hf_vit.models.modeling_hf_axial_vit import HfAxialViTStemEmbeddings
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTPatchEmbeddings
from hf_vit.models.modeling_hf_mixer import HfMixerMLP
from hf_vit.models.modeling_hf_vit import (
    AttentionPooling,
    HfViTBaseForImageClassification,
    HfViTBaseModel,
    HfViTDropPath,
    HfViTLayer,
    HfViTLayerScale,
    HfViTMLP,
    HfViTSwiGLU,
    HfViTTokenPooler,
)
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel
from hf_vit.models.resnet_hf_vit import StdConv2d

# How to build the replacement of a module, by its exact type; the replacement includes its submodules.
REPLACEMENTS: dict[type[nn.Module], Callable[[Any, torch.dtype], nn.Module]] = {
    HfViTLayer: FusedLayer.from_layer,
    AttentionPooling: fuse_pooling,
    HfMixerMLP: lambda mlp, dtype: FusedMLP(mlp, None, dtype),  # the block adds the residual
    StdConv2d: StandardizedConv2d.from_conv,
    DenseNorm: Dense.from_dense_norm,
}
# Modules whose `projection`, a convolution of torch, cuts patches.
_PATCH_EMBEDDINGS = (HfViTPatchEmbeddings, HfHybridViTPatchEmbeddings, HfAxialViTStemEmbeddings)
# Submodules that replacements merge, with the exact types allowed; a forward pass no longer calls these modules.
_Kinds = dict[str, tuple[type[nn.Module], ...]]
_LINEARS: _Kinds = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (nn.Linear,))
_PARTS: dict[type[nn.Module], _Kinds] = {
    HfViTLayer: {
        "attention": tuple(FUSED_ATTENTIONS),
        "mlp": tuple(FUSED_MLPS),
        **dict.fromkeys(("layer_scale1", "layer_scale2"), (HfViTLayerScale,)),
        "dropout": (nn.Dropout,),
        "drop_path": (HfViTDropPath,),
    },
    **dict.fromkeys(FUSED_ATTENTIONS, _LINEARS),
    HfViTMLP: {**dict.fromkeys(("fc1", "fc2"), (nn.Linear,)), "dropout": (nn.Dropout,)},
    HfViTSwiGLU: {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (nn.Linear,)), "dropout": (nn.Dropout,)},
    AttentionPooling: {"attention": (nn.ModuleDict,), "mlp": (HfViTMLP,)},
    nn.ModuleDict: _LINEARS,  # the attention of AttentionPooling
    HfMixerMLP: dict.fromkeys(("fc1", "fc2"), (nn.Linear,)),
    DenseNorm: {"dense": (nn.Linear,), "norm": (nn.BatchNorm1d,)},
}
# Prefix of a class's module -> what the user must do first; the libraries need not be imported for this.
_REMEDIES = {
    "peft.": "merge its adapters first: model = model.merge_and_unload()",
    "torch.nn.utils.parametrize": "remove it first with torch.nn.utils.parametrize.remove_parametrizations",
    **dict.fromkeys(("torch.ao.", "torchao.", "bitsandbytes."), "load the model without quantization"),
    "torch._dynamo.": "give the model as it was before torch.compile",
    "torch.jit.": "give the model as it was before it was traced",
    "torch.nn.parallel.": "give the model inside it: model.module",
    "torch.distributed.": "give the model as it was before it was distributed",
    "hf_vit.inference.": "it is already optimized; load the model again with from_pretrained",
    "transformers_modules.": "it comes from the checkpoint's remote code: import hf_vit and load the model without "
    "trust_remote_code, or import your own class from its file and load it with that",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AS_LOADED = "give the model as from_pretrained returns it"


def check_model(model: object) -> tuple[torch.dtype, torch.device]:
    """Check that a model can be optimized without losing anything; return its dtype and device.

    Types are compared exactly, as a subclass may compute anything. Modules that are not replaced, such as a head, may
    have any type.

    Raises:
        UserError: nothing can be optimized; or something would be lost: an adapter, hook, parametrization, or a
            quantized, compiled or patched module; or weights have several dtypes or devices, or no values.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a {type(model).__name__} is not a model; give a model that hf_vit loaded")
    modules = dict(model.named_modules())
    class_name = type(model).__name__
    if any(isinstance(module, Guarded) for module in modules.values()):
        raise UserError(f"the model is already optimized; use it as it is, or, to change it, {REMEDY}")
    try:
        add_base(type(model), base=guard_of(model))
    except Exception as error:  # code of a user's metaclass may raise anything
        raise UserError(
            f"{class_name} cannot be subclassed to guard it ({to_one_line(error)}); optimize the hf_vit model inside it"
        ) from error
    for name, module in modules.items():
        remedy = _find_remedy(module)
        if remedy is not None:
            raise UserError(f"{_describe(name, module)}; {remedy}")
        if module._compiled_call_impl is not None:
            raise UserError(f"{name or 'the model'} is compiled; {_REMEDIES['torch._dynamo.']}")
    if not any(isinstance(module, HfPreTrainedModel) or type(module) in REPLACEMENTS for module in modules.values()):
        raise UserError(
            f"{class_name} contains no model of hf_vit, so there is nothing to optimize; give a model that "
            "hf_vit loaded"
        )
    placement = _find_placement(model)
    for name, module in modules.items():
        if type(module) in (DenseNorm, HfAxialResNetAttention):  # their batch norms become scales and shifts
            _check_batch_norms(name, module)
        owner, _, child_name = name.rpartition(".")
        if find_replacement(modules[owner], child_name, module) is not None:
            for part_name, part in module.named_modules(prefix=name):
                _check_untouched(part_name, part)
        elif isinstance(module, tuple(REPLACEMENTS)):
            raise UserError(f"{_describe(name, module)}, which may differ from its base class; {_AS_LOADED}")
    return placement


def _check_batch_norms(name: str, module: nn.Module) -> None:
    """Raise a UserError for a batch norm in a module that lacks what becomes its scale and shift."""
    for part_name, part in module.named_children():
        if isinstance(part, nn.BatchNorm1d) and (part.running_mean is None or part.weight is None):  # pyright: ignore[reportUnnecessaryComparison]
            raise UserError(f"{name}.{part_name} is a batch norm without running statistics or weights; {_AS_LOADED}")


def _describe(name: str, module_or_tensor: object) -> str:
    """Return a clause that names a module or tensor and its class."""
    return f"{name or 'the model'} is a {type(module_or_tensor).__module__}.{type(module_or_tensor).__qualname__}"


def _find_remedy(module_or_tensor: object) -> str | None:
    """Return what the user must do first with a module or tensor of this class; None if it is a usual one."""
    origin = f"{type(module_or_tensor).__module__}."
    return next((remedy for prefix, remedy in _REMEDIES.items() if origin.startswith(prefix)), None)


def _check_untouched(name: str, module: nn.Module) -> None:
    """Raise a UserError for submodules of other types, for hooks, and for methods that were replaced on the object."""
    for part_name, kinds in _PARTS.get(type(module), {}).items():
        part = getattr(module, part_name, None)
        if part is not None and type(part) not in kinds:
            expected_types = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{_describe(f'{name}.{part_name}', part)}, not the plain {expected_types}; {_AS_LOADED}")
    # The replacement takes over transformers' own hooks, which record hidden states and attentions.
    if any(hook.__module__ != RECORDING for hooks in _HOOKS for hook in vars(module)[hooks].values()):
        raise UserError(
            f"{name} has a hook, which an optimized model would not call; remove it first, or put it on another module"
        )
    patched_names = [key for key in vars(module) if callable(getattr(type(module), key, None))]
    if patched_names:
        raise UserError(f"{name}.{patched_names[0]} was replaced on this object, perhaps by accelerate; {_AS_LOADED}")


def _find_placement(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device that all weights have."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        if type(tensor) not in (nn.Parameter, torch.Tensor):
            raise UserError(
                f"{_describe(name, tensor)}, but only plain torch tensors can be optimized; "
                f"{_find_remedy(tensor) or _AS_LOADED}"
            )
        if tensor.is_meta:
            raise UserError(
                f"the weight {name} has no values (it is on the meta device); load the model's weights with "
                "from_pretrained first"
            )
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    devices = {tensor.device for tensor in tensors.values()}
    for property_name, values in (("dtype", dtypes), ("device", devices)):
        if len(values) > 1:
            names = " and ".join(sorted(map(str, values)))
            raise UserError(
                f"the model's weights have more than one {property_name} ({names}); use the same for all, with "
                "model.to(…)"
            )
    return dtypes.pop(), devices.pop()


def has_custom_attention(config: Any) -> bool:
    """Return whether a custom function computes the attention, which may differ from the built-in ones."""
    name = config._attn_implementation
    return name not in ("eager", "sdpa", "flex_attention") and "flash" not in str(name)


def has_listeners(module: nn.Module) -> bool:
    """Return whether a hook, or a patched forward as accelerate's, reads or changes the module's inputs or outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(hook.__module__ != RECORDING for hook in hooks)


class Change(NamedTuple):
    """The assignment `owner.name = value`, of a submodule, an attribute or an object's class."""

    owner: nn.Module
    name: str
    value: Any


@dataclass
class Plan:
    """The changes that optimize a model; none is made until `carry_out`."""

    changes: list[Change] = field(default_factory=list)  # in the order to make them
    # The classifiers whose last layer computes only what the head reads.
    classifiers: list[HfViTBaseForImageClassification] = field(default_factory=list)

    def carry_out(self) -> None:
        """Make all changes on the model, and let its classifiers compute only what their heads read."""
        for owner, name, value in self.changes:
            setattr(owner, name, value)
        for classifier in self.classifiers:
            classifier.register_forward_pre_hook(_ask_only_for_head, with_kwargs=True)


@torch.no_grad()
def make_plan(model: nn.Module, dtype: torch.dtype, finish: Callable[[nn.Module], nn.Module] | None = None) -> Plan:
    """Build the replacements for a model that passed `check_model`, without changing the model.

    The replacements compute in `dtype`; inputs and outputs keep theirs. `finish` is called with every replacement once
    it is built, and returns the module to use in its place.
    """
    plan = Plan()
    replacements = dict[nn.Module, Any]()  # a module used twice gets one replacement
    for parent in _iterate_unreplaced(model):
        for name, child in parent._modules.items():
            if child is None:
                continue
            build = find_replacement(parent, name, child)
            if build is not None:
                if child not in replacements:
                    replacements[child] = build(child, dtype)
                    if finish is not None:
                        replacements[child] = finish(replacements[child])
                plan.changes.append(Change(parent, name, replacements[child]))
    for module in model.modules():
        if not isinstance(module, HfViTBaseForImageClassification):
            continue
        last_layer = replacements.get(module.vit.layers[-1])
        num_read = count_read_tokens(module)
        places = {(change.owner, change.name) for change in plan.changes if change.value is last_layer}
        if last_layer is not None and num_read is not None and len(places) == 1:  # another use may read all tokens
            last_layer.num_read = num_read
            plan.classifiers.append(module)
    return plan


def find_replacement(parent: nn.Module, name: str, child: nn.Module) -> Callable[[Any, torch.dtype], nn.Module] | None:
    """Return the function that builds a module's replacement, by its exact type and name; None if the module stays."""
    if name == "projection" and type(parent) in _PATCH_EMBEDDINGS and type(child) is nn.Conv2d:
        options = child.padding, child.dilation, child.groups  # patches must not overlap or have a margin
        return PatchProduct if child.stride == child.kernel_size and options == ((0, 0), (1, 1), 1) else None
    return REPLACEMENTS.get(type(child))


def _iterate_unreplaced(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a module and its descendants, without those that are replaced and their descendants."""
    yield module
    for child in module.children():
        if type(child) not in REPLACEMENTS:
            yield from _iterate_unreplaced(child)


def list_channelwise_norms(model: nn.Module) -> list[Change]:
    """Return the changes of class for GroupNorms of the package on CPUs, where channels come last in memory."""
    changes: list[Change] = []
    for module in model.modules():
        if type(module).__module__.startswith("hf_vit."):
            for child in module.children():
                if type(child) is nn.GroupNorm and child.weight.device.type == "cpu":
                    changes.append(Change(child, "__class__", ChannelwiseGroupNorm))
    return changes


def count_read_tokens(classifier: HfViTBaseForImageClassification) -> int | None:
    """Return how many tokens of the last layer the head reads; None if it may read all.

    Layers that share a block have no separate last one, and the bias of relative positions needs all tokens.
    """
    config, vit = classifier.config, classifier.vit
    if not (
        _is_plain(classifier, HfViTBaseForImageClassification, "_compute_head_outputs")
        and _is_plain(vit, HfViTBaseModel)
        and _is_plain(vit.pooler, HfViTTokenPooler, "pool")
    ):
        return None
    shares_layers = len(set(vit.layers)) < config.num_hidden_layers
    is_relative = config.position_embedding.startswith("relative")
    if shares_layers or config.pooling != "token" or config.is_causal or is_relative:
        return None
    num_read = config.num_special_tokens - config.num_register_tokens
    # OpenVINO 2026.4 computes wrong numbers for two queries of two heads, from the second layer on.
    return None if num_read == config.num_attention_heads == 2 else num_read


def _is_plain(module: nn.Module | None, expected_class: type[nn.Module], *methods: str) -> bool:
    """Return whether a module's forward, and these methods, are those of the package's class, so what they read."""
    if not isinstance(module, expected_class):
        return False
    functions = {name: getattr(getattr(module, name), "__func__", None) for name in ("forward", *methods)}
    return all(function is getattr(expected_class, name) for name, function in functions.items())


def _ask_only_for_head(
    classifier: HfViTBaseForImageClassification, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the last layer skip tokens that nothing reads, records or hooks (a forward pre-hook)."""
    config, vit = classifier.config, classifier.vit
    recordings = (kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions"))
    reads_token = _is_plain(vit.pooler, HfViTTokenPooler, "pool")
    if any(recordings) or config._attn_implementation not in ("eager", "sdpa") or not reads_token:
        return args, kwargs
    last_parts = [part for part in (vit.layers[-1], vit.layernorm, vit.pooler) if part is not None]
    readers = [vit, *(module for part in last_parts for module in part.modules())]
    if any(map(has_listeners, readers)):
        return args, kwargs
    return args, {**kwargs, "only_for_head": True}
