"""Run bare models and classifiers by an engine: make their graphs, and decide when a graph computes the outputs.

Legend: B batch, C channels, H x W px.
"""

import copy
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules
from transformers.utils.generic import can_return_tuple

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Graph, Runtime, get_graph_cache
from hf_vit.conversion.targets.graphs.tracing import export_onnx_of_batches
from hf_vit.environment import LIBRARIES, get_cpu_capabilities, has_avx2_alone, list_versions, read_cpu_name
from hf_vit.errors import UserError, to_one_line
from hf_vit.families import FAMILIES
from hf_vit.inference.freezing import add_base
from hf_vit.inference.layers import Dense, FusedAttention
from hf_vit.inference.plan import (
    Change,
    Plan,
    count_read_tokens,
    has_custom_attention,
    has_listeners,
    list_channelwise_norms,
    make_plan,
)
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel, compute_classifier_loss

ENGINES: dict[str, Runtime] = {name: RUNTIMES[name] for name in ("openvino", "onnxruntime")}
_Placement = tuple[torch.dtype, torch.device]
_KINDS: frozenset[type[nn.Module]] = frozenset(family.classes["model"] for family in FAMILIES.values())
_CLASSIFIERS = frozenset(family.classes["classification"] for family in FAMILIES.values())
# Models that need more of their bare model than a graph returns: maps of all depths, or masked patches.
_HEADS = ("backbone", "masked_prediction")
_MODELS_WITHOUT_GRAPH = tuple(
    family.classes[head] for family in FAMILIES.values() for head in _HEADS if head in family.classes
)
_LARGEST = 2.0**20  # limit of a graph's inputs: where values overflow, engines return numbers instead of NaN
_IGNORED_OPTIONS = ("return_dict", "interpolate_pos_encoding", "only_for_head")  # the last must match `is_cut`


class Outputs(NamedTuple):
    """The names of a graph's outputs, and the output class that they are put into."""

    output_class: type[Any]
    names: tuple[str, ...]


class EngineEncoder(HfPreTrainedModel):
    """Class put before a bare model's class: the graph computes what it can, torch everything else."""

    graph: Graph
    outputs: Outputs  # the outputs of the graph that are this model's
    is_cut: bool  # whether the graph computes only what the classifier's head reads

    @functools.cached_property
    def hook_tables(self) -> list[Mapping[int, Any]]:
        """Return the tables of hooks of all submodules; the first pass lists them, when the model is complete."""
        modules_inside = [module for module in self.modules() if module is not self]
        return [table for module in modules_inside for table in (module._forward_hooks, module._forward_pre_hooks)]

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Compute the outputs with the engine's graph where it can; otherwise with torch."""
        graph_outputs = self.run_graph(self.outputs.names, pixel_values, patch_attention_mask, kwargs)
        if graph_outputs is not None:
            return self.outputs.output_class(**graph_outputs)
        return super().forward(pixel_values, patch_attention_mask=patch_attention_mask, **kwargs)

    def run_graph(
        self,
        names: Sequence[str],
        pixel_values: torch.Tensor,
        patch_attention_mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> dict[str, torch.Tensor] | None:
        """Return the graph's outputs of these names; None where torch has to compute the pass."""
        if patch_attention_mask is None and self._is_plain(options) and self._accepts(pixel_values):
            images = pixel_values.detach().to(self.dtype).contiguous()
            if _are_finite_and_small(images):
                return self.graph.run(images, names)
        return None

    def _is_plain(self, options: Mapping[str, Any]) -> bool:
        """Return whether only the graph's outputs are requested, and no hook reads anything inside the model."""
        config = self.config
        requests = [value for name, value in options.items() if name not in _IGNORED_OPTIONS]
        if bool(options.get("only_for_head")) != self.is_cut or not options.get("return_dict", config.return_dict):
            return False
        if any(value is not None and value is not False for value in requests):
            return False
        if config.output_hidden_states or config.output_attentions or has_custom_attention(config):
            return False
        if modules._has_any_global_hook():
            return False
        # The tables, which are read faster than modules are listed, also hold transformers' own hooks.
        has_hooks = any(self.hook_tables)
        return not (has_hooks and any(has_listeners(module) for module in self.modules() if module is not self))

    def _accepts(self, values: Any) -> bool:
        """Return whether the values are a batch that the graph takes, and no gradients or traces are needed."""
        shape = (self.config.num_channels, *as_pair(self.config.image_size))
        if type(values) is not torch.Tensor or tuple(values.shape[1:]) != shape or not values.is_floating_point():
            return False
        return (
            len(values) > 0
            and values.device.type == "cpu"
            and not values.is_neg()  # NumPy cannot read lazily negated values
            and not (values.requires_grad and torch.is_grad_enabled())
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._functorch.is_functorch_wrapped_tensor(values)  # pyright: ignore[reportAttributeAccessIssue]
            and not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]
        )


