"""Graphs that `hf-vit export --to onnx` wrote, run by onnxruntime as a model of images: logits, and nothing inside."""

import hashlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from transformers import ViTImageProcessor
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit.errors import UserError, one_line

FILE = "model.onnx"


def graph_file(source: str) -> Path | None:
    """The graph that a file or an exported folder stands for; None for anything else."""
    path = Path(source).expanduser()
    if path.suffix == ".onnx" and path.is_file():
        return path
    return path / FILE if (path / FILE).is_file() and not (path / "config.json").exists() else None


@final
class GraphForImageClassification(nn.Module):
    """A classifier's graph: images [B, C, H, W] -> logits [B, K], on the CPU.

    Args:
        file: as `hf-vit export --to onnx` writes it, with labels and preprocessing in its metadata.

    Raises:
        UserError: onnxruntime is missing or cannot read the file, or the file is another.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        if importlib.util.find_spec("onnxruntime") is None:
            raise UserError(f'{file} needs onnxruntime: pip install "hf-vit[export]"')
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what is wrong is said once, by the error
        try:
            self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            about = self.session.get_modelmeta().custom_metadata_map
            labels: dict[str, str] = json.loads(about["labels"])
            self.processor: Any = ViTImageProcessor.from_dict(json.loads(about["processor"]))
        except KeyError as error:
            raise UserError(
                f"{file} does not say its {error.args[0]}; give a graph that hf-vit export --to onnx wrote"
            ) from error
        except Exception as error:  # onnxruntime has a class for every reason
            raise UserError(f"{file} cannot be read by onnxruntime: {one_line(error)}") from error
        if [output.name for output in self.session.get_outputs()] != ["logits"]:
            raise UserError(f"{file} is the graph of a bare model, which answers nothing; export a classifier")
        self.config = SimpleNamespace(
            model_type="onnx", num_labels=len(labels), id2label={int(index): name for index, name in labels.items()}
        )
        self.dtype_and_device = nn.Parameter(torch.zeros(()), requires_grad=False)
        digest = hashlib.sha256(file.read_bytes()).digest()
        self.register_buffer("sha256", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """Logits of images [B, C, H, W].

        Raises:
            UserError: the graph refuses images of this size.
        """
        try:
            (logits,) = self.session.run(None, {"pixel_values": pixel_values.detach().float().numpy()})
        except Exception as error:  # as above
            size = "x".join(map(str, pixel_values.shape[2:]))
            raise UserError(f"the graph refuses images of {size} px: {one_line(error)}") from error
        return ImageClassifierOutput(logits=torch.from_numpy(logits))
