"""Measure how time and memory grow with the number of tokens in every family, and what forms of the tanh GELU cost.

growth: CPU seconds of one thread, and the most memory beside the weights, of small models as loaded, and of AxialResNet
by `optimize_for_inference`, too, which computes few lines at a time. An exponent is the slope of the logarithms against
the number of tokens. Theory is, for time, the slope of the FLOPs on the same points (without softmax and sums); for
memory 1, as no matrix of all pairs of tokens is made, but 1.5 for AxialResNet as loaded, whose logits have a row for
every token. "worse" are exponents more than a tenth above theory.

gelu: milliseconds of one thread, forward without gradients and backward, and the mean error of values and gradients
against float64, as a multiple of that of torch's kernel. u is sqrt(2 / pi) (x + 0.044715 x^3).
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from script import Script, alternate, parser, vit_sizes
from torch.nn import functional as F

from hf_vit import optimize_for_inference
from hf_vit.cost.flops import forward_flops
from hf_vit.environment import keep_freed_memory
from hf_vit.families import FAMILIES
from hf_vit.speed.measuring import measure_peak_memory

SIDES, PATCH = (16, 24, 32, 48), 8  # patches, px; in smaller grids a local window holds nearly all tokens
OPTIMIZED = "axial_resnet, optimized"
MEMORY_THEORY = {"axial_resnet": 1.5}  # of the others: 1
ROTARY = {"rotary_embedding": "axial", "position_embedding": "none"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in FAMILIES}
CASES |= {f"{name}, rotary": (name, ROTARY) for name, family in FAMILIES.items() if family.is_vit}
CASES[OPTIMIZED] = ("axial_resnet", {})

FACTOR = 2 * math.sqrt(2 / math.pi)  # of x in 2 u
CUBIC = FACTOR * 0.044715


def over_x(x: torch.Tensor) -> torch.Tensor:
    """Return 2 u / x."""
    return torch.addcmul(torch.tensor(FACTOR, dtype=x.dtype), x, x, value=CUBIC)


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x * over_x(x))


def by_parts(x: torch.Tensor, length: int = 2**15) -> torch.Tensor:
    outputs = torch.empty_like(x)
    for part, output in zip(x.view(-1).split(length), outputs.view(-1).split(length), strict=True):
        wide = part.float()
        output.copy_(over_x(wide).mul_(wide).sigmoid_().mul_(wide))
    return outputs


KERNEL, BY_PARTS = "torch's kernel", "x sigmoid(2u), in float32, in place by parts"
GELUS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    KERNEL: lambda x: F.gelu(x, approximate="tanh"),
    "x sigmoid(2u), as written": lambda x: x * torch.sigmoid(FACTOR * (x + 0.044715 * x**3)),
    "x sigmoid(2u)": by_sigmoid,
    "x sigmoid(2u), in float32": lambda x: by_sigmoid(x.float()).to(x.dtype),
    BY_PARTS: by_parts,  # without gradients
    "x / 2u silu(2u)": lambda x: F.silu(x * over_x(x)) / over_x(x),
    "x / (1 + exp2(-2u / log 2))": lambda x: x / (1 + torch.exp2(x * over_x(x) * -math.log2(math.e))),
    "x / 2 (1 + tanh(u))": lambda x: 0.5 * x * (1 + torch.tanh(x * over_x(x) / 2)),
    "the exact GELU": F.gelu,
}


def build_model(name: str, fields: dict[str, Any], side: int) -> Any:
    """Return a model with side x side tokens (a ResNet's last map has as many positions)."""
    family, fields = FAMILIES[name], fields | {"image_size": PATCH * side, "num_labels": 10}
    if family.has_tokens:
        sizes = vit_sizes(128, 512) if family.is_vit else {"hidden_size": 128, "intermediate_size": 512}
        stem = {"stage_depths": (1, 1), "stem_width": 32} if name == "hybrid" else {"patch_size": PATCH}
        fields |= {**sizes, **stem, "num_hidden_layers": 4}
    else:
        fields |= {"stage_depths": (2, 2), "stem_width": 64}
    return family.classes["classification"](family.config_class(**fields)).eval()


def cpu_seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure_growth(report: Script) -> None:
    for name, (family, fields) in CASES.items():
        points: list[tuple[float, ...]] = []
        for side in SIDES:
            model = build_model(family, fields, side)
            if name == OPTIMIZED:
                optimize_for_inference(model)
            images = torch.randn(2, 3, *model.config.nominal_size)
            model(images)
            seconds = min(cpu_seconds(lambda: model(images)) for _ in range(report.options.turns))  # noqa: B023
            points.append((side**2, seconds, forward_flops(model.config), measure_peak_memory(lambda: model(images))))  # noqa: B023
        tokens, *quantities = np.log(np.array(points)).T
        slopes = [round(float(np.polyfit(tokens, values, 1)[0]), 3) for values in quantities]
        row = dict(zip(("time", "time_theory", "memory"), slopes, strict=True))
        row["memory_theory"] = MEMORY_THEORY.get(name, 1.0)
        is_worse = any(row[value] > 1.1 * row[f"{value}_theory"] for value in ("time", "memory"))
        report.record(part="growth", family=name, **row, worse=is_worse, points=points)


def measure_gelus(report: Script) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values, gradients = (torch.randn(8, 197, 1536).to(dtype) for _ in range(2))
        turns = {name: lambda name=name: time_both(name, values, gradients) for name in GELUS}  # noqa: B023
        seconds = alternate(turns, report.options.turns, warm_up=1)
        exact = run_both(KERNEL, values.double(), gradients.double())
        errors = {name: mean_errors(run_both(name, values, gradients), exact) for name in GELUS}
        for name in GELUS:
            times = [1e3 * min(turns) for turns in zip(*seconds[name], strict=True)]
            shares = [error / kernels for error, kernels in zip(errors[name], errors[KERNEL], strict=False)]
            row = dict(zip(("forward_ms", "backward_ms"), times, strict=False))
            row |= dict(zip(("forward_error", "backward_error"), shares, strict=False))
            rounded = {key: round(value, 3) for key, value in row.items()}
            report.record(part="gelu", gelu=name, dtype=str(dtype).removeprefix("torch."), **rounded)


def mean_errors(tensors: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((tensor - wanted).abs().mean()) for tensor, wanted in zip(tensors, exact, strict=False)]


def run_both(name: str, values: torch.Tensor, gradients: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of a GELU and, if it has gradients, these, in float64."""
    inputs = values.detach().requires_grad_(name != BY_PARTS)
    outputs = GELUS[name](inputs)
    if name != BY_PARTS:
        outputs.backward(gradients)
    return [tensor.detach().double() for tensor in (outputs, inputs.grad) if tensor is not None]


def time_both(name: str, values: torch.Tensor, gradients: torch.Tensor) -> list[float]:
    """Return the seconds of a GELU forward without gradients and, if it has gradients, backward."""
    with torch.no_grad():
        forward = cpu_seconds(lambda: GELUS[name](values))
    if name == BY_PARTS:
        return [forward]
    outputs = GELUS[name](values.detach().requires_grad_())
    return [forward, cpu_seconds(lambda: outputs.backward(gradients))]


def main() -> None:
    options = parser(__doc__, turns=15)
    options.set_defaults(threads=1)
    report = Script(options.parse_args())
    keep_freed_memory()
    torch.manual_seed(0)
    measure_gelus(report)
    with torch.inference_mode():
        measure_growth(report)
    report.finish()


if __name__ == "__main__":
    main()
