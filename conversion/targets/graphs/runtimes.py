"""Define the runtimes of graphs, one class and one line in `RUNTIMES` each: they open, compile and quantize graphs.

Some are also engines of `optimize_for_inference`.
"""

import hashlib
import logging
import math
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch

from hf_vit.conversion.readers import hash_files
from hf_vit.conversion.targets.graphs.preprocessing import DECODING, NODE_PREFIX
from hf_vit.environment import emulates_bfloat16, has_avx2_alone, require, sums_int8_in_16_bits
from hf_vit.errors import UserError
from hf_vit.writing import make_scratch_folder, replace_file

Outputs = dict[str, torch.Tensor]
EXTENSIONS = "onnxruntime_extensions"
OUTPUTS = "outputs"  # key of an ExecuTorch program's metadata for the names of its outputs
Mode = Literal["dynamic", "static"]
DENSE = ("MatMul", "Gemm")
FRAMEWORK = "framework"  # key of OpenVINO's metadata for those of the ONNX graph that it converted
CACHE_VARIABLE = "HF_VIT_GRAPH_CACHE"  # environment variable: the folder of converted graphs; empty: keep none
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reports its use unless this is set when it starts
CACHE_BYTES = 2**32  # size of all converted graphs that are kept; those unused for longest are deleted first


@contextmanager
def _silence_nncf() -> Any:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(level)


@dataclass(frozen=True)
class Graph:
    """An opened or compiled graph."""

    run: Callable[..., Outputs]  # images -> outputs by name; for an engine (images, names) -> these outputs
    outputs: list[str]
    about: Mapping[str, str]  # the file's metadata


class Runtime(ABC):
    """Abstract: a library that runs graphs of one format on the CPU.

    An opened graph keeps the number of threads that torch has at that time; ExecuTorch sets its own.
    """

    package: ClassVar[str]  # name on PyPI and in certificates
    target: ClassVar[str]  # value of `hf-vit export --to`
    file: ClassVar[str]
    keeps_nan: ClassVar[bool] = True  # whether ReLU and max-pooling keep NaN
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # dtypes of models that it runs as an engine; empty: not an engine
    has_channels_last: ClassVar[bool] = False  # whether its convolutions have channels last in memory
    keeps_graphs: ClassVar[bool] = False  # whether converted graphs are kept for the next process
    modes: ClassVar[tuple[Mode, ...]] = ()  # supported int8 modes

    @abstractmethod
    def open(self, file: Path) -> Graph:
        """Open a file; raises the runtime's own errors."""

    def compile(self, export: Callable[[], Any], entry: Path | None, dtype: torch.dtype) -> Graph:
        """Compile the ONNXProgram of `export` for any thread; a runtime that `keeps_graphs` reads `entry` instead."""
        raise NotImplementedError(f"{self.package} is not an engine")

    def list_dense_layers(self, file: Path) -> list[str]:
        """Return the names of the dense layers that have weights, in order."""
        raise NotImplementedError(f"{self.package} does not support int8")

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        """Write the graph of `file` to `to` with these layers in int8; `images` set the ranges of inputs."""
        raise NotImplementedError(f"{self.package} does not support int8")

    def parts(self, file: Path) -> list[Path]:
        """Return all files of a graph."""
        return [file]

    @final
    def list_missing(self) -> list[str]:
        """Return the packages that the engine needs and that are not installed."""
        return [name for name in (self.package, "onnx", "onnxscript") if find_spec(name) is None]

    @final
    def sha256(self, file: Path) -> str:
        """Return the SHA-256 digest of all files of a graph, concatenated."""
        return hash_files(self.parts(file))

    @final
    def version(self) -> str:
        return version(self.package)


