"""Time and memory of every family against batch, hidden size, depth and tokens, with fitted exponents, as one plot.

    python benchmarks/growth.py [--turns 5] [--points 4] [--output benchmarks/results/growth.json]

CPU seconds of one thread, which other processes touch less than the clock, and the most that torch holds beside the
weights, for models as loaded. Freed memory is kept (`hf_vit.keep_freed_memory`), as wherever a model was
optimized or trains: pages that the system hands out again are no part of a model's growth. An exponent is the slope of
the logarithms. Theory is, for time, the slope of the FLOPs on the same points (`hf_vit.cost`); for memory 1 in batch,
hidden size and tokens and 0 in depth, as nothing is kept from layer to layer and no matrix of all pairs of tokens is
made. Two differ: AxialResNet's logits have a row for every token, 1.5 in tokens; BiT standardises a kernel at every
pass, whose size grows as the square of the width: 2.
"worse" are exponents more than a tenth above theory (of 0: above 0.1).
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from script import Script, parser

from hf_vit.cost.flops import forward_flops
from hf_vit.environment import keep_freed_memory
from hf_vit.families import FAMILIES
from hf_vit.speed.measuring import peak_memory

PATCH = 8  # px
AXES: dict[str, tuple[int, ...]] = {
    "batch": (2, 4, 8, 16),
    "hidden size": (64, 128, 256, 512),
    "depth": (2, 4, 8, 16),
    "tokens": (64, 256, 576, 1024),
}
BASE = {"batch": 2, "hidden size": 128, "depth": 4, "tokens": 256}
MEMORY_THEORY = {"batch": 1.0, "hidden size": 1.0, "depth": 0.0, "tokens": 1.0}
OTHER_MEMORY_THEORY = {("axial_resnet", "tokens"): 1.5, ("bit", "hidden size"): 2.0}


def build_config(name: str, width: int, depth: int, tokens: int) -> Any:
    """Return the configuration of a family with this many tokens (for ResNets: positions of the last map)."""
    family, fields = FAMILIES[name], {"image_size": PATCH * round(tokens**0.5), "num_labels": 10}
    if not family.has_tokens:
        return family.config_class(**fields, stage_depths=(depth // 2, depth // 2), stem_width=width // 2)
    fields |= {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 4 * width}
    if family.is_vit:
        fields["num_attention_heads"] = width // 32
    stem = {"stage_depths": (1, 1), "stem_width": 32} if name == "hybrid" else {"patch_size": PATCH}
    mixer = {"token_intermediate_size": 128} if name == "mixer" else {}
    return family.config_class(**fields, **stem, **mixer)


@torch.inference_mode()
def measure(name: str, point: dict[str, int], turns: int) -> dict[str, Any]:
    config = build_config(name, point["hidden size"], point["depth"], point["tokens"])
    model = FAMILIES[name].classes["classification"](config).eval()
    images = torch.randn(point["batch"], 3, *config.nominal_size)
    seconds: list[float] = []
    for turn in range(-1, turns):
        started = time.process_time()
        model(images)
        if turn >= 0:
            seconds.append(time.process_time() - started)
    return {
        "family": name,
        **point,
        "seconds": statistics.median(seconds),
        "bytes": peak_memory(lambda: model(images)),
        "flops": point["batch"] * forward_flops(config),
    }


def fit_slope(rows: list[dict[str, Any]], axis: str, quantity: str) -> float:
    return float(np.polyfit(np.log([row[axis] for row in rows]), np.log([row[quantity] for row in rows]), 1)[0])


def fit_exponents(name: str, axis: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fitted exponent and the theoretical one for a family along an axis."""
    memory = OTHER_MEMORY_THEORY.get((name, axis), MEMORY_THEORY[axis])
    fit: dict[str, Any] = {"family": name, "axis": axis}
    for quantity, theory in (("seconds", fit_slope(rows, axis, "flops")), ("bytes", memory)):
        exponent = fit_slope(rows, axis, quantity)
        allowed = max(1.1 * theory, 0.1)
        fit |= {f"{quantity}_exponent": round(exponent, 3), f"{quantity}_theory": round(theory, 3)}
        fit[f"{quantity}_worse"] = exponent > allowed
    return fit


def main() -> None:
    options = parser(__doc__, turns=5)
    options.add_argument("--points", type=int, default=4, help="values of every axis, the first ones")
    options.set_defaults(threads=1)
    report = Script(options.parse_args())
    keep_freed_memory()
    fits: list[dict[str, Any]] = []
    for name in FAMILIES:
        for axis, values in AXES.items():
            points = [{**BASE, axis: value} for value in values[: report.options.points]]
            rows = [measure(name, point, report.options.turns) for point in points]
            fits.append(fit_exponents(name, axis, rows))
            report.record(**fits[-1], points=rows)
    report.finish(
        worse=[f"{fit['family']}, {fit['axis']}" for fit in fits if fit["seconds_worse"] or fit["bytes_worse"]]
    )


if __name__ == "__main__":
    main()
