"""Models that others shared in transformers' and timm's formats: from the Hub into hf_vit, with identical logits."""

from pathlib import Path

import numpy as np
import pytest
from loopback.client import Client, Loopback


@pytest.mark.parametrize("kind", ["vit", "deit", "timm"])
def test_a_model_of_another_library(kind: str, hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    wanted = xet_client.run("hub.format_jobs:share", kind=kind, folder=str(tmp_path / kind))
    found = xet_client.run("hub.format_jobs:take", output=str(tmp_path / "converted"), token=None)
    assert np.abs(wanted).max() > 0.1
    for logits in found:
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "model"), [("vit", "alice/theirs"), ("timm", "alice/theirs"), ("timm", "timm:theirs")]
)
def test_a_training_starts_from_it(kind: str, model: str, hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    xet_client.run("hub.format_jobs:share", kind=kind, folder=str(tmp_path / kind))
    found = xet_client.run("hub.format_jobs:start", model=model, output=str(tmp_path / "out"), token=None)
    origin = {"vit": "transformers_vit", "timm": "timm_vit"}[kind]
    assert (found["base_model"], found["origin"]) == (model, origin)
    assert found["seen"], found["log"]
    assert found["told"] == (2 if kind == "vit" else 3), found["log"]  # transformers itself runs what analyze looks at
