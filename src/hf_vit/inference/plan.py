"""The one look at a whole model before any of it changes, and the list of changes that make it fast.

What a change would lose is refused in one line; everything new is built before anything is carried out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_vit.errors import UserError, one_line
from hf_vit.inference.freezing import RECORDING, REMEDY, Guarded, guard_of, precede
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

# By exact types; what stands for a module stands for its parts too.
REPLACEMENTS: dict[type[nn.Module], Callable[[Any, torch.dtype], nn.Module]] = {
    HfViTLayer: FusedLayer.of,
    AttentionPooling: fuse_pooling,
    HfMixerMLP: lambda mlp, dtype: FusedMLP(mlp, None, dtype),  # a block's, which adds no residual itself
    StdConv2d: StandardizedConv2d.of,
    DenseNorm: Dense.of_normed,
}
# Their `projection`, a convolution of torch's, cuts patches.
_CUTTERS = (HfViTPatchEmbeddings, HfHybridViTPatchEmbeddings, HfAxialViTStemEmbeddings)
# What becomes part of something else, by exact types: a forward pass calls these modules no more.
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
    nn.ModuleDict: _LINEARS,  # of the pooling's attention
    HfMixerMLP: dict.fromkeys(("fc1", "fc2"), (nn.Linear,)),
    DenseNorm: {"dense": (nn.Linear,), "norm": (nn.BatchNorm1d,)},
}
# Where a class comes from -> what to do first. No library is imported to know its classes.
_REMEDIES = {
    "peft.": "merge its adapters first: model = model.merge_and_unload()",
    "torch.nn.utils.parametrize": "first take that off by torch.nn.utils.parametrize.remove_parametrizations",
    **dict.fromkeys(("torch.ao.", "torchao.", "bitsandbytes."), "give the model before it is quantized"),
    "torch._dynamo.": "give the model before it is compiled",
    "torch.jit.": "give the model before it is traced",
    "torch.nn.parallel.": "give the model inside it: model.module",
    "torch.distributed.": "give the model before it is distributed",
    "hf_vit.inference.": "it was rewritten before; load it again with from_pretrained",
    "transformers_modules.": "its classes are not the package's: import hf_vit, then load it without "
    "trust_remote_code, or import your own class from its file and load it with that",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AS_LOADED = "give the model as from_pretrained loads it"


def check_model(model: object) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of a model that can be optimized without losing anything.

    Types are compared exactly: a subclass may compute anything. What stays in its place (a head, say) may be anything.
    A UserError where there is nothing to rewrite, or something would be lost: an adapter, a hook, a parametrization, a
    quantized, compiled or patched part; or where weights have several dtypes or devices, or no values.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a {type(model).__name__} is not a model; give one of hf_vit's")
    modules, kind = dict(model.named_modules()), type(model).__name__
    if any(isinstance(module, Guarded) for module in modules.values()):
        raise UserError(f"the model is already optimized; use it as it is, or {REMEDY}")
    try:
        precede(type(model), by=guard_of(model))
    except Exception as error:  # whatever making a subclass of a user's class does
        raise UserError(f"nothing can guard a {kind} ({one_line(error)}); optimize the model in it") from error
    for name, module in modules.items():
        if (remedy := _remedy_for(module)) is not None:
            raise UserError(f"{_describe(name, module)}; {remedy}")
        if module._compiled_call_impl is not None:
            raise UserError(f"{name or 'the model'} is compiled; {_REMEDIES['torch._dynamo.']}")
    if not any(isinstance(module, HfPreTrainedModel) or type(module) in REPLACEMENTS for module in modules.values()):
        raise UserError(f"{kind} is not a model of hf_vit and contains none; there is nothing to optimize")
    placement = _find_placement(model)
    for name, module in modules.items():
        if type(module) in (DenseNorm, HfAxialResNetAttention):  # their batch norms become scales and shifts
            for part_name, part in module.named_children():
                if isinstance(part, nn.BatchNorm1d) and any(each is None for each in (part.running_mean, part.weight)):
                    flaw = "is a batch norm without running statistics or weights"
                    raise UserError(f"{name}.{part_name} {flaw}; {_AS_LOADED}")
        owner, _, place = name.rpartition(".")
        if find_replacement(modules[owner], place, module) is not None:
            for part_name, part in module.named_modules(prefix=name):
                _check_untouched(part_name, part)
        elif isinstance(module, tuple(REPLACEMENTS)):
            risk = "which may differ from its base class"
            raise UserError(f"{_describe(name, module)}, {risk}; {_AS_LOADED}")
    return placement


def _describe(name: str, thing: object) -> str:
    return f"{name or 'the model'} is a {type(thing).__module__}.{type(thing).__qualname__}"


def _remedy_for(thing: object) -> str | None:
    origin = f"{type(thing).__module__}."
    return next((remedy for prefix, remedy in _REMEDIES.items() if origin.startswith(prefix)), None)


def _check_untouched(name: str, module: nn.Module) -> None:
    """Refuse parts that are not torch's or the package's, hooks, and methods that were replaced."""
    for part_name, kinds in _PARTS.get(type(module), {}).items():
        part = getattr(module, part_name, None)
        if part is not None and type(part) not in kinds:
            plain = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{_describe(f'{name}.{part_name}', part)}, not the plain {plain}; {_AS_LOADED}")
    # transformers records hidden states and attentions by hooks of its own; they move to the new part.
    if any(hook.__module__ != RECORDING for kind in _HOOKS for hook in vars(module)[kind].values()):
        raise UserError(
            f"{name} has a hook, which would no longer be called; remove it first, or put it on another module"
        )
    patched = [key for key in vars(module) if callable(getattr(type(module), key, None))]
    if patched:
        raise UserError(f"{name}.{patched[0]} was replaced on this object (accelerate does this, too); {_AS_LOADED}")


def _find_placement(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the one dtype and device of all weights."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        if type(tensor) not in (nn.Parameter, torch.Tensor):
            raise UserError(f"{_describe(name, tensor)}, no plain tensor; {_remedy_for(tensor) or _AS_LOADED}")
        if tensor.is_meta:
            raise UserError(f"{name} is on the meta device, without values; load the model's weights first")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    devices = {tensor.device for tensor in tensors.values()}
    for kind, several in (("dtype", dtypes), ("device", devices)):
        if len(several) > 1:
            names = " and ".join(sorted(map(str, several)))
            raise UserError(f"the model's weights have more than one {kind}: {names}; use one, with model.to(…)")
    return dtypes.pop(), devices.pop()


def attends_otherwise(config: Any) -> bool:
    """Return whether a function computes the attention that is not known to give what all others do."""
    name = config._attn_implementation
    return name not in ("eager", "sdpa", "flex_attention") and "flash" not in str(name)


def has_listeners(module: nn.Module) -> bool:
    """Return whether somebody hears or changes what goes in or comes out, by a hook or as accelerate does it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(hook.__module__ != RECORDING for hook in hooks)


