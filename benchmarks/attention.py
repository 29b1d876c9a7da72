"""Compare the speed of axial or local attention blocks with full attention blocks, for one image.

A block whose values are passed on in place of the attention ("without attention", "dense layers alone") is what no
attention can be faster than. Memory is what torch allocates at most beyond weights and input for one block.

axial: an axial block holds two attentions and two MLPs, hence two full blocks, ours and transformers' own. The exponent
is that of the block's time against the number of tokens, from the smallest to the largest grid.

local: a class token beside the patches, float32. "attention alone" is what stands between the projections. What a
forward pass makes once for all its blocks (masks, places) is told apart.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from script import Script, parser, vit_sizes
from transformers import ViTConfig, ViTModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit import HfAxialViTConfig, HfLocalViTConfig, HfLocalViTModel, HfViTConfig, HfViTModel
from hf_vit.models.embeddings_hf_vit import Tokens
from hf_vit.models.modeling_hf_axial_vit import HfAxialViTLayer
from hf_vit.models.modeling_hf_vit import HfViTLayer
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio, measure_peak_memory, take_turns

SIZES = vit_sizes(384, 1536, heads=6)
DTYPES, SIDES = ("float32", "bfloat16"), (28, 32, 56, 64, 96)
LOCAL_SIDE, LOCAL_SIDES = 64, (32, 48, 64, 96)
PATTERNS: dict[str, dict[str, Any]] = {
    "local": {}, "criss_cross": {"attention_pattern": "criss_cross"},
    "strided": {"attention_pattern": "strided", "attention_stride": LOCAL_SIDE},
}  # fmt: skip
RATIOS = {
    "times_as_fast_as_full": "two full blocks", "times_as_fast_as_transformers": "two blocks of transformers",
    "share_of_speed_without_attention": "without attention",
}  # fmt: skip


def return_values(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return value.transpose(1, 2), None


def build_axial_blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Return name -> function of (tokens [1, N, D], grid)."""
    config, plain = HfAxialViTConfig(**SIZES), HfViTConfig(**SIZES)
    config._attn_implementation = plain._attn_implementation = "sdpa"
    bare = copy.deepcopy(config)
    bare._attn_implementation = "values_alone"
    axial, bare_axial = HfAxialViTLayer(config, 0.0).to(dtype).eval(), HfAxialViTLayer(bare, 0.0).to(dtype).eval()
    first, second = (HfViTLayer(plain, 0.0).to(dtype).eval() for _ in range(2))
    two_layers = ViTConfig(**SIZES, num_hidden_layers=2)
    transformers_layers = ViTModel._from_config(two_layers, attn_implementation="sdpa").layers.to(dtype).eval()
    return {
        "axial": lambda tokens, grid: axial(tokens, (None, None), grid=grid, image_grids=None),
        "without attention": lambda tokens, grid: bare_axial(tokens, (None, None), grid=grid, image_grids=None),
        "two full blocks": lambda tokens, grid: second(first(tokens, None, grid=grid), None, grid=grid),
        "two blocks of transformers": lambda tokens, grid: transformers_layers[1](transformers_layers[0](tokens)),
    }


def measure_axial(report: Script) -> None:
    exponents: dict[str, float] = {}
    for dtype in DTYPES:
        contestants, medians = build_axial_blocks(getattr(torch, dtype)), dict[int, float]()
        for side in report.options.sides:
            tokens = torch.randn(1, side * side, 384, dtype=getattr(torch, dtype))
            turns = {name: partial(block, tokens, (side, side)) for name, block in contestants.items()}
            seconds = take_turns(turns, report.options.turns)
            medians[side] = compute_quartiles(seconds["axial"]).median
            row: dict[str, Any] = {"dtype": dtype, "side": side, "milliseconds": round(1e3 * medians[side], 2)}
            row |= {name: compute_speed_ratio(seconds, "axial", other) for name, other in RATIOS.items()}
            if side == max(report.options.sides):
                row["peak_memory_MB"] = round(measure_peak_memory(turns["axial"]) / 1e6, 1)
            report.record(**row)
        low, high = min(medians), max(medians)
        if low != high:
            exponents[dtype] = round(math.log(medians[high] / medians[low]) / math.log((high / low) ** 2), 3)
    report.finish(time_exponent=exponents)


def block_functions(model: Any, side: int) -> tuple[Callable[[], Any], ...]:
    """Return a model's block, its attention without the projections, and what it makes once for all blocks."""
    grid, (layer,) = (side, side), model.layers
    tokens = Tokens(torch.randn(1, side * side + 1, 384), grid)
    mask = model._make_attention_mask(tokens)
    attention, projected = copy.deepcopy(layer.attention), layer.attention.project(tokens.hidden_states)
    attention.project = lambda hidden_states: projected
    return (
        lambda: layer(tokens.hidden_states, mask, grid=grid),
        lambda: attention.attend(tokens.hidden_states, mask, grid=grid),
        lambda: model._make_attention_mask(tokens),
    )


def measure_local(report: Script) -> None:
    threads = report.options.threads
    one_layer: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "position_embedding": "none"}
    models: dict[str, Any] = {
        name: HfViTModel._from_config(HfViTConfig(**one_layer), attn_implementation=function)
        for name, function in {"full": "sdpa", "dense layers alone": "values_alone"}.items()
    }
    for name, choice in PATTERNS.items():
        models[name] = HfLocalViTModel._from_config(HfLocalViTConfig(**one_layer, **choice), attn_implementation="sdpa")
    forms = {name: block_functions(model.eval(), LOCAL_SIDE) for name, model in models.items()}
    seconds, attention_seconds, mask_seconds = (
        take_turns({name: form[index] for name, form in forms.items()}, report.options.turns) for index in range(3)
    )
    for name in list(models)[1:]:
        row: dict[str, Any] = {"threads": threads, "side": LOCAL_SIDE, "contestant": name}
        row["block_milliseconds"] = round(1e3 * compute_quartiles(seconds[name]).median, 1)
        row["block_times_as_fast_as_full"] = compute_speed_ratio(seconds, name, "full")
        if name in PATTERNS:
            row["attention_alone_times_as_fast_as_full"] = compute_speed_ratio(attention_seconds, name, "full")
            row["once_milliseconds"] = round(1e3 * compute_quartiles(mask_seconds[name]).median, 1)
        report.record(**row)
    for side in LOCAL_SIDES:
        memory = measure_peak_memory(block_functions(models["local"], side)[0])
        sizes = {"peak_memory_MB": round(memory / 1e6, 1), "bytes_a_token": round(memory / side**2)}
        report.record(threads=threads, side=side, **sizes)
    report.finish()


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__, turns=15)
    options.add_argument("kind", choices=("axial", "local"))
    options.add_argument("--sides", nargs="+", type=int, default=list(SIDES), help="of axial")
    report = Script(options.parse_args())
    torch.manual_seed(0)
    ALL_ATTENTION_FUNCTIONS.register("values_alone", return_values)
    {"axial": measure_axial, "local": measure_local}[report.options.kind](report)


if __name__ == "__main__":
    main()
