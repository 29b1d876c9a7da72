"""Whatever takes a model takes any checkpoint that converts: commands x kinds of checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from originals.cases import HEADLESS, KINDS, LABELS, NAMELESS, RUN_BY_THEIR_LIBRARY, UNNAMED
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image
from training.conftest import make_colour_folder
from transformers import AutoModel, BertConfig, BertModel, SwinConfig

from hf_vit.conversion import convert
from hf_vit.loading.model import load_model
from hf_vit.loading.start import build_classifier, build_model, find_model
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

SHORT = ("--steps", "1", "--batch-size", "4", "--evaluations", "1", "--precision", "fp32", "--device", "cpu")
# Command -> its words, of model, data and output; and whether it always needs a model of this package.
COMMANDS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "finetune": (True, ("finetune", "--model", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT)),
    "pretrain": (True, ("pretrain", "--model", "MODEL", "--data", "DATA", "--output", "OUT", *SHORT)),
    "cost": (True, ("cost", "MODEL")),
    "export": (True, ("export", "MODEL", "OUT", "--to", "onnx")),
    "page": (True, ("page", "MODEL", "--output", "OUT", "--runtime", "RUNTIME")),
    "analyze": (False, ("analyze", "MODEL", "--images", "DATA", "--output", "OUT", "--only", "attention_distance")),
    "evaluate": (False, ("evaluate", "MODEL", "--data", "DATA", "--output", "OUT")),
    "predict": (False, ("predict", "MODEL", "IMAGE")),
    "embed": (False, ("embed", "MODEL", "--data", "DATA", "--output", "OUT")),
    "compare": (False, ("compare", "MODEL", "CONVERTED", "--data", "DATA", "--output", "OUT")),
}
NEED_A_HEAD = ("evaluate", "predict", "compare")
# One says what there is to say of an export, which takes seconds.
EXPORTED = ("timm:FOLDER",)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Images by kind of names: of classes, and of classes as files without names call them."""
    root = tmp_path_factory.mktemp("images")
    named = make_colour_folder(root / "colours", count=10)
    shutil.copytree(named, root / "numbered")
    for index, name in enumerate(LABELS):
        (root / "numbered" / name).rename(root / "numbered" / f"LABEL_{index}")
    for path in root.glob("*/*/*.png"):
        with Image.open(path) as image:
            image.resize((32, 32)).save(path)
    return {"named": named, "unnamed": root / "numbered"}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, tuple[str, Path]]:
    """Kind -> what to give as --model, and the folder that `hf-vit convert` makes of it."""
    root, made = tmp_path_factory.mktemp("kinds"), {}
    for index, (kind, save) in enumerate(KINDS.items()):
        source, converted = save(root / f"saved-{index}"), root / f"converted-{index}"
        convert(source, converted)
        made[kind] = source, converted
    return made


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


# Where models are opened from outside, and where they become ours, every kind is tried; the commands that share this
# code are tried on three kinds by default: one converted on the way, one run by its library, and a file.
OF_EVERY_KIND = ("finetune", "predict")
THREE_KINDS = ("transformers ViT-hybrid", "timm folder", "original .npz")
CASES = [
    pytest.param(
        command,
        kind,
        id=f"{command}-{kind}",
        marks=[] if command in OF_EVERY_KIND or kind in (*THREE_KINDS, *EXPORTED) else pytest.mark.slow,
    )
    for command in COMMANDS
    for kind in KINDS
    if not (kind in (*HEADLESS, *NAMELESS) and command in NEED_A_HEAD)  # refused below
    and not (command in ("export", "page") and kind not in EXPORTED)
]


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_every_command_takes_every_kind(command, kind, kinds, data, tmp_path, capsys, monkeypatch):
    needs_ours, words = COMMANDS[command]
    source, converted = kinds[kind]
    images = data["unnamed" if kind in UNNAMED else "named"]
    places = {"MODEL": source, "DATA": images, "OUT": tmp_path / "out", "CONVERTED": converted}
    places |= {"IMAGE": next(images.glob("*/*.png")), "RUNTIME": save_runtime(tmp_path / "runtime")}
    monkeypatch.setattr("hf_vit.pages.runtime.FILES", SMALL_FILES)
    assert run(*(str(places.get(word, word)) for word in words)) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "converted on the way" in line]
    is_read_inside = command == "analyze" and "timm" in kind
    assert len(told) == (needs_ours or is_read_inside or kind not in RUN_BY_THEIR_LIBRARY)
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


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(("kind", "reason"), [(HEADLESS[0], "fine-tune it first"), (NAMELESS[0], "no named classes")])
def test_no_head_is_refused_in_one_line(command, kind, reason, kinds, data, tmp_path, capsys):
    places = {"MODEL": kinds[kind][0], "DATA": data["named"], "OUT": tmp_path / "out"}
    places["IMAGE"] = next(data["named"].glob("*/*.png"))
    assert run(*(str(places.get(word, word)) for word in COMMANDS[command][1])) == 1
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
    "another architecture": (_swin, "use it with transformers itself"),
    "no model of images": (_bert, "model_type 'bert'"),
    "no checkpoint": (_text, "give a .npz, .safetensors or PyTorch file"),
    "a name that timm does not know": (lambda folder: "timm:vit_imaginary", "timm.list_models() names what there is"),
    "an address": (lambda folder: "ftp://host/vit.npz", "give a path, or an address with https://"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_convert_is_refused_in_one_line(what, data, tmp_path, capsys):
    save, reason = REFUSED[what]
    source = save(tmp_path / "saved")
    for command in ("finetune", "pretrain", "cost"):
        places = {"MODEL": source, "DATA": data["named"], "OUT": tmp_path / "out"}
        assert run(*(str(places.get(word, word)) for word in COMMANDS[command][1])) == 1
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("hf-vit: ")
        assert reason in told
        assert not (tmp_path / "out").exists()
