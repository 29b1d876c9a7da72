"""Families x commands: every command takes every family of the table, so that none is second class."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from hub.conftest import training_record
from loopback.client import content_hash
from models import families as tiny
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image
from training.conftest import make_colour_folder
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModelForImageClassification,
    DetrConfig,
    DetrForObjectDetection,
)

from hf_vit import variant_config
from hf_vit.data import make_processor
from hf_vit.families import FAMILIES
from hf_vit.results.facts import Facts, append_record
from hf_vit_cli.main import main

LABELS = ("blue", "green", "red")
SHORT = ("--steps", "1", "--batch-size", "4", "--evaluations", "1", "--precision", "fp32", "--device", "cpu")
COMMANDS = {
    "finetune": ("finetune", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT),
    "noisy-student": ("finetune", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT, "--teacher", "MODEL",
                      "--unlabelled", "DATA", "--confidence", "0", "--drop-path", "0"),
    "meta-pseudo-labels": ("finetune", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT, "--teacher", "MODEL",
                           "--unlabelled", "DATA", "--self-training", "meta-pseudo-labels"),
    "evaluate": ("evaluate", "MODEL", "--data", "DATA", "--output", "OUT"),
    "predict": ("predict", "MODEL", "IMAGE"),
    "embed": ("embed", "MODEL", "--data", "DATA", "--output", "OUT"),
    "analyze": ("analyze", "MODEL", "--images", "DATA", "--output", "OUT", "--split", "train", "--num-images", "8",
                "--only", "cka", "--cka-batch-size", "4"),
    "compare": ("compare", "MODEL", "SECOND", "--data", "DATA", "--output", "OUT", "--speed-turns", "1",
                "--corruption", "contrast", "--epsilon", "1"),
    "diff": ("diff", "MODEL", "SECOND", "--data", "DATA", "--output", "OUT"),
    "bench": ("bench", "models", "VARIANT", "--image-size", "64", "--batch", "1", "--work", "inference", "--turns", "1",
              "--contestant", "hf_vit", "--contestant", "hf_vit optimized", "--contestant", "timm", "--output", "OUT"),
    "bench-saved": ("bench", "saved", "MODEL", "SECOND", "--batch", "2", "--turns", "1", "--output", "OUT"),
    "cost": ("cost", "MODEL"),
    "card": ("card", "MODEL"),
    "export": ("export", "MODEL", "OUT", "--to", "onnx"),
    "page": ("page", "MODEL", "--output", "OUT", "--runtime", "RUNTIME"),
}  # fmt: skip
# Of every family the smallest by name.
VARIANTS = {
    "plain": "Ti/16",
    "hybrid": "R+Ti/16",
    "axial": "Axial-Ti/16",
    "local": "Local-Ti/16",
    "axial_resnet": "AxialResNet-S",
    "bit": "BiT-R50x1",
    "mixer": "Mixer-S/32",
}
# What these do depends on the family; what others do only on whether it has tokens.
OF_EACH_FAMILY = ("finetune", "predict", "embed", "cost")
BY_DEFAULT = {"export": ("plain", "hybrid", "axial"), "bench": ("plain",), "page": ("plain", "bit")}
CASES = [
    pytest.param(
        command,
        name,
        id=f"{command}-{name}",
        marks=[]
        if command in OF_EACH_FAMILY or name in BY_DEFAULT.get(command, ("plain", "axial_resnet"))
        else pytest.mark.slow,  # the same code as for another family
    )
    for command in COMMANDS
    for name in FAMILIES
]


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
        row = (tiny.FAMILIES | tiny.OTHERS)[name]
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


@pytest.mark.parametrize(("command", "name"), CASES)
def test_every_command_takes_every_family(command, name, saved, data, tmp_path, monkeypatch, caplog):
    places = {"MODEL": saved[name], "DATA": data, "OUT": tmp_path / "out", "IMAGE": next(data.glob("*/*.png"))}
    places["RUNTIME"] = save_runtime(tmp_path / "runtime")
    monkeypatch.setattr("hf_vit.pages.runtime.FILES", SMALL_FILES)
    second = "plain" if name != "plain" else "axial"
    places |= {"SECOND": saved[second], "VARIANT": VARIANTS[name]}
    words = [*COMMANDS[command]]
    if command == "export" and hasattr(FAMILIES[name].config_class(), "stage_depths"):
        words.append("--static")  # for all sizes a ResNet is traced slowly: tests/conversion/test_onnx.py
    with pytest.raises(SystemExit) as ended:
        main([str(places.get(word, word)) for word in words])
    assert not ended.value.code
    foreign = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not foreign  # the program would show them
    out = tmp_path / "out"
    if COMMANDS[command][0] == "finetune":
        assert [record.kind for record in Facts.load(out).records] == ["training", "evaluation"]
        assert json.loads((out / "config.json").read_text())["model_type"] == FAMILIES[name].model_type
        assert "colours" in (out / "README.md").read_text()
    if command == "analyze":
        assert json.loads((out / "cka.json").read_text())["inputs"]["model"]["name"] == name
    if command == "compare":
        assert json.loads((out / "speed.json").read_text())["rows"]
    if command == "diff":
        told = json.loads((out / "diff.json").read_text())
        assert told["configuration"]["model_type"] == [f'"{FAMILIES[each].model_type}"' for each in (name, second)]
        assert [layer["num_values"] for layer in told["layers"] if layer["layer"] == "classifier"] != [0]
        assert 0 < sum(told["accuracy"]["top1"]) < 2
    if command.startswith("bench"):
        (row,) = json.loads(out.read_text())["rows"]
        if command == "bench":
            assert {"hf_vit", "hf_vit optimized"} <= set(row["outcomes"])
        else:
            assert list(row["models"]) == [name, second]
    if command == "export":
        model = AutoModelForImageClassification.from_pretrained(saved[name]).eval()
        session = onnxruntime.InferenceSession(next(out.glob("*.onnx")))
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
        ours = AutoModelForImageClassification.from_config(variant_config(f"BiT-R{depth}x{factor}", num_labels=1000))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bit" else pytest.mark.slow) for name in FAMILIES],  # 10 s each
)
def test_every_family_is_shared_and_verified(name, saved, hub, xet_client, tmp_path):
    """One after the other by a fresh process; what the Hub has then is what lay in the folder."""
    folder = tmp_path / name
    shutil.copytree(saved[name], folder)
    append_record(folder, training_record())
    xet_client.run("hub.jobs:command", arguments=["push", str(folder), f"alice/{name}", "--license", "mit"])
    files = hub.files(f"alice/{name}")
    assert files["model.safetensors"] == content_hash((folder / "model.safetensors").read_bytes(), True)
    assert {path.name for path in folder.glob("*.py")} <= set(files)
    xet_client.run("hub.jobs:command", arguments=["verify", f"alice/{name}"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_a_backbone_of_a_detector(name, saved, tmp_path):
    """Checkpoint -> AutoBackbone -> DETR, whose loss reaches it; its maps are what the model's own stages give."""
    classifier = AutoModelForImageClassification.from_pretrained(saved[name]).eval()
    config = AutoConfig.from_pretrained(saved[name])
    config.out_features = config.stage_names[-2:]
    built = AutoBackbone.from_config(config)
    backbone, info = type(built).from_pretrained(saved[name], config=config, output_loading_info=True)
    assert not info["missing_keys"]
    images = torch.randn(2, 3, *config.nominal_size)
    seen = []
    if not FAMILIES[name].has_tokens:  # of these the test of ViTs' maps (tests/doors/test_backbone.py) knows nothing
        for stage in classifier.base_model.encoder.stages:
            stage.register_forward_hook(lambda module, given, output: seen.append(output))
    with torch.no_grad():
        maps = backbone.eval()(images).feature_maps
        classifier(images)
    assert [part.shape[1] for part in maps] == backbone.channels
    assert len(maps) == 2
    for part, output in zip(maps[len(maps) - len(seen) :], seen, strict=True):
        torch.testing.assert_close(part, output.permute(0, 3, 1, 2) if name == "axial_resnet" else output)
    detector = DetrForObjectDetection(
        DetrConfig(
            use_timm_backbone=False, backbone_config=config, d_model=32, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
            num_queries=4, num_labels=2,
        )
    )  # fmt: skip
    assert type(detector.model.backbone.model) is type(backbone)
    detector.model.backbone.model.requires_grad_(True)  # DETR freezes what it takes for a ResNet of its own
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]])}] * 2
    detector(images, labels=labels).loss.backward()
    first = next(parameter for parameter in detector.model.backbone.parameters() if parameter.requires_grad)
    assert first.grad.abs().sum() > 0
    backbone.save_pretrained(tmp_path / "backbone")
    again = type(backbone).from_pretrained(tmp_path / "backbone").eval()
    with torch.no_grad():
        for part, same in zip(maps, again(images).feature_maps, strict=True):
            torch.testing.assert_close(part, same)
