"""Models held to what is said of them: published results measured again, and two models side by side."""

import copy
import itertools
import json
import math
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from dense_heads import FAMILIES
from evaluation.tiny import NAMES as ANIMALS
from evaluation.tiny import make_classifier, make_dataset, make_processor
from hub.conftest import save_model
from loopback.client import Client, Loopback
from sklearn.metrics import precision_recall_fscore_support
from timm.models import save_for_hf
from training.conftest import COLOURS, make_colour_folder
from transformers import AutoModelForImageClassification, pipeline

from hf_vit.audit.differences import compare_layers, diff
from hf_vit.audit.results import NearTies, audit_results, require_equal
from hf_vit.data import ImageData, load_data
from hf_vit.errors import UserError
from hf_vit.evaluation import evaluate, evaluate_protocol, save_protocol
from hf_vit.evaluation.examination import Examination
from hf_vit.hub.card import write_card
from hf_vit.loading import load_model
from hf_vit.loading.start import find_model
from hf_vit.training.tasks.dense import build_dense_model

NAMES = sorted(COLOURS)
LABELS = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images in `colours`, and in `my-vit` a model that was measured by two protocols. Not to be changed."""
    root = tmp_path_factory.mktemp("measured")
    colours = make_colour_folder(root / "colours", count=40)
    folder = save_model(root / "my-vit", **LABELS)
    for protocol, options in (("top1", {}), ("knn", {"neighbors": (3,)})):
        run = evaluate_protocol(protocol, str(folder), str(colours), split="test", progress=False, **options)
        save_protocol(run, folder=folder, command=f"hf-vit evaluate my-vit --protocol {protocol}")
    write_card(folder)
    return root


@pytest.fixture
def colours(measured: Path, tmp_path: Path) -> Path:
    """Images of single colours, a folder a class. To be changed, as the model."""
    return shutil.copytree(measured / "colours", tmp_path / "colours")


@pytest.fixture
def judged(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured / "my-vit", tmp_path / "my-vit")


def audit(folder: Path, *data: Path, **options: Any) -> list[Any]:
    return audit_results(folder, data=list(map(str, data)), device="cpu", **options)


def verdicts(folder: Path, *data: Path) -> dict[str, str]:
    return {finding.result_name: finding.verdict for finding in audit(folder, *data)}


def change(folder: Path, place: int = -2, **fields: Any) -> None:
    """Alter a record, and the card, as its author could; the top-1 evaluation is the last but one."""
    records = json.loads((folder / "facts.json").read_text())
    for path, value in fields.items():
        *above, name = path.split("__")
        part = records[place]
        for step in above:
            part = part[step]
        part[name] = value
    (folder / "facts.json").write_text(json.dumps(records))


def set_head(folder: Path, weight: float | None, bias: dict[int, float] | float) -> None:
    """Another head: random weights of another seed, or the same for all."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    torch.manual_seed(9)
    with torch.no_grad():
        if weight is None:
            torch.nn.init.normal_(model.classifier.weight)
        else:
            model.classifier.weight.fill_(weight)
            model.classifier.bias.fill_(0.0 if isinstance(bias, dict) else bias)
            for label, value in bias.items() if isinstance(bias, dict) else ():
                model.classifier.bias[label] = value
    model.save_pretrained(folder)


def test_true_results_are_equal(judged: Path, colours: Path) -> None:
    before = {path: path.read_bytes() for path in judged.rglob("*") if path.is_file()}
    found = verdicts(judged, colours)
    assert set(found.values()) == {"equal"}
    names = ("Top-1 accuracy", "loss", "ece", "3-nearest-neighbour accuracy, weighted vote")
    assert {f"{name} on colours, split test" for name in names} <= set(found)
    assert before == {path: path.read_bytes() for path in judged.rglob("*") if path.is_file()}
    require_equal(audit(judged, colours, batch_size=5))


