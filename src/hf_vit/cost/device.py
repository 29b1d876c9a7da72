"""The rate of this machine's matrix products: what an estimate can be made from where no data sheet tells the peak."""

import time
from typing import Literal

_SECONDS = 0.3  # of measuring
_SIDES = {"cpu": 1024, "cuda": 8192}  # large enough for the full rate, small enough for many products in the time


def matmul_flops_per_second(device: str = "cpu", precision: Literal["fp32", "bf16"] = "fp32") -> float:
    """FLOP/s of the fastest of many square matrix products on a torch device; takes about a third of a second."""
    import torch

    place = torch.device(device)
    side = _SIDES.get(place.type, 2048)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left = torch.ones(side, side, device=place, dtype=dtype)
    best, until = float("inf"), time.perf_counter() + _SECONDS
    torch.mm(left, left)
    while best == float("inf") or time.perf_counter() < until:
        _wait(place.type)
        start = time.perf_counter()
        torch.mm(left, left)
        _wait(place.type)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def _wait(kind: str) -> None:
    import torch

    if kind != "cpu":
        torch.accelerator.synchronize()
