"""Comparing a converted model with recorded results of the original code, stage by stage.

The recording is an .npz file: `images` [B, H, W, C] float32 in the model's input range, and any of the stages below as
float32 results of the original. Endings say more: `_f64` the same computed in float64, `_0` the first image only, `_c8`
the first 8 channels only. Further sets of images of other sizes are named `images_<set>`, their results
`logits_<set>` and so on; `posemb_in` and `posemb_out_<set>` are position tables before and after resampling.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_vit.conversion.plan.planning import Plan
from hf_vit.conversion.readers.npz import NpzReader
from hf_vit.conversion.sizes import size_text
from hf_vit.conversion.stages import run_stages, stage_names
from hf_vit.errors import UserError

# Largest difference allowed. Rounding in float32 grows with the numbers (tokens reach 10 and more inside the network),
# so there it is relative to the largest recorded value where that exceeds 1; float64 has room to spare.
# A hybrid normalises kernels and features again and again: the original's own float32 and float64 are further apart.
TOLERANCE = {
    "plain": {torch.float32: 1e-5, torch.float64: 1e-10},
    "hybrid": {torch.float32: 6e-5, torch.float64: 1e-10},
    "bit": {torch.float32: 6e-5, torch.float64: 1e-10},
}
PRECISION = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class Comparison:
    """One recorded array beside the model's."""

    array: str
    stage: str
    precision: str
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


@dataclass
class Verification:
    """All comparisons in the order of the computation, and what could not be compared."""

    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def first_difference(self) -> Comparison | None:
        return next((found for found in self.comparisons if not found.agrees), None)

    def largest(self, precision: str) -> Comparison | None:
        """The comparison that comes nearest to its tolerance, or exceeds it most."""
        found = [comparison for comparison in self.comparisons if comparison.precision == precision]
        return max(found, key=lambda one: one.difference / one.tolerance, default=None)


@dataclass(frozen=True)
class _Recorded:
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

    def find(self, stages: Iterable[str]) -> tuple[list[_Recorded], dict[str, str]]:
        """All arrays that belong to a stage, in the order of the stages; and the others with the reason."""
        order = {stage: place for place, stage in enumerate(stages)}
        found: list[_Recorded] = []
        skipped: dict[str, str] = {}
        for array in self.arrays:
            if re.fullmatch(r"images(_\w+)?", array):
                continue
            recorded = self._read_name(array, order)
            if recorded is None:
                skipped[array] = "no stage of this model, or no images for it"
            else:
                found.append(recorded)
        sets = list(self.image_sets)
        found.sort(key=lambda one: (sets.index(one.image_set), order[one.stage], str(one.dtype)))
        return found, skipped

    def _read_name(self, array: str, stages: Mapping[str, int]) -> _Recorded | None:
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
                return _Recorded(array, stage, dtype, image_set, "0" in marks, channels[0] if channels else None)
        return None


def verify(
    recording: Recording,
    plan: Plan,
    models: Mapping[torch.dtype, Callable[[], torch.nn.Module]],
) -> Verification:
    """Run the original's images through the converted model and compare every recorded stage.

    Args:
        recording: what the original code computed.
        plan: how the model was made.
        models: for float32 and float64, a function that gives the converted model in that precision.

    Raises:
        UserError: nothing can be compared, or the images do not fit the model.
    """
    stages = stage_names(plan)
    found, skipped = recording.find(stages)
    result = Verification(skipped=skipped)
    for one in found:
        if reason := _reason_to_skip(recording, plan, one):
            result.skipped[one.array] = reason
    found = [one for one in found if one.array not in result.skipped]
    if not found:
        raise UserError(
            f"{recording.name} holds no result that can be compared ({_reasons(result.skipped)}); a recording has "
            "'images' and any of the arrays " + ", ".join(("embedding", "with_posemb", "layer_0", *stages[-4:]))
        )
    computed: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
    for dtype in dict.fromkeys(one.dtype for one in found):
        model = models[dtype]()
        for image_set in dict.fromkeys(one.image_set for one in found if one.dtype == dtype):
            images = recording.image_sets[image_set].to(dtype).permute(0, 3, 1, 2)
            computed[dtype, image_set] = run_stages(model, images, plan)
    for one in found:
        stages_of_set = computed[one.dtype, one.image_set]
        result.comparisons.append(_compare(recording, one, stages_of_set[one.stage], TOLERANCE[plan.family][one.dtype]))
    return result


def _reason_to_skip(recording: Recording, plan: Plan, one: _Recorded) -> str | None:
    """Why an array cannot be compared: the head is new, or the model was resampled to answer for one size alone."""
    if plan.new_head and one.stage == "logits":
        return "the head is new"
    if not any(row.resample for row in plan.rows):
        return None
    (stride_h, stride_w), (height, width) = plan.config.patch_stride, recording.image_sets[one.image_set].shape[1:3]
    if one.stage == "posemb_in" or (height // stride_h, width // stride_w) != plan.config.grid:
        return "of another image size than --resize-to"
    return None


def _compare(recording: Recording, one: _Recorded, computed: torch.Tensor, tolerance: float) -> Comparison:
    expected = recording.arrays[one.array]
    if one.first_image:
        computed = computed[:1]
    if one.channels is not None:
        computed = computed[..., : one.channels]
    if computed.shape != expected.shape:
        raise UserError(
            f"'{one.array}' in {recording.name} is {size_text(expected.shape)}, the converted model gives "
            f"{size_text(computed.shape)}: the recording belongs to another model"
        )
    if one.dtype == torch.float32:
        tolerance *= max(1.0, float(expected.abs().max()))
    difference = float((computed.double() - expected.double()).abs().max())
    return Comparison(one.array, one.stage, PRECISION[one.dtype], difference, tolerance)


def _reasons(skipped: Mapping[str, str]) -> str:
    reasons: Sequence[str] = list(dict.fromkeys(skipped.values()))
    return ", ".join(reasons) or "it has images only"
