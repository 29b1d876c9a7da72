"""A certified graph in int8: its dense layers by the runtimes' own quantizers, judged by images it has not seen.

All layers are quantized first. Where that misses the bound on images that set no ranges, every part (an attention, an
MLP, a head) is quantized alone, and those that move the logits most stay in float: one, two, four and so on. On a
processor without VNNI weights take half of their range, as its sums would be cut off otherwise.
"""

import contextlib
import io
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from hf_vit.conversion.targets.graphs.preprocessing import OF_NODES, PIXEL_VALUES, as_given
from hf_vit.conversion.targets.graphs.runtimes import ONNXRUNTIME, OPENVINO, Runtime, openvino_core
from hf_vit.data import ImageData, eval_transform, load_data, to_rgb
from hf_vit.environment import sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.results.writing import asking_why

Mode = Literal["dynamic", "static"]
RANGING, CHOOSING, JUDGING = 320, 1000, 5000  # by 64 images ranges were too narrow: others were cut off
LEAST_LEARNING, LEAST_CHOOSING, LEAST_JUDGING = 64, 400, 200
RANKING = 16  # images by which parts are ranked
# Expected of images like those that choose what stays in float; of a thousand that judge, chance may take some more.
CHOOSING_AGREEMENT = 0.998
DENSE = ("MatMul", "Gemm")
BATCH = 8


@final
@dataclass(frozen=True)
class Images:
    """Images of a data set, in batches of what a graph takes; read anew whenever they are iterated over.

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
        return (given for given, _, _ in self.labeled())

    def first(self, count: int) -> "Images":
        return replace(self, rows=self.rows[:count])

    def labeled(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(what the graph takes, pixel values [B, C, H, W], classes of the data [B]), batch by batch."""
        size = BATCH if self.takes == PIXEL_VALUES else 1
        for start in range(0, len(self.rows), size):
            tables: list[tuple[Any, int]] = [(self.data.split(split), row) for split, row in self.rows[start:][:size]]
            examples = [table[row] for table, row in tables]
            images = [to_rgb(example["image"]) for example in examples]
            given = pixel_values = torch.stack(eval_transform(self.processor).prepare(images))
            if self.takes != PIXEL_VALUES:
                given = as_given(self.takes, torch.from_numpy(np.array(images[0]))[None])
            yield given, pixel_values, torch.tensor([example["label"] for example in examples])


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
                f"{data.name} has {learning} training and {judging} test images; int8 needs "
                f"{LEAST_LEARNING} to set its ranges, and {LEAST_JUDGING} others to check it; give more "
                "(--calibrate)"
            )
        train = _shuffle("train", learning)
        ranging = min(RANGING, max(LEAST_LEARNING, learning // 2))
        choosing = _shuffle("validation", validation)[:CHOOSING]
        choosing += train[ranging:][: max(LEAST_CHOOSING - len(choosing), 0)]
        judges = sorted(_shuffle("test", judging)[:JUDGING])
        return cls(
            data, *(Images(data, rows, processor, takes) for rows in (train[:ranging], choosing or train, judges))
        )


def _shuffle(split: str, count: int) -> list[tuple[str, int]]:
    return [(split, row) for row in np.random.default_rng(0).permutation(count).tolist()]


def expected_agreement(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the share of answers that a change of logits [n, K] is expected to leave, of images like these.

    Of a thousand images a handful are so near to another answer that they turn or do not by chance. So every image's
    lead of the first class over the second is held against every image's change of that lead.
    """
    leads, classes = ours.topk(2).values, ours.topk(2).indices
    lead = leads[:, 0] - leads[:, 1]
    lost = (ours - theirs).gather(1, classes)
    lost = lost[:, 0] - lost[:, 1]
    return 1 - float((lost > lead[:, None]).double().mean())


# Images -> logits [n, K].
Answers = Callable[[Images], torch.Tensor]


class Quantizer(ABC):
    """Abstract: int8 of one runtime's files, in the modes that it has."""

    runtime: Runtime
    modes: tuple[Mode, ...]

    @abstractmethod
    def layers(self, file: Path) -> list[str]:
        """Return the names of the dense layers that have weights, in order."""

    @abstractmethod
    def quantize(self, file: Path, to: Path, mode: Mode, images: Images, layers: Sequence[str]) -> None:
        """Write `file` with these layers in int8; `images` set the ranges of what enters the layers."""


@final
class OnnxQuantizer(Quantizer):
    """By onnxruntime: per channel; "static" as QDQ with ranges from images, "dynamic" with those of every batch."""

    runtime, modes = ONNXRUNTIME, ("dynamic", "static")

    def layers(self, file: Path) -> list[str]:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        weights = {initializer.name for initializer in graph.initializer}
        return [node.name for node in graph.node if node.op_type in DENSE and node.input[1] in weights]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Images, layers: Sequence[str]) -> None:
        from onnxruntime import quantization

        given: dict[str, Any] = {"op_types_to_quantize": list(DENSE), "nodes_to_quantize": list(layers)}
        given |= {"per_channel": True, "reduce_range": sums_int8_in_16_bits()}
        with _silent(), _temporary_files_in(to.parent):
            if mode == "dynamic":
                quantization.quantize_dynamic(file, to, **given)
                return
            batches = iter({images.takes: batch.numpy()} for batch in images)
            reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda _: next(batches, None)})
            quantization.quantize_static(file, to, reader(), activation_type=quantization.QuantType.QUInt8, **given)


