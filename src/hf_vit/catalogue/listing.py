"""A list of models: found, filtered, sorted, and shown as table, JSON or a page with a leaderboard a data set."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from hf_vit.catalogue.entries import PAPERS, Entry, entries_of, is_of_family, with_flops
from hf_vit.catalogue.published import TOP1, Score
from hf_vit.display import Displayed, amount
from hf_vit.errors import UserError, one_line
from hf_vit.evaluation.protocols.frame import Table, percent
from hf_vit.families import FAMILIES
from hf_vit.results.figures import render_report
from hf_vit.results.writing import write_atomically

_BODY = """
<p class="quiet">{{ entries|length }} models of {{ places }}. Accuracies stand as they were published or recorded, each
beside its source; none was measured for this page.</p>
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
<p class="quiet">FLOPs of one image's forward pass, a multiply-add counts 2; those of a paper's variant, and its
parameters, with a head for 1,000 classes.</p>
"""


@final
@dataclass(frozen=True, repr=False)
class Listing(Displayed):
    """Models, in the order they are shown in.

    Attributes:
        places: where they were looked for.
        entries: what is known of each.
    """

    places: tuple[str, ...]
    entries: list[Entry]

    def overview(self) -> dict[str, object]:
        return {"places": ", ".join(self.places), "models": f"{len(self.entries):,}"}

    def leaderboards(self) -> list[tuple[str, list[tuple[Entry, Score]]]]:
        """Return a leaderboard of top-1 accuracies per data set, the one with most models first."""
        boards: dict[str, list[tuple[Entry, Score]]] = {}
        for entry in self.entries:
            for score in entry.scores:
                if score.metric == TOP1:
                    boards.setdefault(score.data, []).append((entry, score))
        ranked = sorted(boards.items(), key=lambda board: (-len(board[1]), board[0]))
        return [(data, sorted(rows, key=lambda row: -row[1].value)) for data, rows in ranked]

    def tables(self) -> list[Table]:
        """Return what a terminal shows: the models, and their results."""
        models = [
            [
                *(one_line(entry.name), entry.problem or entry.model_type, _amount(entry.parameters)),
                *(_amount(entry.forward_flops), str(len(entry.checkpoints) or "")),
            ]
            for entry in self.entries
        ]
        results = [
            [one_line(entry.name), score.data, f"{percent(score.value)} {score.metric}", score.source]
            for entry in self.entries
            for score in entry.scores
        ]
        header = ["model", "architecture", "parameters", "FLOPs", "checkpoints"]
        title = f"{len(models):,} models of {', '.join(self.places)}"
        tables = [Table(header, models, title), Table(["model", "data", "result", "source"], results, "their results")]
        return tables if results else tables[:1]

    def to_json(self) -> str:
        """Return all of it."""
        return json.dumps([asdict(entry) for entry in self.entries], indent=2, ensure_ascii=False)

    def save_page(self, output: str | os.PathLike[str]) -> None:
        """Write an HTML page in one move; whatever was downloaded stands in it as text."""
        if Path(output).suffix.lower() not in (".html", ".htm"):
            raise UserError(f"{output} is not an HTML file name; give one that ends in .html")
        shown: dict[str, Any] = {"amount": _amount, "percent": percent, "metric": TOP1}
        places = ", ".join(self.places)
        page = render_report(
            "Models", _BODY, width=90, entries=self.entries, places=places, boards=self.leaderboards(), **shown
        )
        write_atomically(Path(output), page)


def list_models(
    places: Sequence[str] = (),
    *,
    search: str | None = None,
    family: str | None = None,
    judged_on: str | None = None,
    max_parameters: float | None = None,
) -> Listing:
    """Return what models there are, with what is known of each.

    Args:
        places: folders, users or organizations of the Hub, and "papers" for the papers' variants; by default these.
        search: only those with this in their name, whatever its case.
        family: only those of this family ("hybrid") or model_type ("hf_hybrid_vit").
        judged_on: only results on data sets with this in their name, and models that have one.
        max_parameters: only models that are known to be no larger.

    Returns:
        The models in the order of the places; folders and variants in their own order.

    Raises:
        UserError: there is no such place or family, or the Hub cannot be reached.
    """
    from rich.console import Console
    from rich.progress import track

    if family is not None and family not in FAMILIES and not family.isidentifier():
        raise UserError(f"unknown family '{family}'; choose from {', '.join(FAMILIES)}")
    places = tuple(dict.fromkeys(places)) or (PAPERS,)
    entries = list[Entry]()
    for place in places:
        entries += entries_of(place)
    if search is not None:
        entries = [entry for entry in entries if search.lower() in entry.name.lower()]
    if family is not None:
        entries = [entry for entry in entries if is_of_family(entry, family)]
    if max_parameters is not None:
        entries = [entry for entry in entries if entry.parameters is not None and entry.parameters <= max_parameters]
    if judged_on is not None:
        entries = [judged for entry in entries if (judged := entry.judged_on(judged_on)).scores]
    console = Console(stderr=True)
    uncounted = track(entries, "counting FLOPs", console=console, transient=True, disable=not console.is_terminal)
    return Listing(places, list(map(with_flops, uncounted)))


def _amount(number: float | None) -> str:
    return "" if number is None else amount(number)
