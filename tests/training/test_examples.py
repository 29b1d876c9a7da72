import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer
import yaml
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit_cli.main import build_app

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_stock_trainer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stock_trainer.py", "--steps", "120", "--output", str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLES / "stock_trainer.py"), run_name="__main__")
    accuracy = float(re.search(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)[1])
    # Chance is 10%.
    assert accuracy > 50
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.label2id["7"] == 7
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size.height == 8


@pytest.mark.slow
def test_digits_families(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["digits_families.py", str(tmp_path / "digits"), "--epochs", "2"])
    runpy.run_path(str(EXAMPLES / "digits_families.py"), run_name="__main__")
    for name in ("vit-digits", "hybrid-digits", "axial-digits", "local-digits"):
        card = (tmp_path / "digits" / name / "README.md").read_text()
        assert "python digits_families.py digits --epochs 2" in card


def hf_vit_arguments(words: list[str]) -> list[str]:
    """What follows `-m hf_vit` in a command line of torchrun."""
    assert words[0] == "torchrun"
    at = words.index("hf_vit")
    assert words[at - 1] == "-m"
    return words[at + 1 :]


def test_jobs_of_other_clusters_run_a_training_that_goes_on():
    """SkyPilot and Kubernetes: the files are YAML, the command is understood, the output outlives the machine."""
    sky = yaml.safe_load((EXAMPLES / "skypilot/finetune.yaml").read_text())
    job = yaml.safe_load((EXAMPLES / "kubernetes/finetune.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    mounts = {"sky": set(sky["file_mounts"]), "job": {each["mountPath"] for each in container["volumeMounts"]}}
    volumes = {each["name"] for each in job["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    finetune = typer.main.get_command(build_app()).commands["finetune"]
    for name, words in {"sky": shlex.split(sky["run"]), "job": container["args"]}.items():
        command, *rest = hf_vit_arguments(words)
        assert command == "finetune"
        given = finetune.make_context("hf-vit finetune", rest).params
        assert given["resume"]
        assert f"/{given['output'].parts[1]}" in mounts[name]
