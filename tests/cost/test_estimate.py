"""Time, money, and the two published prices, number by number."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_vit.cost import blog_estimate, corrected_estimate, estimate, matmul_flops_per_second
from hf_vit.errors import UserError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"training_flops": 0.0}, "FLOPs of the training"), ({"training_flops": math.inf}, "FLOPs of the training"),
        ({"device_flops": -1.0}, "device FLOP/s"), ({"device_flops": math.nan}, "device FLOP/s"),
        ({"devices": 0}, "devices is 0"), ({"utilisation": 0.0}, "utilization 0"), ({"utilisation": 40.0}, "at most 1"),
        ({"price": -2.0}, "price -2"), ({"price": math.nan}, "price nan"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(wrong: dict[str, float], message: str) -> None:
    given = {"training_flops": 1e18, "device_flops": 1e12, **wrong}
    with pytest.raises(UserError, match=message):
        estimate(given.pop("training_flops"), **given)


def test_corrections_are_said_and_lead_to_the_result() -> None:
    large, huge = corrected_estimate("L/16"), corrected_estimate("H/14")
    # 680 core-days are 85 days of devices with 8 cores, 2,500 are 312.5.
    assert (large.device_days, huge.device_days) == (85, 312.5)
    assert f"{large.tpu_dollars:,.0f}" == "5,090"
    assert huge.tpu_dollars == pytest.approx(312.5 * 24 * 2.495)
    # FLOPs of the paper's table 6 over its table 2's core-days.
    assert large.sustained_flops / 1e12 == pytest.approx(1567e18 / (680 * 86400) / 1e12, rel=0.005)
    assert huge.sustained_flops / 1e12 == pytest.approx(4262e18 / (2500 * 86400) / 1e12, rel=0.005)
    devices, price, twice, core = large.corrections
    blog = blog_estimate("L/16")
    assert [fix.assumption for fix in large.corrections] == list(blog.assumptions[:4])
    assert (devices.before, devices.after) == (blog.tpu_dollars, large.tpu_dollars)
    assert f"{price.after:,.0f}" == "32,855"
    assert price.before == blog.gpu_dollars
    assert (twice.before, twice.after) == (blog.gpu_days, pytest.approx(680 / 3.8))
    assert core.before == twice.after
    assert core.after == large.gpu_days == pytest.approx(680 / (4 * 0.95 * 125 / 61.5))
    assert large.gpu_dollars == pytest.approx(large.gpu_days * 24 * 12.24)
    for fix in large.corrections:
        assert fix.before != fix.after
        assert fix.instead


def test_a_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fastest of its products but the first, within 0.3 s of a clock that products move."""
    now, seconds, sides = 0.0, iter([0.03125, 0.125, 0.0625, 0.125, 0.125]), list[int]()

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal now
        now += next(seconds)
        sides.append(*{*left.shape, *right.shape})

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr("hf_vit.cost.trainings._SECONDS", 0.3)
    monkeypatch.setattr("hf_vit.cost.trainings.time", SimpleNamespace(perf_counter=lambda: now))
    assert matmul_flops_per_second("cpu") == 2 * sides[0] ** 3 / 0.0625


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    assert matmul_flops_per_second("cuda", "bf16") > 3 * matmul_flops_per_second("cuda", "fp32")
