"""Batches of labelled and unlabelled images: every labelled one brings its share of the others along.

Which ones, and how they are varied, depends on (seed, epoch, position) alone, as all order does (see `sampling`).
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from hf_vit.data import ImageCollator, TransformedImages
from hf_vit.training.trainer.sampling import derive_seed

UNLABELLED = "unlabelled"


@final
class WithUnlabelled(torch.utils.data.Dataset[dict[str, Any]]):
    """Labelled examples, each with `ratio` unlabelled ones under the key "unlabelled".

    An epoch is one of the labelled images. The unlabelled ones come in shuffled passes of their own, which run on
    through the epochs: each comes once a pass.

    Args:
        labelled: training images.
        unlabelled: the others, through a transform that no one else uses.
        rows: of `unlabelled`, in any number and repetition.
        ratio: unlabelled images a labelled one.
        seed: of the order.
    """

    def __init__(
        self, labelled: TransformedImages, unlabelled: TransformedImages, rows: Sequence[int], ratio: int, seed: int
    ) -> None:
        self.labelled, self.unlabelled, self.ratio, self.seed = labelled, unlabelled, ratio, seed
        self.rows = torch.as_tensor(rows)
        unlabelled.set_epoch(0)  # the number of the draw tells the variations apart
        self._epoch = torch.tensor(0).share_memory_()
        self._orders: dict[int, torch.Tensor] = {}  # of the passes that were drawn from last

    def __len__(self) -> int:
        return len(self.labelled)

    def set_epoch(self, epoch: int) -> None:
        """From now on draw and vary as in this epoch."""
        self._epoch.fill_(epoch)
        self.labelled.set_epoch(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Examples of the labelled images, and with each those that are learnt beside it."""
        begin = int(self._epoch) * len(self)
        draws = [(begin + index) * self.ratio + which for index in indices for which in range(self.ratio)]
        others = self.unlabelled.varied([self._drawn(draw) for draw in draws], draws)
        shares = (others[start : start + self.ratio] for start in range(0, len(others), self.ratio))
        return [
            {**example, UNLABELLED: share}
            for example, share in zip(self.labelled.__getitems__(indices), shares, strict=True)
        ]

    def _drawn(self, draw: int) -> int:
        number, place = divmod(draw, len(self.rows))
        if number not in self._orders:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, number))
            kept = {key: self._orders[key] for key in sorted(self._orders)[-1:]}
            self._orders = {**kept, number: torch.randperm(len(self.rows), generator=generator)}
        return int(self.rows[self._orders[number][place]])


class UnlabelledCollator:
    """Examples to one batch; `join` puts those of `WithUnlabelled` together, others are as `ImageCollator` makes them.

    Args:
        num_labels: K.
        join: (batch of the labelled images, examples of the unlabelled ones) -> the whole batch.
    """

    def __init__(
        self, num_labels: int, join: Callable[[dict[str, torch.Tensor], list[dict[str, Any]]], dict[str, torch.Tensor]]
    ) -> None:
        self._labelled, self._join = ImageCollator(num_labels), join

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._labelled(examples)
        if UNLABELLED not in examples[0]:
            return batch
        return self._join(batch, [other for example in examples for other in example[UNLABELLED]])


def stacked(examples: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The pixels of examples, [n, ...]."""
    return torch.stack([torch.as_tensor(example["pixel_values"]) for example in examples])