def test_weights_of_16_bits_round_more(judged: Path, colours: Path) -> None:
    """The optimized model of the command has other roundings than the model as loaded, as other processors do."""
    model = AutoModelForImageClassification.from_pretrained(judged, dtype=torch.bfloat16)
    model.save_pretrained(judged)
    (judged / "facts.json").unlink()
    run = evaluate(judged, colours, protocol="calibration", split="train", optimize=True, device="cpu", progress=False)
    assert run.engine
    assert {finding.verdict for finding in audit(judged, colours)} == {"rounding"}


def test_what_is_not_true_is_different(judged: Path, colours: Path) -> None:
    """Better numbers than those of transformers' own pipeline; then weights of another seed."""
    change(judged, values__top1=1.0, values__loss=0.001)
    write_card(judged)
    (first, *others) = audit(judged, colours)
    assert (first.verdict, first.published) == ("different", 1.0)
    ask = pipeline("image-classification", model=str(judged), device="cpu")
    names = sorted(path.name for path in colours.iterdir())
    rows: list[Any] = list(load_data(str(colours)).split("test"))
    assert len(rows) == 5
    right = sum(ask(row["image"])[0]["label"] == names[row["label"]] for row in rows)
    assert re.search(rf"\({5 - right} images differ, and rounding can change the 0 near ties", str(first))
    assert [finding.verdict for finding in others if "loss" in finding.result_name] == ["different"]
    with pytest.raises(UserError, match=r"2 of \d published results differ .*; the first is different: Top-1 accuracy"):
        require_equal([first, *others])
    change(judged, values__top1=right / 5 + 0.08)
    assert audit(judged, colours)[0].verdict == "different", "not even half an image more"
    set_head(judged, None, 0.0)
    assert "different" in verdicts(judged, colours).values()


@pytest.fixture
def tied() -> Examination:
    """A classifier to which two classes are one: what is of either may be answered with any of both."""
    subject = load_model((make_classifier(), make_processor()))
    data = ImageData("animals", "0", {"test": make_dataset(16)}, list(ANIMALS))
    with torch.no_grad():
        subject.model.classifier.weight[1] = subject.model.classifier.weight[0]
        subject.model.classifier.bias[1] = subject.model.classifier.bias[0]
    return Examination(subject, data, progress=False)


def test_what_near_ties_may_make_of_the_means_of_classes(tied: Examination) -> None:
    """Every way in which they may turn, by scikit-learn, passes for rounding, and nothing beyond them."""
    pixels = tied.loaded.prepare([row["image"] for row in tied.data.split("test")])
    with torch.no_grad():
        best = tied.loaded.model(pixels).logits.argmax(-1).numpy()
    labels, turning = np.array(tied.data.split("test")["label"]), np.flatnonzero(best <= 1)
    assert 3 <= len(turning) <= 12
    ways: dict[str, list[float]] = {"precision": [], "recall": [], "f1": []}
    for answers in itertools.product((0, 1), repeat=len(turning)):
        best[turning] = answers
        found = precision_recall_fscore_support(
            labels, best, labels=np.unique(labels), average="macro", zero_division=0
        )
        for values, value in zip(ways.values(), found[:3], strict=True):
            values.append(float(value))
    ties = NearTies(tied)
    assert ties.count(1) == len(turning)
    for metric, values in ways.items():
        assert max(values) - min(values) > 0.01
        assert all(ties.can_explain(metric, value, values[0]) for value in values)
        assert not ties.can_explain(metric, min(values) - 0.01, values[0])
        assert not ties.can_explain(metric, max(values) + 0.01, values[0])
    assert ties.can_explain("ece", 0.1 + len(turning) / 16 - 0.001, 0.1)
    assert not ties.can_explain("ece", 0.1 + len(turning) / 16 + 0.001, 0.1)
    assert not ties.can_explain("loss", 0.101, 0.1)