class EngineClassifier(HfPreTrainedModel):
    """Class put before a classifier's class whose encoder's graph also computes the logits, in one call."""

    outputs: Outputs
    parts: tuple[nn.Module, ...]  # the encoder and heads that the graph computes

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        patch_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the logits with the engine's graph where it can; otherwise with torch. The loss is always torch's."""
        # A graph cannot call hooks, nor compute a head that has been replaced since.
        if self.parts == tuple(self.children()) and not any(has_listeners(part) for part in self.parts):
            encoder: Any = self.base_model
            options = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
            graph_outputs = encoder.run_graph(self.outputs.names, pixel_values, patch_attention_mask, options)
            if graph_outputs is not None:
                loss = compute_classifier_loss(
                    graph_outputs["logits"], labels, self.config, kwargs.get("num_items_in_batch")
                )
                return self.outputs.output_class(loss=loss, **graph_outputs)
        return super().forward(pixel_values, labels=labels, patch_attention_mask=patch_attention_mask, **kwargs)


def _are_finite_and_small(values: torch.Tensor) -> bool:
    """Return whether all values are below the limit of a graph's inputs; runtimes may drop NaN and infinity.

    NumPy checks them in one thread; torch's threads would wait for more work on the engine's cores.
    """
    if values.dtype == torch.bfloat16:
        largest = torch.tensor(_LARGEST, dtype=values.dtype).view(torch.int16).item()
        return bool((values.view(torch.int16).numpy() & 0x7FFF).max() < largest)
    array = values.numpy()
    with np.errstate(invalid="ignore"):
        return bool(array.max() < _LARGEST and array.min() > -_LARGEST)


def _find_encoders(model: nn.Module) -> list[nn.Module]:
    """Return the bare models in a model that an engine can compute."""
    excluded_modules: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, _MODELS_WITHOUT_GRAPH):
            excluded_modules.update(module.modules())
    return [module for module in model.modules() if type(module) in _KINDS and module not in excluded_modules]


def _is_classifier(model: nn.Module) -> bool:
    """Return whether a model is a classifier of the package with its original heads."""
    heads = (child for child in model.children() if child is not getattr(model, "base_model", None))
    return type(model) in _CLASSIFIERS and all(type(head) in (nn.Linear, nn.Identity) for head in heads)


def choose_engine(name: str, model: nn.Module, placement: _Placement, options: Mapping[str, object]) -> Runtime | None:
    """Return the engine that computes a model; None for torch.

    "auto" is OpenVINO where it is installed, can compute the model, and is faster. It is not faster for axial models in
    float32: the products of HfAxialViT are as fast in oneDNN, and the logits of AxialResNet leave the cache. See "Which
    engine" in docs/inference.md.

    Args:
        name: "auto", "torch", or a key of `ENGINES`.
        placement: dtype and device of the model.
        options: options that only torch supports; engines refuse those that are set.

    Raises:
        UserError: the requested engine is not installed or cannot compute the model.
    """
    if name == "torch":
        return None
    axial = [FAMILIES[family].classes["model"] for family in ("axial", "axial_resnet")]
    is_slow = has_avx2_alone() or placement[0] != torch.float32
    if name == "auto" and not is_slow and any(type(encoder) in axial for encoder in _find_encoders(model)):
        return None
    engine = ENGINES["openvino" if name == "auto" else name]
    obstacle = _find_obstacle(engine, model, placement, options)
    if obstacle is not None and name != "auto":
        raise UserError(f"engine={name!r} {obstacle}")
    return engine if obstacle is None else None


def _find_obstacle(
    engine: Runtime, model: nn.Module, placement: _Placement, options: Mapping[str, object]
) -> str | None:
    """Return why an engine cannot compute a model, in words that follow the engine's name; None if it can."""
    dtype, device = placement
    missing = engine.list_missing()
    if missing:
        extras = ",".join(dict.fromkeys((LIBRARIES[engine.package][1], "export")))
        return f'needs {", ".join(missing)}; install with pip install "hf-vit[{extras}]"'
    for name, value in options.items():
        if value:
            return f"cannot be combined with {name}={value!r}; leave one of them out"
    if device.type != "cpu":
        return f"only runs on CPUs, but the model is on {device}; leave engine out"
    if dtype not in engine.dtypes:
        dtypes = " or ".join(str(supported).removeprefix("torch.") for supported in engine.dtypes)
        return f"needs a model in {dtypes}, but it is in {str(dtype).removeprefix('torch.')}; load it in float32"
    encoders = _find_encoders(model)
    if not encoders:
        return f"only runs bare models and classifiers, but the model is a {type(model).__name__}; leave engine out"
    graph_modules: set[nn.Module] = set()
    for computed in (*encoders, *filter(_is_classifier, model.modules())):
        graph_modules.update(computed.modules())
    for name, part in model.named_modules():
        if part in graph_modules and has_listeners(part):
            return (
                f"cannot call the hook of {name or 'the model'}; remove the hook, set it after optimizing, or "
                "leave engine out"
            )
    return None


