"""How FLOPs, durations and prices are printed, of a model and of a training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_vit.cost import CostSummary

Rows = list[tuple[str, str]]


def rate_of(device: str) -> float:
    """FLOP/s of matrix products on a torch device, at the precision that trainings there choose."""
    from hf_vit.cost import matmul_flops_per_second

    return matmul_flops_per_second(device, "bf16" if device.startswith("cuda") else "fp32")


def time_rows(summary: "CostSummary") -> Rows:
    """What a training is estimated to take, and what the last one took."""
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
    """In the unit that makes a readable number."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
