"""Define the targets that are a graph for batches of images: ONNX, OpenVINO, ExecuTorch and transformers.js.

Each graph is certified in its runtime. Graphs take images of any size, unless the model or the user requires one size.
"""

import json
import shutil
from ast import literal_eval
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import nn
from transformers import ViTImageProcessor

from hf_vit.conversion.targets.graphs import runtimes, tracing
from hf_vit.conversion.targets.graphs.certificate import certify
from hf_vit.conversion.targets.graphs.preprocessing import (
    ENCODED,
    LEVELS,
    PIXEL_VALUES,
    Preprocessing,
    prepend,
    refuse_other_sizes,
)
from hf_vit.conversion.targets.target import OutgoingModel, Target
from hf_vit.data.transforms import keeps_shapes, refuse_own_shapes
from hf_vit.environment import require
from hf_vit.errors import UserError
from hf_vit.families import get_problem_type
from hf_vit.writing import diagnose_write_failure, make_scratch_folder

LARGEST_BATCH = 64  # an ExecuTorch program plans its memory for this batch size


@final
class TensorOutputs(nn.Module):
    """A model whose outputs are tensors: a classifier's logits and its head's inputs, or the others' named outputs."""

    def __init__(self, outgoing: OutgoingModel) -> None:
        super().__init__()
        outgoing.model.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias
        self.model = outgoing.model
        self.has_head = outgoing.has_head
        self.names = outgoing.output_names

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on images [B, C, H, W]; a hook captures the inputs of a classifier's head."""
        if not self.has_head:
            outputs = self.model(pixel_values)
            return tuple(outputs[name] for name in self.names)
        features: list[torch.Tensor] = []
        classifier: Any = self.model.classifier
        handle = classifier.register_forward_pre_hook(lambda _, arguments: features.append(arguments[0]))
        logits = self.model(pixel_values).logits
        handle.remove()
        return logits, *features


class _GraphTarget(Target):
    """Abstract: a graph that is checked in its runtime."""

    runtime: ClassVar[runtimes.Runtime]

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        """Certify the graph; return the largest difference of its results, and the runtime."""
        tolerance = self.tolerance(outgoing.config)
        certificate = certify(outgoing, self.runtime, _choose_sizes(outgoing), tolerance, _describe_sizes(outgoing))
        if not certificate.holds() and certificate.largest_difference <= tolerance:
            # The caller reports larger differences of the results; here only the preprocessed images differ.
            raise UserError(
                f"the graph resizes images differently from the image processor ({certificate.describe()}), so "
                "nothing was written; please report this"
            )
        return certificate.largest_difference, certificate.measured_with


@final
class OnnxGraph(_GraphTarget):
    """`model.onnx`, which is checked in onnxruntime."""

    name = "onnx"
    title = "ONNX"
    libraries = (("onnx", "onnxscript", "onnxruntime"), "export")
    options = ("static", "preprocessing", "decoding", "quantize", "calibrate", "agreement", "opset")
    takes_dense = True
    runtime = runtimes.ONNXRUNTIME

    def write(self, outgoing: OutgoingModel) -> None:
        """Export the model to ONNX, with the image processor in the graph if requested."""
        if outgoing.takes != PIXEL_VALUES:
            _check_preprocessing(outgoing)
        size = _find_only_size(outgoing)
        sizes = outgoing.sizes
        (height, width), (stride_h, stride_w) = outgoing.nominal_size, sizes.patch_stride
        if size is None and outgoing.is_dense and (height % stride_h or width % stride_w):
            raise UserError(
                f"a graph for any image size needs multiples of {stride_h}x{stride_w} px, but the model's images "
                f"have {height}x{width} px; add --static to export it for this size only"
            )
        if outgoing.opset is not None and outgoing.opset not in tracing.OPSETS:
            raise UserError(
                f"--opset {outgoing.opset} is unknown; give a number from {tracing.OPSETS[0]} to {tracing.OPSETS[-1]}"
            )
        program = tracing.export_onnx_program(
            TensorOutputs(outgoing).eval(), sizes, outgoing.output_names, size, outgoing.opset
        )
        model = program.model
        _name_axes(model, outgoing, size)
        if size is None:
            refuse_other_sizes(model, sizes.patch_stride, tracing.needs_whole_patches(sizes))
        if outgoing.takes != PIXEL_VALUES:
            prepend(model, Preprocessing.from_processor(outgoing.processor), outgoing.takes)
        model.metadata_props.update(_make_metadata(outgoing))
        if outgoing.opset is not None:
            tracing.lower_opset(model, outgoing.opset)
        tracing.write_constants_as_tensors(model)
        program.save(str(outgoing.folder / self.runtime.file))
        outgoing.processor.save_pretrained(outgoing.folder)


