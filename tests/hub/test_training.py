"""Trainings that end on the Hub: they look before they train, share one complete commit, and fail aloud."""

from pathlib import Path
from typing import Any

from loopback.client import Client, Loopback
from training.conftest import make_colour_folder

REPO = "alice/trained"


def train(client: Client, folder: Path, **options: Any) -> Any:
    return client.run("hub.jobs:train", folder=str(folder), **options)


def test_the_trainer_shares_one_commit(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    done = train(xet_client, tmp_path / "trained", hub_model_id=REPO)
    files = hub.files(REPO)
    wanted = {"model.safetensors", "config.json", "preprocessor_config.json", "facts.json", "README.md"}
    assert {*wanted, "modeling_hf_vit.py"} <= set(files)
    assert not [name for name in files if "checkpoint" in name or name.endswith((".bin", ".pt"))]
    assert (tmp_path / "trained" / "checkpoint-2").is_dir(), "it was there to be left out"
    card = xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")
    for row in ("| Data | colours, split train, 6 images |", "| learning rate | 0.001 |", "| validation accuracy |"):
        assert row in card
    assert xet_client.run("hub.jobs:logits", repo_id=REPO) == done["logits"]
    # One commit after the Hub's own first one, and no request before the end but questions.
    assert len([entry for entry in hub.log() if entry["method"] == "POST" and "/commit/" in entry["path"]]) == 1


def test_trouble_is_told_before_the_training(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    for number, (options, message) in enumerate(
        (
            ({"token": "hf_alice_read"}, "is read-only"),
            ({"token": None}, "there is no token"),
            ({"named": False}, "the model card needs the name of the training data"),
            ({"processor": False}, "give processing_class="),
            ({"license": None}, "the model's license is unknown; give one"),
        )
    ):
        done = train(xet_client, tmp_path / str(number), hub_model_id=REPO, **options)
        assert message in done["error"]
        assert done["steps"] == 0
    assert hub.get(f"/api/models/{REPO}") is None


def test_a_failed_push_ends_the_run(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """Of the stock trainer it leaves no trace in the exit code, and that uploads a pickle (docs/sharing.md)."""
    hub.fault("/commit/", "status", status=403, times=-1, message="no space left")
    folder = tmp_path / "trained"
    done = xet_client.attempt("hub.jobs:train", folder=str(folder), hub_model_id=REPO, catch=False)
    assert done.code != 0
    assert "UserError: the model in" in done.err
    assert "no space left" in done.err
    assert f"Push it later with hf-vit push {folder} {REPO}" in done.err
    stock = {"folder": str(tmp_path / "stock"), "hub_model_id": "alice/two", "stock": True}
    silent = xet_client.attempt("hub.jobs:train", **stock)
    assert silent.code == 0, silent.err
    assert hub.files("alice/two") == {}
    hub.clear_faults()
    again = xet_client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO])
    assert again.code == 0, again.err
    assert hub.head(REPO)
    xet_client.run("hub.jobs:train", **stock | {"hub_model_id": "alice/one"})
    assert "training_args.bin" in hub.files("alice/one")


def test_finetune_shares_its_result(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """Or says that sharing failed, and where the model lies."""
    data = make_colour_folder(tmp_path / "colours")

    def finetune(name: str, **options: Any) -> Any:
        arguments = ["finetune", "--model", "Ti/4", "--image-size", "8", "--data", str(data), "--steps", "2",
                     "--output", str(tmp_path / name), "--evaluations", "1", "--push", REPO, "--private",
                     "--license", "mit"]  # fmt: skip
        return xet_client.attempt("hub.jobs:command", arguments=arguments, **options)

    refused = finetune("never", token="hf_alice_read")
    assert refused.code == 1
    assert "is read-only" in refused.err
    assert not (tmp_path / "never").exists()
    hub.fault("/commit/", "status", status=403, times=-1)
    failed = finetune("first")
    assert failed.code == 1
    assert f"hf-vit: the model in {tmp_path / 'first'} is complete, but pushing it failed" in failed.err
    assert (tmp_path / "first" / "model.safetensors").is_file()
    hub.clear_faults()
    done = finetune("second")
    assert done.code == 0, done.err
    assert f"commit {hub.head(REPO)}" in done.out
    assert hub.get(f"/api/models/{REPO}")["private"] is True
    assert {"learning_curve.png", "facts.json", "model.safetensors"} <= set(hub.files(REPO))
