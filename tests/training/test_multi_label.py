"""Several classes an image: read, learnt, measured, predicted and shared; numbers against plain arithmetic."""

import csv
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from evaluation.tiny import make_classifier
from pages.models import save_classifier
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image
from scipy.special import logit
from training.conftest import COLOURS, save_model

from hf_vit import UserError
from hf_vit.analysis import open_images
from hf_vit.audit.results import audit_results
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate, predict, prediction
from hf_vit.evaluation.protocols.multi_label import MultiLabelResult, compute_multi_label_metrics, pick_thresholds
from hf_vit.hub.card import render_card
from hf_vit.pages.making import make_page
from hf_vit.results.facts import Facts, append_record
from hf_vit.training import finetune
from hf_vit_cli.finetune import print_result


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """160 images of 12 px with a patch of some of three colours, or of none, and a list of them."""
    place = tmp_path_factory.mktemp("multi") / "shapes"
    place.mkdir()
    random = np.random.RandomState(0)
    lines = []
    for number in range(160):
        pixels = random.randint(0, 60, (12, 12, 3), dtype=np.uint8)
        there = [name for name in COLOURS if random.rand() < 0.4]
        for name in there:
            top = 4 * list(COLOURS).index(name)
            pixels[top : top + 4, random.randint(0, 6) :] = COLOURS[name]
        Image.fromarray(pixels).save(place / f"{number:03d}.png")
        lines.append({"file_name": f"{number:03d}.png", "label": there, **{c: int(c in there) for c in COLOURS}})
    (place / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    header = ["file_name", *COLOURS]
    rows = [",".join(str(line[name]) for name in header) for line in lines]
    (place / "columns.csv").write_text("\n".join([",".join(header), *rows]) + "\n")
    return place


def labels(data, split):
    rows = zip(data.seen[split], data.splits[split]["label"], strict=True)
    return {seen.digest: sorted(data.label_names[each] for each in row) for seen, row in rows}


def test_lists_and_columns_of_zero_and_one_are_the_same_data(shapes):
    lists = load_data(str(shapes), multi_label=True)
    columns = load_data(str(shapes / "columns.csv"), label_column="blue,green,red", multi_label=True)
    assert lists.multi_label
    assert columns.multi_label
    assert lists.label_names == columns.label_names == ["blue", "green", "red"]
    for split in lists.splits:
        assert labels(lists, split) == labels(columns, split)
    assert lists.fingerprint == columns.fingerprint
    lines = map(json.loads, (shapes / "metadata.jsonl").read_text().splitlines())
    told = {line["file_name"]: line["label"] for line in lines}
    for split, seen in lists.seen.items():
        for image in seen:
            assert labels(lists, split)[image.digest] == told[image.name.rpartition("/")[2]]


@pytest.mark.parametrize("hidden", [[], None])
def test_a_test_split_without_labels_is_cut_from_the_training_images(shapes, hidden):
    """Before a training, at whose end it could not be measured."""
    for part, lines in (("train", slice(0, 120)), ("test", slice(120, None))):
        rows = [json.loads(line) for line in (shapes / "metadata.jsonl").read_text().splitlines()[lines]]
        rows = [row | {"label": hidden} for row in rows] if part == "test" else rows
        (shapes / f"part-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(str(shapes / "part-*.jsonl"), multi_label=True)
    assert "split 'test' of 'part-*.jsonl' was left out, because it has no labels" in data.notes
    assert sum(map(len, data.seen.values())) == 120
    assert any(labels(data, "test").values())


@pytest.mark.parametrize(("no", "said"), [("-1", "-1"), ("no", "'(no|1)'"), ("", "None")])
def test_columns_of_anything_but_zero_and_one_are_refused(shapes, no, said):
    """Such as CelebA's, of -1 and 1; a cell without a value is no "no"."""
    header, *rows = (shapes / "columns.csv").read_text().splitlines()
    rows = [",".join(no if cell == "0" else cell for cell in row.split(",")) for row in rows]
    (shapes / "others.csv").write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(UserError, match=rf"holds {said}, but multi-label columns hold 0 or 1; write 1 for images of"):
        load_data(str(shapes / "others.csv"), label_column="blue,green,red", multi_label=True)


def test_what_cannot_do_with_several_classes_says_so(shapes, tiny_config, tmp_path):
    with pytest.raises(UserError, match=r"is multi-label, but .* hf-vit finetune"):
        load_data(str(shapes))
    images = [{"bytes": file.read_bytes(), "path": None} for file in sorted(shapes.glob("*.png"))[:4]]
    table = Dataset.from_dict({"image": images, "label": [["blue"], ["red"]] * 2}, features=Features(
        {"image": datasets.Image(), "label": List(Value("string"))}))  # fmt: skip
    table.to_parquet(str(tmp_path / "lists.parquet"))
    for source in (shapes, tmp_path / "lists.parquet"):
        with pytest.raises(UserError, match="multi-label and cannot be read as a stream; leave --streaming out"):
            load_data(str(source), streaming=True, multi_label=True)
    for values in ({"mixup_alpha": 0.2}, {"class_weights": True}):
        with pytest.raises(UserError, match="mixup and cutmix do not work with multi-label data"):
            finetune(tiny_config(), str(shapes), tmp_path / "out", steps=2, **values)


def test_pages_and_analyses_show_images_of_several_classes(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_vit.pages.making.FILES", SMALL_FILES)
    model, runtime = save_classifier(tmp_path / "model", "plain", "default"), save_runtime(tmp_path / "runtime")
    make_page([model], tmp_path / "page", images=str(shapes), runtime=runtime)
    examples = json.loads((tmp_path / "page/page.json").read_text())["examples"]
    assert {"red", "blue, red"} <= {example["label"] for example in examples}
    assert open_images(str(shapes), 3).size == 3


def test_precision_and_thresholds_by_their_definitions():
    random = np.random.RandomState(2)
    truth = random.rand(60, 3) < 0.3
    probabilities = np.clip(0.35 * truth + 0.65 * random.rand(60, 3), 1e-6, 1 - 1e-6)
    names = ["a", "b", "c"]
    thresholds = pick_thresholds(probabilities, truth, names)
    result = compute_multi_label_metrics(logit(probabilities), truth, names, thresholds)
    for k, name in enumerate(names):
        order = np.argsort(-probabilities[:, k])
        hits = truth[order, k]
        precisions = np.cumsum(hits) / np.arange(1, 61)
        assert result.average_precision[name] == pytest.approx(precisions[hits].mean())

        def f1(limit, k=k):
            answers = probabilities[:, k] >= limit
            return 2 * (answers & truth[:, k]).sum() / (answers.sum() + truth[:, k].sum())

        assert result.f1[name] == pytest.approx(f1(thresholds[name]))
        assert result.f1[name] == pytest.approx(max(map(f1, probabilities[:, k])))
    each = torch.nn.functional.binary_cross_entropy(torch.tensor(probabilities), torch.tensor(truth).double())
    assert result.loss == pytest.approx(3 * float(each))


def test_the_loss_of_logits_whose_probabilities_are_0_or_1():
    """As torch has it, of one class, too."""
    logits, truth = np.array([[60.0], [-800.0], [3.0]]), np.array([[False], [True], [True]])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(truth).double())
    result = compute_multi_label_metrics(logits, truth, ["a"], {"a": 0.5})
    assert result.loss == pytest.approx(float(expected))
    assert (result.f1, result.f1_micro) == ({"a": 0.5}, 0.5)


def test_a_model_that_returns_its_hidden_states_is_validated(shapes, tiny_config, tmp_path):
    done = finetune(tiny_config(output_hidden_states=True), str(shapes), tmp_path / "out", steps=2, evaluations=1)
    assert done.validation["loss"] == pytest.approx(done.test.loss, abs=0.1)


def test_a_model_learns_is_measured_and_answers(shapes, tiny_config, tmp_path, command, fails, caplog):
    config = tiny_config(image_size=12, hidden_size=32, intermediate_size=64)
    settings = dict(steps=200, evaluations=4, batch_size=32, learning_rate=5e-3, horizontal_flip=0.0)
    settings |= dict(random_resized_crop=(0, 0))
    done = finetune(config, str(shapes), tmp_path / "model", **settings)
    reached = done.test.mean_average_precision
    assert f"test mean average precision: {reached:.2%} of {done.test.num_images} images" in repr(done)
    again = finetune(config, str(shapes), tmp_path / "model", resume=True, **settings)
    assert (again.test, again.validation) == (done.test, done.validation), "a finished run is recalled"
    assert done.model.config.problem_type == "multi_label_classification"
    assert reached > 0.9
    training, evaluation = Facts.load(tmp_path / "model").records
    assert training.values["recipe"]["label_smoothing"] == 0
    assert training.values["validation_mean_average_precision"] == done.validation["mean_average_precision"]
    assert evaluation.values["protocol"] == "multi-label"

    judging = ("--data", shapes, "--protocol", "multi-label", "--device", "cpu", "--output", tmp_path / "out")
    code, out, err = command("evaluate", tmp_path / "model", *judging)
    assert (code, "were training images" in err) == (0, False)
    again = Facts.load(tmp_path / "model").records[-1].values
    assert again["mean_average_precision"] == pytest.approx(done.test.mean_average_precision)
    assert again["thresholds"] == pytest.approx(done.test.thresholds)
    assert f"{again['mean_average_precision']:.2%}" in out
    written = json.loads((tmp_path / "out" / "multi_label.json").read_text())
    assert written["values"]["classes"] == again["classes"]
    with Image.open(tmp_path / "out" / "multi_label.png") as picture:
        assert picture.format == "PNG"

    code, out, _ = command("predict", tmp_path / "model", shapes / "003.png", "--json", "--device", "cpu")
    (answer,) = json.loads(out)
    scores = {each["label"]: each["score"] for each in answer["predictions"]}
    with Image.open(shapes / "003.png") as image, torch.no_grad():
        logits = done.model(**done.processor(image.convert("RGB"), return_tensors="pt")).logits[0]
    expected = {name: float(torch.sigmoid(logits[k])) for k, name in enumerate(["blue", "green", "red"])}
    assert scores == pytest.approx(expected, abs=1e-3)
    fitted = done.test.thresholds
    assert answer["labels"] == [name for name in ("blue", "green", "red") if expected[name] >= fitted[name]]
    one, table = (str(shapes / "003.png"), "--device", "cpu"), tmp_path / "answers.csv"
    _, out, _ = command("predict", tmp_path / "model", *one)
    assert out.count("yes") == len(answer["labels"])
    assert out.count("no ") == 3 - len(answer["labels"])
    command("predict", tmp_path / "model", *one, "--output", table)
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert json.loads(row["labels"]) == answer["labels"]

    card = render_card(tmp_path / "model")
    assert "| mean average precision |" in card
    assert "if outputs.logits[0, number] > 0]" in card
    assert "no accuracy is known" not in card
    fails(("evaluate", tmp_path / "model", "--data", shapes, "--device", "cpu"), "evaluate --protocol multi-label")

    assert {finding.verdict for finding in audit_results(tmp_path / "model", data=[str(shapes)])} == {"equal"}
    values = evaluation.values | {"thresholds": {"blue": 0.0}}
    few = evaluation.model_copy(update={"values": values | {"settings": {"thresholds": {"blue": 0.0}}}})
    append_record(tmp_path / "model", few)  # of data without the other classes
    _, out, _ = command("predict", tmp_path / "model", *one, "--json")
    assert json.loads(out)[0]["labels"] == ["blue", *(name for name in answer["labels"] if name != "blue")]
    (reason,) = {finding.reason for finding in audit_results(tmp_path / "model", data=[str(shapes)])}
    assert reason == "thresholds has no value for ['green', 'red']; give one for every class"

    for forged in ({"blue": 7, "green": 0.5, "red": 0.5}, [0.5] * 3, None):
        told = evaluation.model_copy(update={"values": evaluation.values | {"thresholds": forged}})
        append_record(tmp_path / "model", told)
        fails(("predict", tmp_path / "model", *one), "no threshold for the class blue")
    append_record(tmp_path / "model", training)  # of new weights, for which no threshold is fitted yet
    prediction._warn_once.cache_clear()  # another test may have had the same warning
    for _ in range(2):
        _, out, _ = command("predict", tmp_path / "model", *one, "--json")
        assert json.loads(out)[0]["labels"] == [name for name, score in expected.items() if score >= 0.5]
        (tmp_path / "model" / "facts.json").unlink(missing_ok=True)
    (note,) = caplog.messages
    assert note.startswith("no threshold is recorded for blue, green, red, so 0.5 is used; hf-vit evaluate --protocol")


def test_thresholds_have_the_names_by_which_the_model_looks_them_up(shapes, tmp_path, caplog):
    """Names of models of others may differ from those of data in blanks and Unicode forms."""
    names = ["red", " green", "blue "]
    save_model(make_classifier(names, problem_type="multi_label_classification"), tmp_path / "model")
    run = evaluate(tmp_path / "model", shapes, protocol="multi-label", device="cpu", progress=False)
    (answer,) = predict(tmp_path / "model", shapes / "003.png", device="cpu")
    assert set(answer.labels) == {name for name, score in answer.scores if score >= run.result.thresholds[name]}
    assert not caplog.messages, "no threshold is missing"


def test_of_very_many_classes_the_worst_are_drawn():
    """A plot of 3,000 bars would have 108,180 px, which matplotlib below 3.10 refuses after all the work."""
    values = {str(number): 1 - number / 3000 for number in range(3000)}
    numbers: dict = dict(f1=values, images=dict.fromkeys(values, 1), thresholds=values, f1_micro=1, loss=0)
    axes = MultiLabelResult(1, average_precision=values, **numbers).draw().axes[0]
    assert [bar.get_width() for bar in axes.patches] == [100 * value for value in sorted(values.values())[:200]]
    assert axes.get_xlabel() == "average precision, the 200 lowest (%)"


def test_a_class_is_printed_by_its_name_whatever_it_is(capsys):
    one = {"[red]": 1.0}
    result = MultiLabelResult(1, average_precision=one, f1=one, images={"[red]": 1}, thresholds=one, f1_micro=1, loss=0)
    assert repr(result).startswith("MultiLabelResult(images: 1, mean average precision: 100.00%")
    print_result(SimpleNamespace(test=result, model=SimpleNamespace(device=torch.device("cpu")), folder="out"))
    assert "[red]" in capsys.readouterr().out
