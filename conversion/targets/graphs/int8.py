"""A certified graph in int8: its dense layers by the runtimes' own quantizers, judged by images it has not seen.

All layers are quantized first. Where that misses the bound on images that set no ranges, every part (an attention, an
MLP, a head) is quantized alone, and those that move the logits most stay in float: one, two, four and so on. On a
processor without VNNI weights take half of their range, as its sums would be cut off otherwise.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES, as_given
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Mode, Runtime
from hf_vit.data import ImageData, eval_transform, load_data, to_rgb
from hf_vit.errors import UserError
from hf_vit.results.writing import diagnose_write_failure

RANGING, CHOOSING, JUDGING = 320, 1000, 5000  # by 64 images ranges were too narrow: others were cut off
LEAST_LEARNING, LEAST_CHOOSING, LEAST_JUDGING = 64, 400, 200
RANKING = 16  # images by which parts are ranked
# Expected of images like those that choose what stays in float; of a thousand that judge, chance may take some more.
CHOOSING_AGREEMENT = 0.998
BATCH = 8


@final
@dataclass(frozen=True)
class Images:
    """Images of a data set, in batches of what a graph takes; read anew whenever they are iterated over."""

    data: ImageData
    rows: list[tuple[str, int]]  # (split, row)
    processor: Any  # makes the pixel values
    takes: str = PIXEL_VALUES  # see `preprocessing`; images that the graph resizes itself come one by one

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch for batch, _, _ in self.labeled())

    def first(self, count: int) -> "Images":
        return replace(self, rows=self.rows[:count])

    def labeled(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Iterate over (what the graph takes, pixel values [B, C, H, W], classes of the data [B])."""
        size = BATCH if self.takes == PIXEL_VALUES else 1
        for start in range(0, len(self.rows), size):
            tables: list[tuple[Any, int]] = [(self.data.split(split), row) for split, row in self.rows[start:][:size]]
            examples = [table[row] for table, row in tables]
            images = [to_rgb(example["image"]) for example in examples]
            batch = pixel_values = torch.stack(eval_transform(self.processor).prepare(images))
            if self.takes != PIXEL_VALUES:
                batch = as_given(self.takes, torch.from_numpy(np.array(images[0]))[None])
            yield batch, pixel_values, torch.tensor([example["label"] for example in examples])


@final
@dataclass(frozen=True)
class Calibration:
    """Images of a data set, by what they decide."""

    data: ImageData
    ranging: Images  # of the train split: ranges, and how much a part matters
    # Of the validation split and, where it has few, others of the train split, whose answers are surer: what stays in
    # float.
    choosing: Images
    judging: Images  # of the test split

    @classmethod
    def of(cls, source: str, processor: Any, image_size: tuple[int, int], takes: str = PIXEL_VALUES) -> "Calibration":
        """Read a data set, see `load_data`; a UserError where it cannot be read, or has too few images."""
        data = load_data(source, image_size=image_size)
        learning, validation, judging = (data.num_examples(split) or 0 for split in ("train", "validation", "test"))
        if learning < LEAST_LEARNING or judging < LEAST_JUDGING:
            raise UserError(
                f"{data.name} has {learning} training and {judging} test images; int8 needs "
                f"{LEAST_LEARNING} to set its ranges, and {LEAST_JUDGING} others to check it; give more "
                "(--calibrate)"
            )
        train, others, judges = (
            [(split, row) for row in np.random.default_rng(0).permutation(count).tolist()]
            for split, count in (("train", learning), ("validation", validation), ("test", judging))
        )
        ranging, choosing = min(RANGING, max(LEAST_LEARNING, learning // 2)), others[:CHOOSING]
        choosing += train[ranging:][: max(LEAST_CHOOSING - len(choosing), 0)]
        chosen = train[:ranging], choosing or train, sorted(judges[:JUDGING])
        return cls(data, *(Images(data, rows, processor, takes) for rows in chosen))


def expected_agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the share of answers that a change of logits [n, K] is expected to leave, of images like these.

    Of a thousand images a handful are so near to another answer that they turn or do not by chance. So every image's
    lead of the first class over the second is held against every image's change of that lead.
    """
    leads, classes = ours.topk(2)
    lost = (ours - theirs).gather(1, classes)
    lead, lost = (pairs[:, 0] - pairs[:, 1] for pairs in (leads, lost))
    return 1 - float((lost > lead[:, None]).double().mean())


# Images -> logits [n, K].
Answers = Callable[[Images], torch.Tensor]


QUANTIZERS = {name: runtime for name, runtime in RUNTIMES.items() if runtime.modes}


def quantize_file(runtime: Runtime, file: Path, mode: Mode, data: Calibration) -> tuple[int, dict[str, float]]:
    """Put a quantized graph in the place of the float one; return how many dense layers it has, and see `choose`."""
    layers, parts = runtime.dense_layers(file), dict[str, list[str]]()
    if not layers:
        raise UserError(f"{file.name} has no dense layers to quantize; leave --quantize out")
    for layer in layers:
        module = layer.partition("/")[0]
        parts.setdefault(module.rpartition(".")[0] or module, []).append(layer)
    # Not tempfile's: where nothing may be removed it hides why, by calling itself without end (Python 3.11).
    scratch = file.with_name("quantised")
    scratch.mkdir()
    to = scratch / file.name

    def answers(chosen: Sequence[str], images: Images) -> Answers:
        with diagnose_write_failure(*runtime.parts(file)):
            runtime.quantize(file, to, mode, images, chosen)
        return _logits_of(runtime, to)

    try:
        in_float = choose(answers, _logits_of(runtime, file), parts, data)
        for part, place in zip(runtime.parts(to), runtime.parts(file), strict=True):
            part.replace(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return len(layers), in_float


def _logits_of(runtime: Runtime, file: Path) -> Answers:
    graph = runtime.open(file)
    return lambda images: torch.cat([graph.run(batch)["logits"] for batch in images])


def choose(
    answers: Callable[[Sequence[str], Images], Answers],
    in_float: Answers,
    parts: dict[str, list[str]],
    data: Calibration,
) -> dict[str, float]:
    """Return the fewest parts in float, of 0, 1, 2, 4 and so on, with which images like the choosing ones are answered
    alike, with the relative change of the logits when each alone is quantized.

    `answers` are those of the graph with these layers of `parts` in int8, their ranges set by these images.
    """
    wanted, few = in_float(data.choosing), data.ranging.first(RANKING)
    change, order = dict[str, float](), list[str]()
    count = agreement = 0
    while count <= len(parts) // 2:
        if count == 1:
            before = in_float(few)
            change = {
                part: float((answers(own, few)(few) - before).norm() / before.norm()) for part, own in parts.items()
            }
            order = sorted(parts, key=lambda part: -change[part])
        left = [layer for part, own in parts.items() if part not in order[:count] for layer in own]
        agreement = expected_agreement(wanted, answers(left, data.ranging)(data.choosing))
        if agreement >= CHOOSING_AGREEMENT:
            return {part: change[part] for part in order[:count]}
        count = 2 * count or 1
    raise UserError(
        f"in int8 only {agreement:.2%} of the answers would stay as in float, measured on "
        f"{len(data.choosing)} images, with half of the model's {len(parts)} parts in float; "
        f"{CHOOSING_AGREEMENT:.2%} is needed, so nothing was written: give other images (--calibrate), or "
        "leave --quantize out"
    )
