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

HEAD = """# What may be done with a model

Between loading a model and reading its logits people change weights in place, swap averaged weights in and back, add
adapters and hooks, quantise, compile, export, call from threads. Each of these idioms was tried on tiny models with
random weights, as loaded and beside `optimize_for_inference`: all of them on every family's classifier in float32, and
of each kind of idiom {drawn}, drawn by a seed, on every head in float64, float32, bfloat16 and 8 bits (torchao's
weights, torch.ao's dynamic products), and on every choice of a configuration; {cases:,} cases in all. What a model
answers is compared with what a freshly built one of the same weights answers, one image at a time in float64: to 1e-10
of the largest logit in float64, 1e-5 in float32 (6e-5 where kernels are standardised). bfloat16 and 8 bits may be no
further off than twice what transformers' ViT is under the same idiom (the hybrid, whose stem rounds as well, than six
times; with a norm behind the attention that pools, than four times), or than twice what the same model is without it.
An idiom that should change the answer is shown to do so.

transformers' ViT went through the same cases (a backbone beside its bare model).

- **right**: the fresh model's numbers.
- **refused**: one line of this package says what is the matter, and what to do.
- **raises**: a library's own error; of a model as loaded only where transformers' ViT is not right either.
- **-**: the idiom does not apply.

Where a cell holds two words, heads or dtypes differ. LoRA on convolutions, merged, answers as its merged weights do;
on standardised convolutions (hybrid, BiT) that is not what the adapter answered ([why](inference.md)).

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
    lines.append("What is quantised it refuses, which is left out here.\n")
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
