"""`model.onnx`: the model as a graph for batches and images of any size; checked in onnxruntime."""

import json
from ast import literal_eval
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import nn

from hf_vit.conversion.targets.graphs.certificate import certify
from hf_vit.conversion.targets.graphs.certified_int8 import in_int8
from hf_vit.conversion.targets.graphs.dense import DenseSizes
from hf_vit.conversion.targets.graphs.preprocessing import ENCODED, PIXEL_VALUES, Preprocessing, prepend
from hf_vit.conversion.targets.graphs.quantizing import DENSE
from hf_vit.conversion.targets.graphs.refusing import refuse_other_sizes
from hf_vit.conversion.targets.graphs.runtimes import EXTENSIONS, ONNXRUNTIME, Runtime
from hf_vit.conversion.targets.graphs.tracing import only_whole_patches, onnx_program, takes_other_sizes
from hf_vit.conversion.targets.target import OutgoingModel, Target
from hf_vit.errors import UserError
from hf_vit.families import problem_type_of

FILE = "model.onnx"


@final
class Outcome(nn.Module):
    """Pixels in, tensors out: of a classifier logits and the features that its head sees, else those of the names."""

    def __init__(self, model: nn.Module, has_head: bool, names: list[str]) -> None:
        super().__init__()
        self.model, self.has_head, self.names = model, has_head, names

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


@final
class OnnxGraph(Target):
    """`model.onnx`, checked in onnxruntime."""

    name = "onnx"
    title = "ONNX"
    libraries = (("onnx", "onnxscript", "onnxruntime"), "export")
    options = ("static", "preprocessing", "decoding", "quantize", "calibrate")
    takes_dense = True

    def write(self, outgoing: OutgoingModel) -> None:
        if outgoing.takes != PIXEL_VALUES:
            _refuse_images(outgoing)
        outgoing.model.set_attn_implementation("eager")  # torch's exporter fails on sdpa with a bias
        module = Outcome(outgoing.model, outgoing.has_head, outgoing.output_names).eval()
        size, sizes = _one_size(outgoing) if _is_of_one_size(outgoing) else None, outgoing.sizes
        if size is None and isinstance(sizes, DenseSizes):
            sizes.refuse_nominal()
        program = onnx_program(module, sizes, outgoing.output_names, size)
        self._finish(program.model, outgoing)
        program.save(str(outgoing.folder / FILE))
        outgoing.processor.save_pretrained(outgoing.folder)

    def _finish(self, model: Any, outgoing: OutgoingModel) -> None:
        """Names for the axes, sizes that hold, and what the file says of itself."""
        from onnxscript import ir

        config, sizes = outgoing.config, outgoing.sizes
        inside = list(model.graph.initializers.values())
        for node in model.graph.all_nodes():
            _name_by_module(node)
            node.metadata_props.clear()  # the exporter's stack traces: places on this machine
            inside += [value for value in node.outputs if not value.is_graph_output()]
        for value in inside:  # whoever needs shapes infers them, and quantisers change what was said of weights
            value.metadata_props.clear()
            value.shape = value.type = None
        (images,), (output, *features) = model.graph.inputs, model.graph.outputs
        height, width = _one_size(outgoing) if _is_of_one_size(outgoing) else ("height", "width")
        images.shape = ir.Shape(["batch", sizes.num_channels, height, width])
        if outgoing.is_dense:
            for each in (output, *features):
                each.shape = ir.Shape(["batch", each.shape[1], *([None] * (len(each.shape) - 2))])
        else:
            axes = [config.num_labels] if outgoing.has_head else ["tokens", output.shape[2]]
            output.shape = ir.Shape(["batch", *axes])
            for each in features:
                each.shape = ir.Shape(["batch", each.shape[1]])
        if not _is_of_one_size(outgoing):
            refuse_other_sizes(model, sizes.patch_stride, only_whole_patches(sizes))
        if outgoing.takes != PIXEL_VALUES:
            prepend(model, Preprocessing.of(outgoing.processor), outgoing.takes)
        model.metadata_props.update(about(outgoing))

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return compare_graph(outgoing, ONNXRUNTIME, self.tolerance(outgoing.config))


