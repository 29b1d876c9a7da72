"""A saved folder is all that transformers' pipelines need, for every family: what `PipelineTesterMixin` asks."""

import dense_heads
import pytest
import torch
from models.families import FAMILIES, OTHERS
from PIL import Image
from skimage import data
from training.conftest import save_model
from transformers import AutoModel, AutoModelForImageClassification, ViTImageProcessor, pipeline

NAMES = {0: "astronaut", 1: "coffee", 2: "cameraman"}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Images as files and modes that people give: RGB, gray, with transparency, gray with transparency, a path."""
    images = [Image.fromarray(image) for image in (data.astronaut(), data.coffee(), data.camera())]
    path = tmp_path_factory.mktemp("photographs") / "coffee.png"
    images[1].save(path)
    return [*images, images[0].convert("RGBA"), images[1].convert("LA"), str(path)]


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHERS])
def folder(request, tmp_path_factory):
    """A classifier of each family, whose head is not zero, with its processor."""
    torch.manual_seed(0)
    row = (FAMILIES | OTHERS)[request.param]
    labels = {"id2label": NAMES, "label2id": {name: index for index, name in NAMES.items()}}
    model = row.build("classification", **labels)
    torch.nn.init.normal_(model.classifier.weight, std=0.2)
    return save_model(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pixel_values(folder, photographs):
    images = [Image.open(each) if isinstance(each, str) else each for each in photographs]
    images = [image.convert("RGB") for image in images]
    return ViTImageProcessor.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def test_image_classification(folder, photographs, pixel_values):
    logits = AutoModelForImageClassification.from_pretrained(folder).eval()(pixel_values).logits
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    assert logits.std(0).min() > 1e-4  # the images do not answer alike
    for settings, wanted in (
        ({}, logits.softmax(-1)),
        ({"top_k": 2}, logits.softmax(-1)),
        ({"function_to_apply": "none"}, logits),
        ({"function_to_apply": "sigmoid"}, logits.sigmoid()),
    ):
        answers = classify(photographs, batch_size=4, **settings)
        for answer, row in zip(answers, wanted, strict=True):
            order = row.argsort(descending=True)[: settings.get("top_k", 3)]
            assert [entry["label"] for entry in answer] == [NAMES[int(index)] for index in order]
            assert [entry["score"] for entry in answer] == pytest.approx(row[order].tolist(), rel=1e-4, abs=1e-5)
    assert classify(photographs[0]) == classify(photographs[:1])[0]
    streamed = list(classify((photographs[index % 6] for index in range(10)), batch_size=4))
    assert [each[0]["label"] for each in streamed] == [NAMES[int(logits[index % 6].argmax())] for index in range(10)]


@torch.no_grad()
def test_image_feature_extraction(folder, photographs, pixel_values):
    expected = AutoModel.from_pretrained(folder).eval()(pixel_values)
    extract = pipeline("image-feature-extraction", model=str(folder), device="cpu")
    tokens = extract(photographs, return_tensors=True)
    for index, each in enumerate(tokens):
        torch.testing.assert_close(each[0], expected.last_hidden_state[index], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(extract(photographs[0])), tokens[0], rtol=1e-4, atol=1e-5)
    pooled = pipeline("image-feature-extraction", model=str(folder), pool=True)(photographs[:2], return_tensors=True)
    for index, each in enumerate(pooled):
        torch.testing.assert_close(each[0], expected.pooler_output[index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(folder, photographs, dtype):
    full, half = (
        pipeline("image-classification", model=str(folder), device="cpu", dtype=each)(photographs[0])
        for each in (torch.float32, dtype)
    )
    scores = [{entry["label"]: entry["score"] for entry in answer} for answer in (full, half)]
    assert scores[1] == pytest.approx(scores[0], abs=0.1)


@pytest.mark.parametrize("head", ["linear", "mask2former"])
def test_image_segmentation(head, photographs, tmp_path):
    """From a folder as from the model itself."""
    model, processor = dense_heads.build("plain", head)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    segment = pipeline("image-segmentation", model=str(tmp_path), device="cpu")
    expected = pipeline("image-segmentation", model=model.eval(), image_processor=processor, device="cpu")
    answers, wanted = (each(photographs[0], subtask="semantic") for each in (segment, expected))
    assert answers
    assert answers == wanted
