"""What a training tells where there is no terminal, and whom else it tells."""

import re
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_vit.errors import UserError
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.trainer.callbacks import progress

SHORT = dict(epochs=2, batch_size=4, evaluations=3, warmup=0)
EVALUATED = re.compile(
    r"step (\d+) of (\d+): (?:loss \d+\.\d{4}, learning rate \d\.\d\de-\d\d, )?validation loss \d+\.\d{4}, "
    r"validation accuracy \d+\.\d\d%, [\d,.]+ images/s, \d:\d\d:\d\d left"
)


def test_a_log_has_a_line_for_every_evaluation(colours, tiny_checkpoint, tmp_path, capsys):
    options = FinetuneOptions(device="cpu", precision="fp32")
    result = finetune(str(tiny_checkpoint), str(colours), tmp_path / "out", options=options, **SHORT)
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
    options = FinetuneOptions(device="cpu", precision="fp32", report_to="tensorboard")
    result = finetune(str(tiny_checkpoint), str(colours), tmp_path / "out", options=options, **SHORT)
    events = accumulator.EventAccumulator(str(tmp_path / "out/runs")).Reload()
    written = [event.value for event in events.Scalars("eval/accuracy")]
    assert written == pytest.approx([entry["eval_accuracy"] for entry in result.history if "eval_accuracy" in entry])
    logged = [entry["step"] for entry in result.history if "loss" in entry]
    assert [event.step for event in events.Scalars("train/loss")] == logged
