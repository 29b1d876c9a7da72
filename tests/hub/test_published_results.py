"""Results in the Hub's forms, as the Hub's own client reads them back."""

from pathlib import Path

import pytest
import yaml
from hub.conftest import training_record
from huggingface_hub import ModelCard, parse_eval_result_entries
from loopback.client import Client, Loopback

from hf_vit.hub.card import render_card, write_card
from hf_vit.hub.published_results import RESULTS_FILE, results_file
from hf_vit.results.facts import DataFact, Record, append_record

REPO = "alice/my-vit"
COMMIT = "5503434ddd753f426f4b38109466949a1217c2bb"
ON_THE_HUB = DataFact(name="uoft-cs/cifar10:plain", fingerprint="a" * 16, split="test", size=10_000, revision=COMMIT)


def evaluation(data: DataFact, top1: float) -> Record:
    command = f"hf-vit evaluate my-vit --data {data.name}"
    return training_record(kind="evaluation", command=command, data=data, values={"top1": top1, "top5": 0.99})


@pytest.fixture
def judged(model_folder: Path) -> Path:
    """On a data set of the Hub, one without a user whose commit is known, and one of this machine."""
    append_record(model_folder, evaluation(ON_THE_HUB, 0.912345))
    append_record(model_folder, evaluation(DataFact(name="beans", split="test", revision="b" * 40), 0.5))
    append_record(model_folder, evaluation(DataFact(name="digits", fingerprint="f" * 16, split="test", size=360), 0.75))
    write_card(model_folder)
    return model_folder


def test_the_client_reads_both_forms(hub: Loopback, xet_client: Client, judged: Path) -> None:
    assert "error" not in xet_client.run("hub.jobs:push", folder=str(judged))
    first, second = xet_client.run("hub.jobs:eval_results", repo_id=REPO)
    source = f"{hub.endpoint}/{REPO}/blob/main/facts.json"
    assert first == {
        "dataset_id": "uoft-cs/cifar10", "task_id": "plain", "value": 0.9123, "dataset_revision": COMMIT,
        "verify_token": None, "date": "2031-02-03T00:00:00+00:00", "source_url": source, "source_name": "facts.json",
        "source_user": None, "source_org": None,
        "notes": "top-1 accuracy; split test; 10,000 images; fingerprint aaaaaaaaaaaaaaaa; "
        "hf-vit evaluate my-vit --data uoft-cs/cifar10:plain",
    }  # fmt: skip
    assert (second["dataset_id"], second["task_id"], second["value"]) == ("beans", "default", 0.5)
    entries = ModelCard(xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")).data.eval_results
    assert [entry.metric_value for entry in entries] == [0.9123, 0.99, 0.5, 0.99, 0.75, 0.99]
    assert (entries[0].dataset_type, entries[0].dataset_config, entries[0].dataset_revision) == (
        "uoft-cs/cifar10", "plain", COMMIT,
    )  # fmt: skip
    assert entries[0].dataset_args == {"fingerprint": "a" * 16, "num_images": 10_000}
    assert (entries[-1].source_url, entries[-1].source_name) == (source, "hf-vit evaluate my-vit --data digits")


def test_results_that_are_no_longer_true_go(hub: Loopback, xet_client: Client, judged: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(judged))
    assert RESULTS_FILE in hub.files(REPO)
    append_record(judged, training_record())
    write_card(judged)
    assert xet_client.run("hub.jobs:push", folder=str(judged))["deleted"] == [RESULTS_FILE]
    assert RESULTS_FILE not in hub.files(REPO)
    assert xet_client.run("hub.jobs:eval_results", repo_id=REPO) is None


def test_without_a_place_nothing_points_to_one(judged: Path) -> None:
    """A folder that was not pushed."""
    assert not any(entry.source_url for entry in ModelCard(render_card(judged)).data.eval_results)
    (entry,) = parse_eval_result_entries(yaml.safe_load(results_file([evaluation(ON_THE_HUB, 1)], "my-vit")))
    assert (entry.source_url, entry.value) == (None, 1.0)
    assert results_file([evaluation(DataFact(name="digits"), 1)], REPO) is None