@final
class OpenVinoQuantizer(Quantizer):
    """By NNCF, with its preset for transformers."""

    runtime, modes = OPENVINO, ("static",)

    def layers(self, file: Path) -> list[str]:
        operations = openvino_core().read_model(file).get_ordered_ops()
        products = [each.get_friendly_name() for each in operations if each.get_type_name() == "MatMul"]
        return [name for name in products if "/" in name and not name.startswith(OF_NODES)]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Images, layers: Sequence[str]) -> None:
        import openvino

        with _silent():
            import nncf
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet

            model = openvino_core().read_model(file)
            # NNCF would quantize convolutions, attention's own products and sums as well, which costs answers, and
            # cut ranges off at the mean of the images' extremes.
            in_float = [
                operation.get_friendly_name()
                for operation in model.get_ordered_ops()
                if operation.get_type_name() not in ("Parameter", "Result", "Constant", "Convert")
                and operation.get_friendly_name() not in set(layers)
            ]
            quantized = nncf.quantize(
                model,
                nncf.Dataset([image[None].numpy() for batch in images for image in batch]),
                subset_size=len(images),
                model_type=nncf.ModelType.TRANSFORMER,
                ignored_scope=nncf.IgnoredScope(names=in_float, validate=False),
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=nncf.OverflowFix.ENABLE if sums_int8_in_16_bits() else None,
                    activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                ),
            )
            openvino.save_model(quantized, to, compress_to_fp16=False)


QUANTIZERS: dict[str, Quantizer] = {
    quantizer.runtime.package: quantizer for quantizer in (OnnxQuantizer(), OpenVinoQuantizer())
}


def quantize_file(runtime: Runtime, file: Path, mode: Mode, data: Calibration) -> tuple[int, dict[str, float]]:
    """Put a quantized graph in the place of the float one.

    Returns:
        How many dense layers there are, and what stays in float; see `choose`.

    Raises:
        UserError: the graph has no dense layers, or no choice keeps to the bound.
    """
    quantizer = QUANTIZERS[runtime.package]
    layers, parts = quantizer.layers(file), dict[str, list[str]]()
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
        with asking_why(*runtime.parts(file)):
            quantizer.quantize(file, to, mode, images, chosen)
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

    Args:
        answers: of the graph with these layers in int8, their ranges set by these images.
        in_float: the graph's as it is.
        parts: part -> its layers.
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


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Any:
    """Where what a kill leaves goes with the rest of an unfinished export; onnxruntime cannot be told another way."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _silent() -> Any:
    """Without the quantizers' own advice and progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
