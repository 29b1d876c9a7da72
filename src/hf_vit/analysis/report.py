"""One HTML page with every analysis of a folder; pictures are inside, so that it can be sent as it is."""

import base64
from collections.abc import Sequence
from pathlib import Path

from hf_vit.analysis.document import AnalysisDocument
from hf_vit.results.writing import write_atomically

REPORT_NAME = "report.html"
_MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ model.name }}: analyses</title>
<style>
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45; }
img { max-width: 100%; }
table { border-collapse: collapse; }
td, th { padding: .15rem .8rem .15rem 0; text-align: left; }
.quiet { color: #555; font-size: .9rem; }
</style>
</head>
<body>
<h1>{{ model.name }}</h1>
<p>A {{ model.kind }} (fingerprint {{ model.fingerprint }}), looked at with {{ images.size }} images of
{{ images.name }}
{%- if images.split %}, split {{ images.split }}{% endif %} (fingerprint {{ images.fingerprint }}).
{%- if images.skipped %} {{ images.skipped | length }} unreadable images were left out:
{{ images.skipped | join(", ") }}.{% endif %}</p>
<p class="quiet">
{%- for name, value in settings.items() %}{{ name }} {{ value }}{{ ", " if not loop.last }}{% endfor %}</p>
{%- for one in documents %}
<h2>{{ one.title }}</h2>
<p>{{ one.shows }}</p>
{%- if one.inputs.against %}
<p>Compared with {{ one.inputs.against.name }}, a {{ one.inputs.against.kind }}
(fingerprint {{ one.inputs.against.fingerprint }}).</p>
{%- endif %}
{%- if one.inputs.cue_conflicts %}
<p>Looked at with {{ one.inputs.cue_conflicts.size }} images of {{ one.inputs.cue_conflicts.name }} (fingerprint
{{ one.inputs.cue_conflicts.fingerprint }}).
{%- if one.inputs.cue_conflicts.skipped %} {{ one.inputs.cue_conflicts.skipped | length }} unreadable images were left
out: {{ one.inputs.cue_conflicts.skipped | join(", ") }}.{% endif %}</p>
{%- endif %}
{%- for title, picture in pictures[one.name] %}
<p><img src="{{ picture }}" alt="{{ title }}"></p>
{%- endfor %}
{%- for note in one.notes %}
<p class="quiet">{{ note }}</p>
{%- endfor %}
<p class="quiet">{{ one.source }}. Numbers: {{ one.name }}.json</p>
<table class="quiet">
{%- for name, array in one.arrays.items() %}
<tr><td>{{ name }}</td><td>{{ array.axes | join(" x ") }}: {{ array.shape | join(" x ") }}</td><td>{{ array.unit }}</td>
<td>{{ array.meaning }}</td></tr>
{%- endfor %}
</table>
{%- endfor %}
{%- if left_out %}
<h2>Left out</h2>
<ul>
{%- for name, reason in left_out.items() %}
<li>{{ name }}: {{ reason }}</li>
{%- endfor %}
</ul>
{%- endif %}
</body>
</html>
"""


_STAGES_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Stages of a training</title>
<style>
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.45; }
img { max-width: 100%; }
</style>
</head>
<body>
<h1>Stages of a training</h1>
<p>{% for stage in stages %}<a href="{{ stage }}/report.html">{{ stage }}</a>{{ ", " if not loop.last }}{% endfor %}.
A line is a layer or depth, the first is dark; numbers: stages.json.</p>
{%- for title, picture in pictures %}
<h2>{{ title }}</h2>
<p><img src="{{ picture }}" alt="{{ title }}"></p>
{%- endfor %}
</body>
</html>
"""


def write_stage_report(folder: Path, stages: Sequence[str], pictures: dict[str, str]) -> Path:
    """Write `folder/report.html` over stages, whose own reports lie in folders of their names.

    `pictures`: file -> title.
    """
    from jinja2 import Environment

    shown = [(title, _embedded(folder / name)) for name, title in pictures.items()]
    path = folder / REPORT_NAME
    write_atomically(path, Environment(autoescape=True).from_string(_STAGES_PAGE).render(stages=stages, pictures=shown))
    return path


def write_report(folder: Path, documents: Sequence[AnalysisDocument], left_out: dict[str, str]) -> Path:
    """Write `folder/report.html` of the analyses whose pictures lie there; `left_out`: name -> why not applicable."""
    from jinja2 import Environment

    page = Environment(autoescape=True).from_string(_PAGE)
    inputs = documents[0].inputs
    text = page.render(
        model=inputs.model,
        images=inputs.images,
        settings=inputs.settings,
        documents=documents,
        pictures={
            one.name: [(title, _embedded(folder / name)) for name, title in one.pictures.items()] for one in documents
        },
        left_out=left_out,
    )
    path = folder / REPORT_NAME
    write_atomically(path, text)
    return path


def _embedded(picture: Path) -> str:
    return f"data:{_MEDIA[picture.suffix]};base64,{base64.b64encode(picture.read_bytes()).decode()}"
