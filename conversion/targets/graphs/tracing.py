"""Export a model as one graph for batches and images of any size.

torch's exporter ignores how Python code depends on sizes. Three measures solve this. The graph is traced at a size
other than the nominal one, so that the model resamples its positions. If padding depends on the size (as in a ResNet),
the graph only takes whole patches, for which padding is constant. Operators that the exporter cannot translate are
replaced by others during tracing, without changes to the models.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.onnx import ONNXProgram
from torch.overrides import TorchFunctionMode

from hf_vit.conversion.targets.graphs.preprocessing import END, FLOAT, Nodes
from hf_vit.errors import UserError

OPSETS = range(14, 26)
TORCHS_OLDEST_OPSET = 18

# Drop a message for every operator with several outputs, which the optimizer leaves to the engine.
logging.getLogger("onnxscript.optimizer._constant_folding").addFilter(lambda record: "Skipping" not in record.msg)


def _interpolate(input: torch.Tensor, size: Any = None, *, mode: str, **options: Any) -> torch.Tensor:
    """Resize lines as maps of one row, as the exporter divides by zero for a line of one cell.

    Antialiasing is by matrices: OpenVINO ignores it, and ONNX has it from opset 18 on.
    """
    if options.pop("antialias", False):
        over_rows, over_columns = (
            _make_smoothing_matrix(number, side, mode == "bicubic").to(input.dtype)
            for number, side in zip(size, input.shape[2:], strict=True)
        )
        return over_rows @ input @ over_columns.T
    if mode != "linear":
        return F.interpolate(input, size, mode=mode, **options)
    return F.interpolate(input[:, :, None], (1, size), mode="bilinear", **options)[:, :, 0]


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Use a convolution for maps [B, h, w, C]; torch takes minutes to prove a dense layer's reshapes for every size."""
    if input.ndim != 4:
        return F.linear(input, weight, bias)
    return torch.conv2d(input.permute(0, 3, 1, 2), weight[:, :, None, None], bias).permute(0, 2, 3, 1)


def _remainder(input: torch.Tensor, divisor: int) -> torch.Tensor:
    """Compute a remainder by division."""
    return input - input // divisor * divisor


