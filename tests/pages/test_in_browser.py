"""The page in Chromium gives what the model gives in Python, from the file to the last number. See `make browser`."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub.conftest import training_record
from pages.browser import NODE, PAGE, RUNTIME, Browser, browser, served
from pages.models import FAMILIES, outputs_of, save_classifier, save_images, save_photographs
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.analysis import show
from hf_vit.analysis.analysis import TokenLayout
from hf_vit.analysis.positions import compute_position_similarity, get_patch_positions
from hf_vit.analysis.rollout import add_rollout_layer
from hf_vit.data import make_processor
from hf_vit.data.images import to_rgb
from hf_vit.pages import making
from hf_vit.pages.description import describe_model
from hf_vit.pages.making import make_page
from hf_vit.results.facts import DataFact, Facts

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "&lt;b&gt;\u202e")
CROPPED = {"size": {"shortest_edge": 24}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "default", {}),
    "registers": ("plain", "registers_gap", {"resample": 3}),
    "rotary like EVA-02": ("plain", "rotary_gap", {}),
    "rotary mixed": ("plain", "rotary_mixed", {}),
    "axial": ("axial", "default", {"resample": 3, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}),
    "hybrid": ("hybrid", "default", {}),
    "mixer": ("mixer", "default", {}),
    "bit": ("bit", "default", {}),
    "cropped": ("plain", "causal", CROPPED),
    "cropped bicubic": ("plain", "default", {**CROPPED, "resample": 3}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_images(tmp_path_factory.mktemp("images") / "images")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_committed_scripts_are_those_of_the_sources(tmp_path: Path):
    subprocess.run([NODE, "build.mjs", tmp_path], cwd=PAGE, check=True)
    committed = Path(making.__file__).parent / "static"
    same, other, missing = filecmp.cmpfiles(tmp_path, committed, making.PAGE_FILES, shallow=False)
    assert (sorted(same), other, missing) == (sorted(making.PAGE_FILES), [], [])


@pytest.mark.parametrize(("query", "head"), [(None, None), (5, None), (5, 1)])
@pytest.mark.parametrize(
    ("family", "choice"),
    [
        *(("plain", "default"), ("plain", "causal_distillation"), ("plain", "rotary"), ("axial", "default")),
        ("plain", "gap_with_class_token"),
    ],
)
def test_maps_are_those_of_analyze(family: str, choice: str, query: int | None, head: int | None):
    model = FAMILIES[family].build("classification", choice)
    image = FAMILIES[family].images(model.config, 1)
    with torch.no_grad():
        hidden, maps = model(image, output_hidden_states=True).hidden_states[1], model.attention_maps(image)
    about = describe_model(model, make_processor(model.config), "tiny", None)
    outputs = {"hidden_1": hidden[0], **outputs_of(maps)}
    positions = get_patch_positions(model)
    if positions is not None:
        outputs["positions"] = positions.flatten(0, 1)
    given = _maps_of(about, outputs, query, head)
    patches = TokenLayout(model)

    def asked(rows: torch.Tensor) -> torch.Tensor:
        """Of [N, N] to the patches: from the patch, from a pooled class token, or the mean of all patches."""
        mine = rows[:, patches.patch_tokens]
        if query is not None:
            return mine[patches.patch_tokens][query]
        return mine[patches.patch_tokens].mean(0) if patches.output_token is None else mine[patches.output_token]

    rolled = None
    for layer in maps:
        rolled = add_rollout_layer(rolled, maps, layer, 0.5)
    assert rolled is not None
    np.testing.assert_allclose(given["rollout"], asked(rolled[0]), atol=1e-6)
    heads = slice(None) if head is None else [head]
    if about["attention"] == "full" or query is None:
        expected = asked(maps.dense(1)[0, heads].mean(0))
    else:
        expected = _cross(*(lines[0, heads].mean(0) for lines in maps[1]), query).flatten()
    np.testing.assert_allclose(given["attention"], expected, atol=1e-6)
    vectors = hidden[0, patches.patch_tokens]
    of = vectors.mean(0) if query is None else vectors[query]
    np.testing.assert_allclose(given["features"], torch.cosine_similarity(of[None], vectors), atol=1e-5)
    if positions is not None and query is not None:
        expected = compute_position_similarity(positions).flatten(2).flatten(0, 1)[query]
        np.testing.assert_allclose(given["positions"], expected, atol=1e-5)


def _cross(rows: torch.Tensor, columns: torch.Tensor, query: int) -> torch.Tensor:
    """[h, w] of the row and the column that a patch sees, [h, w, w] and [w, h, h]; where they meet the larger share."""
    row, column = divmod(query, len(columns))
    seen = torch.zeros(len(rows), len(columns))
    seen[row], seen[:, column] = rows[row, column], columns[column, row]
    seen[row, column] = max(rows[row, column, column], columns[column, row, row])
    return seen


def _maps_of(
    about: dict[str, Any], outputs: dict[str, torch.Tensor], query: int | None, head: int | None
) -> dict[str, list[float]]:
    written = {name: {"dims": list(each.shape), "data": each.flatten().tolist()} for name, each in outputs.items()}
    asked = {"model": about | {"outputs": list(outputs)}, "outputs": written, "query": query, "layer": 1, "head": head}
    command = [NODE, "tests/maps.mjs"]
    done = subprocess.run(command, cwd=PAGE, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_python(kind: str, files: list[Path], window: Browser, tmp_path: Path):
    family, choice, settings = KINDS[kind]
    folder = save_classifier(tmp_path / "model", family, choice, **settings)
    make_page([folder], tmp_path / "page", runtime=RUNTIME)
    model = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    with served(tmp_path / "page") as address:
        window("said")
        window("open", url=address)
        for file in files:
            window("give", file=str(file))
            (given,) = window.results()
            with Image.open(file) as opened:
                expected = processor(images=to_rgb(opened), return_tensors="pt")["pixel_values"]
            assert_equal(given, expected, model, processor.image_std)
        said = window("said")
    assert any(request.endswith(".wasm") for request in said["requests"])
    assert [request for request in said["requests"] if not request.startswith((address, f"blob:{address}"))] == []
    assert said["errors"] == []


def test_files_are_decoded_as_python_does(window: Browser, tmp_path: Path):
    """Every pixel, of images that nothing resizes; and what a trained model then says of them."""
    torch.manual_seed(0)
    sizes = {"image_size": (96, 64), "patch_size": 16, "hidden_size": 16, "num_hidden_layers": 1}
    HfViTForImageClassification(HfViTConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "model")
    processor = ViTImageProcessor(do_resize=False, do_center_crop=True, crop_size={"height": 96, "width": 64})
    processor.save_pretrained(tmp_path / "model")
    alike, rounded = save_photographs(tmp_path / "images")
    for name, folder in (("cropped", tmp_path / "model"), ("digits", ROOT / "model_cards/vit-digits")):
        make_page([folder], tmp_path / name, runtime=RUNTIME)
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        processor = AutoImageProcessor.from_pretrained(folder)
        with served(tmp_path / name) as address:
            window("open", url=address)
            for file in alike + rounded:
                window("give", file=str(file))
                (given,) = window.results()
                with Image.open(file) as opened:
                    expected = processor(images=to_rgb(opened), return_tensors="pt")["pixel_values"]
                off = levels_off(given, expected, processor.image_std)
                assert off.max() < (1e-3 if file in alike else 1.001), file
                with torch.no_grad():
                    logits = model(expected).logits[0]
                np.testing.assert_allclose(given["outputs"]["logits"], logits, atol=1e-5 if file in alike else 0.03)


def levels_off(given: dict[str, Any], expected: torch.Tensor, std: Sequence[float]) -> np.ndarray:
    """How far pixels are from Python's, in steps of the 256."""
    pixels = given["pixels"].reshape(expected.shape[1:])
    return np.abs(pixels - expected[0].numpy()) * np.array(std)[:, None, None] * 255


