"""docs/idioms.md, written from the recorded campaign: `python -m campaigns.idioms.page`."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from campaigns.engine import RESULTS
from campaigns.idioms.trial import AS_LOADED, BEFORE, OPTIMIZED

EIGHT_BITS = f"8-bit {AS_LOADED}"
PAGE = Path(__file__).parents[2] / "docs" / "idioms.md"
WORDS = {"right": "right", "refused": "refused", "raised": "raises", "wrong": "**wrong**", "without it": "-"}
TITLES = {"plain": "ViT", "hybrid": "hybrid", "axial": "axial", "axial_resnet": "AxialResNet", "bit": "BiT"}

HEAD = """# Common operations on a model

People change weights in place, swap averaged weights in and back, add adapters and hooks, quantize, compile, export,
and call models from threads. Each operation was tried on tiny models with random weights, as loaded and with
`optimize_for_inference`: all of them on every family's classifier in float32, and {drawn} of each kind, drawn by a
seed, on every head, dtype and config choice; {cases:,} cases. Logits are compared with those of a freshly built model
with the same weights in float64: 1e-10 of the largest logit in float64, 1e-5 in float32 (6e-5 with standardized
kernels), and in bfloat16 and 8 bits a multiple of the error transformers' ViT has.

- **right**: the fresh model's logits.
- **refused**: this package prints one line with the problem and the remedy.
- **raises**: a library's own error.
- **-**: does not apply.

A cell with two words differs by head or dtype. Merging LoRA into standardized convolutions (hybrid, BiT) is not exact
([why](inference.md)).

Recorded {date} with torch {torch} and transformers {transformers} by `python -m campaigns silent_numbers`.
"""


def words(kinds: set[str]) -> str:
    return ", ".join(word for kind, word in WORDS.items() if kind in kinds) or WORDS["without it"]


def read(rows: list[dict]) -> tuple[dict, dict]:
    """(idiom, family, state) -> kinds of our outcomes, those of 8 bits apart; idiom -> of transformers'."""
    ours, theirs = defaultdict(set), defaultdict(set)
    for row in rows:
        for outcome in row["outcomes"]:
            mine, _, beside = outcome.partition("; transformers ")
            place, _, kind = mine.partition(": ")
            family, _, state = place.partition(" ")
            ours[row["group"], family, state].add(kind)
            theirs[row["group"]].add(beside)
    return ours, theirs


def page() -> str:
    recorded = json.loads((RESULTS / "silent_numbers.json").read_text())
    ours, theirs = read(recorded["rows"])
    idioms = [row["group"] for row in recorded["rows"]]
    lines = [
        HEAD.format(cases=recorded["cases"], drawn=recorded["drawn"], date=recorded["date"], **recorded["versions"])
    ]
    lines += ["## As loaded\n", *as_loaded(idioms, ours, theirs), "", "## Optimized for inference\n"]
    lines.append("All families together: the idiom before `optimize_for_inference`, or after it.")
    lines.append("It refuses quantized models, which are left out here.\n")
    lines += optimized(idioms, ours)
    return "\n".join(lines) + "\n"


def as_loaded(idioms: list[str], ours: dict, theirs: dict) -> Iterator[str]:
    yield f"| idiom | {' | '.join(TITLES.values())} | transformers' ViT |"
    yield "|---" * (len(TITLES) + 2) + "|"
    for idiom in idioms:
        cells = [words(ours[idiom, family, AS_LOADED] | ours[idiom, family, EIGHT_BITS]) for family in TITLES]
        yield f"| {idiom} | {' | '.join(cells)} | {words(theirs[idiom])} |"


def optimized(idioms: list[str], ours: dict) -> Iterator[str]:
    yield "| idiom | before | after |\n|---|---|---|"
    for idiom in idioms:
        cells = [
            words({kind for family in TITLES for kind in ours[idiom, family, state]}) for state in (BEFORE, OPTIMIZED)
        ]
        yield f"| {idiom} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
