"""The engines that a model's graph is computed by, one class and one line in `ENGINES` each; and which is fastest.

Legend: B batch, C channels, H x W px.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch.onnx import ONNXProgram

from hf_vit.conversion.targets.graphs.runtimes import ONNXRUNTIME, openvino_core, with_fast_gelus
from hf_vit.environment import emulates_bfloat16
from hf_vit.results.writing import scratch_folder

_FILE = "model.onnx"


class Engine(ABC):
    """Abstract: a graph of float32 weights, on the CPU, on as many threads as torch has when it is made.

    Attributes:
        package: its name on PyPI.
        extra: of this package, with which it comes.
        needs: what has to be installed.
        dtypes: of models that it computes.
        has_channels_last: in convolutions.
    """

    package: ClassVar[str]
    extra: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    has_channels_last: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, program: ONNXProgram, dtype: torch.dtype) -> Self:
        """Of a graph, and the dtype of the model: products may be computed in it."""

    @abstractmethod
    def run(self, pixel_values: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Images [B, C, H, W], or what the graph takes instead -> outputs of these names, all in the dtype of the
        model; from any thread.
        """

    @classmethod
    @final
    def missing(cls) -> list[str]:
        return [name for name in cls.needs if find_spec(name) is None]


@final
class OpenVinoEngine(Engine):
    """OpenVINO. The batch that comes first is compiled for exactly; all others share a graph for any, which is slower.

    bfloat16 is computed in float32 where the processor has no instructions for it.
    """

    package, extra = "openvino", "openvino,export"
    needs = ("openvino", "onnx", "onnxscript")
    dtypes = (torch.float32, torch.bfloat16)
    has_channels_last = True

    @classmethod
    def of(cls, program: ONNXProgram, dtype: torch.dtype) -> Self:
        return cls(with_fast_gelus(openvino_graph(program)), dtype)

    def __init__(self, graph: Any, dtype: torch.dtype) -> None:
        self._is_half = dtype == torch.bfloat16
        self._graph = _of_half(graph) if self._is_half else graph
        precision = "bf16" if self._is_half and not emulates_bfloat16() else "f32"
        self._options = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._lock = threading.Lock()  # a compiled graph computes one pass at a time
        self._first_shape: torch.Size | None = None
        self._for_first: Any = None
        self._for_any: Any = None

    def run(self, pixel_values: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        import openvino

        # bfloat16, which NumPy lacks, goes in and out as other types of 16 bits.
        array = pixel_values.view(torch.int16).numpy() if self._is_half else pixel_values.numpy()
        images = openvino.Tensor(array, array.shape, openvino.Type.bf16 if self._is_half else openvino.Type.f32)
        with self._lock:
            results = self._compiled_for(pixel_values.shape)([images])
            outputs = {name: torch.from_numpy(results[name].copy()) for name in names}
        return {name: output.view(pixel_values.dtype) for name, output in outputs.items()}

    def _compiled_for(self, shape: torch.Size) -> Any:
        if self._first_shape is None:
            exact = self._graph.clone()
            exact.reshape(list(shape))
            self._for_first = openvino_core().compile_model(exact, "CPU", self._options)
            self._first_shape = shape
        if shape == self._first_shape:
            return self._for_first
        if self._for_any is None:
            self._for_any = openvino_core().compile_model(self._graph, "CPU", self._options)
        return self._for_any


def openvino_graph(program: ONNXProgram) -> Any:
    import openvino

    with scratch_folder("engine") as folder:
        program.save(str(file := folder / _FILE))
        return openvino.convert_model(file)


def _of_half(graph: Any) -> Any:
    """A graph that takes and gives bfloat16: torch's threads, which would convert it, wait on the engine's cores."""
    from openvino import Type
    from openvino.preprocess import PrePostProcessor

    steps = PrePostProcessor(graph)
    steps.input().tensor().set_element_type(Type.bf16)
    for number in range(len(graph.outputs)):
        steps.output(number).tensor().set_element_type(Type.bf16)
    return steps.build()


@final
class OnnxRuntimeEngine(Engine):
    """ONNX Runtime, which has no bfloat16 on CPUs."""

    package, extra = "onnxruntime", "export"
    needs = ("onnxruntime", "onnx", "onnxscript")
    dtypes = (torch.float32,)

    @classmethod
    def of(cls, program: ONNXProgram, dtype: torch.dtype) -> Self:
        with scratch_folder("engine") as folder:
            program.save(str(file := folder / _FILE))
            return cls(file)

    def __init__(self, file: Path) -> None:
        self._graph = ONNXRUNTIME.open(file)

    def run(self, pixel_values: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        outputs = self._graph.run(pixel_values)
        return {name: outputs[name] for name in names}


ENGINES: dict[str, type[Engine]] = {engine.package: engine for engine in (OpenVinoEngine, OnnxRuntimeEngine)}