class Change(NamedTuple):
    """`owner.name = value`: a part, or an object's class."""

    owner: nn.Module
    name: str
    value: Any


@dataclass
class Plan:
    """What turns a model into its rewritten form; nothing of it has happened."""

    changes: list[Change] = field(default_factory=list)  # in order
    # Those whose last layer computes only what the head reads.
    classifiers: list[HfViTBaseForImageClassification] = field(default_factory=list)

    def carry_out(self) -> None:
        for owner, name, value in self.changes:
            setattr(owner, name, value)
        for classifier in self.classifiers:
            classifier.register_forward_pre_hook(_ask_only_for_head, with_kwargs=True)


def as_built(part: nn.Module) -> nn.Module:
    return part


@torch.no_grad()
def make_plan(model: nn.Module, dtype: torch.dtype, finish: Callable[[nn.Module], nn.Module] = as_built) -> Plan:
    """Build the rewritten form of a model that `check_model` has passed; the model stays as it is.

    Args:
        dtype: what rewritten products are computed in; inputs and outputs keep theirs.
        finish: is given every new part as soon as it is built, and returns what stands in its place.
    """
    plan, built = Plan(), dict[nn.Module, Any]()  # a part that stands in two places stays one part
    for parent in _kept_modules(model):
        for name, child in parent._modules.items():
            if child is not None and (build := find_replacement(parent, name, child)) is not None:
                if child not in built:
                    built[child] = finish(build(child, dtype))
                plan.changes.append(Change(parent, name, built[child]))
    for module in model.modules():
        if isinstance(module, HfViTBaseForImageClassification):
            last, num_read = built.get(module.vit.layers[-1]), num_read_tokens(module)
            places = {(change.owner, change.name) for change in plan.changes if change.value is last}
            if last is not None and num_read is not None and len(places) == 1:  # elsewhere all of it may be read
                last.num_read = num_read
                plan.classifiers.append(module)
    return plan


