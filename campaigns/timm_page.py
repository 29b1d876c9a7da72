"""`docs/timm.md`, made from the recorded sweep: `python -m campaigns.timm_page`."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "timm_sweep.json"
PAGE = Path(__file__).parents[1] / "docs" / "timm.md"
EXACT, REFUSED = "exact", "refused: "

HEAD = """\
# Which of timm's plain ViTs convert

Of the {total} architectures of timm {timm} whose names begin with `vit_`, `deit`, `flexivit` or `test_vit`, {exact}
convert and {refused} are refused. Each was built with random weights (heads, norms, positions and special tokens too)
and two blocks (one of more than 2,048 channels), saved as timm saves a repository, and converted by `hf-vit convert`;
its logits, or pooled features where it has no head, are those of timm to 1e-5 of the largest in float32 (6e-5 for
hybrids), and to 1e-10 where the same conversion is carried out in float64.
Recorded on {date} (`{command}`); this page is made from that record.

## Converted

"""


def render(record: Mapping[str, Any]) -> str:
    """The page of one recorded sweep."""
    outcomes = {row["group"]: next(iter(row["outcomes"])) for row in record["rows"]}
    exact = [name for name, outcome in outcomes.items() if outcome == EXACT]
    refused: dict[str, list[str]] = defaultdict(list)
    for name, outcome in outcomes.items():
        if outcome.startswith(REFUSED):
            refused[outcome.removeprefix(REFUSED)].append(name)
    told = {name: record[name] for name in ("timm", "date", "command")}
    head = HEAD.format(total=len(outcomes), exact=len(exact), refused=sum(map(len, refused.values())), **told)
    often = sorted(refused.items(), key=lambda item: -len(item[1]))
    rows = [f"| {len(names)} | {reason.replace('|', '/')} | {_listed(names)} |" for reason, names in often]
    table = ["| number | what `hf-vit convert` says | architectures |", "|---|---|---|", *rows]
    return "\n".join([head + _listed(exact) + ".", "", "## Refused", "", *table]) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(RECORD.read_text())), encoding="utf-8")
