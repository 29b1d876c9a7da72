"""Two models side by side: what is said of differences that were made on purpose."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from audit.conftest import LABELS, NAMES
from hub.conftest import save_model
from loopback.client import Client, Loopback
from training.conftest import COLOURS, make_colour_folder
from transformers import AutoModelForImageClassification, pipeline

from hf_vit.audit.differences import diff, layers_apart
from hf_vit.data import load_data
from hf_vit.errors import UserError

QUIET = {"device": "cpu", "progress": False}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "my-vit", **LABELS)


def altered(folder: Path, to: Path, factor: float = 0.0, label: str = "") -> Path:
    """The model with the weights of its head multiplied; it says `label` of every image, if there is one."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        model.classifier.weight.mul_(factor)
        model.classifier.bias.mul_(factor)
        if label:
            model.classifier.bias[NAMES.index(label)] = 3.0
    model.save_pretrained(to)
    if to != folder:
        shutil.copy(folder / "preprocessor_config.json", to)
    return to


def test_a_model_is_no_different_from_itself(model: Path, colours: Path, tmp_path: Path) -> None:
    told = diff(str(model), str(model), data=str(colours), **QUIET)
    assert told.configuration == {}
    assert {layer.norm for layer in told.layers} == {0.0}
    assert told.accuracy is not None
    assert (told.accuracy.num_disagreements, told.accuracy.p_value) == (0, 1.0)
    assert [table.title for table in told.tables()[:2]] == [
        "the configuration is the same",
        "the weights are the same, value by value",
    ]
    assert told.models == ("my-vit (first)", "my-vit (second)")
    with pytest.raises(UserError, match="classes the model does not know: 'blue'"):
        diff(str(model), str(save_model(tmp_path / "other")), data=str(colours), **QUIET)


def test_layers_and_fields_that_differ(model: Path, tmp_path: Path) -> None:
    other = altered(model, tmp_path / "scaled", 1.25)
    norms = {layer.layer: layer.norm for layer in diff(str(model), str(other), device="cpu").layers}
    assert norms.pop("classifier") == pytest.approx(0.25)
    assert norms
    assert set(norms.values()) == {0.0}
    other = save_model(tmp_path / "other", **LABELS, pooling="token")
    path = other / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_resize": False}))
    told = diff(str(model), str(other), device="cpu").configuration
    assert told == {"pooling": ('"gap"', '"token"'), "processor.do_resize": ("true", "false")}


def test_what_has_no_norm_is_told() -> None:
    first = {"a.0.weight": torch.zeros(2), "b.weight": torch.ones(3), "c.weight": torch.tensor([math.nan])}
    second = {
        "a.0.weight": torch.ones(2),
        "b.weight": torch.ones(4),
        "c.weight": torch.ones(1),
        "d.bias": torch.ones(1),
    }
    told = {layer.layer: (layer.norm, layer.notes) for layer in layers_apart(first, second)}
    assert told == {
        "a.0": (None, ("zero in the first",)),
        "b": (None, ("b.weight [3] | [4]",)),
        "c": (None, ("not finite",)),
        "d": (None, ("d.bias none | [1]",)),
    }


def test_mcnemar_of_answers_that_are_known(model: Path, tmp_path: Path) -> None:
    """Nine red images and one blue: who always says red is right nine times where the other is wrong, and so on."""
    for label, count in (("red", 9), ("blue", 1)):
        make_colour_folder(tmp_path / "data" / "test", count=count, colours={label: COLOURS[label]})
    first, second = (altered(model, tmp_path / f"always-{label}", label=label) for label in ("red", "blue"))
    told = diff(str(first), str(second), data=str(tmp_path / "data"), **QUIET).accuracy
    assert told is not None
    assert (told.num_images, told.both_right, told.only_first, told.only_second) == (10, 0, 9, 1)
    assert told.accuracies == (0.9, 0.1)
    assert told.p_value == pytest.approx(2 * (math.comb(10, 0) + math.comb(10, 1)) / 2**10)
    assert told.num_disagreements == 10
    (blue,) = [each for each in told.pictured if each.label == "blue"]
    assert (blue.file, [answer.is_right for answer in blue.answers]) == ("00.png", [False, True])
    assert blue.answers[1].probability == pytest.approx(math.exp(3) / (math.exp(3) + 2), abs=1e-6)


def test_accuracies_are_those_of_transformers_own_pipeline(model: Path, colours: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5, **LABELS)
    told = diff(str(model), str(other), data=str(colours), batch_size=2, **QUIET)
    assert told.accuracy is not None
    rows = list(load_data(str(colours)).split("test"))
    asks = [pipeline("image-classification", model=str(folder), device="cpu") for folder in (model, other)]
    answers = [[ask(row["image"])[0]["label"] for row in rows] for ask in asks]
    right = [[answer == NAMES[row["label"]] for answer, row in zip(each, rows, strict=True)] for each in answers]
    assert told.accuracy.accuracies == tuple(sum(each) / len(rows) for each in right)
    apart = [place for place, (first, second) in enumerate(zip(*answers, strict=True)) if first != second]
    assert {each.index for each in told.accuracy.pictured} == set(apart)
    assert apart
    sureness = [each.sureness for each in told.accuracy.pictured]
    assert sureness == sorted(sureness, reverse=True)
    told.save(tmp_path / "out")
    numbers = json.loads((tmp_path / "out/diff.json").read_text())
    assert numbers["accuracy"]["num_disagreements"] == len(apart)
    assert (tmp_path / "out/disagreements.png").read_bytes().startswith(b"\x89PNG")
    diff(str(model), str(model), data=str(colours), **QUIET).save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diff.json"]


def test_two_revisions(hub: Loopback, xet_client: Client, model: Path, tmp_path: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(model), tag="v1")
    altered(model, model, 2.0)
    xet_client.run("hub.jobs:push", folder=str(model))
    out = tmp_path / "out"
    words = ["diff", "alice/my-vit@v1", "alice/my-vit", "--output", str(out), "--device", "cpu"]
    done = xet_client.attempt("hub.jobs:command", arguments=words)
    assert done.code == 0, done.err
    layers = {layer["layer"]: layer["norm"] for layer in json.loads((out / "diff.json").read_text())["layers"]}
    assert {name for name, norm in layers.items() if norm} == {"classifier"}
    assert layers["classifier"] == pytest.approx(1.0)
    done = xet_client.attempt("hub.jobs:command", arguments=["diff", "alice/my-vit@v9", "alice/my-vit"])
    assert (done.code, len(done.err.strip().splitlines())) == (1, 1)
