"""Equivariance: when the image moves, do the features move along?

Legend: B batch, C channels, D feature channels, H x W px, h x w places of a map.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from hf_vit.analysis.analyses.analysis import Arrays, ArraySpec, rounded
from hf_vit.analysis.analyses.feature_analysis import FeatureAnalysis, MapComparison, curves
from hf_vit.analysis.analyses.moves import Move, moves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "pixel_shift": ("px", "down and right, within a patch"),
    "patch_shift": ("px", "down and right, by whole patches"),
    "rotation": ("degrees", "counterclockwise, about the centre"),
    "scale": ("1", "factor by which the image is zoomed in, about the centre"),
}


def _specs() -> dict[str, ArraySpec]:
    found: dict[str, ArraySpec] = {}
    for kind, (unit, meaning) in KINDS.items():
        axes = ("move", "axis") if unit == "px" else ("move",)
        found[kind] = ArraySpec(axes, unit, meaning)
        found[f"{kind}_error"] = ArraySpec(("move", "depth"), "1", "0: moves along; 1: no better than their mean")
        found[f"{kind}_cosine"] = ArraySpec(("move", "depth"), "cosine", "of found and moved features, their mean out")
    return found


@final
class Equivariance(FeatureAnalysis):
    """Features of the moved image beside the moved features of the image, by depth."""

    name = "equivariance"
    title = "Equivariance to shifts, rotation and scale"
    source = "features of the moved image against moved features, as equivariance is defined (arXiv 1411.5908)"
    shows = (
        "One line a move: how far the features of a moved image are from the moved features of the image, by depth, "
        "where the two overlap; an error of 0 is exact, 1 no better than the same feature everywhere. Maps are "
        "moved by bilinear interpolation, which has an error of its own for all but whole places; what enters at the "
        "borders (shifts: the other side, else a reflection) is another image to a model that sees all of it."
    )
    arrays: ClassVar[Mapping[str, ArraySpec]] = _specs()

    def measure(self) -> Arrays:
        comparison, chosen = MapComparison(), ()
        for pixel_values in self.batches(self.context.settings.batch_size):
            chosen = self._compare(pixel_values, comparison)
        found, arrays = comparison.arrays(), Arrays()
        for kind in KINDS:
            cases = [case for case, move in enumerate(chosen) if move.kind == kind]
            values = np.array([chosen[case].value for case in cases], dtype=np.float32)
            arrays[kind] = values if kind.endswith("shift") else values[:, 0]
            arrays |= {f"{kind}_{measure}": found[measure][cases] for measure in found}
        return arrays

    @torch.inference_mode()
    def _compare(self, pixel_values: torch.Tensor, comparison: MapComparison) -> tuple[Move, ...]:
        """Add a batch [B, C, H, W]; gives the moves."""
        image = pixel_values.shape[2], pixel_values.shape[3]
        still, _ = self.reader.maps(pixel_values)
        chosen = moves(self.patch_px(pixel_values, still[-1]))
        for case, move in enumerate(chosen):
            found, _ = self.reader.maps(move(pixel_values.float(), image).to(pixel_values.dtype))
            for depth, features in enumerate(found):
                inside = move.inside((features.shape[2], features.shape[3]), image).to(features.device)
                comparison.add(case, depth, features, move(still[depth].float(), image), inside)
        return chosen

    def draw(self, arrays: Arrays) -> "dict[str, Figure]":
        panels = {}
        for kind, (unit, _) in KINDS.items():
            values = arrays[kind].reshape(len(arrays[kind]), -1)[:, 0]
            label = {"px": "{:g} px", "degrees": "{:g} degrees"}.get(unit, "x {:g}")
            errors = arrays[f"{kind}_error"]
            panels[kind.replace("_", " ")] = {
                label.format(value): error for value, error in zip(values, errors, strict=True)
            }
        return {"Error of equivariance by depth": curves(panels, "depth", "relative error")}

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        # The largest shift within a patch, and one whole patch.
        chosen = {
            "half_patch_shift_error_by_depth": ("pixel_shift", -1),
            "patch_shift_error_by_depth": ("patch_shift", 0),
        }
        return {name: rounded(arrays[f"{kind}_error"][case]) for name, (kind, case) in chosen.items()}
