"""Protocols against other implementations: calibration, few shots, probes and neighbors, patches dropped."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from evaluation.tiny import NAMES, examine, make_classifier, make_data, make_processor, our_subject
from models.families import FAMILIES, RESNETS
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.calibration import ReliabilitySums, calibration, fit_temperature
from hf_vit.evaluation.protocols.few_shot import FewShotRegression, draw_shots, few_shot
from hf_vit.evaluation.protocols.occlusion import drop, patch_drop, patch_px, saliency
from hf_vit.evaluation.protocols.probes import linear_probe, nearest_neighbors
from hf_vit.evaluation.protocols.top1 import top1


def draws(images, seed=0):
    """Logits [n, 5], and classes drawn from their own softmax: perfectly calibrated."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, (images, 5))
    return logits, np.array([generator.choice(5, p=np.exp(row)) for row in log_softmax(logits, axis=1)])


def test_the_diagram_equals_a_loop():
    logits, labels = draws(300)
    sums = ReliabilitySums(10)
    for start in range(0, 300, 77):
        sums.add(logits[start : start + 77], labels[start : start + 77])
    found = sums.result()
    probabilities = np.exp(log_softmax(logits, axis=1))
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    gaps, sizes = [], []
    for place in range(10):
        inside = (confidence > place / 10) & (confidence <= (place + 1) / 10)
        assert found.images[place] == inside.sum()
        if inside.any():
            assert found.accuracy[place] == pytest.approx(right[inside].mean())
            assert found.confidence[place] == pytest.approx(confidence[inside].mean())
            gaps.append(abs(right[inside].mean() - confidence[inside].mean()))
            sizes.append(inside.sum())
    assert found.images[:2] == [0, 0]
    assert found.ece == pytest.approx(np.average(gaps, weights=sizes))
    assert found.mce == pytest.approx(max(gaps))
    assert found.loss == pytest.approx(-np.log(probabilities[np.arange(300), labels]).mean())


def test_the_temperature_is_the_best_of_a_grid():
    logits, labels = draws(400)
    found = fit_temperature(3 * logits, labels)
    grid = np.linspace(1.5, 6, 2000)
    losses = [-log_softmax(3 * logits / one, axis=1)[np.arange(400), labels].mean() for one in grid]
    assert found == pytest.approx(grid[int(np.argmin(losses))], abs=2 * (grid[1] - grid[0]))
    # Twice as sure needs twice the temperature; and calibrated logits need none.
    assert fit_temperature(6 * logits, labels) == pytest.approx(2 * found, rel=1e-4)
    assert fit_temperature(*draws(20_000)) == pytest.approx(1, abs=0.03)


def test_a_classifier_before_and_after():
    data, model = make_data(validation=60, test=50), make_classifier()
    result = calibration(examine(model, data, batch_size=9))
    whole = top1(examine(model, data))
    assert (result.top1, result.num_images) == (whole.top1, 50)
    assert result.plain.ece == pytest.approx(whole.ece)
    assert result.plain.loss == pytest.approx(whole.loss)
    logits, labels = {}, {}
    for split in ("validation", "test"):
        pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits[split] = model(pixels).logits.double().numpy()
        labels[split] = np.array(data.splits[split]["label"])
    assert result.temperature == pytest.approx(fit_temperature(logits["validation"], labels["validation"]), rel=1e-5)
    scaled = log_softmax(logits["test"] / result.temperature, axis=1)
    assert result.scaled is not None
    assert result.scaled.loss == pytest.approx(-scaled[np.arange(50), labels["test"]].mean(), rel=1e-5)
    assert result.scaled.loss < result.plain.loss, "random answers given with confidence"


def direct_scores(train, labels, test, classes, l2):
    """Least squares on rows that hold the penalty, by numpy, without a normal equation."""
    mean, std = train.mean(0), train.std(0) + 1e-5
    rows = np.column_stack([(train - mean) / std, 100 * np.ones(len(train))])
    size = rows.shape[1]
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    stacked = np.concatenate([rows, np.sqrt(l2) * np.eye(size)])
    weights = np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((size, classes))]), rcond=None)[0]
    return np.column_stack([(test - mean) / std, 100 * np.ones(len(test))]) @ weights


