"""The runtimes that graphs run in, one class and one line in `RUNTIMES` each: a file in, a function out.

Some of them also compute the passes of models as engines of `optimize_for_inference`.
"""

import hashlib
import logging
import math
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch

from hf_vit.conversion.targets.graphs.preprocessing import DECODING, OF_NODES
from hf_vit.environment import emulates_bfloat16, has_avx2_alone, sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.results.writing import scratch_folder

Outputs = dict[str, torch.Tensor]
EXTENSIONS = "onnxruntime_extensions"
OUTPUTS = "outputs"  # under which an ExecuTorch program says what its outputs are called
Mode = Literal["dynamic", "static"]
DENSE = ("MatMul", "Gemm")
FRAMEWORK = "framework"  # under which OpenVINO keeps the metadata of the ONNX graph that it read


@contextmanager
def _quietly_in(folder: Path) -> Any:
    """Silence the quantizers, and put onnxruntime's temporary files where a kill's go with the unfinished export."""
    before, tempfile.tempdir, level = tempfile.tempdir, str(folder), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        tempfile.tempdir = before
        logging.disable(level)


@dataclass(frozen=True)
class Graph:
    """A graph that was opened or compiled."""

    run: Callable[..., Outputs]  # images -> outputs by name, of an engine (images, names) -> those
    outputs: list[str]
    about: Mapping[str, str]  # the file's metadata


class Runtime(ABC):
    """Abstract: what runs graphs of one kind, on the CPU.

    A graph that is opened keeps the number of threads that torch has then; ExecuTorch's is its own choice.
    """

    package: ClassVar[str]  # on PyPI and in certificates
    target: ClassVar[str]  # of `hf-vit export --to`
    file: ClassVar[str]
    extra: ClassVar[str]  # of this package, with which the runtime comes
    keeps_nan: ClassVar[bool] = True  # in a ReLU and in max pooling, as a ResNet has them
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # of models that it computes as an engine; none: it is no engine
    has_channels_last: ClassVar[bool] = False  # in convolutions
    modes: ClassVar[tuple[Mode, ...]] = ()  # of int8

    @abstractmethod
    def open(self, file: Path) -> Graph:
        """Read a file; raises what the runtime raises."""

    def compile(self, program: Any, dtype: torch.dtype) -> Graph:
        """Return torch's ONNXProgram as an engine's graph for a model of this dtype; it may be run by any thread."""
        raise NotImplementedError(f"{self.package} is no engine")

    def dense_layers(self, file: Path) -> list[str]:
        """Return the names of the dense layers that have weights, in order."""
        raise NotImplementedError(f"{self.package} has no int8")

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        """Write `file` with these layers in int8; `images` (`int8.Images`) set the ranges of what enters the layers."""
        raise NotImplementedError(f"{self.package} has no int8")

    def parts(self, file: Path) -> list[Path]:
        """Return all files of a graph."""
        return [file]

    @final
    def missing(self) -> list[str]:
        """Return what is not installed of what an engine needs."""
        return [name for name in (self.package, "onnx", "onnxscript") if find_spec(name) is None]

    @property
    @final
    def engine_extra(self) -> str:
        return ",".join(dict.fromkeys((self.extra, "export")))

    @final
    def sha256(self, file: Path) -> str:
        """Hash all parts, one after the other."""
        digest = hashlib.sha256()
        for part in self.parts(file):
            with part.open("rb") as opened:
                hashlib.file_digest(opened, lambda: digest)
        return digest.hexdigest()

    @final
    def version(self) -> str:
        return version(self.package)

    @final
    def require(self, file: Path) -> None:
        """Raise a UserError where the runtime is missing."""
        if find_spec(self.package) is None:
            raise UserError(f'{file} needs {self.package}: pip install "hf-vit[{self.extra}]"')


