"""Comparing a converted model with recorded results of the original code, stage by stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hf_vit.conversion.planning.plan import Plan
from hf_vit.conversion.sizes import size_text
from hf_vit.conversion.verification.recording import RecordedArray, Recording
from hf_vit.conversion.verification.stages import run_stages, stage_names
from hf_vit.errors import UserError

# Largest difference allowed. Rounding in float32 grows with the numbers (tokens reach 10 and more inside the network),
# so there it is relative to the largest recorded value where that exceeds 1; float64 has room to spare.
# A hybrid normalises kernels and features again and again: the original's own float32 and float64 are further apart.
TOLERANCE = {
    "plain": {torch.float32: 1e-5, torch.float64: 1e-10},
    "hybrid": {torch.float32: 6e-5, torch.float64: 1e-10},
    "bit": {torch.float32: 6e-5, torch.float64: 1e-10},
    "mixer": {torch.float32: 1e-5, torch.float64: 1e-10},
}
PRECISION = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class ArrayCheck:
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
    """All checks in the order of the computation, and what could not be compared."""

    recording: str
    checks: list[ArrayCheck] = field(default_factory=list[ArrayCheck])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def first_difference(self) -> ArrayCheck | None:
        return next((check for check in self.checks if not check.agrees), None)

    def largest(self, precision: str) -> ArrayCheck | None:
        """The comparison that comes nearest to its tolerance, or exceeds it most."""
        checks = [check for check in self.checks if check.precision == precision]
        return max(checks, key=lambda check: check.difference / check.tolerance, default=None)


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
    arrays, skipped = recording.of_stages(stages)
    result = Verification(recording.name, skipped=skipped)
    for one in arrays:
        if reason := _reason_to_skip(recording, plan, one):
            result.skipped[one.array] = reason
    arrays = [one for one in arrays if one.array not in result.skipped]
    if not arrays:
        raise UserError(
            f"{recording.name} holds no result that can be compared ({_reasons(result.skipped)}); a recording has "
            "'images' and any of the arrays " + ", ".join(("embedding", "with_posemb", "layer_0", *stages[-4:]))
        )
    computed: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
    for dtype in dict.fromkeys(one.dtype for one in arrays):
        model = models[dtype]()
        for image_set in dict.fromkeys(one.image_set for one in arrays if one.dtype == dtype):
            images = recording.image_sets[image_set].to(dtype).permute(0, 3, 1, 2)
            computed[dtype, image_set] = run_stages(model, images, plan)
    for one in arrays:
        stages_of_set = computed[one.dtype, one.image_set]
        result.checks.append(_compare(recording, one, stages_of_set[one.stage], TOLERANCE[plan.family][one.dtype]))
    return result


def _reason_to_skip(recording: Recording, plan: Plan, one: RecordedArray) -> str | None:
    """Why an array cannot be compared: the head is new, or the model was resampled to answer for one size alone."""
    if plan.new_head and one.stage == "logits":
        return "the head is new"
    if plan.resample is None:
        return None
    height, width = recording.image_sets[one.image_set].shape[1:3]
    try:
        grid = plan.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error
    if one.stage == "posemb_in" or grid != plan.config.grid:
        return "of another image size than --resize-to"
    return None


def _compare(recording: Recording, one: RecordedArray, computed: torch.Tensor, tolerance: float) -> ArrayCheck:
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
    return ArrayCheck(one.array, one.stage, PRECISION[one.dtype], difference, tolerance)


def _reasons(skipped: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(skipped.values())) or "it has images only"
