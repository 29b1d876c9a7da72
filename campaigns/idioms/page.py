"""Write docs/idioms.md from the recorded campaign: `python -m campaigns.idioms.page`."""

import json
from collections import defaultdict
from pathlib import Path

from campaigns.engine import RESULTS
from campaigns.idioms.trial import AS_LOADED, BEFORE, OPTIMIZED

EIGHT_BITS = f"8-bit {AS_LOADED}"
PAGE = Path(__file__).parents[2] / "docs" / "idioms.md"
WORDS = {"right": "right", "refused": "refused", "raised": "raises", "wrong": "**wrong**", "without it": "-"}
TITLES = {"plain": "ViT", "hybrid": "hybrid", "axial": "axial", "axial_resnet": "AxialResNet", "bit": "BiT"}

HEAD = """# Common operations on a model

Each row is something people do with a model: change weights in place, swap averaged weights in and back, add adapters
or hooks, quantize, compile, export, call it from threads. It was tried on tiny models with random weights: on every
family's classifier in float32, and {drawn} of each kind, drawn by a seed, on every head, dtype and config choice;
{cases:,} cases in all. Logits are compared with those of a newly built model with the same weights in float64. The
tolerance is 1e-10 of the largest logit in float64 and 1e-5 in float32 (6e-5 with standardized kernels); in bfloat16 and
8 bits it is a multiple of the error of transformers' ViT.

- **right**: the same logits as the new model.
- **refused**: hf_vit raises an error with the problem and the remedy.
- **raises**: another library raises an error.
- **-**: the operation does not apply.

A cell with two words differs by head or dtype. The first columns are models as loaded. The last two are all families of
hf_vit with the operation before and after `optimize_for_inference`, which refuses quantized models. Merging LoRA into
standardized convolutions (hybrid, BiT) is not exact ([why](inference.md)).

Recorded on {date} with torch {torch} and transformers {transformers} by `python -m campaigns silent_numbers`;
`python -m campaigns.idioms.page` writes this page from the record.
"""


def read(rows: list[dict]) -> tuple[dict, dict]:
    """Return our outcomes by (idiom, family, state), where 8-bit models are states of their own, and transformers'."""
    ours, theirs = defaultdict(set), defaultdict(set)
    for row in rows:
        for outcome in row["outcomes"]:
            own_part, _, their_outcome = outcome.partition("; transformers ")
            model, _, kind = own_part.partition(": ")
            family, _, state = model.partition(" ")
            ours[row["group"], family, state].add(kind)
            theirs[row["group"]].add(their_outcome)
    return ours, theirs


def page() -> str:
    recorded = json.loads((RESULTS / "silent_numbers.json").read_text())
    ours, theirs = read(recorded["rows"])
    head = HEAD.format(cases=recorded["cases"], drawn=recorded["drawn"], date=recorded["date"], **recorded["versions"])
    titles = ["idiom", *TITLES.values(), "transformers' ViT", "before optimizing", "after optimizing"]
    rows = [titles, ["---"] * len(titles)]
    for idiom in (row["group"] for row in recorded["rows"]):
        loaded = [ours[idiom, family, AS_LOADED] | ours[idiom, family, EIGHT_BITS] for family in TITLES]
        optimized = [set().union(*(ours[idiom, family, state] for family in TITLES)) for state in (BEFORE, OPTIMIZED)]
        cells = (*loaded, theirs[idiom], *optimized)
        words = [", ".join(word for kind, word in WORDS.items() if kind in kinds) for kinds in cells]
        rows.append([idiom, *(each or WORDS["without it"] for each in words)])
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
