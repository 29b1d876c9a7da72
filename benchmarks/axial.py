"""A whole axial block beside two blocks of full attention, one image, grids of 28 to 96 tokens a side.

    python benchmarks/axial.py [--turns 15] [--threads N] [--output benchmarks/results/axial.json]

All have D 384, 6 heads and an MLP of 1536; an axial block holds two attentions and two MLPs, hence two full blocks,
ours and transformers' own.
"without attention" is the axial block with its projections, but with the values passed on in place of the attention:
what is left to gain. The exponent is that of the block's time against the number of tokens, from 28x28 to 96x96. Memory
is what torch allocates at most beyond weights and input in one forward pass at 96x96.
"""

import copy
import math
from typing import Any

import torch
from transformers import ViTConfig, ViTModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_vit.models.configuration_hf_axial_vit import HfAxialViTConfig
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_axial_vit import HfAxialViTLayer
from hf_vit.models.modeling_hf_vit import HfViTLayer
from hf_vit.speed.measuring import Script, parser, peak_memory, quartiles, speed_ratio, take_turns

SIZES: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
SIDES = (28, 32, 56, 64, 96)


def values_alone(module: Any, query: Any, key: Any, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return value.transpose(1, 2), None


def blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Name -> function of (tokens [1, N, D], grid)."""
    ALL_ATTENTION_FUNCTIONS.register("values_alone", values_alone)
    config, plain = HfAxialViTConfig(**SIZES), HfViTConfig(**SIZES)
    config._attn_implementation = plain._attn_implementation = "sdpa"
    bare = copy.deepcopy(config)
    bare._attn_implementation = "values_alone"
    axial, without = HfAxialViTLayer(config, 0.0).to(dtype).eval(), HfAxialViTLayer(bare, 0.0).to(dtype).eval()
    first, second = (HfViTLayer(plain, 0.0).to(dtype).eval() for _ in range(2))
    two = ViTConfig(**SIZES, num_hidden_layers=2)
    theirs = ViTModel._from_config(two, attn_implementation="sdpa").layers.to(dtype).eval()
    return {
        "axial": lambda tokens, grid: axial(tokens, (None, None), grid=grid, image_grids=None),
        "without attention": lambda tokens, grid: without(tokens, (None, None), grid=grid, image_grids=None),
        "two full blocks": lambda tokens, grid: second(first(tokens, None, grid=grid), None, grid=grid),
        "two blocks of transformers": lambda tokens, grid: theirs[1](theirs[0](tokens)),
    }


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__, turns=15)
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--sides", nargs="+", type=int, default=list(SIDES))
    report = Script(options.parse_args())
    torch.manual_seed(0)
    exponents: dict[str, float] = {}
    for dtype in report.options.dtypes:
        contestants, medians = blocks(getattr(torch, dtype)), dict[int, float]()
        for side in report.options.sides:
            tokens = torch.randn(1, side * side, 384, dtype=getattr(torch, dtype))
            turns = {name: lambda block=block: block(tokens, (side, side)) for name, block in contestants.items()}  # noqa: B023
            seconds = take_turns(turns, report.options.turns)
            medians[side] = quartiles(seconds["axial"]).median
            row: dict[str, Any] = {"dtype": dtype, "side": side, "milliseconds": round(1e3 * medians[side], 2)}
            row["times_as_fast_as_full"] = speed_ratio(seconds, "axial", "two full blocks")
            row["times_as_fast_as_transformers"] = speed_ratio(seconds, "axial", "two blocks of transformers")
            row["share_of_speed_without_attention"] = speed_ratio(seconds, "axial", "without attention")
            if side == max(report.options.sides):
                row["peak_memory_MB"] = round(peak_memory(turns["axial"]) / 1e6, 1)
            report.record(**row)
        low, high = min(medians), max(medians)
        if low != high:
            exponents[dtype] = round(math.log(medians[high] / medians[low]) / math.log((high / low) ** 2), 3)
            print(f"{dtype}: time grows as N^{exponents[dtype]} from {low}x{low} to {high}x{high}", flush=True)
    report.finish(time_exponent=exponents)


if __name__ == "__main__":
    main()