@torch.no_grad()
def make_engine_changes(model: nn.Module, engine: Runtime, dtype: torch.dtype, plan: Plan) -> list[Change]:
    """Return the changes that give the bare models in a model, and their classifiers, a graph and another class.

    Raises:
        UserError: the graph cannot be made.
    """
    num_read: dict[Any, int | None] = {member.vit: count_read_tokens(member) for member in plan.classifiers}
    classifiers = {member.base_model: member for member in model.modules() if _is_classifier(member)}
    changes = list[Change]()
    try:
        for encoder in _find_encoders(model):
            classifier = classifiers.get(encoder)
            graph_model = encoder if classifier is None else classifier
            graph, outputs, *classifier_outputs = _make_graph(graph_model, engine, dtype, num_read.get(encoder))
            engine_class = add_base(type(encoder), base=EngineEncoder)
            settings = {"graph": graph, "outputs": outputs, "is_cut": encoder in num_read, "__class__": engine_class}
            changes += [Change(encoder, name, value) for name, value in settings.items()]
            if classifier is not None:
                engine_class = add_base(type(classifier), base=EngineClassifier)
                parts = tuple(classifier.children())
                settings = {"outputs": classifier_outputs[0], "parts": parts, "__class__": engine_class}
                changes += [Change(classifier, name, value) for name, value in settings.items()]
    except (MemoryError, UserError):
        raise
    except Exception as error:  # exporter and engines have a class for every reason
        reason = f"{engine.package} cannot run this {type(model).__name__} ({to_one_line(error)})"
        raise UserError(f"{reason}; use engine='torch'") from error
    return changes


def list_engine_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose outputs a graph of ONNX Runtime or OpenVINO computes; nothing in them may change."""
    computed: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, EngineEncoder):
            computed.update(module.modules())
        elif isinstance(module, EngineClassifier):  # a part of it is the encoder, another one its head
            for part in module.parts:
                computed.update(part.modules())
    return computed


@final
class _ExportedPass(nn.Module):
    """Module for export: pixels in, a tuple of tensors out, the bare model's outputs and then its classifier's."""

    def __init__(self, model: Any, only_for_head: bool) -> None:
        super().__init__()
        self.model = model
        self.options = {"only_for_head": True} if only_for_head else {}

    def outputs(self, pixel_values: torch.Tensor) -> list[Any]:
        """Return the outputs of the bare model and, for a classifier, its own."""
        outputs: list[Any] = []
        encoder = self.model.base_model
        hook = encoder.register_forward_hook(lambda _, __, output: outputs.append(output))
        output = self.model(pixel_values, **self.options)
        hook.remove()
        return outputs if encoder is self.model else [*outputs, output]

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for output in self.outputs(pixel_values) for tensor in output.to_tuple())


def _make_graph(
    model: nn.Module, engine: Runtime, dtype: torch.dtype, num_read: int | None
) -> tuple[Graph, *tuple[Outputs, ...]]:
    """Export the rewritten form of a model in float32 as an engine's graph; also return the outputs of each model."""
    model_copy: Any = copy.deepcopy(model).float().eval()
    model_copy.set_attn_implementation("eager")  # torch cannot export sdpa with a bias; engines fuse it themselves
    # The file that keeps the graph for the next process, named after the model before it is rewritten.
    folder = get_graph_cache() if engine.keeps_graphs and _is_of_packages(model_copy) else None
    entry: Path | None = None
    with suppress(metadata.PackageNotFoundError):  # without versions nothing is kept
        entry = folder and folder / f"{_hash_graph_inputs(model_copy, engine, num_read)}.graph"
    plan = make_plan(model_copy, torch.float32)
    if engine.has_channels_last:
        plan.changes += list_channelwise_norms(model_copy)
    plan.carry_out()
    for attention in (module for module in model_copy.modules() if isinstance(module, FusedAttention)):
        separate_projections(attention)
    if num_read is not None:
        model_copy.base_model.layers[-1].num_read = num_read
    one_pass = _ExportedPass(model_copy, num_read is not None).eval()
    size = as_pair(model_copy.config.image_size)
    # Explicit, as torch's default dtype and device may be others.
    images = torch.zeros(2, model_copy.config.num_channels, *size, dtype=torch.float32, device="cpu")
    all_outputs = one_pass.outputs(images)
    if any(bool(tensor.isnan().any()) for output in all_outputs for tensor in output.to_tuple()):
        raise UserError(
            f"engine={engine.package!r} may return numbers where this {type(model).__name__} computes NaN, because its "
            "weights are damaged or its training diverged; load other weights, or use engine='torch'"
        )
    outputs = [Outputs(type(output), tuple(output)) for output in all_outputs]
    # A graph of one image size is faster to make and to run; torch computes the other sizes.
    names = [name for group in outputs for name in group.names]
    return engine.compile(lambda: export_onnx_of_batches(one_pass, images, names), entry, dtype), *outputs


