"""The learning curve: what is drawn, read back from the figure."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_vit.training.run import learning_curve
from hf_vit.training.run.learning_curve import plot_learning_curve


def test_the_learning_curve_shows_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        {"epoch": 0.5, "loss": 2.0, "learning_rate": 1e-3, "step": 5},
        {"epoch": 1.0, "eval_loss": 1.5, "eval_accuracy": 0.6, "step": 10},
        {"epoch": 1.5, "loss": 1.0, "step": 15},
        {"epoch": 2.0, "eval_loss": 1.2, "eval_accuracy": 0.7, "step": 20},
        {"epoch": 2.0, "train_runtime": 3.0, "train_loss": 1.5, "step": 20},
    ]
    figures: list[Figure] = []
    monkeypatch.setattr(learning_curve, "save_figure", lambda figure, path: figures.append(figure))
    assert plot_learning_curve(history, tmp_path / "c.png")
    loss, accuracy = figures[0].axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in loss.lines}
    assert drawn == {"training": [[0.5, 2.0], [1.5, 1.0]], "validation": [[1.0, 1.5], [2.0, 1.2]]}
    assert np.asarray(accuracy.lines[0].get_xydata()).tolist() == [[1.0, 60.0], [2.0, 70.0]]


def test_no_history_no_curve(tmp_path: Path) -> None:
    assert not plot_learning_curve([], tmp_path / "c.png")
    assert not plot_learning_curve([{"epoch": 1.0, "train_runtime": 3.0}], tmp_path / "c.png")
    assert plot_learning_curve([{"epoch": 1.0, "loss": 3.0}], tmp_path / "d.png")
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]
