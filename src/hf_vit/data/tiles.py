"""Images that are larger than what a model takes, or than memory, in overlapping tiles; predictions joined again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_vit.errors import UserError

# A box that a tile's edge may have cut is dropped where another one of its class has this share of it.
_COVERED = 0.8


@dataclass(frozen=True)
class Tiles:
    """Where the tiles of an image lie; all of one size, spread evenly.

    Attributes:
        image_size: (height, width) px.
        tile_size: (height, width) px; a side that is longer than the image's is as long as that.
        overlap: px that neighbors share at least.
        margin: px along a tile's inner edges that do not count in a joined map, for what a network sees differently
            there. A function of a pixel's surroundings up to `margin` px gives the same joined as it does untiled.

    Raises:
        UserError: the overlap is no less than a tile, or less than both margins.
    """

    image_size: tuple[int, int]
    tile_size: tuple[int, int]
    overlap: int = 0
    margin: int = 0

    def __post_init__(self) -> None:
        overlap, margin = self.overlap, self.margin
        if min(*self.image_size, *self.tile_size) < 1:
            sizes = f"{self.tile_size} px in an image of {self.image_size} px"
            raise UserError(f"tiles of {sizes}; needed: sides of 1 or more")
        if not 0 <= overlap < min(self.tile_size):
            raise UserError(f"tiles overlap by {overlap} px; needed: 0 or more, and less than {min(self.tile_size)}")
        if not 0 <= 2 * margin <= overlap:
            raise UserError(
                f"tiles with a margin of {margin} px overlap by {overlap} px; needed: an overlap of at least "
                "twice the margin"
            )

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) px of every tile, row by row."""
        height, width = self._tile
        return [(left, top, left + width, top + height) for top in self._starts(0) for left in self._starts(1)]

    def crops(self, image: Any) -> Iterator[Image.Image]:
        """Yield the tiles as pictures, one at a time.

        Args:
            image: a Pillow image, or an array [H, W, 3] or [H, W] of uint8 of which parts can be had
                (numpy.load(mmap_mode="r"), tifffile.memmap, zarr): of such a one only a tile is in memory.
        """
        for left, top, right, bottom in self.boxes:
            if isinstance(image, Image.Image):
                yield image.crop((left, top, right, bottom))
            else:
                yield Image.fromarray(np.asarray(image[top:bottom, left:right]))

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield [h, w] float32 of every tile, less at its inner edges; at every pixel of the image they sum to one."""
        rows, columns = self._shares(0), self._shares(1)
        for row in rows:
            for column in columns:
                yield torch.from_numpy(np.outer(row, column).astype(np.float32))

    def join_maps(self, maps: Iterable[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return one map of all tiles' maps, the mean of those that overlap.

        Args:
            maps: [K, h, w] of every tile, in the order of `boxes`, such as logits or probabilities of K classes.
            out: [K, H, W] of zeros, where memory does not hold it (torch.from_file); None to make one.

        Returns:
            [K, H, W].
        """
        for (left, top, right, bottom), weight, scores in zip(self.boxes, self.weights(), maps, strict=True):
            if out is None:
                out = torch.zeros(scores.shape[0], *self.image_size, dtype=scores.dtype, device=scores.device)
            out[:, top:bottom, left:right] += scores * weight.to(scores)
        assert out is not None
        return out

    def join_classes(self, maps: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return one class map of all tiles': where they overlap, that of the tile in which the pixel lies the deepest.

        Args:
            maps: [h, w] of every tile, in the order of `boxes`, the class of every pixel.

        Returns:
            [H, W].
        """
        deepest, joined = torch.zeros(self.image_size), torch.zeros(self.image_size, dtype=torch.int64)
        for (left, top, right, bottom), weight, classes in zip(self.boxes, self.weights(), maps, strict=True):
            place = slice(top, bottom), slice(left, right)
            is_deeper = weight > deepest[place]
            deepest[place] = torch.maximum(deepest[place], weight)
            joined[place] = torch.where(is_deeper, classes, joined[place])
        return joined

    def join_boxes(
        self, found: Sequence[Mapping[str, torch.Tensor]], iou_threshold: float = 0.5
    ) -> dict[str, torch.Tensor]:
        """Return one list of the boxes of all tiles, by torchvision's `batched_nms`.

        A box at an inner edge of its tile may be a part of an object: it goes where another box of its class has most
        of it.

        Args:
            found: of every tile, in the order of `boxes`, "boxes" [n, 4] as x1 y1 x2 y2 px of the tile, "scores" [n]
                and "labels" [n]; others of n rows, such as masks, are left out.
            iou_threshold: of two boxes of a class that overlap more the better one stays.

        Returns:
            "boxes" [m, 4] px of the image, "scores" [m], falling, and "labels" [m].
        """
        from torchvision.ops import batched_nms

        moved = [
            one["boxes"] + one["boxes"].new_tensor([*tile[:2], *tile[:2]])
            for tile, one in zip(self.boxes, found, strict=True)
        ]
        edges = torch.cat([self._at_inner_edge(*each) for each in zip(moved, self.boxes, strict=True)])
        boxes = torch.cat(moved)
        scores, labels = (torch.cat([one[name] for one in found]) for name in ("scores", "labels"))
        kept = batched_nms(boxes, scores, labels, iou_threshold)
        boxes, scores, labels, edges = boxes[kept], scores[kept], labels[kept], edges[kept]
        whole = ~(edges & _is_part(boxes, labels))
        return {"boxes": boxes[whole], "scores": scores[whole], "labels": labels[whole]}

    @property
    def _tile(self) -> tuple[int, int]:
        return min(self.tile_size[0], self.image_size[0]), min(self.tile_size[1], self.image_size[1])

    def _starts(self, axis: int) -> list[int]:
        length, side = self.image_size[axis], self._tile[axis]
        if length == side:
            return [0]
        count = -(-(length - self.overlap) // (side - self.overlap))
        return [(length - side) * number // (count - 1) for number in range(count)]

    def _shares(self, axis: int) -> "list[np.ndarray[Any, Any]]":
        """Return the pixel weights of every tile along an axis; overlapping weights sum to one."""
        length, side = self.image_size[axis], self._tile[axis]
        starts = self._starts(axis)
        places = np.arange(side)
        ramps: list[np.ndarray[Any, Any]] = []
        for start in starts:
            left = places + 1 - self.margin if start > 0 else np.full(side, side)
            right = side - places - self.margin if start + side < length else np.full(side, side)
            ramps.append(np.maximum(0, np.minimum(left, right)).astype(np.float64))
        total = np.zeros(length)
        for start, ramp in zip(starts, ramps, strict=True):
            total[start : start + side] += ramp
        return [ramp / total[start : start + side] for start, ramp in zip(starts, ramps, strict=True)]

    def _at_inner_edge(self, boxes: torch.Tensor, tile: tuple[int, int, int, int]) -> torch.Tensor:
        """Return which boxes [n, 4] px of the image reach an edge of their tile (within 1 px) that is none of the
        image's.
        """
        height, width = self.image_size
        inner = [tile[0] > 0, tile[1] > 0, tile[2] < width, tile[3] < height]
        edges, is_inner = boxes.new_tensor(tile), torch.tensor(inner, device=boxes.device)
        return (((boxes - edges).abs() <= 1) & is_inner).any(-1)


def _is_part(boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return which of n boxes [n, 4] lie for the most part in a larger one of their class."""
    from torchvision.ops import box_area

    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = box_area(boxes)
    larger = (areas[None, :] > areas[:, None]) & (labels[:, None] == labels[None, :])
    return (larger & (shared >= _COVERED * areas[:, None])).any(1)
