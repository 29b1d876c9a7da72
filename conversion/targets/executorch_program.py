"""`model.pte`: the model as a program of ExecuTorch for one image size, by XNNPACK on CPUs; checked in ExecuTorch."""

from dataclasses import replace
from typing import final

import torch

from hf_vit.conversion.targets.graphs.runtimes import EXECUTORCH, OUTPUTS
from hf_vit.conversion.targets.onnx_graph import Outcome, about, compare_graph
from hf_vit.conversion.targets.target import OutgoingModel, Target

LARGEST_BATCH = 64  # memory is planned for it


@final
class ExecuTorchProgram(Target):
    """`model.pte` for the nominal image size and batches up to `LARGEST_BATCH`."""

    name = "executorch"
    title = "ExecuTorch"
    libraries = (("executorch",), "executorch")
    least_tolerance = 1e-3  # XNNPACK has approximations of its own for GELU and softmax

    def write(self, outgoing: OutgoingModel) -> None:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

        outgoing = replace(outgoing, static=True)
        outgoing.model.set_attn_implementation("eager")
        module = Outcome(outgoing.model, outgoing.has_head, outgoing.output_names).eval()
        images = torch.zeros(2, outgoing.config.num_channels, *outgoing.nominal_size)
        dims = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)
        with torch.no_grad():
            program = torch.export.export(module, (images,), dynamic_shapes=dims, strict=False)
        said = about(outgoing) | {OUTPUTS: " ".join(outgoing.output_names)}
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=said)
        (outgoing.folder / EXECUTORCH.file).write_bytes(edge.to_executorch().buffer)
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return compare_graph(replace(outgoing, static=True), EXECUTORCH, self.tolerance(outgoing.config))
