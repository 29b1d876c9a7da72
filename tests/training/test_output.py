"""The output folder: one run at a time, resumed whatever stops it, finished when it is; its log, curve and speed."""

import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from results.test_writing import left_by
from torch.utils.data import get_worker_info
from training.conftest import interrupt, same_weights
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_vit import HfViTConfig, UserError
from hf_vit.data.transforms import TrainTransform
from hf_vit.evaluation import evaluate
from hf_vit.loading.folders import list_checkpoints
from hf_vit.results.facts import Facts, append_record, make_record
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune, pretrain
from hf_vit.training import run as output_module
from hf_vit.training.input_speed import InputSpeed, measure_input
from hf_vit.training.run import describe_resume, is_complete, plot_learning_curve
from hf_vit.training.trainer import callbacks as progress
from hf_vit.training.trainer.callbacks import StopOnTermination
from hf_vit.training.trainer.sampling import SeededDataset

SETTINGS = dict(steps=4, evaluations=2, batch_size=8, dropout=0.1, learning_rate=2e-3)


@pytest.fixture(scope="module")
def train(colours, tiny_config):
    def run(output, report=None, changes=None, **options):
        config, settings = tiny_config(num_hidden_layers=1), SETTINGS | (changes or {}) | options
        return finetune(config, str(colours), output, report=report, device="cpu", **settings)

    return run


@pytest.fixture(scope="module")
def done(train, tmp_path_factory):
    """A finished run with its checkpoints."""
    return train(tmp_path_factory.mktemp("done") / "done", keep_checkpoints=True)


def test_numbers_of_numpy_are_numbers(train, done, tmp_path, colours):
    """As they come from a table of settings."""
    changes = {"learning_rate": np.float64(SETTINGS["learning_rate"]), "steps": np.int64(SETTINGS["steps"])}
    image_size = np.int64(json.loads((done.folder / "config.json").read_text())["image_size"])
    again = train(tmp_path / "out", None, changes, seed=np.int64(0), image_size=image_size)
    assert same_weights(done.folder, again.folder)
    cropped = train(tmp_path / "cropped", random_resized_crop=(0.5, 1.0))
    changes |= {"random_resized_crop": (np.float32(0.5), np.int64(1)), "image_size": (image_size, image_size)}
    assert same_weights(train(tmp_path / "again", None, changes).folder, cropped.folder)
    measured = evaluate(done.folder, str(colours), batch_size=np.int64(8), device="cpu", progress=False)
    assert measured.result.headline() == done.test.headline()


# ---- one run at a time


@pytest.mark.parametrize("place", ["run.open_start", "trainer.hf_vit_trainer.HfViTTrainer.training_step"])
def test_a_second_run_in_a_live_runs_folder_is_refused(place, train, done, tmp_path, monkeypatch):
    """While the first looks at its data, and while it trains; with and without --resume."""
    output, refused = tmp_path / "out", []
    real = pkgutil.resolve_name(f"hf_vit.training.{place}")

    def meanwhile(*args, **kwargs):
        for resume in (False, True) if not refused else ():
            with pytest.raises(UserError, match=r"another run is using .*out; wait until it ends, or choose"):
                train(output, resume=resume)
            refused.append(resume)
        return real(*args, **kwargs)

    monkeypatch.setattr(f"hf_vit.training.{place}", meanwhile)
    train(output)
    assert refused == [False, True]
    assert same_weights(output, done.folder)
    assert not [path for path in output.iterdir() if path.name.startswith(".") or path.is_dir()]


