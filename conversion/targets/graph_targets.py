"""The targets that are one graph for batches of images: ONNX, OpenVINO, ExecuTorch and transformers.js.

Each is certified in its own runtime. Graphs are for images of any size, unless the model or the user wants one.
"""

import json
from ast import literal_eval
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, final

import torch
from torch import nn
from transformers import ViTImageProcessor

from hf_vit.conversion.targets.graphs.certificate import certify
from hf_vit.conversion.targets.graphs.preprocessing import (
    ENCODED,
    LEVELS,
    PIXEL_VALUES,
    Preprocessing,
    prepend,
    refuse_other_sizes,
)
from hf_vit.conversion.targets.graphs.runtimes import (
    DENSE,
    EXECUTORCH,
    EXTENSIONS,
    ONNXRUNTIME,
    OPENVINO,
    OUTPUTS,
    Runtime,
)
from hf_vit.conversion.targets.graphs.tracing import (
    OPSETS,
    lower_opset,
    only_whole_patches,
    onnx_program,
    takes_other_sizes,
)
from hf_vit.conversion.targets.target import OutgoingModel, Target
from hf_vit.errors import UserError
from hf_vit.families import problem_type_of
from hf_vit.results.writing import diagnose_write_failure

LARGEST_BATCH = 64  # memory of an ExecuTorch program is planned for it


@final
class Outcome(nn.Module):
    """Pixels in, tensors out: of a classifier logits and the features that its head sees, else those of the names."""

    def __init__(self, outgoing: OutgoingModel) -> None:
        super().__init__()
        outgoing.model.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias
        self.model, self.has_head, self.names = outgoing.model, outgoing.has_head, outgoing.output_names

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.has_head:
            outputs = self.model(pixel_values)
            return tuple(outputs[name] for name in self.names)
        seen: list[torch.Tensor] = []
        classifier: Any = self.model.classifier
        handle = classifier.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        logits = self.model(pixel_values).logits
        handle.remove()
        return logits, *seen


class _GraphTarget(Target):
    """Abstract: checked in a runtime."""

    runtime: ClassVar[Runtime]

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        tolerance = self.tolerance(outgoing.config)
        done = certify(outgoing, self.runtime, _sizes_to_compare(outgoing), tolerance, _describe_sizes(outgoing))
        if not done.holds() and done.largest_difference <= tolerance:
            raise UserError(
                f"the graph resizes images differently: {done.describe()}; nothing was written, please report this"
            )
        return done.largest_difference, done.measured_with


@final
class OnnxGraph(_GraphTarget):
    """`model.onnx`, checked in onnxruntime."""

    name = "onnx"
    title = "ONNX"
    libraries = (("onnx", "onnxscript", "onnxruntime"), "export")
    options = ("static", "preprocessing", "decoding", "quantize", "calibrate", "opset")
    takes_dense = True
    runtime = ONNXRUNTIME

    def write(self, outgoing: OutgoingModel) -> None:
        if outgoing.takes != PIXEL_VALUES:
            _refuse_images(outgoing)
        size, sizes = _one_size(outgoing), outgoing.sizes
        (height, width), (stride_h, stride_w) = outgoing.nominal_size, sizes.patch_stride
        if size is None and outgoing.is_dense and (height % stride_h or width % stride_w):
            raise UserError(
                f"a graph for every image size takes multiples of {stride_h}x{stride_w} px, and the model's "
                f"own images have {height}x{width}; add --static for a graph of that size only"
            )
        if outgoing.opset is not None and outgoing.opset not in OPSETS:
            raise UserError(f"--opset {outgoing.opset} is not available; give one from {OPSETS[0]} to {OPSETS[-1]}")
        program = onnx_program(Outcome(outgoing).eval(), sizes, outgoing.output_names, size, outgoing.opset)
        model = program.model
        _name_axes(model, outgoing, size)
        if size is None:
            refuse_other_sizes(model, sizes.patch_stride, only_whole_patches(sizes))
        if outgoing.takes != PIXEL_VALUES:
            prepend(model, Preprocessing.of(outgoing.processor), outgoing.takes)
        model.metadata_props.update(_about(outgoing))
        if outgoing.opset is not None:
            lower_opset(model, outgoing.opset)
        program.save(str(outgoing.folder / self.runtime.file))
        outgoing.processor.save_pretrained(outgoing.folder)


