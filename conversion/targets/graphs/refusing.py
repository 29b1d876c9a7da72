"""What a graph refuses: ONNX has no operator that raises, but every runtime refuses to reshape to more values."""

from typing import Any


def refuse_other_sizes(model: Any, stride: tuple[int, int], whole: bool) -> None:
    """Images smaller than a patch, and where `whole`, of sides that are no multiples of it, are refused when it is run.

    Args:
        model: an `onnx_ir.Model` whose first input is [B, C, H, W]; it is changed.
        stride: (height, width) of a patch in px.
    """
    from onnxscript import ir

    graph, images = model.graph, model.graph.inputs[0]
    users = [(usage.node, usage.idx) for usage in images.uses()]
    name = f"image_sides_{'must_be_multiples_of' if whole else 'are_smaller_than'}_{stride[0]}x{stride[1]}_px"
    nodes: list[Any] = []

    def add(operator: str, *inputs: Any, **attributes: Any) -> Any:
        node = ir.node(operator, inputs, attributes, name=f"{name}/{len(nodes)}")
        nodes.append(node)
        return node.outputs[0]

    sides, patch = add("Shape", images, start=2), add("Constant", value_ints=list(stride))
    wrong = add("Less", sides, patch)
    if whole:
        nothing = add("Constant", value_ints=[0, 0])
        wrong = add("Or", wrong, add("Less", nothing, add("Mod", sides, patch)))
    longer = add("Add", sides, add("Cast", wrong, to=int(ir.DataType.INT64)))
    shape = add("Concat", add("Shape", images, start=0, end=2), longer, axis=0)
    checked = add("Reshape", images, shape)
    checked.dtype, checked.shape = images.dtype, images.shape
    for node, index in users:
        node.replace_input_with(index, checked)
    graph.insert_before(graph[0], nodes)