@functools.cache
def _hash_code() -> str:
    """Return a digest of this package's code."""
    package = Path(__file__).parents[1]
    files = sorted([*package.glob("*.py"), *package.glob("*/**/*.py")])  # the second follows links to folders
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _hash_graph_inputs(model: Any, engine: Runtime, num_read: int | None) -> str:
    """Return a digest of all that decides a model's graph: code, libraries, processor, modules, settings, weights."""
    libraries = {name: metadata.version(name) for name in (engine.package, "onnx", "onnxscript")}
    processor = read_cpu_name(), dict(get_cpu_capabilities())
    config = {name: value for name, value in model.config.to_dict().items() if "name_or_path" not in name}
    facts = _hash_code(), list_versions(), libraries, processor, config, num_read
    digest = hashlib.sha256(repr(facts).encode())
    numbers: dict[nn.Module, int] = {}  # layers may share a module
    for name, module in model.named_modules(remove_duplicate=False):
        values = {key: vars(module)[key] for key in sorted(vars(module)) if key != "name_or_path"}
        settings = {key: value for key, value in values.items() if callable(value) or _is_setting(value)}
        number = numbers.setdefault(module, len(numbers))
        digest.update(re.sub(" at 0x[0-9a-f]+", "", repr((name, number, type(module), settings))).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _is_of_packages(model: nn.Module) -> bool:
    """Return whether all code of a model is of packages that a fingerprint has, not a user's, which may change."""

    def is_versioned(code: object) -> bool:
        if isinstance(code, functools.partial):
            return is_versioned(code.func)  # pyright: ignore[reportUnknownMemberType]
        package = (getattr(code, "__module__", None) or "torch").partition(".")[0]  # builtins of torch have no module
        return package in ("hf_vit", "torch", "transformers")

    modules = list(model.modules())
    functions = (value for module in modules for value in vars(module).values() if callable(value))
    return all(map(is_versioned, (*map(type, modules), *functions)))


def _is_setting(value: object) -> bool:
    """Return whether an attribute of a module is a number, a name, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | int | float | str | slice | torch.dtype)


class SeparateAttention(FusedAttention):
    """Class put before an attention's class: q, k and v are three products, and q's weights include the scaling.

    Engines would copy the parts of one product, and scale in a separate pass.
    """

    qkv: nn.ModuleList

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (self.heads(dense(hidden_states)) for dense in self.qkv)
        return query, key, value


def separate_projections(attention: FusedAttention) -> None:
    """Split the product for q, k and v of an attention into three, and move the scaling into q's weights."""
    merged: Any = attention.qkv
    biases = (None,) * 3 if merged.merged_bias is None else merged.merged_bias.chunk(3)
    query, key, value = map(Dense, merged.merged_weight.chunk(3), biases)
    attention.qkv = nn.ModuleList((query, key, value))
    if not attention.config.use_qk_norm:  # a norm would undo the scaling
        for tensor in query.buffers():
            tensor.mul_(attention.scaling)
        attention.scaling = 1.0
    attention.__class__ = add_base(type(attention), base=SeparateAttention)
