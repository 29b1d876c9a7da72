"""Time, money, and the two published prices, number by number."""

import math
from types import SimpleNamespace

import pytest
import torch

from hf_vit.cost import blog_estimate, corrected_estimate, estimate, matmul_flops_per_second
from hf_vit.errors import UserError


def test_time_and_money_by_hand() -> None:
    """36e18 FLOPs at 4 x 100e12 x 0.25 FLOP/s: 100 h, and 400 device-hours at $2.50."""
    found = estimate(36e18, device_flops=100e12, devices=4, utilisation=0.25, price=2.5)
    assert found.seconds == pytest.approx(360_000)
    assert found.device_hours == pytest.approx(400)
    assert found.dollars == pytest.approx(1000)
    assert estimate(36e18, device_flops=100e12, devices=4, utilisation=0.25).dollars is None
    # More devices are faster and cost the same, as utilisation is told and not guessed.
    assert estimate(36e18, device_flops=100e12, devices=8, utilisation=0.25, price=2.5).dollars == pytest.approx(1000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"training_flops": 0.0}, "FLOPs of the training"),
        ({"training_flops": math.inf}, "FLOPs of the training"),
        ({"device_flops": -1.0}, "device FLOP/s"),
        ({"device_flops": math.nan}, "device FLOP/s"),
        ({"devices": 0}, "0 devices"),
        ({"utilisation": 0.0}, "utilization 0"),
        ({"utilisation": 40.0}, "at most 1"),
        ({"price": -2.0}, "price -2"),
        ({"price": math.nan}, "price nan"),
    ],
)
def test_impossible_numbers_are_refused(wrong: dict[str, float], message: str) -> None:
    given = {"training_flops": 1e18, "device_flops": 1e12, **wrong}
    with pytest.raises(UserError, match=message):
        estimate(given.pop("training_flops"), **given)


def test_the_blog_posts_numbers() -> None:
    large, huge = blog_estimate("L/16"), blog_estimate("H/14")
    assert f"{large.tpu_dollars:,.0f}" == "40,718"
    assert f"{huge.tpu_dollars:,.0f}" == "149,700"
    assert f"{large.speed_up:.2f}" == "6.08"
    assert f"{large.gpu_days:.1f}" == "111.8"
    assert large.gpu_dollars == pytest.approx(8214, abs=1)
    assert len(large.assumptions) == 5


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


@pytest.mark.parametrize("price", [blog_estimate, corrected_estimate])
def test_only_runs_with_published_days_have_a_published_price(price) -> None:
    assert price("ViT-L/16").core_days == 680
    with pytest.raises(UserError, match=r"L/16 and H/14, not 'B/16'.*--mode flops"):
        price("B/16")


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