def assert_equal(given: dict[str, Any], expected: torch.Tensor, model: Any, std: Sequence[float]) -> None:
    assert levels_off(given, expected, std).max() < 1e-3  # no pixel is another
    with torch.no_grad():
        output = model(expected, output_hidden_states=True)
        maps = model.attention_maps(expected) if hasattr(model, "attention_maps") else {}
    np.testing.assert_allclose(given["outputs"]["logits"], output.logits[0], atol=1e-4, rtol=1e-4)
    for name, wanted in outputs_of(maps).items():
        np.testing.assert_allclose(given["outputs"][name], wanted, atol=1e-4)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of a page of two models: a plain one with hostile labels beside an axial one."""
    root = tmp_path_factory.mktemp("hostile")
    plain = save_classifier(root / "<img src=x onerror=alert(2)>", "plain", "default", HOSTILE)
    axial = save_classifier(root / "axial", "axial", "default")
    record = training_record(kind="evaluation", values={"top1": 0.5, "ece": 0.0625, "images_per_second": 1234.4})
    record.data = DataFact(name="<b>digits</b>", split="test", size=360)
    Facts(records=[record]).save(plain)
    make_page([plain, axial], root / "page", images="digits", runtime=RUNTIME)
    with served(root / "page") as address:
        yield address


def test_words_of_a_model_are_text(hostile: str, window: Browser):
    window("said")
    window("open", url=hostile)
    window.results(2)
    shown = window.text()
    for label in HOSTILE:
        assert label in shown
    assert "<img src=x onerror=alert(2)>" in shown
    assert "of 360 images (<b>digits</b>, test)" in shown
    assert "50.0%" in shown
    assert "6.2%" in shown
    assert "1,234 images/s" in shown
    assert window("evaluate", script="document.querySelectorAll('main img, main script, main b').length") == 0
    assert window("said")["errors"] == []


def test_patches_are_painted_away_live(hostile: str, window: Browser):
    """In both models at once, by the keyboard; what is fed then is the image with the mean colour there."""
    window("open", url=hostile)
    before = {result["model"]: result for result in window.results(2)}
    for key in ("ArrowRight", "ArrowRight", "Space"):  # the first patch, the second, hidden
        window("press", selector=".stage", key=key)
    after = {result["model"]: result for result in window.results(2)}
    for model, result in after.items():
        clear, hidden = (each["pixels"].reshape(3, 16, 16) for each in (before[model], result))
        expected = clear.copy()
        expected[:, :4, 4:8] = clear.mean(axis=(1, 2))[:, None, None]
        np.testing.assert_allclose(hidden, expected, atol=1e-5)
        assert not np.array_equal(result["outputs"]["logits"], before[model]["outputs"]["logits"])
    assert "1 patch is hidden" in window("evaluate", script="document.querySelector('.stage').ariaLabel")
    window("press", selector=".sliders label:nth-child(1) input", key="Home")  # a layer that was not computed again
    (whole,) = window.results()
    np.testing.assert_array_equal(whole["pixels"], after[whole["model"]]["pixels"])
    assert whole["outputs"].keys() == before[whole["model"]]["outputs"].keys()
    window("click", selector="#restore")
    for result in window.results(2):
        np.testing.assert_array_equal(result["pixels"], before[result["model"]]["pixels"])


def test_pointer_looks_and_paints(hostile: str, window: Browser):
    """Over the sixth patch of 4x4: what it sees, then it and those on the way to the twelfth are painted away."""
    window("open", url=hostile)
    before = next(result["pixels"] for result in window.results(2)).reshape(3, 16, 16)
    left, top, width, height = window("evaluate", script=PLACE)
    at = [(left + width * (column + 0.5) / 4, top + height * (row + 0.5) / 4) for row, column in ((1, 1), (1, 3))]
    window("move", selector=".stage", x=width * 1.5 / 4, y=height * 1.5 / 4)
    assert "Attention from row 2, column 2, highest" in window("evaluate", script=LABEL)
    window("click", selector="#paint")
    assert "Attention from the class token" in window("evaluate", script=LABEL)
    window("drag", **{"from": at[0], "to": at[1]})
    expected = before.copy()
    expected[:, 4:8, 4:16] = before.mean(axis=(1, 2))[:, None, None]
    while not np.allclose(window.results()[-1]["pixels"].reshape(3, 16, 16), expected, atol=1e-5):
        pass  # on the way there; without an end in sight `results` fails
    assert "3 patches are hidden" in window("evaluate", script=LABEL)


def test_any_layer_and_head(hostile: str, window: Browser):
    """By the sliders: the first layer's last head, from the first patch, is highest where torch says."""
    window("open", url=hostile)
    (fed,) = (result["pixels"] for result in window.results(2) if result["model"] != "axial")
    window("press", selector=".sliders label:nth-child(1) input", key="Home")
    window("press", selector=".sliders label:nth-child(2) input", key="End")
    window("press", selector=".stage", key="ArrowRight")
    model = FAMILIES["plain"].build("classification", "default")
    maps = model.attention_maps(torch.tensor(fed).reshape(1, 3, 16, 16))
    row, column = divmod(int(maps[0][0, -1, 1, 1:].argmax()), 4)
    assert window.text(".sliders").split() == ["Layer", "1", "Head", "4"]
    assert f"from row 1, column 1, highest at row {row + 1}, column {column + 1}" in window("evaluate", script=LABEL)


