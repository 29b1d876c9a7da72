"""A block of local attention beside a block of full attention, one image of 64x64 tokens; its memory at four sizes.

    python benchmarks/local.py [--turns 11] [--threads N] [--output benchmarks/results/local.json]

All have D 384, 6 heads, an MLP of 1536 and a class token, in float32 under sdpa; the window is of 7 tokens, the stride
of 64. "dense layers alone" is a block whose values are passed on in place of the attention: what no pattern can be
faster than. "attention alone" is what stands between the projections. What a forward pass makes once for all its blocks
(masks, places) is told apart. Memory is what torch allocates at most beyond weights and input for one block.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit.models.configuration_hf_local_vit import HfLocalViTConfig
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.embeddings_hf_vit import Tokens
from hf_vit.models.modeling_hf_local_vit import HfLocalViTModel
from hf_vit.models.modeling_hf_vit import HfViTModel
from hf_vit.speed.measuring import Script, parser, peak_memory, quartiles, speed_ratio, take_turns

SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "position_embedding": "none",
}
SIDE, SIDES = 64, (32, 48, 64, 96)
PATTERNS: dict[str, dict[str, Any]] = {
    "local": {},
    "criss_cross": {"attention_pattern": "criss_cross"},
    "strided": {"attention_pattern": "strided", "attention_stride": SIDE},
}

Turn = Callable[[], Any]


def values_alone(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return value.transpose(1, 2), None


def turns_of(model: Any, side: int) -> tuple[Turn, Turn, Turn]:
    """A model's block, its attention without the projections, and what it makes once for all blocks."""
    grid, (layer,) = (side, side), model.layers
    tokens = Tokens(torch.randn(1, side * side + 1, 384), grid)
    mask = model._attention_mask(tokens)
    attention, projected = copy.deepcopy(layer.attention), layer.attention.project(tokens.hidden_states)
    attention.project = lambda hidden_states: projected
    return (
        lambda: layer(tokens.hidden_states, mask, grid=grid),
        lambda: attention.attend(tokens.hidden_states, mask, grid=grid),
        lambda: model._attention_mask(tokens),
    )


@torch.inference_mode()
def main() -> None:
    report = Script(parser(__doc__, turns=11).parse_args())
    torch.manual_seed(0)
    ALL_ATTENTION_FUNCTIONS.register("values_alone", values_alone)
    full, dense = (
        HfViTModel._from_config(HfViTConfig(**SIZES), attn_implementation=name).eval()
        for name in ("sdpa", "values_alone")
    )
    models = {
        name: HfLocalViTModel._from_config(HfLocalViTConfig(**SIZES, **choice), attn_implementation="sdpa").eval()
        for name, choice in PATTERNS.items()
    }
    block, alone, _ = turns_of(full, SIDE)
    blocks: dict[str, Turn] = {"full": block, "dense layers alone": turns_of(dense, SIDE)[0]}
    attentions, once = {"full": alone}, dict[str, Turn]()
    for name, model in models.items():
        blocks[name], attentions[name], once[name] = turns_of(model, SIDE)
    seconds, of_attention = take_turns(blocks, report.options.turns), take_turns(attentions, report.options.turns)
    of_masks = take_turns(once, report.options.turns)
    for name in ("dense layers alone", *models):
        row: dict[str, Any] = {"side": SIDE, "contestant": name}
        row["block_milliseconds"] = round(1e3 * quartiles(seconds[name]).median, 1)
        row["block_times_as_fast_as_full"] = speed_ratio(seconds, name, "full")
        if name in models:
            row["attention_alone_times_as_fast_as_full"] = speed_ratio(of_attention, name, "full")
            row["once_milliseconds"] = round(1e3 * quartiles(of_masks[name]).median, 1)
        report.record(**row)
    for side in SIDES:
        memory = peak_memory(turns_of(models["local"], side)[0])
        report.record(side=side, peak_memory_MB=round(memory / 1e6, 1), bytes_a_token=round(memory / side**2))
    report.finish()


if __name__ == "__main__":
    main()
