"""`top1` against a plain loop and scikit-learn, and its promises on memory, names and state; its pictures."""

import contextlib
import os
import pickle
import re
import socket
import threading
import weakref
from dataclasses import replace

import evaluate as evaluate_library
import numpy as np
import pytest
import torch
from evaluation.tiny import NAMES, logits_of, make_classifier, make_dataset, make_images, make_processor, save_ours
from PIL import Image
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
    top_k_accuracy_score,
)

from hf_vit.analysis import analyze, show
from hf_vit.comparison import ComparisonSettings, compare
from hf_vit.data import ImageData, eval_transform
from hf_vit.errors import UserError
from hf_vit.evaluation import (
    PROTOCOLS,
    WrongImage,
    evaluate,
    evaluate_protocol,
    plot_confusion_matrix,
    plot_wrong_images,
    predict,
)
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.metrics import ClassificationMetrics
from hf_vit.evaluation.protocols.frame import make_thumbnail
from hf_vit.evaluation.reading import Collate, iterate_batches
from hf_vit.loading.model import load_model, make_names_unique, match_labels
from hf_vit.results.figures import save_figure

COUNT = 61


@pytest.fixture(scope="module")
def dataset():
    return make_dataset(COUNT)


def measure(model, dataset, label_names=NAMES, prepare=None, max_wrong=64, **options):
    subject = load_model((model, make_processor()))
    subject = subject if prepare is None else replace(subject, prepare=prepare)
    data = ImageData("noise", "0123456789abcdef", {"test": dataset}, list(label_names))
    return PROTOCOLS["top1"](Examination(subject, data, **{"progress": False, **options}), max_wrong=max_wrong)


def probabilities_of(model, dataset):
    return logits_of(model, dataset["image"]).double().softmax(-1).numpy()


