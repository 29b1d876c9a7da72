"""What the package measures by itself: turns, ratios, memory, FLOPs."""

from types import SimpleNamespace

import pytest
import torch

from hf_vit.speed.measuring import (
    compute_quartiles,
    compute_speed_ratio,
    count_flops,
    measure_forwards,
    measure_peak_memory,
    others_load,
    take_turns,
)
from hf_vit.speed.peers import Cell, Shape


def test_turns_change_who_follows_whom():
    """Every turn has each once; in the warm-up and 40 turns everybody begins, and comes right after everybody else."""
    order = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = take_turns(contestants, turns=40, warm_up=1)
    assert {name: len(found) for name, found in seconds.items()} == {"a": 40, "b": 40, "c": 40}
    turns = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert len(turns) == 41
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert {turn[:2] for turn in turns} == {turn[1:] for turn in turns} == {"ab", "ac", "ba", "bc", "ca", "cb"}


def test_ratios_are_paired():
    """A machine that slows down in the middle changes no ratio."""
    seconds = {"fast": [1.0, 10.0, 2.0], "slow": [3.0, 30.0, 6.0]}
    assert str(compute_speed_ratio(seconds, "fast", "slow")) == "3.00 (3.00 to 3.00)"
    found = compute_quartiles([1, 2, 3, 4, 5])
    assert (found.lower, found.median, found.upper) == (2, 3, 4)
    assert compute_quartiles([7]).upper == 7


def test_peak_memory_of_known_tensors():
    def work():
        first = torch.ones(1000, 250)  # 1 MB
        second = first + 1  # 2 MB in all
        del first
        third = second + 1  # still 2 MB
        del second, third

    assert measure_peak_memory(work) == pytest.approx(2_000_000, abs=100)  # scalars are held as well


def test_the_end_of_work_on_any_device_is_waited_for(monkeypatch):
    """As on Apple's GPUs, whose calls return before they are done and whose memory torch does not record."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    model = SimpleNamespace(model=torch.nn.Linear(2, 2, device="meta"), is_graph=False)
    speeds, _ = measure_forwards({"model": model}, {"model": torch.zeros(1, 2, device="meta")}, turns=1)
    assert speeds["model"].peak_memory is None
    Cell("inference", Shape("Ti/16", 32), device="meta").step("hf_vit")()
    assert waited == [torch.device("meta")] * 3 + ["meta"]


def test_flops_of_a_layer_and_of_attention():
    layer = torch.nn.Linear(6, 10)
    assert count_flops(layer, lambda: layer(torch.zeros(4, 6))) == 2 * 4 * 6 * 10
    assert layer.weight.requires_grad, "as it was before"
    tokens, width = 5, 16
    inputs = torch.zeros(1, 2, tokens, width // 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert count_flops(layer, lambda: attend(inputs, inputs, inputs)) == 2 * 2 * tokens**2 * width


def test_own_work_is_not_the_load_of_others(monkeypatch):
    import os
    from types import SimpleNamespace as Times

    import psutil

    clock = iter([3.0, 5.0])
    system = iter([Times(user=10, system=1, iowait=5), Times(user=13, system=2, iowait=50)])
    own = iter([Times(user=1, system=0), Times(user=2, system=0.5)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(system))
    monkeypatch.setattr(os, "times", lambda: next(own))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    # 4 s were busy, 1.5 s of them own, in two.
    assert others_load(2.0) == 1.25
