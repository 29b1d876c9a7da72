"""Dense layers of a graph in int8, by the runtimes' own quantisers; what stays in float is chosen by measuring.

All of them are quantised first. Where that misses the bound on images that set no ranges, every part (an attention, an
MLP, a head) is quantised alone, and those that move the logits most stay in float: one, two, four and so on. On a
processor without VNNI weights take half of their range, as its sums would be cut off otherwise.
"""

import contextlib
import io
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.conversion.targets.graphs.calibration import Calibration, Images, Mode, expected_agreement
from hf_vit.conversion.targets.graphs.preprocessing import OF_NODES
from hf_vit.conversion.targets.graphs.runtimes import ONNXRUNTIME, OPENVINO, Runtime, openvino_core
from hf_vit.environment import sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.results.writing import asking_why

DENSE = ("MatMul", "Gemm")
RANKING = 16  # images by which parts are ranked
# Expected of images like those that choose what stays in float; of a thousand that judge, chance may take some more.
CHOOSING_AGREEMENT = 0.998


# Images -> logits [n, K].
Answers = Callable[[Images], torch.Tensor]


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        parts: part of the graph -> its dense layers.
        in_float: part that stays in float -> relative change of the logits when it alone is quantised.
    """

    parts: dict[str, list[str]]
    in_float: dict[str, float]


class Quantizer(ABC):
    """Abstract: int8 of one runtime's files.

    Attributes:
        runtime: what runs the files.
        modes: what it can do.
    """

    runtime: Runtime
    modes: tuple[Mode, ...]

    @abstractmethod
    def layers(self, file: Path) -> list[str]:
        """Names of the dense layers that have weights, in order."""

    @abstractmethod
    def quantize(self, file: Path, to: Path, mode: Mode, images: Images, layers: Sequence[str]) -> None:
        """Write `file` with these layers in int8.

        Args:
            images: set the ranges of what enters the layers.
        """


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
            # NNCF would quantise convolutions, attention's own products and sums as well, which costs answers, and
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


def quantize_file(quantizer: Quantizer, file: Path, mode: Mode, data: Calibration) -> Choice:
    """Put a quantised graph in the place of the float one.

    Raises:
        UserError: the graph has no dense layers, or no choice keeps to the bound.
    """
    layers = quantizer.layers(file)
    if not layers:
        raise UserError(f"{file.name} has no dense layers to quantise; leave --quantize out")
    parts: dict[str, list[str]] = {}
    for layer in layers:
        module = layer.partition("/")[0]
        parts.setdefault(module.rpartition(".")[0] or module, []).append(layer)
    # Not tempfile's: where nothing may be removed it hides why, by calling itself without end (Python 3.11).
    scratch = file.with_name("quantised")
    scratch.mkdir()
    to = scratch / file.name

    def answers(chosen: Sequence[str], images: Images) -> Answers:
        with asking_why(*quantizer.runtime.parts(file)):
            quantizer.quantize(file, to, mode, images, chosen)
        return logits_of(quantizer.runtime, to)

    try:
        choice = choose(answers, logits_of(quantizer.runtime, file), parts, data)
        for part, place in zip(quantizer.runtime.parts(to), quantizer.runtime.parts(file), strict=True):
            part.replace(place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return choice


def logits_of(runtime: Runtime, file: Path) -> Answers:
    """A graph's answers."""
    graph = runtime.open(file)
    return lambda images: torch.cat([graph.run(batch)["logits"] for batch in images])


def choose(
    answers: Callable[[Sequence[str], Images], Answers],
    in_float: Answers,
    parts: dict[str, list[str]],
    data: Calibration,
) -> Choice:
    """The fewest parts in float, of 0, 1, 2, 4 and so on, with which images like the choosing ones are answered alike.

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
            return Choice(parts, {part: change[part] for part in order[:count]})
        count = 2 * count or 1
    raise UserError(
        f"in int8 only {agreement:.2%} of the answers would stay as in float, to judge by {len(data.choosing)} images, "
        f"with half of the model's {len(parts)} parts in float; {CHOOSING_AGREEMENT:.2%} is needed, so nothing is "
        "written: give other images (--calibrate), or leave --quantize out"
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
    """Without the quantisers' own advice and progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
