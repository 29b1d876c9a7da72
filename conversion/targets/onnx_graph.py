"""`model.onnx`: the model as a graph, for any batch size at its nominal image size; checked in onnxruntime."""

from importlib.util import find_spec
from typing import Any, final

import torch
from torch import nn

from hf_vit.conversion.exporting import Exported, Target, largest_difference, probe
from hf_vit.errors import UserError

FILE = "model.onnx"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


@final
class _Outcome(nn.Module):
    """Pixels in, plain tensors out: logits of a classifier, tokens of a bare model."""

    def __init__(self, model: nn.Module, has_head: bool) -> None:
        super().__init__()
        self.model, self.has_head = model, has_head

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        output = self.model(pixel_values)
        return output.logits if self.has_head else output.last_hidden_state


def _write(exported: Exported) -> None:
    exported.model.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias
    images, _ = probe(exported)
    program = torch.onnx.export(
        _Outcome(exported.model, exported.has_head).eval(),
        (images,),
        input_names=["pixel_values"],
        output_names=["logits" if exported.has_head else "last_hidden_state"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(exported.folder / FILE))
    exported.processor.save_pretrained(exported.folder)


def _compare(exported: Exported) -> tuple[float, str]:
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(exported.folder / FILE), providers=["CPUExecutionProvider"])
    differences: list[float] = []
    for batch in (1, 3):
        images, ours = probe(exported, batch)
        theirs = session.run(None, {"pixel_values": images.numpy()})[0]
        differences.append(largest_difference(ours, torch.from_numpy(theirs)))
    return max(differences), f"onnxruntime {onnxruntime.__version__}"


def _ready() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f'the export to ONNX needs {", ".join(missing)}: pip install "hf-vit[export]"')


TARGET = Target(name="onnx", title="ONNX", write=_write, compare=_compare, ready=_ready)
