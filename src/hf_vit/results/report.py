"""A report: one HTML page of results with the pictures inside, so that it can be sent as it is."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

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


def render_report(title: str, body: str, *, heading: str | None = None, width: int = 60, **values: object) -> str:
    """The page.

    Args:
        title: of the window, and above everything else unless there is a `heading`.
        body: a Jinja template of what stands below it; `figure(path, title)` shows a PNG or SVG file. All text is
            escaped.
        width: of the page at most, in rem.
        values: what the template names.
    """
    from jinja2 import DictLoader, Environment

    pages = Environment(autoescape=True, loader=DictLoader({"page": _PAGE, "body": body}))
    return pages.get_template("page").render(title=title, heading=heading, width=width, figure=_figure, **values)


def _figure(picture: Path, title: str) -> "Markup":
    from markupsafe import Markup

    content = base64.b64encode(picture.read_bytes()).decode()
    source = f"data:{_MEDIA[picture.suffix]};base64,{content}"
    return Markup('<p><img src="{}" alt="{}"></p>').format(source, title)
