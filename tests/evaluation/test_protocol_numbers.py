"""Protocols against other implementations: calibration, few shots, probes and neighbors, patches dropped."""

import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from evaluation.tiny import (
    NAMES,
    choose_features,
    examine,
    fit_probe,
    logits_of,
    make_classifier,
    make_data,
    make_images,
    our_subject,
    pixels_of,
)
from models.families import FAMILIES, RESNETS
from PIL import Image
from scipy.special import log_softmax
from sklearn.neighbors import KNeighborsClassifier
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from hf_vit.data import eval_transform
from hf_vit.errors import UserError
from hf_vit.evaluation import PROTOCOLS, evaluate_protocol
from hf_vit.evaluation.protocols.calibration import ReliabilitySums, calibration, fit_temperature
from hf_vit.evaluation.protocols.probes import draw_shots, few_shot, linear_probe, nearest_neighbors, score_few_shots
from hf_vit.evaluation.protocols.robustness import (
    CORRUPTIONS,
    choose_patch_size,
    corrupt,
    corrupt_batch,
    corruptions,
    draw_start,
    drop,
    fgsm,
    make_disk_kernel,
    make_motion_kernel,
    measure_saliency,
    patch_drop,
    pgd,
    robustness,
)
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.pixels import PixelScale


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


def test_a_temperature_without_mistakes_is_told():
    data = make_data(validation=12, test=12)
    answers = make_classifier()
    labels = logits_of(answers, data.splits["validation"]["image"]).argmax(-1).tolist()
    right = data.splits["validation"].remove_columns("label").add_column("label", labels)
    splits = data.splits | {"validation": right.cast(data.splits["test"].features)}
    (rows,) = [table.rows for table in calibration(examine(answers, replace(data, splits=splits))).tables("")]
    assert [row[0] for row in rows] == ["1", "0.010 (the lowest: the fit has no mistakes)"]


def test_a_classifier_before_and_after():
    data, model = make_data(validation=60, test=50), make_classifier()
    result = calibration(examine(model, data, batch_size=9))
    whole = PROTOCOLS["top1"](examine(model, data))
    assert (result.top1, result.num_images) == (whole.top1, 50)
    assert result.plain.ece == pytest.approx(whole.ece)
    assert result.plain.loss == pytest.approx(whole.loss)
    logits, labels = {}, {}
    for split in ("validation", "test"):
        logits[split] = logits_of(model, data.splits[split]["image"]).double().numpy()
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
    found = score_few_shots(train, labels, 4, test, l2)
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
    data = make_data()
    result = few_shot(examine(make_classifier(num_hidden_layers=2), data, seed=5), shots=(4, 1), trials=2)
    (*_, train), labels = features_of(data, "train")
    (*_, test), truth = features_of(data, "test")
    assert result.shots == [1, 4]
    for shots, row in zip(result.shots, result.accuracy, strict=True):
        for trial, accuracy in enumerate(row):
            rows = draw_shots(labels, NAMES, 4, seed=5 + trial)[:, :shots].ravel()
            scores = direct_scores(train[rows], labels[rows], test, 6, 1024)
            assert accuracy == pytest.approx((scores.argmax(1) == truth).mean())
    assert result.num_images == 30
    assert result.headline()["4-shot accuracy"] == pytest.approx(np.mean(result.accuracy[1]))


def features_of(data, split):
    """The class token at every depth and before the head, of a model of two layers."""
    model = make_classifier(num_hidden_layers=2)
    with torch.no_grad():
        output = model.vit(pixels_of(data.splits[split]["image"]), output_hidden_states=True)
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
        fits = [fit_probe(train[depth], labels, c) for c in (0.1, 10.0)]
        best = int(np.argmax([fit.score(validation[depth], chosen) for fit in fits]))
        assert strength == (0.1, 10.0)[best]
        assert accuracy == pytest.approx(fits[best].score(test[depth], truth))
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


