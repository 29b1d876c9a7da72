"""Whatever takes a model takes every family and every checkpoint that converts: commands x families x kinds."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from hub import jobs
from hub.conftest import training_record
from loopback.client import content_hash
from models import families as tiny
from originals.cases import HEADLESS, KINDS, LABELS, NAMED, NAMELESS, RUN_BY_THEIR_LIBRARY, UNNAMED
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image
from training.conftest import make_colour_folder, save_model
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    SwinConfig,
    TimmWrapperConfig,
    TimmWrapperModel,
)

import hf_vit
from hf_vit.conversion import convert
from hf_vit.cost import forward_flops
from hf_vit.errors import UserError
from hf_vit.families import AUTO_CLASSES, FAMILIES, Door, find_family
from hf_vit.loading import load_model
from hf_vit.loading.start import build_classifier, build_model, find_model
from hf_vit.results.facts import Facts, append_record
from hf_vit_cli.main import main

SHORT = ("--steps", "1", "--batch-size", "4", "--evaluations", "1", "--precision", "fp32", "--device", "cpu")
LEARN = ("--data", "DATA", "--output", "OUT", *SHORT)
COMMANDS = {
    "finetune": ("finetune", "MODEL", *LEARN),
    "pretrain": ("pretrain", "--model", "MODEL", *LEARN),
    "noisy-student": ("finetune", "MODEL", *LEARN, "--teacher", "MODEL", "--unlabeled", "DATA", "--confidence", "0",
                      "--drop-path", "0"),
    "meta-pseudo-labels": ("finetune", "MODEL", *LEARN, "--teacher", "MODEL", "--unlabeled", "DATA",
                           "--self-training", "meta-pseudo-labels"),
    "evaluate": ("evaluate", "MODEL", "--data", "DATA", "--output", "OUT"),
    "predict": ("predict", "MODEL", "IMAGE"),
    "embed": ("embed", "MODEL", "--data", "DATA", "--output", "OUT"),
    "analyze": ("analyze", "MODEL", "--images", "DATA", "--output", "OUT", "--only", "attention_distance"),
    "cka": ("analyze", "MODEL", "--images", "DATA", "--output", "OUT", "--split", "train", "--num-images", "8",
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
NEED_OURS = ("finetune", "pretrain", "cost", "export", "page")
NEED_A_HEAD = ("evaluate", "predict", "compare")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Images by kind of names: of classes, and of classes as files without names call them."""
    root = tmp_path_factory.mktemp("images")
    named = make_colour_folder(root / "colours", count=10)
    for path in root.glob("*/*/*.png"):
        with Image.open(path) as image:
            image.resize((32, 32)).save(path)
    for index, name in enumerate(LABELS):
        shutil.copytree(named / name, root / "numbered" / f"LABEL_{index}")
    return {"named": named, "unnamed": root / "numbered"}


def run(words: tuple[str, ...], places: dict[str, Any], images: Path, tmp_path: Path, monkeypatch: Any = None) -> int:
    """The exit status of a command of a model, with images and an output folder."""
    places = {"DATA": images, "OUT": tmp_path / "out", "IMAGE": next(images.glob("*/*.png")), **places}
    if "RUNTIME" in words:
        places["RUNTIME"] = save_runtime(tmp_path / "runtime")
        monkeypatch.setattr("hf_vit.pages.making.FILES", SMALL_FILES)
    with pytest.raises(SystemExit) as ended:
        main([str(places.get(word, word)) for word in words])
    return int(ended.value.code or 0)


# Families