@final
class OnnxRuntime(Runtime):
    """`model.onnx`; as an engine it has no bfloat16 on CPUs.

    int8 is per channel, with ranges of inputs from images ("static") or of every token in every pass ("dynamic"). The
    execution provider must run the whole graph.
    """

    package = "onnxruntime"
    target = "onnx"
    file = "model.onnx"
    dtypes = (torch.float32,)
    modes = ("dynamic", "static")

    def __init__(self, provider: str = "CPUExecutionProvider") -> None:
        self.provider = provider

    def open(self, file: Path) -> Graph:
        """Open an ONNX file, with onnxruntime-extensions if it decodes images."""
        import onnxruntime

        if self.provider not in onnxruntime.get_available_providers():
            raise UserError(f"onnxruntime has no {self.provider} here; install a build that has it, with its libraries")
        options = onnxruntime.SessionOptions()
        if self.provider != "CPUExecutionProvider":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.log_severity_level = 4  # errors are raised and need not be logged too
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # else idle threads keep cores busy
        start = partial(onnxruntime.InferenceSession, str(file), options, providers=[self.provider])
        try:
            session = start()
        except Exception as error:  # onnxruntime has many types of errors
            if DECODING not in str(error):
                raise
            require(EXTENSIONS, purpose=str(file))
            from onnxruntime_extensions import get_library_path

            options.register_custom_ops_library(get_library_path())
            session = start()
        names = [output.name for output in session.get_outputs()]
        return Graph(partial(_run_onnx, session), names, session.get_modelmeta().custom_metadata_map)

    def compile(self, export: Callable[[], Any], entry: Path | None, dtype: torch.dtype) -> Graph:
        with make_scratch_folder("engine") as folder:
            file = folder / self.file
            export().save(str(file))
            return self.open(file)

    def parts(self, file: Path) -> list[Path]:
        data = file.with_name(f"{file.name}.data")  # where torch's exporter writes more than 2 GB of weights
        return [file, data] if data.is_file() else [file]

    def list_dense_layers(self, file: Path) -> list[str]:
        """Return the names of the products whose second factor is a weight."""
        import onnx

        graph = onnx.load(file, load_external_data=False).graph
        weights = {initializer.name for initializer in graph.initializer}
        return [node.name for node in graph.node if node.op_type in DENSE and node.input[1] in weights]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        """Quantize these layers per output channel; `images` also decide how weights are rounded."""
        from onnxscript import ir

        from hf_vit.conversion.targets.graphs import dense_int8

        # As in `file`, more than 2 GB of weights are in a second file.
        save = partial(ir.save, path=to, external_data=f"{to.name}.data" if len(self.parts(file)) > 1 else None)

        def run_images(model: Any) -> Iterator[Outputs]:
            save(model)
            return map(self.open(to).run, images)

        model = ir.load(file)
        records = dense_int8.record_inputs(model, layers, run_images)
        dense_int8.smooth_norms(model, layers, records)
        levels = 64 if sums_int8_in_16_bits() else 127  # 2 * 255 * 64 fits into 16 bits
        dense_int8.quantize_layers(model, layers, records, mode == "dynamic", levels)
        save(model)


