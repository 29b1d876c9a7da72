"""`--config out/facts.json`: what was recorded of a run is done again, to the same weights."""

import shutil

import pytest
from safetensors.torch import load_file

from hf_vit.results.facts import Facts

SHORT = ("--steps", "4", "--evaluations", "2", "--batch-size", "12", "--precision", "fp32")


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
    assert command(name, "tiny", "--data", "colours", "--output", "one", *SHORT, *settings)[0] == 0
    assert command(name, "--config", "one/facts.json", "--output", "two")[0] == 0
    assert command(name, "--config", "one/facts.json", "--output", "three", "--seed", "8")[0] == 0
    one, two, three = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two", "three"))
    assert all((two[key] == value).all() for key, value in one.items())
    assert any((three[key] != value).any() for key, value in one.items())
    commands = [Facts.load(tmp_path / name).of_kind("training")[-1].command for name in ("one", "two")]
    assert commands[0] == commands[1].replace("--output two", "--output one"), "its facts can be run again"
