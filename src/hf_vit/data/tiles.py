"""Divide images that are too large for a model or for memory into overlapping tiles, and join the predictions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_vit.errors import UserError

# A box at a tile's inner edge is dropped if a larger box of its class covers this share of it.
_COVERED = 0.8
_COMPARED_AT_ONCE = 256  # boxes at an edge, each with all others


@dataclass(frozen=True)
class Tiles:
    """Positions of the tiles of an image, which have one size and are spread evenly.

    Attributes:
        image_size: (height, width) px.
        tile_size: (height, width) px; sides are cut to those of the image.
        overlap: fewest px that neighbors share.
        margin: px along a tile's inner edges that are ignored in joined maps, because a network sees less context
            there. A model that sees at most `margin` px around a pixel gives the same joined map as without tiles.

    Raises:
        UserError: a side is below 1 px, or the overlap is not below the tile's sides or below twice the margin.
    """

    image_size: tuple[int, int]
    tile_size: tuple[int, int]
    overlap: int = 0
    margin: int = 0

    def __post_init__(self) -> None:
        overlap, margin = self.overlap, self.margin
        if min(*self.image_size, *self.tile_size) < 1:
            sizes = f"{self.tile_size} px in an image of {self.image_size} px"
            raise UserError(f"tiles of {sizes} are not possible; give sides of at least 1 px")
        if not 0 <= overlap < min(self.tile_size):
            raise UserError(
                f"the tiles overlap by {overlap} px, but tiles of this size need 0 to {min(self.tile_size) - 1} "
                "px; choose another overlap"
            )
        if not 0 <= 2 * margin <= overlap:
            raise UserError(
                f"the tiles overlap by {overlap} px, less than twice their margin of {margin} px; choose a larger "
                "overlap, or a smaller margin"
            )

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) px of every tile, row by row."""
        height, width = self._tile
        return [
            (left, top, left + width, top + height) for top in self._find_starts(0) for left in self._find_starts(1)
        ]

    def crops(self, image: Any) -> Iterator[Image.Image]:
        """Yield the tiles as Pillow images, one at a time.

        Args:
            image: a Pillow image, or a uint8 array [H, W, 3] or [H, W] (height, width). Of an array on disk
                (numpy.load(mmap_mode="r"), tifffile.memmap, zarr) only one tile is in memory.
        """
        for left, top, right, bottom in self.boxes:
            if isinstance(image, Image.Image):
                yield image.crop((left, top, right, bottom))
            else:
                yield Image.fromarray(np.asarray(image[top:bottom, left:right]))

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield the pixel weights of every tile, [h, w] float32 (its height, width).

        Weights fall towards inner edges, and sum to 1 at every pixel of the image.
        """
        rows, columns = self._weigh_axis(0), self._weigh_axis(1)
        for row in rows:
            for column in columns:
                yield torch.from_numpy(np.outer(row, column).astype(np.float32))

    def join_maps(self, maps: Iterable[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Join the maps of all tiles to a map of the image; overlapping tiles are averaged with `weights`.

        Args:
            maps: [K, h, w] of every tile, in the order of `boxes`, such as logits or probabilities of K classes.
            out: [K, H, W] of zeros to write to, for example a file (torch.from_file); None for a new tensor.

        Returns:
            [K, H, W] (classes, height, width of the image).
        """
        for (left, top, right, bottom), weight, scores in zip(self.boxes, self.weights(), maps, strict=True):
            if out is None:
                out = torch.zeros(scores.shape[0], *self.image_size, dtype=scores.dtype, device=scores.device)
            out[:, top:bottom, left:right] += scores * weight.to(scores)
        assert out is not None
        return out

    def join_classes(self, maps: Iterable[torch.Tensor]) -> torch.Tensor:
        """Join the class maps of all tiles; a pixel gets its class from the tile with the highest weight.

        Args:
            maps: [h, w] of every tile, in the order of `boxes`, the class of every pixel.

        Returns:
            [H, W].
        """
        deepest, joined = torch.zeros(self.image_size), torch.zeros(self.image_size, dtype=torch.int64)
        for (left, top, right, bottom), weight, classes in zip(self.boxes, self.weights(), maps, strict=True):
            window = slice(top, bottom), slice(left, right)
            is_deeper = weight > deepest[window]
            deepest[window] = torch.maximum(deepest[window], weight)
            joined[window] = torch.where(is_deeper, classes, joined[window])
        return joined

    def join_boxes(
        self, found: Sequence[Mapping[str, torch.Tensor]], iou_threshold: float = 0.5
    ) -> dict[str, torch.Tensor]:
        """Join the boxes of all tiles with torchvision's `batched_nms`.

        A box at an inner edge of its tile may be a part of an object, so it is dropped if a larger box of its class
        covers most of it.

        Args:
            found: for every tile, in the order of `boxes`, "boxes" [n, 4] as x1 y1 x2 y2 px of the tile, "scores" [n]
                and "labels" [n] of its n objects; other keys, such as masks, are ignored.
            iou_threshold: of two boxes of a class with a higher IoU, only the one with the higher score remains.

        Returns:
            "boxes" [m, 4] px of the image, "scores" [m] in descending order, and "labels" [m].
        """
        from torchvision.ops import batched_nms

        boxes_of_tiles, at_edge_of_tiles = [], []
        for tile, objects in zip(self.boxes, found, strict=True):
            left, top, _, _ = tile
            boxes_of_tiles.append(objects["boxes"] + objects["boxes"].new_tensor([left, top, left, top]))
            at_edge_of_tiles.append(self._is_at_inner_edge(boxes_of_tiles[-1], tile))
        boxes, at_edge = torch.cat(boxes_of_tiles), torch.cat(at_edge_of_tiles)
        scores, labels = (torch.cat([objects[name] for objects in found]) for name in ("scores", "labels"))
        # Boxes at an edge come last, because a part with a higher score would suppress the whole object.
        best = batched_nms(boxes.float(), scores.float() - at_edge.float(), labels, iou_threshold)
        best = best[scores[best].argsort(descending=True, stable=True)]
        boxes, scores, labels, at_edge = (values[best] for values in (boxes, scores, labels, at_edge))
        is_complete = ~at_edge
        for rows in at_edge.nonzero()[:, 0].split(_COMPARED_AT_ONCE):
            is_complete[rows] = ~_are_parts(rows, boxes, labels)
        return {"boxes": boxes[is_complete], "scores": scores[is_complete], "labels": labels[is_complete]}

    @property
    def _tile(self) -> tuple[int, int]:
        return min(self.tile_size[0], self.image_size[0]), min(self.tile_size[1], self.image_size[1])

    def _find_starts(self, axis: int) -> list[int]:
        """Return the first pixel of every row (axis 0) or column (axis 1) of tiles."""
        length, side = self.image_size[axis], self._tile[axis]
        if length == side:
            return [0]
        count = -(-(length - self.overlap) // (side - self.overlap))
        return [(length - side) * number // (count - 1) for number in range(count)]

    def _weigh_axis(self, axis: int) -> "list[np.ndarray[Any, Any]]":
        """Return the weights of every tile along an axis; the weights of overlapping tiles sum to 1."""
        length, side = self.image_size[axis], self._tile[axis]
        tile_starts = self._find_starts(axis)
        positions = np.arange(side)
        ramps: list[np.ndarray[Any, Any]] = []
        for start in tile_starts:  # weights rise from a tile's margin inwards, but not at the image's edges
            left = positions + 1 - self.margin if start > 0 else np.full(side, side)
            right = side - positions - self.margin if start + side < length else np.full(side, side)
            ramps.append(np.maximum(0, np.minimum(left, right)).astype(np.float64))
        total = np.zeros(length)
        for start, ramp in zip(tile_starts, ramps, strict=True):
            total[start : start + side] += ramp
        return [ramp / total[start : start + side] for start, ramp in zip(tile_starts, ramps, strict=True)]

    def _is_at_inner_edge(self, boxes: torch.Tensor, tile: tuple[int, int, int, int]) -> torch.Tensor:
        """Return whether each of n boxes, [n, 4] px of the image, reaches within 1 px of an inner edge of its tile."""
        height, width = self.image_size
        inner = [tile[0] > 0, tile[1] > 0, tile[2] < width, tile[3] < height]
        outwards = boxes.new_tensor([-1, -1, 1, 1])  # a DETR's boxes may end outside the tile
        is_at_edge = (boxes - boxes.new_tensor(tile)) * outwards >= -1
        return (is_at_edge & torch.tensor(inner, device=boxes.device)).any(-1)


def _are_parts(rows: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return for m rows of n boxes, [n, 4], whether each lies for the most part in a larger box of its class, [m]."""
    from torchvision.ops import box_area

    top_left = torch.maximum(boxes[rows, None, :2], boxes[:, :2])  # [m, n, 2]
    bottom_right = torch.minimum(boxes[rows, None, 2:], boxes[:, 2:])
    intersections = (bottom_right - top_left).clamp(min=0).prod(-1)
    areas = box_area(boxes)
    is_larger = (areas > areas[rows, None]) & (labels == labels[rows, None])
    return (is_larger & (intersections >= _COVERED * areas[rows, None])).any(1)