def test_a_machine_that_answers_near_ties_otherwise(judged: Path, colours: Path) -> None:
    """All logits of an image are equal; then it took all for the last class, as likely here as the first."""
    set_head(judged, 0.0, 1.0)
    change(judged, values__top1=1.0)
    write_card(judged)
    (first, *_) = audit(judged, colours)
    assert (first.verdict, first.published) == ("rounding", 1.0)
    assert "the 5 near ties" in first.reason
    set_head(judged, 0.0, {0: 1.0, 2: 1.0})
    labels = [row["label"] for row in load_data(str(colours)).split("test")]
    last = labels.count(2)
    assert last != labels.count(0)
    precision = last / len(labels)
    means = {"precision": precision, "recall": 1.0, "f1": 2 * precision / (precision + 1)}
    fields = {f"values__{name}": value / len(set(labels)) for name, value in means.items()}
    change(judged, values__top1=precision, **fields)
    write_card(judged)
    found = {finding.result_name.split()[0]: finding for finding in audit(judged, colours)}
    for name in ("Top-1", "precision", "f1"):
        assert found[name].verdict == "rounding", str(found[name])
    change(judged, values__f1=0.8)  # more than two of three classes can have
    write_card(judged)
    assert verdicts(judged, colours)["f1 on colours, split test"] == "different"


def test_what_is_not_checkable(judged: Path, colours: Path) -> None:
    """A number without a record, data that are not there, other images than those of the record."""
    card = judged / "README.md"
    as_percentage = re.sub(r"value: ([\d.]+)", lambda match: f"value: {100 * float(match[1])}", card.read_text())
    card.write_text(as_percentage)
    (judged / ".eval_results").mkdir()
    (judged / ".eval_results" / "x.yaml").write_text("- dataset: {id: cais/hle, task_id: default}\n  value: 0.99\n")
    (judged / ".eval_results" / "y.yaml").write_text("- [")
    told = {finding.result_name: finding for finding in audit(judged, colours) if finding.verdict == "not checkable"}
    assert "README.md states this result" in str(told["Top-1 accuracy on colours, split test"])
    assert ".eval_results/x.yaml states this result" in str(told["Top-1 accuracy on cais/hle, task default"])
    assert any(what.startswith(".eval_results/y.yaml cannot be read") for what in told)
    shutil.rmtree(judged / ".eval_results")
    write_card(judged)
    (colours / "red" / "00.png").unlink()
    found = audit(judged, colours)
    assert {finding.verdict for finding in found} == {"not checkable"}
    assert "its fingerprint is different" in found[0].reason
    found = audit(judged)
    assert found[0].reason == "colours is not a public data set; give its path or URL with --data"
    with pytest.raises(UserError, match="no published result could be checked"):
        require_equal(found)


def test_every_published_number_is_measured_again(judged: Path, colours: Path) -> None:
    """Of records that the card shows too, of numbers that no protocol measures; and of an older record none."""
    records = json.loads((judged / "facts.json").read_text())
    older, few = copy.deepcopy(records[-2:])
    older["values"]["top1"] = 0.9999
    few["data"]["size"] = 3
    (name,) = few["values"]["headline"]
    few["values"]["headline"] = {name: 0.4321, "no such accuracy": 0.8765}
    (judged / "facts.json").write_text(json.dumps([*records[:-2], older, few, *records[-2:]]))
    write_card(judged)
    card = (judged / "README.md").read_text()
    (judged / "README.md").write_text(re.sub(r"value: 0\.\d+|value: 1\.0", "value: 0.9999", card, count=1))
    found = {finding.published: finding.verdict for finding in audit(judged, colours)}
    assert (found[0.4321], found[0.8765], found[0.9999]) == ("different", "not checkable", "different")