def _unfold(input: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Return windows of a table's rows, one beside the other: [L, K] -> [L - size + 1, K, size]."""
    starts = torch.arange(input.shape[0] - size + 1)
    return input[starts[:, None] + torch.arange(size)].transpose(1, 2)


def _adaptive_avg_pool2d(input: torch.Tensor, output_size: Any) -> torch.Tensor:
    """Multiply by averaging matrices, as the exporter would keep the windows of the traced size."""
    rows, columns = (output_size, output_size) if isinstance(output_size, int) else output_size
    over_rows, over_columns = (
        _make_averaging_matrix(rows, input.shape[2]),
        _make_averaging_matrix(columns, input.shape[3]),
    )
    return over_rows.to(input.dtype) @ input @ over_columns.T.to(input.dtype)


def _make_averaging_matrix(number: int, side: int) -> torch.Tensor:
    """Return the matrix [number, side] that averages `side` cells to `number` means, as adaptive pooling does.

    Mean i covers the cells from floor(i * side / number) to before ceil((i + 1) * side / number).
    """
    index = torch.arange(number)[:, None]
    cell = torch.arange(side)
    start, end = index * side // number, ((index + 1) * side + number - 1) // number
    return ((cell >= start) & (cell < end)) / (end - start)


def _make_smoothing_matrix(number: Any, side: int, is_cubic: bool) -> torch.Tensor:
    """Return the matrix [number, side] by which torch resizes `side` cells with antialiasing: the weights of a filter.

    The filter is as wide as the smaller of the two grids' steps: a triangle, or Keys' cubic with a = -0.5.
    """
    step = side / torch.full((), number, dtype=torch.float64)
    centers = (torch.arange(number, dtype=torch.float64) + 0.5) * step
    distance = (torch.arange(side, dtype=torch.float64) + 0.5 - centers[:, None]).abs() / step.clamp(min=1)
    weights = (1 - distance).clamp(min=0)
    if is_cubic:
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
        weights = torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(dim=1, keepdim=True)


def _linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
    """Compute torch.linspace for a number of steps that may depend on the image size."""
    linspace = cast(Any, torch.linspace)  # torch's annotations exclude symbolic sizes
    return (linspace_of_any_size if isinstance(steps, torch.SymInt) else linspace)(start, end, steps, **options)


def linspace_of_any_size(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
    """Compute torch.linspace, for which the exporter would keep the steps of the traced size."""
    return start + torch.arange(steps, **options) * ((end - start) / torch.sym_max(steps - 1, 1))


def _as_tensor(data: Any, **options: Any) -> torch.Tensor:
    """Make a tensor from nested lists by stacking, as the exporter would keep the numbers of the traced size."""
    if not _has_sizes(data):
        return torch.as_tensor(data, **options)
    if isinstance(data, list | tuple):
        return torch.stack([_as_tensor(item, **options) for item in cast("list[Any]", data)])
    return torch.full((), data, **options)


def _has_sizes(data: Any) -> bool:
    """Return whether nested lists hold a symbolic size."""
    if isinstance(data, list | tuple):
        return any(map(_has_sizes, cast("list[Any]", data)))
    return isinstance(data, torch.SymInt)


# Functions of torch -> functions that compute the same by operators that export for any size.
REPLACEMENTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    F.adaptive_avg_pool2d: _adaptive_avg_pool2d,
    F.interpolate: _interpolate,
    F.linear: _linear,
    torch.Tensor.remainder: _remainder,
    torch.Tensor.unfold: _unfold,
    torch.as_tensor: _as_tensor,
    torch.linspace: _linspace,
    torch.tensor: _as_tensor,
}


@final
class _ReplacedOperators(TorchFunctionMode):
    """Context in which functions of torch are computed by their `REPLACEMENTS`."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def export_onnx_program(
    module: nn.Module,
    config: Any,
    output_names: Sequence[str],
    size: tuple[int, int] | None = None,
    opset: int | None = None,
) -> ONNXProgram:
    """Export a module of images [B, C, H, W] to ONNX, for any B, and for any H and W unless `size` is given.

    `lower_opset` must then convert the operators that torch cannot write in `opset`; about sizes see
    `needs_whole_patches`.
    """
    height, width = size or choose_traced_size(config.grid, config.patch_stride)
    dims: dict[int, Any] = {0: Dim.DYNAMIC}
    if size is None and needs_whole_patches(config):
        stride_h, stride_w = config.patch_stride
        dims |= {2: stride_h * Dim("rows"), 3: stride_w * Dim("columns")}
    elif size is None:
        dims |= {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    with torch.no_grad(), _ReplacedOperators():
        program = torch.export.export(
            module,
            (torch.zeros(2, config.num_channels, height, width),),
            dynamic_shapes=(dims,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # guards would fail at sizes other than the nominal one
        )
    traced_opset = None if opset is None else max(opset, TORCHS_OLDEST_OPSET)
    return _export(program, output_names=output_names, opset_version=traced_opset)


def export_onnx_of_batches(module: nn.Module, example: torch.Tensor, output_names: Sequence[str]) -> ONNXProgram:
    """Export a module that takes a tensor like `example` [B, ...] to ONNX, for any B."""
    return _export(module, (example,), output_names=output_names, dynamic_shapes=({0: Dim("batch")},))


def _export(*arguments: Any, **options: Any) -> ONNXProgram:
    """Run torch's exporter for a graph with the input "pixel_values"."""
    program = torch.onnx.export(*arguments, input_names=["pixel_values"], dynamo=True, verbose=False, **options)
    assert program is not None  # with dynamo=True
    return program


def lower_opset(model: Any, opset: int) -> None:
    """Convert an `onnx_ir.Model` from torch to an older opset, in place; raise a UserError if that is not possible."""
    from onnx import defs
    from onnxscript import ir

    if opset >= TORCHS_OLDEST_OPSET:
        return
    graph = model.graph
    for node in list(graph):
        nodes = Nodes(f"{node.name}/")
        output = _lower_node(node, nodes, opset)
        if output is not None:
            ir.convenience.replace_nodes_and_values(graph, node, [node], nodes.nodes, node.outputs, [output])
    for node in graph:
        if node.domain:  # not an operator of ONNX itself
            continue
        try:
            schema = defs.get_schema(node.op_type, opset)
            is_supported = len(node.inputs) <= schema.max_input and node.attributes.keys() <= schema.attributes.keys()
        except defs.SchemaError:
            is_supported = False
        if not is_supported:
            raise UserError(
                f"this model needs the ONNX operator {node.op_type}, which --opset {opset} lacks; give --opset "
                f"{TORCHS_OLDEST_OPSET} or higher"
            )
    model.opset_imports[""] = opset


def _lower_node(node: Any, nodes: Nodes, opset: int) -> Any:
    """Add nodes that compute the same in an older opset and return their output; None if the node itself can stay.

    Attributes that the opset lacks, and whose values have no effect, are removed from the node.
    """
    from onnxscript import ir

    options = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "LayerNormalization" and opset < 17:
        return _layer_norm(nodes, options, *node.inputs)
    if node.op_type == "Shape" and opset < 15 and options:
        return nodes.slice(nodes.Shape(node.inputs[0]), options.get("start", 0), options.get("end", END))
    if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and len(node.inputs) > 1:
        axes: Any = ir.convenience.get_const_tensor(node.inputs[1])
        reduction = {"axes": axes.numpy().tolist(), "keepdims": options.get("keepdims", 1)}
        return getattr(nodes, node.op_type)(node.inputs[0], **reduction)
    if node.op_type == "Resize" and not options.get("antialias"):
        for name in ("antialias", "keep_aspect_ratio_policy"):
            node.attributes.pop(name, None)
    elif node.op_type == "Split":
        node.attributes.pop("num_outputs", None)  # without it, the outputs have equal sizes
    return None


def write_constants_as_tensors(model: Any) -> None:
    """Give the constants of an `onnx_ir.Model` tensors, in place: onnxruntime's shape inference reads no others."""
    from onnxscript import ir

    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value" not in node.attributes:
            tensor: Any = ir.convenience.get_const_tensor(node.outputs[0])
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", tensor)


def _layer_norm(nodes: Nodes, options: Mapping[str, Any], values: Any, scale: Any, bias: Any = None) -> Any:
    """Compute LayerNormalization over the last axis by its definition."""
    mean: Any = {"axes": [-1], "keepdims": 1}
    centered = nodes.Sub(values, nodes.ReduceMean(values, **mean))
    # The form that onnxruntime's optimizers recognize; Mul(centered, centered) ends one of them with an error.
    variance = nodes.ReduceMean(nodes.Pow(centered, nodes.constant(2.0, FLOAT)), **mean)
    deviation = nodes.Sqrt(nodes.Add(variance, nodes.constant(options["epsilon"], FLOAT)))
    scaled = nodes.Mul(nodes.Div(centered, deviation), scale)
    return scaled if bias is None else nodes.Add(scaled, bias)


def takes_other_sizes(config: Any) -> bool:
    """Return whether the model takes images of other sizes than the nominal one; an MLP-Mixer does not."""
    try:
        config.grid_of(*choose_traced_size(config.grid, config.patch_stride))
    except ValueError:
        return False
    return True


def needs_whole_patches(config: Any) -> bool:
    """Return whether sides must be multiples of the patch, as for a ResNet, whose padding depends on the size."""
    return getattr(config, "stage_depths", None) is not None


def choose_traced_size(grid: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Return an (H, W) in px of whole patches in which no sides are equal to each other or to the nominal ones.

    The exporter would take equal sizes for the same size.
    """
    rows, columns = grid[0] + 1, grid[1] + 2  # more than the nominal grid, and not equal for a square one
    height, width = stride
    while rows * height == columns * width:
        columns += 1
    return rows * height, columns * width