@final
class OpenVinoGraph(_GraphTarget):
    """`openvino_model.xml` and `.bin`, the ONNX graph with weights in float32 and its metadata, checked in OpenVINO."""

    name = "openvino"
    title = "OpenVINO"
    libraries = (("onnx", "onnxscript", "onnxruntime", "openvino"), "export,openvino")
    options = ("static", "preprocessing", "quantize", "calibrate")
    runtime = OPENVINO

    def write(self, outgoing: OutgoingModel) -> None:
        import openvino

        OnnxGraph().write(outgoing)
        file = outgoing.folder / ONNXRUNTIME.file
        graph = openvino.convert_model(file)
        with diagnose_write_failure(file):
            openvino.save_model(graph, outgoing.folder / OPENVINO.file, compress_to_fp16=False)
        del graph  # it holds the file
        file.unlink()


@final
class ExecuTorchProgram(_GraphTarget):
    """`model.pte` by XNNPACK on CPUs, for the nominal image size and batches up to `LARGEST_BATCH`."""

    name = "executorch"
    title = "ExecuTorch"
    libraries = (("executorch",), "executorch")
    least_tolerance = 1e-3  # XNNPACK has approximations of its own for GELU and softmax
    runtime = EXECUTORCH

    def write(self, outgoing: OutgoingModel) -> None:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

        images = torch.zeros(2, outgoing.config.num_channels, *outgoing.nominal_size)
        dims = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)
        with torch.no_grad():
            program = torch.export.export(Outcome(outgoing).eval(), (images,), dynamic_shapes=dims, strict=False)
        said = _about(replace(outgoing, static=True)) | {OUTPUTS: " ".join(outgoing.output_names)}
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=said)
        (outgoing.folder / EXECUTORCH.file).write_bytes(edge.to_executorch().buffer)
        outgoing.processor.save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return super().compare(replace(outgoing, static=True))


@final
class TransformersJsFolder(Target):
    """config.json and `onnx/model.onnx` with the image processor in it, of any family's classifier.

    To transformers.js a ViT is what takes images and gives logits.

    transformers.js resizes otherwise than Python does: in node without smoothing, in browsers as the browser likes. So
    its processor hands levels 0..255 on as they are, and the graph does the rest, to the same bits as in Python.
    """

    name = "transformers.js"
    title = "transformers.js"
    libraries = OnnxGraph.libraries
    takes = LEVELS
    problem_types = ("single_label_classification",)  # its pipeline applies a softmax to all

    def write(self, outgoing: OutgoingModel) -> None:
        inside = replace(outgoing, folder=outgoing.folder / "onnx")
        inside.folder.mkdir()
        OnnxGraph().write(inside)
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


def _about(outgoing: OutgoingModel) -> dict[str, str]:
    """Return what a graph's file says of itself."""
    config, problem_type = outgoing.config, problem_type_of(outgoing.config)
    return {
        "labels": json.dumps({int(index): label for index, label in config.id2label.items()}, ensure_ascii=False),
        "processor": json.dumps(outgoing.processor.to_dict(), ensure_ascii=False, default=str),
        "image_sizes": _describe_sizes(outgoing),
        "takes": outgoing.takes,
        **({"problem_type": problem_type} if problem_type != "single_label_classification" else {}),
        **({"predicts": type(outgoing.model).__name__} if outgoing.is_dense else {}),
        **({"quantize": outgoing.quantize} if outgoing.quantize is not None else {}),
    }