@final
class OnnxRuntime(Runtime):
    """`model.onnx`; as an engine it has no bfloat16 on CPUs.

    In int8 per channel: "static" as QDQ with ranges from images, "dynamic" with those of every batch.
    """

    package, target, file, extra = "onnxruntime", "onnx", "model.onnx", "export"
    dtypes, modes = (torch.float32,), ("dynamic", "static")

    def open(self, file: Path) -> Graph:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what is wrong is said once, by the error
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes cores from who comes next
        start = partial(onnxruntime.InferenceSession, str(file), options, providers=["CPUExecutionProvider"])
        try:
            session = start()
        except Exception as error:  # it has a class for every reason
            if DECODING not in str(error):
                raise
            if find_spec(EXTENSIONS) is None:
                raise ImportError(f'{file} needs onnxruntime-extensions: pip install "hf-vit[export]"') from error
            from onnxruntime_extensions import get_library_path

            options.register_custom_ops_library(get_library_path())
            session = start()
        names = [output.name for output in session.get_outputs()]
        return Graph(partial(_run_onnx, session), names, session.get_modelmeta().custom_metadata_map)

    def compile(self, program: Any, dtype: torch.dtype) -> Graph:
        with scratch_folder("engine") as folder:
            program.save(str(file := folder / self.file))
            return self.open(file)

    def dense_layers(self, file: Path) -> list[str]:
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        weights = {initializer.name for initializer in graph.initializer}
        return [node.name for node in graph.node if node.op_type in DENSE and node.input[1] in weights]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        from onnxruntime import quantization

        options: dict[str, Any] = {"op_types_to_quantize": list(DENSE), "nodes_to_quantize": list(layers)}
        options |= {"per_channel": True, "reduce_range": sums_int8_in_16_bits()}
        with _quietly_in(to.parent):
            if mode == "dynamic":
                quantization.quantize_dynamic(file, to, **options)
                return
            batches = iter({images.takes: batch.numpy()} for batch in images)
            reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda _: next(batches, None)})
            quantization.quantize_static(file, to, reader(), activation_type=quantization.QuantType.QUInt8, **options)