@pytest.mark.parametrize("images", [5, 33, 34, 200], ids="{} images".format)
@pytest.mark.parametrize("l2", [2.0**10, 1.0])
def test_the_regression_equals_a_direct_solve(images, l2):
    """32 features and a constant: fewer, as many, and more images than unknowns."""
    generator = np.random.default_rng(images)
    train, test = generator.normal(3, 5, (images, 32)), generator.normal(3, 5, (50, 32))
    labels = generator.integers(0, 4, images)
    train[:, 5] = test[:, 5] = 7  # a feature that never changes does no harm
    found = FewShotRegression.fit(train, labels, 4, l2).scores(test)
    np.testing.assert_allclose(found, direct_scores(train, labels, test, 4, l2), rtol=0, atol=1e-8)


def test_shots_are_drawn_by_class_and_seed():
    labels = np.random.default_rng(0).integers(0, 6, 400)
    few, more = draw_shots(labels, NAMES, 3, seed=1), draw_shots(labels, NAMES, 10, seed=1)
    assert few.shape == (6, 3)
    assert (labels[more] == np.arange(6)[:, None]).all()
    assert len(set(more.ravel().tolist())) == 60
    assert (more[:, :3] == few).all()
    assert (draw_shots(labels, NAMES, 10, seed=2) != more).any()


def test_few_shots_equal_their_parts():
    data, model = make_data(), make_classifier()
    result = few_shot(examine(model, data, seed=5), shots=(4, 1), trials=2)
    features = {}
    for split in ("train", "test"):
        pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            features[split] = model.vit(pixels).last_hidden_state[:, 0].double().numpy()
    labels, truth = (np.array(data.splits[split]["label"]) for split in ("train", "test"))
    assert result.shots == [1, 4]
    for shots, row in zip(result.shots, result.accuracy, strict=True):
        for trial, accuracy in enumerate(row):
            rows = draw_shots(labels, NAMES, 4, seed=5 + trial)[:, :shots].ravel()
            scores = direct_scores(features["train"][rows], labels[rows], features["test"], 6, 1024)
            assert accuracy == pytest.approx((scores.argmax(1) == truth).mean())
    assert result.num_images == 30
    assert result.headline()["4-shot accuracy"] == pytest.approx(np.mean(result.accuracy[1]))


