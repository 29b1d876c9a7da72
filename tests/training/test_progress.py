"""What a training tells: its log, its learning curve, and how fast its input is."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_vit import UserError
from hf_vit.data.transforms import TrainTransform
from hf_vit.training import FinetuneOptions, finetune, input_speed
from hf_vit.training.input_speed import InputSpeed, measure_input
from hf_vit.training.run import plot_learning_curve
from hf_vit.training.trainer import callbacks as progress

SHORT = dict(epochs=2, batch_size=4, evaluations=3, warmup=0, device="cpu", precision="fp32")
EVALUATED = re.compile(
    r"step (\d+) of (\d+): (?:loss \d+\.\d{4}, learning rate \d\.\d\de-\d\d, )?validation loss \d+\.\d{4}, "
    r"validation accuracy \d+\.\d\d%, [\d,.]+ images/s, \d:\d\d:\d\d left"
)


def test_a_log_has_a_line_for_every_evaluation(colours, tiny_checkpoint, tmp_path, capsys):
    result = finetune(str(tiny_checkpoint), str(colours), tmp_path / "out", **SHORT)
    lines = capsys.readouterr().err.splitlines()
    told = [EVALUATED.fullmatch(line) for line in lines if line.startswith("step ")]
    evaluated = [entry["step"] for entry in result.history if "eval_accuracy" in entry]
    assert [match and [int(match[1]), int(match[2])] for match in told] == [[step, result.steps] for step in evaluated]
    with_loss = [int(match[1]) for match in told if ": loss " in match[0]]
    assert with_loss == [entry["step"] for entry in result.history if "loss" in entry], "what is not logged is not told"


def test_between_evaluations_there_is_a_line_a_minute(monkeypatch, tmp_path):
    """Two steps take 20 s each, of 8 images in two micro-batches; of ten steps the eighth is evaluated."""
    now, lines = [1000.0], []
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    logged = progress.LoggedProgress(lambda: 0.25, lines.append)
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True)
    state, scheduler = TrainerState(max_steps=10, global_step=1), SimpleNamespace(get_last_lr=lambda: [0.5])
    logged.on_train_begin(args, state, TrainerControl())
    for _ in range(8):
        now[0] += 20
        state.global_step += 1
        control = TrainerControl(should_evaluate=state.global_step == 7)
        logged.on_step_end(args, state, control, lr_scheduler=scheduler)
        if control.should_evaluate:
            logged.on_log(args, state, control, {"loss": 0.75, "learning_rate": 0.5})
            logged.on_log(args, state, control, {"eval_loss": 1.0, "eval_accuracy": 0.5})
            logged.on_evaluate(args, state, control)
    pace = "0.4 images/s"
    assert lines == [
        f"step 4 of 10: loss 0.2500, learning rate 5.00e-01, {pace}, 0:02:00 left",
        "step 7 of 10: loss 0.7500, learning rate 5.00e-01, validation loss 1.0000, validation accuracy 50.00%, "
        f"{pace}, 0:01:00 left",
    ]


def test_the_loss_of_a_step_is_that_of_all_its_micro_batches(make_trainer):
    losses = []

    class Watching(progress.LoggedProgress):
        def on_step_end(self, args, state, control, **kwargs):
            losses.append(self._step_loss())

    whole = make_trainer(max_steps=3, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2)
    parts = make_trainer(
        max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, learning_rate=1e-2
    )
    for trainer in (whole, parts):
        trainer.add_callback(Watching(lambda trainer=trainer: float(trainer._step_loss)))
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx(logged, abs=1e-4)
        losses.clear()


def test_whom_to_report_to_is_checked_before_any_work(monkeypatch):
    with pytest.raises(UserError, match="report_to 'paper' is unknown; choose none, tensorboard, wandb, trackio"):
        FinetuneOptions(report_to="paper")
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackio, which is not installed; pip install trackio"):
        FinetuneOptions(report_to="trackio")


def test_tensorboard_gets_the_log_into_a_folder_that_stays(colours, tiny_checkpoint, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = finetune(str(tiny_checkpoint), str(colours), tmp_path / "out", report_to="tensorboard", **SHORT)
    events = accumulator.EventAccumulator(str(tmp_path / "out/runs")).Reload()
    written = [event.value for event in events.Scalars("eval/accuracy")]
    assert written == pytest.approx([entry["eval_accuracy"] for entry in result.history if "eval_accuracy" in entry])
    logged = [entry["step"] for entry in result.history if "loss" in entry]
    assert [event.step for event in events.Scalars("train/loss")] == logged


def test_the_learning_curve_shows_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        {"epoch": 0.5, "loss": 2.0, "learning_rate": 1e-3, "step": 5},
        {"epoch": 1.0, "eval_loss": 1.5, "eval_accuracy": 0.6, "step": 10},
        {"epoch": 1.5, "loss": 1.0, "step": 15},
        {"epoch": 2.0, "eval_loss": 1.2, "eval_accuracy": 0.7, "step": 20},
        {"epoch": 2.0, "train_runtime": 3.0, "train_loss": 1.5, "step": 20},
    ]
    figures: list[Figure] = []
    monkeypatch.setattr("hf_vit.training.run.save_figure", lambda figure, path: figures.append(figure))
    assert plot_learning_curve(history, tmp_path / "c.png")
    loss, accuracy = figures[0].axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in loss.lines}
    assert drawn == {"training": [[0.5, 2.0], [1.5, 1.0]], "validation": [[1.0, 1.5], [2.0, 1.2]]}
    assert np.asarray(accuracy.lines[0].get_xydata()).tolist() == [[1.0, 60.0], [2.0, 70.0]]


def test_no_history_no_curve(tmp_path: Path) -> None:
    assert not any(plot_learning_curve(log, tmp_path / "c.png") for log in ([], [{"epoch": 1.0, "train_runtime": 3.0}]))
    assert plot_learning_curve([{"epoch": 1.0, "loss": 3.0}], tmp_path / "d.png")
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


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
    with pytest.raises(UserError, match="too short to measure"):
        measure_input(str(tiny_checkpoint), str(colours), options=OPTIONS, seconds=0)
    measured = InputSpeed(100.0, 50.0, 40.0, 8, 2, False)
    monkeypatch.setattr("hf_vit.training.input_speed.measure_input", lambda *args, **kwargs: measured)
    code, out, _ = command("bench", "data", "--data", colours, "--model", tiny_checkpoint, "--num-workers", "2")
    assert code == 0
    assert "the model is the bottleneck: data loading could supply 2.0 times as many images" in out
    assert "2 workers" in out
    measured = InputSpeed(10.0, 40.0, 9.0, 8, 0, True)
    assert "the model could train on 4.0 times as many" in command("bench", "data", "--data", "d", "--model", "m")[1]
    assert "bench" in command("--help")[1]
