"""The runtimes that graphs are run in, one class and one line in `RUNTIMES` each: a file in, a function out."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stderr
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, final

import torch

from hf_vit.conversion.targets.graphs.preprocessing import DECODING
from hf_vit.environment import has_avx2_alone
from hf_vit.errors import UserError

Outputs = dict[str, torch.Tensor]
EXTENSIONS = "onnxruntime_extensions"
_PROVIDERS = ["CPUExecutionProvider"]
OUTPUTS = "outputs"  # under which an ExecuTorch program says what its outputs are called
FRAMEWORK = "framework"  # under which OpenVINO keeps the metadata of the ONNX graph that it read


@dataclass(frozen=True)
class Graph:
    """A file that was opened.

    Attributes:
        run: images, of the graph's input -> outputs by name; raises what the runtime raises.
        outputs: their names.
        about: what the file says of itself.
    """

    run: Callable[[torch.Tensor], Outputs]
    outputs: list[str]
    about: Mapping[str, str]


class Runtime(ABC):
    """Abstract: what runs graphs of one kind, on the CPU.

    A graph that is opened keeps the number of threads that torch has then; ExecuTorch's is its own choice.

    Attributes:
        package: as it is called on PyPI and in certificates.
        target: what `hf-vit export --to` calls its files.
        file: name of a folder's graph.
        extra: of this package, with which the runtime comes.
        keeps_nan: whether NaN stays what it is in a ReLU and in max pooling, as a ResNet has them.
    """

    package: ClassVar[str]
    target: ClassVar[str]
    file: ClassVar[str]
    extra: ClassVar[str]
    keeps_nan: ClassVar[bool] = True

    @abstractmethod
    def open(self, file: Path) -> Graph:
        """Read a file; raises what the runtime raises."""

    def parts(self, file: Path) -> list[Path]:
        """All files of a graph."""
        return [file]

    @final
    def sha256(self, file: Path) -> str:
        """Of all parts, one after the other."""
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
    """`model.onnx`."""

    package, target, file, extra = "onnxruntime", "onnx", "model.onnx", "export"

    def open(self, file: Path) -> Graph:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what is wrong is said once, by the error
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes cores from who comes next
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=_PROVIDERS)
        except Exception as error:  # it has a class for every reason
            if DECODING not in str(error):
                raise
            if find_spec(EXTENSIONS) is None:
                raise ImportError(f'{file} needs onnxruntime-extensions: pip install "hf-vit[export]"') from error
            from onnxruntime_extensions import get_library_path

            options.register_custom_ops_library(get_library_path())
            session = onnxruntime.InferenceSession(str(file), options, providers=_PROVIDERS)
        names = [output.name for output in session.get_outputs()]
        return Graph(partial(_run_onnx, session, names), names, session.get_modelmeta().custom_metadata_map)


def _run_onnx(session: Any, names: list[str], images: torch.Tensor) -> Outputs:
    arrays = session.run(names, {session.get_inputs()[0].name: images.numpy()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


@cache
def openvino_core() -> Any:
    """One for the process, kept to its end. Whoever compiles first gives the thread another stack for signals and puts
    the former back when it goes: of two, the one that goes last may put back one that is freed, and the next signal
    ends the process."""
    import openvino

    return openvino.Core()


def with_fast_gelus(graph: Any) -> Any:
    """The graph of OpenVINO, where AVX2 is all there is with every GELU in the terms of its definition, in a form that
    OpenVINO does not take for one: it leaves a product with a GELU in it to a slower library there than others.
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
    """`openvino_model.xml`, with its weights beside it; computed in float32, where OpenVINO would choose bfloat16."""

    package, target, file, extra = "openvino", "openvino", "openvino_model.xml", "openvino"
    keeps_nan = False

    def open(self, file: Path) -> Graph:
        with file.open("rb") as opened:
            if b"<net" not in opened.read(1024):  # OpenVINO would try other libraries' files, and log how that goes
                raise ValueError("it is no graph of OpenVINO's")
        model = with_fast_gelus(openvino_core().read_model(file))
        hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino_core().compile_model(
            model, "CPU", hints | {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        )
        names = [output.get_any_name() for output in model.outputs]
        keys = model.get_rt_info([FRAMEWORK]).value if model.has_rt_info([FRAMEWORK]) else {}
        about = {key: model.get_rt_info([FRAMEWORK, key]).astype(str) for key in keys}
        return Graph(partial(_run_openvino, compiled, names, about.get("image_sizes", "others")), names, about)

    def parts(self, file: Path) -> list[Path]:
        return [file, file.with_suffix(".bin")]


def _run_openvino(compiled: Any, names: list[str], sizes: str, images: torch.Tensor) -> Outputs:
    # On one thread OpenVINO loses its error about a size: a request that was used before gives its earlier answers
    # again, a new one none.
    results = compiled.create_infer_request().infer([images.numpy()])
    if any(len(results[name]) != len(images) for name in names):
        size = "x".join(map(str, images.shape[2:]))
        raise UserError(f"OpenVINO gives no answer for images of {size} px; resize them: the graph takes {sizes}")
    return {name: torch.from_numpy(results[name].copy()) for name in names}


@final
class ExecuTorch(Runtime):
    """`model.pte`."""

    package, target, file, extra = "executorch", "executorch", "model.pte", "executorch"

    def open(self, file: Path) -> Graph:
        from executorch.runtime import Runtime as Interpreter  # pyright: ignore[reportMissingImports]

        with _without_its_log():
            program = Interpreter.get().load_program(file)
            said = {name: str(_constant(program, name)) for name in program.method_names if name != "forward"}
            method = program.load_method("forward")
        names = said.pop(OUTPUTS).split()
        return Graph(partial(_run_executorch, method, names), names, said)


def _without_its_log() -> AbstractContextManager[object]:
    """What ExecuTorch's C++ side writes goes to `sys.stderr` (its pull request 6390), errors by exceptions as well."""
    return redirect_stderr(StringIO())


def _constant(program: Any, name: str) -> object:
    return program.load_method(name).execute([])[0]


def _run_executorch(method: Any, names: list[str], images: torch.Tensor) -> Outputs:
    with _without_its_log():
        tensors = method.execute([images])
    return {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}  # the next call writes over them


ONNXRUNTIME, OPENVINO, EXECUTORCH = OnnxRuntime(), OpenVino(), ExecuTorch()
RUNTIMES: dict[str, Runtime] = {runtime.package: runtime for runtime in (ONNXRUNTIME, OPENVINO, EXECUTORCH)}
