"""The pictures of the analyses, drawn off screen; the same arrays give the same bytes."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

PictureFormat = Literal["png", "svg"]
_DPI = 120
_MAX_TILES = 14  # tiles along an axis of the position picture; more would be too small to see


def encode(figure: "Figure", picture_format: PictureFormat) -> bytes:
    """A figure as the bytes of a file, without dates, versions or random ids."""
    from matplotlib import rc_context

    content = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None} if picture_format == "png" else {"Date": None, "Creator": None}
    with rc_context({"svg.hashsalt": "hf-vit"}):
        figure.savefig(content, format=picture_format, dpi=_DPI, metadata=metadata)
    return content.getvalue()


def heads_by_depth(arrays: "Mapping[str, NDArray[np.float32]]", label: str) -> "Figure":
    """One panel an array [L, A]: a dot a head over the layer, a line through their means."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(4.4 * len(arrays), 3.6)
    top = 1.05 * max(float(values.max()) for values in arrays.values())
    for place, (name, values) in enumerate(arrays.items()):
        axes = figure.add_subplot(1, len(arrays), place + 1)
        layers = np.arange(1, len(values) + 1)
        for head in values.T:
            axes.scatter(layers, head, s=10, alpha=0.6, color="tab:blue", linewidths=0)
        axes.plot(layers, values.mean(axis=1), color="tab:orange", label="mean of the heads")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_ylim(0, top or 1)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def overlays(pixels: "NDArray[np.uint8]", maps: "NDArray[np.float32]") -> "Figure":
    """Images [I, H, W, 3] above themselves under a heat map [I, h, w], each map on its own scale."""
    count = len(maps)
    figure = _figure(2.2 * count, 4.6)
    for place, (image, found) in enumerate(zip(pixels, maps, strict=True)):
        height, width = image.shape[:2]
        for row in range(2):
            axes = figure.add_subplot(2, count, row * count + place + 1)
            axes.imshow(image, interpolation="nearest")
            if row:
                extent = (-0.5, width - 0.5, height - 0.5, -0.5)
                axes.imshow(found, cmap="inferno", alpha=0.6, extent=extent, interpolation="bilinear", vmin=0)
            axes.set_axis_off()
    return figure


def head_grid(image: "NDArray[np.uint8]", maps: "NDArray[np.float32]") -> "Figure":
    """An image [H, W, 3] and its maps [L, A, h, w]: one row a layer, one column a head."""
    layers, heads = maps.shape[:2]
    figure = _figure(0.9 * (heads + 2) + 0.6, 0.9 * max(layers, 2) + 0.4)
    grid = figure.add_gridspec(layers, heads + 2)
    axes = figure.add_subplot(grid[: min(2, layers), :2])
    axes.imshow(image, interpolation="nearest")
    axes.set_axis_off()
    for layer in range(layers):
        for head in range(heads):
            axes = figure.add_subplot(grid[layer, head + 2])
            axes.imshow(maps[layer, head], cmap="inferno", interpolation="nearest", vmin=0)
            axes.set_xticks([])
            axes.set_yticks([])
            if head == 0:
                axes.set_ylabel(f"layer {layer + 1}", fontsize=7)
            if layer == 0:
                axes.set_title(f"head {head + 1}", fontsize=7)
    return figure


