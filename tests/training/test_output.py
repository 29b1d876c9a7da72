"""The output folder: one run at a time, told how to go on whatever stops it, recognised as finished whenever it is."""

import os
import pkgutil
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import get_worker_info
from training.conftest import interrupt, same_weights
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_vit import HfViTConfig, UserError
from hf_vit.results.facts import Facts, append_record, new_record
from hf_vit.results.writing import hidden_sibling
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune, pretrain
from hf_vit.training import run as output_module
from hf_vit.training.run import describe_resume, is_complete
from hf_vit.training.trainer.callbacks import StopOnTermination
from hf_vit.training.trainer.sampling import SeededDataset

SETTINGS = dict(steps=4, evaluations=2, batch_size=8, dropout=0.1, learning_rate=2e-3)


@pytest.fixture(scope="module")
def train(colours, tiny_config):
    def run(output, report=None, changes=None, **options):
        chosen = FinetuneOptions(device="cpu", **options)
        config, settings = tiny_config(num_hidden_layers=1), SETTINGS | (changes or {})
        return finetune(config, str(colours), output, options=chosen, report=report, **settings)

    return run


@pytest.fixture(scope="module")
def done(train, tmp_path_factory):
    """A finished run with its checkpoints."""
    return train(tmp_path_factory.mktemp("done") / "done", keep_checkpoints=True)


def test_checkpoints_are_kept_on_request_and_apart(done):
    assert {"run.json", "checkpoint-4"} <= {path.name for path in (done.folder / "checkpoints").iterdir()}
    assert not list(done.folder.glob("*.pt"))


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


def test_what_was_refused_leaves_nothing(train, tmp_path):
    with pytest.raises(UserError, match="no-such-folder"):
        pretrain(HfViTConfig(image_size=8, patch_size=4), "no-such-folder", tmp_path / "a" / "b" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_a_disk_that_is_read_only(train, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(output_module, "WeakFileLock", refuse)
    with pytest.raises(UserError, match=r"out cannot be written \(Read-only file system\); choose another folder"):
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
    assert told == [f"{output} holds a finished model, so there is nothing to resume"]
    assert {path.name for path in output.iterdir()} == {p.name for p in done.folder.iterdir()} - {"checkpoints"}
    assert (output / "facts.json").read_bytes() == (done.folder / "facts.json").read_bytes()
    assert same_weights(output, done.folder)
    trained = done.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in again.model.state_dict().items())
    for field in ("steps", "best_step", "validation"):
        assert getattr(again, field) == getattr(done, field)
    for field in ("num_images", "num_wrong", "top1", "top5", "loss", "ece", "per_class", "label_names"):
        assert getattr(again.test, field) == getattr(done.test, field), field


def test_a_finished_pre_training_by_command(command, colours, tiny_checkpoint, tmp_path):
    output = tmp_path / "out"
    arguments = ("pretrain", "--model", tiny_checkpoint, "--data", colours, "--output", output)
    steps = ("--steps", "1", "--evaluations", "1", "--batch-size", "8", "--objective", "contrastive")
    first = command(*arguments, *steps, "--keep-checkpoints")
    assert (output / "checkpoints" / "run.json").is_file()
    second = command(*arguments, *steps, "--resume")
    assert (second[0], second[2]) == (0, "")
    assert "holds a finished model, so there is nothing to resume" in second[1]
    code, _, err = command("finetune", *arguments[1:], "--resume")
    assert (code, err.count("\n")) == (1, 1)
    assert "holds a model for another task; choose a new or empty folder" in err
    assert first[1].partition("validation loss")[2] == second[1].partition("validation loss")[2]
    assert not (output / "checkpoints").exists()
    assert len(Facts.load(output).records) == 1


def test_what_others_keep_beside_a_model_is_left_alone(train, tiny_checkpoint, tmp_path):
    """A model with facts of another command, and a folder of its owner's."""
    output = shutil.copytree(tiny_checkpoint, tmp_path / "out")
    append_record(output, new_record("conversion", values={}, command="hf-vit convert"))
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
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            dead.wait()
        name = hidden_sibling(work / "run.json", "tmp").name
        (work / name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")).write_text("{")
    assert train(tmp_path / "out").steps == 4
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_an_interrupt_after_the_model_was_delivered_says_that_it_is_complete(train, done, tmp_path):
    output = shutil.copytree(done.folder, tmp_path / "out")
    assert describe_resume(output) == f"the model in {output} is complete; --resume removes its checkpoints"
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


def test_an_interrupt_before_the_run_is_entered(command, colours, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_vit.training.run.open_start", lambda *args, **options: interrupt())
    code, _, err = command("finetune", "--model", "Ti/4", "--data", colours, "--output", tmp_path / "out")
    assert (code, err) == (130, "hf-vit: stopped; nothing was written yet; run the same command again\n")
    assert not (tmp_path / "out").exists()


def test_sigterm_writes_a_checkpoint_to_go_on_from(train, done, tmp_path, stop_at, monkeypatch):
    """At step 3, where none was due; the handler is given back."""
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context():
        stop_at(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) == before
    assert is_complete(tmp_path / "out" / "checkpoints" / "checkpoint-3")
    told = []
    again = train(tmp_path / "out", told.append, resume=True)
    assert "resuming from checkpoint-3" in told
    assert again.steps == 4
    assert same_weights(again.folder, done.folder)
    assert (again.validation, again.test.loss) == (done.validation, done.test.loss)


def test_sigterm_does_not_break_the_opening_of_a_file(tmp_path):
    """On a disk of a network it may wait: torch's stream does not try again what a signal interrupts."""
    os.mkfifo(file := tmp_path / "scheduler.pt")
    training, state, control, stop = TrainingArguments(tmp_path), TrainerState(), TrainerControl(), StopOnTermination()
    stop.on_train_begin(training, state, control)
    asking = subprocess.Popen(
        ["sh", "-c", f"sleep 0.3; kill -TERM {os.getpid()}; sleep 0.1; exec cat '{file}'"], stdout=subprocess.PIPE
    )
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
        message = r"^a data loading process was killed, probably for lack of memory \(DataLoader worker .*\); "
        with pytest.raises(
            UserError, match=message + r"free some memory or choose a smaller --num-workers, then start again"
        ):
            train(tmp_path / "out", num_workers=1)
    assert train(tmp_path / "out", resume=True).steps == 4
