"""The outputs of a comparison: Markdown, HTML and PNG for people, CSV for spreadsheets, JSON for programs."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.comparison.result_files import ModelResult, Share, SpeedResult
from hf_vit.display import format_amount, format_count
from hf_vit.results.figures import make_figure, render_report

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


def make_rows(results: Sequence[ModelResult], speed: SpeedResult | None) -> list[dict[str, str]]:
    """Make a row of texts for every model, header -> text.

    A value that was not measured is an empty text, and a column without values is left out.
    """
    rows = [_make_row(result, speed) for result in results]
    all_headers = dict.fromkeys(header for row in rows for header in row)  # without duplicates, in their order
    headers = [header for header in all_headers if any(row.get(header) for row in rows)]
    return [{header: row.get(header, "") for header in headers} for row in rows]


def explain_table(results: Sequence[ModelResult], speed: SpeedResult | None) -> list[str]:
    """Return the sentences that explain the table: data, settings, machine and the notes on models."""
    first = results[0].inputs
    settings, data = first.settings, first.data
    size = data.size or 0
    lines = [f"{data.name}, split {data.split}, {size:,} images; brackets: Wilson's 95% interval."]
    if any(result.clean is not None for result in results):
        images = min(settings["robustness_images"] or size, size)
        changes = [f"corrupted (severity {settings['severity']})"] if settings["corruptions"] else []
        changes += ["attacked (FGSM, epsilon in 1/255)"] if settings["epsilons"] else []
        change = f"{images:,} images were {' and '.join(changes)}"
        lines.append(f"{change}; the column clean is the accuracy on the unchanged images.")
    if speed is not None:
        machine = f"{speed.hardware.get('name')}, {speed.hardware.get('device')}, {speed.threads} threads of torch"
        load = "the machine was otherwise idle"
        if not speed.quiet:
            load = f"other processes used {speed.others_load:.1f} cores: compare ratios, not images/s"
        lines.append(
            f"Speed: forward passes of {speed.batch_size} images on {machine}, every model once in each of "
            f"{speed.turns} turns; times as fast as {next(iter(speed.rows))}, with median and quartiles of the turns; "
            f"{load}. Memory: the peak of a forward pass in addition to weights and input."
        )
    return lines + [f"{result.name}: {note}." for result in results for note in result.notes]


def make_markdown(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """Return the table and its explanation as Markdown."""
    rows = make_rows(results, speed)
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(value.replace("|", "\\|") for value in row.values()) + " |" for row in rows]
    lines += [line for sentence in explain_table(results, speed) for line in ("", sentence)]
    return "\n".join(lines) + "\n"


def make_html(results: Sequence[ModelResult], speed: SpeedResult | None, picture: Path) -> str:
    """Return an HTML page with the table, the picture (a PNG file), and the explanation."""
    return render_report(
        f"{format_count(len(results), 'model')} on {results[0].inputs.data.name}",
        _REPORT,
        width=80,
        rows=make_rows(results, speed),
        sentences=explain_table(results, speed),
        picture=picture,
    )


def to_csv(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """Return a line per model with all unrounded numbers as CSV; a missing number is empty."""
    rows = [_list_numbers(result, speed) for result in results]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))  # without duplicates, in their order
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(results: Sequence[ModelResult], speed: SpeedResult | None) -> str:
    """Return `{"format": 1, "models": [ModelResult], "speed": SpeedResult or null}` as JSON."""
    models = [result.model_dump(mode="json") for result in results]
    document = {"format": 1, "models": models, "speed": None if speed is None else speed.model_dump(mode="json")}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _make_row(result: ModelResult, speed: SpeedResult | None) -> dict[str, str]:
    """Make the row of a model, header -> text, with rounded values."""
    model = result.inputs.model
    row = {
        "model": result.name,
        "kind": model.kind,
        "judged by": model.judged_by,
        "px": "x".join(map(str, result.image_size)),
        "parameters": format_amount(result.parameters),
        "FLOPs": format_amount(result.flops),
        "top-1 (%)": _format_interval(result.top1),
        "top-5 (%)": _format_interval(result.top5),
        "calibration error (%)": _format_percent(result.ece),
        "clean (%)": _format_percent(result.clean),
        "corrupted, mean (%)": _format_percent(result.mean_corrupted),
    }
    row |= {f"FGSM {epsilon} (%)": _format_percent(value) for epsilon, value in (result.fgsm or {}).items()}
    if speed is not None:
        model_speed = speed.rows[result.name]
        ratio = model_speed.times_as_fast
        row["times as fast"] = f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})"
        row["images/s"] = f"{model_speed.images_per_second.median:,.4g}"
        row["memory (MB)"] = "" if model_speed.peak_memory is None else f"{model_speed.peak_memory / 1e6:,.4g}"
    return row


def _list_numbers(result: ModelResult, speed: SpeedResult | None) -> dict[str, Any]:
    """Return all unrounded values of a model in one flat dictionary."""
    row: dict[str, Any] = result.inputs.model.model_dump()
    row |= dict(zip(("image_height", "image_width"), result.image_size, strict=True))
    row |= {"parameters": result.parameters, "flops": result.flops}
    for name, share in (("top1", result.top1), ("top5", result.top5)):
        numbers = (None, None, None) if share is None else (share.value, share.low, share.high)
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), numbers, strict=True))
    row |= {"loss": result.loss, "ece": result.ece, "clean": result.clean}
    row |= {f"corrupted_{name}": value for name, value in result.corruptions.items()}
    row |= {f"fgsm_{epsilon}": value for epsilon, value in (result.fgsm or {}).items()}
    if speed is not None:
        model_speed = speed.rows[result.name]
        row |= {f"times_as_fast_{name}": value for name, value in asdict(model_speed.times_as_fast).items()}
        images_per_second = asdict(model_speed.images_per_second)
        row |= {f"images_per_second_{name}": value for name, value in images_per_second.items()}
        row["peak_memory"] = model_speed.peak_memory
    return row


def _format_interval(share: Share | None) -> str:
    """Format a share with its interval in percent, None as an empty text."""
    return "" if share is None else f"{100 * share.value:.2f} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _format_percent(value: float | None) -> str:
    """Format a fraction in percent, None as an empty text."""
    return "" if value is None else f"{100 * value:.2f}"


def draw_comparison(results: Sequence[ModelResult], speed: SpeedResult | None) -> "Figure":
    """Draw accuracy with interval, calibration, robustness and speed per model; below them, accuracy against FLOPs."""
    has_robustness = any(result.clean is not None for result in results)
    panels = 2 + has_robustness + (speed is not None)
    # Sizes in inches: a panel has a row per model; below the panels is a scatter plot.
    panel_width, names_width, scatter_height, margin = 3.1, 2, 3.4, 0.4
    panel_height = 0.8 + 0.32 * len(results)
    figure = make_figure(panel_width * panels + names_width, panel_height + scatter_height + margin)
    grid = figure.add_gridspec(2, panels, height_ratios=[panel_height, scatter_height])
    axes = [figure.add_subplot(grid[0, column]) for column in range(panels)]
    shares = [result.top1 for result in results]
    _draw_intervals(axes[0], [(100 * top1.low, 100 * top1.value, 100 * top1.high) for top1 in shares], "tab:blue")
    axes[0].set_xlabel("top-1 accuracy (%), 95% interval")
    axes[1].barh(range(len(results)), [100 * result.ece for result in results], color="tab:gray", height=0.6)
    axes[1].set_xlabel("calibration error (%)")
    if has_robustness:
        _draw_robustness(axes[2], results)
    if speed is not None:
        _draw_speed(axes[-1], results, speed)
    for column, panel in enumerate(axes):
        names = [result.name for result in results] if column == 0 else [""] * len(results)
        panel.set_yticks(range(len(results)), labels=names, parse_math=False)
        panel.set_ylim(len(results) - 0.5, -0.5)
        panel.grid(visible=True, axis="x", alpha=0.3)
    scatter = figure.add_subplot(grid[1, :])
    for result in results:
        if result.flops is not None:
            point = (result.flops, 100 * result.top1.value)
            scatter.plot(*point, marker="o", color="tab:blue")
            scatter.annotate(f" {result.name}", point, fontsize=8, va="center", parse_math=False)
    _set_logarithmic(scatter)
    scatter.margins(x=0.15)
    scatter.set_xlabel("FLOPs of the forward pass of an image")
    scatter.set_ylabel("top-1 accuracy (%)")
    scatter.grid(visible=True, alpha=0.3)
    return figure


def _draw_robustness(axes: "Axes", results: Sequence[ModelResult]) -> None:
    """Draw the accuracy of every model on clean, corrupted and attacked images as markers in its row."""
    series = {"clean": [result.clean for result in results], "corrupted": [result.mean_corrupted for result in results]}
    attacked = [result.fgsm or {} for result in results]
    for epsilon in dict.fromkeys(epsilon for accuracies in attacked for epsilon in accuracies):
        series[f"FGSM {epsilon}/255"] = [accuracies.get(epsilon) for accuracies in attacked]
    for (name, accuracies), marker in zip(series.items(), cycle("os<>v^dP*X"), strict=False):
        rows = [row for row, value in enumerate(accuracies) if value is not None]
        percentages = [100 * value for value in accuracies if value is not None]
        if rows:
            axes.plot(percentages, rows, linestyle="", marker=marker, markersize=5, label=name)
    axes.set_xlabel("accuracy, corrupted and attacked (%)")
    axes.legend(fontsize=7)


def _draw_speed(axes: "Axes", results: Sequence[ModelResult], speed: SpeedResult) -> None:
    """Draw the speed of every model relative to the first with its quartiles."""
    ratios = [speed.rows[result.name].times_as_fast for result in results]
    _draw_intervals(axes, [(ratio.lower, ratio.median, ratio.upper) for ratio in ratios], "tab:orange")
    axes.axvline(1, color="black", linewidth=0.6)
    _set_logarithmic(axes)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times as fast as the first" + ("" if speed.quiet else " (busy machine)"))


def _draw_intervals(axes: "Axes", intervals: Sequence[tuple[float, float, float]], color: str) -> None:
    """Draw intervals (low, middle, high), one per row, as a line with a marker."""
    for row, (low, middle, high) in enumerate(intervals):
        axes.plot([low, middle, high], [row] * 3, marker="o", markevery=[1], color=color)


def _set_logarithmic(axes: "Axes") -> None:
    """Make the x axis logarithmic, with labels such as 500 k and 2 M at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