@final
class OpenVinoGraph(_GraphTarget):
    """`openvino_model.xml` and `.bin`, converted from the ONNX graph with float32 weights and checked in OpenVINO."""

    name = "openvino"
    title = "OpenVINO"
    libraries = (("onnx", "onnxscript", "onnxruntime", "openvino"), "export,openvino")
    options = ("static", "preprocessing", "quantize", "calibrate", "agreement")
    runtime = runtimes.OPENVINO

    def write(self, outgoing: OutgoingModel) -> None:
        """Export the model to ONNX and convert that."""
        import openvino

        OnnxGraph().write(outgoing)
        file = outgoing.folder / runtimes.ONNXRUNTIME.file
        if "," not in str(file):
            graph = openvino.convert_model(file)
        else:  # OpenVINO splits paths at commas
            with make_scratch_folder("export") as scratch:
                parts = [shutil.copy(part, scratch) for part in runtimes.ONNXRUNTIME.parts(file)]
                graph = openvino.convert_model(parts[0])
        with diagnose_write_failure(file):
            openvino.save_model(graph, outgoing.folder / runtimes.OPENVINO.file, compress_to_fp16=False)
        del graph  # it keeps the file open
        for part in runtimes.ONNXRUNTIME.parts(file):
            part.unlink()


@final
class ExecuTorchProgram(_GraphTarget):
    """`model.pte` by XNNPACK on CPUs, for the nominal image size and batches up to `LARGEST_BATCH`."""

    name = "executorch"
    title = "ExecuTorch"
    libraries = (("executorch",), "executorch")
    least_tolerance = 1e-3  # XNNPACK approximates GELU and softmax
    runtime = runtimes.EXECUTORCH

    def write(self, outgoing: OutgoingModel) -> None:
        """Export the model and lower it to XNNPACK, with the metadata as constant methods."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

        images = torch.zeros(2, outgoing.config.num_channels, *outgoing.nominal_size)
        dims = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)
        with torch.no_grad():
            program = torch.export.export(TensorOutputs(outgoing).eval(), (images,), dynamic_shapes=dims, strict=False)
        metadata = _make_metadata(replace(outgoing, static=True)) | {runtimes.OUTPUTS: " ".join(outgoing.output_names)}
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=metadata)
        (outgoing.folder / runtimes.EXECUTORCH.file).write_bytes(edge.to_executorch().buffer)
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return super().compare(replace(outgoing, static=True))


@final
class TransformersJsFolder(Target):
    """config.json and `onnx/model.onnx`, which includes the image processor, for a classifier of any family.

    config.json names a ViT, which for transformers.js is any model from images to logits. transformers.js resizes
    images differently from Python: without smoothing in node, and as the browser does elsewhere. So its processor
    passes levels 0..255 on, and the graph resizes them to the same bits as in Python.
    """

    name = "transformers.js"
    title = "transformers.js"
    libraries = OnnxGraph.libraries
    takes = LEVELS
    problem_types = ("single_label_classification",)  # its pipeline always applies a softmax

    def write(self, outgoing: OutgoingModel) -> None:
        """Write the ONNX graph, and config.json and a processor that leave the images to it."""
        inner = replace(outgoing, folder=outgoing.folder / "onnx")
        inner.folder.mkdir()
        OnnxGraph().write(inner)
        config: dict[str, Any] = {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "image_size": list(outgoing.nominal_size),
            "id2label": outgoing.config.id2label,
            "label2id": {label: index for index, label in outgoing.config.id2label.items()},
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (outgoing.folder / "config.json").write_text(text, encoding="utf-8")
        steps: dict[str, Any] = {f"do_{step}": False for step in ("resize", "rescale", "normalize", "center_crop")}
        ViTImageProcessor(**steps, do_convert_rgb=True).save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return OnnxGraph().compare(replace(outgoing, folder=outgoing.folder / "onnx"))


def _make_metadata(outgoing: OutgoingModel) -> dict[str, str]:
    """Return the metadata that is stored in a graph's file."""
    problem_type = get_problem_type(outgoing.config)
    return {
        "labels": json.dumps(
            {int(index): label for index, label in outgoing.config.id2label.items()}, ensure_ascii=False
        ),
        "processor": json.dumps(outgoing.processor.to_dict(), ensure_ascii=False, default=str),
        "image_sizes": _describe_sizes(outgoing),
        "takes": outgoing.takes,
        **({"problem_type": problem_type} if problem_type != "single_label_classification" else {}),
        **({"thresholds": json.dumps(outgoing.thresholds)} if outgoing.thresholds else {}),
        **({"predicts": type(outgoing.model).__name__} if outgoing.is_dense else {}),
        **({"patch_stride": json.dumps(outgoing.config.patch_stride)} if keeps_shapes(outgoing.processor) else {}),
        **({"quantize": outgoing.quantize} if outgoing.quantize is not None else {}),
    }


