"""The memory of a training: beside what torch holds in a real step, and beside torch's tracker of FSDP2."""

from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.initialization import no_init_weights

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.cost import memory_plan
from hf_vit.speed.measuring import measure_peak_memory

SIZES = dict(hidden_size=64, num_hidden_layers=6, num_attention_heads=4, intermediate_size=256, num_labels=10)


def small(folder: Any) -> Any:
    model = HfViTForImageClassification(HfViTConfig(image_size=64, patch_size=8, **SIZES))
    model.save_pretrained(folder)
    return model.train()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_on_this_machine(tmp_path, precision: str, checkpointing: bool):
    """Without gradients, which the plan counts apart, it holds at its peak what was planned."""
    model = small(tmp_path)
    if checkpointing:
        model.activation_checkpointing_enable()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    # So many that what oneDNN takes for its own products, which is not planned, is a small part: with AMX 0.3 MB.
    images = torch.randn(32, 3, 64, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(images).logits
        logits.float().logsumexp(1).sum().backward()

    plan = memory_plan(tmp_path, batch_size=32, precision=precision, devices=1)
    planned = plan.checkpointed if checkpointing else plan.activations
    assert planned == pytest.approx(measure_peak_memory(step), rel=0.05)
    assert plan.states == 16 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow  # 8 s: four processes
def test_fsdp2_on_four_devices():
    """torch's tracker sees no gradients at the peak, of which the plan has every device's share."""
    (plan,) = (row for row in memory_plan("S/16", batch_size=8, devices=4).rows if row.devices == 4)
    assert plan.sharded == pytest.approx(tracked_on(4), rel=0.05)


def tracked_on(devices: int) -> int:
    """Bytes at the peak of a second step of S/16 on 8 images."""
    from hf_vit.variants import variant_config

    distributed.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        mesh = distributed.init_device_mesh("cpu", (devices,))
        with FakeTensorMode():
            with no_init_weights():
                model: Any = HfViTForImageClassification(variant_config("S/16")).train()
            for module in (*model.vit.layers, model):
                fully_shard(module, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            tracker = FSDPMemTracker(model, optimizer)
            images = torch.empty(8, 3, 224, 224)
            with tracker:
                for _ in range(2):
                    model(images).logits.sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
            (peak,) = tracker.get_tracker_snapshot("peak").values()
        return next(held for kind, held in peak.items() if str(kind).endswith("Total"))
    finally:
        distributed.destroy_process_group()


# Axial models take 7 to 12 s to trace.
AXIAL = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("Axial-Ti/16", "AxialResNet-S")]


@pytest.mark.parametrize("variant", ["R+Ti/16", "BiT-R50x1", "Mixer-S/32", *AXIAL])
def test_every_family(variant: str):
    plan = memory_plan(variant)
    assert plan.activations > 0
    assert [row.devices for row in plan.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert [row.sharded for row in plan.rows] == sorted((row.sharded for row in plan.rows), reverse=True)


@pytest.mark.slow  # 48 layers are traced, in 12 s
def test_the_largest_is_planned_without_its_weights():
    """G/14 has 1.84 billion parameters (arXiv 2106.04560, table 2); four numbers each are 29.5 GB."""
    plan = memory_plan("G/14", devices=3)
    assert plan.parameters == pytest.approx(1.843e9, rel=0.001)
    assert [row.devices for row in plan.rows] == [1, 2, 3]
    assert plan.rows[2].sharded < plan.rows[1].sharded < plan.rows[0].sharded
