"""`model.onnx`: the model as a graph, for any batch size at its nominal image size; checked in onnxruntime."""

from typing import final

import torch
from torch import nn

from hf_vit.conversion.targets.target import OutgoingModel, Target, largest_difference

FILE = "model.onnx"


@final
class _Outcome(nn.Module):
    """Pixels in, plain tensors out: logits of a classifier, tokens of a bare model."""

    def __init__(self, model: nn.Module, has_head: bool) -> None:
        super().__init__()
        self.model, self.has_head = model, has_head

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        output = self.model(pixel_values)
        return output.logits if self.has_head else output.last_hidden_state


@final
class OnnxGraph(Target):
    """`model.onnx`, checked in onnxruntime."""

    name = "onnx"
    title = "ONNX"
    libraries = (("onnx", "onnxscript", "onnxruntime"), "export")

    def write(self, outgoing: OutgoingModel) -> None:
        outgoing.model.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias
        images, _ = outgoing.probe()
        program = torch.onnx.export(
            _Outcome(outgoing.model, outgoing.has_head).eval(),
            (images,),
            input_names=["pixel_values"],
            output_names=["logits" if outgoing.has_head else "last_hidden_state"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # the exporter's stack traces: places on this machine
        program.save(str(outgoing.folder / FILE))
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(outgoing.folder / FILE), providers=["CPUExecutionProvider"])
        differences: list[float] = []
        for batch in (1, 3):
            images, ours = outgoing.probe(batch)
            theirs = session.run(None, {"pixel_values": images.numpy()})[0]
            differences.append(largest_difference(ours, torch.from_numpy(theirs)))
        return max(differences), f"onnxruntime {onnxruntime.__version__}"