def filters(components: "NDArray[np.float32]") -> "Figure":
    """Components [F, C, P, P']: as colour tiles for 3 channels, gray for 1; of more channels or 1x1, as one matrix."""
    count, channels, height, width = components.shape
    if channels not in (1, 3) or height * width == 1:
        figure = _figure(7, 4)
        axes = figure.add_subplot()
        axes.imshow(components.reshape(count, -1), cmap="coolwarm", aspect="auto", interpolation="nearest")
        axes.set_xlabel("input channel" if height * width == 1 else "input channel, row, column")
        axes.set_ylabel("component")
        return figure
    columns = min(7, count)
    rows = -(-count // columns)
    figure = _figure(0.9 * columns, 0.9 * rows)
    for place, component in enumerate(components):
        axes = figure.add_subplot(rows, columns, place + 1)
        low, high = component.min(), component.max()
        tile = ((component - low) / max(high - low, 1e-12)).transpose(1, 2, 0)
        axes.imshow(tile if channels == 3 else tile[..., 0], cmap="gray", interpolation="nearest", vmin=0, vmax=1)
        axes.set_axis_off()
    return figure


def position_tiles(similarity: "NDArray[np.float32]") -> "Figure":
    """Cosine similarities [h, w, h, w]: one tile a patch (of large grids, of every second, third, ... patch)."""
    h, w = similarity.shape[:2]
    rows, columns = (np.arange(0, side, -(-side // _MAX_TILES)) for side in (h, w))
    side = 0.45 if max(len(rows), len(columns)) > 7 else 0.7
    figure = _figure(side * len(columns) + 1.2, side * len(rows) + 0.4)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for (place, other), one in np.ndenumerate(axes):
        picture = one.imshow(similarity[rows[place], columns[other]], vmin=-1, vmax=1, cmap="viridis")
        one.set_xticks([])
        one.set_yticks([])
    figure.supxlabel("patch column", fontsize=8)
    figure.supylabel("patch row", fontsize=8)
    figure.colorbar(picture, ax=axes, label="cosine similarity", fraction=0.046, pad=0.02)  # pyright: ignore[reportPossiblyUnboundVariable]
    return figure


def cka(values: "NDArray[np.float32]", first: str, second: str) -> "Figure":
    """A heat map of [L, L'], layer 0 at the bottom left."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(5.2, 4.2)
    axes = figure.add_subplot()
    picture = axes.imshow(values, origin="lower", cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_ylabel(first, parse_math=False)
    axes.set_xlabel(second, parse_math=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(picture, ax=axes, label="CKA")
    return figure


def curves(
    panels: "Mapping[str, Mapping[str, NDArray[np.float32]]]",
    xlabel: str,
    ylabel: str,
    x: "NDArray[np.float32] | None" = None,
) -> "Figure":
    """One panel a title, one line a label over `x`, by default the place in the array; undefined values leave gaps."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(4.4 * len(panels), 3.6)
    for place, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for label, values in lines.items():
            axes.plot(np.arange(len(values)) if x is None else x, values, marker=".", label=label or None)
        if x is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if any(lines):
            axes.legend(fontsize=8)
    return figure


def over_steps(curves: "Mapping[str, NDArray[np.float32]]", steps: "Sequence[int]") -> "Figure":
    """One panel an array [stage, depth] (or [stage, 1]): a line a depth, dark to bright, over the training's steps."""
    from matplotlib import colormaps

    figure = _figure(4.4 * len(curves), 3.6)
    for place, (title, values) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), place + 1)
        depths = values.shape[1]
        for depth in range(depths):
            colour = colormaps["viridis"](depth / max(depths - 1, 1) * 0.9)
            axes.plot(steps, values[:, depth], marker=".", color=colour, label=str(depth) if depths > 1 else None)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, alpha=0.3)
        if depths > 1:
            axes.legend(fontsize=6, title="place", title_fontsize=6)
    return figure


def shares(names: "Sequence[str]", values: "NDArray[np.float32]", overall: float, label: str) -> "Figure":
    """One bar a name, 0 to 1, and a line for all together; undefined ones are left out."""
    figure = _figure(0.45 * len(names) + 2.2, 3.4)
    axes = figure.add_subplot()
    axes.bar(np.arange(len(names)), np.nan_to_num(values))
    axes.axhline(overall, color="tab:orange", label=f"all: {overall:.2f}")
    axes.set_xticks(np.arange(len(names)), names, rotation=45, ha="right", parse_math=False)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return figure


def fields(maps: "NDArray[np.float32]") -> "Figure":
    """Maps [L, h, w] with a largest value of 1, one tile a depth, logarithmic over three decades."""
    from matplotlib.colors import LogNorm

    columns = min(7, len(maps))
    rows = -(-len(maps) // columns)
    figure = _figure(1.6 * columns + 0.8, 1.8 * rows)
    tiles = figure.subplots(rows, columns, squeeze=False).ravel()
    for depth, (axes, found) in enumerate(zip(tiles, maps, strict=False)):
        picture = axes.imshow(found.clip(1e-3), norm=LogNorm(1e-3, 1), cmap="magma", interpolation="nearest")
        axes.set_title(f"depth {depth}", fontsize=8)
    for axes in tiles:
        axes.set_axis_off()
    figure.colorbar(picture, ax=list(tiles), label="gradient")  # pyright: ignore[reportPossiblyUnboundVariable]
    return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
