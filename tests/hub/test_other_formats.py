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
