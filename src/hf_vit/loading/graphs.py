"""Run graphs that `hf-vit export` wrote as torch modules, which give logits and features."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit.conversion.targets.graphs.certificate import NAME, RESULTS, Certificate, verify
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, PIXEL_VALUES, convert_images
from hf_vit.conversion.targets.graphs.runtimes import RUNTIMES, Outputs, Runtime
from hf_vit.environment import require, sums_int8_in_16_bits
from hf_vit.errors import UserError, to_one_line
from hf_vit.repositories.reading import check_references, refuse_pointer
from hf_vit.writing import make_scratch_folder


def find_graph(source: str) -> tuple[Runtime, Path] | None:
    """Return the runtime and the graph file of a path to a graph or to an exported folder; None for other paths."""
    path = Path(source).expanduser()
    for runtime in RUNTIMES.values():
        if path.suffix == Path(runtime.file).suffix and path.is_file():
            return runtime, path
        if (path / runtime.file).is_file() and not (path / "config.json").exists():
            return runtime, path / runtime.file
    return None


@final
class GraphForImageClassification(nn.Module):
    """A classifier's graph on the CPU, which maps images [B, C, H, W] to logits [B, K] (K classes).

    A graph with an image processor takes images with levels 0..255; see `pad_to_canvas` for images of several sizes.

    Raises:
        UserError: the runtime is not installed or cannot read the file, or the file is not a classifier's graph. Also
            if it is in int8, this CPU may overflow its sums, and its certificate is missing or gives other results.
    """

    def __init__(self, runtime: Runtime, file: Path) -> None:
        super().__init__()
        require(runtime.package, purpose=str(file))
        refuse_pointer(file, str(file))
        # Before the graph is opened, because verifying opens it as well and would double the memory.
        is_unverified = sums_int8_in_16_bits() and not _verify_int8(file)
        try:
            self.graph = runtime.open(file)
            labels: dict[str, str] = json.loads(self.graph.about["labels"])
            with make_scratch_folder("processor") as folder:  # transformers finds the class by a file
                (folder / "preprocessor_config.json").write_text(self.graph.about["processor"], encoding="utf-8")
                check_references(folder, "the graph")
                self.processor: Any = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
            self.thresholds: dict[str, Any] = dict(json.loads(self.graph.about.get("thresholds", "{}")))
            self.takes: str = self.graph.about.get("takes", PIXEL_VALUES)
            self.config = SimpleNamespace(
                model_type=runtime.target,
                num_labels=len(labels),
                problem_type=self.graph.about.get("problem_type"),
                # Processors of models for other than RGB images do not convert, and have a mean for every channel.
                num_channels=3 if self.processor.do_convert_rgb is not False else len(self.processor.image_mean),
                id2label={int(index): name for index, name in labels.items()},
                # (height, width) px, in the graph of a model that reads images in their own shape.
                patch_stride=json.loads(self.graph.about.get("patch_stride", "null")),
            )
            digest = bytes.fromhex(runtime.sha256(file))
        except KeyError as error:
            raise UserError(
                f"{file} has no {error.args[0]}, which hf-vit writes into a graph; give one that hf-vit export "
                f"--to {runtime.target} wrote"
            ) from error
        except Exception as error:  # runtimes raise many classes of errors
            raise UserError(
                f"{runtime.package} cannot read {file}: {to_one_line(error)}; export the model again with hf-vit export"
            ) from error
        if is_unverified and "quantize" in self.graph.about:
            raise UserError(
                f"{file} is in int8, which this CPU may compute differently, and its {NAME} is missing; copy "
                f"{NAME} and {RESULTS} beside it, or export the model again"
            )
        predicts = self.graph.about.get("predicts")
        if predicts:
            raise UserError(
                f"{file} is the graph of a {predicts}, which hf-vit does not run; run it with {runtime.package}, or "
                "give the model that was exported"
            )
        if "logits" not in self.graph.outputs:
            raise UserError(
                f"{file} is the graph of a model without a classification head; export a classifier with hf-vit export"
            )
        self.dtype_and_device = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("sha256", torch.frombuffer(bytearray(digest), dtype=torch.uint8))

    def forward(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None
    ) -> ImageClassifierOutput:
        """Return the logits of images, [B, C, H, W]; those with a mask [B, h, w] of their patches run one by one."""
        logits: Any = self._run(pixel_values, patch_attention_mask)["logits"]
        return ImageClassifierOutput(logits=logits)

    def forward_features(
        self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the inputs of the head, [B, D] (hidden size D)."""
        outputs = self._run(pixel_values, patch_attention_mask)
        if "features" not in outputs:
            raise UserError("the graph has no output for features; export the model again with hf-vit export")
        return outputs["features"]

    def forward_head(self, features: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """Return the features unchanged; timm's models have a method of this name."""
        return features

    def _run(self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor | None) -> Outputs:
        """Run a batch; images of several sizes run one by one."""
        if self.takes == PIXEL_VALUES and patch_attention_mask is None:
            return self._run_graph(pixel_values.detach().float().contiguous())
        if patch_attention_mask is None:
            images = [_crop_from_canvas(padded) for padded in pixel_values.detach()]
        else:
            patch_height, patch_width = self.config.patch_stride
            images: list[torch.Tensor] = []
            for padded, mask in zip(pixel_values.detach(), patch_attention_mask, strict=True):
                height, width = int(mask[:, 0].sum()) * patch_height, int(mask[0].sum()) * patch_width
                images.append(padded[:, :height, :width].float())
        if self.takes != ENCODED and len({image.shape for image in images}) == 1:
            return self._run_graph(torch.stack(images))
        outputs = [self._run_graph(image[None]) for image in images]
        return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}

    def _run_graph(self, images: torch.Tensor) -> Outputs:
        """Run the graph; convert the many errors of runtimes to a UserError."""
        try:
            return self.graph.run(images if self.takes == PIXEL_VALUES else convert_images(self.takes, images))
        except Exception as error:  # runtimes raise many classes of errors
            size = "x".join(map(str, images.shape[2:] if self.takes == PIXEL_VALUES else images.shape[1:3]))
            raise UserError(f"the graph cannot run {len(images)} images of {size} px: {to_one_line(error)}") from error


def _verify_int8(file: Path) -> bool:
    """Return whether a graph in int8 has a certificate; raise UserError if its results differ from that."""
    certificate = Certificate.read(file.with_name(NAME))
    if certificate is None or certificate.quantization is None or certificate.file != file.name:
        return False
    verify(file.parent)
    return True


def pad_to_canvas(images: Sequence[Image.Image]) -> torch.Tensor:
    """Stack RGB images of any sizes, levels 0..255, to [B, 3, H, W] with NaN to the right of and below each image."""
    levels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() for image in images]
    height, width = (max(pixels.shape[side] for pixels in levels) for side in (1, 2))
    canvases = torch.full((len(levels), 3, height, width), torch.nan)
    for canvas, pixels in zip(canvases, levels, strict=True):
        canvas[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return canvases


def _crop_from_canvas(canvas: torch.Tensor) -> torch.Tensor:
    """Return the image on a canvas of `pad_to_canvas`, [3, H, W], as uint8 [H, W, 3]."""
    is_image = canvas[0].isfinite()
    image = canvas[:, : int(is_image[:, 0].sum()), : int(is_image[0].sum())]
    return image.to(torch.uint8).permute(1, 2, 0).contiguous()
