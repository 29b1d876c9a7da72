"""Attention maps of any supported vision transformer, handed out layer by layer while one ordinary forward runs.

Legend: B batch, N tokens, D hidden size, A heads, h x w patch grid.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from hf_vit.analysis.reading.token_layout import OUR_VITS, PREFIX_TOKENS, TokenLayout, encoder_of, kind_of
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_vit import AttentionMaps, attention_probabilities


def attention_obstacle(model: nn.Module) -> str | None:
    """Why the attention of a model cannot be read; None if it can."""
    kind, known = kind_of(model), (*OUR_VITS, *PREFIX_TOKENS)
    if kind in known:
        return None
    return f"it reads attention maps, which it knows how to find in {', '.join(known)}, not in {kind}"


@final
class AttentionReader:
    """Reads attention probabilities under any attention implementation, in memory for one layer.

    They are computed anew from the queries and keys of the layer that runs, so a pass costs one forward and little
    more, and no layer is kept.

    Attributes:
        layout: where the patches stand among the tokens.
        num_layers, num_heads: how many maps a pass gives, and of how many heads each.
        is_axial: whether a map is a pair, along rows and along columns (see `AttentionMaps`).

    Raises:
        UserError: the model is of another family.
    """

    def __init__(self, model: nn.Module) -> None:
        if obstacle := attention_obstacle(model):
            raise UserError(f"attention cannot be analysed: {obstacle}; choose other analyses with --only")
        self.encoder = encoder_of(model)
        self.layout = TokenLayout(model)
        config = self.layout.config
        self.is_axial = config.model_type == "hf_axial_vit"
        self.num_layers, self.num_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self._probabilities = _our_probabilities if config.model_type in OUR_VITS else _their_probabilities

    def read(self, pixel_values: torch.Tensor, receive: Callable[[int, AttentionMaps], None]) -> None:
        """Run the encoder on [B, C, H, W]; `receive(layer, maps)` gets every layer's map, first layer first."""
        grid, layer = self.layout.grid(pixel_values), 0
        rows: torch.Tensor | None = None

        def finish(found: Any) -> None:
            nonlocal layer
            receive(layer, AttentionMaps({layer: found}, grid, self.layout.patch_tokens))
            layer += 1

        def whole(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            finish(self._probabilities(module, _hidden_states(arguments, keywords), grid))

        def along_rows(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal rows
            rows = self._lines(module, _hidden_states(arguments, keywords), grid)

        def along_columns(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            finish((rows, self._lines(module, _hidden_states(arguments, keywords), (grid[1], grid[0]))))

        hooks = {"row": along_rows, "column": along_columns}
        handles = [
            module.register_forward_pre_hook(hooks.get(name.split(".")[-2], whole), with_kwargs=True)
            for name, module in self.encoder.named_modules()
            if hasattr(module, "q_proj") and hasattr(module, "scaling")
        ]
        try:
            self.encoder(pixel_values, **self.layout.keywords(pixel_values))
        finally:
            for handle in handles:
                handle.remove()

    def _lines(self, module: nn.Module, lines: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Lines folded into the batch [B*h, w, D] -> [B, A, h, w, w]."""
        return self._probabilities(module, lines, grid).unflatten(0, (-1, grid[0])).transpose(1, 2)


def _hidden_states(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    return arguments[0] if arguments else keywords["hidden_states"]


def _our_probabilities(module: Any, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    return module.probabilities(hidden_states, None, grid, None)


def _their_probabilities(module: Any, hidden_states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    query, key = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj)
    )
    return attention_probabilities(query, key, module.scaling)
