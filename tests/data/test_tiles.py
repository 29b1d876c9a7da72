"""Tiles cover an image, their weights sum to one, and joined predictions are those of the whole image."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import batched_nms

from hf_vit.data.tiles import Tiles
from hf_vit.errors import UserError

LAYOUTS = [
    Tiles((100, 140), (32, 48), 8),
    Tiles((33, 47), (32, 46), 31),
    Tiles((64, 64), (64, 64), 10),
    Tiles((20, 200), (64, 64), 16, margin=4),
    Tiles((101, 97), (40, 40), 17, margin=8),
    Tiles((50, 50), (7, 9), 0),
]


@pytest.mark.parametrize("tiles", LAYOUTS)
def test_weights_sum_to_one_everywhere_and_neighbours_overlap(tiles):
    total = torch.zeros(tiles.image_size)
    lefts, tops = set(), set()
    for (left, top, right, bottom), weight in zip(tiles.boxes, tiles.weights(), strict=True):
        assert weight.shape == (bottom - top, right - left)
        assert weight.shape == tuple(min(pair) for pair in zip(tiles.tile_size, tiles.image_size, strict=True))
        assert (weight >= 0).all()
        total[top:bottom, left:right] += weight
        lefts.add(left)
        tops.add(top)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)
    for starts, side in ((sorted(tops), weight.shape[0]), (sorted(lefts), weight.shape[1])):
        assert all(after + tiles.overlap <= before + side for before, after in pairwise(starts))
    assert len(tiles) == len(tops) * len(lefts)


def picture(height, width):
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8))


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


@pytest.mark.parametrize("tiles", LAYOUTS)
def test_a_function_of_the_pixel_gives_the_same_joined(tiles):
    image = picture(*tiles.image_size)
    joined = tiles.join_maps(tensor(crop).log1p() for crop in tiles.crops(image))
    assert torch.allclose(joined, tensor(image).log1p(), rtol=1e-5)


@pytest.mark.parametrize("margin", [0, 4])
def test_a_network_gives_the_same_joined_when_its_margin_is_left_out(margin):
    """Two convolutions that see 4 px around; without the margin the edges of tiles differ."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 5, padding=2), torch.nn.GELU(), torch.nn.Conv2d(8, 5, 5, padding=2)
    )
    tiles = Tiles((90, 70), (40, 32), 12, margin)
    image = picture(90, 70)
    with torch.no_grad():
        whole = network(tensor(image)[None] / 255)[0]
        joined = tiles.join_maps(network(tensor(crop)[None] / 255)[0] for crop in tiles.crops(image))
    error = (joined - whole).abs().max()
    assert error < 1e-5 if margin else error > 1e-2


def test_arrays_are_read_tile_by_tile(tmp_path):
    array = np.asarray(picture(60, 50))
    np.save(tmp_path / "scan.npy", array)

    class Counting:
        largest = 0

        def __init__(self):
            self.array = np.load(tmp_path / "scan.npy", mmap_mode="r")

        def __getitem__(self, part):
            read = self.array[part]
            self.largest = max(self.largest, read.shape[0] * read.shape[1])
            return read

    source, tiles = Counting(), Tiles((60, 50), (16, 20), 4)
    for one, other in zip(tiles.crops(source), tiles.crops(Image.fromarray(array)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert source.largest == 16 * 20
    out = torch.from_file(str(tmp_path / "maps"), shared=True, size=3 * 60 * 50).reshape(3, 60, 50)
    joined = tiles.join_maps((tensor(crop) for crop in tiles.crops(source)), out)
    assert joined is out
    assert torch.allclose(joined, tensor(Image.fromarray(array)), rtol=1e-5)


def answers(tiles, objects):
    """What a perfect detector says of every tile: objects cut at its edges, less sure of what it sees less of."""
    found = []
    for left, top, right, bottom in tiles.boxes:
        rows = []
        for (x1, y1, x2, y2), label in objects:
            seen = max(x1, left), max(y1, top), min(x2, right), min(y2, bottom)
            if seen[0] < seen[2] and seen[1] < seen[3]:
                share = (seen[2] - seen[0]) * (seen[3] - seen[1]) / ((x2 - x1) * (y2 - y1))
                rows.append((*(seen[0] - left, seen[1] - top, seen[2] - left, seen[3] - top), share, label))
        table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
        found.append({"boxes": table[:, :4], "scores": table[:, 4], "labels": table[:, 5].long()})
    return found


def test_boxes_of_all_tiles_are_one_list():
    """Objects no larger than the overlap come back whole, once, whatever tiles see parts of them."""
    random = np.random.RandomState(4)
    tiles = Tiles((200, 260), (80, 90), 30)
    objects = []
    while len(objects) < 40:
        x, y, w, h = random.randint(230), random.randint(170), random.randint(8, 29), random.randint(8, 29)
        box = (x, y, x + w, y + h)
        if all(box[2] < o[0] or o[2] < box[0] or box[3] < o[1] or o[3] < box[1] for o, _ in objects):
            objects.append((box, random.randint(3)))
    joined = tiles.join_boxes(answers(tiles, objects))
    told = {
        (tuple(map(int, box)), label)
        for box, label in zip(joined["boxes"].tolist(), joined["labels"].tolist(), strict=True)
    }
    assert told == set(objects)
    assert len(joined["boxes"]) == len(objects)
    assert (joined["scores"] == 1).all()


def test_one_tile_is_torchvisions_batched_nms():
    random = torch.Generator().manual_seed(1)
    corners = torch.rand(60, 2, generator=random) * 50
    boxes = torch.cat([corners, corners + 5 + 30 * torch.rand(60, 2, generator=random)], 1)
    scores, labels = torch.rand(60, generator=random), torch.randint(3, (60,), generator=random)
    joined = Tiles((100, 100), (100, 100)).join_boxes([{"boxes": boxes, "scores": scores, "labels": labels}], 0.4)
    kept = batched_nms(boxes, scores, labels, 0.4)
    assert torch.equal(joined["boxes"], boxes[kept])
    assert torch.equal(joined["scores"], scores[kept])
    none = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    assert Tiles((100, 100), (50, 50)).join_boxes([none] * 4)["boxes"].shape == (0, 4)


def test_an_object_larger_than_a_tile_keeps_its_parts():
    tiles = Tiles((100, 100), (40, 40), 10)
    joined = tiles.join_boxes(answers(tiles, [((0, 0, 100, 100), 0)]))
    assert len(joined["boxes"]) == len(tiles)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (((10, 10), (4, 4), 4), "tiles overlap by 4 px; needed: 0 or more, and less than 4"),
        (((10, 10), (4, 4), 2, 2), "tiles with a margin of 2 px overlap by 2 px; needed: twice as many"),
        (((10, 10), (0, 4)), "needed: sides of 1 or more"),
    ],
)
def test_tiles_that_cannot_be_are_refused(values, said):
    with pytest.raises(UserError, match=said):
        Tiles(*values)