def features_of(data, split):
    """The class token at every depth and before the head, of a model of two layers."""
    model = make_classifier(num_hidden_layers=2)
    pixels = make_processor()(images=list(data.splits[split]["image"]), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = model.vit(pixels, output_hidden_states=True)
        embedded, first = output.hidden_states[:2]
        found = [embedded, first, model.vit.layers[1](first), output.last_hidden_state]
    tokens = [hidden[:, 0].numpy() for hidden in found]
    return tokens, np.array(data.splits[split]["label"])


def test_the_probe_equals_scikit_learn_at_every_depth():
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


def test_neighbours_equal_scikit_learn():
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


def test_a_stream_has_the_same_neighbours():
    table, stream = make_data(), make_data()
    for split in stream.splits:
        stream.splits[split] = stream.splits[split].to_iterable_dataset()
    options = {"neighbors": (1, 5)}
    assert nearest_neighbors(examine(data=stream), **options) == nearest_neighbors(examine(data=table), **options)
    assert len(examine(data=stream, num_images=7).features("test")[1]) == 7


def test_the_grid_is_the_model_s():
    assert patch_px(make_classifier(), (8, 8), None) == (4, 4)
    assert patch_px(make_classifier(), (8, 8), 2) == (2, 2)
    hybrid = FAMILIES["hybrid"].build("classification")
    assert patch_px(hybrid, (16, 16), None) == hybrid.config.patch_stride
    vit = VisionTransformer(img_size=(12, 32), patch_size=(6, 8), embed_dim=8, depth=1, num_heads=1)
    assert patch_px(vit, (12, 32), None) == (6, 8)
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    assert patch_px(resnet, (224, 280), None) == (16, 16)
    assert patch_px(resnet, (8, 8), None) == (1, 1)
    for name in RESNETS:  # their total stride is no patch
        assert patch_px(RESNETS[name].build("classification"), (224, 280), None) == (16, 16)
    with pytest.raises(UserError, match=r"patches of 9x9 px do not fit images of 8x8 px; give --patch-size"):
        patch_px(resnet, (8, 8), 9)


def test_dropping_replaces_whole_patches_and_more_of_the_same():
    """12x20 px in patches of 4x8: the last column of patches is cut off by the border."""
    values, ranks = torch.rand(2, 3, 12, 20), torch.stack([torch.randperm(9).view(3, 3) for _ in range(2)])
    filling = torch.full((2, 3, 1, 1), -7.0)
    before = torch.zeros(2, 12, 20, dtype=torch.bool)
    for share in (0.0, 0.3, 0.5, 1.0):
        found = drop(values, ranks, share, filling, (4, 8))
        changed = (found == -7).all(dim=1)
        assert torch.equal(found[:, 0][~changed], values[:, 0][~changed])
        for image in range(2):
            for row in range(3):
                for column in range(3):
                    patch = changed[image, 4 * row : 4 * row + 4, 8 * column : 8 * column + 8]
                    assert bool(patch.all()) == bool(patch.any()) == bool(ranks[image, row, column] < round(9 * share))
        assert bool((before & ~changed).any()) is False
        before = changed


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 12, 4, dtype=torch.float64)

    def forward(self, pixel_values):
        return self.head(pixel_values.flatten(1))


def test_saliency_of_a_linear_model_is_what_dropping_does():
    model, values = Linear(), torch.randn(5, 3, 8, 12, dtype=torch.float64)
    filling = values.mean(dim=(2, 3), keepdim=True)
    found = saliency(model, values, filling, (4, 4))
    assert found.shape == (5, 2, 3)

    def margin(changed, predicted):
        logits = model(changed)
        return logits[torch.arange(5), predicted] - logits.mean(1)

    with torch.no_grad():
        predicted = model(values).argmax(1)
        for row in range(2):
            for column in range(3):
                ranks = torch.ones(5, 2, 3)
                ranks[:, row, column] = 0
                changed = drop(values, ranks, 1 / 6, filling, (4, 4))
                effect = (margin(values, predicted) - margin(changed, predicted)).abs()
                torch.testing.assert_close(found[:, row, column], effect)


def test_accuracy_without_patches_equals_a_plain_loop():
    data, model = make_data(side=8), make_classifier()
    result = patch_drop(examine(model, data, batch_size=8), shares=(0.5, 0, 1), fill="black")
    labels = torch.tensor(data.splits["test"]["label"])
    values = make_processor()(images=list(data.splits["test"]["image"]), return_tensors="pt")["pixel_values"]
    whole = top1(examine(model, data))
    with torch.no_grad():
        black = int(model(torch.full((1, 3, 8, 8), -1.0)).logits.argmax())
        ranks = saliency(model, values, torch.tensor(-1.0), (4, 4)).flatten(1).argsort(dim=1, descending=True)
        places = torch.zeros(30, 4).scatter(1, ranks, torch.arange(4.0).expand(30, 4)).view(30, 2, 2)
        half = model(drop(values, places, 0.5, torch.tensor(-1.0), (4, 4))).logits.argmax(1)
    assert result.shares == [0.0, 0.5, 1.0]
    for found in result.accuracy.values():
        assert found[0] == whole.top1
        assert found[2] == float((labels == black).double().mean())
    assert result.accuracy["salient first"][1] == pytest.approx(float((half == labels).double().mean()))
    assert (result.patch_px, result.fill) == ((4, 4), "black")
    again = patch_drop(examine(model, data, batch_size=30), shares=(0.5, 0, 1), fill="black")
    assert again == result, "an image's order of patches does not depend on its batch"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_drops_its_own_patches(family):
    subject = our_subject(family)
    result = patch_drop(examine(subject, make_data(test=6)), shares=(0.0, 0.5))
    assert result.patch_px == subject.model.config.patch_stride
    assert set(result.accuracy) == {"random", "salient first", "salient last"}