@pytest.mark.parametrize("batch_size", [1, 16, 100])
def test_the_result_equals_scikit_learn(dataset, batch_size, tmp_path, monkeypatch):
    """No file is written and no network asked, as the base class of `evaluate` would."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked the network"))
    monkeypatch.setattr(evaluate_library.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = make_classifier()
    result = measure(model, dataset, batch_size=batch_size)
    assert os.listdir(tmp_path) == []
    probabilities, labels, every = probabilities_of(model, dataset), np.array(dataset["label"]), list(range(6))
    predictions, confidences = probabilities.argmax(1), probabilities.max(1)
    assert len(set(predictions.tolist())) > 2, "a model with one answer would prove little"
    assert result.num_images == COUNT
    expected = {
        "top1": accuracy_score(labels, predictions),
        "top5": top_k_accuracy_score(labels, probabilities, k=5, labels=every),
        "loss": log_loss(labels, probabilities, labels=every),
        "ece": bin_by_bin(predictions == labels, confidences),
        "precision": precision_score(labels, predictions, average="macro", zero_division=0),
        "recall": recall_score(labels, predictions, average="macro"),
        "f1": f1_score(labels, predictions, average="macro"),
        "auc": roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"),
    }
    values = result.values()
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    recalls = recall_score(labels, predictions, average=None, labels=every)
    assert result.per_class == pytest.approx(dict(zip(NAMES, recalls, strict=True)))
    assert (result.confusion_matrix == confusion_matrix(labels, predictions, labels=every)).all()
    assert result.num_wrong == (predictions != labels).sum() == len(result.wrong)
    for entry in result.wrong:
        assert (entry.label, entry.prediction) == (NAMES[labels[entry.index]], NAMES[predictions[entry.index]])
        assert entry.confidence == pytest.approx(confidences[entry.index], rel=1e-5)
    order = [entry.confidence for entry in result.wrong]
    assert order == sorted(order, reverse=True)
    assert len(values["thresholds"]) == 12
    for row in values["thresholds"]:
        answered = confidences >= row["threshold"]
        right = (answered & (predictions == labels)).sum()
        wanted = {"answered": answered.mean(), "recall": right / COUNT, "f1": 2 * right / (answered.sum() + COUNT)}
        wanted["precision"] = right / answered.sum() if answered.any() else 0
        assert row == pytest.approx({"threshold": row["threshold"], **wanted})


def test_streams_workers_and_any_preparation_give_the_same(dataset):
    processor, model, seen = make_processor(), make_classifier(), []

    def prepare(images):
        assert all(image.mode == "RGB" for image in images)
        seen.append(len(images))
        return processor(images=list(images), return_tensors="pt")["pixel_values"]

    table = measure(model, dataset, batch_size=8)
    stream = measure(model, dataset.to_iterable_dataset(), batch_size=8)
    assert stream.values() | {"images_per_second": 0} == table.values() | {"images_per_second": 0}
    assert stream.wrong == table.wrong == measure(model, dataset, num_workers=1, batch_size=8).wrong
    assert measure(model, dataset, prepare=prepare, batch_size=20).loss == pytest.approx(table.loss, rel=1e-6)
    assert seen == [20, 20, 20, 1]
    assert measure(model, dataset, max_wrong=5).wrong == table.wrong[:5]
    assert measure(model, dataset, max_wrong=0).num_wrong == table.num_wrong > 5


def test_classes_are_matched_by_name_not_by_number(dataset):
    model = make_classifier()
    straight = measure(model, dataset)
    order = [3, 0, 5, 1, 4, 2]
    renamed = dataset.cast_column("label", dataset.features["label"].__class__(names=[NAMES[i] for i in order]))
    moved = renamed.map(lambda row: {"label": order.index(row["label"])}, keep_in_memory=True)
    permuted = measure(model, moved, label_names=[NAMES[index] for index in order])
    assert (permuted.top1, permuted.per_class) == (straight.top1, straight.per_class)
    assert measure(model, moved).per_class != straight.per_class
    two = dataset.filter(lambda row: row["label"] in (1, 4), keep_in_memory=True)
    mapped = two.map(lambda row: {"label": int(row["label"] == 4)}, keep_in_memory=True)
    result = measure(model, mapped, label_names=["bee", "eel"])
    assert result.top1 == pytest.approx(accuracy_score(two["label"], probabilities_of(model, two).argmax(1)))
    assert set(result.per_class) == {"bee", "eel"}
    assert result.confusion_matrix.shape == (6, 6)


IMAGENET = ["crane", "heron", "crane"]


@pytest.mark.parametrize(
    ("names", "of_model", "expected"),
    [
        (IMAGENET, IMAGENET, [0, 1, 2]),
        (["heron"], IMAGENET, [1]),
        (["heron", "crane"], IMAGENET, r"several classes named 'crane'.*id2label"),
        (["cr\u00e8me", "bee"], ["bee ", "cre\u0300me"], [1, 0]),  # either Unicode form, and blanks
        (["cr\u00e8me"], ["cr\u00e8me", "cre\u0300me"], "several classes named 'cr\u00e8me'"),
        (["bee", "yak", "zebra"], ["ant", "bee"], r"does not have: 'yak', 'zebra'; the model has 'ant', 'bee'"),
        ([f"c{index}" for index in range(50)], ["ant"], "and 40 more"),
    ],
)
def test_names_of_classes(names, of_model, expected):
    if isinstance(expected, list):
        assert match_labels(names, of_model) == expected
    else:
        with pytest.raises(UserError, match=expected):
            match_labels(names, of_model)
    assert make_names_unique(IMAGENET) == ["crane (0)", "heron", "crane (2)"]


class Untouchable:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise AssertionError("an image was read")


def rows_of(*labels, images=None):
    return [{"image": image, "label": label} for image, label in zip(images or make_images(2), labels, strict=False)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (Untouchable(), {"label_names": ["yak"]}, "that the model does not have"),
        *((rows_of(each), {}, re.escape(f"label {each!r}, which is not one")) for each in (-1, 6, None, "ant", [1])),
        (rows_of(0, 0, images=[*make_images(1), None]), {}, "a row of the data has no image"),
        (make_dataset(4).select([]), {}, "holds no image"),
        (make_dataset(4), {"batch_size": 0}, "batch size is 0"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_measured_are_refused(rows, options, message):
    with pytest.raises(UserError, match=message):
        measure(make_classifier(), rows, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "mask"}, "loaded with target='mask'; load it with target='label'"),
        ({"multi_label": True}, "is multi-label"),
    ],
)
def test_loaded_data_of_another_kind_are_refused(dataset, fields, message):
    data = ImageData("noise", "", {"test": dataset}, list(NAMES), **fields)
    with pytest.raises(UserError, match=message):
        evaluate((make_classifier(), make_processor()), data, protocol="top1")


def test_kinds_of_models_and_images(dataset, capsys):
    modes = ["L", "RGBA", "P", "CMYK", "I;16", "LA", "1"]
    rows = [{"image": Image.new(mode, (9, 7)), "label": 0} for mode in modes]
    assert measure(make_classifier(), rows, progress=True).num_images == len(modes)
    assert capsys.readouterr().out == "", "the bar goes to standard error"
    four = measure(make_classifier(NAMES[:4]), make_dataset(20, NAMES[:4]), label_names=NAMES[:4])
    assert four.top5 is None
    assert "top5" not in four.values()
    full, half = measure(make_classifier(), dataset), measure(make_classifier().to(torch.bfloat16), dataset)
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert half.loss != full.loss, "measured as it is"
    model = make_classifier()
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    with pytest.raises(UserError, match="NaN or infinite"):
        measure(model, dataset)


def test_images_are_let_go_of():
    """The number of images alive at once depends on the batch, not on the data."""

    class Stream:
        def __init__(self, count):
            self.count, self.peak, self.made = count, 0, []

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            self.peak = max(self.peak, sum(made() is not None for made in self.made))
            image = Image.new("RGB", (8, 8), (index % 256, index // 256, 7))
            self.made.append(weakref.ref(image))
            return {"image": image, "label": index % 6}

    peaks = []
    for count in (40, 160):
        stream = Stream(count)
        assert measure(make_classifier(), stream, batch_size=4, max_wrong=2).num_images == count
        peaks.append(stream.peak)
    assert peaks[0] == peaks[1] <= 3 * 4


def test_mode_and_random_state_are_given_back(dataset, tmp_path):
    model, data = make_classifier().train(), ImageData("noise", "", {"test": dataset}, list(NAMES))
    model.vit.embeddings.eval()  # a frozen part stays in evaluation mode
    ours, settings = save_ours(tmp_path / "ours"), ComparisonSettings(corruptions=(), epsilons=(), speed_turns=0)
    modes, before = [module.training for module in model.modules()], torch.get_rng_state()
    pair, images = (model, make_processor()), make_images(2)
    for use in (
        lambda: evaluate_protocol("top1", pair, data, progress=False),
        lambda: evaluate_protocol("top1", pair, data, split="none"),
        lambda: predict(pair, images),
        lambda: analyze(pair, images, only=["attention_distance"]),
        lambda: show(pair, images[0]),
        lambda: compare([pair, (ours, make_processor())], data, tmp_path / "out", settings=settings, progress=False),
    ):
        with contextlib.suppress(UserError):
            use()
        assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_model_may_be_trained_between_two_uses(tmp_path):
    """It predicts without dropout and keeps its mode, and results of its earlier weights are not taken for its own."""
    model, images = make_classifier(hidden_dropout_prob=0.5), make_images(4)
    loaded = load_model((model, make_processor()))
    analyze(loaded, images, tmp_path, only=["attention_entropy"])
    model.train()
    assert predict(loaded, images) == predict(loaded, images)
    assert model.training
    torch.nn.init.normal_(model.classifier.weight)
    with pytest.raises(UserError, match=r"with other inputs \(model differ"):
        analyze(loaded, images, tmp_path, only=["attention_entropy"])


def test_threads_use_a_model_in_evaluation_mode_until_the_last_ends(monkeypatch):
    """The first thread ends while the second predicts, which must not see the mode of training."""
    model, barrier, modes = make_classifier().train(), threading.Barrier(2), []
    forward = model.forward

    def wait(*args, **kwargs):
        barrier.wait(30)
        if threading.current_thread() is threads[1]:
            threads[0].join(30)
        modes.append(model.training)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", wait)
    threads = [threading.Thread(target=predict, args=((model, make_processor()), make_images(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert modes == [False, False]
    assert model.training


def test_workers_send_no_whole_images():
    """Pixel values and labels as without them; of images what a report shows, and small ones as they are."""
    noise = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    pictures = [Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC) for size in ((1000, 700), (300, 319))]
    rows = [{"image": picture, "label": label} for label, picture in enumerate(pictures)]
    collate = Collate(lambda images: torch.stack(eval_transform(make_processor()).prepare(images)), [1, 0])
    (values, labels, images), (plain_values, plain_labels, plain) = (
        next(iter(iterate_batches(rows, 2, collate, workers))) for workers in (1, 0)
    )
    assert torch.equal(values, plain_values)
    assert labels.tolist() == plain_labels.tolist() == [1, 0]
    assert [image.size for image in plain] == [(1000, 700), (300, 319)]
    assert [image.size for image in images] == [(167, 117), (300, 319)]
    for image, whole in zip(images, plain, strict=True):
        small, wanted = (np.asarray(make_thumbnail(each), dtype=float) for each in (image, whole))
        assert small.shape == wanted.shape
        assert np.abs(small - wanted).mean() < 2


def saved(figure, path):
    """The figure as its PNG shows it."""
    save_figure(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_the_matrix_shows_its_counts_in_place(tmp_path):
    matrix = np.array([[5, 0, 1], [0, 7, 0], [2, 3, 4]])
    figure = plot_confusion_matrix(matrix, ["ant", "bee", "cow"], title="test of $4")
    axes = figure.axes[0]
    shown = {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts}
    assert shown == {(0, 0): "5", (0, 2): "1", (1, 1): "7", (2, 0): "2", (2, 1): "3", (2, 2): "4"}
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in ticks] == ["ant", "bee", "cow"]
    assert axes.get_title() == "test of $4"
    assert np.asarray(axes.images[0].get_array()) == pytest.approx(matrix / matrix.sum(1, keepdims=True))
    assert saved(figure, tmp_path / "m.png").std() > 10
    again = plot_confusion_matrix(matrix, ["ant", "bee", "cow"], title="test of $4")
    save_figure(again, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "m.png").read_bytes()
    assert b"matplotlib" not in (tmp_path / "m.png").read_bytes(), "no version of it"
    for size in (1, 25, 300):
        figure = plot_confusion_matrix(np.eye(size, dtype=np.int64), [str(index) for index in range(size)])
        assert len(figure.axes[0].texts) == (size if size <= 20 else 0)
        assert max(saved(figure, tmp_path / "m.png").shape) < 2000


def test_mistakes_show_their_images_in_order_and_names_as_they_are(tmp_path):
    odd = ("$a^{", "two\nlines", "猫", "_under_ <b>", "x" * 60)
    matrix = plot_confusion_matrix(np.eye(5, dtype=np.int64), odd, title=odd[0])
    labels = [label.get_text() for label in matrix.axes[0].get_xticklabels()]
    assert labels == ["$a^{", "two lines", "猫", "_under_ <b>", "x" * 23 + "…"]
    saved(matrix, tmp_path / "matrix.png")
    wrong = [
        WrongImage(0.99 - index / 100, index, odd[0], "猫", Image.new("RGB", (8, 6), (index, 0, 0)))
        for index in range(30)
    ]
    figure = plot_wrong_images(wrong)
    assert len(figure.axes) == 25
    for index, axes in enumerate(figure.axes):
        pixels = axes.images[0].get_array()
        assert pixels.shape == (6, 8, 3)
        assert pixels[0, 0, 0] == index
        assert axes.get_title() == f"$a^{{ → 猫\n{99 - index}% · image {index}"
    saved(figure, tmp_path / "wrong.png")


CLASSES = 7
METRIC_NAMES = [f"class {index}" for index in range(CLASSES)]


def columns_of(references, logits):
    logits = np.asarray(logits, dtype=float)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return {"predictions": np.log(probabilities), "references": np.asarray(references)}


def random_columns(count=200):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(count, CLASSES)) * 2
    return columns_of(generator.integers(0, CLASSES, count), logits)


def bin_by_bin(hits, sure):
    """The formula of arXiv 1706.04599."""
    total = 0.0
    for index in range(15):
        inside = (sure > index / 15) & (sure <= (index + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(hits[inside].mean() - sure[inside].mean())
    return total


# Class 0 outranks the other in one of two pairs, class 1 in both of two; class 2 has no image.
FEW = ([0, 0, 1], np.log([[0.9, 0.1, 1e-9], [0.2, 0.1, 0.7], [0.5, 0.4, 0.1]]))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (columns_of(*FEW), {"accuracy": 1 / 3, "auc": 0.75, "per_class_accuracy": {"class 0": 0.5, "class 1": 0}}),
        (columns_of(*FEW), {"precision": 0.25, "recall": 0.25, "f1": 0.25}),
        (columns_of([0, 0], [[1, 0], [0, 1]]), {"auc": None, "recall": 0.5}),  # one class alone has no area
        (columns_of([1], [[0, 99]]), {"expected_calibration_error": 0}),
        (columns_of([0], [[0, 99]]), {"expected_calibration_error": 1}),
    ],
)
def test_values_by_hand(columns, expected):
    metrics = ClassificationMetrics(METRIC_NAMES[: columns["predictions"].shape[1]])
    result = metrics.compute(**columns)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value), name
    assert (result["confusion_matrix"].sum(), "top5_accuracy" in result) == (len(columns["references"]), False)
    metrics.add(**{name.removesuffix("s"): column[0] for name, column in columns.items()})
    assert len(metrics) == 1


def test_a_metric_holds_no_images(monkeypatch):
    """What it holds does not grow with the data, but for the area, which needs every probability."""
    monkeypatch.setattr(ClassificationMetrics, "MOST_PROBABILITIES", 3)
    metrics, columns = ClassificationMetrics(METRIC_NAMES), random_columns(100)
    metrics.add_batch(**columns)
    before = {name: len(pickle.dumps(value)) for name, value in vars(metrics).items() if name[0] == "_"}
    for _ in range(5):
        metrics.add_batch(**columns)
    sizes = {name: len(pickle.dumps(vars(metrics)[name])) - size for name, size in before.items()}
    assert max(sizes.values()) < 200, sizes
    assert metrics.compute()["auc"] is None
    with pytest.raises(ValueError, match="no image was added"):
        metrics.compute()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"references": None}, r"shape \(1, 7\) and references of \(\);"),
        ({"reference": [0]}, r"references of \(1,\) and reference; give"),
        ({"references": [0, 1]}, r"shape \(1, 7\) and references of \(2,\);"),
        ({"predictions": [[0, 1]]}, r"shape \(1, 2\) .*; give logarithms of probabilities \[B, 7\]"),
        ({"references": [-1]}, "references has classes from -1 to -1, but the model's classes are 0 to 6"),
        ({"references": [7]}, "references has classes from 7"),
        ({"predictions": [[3.0] * CLASSES]}, "predictions reach 3, .*log_softmax"),
        ({"predictions": [[np.nan] * CLASSES]}, "log_softmax"),
    ],
)  # fmt: skip
def test_wrong_columns_are_refused(changes, message):
    metrics = ClassificationMetrics(METRIC_NAMES)
    with pytest.raises(ValueError, match=message):
        metrics.add_batch(**columns_of([0], [range(CLASSES)]) | changes)
    assert len(metrics) == 0