def _run_onnx(session: Any, images: torch.Tensor, names: Sequence[str] | None = None) -> Outputs:
    """Run an ONNX graph; return the outputs of these names, by default all."""
    names = names or [output.name for output in session.get_outputs()]
    arrays = session.run(names, {session.get_inputs()[0].name: images.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


@cache
def get_openvino_core() -> Any:
    """Return the only core of the process, which is never freed.

    A core changes the thread's signal stack when it first compiles, and restores the former one when it is freed. With
    two cores, the last one freed may restore a stack that no longer exists, and the next signal crashes the process.
    """
    import openvino

    return openvino.Core()


def _compile_openvino(graph: Any, precision: str) -> Any:
    """Compile an OpenVINO graph for the CPU, with torch's number of threads."""
    hints = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    return get_openvino_core().compile_model(graph, "CPU", hints | {"INFERENCE_NUM_THREADS": torch.get_num_threads()})


def replace_gelus(graph: Any) -> Any:
    """Replace every GELU of an OpenVINO graph by its definition, in a form that OpenVINO does not recognize.

    Only on CPUs with AVX2 and no more, where OpenVINO runs products that it fuses with a GELU slowly.
    """
    if not has_avx2_alone():
        return graph
    from openvino import opset13 as ops

    for gelu in [operation for operation in graph.get_ops() if operation.get_type_name() == "Gelu"]:
        values = gelu.input_value(0)
        constant = partial(ops.constant, dtype=values.get_element_type())
        if gelu.get_attributes().get("approximation_mode", "ERF") == "ERF":  # the older operator lacks the attribute
            half = ops.multiply(values, constant(0.5))
            replacement = ops.add(ops.multiply(half, ops.erf(ops.multiply(values, constant(math.sqrt(0.5))))), half)
        else:  # 0.5 * (1 + tanh(u)) is sigmoid(2 u)
            factor = 2 * math.sqrt(2 / math.pi)
            cubic = ops.add(ops.multiply(ops.multiply(values, values), constant(0.044715 * factor)), constant(factor))
            replacement = ops.multiply(values, ops.sigmoid(ops.multiply(values, cubic)))
        for reader in gelu.output(0).get_target_inputs():
            reader.replace_source_output(replacement.output(0))
    return graph


@final
class OpenVino(Runtime):
    """`openvino_model.xml` with its weights beside it, computed in float32, although OpenVINO would choose bfloat16.

    int8 is by NNCF: "static" with its preset for transformers, and ranges from images; "dynamic" compresses weights per
    channel, and OpenVINO quantizes groups of 32 inputs of a token in every pass, which changes fewer answers.
    """

    package = "openvino"
    target = "openvino"
    file = "openvino_model.xml"
    keeps_nan, has_channels_last, keeps_graphs = False, True, True
    dtypes = (torch.float32, torch.bfloat16)
    modes = ("dynamic", "static")

    def open(self, file: Path) -> Graph:
        """Open an OpenVINO model, and compile it in float32."""
        with file.open("rb") as opened:
            if b"<net" not in opened.read(1024):  # OpenVINO would try the file as other formats, and log errors
                raise ValueError("it is not an OpenVINO model; export the model again with --to openvino")
        model = replace_gelus(get_openvino_core().read_model(file))
        names = [output.get_any_name() for output in model.outputs]
        keys = model.get_rt_info([FRAMEWORK]).value if model.has_rt_info([FRAMEWORK]) else {}
        about = {key: model.get_rt_info([FRAMEWORK, key]).astype(str) for key in keys}
        compiled = _compile_openvino(model, "f32")
        return Graph(partial(_run_openvino, compiled, names, about.get("image_sizes", "others")), names, about)

    def compile(self, export: Callable[[], Any], entry: Path | None, dtype: torch.dtype) -> Graph:
        graph = None if entry is None else _read_graph(entry)
        if graph is None:
            graph = make_openvino_graph(export())
            if entry is not None:
                _keep_graph(graph, entry)
        return make_openvino_engine(graph, dtype)

    def parts(self, file: Path) -> list[Path]:
        return [file, file.with_suffix(".bin")]

    def list_dense_layers(self, file: Path) -> list[str]:
        operations = get_openvino_core().read_model(file).get_ordered_ops()
        products = [operation.get_friendly_name() for operation in operations if operation.get_type_name() == "MatMul"]
        return [name for name in products if "/" in name and not name.startswith(NODE_PREFIX)]

    def quantize(self, file: Path, to: Path, mode: Mode, images: Any, layers: Sequence[str]) -> None:
        """Quantize these layers with NNCF, and keep all other operations in float.

        By default NNCF would also quantize convolutions, attention's products and sums, which costs accuracy.
        """
        import openvino

        with _silence_nncf():
            import nncf
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet

            model = get_openvino_core().read_model(file)
            no_operations = ("Parameter", "Result", "Constant", "Convert")
            operations = [node for node in model.get_ordered_ops() if node.get_type_name() not in no_operations]
            names = [operation.get_friendly_name() for operation in operations]
            in_float = [name for name in names if name not in layers]
            scope = nncf.IgnoredScope(names=in_float, validate=False)
            if mode == "dynamic":
                int8_model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=scope)
                openvino.save_model(int8_model, to, compress_to_fp16=False)
                return
            quantized = nncf.quantize(
                model,
                nncf.Dataset([image[None].numpy() for batch in images for image in batch]),
                subset_size=len(images),
                model_type=nncf.ModelType.TRANSFORMER,
                ignored_scope=scope,
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    overflow_fix=nncf.OverflowFix.ENABLE if sums_int8_in_16_bits() else None,
                    # by default ranges are cut off at the mean of the images' extremes
                    activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                ),
            )
            openvino.save_model(quantized, to, compress_to_fp16=False)