def _check_preprocessing(outgoing: OutgoingModel) -> None:
    """Raise a UserError if the image processor cannot be part of the model's graph."""
    height, width = Preprocessing.from_processor(outgoing.processor).output_size
    if not outgoing.has_head or outgoing.config.num_channels != 3:
        options = "--preprocessing, --decoding and --to transformers.js"
        raise UserError(f"{options} need a classifier of RGB images; use --to onnx without them")
    try:
        outgoing.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(
            f"the image processor makes images of {height}x{width} px, but the model does not take that size: "
            f"{error}; correct the size in preprocessor_config.json"
        ) from error
    if outgoing.takes == ENCODED:
        require(runtimes.EXTENSIONS, purpose="--decoding")


def _name_axes(model: Any, outgoing: OutgoingModel, size: tuple[int, int] | None) -> None:
    """Name axes and dense layers of an ONNX model in place; drop metadata and the shapes of inner values.

    Dense layers get names such as vit.layers.0.mlp.fc1/linear_4, by which quantizers list them.
    """
    from onnxscript import ir

    inner_values = list(model.graph.initializers.values())
    for node in model.graph.all_nodes():
        scopes: list[str] = literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        if node.op_type in runtimes.DENSE and len(scopes) > 1 and node.inputs[1].is_initializer():
            node.name = f"{scopes[-2].removeprefix('model.')}/{scopes[-1]}"
        node.metadata_props.clear()  # the exporter's stack traces, which have paths of this machine
        inner_values += [value for value in node.outputs if not value.is_graph_output()]
    for value in inner_values:  # tools that need shapes infer them, and quantizers change those of weights
        value.metadata_props.clear()
        value.shape = value.type = None
    (images,) = model.graph.inputs
    images.shape = ir.Shape(["batch", outgoing.sizes.num_channels, *(size or ("height", "width"))])
    for index, output in enumerate(model.graph.outputs):
        if index > 0 or outgoing.is_dense:  # the second axis is fixed, such as labels or queries; further ones are not
            axes = [output.shape[1], *([None] * (len(output.shape) - 2))]
        else:
            axes = [outgoing.config.num_labels] if outgoing.has_head else ["tokens", output.shape[2]]
        output.shape = ir.Shape(["batch", *axes])


def _find_only_size(outgoing: OutgoingModel) -> tuple[int, int] | None:
    """Return the only image size of the graph's model, which its image processor may set; None for any size."""
    if outgoing.takes == PIXEL_VALUES and not outgoing.static and tracing.takes_other_sizes(outgoing.sizes):
        return None
    refuse_own_shapes(outgoing.processor, "this graph")
    if outgoing.takes != PIXEL_VALUES:
        return Preprocessing.from_processor(outgoing.processor).output_size
    return outgoing.nominal_size


def _describe_sizes(outgoing: OutgoingModel) -> str:
    """Return the image sizes that the graph takes, in words."""
    if outgoing.takes != PIXEL_VALUES:
        return "all"
    only_size = _find_only_size(outgoing)
    if only_size is not None:
        return f"{only_size[0]}x{only_size[1]} px"
    height, width = outgoing.sizes.patch_stride
    return f"{'multiples of' if tracing.needs_whole_patches(outgoing.sizes) else 'at least'} {height}x{width} px"


def _choose_sizes(outgoing: OutgoingModel) -> list[tuple[int, int]]:
    """Return the (height, width) in px of the batches to compare: the nominal size twice, and others if possible.

    With the image processor in the graph: the size that it keeps, twice, and sizes that it resizes.
    """
    if outgoing.takes != PIXEL_VALUES:
        height, width = unchanged = Preprocessing.from_processor(outgoing.processor).unchanged_size
        resized = [(2 * height + 3, width + width // 2 + 1), (height // 2 + 1, width + 7), (480, 500), (37, 53)]
        return [unchanged, unchanged, *resized]
    nominal = outgoing.nominal_size
    if _find_only_size(outgoing) is not None:
        return [nominal, nominal]
    h, w = outgoing.sizes.grid
    patch_height, patch_width = outgoing.sizes.patch_stride
    grids = [(max(h // 2, 1), w), (h + 1, max(w - 1, 1)), (h + h // 2, w + 2), (h, 2 * w)]
    return [nominal, nominal, *((rows * patch_height, columns * patch_width) for rows, columns in grids)]
