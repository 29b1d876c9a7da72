"""Every kind of model is measured as its own library answers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from comparison import zoo
from evaluation.tiny import NAMES

from hf_vit.comparison import ComparisonSettings
from hf_vit.comparison.measurement import (
    HEAD,
    PROBE,
    ProbedForImageClassification,
    fit_probe,
    inputs_of,
    judged_by,
    measure_model,
)
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.families import FAMILIES
from hf_vit.loading.folders import ImageGPTFeatures
from hf_vit.loading.model import load_model, load_models
from hf_vit.loading.outputs import pre_logits

SETTINGS = ComparisonSettings(corruptions=("contrast",), epsilons=(8.0,), robustness_images=None, speed_turns=0)
MEAN, STD = (torch.tensor(zoo.SCALE[name])[:, None, None] for name in ("image_mean", "image_std"))


def library_model(saved, kind):
    """The saved model as its own library loads it; timm's weights are read by hand."""
    if kind in zoo.TIMM:
        import timm
        from safetensors.torch import load_file

        architecture, fields = zoo.TIMM[kind]
        model = timm.create_model(architecture, num_classes=len(NAMES), **fields)
        model.load_state_dict(load_file(saved.folder(kind) / "model.safetensors"))
        return model.eval()
    from transformers import AutoModelForImageClassification

    return AutoModelForImageClassification.from_pretrained(saved.folder(kind)).eval()


def pixels_of(data, side=zoo.SIDE):
    """The test images in 0..1, resized as both libraries' processors do here: bilinear or bicubic, by Pillow."""
    from PIL import Image

    images = [image.resize((side, side), Image.Resampling.BILINEAR) for image in data.split("test")["image"]]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 255


def answers(model, pixels):
    output = model((pixels - MEAN) / STD)
    return getattr(output, "logits", output)


def measured(saved, data, kind, probe=False, **changes):
    subject, settings = load_model(saved.source(kind)), replace(SETTINGS, **changes)
    inputs = inputs_of(subject, judged_by(subject, data, probe), data, "test", settings)
    return subject, measure_model(subject, data, inputs, settings, progress=False)


@pytest.mark.parametrize("kind", [*zoo.TRANSFORMERS, *zoo.TIMM])
def test_a_kind_as_its_library_answers(kind, saved, data):
    subject, result = measured(saved, data, kind)
    reference, truth = library_model(saved, kind), torch.tensor(data.split("test")["label"])
    pixels = subject.prepare(data.split("test")["image"]) * STD + MEAN
    with torch.no_grad():
        logits = answers(reference, pixels).double()
    best = logits.argsort(dim=1, descending=True) == truth[:, None]
    assert result.top1.value == pytest.approx(float(best[:, 0].double().mean()))
    assert result.top5.value == pytest.approx(float(best[:, :5].any(dim=1).double().mean()))
    assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, truth)), rel=1e-4)
    assert result.clean == result.top1.value
    assert set(result.corruptions) == {"contrast"}
    assert result.parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert (result.image_size, result.inputs.model.judged_by) == ((zoo.SIDE, zoo.SIDE), HEAD)
    assert result.inputs.model.kind == (type(reference).__name__ if kind in zoo.TIMM else reference.config.model_type)


def test_every_family_of_the_package_is_among_the_kinds():
    assert {"vit" if name == "plain" else name for name in FAMILIES} <= {*zoo.TRANSFORMERS, *zoo.TIMM}


def test_images_are_prepared_as_by_hand(saved, data):
    subjects = load_models([saved.source("vit"), saved.source("swin")])
    for subject in subjects:
        prepared = subject.prepare(data.split("test")["image"])
        assert torch.allclose(prepared * STD + MEAN, pixels_of(data), atol=1.01 / 255)


@pytest.mark.parametrize("kind", ["bit", "coatnet"])
def test_fgsm_as_by_hand(kind, saved, data):
    """In the model's own units: a step of epsilon / std, cut where a pixel would leave black and white."""
    subject, result = measured(saved, data, kind)
    reference, truth = library_model(saved, kind), torch.tensor(data.split("test")["label"])
    values = subject.prepare(data.split("test")["image"]).requires_grad_()
    output = reference(values)
    logits = getattr(output, "logits", output)
    torch.nn.functional.cross_entropy(logits, truth, reduction="sum").backward()
    moved = values.detach() + 8 / 255 / STD * values.grad.sign()
    moved = torch.minimum(torch.maximum(moved, -MEAN / STD), (1 - MEAN) / STD)
    with torch.no_grad():
        output = reference(moved)
    hits = getattr(output, "logits", output).argmax(dim=1) == truth
    assert result.fgsm == {"8": pytest.approx(float(hits.double().mean()), abs=1 / 24 + 1e-9)}