LABEL = "document.querySelector('.stage').ariaLabel"
PLACE = """
(() => {
  const { left, top, width, height } = document.querySelector(".stage").getBoundingClientRect();
  return [left, top, width, height];
})()
"""
GIVEN = """
(async () => {
  const given = new DataTransfer();
  given.items.add(new File([await (await fetch("examples/1.png")).blob()], "one.png", { type: "image/png" }));
  document.body.dispatchEvent(%s);
})()
"""


@pytest.mark.parametrize(
    "event",
    [
        "new DragEvent('drop', { dataTransfer: given, bubbles: true })",
        "new ClipboardEvent('paste', { clipboardData: given, bubbles: true })",
    ],
)
def test_images_are_dropped_and_pasted(event: str, hostile: str, window: Browser):
    window("open", url=hostile)
    window.results(2)
    window("click", selector="#examples button:nth-child(2)")
    chosen = {result["model"]: result["pixels"] for result in window.results(2)}
    window("click", selector="#examples button:nth-child(1)")
    window.results(2)
    window("evaluate", script=GIVEN % event)
    for result in window.results(2):
        np.testing.assert_array_equal(result["pixels"], chosen[result["model"]])


def test_the_last_image_stays(hostile: str, window: Browser, tmp_path: Path):
    """A large one takes longer to read than a small one that comes after it."""
    window("open", url=hostile)
    window.results(2)
    window("click", selector="#examples button:nth-child(2)")
    small = {result["model"]: result["pixels"] for result in window.results(2)}
    Image.effect_noise((5000, 5000), 90).save(tmp_path / "large.png")
    window("give", file=str(tmp_path / "large.png"))
    window("click", selector="#examples button:nth-child(2)")
    time.sleep(4)  # the large one comes within this time, if it comes
    for result in window.results(2)[-2:]:
        np.testing.assert_array_equal(result["pixels"], small[result["model"]])


