"""Bare models and heads whose passes an engine computes: what is made a graph, and when the graph answers.

Legend: B batch, C channels, H x W px.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from hf_vit.conversion.readers.checkpoint import all_finite
from hf_vit.conversion.targets.graphs.tracing import onnx_of_batches
from hf_vit.errors import UserError, one_line
from hf_vit.families import FAMILIES
from hf_vit.inference.engines import ENGINES, Engine
from hf_vit.inference.freezing import preceded
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import HfViTBaseForImageClassification
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel
from hf_vit.rewriting.heads import has_listeners, num_read_tokens
from hf_vit.rewriting.planning import Change, plan_for

_KINDS: frozenset[type[nn.Module]] = frozenset(family.classes["model"] for family in FAMILIES.values())
# They ask their bare model for what no graph gives: maps of all depths, masked patches.
_ASK_FOR_MORE = tuple(
    family.classes[door]
    for family in FAMILIES.values()
    for door in ("backbone", "masked_prediction")
    if door in family.classes
)
_CLASSIFIERS = tuple(family.classes["classification"] for family in FAMILIES.values())
_OF_NO_EFFECT = ("return_dict", "interpolate_pos_encoding", "only_for_head")  # the last decides which graph it is


@final
class _Pass(nn.Module):
    """Pixels in, tensors out: what of a bare model's output is not None."""

    def __init__(self, encoder: nn.Module, only_for_head: bool) -> None:
        super().__init__()
        self.encoder, self.asked = encoder, {"only_for_head": True} if only_for_head else {}

    def output(self, pixel_values: torch.Tensor) -> Any:
        return self.encoder(pixel_values, **self.asked)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.output(pixel_values).to_tuple()


class EngineEncoder(HfPreTrainedModel):
    """Goes before the class of a bare model; what its graph cannot answer, torch does, as it would have without.

    Attributes:
        graph: what computes.
        output_kind: what its outputs are put into.
        is_cut: the graph computes what the classifier's head reads, and no more.
        hook_tables: where hooks on parts would be.
    """

    graph: Engine
    output_kind: type[Any]
    is_cut: bool
    hook_tables: list[Mapping[int, Any]]

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if patch_attention_mask is None and self._is_plain(kwargs) and self._fits(pixel_values):
            images = pixel_values.detach().to(self.dtype).contiguous()
            if all_finite(images):  # runtimes drop NaN and infinity in some operators
                return self.output_kind(**self.graph.run(images))
        return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether nothing is asked for, or listened to, but the outputs of the graph."""
        if bool(kwargs.get("only_for_head")) != self.is_cut or not kwargs.get("return_dict", self.config.return_dict):
            return False
        if any(value not in (None, False) for name, value in kwargs.items() if name not in _OF_NO_EFFECT):
            return False
        if self.config.output_hidden_states or self.config.output_attentions:
            return False
        return not any(self.hook_tables) or not any(has_listeners(each) for each in self.modules() if each is not self)

    def _fits(self, pixel_values: Any) -> bool:
        shape = (self.config.num_channels, *as_pair(self.config.image_size))
        return _is_batch(pixel_values, shape) and pixel_values.is_floating_point()


class EngineHead(nn.Linear):
    """Goes before torch's class of a head: torch's threads, woken for it, would wait for more on the engine's cores."""

    graph: Engine

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_batch(input, (self.in_features,)) and input.dtype == self.weight.dtype:
            features = input.detach().contiguous()
            if all_finite(features):
                return self.graph.run(features)["logits"]
        return super().forward(input)


def _is_batch(values: Any, shape: tuple[int, ...]) -> bool:
    """Whether they are a batch of what a graph takes, [B, *shape], and nothing is asked for but the result."""
    if type(values) is not torch.Tensor or tuple(values.shape[1:]) != shape:
        return False
    return (
        len(values) > 0
        and values.device.type == "cpu"
        and not (values.requires_grad and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]
    )


