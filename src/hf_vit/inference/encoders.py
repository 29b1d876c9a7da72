"""Bare models and classifiers whose passes an engine computes: what is made a graph, and when the graph answers.

Legend: B batch, C channels, H x W px.
"""

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules
from transformers.utils.generic import can_return_tuple

from hf_vit.conversion.targets.graphs.tracing import onnx_of_batches, onnx_of_linear
from hf_vit.environment import has_avx2_alone
from hf_vit.errors import UserError, one_line
from hf_vit.families import FAMILIES
from hf_vit.inference.attention import take_apart
from hf_vit.inference.engines import ENGINES, Engine
from hf_vit.inference.freezing import preceded, refuse_gradients
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.loss_hf_vit import classifier_loss
from hf_vit.models.modeling_hf_vit import HfViTBaseForImageClassification
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel
from hf_vit.rewriting.heads import attends_otherwise, has_listeners, num_read_tokens
from hf_vit.rewriting.planning import Change, channelwise_norms, plan_for
from hf_vit.rewriting.transformer import FusedAttention

_KINDS: frozenset[type[nn.Module]] = frozenset(family.classes["model"] for family in FAMILIES.values())
# They ask their bare model for what no graph gives: maps of all depths, masked patches.
_ASK_FOR_MORE = tuple(
    family.classes[door]
    for family in FAMILIES.values()
    for door in ("backbone", "masked_prediction")
    if door in family.classes
)
_CLASSIFIERS = frozenset(family.classes["classification"] for family in FAMILIES.values())
_LARGEST = 2.0**20  # of what a graph is given: what overflows on the way comes out of engines as numbers, not as NaN
_OF_NO_EFFECT = ("return_dict", "interpolate_pos_encoding", "only_for_head")  # the last decides which graph it is


@final
class _Pass(nn.Module):
    """Pixels in, tensors out: what is not None of a bare model's output, then of that of the classifier around it."""

    def __init__(self, model: Any, only_for_head: bool) -> None:
        super().__init__()
        self.model, self.asked = model, {"only_for_head": True} if only_for_head else {}

    def outputs(self, pixel_values: torch.Tensor) -> list[Any]:
        heard: list[Any] = []
        encoder = self.model.base_model
        listener = encoder.register_forward_hook(lambda _, __, output: heard.append(output))
        output = self.model(pixel_values, **self.asked)
        listener.remove()
        return heard if encoder is self.model else [*heard, output]

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for output in self.outputs(pixel_values) for tensor in output.to_tuple())


class Outputs(NamedTuple):
    """Those of a graph that are one model's.

    Attributes:
        kind: what they are put into.
        names: as the graph has them, too.
    """

    kind: type[Any]
    names: tuple[str, ...]


class EngineEncoder(HfPreTrainedModel):
    """Goes before the class of a bare model; what its graph cannot answer, torch does, as it would have without.

    Attributes:
        graph: what computes.
        outputs: which of the graph's are this model's.
        is_cut: the graph computes what the classifier's head reads, and no more.
    """

    graph: Engine
    outputs: Outputs
    is_cut: bool

    @functools.cached_property
    def hook_tables(self) -> list[Mapping[int, Any]]:
        """Where hooks on parts would be; first asked for by a pass, when parts are what they will be."""
        parts = [part for part in self.modules() if part is not self]
        return [table for part in parts for table in (part._forward_hooks, part._forward_pre_hooks)]

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        answers = self.answers(self.outputs.names, pixel_values, patch_attention_mask, kwargs)
        if answers is not None:
            return self.outputs.kind(**answers)
        return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)

    def answers(
        self,
        names: Sequence[str],
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None,
        asked: Mapping[str, Any],
    ) -> dict[str, torch.Tensor] | None:
        """Of the graph; None where it has none."""
        if patch_attention_mask is None and self._is_plain(asked) and self._fits(pixel_values):
            images = pixel_values.detach().to(self.dtype).contiguous()
            if _are_usual(images):
                return self.graph.run(images, names)
        return None

    def _is_plain(self, asked: Mapping[str, Any]) -> bool:
        """Whether nothing is asked for, or listened to, but the outputs of the graph."""
        if bool(asked.get("only_for_head")) != self.is_cut or not asked.get("return_dict", self.config.return_dict):
            return False
        if any(value is not None and value is not False for name, value in asked.items() if name not in _OF_NO_EFFECT):
            return False
        if self.config.output_hidden_states or self.config.output_attentions or modules._has_any_global_hook():
            return False
        if attends_otherwise(self.config):
            return False
        return not any(self.hook_tables) or not any(has_listeners(each) for each in self.modules() if each is not self)

    def _fits(self, pixel_values: Any) -> bool:
        shape = (self.config.num_channels, *as_pair(self.config.image_size))
        return _is_batch(pixel_values, shape) and pixel_values.is_floating_point()


