"""`openvino_model.xml`: the ONNX graph as OpenVINO's own, with its metadata; checked in OpenVINO."""

from typing import final

from hf_vit.conversion.targets.graphs.runtimes import OPENVINO
from hf_vit.conversion.targets.onnx_graph import FILE as ONNX_FILE
from hf_vit.conversion.targets.onnx_graph import OnnxGraph, compare_graph
from hf_vit.conversion.targets.target import OutgoingModel, Target
from hf_vit.results.writing import asking_why


@final
class OpenVinoGraph(Target):
    """`openvino_model.xml` and `.bin`, weights in float32, checked in OpenVINO."""

    name = "openvino"
    title = "OpenVINO"
    libraries = (("onnx", "onnxscript", "onnxruntime", "openvino"), "export,openvino")
    options = ("static", "preprocessing", "quantize", "calibrate")

    def write(self, outgoing: OutgoingModel) -> None:
        import openvino

        OnnxGraph().write(outgoing)
        graph = openvino.convert_model(outgoing.folder / ONNX_FILE)
        with asking_why(outgoing.folder / ONNX_FILE):
            openvino.save_model(graph, outgoing.folder / OPENVINO.file, compress_to_fp16=False)
        del graph  # it holds the file
        (outgoing.folder / ONNX_FILE).unlink()

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return compare_graph(outgoing, OPENVINO, self.tolerance(outgoing.config))