def test_camera(hostile: str, window: Browser):
    """Chromium's false one: a green picture with a clock; the camera is off when the dialog is closed."""
    window("open", url=hostile)
    window.results(2)
    window("click", selector="#camera")
    window("wait", selector="#shot[open]")
    window("evaluate", script="new Promise((seen) => document.querySelector('#video').requestVideoFrameCallback(seen))")
    window("click", selector="#take")
    red, green, blue = window.results(2)[0]["pixels"].reshape(3, -1).mean(axis=1)
    assert green > max(red, blue)
    assert window("evaluate", script="document.querySelector('#video').srcObject === null")


def test_models_are_picked(window: Browser, tmp_path: Path):
    """Of three models two are side by side, or those that the address names; each place takes another, of the image."""
    for name in ("plain", "mixer", "bit"):
        save_classifier(tmp_path / name, name, "default")
    make_page(
        [tmp_path / name for name in ("plain", "mixer", "bit")], tmp_path / "page", images="digits", runtime=RUNTIME
    )
    with served(tmp_path / "page") as address:
        window("open", url=f"{address}#model=bit&model=none")
        assert [result["model"] for result in window.results()] == ["bit"]
        assert window("evaluate", script="document.querySelectorAll('.panel select').length") == 1
        window("open", url=address)
        assert {result["model"] for result in window.results(2)} == {"plain", "mixer"}
        window("pick", selector=".panel:nth-child(2) select", value="2")
        (picked,) = window.results()
        assert picked["model"] == "bit"
        assert list(picked["outputs"]) == ["logits"]
        window("click", selector="#examples button:nth-child(3)")
        assert {result["model"] for result in window.results(2)} == {"plain", "bit"}


