"""Bare models and classifiers whose passes an engine computes: what is made a graph, and when the graph answers.

Legend: B batch, C channels, H x W px.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules
from transformers.utils.generic import can_return_tuple

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Graph, Runtime
from hf_vit.conversion.targets.graphs.tracing import onnx_of_batches
from hf_vit.environment import has_avx2_alone
from hf_vit.errors import UserError, one_line
from hf_vit.families import FAMILIES
from hf_vit.inference.freezing import precede
from hf_vit.inference.layers import Dense, FusedAttention
from hf_vit.inference.plan import (
    Change,
    Plan,
    attends_otherwise,
    channelwise_norms,
    has_listeners,
    make_plan,
    num_read_tokens,
)
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel, classifier_loss

ENGINES: dict[str, Runtime] = {name: RUNTIMES[name] for name in ("openvino", "onnxruntime")}
_Placement = tuple[torch.dtype, torch.device]
_KINDS: frozenset[type[nn.Module]] = frozenset(family.classes["model"] for family in FAMILIES.values())
_CLASSIFIERS = frozenset(family.classes["classification"] for family in FAMILIES.values())
# They ask their bare model for what no graph gives: maps of all depths, masked patches.
_HEADS = ("backbone", "masked_prediction")
_ASK_FOR_MORE = tuple(each.classes[head] for each in FAMILIES.values() for head in _HEADS if head in each.classes)
_LARGEST = 2.0**20  # of what a graph is given: what overflows on the way comes out of engines as numbers, not as NaN
_OF_NO_EFFECT = ("return_dict", "interpolate_pos_encoding", "only_for_head")  # the last decides which graph it is


class Outputs(NamedTuple):
    """The class that a graph's outputs of these names are put into."""

    kind: type[Any]
    names: tuple[str, ...]


class EngineEncoder(HfPreTrainedModel):
    """Goes before the class of a bare model; what its graph cannot answer, torch does, as it would have without."""

    graph: Graph
    outputs: Outputs  # those of the graph that are this model's
    is_cut: bool  # the graph computes what the classifier's head reads, and no more

    @functools.cached_property
    def hook_tables(self) -> list[Mapping[int, Any]]:
        """Return where hooks on parts would be; a pass asks for them first, when all parts are in place."""
        parts = [part for part in self.modules() if part is not self]
        return [table for part in parts for table in (part._forward_hooks, part._forward_pre_hooks)]

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        answers = self.answer(self.outputs.names, pixel_values, patch_attention_mask, kwargs)
        if answers is not None:
            return self.outputs.kind(**answers)
        return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)

    def answer(
        self,
        names: Sequence[str],
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> dict[str, torch.Tensor] | None:
        """Return the graph's outputs of these names; None where torch has to compute the pass."""
        if patch_attention_mask is None and self._is_plain(options) and self._takes(pixel_values):
            images = pixel_values.detach().to(self.dtype).contiguous()
            if _are_usual(images):
                return self.graph.run(images, names)
        return None

    def _is_plain(self, options: Mapping[str, Any]) -> bool:
        """Return whether nothing is asked for, or listened to, but the outputs of the graph."""
        config = self.config
        requests = [value for name, value in options.items() if name not in _OF_NO_EFFECT]
        return (
            bool(options.get("only_for_head")) == self.is_cut
            and options.get("return_dict", config.return_dict)
            and all(value is None or value is False for value in requests)
            and not (config.output_hidden_states or config.output_attentions or modules._has_any_global_hook())
            and not attends_otherwise(config)
            and not (any(self.hook_tables) and any(has_listeners(each) for each in self.modules() if each is not self))
        )

    def _takes(self, values: Any) -> bool:
        """Return whether they are a batch of what the graph takes, and nothing is asked for but the result."""
        shape = (self.config.num_channels, *as_pair(self.config.image_size))
        if type(values) is not torch.Tensor or tuple(values.shape[1:]) != shape or not values.is_floating_point():
            return False
        return (
            len(values) > 0
            and values.device.type == "cpu"
            and not values.is_neg()  # of which NumPy makes nothing
            and not (values.requires_grad and torch.is_grad_enabled())
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._functorch.is_functorch_wrapped_tensor(values)  # pyright: ignore[reportAttributeAccessIssue]
            and not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]
        )


