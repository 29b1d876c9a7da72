"""Several processes train as one would; streams are divided; unequal data are refused or read, never waited for."""

import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from training.conftest import Images, same_weights, write_numbers, write_parquet
from training.rank_jobs import (
    CONTRASTS,
    FSDP2,
    SETTINGS,
    STATIC_MASKS,
    VARIANTS,
    noisy_student,
    pretraining,
    tiny_config,
    variant,
)
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import UserError
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate_protocol
from hf_vit.results.facts import Facts
from hf_vit.training import finetune
from hf_vit.training.plan import micro_batch_size
from hf_vit.training.processes import REFUSALS, explain_lost_contact, run_main_process_first, wait_for_all
from hf_vit.training.run import is_complete
from hf_vit.training.trainer.distributed import check_sharding

TESTS = Path(__file__).parents[1]
SHARDS = {"even": [12, 12, 12, 12], "uneven": [3, 9, 6, 1], "single": [20]}


def write_images(root, files):
    """Parquet shards of images: one of 30 and one of 12 to train on."""
    root.mkdir()
    files = files[::3] + files[1::3] + files[2::3]
    parts = {"train-0": files[:30], "train-1": files[30:42], "val": files[42:69], "test": files[42:69]}
    for name, chosen in parts.items():
        write_parquet(root / f"{name}.parquet", chosen)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, make_colours, warm):
    """The folder in which two processes trained one model, and a reader of what they report."""
    folder = tmp_path_factory.mktemp("two")
    make_colours(folder / "colours", 24)
    for rank in (0, 1):
        make_colours(folder / f"colours-{rank}", 6 + rank)
    assert warm.together("training.rank_jobs:do_first", folder / "first", place=str(folder)) == ""
    return folder, lambda name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def two(pair, warm):
    """The same after all other jobs of rank_jobs.py."""
    folder, read = pair
    colours = folder / "colours"
    write_images(folder / "shards", sorted(colours.glob("*/*.png")))
    for name, sizes in SHARDS.items():
        write_numbers(folder / name, sizes)
    assert warm.together("training.rank_jobs:do_all", folder / "processes", place=str(folder)) == ""
    return folder, read


def test_two_processes_train_as_one(pair, tmp_path):
    """Micro-batches of 4 in two processes equal batches of 16 in one; 59 images, for two epochs."""
    folder, read = pair
    one = finetune(tiny_config(), str(folder / "colours"), tmp_path / "one", steps=8, **SETTINGS)
    ours, theirs = load_file(tmp_path / "one" / "model.safetensors"), load_file(folder / "ddp" / "model.safetensors")
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-6, rtol=0)
    told = Facts.load(folder / "ddp").records[0].values
    assert told["validation_loss"] == pytest.approx(one.validation["loss"], abs=1e-6), "every image counts once"
    for test_loss, losses in read("ddp"):
        assert test_loss == pytest.approx(one.test.loss, abs=1e-6)
        assert losses == pytest.approx([entry["loss"] for entry in one.history if "loss" in entry], abs=1e-5)


@pytest.mark.slow  # two processes train in twelve ways
def test_a_noisy_student_of_two_processes_is_that_of_one(two, tmp_path):
    folder, _ = two
    noisy_student(folder, tmp_path / "noisy")
    ours, theirs = (load_file(place / "noisy" / "model.safetensors") for place in (tmp_path, folder))
    assert any(weight.any() for weight in ours.values())
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-6, rtol=0)


def test_the_first_process_alone_tells_and_writes(pair):
    folder, read = pair
    assert read("verbosity") == [logging.ERROR] * 2, "transformers warns in no process"
    told, silent = ((folder / f"printed-{rank}.txt").read_text() for rank in (0, 1))
    assert told.count("steps of 16 images") == 1  # not of different data, which are refused before a model is built
    assert silent == ""
    training, evaluation = Facts.load(folder / "ddp").records
    assert training.values["world_size"] == 2
    assert training.values["micro_batch_size"] == 4
    assert (evaluation.data.split, evaluation.data.size) == ("test", 3)


