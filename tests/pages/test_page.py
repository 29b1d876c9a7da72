"""`hf-vit page`: the folder, its graph beside the model, its description, and what it refuses."""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from huggingface_hub import RepoCard
from pages.models import FAMILIES, LABELS, save_classifier, save_runtime
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessor

from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.pages import making, runtime
from hf_vit.pages.description import preprocessing
from hf_vit.pages.graph import write_graph
from hf_vit.pages.making import make_page
from hf_vit_cli.main import main


@pytest.fixture
def runtime_files(tmp_path: Path) -> Path:
    return save_runtime(tmp_path / "runtime/package/dist")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("plain") / "model", "plain", "default")


def test_folder(plain: Path, runtime_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["page", str(plain), "--output", str(out), "--images", "digits", "--runtime", str(runtime_files)])
    assert ended.value.code == 0
    assert "python -m http.server" in capsys.readouterr().out
    page = json.loads((out / "page.json").read_text())
    (model,) = page["models"]
    assert model["labels"] == list(LABELS)
    assert model["bytes"] == (out / model["folder"] / "model.onnx").stat().st_size
    assert sorted(example["label"] for example in page["examples"]) == [str(digit) for digit in range(10)]
    with Image.open(out / page["examples"][3]["file"]) as example:
        assert example.mode == "RGB"
    assert {file.name for file in (out / "runtime").iterdir()} == set(runtime.FILES)
    assert {file.name for file in out.iterdir() if file.is_file()} == {*making.STATIC, "page.json", "README.md"}
    card = RepoCard.load(out / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() == {"title": "model", "sdk": "static", "app_file": "index.html"}


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        ("plain", "default"),
        ("plain", "rectangular"),
        ("plain", "causal_distillation"),
        ("plain", "registers_gap"),
        ("plain", "two_groups_of_three"),
        ("plain", "relative_bias"),
        ("hybrid", "default"),
        ("local", "default"),
        ("axial", "default"),
        ("mixer", "default"),
        ("axial_resnet", "default"),
        ("bit", "default"),
    ],
)
def test_graph_gives_what_the_model_does(family: str, choice: str, tmp_path: Path):
    """Attention is held against `attention_maps`, which computes it anew from queries and keys."""
    model = FAMILIES[family].build("classification", choice)
    kind = family_of(model.config.model_type)
    assert kind is not None
    image = FAMILIES[family].images(model.config, 1)
    with torch.no_grad():
        expected = model(image, output_hidden_states=True)
        maps = model.attention_maps(image) if kind.is_vit else {}
    names = write_graph(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    given = dict(zip(names, session.run(names, {"pixel_values": image.numpy()}), strict=True))
    np.testing.assert_allclose(given["logits"], expected.logits[0], atol=1e-4)
    for layer in maps:
        found = maps[layer]
        if isinstance(found, tuple):  # [1, A, lines, side, side]
            for name, lines in zip(("row", "column"), found, strict=True):
                np.testing.assert_allclose(given[f"{name}_attention_{layer}"], lines[0].transpose(0, 1), atol=1e-5)
        else:
            np.testing.assert_allclose(given[f"attention_{layer}"], found[0], atol=1e-5)
    if kind.has_tokens:
        for depth, hidden in enumerate(expected.hidden_states):
            np.testing.assert_allclose(given[f"hidden_{depth}"], hidden[0], atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": {"longest_edge": 16}}, "cannot resize to"),
        ({"resample": 1}, "resample=1"),
        ({"size": {"height": 8, "width": 16}}, "does not make images of 16x16 px"),
        ({"size": {"shortest_edge": 20}}, "does not make images of 16x16 px"),
        ({"do_resize": False}, "does not make images of 16x16 px"),
    ],
)
def test_preparation_that_the_page_does_not_know_is_refused(settings: dict[str, Any], words: str):
    processor = ViTImageProcessor(**{"size": {"height": 16, "width": 16}, **settings})
    with pytest.raises(UserError, match=words):
        preprocessing(processor, (16, 16))


def test_weights_of_half_the_precision(plain: Path, runtime_files: Path, tmp_path: Path):
    model = AutoModelForImageClassification.from_pretrained(plain).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    shutil.copy(plain / "preprocessor_config.json", tmp_path / "half")
    make_page([tmp_path / "half"], tmp_path / "out", runtime=runtime_files)
    session = onnxruntime.InferenceSession(str(tmp_path / "out/models/0/model.onnx"))
    image = torch.rand(1, 3, 16, 16)
    (logits,) = session.run(["logits"], {"pixel_values": image.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(logits, model.float()(image).logits[0], atol=1e-4)


def test_too_large_is_told_before_the_export(plain: Path, runtime_files: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(making, "LARGEST_BYTES", 10_000)
    monkeypatch.setattr(making, "write_graph", lambda *_: pytest.fail("it was exported"))
    with pytest.raises(UserError, match="too large for a browser: 0 MB of weights"):
        make_page([plain], tmp_path / "out", runtime=runtime_files)
    assert not (tmp_path / "out").exists()


def test_large_sizes():
    """L/16 at 224 px is 1.2 GB, B/16 fits with its maps."""
    from hf_vit import variant_config
    from hf_vit.pages.graph import numbers_inside

    base, large = variant_config("B/16"), variant_config("L/16", image_size=384)
    assert numbers_inside(base) == 12 * 12 * 197**2 + 13 * 196 * 768
    assert 4 * (86_567_656 + numbers_inside(base)) < making.LARGEST_BYTES < 4 * (304_326_632 + numbers_inside(large))


@pytest.mark.parametrize("choice", ["no_labels", "one_channel"])
def test_what_is_no_classifier_of_photographs_is_refused(choice: str, runtime_files: Path, tmp_path: Path):
    model = save_classifier(tmp_path / "model", "plain", choice)
    with pytest.raises(UserError, match=r"no image classifier|RGB"):
        make_page([model], tmp_path / "out", runtime=runtime_files)
    assert not (tmp_path / "out").exists()


def test_incomplete_runtime_is_refused_before_any_work(runtime_files: Path, tmp_path: Path):
    (runtime_files / "ort.wasm.min.mjs").unlink()
    with pytest.raises(UserError, match=r"has no ort\.wasm\.min\.mjs; give the folder dist of the npm package"):
        make_page(["no such model"], tmp_path / "out", runtime=runtime_files)
    assert not (tmp_path / "out").exists()


def test_runtime_is_fetched_and_checked(runtime_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = tmp_path / "runtime.tgz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(runtime_files.parent, "package")

    def fetched(url: str, *, checked_later: bool) -> Path:
        assert url == "https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-1.30.0.tgz"
        return archive

    monkeypatch.setattr(runtime, "download", fetched)
    monkeypatch.setattr(runtime, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    runtime.copy_runtime(tmp_path / "copied")
    for name in runtime.FILES:
        assert (tmp_path / "copied" / name).read_text() == f"contents of {name}"
    archive.write_bytes(archive.read_bytes() + b"forged")
    with pytest.raises(
        UserError, match=r"tgz is another file than it was; try again, or give the files with --runtime"
    ):
        runtime.copy_runtime(tmp_path / "again")
    assert not archive.exists()  # got anew next time


def test_our_scripts_are_small():
    folder = Path(making.__file__).parent / "static"
    assert sum(file.stat().st_size for file in folder.glob("*.js")) < 200_000
    assert "innerHTML" not in "".join(file.read_text() for file in folder.glob("*.js"))
