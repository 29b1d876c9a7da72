"""Quantize a certified graph to int8 and measure the result on held-out images.

First all dense layers are quantized. If too many answers change, every part (an attention, an MLP, a head) is quantized
alone, and the parts that change the logits most stay in float: one, two, four and so on. If that leaves no margin for
chance, but enough answers on the choosing images, the held-out images decide. On processors without VNNI weights of
ONNX Runtime and of static graphs use half of their range, so that sums cannot saturate.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch

from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES, convert_images
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Mode, Runtime
from hf_vit.data import ImageData, eval_transform, load_data, to_rgb
from hf_vit.data.transforms import refuse_own_shapes
from hf_vit.errors import UserError
from hf_vit.writing import diagnose_write_failure

# Images that set ranges, choose the parts that stay in float, and measure the result: the most used, the least needed.
# With 64 images for ranges, values of other images were cut off.
RANGING, CHOOSING, JUDGING = 320, 1000, 5000
LEAST_LEARNING, LEAST_CHOOSING, LEAST_JUDGING = 64, 400, 200
RANKING = 16  # number of images to rank the parts
# The default share of held-out images that must keep the model's class. The choosing images, of which fewer may change,
# as on held-out images it may be lower by chance, and the accuracy that may be lost follow from it.
AGREEMENT = 0.995
_CHANGED_WHEN_CHOOSING, _LOST_ACCURACY = 0.4, 0.6  # per share of held-out images that may change
BATCH = 8


@final
@dataclass(frozen=True)
class Images:
    """Images of a data set, as batches of a graph's input; they are read anew in every iteration."""

    data: ImageData
    rows: list[tuple[str, int]]  # (split, row)
    processor: Any  # image processor
    takes: str = PIXEL_VALUES  # the graph's input, see `preprocessing`; images that the graph resizes come one by one

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch for batch, _, _ in self.iterate_labeled_batches())

    def first(self, count: int) -> "Images":
        """Return only the first images."""
        return replace(self, rows=self.rows[:count])

    def iterate_labeled_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Iterate over (the graph's input, pixel values [B, C, H, W], classes of the data [B])."""
        size = BATCH if self.takes == PIXEL_VALUES else 1
        for start in range(0, len(self.rows), size):
            rows = self.rows[start : start + size]
            examples = [cast(Any, self.data.split(split))[row] for split, row in rows]
            images = [to_rgb(example["image"]) for example in examples]
            batch = pixel_values = torch.stack(eval_transform(self.processor).prepare(images))
            if self.takes != PIXEL_VALUES:
                batch = convert_images(self.takes, torch.from_numpy(np.array(images[0]))[None])
            yield batch, pixel_values, torch.tensor([example["label"] for example in examples])


@final
@dataclass(frozen=True)
class Calibration:
    """Images of a data set by their use."""

    data: ImageData
    ranging: Images  # from the train split, to set ranges and to rank parts
    choosing: Images  # from the validation split, if it has few also from the train split, to choose parts in float
    judging: Images  # from the test split, to measure the result
    agreement: float = AGREEMENT  # required share of the judging images with the model's class

    @property
    def choosing_agreement(self) -> float:
        """Return the share of the choosing images that must be expected to keep their class."""
        return 1 - _CHANGED_WHEN_CHOOSING * (1 - self.agreement)

    @property
    def lost_accuracy(self) -> float:
        """Return the accuracy on the judging images that may be lost."""
        return _LOST_ACCURACY * (1 - self.agreement)

    def describe_remedy(self, choosing: float = 1.0, judging: float = 1.0, lost: float = 0.0) -> str:
        """Return the option that would accept these measured shares and this lost accuracy, in words."""
        changed = max(1 - choosing, 1 - judging, lost / _LOST_ACCURACY)
        accepted = math.floor(100 * (1 - changed)) / 100
        return f"accept it with --agreement {accepted:g}, " if accepted > 0 else ""

    @classmethod
    def load(
        cls,
        source: str,
        processor: Any,
        image_size: tuple[int, int],
        takes: str = PIXEL_VALUES,
        agreement: float = AGREEMENT,
    ) -> "Calibration":
        """Load a data set, see `load_data`; raise a UserError if it cannot be read or has too few images."""
        refuse_own_shapes(processor, "--quantize")
        data = load_data(source, image_size=image_size, skip_bad_images=True)

        def shuffle_rows(split: str) -> list[tuple[str, int]]:
            order = np.random.default_rng(0).permutation(data.num_examples(split) or 0)
            return [(split, row) for row in order.tolist()]

        train, validation, test = map(shuffle_rows, ("train", "validation", "test"))
        if len(train) < LEAST_LEARNING or len(test) < LEAST_JUDGING:
            raise UserError(
                f"{data.name} has {len(train)} training and {len(test)} test images, but int8 needs at least "
                f"{LEAST_LEARNING} and {LEAST_JUDGING}; give a larger data set with --calibrate"
            )
        num_ranging = min(RANGING, max(LEAST_LEARNING, len(train) // 2))
        choosing = validation[:CHOOSING]
        choosing += train[num_ranging:][: max(LEAST_CHOOSING - len(choosing), 0)]
        uses = train[:num_ranging], choosing or train, sorted(test[:JUDGING])
        ranging, choosing_images, judging = (Images(data, rows, processor, takes) for rows in uses)
        return cls(data, ranging, choosing_images, judging, agreement)


def estimate_agreement(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the share of images like these whose class is expected to stay the same after a change of logits [n, K].

    A few images are so close to another class that they change it by chance. To average this out, every image's lead of
    its first class over its second is compared with every image's change of that lead.
    """
    best_two, classes = expected.topk(2)
    losses = (expected - actual).gather(1, classes)
    lead, lost_lead = best_two[:, 0] - best_two[:, 1], losses[:, 0] - losses[:, 1]
    return 1 - float((lost_lead > lead[:, None]).double().mean())


RunGraph = Callable[[Images], torch.Tensor]  # images -> logits [n, K]
QUANTIZERS = {name: runtime for name, runtime in RUNTIMES.items() if runtime.modes}


def quantize_file(runtime: Runtime, file: Path, mode: Mode, data: Calibration) -> tuple[int, dict[str, float]]:
    """Replace the float graph by a quantized one; return its number of dense layers, and what stayed in float.

    The parts in float and their changes come from `choose_float_parts`.
    """
    layers = runtime.list_dense_layers(file)
    parts = dict[str, list[str]]()
    if not layers:
        raise UserError(f"{file.name} has no dense layers, so there is nothing to quantize; leave --quantize out")
    for layer in layers:
        module = layer.partition("/")[0]
        parts.setdefault(module.rpartition(".")[0] or module, []).append(layer)
    # tempfile's folder would hide an error when it cannot be removed, as it then recurses endlessly (Python 3.11).
    scratch = file.with_name("quantised")
    scratch.mkdir()
    quantized_file = scratch / file.name

    def quantize_layers(layers_to_quantize: Sequence[str], images: Images) -> RunGraph:
        with diagnose_write_failure(*runtime.parts(file)):
            runtime.quantize(file, quantized_file, mode, images, layers_to_quantize)
        return _make_graph_runner(runtime, quantized_file)

    try:
        float_parts = choose_float_parts(quantize_layers, _make_graph_runner(runtime, file), parts, data)
        for part, target in zip(runtime.parts(quantized_file), runtime.parts(file), strict=True):
            part.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return len(layers), float_parts


def _make_graph_runner(runtime: Runtime, file: Path) -> RunGraph:
    """Open a graph; return a function from images to its logits."""
    graph = runtime.open(file)
    return lambda images: torch.cat([graph.run(batch)["logits"] for batch in images])


def choose_float_parts(
    quantize: Callable[[Sequence[str], Images], RunGraph],
    run_float_graph: RunGraph,
    parts: dict[str, list[str]],
    data: Calibration,
) -> dict[str, float]:
    """Find how few parts must stay in float so that enough images keep their class; try 0, 1, 2, 4, ... parts.

    The parts that change the logits most when they are quantized alone stay in float first. What `quantize` wrote last
    is the result.

    Args:
        quantize: quantizes the given layers, with ranges from the given images, and returns the graph as a function.
        run_float_graph, data: the unquantized graph, and the images.
        parts: part -> its dense layers.

    Returns:
        Part in float -> relative change of the logits when only this part is quantized.
    """
    expected_logits = run_float_graph(data.choosing)
    ranking_images = data.ranging.first(RANKING)
    relative_changes: dict[str, float] = {}
    parts_by_change: list[str] = []
    agreements: dict[int, float] = {}  # number of parts in float -> estimated share of unchanged answers

    def quantize_others(num_float_parts: int) -> RunGraph:
        """Quantize all but so many parts."""
        in_float = parts_by_change[:num_float_parts]
        layers = [layer for part, own in parts.items() if part not in in_float for layer in own]
        return quantize(layers, data.ranging)

    num_float_parts = 0
    while num_float_parts <= len(parts) // 2:
        if num_float_parts == 1:  # the parts need an order only if quantizing all of them failed
            float_logits = run_float_graph(ranking_images)
            for part, layers in parts.items():
                logits = quantize(layers, ranking_images)(ranking_images)
                relative_changes[part] = float((logits - float_logits).norm() / float_logits.norm())
            parts_by_change = sorted(parts, key=lambda part: -relative_changes[part])
        agreement = estimate_agreement(expected_logits, quantize_others(num_float_parts)(data.choosing))
        agreements[num_float_parts] = agreement
        if agreement >= data.choosing_agreement:
            break
        num_float_parts = 2 * num_float_parts or 1
    else:  # even half of the parts in float leave no margin
        num_float_parts = max(agreements, key=lambda number: agreements[number])
        best_agreement = agreements[num_float_parts]
        if best_agreement < data.agreement:
            raise UserError(
                f"in int8 only {best_agreement:.2%} of {len(data.choosing)} images keep their class, even "
                f"with half of the model's {len(parts)} parts in float, but {data.agreement:.2%} are required, so "
                f"nothing was written; {data.describe_remedy(choosing=best_agreement)}give other images "
                "with --calibrate, or leave --quantize out"
            )
        if num_float_parts != list(agreements)[-1]:
            quantize_others(num_float_parts)
    return {part: relative_changes[part] for part in parts_by_change[:num_float_parts]}