def _run_openvino(compiled: Any, names: list[str], sizes: str, images: torch.Tensor) -> Outputs:
    """Run an OpenVINO graph; raise a UserError if it does not take the images' size."""
    # With one thread OpenVINO reports no error for a wrong size: a new request returns no results, and a used one would
    # return its former results.
    results = compiled.create_infer_request().infer([images.numpy()])
    if any(len(results[name]) != len(images) for name in names):
        size = "x".join(map(str, images.shape[2:]))
        if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):  # int8 graphs may need instructions that it forbids
            taken = f"unset it (the graph takes images of {sizes})"
            raise UserError(
                f"OpenVINO computes nothing under ONEDNN_MAX_CPU_ISA={limit} for images of {size} px; {taken}"
            )
        raise UserError(f"the OpenVINO graph does not take images of {size} px; resize them to {sizes}")
    return {name: torch.from_numpy(results[name].copy()) for name in names}


def make_openvino_graph(program: Any) -> Any:
    """Convert torch's ONNXProgram to an OpenVINO graph."""
    import openvino

    with make_scratch_folder("engine") as folder:
        file = folder / ONNXRUNTIME.file
        program.save(str(file))
        return openvino.convert_model(file)


def get_graph_cache() -> Path | None:
    """Return the folder of converted graphs; None if none are kept, or if another user may read or write there."""
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = os.environ.get(CACHE_VARIABLE, f"{parent}/hf_vit/graphs")
    if not name or not hasattr(os, "geteuid"):  # without users, privacy cannot be checked
        return None
    with suppress(OSError, RuntimeError):  # a read-only disk; a user without a home
        folder = Path(name).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder.lstat(), stat.S_ISDIR):
            return folder
    return None


