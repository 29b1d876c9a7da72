"""Graphs that `hf-vit export` wrote, run by their runtimes as a model of images: logits and features, no more."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import nn
from transformers import ViTImageProcessor
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit.conversion.targets.graphs.certificate import NAME, RESULTS, Certificate, verify
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, PIXEL_VALUES, as_given
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Outputs, Runtime
from hf_vit.environment import sums_int8_in_16_bits
from hf_vit.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image


def graph_file(source: str) -> tuple[Runtime, Path] | None:
    """Return the graph that a file or an exported folder stands for, and what runs it; None for anything else."""
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

    With an image processor in it, images are the levels 0..255; of unequal ones, NaN fills what is no image (`canvas`).

    Raises:
        UserError: the runtime is missing or cannot read the file, or the file is another; or it is in int8, this
            processor may cut off its sums, and the certificate beside it is missing or finds other results.
    """

    def __init__(self, runtime: Runtime, file: Path) -> None:
        super().__init__()
        runtime.require(file)
        # First: verifying opens the graph itself, and two take twice the memory.
        unsure = sums_int8_in_16_bits() and not _verified_int8(file)
        try:
            self.graph = runtime.open(file)
            labels: dict[str, str] = json.loads(self.graph.about["labels"])
            self.processor: Any = ViTImageProcessor.from_dict(json.loads(self.graph.about["processor"]))
            self.takes: str = self.graph.about.get("takes", PIXEL_VALUES)
            digest = bytes.fromhex(runtime.sha256(file))
        except KeyError as error:
            raise UserError(
                f"{file} lacks its {error.args[0]}; give a graph that hf-vit export --to {runtime.target} wrote"
            ) from error
        except Exception as error:  # a runtime has a class for every reason
            raise UserError(f"{file} cannot be read by {runtime.package}: {one_line(error)}") from error
        if unsure and "quantize" in self.graph.about:
            raise UserError(
                f"{file} is in int8, which other processors may compute differently, and its {NAME} is "
                f"missing; put it there with its {RESULTS}, or export the model again"
            )
        if predicts := self.graph.about.get("predicts"):
            raise UserError(
                f"{file} is the graph of a {predicts}, which only {runtime.package} runs; give the model itself"
            )
        if "logits" not in self.graph.outputs:
            raise UserError(f"{file} is the graph of a bare model, which predicts nothing; export a classifier")
        self.config = SimpleNamespace(
            model_type=runtime.target,
            num_labels=len(labels),
            problem_type=self.graph.about.get("problem_type"),
            id2label={int(index): name for index, name in labels.items()},
        )
        self.dtype_and_device = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("sha256", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        """Return the logits of images [B, C, H, W]."""
        return ImageClassifierOutput(logits=self._run(pixel_values)["logits"])  # pyright: ignore[reportArgumentType]

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return [B, D]: what the head sees; as `forward`."""
        outputs = self._run(pixel_values)
        if "features" not in outputs:
            raise UserError("the graph was exported without features; export the model again")
        return outputs["features"]

    def forward_head(self, features: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """As timm's models have it: features before the head are features."""
        return features

    def _run(self, pixel_values: torch.Tensor) -> Outputs:
        if self.takes == PIXEL_VALUES:
            return self._answer(pixel_values.detach().float().contiguous())
        images = [_image_of(one) for one in pixel_values.detach()]
        if self.takes != ENCODED and len({image.shape for image in images}) == 1:
            return self._answer(torch.stack(images))
        answers = [self._answer(image[None]) for image in images]
        return {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}

    def _answer(self, images: torch.Tensor) -> Outputs:
        try:
            return self.graph.run(images if self.takes == PIXEL_VALUES else as_given(self.takes, images))
        except Exception as error:  # as above
            size = "x".join(map(str, images.shape[2:] if self.takes == PIXEL_VALUES else images.shape[1:3]))
            raise UserError(
                f"the graph refuses images of {size} px, {len(images)} at once: {one_line(error)}"
            ) from error


def _verified_int8(file: Path) -> bool:
    """Return whether a certificate says that the graph is in int8; it is refused unless it repeats what it gave
    then.
    """
    certificate = Certificate.read(file.with_name(NAME))
    if certificate is None or certificate.quantization is None or certificate.file != file.name:
        return False
    verify(file.parent)
    return True


def canvas(images: "Sequence[Image]") -> torch.Tensor:
    """RGB images of any sizes -> their levels 0..255 [B, 3, H, W], each at the top left, NaN beside and below it."""
    levels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() for image in images]
    height, width = (max(one.shape[side] for one in levels) for side in (1, 2))
    filled = torch.full((len(levels), 3, height, width), torch.nan)
    for place, one in zip(filled, levels, strict=True):
        place[:, : one.shape[1], : one.shape[2]] = one
    return filled


def _image_of(filled: torch.Tensor) -> torch.Tensor:
    """Return [3, H, W] of a canvas -> its image, uint8 [H, W, 3]."""
    there = filled[0].isfinite()
    image = filled[:, : int(there[:, 0].sum()), : int(there[0].sum())]
    return image.to(torch.uint8).permute(1, 2, 0).contiguous()