def test_what_was_refused_leaves_nothing_nor_does_a_folder_on_a_disk_that_is_read_only(train, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no-such-folder"):
        pretrain(HfViTConfig(image_size=8, patch_size=4), "no-such-folder", tmp_path / "a" / "b" / "out")
    assert list(tmp_path.iterdir()) == []
    refuse = Mock(side_effect=OSError(30, "Read-only file system"))
    monkeypatch.setattr(output_module, "WeakFileLock", refuse)
    with pytest.raises(UserError, match=r"out cannot be written: Read-only file system; choose another --output"):
        train(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- finished, whatever a kill left beside the model


def only_run_json(work):
    for path in work.iterdir():
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


LEFT = {
    "everything": lambda work: None,
    "an older checkpoint": lambda work: shutil.rmtree(work / "checkpoint-4"),
    "no run.json": lambda work: (work / "run.json").unlink(),
    "run.json alone": only_run_json,
    "a renamed folder": lambda work: work.rename(work.with_name(".checkpoints-removed")),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("left", LEFT)
def test_a_run_killed_in_its_final_tidying_is_finished(left, train, done, tmp_path, monkeypatch):
    """Nothing is trained, also with other settings; the model stays as it is, and what was left goes."""
    output, told = shutil.copytree(done.folder, tmp_path / "out"), []
    LEFT[left](output / "checkpoints")
    monkeypatch.setattr(HfViTTrainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    again = train(output, told.append, dict(learning_rate=0.1), resume=True)
    (line,) = told
    assert line.startswith(f"{output} already holds a finished model, so there is nothing to resume; to train it ")
    assert {path.name for path in output.iterdir()} == {p.name for p in done.folder.iterdir()} - {"checkpoints"}
    assert (output / "facts.json").read_bytes() == (done.folder / "facts.json").read_bytes()
    assert same_weights(output, done.folder)
    trained = done.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in again.model.state_dict().items())
    for field in ("steps", "best_step", "validation"):
        assert getattr(again, field) == getattr(done, field)
    for field in ("num_images", "num_wrong", "top1", "top5", "loss", "ece", "per_class", "label_names"):
        assert getattr(again.test, field) == getattr(done.test, field), field
    assert again.test.seconds == round(done.test.seconds, 3) > 0


def test_a_finished_pre_training_by_command(command, fails, colours, tiny_checkpoint, tmp_path):
    output = tmp_path / "out"
    arguments = ("pretrain", "--model", tiny_checkpoint, "--data", colours, "--output", output)
    steps = ("--steps", "1", "--evaluations", "1", "--batch-size", "8", "--objective", "contrastive")
    first = command(*arguments, *steps, "--keep-checkpoints")
    assert (output / "checkpoints" / "run.json").is_file()
    second = command(*arguments, *steps, "--resume")
    assert (second[0], second[2]) == (0, "")
    assert "already holds a finished model, so there is nothing to resume" in second[1]
    fails(("finetune", *arguments[1:], "--resume"), "holds a model for another task; choose a new or empty folder")
    assert first[1].partition("validation loss")[2] == second[1].partition("validation loss")[2]
    assert not (output / "checkpoints").exists()
    assert len(Facts.load(output).records) == 1


def test_what_others_keep_beside_a_model_is_left_alone(train, tiny_checkpoint, tmp_path):
    """A model with facts of another command, and a folder of its owner's."""
    output = shutil.copytree(tiny_checkpoint, tmp_path / "out")
    append_record(output, make_record("conversion", values={}, command="hf-vit convert"))
    (output / "checkpoints").mkdir()
    (output / "checkpoints" / "thesis.txt").write_text("the only copy")
    with pytest.raises(UserError, match="holds a model for another task; choose a new or empty folder"):
        train(output, resume=True)
    assert (output / "checkpoints" / "thesis.txt").is_file()


# ---- stopped, and told how it goes on


@pytest.mark.parametrize("left", ["nothing", "half of run.json"])
def test_a_run_killed_before_it_was_entered_is_started_anew(left, train, tmp_path):
    work = tmp_path / "out" / "checkpoints"
    work.mkdir(parents=True)
    (tmp_path / "out" / ".lock").touch()
    if left != "nothing":
        left_by(2**22 + 1, work / "run.json").write_text("{")  # no process has this number
    assert train(tmp_path / "out").steps == 4
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_an_interrupt_after_the_model_was_delivered_says_that_it_is_complete(train, done, tmp_path):
    output = shutil.copytree(done.folder, tmp_path / "out")
    assert describe_resume(output) == f"the model in {output} is complete; --resume removes the checkpoints"
    train(output, resume=True)
    assert describe_resume(output) == f"the model in {output} is complete"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (1, "there is no complete checkpoint yet; --resume starts from step 0"),
        (2, "checkpoint-1 in OUTPUT is complete; continue with --resume"),
    ],
)
def test_an_interrupted_command_tells_what_it_kept(step, message, command, colours, tmp_path, stop_at):
    output = tmp_path / "out"
    stop_at(step, interrupt)
    flags = ("--image-size", "8", "--steps", "2", "--evaluations", "2", "--batch-size", "4")
    code, _, err = command("finetune", "--model", "Ti/4", "--data", colours, "--output", output, *flags)
    *log, last = err.splitlines()
    assert (code, last) == (130, f"hf-vit: stopped; {message.replace('OUTPUT', str(output))}")
    assert [line.partition(":")[0] for line in log] == [f"step {done} of 2" for done in range(1, step)]


def test_the_newest_checkpoints_are_kept_where_the_clock_is_set_back(
    tiny_config, colours, tmp_path, stop_at, monkeypatch
):
    synced = set()
    monkeypatch.setattr("os.path.getmtime", lambda path: -10.0 * int(str(path).rpartition("-")[2]))
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    stop_at(4)
    with pytest.raises(KeyboardInterrupt):
        pretrain(tiny_config(num_hidden_layers=1), colours, tmp_path, steps=4, evaluations=4, batch_size=8)
    kept = list_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in kept] == ["checkpoint-2", "checkpoint-3"]
    files = [file.stat() for folder in kept for file in folder.iterdir()]
    assert {file.st_ino for file in files} <= synced
    assert len({file.st_mode for file in files}) == 1, "safetensors makes files that only their owner can read"