def _refuse_images(outgoing: OutgoingModel) -> None:
    """Raise a UserError that says why the image processor cannot be in the model's graph."""
    if outgoing.takes == ENCODED and outgoing.quantize == "static":
        raise UserError(
            "--quantize static does not work with --decoding; use --preprocessing instead, or --quantize dynamic"
        )
    height, width = Preprocessing.of(outgoing.processor).output_size
    if not outgoing.has_head or outgoing.config.num_channels != 3:
        raise UserError("--preprocessing and --decoding need a classifier of RGB images; leave them out")
    try:
        outgoing.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(
            f"the image processor makes images of {height}x{width} px, which the model does not take: {error}"
        ) from error
    if outgoing.takes == ENCODED and find_spec(EXTENSIONS) is None:
        raise UserError('--decoding needs onnxruntime-extensions: pip install "hf-vit[export]"')


def _name_axes(model: Any, outgoing: OutgoingModel, size: tuple[int, int] | None) -> None:
    """Name axes and dense layers (vit.layers.0.mlp.fc1/linear_4, as quantizers list them); drop what is inferred."""
    from onnxscript import ir

    inside = list(model.graph.initializers.values())
    for node in model.graph.all_nodes():
        scopes: list[str] = literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        if node.op_type in DENSE and len(scopes) > 1 and node.inputs[1].is_initializer():
            node.name = f"{scopes[-2].removeprefix('model.')}/{scopes[-1]}"
        node.metadata_props.clear()  # the exporter's stack traces: places on this machine
        inside += [value for value in node.outputs if not value.is_graph_output()]
    for value in inside:  # whoever needs shapes infers them, and quantizers change those of weights
        value.metadata_props.clear()
        value.shape = value.type = None
    (images,), (output, *others) = model.graph.inputs, model.graph.outputs
    images.shape = ir.Shape(["batch", outgoing.sizes.num_channels, *(size or ("height", "width"))])
    if outgoing.is_dense:
        output.shape = ir.Shape(["batch", output.shape[1], *([None] * (len(output.shape) - 2))])
    else:
        axes = [outgoing.config.num_labels] if outgoing.has_head else ["tokens", output.shape[2]]
        output.shape = ir.Shape(["batch", *axes])
    for other in others:
        other.shape = ir.Shape(["batch", other.shape[1], *([None] * (len(other.shape) - 2))])


def _one_size(outgoing: OutgoingModel) -> tuple[int, int] | None:
    """Return the one size of images, which an image processor before the model may have made; None for any size."""
    if outgoing.takes != PIXEL_VALUES:
        return Preprocessing.of(outgoing.processor).output_size
    return outgoing.nominal_size if outgoing.static or not takes_other_sizes(outgoing.sizes) else None


def _describe_sizes(outgoing: OutgoingModel) -> str:
    if outgoing.takes != PIXEL_VALUES:
        return "all"
    size, whole = _one_size(outgoing), only_whole_patches(outgoing.sizes)
    words = "" if size is not None else "multiples of " if whole else "at least "
    height, width = size or outgoing.sizes.patch_stride
    return f"{words}{height}x{width} px"


def _sizes_to_compare(outgoing: OutgoingModel) -> list[tuple[int, int]]:
    """Return (H, W) in px: the nominal size twice, for two batches; for any size rectangles too, smaller and larger.

    Where the image processor is in the graph: what it leaves as it is, twice, and what it resizes.
    """
    if outgoing.takes != PIXEL_VALUES:
        height, width = kept = Preprocessing.of(outgoing.processor).kept_size
        resized = [(2 * height + 3, width + width // 2 + 1), (height // 2 + 1, width + 7), (480, 500), (37, 53)]
        return [kept, kept, *resized]
    nominal = outgoing.nominal_size
    if _one_size(outgoing) is not None:
        return [nominal, nominal]
    (h, w), (height, width) = outgoing.sizes.grid, outgoing.sizes.patch_stride
    grids = [(max(h // 2, 1), w), (h + 1, max(w - 1, 1)), (h + h // 2, w + 2), (h, 2 * w)]
    return [nominal, nominal, *((rows * height, columns * width) for rows, columns in grids)]
