"""`hf-vit page` and `hf_vit.analysis.show`: what they write, which gives what the model does, and what they refuse."""

import base64
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from huggingface_hub import RepoCard
from pages import screenshot
from pages.browser import served
from pages.models import FAMILIES, LABELS, outputs_of, save_classifier
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    LevitImageProcessor,
    MobileViTImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from hf_vit import HfViTModel, variant_config
from hf_vit.analysis import show
from hf_vit.errors import UserError
from hf_vit.families import find_family
from hf_vit.pages import making
from hf_vit.pages.description import describe_model, describe_preprocessing
from hf_vit.pages.graph import count_inner_values, write_graph
from hf_vit.pages.making import make_page, shorten_names


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "FILES", SMALL_FILES)


@pytest.fixture
def runtime_files(small_files: None, tmp_path: Path) -> Path:
    return save_runtime(tmp_path / "runtime/dist")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("plain") / "model", "plain", "default")


def test_folder(plain: Path, runtime_files: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]):
    out = tmp_path / "out"
    code, told, _ = command("page", plain, "--output", out, "--images", "digits", "--runtime", runtime_files)
    assert (code, "python -m http.server" in told) == (0, True)
    page = json.loads((out / "page.json").read_text())
    (model,) = page["models"]
    assert model["labels"] == list(LABELS)
    assert model["bytes"] == (out / model["folder"] / "model.onnx").stat().st_size
    assert sorted(example["label"] for example in page["examples"]) == [str(digit) for digit in range(10)]
    with Image.open(out / page["examples"][3]["file"]) as example:
        assert example.mode == "RGB"
    assert {file.name for file in (out / "runtime").iterdir()} == set(making.FILES)
    assert {file.name for file in out.iterdir() if file.is_file()} == {*making.PAGE_FILES, "page.json", "README.md"}
    card = RepoCard.load(out / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() == {"title": "model", "sdk": "static", "app_file": "index.html"}


SLOW = [  # 2 to 8 s each in torch's exporter
    *(("plain", choice) for choice in ("default", "rectangular", "registers_gap", "relative_bias", "rotary")),
    *(("plain", choice) for choice in ("two_groups_of_three", "rotary_mixed", "rotary_registers")),
    *((family, "default") for family in ("hybrid", "local", "mixer", "axial_resnet", "bit")),
]
CASES = [("plain", "causal_distillation"), ("axial", "default")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("family", "choice"), CASES)
def test_graph_gives_what_the_model_does(family: str, choice: str, tmp_path: Path):
    """The model is computed in float64; attention is held against `attention_maps`, which computes it anew."""
    model = FAMILIES[family].build("classification", choice)
    kind = find_family(model.config.model_type)
    assert kind is not None
    image = FAMILIES[family].images(model.config, 1)
    names = write_graph(model, tmp_path / "model.onnx")
    exact, exact_image = model.double(), image.double()
    with torch.no_grad():
        expected = exact(exact_image, output_hidden_states=True)
        maps = exact.attention_maps(exact_image) if kind.is_vit else {}
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    given = dict(zip(names, session.run(names, {"pixel_values": image.numpy()}), strict=True))
    np.testing.assert_allclose(given["logits"], expected.logits[0], atol=1e-4)
    for name, wanted in outputs_of(maps).items():
        np.testing.assert_allclose(given[name], wanted, atol=1e-5)
    if kind.has_tokens:
        for depth, hidden in enumerate(expected.hidden_states):
            np.testing.assert_allclose(given[f"hidden_{depth}"], hidden[0], atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": {"longest_edge": 16}}, "the page cannot compute: size="),
        ({"resample": 1}, "resample=LANCZOS"),
        ({"size": {"height": 8, "width": 16}}, "does not return images of 16x16 px"),
        ({"size": {"shortest_edge": 20}}, "the page cannot compute: size="),
        ({"do_resize": False}, "do_resize=False without a crop"),
    ],
)
def test_preparation_that_the_page_does_not_know_is_refused(settings: dict[str, Any], words: str):
    processor = ViTImageProcessor(**{"size": {"height": 16, "width": 16}, **settings})
    with pytest.raises(UserError, match=words):
        describe_preprocessing(processor, (16, 16))


