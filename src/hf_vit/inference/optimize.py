"""`optimize_for_inference`: what it takes, and in which order, so that a model is optimized wholly or not at all."""

from typing import TypeVar

import torch
from torch import nn

from hf_vit.environment import emulates_bfloat16, keep_freed_memory
from hf_vit.errors import UserError, enough_memory
from hf_vit.inference import int8
from hf_vit.inference.compiling import compile_frozen
from hf_vit.inference.encoders import EngineEncoder, EngineHead, choose_engine, engine_changes
from hf_vit.inference.engines import ENGINES, Engine
from hf_vit.inference.freezing import check_freezable, freeze
from hf_vit.inference.memory import memory_changes
from hf_vit.inference.merging import check_mergeable, merging_changes
from hf_vit.inference.packing import pack
from hf_vit.rewriting.looking import check_rewritable
from hf_vit.rewriting.planning import Change, Plan, channelwise_norms, plan_for

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

    q, k and v become one product, LayerScale and batch norms go into the weights, kernels are standardised once, and
    patches are cut by a product instead of a convolution. The last layer of a classifier that reads its class token
    computes only that, unless hidden states or attentions are asked for (a hook on it sees as much). On CPUs weights
    are packed for oneDNN, which then adds biases, residuals and GELU while the product is in the cache; bfloat16 is
    computed in float32 where the processor has no instructions for it; position tables are kept for the sizes of
    images that come, and freed memory for the next pass (`hf_vit.keep_freed_memory`, of the whole process).

    All of the model is looked at first, and everything new is built before anything is changed, so that a model that
    is refused, or for which memory runs out, is as it was. Meanwhile the weights are in memory twice, afterwards once.

    Args:
        model: any model of this package, or one that holds such a model; on its device and in its dtype (they are
            final), without adapters, hooks or parametrisations on what is rewritten.
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
    _check_options(engine, quantize)
    check_freezable(model)
    dtype, device = check_rewritable(model)
    if quantize is not None:
        int8.check_int8(model, device, compile)
    if merge_tokens is not None:
        check_mergeable(model, merge_tokens)
    others = {"compile": compile, "quantize": quantize, "merge_tokens": merge_tokens}
    computes = choose_engine(engine, model, (dtype, device), others)
    is_emulated = dtype == torch.bfloat16 and device.type == "cpu" and emulates_bfloat16()
    # A compiler cannot look into packed weights, and folds by itself what depends on weights alone.
    with enough_memory("the model's weights a second time", "use the model as it is, or where there is more"):
        finish = int8.quantize if quantize is not None else _as_it_is if compile else pack
        plan = plan_for(model, torch.float32 if is_emulated or quantize is not None else dtype, finish=finish)
        by_engine = _changes_by(computes, model, dtype, plan, must=engine != "auto")
    if merge_tokens is not None:
        plan.changes += merging_changes(model, plan.changes, merge_tokens)
    plan.changes += [*(channelwise_norms(model) if compile else memory_changes(model)), *by_engine]
    plan.carry_out()
    model.eval().requires_grad_(False)
    if compile:
        compile_frozen(model)
    freeze(model, (dtype, device), computes.package if computes and by_engine else "torch", (EngineEncoder, EngineHead))
    if device.type == "cpu":
        keep_freed_memory()
    return model


def _changes_by(
    engine: type[Engine] | None, model: nn.Module, dtype: torch.dtype, plan: Plan, *, must: bool
) -> list[Change]:
    """Of an engine; none where there is none, or where it cannot take the model and need not."""
    try:
        return [] if engine is None else engine_changes(model, engine, dtype, plan.classifiers)
    except UserError:
        if must:
            raise
        return []


def _as_it_is(part: nn.Module) -> nn.Module:
    return part


def _check_options(engine: str, quantize: object) -> None:
    if engine not in ("auto", "torch", *ENGINES):
        raise UserError(f"engine={engine!r}: there is {', '.join(map(repr, ('auto', 'torch', *ENGINES)))}")
    if quantize not in (None, "int8"):
        raise UserError(f"quantize={quantize!r}: there is None and 'int8'")