def chosen_features(subject, data, split, kind, norm):
    """The features of the last two layers, from the hidden states that transformers records."""
    pixels, model = subject.prepare(list(data.splits[split]["image"])), subject.model
    with torch.no_grad():
        states = model.vit(pixels, output_hidden_states=True).hidden_states[-2:]
        states = [model.vit.layernorm(state) if norm else state for state in states]
    return choose_features(states, kind).numpy(), np.array(data.splits[split]["label"])


@pytest.mark.parametrize(("kind", "norm"), [("class", True), ("mean", False), ("class+mean", True)])
def test_probes_read_the_features_that_are_chosen(kind, norm):
    data, subject = make_data(), our_subject("plain")
    chosen = dict(features=kind, layers=2, norm=norm, progress=False)
    (train, labels), (_, _), (test, truth) = (chosen_features(subject, data, name, kind, norm) for name in data.splits)
    run = evaluate_protocol("knn", subject, data, neighbors=(1, 9), **chosen)
    scores = [KNeighborsClassifier(size, metric="cosine").fit(train, labels).score(test, truth) for size in (1, 9)]
    assert run.result.plain == pytest.approx(scores)
    assert run.settings == {"neighbors": [1, 9], "learn_split": "train", "features": kind, "layers": 2, "norm": norm}
    probe = dict(strengths=(1.0,), choose_split=None)
    run = evaluate_protocol("linear-probe", subject, data, **probe, **chosen)
    assert run.result.depths == [f"{kind} of 2"]
    assert run.result.accuracy == pytest.approx([fit_probe(train, labels, 1.0).score(test, truth)])
    run = evaluate_protocol("few-shot", subject, data, shots=(2,), trials=1, **chosen)
    rows = draw_shots(labels, data.label_names, 2, 0).ravel()
    best = direct_scores(train[rows], labels[rows], test, len(data.label_names), 2.0**10).argmax(1)
    assert run.result.accuracy == [[pytest.approx((best == truth).mean())]]


@pytest.mark.parametrize(
    ("protocol", "options", "reason"),
    [
        ("knn", dict(features="patches"), "--features patches .* give one of class, mean, class.mean"),
        ("knn", dict(layers=2), "--layers and --no-norm only work with --features"),
        ("knn", dict(features="mean", layers=3), "--layers 3 does not fit a model with 2 layers"),
        ("top1", dict(features="mean"), "--features only works with --protocol few-shot, linear-probe, knn, vtab"),
    ],
)
def test_features_that_cannot_be_read_are_refused(protocol, options, reason):
    with pytest.raises(UserError, match=reason):
        evaluate_protocol(protocol, our_subject("plain"), make_data(), **options)


def test_a_stream_has_the_same_neighbours():
    table, stream = make_data(), make_data()
    for split in stream.splits:
        stream.splits[split] = stream.splits[split].to_iterable_dataset()
    options = {"neighbors": (1, 5)}
    assert nearest_neighbors(examine(data=stream), **options) == nearest_neighbors(examine(data=table), **options)
    assert len(examine(data=stream, num_images=7).features("test")[1]) == 7


def test_the_grid_is_the_model_s():
    assert choose_patch_size(make_classifier(), (8, 8), None) == (4, 4)
    assert choose_patch_size(make_classifier(), (8, 8), 2) == (2, 2)
    hybrid = FAMILIES["hybrid"].build("classification")
    assert choose_patch_size(hybrid, (16, 16), None) == hybrid.config.patch_stride
    vit = VisionTransformer(img_size=(12, 32), patch_size=(6, 8), embed_dim=8, depth=1, num_heads=1)
    assert choose_patch_size(vit, (12, 32), None) == (6, 8)
    resnet = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
    assert choose_patch_size(resnet, (224, 280), None) == (16, 16)
    assert choose_patch_size(resnet, (8, 8), None) == (1, 1)
    for name in RESNETS:  # their total stride is no patch
        assert choose_patch_size(RESNETS[name].build("classification"), (224, 280), None) == (16, 16)
    with pytest.raises(UserError, match=r"patches of 9x9 px do not fit images of 8x8 px; give a smaller --patch-size"):
        choose_patch_size(resnet, (8, 8), 9)


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


