"""Families x commands: every command takes every family of the table, so that none is second class."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from models import families as tiny
from PIL import Image
from training.conftest import make_colour_folder
from transformers import AutoModelForImageClassification

from hf_vit import variant_config
from hf_vit.data import make_processor
from hf_vit.families import FAMILIES
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

LABELS = ("blue", "green", "red")
SHORT = ("--steps", "1", "--batch-size", "4", "--evaluations", "1", "--precision", "fp32", "--device", "cpu")
COMMANDS = {
    "finetune": ("finetune", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT),
    "evaluate": ("evaluate", "MODEL", "--data", "DATA", "--output", "OUT"),
    "predict": ("predict", "MODEL", "IMAGE"),
    "embed": ("embed", "MODEL", "--data", "DATA", "--output", "OUT"),
    "analyze": ("analyze", "MODEL", "--images", "DATA", "--output", "OUT", "--only", "patch_filters"),
    "cost": ("cost", "MODEL"),
    "card": ("card", "MODEL"),
    "export": ("export", "MODEL", "OUT", "--to", "onnx"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = make_colour_folder(tmp_path_factory.mktemp("images") / "colours", count=10)
    for path in folder.glob("*/*.png"):
        with Image.open(path) as image:
            image.resize((32, 32)).save(path)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A classifier of every family, whose head is not zero."""
    root, folders = tmp_path_factory.mktemp("saved"), {}
    for name, family in FAMILIES.items():
        row = (tiny.FAMILIES | tiny.RESNETS)[name]
        labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: index for index, name in enumerate(LABELS)}}
        config = row.config(num_labels=3)
        config = type(config).from_dict({**config.to_dict(), **labels})
        torch.manual_seed(0)
        model = family.classes["classification"](config)
        torch.nn.init.normal_(model.classifier.weight)
        model.save_pretrained(root / name)
        make_processor(config).save_pretrained(root / name)
        folders[name] = root / name
    return folders


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_family(command, name, saved, data, tmp_path):
    places = {"MODEL": saved[name], "DATA": data, "OUT": tmp_path / "out", "IMAGE": next(data.glob("*/*.png"))}
    with pytest.raises(SystemExit) as ended:
        main([str(places.get(word, word)) for word in COMMANDS[command]])
    assert not ended.value.code
    if command == "finetune":
        folder = tmp_path / "out"
        assert [record.kind for record in Facts.load(folder).records] == ["training", "evaluation"]
        assert json.loads((folder / "config.json").read_text())["model_type"] == FAMILIES[name].model_type
        assert "colours" in (folder / "README.md").read_text()
    if command == "export":
        model = AutoModelForImageClassification.from_pretrained(saved[name]).eval()
        session = onnxruntime.InferenceSession(next((tmp_path / "out").glob("*.onnx")))
        height, width = model.config.nominal_size
        for count in (1, 3):  # the batch is dynamic
            images = torch.randn(count, model.config.num_channels, height, width)
            (answer,) = session.run(["logits"], {"pixel_values": images.numpy()})
            with torch.no_grad():
                np.testing.assert_allclose(answer, model(images).logits.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "stem_width"), [("AxialResNet-S", 32), ("AxialResNet-M", 48), ("AxialResNet-L", 64)])
def test_axial_resnets_by_name(name, stem_width):
    """The widths whose parameters are the paper's (tests/axial/test_axial_resnet.py counts them)."""
    config = variant_config(name)
    assert (config.model_type, config.stage_depths, config.stem_width) == ("hf_axial_resnet", (3, 4, 6, 3), stem_width)


@pytest.mark.parametrize(("depth", "factor"), [(50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4)])
def test_bits_by_name_are_timms(depth, factor):
    with torch.device("meta"):
        theirs = timm.create_model(f"resnetv2_{depth}x{factor}_bit", num_classes=1000)
    assert parameters_of(f"BiT-R{depth}x{factor}") == sum(parameter.numel() for parameter in theirs.parameters())


def parameters_of(name: str) -> int:
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(variant_config(name, num_labels=1000))
    return sum(parameter.numel() for parameter in model.parameters())
