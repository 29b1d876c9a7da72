"""`report.html`: every analysis of a folder on one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_vit.analysis.analysis_file import AnalysisDocument
from hf_vit.results.report import render_report
from hf_vit.results.writing import write_atomically

REPORT_NAME = "report.html"

_REPORT = """
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
{{ figure(picture, title) }}
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
"""


def write_report(folder: Path, documents: Sequence[AnalysisDocument], left_out: Mapping[str, str]) -> None:
    """Write the page over analyses whose pictures lie in `folder`; `left_out`: name -> why it does not apply."""
    inputs = documents[0].inputs
    page = render_report(
        f"{inputs.model.name}: analyses",
        _REPORT,
        heading=inputs.model.name,
        model=inputs.model,
        images=inputs.images,
        settings={name: value for name, value in inputs.settings.items() if name != "num_images"},
        documents=documents,
        pictures={one.name: [(title, folder / name) for name, title in one.pictures.items()] for one in documents},
        left_out=left_out,
    )
    write_atomically(folder / REPORT_NAME, page)