def test_every_view_is_told_in_words(hostile: str, window: Browser):
    window("open", url=hostile)
    window.results(2)
    labels = []
    for view in ("attention", "rollout", "features", "positions"):
        window("click", selector=f"#views input[value={view}]")
        window("press", selector=".stage", key="ArrowRight")
        labels.append(window("evaluate", script="document.querySelector('.stage').ariaLabel"))
        assert "from row 1, column" in labels[-1]
        assert "highest at row" in labels[-1]
        assert "row 1, column" in window.text(".legend")
    assert [label.split(". ")[1].split(" ")[0] for label in labels] == ["Attention", "Rollout", "Features", "Positions"]


def test_broken_image_is_told_in_a_sentence(hostile: str, window: Browser, tmp_path: Path):
    window("open", url=hostile)
    window.results(2)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    window("give", file=str(tmp_path / "broken.png"))
    window("wait", selector="#notice:not([hidden])")
    assert window.text("#notice") == "The browser cannot read this file as an image. Try a JPEG, PNG or WebP file."
    window("click", selector="#examples button")
    window.results(2)
    assert window("evaluate", script="document.querySelector('#notice').hidden")


def test_nothing_is_wider_than_a_phone(hostile: str, window: Browser, tmp_path: Path):
    window("open", url=hostile)
    window.results(2)
    for scheme in ("light", "dark"):
        window("look", file=str(tmp_path / f"{scheme}.png"), width=360, height=740, scheme=scheme)
        assert window("evaluate", script="document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize(("family", "choice"), [("plain", "registers_gap"), ("axial", "default"), ("mixer", "default")])
def test_still_page_in_a_frame(family: str, choice: str, files: list[Path], window: Browser, tmp_path: Path):
    """`hf_vit.analysis.show`: in a sandboxed frame, as a notebook has it, and with no request at all."""
    folder = save_classifier(tmp_path / "model", family, choice, HOSTILE)
    shown = show(str(folder), files[5])
    (tmp_path / "notebook").mkdir()
    (tmp_path / "notebook/index.html").write_text(f"<!doctype html><link rel=icon href=data:,>{shown._repr_html_()}")
    window("said")
    with served(tmp_path / "notebook") as address:
        window("open", url=address)
        names, shares = (window("inFrame", selector=f".classes .{part}") for part in ("name", "share"))
        said = window("said")
    assert [request for request in said["requests"] if not request.startswith("data:")] == [address]
    assert said["errors"] == []
    with Image.open(files[5]) as opened:
        expected = _answer(folder, opened)
    assert names == list(expected)
    np.testing.assert_allclose([float(share.rstrip("%")) for share in shares], list(expected.values()), atol=0.2)


def test_the_documentation_holds_the_page_of_the_digits(window: Browser, tmp_path: Path):
    """Built as it is for everyone, opened below another folder of its host: its first page runs the model."""
    site = tmp_path / "somebody/hf_vit"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    folder = ROOT / "model_cards/vit-digits"
    with Image.open(site / "models/live/examples/0.png") as example:
        expected = _answer(folder, example)
    window("said")
    with served(tmp_path) as address:
        window("open", url=f"{address}somebody/hf_vit/index.html")
        window("evaluate", script="document.querySelector('iframe').scrollIntoView()")
        names, shares = (window("inFrame", selector=f".classes .{part}") for part in ("name", "share"))
        assert "in WebAssembly" in window("inFrame", selector=".status")[0]
        said = window("said")
    assert [request for request in said["requests"] if not request.startswith((address, f"blob:{address}"))] == []
    assert said["errors"] == []
    assert names == list(expected)[:5]
    np.testing.assert_allclose([float(each.rstrip("%")) for each in shares], list(expected.values())[:5], atol=0.06)


def _answer(folder: Path, image: Image.Image) -> dict[str, float]:
    """Classes in words, the most likely first, with percentages."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**AutoImageProcessor.from_pretrained(folder)(images=to_rgb(image), return_tensors="pt")).logits
    shares = logits[0].softmax(0).sort(descending=True)
    percentages = (100 * shares.values).tolist()
    return {model.config.id2label[int(at)]: each for at, each in zip(shares.indices, percentages, strict=True)}


@pytest.mark.parametrize("passes", [0, 1])
def test_a_graphics_card_that_fails_is_left(passes: int, window: Browser, tmp_path: Path):
    """WebGPU opens a model, and fails in its first pass or after it; then WebAssembly answers."""
    folder = save_classifier(tmp_path / "model", "plain", "default")
    make_page([folder], tmp_path / "page", images="digits", runtime=RUNTIME)
    failing = f"left: {passes}, async run() {{ if (this.left-- < 1) throw new Error('device lost'); }}"
    opening = f"InferenceSession = {{ create: async () => ({{ {failing} }}) }}"
    (tmp_path / "page/runtime/ort.webgpu.min.mjs").write_text(
        f"export const env = {{ wasm: {{}} }}, Tensor = Array, {opening};"
    )
    worker = tmp_path / "page/worker.js"
    adapter = "Object.defineProperty(navigator, 'gpu', { value: { requestAdapter: async () => ({}) } });"
    worker.write_text(adapter + worker.read_text())
    with served(tmp_path / "page") as address:
        window("open", url=address)
        window.results()
        assert "in WebAssembly" in window.text(".status")


def test_a_page_that_was_made_again_is_read_again(window: Browser, tmp_path: Path):
    """Its files do not say how long they stay, so that browsers keep those that have long been unchanged."""
    folder = save_classifier(tmp_path / "model", "plain", "default")
    logits: list[Any] = []
    with served(tmp_path) as address:
        for version in (1, 2):
            make_page([folder], tmp_path / "page", images="digits", runtime=RUNTIME)
            for file in (tmp_path / "page").rglob("*.*"):
                os.utime(file, (version * 5e8, version * 5e8))
            window("open", url=f"{address}page/")
            logits += [result["outputs"]["logits"] for result in window.results()]
            model = AutoModelForImageClassification.from_pretrained(folder)
            with torch.no_grad():
                model.classifier.weight.mul_(2)
                model.classifier.bias.mul_(2)
            model.save_pretrained(folder)
            shutil.rmtree(tmp_path / "page")
    np.testing.assert_allclose(logits[1], 2 * logits[0], atol=1e-4)


def test_browser_without_webassembly_is_told(hostile: str, window: Browser):
    window("without", name="WebAssembly")
    window("open", url=hostile)
    window("wait", selector="#notice:not([hidden])")
    assert "This browser cannot run the model" in window.text("#notice")
