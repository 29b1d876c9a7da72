"""`hf-vit cost`."""

from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import print_table
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from hf_vit.cost import BesideTpu, BlogEstimate, CorrectedEstimate, CostSummary, MemoryPlan

Rows = list[tuple[str, str]]

_TRAINING = "A training (mode flops)"
# Mode -> what it reads; blog and corrected have their own numbers.
_TAKES: dict[str, set[str]] = {
    "flops": {"image_size", "images", "epochs", "devices", "device_flops", "utilization", "price"},
    "memory": {"image_size", "devices", "batch_size", "precision"},
    "blog": set(),
    "corrected": set(),
    "tpu": {"device_flops"},
}
_OPTIONS = set[str]().union(*_TAKES.values())
_MEMORY = "Memory of a training (mode memory, with --devices, 64 by default)"


def cost(
    model: str = arg(..., "Variant (L/16), folder, Hub id, or whatever hf-vit convert reads."),
    image_size: str | None = opt(None, "Input size in pixels: 224 or 224x160. Default: the model's."),
    images: float | None = opt(
        None, "Images in the training set. Default: those recorded in the folder.", panel=_TRAINING
    ),
    epochs: float | None = opt(None, "Epochs of the training. Default: 1.", panel=_TRAINING),
    devices: int | None = opt(None, "Number of devices. Default: 1.", panel=_TRAINING),
    device_flops: str | None = opt(
        None, "Peak FLOP/s of a device: 312e12, or here to measure this machine.", panel=_TRAINING
    ),
    utilization: float | None = opt(None, "Share of the peak that a training sustains. Default: 0.4.", panel=_TRAINING),
    price: float | None = opt(None, "Price in dollars per device-hour.", panel=_TRAINING),
    batch_size: int | None = opt(None, "Images per device and step. Default: 1.", panel=_MEMORY),
    precision: str | None = opt(None, "fp32 or bf16. Default: fp32.", panel=_MEMORY),
    mode: str = opt(
        "flops",
        "flops; memory; blog or corrected: prices of the original L/16 and H/14; tpu: this machine beside TPUs.",
    ),
    as_json: bool = opt(False, "Print JSON.", "--json"),
) -> None:
    """Count FLOPs; estimate time, cost and memory of a training."""
    given = {name: value for name, value in locals().items() if name in _OPTIONS and value is not None}
    from hf_vit.cost import beside_tpu, blog_estimate, corrected_estimate, cost_summary, memory_plan

    _refuse_unused(mode, given)
    for name, read in {"image_size": options.parse_size, "device_flops": _rate}.items():
        if name in given:
            given[name] = read(given[name])
    if mode == "flops":
        if "utilization" in given:
            given["utilisation"] = given.pop("utilization")
        summary = cost_summary(model, **given)
        _show(model, summary, _summary_rows(summary), as_json)
    elif mode == "memory":
        plan = memory_plan(model, **given)
        _show(f"{model}, memory of a training with AdamW, on each device", plan, _memory_rows(plan), as_json)
    elif mode == "tpu":
        beside = beside_tpu(model, given["device_flops"] if given else _rate("here"))
        what = "this machine's matrix products" if device_flops in (None, "here") else "a device of"
        _show(f"{model}, beside TPUv3 cores", beside, _tpu_rows(beside, what), as_json)
    elif mode == "blog":
        found = blog_estimate(model)
        _show(f"{model}, as the blog post reckoned", found, _blog_rows(found), as_json)
    else:
        corrected = corrected_estimate(model)
        _show(f"{model}, corrected", corrected, _corrected_rows(corrected), as_json)


def _refuse_unused(mode: str, given: dict[str, Any]) -> None:
    from hf_vit.errors import UserError

    if mode not in _TAKES:
        raise UserError(f"mode '{mode}' is unknown; choose {', '.join(_TAKES)}")
    unused = given.keys() - _TAKES[mode]
    if unused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given if name in unused)
        remedy = next((f"use --mode {other}" for other, takes in _TAKES.items() if unused <= takes), "leave them out")
        raise UserError(f"{names} would change nothing in mode {mode}; {remedy}")