def test_processes_draw_apart_diverge_together_and_judge_what_is_saved(pair):
    folder, read = pair
    assert len(set(read("drawn"))) == 2
    ours, theirs = read("sweep")
    assert ours == theirs
    (diverged, loss), validation_loss = ours
    assert (diverged, loss) == (None, validation_loss)
    for message in read("diverged"):
        assert "infinite at step 1 (noticed at step 2" in message, "the other process diverges one step later"
    data, model = str(folder / "colours"), str(folder / "sweep")
    saved = evaluate_protocol("top1", model, data, split="validation", progress=False, optimize=False).result
    assert validation_loss == pytest.approx(saved.loss, abs=1e-6), "with the running statistics of the first process"
    model = AutoModelForImageClassification.from_pretrained(folder / "predicted")
    with torch.no_grad():
        logits = model(Images(16).pixels).logits
    for predicted in read("predicted"):
        torch.testing.assert_close(torch.tensor(predicted), logits, atol=1e-5, rtol=0)


@pytest.mark.slow  # two processes train in twelve ways
def test_an_interrupted_stream_goes_on_at_its_image_in_every_process(two):
    folder, read = two
    told, silent = ((folder / f"printed-later-{rank}.txt").read_text() for rank in (0, 1))
    assert (told.count("resuming from checkpoint-3"), silent) == (1, "")
    for same, epoch, again in read("resumed"):
        assert same
        assert epoch == again == 1
    last = sorted(path.name for path in (folder / "resumed" / "checkpoints" / "checkpoint-6").iterdir())
    assert {"stream_0.pt", "stream_1.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(last)


@pytest.mark.slow  # two processes train in twelve ways
def test_a_streamed_validation_counts_every_image_once(two):
    """27 images in batches of four, which the first process reads for both."""
    folder, _ = two
    recorded = Facts.load(folder / "stream").records[0].values
    data = load_data(str(folder / "shards"), image_size=(8, 8))
    model = AutoModelForImageClassification.from_pretrained(folder / "stream")
    processor = AutoImageProcessor.from_pretrained(folder / "stream")
    again = evaluate_protocol("top1", (model, processor), data, split="validation", progress=False).result
    assert again.num_images == 27
    assert recorded["validation_accuracy"] == pytest.approx(again.top1, abs=1e-6)  # kept in float32


@pytest.mark.slow  # two processes train in twelve ways
@pytest.mark.parametrize("name", SHARDS)
def test_parts_of_two_processes_of_two_workers_do_not_wait_for_each_other(two, name):
    """Each row is read once an epoch; whoever has read a smaller part begins the next epoch's."""
    _, read = two
    count = sum(SHARDS[name])
    per_rank = [[number for batch in rank for number in batch] for rank in read(f"read-{name}")]
    assert len(per_rank[0]) == len(per_rank[1])
    times = Counter(per_rank[0] + per_rank[1])
    assert set(times.values()) == {1}
    epochs = Counter(number // 1000 for number in times)
    whole = [epoch for epoch, rows in epochs.items() if rows == count]
    assert 0 in whole if name == "uneven" else epochs == {0: count}


def test_different_data_are_refused_in_every_process(pair):
    folder, read = pair
    for kind, message in read("unequal"):
        assert kind == "UserError"
        assert message.startswith("the processes have different training data (")
    (first, message), (other, _) = read("full")
    assert (first, other) == ("UserError", "SystemExit")
    assert "holds a finished model" in message
    assert read("finished") == [Facts.load(folder / "ddp").records[1].values["loss"]] * 2


def test_batches_that_processes_cannot_share(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="the batch size 16 cannot be divided among 3 processes"):
        micro_batch_size(16, None)
    assert micro_batch_size(12, None) == 4
    with pytest.raises(UserError, match="of which each of 3 processes has 4"):
        micro_batch_size(12, 3)


def test_example_configurations_say_what_they_are_called(monkeypatch):
    """accelerate starts several processes; what they ask of FSDP2 is what the sharded training below starts with."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import load_config_from_file

    examples = TESTS.parent / "examples" / "accelerate"
    found = {path.stem: load_config_from_file(str(path)) for path in examples.glob("*.yaml")}
    kinds = {name: config.distributed_type.value for name, config in found.items()}
    assert kinds == {"ddp": "MULTI_GPU", "ddp_cpu": "MULTI_GPU", "fsdp2": "FSDP"}
    started = {}
    monkeypatch.setattr(
        launch, "multi_gpu_launcher", lambda args: started.update({args.config_file: args.num_processes})
    )
    for path in examples.glob("*.yaml"):
        launch.launch_command(launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    assert {Path(path).stem: number for path, number in started.items()} == {"ddp": 8, "ddp_cpu": 2, "fsdp2": 8}
    for name, value in FSDP2.items():
        if name.startswith("FSDP_"):
            key = "fsdp_transformer_layer_cls_to_wrap" if name == "FSDP_TRANSFORMER_CLS_TO_WRAP" else name.lower()
            assert str(found["fsdp2"].fsdp_config[key]).lower() == value.lower()


@pytest.fixture(scope="module")
def one(two, tmp_path_factory):
    """The weights and losses of a variant in this process alone."""
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def train(name):
        if name in CONTRASTS:
            pretraining(two[0], folder / name, CONTRASTS[name])
        else:
            variant(two[0], folder / name, name)
        return load_file(folder / name / "model.safetensors"), json.loads((folder / f"{name}-0.json").read_text())

    return train


def assert_same_training(folder, name, wanted):
    weights, losses = wanted
    found = load_file(folder / name / "model.safetensors")
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(found[key], weight, atol=1e-6, rtol=0, msg=f"{name}: {key}")
    for rank in (0, 1):
        theirs = json.loads((folder / f"{name}-{rank}.json").read_text())
        assert theirs[0] == pytest.approx(losses[0], abs=1e-6)
        assert theirs[1] == pytest.approx(losses[1], abs=1e-6)


def test_a_pre_training_of_two_processes_is_that_of_one(pair, tmp_path):
    """Also its validation loss, for which the last batch of two processes has images twice."""
    pretraining(pair[0], tmp_path / "masked-patch", **STATIC_MASKS)
    losses = json.loads((tmp_path / "masked-patch-0.json").read_text())
    assert_same_training(pair[0], "masked-patch", (load_file(tmp_path / "masked-patch" / "model.safetensors"), losses))


@pytest.mark.slow  # two processes train in twelve ways
@pytest.mark.parametrize("name", [*VARIANTS, *CONTRASTS])
def test_whatever_is_chosen_two_processes_train_as_one(two, one, name):
    """Of contrast every process has half of the batch at once; keys and batch norms of the other half count too."""
    assert_same_training(two[0], name, one(name))


def assert_resumed(folder, name):
    """To the bit, from the middle and when the training itself had ended."""
    for again in ("resumed", "ended"):
        assert same_weights(folder / name, folder / f"{name} {again}"), again


@pytest.mark.slow  # two processes train in twelve ways
def test_a_sharded_average_is_saved_in_parts_and_resumed(two, one, tmp_path):
    folder, _ = two
    name = "SHARDED_STATE_DICT average"
    assert_same_training(folder, name, one("average"))
    assert_resumed(folder, name)
    saved = folder / name / "checkpoints" / "checkpoint-6"
    assert not list(saved.glob("*.safetensors")), "nobody has brought the weights together"
    parts = sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*.distcp"))
    folders = ("optimizer_0", "pytorch_model_fsdp_0", "pytorch_model_fsdp_1")
    assert parts == [f"{each}/__{rank}_0.distcp" for each in folders for rank in (0, 1)]
    work = shutil.copytree(saved.parent, tmp_path / "work")
    assert is_complete(work / "checkpoint-6")
    for each in folders:
        half = shutil.copytree(work / "checkpoint-6", work / f"checkpoint-{7 + folders.index(each)}")
        (half / each / ".metadata").unlink()  # torch writes it last
        assert not is_complete(half)


@pytest.mark.slow  # sharded trainings of two processes take minutes
def test_whatever_is_chosen_sharded_training_is_that_of_one_process(two, one, warm):
    """Saved whole; then in parts, with activations computed again and the model compiled."""
    folder, _ = two
    assert warm.together("training.rank_jobs:all_sharded", folder / "sharded", seconds=560, place=str(folder)) == ""
    for name in ("average", "lora", "sam", "distilled", "contrastive"):
        assert_same_training(folder, f"FULL_STATE_DICT {name}", one(name))
    for name in ("lora", "distilled"):
        assert_same_training(folder, f"SHARDED_STATE_DICT {name}", one(name))
        assert_resumed(folder, f"SHARDED_STATE_DICT {name}")
        assert_resumed(folder, f"FULL_STATE_DICT {name}")
    finished = folder / "FULL_STATE_DICT average"
    assert json.loads((finished / "config.json").read_text())["architectures"] == ["HfViTForImageClassification"]
    assert (finished / "modeling_hf_vit.py").is_file()


@pytest.mark.slow  # torchrun starts two interpreters, twice
def test_by_command(two, tmp_path):
    """torchrun -m hf_vit: one table, one error line, and what is wrong stops everybody."""
    folder, _ = two

    def launch(*arguments):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run([*launcher, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    arguments = ["-m", "hf_vit", "finetune", "--model", "Ti/4", "--data", folder / "colours", "--image-size", "8"]
    arguments += ["--steps", "1", "--evaluations", "1", "--batch-size", "4", "--device", "cpu"]
    done = launch(*arguments, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("saved in") == 1
    again = launch(*arguments, "--output", tmp_path / "out")
    assert again.returncode != 0
    assert again.stderr.count("holds a finished model") == 1


@pytest.mark.slow  # two processes train in twelve ways
def test_sharding_is_refused_before_the_first_step(two):
    assert two[1]("refused") == [[REFUSALS["sam micro-batches"], []]] * 2


@pytest.mark.slow  # two processes train in twelve ways
def test_a_full_disk_of_one_process_ends_all_in_a_line(two):
    first, second = two[1]("full-disk")
    assert first.startswith("process 0 of 2 lost contact with another process, which ended or did not respond for 20")
    assert "cannot be written: " in second
    assert "space" in second
    assert "--resume" in first
    assert "--resume" in second
    assert not {"\n"} & {*first, *second}


def slow_to_join(*arguments, _join=torch.distributed.new_group, **settings):
    """The last that torch asks of its store, which the first process holds, comes late."""
    group = _join(*arguments, **settings)
    time.sleep(2)
    torch.distributed.distributed_c10d._get_default_store().add("asked", 1)
    return group


def wait_for_the_first(seconds, timeout, late):
    """What becomes of two processes of which the first works for so long, or falls silent (None)."""
    first = os.environ["RANK"] == "0"
    if late and not first:
        torch.distributed.new_group = slow_to_join
    try:
        with explain_lost_contact(timeout), run_main_process_first("cpu", timeout):
            if first and seconds is None:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif first:
                time.sleep(seconds)
    except UserError as error:
        return str(error)
    wait_for_all()
    return "went on"


@pytest.mark.slow  # two processes wait for one another for seconds
@pytest.mark.parametrize(
    ("seconds", "late"),
    [(6, False), (None, False), (None, True)],
    ids=["at work", "silent", "silent before the second is there"],
)
def test_who_works_is_waited_for_and_who_is_silent_is_not(tmp_path, warm, seconds, late):
    name = "training.test_processes:wait_for_the_first"
    programs = warm.start_two(name, tmp_path, seconds=seconds, timeout=4, late=late)
    waited = [each.wait(40 if each is programs[1] or seconds else 0) for each in reversed(programs)]
    told = [each.folder / "answer.json" for each in programs]
    if seconds is None:
        programs[0].kill()
        assert waited == [0, None]
        assert json.loads(told[1].read_text()) == (
            "process 1 of 2 lost contact with another process, which ended or did not respond for 4 seconds "
            "(--process-timeout); look up the error of that process, then continue with --resume"
        )
    else:
        assert waited == [0, 0]
        assert [json.loads(file.read_text()) for file in told] == ["went on"] * 2


def plugin(version=2, checkpointing=False):
    return SimpleNamespace(fsdp_version=version, activation_checkpointing=checkpointing)


def test_refusals_stand_in_the_documentation():
    text = (TESTS.parent / "docs" / "combinations.md").read_text()
    rows = [line for line in text.partition("## Several processes")[2].splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [f"| {message}" for message in REFUSALS.values()]


def test_what_sharding_cannot_do_is_refused():
    plain, noisy = tiny_config(), tiny_config(drop_path_rate=0.1)
    for settings, name in (
        ((plugin(version=1), plain, False), "fsdp1"),
        ((plugin(), SimpleNamespace(backbone_config=plain), False), "fsdp dense"),
        ((plugin(), plain, True), "sam micro-batches"),
        ((plugin(checkpointing=True), noisy, False), "checkpointing dropout"),
    ):
        with pytest.raises(UserError) as error:
            check_sharding(*settings)
        assert str(error.value) == REFUSALS[name]
    for settings in ((None, noisy, True), (plugin(), noisy, False), (plugin(checkpointing=True), plain, False)):
        check_sharding(*settings)