# Of every family the smallest by name.
VARIANTS = {
    "plain": "Ti/16", "hybrid": "R+Ti/16", "axial": "Axial-Ti/16", "local": "Local-Ti/16",
    "axial_resnet": "AxialResNet-S", "bit": "BiT-R50x1", "mixer": "Mixer-S/32",
}  # fmt: skip
# What these do depends on the family; what others do only on whether it has tokens.
OF_EACH_FAMILY = ("finetune", "predict", "cost")
BY_DEFAULT = {
    # plain has tests of its own: of exports in tests/conversion, of pages in tests/pages
    "export": ("hybrid", "axial"), "bench": ("plain",), "page": ("bit",),
    **dict.fromkeys(("noisy-student", "meta-pseudo-labels", "compare"), ("axial_resnet",)),  # and of these
}  # fmt: skip
OF_FAMILIES = [
    pytest.param(
        command,
        name,
        id=f"{command}-{name}",
        marks=[]
        if command in OF_EACH_FAMILY or name in BY_DEFAULT.get(command, ("plain", "axial_resnet"))
        else pytest.mark.slow,  # the same code as for another family
    )
    for command in COMMANDS
    if command not in ("pretrain", "analyze")
    for name in FAMILIES
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A classifier of every family, whose head is not zero."""
    root = tmp_path_factory.mktemp("saved")
    for name, family in FAMILIES.items():
        config = (tiny.FAMILIES | tiny.OTHERS)[name].config(num_labels=3)
        config = type(config).from_dict({**config.to_dict(), **NAMED})
        torch.manual_seed(0)
        model = family.classes["classification"](config)
        torch.nn.init.normal_(model.classifier.weight)
        save_model(model, root / name)
    return {name: root / name for name in FAMILIES}


@pytest.mark.parametrize(("command", "name"), OF_FAMILIES)
def test_every_command_takes_every_family(command, name, saved, data, tmp_path, monkeypatch, caplog):
    second, words = "plain" if name != "plain" else "axial", COMMANDS[command]
    places = {"MODEL": saved[name], "SECOND": saved[second], "VARIANT": VARIANTS[name]}
    if command == "export" and hasattr(FAMILIES[name].config_class(), "stage_depths"):
        words = (*words, "--static")  # for all sizes a ResNet is traced slowly: tests/conversion/test_graphs.py
    assert run(words, places, data["named"], tmp_path, monkeypatch) == 0
    foreign = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not foreign  # the program would show them
    out = tmp_path / "out"
    if COMMANDS[command][0] == "finetune":
        assert [record.kind for record in Facts.load(out).records] == ["training", "evaluation"]
        assert json.loads((out / "config.json").read_text())["model_type"] == FAMILIES[name].model_type
        assert "colours" in (out / "README.md").read_text()
    if command == "cka":
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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bit" else pytest.mark.slow) for name in FAMILIES],  # 10 s each
)
def test_every_family_is_shared_and_verified(name, saved, hub, xet_client, tmp_path):
    """What the Hub has then is what lay in the folder, and loads with the same answers."""
    folder = tmp_path / name
    shutil.copytree(saved[name], folder)
    append_record(folder, training_record())
    xet_client.command("push", folder, f"alice/{name}", "--license", "mit")
    files = hub.files(f"alice/{name}")
    assert files["model.safetensors"] == content_hash((folder / "model.safetensors").read_bytes(), True)
    assert {path.name for path in folder.glob("*.py")} <= set(files)
    assert "error" not in xet_client.run("hub.jobs:verify", repo_id=f"alice/{name}")
    answer = xet_client.run("hub.jobs:logits", repo_id=f"alice/{name}")
    assert answer == pytest.approx(jobs.logits(str(folder)), abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_a_backbone(name, saved):
    """Checkpoint -> AutoBackbone, with all weights; a ResNet's maps are what the model's own stages give."""
    classifier = AutoModelForImageClassification.from_pretrained(saved[name]).eval()
    config = AutoConfig.from_pretrained(saved[name])
    config.out_features = config.stage_names[-2:]
    built = AutoBackbone.from_config(config)
    backbone, info = type(built).from_pretrained(saved[name], config=config, output_loading_info=True)
    assert not info["missing_keys"]
    images, outputs = torch.randn(2, 3, *config.nominal_size), []
    if not FAMILIES[name].has_tokens:
        for stage in classifier.base_model.encoder.stages:
            stage.register_forward_hook(lambda module, given, output: outputs.append(output))
    with torch.no_grad():
        maps = backbone.eval()(images).feature_maps
        classifier(images)
    assert [part.shape[1] for part in maps] == backbone.channels
    assert len(maps) == 2
    for part, output in zip(maps[len(maps) - len(outputs) :], outputs, strict=True):
        torch.testing.assert_close(part, output.permute(0, 3, 1, 2) if name == "axial_resnet" else output)
    with torch.no_grad():
        layers = classifier.get_intermediate_layers(images, 2, norm=hasattr(config, "apply_layernorm"))
        (last,), tokens = classifier.get_intermediate_layers(images), classifier.base_model(images).last_hidden_state
    torch.testing.assert_close([layer.feature_map for layer in layers], list(maps))
    torch.testing.assert_close(last.patch_tokens, tokens[:, -last.patch_tokens.shape[1] :])
    with pytest.raises(ValueError, match="layers=99 does not fit a model with"):
        classifier.get_intermediate_layers(images, 99)


OUTPUTS = {"model": "last_hidden_state", "classification": "logits", "masked_prediction": "reconstruction"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("door", AUTO_CLASSES)
def test_every_family_by_every_door(name: str, door: Door):
    """The Auto class builds the family's class, which computes and is counted; or says that it does not know it."""
    family, row = FAMILIES[name], (tiny.FAMILIES | tiny.OTHERS)[name]
    config, auto_class = row.config(), getattr(transformers, AUTO_CLASSES[door])
    if door in family.not_applicable:
        assert door not in family.classes
        with pytest.raises(ValueError, match=f"Unrecognized configuration class .*{family.config_class.__name__}"):
            auto_class.from_config(config)
        with pytest.raises(UserError, match=family.not_applicable[door]):
            forward_flops(config, task=door)
        return
    model = auto_class.from_config(config).eval()
    assert type(model) is family.classes[door] is getattr(hf_vit, type(model).__name__)
    assert family.find_task(type(model).__name__) == door
    assert forward_flops(config, task=door) > 0
    images = row.images(config)
    with torch.no_grad():
        outputs = model(images, output_hidden_states=True)
    if door != "backbone":
        assert outputs[OUTPUTS[door]].shape[0] == len(images)
    depth = config.num_hidden_layers if family.has_tokens else sum(config.stage_depths)
    assert sum(isinstance(module, family.blocks) for module in model.modules()) == depth
    assert len(outputs.hidden_states) == depth + 1
    assert hasattr(model, family.prefix) == (door != "model")


def test_the_package_shows_its_table():
    assert hf_vit.__all__ == sorted(dir(hf_vit))
    with pytest.raises(AttributeError, match="Any"):
        hf_vit.Any  # noqa: B018
    for family in FAMILIES.values():
        assert find_family(family.model_type) is family
        assert transformers.AutoConfig.for_model(family.model_type).__class__ is family.config_class
    assert find_family("vit") is find_family(None) is None


# Checkpoints of other codes

# Where models are opened from outside every kind is tried (`test_weights_are_those_of_convert` opens all as ours, too);
# the commands that share this code are tried on three: one converted on the way, one run by its library, and a file.
OF_EVERY_KIND = ("predict",)
THREE_KINDS = ("transformers ViT-hybrid", "timm folder", "original .npz")
# One says what there is to say of an export and a page.
EXPORTED = ("timm:FOLDER",)
OF_KINDS = [
    pytest.param(
        command,
        kind,
        id=f"{command}-{kind}",
        marks=[] if command in OF_EVERY_KIND or kind in (*THREE_KINDS, *EXPORTED) else pytest.mark.slow,
    )
    for command in (*NEED_OURS, "analyze", "evaluate", "predict", "embed", "compare")
    for kind in KINDS
    if not (kind in (*HEADLESS, *NAMELESS) and command in NEED_A_HEAD)  # refused below
    and not (command in ("export", "page") and kind not in EXPORTED)
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """Kind -> what to give as --model, and the folder that `hf-vit convert` makes of it."""
    root, made = tmp_path_factory.mktemp("kinds"), {}
    for index, (kind, save) in enumerate(KINDS.items()):
        source, converted = save(root / f"saved-{index}"), root / f"converted-{index}"
        convert(source, converted)
        made[kind] = source, converted
    return made


@pytest.mark.parametrize(("command", "kind"), OF_KINDS)
def test_every_command_takes_every_kind(command, kind, kinds, data, tmp_path, capsys, monkeypatch):
    source, converted = kinds[kind]
    images = data["unnamed" if kind in UNNAMED else "named"]
    words = (*COMMANDS[command][:-1], "timm") if command == "export" else COMMANDS[command]  # a graph takes seconds
    assert run(words, {"MODEL": source, "SECOND": converted}, images, tmp_path, monkeypatch) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "converted in memory" in line]
    is_read_inside = command == "analyze" and "timm" in kind
    assert len(told) == (command in NEED_OURS or is_read_inside or kind not in RUN_BY_THEIR_LIBRARY)
    assert not told or told[0].startswith("note: ")
    if command == "finetune":
        origin = json.loads((converted / "facts.json").read_text())[0]["values"]["origin"]
        values = Facts.load(tmp_path / "out").records[0].values
        assert values["origin"] == origin
        assert values["base_model"].endswith(Path(source).name)
        assert str(tmp_path.parent) not in values["base_model"]
    if (command, kind) == ("evaluate", "transformers ViT-hybrid"):
        model = json.loads((tmp_path / "out/top1.json").read_text())["model"]
        assert (model["kind"], model["origin"]) == ("hf_hybrid_vit", "transformers_vit_hybrid")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_convert(kind, kinds):
    """Bit for bit: what a training starts from, and what is looked at."""
    source, converted = kinds[kind]
    wanted = AutoModel.from_pretrained(converted).state_dict()
    started = build_model(find_model(source), "model").state_dict()
    looked_at: Any = load_model(source, "cpu", inside=True).model
    both = [started]
    if type(looked_at).__module__.startswith("hf_vit."):
        both.append(getattr(looked_at, "vit", looked_at).state_dict())
    assert len(both) == 2 or kind in RUN_BY_THEIR_LIBRARY
    for state in both:
        assert {name for name in wanted if "pooler" not in name} <= state.keys()
        assert all(torch.equal(state[name], value) for name, value in wanted.items() if name in state)


def test_heads_of_the_same_classes_are_kept(kinds):
    source, converted = kinds["timm folder"]
    kept = build_classifier(find_model(source), ["red", "blue", "green"])
    wanted = build_classifier(find_model(str(converted)), ["red", "blue", "green"])
    assert wanted.classifier.weight.any()
    assert torch.equal(kept.classifier.weight, wanted.classifier.weight)


def test_timm_is_converted_where_it_is_not_installed(kinds, monkeypatch):
    source, converted = kinds["timm folder"]
    own = load_model(source, "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ours, saved = load_model(source, "cpu"), load_model(str(converted), "cpu")
    assert (own.origin, ours.origin, saved.origin) == (None, "timm_vit", None)
    assert ours.label_sets == own.label_sets == [list(LABELS)]
    images = [Image.effect_noise((20, 20), 90).convert("RGB")]
    pixels = ours.pixel_values(images)
    torch.testing.assert_close(pixels, own.pixel_values(images), atol=0.02, rtol=0)
    with torch.no_grad():
        answer = ours.model(pixels).logits
        assert torch.equal(answer, saved.model(pixels).logits)
        torch.testing.assert_close(answer, own.model(pixels), atol=1e-4, rtol=1e-4)


def test_a_timm_model_without_head_names_no_classes(tmp_path):
    """timm's configuration of the architecture speaks of ImageNet's 1,000."""
    TimmWrapperModel(TimmWrapperConfig(architecture="test_vit")).save_pretrained(tmp_path)
    assert load_model(tmp_path, "cpu").label_sets == []
    with pytest.raises(UserError, match=r"has no classification head \(num_classes=0\)"):
        load_model(tmp_path, "cpu", as_classifier=True)


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(("kind", "reason"), [(HEADLESS[0], "fine-tune it first"), (NAMELESS[0], "no class names")])
def test_no_head_is_refused_in_one_line(command, kind, reason, kinds, data, tmp_path, capsys):
    assert run(COMMANDS[command], {"MODEL": kinds[kind][0]}, data["named"], tmp_path) == 1
    assert reason in capsys.readouterr().err.splitlines()[-1]


def _swin(folder: Path) -> str:
    model = AutoModel.from_config(SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2]))
    model.save_pretrained(folder)
    return str(folder)


def _bert(folder: Path) -> str:
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    return str(folder)


def _text(folder: Path) -> str:
    folder.mkdir()
    (folder / "notes.txt").write_text("no weights")
    return str(folder / "notes.txt")


REFUSED = {
    "another architecture": (_swin, "use it with transformers"),
    "no model of images": (_bert, "model_type 'bert'"),
    "no checkpoint": (_text, "give an .npz, .safetensors or PyTorch file"),
    "a name that timm does not know": (lambda folder: "timm:vit_imaginary", "timm.list_models(pretrained=True)"),
    "an address": (lambda folder: "ftp://host/vit.npz", "give a path or a URL that begins with https://"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_convert_is_refused_in_one_line(what, data, tmp_path, capsys):
    save, reason = REFUSED[what]
    source = save(tmp_path / "saved")
    for command in ("finetune", "pretrain", "cost"):
        assert run(COMMANDS[command], {"MODEL": source}, data["named"], tmp_path) == 1
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("hf-vit: ")
        assert reason in told
        assert not (tmp_path / "out").exists()
