import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit_cli.main import build_app

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow  # 120 steps, the fewest that show an accuracy above chance
def test_stock_trainer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stock_trainer.py", "--steps", "120", "--output", str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLES / "stock_trainer.py"), run_name="__main__")
    accuracy = float(re.search(r"validation accuracy ([\d.]+)%", capsys.readouterr().out)[1])
    # Chance is 10%.
    assert accuracy > 50
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.label2id["7"] == 7
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size.height == 8


@pytest.mark.slow  # trains four families
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


def test_slurm_jobs_resume_and_have_folders_of_their_own(monkeypatch):
    asked, trainings = {}, []

    class Executor:
        """In place of submitit's, which would call sbatch."""

        def __init__(self, folder, **settings):
            asked.update(settings, folder=folder)

        def update_parameters(self, **parameters):
            asked.update(parameters)

        def submit_array(self, jobs):
            trainings.extend(jobs)
            return [SimpleNamespace(job_id=number, paths=SimpleNamespace(stdout="log")) for number in range(len(jobs))]

    monkeypatch.setattr("submitit.AutoExecutor", Executor)
    words = "out/b16 --rates 0.001 0.003 --gpus 8 --nodes 2 --hours 1.5 --partition gpu -- B/16 --data digits"
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words.split()])
    runpy.run_path(str(EXAMPLES / "slurm/finetune.py"), run_name="__main__")
    finetune = typer.main.get_command(build_app()).commands["finetune"]
    given = [finetune.make_context("hf-vit finetune", each.arguments[1:]).params for each in trainings]
    assert [(each["learning_rate"], each["output"].as_posix(), each["resume"]) for each in given] == [
        (0.001, "out/b16/0.001", True),
        (0.003, "out/b16/0.003", True),
    ]
    expected = {"folder": "out/b16.jobs", "cluster": "slurm", "nodes": 2, "gpus_per_node": 8, "tasks_per_node": 8}
    assert asked.items() >= (expected | {"timeout_min": 90, "slurm_partition": "gpu"}).items()