def _run_onnx(session: Any, images: torch.Tensor, names: Sequence[str] | None = None) -> Outputs:
    names = names or [output.name for output in session.get_outputs()]
    arrays = session.run(names, {session.get_inputs()[0].name: images.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


@cache
def openvino_core() -> Any:
    """Return the one core of the process, kept to its end.

    Whoever compiles first gives the thread another stack for signals and puts the former back when it goes: of two, the
    one that goes last may put back one that is freed, and the next signal ends the process.
    """
    import openvino

    return openvino.Core()


def _compile_openvino(graph: Any, precision: str) -> Any:
    hints = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    return openvino_core().compile_model(graph, "CPU", hints | {"INFERENCE_NUM_THREADS": torch.get_num_threads()})


def with_fast_gelus(graph: Any) -> Any:
    """Return an OpenVINO graph; where AVX2 is all there is with every GELU in the terms of its definition, in a form
    that OpenVINO does not take for one: it leaves a product with a GELU in it to a slower library there than others.
    """
    if not has_avx2_alone():
        return graph
    from openvino import opset13 as ops

    for gelu in [each for each in graph.get_ops() if each.get_type_name() == "Gelu"]:
        x = gelu.input_value(0)
        number = partial(ops.constant, dtype=x.get_element_type())
        if gelu.get_attributes().get("approximation_mode", "ERF") == "ERF":  # the older operator has no choice
            half = ops.multiply(x, number(0.5))
            apart = ops.add(ops.multiply(half, ops.erf(ops.multiply(x, number(math.sqrt(0.5))))), half)
        else:  # 0.5 * (1 + tanh(u)) is sigmoid(2 u)
            factor = 2 * math.sqrt(2 / math.pi)
            cubic = ops.add(ops.multiply(ops.multiply(x, x), number(0.044715 * factor)), number(factor))
            apart = ops.multiply(x, ops.sigmoid(ops.multiply(x, cubic)))
        for reader in gelu.output(0).get_target_inputs():
            reader.replace_source_output(apart.output(0))
    return graph


@final
class OpenVino(Runtime):
    """`openvino_model.xml`, with its weights beside it; computed in float32, where OpenVINO would choose bfloat16.

    In int8 by NNCF, with its preset for transformers.
    """

    package, target, file, extra = "openvino", "openvino", "openvino_model.xml", "openvino"
    keeps_nan, has_channels_last = False, True
    dtypes, modes = (torch.float32, torch.bfloat16), ("static",)

    def open(self, file: Path) -> Graph:
        with file.open("rb") as opened:
            if b"<net" not in opened.read(1024):  # OpenVINO would try other libraries' files, and log how that goes
                raise ValueError("it is not an OpenVINO model; export the model again with --to openvino")
        model = with_fast_gelus(openvino_core().read_model(file))
        names = [output.get_any_name() for output in model.outputs]
        keys = model.get_rt_info([FRAMEWORK]).value if model.has_rt_info([FRAMEWORK]) else {}
        about = {key: model.get_rt_info([FRAMEWORK, key]).astype(str) for key in keys}
        compiled = _compile_openvino(model, "f32")
        return Graph(partial(_run_openvino, compiled, names, about.get("image_sizes", "others")), names, about)

    def compile(self, program: Any, dtype: torch.dtype) -> Graph:
        return openvino_engine(openvino_graph(program), dtype)

    def parts(self, file: Path) -> list[Path]:
        return [file, file.with_suffix(".bin")]

    def dense_layers(self, file: Path) -> list[str]:
        operations = openvino_core().read_model(file).get_ordered_ops()
        products = [each.get_friendly_name() for each in operations if each.get_type_name() == "MatMul"]
        return [name for name in products if "/" in name and not name.startswith(OF_NODES)]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        import openvino

        with _quietly_in(to.parent):
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


def _run_openvino(compiled: Any, names: list[str], sizes: str, images: torch.Tensor) -> Outputs:
    # On one thread OpenVINO loses its error about a size: a request that was used before gives its earlier answers
    # again, a new one none.
    results = compiled.create_infer_request().infer([images.numpy()])
    if any(len(results[name]) != len(images) for name in names):
        size = "x".join(map(str, images.shape[2:]))
        raise UserError(f"OpenVINO gives no answer for images of {size} px; resize them: the graph takes {sizes}")
    return {name: torch.from_numpy(results[name].copy()) for name in names}


def openvino_graph(program: Any) -> Any:
    """Return torch's ONNXProgram as a graph of OpenVINO's."""
    import openvino

    with scratch_folder("engine") as folder:
        program.save(str(file := folder / ONNXRUNTIME.file))
        return openvino.convert_model(file)


def openvino_engine(graph: Any, dtype: torch.dtype) -> Graph:
    """Return a graph of OpenVINO's as an engine's, which takes and gives this dtype.

    The batch that comes first is compiled for exactly; all others share a graph for any, which is slower. bfloat16 is
    computed in float32 where the processor has no instructions for it.
    """
    import openvino

    is_half = dtype == torch.bfloat16
    graph = with_fast_gelus(graph)
    if is_half:  # torch's threads, which would convert it, wait on the engine's cores
        steps = openvino.preprocess.PrePostProcessor(graph)
        steps.input().tensor().set_element_type(openvino.Type.bf16)
        for number in range(len(graph.outputs)):
            steps.output(number).tensor().set_element_type(openvino.Type.bf16)
        graph = steps.build()
    precision = "bf16" if is_half and not emulates_bfloat16() else "f32"
    compiled: dict[torch.Size | None, Any] = {}
    lock = threading.Lock()  # a compiled graph computes one pass at a time

    def run(images: torch.Tensor, names: Sequence[str]) -> Outputs:
        # bfloat16, which NumPy lacks, goes in and out as another type of 16 bits.
        array = images.view(torch.int16).numpy() if is_half else images.numpy()
        tensor = openvino.Tensor(array, array.shape, openvino.Type.bf16 if is_half else openvino.Type.f32)
        with lock:
            shape = images.shape if not compiled or images.shape in compiled else None
            if shape not in compiled:
                exact = graph if shape is None else graph.clone()
                if shape is not None:
                    exact.reshape(list(shape))
                compiled[shape] = _compile_openvino(exact, precision)
            results = compiled[shape]([tensor])
            outputs = {name: torch.from_numpy(results[name].copy()) for name in names}
        return {name: output.view(images.dtype) for name, output in outputs.items()}

    return Graph(run, [output.get_any_name() for output in graph.outputs], {})


@final
class ExecuTorch(Runtime):
    """`model.pte`."""

    package, target, file, extra = "executorch", "executorch", "model.pte", "executorch"

    def open(self, file: Path) -> Graph:
        from executorch.runtime import Runtime as Interpreter  # pyright: ignore[reportMissingImports]

        with _without_its_log():
            program = Interpreter.get().load_program(file)
            constants = (name for name in program.method_names if name != "forward")
            about = {name: str(program.load_method(name).execute([])[0]) for name in constants}
            method = program.load_method("forward")
        names = about.pop(OUTPUTS).split()
        return Graph(partial(_run_executorch, method, names), names, about)


def _without_its_log() -> AbstractContextManager[object]:
    """Silence ExecuTorch's C++ side, which writes to `sys.stderr` (pull request 6390); errors are exceptions too."""
    return redirect_stderr(StringIO())


def _run_executorch(method: Any, names: list[str], images: torch.Tensor) -> Outputs:
    with _without_its_log():
        tensors = method.execute([images])
    return {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}  # the next call writes over them


ONNXRUNTIME, OPENVINO, EXECUTORCH = OnnxRuntime(), OpenVino(), ExecuTorch()
RUNTIMES: dict[str, Runtime] = {runtime.package: runtime for runtime in (ONNXRUNTIME, OPENVINO, EXECUTORCH)}
