"""A model for masks or boxes on the Hub: it arrives whole, tells its results, and runs by its card's code alone."""

from pathlib import Path

import pytest
import yaml
from loopback.client import Client, Loopback
from training.dense_jobs import learn

from hf_vit.data.builtin import scenes
from hf_vit.hub.card import render_card

REPO = "alice/dense"
CASES = [("segmentation", "linear", "mean_iou"), ("detection", "mask-rcnn", "mean_average_precision")]


@pytest.mark.parametrize(("task", "head", "metric"), CASES)
def test_pushed_and_verified(
    hub: Loopback,
    xet_client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    head: str,
    metric: str,
) -> None:
    monkeypatch.setattr(scenes, "HELD_OUT", 6)
    result = learn(tmp_path / "model", task, head, steps=2, evaluations=1)
    pushed = xet_client.attempt("hub.jobs:command", arguments=["push", str(result.folder), REPO, "--license", "mit"])
    assert pushed.code == 0, pushed.err
    files = hub.files(REPO)
    assert {"model.safetensors", "facts.json", "learning_curve.png", f"evaluation_{task}.png"} <= set(files)
    assert f"{task}_hf_vit.py" in files, "the code of the head travels"
    assert f"evaluation_{task}_worst_images.png" not in files, "it shows images of the data"
    # The examples of the card: with this package, and by the code beside the weights where the package is barred.
    verified = xet_client.attempt("hub.jobs:command", arguments=["verify", REPO, "--trust-remote-code"])
    assert verified.code == 0, verified.err
    assert verified.out.count(" printed: ") == 2
    card = xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == {"segmentation": "image-segmentation", "detection": "object-detection"}[task]
    (index,) = metadata["model-index"]
    told = {entry["name"]: entry["value"] for each in index["results"] for entry in each["metrics"]}
    assert all(entry["type"] == metric for each in index["results"] for entry in each["metrics"])
    headline = result.test.headline()
    expected = {"Mean IoU": headline["mean IoU"]} if task == "segmentation" else {"Box AP": headline["box AP"]}
    assert {name: told[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert "worst_images" in render_card(result.folder, share_images=True)
