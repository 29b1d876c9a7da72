"""--lr-sweep: every rate is a run of its own, the best is kept, the test split is looked at once."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from hf_vit import UserError
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.tasks import classification
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

RATES = (1e-6, 3e-3)
SETTINGS = dict(steps=12, evaluations=2, batch_size=16, warmup=0.0)


@pytest.fixture(scope="module")
def sweep(tiny_config, colours):
    def run(output, rates=RATES, report=None, **options):
        return finetune(
            tiny_config(),
            str(colours),
            output,
            lr_sweep=rates,
            options=FinetuneOptions(**options),
            report=report,
            **SETTINGS,
        )

    return run


@pytest.fixture(scope="module")
def swept(sweep, tmp_path_factory):
    """A sweep with its checkpoints, what it told, and how often it looked at the test split."""
    looks, told, evaluate = [], [], classification.top1

    def watched(*args, **kwargs):
        looks.append(1)
        return evaluate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(classification, "top1", watched)
        return sweep(tmp_path_factory.mktemp("swept") / "swept", report=told.append, keep_checkpoints=True), told, looks


def test_the_best_trial_is_the_run_of_its_own_rate(swept, tiny_config, colours, tmp_path):
    result, told, looks = swept
    assert looks == [1]
    alone = {
        rate: finetune(tiny_config(), str(colours), tmp_path / f"{rate}", learning_rate=rate, **SETTINGS)
        for rate in RATES
    }
    assert [trial["accuracy"] for trial in result.trials] == [alone[rate].validation["accuracy"] for rate in RATES]
    assert [trial["loss"] for trial in result.trials] == [alone[rate].validation["loss"] for rate in RATES]
    best = max(RATES, key=lambda rate: (alone[rate].validation["accuracy"], -alone[rate].validation["loss"]))
    assert result.recipe.learning_rate == best == 3e-3
    found, expected = (load_file(folder / "model.safetensors") for folder in (result.folder, alone[best].folder))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert result.test.top1 == alone[best].test.top1
    training = Facts.load(result.folder).of_kind("training")[-1].values
    assert [trial["learning_rate"] for trial in training["learning_rate_sweep"]] == list(RATES)
    assert training["recipe"]["learning_rate"] == 3e-3
    assert any("learning rate 1e-06: validation accuracy" in line for line in told)


def test_a_finished_sweep_tells_the_rate_that_it_kept(swept, sweep, tmp_path):
    """Not the one that was typed: the same command, once more."""
    again = sweep(shutil.copytree(swept[0].folder, tmp_path / "again"), resume=True)
    assert again.recipe.learning_rate == swept[0].recipe.learning_rate == 3e-3
    assert [trial["learning_rate"] for trial in again.trials] == list(RATES)


def test_a_killed_sweep_goes_on_to_the_same(swept, sweep, tmp_path):
    done = swept[0]
    again = tmp_path / "again"
    shutil.copytree(done.folder / "checkpoints", again / "checkpoints")
    # The first trial had ended, the second had not got to its end.
    shutil.rmtree(again / "checkpoints" / "rate-0.003" / "checkpoints" / "checkpoint-12")
    with pytest.raises(UserError, match="go on with --resume"):
        sweep(again)
    with pytest.raises(UserError, match=r"begun with the learning rates to sweep: 1e-06,0\.003"):
        sweep(again, rates=(0.1, 0.2), resume=True)
    result = sweep(again, resume=True)
    assert not (again / "checkpoints").exists()
    without_time = [[{**trial, "seconds": None} for trial in run.trials] for run in (done, result)]
    assert without_time[0] == without_time[1]
    found, expected = (load_file(folder / "model.safetensors") for folder in (result.folder, done.folder))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_rate_that_diverges_is_told_and_passed_over(sweep, tmp_path, monkeypatch):
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


def test_by_command(command, tiny_checkpoint, colours, tmp_path):
    arguments = ("finetune", "--model", tiny_checkpoint, "--data", colours, "--batch-size", "16")
    output = tmp_path / "out"
    code, out, err = command(
        *arguments, "--output", output, "--sweep-rates", "0.001,0.003", "--steps", "4", "--evaluations", "1"
    )
    assert code == 0, err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["step 4 of 4"] * 2
    assert "learning rates, validation split" in out
    assert out.count("kept") == 1
    record = json.loads((output / "facts.json").read_text())[0]
    assert "--sweep-rates 0.001,0.003" in record["command"]
    for value, message in (("a,b", "not understood"), ("0.1,0.1", "comes twice"), ("-1", "greater than 0")):
        code, _, err = command(*arguments, "--output", tmp_path / "no", "--sweep-rates", value)
        assert code == 1
        assert message in err
    code, _, err = command(*arguments, "--output", tmp_path / "no", "--recipe", "digits", "--lr-sweep")
    assert code == 1
    assert "has no grid" in err
    assert not (tmp_path / "no").exists()
