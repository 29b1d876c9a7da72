"""A saved folder, model and image processor, is all that transformers' pipelines need."""

import pytest
import torch
from transformers import ViTImageProcessor, pipeline

import hf_vit


@pytest.fixture
def photographs():
    from PIL import Image
    from skimage import data

    return [Image.fromarray(image) for image in (data.astronaut(), data.coffee(), data.camera())]  # the last is gray


@pytest.fixture
def processor():
    return ViTImageProcessor(
        size={"height": 64, "width": 64}, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_convert_rgb=True
    )


@torch.no_grad()
def test_image_feature_extraction(family, tiny_config, photographs, processor, tmp_path):
    model = getattr(hf_vit, f"{family}Model")(tiny_config(family)).eval()
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    pixel_values = processor(photographs, return_tensors="pt")["pixel_values"]
    expected = model(pixel_values)
    tokens = pipeline("image-feature-extraction", model=str(tmp_path))(photographs, return_tensors=True)
    pooled = pipeline("image-feature-extraction", model=str(tmp_path), pool=True)(photographs, return_tensors=True)
    for index in range(3):
        torch.testing.assert_close(tokens[index][0], expected.last_hidden_state[index], rtol=0, atol=1e-5)
        torch.testing.assert_close(pooled[index][0], expected.pooler_output[index], rtol=0, atol=1e-5)


@torch.no_grad()
def test_image_classification(family, tiny_config, photographs, processor, tmp_path):
    names = {0: "astronaut", 1: "coffee", 2: "cameraman"}
    model = getattr(hf_vit, f"{family}ForImageClassification")(tiny_config(family, id2label=names)).eval()
    model.classifier.weight.normal_()  # a new head is zero: all classes alike
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    answers = pipeline("image-classification", model=str(tmp_path))(photographs, top_k=3)
    probabilities = model(processor(photographs, return_tensors="pt")["pixel_values"]).logits.softmax(dim=-1)
    assert len({round(float(p), 4) for p in probabilities.flatten()}) > 6
    for answer, row in zip(answers, probabilities, strict=True):
        assert [entry["label"] for entry in answer] == [names[int(i)] for i in row.argsort(descending=True)]
        assert [entry["score"] for entry in answer] == pytest.approx(
            row.sort(descending=True).values.tolist(), abs=1e-5
        )
