"""`predict --tiles`: images larger than the model's, at their own scale, by models whose answers are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import DetrImageProcessor, SegformerImageProcessor
from transformers.modeling_outputs import SemanticSegmenterOutput

from hf_vit import UserError
from hf_vit.evaluation import predict

SIDE = 32
SETTINGS = dict(
    size={"height": SIDE, "width": SIDE}, image_mean=[0.0] * 3, image_std=[1.0] * 3, do_pad=False, do_normalize=True
)
NAMES = {0: "red", 1: "green", 2: "blue"}


class ColourForSemanticSegmentation(nn.Module):
    """The strongest colour of every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=NAMES, num_labels=3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values: torch.Tensor) -> SemanticSegmenterOutput:
        return SemanticSegmenterOutput(logits=self.scale * pixel_values)


class BrightForObjectDetection(nn.Module):
    """One box around what is bright, of the class "green"; nothing where nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=NAMES, num_labels=3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        logits = torch.tensor([0.0, 0.0, 0.0, 9.0]).repeat(len(pixel_values), 1, 1)
        boxes = torch.zeros(len(pixel_values), 1, 4)
        for index, image in enumerate(pixel_values):
            rows, columns = torch.where(image.mean(0) > 0.5)
            if len(rows):
                logits[index, 0] = torch.tensor([0.0, 9.0, 0.0, 0.0])
                x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
                boxes[index, 0] = torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]) / SIDE
        return SimpleNamespace(logits=self.scale * logits, pred_boxes=boxes)


@pytest.mark.parametrize("size", [(100, 70), (33, 32), (20, 90), (32, 32), (10, 12)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_pixels_are_those_of_the_image(tmp_path, size, batch_size):
    """Seen at its own scale, every pixel has its colour's class; an image made smaller loses that."""
    width, height = size
    array = np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(array).save(tmp_path / "image.png")
    model = ColourForSemanticSegmentation(), SegformerImageProcessor(**SETTINGS)
    (answer,) = predict(model, tmp_path / "image.png", tiles=True, batch_size=batch_size)
    assert answer.mask.shape == (height, width)
    if min(size) >= SIDE:
        assert np.array_equal(answer.mask, array.argmax(-1))
        shares = {NAMES[k]: float((array.argmax(-1) == k).mean()) for k in range(3)}
        assert {each["label"]: each["share"] for each in answer.answers} == pytest.approx(shares)
    (smaller,) = predict(model, tmp_path / "image.png")
    fits = max(size) <= SIDE
    assert np.array_equal(smaller.mask, answer.mask) == fits, "without tiles the image is made as small as the model's"


@pytest.mark.parametrize(
    "box", [(4, 6, 12, 14), (22, 20, 30, 26), (24, 24, 32, 32), (52, 46, 59, 54), (100, 70, 108, 78)]
)
def test_an_object_is_one_box(tmp_path, box):
    """No larger than the overlap, it is seen whole by a tile; what others see of it is dropped."""
    array = np.zeros((80, 110, 3), dtype=np.uint8)
    array[box[1] : box[3], box[0] : box[2]] = 255
    Image.fromarray(array).save(tmp_path / "image.png")
    model = BrightForObjectDetection(), DetrImageProcessor(**SETTINGS)
    (answer,) = predict(model, tmp_path / "image.png", tiles=True)
    (only,) = answer.answers
    assert (only["label"], only["box"]) == ("green", pytest.approx(box, abs=1e-3))
    assert answer.mask is None


def test_a_classifier_sees_no_tiles(tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "image.png")
    with pytest.raises(UserError, match="leave --tiles out"):
        predict((nn.Identity(), None), tmp_path / "image.png", tiles=True)
