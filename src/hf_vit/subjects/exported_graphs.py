"""Graphs that `hf-vit export` wrote, run by their runtimes as a model of images: logits and features, no more."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from transformers import ViTImageProcessor
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Outputs, Runtime
from hf_vit.errors import UserError, one_line


def graph_file(source: str) -> tuple[Runtime, Path] | None:
    """The graph that a file or an exported folder stands for, and what runs it; None for anything else."""
    path = Path(source).expanduser()
    for runtime in RUNTIMES.values():
        if path.suffix == Path(runtime.file).suffix and path.is_file():
            return runtime, path
        if (path / runtime.file).is_file() and not (path / "config.json").exists():
            return runtime, path / runtime.file
    return None


@final
class GraphForImageClassification(nn.Module):
    """A classifier's graph: images [B, C, H, W] -> logits [B, K], on the CPU.

    Args:
        runtime: what runs it.
        file: as `hf-vit export` writes it, with labels and preprocessing in its metadata.

    Raises:
        UserError: the runtime is missing or cannot read the file, or the file is another.
    """

    def __init__(self, runtime: Runtime, file: Path) -> None:
        super().__init__()
        runtime.require(file)
        try:
            self.graph = runtime.open(file)
            labels: dict[str, str] = json.loads(self.graph.about["labels"])
            self.processor: Any = ViTImageProcessor.from_dict(json.loads(self.graph.about["processor"]))
            digest = bytes.fromhex(runtime.sha256(file))
        except KeyError as error:
            raise UserError(
                f"{file} does not say its {error.args[0]}; give a graph that hf-vit export --to {runtime.target} wrote"
            ) from error
        except Exception as error:  # a runtime has a class for every reason
            raise UserError(f"{file} cannot be read by {runtime.package}: {one_line(error)}") from error
        if "logits" not in self.graph.outputs:
            raise UserError(f"{file} is the graph of a bare model, which answers nothing; export a classifier")
        self.config = SimpleNamespace(
            model_type=runtime.target,
            num_labels=len(labels),
            id2label={int(index): name for index, name in labels.items()},
        )
        self.dtype_and_device = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("sha256", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """Logits of images [B, C, H, W].

        Raises:
            UserError: the graph refuses images of this size.
        """
        return ImageClassifierOutput(logits=self._run(pixel_values)["logits"])  # pyright: ignore[reportArgumentType]

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, D]: what the head sees; as `forward`."""
        outputs = self._run(pixel_values)
        if "features" not in outputs:
            raise UserError("the graph was exported without features; export the model again")
        return outputs["features"]

    def forward_head(self, features: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """As timm's models have it: features before the head are features."""
        return features

    def _run(self, pixel_values: torch.Tensor) -> Outputs:
        try:
            return self.graph.run(pixel_values.detach().float().contiguous())
        except Exception as error:  # as above
            size = "x".join(map(str, pixel_values.shape[2:]))
            raise UserError(f"the graph refuses images of {size} px: {one_line(error)}") from error