def test_a_result_on_images_of_other_sizes_is_measured_on_these(judged: Path, colours: Path) -> None:
    run = evaluate_protocol("top1", str(judged), str(colours), split="validation", max_num_patches=2, **QUIET)
    save_protocol(run, folder=judged)
    found = [finding for finding in audit(judged, colours) if "split validation" in finding.result_name]
    assert {finding.verdict for finding in found} == {"equal"}


def test_the_numbers_of_the_metadata_are_measured_again(tmp_path: Path) -> None:
    """They are recorded beside those of the card's table."""
    scenes = load_data("scenes:images=16", target="mask")
    for part in build_dense_model(find_model(FAMILIES["plain"]()), "linear", scenes.label_names):
        part.save_pretrained(tmp_path)
    run = evaluate_protocol("segmentation", str(tmp_path), scenes, num_images=2, device="cpu", progress=False)
    save_protocol(run, folder=tmp_path)
    assert set(verdicts(tmp_path).values()) == {"equal"}
    change(tmp_path, -1, values__mean_iou=0.9)
    assert verdicts(tmp_path)[f"Mean IoU on {scenes.name}, split test"] == "different"


def test_a_stranger_s_record_opens_nothing(judged: Path, colours: Path) -> None:
    """Neither a path that it names, nor a traceback."""
    before = (judged / "facts.json").read_text()
    for fields, reason in (
        ({"data__name": str(colours)}, "is not a public data set"),
        ({"data__name": "~"}, "is not a public data set"),
        ({"data__name": "a/b", "data__split": None}, "its record names no data set or no split"),
        ({"data__fingerprint": None}, "has no fingerprint"),
        ({"values__protocol": "no-such", "values__headline": {"x": 1.0}}, "--protocol no-such is unknown"),
        ({"values__headline": {"x": 1.0}, "values__settings": {"mappings": "../x"}}, "of its author's machine"),
        ({"data__size": -3}, "it must be at least 1"),
        ({"data__split": "nowhere"}, "has no split 'nowhere'"),
    ):
        (judged / "facts.json").write_text(before)
        change(judged, **fields)
        reasons = [str(finding) for finding in audit(judged, *([] if "data__name" in fields else [colours]))]
        assert any(reason in told for told in reasons), reasons


def test_the_command(hub: Loopback, xet_client: Client, judged: Path, colours: Path) -> None:
    """Of a model that is said to be better than it is."""
    change(judged, values__top1=1.0)
    write_card(judged)
    xet_client.run("hub.jobs:push", folder=str(judged))
    words = ["verify", "alice/my-vit", "--results", "--data", str(colours), "--device", "cpu"]
    done = xet_client.attempt("hub.jobs:command", arguments=words, examples=False)
    assert done.code == 1
    assert "equal: loss on colours, split test" in done.out
    (line,) = done.err.strip().splitlines()
    assert "1 of" in line
    assert "the first is different: Top-1 accuracy on colours, split test 1 published" in line


# Two models side by side

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
    assert [table.title for table in told.tables()[:2]] == ["the configurations are equal", "all weights are equal"]
    assert told.models == ("my-vit (first)", "my-vit (second)")
    with pytest.raises(UserError, match="classes that the model does not have: 'blue'"):
        diff(str(model), str(save_model(tmp_path / "other")), data=str(colours), **QUIET)
    path = model / "preprocessor_config.json"  # which keeps the shapes of images
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_num_patches": 12}))
    assert diff(str(model), str(model), data=str(colours), **QUIET).accuracy == told.accuracy


def test_a_class_has_the_same_name_in_every_unicode_form(tmp_path: Path) -> None:
    names = ("bleuté", "rosé")
    make_colour_folder(tmp_path / "data" / "test", count=2, colours=dict(zip(names, COLOURS.values(), strict=False)))
    for form in ("NFC", "NFD"):
        save_model(tmp_path / form, id2label={row: unicodedata.normalize(form, name) for row, name in enumerate(names)})
    told = diff(str(tmp_path / "NFC"), str(tmp_path / "NFD"), data=str(tmp_path / "data"), **QUIET)
    assert told.accuracy is not None
    assert (told.accuracy.num_images, told.accuracy.num_disagreements) == (4, 0)


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


