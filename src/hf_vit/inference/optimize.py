"""`optimize_for_inference`: what it takes, and in which order, so that a model is optimized wholly or not at all."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hf_vit.environment import cpu_capabilities, emulates_bfloat16, keep_freed_memory
from hf_vit.errors import UserError, enough_memory
from hf_vit.inference.engines import ENGINES, choose_engine, computed_parts, engine_changes
from hf_vit.inference.freezing import freeze, refuse_gradients
from hf_vit.inference.memory import memory_changes
from hf_vit.inference.merging import check_mergeable, merging_changes
from hf_vit.inference.packing import check_int8, pack
from hf_vit.inference.plan import Change, as_built, channelwise_norms, check_model, make_plan

Model = TypeVar("Model", bound=nn.Module)


def optimize_for_inference(
    model: Model,
    *,
    engine: str = "auto",
    compile: bool = False,
    quantize: str | None = None,
    merge_tokens: int | None = None,
) -> Model:
    """Make a model faster at inference, in place: same inputs, same outputs up to rounding, no more training or saving.

    q, k and v become one product, LayerScale and batch norms go into the weights, kernels are standardized once, and
    patches are cut by a product instead of a convolution. The last layer of a classifier that reads its class token
    computes only that, unless hidden states or attentions are asked for (a hook on it sees as much). On CPUs weights
    are packed for oneDNN, which then adds biases, residuals and GELU while the product is in the cache; bfloat16 is
    computed in float32 where the processor has no instructions for it; position tables are kept for the sizes of
    images that come, and freed memory for the next pass (`hf_vit.keep_freed_memory`, of the whole process).

    All of the model is looked at first, and everything new is built before anything is changed, so that a model that
    is refused, or for which memory runs out, is as it was. Meanwhile the weights are in memory twice, afterwards once.

    Args:
        model: any model of this package, or one that holds such a model; on its device and in its dtype (they are
            final), without adapters, hooks or parametrizations on what is rewritten.
        engine: what computes: "torch"; "openvino" or "onnxruntime", for bare models and classifiers on CPUs in float32
            (OpenVINO: bfloat16 too), weights at least twice in memory. What their graph does not give (hidden states,
            padding, what hooks hear) torch computes. "auto": OpenVINO where it can and was measured to be faster.
        compile: instead of packing weights, compile by inductor, weights frozen: a C++ compiler, a slow first call
            a shape, before which hooks and heads are to be set. Which is faster, `hf-vit bench models` tells.
        quantize: "int8": dense layers on CPUs in int8, by oneDNN (weights per channel, what enters a layer by the range
            of the batch); what cuts patches, convolutions, attention's own products and the head stay in float. Other
            outputs, within what the model's accuracy allows. Without VNNI it is not fast, and weights are coarser.
        merge_tokens: how many patch tokens every block merges into others (token merging, arXiv 2210.09461), for
            Vision Transformers and hybrids: other outputs, within what the model's accuracy allows, in less time.
            `attention_maps` stay maps over all patches. Hidden states, backbones and padding are refused.

    Returns:
        `model`, in evaluation mode and frozen: what would train, cast, move, copy or save it raises UserError and
        changes nothing. `model.engine` says what computes.

    Raises:
        UserError: no such option; a model that would lose something (the message names the part); too little memory.
    """
    names = ("auto", "torch", *ENGINES)
    if engine not in names:
        raise UserError(f"unknown engine={engine!r}; choose from {', '.join(map(repr, names))}")
    if quantize not in (None, "int8"):
        raise UserError(f"unknown quantize={quantize!r}; choose None or 'int8'")
    dtype, device = placement = check_model(model)
    if quantize is not None:
        check_int8(model, device, compile)
    if merge_tokens is not None:
        check_mergeable(model, merge_tokens)
    options = {"compile": compile, "quantize": quantize, "merge_tokens": merge_tokens}
    runtime, by_engine = choose_engine(engine, model, placement, options), list[Change]()
    is_emulated = dtype == torch.bfloat16 and device.type == "cpu" and emulates_bfloat16()
    # A compiler cannot look into packed weights, and folds by itself what depends on weights alone.
    finish = as_built if compile else pack if quantize is None else partial(pack, in_int8=True)
    with enough_memory("the model's weights a second time", "use the model as it is, or where there is more"):
        plan = make_plan(model, torch.float32 if is_emulated or quantize is not None else dtype, finish)
        if runtime is not None:
            try:
                by_engine = engine_changes(model, runtime, dtype, plan)
            except UserError:
                if engine != "auto":
                    raise
    if merge_tokens is not None:
        plan.changes += merging_changes(model, plan.changes, merge_tokens)
    plan.changes += [*(channelwise_norms(model) if compile else memory_changes(model)), *by_engine]
    plan.carry_out()
    model.eval().requires_grad_(False)
    if compile:
        compile_frozen(model)
    freeze(model, placement, runtime.package if runtime and by_engine else "torch", computed_parts(model))
    if device.type == "cpu":
        keep_freed_memory()
    return model


def compile_frozen(model: nn.Module) -> None:
    """Compile by torch's inductor, frozen; on CPUs C++ calls the operators, which saves calls of Python.

    All has to be set while dynamo traces too, and as options it comes too late.
    """
    from torch._inductor import config  # not before it is needed: it takes a second

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    # Products of float32 are slower by Intel's MKL, which inductor takes, than by oneDNN on AMD's CPUs. Not on one with
    # AMX, should it come: there oneDNN could take the lower precision that it is allowed below.
    known = cpu_capabilities()
    is_slow = str(known.get("cpu_name")).startswith("AMD") and not known.get("amx_tile")
    by_onednn = _products_by_onednn if on_cpu and is_slow else nullcontext
    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def frozen(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Tensor):
                refuse_gradients(argument)
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=on_cpu), by_onednn():
            return compiled(*args, **kwargs)

    model._compiled_call_impl = frozen


_lock = threading.Lock()
_passes_by_onednn: list[str] = []  # of each that is on its way, what was set before the first


@contextmanager
def _products_by_onednn() -> Generator[None]:
    """Allow lower precision, for which inductor takes oneDNN; without instructions for it, none is lost."""
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    with _lock:
        _passes_by_onednn.append(_passes_by_onednn[0] if _passes_by_onednn else products.fp32_precision)
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        with _lock:
            before = _passes_by_onednn.pop()
            if not _passes_by_onednn:
                products.fp32_precision = before
