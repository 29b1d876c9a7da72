"""`hf-vit bench data`: the input's speed beside the model's, told by which of the two is the slower."""

from types import SimpleNamespace

import pytest
import torch

from hf_vit import UserError
from hf_vit.data.transforms import TrainTransform
from hf_vit.training import FinetuneOptions, input_speed
from hf_vit.training.input_speed import InputSpeed, measure_input

OPTIONS = FinetuneOptions(device="cpu", precision="fp32", micro_batch_size=4)


@pytest.mark.parametrize(("a_batch", "a_step", "limit"), [(0.2, 0.05, "data"), (0.1, 0.4, "model")])
def test_images_a_second_by_a_clock_that_input_and_model_move(
    make_colours, tmp_path, tiny_config, monkeypatch, a_batch, a_step, limit
):
    now = 0.0

    def takes(owner, name, seconds):
        work = getattr(owner, name)

        def moved(self, *args, **kwargs):
            nonlocal now
            now += seconds
            return work(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, moved)

    monkeypatch.setattr(input_speed, "time", SimpleNamespace(perf_counter=lambda: now))
    takes(TrainTransform, "finish", a_batch)  # once for every batch of four
    takes(torch.optim.AdamW, "step", a_step)
    found = measure_input(tiny_config(), str(make_colours(tmp_path / "colours", 22)), options=OPTIONS, seconds=9.0)
    assert found.data == pytest.approx(4 / a_batch)
    assert found.model == pytest.approx(4 / a_step)
    assert found.together == pytest.approx(4 / (a_batch + a_step))
    assert found.limit == limit
    assert (found.micro_batch_size, found.num_workers, found.is_cached) == (4, 0, True)


def test_by_command(command, colours, tiny_checkpoint, monkeypatch):
    measured = InputSpeed(100.0, 50.0, 40.0, 8, 2, False)
    monkeypatch.setattr("hf_vit.training.input_speed.measure_input", lambda *args, **kwargs: measured)
    code, out, _ = command("bench", "data", "--data", colours, "--model", tiny_checkpoint, "--num-workers", "2")
    assert code == 0
    assert "the model limits: the input could feed 2.0 times as many images" in out
    assert "2 workers" in out
    measured = InputSpeed(10.0, 40.0, 9.0, 8, 0, True)
    assert "the model could train on 4.0 times as many" in command("bench", "data", "--data", "d", "--model", "m")[1]
    assert "bench" in command("--help")[1]


def test_bad_input(tiny_config, colours):
    with pytest.raises(UserError, match="too few to measure"):
        measure_input(tiny_config(), str(colours), options=OPTIONS, seconds=0)