def test_flops_as_the_configuration_tells(saved, data):
    from hf_vit.cost import forward_flops

    for kind in ("vit", "hybrid", "axial", "axial_resnet"):
        subject, result = measured(saved, data, kind, corruptions=(), epsilons=())
        assert result.flops == pytest.approx(forward_flops(subject.model.config), rel=0.01)
        assert (result.clean, result.corruptions, result.fgsm) == (None, {}, None)


def test_wilsons_interval_in_closed_form(saved, data):
    from hf_vit.comparison.measurement import share

    z, images, hits = 1.959963984540054, 24, 3
    middle = (hits + z**2 / 2) / (images + z**2)
    half = z / (images + z**2) * math.sqrt(hits * (images - hits) / images + z**2 / 4)
    found = share(hits, images)
    assert (found.value, found.low, found.high) == pytest.approx((hits / images, middle - half, middle + half))


def test_image_gpt_by_its_middle_layer_and_a_probe(saved, data, tmp_path):
    """Against the whole model: the input of the middle block, normed by it, averaged over the pixels."""
    from transformers import AutoImageProcessor, ImageGPTModel

    subject = load_model(saved.source("igpt"))
    images = list(data.split("test")["image"])
    whole = ImageGPTModel.from_pretrained(saved.folder("igpt")).eval()
    tokens = AutoImageProcessor.from_pretrained(saved.folder("igpt"))(images=images, return_tensors="pt")
    with torch.no_grad():
        states = whole(**tokens, output_hidden_states=True).hidden_states
        expected = whole.h[2].ln_1(states[2]).mean(dim=1)
        found = pre_logits(subject.model, subject.prepare(images))
        given = ImageGPTFeatures(whole, subject.model.clusters, (8, 8))(subject.prepare(images))
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(given, expected, atol=1e-6)
    assert len(whole.h) == 4, "the model that was given is left as it was"
    _, result = measured(saved, data, "igpt", probe=True)
    assert (result.inputs.model.judged_by, result.fgsm, set(result.corruptions)) == (PROBE, None, {"contrast"})
    assert result.notes[-1] == "not attacked: its choice of colours has no gradient"
    assert result.clean == result.top1.value
    folder = zoo.save_image_gpt(tmp_path / "small")
    AutoImageProcessor.from_pretrained(folder, size={"height": 16, "width": 16}).save_pretrained(folder)
    with pytest.raises(UserError, match=r"makes 16x16 px, a token each, and the ImageGPT takes 64"):
        load_models([str(folder), saved.source("vit")])


@pytest.mark.parametrize(("missing", "classes"), [(None, 6), (5, 6), (None, 2)])
def test_a_probe_answers_as_scikit_learn(missing, classes, saved, data):
    splits = {name: table.filter(lambda row: row["label"] < classes) for name, table in data.splits.items()}
    splits["train"] = splits["train"].filter(lambda row: row["label"] != missing)
    data = ImageData("colours", "", splits, data.label_names[:classes])
    subject = load_model(saved.source("swin"))
    examination = Examination(subject, data, progress=False)
    head, strength = fit_probe(examination)
    model = ProbedForImageClassification(subject.model, head, data.label_names)
    with torch.no_grad():
        found = model(subject.prepare(data.split("test")["image"])).softmax(dim=1)
    expected, seen = regression(examination, strength)
    assert found[:, seen].numpy() == pytest.approx(expected, abs=1e-4)
    assert missing is None or not found[:, missing].any()


def regression(examination, strength):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    pipeline.fit(*examination.features("train"))
    return pipeline.predict_proba(examination.features("test")[0]), pipeline[-1].classes_


@pytest.mark.parametrize("knows_all", [True, False])
def test_a_probe_that_never_saw_a_class_has_no_loss(knows_all, saved, data):
    missing = None if knows_all else data.split("test")["label"][0]
    train = data.split("train").filter(lambda row: row["label"] != missing)
    data = ImageData("colours", "", {**data.splits, "train": train}, data.label_names)
    subject = load_model(saved.source("swin"))
    settings = replace(SETTINGS, corruptions=(), epsilons=())
    found = measure_model(subject, data, inputs_of(subject, PROBE, data, "test", settings), settings, progress=False)
    assert (found.loss is not None) == knows_all
    assert found.loss is None or found.loss < 100


def test_timm_by_folder_and_by_file(saved, data):
    folder = saved.folder("efficientnet")
    sources = [str(folder), f"timm:test_efficientnet@{folder / 'model.safetensors'}"]
    pixel_values = torch.rand(2, 3, zoo.SIDE, zoo.SIDE)
    by_folder, by_file = load_models(sources)
    with torch.no_grad():
        assert torch.equal(by_folder.model(pixel_values), by_file.model(pixel_values))
    with pytest.raises(UserError, match="it has no head with named classes; or let a linear probe answer"):
        judged_by(by_file, data, probe=False)
    for mistake in ("test_efficientnet@nowhere.pth", "test_resnet@" + sources[1].partition("@")[2]):
        with pytest.raises(UserError, match="cannot be loaded"):
            load_models([f"timm:{mistake}", sources[0]])
