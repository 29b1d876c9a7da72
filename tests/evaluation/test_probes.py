"""Linear probes and nearest neighbours beside scikit-learn on features read in one forward."""

import numpy as np
import pytest
import torch
from evaluation.tiny import examine, make_classifier, make_data, make_processor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.probes import linear_probe, nearest_neighbors


def features_of(data: ImageData, split: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The class token at every depth and before the head, of a model of two layers."""
    model = make_classifier(num_hidden_layers=2)
    pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = model.vit(pixels, output_hidden_states=True)
        embedded, first = output.hidden_states[:2]
        found = [embedded, first, model.vit.layers[1](first), output.last_hidden_state]
    tokens = [hidden[:, 0].numpy() for hidden in found]
    return tokens, np.array(data.splits[split]["label"])


def test_the_probe_equals_scikit_learn_at_every_depth() -> None:
    data = make_data()
    result = linear_probe(examine(make_classifier(num_hidden_layers=2), data, batch_size=9), strengths=(0.1, 10.0))
    assert result.depths == ["vit.embeddings", "vit.layers.0", "vit.layers.1", "pre_logits"]
    (train, labels), (validation, chosen), (test, truth) = (features_of(data, name) for name in data.splits)
    for depth, (accuracy, strength) in enumerate(zip(result.accuracy, result.strengths, strict=True)):
        scaler = StandardScaler().fit(train[depth])
        fits = [LogisticRegression(C=c, max_iter=1000).fit(scaler.transform(train[depth]), labels) for c in (0.1, 10.0)]
        scores = [fit.score(scaler.transform(validation[depth]), chosen) for fit in fits]
        best = int(np.argmax(scores))
        assert strength == (0.1, 10.0)[best]
        assert accuracy == pytest.approx(fits[best].score(scaler.transform(test[depth]), truth))
    assert result.unfinished == 0
    assert result.headline() == {"linear probe accuracy": result.accuracy[-1]}


def test_one_strength_needs_no_validation_split() -> None:
    data = make_data()
    del data.splits["validation"]  # type: ignore[attr-defined]
    assert linear_probe(examine(data=data), strengths=(1.0,), choose_split=None).strengths == [1.0] * 3
    with pytest.raises(UserError, match="has no split 'validation'"):
        linear_probe(examine(data=data))
    with pytest.raises(UserError, match="one alone where no split chooses"):
        linear_probe(examine(data=data), choose_split=None)


def test_a_probe_needs_two_classes() -> None:
    data = make_data()
    rows = [row for row, label in enumerate(data.splits["train"]["label"]) if label == 2]
    data.splits["train"] = data.splits["train"].select(rows)  # type: ignore[index]
    with pytest.raises(UserError, match="images of one class only"):
        linear_probe(examine(data=data))


def test_neighbours_equal_scikit_learn() -> None:
    data = make_data()
    result = nearest_neighbors(examine(make_classifier(num_hidden_layers=2), data), neighbors=(9, 1, 30))
    (*_, train), labels = features_of(data, "train")
    (*_, test), truth = features_of(data, "test")
    assert result.neighbors == [1, 9, 30]
    for place, size in enumerate(result.neighbors):
        plain = KNeighborsClassifier(size, metric="cosine").fit(train, labels)
        votes = KNeighborsClassifier(size, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
        assert result.plain[place] == pytest.approx(plain.score(test, truth))
        assert result.weighted[place] == pytest.approx(votes.fit(train, labels).score(test, truth))
    assert len(set(result.plain)) > 1, "a model whose neighbours all agree would prove little"


def test_misuse_of_neighbours() -> None:
    with pytest.raises(UserError, match="73 neighbours are asked for, split 'train' has 72 images"):
        nearest_neighbors(examine(), neighbors=(1, 73))
    with pytest.raises(UserError, match="at least 1"):
        nearest_neighbors(examine(), neighbors=())


def test_a_stream_gives_the_same() -> None:
    table, stream = make_data(), make_data()
    for split in stream.splits:
        stream.splits[split] = stream.splits[split].to_iterable_dataset()  # type: ignore[index]
    options = {"neighbors": (1, 5)}
    assert nearest_neighbors(examine(data=stream), **options) == nearest_neighbors(examine(data=table), **options)
    assert len(examine(data=stream, num_images=7).features("test")[1]) == 7