def _rate(text: str) -> float:
    """Return the number after --device-flops, or this machine's."""
    from hf_vit.errors import UserError

    if text == "here":
        import torch

        return rate_of("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"--device-flops {text!r} is not a number; give FLOP/s such as 312e12, or here") from error


def _show(title: str, found: Any, rows: Rows, as_json: bool) -> None:
    if as_json:
        import dataclasses
        import json

        told = dataclasses.asdict(found)
        typer.echo(json.dumps(told | {"forward_flops": found.forward_flops} if "macs" in told else told, indent=2))
        return
    print_table(rows, title=title)


def _summary_rows(summary: "CostSummary") -> Rows:
    height, width = summary.image_size
    rows = [(f"forward, one image of {height}x{width} px", flops(summary.forward_flops))]
    rows += [(f"  {part}", flops(2 * macs)) for part, macs in summary.macs.items()]
    if summary.training_flops is not None:
        rows.append((f"training on {summary.images:,.0f} images", flops(summary.training_flops)))
    return rows + time_rows(summary)


def _memory_rows(plan: "MemoryPlan") -> Rows:
    height, width = plan.image_size
    images = f"{plan.batch_size} images of {height}x{width} px in {plan.precision}"
    rows = [
        (f"weights, gradients, averages of {plan.parameters:,} parameters", gigabytes(plan.states)),
        (f"activations of {images}", gigabytes(plan.activations)),
    ]
    if plan.checkpointed is not None:
        rows.append(("  with activation checkpointing", gigabytes(plan.checkpointed)))
    for row in plan.rows:
        ways = {"DDP": row.replicated, "FSDP2": row.sharded, "and checkpointing": row.checkpointed}
        shown = ", ".join(f"{way} {gigabytes(held)}" for way, held in ways.items() if held is not None)
        rows.append((f"{row.devices} devices" if row.devices > 1 else "one device", shown))
    return rows


def _blog_rows(found: "BlogEstimate") -> Rows:
    return [
        ("TPUv3-core-days (paper, table 2)", f"{found.core_days:,g}"),
        ("price on TPUs", f"{dollars(found.tpu_dollars)}"),
        ("four V100 against one TPU core", f"{found.speed_up:.2f} times as fast"),
        ("time on four V100", f"{found.gpu_days:.1f} days"),
        ("price on four V100", f"{dollars(found.gpu_dollars)}"),
        *((f"assumption {number}", text) for number, text in enumerate(found.assumptions, start=1)),
    ]


def _tpu_rows(found: "BesideTpu", what: str) -> Rows:
    return [
        ("TPUv3-core-days (paper, table 2)", f"{found.core_days:,g}"),
        ("peak of a TPU core (data sheet)", f"{flops(found.tpu_core_flops)}/s"),
        ("sustained by a TPU core", f"{flops(found.sustained_flops)}/s, {found.tpu_utilisation:.0%} of its peak"),
        (what, f"{flops(found.device_flops)}/s, {found.cores:.3g} TPU cores"),
        ("time there at the same share", duration(found.days * 86400)),
        ("time there at its whole rate", duration(found.least_days * 86400)),
    ]


def _corrected_rows(found: "CorrectedEstimate") -> Rows:
    rows: Rows = []
    for number, fix in enumerate(found.corrections, start=1):
        shown = dollars if fix.quantity.endswith("dollars") else "{:,.1f}".format
        change = f"{fix.quantity} {shown(fix.before)} -> {shown(fix.after)}"
        rows.append((f"correction {number}", f"not: {fix.assumption}\nbut: {fix.instead}\n{change}"))
    share = f"{flops(found.sustained_flops)}/s, {found.tpu_utilisation:.0%} of its peak"
    return [
        *rows,
        ("sustained by a TPU core", share),
        ("price on TPUs", f"{dollars(found.tpu_dollars)} ({found.device_days:g} device-days)"),
        ("four V100 against one TPU core", f"{found.speed_up:.2f} times as fast"),
        ("time on four V100", f"{found.gpu_days:.1f} days"),
        ("price on four V100", f"{dollars(found.gpu_dollars)}"),
    ]


def rate_of(device: str) -> float:
    """FLOP/s of matrix products on a torch device, at the precision that trainings there choose."""
    from hf_vit.cost import matmul_flops_per_second

    return matmul_flops_per_second(device, "bf16" if device.startswith("cuda") else "fp32")


def time_rows(summary: "CostSummary") -> Rows:
    """Return what a training is estimated to take, and what the last one took."""
    rows: Rows = []
    if (found := summary.estimate) is not None:
        told = f"{found.devices} x {flops(found.device_flops)}/s x {found.utilisation:.0%}"
        rows.append(("estimated time", f"{duration(found.seconds)} ({told})"))
        if found.dollars is not None:
            rows.append(("estimated price", f"${found.dollars:,.2f} ({found.device_hours:,.1f} h x ${found.price:g})"))
    if (run := summary.measured) is not None and run.seconds is not None and run.flops_per_second is not None:
        told = f"{flops(run.flops_per_second)}/s"
        if found is not None:
            told += f", {run.flops_per_second / (found.devices * found.device_flops):.0%} of this peak"
        rows.append(("measured time", f"{duration(run.seconds)} ({told})"))
        if run.hardware:
            rows.append(("measured on", run.hardware))
    return rows


def dollars(value: float) -> str:
    """$18,713 of 18,712.50: halves are rounded up."""
    return f"${int(value + 0.5):,}"


def flops(value: float) -> str:
    """17.6 GFLOPs."""
    for prefix, size in (("exa", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:,.4g} {prefix}FLOPs"
    return f"{value / 1e3:,.4g} kFLOPs"


def gigabytes(number: int) -> str:
    """12.3 GB of 12,345,678,901 bytes."""
    return f"{number / 1e9:,.3g} GB" if number < 1e11 else f"{number / 1e9:,.0f} GB"


def duration(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