def test_saliency_of_a_linear_model_is_what_dropping_does():
    model, values = Linear(4, 3 * 8 * 12), torch.randn(5, 3, 8, 12, dtype=torch.float64)
    filling = values.mean(dim=(2, 3), keepdim=True)
    found = measure_saliency(model, values, filling, (4, 4))
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
    values = pixels_of(data.splits["test"]["image"])
    whole = PROTOCOLS["top1"](examine(model, data))
    with torch.no_grad():
        black = int(model(torch.full((1, 3, 8, 8), -1.0)).logits.argmax())
        ranks = measure_saliency(model, values, torch.tensor(-1.0), (4, 4)).flatten(1).argsort(dim=1, descending=True)
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
        (calibration, None, {"split": "validation"}, r"split 'validation' is already used.*--no-temp"),
        (calibration, without("validation"), {}, r"cannot be fitted: .*no split 'validation'.*--no-temperature"),
        (calibration, None, {"temperature": False, "bins": 0}, "bins=0 is too small"),
        (few_shot, None, {}, rf"has {FEWEST} training images, too few for 25 shots; give --shots"),
        (few_shot, None, {"split": "train", "shots": (1,)}, "split 'train' is already used for fitting"),
        (few_shot, None, {"shots": (0,)}, "at least 1"),
        (few_shot, streamed(make_data()), {"shots": (1,)}, "is a stream, so images cannot be selected"),
        (linear_probe, without("validation"), {}, "has no split 'validation'"),
        (linear_probe, without("validation"), {"choose_split": None}, "only one if the data has no validation split"),
        (linear_probe, of_one_class(), {}, "have the same class"),
        (nearest_neighbors, None, {"neighbors": (1, 73)}, "split 'train' has only 72 images; give at most 72"),
        (nearest_neighbors, None, {"neighbors": ()}, "at least 1"),
        (patch_drop, None, {"shares": ()}, r"give numbers from 0 to 1"),
        (patch_drop, None, {"shares": (1.2,)}, r"give numbers from 0 to 1"),
        (patch_drop, None, {"fill": "white"}, "--fill white is unknown; choose mean or black"),
        (patch_drop, None, {"orders": ("best",)}, r"orders=\['best'\] is unknown; choose from random, salient"),
        (patch_drop, None, {"patch_size": 90}, "do not fit images of 8x8 px"),
        *(
            (robustness, None, options, "give epsilons above 0 and at most 255")
            for options in ({"epsilons": ()}, {"epsilons": (0,)}, {"epsilons": (300,)}, {"steps": 0})
        ),
        (corruptions, None, {"kinds": ["fog", "contrast"]}, "corruption fog is unknown; choose from gaussian_noise"),
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


MEAN, STD = (0.3, 0.45, 0.6), (0.2, 0.25, 0.5)


class Linear(nn.Module):
    """Logits [B, K] of flattened images; a class of its own so that its config can name the classes."""

    def __init__(self, classes=2, inputs=3 * 6 * 6):
        super().__init__()
        self.head = nn.Linear(inputs, classes, dtype=torch.float64)

    def forward(self, pixel_values):
        return self.head(pixel_values.flatten(1))


def of_six_px(model):
    processor = ViTImageProcessor(size={"height": 6, "width": 6}, image_mean=MEAN, image_std=STD)
    return LoadedModel(model, lambda images: torch.stack(eval_transform(processor).prepare(images)), "linear")


@pytest.fixture
def linear():
    return of_six_px(Linear())


def pixel_weights(model):
    """[3, 6, 6]: how fast the margin of class 0 over class 1 grows with each pixel in 0..1, worked out by hand."""
    weight = model.head.weight[0] - model.head.weight[1]
    return weight.detach().view(3, 6, 6) / torch.tensor(STD, dtype=torch.float64)[:, None, None]


