"""A killed training goes on to the very numbers of an unbroken one; what a kill leaves half-written is found out."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.results.facts import Facts
from hf_vit.subjects.checkpoint_folders import checkpoints_in
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune
from hf_vit.training.run.checkpoints import is_complete, last_complete, read_state

# Everything that draws random numbers is on; 48 images in batches of 8 are 6 steps an epoch, a checkpoint every 4.
SETTINGS = dict(
    steps=32,
    evaluations=8,
    batch_size=8,
    learning_rate=2e-3,
    dropout=0.1,
    drop_path=0.1,
    mixup_alpha=0.2,
    shift_px=1,
    rotation_degrees=10.0,
    random_resized_crop=(0.5, 1.0),
)


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
    """Everything that must be equal: weights, test and validation numbers, and the whole log but for timings."""
    record = Facts.load(result.folder).of_kind("evaluation")[-1]
    values = {key: value for key, value in record.values.items() if key != "images_per_second"}
    log = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
        for entry in result.history
        if "train_runtime" not in entry
    ]
    return load_file(result.folder / "model.safetensors"), values, result.validation, result.best_step, log


def assert_same(one, other):
    weights, *numbers = outcome(one)
    others, *other_numbers = outcome(other)
    assert weights.keys() == others.keys()
    assert all(bool((weights[name] == others[name]).all()) for name in weights)
    assert numbers == other_numbers


def test_killed_training_resumes_to_the_same_numbers(train, unbroken, tiny_config, colours, tmp_path, warm):
    killed = tmp_path / "killed"
    job = {"config": tiny_config().to_diff_dict(), "data": str(colours), "output": str(killed)}
    process = warm.start("training.test_resume:learn", tmp_path / "process", **job)
    checkpoint = killed / "checkpoints" / "checkpoint-8"
    while not checkpoint.exists() or not is_complete(checkpoint):
        assert process.wait(0.002) is None, process.err
    process.kill()
    assert {path.name for path in killed.iterdir()} == {".lock", "checkpoints"}
    left = last_complete(killed / "checkpoints")
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


def test_resume_after_the_training_itself_had_ended(train, unbroken, killed):
    assert_same(train(killed(unbroken, "again", lost=0), resume=True), unbroken)


def test_resume_of_a_run_that_was_stopped_early(train, killed, tmp_path):
    # So slow that the accuracy stands still at once.
    changes = dict(learning_rate=1e-9, patience=2)
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    assert done.steps < SETTINGS["steps"]
    assert_same(train(killed(done, "again", lost=0), resume=True, changes=changes), done)


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
    left = checkpoints_in(tmp_path / "stopped" / "checkpoints")
    assert [path.name for path in left] == ["checkpoint-4", "checkpoint-8"]
    assert_same(train(tmp_path / "stopped", resume=True, changes=changes), done)


def test_resume_with_workers_is_the_same(train, unbroken, killed):
    assert_same(train(killed(unbroken, "again"), resume=True, num_workers=2), unbroken)


def test_resume_with_other_settings_is_refused(train, short, killed):
    with pytest.raises(UserError, match=r"learning_rate was 0.002, now 0.1; seed was 0, now 1"):
        train(killed(short, "again", lost=0), resume=True, changes=SHORT | dict(learning_rate=0.1), seed=1)


def test_unfinished_and_finished_runs_are_not_overwritten(train, short, killed):
    """What --resume makes of a finished one is in test_output.py."""
    with pytest.raises(UserError, match="unfinished run; go on with --resume"):
        train(killed(short, "again", lost=0))
    before = {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")}
    with pytest.raises(UserError, match="holds a finished model; choose"):
        train(short.folder)
    assert {path: path.stat().st_mtime_ns for path in short.folder.rglob("*")} == before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("how", ["missing", "empty", "half"])
def test_half_written_checkpoints_are_recognised(name, how, checkpoint_copy):
    assert is_complete(checkpoint_copy)
    file = checkpoint_copy / name
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if how == "empty" else content[: len(content) // 2])
    assert not is_complete(checkpoint_copy)
    assert last_complete(checkpoint_copy.parent) is None


@pytest.fixture
def checkpoint_copy(short, tmp_path):
    return shutil.copytree(short.folder / "checkpoints" / "checkpoint-4", tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    "changes",
    [
        dict(average_decay=0.8, sam_rho=0.1, layer_decay=0.7, loss="bce", mixup_alpha=0.0),
        dict(average_decay=0.5, sam_rho=0.1, sam_micro_batches=True, optimizer="sgd", learning_rate=0.05),
        dict(tune="lora", lora_rank=2, learning_rate=0.02, layer_decay=0.9),
        dict(
            optimizer="muon",
            schedule="warmup_stable_decay",
            min_learning_rate=1e-5,
            repeated_augmentation=2,
            auto_augment="rand-m9-mstd0.5-inc1",
            color_jitter=0.3,
        ),
    ],
    ids=["average, sam, layer decay, bce", "average, sam a micro-batch, sgd", "lora", "muon, stable, repeated"],
)
def test_resume_with_everything_that_keeps_weights_of_its_own(changes, train, killed, tmp_path):
    """From the last checkpoint but one, as after a kill; then once more when the training itself had ended."""
    changes = dict(steps=8, evaluations=4) | changes
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    for name, lost in (("killed", 1), ("ended", 0)):
        again = killed(done, name, lost)
        assert len(checkpoints_in(again / "checkpoints")) == 2 - lost
        assert_same(train(again, resume=True, changes=changes), done)
    released = load_file(done.folder / "model.safetensors")
    fresh = HfViTForImageClassification(HfViTForImageClassification.from_pretrained(done.folder).config)
    assert released.keys() == fresh.state_dict().keys()


def test_a_checkpoint_without_its_training_weights_is_no_place_to_go_on_from(train, tmp_path):
    changes = dict(steps=8, evaluations=2, average_decay=0.8)
    done = train(tmp_path / "done", changes=changes, keep_checkpoints=True)
    again = tmp_path / "again"
    shutil.copytree(done.folder / "checkpoints", again / "checkpoints")
    first, last = checkpoints_in(again / "checkpoints")
    shutil.rmtree(last)
    (first / "training_weights.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks training_weights\.safetensors"):
        train(again, resume=True, changes=changes)