def _is_private(status: os.stat_result, has_kind: Callable[[int], bool]) -> bool:
    """Return whether a file of this kind belongs to this user and to nobody else."""
    return has_kind(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _digest(entry: Path, *parts: bytes | memoryview) -> bytes:
    """Return the SHA-256 of a kept graph, which includes its key, so that no entry can take another's place."""
    digest = hashlib.sha256(entry.name.encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read_graph(entry: Path) -> Any:
    """Return a kept OpenVINO graph; None if it is absent, damaged, or not private to this user.

    The file holds the digest of the rest (32 bytes), the length of the graph's text (8 bytes), the text, and the
    weights. It is read once, so that OpenVINO gets the bytes that were checked.
    """
    try:
        with open(os.open(entry, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if not _is_private(os.fstat(file.fileno()), stat.S_ISREG):
                return None
            content = memoryview(file.read())
        text_end = 40 + int.from_bytes(content[32:40], "little")
        if bytes(content[:32]) != _digest(entry, content[32:]):
            return None
        import openvino

        os.utime(entry)  # `_keep_graph` deletes by this time
        weights = openvino.Tensor(np.frombuffer(content[text_end:], np.uint8))
        return get_openvino_core().read_model(bytes(content[40:text_end]), weights)
    except Exception:  # OpenVINO has many types of errors
        return None


def _keep_graph(graph: Any, entry: Path) -> None:
    """Write an OpenVINO graph for the next process, and delete the graphs that were unused for longest."""
    import openvino

    with suppress(OSError, RuntimeError, UserError), make_scratch_folder("engine") as scratch:  # such as a full disk
        openvino.save_model(graph, scratch / OPENVINO.file, compress_to_fp16=False)
        text, weights = (part.read_bytes() for part in OPENVINO.parts(scratch / OPENVINO.file))
        if len(text) + len(weights) > CACHE_BYTES:
            return  # it would take the place of all others, and would not stay either
        length = len(text).to_bytes(8, "little")
        with replace_file(entry) as temporary, temporary.open("wb") as file:
            temporary.chmod(0o600)
            file.writelines((_digest(entry, length, text, weights), length, text, weights))
        size = 0
        for path in sorted(entry.parent.glob(f"*{entry.suffix}"), key=lambda path: -path.stat().st_mtime):
            size += path.stat().st_size
            if size > CACHE_BYTES:
                path.unlink()


def make_openvino_engine(graph: Any, dtype: torch.dtype) -> Graph:
    """Compile an OpenVINO graph as an engine, with inputs and outputs of this dtype.

    The first batch size is compiled exactly; all others share a slower graph for any size. bfloat16 is computed in
    float32 on processors without instructions for it.
    """
    import openvino

    is_half = dtype == torch.bfloat16
    graph = replace_gelus(graph)
    if is_half:  # OpenVINO converts inputs and outputs, as torch's threads would compete for its cores
        steps = openvino.preprocess.PrePostProcessor(graph)
        steps.input().tensor().set_element_type(openvino.Type.bf16)
        for number in range(len(graph.outputs)):
            steps.output(number).tensor().set_element_type(openvino.Type.bf16)
        graph = steps.build()
    precision = "bf16" if is_half and not emulates_bfloat16() else "f32"
    compiled: dict[torch.Size | None, Any] = {}  # shape of the first batch, and None for all others -> graph
    lock = threading.Lock()  # a compiled graph computes one pass at a time

    def run(images: torch.Tensor, names: Sequence[str]) -> Outputs:
        """Run a batch in the graph of its exact size, or in the one for any size."""
        # NumPy has no bfloat16, so it is passed as another type of 16 bits.
        array = images.view(torch.int16).numpy() if is_half else images.numpy()
        tensor = openvino.Tensor(array, array.shape, openvino.Type.bf16 if is_half else openvino.Type.f32)
        with lock:
            is_first_shape = not compiled or images.shape in compiled
            shape = images.shape if is_first_shape else None
            if shape not in compiled:
                fixed_graph = graph if shape is None else graph.clone()
                if shape is not None:
                    fixed_graph.reshape(list(shape))
                compiled[shape] = _compile_openvino(fixed_graph, precision)
            results = compiled[shape]([tensor])
            outputs = {name: torch.from_numpy(results[name].copy()) for name in names}
        return {name: output.view(images.dtype) for name, output in outputs.items()}

    return Graph(run, [output.get_any_name() for output in graph.outputs], {})


@final
class ExecuTorch(Runtime):
    """`model.pte`."""

    package = "executorch"
    target = "executorch"
    file = "model.pte"

    def open(self, file: Path) -> Graph:
        """Load an ExecuTorch program, and read its metadata from constant methods."""
        from executorch.runtime import Runtime as Interpreter  # pyright: ignore[reportMissingImports]

        with _silence_executorch():
            program = Interpreter.get().load_program(file)
            constants = (name for name in program.method_names if name != "forward")
            about = {name: str(program.load_method(name).execute([])[0]) for name in constants}
            method = program.load_method("forward")
        names = about.pop(OUTPUTS).split()
        return Graph(partial(_run_executorch, method, names), names, about)


def _silence_executorch() -> AbstractContextManager[object]:
    """Silence ExecuTorch's C++ code, which writes to `sys.stderr` (pull request 6390); errors are raised too."""
    return redirect_stderr(StringIO())


def _run_executorch(method: Any, names: list[str], images: torch.Tensor) -> Outputs:
    """Run an ExecuTorch program; return copies of its outputs, which the next call overwrites."""
    with _silence_executorch():
        tensors = method.execute([images])
    return {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}


ONNXRUNTIME, OPENVINO, EXECUTORCH = OnnxRuntime(), OpenVino(), ExecuTorch()
RUNTIMES: dict[str, Runtime] = {runtime.package: runtime for runtime in (ONNXRUNTIME, OPENVINO, EXECUTORCH)}