@pytest.mark.parametrize(("kind", "step"), [(LevitImageProcessor, "resize"), (MobileViTImageProcessor, "preprocess")])
def test_steps_of_other_processors_are_refused(kind: Any, step: str):
    """LeViT resizes to 256 / 224 of its size, MobileViT swaps the channels."""
    processor = kind(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    with pytest.raises(UserError, match=rf"cannot compute: {kind.__name__} \(which overrides {step}\); change"):
        describe_preprocessing(processor, (16, 16))


def test_one_mean_holds_for_all_channels():
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.5], image_std=[0.25])
    steps = describe_preprocessing(processor, (16, 16))
    assert (steps["mean"], steps["std"]) == ([0.5] * 3, [0.25] * 3)


def test_models_of_one_name_are_told_apart_without_their_place(tmp_path: Path):
    ann, bob = (tmp_path / name / "model" for name in ("ann", "bob"))
    ann.mkdir(parents=True)
    assert shorten_names([ann, bob, "alice/vit"]) == ["ann/model", "bob/model", "vit"]
    assert shorten_names([ann, bob, bob]) == ["ann/model", "model (2)", "model (3)"]
    assert shorten_names([ann / ".." / "model"]) == ["model"]
    assert shorten_names(["timm:vit_tiny"]) == ["timm:vit_tiny"]


def test_what_is_no_share_is_no_figure(plain: Path, tmp_path: Path):
    """facts.json of a stranger."""
    model, processor = AutoModelForImageClassification.from_pretrained(plain), ViTImageProcessor.from_pretrained(plain)
    for value in (10**400, 96.94, float("nan"), [1]):
        values = {"top1": 0.5, "ece": value, "images_per_second": value}
        record = {"kind": "evaluation", "command": "x", "date": "2031-02-03T00:00:00Z", "values": values}
        (tmp_path / "facts.json").write_text(json.dumps([record]))
        told = describe_model(model, processor, "model", tmp_path)
        figures = {figure["name"]: figure["value"] for figure in told["figures"]}
        assert figures == {"Accuracy": "50.0%"} | ({"Speed": "97 images/s"} if value == 96.94 else {})


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


def test_large_sizes():
    """L/16 at 384 px is 1.2 GB, B/16 fits with its maps."""
    base, large = variant_config("B/16"), variant_config("L/16", image_size=384)
    assert count_inner_values(base) == 12 * 12 * 197**2 + 13 * 196 * 768
    assert 4 * (86_567_656 + count_inner_values(base)) < making.MAX_BYTES
    assert 4 * (304_326_632 + count_inner_values(large)) > making.MAX_BYTES


def test_refusals_come_before_the_export(plain: Path, runtime_files: Path, tmp_path: Path, monkeypatch: Any):
    """What is too large, no classifier of photographs, and another runtime."""
    monkeypatch.setattr(making, "write_graph", lambda *_: pytest.fail("it was exported"))

    def refuse(model: object, words: str) -> None:
        with pytest.raises(UserError, match=words):
            make_page([str(model)], tmp_path / "out", runtime=runtime_files)
        assert not (tmp_path / "out").exists()

    diverged = AutoModelForImageClassification.from_pretrained(plain)
    torch.nn.init.constant_(diverged.classifier.weight, torch.nan)
    diverged.save_pretrained(shutil.copytree(plain, tmp_path / "diverged"))
    refuse(tmp_path / "diverged", "NaN or infinite, so it cannot be shown; use a checkpoint from before")
    for choice in ("no_labels", "one_channel"):
        refuse(save_classifier(tmp_path / choice, "plain", choice), "not an image classifier|RGB")
    with monkeypatch.context() as patched:
        patched.setattr(making, "MAX_BYTES", 10_000)
        refuse(plain, "too large for a browser: 0 MB of weights")
    (runtime_files / "ort.webgpu.min.mjs").write_text("of another version")
    refuse("no such model", r"has another version of ort\.webgpu\.min\.mjs than 1\.30\.0; give")
    (runtime_files / "ort.wasm.min.mjs").unlink()
    refuse("no such model", r"has no ort\.wasm\.min\.mjs; give the folder dist of the npm package")


