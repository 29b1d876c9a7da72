"""The graph that a page runs: it takes one image and returns logits, attention maps and hidden states.

Legend: C channels, H x W px, h x w patch grid, N tokens, D hidden size, A heads, K labels.
"""

from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_vit.families import find_family
from hf_vit.models.configuration_hf_vit import as_pair


@final
class ModelWithMaps(nn.Module):
    """A module that maps [1, C, H, W] to one tensor for each of `names`, without the batch axis."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config: Any = model.config
        self.model = model
        family = find_family(config.model_type)
        assert family is not None
        self.has_tokens, self.has_attention = family.has_tokens, family.is_vit
        self.names = ["logits"]
        if self.has_attention:
            kinds = ("row_attention", "column_attention") if is_axial(config) else ("attention",)
            self.names += [f"{kind}_{layer}" for layer in range(config.num_hidden_layers) for kind in kinds]
        if self.has_tokens:
            self.names += [f"hidden_{depth}" for depth in range(config.num_hidden_layers + 1)]

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits, attention maps and hidden states in the order of `names`."""
        options = {"output_attentions": True} if self.has_attention else {}
        output = self.model(pixel_values, output_hidden_states=self.has_tokens, **options)
        results = [output.logits[0]]
        if self.has_attention:  # the first axis of axial maps are the lines of the grid, not the batch
            results += output.attentions if is_axial(self.model.config) else [maps[0] for maps in output.attentions]
        if self.has_tokens:
            results += [states[0] for states in output.hidden_states]
        return tuple(results)

    def positions(self) -> torch.Tensor | None:
        """Return the position embeddings [h*w, D] of the model's patch grid; None if none are added to the patches."""
        if not self.has_attention:
            return None
        encoder: Any = self.model.base_model
        with torch.no_grad():
            table, _ = encoder.embeddings.compute_position_table(encoder.config.grid, like=next(encoder.parameters()))
        return None if table is None else table[0].detach().clone()


def is_axial(config: Any) -> bool:
    """Return whether layers attend along rows and then along columns."""
    return config.model_type == "hf_axial_vit"


def count_inner_values(config: Any) -> int:
    """Return how many values the attention maps and hidden states of one image have; a browser keeps all in memory."""
    family = find_family(config.model_type)
    if family is None or not family.has_tokens:
        return 0
    h, w = config.grid
    depth = config.num_hidden_layers
    attention = 0
    if family.is_vit:
        attention = config.num_attention_heads * (h * w * (h + w) if is_axial(config) else (h * w + 1) ** 2)
    return depth * attention + (depth + 1) * h * w * config.hidden_size


def write_graph(model: PreTrainedModel, file: Path) -> list[str]:
    """Write a classifier as an ONNX graph for one image of its input size.

    Returns:
        The names of the outputs: logits [K]; attention_LAYER [A, N, N], or for axial models row_attention_LAYER [h, A,
            w, w] and column_attention_LAYER [w, A, h, h]; hidden_DEPTH [N, D], where depth 0 is before the first layer;
            positions [h*w, D], the position embeddings of the patches.
    """
    from onnxscript import ir

    model.set_attn_implementation("eager")  # other implementations return no attention maps
    config: Any = model.config
    module = ModelWithMaps(model).eval()
    image = torch.zeros(1, config.num_channels, *as_pair(config.image_size))
    with torch.no_grad():
        program = torch.onnx.export(
            module, (image,), input_names=["pixel_values"], output_names=module.names, dynamo=True, verbose=False
        )
    assert program is not None
    graph: Any = program.model.graph
    for node in graph.all_nodes():
        node.metadata_props.clear()  # the exporter's stack traces contain local paths
    positions = module.positions()
    if positions is not None:  # the same for every image
        table = ir.Value(name="positions_table", const_value=ir.tensor(positions.numpy(), name="positions_table"))
        graph.register_initializer(table)
        shape, data_type = ir.Shape(list(positions.shape)), ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(ir.Value(name="positions", shape=shape, type=data_type))
        graph.append(ir.node("Identity", [table], outputs=[graph.outputs[-1]]))
    program.save(str(file), external_data=False)
    return [output.name for output in graph.outputs]
