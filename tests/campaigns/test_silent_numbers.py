"""Ordinary idioms on every family, head and dtype: the numbers of a freshly built model, or a refusal; never others.

`idioms/` holds what is tried; docs/idioms.md shows what came of it, beside transformers' ViT.
"""

import random
from collections import defaultdict

import pytest
from campaigns.idioms.outcomes import attempt, case_of, cases_of, parts_of, subjects
from campaigns.idioms.page import PAGE, page
from campaigns.idioms.table import IDIOMS
from campaigns.idioms.trial import ALL, DTYPES, QUANTISED, STATES, Subject
from campaigns.ledger import Campaign, failures

COMMAND = ".venv/bin/python -m pytest -m slow tests/campaigns/test_silent_numbers.py"
SEED = 0
# Of every kind of idiom ("weights", "hooks", ...) on every family, head and dtype, and on every choice of a
# configuration: so many cases of some 31,000.
DRAWN = 1

pytestmark = [
    # Upstream: peft, torch.ao, torch.jit, torch.func and the exporters say what is old or slow of themselves.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(6 * 3600),
]


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


@pytest.mark.slow
def test_every_idiom():
    campaign = Campaign("silent_numbers", COMMAND, seed=SEED, drawn=DRAWN)
    assert failures(campaign.run(all_cases(), attempt, idiom_of)) == []


def sample() -> list[str]:
    """Every second of the quick idioms, each on another family and head, by turns as loaded and optimized."""
    quick = [name for name, idiom in IDIOMS.items() if not idiom.slow][::2]
    candidates = [subject for subject in subjects(("float64", "float32")) if subject.head != "backbone"]
    cases: list[str] = []
    for index, name in enumerate(quick):
        fitting = [subject for subject in candidates if IDIOMS[name].fits(subject)]
        cases.append(case_of(fitting[7 * index % len(fitting)], STATES[index % 3], name))
    return cases


@pytest.mark.parametrize("case", sample())
def test_a_sample(case: str):
    attempt(case)


def test_the_page_shows_what_was_recorded():
    assert PAGE.read_text() == page()