def test_what_timm_keeps_of_its_models(tmp_path: Path) -> None:
    """The same weights for images of another mean color."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    for name in ("first", "second"):
        save_for_hf(model, tmp_path / name, safe_serialization=True, model_args={"img_size": 32, "depth": 1})
    path = tmp_path / "second/config.json"
    config = json.loads(path.read_text())
    config["pretrained_cfg"]["mean"] = [0.25, 0.5, 0.5]
    path.write_text(json.dumps(config))
    told = diff(str(tmp_path / "first"), str(path.parent), device="cpu")
    assert told.configuration == {"mean": ("[0.5, 0.5, 0.5]", "[0.25, 0.5, 0.5]")}


def test_what_has_no_norm_is_told() -> None:
    first = {"a.0.weight": torch.zeros(2), "b.weight": torch.ones(3), "c.weight": torch.tensor([math.nan])}
    second = {
        "a.0.weight": torch.ones(2), "b.weight": torch.ones(4), "c.weight": torch.ones(1), "d.bias": torch.ones(1),
    }  # fmt: skip
    for state, weight, steps in ((first, 1.0, 20_000), (second, 2.0, 30_000)):  # a batch norm
        state |= {"e.1.weight": torch.tensor([weight]), "e.1.num_batches_tracked": torch.tensor(steps)}
    told = {layer.layer: (layer.norm, layer.notes) for layer in compare_layers(first, second)}
    assert told == {
        "a.0": (None, ("all weights are zero in the first model, so the relative difference is undefined",)),
        "b": (None, ("b.weight [3] | [4]",)),
        "c": (None, ("some weights are not finite",)),
        "e.1": (1.0, ()),
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
    (blue,) = [each for each in told.examples if each.label == "blue"]
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
    assert {each.index for each in told.accuracy.examples} == set(apart)
    assert apart
    lower_probability = [each.lower_probability for each in told.accuracy.examples]
    assert lower_probability == sorted(lower_probability, reverse=True)
    told.save(tmp_path / "out")
    numbers = json.loads((tmp_path / "out/diff.json").read_text())
    assert numbers["accuracy"]["num_disagreements"] == len(apart)
    assert (tmp_path / "out/disagreements.png").read_bytes().startswith(b"\x89PNG")
    diff(str(model), str(model), data=str(colours), **QUIET).save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diff.json"]


def test_built_in_images_have_no_model_s_size_but_one_that_all_share(tmp_path: Path) -> None:
    digits = {"id2label": {number: str(number) for number in range(10)}, "num_labels": 10}
    models = [str(save_model(tmp_path / f"{side}", seed=side, **digits, image_size=side)) for side in (8, 16)]
    first, second = (diff(*pair, data="digits", num_images=90, **QUIET).accuracy for pair in (models, models[::-1]))
    assert first is not None
    assert second is not None
    assert first.accuracies == second.accuracies[::-1], "whichever model is named first"


def test_two_revisions(hub: Loopback, xet_client: Client, model: Path, tmp_path: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(model), tag="v1")
    altered(model, model, 2.0)
    xet_client.run("hub.jobs:push", folder=str(model))
    out = tmp_path / "out"
    xet_client.command("diff", "alice/my-vit@v1", "alice/my-vit", "--output", out, "--device", "cpu")
    layers = {layer["layer"]: layer["norm"] for layer in json.loads((out / "diff.json").read_text())["layers"]}
    assert {name for name, norm in layers.items() if norm} == {"classifier"}
    assert layers["classifier"] == pytest.approx(1.0)
    done = xet_client.attempt("hub.jobs:command", arguments=["diff", "alice/my-vit@v9", "alice/my-vit"])
    assert (done.code, len(done.err.strip().splitlines())) == (1, 1)