class EngineClassifier(HfPreTrainedModel):
    """Goes before the class of a classifier, whose encoder's graph has the logits too: a pass is one call of it."""

    outputs: Outputs
    parts: tuple[nn.Module, ...]  # that the graph was made of, encoder and heads

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.parts == tuple(self.children()) and not any(has_listeners(part) for part in self.parts):
            encoder: Any = self.base_model
            options = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
            answers = encoder.answer(self.outputs.names, pixel_values, patch_attention_mask, options)
            if answers is not None:
                loss = classifier_loss(answers["logits"], labels, self.config, kwargs.get("num_items_in_batch"))
                return self.outputs.kind(loss=loss, **answers)
        return super().forward(pixel_values, labels=labels, patch_attention_mask=patch_attention_mask, **kwargs)


def _are_usual(values: torch.Tensor) -> bool:
    """Return whether all are numbers of a usual size: runtimes drop NaN and infinity in some operators.

    By NumPy, in one thread: torch's threads, woken for it, would wait for more on the engine's cores.
    """
    if values.dtype == torch.bfloat16:
        largest = torch.tensor(_LARGEST, dtype=values.dtype).view(torch.int16).item()
        return bool((values.view(torch.int16).numpy() & 0x7FFF).max() < largest)
    array = values.numpy()
    with np.errstate(invalid="ignore"):
        return bool(array.max() < _LARGEST and array.min() > -_LARGEST)


def _encoders_in(model: nn.Module) -> list[nn.Module]:
    """Return the bare models in a model that an engine can compute."""
    taken = {part for module in model.modules() if isinstance(module, _ASK_FOR_MORE) for part in module.modules()}
    return [each for each in model.modules() if type(each) in _KINDS and each not in taken]


def _is_classifier(model: nn.Module) -> bool:
    """Return whether it is one of the package's, with its own heads."""
    heads = (child for child in model.children() if child is not getattr(model, "base_model", None))
    return type(model) in _CLASSIFIERS and all(type(head) in (nn.Linear, nn.Identity) for head in heads)


def choose_engine(name: str, model: nn.Module, placement: _Placement, options: Mapping[str, object]) -> Runtime | None:
    """Return what computes a model; None for torch. "auto" is OpenVINO where that is installed, can and is faster.

    It is no faster in float32 where products are nearly all (of axial models) and oneDNN's are as fast: see "Which
    engine" in docs/inference.md. `options` are those that only torch can.

    Raises:
        UserError: the engine that was asked for is not there, or cannot compute the model.
    """
    if name == "torch":
        return None
    axial, is_slow = FAMILIES["axial"].classes["model"], has_avx2_alone() or placement[0] != torch.float32
    if name == "auto" and not is_slow and any(type(each) is axial for each in _encoders_in(model)):
        return None
    engine = ENGINES["openvino" if name == "auto" else name]
    obstacle = _find_obstacle(engine, model, placement, options)
    if obstacle is not None and name != "auto":
        raise UserError(f"engine={name!r} {obstacle}")
    return engine if obstacle is None else None


def _find_obstacle(
    engine: Runtime, model: nn.Module, placement: _Placement, options: Mapping[str, object]
) -> str | None:
    dtype, device = placement
    if missing := engine.missing():
        return f'needs {", ".join(missing)}: pip install "hf-vit[{engine.engine_extra}]"'
    if option := next((f"{name}={value!r}" for name, value in options.items() if value), None):
        return f"cannot be combined with {option}; leave one of them out"
    if device.type != "cpu":
        return f"is for CPUs, and the model is on {device}; leave it out"
    if dtype not in engine.dtypes:
        known = " or ".join(str(each).removeprefix("torch.") for each in engine.dtypes)
        return f"computes models in {known}, and this one is in {str(dtype).removeprefix('torch.')}; load it in float32"
    encoders = _encoders_in(model)
    if not encoders:
        return f"is for bare models and classifiers, and a {type(model).__name__} is neither; leave it out"
    inside = {part for each in (*encoders, *filter(_is_classifier, model.modules())) for part in each.modules()}
    for name, part in model.named_modules():
        if part in inside and has_listeners(part):
            hooked = f"{name or 'the model'} has a hook; leave one of them out, or set it afterwards"
            return f"computes no parts that could be listened to, and {hooked}"
    return None


