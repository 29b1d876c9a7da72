"""Contestants that an engine computes in torch's place: peers as the engine's own converter takes them, or in int8."""

from typing import Any, final

import torch
from torch import nn

from hf_vit.conversion.targets.graphs.tracing import onnx_of_batches
from hf_vit.inference.engines import ENGINES, Engine, OnnxRuntimeEngine, OpenVinoEngine, openvino_graph
from hf_vit.results.writing import scratch_folder

INT8 = " int8"
# What stands at the end of a contestant's name -> the engine, and whether in int8.
FORMS: dict[str, tuple[type[Engine], bool]] = {
    f", {name}{form}": (engine, form == INT8) for name, engine in ENGINES.items() for form in ("", INT8)
}


def without_form(name: str) -> tuple[str, str]:
    """(the contestant itself, how it is computed: a key of `FORMS` or nothing)."""
    form = next((each for each in FORMS if name.endswith(each)), "")
    return name.removesuffix(form), form


def obstacle_of(form: str, dtype: torch.dtype, device: str) -> str | None:
    """Why a contestant cannot be computed so; None if it can."""
    engine, in_int8 = FORMS[form]
    missing = engine.missing()
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    if torch.device(device).type != "cpu":
        return f"{engine.package} is measured on CPUs"
    if (in_int8 and dtype != torch.float32) or dtype not in engine.dtypes:
        return f"{form.removeprefix(', ')} has no {str(dtype).removeprefix('torch.')}"
    return None


@final
class OnEngine(nn.Module):
    """[B, 3, H, W] -> what the engine makes of it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.engine.run(images.contiguous(), ("outputs",))["outputs"]


@torch.no_grad()
def on_engine(
    model: nn.Module, images: torch.Tensor, form: str, dtype: torch.dtype, *, through_onnx: bool = False
) -> nn.Module:
    """A model in float32, as OpenVINO's own converter or torch's exporter gives it to the engine.

    Args:
        images: [B, 3, H, W], of the size that the graph is for; in int8 they also set ranges.
        form: of `FORMS`.
        through_onnx: torch's exporter for OpenVINO too.
    """
    engine, in_int8 = FORMS[form]
    if engine is OpenVinoEngine:
        graph = _through_onnx(model.eval(), images) if through_onnx else _converted(model.eval(), images)
        return OnEngine(OpenVinoEngine(_calibrated(graph, images) if in_int8 else graph, dtype))
    program = onnx_of_batches(model.eval(), images, ["outputs"])
    return OnEngine(_in_int8(program) if in_int8 else engine.of(program, dtype))


def _through_onnx(model: nn.Module, images: torch.Tensor) -> Any:
    return openvino_graph(onnx_of_batches(model, images, ["outputs"]))


def _converted(model: nn.Module, images: torch.Tensor) -> Any:
    import openvino

    graph = openvino.convert_model(model, example_input=images, input=[-1, *images.shape[1:]])
    graph.outputs[0].get_tensor().set_names({"outputs"})
    return graph


def _calibrated(graph: Any, images: torch.Tensor) -> Any:
    import nncf  # pyright: ignore[reportMissingImports]

    data = nncf.Dataset([images.numpy()])
    return nncf.quantize(graph, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=1)


def _in_int8(program: Any) -> Engine:
    """Dense layers in int8, what enters them by every batch's range."""
    from onnxruntime.quantization import quantize_dynamic

    graph = program.model.graph
    inside = [value for node in graph.all_nodes() for value in node.outputs if not value.is_graph_output()]
    for value in (*inside, *graph.initializers.values()):  # whoever needs shapes infers them; quantising changes them
        value.shape = value.type = None
    with scratch_folder("engine") as folder:
        program.save(str(folder / "float.onnx"))
        quantize_dynamic(folder / "float.onnx", file := folder / "int8.onnx", per_channel=True)
        return OnnxRuntimeEngine(file)
