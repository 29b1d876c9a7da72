"""The notebook runs from its first cell to its last, in a folder that starts like a fresh clone."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from hf_vit.results.facts import Facts

ROOT = Path(__file__).parents[1]


def test_notebook_runs(tmp_path, monkeypatch):
    """With a tenth of its epochs; every cell that showed something shows the same kind of thing."""
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
