"""Checkpoints that released versions of the package saved (tests/fixtures): they load, or are refused in one line."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit

FIXTURES = Path(__file__).parents[1] / "fixtures"
# Renamed once, before the first release on a Hub.
REFUSED = [("release_0.1.0", "bit"), ("release_0.1.0", "axial_resnet")]
FOLDERS = sorted((path.parent.name, path.name) for path in FIXTURES.glob("release_*/*"))


@pytest.mark.parametrize(("release", "name"), [row for row in FOLDERS if row not in REFUSED])
def test_a_checkpoint_of_an_older_version_answers_the_same(release: str, name: str):
    folder = FIXTURES / release / name
    answers = load_file(folder / "answers.safetensors")
    model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        outputs = model(answers["images"], output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, answers["logits"], rtol=0, atol=1e-5)
    if "last_hidden_state" in answers:
        torch.testing.assert_close(outputs.hidden_states[-1], answers["last_hidden_state"], rtol=0, atol=1e-5)
    assert AutoImageProcessor.from_pretrained(folder).size["height"] == 16


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForImageClassification"])
@pytest.mark.parametrize(("release", "name"), REFUSED)
def test_a_renamed_checkpoint_is_refused_with_the_remedy(release: str, name: str, auto_class: str):
    folder = FIXTURES / release / name
    with pytest.raises(OSError, match=r"saved by hf_vit 0\.1\.0.*`hf-vit convert`.*train it again") as refusal:
        getattr(transformers, auto_class).from_pretrained(folder)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_there_is_a_fixture_of_this_release():
    assert (FIXTURES / f"release_{hf_vit.__version__}").is_dir(), "see tests/fixtures/make_release.py"
    for release in FIXTURES.glob("release_*"):
        assert sum(path.stat().st_size for path in release.rglob("*") if path.is_file()) < 200_000
