"""Shape bias: whether a classifier follows shape or texture if the two disagree.

Legend: B batch, K labels, C classes.
Source: Geirhos et al., arXiv 1811.12231, section 2 and figure 4.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hf_vit.analysis.analysis import Analysis, Arrays, Context, Pictures, describe_arrays, forward_options
from hf_vit.evaluation.reading import compute_logits, convert_to_scores
from hf_vit.loading.optimizing import copy_optimized, describe_engine
from hf_vit.results.figures import make_figure

DECISIONS = ("shape", "texture", "other")


def decide_classes(probabilities: torch.Tensor, labels: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the predicted class [B] for probabilities [B, K]: the one whose labels have the largest mean probability.

    `labels` has for every class the indices of its labels; other labels are ignored.
    """
    scores = [probabilities[:, list(indices)].mean(dim=1) for indices in labels]
    return torch.stack(scores, dim=1).argmax(dim=1)


def count_decisions(
    predictions: NDArray[np.int64], shapes: Sequence[int], textures: Sequence[int], num_classes: int
) -> NDArray[np.int64]:
    """Return [C, 3]: for every shape class the number of predictions [n] by shape, by texture and by neither."""
    counts = np.zeros((num_classes, len(DECISIONS)), dtype=np.int64)
    # Indices in `DECISIONS`.
    decisions = np.select([predictions == np.array(shapes), predictions == np.array(textures)], [0, 1], default=2)
    np.add.at(counts, (np.array(shapes), decisions), 1)
    return counts


def compute_shape_share(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return shape / (shape + texture) decisions [...] from counts [..., 3]; NaN if both are zero."""
    num_either = counts[..., :2].sum(axis=-1)
    return np.where(num_either > 0, counts[..., 0], np.nan) / np.maximum(num_either, 1)


@final
class ShapeBias(Analysis):
    """Predictions of a classifier for images with the shape of one class and the texture of another."""

    name = "shape_bias"
    title = "Shape against texture"
    source = "arXiv 1811.12231, section 2 and figure 4"
    shows = (
        "One bar per shape class: of the images predicted as the class of their shape or of their texture, the "
        "share predicted as the shape; the line is the share over all images. Images predicted as a third "
        "class do not count, so this is not an accuracy. The result holds for this set of images only."
    )
    second_input = "cue_conflicts"
    arrays = describe_arrays(
        shape_bias=("class", "share", "shape decisions among shape and texture decisions, by shape"),
        shape_bias_overall=("all", "share", "the same over all images"),
        decisions=("class decision", "images", "by shape class: predicted as shape, as texture, as another class"),
    )

    @classmethod
    def find_obstacle(cls, context: Context) -> str | None:
        if context.cue_conflicts is None:
            return "it needs images whose shape and texture disagree; give --cue-conflict DIR"
        return None

    def measure(self) -> Arrays:
        conflicts = self.context.cue_conflicts
        assert conflicts is not None
        loaded = self.context.loaded
        if self.context.optimize:
            loaded, self.engine = copy_optimized(loaded, conflicts.images.size)
        predictions: list[torch.Tensor] = []
        for pixel_values in self.batches(images=conflicts.images):
            with torch.inference_mode():
                logits = compute_logits(loaded.model, pixel_values, **forward_options(loaded.model, pixel_values))
            probabilities = convert_to_scores(loaded.model, logits)
            predictions.append(decide_classes(probabilities, conflicts.labels))
        answers = torch.cat(predictions).numpy()
        counts = count_decisions(answers, conflicts.shapes, conflicts.textures, len(conflicts.classes))
        self.notes += [f"classes: {', '.join(conflicts.classes)}", f"decisions: {', '.join(DECISIONS)}"]
        self.notes += conflicts.images.notes + ([] if self.engine is None else [describe_engine(self.engine)])
        return {
            "shape_bias": compute_shape_share(counts).astype(np.float32),
            "shape_bias_overall": compute_shape_share(counts.sum(axis=0, keepdims=True)).astype(np.float32),
            "decisions": counts.astype(np.float32),
        }

    def draw(self, arrays: Arrays) -> Pictures:
        """Draw a bar per class from 0 to 1, and a line for the overall value; undefined bars are missing."""
        assert self.context.cue_conflicts is not None
        names = self.context.cue_conflicts.classes
        overall = float(arrays["shape_bias_overall"][0])
        figure = make_figure(0.45 * len(names) + 2.2, 3.4)
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
