"""`hf-vit cost`."""

import dataclasses
import inspect
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, print_table
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hf_vit.cost import BesideTpu, BlogEstimate, CorrectedEstimate, CostSummary, MemoryPlan

Rows = list[tuple[str, str]]

_TRAINING = "A training (mode flops)"
_MEMORY = "Memory of a training (mode memory, with --devices, 64 by default)"


def cost(
    model: str = arg(
        ..., "Model: variant (such as L/16), folder, Hub id, or any checkpoint that hf-vit convert reads."
    ),
    image_size: str | None = opt(None, "Input size in pixels: 224 or 224x160. Default: the model's."),
    images: float | None = opt(
        None,
        "Number of images in the training set. Default: the number recorded in the model's folder.",
        panel=_TRAINING,
    ),
    epochs: float | None = opt(None, "Epochs of the training. Default: 1.", panel=_TRAINING),
    devices: int | None = opt(None, "Number of devices. Default: 1.", panel=_TRAINING),
    device_flops: str | None = opt(
        None, "Peak speed of a device in FLOP/s (312e12), or here to measure this machine.", panel=_TRAINING
    ),
    utilization: float | None = opt(
        None, "Share of the peak speed that the training reaches, 0 to 1. Default: 0.4.", panel=_TRAINING
    ),
    price: float | None = opt(None, "Price in dollars per device-hour.", panel=_TRAINING),
    batch_size: int | None = opt(None, "Images per device and step. Default: 1.", panel=_MEMORY),
    precision: str | None = opt(None, "Precision: fp32 or bf16. Default: fp32.", panel=_MEMORY),
    mode: str = opt(
        "flops",
        "What to estimate: flops, memory, the price of training the paper's L/16 or H/14 (blog or corrected), or "
        "tpu, this machine compared with TPUs.",
    ),
    as_json: bool = options.JSON,
) -> None:
    """Count FLOPs; estimate time, cost and memory of a training."""
    values = collect_options(locals(), "model", "mode", "as_json")
    arguments = {name: value for name, value in values.items() if value is not None}
    from hf_vit.cost import beside_tpu, blog_estimate, corrected_estimate, cost_summary, memory_plan

    device_label = "this machine's matrix products" if device_flops in (None, "here") else "the given device"
    modes: dict[str, tuple[Any, ...]] = {
        "flops": (cost_summary, _make_summary_rows, model),
        "memory": (memory_plan, _make_memory_rows, f"{model}, memory of a training with AdamW, on each device"),
        "blog": (blog_estimate, _make_blog_rows, f"{model}, as the blog post estimated"),
        "corrected": (corrected_estimate, _make_corrected_rows, f"{model}, corrected"),
        "tpu": (beside_tpu, partial(_make_tpu_rows, device_label), f"{model}, compared with TPUv3 cores"),
    }
    _check_options(mode, arguments, {name: function for name, (function, *_) in modes.items()})
    for name, parse in {"image_size": options.parse_size, "device_flops": _parse_rate}.items():
        if name in arguments:
            arguments[name] = parse(arguments[name])
    if "utilization" in arguments:
        arguments["utilisation"] = arguments.pop("utilization")
    if mode == "tpu" and not arguments:
        arguments["device_flops"] = _parse_rate("here")
    function, make_rows, title = modes[mode]
    result: Any = function(model, **arguments)
    if not as_json:
        print_table(make_rows(result), title=title)
        return
    fields = dataclasses.asdict(result)
    if mode == "flops":
        fields["forward_flops"] = result.forward_flops
    typer.echo(json.dumps(fields, indent=2))


def _check_options(mode: str, arguments: dict[str, Any], functions: "Mapping[str, Callable[..., Any]]") -> None:
    """Raise a UserError for an unknown mode, or for options that the mode's function does not take."""
    from hf_vit.errors import UserError

    if mode not in functions:
        raise UserError(f"--mode {mode} is unknown; use one of {', '.join(functions)}")
    options = {
        name: {parameter.replace("utilisation", "utilization") for parameter in inspect.signature(function).parameters}
        for name, function in functions.items()
    }
    unused_options = arguments.keys() - options[mode]
    if unused_options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in arguments if name in unused_options)
        remedy = next(
            (f"use --mode {other}" for other, mode_options in options.items() if unused_options <= mode_options),
            "remove them",
        )
        raise UserError(f"{names} has no effect with --mode {mode}; {remedy}")