def encoders_in(model: nn.Module) -> dict[str, nn.Module]:
    """The bare models in a model that an engine can compute, by their names; "" is the model itself."""
    taken = {part for module in model.modules() if isinstance(module, _ASK_FOR_MORE) for part in module.modules()}
    return {name: each for name, each in model.named_modules() if type(each) in _KINDS and each not in taken}


def choose_engine(
    asked: str, model: nn.Module, placement: tuple[torch.dtype, torch.device], options: Mapping[str, object]
) -> type[Engine] | None:
    """What computes a model; None for torch. "auto" is OpenVINO where that is installed and can, else torch.

    Measured: see "Which engine" in docs/inference.md.

    Args:
        options: what else was asked for, which only torch can.

    Raises:
        UserError: the engine that was asked for is not there, or cannot compute the model.
    """
    if asked == "torch":
        return None
    engine = ENGINES["openvino" if asked == "auto" else asked]
    obstacle = _obstacle(engine, model, placement, options)
    if obstacle is None:
        return engine
    if asked == "auto":
        return None
    raise UserError(f"engine={asked!r} {obstacle}")


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
    for name, encoder in encoders.items():
        for part_name, part in encoder.named_modules(prefix=name):
            if part is not encoder and has_listeners(part):
                return f"computes no parts that could be listened to, and {part_name} has a hook; leave one of them out"
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
            return [*_encoder_changes(model, engine, dtype, num_read), *_head_changes(model, engine, dtype)]
    except (MemoryError, UserError):
        raise
    except Exception as error:  # exporter and engines have a class for every reason
        reason = f"{engine.package} cannot take this {type(model).__name__} ({one_line(error)})"
        raise UserError(f"{reason}; use engine='torch'") from error


def _encoder_changes(
    model: nn.Module, engine: type[Engine], dtype: torch.dtype, num_read: Mapping[nn.Module, int | None]
) -> Iterator[Change]:
    for encoder in encoders_in(model).values():
        graph, output_kind = _graph_of(encoder, engine, dtype, num_read.get(encoder))
        tables: list[Mapping[int, Any]] = []
        for part in encoder.modules():
            if part is not encoder:
                tables += [part._forward_hooks, part._forward_pre_hooks]
        added = {"graph": graph, "output_kind": output_kind, "is_cut": encoder in num_read, "hook_tables": tables}
        yield from _computed_by(encoder, EngineEncoder, added)


def _head_changes(model: nn.Module, engine: type[Engine], dtype: torch.dtype) -> Iterator[Change]:
    for classifier in (module for module in model.modules() if isinstance(module, _CLASSIFIERS)):
        for head in (child for child in classifier.children() if type(child) is nn.Linear):
            twin, example = copy.deepcopy(head).float(), torch.zeros(2, head.in_features)
            graph = engine.of(onnx_of_batches(twin, example, ["logits"]), dtype)
            yield from _computed_by(head, EngineHead, {"graph": graph})


def _computed_by(part: nn.Module, kind: type[nn.Module], added: Mapping[str, object]) -> Iterator[Change]:
    yield from (Change(part, name, value) for name, value in added.items())
    yield Change(part, "__class__", preceded(type(part), by=kind))


def _graph_of(
    encoder: nn.Module, engine: type[Engine], dtype: torch.dtype, num_read: int | None
) -> tuple[Engine, type[Any]]:
    """The rewritten form of a bare model in float32 as an engine's graph, and what its outputs are put into."""
    twin: Any = copy.deepcopy(encoder).float().eval()
    twin.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias; engines fuse it themselves
    plan_for(twin, torch.float32).carry_out()
    if num_read is not None:
        twin.layers[-1].num_read = num_read
    one_pass, size = _Pass(twin, num_read is not None).eval(), as_pair(twin.config.image_size)
    images = torch.zeros(2, twin.config.num_channels, *size)
    output = one_pass.output(images)
    # Of one size, which is faster to make and to run; torch computes the others.
    return engine.of(onnx_of_batches(one_pass, images, list(output)), dtype), type(output)
