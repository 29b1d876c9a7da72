"""`hf-vit cost`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.cost_rows import Rows, dollars, duration, flops, rate_of, time_rows

if TYPE_CHECKING:
    from hf_vit.cost import BesideTpu, BlogEstimate, CorrectedEstimate, CostSummary


_TRAINING = "A training (mode flops)"


def cost(
    model: Annotated[
        str,
        typer.Argument(help="Variant (L/16), folder, Hub id, or whatever hf-vit convert reads.", show_default=False),
    ],
    image_size: Annotated[str | None, typer.Option(help="px, S or HxW; by default the model's own.")] = None,
    images: Annotated[
        float | None,
        typer.Option(rich_help_panel=_TRAINING, help="In the training set; a folder tells its own."),
    ] = None,
    epochs: Annotated[float | None, typer.Option(rich_help_panel=_TRAINING, help="1 by default.")] = None,
    devices: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="1 by default.")] = None,
    device_flops: Annotated[
        str | None,
        typer.Option(rich_help_panel=_TRAINING, help="Peak FLOP/s of a device (312e12), or here: measure this one."),
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINING, help="Share of the peak that is kept, 0.4 by default.")
    ] = None,
    price: Annotated[float | None, typer.Option(rich_help_panel=_TRAINING, help="Dollars a device-hour.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="flops; blog, corrected: prices of the original L/16 and H/14; tpu: those beside this machine."
        ),
    ] = "flops",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count FLOPs; estimate time and money of a training, beside what a finished one took."""
    from hf_vit.cost import beside_tpu, blog_estimate, corrected_estimate, cost_summary
    from hf_vit.errors import UserError

    asked: dict[str, Any] = {
        "image_size": options.parse_size(image_size),
        "images": images,
        "epochs": epochs,
        "devices": devices,
        "device_flops": None if device_flops is None else _rate(device_flops),
        "utilisation": utilisation,
        "price": price,
    }
    if mode == "flops":
        summary = cost_summary(model, **asked)
        _show(model, summary, _summary_rows(summary), as_json)
        return
    if mode not in ("blog", "corrected", "tpu"):
        raise UserError(f"mode '{mode}' is unknown; choose flops, blog, corrected or tpu")
    rate = _rate(device_flops or "here") if mode == "tpu" else 0.0
    unused = [
        f"--{name.replace('_', '-')}"
        for name, value in asked.items()
        if value is not None and (mode, name) != ("tpu", "device_flops")
    ]
    if unused:
        raise UserError(f"{', '.join(unused)} would change nothing: mode {mode} has its own numbers; use --mode flops")
    if mode == "tpu":
        beside = beside_tpu(model, rate)
        what = "this machine's matrix products" if device_flops in (None, "here") else "a device of"
        _show(f"{model}, beside TPUv3 cores", beside, _tpu_rows(beside, what), as_json)
    elif mode == "blog":
        found = blog_estimate(model)
        _show(f"{model}, as the blog post reckoned", found, _blog_rows(found), as_json)
    else:
        corrected = corrected_estimate(model)
        _show(f"{model}, corrected", corrected, _corrected_rows(corrected), as_json)


def _rate(text: str) -> float:
    """The number after --device-flops, or this machine's."""
    from hf_vit.errors import UserError

    if text == "here":
        import torch

        return rate_of("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"--device-flops {text!r} is no number; give FLOP/s such as 312e12, or here") from error


def _show(title: str, found: Any, rows: Rows, as_json: bool) -> None:
    if as_json:
        import dataclasses
        import json

        told = dataclasses.asdict(found)
        typer.echo(json.dumps(told | {"forward_flops": found.forward_flops} if "macs" in told else told, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def _summary_rows(summary: "CostSummary") -> Rows:
    height, width = summary.image_size
    rows = [(f"forward, one image of {height}x{width} px", flops(summary.forward_flops))]
    rows += [(f"  {part}", flops(2 * macs)) for part, macs in summary.macs.items()]
    if summary.training_flops is not None:
        rows.append((f"training on {summary.images:,.0f} images", flops(summary.training_flops)))
    return rows + time_rows(summary)


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
