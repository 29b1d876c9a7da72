"""Accuracy on corrupted images.

Legend: B batch, C channels, H x W px.
Source: arXiv 1903.12261 (ImageNet-C); see `corruptions.py` for what is made here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.corruptions import CORRUPTIONS, corrupt, known_corruptions
from hf_vit.evaluation.protocols.curves import Line, curves
from hf_vit.evaluation.protocols.frame import OneTableResult, Table, percent
from hf_vit.evaluation.reading import finite_logits
from hf_vit.loading.pixels import PixelScale, image_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEVERITIES = (1, 2, 3, 4, 5)


@final
@dataclass(frozen=True, repr=False)
class CorruptionsResult(OneTableResult):
    """What `corruptions` measured.

    Attributes:
        num_images: images that judged, each under every corruption.
        clean: accuracy without corruption.
        accuracy: corruption -> [5], by severity.
    """

    title: ClassVar[str] = "Common corruptions"
    source: ClassVar[str] = "arXiv 1903.12261"
    num_images: int
    clean: float
    accuracy: dict[str, list[float]]

    @property
    def mean_error(self) -> float:
        """Mean of the errors over severities and corruptions; not set against another model's, as in ImageNet-C."""
        return 1 - float(np.mean(list(self.accuracy.values())))

    def values(self) -> dict[str, Any]:
        return {
            "clean_accuracy": self.clean,
            "mean_corruption_error": self.mean_error,
            "error_above_clean": self.mean_error - (1 - self.clean),
            "accuracy_by_severity": self.accuracy,
        }

    def headline(self) -> dict[str, float]:
        every, some = len(CORRUPTIONS), len(self.accuracy)
        which = f"{every} corruptions" if some == every else f"{some} of {every} corruptions"
        return {f"mean error under {which}": self.mean_error}

    def table(self) -> Table:
        header = ["accuracy by severity", *map(str, SEVERITIES), "mean"]
        rows = [
            [name.replace("_", " "), *map(percent, found), percent(float(np.mean(found)))]
            for name, found in self.accuracy.items()
        ]
        every = [float(np.mean(column)) for column in zip(*self.accuracy.values(), strict=True)]
        rows.append(["all", *map(percent, every), percent(1 - self.mean_error)])
        return Table(header, rows)

    def draw(self) -> "Figure":
        lines = [
            Line(name.replace("_", " "), SEVERITIES, [100 * value for value in found])
            for name, found in self.accuracy.items()
        ]
        return curves(lines, "severity", "accuracy (%)", level=("not corrupted", 100 * self.clean))


def corruptions(examination: Examination, *, kinds: Sequence[str] | None = None) -> CorruptionsResult:
    """Accuracy on corrupted images, of every kind and severity.

    Images are corrupted as the model sees them, resized and cropped; the randomness of an image depends on the seed
    and on its content alone.

    Args:
        examination: the classifier and the data.
        kinds: names of `CORRUPTIONS`; all by default.

    Raises:
        UserError: an unknown kind, or the image processor does more than scale pixels.
    """
    names = known_corruptions(kinds)
    scale, model = PixelScale.of(examination.subject), examination.subject.model
    hits, clean, images = {name: np.zeros(len(SEVERITIES)) for name in names}, 0, 0
    with torch.inference_mode():
        for values, labels in examination.judging("corrupting"):
            pixels = scale.pixels(values).clamp(0, 1)
            clean += int((finite_logits(model, values).argmax(dim=1) == labels).sum())
            for name in names:
                for place, severity in enumerate(SEVERITIES):
                    changed = scale.values(corrupt_batch(pixels, name, severity, examination.seed))
                    hits[name][place] += int((finite_logits(model, changed).argmax(dim=1) == labels).sum())
            images += len(labels)
    return CorruptionsResult(images, clean / images, {name: (found / images).tolist() for name, found in hits.items()})


def corrupt_batch(pixels: torch.Tensor, name: str, severity: int, seed: int) -> torch.Tensor:
    """Pixels [B, 3, H, W] in 0..1, each image corrupted by its own randomness."""
    kind = list(CORRUPTIONS).index(name)
    pictures = pixels.permute(0, 2, 3, 1).double().cpu().numpy()
    changed = [
        corrupt(picture, name, severity, image_generator(image, seed, kind, severity))
        for picture, image in zip(pictures, pixels, strict=True)
    ]
    return torch.from_numpy(np.stack(changed)).permute(0, 3, 1, 2).to(pixels.device, pixels.dtype)