def test_an_interrupt_before_the_run_is_entered(command, colours, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_vit.training.run.open_start", lambda *args, **options: interrupt())
    code, _, err = command("finetune", "--model", "Ti/4", "--data", colours, "--output", tmp_path / "out")
    assert (code, err) == (130, "hf-vit: stopped; nothing was written yet; run the same command again\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_writes_a_checkpoint_to_go_on_from(workers, train, done, tmp_path, stop_at, monkeypatch):
    """At step 3, where none was due; the handler is given back. Schedulers send it to the workers too."""
    before = signal.getsignal(signal.SIGTERM)
    others = {*multiprocessing.active_children()}

    def terminate():
        processes = [*(worker.pid for worker in {*multiprocessing.active_children()} - others), os.getpid()]
        assert len(processes) == 1 + workers
        # Not by a worker's parent. The shell ends later, as the signals' stack of pytest's faulthandler has no room for
        # SIGCHLD beside SIGTERM where the processor has AMX.
        subprocess.run(["sh", "-c", f"kill {' '.join(map(str, processes))}; sleep 0.1"], check=True)
        time.sleep(0.2)  # until a worker is seen to be gone

    with monkeypatch.context():
        stop_at(3, terminate)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "out", num_workers=workers)
    assert signal.getsignal(signal.SIGTERM) == before
    assert is_complete(tmp_path / "out" / "checkpoints" / "checkpoint-3")
    told = []
    again = train(tmp_path / "out", told.append, resume=True, num_workers=workers)
    assert "resuming from checkpoint-3" in told
    assert again.steps == 4
    for worker in {*multiprocessing.active_children()} - others:  # as Python does when it exits
        worker.terminate()
        worker.join(5)
        assert not worker.is_alive()
    assert same_weights(again.folder, done.folder)
    assert (again.validation, again.test.loss) == (done.validation, done.test.loss)


def test_windows_does_not_interrupt_system_calls(tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "siginterrupt")
    before, stop = signal.getsignal(signal.SIGTERM), StopOnTermination()
    stop.on_train_begin(TrainingArguments(tmp_path), TrainerState(), TrainerControl())
    assert signal.getsignal(signal.SIGTERM) != before
    stop.close()


def test_sigterm_does_not_break_the_opening_of_a_file(tmp_path):
    """On a disk of a network it may wait: torch's stream does not try again what a signal interrupts."""
    os.mkfifo(file := tmp_path / "scheduler.pt")
    training, state, control, stop = TrainingArguments(tmp_path), TrainerState(), TrainerControl(), StopOnTermination()
    stop.on_train_begin(training, state, control)
    script = f"sleep 0.3; kill -TERM {os.getpid()}; sleep 0.1; exec cat '{file}'"
    asking = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    try:
        torch.save({"step": 1}, file)  # waits until it is read
        saved = asking.communicate()[0]
    finally:
        asking.kill()
        asking.wait()
        stop.close()
    (tmp_path / "saved.pt").write_bytes(saved)
    assert torch.load(tmp_path / "saved.pt") == {"step": 1}
    stop.on_step_end(training, state, control)
    assert control.should_save


def test_a_data_worker_that_is_killed_is_one_line(train, tmp_path, monkeypatch):
    fetch = SeededDataset.__getitems__

    def killed(self, keys):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch(self, keys)

    with monkeypatch.context() as patched:
        patched.setattr(SeededDataset, "__getitems__", killed)
        message = r"^a data loading process was killed, .* memory ran out .*; free .* --num-workers, then .* --resume"
        with pytest.raises(UserError, match=message):
            train(tmp_path / "out", num_workers=1)
    assert train(tmp_path / "out", resume=True).steps == 4


QUICK = dict(epochs=2, batch_size=4, evaluations=3, warmup=0, device="cpu", precision="fp32")
EVALUATED = re.compile(
    r"step (\d+) of (\d+): (?:loss \d+\.\d{4}, learning rate \d\.\d\de-\d\d, )?validation loss \d+\.\d{4}, "
    r"validation accuracy \d+\.\d\d%, [\d,.]+ images/s, \d:\d\d:\d\d left"
)


def test_a_log_has_a_line_for_every_evaluation_and_tensorboard_gets_it_into_a_folder_that_stays(
    colours, tiny_checkpoint, tmp_path, capsys
):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = finetune(str(tiny_checkpoint), str(colours), tmp_path / "out", report_to="tensorboard", **QUICK)
    lines = capsys.readouterr().err.splitlines()
    told = [EVALUATED.fullmatch(line) for line in lines if line.startswith("step ")]
    evaluated = {entry["step"]: entry["eval_accuracy"] for entry in result.history if "eval_accuracy" in entry}
    assert [match and [int(match[1]), int(match[2])] for match in told] == [[step, result.steps] for step in evaluated]
    with_loss = [int(match[1]) for match in told if ": loss " in match[0]]
    logged = [entry["step"] for entry in result.history if "loss" in entry]
    assert with_loss == logged, "what is not logged is not told"
    events = accumulator.EventAccumulator(str(tmp_path / "out/runs")).Reload()
    assert [event.value for event in events.Scalars("eval/accuracy")] == pytest.approx([*evaluated.values()])
    assert [event.step for event in events.Scalars("train/loss")] == logged


def test_between_evaluations_there_is_a_line_a_minute(monkeypatch, tmp_path):
    """Two steps take 20 s each, of 8 images in two micro-batches; of ten steps the eighth is evaluated."""
    now, lines = [1000.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
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

    settings = dict(max_steps=3, logging_steps=1, learning_rate=1e-2)
    whole = make_trainer(per_device_train_batch_size=4, **settings)
    parts = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=2, **settings)
    for trainer in (whole, parts):
        trainer.add_callback(Watching(lambda trainer=trainer: float(trainer._step_loss)))
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx(logged, abs=1e-4)
        losses.clear()


def test_whom_to_report_to_is_checked_before_any_work(monkeypatch):
    with pytest.raises(UserError, match="report_to = 'paper': Input should be 'none', 'tensorboard', 'wandb'"):
        FinetuneOptions(report_to="paper")
    with pytest.raises(UserError, match="seed = 5000000000: Input should be less than 4294967296"):
        FinetuneOptions(seed=5_000_000_000)
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackio; install it with pip install trackio"):
        FinetuneOptions(report_to="trackio")


def test_the_learning_curve_shows_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = [
        {"epoch": 0.5, "loss": 2.0, "learning_rate": 1e-3, "step": 5},
        {"epoch": 1.0, "eval_loss": 1.5, "eval_accuracy": 0.6, "step": 10},
        {"epoch": 1.5, "loss": 1.0, "step": 15},
        {"epoch": 2.0, "eval_loss": 1.2, "eval_accuracy": 0.7, "step": 20},
        {"epoch": 2.0, "train_runtime": 3.0, "train_loss": 1.5, "step": 20},
    ]
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **options: figures.append(figure))
    assert plot_learning_curve(history, tmp_path / "c.png")
    loss, accuracy = figures[0].axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy (%)"), "a squared error has no nats"
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in loss.lines}
    assert drawn == {"training": [[0.5, 2.0], [1.5, 1.0]], "validation": [[1.0, 1.5], [2.0, 1.2]]}
    assert np.asarray(accuracy.lines[0].get_xydata()).tolist() == [[1.0, 60.0], [2.0, 70.0]]


