"""Figures drawn without a display, and HTML reports that embed them; the same figure gives the same bytes."""

import base64
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_vit.writing import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PictureFormat = Literal["png", "svg"]
_DPI = 120
_MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font-family: sans-serif; max-width: {{ width }}rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
.quiet { color: #555; font-size: .9rem; }
</style>
</head>
<body>
<h1>{{ heading or title }}</h1>
{% include "body" %}
</body>
</html>
"""


def make_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def set_integer_ticks(axis: "Axis") -> None:
    """Set ticks at whole numbers only, for axes of layers, epochs or images."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def encode_figure(figure: "Figure", picture_format: PictureFormat = "png") -> bytes:
    """Return a figure as the bytes of a PNG or SVG file, without dates, versions or random ids."""
    from matplotlib import rc_context

    content = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None} if picture_format == "png" else {"Date": None, "Creator": None}
    with rc_context({"svg.hashsalt": "hf-vit"}), warnings.catch_warnings():
        # Class names in a script that the font lacks are drawn as boxes; users need no warning about it.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        figure.savefig(content, format=picture_format, dpi=_DPI, metadata=metadata)
    return content.getvalue()


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG in one move."""
    write_atomically(path, encode_figure(figure))


def render_report(title: str, body: str, *, heading: str | None = None, width: int = 60, **values: object) -> str:
    """Return an HTML page of results that embeds its images, so that it can be sent as one file.

    Args:
        title: title of the window, and the heading unless `heading` is given.
        body: Jinja template of the content; `figure(path, title)` embeds a PNG or SVG file. Values are escaped.
        heading: heading of the page.
        width: maximum width of the page in rem.
        values: values for the template.
    """
    from jinja2 import DictLoader, Environment

    environment = Environment(autoescape=True, loader=DictLoader({"page": _PAGE, "body": body}))
    return environment.get_template("page").render(title=title, heading=heading, width=width, figure=_embed, **values)


def _embed(picture: Path, title: str) -> "Markup":
    """Return an <img> element with the image file as a data URL."""
    from markupsafe import Markup

    content = base64.b64encode(picture.read_bytes()).decode()
    source = f"data:{_MEDIA[picture.suffix]};base64,{content}"
    return Markup('<p><img src="{}" alt="{}"></p>').format(source, title)
