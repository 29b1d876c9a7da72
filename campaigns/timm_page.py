"""Write docs/timm.md from the recorded sweep: `python -m campaigns.timm_page`."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "timm_sweep.json"
PAGE = Path(__file__).parents[1] / "docs" / "timm.md"
EXACT, REFUSED = "exact", "refused: "

HEAD = """\
# Which of timm's vision transformers convert

Of the {total} architectures of timm {timm} in its modules vision_transformer, deit, vision_transformer_relpos,
vision_transformer_hybrid, mlp_mixer, resnetv2, eva, beit, naflexvit and vision_transformer_sam, `hf-vit convert`
converts {exact} and refuses {refused}. Each was built with two blocks (wide ones with one) and random weights, also in
heads, norms, positions and special tokens, and saved as timm saves a repository. After conversion, the logits (or
pooled features without a head) equal timm's to 1e-5 of the largest value in float32 (6e-5 for hybrids and BiT), and to
1e-10 in float64 (1e-7 with rotary positions, whose angles timm computes in float32; the tables of NaFlexVit, which it
resizes in float32, were resized in float64 for this).

Recorded on {date} with `{command}`{again}; `python -m campaigns.timm_page` writes this page from the record.

## Converted

"""


def render(record: Mapping[str, Any]) -> str:
    outcomes = {row["group"]: next(iter(row["outcomes"])) for row in record["rows"]}
    exact = [name for name, outcome in outcomes.items() if outcome == EXACT]
    refused: dict[str, list[str]] = defaultdict(list)
    for name, outcome in outcomes.items():
        if outcome.startswith(REFUSED):
            refused[outcome.removeprefix(REFUSED)].append(name)
    details = {name: record[name] for name in ("timm", "date", "command")}
    details["again"] = ""
    if (again := record.get("again")) is not None:
        details["again"] = f", and {again['cases']} architectures again on {again['date']} (`--only`)"
    head = HEAD.format(total=len(outcomes), exact=len(exact), refused=sum(map(len, refused.values())), **details)
    by_number = sorted(refused.items(), key=lambda item: -len(item[1]))
    rows = [f"| {len(names)} | {reason.replace('|', '/')} | {_format_names(names)} |" for reason, names in by_number]
    table = ["| number | message of `hf-vit convert` | architectures |", "|---|---|---|", *rows]
    return "\n".join([head + _format_names(exact) + ".", "", "## Refused", "", *table]) + "\n"


def _format_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(RECORD.read_text())), encoding="utf-8")
