"""A killed training, recorded run or sweep goes on to the numbers of an unbroken one."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from training.conftest import same_weights, untimed_log

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.evaluation import PROTOCOLS
from hf_vit.loading.folders import list_checkpoints
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune
from hf_vit.training.api import choose_tuning
from hf_vit.training.run import find_last_complete, is_complete, read_state

# Everything that draws random numbers is on; 48 images in batches of 8 are 6 steps an epoch, a checkpoint every 4.
SETTINGS = dict(steps=24, evaluations=6, batch_size=8, learning_rate=2e-3, dropout=0.1, drop_path=0.1, mixup_alpha=0.2)
SETTINGS |= dict(shift_px=1, rotation_degrees=10.0, random_resized_crop=(0.5, 1.0))


def learn(config, data, output):
    """What the process does that is killed."""
    torch.set_num_threads(1)
    finetune(HfViTConfig(**config), data, output, options=FinetuneOptions(micro_batch_size=4), **SETTINGS)


@pytest.fixture(scope="module")
def train(tiny_config, colours):
    """Train with `SETTINGS`, in micro-batches of 4."""

    def run(output, resume=False, changes=None, **options):
        settings = {**SETTINGS, **(changes or {})}
        chosen = FinetuneOptions(**{"micro_batch_size": 4, "resume": resume, **options})
        return finetune(tiny_config(), str(colours), output, options=chosen, **settings)

    return run


@pytest.fixture(scope="module")
def unbroken(train, tmp_path_factory):
    """The run that every interrupted one must equal, with its checkpoints."""
    return train(tmp_path_factory.mktemp("unbroken") / "unbroken", keep_checkpoints=True)


SHORT = dict(steps=4, evaluations=1)


@pytest.fixture(scope="module")
def short(train, tmp_path_factory):
    """A run of a few steps, with its checkpoint."""
    return train(tmp_path_factory.mktemp("short") / "short", changes=SHORT, keep_checkpoints=True)


def outcome(result):
    """Everything that must be equal beside weights: test and validation numbers, and the log but for timings."""
    record = Facts.load(result.folder).filter_kind("evaluation")[-1]
    values = {key: value for key, value in record.values.items() if key != "images_per_second"}
    return values, result.validation, result.best_step, untimed_log(result)


def assert_same(one, other):
    assert same_weights(one.folder, other.folder)
    assert outcome(one) == outcome(other)


def test_killed_training_resumes_to_the_same_numbers(train, unbroken, tiny_config, colours, tmp_path, warm):
    killed = tmp_path / "killed"
    job = {"config": tiny_config().to_diff_dict(), "data": str(colours), "output": str(killed)}
    process = warm.start("training.test_resume:learn", tmp_path / "process", **job)
    checkpoint = killed / "checkpoints" / "checkpoint-8"
    while not checkpoint.exists() or not is_complete(checkpoint):
        assert process.wait(0.002) is None, process.err
    process.kill()
    assert {path.name for path in killed.iterdir()} == {".lock", "checkpoints"}
    left = find_last_complete(killed / "checkpoints")
    assert 8 <= read_state(left)["global_step"] < SETTINGS["steps"]
    # The last complete checkpoint is a model that loads.
    loaded = HfViTForImageClassification.from_pretrained(left)
    assert list(loaded.config.id2label.values()) == ["blue", "green", "red"]
    # As if the kill had come while the next checkpoint was being written.
    half = left.with_name(f"checkpoint-{read_state(left)['global_step'] + 4}")
    if not half.exists():
        shutil.copytree(left, half)
    (half / "trainer_state.json").unlink(missing_ok=True)
    assert_same(train(killed, resume=True), unbroken)
    assert not (killed / "checkpoints").exists()


def test_resume_of_a_run_that_was_stopped_early(train, killed, tmp_path):
    # So slow that the accuracy stands still at once.
    changes = dict(learning_rate=1e-9, patience=2)
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    assert done.steps < SETTINGS["steps"]
    assert_same(train(killed(done, "again", lost=0), resume=True, changes=changes), done)
    left = killed(done, "without the best", lost=0)
    shutil.rmtree(left / "checkpoints" / f"checkpoint-{done.best_step}")
    last = train(left, resume=True, changes=changes)
    assert last.best_step == done.steps > done.best_step, "of whose scores and weights it is the one that is left"


def test_evaluations_without_a_better_one_are_counted_across_a_resume(train, tmp_path, monkeypatch):
    changes = dict(learning_rate=1e-12, patience=3)
    done = train(tmp_path / "done", changes=changes)
    # Of so small steps only the first evaluation is a better one.
    assert (done.best_step, done.steps) == (4, 16)

    evaluate, calls = HfViTTrainer.evaluate, []

    def stop_at_the_third(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(HfViTTrainer, "evaluate", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "stopped", changes=changes)
    left = list_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert [path.name for path in left] == ["checkpoint-4", "checkpoint-8"]
    assert_same(train(tmp_path / "stopped", resume=True, changes=changes), done)


def test_resume_with_workers_is_the_same(train, unbroken, stop_at, tmp_path):
    """In this epoch and in the next ones, in which workers that persist draw no random numbers of their own."""
    stop_at(19)  # of the micro-batches, after the checkpoint of step 8
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "again")
    assert_same(train(tmp_path / "again", resume=True, num_workers=1), unbroken)


def test_resume_with_other_settings_is_refused(train, short, killed):
    with pytest.raises(UserError, match=r"learning_rate was 0.002 and is now 0.1; seed was 0 and is now 1"):
        train(killed(short, "again", lost=0), resume=True, changes=SHORT | dict(learning_rate=0.1), seed=1)


def test_resume_with_another_image_processor_is_refused(tiny_checkpoint, colours, killed, tmp_path):
    """As where it was saved beside the weights after the training began."""
    shutil.copytree(tiny_checkpoint, tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").rename(tmp_path / "later")
    settings = dict(steps=1, evaluations=1, batch_size=8, keep_checkpoints=True)
    done = finetune(tmp_path / "base", colours, tmp_path / "done", **settings)
    (tmp_path / "later").rename(tmp_path / "base" / "preprocessor_config.json")
    with pytest.raises(UserError, match=r"image_mean was \[0.5, 0.5, 0.5\] and is now \[0.4, 0.5, 0.6\]; give the old"):
        finetune(tmp_path / "base", colours, killed(done, "again", lost=0), **settings, resume=True)
    # Nor with the config of another model, whose weights would be those of the checkpoint.
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(UserError, match="with, but hidden_act was gelu_pytorch_tanh and is now relu; give the old"):
        finetune(tmp_path / "base", colours, tmp_path / "again", **settings, resume=True)


def test_a_run_of_a_version_without_an_option_has_its_default(train, short, killed):
    output = killed(short, "again", lost=0)
    run = output / "checkpoints" / "run.json"
    settings = json.loads(run.read_text())
    assert [settings.pop(name) for name in ("momentum", "architecture", "image_mean")] == [0.9, {}, [0.5] * 3]
    run.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"but momentum was 0.9 and is now 0.5; give"):
        train(output, resume=True, changes=SHORT | dict(momentum=0.5))
    assert_same(train(output, resume=True, changes=SHORT), short)


def test_the_space_that_checkpoints_take_already_is_not_needed_again(train, short, killed, monkeypatch):
    output = killed(short, "again", lost=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
    with pytest.raises(UserError, match=r"has 5\.0 MiB free, but the training needs about 1"):
        train(output, resume=True, changes=SHORT)
    with (output / "checkpoints" / "checkpoint-4" / "of a large model").open("wb") as file:
        file.truncate(2**30)
    assert_same(train(output, resume=True, changes=SHORT), short)


def test_a_run_of_a_version_that_decayed_other_weights_is_refused(train, killed, tmp_path, monkeypatch):
    """As 0.2 did of AxialResNet and of Mask2Former."""
    changes, names = dict(steps=2, evaluations=2), HfViTTrainer.get_decay_parameter_names
    with monkeypatch.context() as patched:
        patched.setattr(HfViTTrainer, "get_decay_parameter_names", lambda self, model: names(self, model)[1:])
        done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    with pytest.raises(UserError, match=r"checkpoint-1 in .*again was written by a version that exempts other weights"):
        train(killed(done, "again"), resume=True, changes=changes)


def test_unfinished_and_finished_runs_are_not_overwritten(train, short, killed):
    """What --resume makes of a finished one is in test_output.py."""
    with pytest.raises(UserError, match="unfinished run; add --resume"):
        train(killed(short, "again", lost=0))
    before = {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")}
    with pytest.raises(UserError, match="holds a finished model; choose"):
        train(short.folder)
    assert {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("how", ["missing", "empty", "half"])
def test_half_written_checkpoints_are_recognised(name, how, short, tmp_path):
    checkpoint = shutil.copytree(short.folder / "checkpoints" / "checkpoint-4", tmp_path / "checkpoint-4")
    assert is_complete(checkpoint)
    file = checkpoint / name
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if how == "empty" else content[: len(content) // 2])
    assert not is_complete(checkpoint)
    assert find_last_complete(checkpoint.parent) is None


def test_a_checkpoint_that_cannot_be_read_is_not_deleted(train, short, killed, monkeypatch):
    """As one of another user, which is taken for an incomplete one: here it is."""
    output, read = killed(short, "again", lost=0), Path.open
    weights = output / "checkpoints" / "checkpoint-4" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"")

    def refuse(path, *args, **kwargs):
        if path == weights:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(PermissionError, match="Permission denied"):
            train(output, resume=True, changes=SHORT)
    weights.write_bytes(content)
    assert_same(train(output, resume=True, changes=SHORT), short)


@pytest.mark.parametrize(
    "changes",
    [
        dict(average_decay=0.8, sam_rho=0.1, layer_decay=0.7, loss="bce", mixup_alpha=0.0),
        dict(average_decay=0.5, sam_rho=0.1, sam_micro_batches=True, optimizer="sgd", learning_rate=0.05),
        dict(tune="lora", lora_rank=2, learning_rate=0.02, layer_decay=0.9),
        dict(optimizer="muon", schedule="warmup_stable_decay", min_learning_rate=1e-5)
        | dict(repeated_augmentation=2, auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3),
    ],
    ids=["average, sam, layer decay, bce", "average, sam a micro-batch, sgd", "lora", "muon, stable, repeated"],
)
def test_resume_with_everything_that_keeps_weights_of_its_own(changes, train, killed, tmp_path):
    """From the last checkpoint but one, as after a kill; then once more when the training itself had ended."""
    changes = dict(steps=8, evaluations=4) | changes
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    for name, lost in (("killed", 1), ("ended", 0)):
        again = killed(done, name, lost)
        assert len(list_checkpoints(again / "checkpoints")) == 2 - lost
        assert_same(train(again, resume=True, changes=changes), done)
    released = load_file(done.folder / "model.safetensors")
    fresh = HfViTForImageClassification(HfViTForImageClassification.from_pretrained(done.folder).config)
    assert released.keys() == fresh.state_dict().keys()


def test_a_checkpoint_without_its_training_weights_is_no_place_to_go_on_from(train, killed, tmp_path):
    changes = dict(steps=8, evaluations=2, average_decay=0.8)
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    again = killed(done, "again")
    (list_checkpoints(again / "checkpoints")[0] / "training_weights.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no training_weights\.safetensors"):
        train(again, resume=True, changes=changes)


SHORT_FLAGS = ("--steps", "4", "--evaluations", "2", "--batch-size", "12", "--precision", "fp32")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("finetune", ("--learning-rate", "2e-3", "--randaugment", "2", "5", "--seed", "7", "--drop-path", ".1")),
        ("pretrain", ("--mask-rate", ".6", "--static-masks", "--seed", "7", "--horizontal-flip", ".5")),
    ],
)
def test_a_recorded_run_is_done_again(name, settings, colours, tiny_checkpoint, command, tmp_path, monkeypatch):
    shutil.copytree(colours, tmp_path / "colours")
    shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert command(name, "tiny", "--data", "colours", "--output", "one", *SHORT_FLAGS, *settings)[0] == 0
    assert command(name, "--config", "one/facts.json", "--output", "two")[0] == 0
    assert command(name, "--config", "one/facts.json", "--output", "three", "--seed", "8")[0] == 0
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "three")
    commands = [Facts.load(tmp_path / name).filter_kind("training")[-1].command for name in ("one", "two")]
    assert commands[0] == commands[1].replace("--output two", "--output one"), "its facts can be run again"


RATES = (1e-6, 3e-3)
SWEEP_SETTINGS = dict(steps=12, evaluations=2, batch_size=16, warmup=0.0)


@pytest.fixture(scope="module")
def sweep(tiny_config, colours):
    def run(output, rates=RATES, report=None, **options):
        given = SWEEP_SETTINGS | dict(lr_sweep=rates, report=report)
        return finetune(tiny_config(), str(colours), output, options=FinetuneOptions(**options), **given)

    return run


@pytest.fixture(scope="module")
def swept(sweep, tmp_path_factory):
    """A sweep with its checkpoints, what it told, and how often it looked at the test split."""
    told, looks = [], Mock(wraps=PROTOCOLS["top1"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PROTOCOLS, "top1", looks)
        result = sweep(tmp_path_factory.mktemp("swept") / "swept", report=told.append, keep_checkpoints=True)
    return result, told, looks.call_count


def test_the_best_trial_is_the_run_of_its_own_rate(swept, sweep, tiny_config, colours, tmp_path):
    result, told, looks = swept
    assert looks == 1
    alone = {
        rate: finetune(tiny_config(), str(colours), tmp_path / f"{rate}", learning_rate=rate, **SWEEP_SETTINGS)
        for rate in RATES
    }
    for name in ("accuracy", "loss"):
        assert [trial[name] for trial in result.trials] == [alone[rate].validation[name] for rate in RATES]
    best = max(RATES, key=lambda rate: (alone[rate].validation["accuracy"], -alone[rate].validation["loss"]))
    assert result.recipe.learning_rate == best == 3e-3
    assert same_weights(result.folder, alone[best].folder)
    assert result.test.top1 == alone[best].test.top1
    training = Facts.load(result.folder).filter_kind("training")[-1].values
    assert [trial["learning_rate"] for trial in training["learning_rate_sweep"]] == list(RATES)
    assert training["recipe"]["learning_rate"] == 3e-3
    assert any("learning rate 1e-06: validation accuracy" in line for line in told)
    # The same command once more tells the rate that was kept, not the one that was typed.
    again = sweep(shutil.copytree(swept[0].folder, tmp_path / "again"), resume=True)
    assert again.recipe.learning_rate == swept[0].recipe.learning_rate == 3e-3
    assert [trial["learning_rate"] for trial in again.trials] == list(RATES)


def test_a_killed_sweep_goes_on_to_the_same(swept, sweep, killed):
    done = swept[0]
    again = killed(done, "again", lost=0)
    # The first trial had ended, the second had not got to its end.
    shutil.rmtree(again / "checkpoints" / "rate-0.003" / "checkpoints" / "checkpoint-12")
    with pytest.raises(UserError, match="holds an unfinished run; add --resume"):
        sweep(again)
    for rates in ((0.1, 0.2), False):
        with pytest.raises(UserError, match=r"started with the learning rates 1e-06,0\.003"):
            sweep(again, rates=rates, resume=True)
    result = sweep(again, resume=True)
    assert not (again / "checkpoints").exists()
    without_time = [[{**trial, "seconds": None} for trial in run.trials] for run in (done, result)]
    assert without_time[0] == without_time[1]
    assert same_weights(result.folder, done.folder)


def test_a_rate_that_diverges_is_told_and_passed_over(sweep, tiny_config, colours, tmp_path, monkeypatch):
    learn = HfViTTrainer.compute_loss

    def explode(self, model, inputs, *args, **kwargs):
        loss = learn(self, model, inputs, *args, **kwargs)
        return loss * float("nan") if model.training and self.args.learning_rate == 1e-6 else loss

    monkeypatch.setattr(HfViTTrainer, "compute_loss", explode)
    result = sweep(tmp_path / "one")
    assert [trial["accuracy"] is None for trial in result.trials] == [True, False]
    assert result.recipe.learning_rate == 3e-3
    with pytest.raises(UserError, match="infinite at every learning rate"):
        sweep(tmp_path / "none", rates=(1e-6,))
    # The last step has a finite loss, and makes the weights infinite.
    short = dict(lr_sweep=(1e38, 3e-3), steps=1, evaluations=1, warmup=0.0)
    late = finetune(tiny_config(), str(colours), tmp_path / "late", **short)
    assert [trial["accuracy"] is None for trial in late.trials] == [True, False]


def test_a_sweep_by_command(command, fails, tiny_checkpoint, colours, tmp_path):
    arguments = ("finetune", "--model", tiny_checkpoint, "--data", colours, "--batch-size", "16")
    output = tmp_path / "out"
    quick = ("--sweep-rates", "0.001,0.003", "--steps", "4", "--evaluations", "1")
    code, out, err = command(*arguments, "--output", output, *quick)
    assert code == 0, err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["step 4 of 4"] * 2
    assert "learning rates, validation split" in out
    assert sum(line.endswith("best │") and "0.00" in line for line in out.splitlines()) == 1
    record = json.loads((output / "facts.json").read_text())[0]
    assert "--sweep-rates 0.001,0.003" in record["command"]
    for words, message in (
        (("--sweep-rates", "a,b"), "is not a list of numbers"),
        (("--sweep-rates", "0.1,0.1"), "contain a duplicate"),
        (("--sweep-rates", "-1"), "greater than 0"),
        (("--sweep-rates", "0.1,0.2", "--learning-rate", "0.1"), "leave them or --learning-rate out"),
        (("--recipe", "digits", "--lr-sweep"), "has no learning rates for --lr-sweep"),
    ):
        fails((*arguments, "--output", tmp_path / "no", *words), message)
    assert not (tmp_path / "no").exists()


def test_tune_auto_trains_the_best_of_short_trials_and_goes_on_after_a_kill(tiny_checkpoint, colours, killed, tmp_path):
    """Every trial is the run that its settings make alone, and so is the training of the best one."""
    settings = dict(steps=20, evaluations=2, batch_size=16, warmup=10.0, learning_rate=3e-3)

    def run(name, **changes):
        return finetune(str(tiny_checkpoint), str(colours), tmp_path / name, **settings | changes)

    told = []
    done = run("auto", tune="auto", keep_checkpoints=True, report=told.append)
    short = dict(steps=6, evaluations=1, warmup=3.0)
    alone = {tune: run(tune, tune=tune, **short).validation for tune in ("head", "lora", "all")}
    assert {trial["tune"]: {name: trial[name] for name in ("accuracy", "loss")} for trial in done.trials} == alone
    best = max(alone, key=lambda tune: (alone[tune]["accuracy"], -alone[tune]["loss"]))
    assert done.recipe.tune == best == "all"
    assert same_weights(done.folder, run("best", tune=best).folder)
    (reason,) = [line.partition(": ")[2] for line in told if line.startswith("--tune auto chooses all: ")]
    facts = Facts.load(done.folder).filter_kind("training")[-1].values
    assert (facts["tune_reason"], facts["recipe"]["tune"], facts["tune_trials"]) == (reason, best, done.trials)

    again = killed(done, "again", lost=0)
    shutil.rmtree(again / "checkpoints" / "chosen" / "checkpoints" / "checkpoint-20")
    shutil.rmtree(again / "checkpoints" / "tune-lora")
    with pytest.raises(UserError, match="was started with --tune auto"):
        run("again", resume=True, lr_sweep=RATES, learning_rate=None)
    result = run("again", tune="auto", resume=True)
    assert same_weights(result.folder, done.folder)
    without_time = [[{**trial, "seconds": None} for trial in each.trials] for each in (done, result)]
    assert without_time[0] == without_time[1]
    finished = run("again", tune="auto", resume=True)
    assert (finished.recipe.tune, finished.trials) == (best, result.trials)


def test_tune_auto_tries_each_choice_at_a_rate_of_its_own(tiny_checkpoint, colours, tmp_path):
    done = finetune(str(tiny_checkpoint), str(colours), tmp_path / "own", tune="auto", steps=10, batch_size=16)
    rates = {trial["tune"]: trial["learning_rate"] for trial in done.trials}
    assert rates == pytest.approx({"head": 1e-2, "lora": 1e-3, "all": 1e-4})  # the recipe's grid begins with 1e-4
    assert done.recipe.learning_rate == rates[done.recipe.tune]
    settings = dict(tune="auto", steps=4, batch_size=16)
    least = finetune(str(tiny_checkpoint), str(colours), tmp_path / "least", min_learning_rate=2e-4, **settings)
    assert [trial["learning_rate"] for trial in least.trials] == pytest.approx([1e-2, 1e-3, 2e-4])
    muon = finetune(str(tiny_checkpoint), str(colours), tmp_path / "muon", recipe="small-data", **settings)
    assert {trial["learning_rate"] for trial in muon.trials} == {3e-3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=3), "tries each choice for 30% of the steps, but the training has only 3"),
        (dict(lr_sweep=True), "give only one of them"),
        (dict(cache_features=True), "needs a frozen backbone, which --tune auto trains"),
        (dict(task="segmentation"), r"--tune \(auto\) does not work for segmentation"),
    ],
    ids=str,
)
def test_tune_auto_refuses_what_cannot_work(settings, message, tiny_checkpoint, tiny_config, colours, tmp_path):
    with pytest.raises(UserError, match=message):
        finetune(str(tiny_checkpoint), str(colours), tmp_path / "no", tune="auto", **settings)
    with pytest.raises(UserError, match=r"needs a pretrained model, but all weights of .* are new"):
        finetune(tiny_config(), "no-such-data", tmp_path / "no", tune="auto")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("accuracies", "losses", "images", "best"),
    [
        ((0.50, 0.60, 0.55), (0.1, 0.9, 0.2), 10_000, "lora"),  # no chance: 0.7 points are one standard error
        ((0.50, 0.60, 0.55), (0.9, 0.8, 0.2), 100, "all"),  # a standard error of 7 points, so that head is not close
        ((0.50, 0.60, 0.55), (0.1, 0.8, 0.2), 10, "head"),
        ((None, 0.60, 0.55), (None, 0.8, 0.2), 10, "all"),
        ((0.50, 0.60, 0.55), (0.1, 0.9, 0.2), None, "lora"),  # a stream of unknown length
    ],
)
def test_an_accuracy_counts_beyond_chance(accuracies, losses, images, best):
    rows = zip(("head", "lora", "all"), accuracies, losses, strict=True)
    names = ("tune", "accuracy", "loss", "score", "images")
    trials = [dict(zip(names, (*row, row[1], images), strict=True)) for row in rows]
    assert choose_tuning(trials)[0] == best
