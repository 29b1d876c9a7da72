"""Trainings that end on the Hub: they look before they train, share one complete commit, and fail aloud."""

from pathlib import Path
from typing import Any

import pytest
from loopback.client import Client, Loopback

REPO = "alice/trained"


def train(client: Client, folder: Path, **options: Any) -> Any:
    return client.run("hub.training_jobs:train", folder=str(folder), **options)


def test_the_trainer_shares_one_commit(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    done = train(xet_client, tmp_path / "trained", hub_model_id=REPO)
    assert done["commit"] == hub.head(REPO)
    files = hub.files(REPO)
    assert {"model.safetensors", "config.json", "preprocessor_config.json", "facts.json", "README.md"} <= set(files)
    assert "modeling_hf_vit.py" in files
    assert not [name for name in files if "checkpoint" in name or name.endswith((".bin", ".pt"))]
    assert (tmp_path / "trained" / "checkpoint-2").is_dir(), "it was there to be left out"
    card = xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")
    assert "| Data | colours, split train, 6 images |" in card
    assert "| learning rate | 0.001 |" in card
    assert "| validation accuracy |" in card
    assert xet_client.run("hub.jobs:logits", repo_id=REPO) == done["logits"]
    # One commit after the Hub's own first one, and no request before the end but questions.
    posts = [entry["path"] for entry in hub.log() if entry["method"] == "POST" and "/commit/" in entry["path"]]
    assert len(posts) == 1


def test_trouble_is_told_before_the_training(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    for number, (options, message) in enumerate(
        (
            ({"token": "hf_alice_read"}, "can only read"),
            ({"token": None}, "there is no token"),
            ({"named": False}, "this data set has no name"),
            ({"processor": False}, "give processing_class="),
            ({"license": None}, "no license is known, and none is assumed"),
        )
    ):
        done = train(xet_client, tmp_path / str(number), hub_model_id=REPO, **options)
        assert message in done["error"]
        assert done["steps"] == 0
    assert hub.get(f"/api/models/{REPO}") is None


def test_a_failed_push_ends_the_run(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    hub.fault("/commit/", "status", status=403, times=-1, message="no space left")
    folder = tmp_path / "trained"
    done = xet_client.attempt("hub.training_jobs:train", folder=str(folder), hub_model_id=REPO, catch=False)
    assert done.code != 0
    assert "UserError: the model in" in done.err
    assert "no space left" in done.err
    assert f"Later: hf-vit push {folder} {REPO}" in done.err
    hub.clear_faults()
    again = xet_client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO])
    assert again.code == 0, again.err
    assert hub.head(REPO)


def test_what_is_said_of_the_stock_trainer(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """docs/sharing.md: it uploads a pickle, and a push that failed leaves no trace in the exit code."""
    train(xet_client, tmp_path / "one", hub_model_id="alice/one", stock=True)
    assert "training_args.bin" in hub.files("alice/one")
    hub.fault("/commit/", "status", status=403, times=-1)
    done = xet_client.attempt(
        "hub.training_jobs:train", folder=str(tmp_path / "two"), hub_model_id="alice/two", stock=True
    )
    assert done.code == 0, done.err
    assert hub.fired() > 0
    assert hub.files("alice/two") == {}


@pytest.mark.slow
def test_finetune_tells_that_sharing_failed(
    hub: Loopback, xet_client: Client, colour_folder: Path, tmp_path: Path
) -> None:
    hub.fault("/commit/", "status", status=403, times=-1)
    failed = finetune(xet_client, colour_folder, tmp_path / "first")
    assert failed.code == 1
    assert f"hf-vit: the model in {tmp_path / 'first'} is complete, but sharing it failed" in failed.err
    assert (tmp_path / "first" / "model.safetensors").is_file()


def finetune(client: Client, data: Path, output: Path, **options: Any) -> Any:
    arguments = ["finetune", "--model", "Ti/4", "--image-size", "8", "--data", str(data), "--output", str(output),
                 "--steps", "2", "--evaluations", "1", "--push", REPO, "--private", "--license", "mit"]  # fmt: skip
    return client.attempt("hub.jobs:command", arguments=arguments, **options)


def test_finetune_shares_its_result(hub: Loopback, xet_client: Client, colour_folder: Path, tmp_path: Path) -> None:
    refused = finetune(xet_client, colour_folder, tmp_path / "never", token="hf_alice_read")
    assert refused.code == 1
    assert "can only read" in refused.err
    assert not (tmp_path / "never").exists()
    done = finetune(xet_client, colour_folder, tmp_path / "second")
    assert done.code == 0, done.err
    assert f"commit {hub.head(REPO)}" in done.out
    assert hub.get(f"/api/models/{REPO}")["private"] is True
    assert {"learning_curve.png", "facts.json", "model.safetensors"} <= set(hub.files(REPO))


@pytest.fixture(scope="session")
def colour_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of six images of 12 px each."""
    import numpy as np
    from PIL import Image

    root = tmp_path_factory.mktemp("data") / "colours"
    random = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir(parents=True)
        for index in range(6):
            pixels = random.integers(0, 90, (12, 12, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root