@torch.no_grad()
def engine_changes(model: nn.Module, engine: Runtime, dtype: torch.dtype, plan: Plan) -> list[Change]:
    """Return other classes for the bare models in a model and their classifiers, each with its graph.

    Raises:
        UserError: the graph cannot be made.
    """
    num_read: dict[Any, int | None] = {each.vit: num_read_tokens(each) for each in plan.classifiers}
    classifiers, changes = {each.base_model: each for each in model.modules() if _is_classifier(each)}, list[Change]()
    try:
        for encoder in _encoders_in(model):
            classifier = classifiers.get(encoder)
            whole = encoder if classifier is None else classifier
            graph, outputs, *of_classifier = _make_graph(whole, engine, dtype, num_read.get(encoder))
            kind = precede(type(encoder), by=EngineEncoder)
            settings = {"graph": graph, "outputs": outputs, "is_cut": encoder in num_read, "__class__": kind}
            changes += [Change(encoder, name, value) for name, value in settings.items()]
            if classifier is not None:
                kind, parts = precede(type(classifier), by=EngineClassifier), tuple(classifier.children())
                settings = {"outputs": of_classifier[0], "parts": parts, "__class__": kind}
                changes += [Change(classifier, name, value) for name, value in settings.items()]
    except (MemoryError, UserError):
        raise
    except Exception as error:  # exporter and engines have a class for every reason
        reason = f"{engine.package} cannot take this {type(model).__name__} ({one_line(error)})"
        raise UserError(f"{reason}; use engine='torch'") from error
    return changes


def computed_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules that graphs were made of."""
    encoders = [each for each in model.modules() if isinstance(each, EngineEncoder)]
    heads = [part for each in model.modules() if isinstance(each, EngineClassifier) for part in each.parts]
    return {part for each in (*encoders, *heads) for part in each.modules()}


@final
class _Pass(nn.Module):
    """Pixels in, tensors out: what is not None of a bare model's output, then of that of the classifier around it."""

    def __init__(self, model: Any, only_for_head: bool) -> None:
        super().__init__()
        self.model, self.options = model, {"only_for_head": True} if only_for_head else {}

    def outputs(self, pixel_values: torch.Tensor) -> list[Any]:
        heard: list[Any] = []
        encoder = self.model.base_model
        listener = encoder.register_forward_hook(lambda _, __, output: heard.append(output))
        output = self.model(pixel_values, **self.options)
        listener.remove()
        return heard if encoder is self.model else [*heard, output]

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for output in self.outputs(pixel_values) for tensor in output.to_tuple())


def _make_graph(
    model: nn.Module, engine: Runtime, dtype: torch.dtype, num_read: int | None
) -> tuple[Graph, *tuple[Outputs, ...]]:
    """Return the rewritten form of a model in float32 as an engine's graph, and which outputs are whose."""
    twin: Any = copy.deepcopy(model).float().eval()
    twin.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias; engines fuse it themselves
    plan = make_plan(twin, torch.float32)
    if engine.has_channels_last:
        plan.changes += channelwise_norms(twin)
    plan.carry_out()
    for attention in (part for part in twin.modules() if isinstance(part, FusedAttention)):
        separate_projections(attention)
    if num_read is not None:
        twin.base_model.layers[-1].num_read = num_read
    one_pass, size = _Pass(twin, num_read is not None).eval(), as_pair(twin.config.image_size)
    # Whatever torch's default dtype and device are.
    images = torch.zeros(2, twin.config.num_channels, *size, dtype=torch.float32, device="cpu")
    answers = one_pass.outputs(images)
    if any(bool(tensor.isnan().any()) for output in answers for tensor in output.to_tuple()):
        raise UserError(
            f"engine={engine.package!r} may turn the NaN outputs of this {type(model).__name__} into "
            "numbers: its weights are damaged or diverged; give other weights, or engine='torch'"
        )
    outputs = [Outputs(type(output), tuple(output)) for output in answers]
    # Of one size, which is faster to make and to run; torch computes the others.
    program = onnx_of_batches(one_pass, images, [name for each in outputs for name in each.names])
    return engine.compile(program, dtype), *outputs


class SeparateAttention(FusedAttention):
    """Goes before the class of an attention whose q, k and v are three products, q scaled by its weights.

    Engines copy what is cut out of one product, and scale in a pass of its own.
    """

    qkv: nn.ModuleList

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self.heads(dense(hidden_states)) for dense in self.qkv)
        return query, key, value


def separate_projections(part: FusedAttention) -> None:
    merged: Any = part.qkv
    biases = (None,) * 3 if merged.merged_bias is None else merged.merged_bias.chunk(3)
    query, key, value = map(Dense, merged.merged_weight.chunk(3), biases)
    for tensor in query.buffers():
        tensor.mul_(part.scaling)
    part.qkv, part.scaling = nn.ModuleList((query, key, value)), 1.0
    part.__class__ = precede(type(part), by=SeparateAttention)
