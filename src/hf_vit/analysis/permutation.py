"""Sensitivity to the order of patches: how much of what a model says is left when its patches change places.

Legend: B batch, C channels, D feature channels, H x W px, h x w patch grid, n = h*w patches.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import Arrays, FeatureAnalysis, MapComparison, Pictures, curves, describe_arrays, rounded
from hf_vit.families import problem_type_of

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def patch_sources(num_patches: int, share: float, seed: Sequence[int]) -> NDArray[np.int64]:
    """[n]: for every place the patch that comes there. A share of them, drawn by seed, move in one circle.

    Each of them really moves; the patches of a smaller share are among those of a larger one.
    """
    chosen = np.random.default_rng(list(seed)).permutation(num_patches)[: round(share * num_patches)]
    sources = np.arange(num_patches)
    sources[chosen] = np.roll(chosen, 1)
    return sources


def permute_patches(maps: torch.Tensor, sources: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Images or feature maps [B, C, H, W], cut into a grid of h x w patches, with patch `sources[b, i]` at place i."""
    h, w = grid
    height, width = maps.shape[2] // h, maps.shape[3] // w
    tiles = maps.unflatten(3, (w, width)).unflatten(2, (h, height)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = tiles.gather(1, sources[:, :, None, None, None].expand_as(tiles))  # [B, n, C, height, width]
    return moved.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


@final
class PatchPermutation(FeatureAnalysis):
    """Features and output when a share of the patches changed places."""

    name = "patch_permutation"
    title = "Sensitivity to the order of patches"
    source = "patch shuffling as in arXiv 2105.10497, section 3, for a growing share of patches"
    shows = (
        "How far the output and the features of every depth are from those of the ordered image, by the share of "
        "patches that changed places; features are compared patch by patch where each patch went. Models without "
        "positions and mixing over borders stay at 0. It cannot tell what is lost: the order, or what crosses the "
        "patches' borders."
    )
    arrays = describe_arrays(
        share=("case", "share", "of the patches that changed places"),
        feature_error=("case depth", "1", "0: features move along; 1: no better than their mean"),
        feature_cosine=("case depth", "cosine", "between the features and the moved features, without their mean"),
        output_error=("case", "1", "of the logits (without: of the mean feature), as a share of their norm"),
        same_prediction=("case", "share", "classifiers: images whose best class stays"),
    )

    def measure(self) -> Arrays:
        comparison = MapComparison()
        sums, seen = np.zeros((len(SHARES), 2)), 0
        norm, classifies = 0.0, True
        for pixel_values in self.batches():
            ordered, changed, classifies = self._outputs(pixel_values, seen, comparison)
            norm += ordered.square().sum().item()
            for case, output in enumerate(changed):
                same = (output.argmax(dim=1) == ordered.argmax(dim=1)).sum().item()
                sums[case] += (output - ordered).square().sum().item(), same
            seen += len(pixel_values)
        arrays = {
            "share": np.array(SHARES),
            **comparison.arrays("feature_"),
            # A head as it is initialized answers nothing but zeros: what is left of them is undefined.
            "output_error": np.sqrt(sums[:, 0] / (norm or np.nan)),
        }
        if classifies and problem_type_of(self.context.subject.model) != "regression":
            arrays["same_prediction"] = sums[:, 1] / seen
        elif not classifies:
            self.notes.append("the model has no logits: its output is the mean over places of the last depth")
        return {name: values.astype(np.float32) for name, values in arrays.items()}

    @torch.inference_mode()
    def _outputs(
        self, pixel_values: torch.Tensor, first: int, comparison: MapComparison
    ) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
        """Outputs [B, K] of the ordered and of the permuted images, and whether they are logits; features are added."""
        ordered, output = self.maps(pixel_values)
        grid = ordered[-1].shape[2], ordered[-1].shape[3]
        self.patch_px(pixel_values, ordered[-1])
        found: list[torch.Tensor] = []
        for case, share in enumerate(SHARES):
            seeds = ((self.context.settings.seed, first + place) for place in range(len(pixel_values)))
            drawn = np.stack([patch_sources(grid[0] * grid[1], share, seed) for seed in seeds])
            sources = torch.from_numpy(drawn).to(pixel_values.device)
            maps, changed = self.maps(permute_patches(pixel_values, sources, grid))
            for depth, features in enumerate(maps):
                everywhere = torch.ones(features.shape[2:], dtype=torch.bool, device=features.device)
                comparison.add(case, depth, features, permute_patches(ordered[depth], sources, grid), everywhere)
            found.append(_answer(changed, maps[-1]))
        return _answer(output, ordered[-1]), found, _logits(output) is not None

    def draw(self, arrays: Arrays) -> Pictures:
        shares, errors = arrays["share"], arrays["feature_error"]
        names = [f"{share:.0%}" for share in shares]
        figures = {
            "Error of permuted patches by depth": curves(
                {"features": dict(zip(names, errors, strict=True))}, "depth", "relative error"
            )
        }
        output = {name: arrays[name] for name in ("output_error", "same_prediction") if name in arrays}
        panels = {name.replace("_", " "): {"": values} for name, values in output.items()}
        figures["Output by the share of permuted patches"] = curves(
            panels, "share of patches that changed places", "", shares
        )
        return figures

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        found: dict[str, Any] = {"all_permuted_feature_error_by_depth": rounded(arrays["feature_error"][-1])}
        if "same_prediction" in arrays:
            found["same_prediction_by_share"] = rounded(arrays["same_prediction"])
        return found


def _logits(output: object) -> torch.Tensor | None:
    found = getattr(output, "logits", output)
    return found if isinstance(found, torch.Tensor) and found.ndim == 2 else None


def _answer(output: object, last: torch.Tensor) -> torch.Tensor:
    """[B, K]: logits, or the mean over places of the last feature map [B, D, h, w]."""
    logits = _logits(output)
    return (last.mean(dim=(2, 3)) if logits is None else logits).double()