def _parse_rate(text: str) -> float:
    """Return the FLOP/s given by --device-flops, measured on this machine for "here"."""
    from hf_vit.errors import UserError

    if text == "here":
        import torch

        return measure_rate("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return float(text)
    except ValueError as error:
        raise UserError(
            f"--device-flops {text!r} is not a number; give FLOP/s such as 312e12, or here (this machine)"
        ) from error


def _make_summary_rows(summary: "CostSummary") -> Rows:
    """Return the rows for FLOPs and time of a training."""
    height, width = summary.image_size
    rows = [(f"forward, one image of {height}x{width} px", format_flops(summary.forward_flops))]
    rows += [(f"  {part}", format_flops(2 * macs)) for part, macs in summary.macs.items()]
    if summary.training_flops is not None:
        rows.append((f"training on {summary.images:,.0f} images", format_flops(summary.training_flops)))
    estimate = summary.estimate
    if estimate is not None:
        speed = f"{format_flops(estimate.device_flops)}/s x {estimate.utilisation:.0%} utilization"
        duration = format_duration(estimate.seconds)
        rows.append(("estimated time", f"{duration} ({estimate.devices} x {speed})"))
        if estimate.dollars is not None:
            hours = f"{estimate.device_hours:,.1f} h x ${estimate.price:g}"
            rows.append(("estimated price", f"${estimate.dollars:,.2f} ({hours})"))
    return rows + make_measured_rows(summary)


def _make_memory_rows(plan: "MemoryPlan") -> Rows:
    """Return the rows for the memory of a training."""
    from hf_vit.display import format_count

    height, width = plan.image_size
    images = f"{format_count(plan.batch_size, 'image')} of {height}x{width} px in {plan.precision}"
    rows = [
        (f"weights, gradients, optimizer state of {plan.parameters:,} parameters", format_gigabytes(plan.states)),
        (f"activations of {images}", format_gigabytes(plan.activations)),
    ]
    if plan.checkpointed is not None:
        rows.append(("  with activation checkpointing", format_gigabytes(plan.checkpointed)))
    for row in plan.rows:
        strategies = {"DDP": row.replicated, "FSDP2": row.sharded, "and checkpointing": row.checkpointed}
        memory_text = ", ".join(
            f"{strategy} {format_gigabytes(memory)}" for strategy, memory in strategies.items() if memory is not None
        )
        rows.append((f"{row.devices} devices" if row.devices > 1 else "one device", memory_text))
    return rows


def _make_blog_rows(estimate: "BlogEstimate") -> Rows:
    """Return the rows for the estimate of the blog post."""
    return [
        ("TPUv3-core-days (paper, table 2)", f"{estimate.core_days:,g}"),
        ("price on TPUs", format_dollars(estimate.tpu_dollars)),
        ("speed of four V100 relative to one TPU core", f"{estimate.speed_up:.2f} times as fast"),
        ("time on four V100", f"{estimate.gpu_days:.1f} days"),
        ("price on four V100", format_dollars(estimate.gpu_dollars)),
        *((f"assumption {number}", text) for number, text in enumerate(estimate.assumptions, start=1)),
    ]


def _make_tpu_rows(device_label: str, estimate: "BesideTpu") -> Rows:
    """Return the rows that compare a device with TPU cores."""
    return [
        ("TPUv3-core-days (paper, table 2)", f"{estimate.core_days:,g}"),
        ("peak of a TPU core (data sheet)", f"{format_flops(estimate.tpu_core_flops)}/s"),
        (
            "speed reached by a TPU core",
            f"{format_flops(estimate.sustained_flops)}/s, {estimate.tpu_utilisation:.0%} of its peak",
        ),
        (device_label, f"{format_flops(estimate.device_flops)}/s, {estimate.cores:.3g} TPU cores"),
        ("time on that device at the same utilization", format_duration(estimate.days * 86400)),
        ("time on that device at full speed", format_duration(estimate.least_days * 86400)),
    ]


def _make_corrected_rows(estimate: "CorrectedEstimate") -> Rows:
    """Return the rows for the corrected estimate: every correction, and the resulting times and prices."""
    rows: Rows = []
    for number, fix in enumerate(estimate.corrections, start=1):
        format_value = format_dollars if fix.quantity.endswith("dollars") else "{:,.1f}".format
        change = f"{fix.quantity} {format_value(fix.before)} -> {format_value(fix.after)}"
        rows.append((f"correction {number}", f"assumed: {fix.assumption}\ncorrected: {fix.instead}\n{change}"))
    speed = f"{format_flops(estimate.sustained_flops)}/s, {estimate.tpu_utilisation:.0%} of its peak"
    return [
        *rows,
        ("speed reached by a TPU core", speed),
        ("price on TPUs", f"{format_dollars(estimate.tpu_dollars)} ({estimate.device_days:g} device-days)"),
        ("speed of four V100 relative to one TPU core", f"{estimate.speed_up:.2f} times as fast"),
        ("time on four V100", f"{estimate.gpu_days:.1f} days"),
        ("price on four V100", format_dollars(estimate.gpu_dollars)),
    ]


def measure_rate(device: str) -> float:
    """Return the FLOP/s of matrix products on a torch device, in the precision that trainings use there."""
    from hf_vit.cost import matmul_flops_per_second

    return matmul_flops_per_second(device, "bf16" if device.startswith("cuda") else "fp32")


def make_measured_rows(summary: "CostSummary") -> Rows:
    """Return the rows for the time of the last training, beside the peak of the device if it is known."""
    rows: Rows = []
    estimate = summary.estimate
    run = summary.measured
    if run is not None and run.seconds:
        details = "on cached features" if run.flops_per_second is None else f"{format_flops(run.flops_per_second)}/s"
        if run.flops_per_second is not None and estimate is not None:
            details += f", {run.flops_per_second / (estimate.devices * estimate.device_flops):.0%} of this peak"
        rows.append(("measured time", f"{format_duration(run.seconds)} ({details})"))
        if run.hardware:
            rows.append(("measured on", run.hardware))
    return rows


def format_dollars(value: float) -> str:
    """Return an amount such as $18,713 for 18712.5; halves are rounded up."""
    return f"${int(value + 0.5):,}"


def format_flops(value: float) -> str:
    """Return a number of FLOPs with a unit, such as 17.6 GFLOPs."""
    for prefix, size in (("exa", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:,.4g} {prefix}FLOPs"
    return f"{value / 1e3:,.4g} kFLOPs"


def format_gigabytes(number: int) -> str:
    """Return a number of bytes in GB, such as 12.3 GB."""
    return f"{number / 1e9:,.3g} GB" if number < 1e11 else f"{number / 1e9:,.0f} GB"


def format_duration(seconds: float) -> str:
    """Return seconds in the largest unit of which there are at least two, such as 3.2 h."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
