"""The images that a graph is quantised with, and those that it is judged by, which quantising never sees."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from hf_vit.data import ImageData, eval_transform, load_data
from hf_vit.errors import UserError

Mode = Literal["dynamic", "static"]
RANGING, CHOOSING, JUDGING = 64, 400, 5000
LEAST_LEARNING, LEAST_JUDGING = 64, 200
AGREEMENT, ACCURACY = 0.995, 0.003


@final
@dataclass(frozen=True)
class Calibration:
    """Images of a data set, as the processor makes them.

    Attributes:
        data: where they are from.
        ranging: [n, C, H, W] of the train split, which set ranges and tell how much a part matters.
        choosing: others of it, which decide what stays in float; few splits are so small that they are the same.
        processor: makes the pixels of the test split.
        judging: rows of the test split, ascending.
    """

    data: ImageData
    ranging: torch.Tensor
    choosing: torch.Tensor
    processor: Any
    judging: list[int]

    @classmethod
    def of(cls, source: str, processor: Any, image_size: tuple[int, int]) -> "Calibration":
        """Read a data set; see `load_data`.

        Raises:
            UserError: it cannot be read, or has too few images.
        """
        data = load_data(source, image_size=image_size)
        learning, judging = (data.num_examples(split) or 0 for split in ("train", "test"))
        if learning < LEAST_LEARNING or judging < LEAST_JUDGING:
            raise UserError(
                f"{data.name} has {learning} training and {judging} test images; int8 needs {LEAST_LEARNING} to set "
                f"its ranges, and {LEAST_JUDGING} others to be judged by; give more (--calibrate)"
            )
        order = np.random.default_rng(0).permutation(learning).tolist()
        ranging = _pixels(data, "train", order[:RANGING], processor)
        choosing = _pixels(data, "train", order[RANGING : RANGING + CHOOSING] or order, processor)
        judges = sorted(np.random.default_rng(0).permutation(judging)[:JUDGING].tolist())
        return cls(data, ranging, choosing, processor, judges)

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of the test split: (images [B, C, H, W], classes of the data [B]), one after the other."""
        table: Any = self.data.split("test")
        for start in range(0, len(self.judging), size):
            rows = self.judging[start : start + size]
            yield _pixels(self.data, "test", rows, self.processor), torch.tensor(table.select(rows)["label"])


def _pixels(data: ImageData, split: str, rows: list[int], processor: Any) -> torch.Tensor:
    table: Any = data.split(split)
    images = table.select(rows)["image"]
    return torch.stack(eval_transform(processor).prepare(list(images)))


def agreement_of(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of the rows of logits [n, K] with the same largest one."""
    return float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
