"""Figures drawn off screen, without pyplot's global state; the same figure gives the same bytes."""

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PictureFormat = Literal["png", "svg"]
_DPI = 120


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def integer_ticks(axis: "Axis") -> None:
    """Mark whole numbers only: layers, epochs, images."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def encode_figure(figure: "Figure", picture_format: PictureFormat = "png") -> bytes:
    """A figure as the bytes of a file, without dates, versions or random ids."""
    from matplotlib import rc_context

    content = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None} if picture_format == "png" else {"Date": None, "Creator": None}
    with rc_context({"svg.hashsalt": "hf-vit"}), warnings.catch_warnings():
        # A class name in a script the font lacks is drawn as boxes: not worth a warning in a user's terminal.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure.savefig(content, format=picture_format, dpi=_DPI, metadata=metadata)
    return content.getvalue()


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG in one move."""
    write_atomically(path, encode_figure(figure))
