"""The pictures: what is drawn, read back from the figure and from the PNG."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from hf_vit.evaluation import WrongImage, plot_confusion_matrix, plot_wrong_images
from hf_vit.results.figures import save_figure

ODD_NAMES = ("$a^{", "two\nlines", "猫", "_under_ <b>", "x" * 60)


def _saved(figure: Figure, path: Path) -> np.ndarray:
    """The figure as its PNG shows it."""
    save_figure(figure, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_the_matrix_shows_its_counts_in_place(tmp_path: Path) -> None:
    matrix = np.array([[5, 0, 1], [0, 7, 0], [2, 3, 4]])
    figure = plot_confusion_matrix(matrix, ["ant", "bee", "cow"], title="test of $4")
    axes = figure.axes[0]
    shown = {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts}
    assert shown == {(0, 0): "5", (0, 2): "1", (1, 1): "7", (2, 0): "2", (2, 1): "3", (2, 2): "4"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ant", "bee", "cow"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee", "cow"]
    assert axes.get_title() == "test of $4"
    shares = np.asarray(axes.images[0].get_array())
    assert shares == pytest.approx(matrix / matrix.sum(1, keepdims=True))
    assert _saved(figure, tmp_path / "m.png").std() > 10
    assert [path.name for path in tmp_path.iterdir()] == ["m.png"]


@pytest.mark.parametrize("size", [1, 2, 25, 300])
def test_any_number_of_classes(tmp_path: Path, size: int) -> None:
    figure = plot_confusion_matrix(np.eye(size, dtype=np.int64), [str(index) for index in range(size)])
    assert len(figure.axes[0].texts) == (size if size <= 20 else 0)
    height, width, _ = _saved(figure, tmp_path / "m.png").shape
    assert max(height, width) < 2000


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    wrong = [WrongImage(0.9, 3, ODD_NAMES[0], ODD_NAMES[2], Image.new("RGB", (9, 5)))]
    matrix = plot_confusion_matrix(np.eye(5, dtype=np.int64), ODD_NAMES, title=ODD_NAMES[0])
    mistakes = plot_wrong_images(wrong)
    labels = [label.get_text() for label in matrix.axes[0].get_xticklabels()]
    assert labels == ["$a^{", "two lines", "猫", "_under_ <b>", "x" * 23 + "…"]
    assert mistakes.axes[0].get_title() == "$a^{ → 猫\n90% · image 3"
    for figure in (matrix, mistakes):
        _saved(figure, tmp_path / "drawn.png")


def test_mistakes_show_their_images_in_order() -> None:
    wrong = [
        WrongImage(0.99 - index / 100, index, "ant", "bee", Image.new("RGB", (8, 6), (index, 0, 0)))
        for index in range(30)
    ]
    figure = plot_wrong_images(wrong)
    assert len(figure.axes) == 25
    for index, axes in enumerate(figure.axes):
        pixels: Any = axes.images[0].get_array()
        assert pixels.shape == (6, 8, 3)
        assert pixels[0, 0, 0] == index
        assert axes.get_title() == f"ant → bee\n{99 - index}% · image {index}"


def test_the_same_picture_has_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_figure(plot_confusion_matrix(np.eye(3, dtype=np.int64), ["a", "b", "c"]), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
