"""A comparison as one HTML page with the picture inside, so that it can be sent as it is."""

import base64
from collections.abc import Sequence

from hf_vit.comparison.document import ModelResult, SpeedResult
from hf_vit.comparison.tables import sentences, shown_rows

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font-family: sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45; }
img { max-width: 100%; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #ddd; }
.quiet { color: #555; font-size: .9rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<div><table>
<tr>{% for header in rows[0] %}<th>{{ header }}</th>{% endfor %}</tr>
{%- for row in rows %}
<tr>{% for value in row.values() %}<td>{{ value }}</td>{% endfor %}</tr>
{%- endfor %}
</table></div>
<p><img src="data:image/png;base64,{{ picture }}" alt="{{ title }}"></p>
{%- for sentence in sentences %}
<p class="quiet">{{ sentence }}</p>
{%- endfor %}
</body>
</html>
"""


def html(results: Sequence[ModelResult], speed: SpeedResult | None, picture: bytes) -> str:
    """The page; `picture` is a PNG."""
    from jinja2 import Environment

    data = results[0].inputs.data
    page = Environment(autoescape=True).from_string(_PAGE)
    return page.render(
        title=f"{len(results)} models on {data.name}",
        rows=shown_rows(results, speed),
        sentences=sentences(results, speed),
        picture=base64.b64encode(picture).decode(),
    )