class EngineClassifier(HfPreTrainedModel):
    """Goes before the class of a classifier, whose encoder's graph has the logits too; a pass is one call of it then.

    Attributes:
        outputs: which of the graph's are this model's.
        parts: that the graph was made of, encoder and heads.
    """

    outputs: Outputs
    parts: tuple[nn.Module, ...]

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
            asked = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
            answers = encoder.answers(self.outputs.names, pixel_values, patch_attention_mask, asked)
            if answers is not None:
                loss = classifier_loss(answers["logits"], labels, self.config, kwargs.get("num_items_in_batch"))
                return self.outputs.kind(loss=loss, **answers)
        return super().forward(pixel_values, labels=labels, patch_attention_mask=patch_attention_mask, **kwargs)


class EngineHead(nn.Linear):
    """Goes before torch's class of a head: torch's threads, woken for it, would wait for more on the engine's cores."""

    graph: Engine

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        refuse_gradients(input)
        if _is_batch(input, (self.in_features,)) and input.dtype == self.weight.dtype:
            features = input.detach().contiguous()
            if _are_usual(features):
                return self.graph.run(features, ("logits",))["logits"]
        return super().forward(input)


def _is_batch(values: Any, shape: tuple[int, ...]) -> bool:
    """Whether they are a batch of what a graph takes, [B, *shape], and nothing is asked for but the result."""
    if type(values) is not torch.Tensor or tuple(values.shape[1:]) != shape:
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


def _are_usual(values: torch.Tensor) -> bool:
    """Whether all are numbers of a usual size: runtimes drop NaN and infinity in some operators.

    By NumPy, in one thread, as `all_finite` says.
    """
    if values.dtype == torch.bfloat16:
        largest = torch.tensor(_LARGEST, dtype=values.dtype).view(torch.int16).item()
        return bool((values.view(torch.int16).numpy() & 0x7FFF).max() < largest)
    array = values.numpy()
    with np.errstate(invalid="ignore"):
        return bool(array.max() < _LARGEST and array.min() > -_LARGEST)


def encoders_in(model: nn.Module) -> dict[str, nn.Module]:
    """The bare models in a model that an engine can compute, by their names; "" is the model itself."""
    taken = {part for module in model.modules() if isinstance(module, _ASK_FOR_MORE) for part in module.modules()}
    return {name: each for name, each in model.named_modules() if type(each) in _KINDS and each not in taken}


def choose_engine(
    asked: str, model: nn.Module, placement: tuple[torch.dtype, torch.device], options: Mapping[str, object]
) -> type[Engine] | None:
    """What computes a model; None for torch. "auto" is OpenVINO where that is installed, can and is faster, else torch.

    Measured: see "Which engine" in docs/inference.md.

    Args:
        options: what else was asked for, which only torch can.

    Raises:
        UserError: the engine that was asked for is not there, or cannot compute the model.
    """
    if asked == "torch" or (asked == "auto" and _is_faster_by_torch(model, placement[0])):
        return None
    engine = ENGINES["openvino" if asked == "auto" else asked]
    obstacle = _obstacle(engine, model, placement, options)
    if obstacle is None:
        return engine
    if asked == "auto":
        return None
    raise UserError(f"engine={asked!r} {obstacle}")


def _is_faster_by_torch(model: nn.Module, dtype: torch.dtype) -> bool:
    """Of axial models the products are nearly all, and OpenVINO's in float32 are no faster than oneDNN's, unless AVX2
    is all there is.
    """
    if dtype != torch.float32 or has_avx2_alone():
        return False
    axial = FAMILIES["axial"].classes["model"]
    return any(type(each) is axial for each in encoders_in(model).values())


def _obstacle(
    engine: type[Engine], model: nn.Module, placement: tuple[torch.dtype, torch.device], options: Mapping[str, object]
) -> str | None:
    dtype, device = placement
    if missing := engine.missing():
        return f'needs {", ".join(missing)}: pip install "hf-vit[{engine.extra}]"'
    if given := next((f"{name}={value!r}" for name, value in options.items() if value), None):
        return f"does not go with {given}; leave one of them out"
    if device.type != "cpu":
        return f"is for CPUs, and the model is on {device}; leave it out"
    if dtype not in engine.dtypes:
        known = " or ".join(str(each).removeprefix("torch.") for each in engine.dtypes)
        return f"computes models in {known}, and this one is in {str(dtype).removeprefix('torch.')}; load it in float32"
    encoders = encoders_in(model)
    if not encoders:
        return f"is for bare models and classifiers, and a {type(model).__name__} is neither; leave it out"
    whole = [*encoders.values(), *filter(_is_classifier, model.modules())]
    inside = {part for each in whole for part in each.modules()}
    for name, part in model.named_modules():
        if part in inside and has_listeners(part):
            there = f"{name or 'the model'} has a hook; leave one of them out, or set it afterwards"
            return f"computes no parts that could be listened to, and {there}"
    return None


