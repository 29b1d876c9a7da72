"""List models and show them as a table, JSON or an HTML page with a leaderboard per data set."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from hf_vit.catalogue.entries import PAPERS, Entry, add_flops, belongs_to_family, list_entries
from hf_vit.catalogue.published import TOP1, Score
from hf_vit.display import Displayed, amount
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.protocols.frame import Table, percent
from hf_vit.families import FAMILIES
from hf_vit.results.figures import render_report
from hf_vit.results.writing import write_atomically

_BODY = """
<p class="quiet">{{ entries|length }} models from {{ places }}. Accuracies were published or recorded by the named
source; none was measured for this page.</p>
{% for data, rows in boards %}
<h2>{{ data }}</h2>
<div class="wide"><table>
<tr><th></th><th>model</th><th>{{ metric }}</th><th>parameters</th><th>FLOPs</th><th>source</th></tr>
{% for entry, score in rows %}
<tr><td>{{ loop.index }}</td><td>{{ entry.name }}</td><td>{{ percent(score.value) }}</td>
<td>{{ amount(entry.parameters) }}</td><td>{{ amount(entry.forward_flops) }}</td><td>{{ score.source }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
<h2>All models</h2>
<div class="wide"><table>
<tr><th>model</th><th>kind</th><th>architecture</th><th>parameters</th><th>FLOPs</th><th>checkpoints</th></tr>
{% for entry in entries %}
<tr><td>{{ entry.name }}</td><td>{{ entry.kind }}</td><td>{{ entry.problem or entry.model_type }}</td>
<td>{{ amount(entry.parameters) }}</td><td>{{ amount(entry.forward_flops) }}</td>
<td>{% for checkpoint in entry.checkpoints %}<code>{{ checkpoint }}</code><br>{% endfor %}</td></tr>
{% endfor %}
</table></div>
<p class="quiet">FLOPs are those of one image's forward pass (a multiply-add counts 2). FLOPs and parameters of a
paper's variant include a head for 1,000 classes.</p>
"""


@final
@dataclass(frozen=True, repr=False)
class Listing(Displayed):
    """The listed models, in display order.

    Attributes:
        places: the folders, users or "papers" that were searched.
        entries: the description of each model.
    """

    places: tuple[str, ...]
    entries: list[Entry]

    def overview(self) -> dict[str, object]:
        """Return where models were searched, and their number."""
        return {"places": ", ".join(self.places), "models": f"{len(self.entries):,}"}

    def leaderboards(self) -> list[tuple[str, list[tuple[Entry, Score]]]]:
        """Return (data set, models by top-1 accuracy) pairs; the data set with most models comes first."""
        boards: dict[str, list[tuple[Entry, Score]]] = {}
        for entry in self.entries:
            for score in entry.scores:
                if score.metric == TOP1:
                    boards.setdefault(score.data, []).append((entry, score))
        ranked = sorted(boards.items(), key=lambda board: (-len(board[1]), board[0]))
        return [(data, sorted(rows, key=lambda row: -row[1].value)) for data, rows in ranked]

    def tables(self) -> list[Table]:
        """Return the tables printed in a terminal: the models, and their results."""
        models = [
            [
                *(one_line(entry.name), entry.problem or entry.model_type, _format_amount(entry.parameters)),
                *(_format_amount(entry.forward_flops), str(len(entry.checkpoints) or "")),
            ]
            for entry in self.entries
        ]
        results = [
            [one_line(entry.name), score.data, f"{percent(score.value)} {score.metric}", score.source]
            for entry in self.entries
            for score in entry.scores
        ]
        header = ["model", "architecture", "parameters", "FLOPs", "checkpoints"]
        title = f"{len(models):,} models from {', '.join(self.places)}"
        tables = [
            Table(header, models, title),
            Table(["model", "data", "result", "source"], results, "published and recorded results"),
        ]
        return tables if results else tables[:1]

    def to_json(self) -> str:
        """Return all entries as JSON."""
        return json.dumps([asdict(entry) for entry in self.entries], indent=2, ensure_ascii=False)

    def save_page(self, output: str | os.PathLike[str]) -> None:
        """Write the models as an HTML page; text from the Hub is escaped.

        Raises:
            UserError: the file name does not end in .html or .htm, or the file cannot be written.
        """
        if Path(output).suffix.lower() not in (".html", ".htm"):
            raise UserError(f"the output {output} is not an HTML file name; give a name that ends in .html")
        template_values: dict[str, Any] = {"amount": _format_amount, "percent": percent, "metric": TOP1}
        places = ", ".join(self.places)
        page = render_report(
            "Models",
            _BODY,
            width=90,
            entries=self.entries,
            places=places,
            boards=self.leaderboards(),
            **template_values,
        )
        write_atomically(Path(output), page)


def list_models(
    places: Sequence[str] = (),
    *,
    search: str | None = None,
    family: str | None = None,
    data: str | None = None,
    max_parameters: float | None = None,
) -> Listing:
    """Return the models of the papers, of folders and of Hub users that match all filters.

    Args:
        places: folders, users or organizations of the Hub, and "papers" for the papers' variants (the default).
        search: keep models whose name contains this text, in any case.
        family: keep models of this family ("hybrid") or model_type ("hf_hybrid_vit").
        data: keep results on data sets whose name contains this text, and models with such a result.
        max_parameters: keep models that are known to have at most this many parameters.

    Returns:
        The models in the order of the places; folders are sorted by path, variants as the papers list them.

    Raises:
        UserError: a place or the family does not exist, or the Hub cannot be reached.
    """
    from rich.console import Console
    from rich.progress import track

    if family is not None and family not in FAMILIES and not family.isidentifier():
        raise UserError(f"the family '{family}' is unknown; choose from {', '.join(FAMILIES)}")
    places = tuple(dict.fromkeys(places)) or (PAPERS,)
    entries = list[Entry]()
    for source in places:
        entries += list_entries(source)
    if search is not None:
        entries = [entry for entry in entries if search.lower() in entry.name.lower()]
    if family is not None:
        entries = [entry for entry in entries if belongs_to_family(entry, family)]
    if max_parameters is not None:
        entries = [entry for entry in entries if entry.parameters is not None and entry.parameters <= max_parameters]
    if data is not None:
        entries = [selected for entry in entries if (selected := entry.select_data(data)).scores]
    console = Console(stderr=True)
    uncounted = track(entries, "counting FLOPs", console=console, transient=True, disable=not console.is_terminal)
    return Listing(places, list(map(add_flops, uncounted)))


def _format_amount(number: float | None) -> str:
    """Return a number such as 85.8M, or "" for None."""
    return "" if number is None else amount(number)
