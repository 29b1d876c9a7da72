"""Write dense layers of an ONNX graph in int8, with their inputs on calibration images in view.

QuantizeLinear and DequantizeLinear stand on either side of products, which ONNX Runtime then computes in int8.
Legend: D inputs and M outputs of a layer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from onnxscript import ir

from hf_vit.conversion.targets.graphs.fitting import Inputs, round_weights
from hf_vit.conversion.targets.graphs.preprocessing import Nodes

_LEAST_SCALE = 1e-9
_LEVELS = 255  # of inputs in int8, from 0
_GELU_ZERO = 28  # level of zero for inputs whose lowest value is small, as after a GELU
_OPSET_WITH_AXES = 18  # since then axes are an input of ReduceMax


def record_inputs(
    model: Any, layers: Sequence[str], run: Callable[[Any], Iterable[dict[str, torch.Tensor]]]
) -> dict[str, Inputs]:
    """Return the records of the values that dense layers of an `onnx_ir.Model` read, by the names of these values.

    `run` runs the calibration images through a graph, and returns the outputs of every batch.
    """
    outputs = model.graph.outputs
    values = list(dict.fromkeys(node.inputs[0] for node in model.graph if node.name in layers))
    original_outputs = list(outputs)
    outputs.extend(value for value in values if value not in original_outputs)
    records: dict[str, Inputs] = {}
    for batch in run(model):
        for value in values:
            records[value.name] = Inputs.record(batch[value.name], records.get(value.name))
    del outputs[len(original_outputs) :]
    return records


def smooth_norms(model: Any, layers: Sequence[str], records: dict[str, Inputs]) -> None:
    """Balance the channels of layer norms with the weights of the dense layers that alone read them, in place."""
    for norm in model.graph:
        output, parameters = norm.outputs[0], [value for value in norm.inputs[1:] if value is not None]
        readers = [node for node, _ in output.uses()]
        has_other_readers = output.is_graph_output() or any(node.name not in layers for node in readers)
        if norm.op_type != "LayerNormalization" or not readers or has_other_readers:
            continue
        parameters_and_weights = (*parameters, *(node.inputs[1] for node in readers))
        if not all(value.is_initializer() and len(value.uses()) == 1 for value in parameters_and_weights):
            continue
        name = output.name
        factors = records[name].choose_factors(torch.cat([_read_weight(node) for node in readers]))
        records[name] = records[name].divide(factors)
        for parameter in parameters:
            _write(parameter, _read(parameter) / factors)
        for node in readers:
            weight = _read_weight(node) * factors
            _write(node.inputs[1], weight if _is_transposed(node) else weight.T)


def quantize_layers(model: Any, layers: Sequence[str], records: dict[str, Inputs], by_token: bool, levels: int) -> None:
    """Replace dense layers of an `onnx_ir.Model` by products in int8, in place.

    Args:
        model, records: the graph, and what `record_inputs` returned for it.
        layers: names of the layers; each output channel of their weights has its own scale.
        by_token: whether every token has its own range in every pass, instead of the one of the records.
        levels: largest weight in int8.
    """
    graph = model.graph
    int8_inputs: dict[str, tuple[Any, Any]] = {}  # by the name of a value, as layers share their inputs
    for node in [node for node in graph if node.name in layers]:
        values, former_weight, *bias = node.inputs
        record, weight, nodes = records[values.name], _read_weight(node), Nodes(f"{node.name}/")
        if values.name not in int8_inputs:
            int8_inputs[values.name] = _quantize_inputs(nodes, values, record, by_token, graph.opset_imports[""])
        inputs, token_scales = int8_inputs[values.name]
        scales = weight.abs().amax(dim=1).clamp(min=_LEAST_SCALE) / levels
        int8_weight = round_weights(weight / scales[:, None], levels, record).to(torch.int8)
        zeros = torch.zeros(len(scales), dtype=torch.int8)
        parameters = [ir.Value(name=f"{node.name}/{name}") for name in ("weight", "scales", "zeros")]
        for parameter, tensor in zip(parameters, (int8_weight.T, scales, zeros), strict=True):
            _write(parameter, tensor)
            graph.register_initializer(parameter)
        outputs = nodes.MatMul(inputs, nodes.DequantizeLinear(*parameters, axis=1))
        outputs = outputs if token_scales is None else nodes.Mul(outputs, token_scales)
        outputs = nodes.Add(outputs, *bias) if bias and bias[0] is not None else outputs
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes.nodes, node.outputs, [outputs])
        if not former_weight.uses():
            graph.initializers.pop(former_weight.name)


def _quantize_inputs(nodes: Nodes, values: Any, record: Inputs, by_token: bool, opset: int) -> tuple[Any, Any]:
    """Add nodes that quantize a layer's inputs; return the result, and scales of tokens by which to multiply outputs.

    The scales are None if all tokens have the range of the record.
    """
    lowest, highest = min(float(record.lowest.min()), 0.0), max(float(record.highest.max()), 0.0)
    token_scales = None
    if by_token:
        is_one_sided = -lowest * (_LEVELS - _GELU_ZERO) < highest * _GELU_ZERO
        zero = _GELU_ZERO if is_one_sided else 128
        scale = 1 / (_LEVELS - zero)
        largest = values if is_one_sided else nodes.Abs(values)
        least = max(-lowest / zero / scale if is_one_sided else 0.0, _LEAST_SCALE)
        if opset < _OPSET_WITH_AXES:
            largest = nodes.ReduceMax(largest, axes=[-1], keepdims=1)
        else:
            largest = nodes.ReduceMax(largest, nodes.add_ints(-1), keepdims=1)
        token_scales = nodes.Max(largest, nodes.constant(least, ir.DataType.FLOAT))
        values = nodes.Div(values, token_scales)
    else:
        scale = max((highest - lowest) / _LEVELS, _LEAST_SCALE)
        zero = round(-lowest / scale)
    step = nodes.constant(scale, ir.DataType.FLOAT), nodes.constant(zero, ir.DataType.UINT8)
    return nodes.DequantizeLinear(nodes.QuantizeLinear(values, *step), *step), token_scales


def _read(initializer: Any) -> torch.Tensor:
    return torch.tensor(initializer.const_value.numpy())


def _write(initializer: Any, tensor: torch.Tensor) -> None:
    initializer.const_value = ir.tensor(tensor.contiguous().numpy(), name=initializer.name)


def _is_transposed(node: Any) -> bool:
    return "transB" in node.attributes and bool(node.attributes["transB"].value)


def _read_weight(node: Any) -> torch.Tensor:
    """Return a dense layer's weight, [M, D]."""
    weight = _read(node.inputs[1])
    return weight if _is_transposed(node) else weight.T