def test_what_a_model_does_not_see_is_not_dropped():
    """Patches of 4 px of images of 18 px are those of the images cut to 16 px."""
    results = []
    for side in (18, 16):
        data = make_data(test=9, side=18)
        images = [image.crop((0, 0, side, side)) for image in data.splits["test"]["image"]]
        columns = {"image": images, "label": data.splits["test"]["label"]}
        data.splits["test"] = Dataset.from_dict(columns, features=data.splits["test"].features)
        subject = our_subject("plain", image_size=side)
        results.append(patch_drop(examine(subject, data), shares=(0.3, 0.6)))
    assert results[0] == results[1]


def without(split):
    data = make_data()
    del data.splits[split]
    return data


def of_one_class():
    data = make_data()
    rows = [row for row, label in enumerate(data.splits["train"]["label"]) if label == 2]
    data.splits["train"] = data.splits["train"].select(rows)
    return data


def streamed(data):
    data.splits["train"] = data.splits["train"].to_iterable_dataset()
    return data


FEWEST = int(np.bincount(make_data().splits["train"]["label"]).min())


@pytest.mark.parametrize(
    ("protocol", "data", "options", "message"),
    [
        (
            calibration,
            None,
            {"split": "validation"},
            r"cannot be fitted: split 'validation' .* judge as well.*--no-temp",
        ),
        (calibration, without("validation"), {}, r"cannot be fitted: .*no split 'validation'.*--no-temperature"),
        (calibration, None, {"temperature": False, "bins": 0}, "0 bins"),
        (few_shot, None, {}, rf"has {FEWEST} images to learn from, 25 shots need 25 a class.*--shots"),
        (few_shot, None, {"split": "train", "shots": (1,)}, "split 'train' is fitted on and cannot judge as well"),
        (few_shot, None, {"shots": (0,)}, "at least 1"),
        (few_shot, streamed(make_data()), {"shots": (1,)}, "is a stream, whose images cannot be chosen"),
        (linear_probe, without("validation"), {}, "has no split 'validation'"),
        (linear_probe, without("validation"), {"choose_split": None}, "one alone where no split chooses"),
        (linear_probe, of_one_class(), {}, "images of one class only"),
        (nearest_neighbors, None, {"neighbors": (1, 73)}, "73 neighbours are asked for, split 'train' has 72 images"),
        (nearest_neighbors, None, {"neighbors": ()}, "at least 1"),
        (patch_drop, None, {"shares": ()}, r"must lie in 0\.\.1"),
        (patch_drop, None, {"shares": (1.2,)}, r"must lie in 0\.\.1"),
        (patch_drop, None, {"fill": "white"}, "fill 'white' is not known; choose mean or black"),
        (patch_drop, None, {"orders": ("best",)}, r"orders \['best'\] are not all known; there are random, salient"),
        (patch_drop, None, {"patch_size": 90}, "do not fit images of 8x8 px"),
    ],
)
def test_what_a_protocol_cannot_do_is_refused(protocol, data, options, message):
    given = {name: options.pop(name) for name in ["split"] if name in options}
    with pytest.raises(UserError, match=message):
        protocol(examine(data=data, **given), **options)


def test_without_a_validation_split_nothing_is_fitted_on_it():
    plain = calibration(examine(data=without("validation")), temperature=False)
    assert (plain.temperature, plain.scaled) == (None, None)
    one = linear_probe(examine(data=without("validation")), strengths=(1.0,), choose_split=None)
    assert one.strengths == [1.0] * 3
