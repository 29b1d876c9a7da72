"""Ordinary idioms on every family, head and dtype: the numbers of a freshly built model, or a refusal; never others.

`idioms/` holds what is tried; docs/idioms.md shows what came of it, beside transformers' ViT.
"""

import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.engine import Campaign
from campaigns.idioms.outcomes import attempt, cases_of, parts_of, subjects
from campaigns.idioms.trial import ALL, DTYPES, IDIOMS, QUANTISED, Subject

SEED = 0
# Of every kind of idiom ("weights", "hooks", ...) on every family, head and dtype, and on every choice of a
# configuration: so many cases of some 31,000.
DRAWN = 1


def all_cases() -> list[str]:
    """Every idiom on every family's classifier in float32, and of others some of every kind, as the seed draws them."""
    plainest = [subject for subject in subjects(("float32",)) if subject.head == "classification"]
    choices = [
        Subject(family, dtype="float32", choice=choice)
        for family in ALL
        for choice in ALL[family].choices
        if choice != "default"
    ]
    groups: dict[tuple[Subject, str], list[str]] = defaultdict(list)
    for subject in (*subjects((*DTYPES, *QUANTISED)), *choices):
        for case in cases_of(subject):
            groups[subject, idiom_of(case).partition(":")[0]].append(case)
    draw = random.Random(SEED)
    drawn = [case for group in groups.values() for case in draw.sample(group, min(DRAWN, len(group)))]
    return list(dict.fromkeys([case for subject in plainest for case in cases_of(subject)] + drawn))


def idiom_of(case: str) -> str:
    return parts_of(case)[2]


def is_quick(case: str) -> bool:
    """Whether it takes a second: an idiom that compiles and exports nothing, in a dtype that needs no comparison."""
    subject, _, name = parts_of(case)
    return not IDIOMS[name].slow and subject.dtype in ("float64", "float32") and subject.head != "backbone"


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield the function that tries, deaf to what peft, torch.ao, torch.jit and the exporters warn of themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield attempt


CAMPAIGN = Campaign(
    name="silent_numbers",
    promise="after an ordinary idiom a model answers as a freshly built one, or refuses in one line",
    cases=all_cases,
    prepare=prepare,
    settings={"seed": SEED, "drawn": DRAWN},
    is_quick=is_quick,
    group_of=idiom_of,
)
