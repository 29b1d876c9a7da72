"""A CLIP-like and a DINOv2-like tower, from transformers' folder to a shared, fine-tuned model."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hub.jobs import make_image
from loopback.client import Client, Loopback
from originals.pytorch import of_transformers
from training.conftest import make_colour_folder

import hf_vit
from hf_vit_cli.main import main

REPO = "alice/tower"
TOWERS = {
    "clip": ("CLIPVisionModel", {}, transformers.CLIPImageProcessor),
    "dinov2": ("Dinov2WithRegistersModel", {"mlp_ratio": 2, "num_register_tokens": 3}, transformers.BitImageProcessor),
}
SHORT = ("--steps", "8", "--evaluations", "2", "--batch-size", "12", "--precision", "fp32")


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code


@pytest.mark.filterwarnings("ignore")  # of the exporter's own
@pytest.mark.parametrize("kind", TOWERS)
def test_a_tower_goes_the_whole_way(kind: str, hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    name, fields, processor_class = TOWERS[kind]
    saved, tower, tuned = tmp_path / "saved", tmp_path / "tower", tmp_path / "tuned"
    of_transformers(name, **fields).save_pretrained(saved)
    processor_class(size={"shortest_edge": 14}, crop_size={"height": 12, "width": 12}).save_pretrained(saved)
    data = make_colour_folder(tmp_path / "colours")
    run("convert", saved, tower)
    run("finetune", "--model", tower, "--data", data, "--output", tuned, *SHORT)
    model = hf_vit.HfViTForImageClassification.from_pretrained(tuned).eval()
    before = hf_vit.HfViTModel.from_pretrained(tower).config
    for field in ("norm_before_layers", "norm_after_pooling", "num_register_tokens", "image_mean"):
        assert getattr(model.config, field) == getattr(before, field)
    run("evaluate", tuned, "--data", data)
    run("analyze", tuned, "--images", data, "--output", tmp_path / "analysis", "--only", "attention_distance")
    assert list((tmp_path / "analysis").glob("*.png"))
    run("export", tuned, tmp_path / "onnx", "--to", "onnx")
    assert (tmp_path / "onnx" / "model.onnx").is_file()
    pushed = xet_client.attempt("hub.jobs:command", arguments=["push", str(tuned), REPO, "--license", "mit"])
    assert pushed.code == 0, pushed.err
    assert hub.head(REPO)
    again = xet_client.run("hub.jobs:logits", repo_id=REPO)
    processor = transformers.AutoImageProcessor.from_pretrained(tuned)
    with torch.no_grad():
        expected = model(**processor(images=make_image(), return_tensors="pt")).logits[0]
    np.testing.assert_allclose(again, expected, atol=1e-5)
