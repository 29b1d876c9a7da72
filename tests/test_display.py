"""What Python shows of data and results: a line that says what it is, and a table in notebooks; and the notebook."""

import html
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from training.conftest import make_colour_folder

import hf_vit
from hf_vit.data import load_data
from hf_vit.evaluation import embed
from hf_vit.results.facts import Facts

ROOT = Path(__file__).parents[1]
CLASSES = {"<b>bold": (230, 40, 40), "green & grey": (40, 200, 40)}


def read(page: str) -> tuple[set[str], list[str]]:
    """Return the elements of a page, and the texts in them."""
    texts = [html.unescape(text) for text in re.split("<[^>]+>", page) if text]
    return set(re.findall(r"<(\w+)", page)), texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_colour_folder(tmp_path_factory.mktemp("images") / "colours", count=10, colours=CLASSES)


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    """What the doors of the package give, one after the other: `finetune` as its docstring says."""
    root = tmp_path_factory.mktemp("results")
    data, short = str(folder), dict(steps=2, batch_size=4, evaluations=1, seed=3, device="cpu", image_size=8)
    config = hf_vit.HfViTConfig(
        image_size=12, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = root / "tuned"
    return {
        "data": load_data(data),
        "finetune": hf_vit.finetune(config, data, model, **short),
        "pretrain": hf_vit.pretrain(config, data, root / "pretrained", **short),
        "evaluate": hf_vit.evaluate(str(model), data),
        "result": hf_vit.evaluate(str(model), data, protocol="few-shot", shots=[1], trials=1).result,
        "analyze": hf_vit.analyze(str(model), data, root / "analysis", only=["patch_filters"], num_images=2),
        "export": hf_vit.export(model, root / "timm", "timm"),
        "convert": hf_vit.convert("tests/golden/vit_tok.ckpt.npz", root / "converted"),
        "embed": embed(str(model), data, root / "embedded"),
    }


def test_everything_shows_itself_in_a_line_and_a_table(results):
    for name, result in results.items():
        line = repr(result)
        assert line.startswith(f"{type(result).__name__}("), name
        assert "\n" not in line, name
        assert len(line) < 400, name
        elements, texts = read(result._repr_html_())
        assert elements == {"table", "caption", "tr", "th", "td"}, f"{name}: what stands in it is text"
        assert texts[0] == type(result).__name__


def test_the_line_says_what_it_is(results):
    train = len(results["data"].split("train"))
    assert 10 < train < 20
    assert repr(results["data"]).startswith(f"ImageData(name: colours, train: {train} images, ")
    assert "classes: 2 (<b>bold, green & grey)" in repr(results["data"])
    assert "<b>bold, green & grey" in " ".join(read(results["data"]._repr_html_())[1])
    tuned = results["finetune"]
    assert f"test accuracy: {tuned.test.top1:.2%} of {tuned.test.num_images} images" in repr(tuned)
    assert f"top-1 accuracy: {results['evaluate'].result.top1:.2%}" in repr(results["evaluate"])
    assert "keys: 56 used, 0 ignored" in repr(results["convert"])


def test_functions_do_what_their_commands_do(results, folder, tmp_path):
    """The facts tell of evaluation and analysis, and the card was rendered anew."""
    model = results["finetune"].folder
    kinds = [record.kind for record in Facts.load(model).records]
    assert kinds == ["training", "evaluation", "evaluation", "evaluation", "analysis"]
    assert "few-shot" in (model / "README.md").read_text().lower()
    images = sorted(folder.glob("*/*.png"))[:2]
    answers = hf_vit.predict(str(model), images, top=1)
    assert [answer.image for answer in answers] == [str(image) for image in images]
    assert hf_vit.predict(str(model), images[0], top=1) == answers[:1]
    assert hf_vit.predict(str(model), str(folder / "*/*.png"), output=tmp_path / "all.csv") == []
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 21


@pytest.mark.slow  # 24 s: starts a kernel that imports and trains
def test_notebook_runs(tmp_path, monkeypatch):
    """From a fresh clone, with a tenth of its epochs; every cell that showed something shows the same kind of thing."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples/first_model.ipynb", as_version=4)
    shown = [[sorted(output.data) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]
    (training,) = [cell for cell in notebook.cells if "epochs=10" in cell.source]
    training.source = training.source.replace("epochs=10", "epochs=1")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "examples").mkdir()
    place = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    results = [[sorted(each.data) for each in cell.outputs if each.output_type != "stream"] for cell in cells]
    assert results == shown
    assert "FinetuneResult(" in cells[1].outputs[-1].data["text/plain"]
    model = tmp_path / "examples/first-model"
    assert [each.kind for each in Facts.load(model).records] == ["training", "evaluation", "evaluation", "analysis"]
