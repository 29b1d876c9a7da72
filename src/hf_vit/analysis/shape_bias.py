"""Shape bias: which of two cues a classifier follows where shape and texture disagree.

Legend: B batch, K labels, C classes.
Source: Geirhos et al., arXiv 1811.12231, section 2 and figure 4.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import Analysis, Arrays, Context, Pictures, describe_arrays, keywords_of
from hf_vit.loading.optimizing import copy_optimized, describe_engine
from hf_vit.results.figures import new_figure

DECISIONS = ("shape", "texture", "other")


def class_decisions(logits: torch.Tensor, labels: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [B, K] -> [B], the class with the largest mean probability of its labels; other labels do not count."""
    probabilities = logits.double().softmax(dim=1)
    scores = [probabilities[:, list(own)].mean(dim=1) for own in labels]
    return torch.stack(scores, dim=1).argmax(dim=1)


def count_decisions(
    decided: NDArray[np.int64], shapes: Sequence[int], textures: Sequence[int], num_classes: int
) -> NDArray[np.int64]:
    """Classes [n] of images with these shapes and textures -> [C, 3]: by class of the shape, how many by which cue."""
    counts = np.zeros((num_classes, len(DECISIONS)), dtype=np.int64)
    for found, shape, texture in zip(decided.tolist(), shapes, textures, strict=True):
        counts[shape, 0 if found == shape else 1 if found == texture else 2] += 1
    return counts


def shape_share(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [..., 3] -> [...], shape decisions as a share of shape and texture decisions; NaN without either."""
    either = counts[..., :2].sum(axis=-1)
    return np.where(either > 0, counts[..., 0], np.nan) / np.maximum(either, 1)


@final
class ShapeBias(Analysis):
    """Decisions of a classifier on images with the shape of one class and the texture of another."""

    name = "shape_bias"
    title = "Shape against texture"
    source = "arXiv 1811.12231, section 2 and figure 4"
    shows = (
        "One bar per shape class: of the images that are given either to their shape's or to their "
        "texture's class, the share that goes to the shape; the line is the share over all images. Images "
        "given to a third class do not count, so it says nothing about accuracy, and it holds for this set "
        "of images alone."
    )
    second_input = "cue_conflicts"
    arrays = describe_arrays(
        shape_bias=("class", "share", "shape decisions among shape and texture decisions, by shape"),
        shape_bias_overall=("all", "share", "the same over all images"),
        decisions=("class decision", "images", "by shape: decided by shape, by texture, otherwise"),
    )

    @classmethod
    def obstacle(cls, context: Context) -> str | None:
        if context.cue_conflicts is None:
            return "it needs images whose shape and texture disagree: give --cue-conflict DIR"
        return None

    def measure(self) -> Arrays:
        conflicts = self.context.cue_conflicts
        assert conflicts is not None
        subject = self.context.subject
        if self.context.optimize:
            subject, self.engine = copy_optimized(subject, conflicts.images.size)
        decided: list[torch.Tensor] = []
        for pixel_values in self.batches(images=conflicts.images):
            with torch.inference_mode():
                output = subject.model(pixel_values, **keywords_of(subject.model, pixel_values))
            decided.append(class_decisions(getattr(output, "logits", output), conflicts.labels).cpu())
        counts = count_decisions(
            torch.cat(decided).numpy(), conflicts.shapes, conflicts.textures, len(conflicts.classes)
        )
        self.notes += [f"classes: {', '.join(conflicts.classes)}", f"decisions: {', '.join(DECISIONS)}"]
        self.notes += conflicts.images.notes + ([] if self.engine is None else [describe_engine(self.engine)])
        return {
            "shape_bias": shape_share(counts).astype(np.float32),
            "shape_bias_overall": shape_share(counts.sum(axis=0, keepdims=True)).astype(np.float32),
            "decisions": counts.astype(np.float32),
        }

    def draw(self, arrays: Arrays) -> Pictures:
        """Draw a bar per class, 0 to 1, and a line for all together; undefined ones are left out."""
        assert self.context.cue_conflicts is not None
        names = self.context.cue_conflicts.classes
        overall = float(arrays["shape_bias_overall"][0])
        figure = new_figure(0.45 * len(names) + 2.2, 3.4)
        axes = figure.add_subplot()
        axes.bar(np.arange(len(names)), np.nan_to_num(arrays["shape_bias"]))
        axes.axhline(overall, color="tab:orange", label=f"all: {overall:.2f}")
        axes.set_xticks(np.arange(len(names)), names, rotation=45, ha="right", parse_math=False)
        axes.set_ylabel("share of shape decisions")
        axes.set_ylim(0, 1)
        axes.legend(fontsize=8)
        return {self.title: figure}

    def summary(self, arrays: Arrays) -> dict[str, Any]:
        overall = float(arrays["shape_bias_overall"][0])
        decisions = dict(zip(DECISIONS, arrays["decisions"].sum(axis=0).astype(int).tolist(), strict=True))
        return {"shape_bias": round(overall, 4) if np.isfinite(overall) else None, "decisions": decisions}
