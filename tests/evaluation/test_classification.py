"""`top1` against a plain loop and scikit-learn, and its promises on memory, names and state."""

import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from evaluation.tiny import NAMES, make_classifier, make_dataset, make_images, make_processor, save_ours
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, recall_score, top_k_accuracy_score

from hf_vit.data import ImageData, eval_transform
from hf_vit.errors import UserError
from hf_vit.evaluation import ClassificationResult, evaluate, evaluate_protocol
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.top1 import top1
from hf_vit.evaluation.protocols.top1_figures import thumbnail_of
from hf_vit.evaluation.reading import Collate, image_batches
from hf_vit.subjects.labels import match_labels, unique_names
from hf_vit.subjects.subject import open_subject

COUNT = 61


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return make_dataset(COUNT)


def _evaluate(
    model: Any, dataset: Any, label_names: Any = NAMES, prepare: Any = None, max_wrong: int = 64, **options: Any
) -> ClassificationResult:
    subject = open_subject((model, make_processor()))
    subject = subject if prepare is None else replace(subject, prepare=prepare)
    data = ImageData("noise", "0123456789abcdef", {"test": dataset}, list(label_names))
    return top1(Examination(subject, data, **{"progress": False, **options}), max_wrong=max_wrong)


def _probabilities(model: Any, dataset: Dataset) -> np.ndarray:
    """All images at once, without a line of the code under test."""
    pixel_values = make_processor()(images=list(dataset["image"]), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return model(pixel_values).logits.double().softmax(-1).numpy()


@pytest.mark.parametrize("batch_size", [1, 16, 100])
def test_the_result_equals_scikit_learn(dataset: Dataset, batch_size: int) -> None:
    model = make_classifier()
    result = _evaluate(model, dataset, batch_size=batch_size)
    probabilities, labels, every = _probabilities(model, dataset), np.array(dataset["label"]), list(range(6))
    predictions = probabilities.argmax(1)
    assert len(set(predictions.tolist())) > 2, "a model that says one thing would prove little"
    assert result.num_images == COUNT
    assert result.top1 == pytest.approx(accuracy_score(labels, predictions))
    assert result.top5 == pytest.approx(top_k_accuracy_score(labels, probabilities, k=5, labels=every))
    assert result.loss == pytest.approx(log_loss(labels, probabilities, labels=every), rel=1e-5)
    assert list(result.per_class) == list(NAMES)
    recalls = recall_score(labels, predictions, average=None, labels=every)
    assert list(result.per_class.values()) == pytest.approx(list(recalls))
    assert (result.confusion_matrix == confusion_matrix(labels, predictions, labels=every)).all()
    assert result.num_wrong == (predictions != labels).sum() == len(result.wrong)
    for entry in result.wrong:
        assert entry.label == NAMES[labels[entry.index]]
        assert entry.prediction == NAMES[predictions[entry.index]]
        assert entry.confidence == pytest.approx(probabilities[entry.index].max(), rel=1e-5)
    confidences = [entry.confidence for entry in result.wrong]
    assert confidences == sorted(confidences, reverse=True)


def test_a_stream_gives_the_same(dataset: Dataset) -> None:
    model = make_classifier()
    table, stream = (_evaluate(model, data, batch_size=8) for data in (dataset, dataset.to_iterable_dataset()))
    assert stream.values() | {"images_per_second": 0} == table.values() | {"images_per_second": 0}
    assert stream.wrong == table.wrong


def test_any_way_to_prepare_images_gives_the_same(dataset: Dataset) -> None:
    processor, model = make_processor(), make_classifier()
    seen: list[int] = []

    def prepare(images: Sequence[Image.Image]) -> torch.Tensor:
        assert all(image.mode == "RGB" for image in images)
        seen.append(len(images))
        return processor(images=list(images), return_tensors="pt")["pixel_values"]

    by_transform = _evaluate(model, dataset, prepare=prepare, batch_size=20)
    assert by_transform.loss == pytest.approx(_evaluate(model, dataset).loss, rel=1e-6)
    assert seen == [20, 20, 20, 1]


def test_classes_are_matched_by_name_not_by_number(dataset: Dataset) -> None:
    model = make_classifier()
    straight = _evaluate(model, dataset)
    order = [3, 0, 5, 1, 4, 2]
    renamed = dataset.cast_column("label", dataset.features["label"].__class__(names=[NAMES[i] for i in order]))
    moved = renamed.map(lambda row: {"label": order.index(row["label"])}, keep_in_memory=True)
    permuted = _evaluate(model, moved, label_names=[NAMES[index] for index in order])
    assert permuted.top1 == straight.top1
    assert permuted.per_class == straight.per_class
    wrong_way = _evaluate(model, moved, label_names=NAMES)
    assert wrong_way.per_class != straight.per_class


def test_data_with_fewer_classes_than_the_model(dataset: Dataset) -> None:
    model = make_classifier()
    two = dataset.filter(lambda row: row["label"] in (1, 4), keep_in_memory=True)
    mapped = two.map(lambda row: {"label": int(row["label"] == 4)}, keep_in_memory=True)
    result = _evaluate(model, mapped, label_names=["bee", "eel"])
    predictions = _probabilities(model, two).argmax(1)
    assert result.top1 == pytest.approx(accuracy_score(two["label"], predictions))
    assert set(result.per_class) == {"bee", "eel"}
    assert result.confusion_matrix is not None
    assert result.confusion_matrix.shape == (6, 6)


def test_unknown_classes_are_named() -> None:
    with pytest.raises(UserError, match=r"does not know: 'yak', 'zebra'; the model's are 'ant', 'bee'"):
        match_labels(["bee", "yak", "zebra"], ["ant", "bee"])
    with pytest.raises(UserError, match="and 40 more"):
        match_labels([f"c{index}" for index in range(50)], ["ant"])


def test_names_that_occur_twice() -> None:
    imagenet = ["crane", "heron", "crane"]
    assert match_labels(imagenet, imagenet) == [0, 1, 2]
    assert match_labels(["heron"], imagenet) == [1]
    with pytest.raises(UserError, match=r"several classes called 'crane'.*id2label"):
        match_labels(["heron", "crane"], imagenet)
    assert unique_names(imagenet) == ["crane (0)", "heron", "crane (2)"]


def test_names_match_in_either_unicode_form_and_with_blanks() -> None:
    assert match_labels(["cr\u00e8me", "bee"], ["bee ", "cre\u0300me"]) == [1, 0]
    with pytest.raises(UserError, match="several classes called 'cr\u00e8me'"):
        match_labels(["cr\u00e8me"], ["cr\u00e8me", "cre\u0300me"])


def test_the_label_check_comes_before_the_work() -> None:
    class Untouchable:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("an image was read")

    with pytest.raises(UserError, match="does not know"):
        _evaluate(make_classifier(), Untouchable(), label_names=["yak"])


def test_top5_is_absent_below_five_classes() -> None:
    names = NAMES[:4]
    result = _evaluate(make_classifier(names), make_dataset(20, names), label_names=names)
    assert result.top5 is None
    assert "top5" not in result.values()


@pytest.mark.parametrize("label", [-1, 6, None, "ant", [1]])
def test_labels_outside_the_classes(label: Any) -> None:
    rows = [{"image": image, "label": label} for image in make_images(2)]
    with pytest.raises(UserError, match=re.escape(f"label {label!r}, outside the 6 classes")):
        _evaluate(make_classifier(), rows)


def test_a_row_without_an_image() -> None:
    rows = [{"image": image, "label": 0} for image in (*make_images(2), None)]
    with pytest.raises(UserError, match="a row of the data has no image"):
        _evaluate(make_classifier(), rows)


def test_no_image_and_no_batch() -> None:
    with pytest.raises(UserError, match="holds no image"):
        _evaluate(make_classifier(), make_dataset(4).select([]))
    with pytest.raises(UserError, match="batch size 0"):
        _evaluate(make_classifier(), make_dataset(4), batch_size=0)


def test_outputs_that_are_not_finite(dataset: Dataset) -> None:
    model = make_classifier()
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    with pytest.raises(UserError, match="not finite"):
        _evaluate(model, dataset)


def test_every_mode_of_image_is_converted() -> None:
    modes = ["L", "RGBA", "P", "CMYK", "I;16", "LA", "1"]
    rows = [{"image": Image.new(mode, (9, 7)), "label": 0} for mode in modes]
    assert _evaluate(make_classifier(), rows).num_images == len(modes)


def test_only_the_most_confident_mistakes_are_kept(dataset: Dataset) -> None:
    every, few = (_evaluate(make_classifier(), dataset, max_wrong=limit) for limit in (COUNT, 5))
    assert every.num_wrong == few.num_wrong > 5
    assert few.wrong == every.wrong[:5]
    assert _evaluate(make_classifier(), dataset, max_wrong=0).wrong == []


def test_images_are_let_go_of() -> None:
    """The number of images alive at once depends on the batch, not on the data."""

    class Stream:
        def __init__(self, count: int) -> None:
            self.count, self.peak = count, 0
            self.made: list[weakref.ref[Any]] = []

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.peak = max(self.peak, sum(made() is not None for made in self.made))
            image = Image.new("RGB", (8, 8), (index % 256, index // 256, 7))
            self.made.append(weakref.ref(image))
            return {"image": image, "label": index % 6}

    peaks = []
    for count in (40, 160):
        stream = Stream(count)
        assert _evaluate(make_classifier(), stream, batch_size=4, max_wrong=2).num_images == count
        peaks.append(stream.peak)
    assert peaks[0] == peaks[1] <= 3 * 4


def test_mode_and_random_state_are_given_back(dataset: Dataset) -> None:
    model, data = make_classifier().train(), ImageData("noise", "", {"test": dataset}, list(NAMES))
    before = torch.get_rng_state()
    evaluate_protocol("top1", (model, make_processor()), data, progress=False)
    assert model.training
    with pytest.raises(UserError):
        evaluate_protocol("top1", (model, make_processor()), data, split="none")
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_in_bfloat16_is_measured_as_it_is(dataset: Dataset) -> None:
    full, half = _evaluate(make_classifier(), dataset), _evaluate(make_classifier().to(torch.bfloat16), dataset)
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert half.loss != full.loss


def test_worker_processes_give_the_same(dataset: Dataset) -> None:
    model = make_classifier()
    assert _evaluate(model, dataset, num_workers=1, batch_size=16).wrong == _evaluate(model, dataset).wrong


def test_workers_send_no_whole_images() -> None:
    """Pixel values and labels as without them; of images what a report shows, and small ones as they are."""
    noise = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    pictures = [Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC) for size in ((1000, 700), (300, 319))]
    rows: list[dict[str, Any]] = [{"image": picture, "label": label} for label, picture in enumerate(pictures)]
    collate = Collate(lambda images: torch.stack(eval_transform(make_processor()).prepare(images)), [1, 0])
    (values, labels, images), (plain_values, plain_labels, plain) = (
        next(iter(image_batches(rows, 2, collate, workers))) for workers in (1, 0)
    )
    assert torch.equal(values, plain_values)
    assert labels.tolist() == plain_labels.tolist() == [1, 0]
    assert [image.size for image in plain] == [(1000, 700), (300, 319)]
    assert [image.size for image in images] == [(167, 117), (300, 319)]
    for image, whole in zip(images, plain, strict=True):
        small, wanted = (np.asarray(thumbnail_of(each), dtype=float) for each in (image, whole))
        assert small.shape == wanted.shape
        assert np.abs(small - wanted).mean() < 2


def test_the_bar_goes_to_standard_error(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    _evaluate(make_classifier(), dataset, progress=True)
    assert capsys.readouterr().out == ""


def test_a_model_that_judges_each_class_by_itself_is_told_of(dataset: Dataset, tmp_path: Path) -> None:
    """Its answers to an image need not sum to 1, which the loss of one class an image takes for granted."""
    model, data = save_ours(tmp_path), ImageData("noise", "0123456789abcdef", {"test": dataset}, list(NAMES))
    assert "warnings" not in evaluate(str(tmp_path), data, progress=False).record.values
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    (told,) = evaluate(str(tmp_path), data, progress=False).record.values["warnings"]
    assert told.startswith("the model judges each class by itself, and the loss, the calibration error")
    assert told in (tmp_path / "README.md").read_text()
