"""Optimize a model for inference, completely or not at all."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hf_vit.environment import cpu_capabilities, emulates_bfloat16, keep_freed_memory
from hf_vit.errors import UserError, enough_memory
from hf_vit.inference.engines import ENGINES, choose_engine, engine_changes, engine_modules
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

    q, k and v become one product, LayerScale and batch norms are merged into the weights, kernels are standardized
    once, and a product cuts patches instead of a convolution. The last layer of a classifier that reads its class token
    computes only that token, unless hidden states or attentions are requested or a hook reads them. On CPUs weights are
    packed for oneDNN, which adds biases, residuals and GELU while the product is in the cache. bfloat16 is computed in
    float32 on processors without instructions for it. Position tables are cached per image size, and freed memory is
    kept for the next pass (`hf_vit.keep_freed_memory`, for the whole process).

    The whole model is checked and everything new is built before anything changes, so a model that is refused, or for
    which memory runs out, stays as it was. While it is optimized, its weights are in memory twice.

    Args:
        model: a model of this package, or a module that contains one, on its final device and in its final dtype,
            without adapters, hooks or parametrizations on the modules that are rewritten.
        engine: "torch"; "openvino" or "onnxruntime", for bare models and classifiers on CPUs in float32 (OpenVINO also
            bfloat16), which need at least twice the weights' memory; torch computes what their graph does not return
            (hidden states, padding, hooks). "auto": OpenVINO where it works and was measured to be faster, else torch.
        compile: compile the model with torch's inductor instead of packing weights. Needs a C++ compiler; the first
            call with each shape is slow; set hooks and heads before it. `hf-vit bench models` shows which is faster.
        quantize: "int8": compute dense layers on CPUs in int8 by oneDNN (weights per channel, inputs by the range of
            the batch); patches, convolutions, attention's products and the head stay in float. Outputs change; check
            the model's accuracy. Without VNNI instructions it is not fast, and weights are coarser.
        merge_tokens: patch tokens that every block merges into others (token merging, arXiv 2210.09461), for Vision
            Transformers and hybrids. Faster, but outputs change; check the model's accuracy. `attention_maps` still
            cover all patches. Hidden states, backbones and padding are refused.

    Returns:
        `model`, in evaluation mode and frozen: training, casting, moving, copying or saving it raises UserError and
            changes
        nothing. `model.engine` names the engine.

    Raises:
        UserError: an unknown option; a model that would lose something (the message names the module); too little
            memory.
    """
    names = ("auto", "torch", *ENGINES)
    if engine not in names:
        raise UserError(f"unknown engine={engine!r}; choose from {', '.join(map(repr, names))}")
    if quantize not in (None, "int8"):
        raise UserError(f"unknown quantize={quantize!r}; choose 'int8' or None")
    dtype, device = placement = check_model(model)
    if quantize is not None:
        check_int8(model, device, compile)
    if merge_tokens is not None:
        check_mergeable(model, merge_tokens)
    options = {"compile": compile, "quantize": quantize, "merge_tokens": merge_tokens}
    runtime, graph_changes = choose_engine(engine, model, placement, options), list[Change]()
    is_emulated = dtype == torch.bfloat16 and device.type == "cpu" and emulates_bfloat16()
    # A compiler cannot read packed weights, and precomputes by itself what depends only on weights.
    finish = as_built if compile else pack if quantize is None else partial(pack, in_int8=True)
    with enough_memory("the model's weights a second time", "use the model as it is, or a machine with more memory"):
        plan = make_plan(model, torch.float32 if is_emulated or quantize is not None else dtype, finish)
        if runtime is not None:
            try:
                graph_changes = engine_changes(model, runtime, dtype, plan)
            except UserError:
                if engine != "auto":
                    raise
    if merge_tokens is not None:
        plan.changes += merging_changes(model, plan.changes, merge_tokens)
    plan.changes += [*(channelwise_norms(model) if compile else memory_changes(model)), *graph_changes]
    plan.carry_out()
    model.eval().requires_grad_(False)
    if compile:
        compile_frozen(model)
    freeze(model, placement, runtime.package if runtime and graph_changes else "torch", engine_modules(model))
    if device.type == "cpu":
        keep_freed_memory()
    return model


def compile_frozen(model: nn.Module) -> None:
    """Compile a frozen model with torch's inductor; on CPUs a C++ wrapper calls the operators, which is faster than
    Python.

    The settings also hold while dynamo traces the model, when options of `compile` would come too late.
    """
    from torch._inductor import config  # imported late, as it takes a second

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    # On AMD's CPUs float32 products are faster in oneDNN than in Intel's MKL, which inductor uses. A CPU with AMX is
    # excluded, as oneDNN could use the lower precision that is allowed below.
    capabilities = cpu_capabilities()
    mkl_is_slow = str(capabilities.get("cpu_name")).startswith("AMD") and not capabilities.get("amx_tile")
    use_onednn = _use_onednn_products if on_cpu and mkl_is_slow else nullcontext
    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def run_frozen(*args: Any, **kwargs: Any) -> Any:
        """Run a pass without gradients and under inductor's settings."""
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Tensor):
                refuse_gradients(argument)
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=on_cpu), use_onednn():
            return compiled(*args, **kwargs)

    model._compiled_call_impl = run_frozen


_lock = threading.Lock()
_previous_precisions: list[str] = []  # one entry per running pass: the setting from before the first of them


@contextmanager
def _use_onednn_products() -> Generator[None]:
    """Allow lower precision, which makes inductor use oneDNN; CPUs without instructions for it lose no precision."""
    matmul_settings: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    with _lock:
        _previous_precisions.append(_previous_precisions[0] if _previous_precisions else matmul_settings.fp32_precision)
        matmul_settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        with _lock:
            previous = _previous_precisions.pop()
            if not _previous_precisions:
                matmul_settings.fp32_precision = previous