def test_no_history_no_curve(tmp_path: Path) -> None:
    assert not any(plot_learning_curve(log, tmp_path / "c.png") for log in ([], [{"epoch": 1.0, "train_runtime": 3.0}]))
    assert plot_learning_curve([{"epoch": 1.0, "loss": 3.0}], tmp_path / "d.png")
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


MEASURED = FinetuneOptions(device="cpu", precision="fp32", micro_batch_size=4)


@pytest.mark.parametrize(("a_batch", "a_step", "limit"), [(0.2, 0.05, "data"), (0.1, 0.4, "model")])
def test_images_a_second(make_colours, tmp_path, tiny_config, monkeypatch, a_batch, a_step, limit):
    """By a clock that input and model move."""
    now = 0.0

    def takes(owner, name, seconds):
        work = getattr(owner, name)

        def moved(self, *args, **kwargs):
            nonlocal now
            now += seconds
            return work(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, moved)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    takes(TrainTransform, "finish", a_batch)  # once for every batch of four
    takes(torch.optim.AdamW, "step", a_step)
    found = measure_input(tiny_config(), str(make_colours(tmp_path / "colours", 22)), options=MEASURED, seconds=9.0)
    assert found.data == pytest.approx(4 / a_batch)
    assert found.model == pytest.approx(4 / a_step)
    assert found.together == pytest.approx(4 / (a_batch + a_step))
    assert found.limit == limit
    assert (found.micro_batch_size, found.num_workers, found.is_cached) == (4, 0, True)


def test_bench_data_by_command(succeeds, colours, tiny_checkpoint, monkeypatch):
    with pytest.raises(UserError, match="too short to measure"):
        measure_input(str(tiny_checkpoint), str(colours), options=MEASURED, seconds=0)
    measured = InputSpeed(100.0, 50.0, 40.0, 8, 2, False)
    monkeypatch.setattr("hf_vit.training.input_speed.measure_input", lambda *args, **kwargs: measured)
    out = succeeds("bench", "data", "--data", colours, "--model", tiny_checkpoint, "--num-workers", "2")
    assert "the model is the bottleneck: data loading could supply 2.0 times as many images" in out
    assert "2 workers" in out
    measured = InputSpeed(10.0, 40.0, 9.0, 8, 0, True)
    assert "the model could train on 4.0 times as many" in succeeds("bench", "data", "--data", "d", "--model", "m")
    assert "bench" in succeeds("--help")
