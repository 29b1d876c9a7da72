"""Sensitivity to patch order: how much features and predictions change when patches are permuted.

Legend: B batch, C channels, D feature channels, H x W px, h x w patch grid, n = h*w patches.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import (
    Arrays,
    FeatureAnalysis,
    MapComparison,
    Pictures,
    describe_arrays,
    draw_curves,
    round_values,
)
from hf_vit.families import get_problem_type
from hf_vit.loading.outputs import check_finite

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def patch_sources(num_patches: int, share: float, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return [n]: the index of the patch that moves to each position.

    A fraction `share` of the patches, drawn by seed, is permuted in one cycle, so that each of them moves. The patches
    of a smaller share are among those of a larger one.
    """
    moved = np.random.default_rng(list(seed)).permutation(num_patches)[: round(share * num_patches)]
    sources = np.arange(num_patches)
    sources[moved] = np.roll(moved, 1)
    return sources


def permute_patches(maps: torch.Tensor, sources: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return images or maps [B, C, H, W] with patch `sources[b, i]` of the h x w grid moved to position i."""
    h, w = grid
    height, width = maps.shape[2] // h, maps.shape[3] // w
    tiles = maps.unflatten(3, (w, width)).unflatten(2, (h, height)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = tiles.gather(1, sources[:, :, None, None, None].expand_as(tiles))  # [B, n, C, height, width]
    return moved.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


@final
class PatchPermutation(FeatureAnalysis):
    """Changes of features and output when a fraction of the patches is permuted."""

    name = "patch_permutation"
    title = "Sensitivity to the order of patches"
    source = "patch shuffling as in arXiv 2105.10497, section 3, for a growing share of patches"
    shows = (
        "How far the output and the features of every depth are from those of the ordered image, by the share of "
        "permuted patches; features are compared patch by patch at their new positions. Models without "
        "positions and without mixing across patch borders stay at 0. It cannot tell whether the order matters or "
        "what crosses the patches' borders."
    )
    arrays = describe_arrays(
        share=("case", "share", "fraction of permuted patches"),
        feature_error=("case depth", "1", "0: features move along; 1: no better than their mean"),
        feature_cosine=("case depth", "cosine", "between the features and the moved features, without their mean"),
        output_error=("case", "1", "change of the logits (or of the mean feature), divided by their norm"),
        same_prediction=("case", "share", "classifiers: images whose predicted class stays"),
    )

    def measure(self) -> Arrays:
        comparison = MapComparison()
        sums = np.zeros((len(SHARES), 2))  # squared errors of the output, and equal predictions
        norm = 0.0
        num_images = 0
        has_logits = True
        for pixel_values in self.batches():
            ordered, outputs, has_logits = self._compare_batch(pixel_values, num_images, comparison)
            norm += ordered.square().sum().item()
            for case, output in enumerate(outputs):
                num_same = (output.argmax(dim=1) == ordered.argmax(dim=1)).sum().item()
                sums[case] += (output - ordered).square().sum().item(), num_same
            num_images += len(pixel_values)
        arrays = {
            "share": np.array(SHARES),
            **comparison.arrays("feature_"),
            # A newly initialized head returns only zeros, for which the relative error is undefined.
            "output_error": np.sqrt(sums[:, 0] / (norm or np.nan)),
        }
        if has_logits and get_problem_type(self.context.loaded.model) != "regression":
            arrays["same_prediction"] = sums[:, 1] / num_images
        elif not has_logits:
            self.notes.append("the model has no logits, so its output is the mean over positions of the last depth")
        return {name: values.astype(np.float32) for name, values in arrays.items()}

    @torch.inference_mode()
    def _compare_batch(
        self, pixel_values: torch.Tensor, first_index: int, comparison: MapComparison
    ) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
        """Compare the feature maps of images with those of the same images with permuted patches.

        Returns:
            The outputs [B, K] of the ordered images; for every share those of the permuted images; and whether they
            are logits.
        """
        ordered, output = self.read_maps(pixel_values)
        grid = ordered[-1].shape[2], ordered[-1].shape[3]
        self.compute_patch_px(pixel_values, ordered[-1])
        permuted_outputs: list[torch.Tensor] = []
        for case, share in enumerate(SHARES):
            seeds = ((self.context.settings.seed, first_index + index) for index in range(len(pixel_values)))
            permutations = np.stack([patch_sources(grid[0] * grid[1], share, seed) for seed in seeds])
            sources = torch.from_numpy(permutations).to(pixel_values.device)
            maps, permuted_output = self.read_maps(permute_patches(pixel_values, sources, grid))
            for depth, features in enumerate(maps):
                everywhere = torch.ones(features.shape[2:], dtype=torch.bool, device=features.device)
                comparison.add(case, depth, features, permute_patches(ordered[depth], sources, grid), everywhere)
            permuted_outputs.append(_compute_final_output(permuted_output, maps[-1]))
        return _compute_final_output(output, ordered[-1]), permuted_outputs, _find_logits(output) is not None

    def draw(self, arrays: Arrays) -> Pictures:
        shares, errors = arrays["share"], arrays["feature_error"]
        names = [f"{share:.0%}" for share in shares]
        curves = {"features": dict(zip(names, errors, strict=True))}
        output = {name: arrays[name] for name in ("output_error", "same_prediction") if name in arrays}
        panels = {name.replace("_", " "): {"": values} for name, values in output.items()}
        return {
            "Error of permuted patches by depth": draw_curves(curves, "depth", "relative error"),
            "Output by the share of permuted patches": draw_curves(panels, "share of permuted patches", "", shares),
        }

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        numbers: dict[str, Any] = {"all_permuted_feature_error_by_depth": round_values(arrays["feature_error"][-1])}
        if "same_prediction" in arrays:
            numbers["same_prediction_by_share"] = round_values(arrays["same_prediction"])
        return numbers


def _find_logits(output: object) -> torch.Tensor | None:
    """Return the logits [B, K] of a model output, or None."""
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, torch.Tensor) and logits.ndim == 2 else None


def _compute_final_output(output: object, last: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, K], or the mean over positions of the last feature map [B, D, h, w]."""
    logits = _find_logits(output)
    return check_finite((last.mean(dim=(2, 3)) if logits is None else logits).cpu().double(), "outputs")
