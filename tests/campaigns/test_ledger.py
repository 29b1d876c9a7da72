"""A campaign counts what was tried once, goes on after a kill, and hides no failure."""

import json
from pathlib import Path

import pytest
from campaigns import ledger
from campaigns.ledger import Campaign, failures


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(ledger, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(ledger, "SCRATCH", tmp_path)


def test_counts_and_failures_are_recorded(tmp_path: Path):
    def attempt(case: str) -> str:
        assert case != "b/3", "half written"
        return "refused"

    counts = Campaign("forged", "pytest", seed=0).run(["a/1", "a/2", "b/3"], attempt)
    assert counts[("a", "refused")] == 2
    (failure,) = failures(counts)
    assert failure.startswith("FAILED: b/3: half written")
    recorded = json.loads((tmp_path / "results" / "forged.json").read_text())
    assert (recorded["cases"], recorded["seed"]) == (3, 0)
    assert recorded["rows"][0] == {"group": "a", "cases": 2, "outcomes": {"refused": 2}}
    assert "date" in recorded


def test_a_stopped_campaign_goes_on(tmp_path: Path):
    tried: list[str] = []

    def attempt(case: str) -> str:
        if case == "a/3" and "a/3" not in tried:
            tried.append(case)
            raise KeyboardInterrupt
        tried.append(case)
        return "same"

    cases = [f"a/{index}" for index in range(5)]
    with pytest.raises(KeyboardInterrupt):
        Campaign("stopped", "pytest", seed=0).run(cases, attempt)
    with (tmp_path / "stopped.jsonl").open("a") as file:
        file.write('["a/4", "sa')  # as a kill leaves it
    assert Campaign("stopped", "pytest", seed=0).run(cases, attempt)[("a", "same")] == 5
    assert tried == ["a/0", "a/1", "a/2", "a/3", "a/3", "a/4"]
    assert not (tmp_path / "stopped.jsonl").exists()


def test_other_settings_begin_anew(tmp_path: Path):
    (tmp_path / "other.jsonl").write_text('{"seed": 0}\n["a/0", "same"]\n')
    tried: list[str] = []
    Campaign("other", "pytest", seed=1).run(["a/0"], lambda case: tried.append(case) or "same")
    assert tried == ["a/0"]


def test_no_case_is_counted_twice():
    with pytest.raises(AssertionError, match="drawn twice"):
        Campaign("twice", "pytest").run(["a/0", "a/0"], lambda _: "same")