def margin(subject, scale, pixels):
    logits = subject.model(scale.values(pixels))
    return logits[:, 1] - logits[:, 0]


def test_the_scale_is_the_processor_s(linear):
    scale = PixelScale.measure(linear)
    assert scale.mean == pytest.approx(MEAN, rel=1e-6)
    assert scale.std == pytest.approx(STD, rel=1e-6)
    assert scale.factor == 1
    one = PixelScale.from_processor(ViTImageProcessor(image_mean=0.5, image_std=0.25))  # a number for all channels
    assert (one.mean, one.std) == ((0.5,) * 3, (0.25,) * 3)
    images = make_images(3, side=6)
    wanted = torch.tensor(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 255
    found = scale.pixels(linear.prepare(images).double())
    torch.testing.assert_close(found, wanted.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(scale.values(found), linear.prepare(images).double(), atol=1e-6, rtol=0)


def test_processors_that_do_more_than_scale(linear):
    def squared(images):
        return linear.prepare(images) ** 2

    def constant(images):
        return linear.prepare(images) * 0

    def swapped(images):
        return linear.prepare(images).flip(1)  # MobileViT's processor does

    for prepare in (squared, constant, swapped):
        with pytest.raises(UserError, match="does more than resize, crop and normalize"):
            PixelScale.measure(LoadedModel(linear.model, prepare, "odd"))


def test_at_the_border_only_what_is_left_counts(linear):
    """Some pixels are black or white, or nearer to it than epsilon: the best is still known in closed form."""
    scale, epsilon = PixelScale.measure(linear), 20 / 255
    pixels = torch.randint(0, 256, (4, 3, 6, 6)).double() / 255
    pixels[:, :, :2] = pixels[:, :, :2].round()
    uphill = -pixel_weights(linear.model)
    room = torch.where(uphill > 0, (1 - pixels).clamp(max=epsilon), pixels.clamp(max=epsilon))
    expected = (uphill.abs() * room).sum(dim=(1, 2, 3))

    def loss(moved):
        return margin(linear, scale, moved)

    start = draw_start(pixels, 3)
    for attacked in (fgsm(loss, pixels, epsilon), pgd(loss, pixels, epsilon, steps=8, start=start)):
        torch.testing.assert_close(loss(attacked) - loss(pixels), expected, rtol=1e-6, atol=0)
        assert float(attacked.min()) >= 0
        assert float(attacked.max()) <= 1
        assert float((attacked - pixels).abs().max()) <= epsilon + 1e-12


def test_pgd_stays_in_the_ball_and_beats_fgsm_on_a_curved_loss():
    model = make_classifier().double()
    pixels, labels = torch.rand(8, 3, 8, 8, dtype=torch.float64), torch.arange(8) % 6

    def loss(moved):
        return nn.functional.cross_entropy(model(moved * 2 - 1).logits, labels, reduction="none")

    epsilon, start = 16 / 255, draw_start(pixels, 0)
    assert float(start.abs().max()) <= 1
    once, often = fgsm(loss, pixels, epsilon), pgd(loss, pixels, epsilon, steps=20)
    begun = pgd(loss, pixels, epsilon, steps=1, start=start)
    for attacked in (once, often, begun):
        assert float((attacked - pixels).abs().max()) <= epsilon + 1e-12
        assert 0 <= float(attacked.min()) <= float(attacked.max()) <= 1
    with torch.no_grad():
        assert float(loss(often).mean()) > float(loss(once).mean()) > float(loss(pixels).mean())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_accuracy_under_attack_equals_the_closed_form():
    """Of a linear classifier of two classes, exactly the images whose margin exceeds epsilon ||w||_1 survive."""
    model = type("LinearForImageClassification", (Linear,), {})()  # a name that makes it a classifier with classes
    model.config = type("Config", (), {"id2label": {0: "ant", 1: "bee"}, "num_labels": 2})()
    subject, data = of_six_px(model), make_data(test=60, side=6)
    two = data.splits["test"].map(
        lambda row: {"image": row["image"].point(lambda value: 60 + value // 2), "label": row["label"] % 2}
    )
    data.splits["test"], data.label_names = two, ["ant", "bee"]
    epsilons = (0.5, 1.0, 2.0, 4.0)
    result = robustness(examine(subject, data, batch_size=13), epsilons=epsilons, steps=3)
    with torch.no_grad():
        logits = model(subject.prepare(two["image"]).double())
    sign = 1 - 2 * torch.tensor(two["label"])
    margins = (logits[:, 0] - logits[:, 1]) * sign
    norm = pixel_weights(model).abs().sum()
    wanted = [float((margins > epsilon / 255 * norm).double().mean()) for epsilon in epsilons]
    assert result.clean == float((margins > 0).double().mean())
    assert result.fgsm == result.pgd == wanted
    assert 0 < wanted[-1] < wanted[0] < result.clean
    assert robustness(examine(subject, data), epsilons=(0.5,)).steps == 10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_after_an_ordinary_evaluation(family):
    """Derived tables and kernels that an evaluation without gradients keeps do not stand in the way."""
    subject, data = our_subject(family), make_data(test=12)
    PROTOCOLS["top1"](examine(subject, data))
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    result = robustness(examine(subject, data), epsilons=(8.0,), steps=2)
    assert result == robustness(examine(subject, data, batch_size=5), epsilons=[8.0], steps=2)
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1), (torch.float16, 20), (torch.float32, 100)])
def test_a_classifier_is_attacked_in_every_precision_however_confident_it_is(dtype, scale):
    """Logits times `scale` change neither what is right nor which pixels matter, but round its probability to 1."""
    data, model = make_data(test=60), make_classifier()
    images = data.splits["test"]["image"]
    columns = {"image": images, "label": logits_of(model, images).argmax(dim=1).tolist()}
    data.splits["test"] = Dataset.from_dict(columns, features=data.splits["test"].features)
    full = robustness(examine(model, data), epsilons=(8.0,), steps=4)
    with torch.no_grad():
        model.classifier.weight *= scale
        model.classifier.bias *= scale
    result = robustness(examine(model.to(dtype), data), epsilons=(8.0,), steps=4)
    assert full.pgd[0] < 0.2 < 0.9 < full.clean
    assert result.pgd[0] == pytest.approx(full.pgd[0], abs=0.1)


def photo(side=64):
    """A smooth picture with an edge, in steps of 1/255."""
    rows, columns = np.mgrid[:side, :side] / side
    channels = [0.5 + 0.3 * np.sin(6 * rows), 0.2 + 0.5 * columns, np.where(rows > columns, 0.8, 0.3)]
    return np.rint(np.stack(channels, axis=-1) * 255) / 255


def seeded():
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severities_grow_and_stay_pictures(name):
    picture = photo()
    distances = []
    for severity in range(1, 6):
        found = corrupt(picture, name, severity, seeded())
        assert found.shape == picture.shape
        assert (found == corrupt(picture, name, severity, seeded())).all()
        np.testing.assert_allclose(found * 255, np.rint(found * 255), atol=1e-9)
        assert found.min() >= 0
        assert found.max() <= 1
        distances.append(float(np.abs(found - picture).mean()))
    assert distances[0] > 0
    assert all(later > earlier for earlier, later in itertools.pairwise(distances)), distances


def test_the_statistics_of_noise():
    gray = np.full((200, 200, 3), 102 / 255)
    normal = corrupt(gray, "gaussian_noise", 1, seeded()) - gray
    assert normal.std() == pytest.approx(0.08, rel=0.02)
    shot = corrupt(gray, "shot_noise", 1, seeded())
    assert shot.mean() == pytest.approx(0.4, abs=0.002)
    assert shot.var() == pytest.approx(0.4 / 60, rel=0.02)
    impulse = corrupt(gray, "impulse_noise", 3, seeded())
    assert (impulse == 1).mean() == pytest.approx(0.045, rel=0.05)
    assert (impulse == 0).mean() == pytest.approx(0.045, rel=0.05)
    assert ((impulse == 0) | (impulse == 1) | (impulse == gray)).all()


def test_kernels_of_blurs():
    for radius in (0.3, 0.9, 4.0, 7.5):
        kernel = make_disk_kernel(radius)
        assert kernel.sum() == pytest.approx(1)
        assert (kernel == kernel[::-1]).all()
        assert (kernel == kernel.T).all()
    inside = make_disk_kernel(7.5)[8, 8]
    assert inside == pytest.approx(1 / (np.pi * 7.5**2), rel=0.01), "a whole pixel weighs one over the disk's area"
    straight = make_motion_kernel(3.0, 2.0, 0.0)
    middle = len(straight) // 2
    assert straight.sum() == pytest.approx(1)
    assert straight[middle].sum() == pytest.approx(1), "along a row nothing leaves it"
    assert straight[middle, :middle].sum() == 0, "it smears to one side"
    weights = straight[middle, middle : middle + 7]
    assert (np.diff(weights[1:]) < 0).all()
    turned = make_motion_kernel(3.0, 2.0, np.pi / 4)
    assert np.trace(turned) > 0.4
    assert np.tril(turned, -2).sum() == np.triu(turned, 2).sum() == 0


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"])
def test_a_picture_of_one_colour_stays(name):
    flat = np.full((40, 56, 3), (51 / 255, 102 / 255, 1))
    np.testing.assert_allclose(corrupt(flat, name, 5, seeded()), flat, atol=1e-9)


def test_blurs_follow_the_size_of_the_image():
    """The same edge, four times as large, is blurred over four times as many pixels."""
    widths = []
    for side in (56, 224):
        picture = np.zeros((side, side, 3))
        picture[:, side // 2 :] = 1
        found = corrupt(picture, "defocus_blur", 5, seeded())[side // 2, :, 0]
        widths.append(int(((found > 0.01) & (found < 0.99)).sum()))
    assert widths[1] == pytest.approx(4 * widths[0], abs=3)


def test_those_with_a_formula():
    picture = photo()
    mean = picture.mean(axis=(0, 1))
    flatter = (picture - mean) * 0.3 + mean
    np.testing.assert_allclose(corrupt(picture, "contrast", 2, seeded()), flatter, atol=0.5 / 255 + 1e-9)
    gray = np.full((4, 4, 3), 0.2)
    np.testing.assert_allclose(corrupt(gray, "brightness", 3, seeded()), 0.5, atol=0.5 / 255)
    blocks = corrupt(photo(64), "pixelate", 5, seeded())
    small = photo(64).reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(blocks, small.repeat(4, axis=0).repeat(4, axis=1), atol=0.5 / 255 + 1e-9)
    content = io.BytesIO()
    Image.fromarray((picture * 255).round().astype(np.uint8)).save(content, "JPEG", quality=7)
    assert (corrupt(picture, "jpeg_compression", 5, seeded()) * 255 == np.asarray(Image.open(content))).all()


def test_accuracy_equals_a_plain_loop():
    data, model = make_data(), make_classifier()
    result = corruptions(examine(model, data, batch_size=8, seed=4), kinds=["contrast", "shot_noise"])
    assert list(result.accuracy) == ["shot_noise", "contrast"]
    whole = PROTOCOLS["top1"](examine(model, data))
    assert result.clean == whole.top1
    labels = torch.tensor(data.splits["test"]["label"])
    values = pixels_of(data.splits["test"]["image"])
    for name, found in result.accuracy.items():
        for severity in (1, 5):
            pixels = corrupt_batch(values / 2 + 0.5, name, severity, seed=4)
            with torch.no_grad():
                answers = model(pixels * 2 - 1).logits.argmax(1)
            assert found[severity - 1] == pytest.approx(float((answers == labels).double().mean()))
    assert result.mean_error == pytest.approx(1 - np.mean(list(result.accuracy.values())))
    assert result.values()["error_above_clean"] == pytest.approx(result.mean_error - (1 - result.clean))
