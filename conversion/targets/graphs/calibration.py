"""The images that a graph is quantised with, and those that it is judged by, which quantising never sees."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch

from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES, as_given
from hf_vit.data import ImageData, eval_transform, load_data, to_rgb
from hf_vit.errors import UserError

Mode = Literal["dynamic", "static"]
RANGING, CHOOSING, JUDGING = 320, 1000, 5000  # by 64 images ranges were too narrow: others were cut off
LEAST_LEARNING, LEAST_CHOOSING, LEAST_JUDGING = 64, 400, 200
AGREEMENT, ACCURACY = 0.995, 0.003
BATCH = 8


@final
@dataclass(frozen=True)
class Images:
    """Images of a data set, in batches of what a graph takes; read anew whenever they are gone through.

    Attributes:
        rows: (split, row) of every image.
        processor: makes the pixel values.
        takes: see `preprocessing`; images that the graph resizes itself come one by one.
    """

    data: ImageData
    rows: list[tuple[str, int]]
    processor: Any
    takes: str = PIXEL_VALUES

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (given for given, _, _ in self.labelled())

    def first(self, count: int) -> "Images":
        return replace(self, rows=self.rows[:count])

    def labelled(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(what the graph takes, pixel values [B, C, H, W], classes of the data [B]), batch by batch."""
        size = BATCH if self.takes == PIXEL_VALUES else 1
        for start in range(0, len(self.rows), size):
            examples = [self._example(split, row) for split, row in self.rows[start : start + size]]
            images = [to_rgb(example["image"]) for example in examples]
            pixel_values = torch.stack(eval_transform(self.processor).prepare(images))
            given = pixel_values
            if self.takes != PIXEL_VALUES:
                given = as_given(self.takes, torch.from_numpy(np.array(images[0]))[None])
            yield given, pixel_values, torch.tensor([example["label"] for example in examples])

    def _example(self, split: str, row: int) -> dict[str, Any]:
        table: Any = self.data.split(split)
        return table[row]


@final
@dataclass(frozen=True)
class Calibration:
    """Images of a data set.

    Attributes:
        data: where they are from.
        ranging: of the train split, which set ranges and tell how much a part matters.
        choosing: of the validation split and, where it has few, others of the train split, whose answers are surer;
            they decide what stays in float.
        judging: of the test split.
    """

    data: ImageData
    ranging: Images
    choosing: Images
    judging: Images

    @classmethod
    def of(cls, source: str, processor: Any, image_size: tuple[int, int], takes: str = PIXEL_VALUES) -> "Calibration":
        """Read a data set; see `load_data`.

        Raises:
            UserError: it cannot be read, or has too few images.
        """
        data = load_data(source, image_size=image_size)
        learning, validation, judging = (data.num_examples(split) or 0 for split in ("train", "validation", "test"))
        if learning < LEAST_LEARNING or judging < LEAST_JUDGING:
            raise UserError(
                f"{data.name} has {learning} training and {judging} test images; int8 needs {LEAST_LEARNING} to set "
                f"its ranges, and {LEAST_JUDGING} others to be judged by; give more (--calibrate)"
            )
        train = _shuffled("train", learning)
        ranging = min(RANGING, max(LEAST_LEARNING, learning // 2))
        choosing = _shuffled("validation", validation)[:CHOOSING]
        choosing += train[ranging:][: max(LEAST_CHOOSING - len(choosing), 0)]
        judges = sorted(_shuffled("test", judging)[:JUDGING])
        return cls(
            data, *(Images(data, rows, processor, takes) for rows in (train[:ranging], choosing or train, judges))
        )


def _shuffled(split: str, count: int) -> list[tuple[str, int]]:
    return [(split, row) for row in np.random.default_rng(0).permutation(count).tolist()]


def expected_agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of answers that a change of logits [n, K] is expected to leave, of images like these.

    Of a thousand images a handful are so near to another answer that they turn or do not by chance. So every image's
    lead of the first class over the second is held against every image's change of that lead.
    """
    leads, classes = ours.topk(2).values, ours.topk(2).indices
    lead = leads[:, 0] - leads[:, 1]
    lost = (ours - theirs).gather(1, classes)
    lost = lost[:, 0] - lost[:, 1]
    return 1 - float((lost > lead[:, None]).double().mean())
