"""What the tests of costs share."""

import pytest


@pytest.fixture(autouse=True)
def short_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's rate from 0.05 s of products instead of 0.3 s."""
    monkeypatch.setattr("hf_vit.cost.trainings._SECONDS", 0.05)