def about(outgoing: OutgoingModel) -> dict[str, str]:
    """What a graph's file says of itself."""
    config, problem_type = outgoing.config, problem_type_of(outgoing.config)
    return {
        "labels": json.dumps({int(index): label for index, label in config.id2label.items()}, ensure_ascii=False),
        "processor": json.dumps(outgoing.processor.to_dict(), ensure_ascii=False, default=str),
        "image_sizes": _sizes_in_words(outgoing),
        "takes": outgoing.takes,
        **({"problem_type": problem_type} if problem_type != "single_label_classification" else {}),
        **({"predicts": type(outgoing.model).__name__} if outgoing.is_dense else {}),
        **({"quantize": outgoing.quantize} if outgoing.quantize is not None else {}),
    }


def compare_graph(outgoing: OutgoingModel, runtime: Runtime, tolerance: float) -> tuple[float, str]:
    """Certify the graph that was written for a runtime; see `Target.compare`."""
    done = certify(outgoing, runtime, sizes_to_compare(outgoing), tolerance, _sizes_in_words(outgoing))
    if not done.holds() and done.largest_difference <= tolerance:
        raise UserError(f"the graph resizes otherwise: {done.describe()}; nothing is written, please report this")
    if outgoing.quantize is not None and done.holds():
        in_int8(outgoing, runtime, done)
    return done.largest_difference, done.measured_with


def _refuse_images(outgoing: OutgoingModel) -> None:
    """Raise a UserError that says why the image processor cannot be in the model's graph."""
    if outgoing.takes == ENCODED and outgoing.quantize == "static":
        raise UserError(
            "--quantize static runs the graph where there is no decoder; give --preprocessing instead of --decoding, "
            "or --quantize dynamic"
        )
    height, width = Preprocessing.of(outgoing.processor).output_size
    if not outgoing.has_head or outgoing.config.num_channels != 3:
        raise UserError(
            "an image processor goes into the graph of a classifier of RGB images; export one, or without it"
        )
    try:
        outgoing.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(
            f"the image processor makes images of {height}x{width} px, which the model does not take: {error}"
        ) from error
    if outgoing.takes == ENCODED and find_spec(EXTENSIONS) is None:
        raise UserError('--decoding needs onnxruntime-extensions: pip install "hf-vit[export]"')


def _name_by_module(node: Any) -> None:
    """A dense layer is called by its module, vit.layers.0.mlp.fc1/linear_4: what quantisers list is understood."""
    scopes: list[str] = literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    if node.op_type in DENSE and len(scopes) > 1 and node.inputs[1].is_initializer():
        node.name = f"{scopes[-2].removeprefix('model.')}/{scopes[-1]}"


def _is_of_one_size(outgoing: OutgoingModel) -> bool:
    """The model, whose images an image processor before it may have resized."""
    return outgoing.static or outgoing.takes != PIXEL_VALUES or not takes_other_sizes(outgoing.sizes)


def _one_size(outgoing: OutgoingModel) -> tuple[int, int]:
    takes_images = outgoing.takes != PIXEL_VALUES
    return Preprocessing.of(outgoing.processor).output_size if takes_images else outgoing.nominal_size


def _sizes_in_words(outgoing: OutgoingModel) -> str:
    if outgoing.takes != PIXEL_VALUES:
        return "all"
    height, width = outgoing.nominal_size
    if _is_of_one_size(outgoing):
        return f"{height}x{width} px"
    height, width = outgoing.sizes.patch_stride
    return f"{'multiples of' if only_whole_patches(outgoing.sizes) else 'at least'} {height}x{width} px"


def sizes_to_compare(outgoing: OutgoingModel) -> list[tuple[int, int]]:
    """(H, W) in px: the nominal size, again with another batch; unless static rectangles, too, smaller and larger.

    Where the image processor is in the graph: what it leaves as it is, twice, and what it resizes.
    """
    if outgoing.takes != PIXEL_VALUES:
        height, width = kept = Preprocessing.of(outgoing.processor).kept_size
        return [
            kept,
            kept,
            (2 * height + 3, width + width // 2 + 1),
            (height // 2 + 1, width + 7),
            (480, 500),
            (37, 53),
        ]
    nominal = outgoing.nominal_size
    if _is_of_one_size(outgoing):
        return [nominal, nominal]
    (h, w), (height, width) = outgoing.sizes.grid, outgoing.sizes.patch_stride
    grids = [(max(h // 2, 1), w), (h + 1, max(w - 1, 1)), (h + h // 2, w + 2), (h, 2 * w)]
    return [nominal, nominal, *((rows * height, columns * width) for rows, columns in grids)]