def find_replacement(parent: nn.Module, name: str, child: nn.Module) -> Callable[[Any, torch.dtype], nn.Module] | None:
    """Return what builds the rewritten form of a part, by its exact type and place; None where it stays."""
    if name == "projection" and type(parent) in _CUTTERS and type(child) is nn.Conv2d:
        others = child.padding, child.dilation, child.groups  # patches that overlap or have a margin are no product
        return PatchProduct if child.stride == child.kernel_size and others == ((0, 0), (1, 1), 1) else None
    return REPLACEMENTS.get(type(child))


def _kept_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the module and all in it, down to what is replaced."""
    yield module
    for child in module.children():
        if type(child) not in REPLACEMENTS:
            yield from _kept_modules(child)


def channelwise_norms(model: nn.Module) -> list[Change]:
    """Return another class for the GroupNorms of the package's parts on CPUs, where channels are last in memory."""
    ours = (part for part in model.modules() if type(part).__module__.startswith("hf_vit."))
    norms = (child for part in ours for child in part.children() if type(child) is nn.GroupNorm)
    return [Change(norm, "__class__", ChannelwiseGroupNorm) for norm in norms if norm.weight.device.type == "cpu"]


def num_read_tokens(classifier: HfViTBaseForImageClassification) -> int | None:
    """Return how many tokens of the last layer the head reads; None where it may read all.

    Layers that share a block have no last one, and a bias of relative positions is that of all tokens.
    """
    config, vit = classifier.config, classifier.vit
    plain = _is_plain(classifier, HfViTBaseForImageClassification, "_head_outputs") and _is_plain(vit, HfViTBaseModel)
    if not (plain and _is_plain(vit.pooler, HfViTTokenPooler, "pool")):
        return None
    shared = len(set(vit.layers)) < config.num_hidden_layers
    if shared or config.pooling != "token" or config.is_causal or config.position_embedding.startswith("relative"):
        return None
    return config.num_special_tokens - config.num_register_tokens


def _is_plain(part: nn.Module | None, kind: type[nn.Module], *methods: str) -> bool:
    """Return whether its forward and other methods are those of a class of the package; others may read anything."""
    return isinstance(part, kind) and all(
        getattr(getattr(part, name), "__func__", None) is getattr(kind, name) for name in ("forward", *methods)
    )


def _ask_only_for_head(
    classifier: HfViTBaseForImageClassification, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let the last layer leave out what nobody reads, records or listens to (a forward pre-hook)."""
    config, vit = classifier.config, classifier.vit
    recorded = (kwargs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions"))
    reads_token = _is_plain(vit.pooler, HfViTTokenPooler, "pool")
    if any(recorded) or config._attn_implementation not in ("eager", "sdpa") or not reads_token:
        return args, kwargs
    ends = [end for end in (vit.layers[-1], vit.layernorm, vit.pooler) if end is not None]
    if has_listeners(vit) or any(has_listeners(part) for end in ends for part in end.modules()):
        return args, kwargs
    return args, {**kwargs, "only_for_head": True}
