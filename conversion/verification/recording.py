"""Recorded results of the original code.

The recording is an .npz file: `images` [B, H, W, C] float32 in the model's input range, and any of the stages of
`stages.py` as float32 results of the original. Endings say more: `_f64` the same computed in float64, `_0` the first
image only, `_c8` the first 8 channels only. Further sets of images of other sizes are named `images_<set>`, their
results `logits_<set>` and so on; `posemb_in` and `posemb_out_<set>` are position tables before and after resampling.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_vit.conversion.readers.npz import NpzReader
from hf_vit.conversion.sizes import size_text
from hf_vit.errors import UserError


@dataclass(frozen=True)
class RecordedArray:
    """Name of an array, read: "encoded_f64_0" is stage "encoded", float64, first image."""

    array: str
    stage: str
    dtype: torch.dtype
    image_set: str
    first_image: bool
    channels: int | None


class Recording:
    """The recorded results of the original code."""

    def __init__(self, path: str | Path) -> None:
        with NpzReader(path) as reader:
            self.name = reader.path.name
            self.arrays = {
                key: reader.read_floats(key)
                for key, member in reader.members.items()
                if member.dtype.kind == "f" and key != "images_u8"
            }
        self.image_sets = {
            key.removeprefix("images").removeprefix("_"): value
            for key, value in self.arrays.items()
            if re.fullmatch(r"images(_\w+)?", key)
        }
        if not self.image_sets:
            raise UserError(f"{self.name} holds no 'images' [B, H, W, C] float array; nothing can be compared")
        for image_set, images in self.image_sets.items():
            if images.ndim != 4 or not images.numel():
                raise UserError(f"images {image_set!r} in {self.name} are {size_text(images.shape)}, not [B, H, W, C]")

    def of_stages(self, stages: Iterable[str]) -> tuple[list[RecordedArray], dict[str, str]]:
        """All arrays that belong to a stage, in the order of the stages; and the others with the reason."""
        order = {stage: place for place, stage in enumerate(stages)}
        arrays: list[RecordedArray] = []
        skipped: dict[str, str] = {}
        for array in self.arrays:
            if re.fullmatch(r"images(_\w+)?", array):
                continue
            recorded = self._read_name(array, order)
            if recorded is None:
                skipped[array] = "no stage of this model, or no images for it"
            else:
                arrays.append(recorded)
        sets = list(self.image_sets)
        arrays.sort(key=lambda one: (sets.index(one.image_set), order[one.stage], str(one.dtype)))
        return arrays, skipped

    def _read_name(self, array: str, stages: Mapping[str, int]) -> RecordedArray | None:
        sets = "|".join(re.escape(name) for name in self.image_sets if name)
        ending = rf"(?:_(?:f64|0|c\d+{'|' + sets if sets else ''}))*"
        # The longest stage name wins: "layer_0" is block 0, not the first image of "layer".
        for stage in sorted(stages, key=len, reverse=True):
            if not re.fullmatch(re.escape(stage) + ending, array):
                continue
            marks = array.removeprefix(stage).split("_")[1:]
            named = [mark for mark in marks if mark in self.image_sets]
            channels = [int(mark[1:]) for mark in marks if re.fullmatch(r"c\d+", mark)]
            image_set = named[0] if named else ""
            if image_set in self.image_sets or stage == "posemb_in":
                dtype = torch.float64 if "f64" in marks else torch.float32
                image_set = image_set if image_set in self.image_sets else next(iter(self.image_sets))
                return RecordedArray(array, stage, dtype, image_set, "0" in marks, channels[0] if channels else None)
        return None
