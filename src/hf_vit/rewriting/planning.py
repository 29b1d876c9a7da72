"""What stands for what, as a list of changes: all of it is built before anything is changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_vit.models.embeddings_hf_vit import HfViTPatchEmbeddings
from hf_vit.models.modeling_hf_axial_resnet import DenseNorm
from hf_vit.models.modeling_hf_axial_vit import HfAxialViTStemEmbeddings
from hf_vit.models.modeling_hf_hybrid_vit import HfHybridViTPatchEmbeddings
from hf_vit.models.modeling_hf_mixer import HfMixerMLP
from hf_vit.models.modeling_hf_vit import AttentionPooling, HfViTBaseForImageClassification, HfViTLayer
from hf_vit.models.resnet_hf_vit import StdConv2d
from hf_vit.rewriting.convolutions import ChannelwiseGroupNorm, StandardizedConv2d, dense_of_norm
from hf_vit.rewriting.heads import num_read_tokens, only_for_head
from hf_vit.rewriting.transformer import FusedLayer, PatchProduct, fused_mixer_mlp, fused_pooling

# By exact types; what stands for a module stands for its parts too.
REPLACEMENTS: dict[type[nn.Module], Callable[[Any, torch.dtype], nn.Module]] = {
    HfViTLayer: FusedLayer.of,
    AttentionPooling: fused_pooling,
    HfMixerMLP: fused_mixer_mlp,
    StdConv2d: StandardizedConv2d.of,
    DenseNorm: dense_of_norm,
}
# Their `projection`, a convolution of torch's, cuts patches.
_CUTTERS = (HfViTPatchEmbeddings, HfHybridViTPatchEmbeddings, HfAxialViTStemEmbeddings)


class Change(NamedTuple):
    """`owner.name = value`: a part, or an object's class."""

    owner: nn.Module
    name: str
    value: Any


@dataclass
class Plan:
    """What turns a model into its rewritten form; nothing of it has happened.

    Attributes:
        changes: in the order they are carried out.
        classifiers: whose last layer computes only what the head reads.
    """

    changes: list[Change] = field(default_factory=list)
    classifiers: list[HfViTBaseForImageClassification] = field(default_factory=list)

    def carry_out(self) -> None:
        for owner, name, value in self.changes:
            setattr(owner, name, value)
        for classifier in self.classifiers:
            classifier.register_forward_pre_hook(only_for_head, with_kwargs=True)


@torch.no_grad()
def plan_for(
    model: nn.Module, dtype: torch.dtype, finish: Callable[[nn.Module], nn.Module] = lambda module: module
) -> Plan:
    """The rewritten form of a model that `looking` has passed; the model stays as it is.

    Args:
        dtype: what rewritten products are computed in; inputs and outputs keep theirs.
        finish: is given every new part as soon as it is built, and gives what stands in its place.
    """
    plan, built = Plan(), dict[nn.Module, Any]()  # a part that stands in two places stays one part
    for parent in _kept_modules(model):
        for name, child in parent._modules.items():
            if child is not None and (build := replacement(parent, name, child)) is not None:
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


def channelwise_norms(model: nn.Module) -> list[Change]:
    """Another class for the GroupNorms of the package's parts on CPUs, where channels are last in memory."""
    ours = (part for part in model.modules() if type(part).__module__.startswith("hf_vit."))
    norms = (child for part in ours for child in part.children() if type(child) is nn.GroupNorm)
    return [Change(norm, "__class__", ChannelwiseGroupNorm) for norm in norms if norm.weight.device.type == "cpu"]


def replacement(parent: nn.Module, name: str, child: nn.Module) -> Callable[[Any, torch.dtype], nn.Module] | None:
    """What builds the rewritten form of a part, by its exact type and place; None where it stays."""
    if name == "projection" and type(parent) in _CUTTERS and type(child) is nn.Conv2d:
        others = child.padding, child.dilation, child.groups  # patches that overlap or have a margin are no product
        return PatchProduct if child.stride == child.kernel_size and others == ((0, 0), (1, 1), 1) else None
    return REPLACEMENTS.get(type(child))


def _kept_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all in it, down to what is replaced."""
    yield module
    for child in module.children():
        if type(child) not in REPLACEMENTS:
            yield from _kept_modules(child)
