"""Three seeded cases of every campaign, and the engine that tries them; all cases by `python -m campaigns NAME`."""

import importlib
import json
from contextlib import nullcontext

import pytest
import typer

from campaigns import NAMES, engine
from campaigns.__main__ import SECURITY, security_page
from campaigns.commands import READING, SHARING, WRITING
from campaigns.engine import Campaign, failures
from hf_vit.conversion.targets.registry import TARGETS
from hf_vit.training.api import OBJECTIVES
from hf_vit_cli.main import build_app

SLOW = {"ray_faults": "starts Ray several times", "lost_processes": "starts torchrun several times"}


@pytest.mark.filterwarnings("ignore")  # a case judges what a user would see
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_three_cases(name, tmp_path):
    campaign = importlib.import_module(f"campaigns.{name}").CAMPAIGN
    assert campaign.name == name
    with campaign.prepare(tmp_path) as attempt:
        for case in campaign.sample(3):
            assert attempt(case)


def test_security_shows_the_records():
    assert SECURITY.read_text() == security_page(), "run python -m campaigns"


def test_every_command_is_struck():
    """A new command, export target or pre-training objective must join a table of `campaigns/commands.py`."""
    rows = [" ".join((*commands[-1], "")) for commands in (WRITING | READING | SHARING).values()]
    for words, parameters in leaves(typer.main.get_command(build_app())):
        options = {option for one in parameters if one.default is None or one.is_flag for option in one.opts}
        of_it = [row for row in rows if row.startswith(words)]
        assert of_it, f"'{words}' is in no table"
        for option in options & {"--output", "--report", "--force", "--push", "--results", "--sweep-rates"}:
            assert any(f" {option} " in row for row in of_it), f"'{words}' is in no table with {option}"
    exports = {f"export-{name}" for name in TARGETS if name != "executorch"}  # which has an environment of its own
    assert exports | {f"pretrain-{name}" for name in OBJECTIVES} <= WRITING.keys()


def leaves(command, words=""):
    """The words of every command, and its parameters."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{words}{name} ")
    if not hasattr(command, "commands"):
        yield words, command.params


@pytest.fixture
def places(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(engine, "SCRATCH", tmp_path)


def campaign_of(attempt, *cases, **settings):
    return Campaign("small", "a promise", lambda: cases, lambda folder: nullcontext(attempt), settings)


def test_counts_and_failures_are_recorded(places, tmp_path):
    def attempt(case):
        assert case != "b/3", "half written"
        return "refused"

    counts = campaign_of(attempt, "a/1", "a/2", "b/3", seed=0).run(tmp_path)
    assert counts["a", "refused"] == 2
    (failure,) = failures(counts)
    assert failure.startswith("FAILED: b/3: half written")
    record = json.loads((tmp_path / "results/small.json").read_text())
    assert (record["cases"], record["seed"], record["promise"]) == (3, 0, "a promise")
    assert record["rows"][0] == {"group": "a", "cases": 2, "outcomes": {"refused": 2}}


def test_a_stopped_campaign_resumes(places, tmp_path):
    tried = []

    def attempt(case):
        tried.append(case)
        if tried.count("a/3") == 1 and case == "a/3":
            raise KeyboardInterrupt
        return "same"

    cases = [f"a/{index}" for index in range(5)]
    with pytest.raises(KeyboardInterrupt):
        campaign_of(attempt, *cases, seed=0).run(tmp_path)
    with (tmp_path / "small.jsonl").open("a") as file:
        file.write('["a/4", "sa')  # as a kill leaves it
    assert campaign_of(attempt, *cases, seed=0).run(tmp_path)["a", "same"] == 5
    assert tried == ["a/0", "a/1", "a/2", "a/3", "a/3", "a/4"]


def test_other_settings_begin_anew(places, tmp_path):
    (tmp_path / "small.jsonl").write_text('{"seed": 0}\n["a/0", "wrong"]\n')
    assert campaign_of(lambda case: "same", "a/0", seed=1).run(tmp_path) == {("a", "same"): 1}


def test_cases_that_are_tried_again_take_nothing_away(places, tmp_path):
    """Neither the work of a stopped run, nor the outcomes of the other cases of a group."""
    outcomes, tried = iter(["refused", "refused", "same", "refused", KeyboardInterrupt, "same", "refused", "same"]), []

    def attempt(case):
        tried.append(case)
        if (outcome := next(outcomes)) is KeyboardInterrupt:
            raise outcome
        return outcome

    campaign = campaign_of(attempt, "a/0", "a/1", "b/2")
    campaign.run(tmp_path)
    record = (tmp_path / "results/small.json").read_text()
    with pytest.raises(KeyboardInterrupt):
        campaign.run(tmp_path)
    assert campaign.run(tmp_path, "a/0") == {("a", "same"): 1}
    assert (tmp_path / "results/small.json").read_text() == record
    assert campaign.run(tmp_path)["a", "refused"] == 2
    assert tried[3:] == ["a/0", "a/1", "a/0", "a/1", "b/2"]


def test_no_case_is_counted_twice(tmp_path):
    with pytest.raises(AssertionError, match="drawn twice"):
        campaign_of(lambda case: "same", "a/0", "a/0").run(tmp_path)