def engine_changes(
    model: nn.Module,
    engine: type[Engine],
    dtype: torch.dtype,
    classifiers: Iterable[HfViTBaseForImageClassification],
) -> list[Change]:
    """Other classes for the bare models in a model and for the heads of its classifiers, each with its graph.

    Args:
        classifiers: whose last layer computes only what the head reads.

    Raises:
        UserError: the graph cannot be made.
    """
    num_read: dict[nn.Module, int | None] = {each.vit: num_read_tokens(each) for each in classifiers}
    try:
        with torch.no_grad():
            return list(_changes(model, engine, dtype, num_read))
    except (MemoryError, UserError):
        raise
    except Exception as error:  # exporter and engines have a class for every reason
        reason = f"{engine.package} cannot take this {type(model).__name__} ({one_line(error)})"
        raise UserError(f"{reason}; use engine='torch'") from error


def _changes(
    model: nn.Module, engine: type[Engine], dtype: torch.dtype, num_read: Mapping[nn.Module, int | None]
) -> Iterator[Change]:
    encoders = encoders_in(model).values()
    classifiers = {each.base_model: each for each in model.modules() if _is_classifier(each)}
    for encoder in encoders:
        classifier = classifiers.get(encoder)
        graph, *outputs = _graph_of(encoder if classifier is None else classifier, engine, dtype, num_read.get(encoder))
        added = {"graph": graph, "outputs": outputs[0], "is_cut": encoder in num_read}
        yield from _computed_by(encoder, EngineEncoder, added)
        if classifier is not None:
            parts = tuple(classifier.children())
            yield from _computed_by(classifier, EngineClassifier, {"outputs": outputs[1], "parts": parts})
            for head in (part for part in parts if type(part) is nn.Linear):
                yield from _computed_by(head, EngineHead, {"graph": engine.of(onnx_of_linear(head, "logits"), dtype)})


def _is_classifier(model: nn.Module) -> bool:
    """Whether it is one of the package's, with its own heads."""
    if type(model) not in _CLASSIFIERS:
        return False
    return all(type(head) in (nn.Linear, nn.Identity) for head in model.children() if head is not model.base_model)


def _computed_by(part: nn.Module, kind: type[nn.Module], added: Mapping[str, object]) -> Iterator[Change]:
    yield from (Change(part, name, value) for name, value in added.items())
    yield Change(part, "__class__", preceded(type(part), by=kind))


def _graph_of(
    model: nn.Module, engine: type[Engine], dtype: torch.dtype, num_read: int | None
) -> tuple[Engine, *tuple[Outputs, ...]]:
    """The rewritten form of a bare model or classifier in float32 as an engine's graph; outputs as `_Pass` has them."""
    twin: Any = copy.deepcopy(model).float().eval()
    twin.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias; engines fuse it themselves
    plan = plan_for(twin, torch.float32)
    if engine.has_channels_last:
        plan.changes += channelwise_norms(twin)
    plan.carry_out()
    for attention in (part for part in twin.modules() if isinstance(part, FusedAttention)):
        take_apart(attention)
    if num_read is not None:
        twin.base_model.layers[-1].num_read = num_read
    one_pass, size = _Pass(twin, num_read is not None).eval(), as_pair(twin.config.image_size)
    images = _zeros(2, twin.config.num_channels, *size)
    answers = one_pass.outputs(images)
    if any(bool(tensor.isnan().any()) for output in answers for tensor in output.to_tuple()):
        raise UserError(
            f"engine={engine.package!r} might make numbers of the NaN that this {type(model).__name__} answers: its "
            "weights are damaged or diverged; give others, or engine='torch'"
        )
    outputs = [Outputs(type(output), tuple(output)) for output in answers]
    # Of one size, which is faster to make and to run; torch computes the others.
    graph = engine.of(onnx_of_batches(one_pass, images, [name for each in outputs for name in each.names]), dtype)
    return graph, *outputs


def _zeros(*shape: int) -> torch.Tensor:
    """Whatever torch's default dtype and device are."""
    return torch.zeros(*shape, dtype=torch.float32, device="cpu")