@pytest.mark.usefixtures("small_files")
def test_runtime_is_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a server on this machine, in the place of the public one."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    on_server = save_runtime(tmp_path / "server")
    with served(on_server) as address:
        monkeypatch.setattr(making, "BASE_URL", address.rstrip("/"))
        forged = on_server / "ort-wasm-simd-threaded.wasm"
        forged.write_text("forged")
        with pytest.raises(UserError, match=r"simd-threaded\.wasm is wrong; try again, or give"):
            making.copy_runtime(tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
        assert "forged" not in [file.read_text() for file in (tmp_path / "cache").rglob("ort*")]  # got anew next time
        forged.unlink()
        with pytest.raises(UserError, match=r"wasm cannot be downloaded: .*; or give .* as --runtime DIR"):
            making.copy_runtime(tmp_path / "refused")
        forged.write_text(f"contents of {forged.name}")
        making.copy_runtime(tmp_path / "copied")
    making.copy_runtime(tmp_path / "again")  # without the server
    for copy, name in itertools.product(("copied", "again"), SMALL_FILES):
        assert (tmp_path / copy / name).read_text() == f"contents of {name}"
    assert len(list((tmp_path / "cache").rglob("ort*"))) == len(SMALL_FILES)


def test_address_and_files_of_the_runtime():
    """What the lock file of the page's own packages says of the version, which the browser's tests run."""
    lock = json.loads((Path(__file__).parents[2] / "page/package-lock.json").read_text())
    version = lock["packages"]["node_modules/onnxruntime-web"]["version"]
    assert f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{version}/dist" == making.BASE_URL
    assert [len(sha256) for sha256 in making.FILES.values()] == [64] * 6


def test_the_picture_is_of_the_page_as_it_is():
    with Image.open(screenshot.PICTURE) as picture:
        assert picture.info["sources"] == screenshot.sources(), "docs/images/page.png is stale: run make page"


TINY = {"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HOSTILE = ("<script>alert(1)</script>", "</script><b>", '"><img src=x>')


def test_page_is_one_file_whose_words_are_data(tmp_path: Path):
    model = save_classifier(tmp_path / "model", "plain", "default", HOSTILE)
    shown = show(str(model), Image.effect_noise((20, 30), 80))
    shown.save(tmp_path / "shown.html")
    page = (tmp_path / "shown.html").read_text()
    assert re.findall(r"(?:src|href)=.(?!data:)", page.partition("<style>")[0]) == []
    assert page.count("<script") == page.count("</script>") == 2
    assert r"\u003cscript>alert(1)" in page
    assert shown._repr_html_().count("<") == 2  # a frame, which holds all else as text


def test_attention_implementation_stays(plain: Path):
    options = {"attn_implementation": "sdpa", "dtype": torch.bfloat16}
    model = AutoModelForImageClassification.from_pretrained(plain, **options).eval()
    show((model, AutoImageProcessor.from_pretrained(plain)), Image.new("RGB", (16, 16)))
    assert model.config._attn_implementation == "sdpa"


def _pictures_of(page: str) -> list[Image.Image]:
    assert "<script" not in page
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(each))) for each in found]


def test_what_has_no_page_is_shown_in_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No classifier, one of transformers, values, one too large, and a processor that the page cannot follow."""
    folder = save_classifier(tmp_path / "<b>model", "plain", "default")
    HfViTModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    shutil.copy(folder / "preprocessor_config.json", tmp_path / "bare")
    image = Image.effect_noise((20, 30), 80)
    nearest = AutoImageProcessor.from_pretrained(folder, resample=0)
    theirs = Dinov2ForImageClassification(Dinov2Config(**TINY)).eval()
    shown = [show(str(tmp_path / "bare"), image), show((theirs, AutoImageProcessor.from_pretrained(folder)), image)]
    shown.append(show((AutoModelForImageClassification.from_pretrained(folder).eval(), nearest), image))
    values = AutoModelForImageClassification.from_pretrained(folder, problem_type="regression").eval()
    shown.append(show((values, AutoImageProcessor.from_pretrained(folder)), image))
    monkeypatch.setattr("hf_vit.analysis.showing._MAX_BYTES", 10)
    shown.append(show(str(folder), image))
    for each in shown:
        pictures = _pictures_of(each.page)
        assert len(pictures) >= 2
        assert all(len(picture.convert("L").getcolors(256) or []) > 10 for picture in pictures)
    assert "<b>" not in shown[-1].page


def test_what_has_neither_page_nor_attention_is_refused(tmp_path: Path):
    model = ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    with pytest.raises(UserError, match=r"cannot be shown \(only classifiers .*\), and its attention cannot be drawn"):
        show((model, processor), Image.new("RGB", (16, 16)))


def test_broken_image_is_told(plain: Path, tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.png cannot be read as an image: .*; give another file"):
        show(str(plain), tmp_path / "broken.png")
