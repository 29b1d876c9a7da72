"""A comparison as text and picture: Markdown, HTML and PNG for people, CSV for spreadsheets, JSON for programs."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.comparison.result_files import ModelResult, Share, SpeedResult
from hf_vit.display import amount
from hf_vit.results.figures import new_figure, render_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REPORT = """
<div class="wide"><table>
<tr>{% for header in rows[0] %}<th>{{ header }}</th>{% endfor %}</tr>
{%- for row in rows %}
<tr>{% for value in row.values() %}<td>{{ value }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
{{ figure(picture, title) }}
{%- for sentence in sentences %}
<p class="quiet">{{ sentence }}</p>
{%- endfor %}
"""


def shown_rows(results: Sequence[ModelResult], speed: SpeedResult | None) -> list[dict[str, str]]:
    """Return a row a model, header -> text; what was not measured is an empty text, a header without any is left
    out.
    """
    rows = [_row(result, speed) for result in results]
    headers = [header for header in rows[0] if any(row.get(header) for row in rows)]
    headers += [header for row in rows for header in row if row[header] and header not in headers]
    return [{header: row.get(header, "") for header in dict.fromkeys(headers)} for row in rows]


def sentences(results: Sequence[ModelResult], speed: SpeedResult | None) -> list[str]:
    """Return what must be said beside the table."""
    first = results[0].inputs
    settings, data = first.settings, first.data
    size = data.size or 0
    lines = [f"{data.name}, split {data.split}, {size:,} images; brackets: Wilson's 95% interval."]
    if results[0].clean is not None:
        images = min(settings["robustness_images"] or size, size)
        lines.append(
            f"{images:,} images were corrupted (severity {settings['severity']}) and attacked (FGSM, 1/255); accuracy "
            "on them as they are is in the column clean."
        )
    if speed is not None:
        machine = f"{speed.hardware.get('name')}, {speed.hardware.get('device')}, {speed.threads} threads of torch"
        load = (
            "the machine was otherwise idle"
            if speed.quiet
            else f"other processes used {speed.others_load:.1f} cores: compare ratios, not images/s"
        )
        lines.append(
            f"Speed: forwards of {speed.batch_size} images on {machine}, {speed.turns} turns, every model once a turn; "
            f"times as fast as {next(iter(speed.rows))}, median and quartiles of the turns; {load}. "
            "Memory: what a forward holds beyond weights and input."
        )
    return lines + [f"{result.name}: {note}." for result in results for note in result.notes]


def markdown(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """Return the table and what must be said beside it."""
    rows = shown_rows(results, speed)
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(value.replace("|", "\\|") for value in row.values()) + " |" for row in rows]
    lines += [line for sentence in sentences(results, speed) for line in ("", sentence)]
    return "\n".join(lines) + "\n"


def html(results: Sequence[ModelResult], speed: SpeedResult | None, picture: Path) -> str:
    """Return a page of the table, the picture (a PNG file), and what must be said beside them."""
    return render_report(
        f"{len(results)} models on {results[0].inputs.data.name}",
        _REPORT,
        width=80,
        rows=shown_rows(results, speed),
        sentences=sentences(results, speed),
        picture=picture,
    )


def plain_csv(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """One line a model with every number as it was measured; empty where there is none."""
    rows = [_numbers(result, speed) for result in results]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plain_json(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """`{"format": 1, "models": [ModelResult], "speed": SpeedResult or null}`."""
    models = [result.model_dump(mode="json") for result in results]
    made = {"format": 1, "models": models, "speed": None if speed is None else speed.model_dump(mode="json")}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _row(result: ModelResult, speed: SpeedResult | None) -> dict[str, str]:
    model = result.inputs.model
    row = {
        "model": result.name,
        "kind": model.kind,
        "judged by": model.judged_by,
        "px": "x".join(map(str, result.image_size)),
        "parameters": "" if result.parameters is None else amount(result.parameters),
        "FLOPs": "" if result.flops is None else amount(result.flops),
        "top-1 (%)": _interval(result.top1),
        "top-5 (%)": _interval(result.top5),
        "calibration error (%)": _percent(result.ece),
        "clean (%)": _percent(result.clean),
        "corrupted, mean (%)": _percent(result.mean_corrupted),
    }
    row |= {f"FGSM {epsilon} (%)": _percent(value) for epsilon, value in (result.fgsm or {}).items()}
    if speed is not None:
        own = speed.rows[result.name]
        ratio = own.times_as_fast
        row["times as fast"] = f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})"
        row["images/s"] = f"{own.images_per_second.median:,.4g}"
        row["memory (MB)"] = "" if own.peak_memory is None else f"{own.peak_memory / 1e6:,.4g}"
    return row


def _numbers(result: ModelResult, speed: SpeedResult | None) -> dict[str, Any]:
    row: dict[str, Any] = result.inputs.model.model_dump()
    row |= dict(zip(("image_height", "image_width"), result.image_size, strict=True))
    row |= {"parameters": result.parameters, "flops": result.flops}
    for name, share in (("top1", result.top1), ("top5", result.top5)):
        row |= {name: share and share.value, f"{name}_low": share and share.low, f"{name}_high": share and share.high}
    row |= {"loss": result.loss, "ece": result.ece, "clean": result.clean}
    row |= {f"corrupted_{name}": value for name, value in result.corruptions.items()}
    row |= {f"fgsm_{epsilon}": value for epsilon, value in (result.fgsm or {}).items()}
    if speed is not None:
        own = speed.rows[result.name]
        row |= {f"times_as_fast_{name}": value for name, value in own.times_as_fast.model_dump().items()}
        row |= {f"images_per_second_{name}": value for name, value in own.images_per_second.model_dump().items()}
        row["peak_memory"] = own.peak_memory
    return row


def _interval(share: Share | None) -> str:
    return "" if share is None else f"{100 * share.value:.2f} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def draw_comparison(results: Sequence[ModelResult], speed: SpeedResult | None) -> "Figure":
    """Accuracy with its interval, calibration, robustness and speed by model; below, accuracy against FLOPs."""
    robust = any(result.clean is not None for result in results)
    panels = 2 + robust + (speed is not None)
    figure = new_figure(3.1 * panels + 2, 1.2 + 0.32 * len(results) + 3.4)
    grid = figure.add_gridspec(2, panels, height_ratios=[0.8 + 0.32 * len(results), 3.4])
    axes = [figure.add_subplot(grid[0, place]) for place in range(panels)]
    shares = [result.top1 for result in results]
    _intervals(axes[0], [(100 * one.low, 100 * one.value, 100 * one.high) for one in shares], "tab:blue")
    axes[0].set_xlabel("top-1 accuracy (%), 95% interval")
    axes[1].barh(range(len(results)), [100 * result.ece for result in results], color="tab:gray", height=0.6)
    axes[1].set_xlabel("calibration error (%)")
    if robust:
        _robustness(axes[2], results)
    if speed is not None:
        _speed(axes[-1], results, speed)
    for place, one in enumerate(axes):
        names = [result.name for result in results] if place == 0 else [""] * len(results)
        one.set_yticks(range(len(results)), labels=names, parse_math=False)
        one.set_ylim(len(results) - 0.5, -0.5)
        one.grid(visible=True, axis="x", alpha=0.3)
    below = figure.add_subplot(grid[1, :])
    for result in results:
        if result.flops is not None:
            point = (result.flops, 100 * result.top1.value)
            below.plot(*point, marker="o", color="tab:blue")
            below.annotate(f" {result.name}", point, fontsize=8, va="center", parse_math=False)
    _logarithmic(below)
    below.margins(x=0.15)
    below.set_xlabel("FLOPs of a forward, one image")
    below.set_ylabel("top-1 accuracy (%)")
    below.grid(visible=True, alpha=0.3)
    return figure


def _robustness(axes: "Axes", results: Sequence[ModelResult]) -> None:
    series = {"clean": [result.clean for result in results], "corrupted": [result.mean_corrupted for result in results]}
    for epsilon in dict.fromkeys(epsilon for result in results for epsilon in result.fgsm or {}):
        series[f"FGSM {epsilon}/255"] = [(result.fgsm or {}).get(epsilon) for result in results]
    for name, marker in zip(series, "os<>v^dP*X", strict=False):
        points = [(100 * value, place) for place, value in enumerate(series[name]) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, markersize=5, label=name)
    axes.set_xlabel("accuracy, corrupted and attacked (%)")
    axes.legend(fontsize=7)


def _speed(axes: "Axes", results: Sequence[ModelResult], speed: SpeedResult) -> None:
    ratios = [speed.rows[result.name].times_as_fast for result in results]
    _intervals(axes, [(ratio.lower, ratio.median, ratio.upper) for ratio in ratios], "tab:orange")
    axes.axvline(1, color="black", linewidth=0.6)
    _logarithmic(axes)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times as fast as the first" + ("" if speed.quiet else " (busy machine)"))


def _intervals(axes: "Axes", rows: Sequence[tuple[float, float, float]], color: str) -> None:
    for place, (low, middle, high) in enumerate(rows):
        axes.plot([low, high], [place, place], color=color)
        axes.plot(middle, place, marker="o", color=color)


def _logarithmic(axes: "Axes") -> None:
    """Ticks at 1, 2 and 5 of every decade, as people read them: 500 k, 2 M."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
