"""Examples and the demonstration."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HfHybridViTForImageClassification, UserError
from hf_vit.data import make_processor
from hf_vit.results.delivery import prepare_output
from hf_vit.results.facts import Facts, append_record, make_record
from hf_vit.training.demonstration import FRESH_PROGRAM, claim_output, compare_fresh, make_digits_config, train_digits
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


def test_jobs_of_other_clusters_run_a_training_that_goes_on():
    """SkyPilot and Kubernetes: the files are YAML, the command is understood, the output outlives the machine."""
    sky = yaml.safe_load((EXAMPLES / "skypilot/finetune.yaml").read_text())
    job = yaml.safe_load((EXAMPLES / "kubernetes/finetune.yaml").read_text())
    assert (sky["workdir"], sky["setup"]) == (".", "pip install '.[train]'"), "the package is on no index"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    mounts = {"sky": set(sky["file_mounts"]), "job": {each["mountPath"] for each in container["volumeMounts"]}}
    volumes = {each["name"] for each in job["spec"]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    finetune = typer.main.get_command(build_app()).commands["finetune"]
    for name, words in {"sky": shlex.split(sky["run"]), "job": container["command"]}.items():
        start = words.index("hf_vit")
        assert (words[0], words[start - 1 : start + 2]) == ("torchrun", ["-m", "hf_vit", "finetune"])
        given = finetune.make_context("hf-vit finetune", words[start + 2 :]).params
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
    runs = [(each["learning_rate"], each["output"].as_posix(), each["resume"]) for each in given]
    assert runs == [(0.001, "out/b16/0.001", True), (0.003, "out/b16/0.003", True)]
    expected = {"folder": "out/b16.jobs", "cluster": "slurm", "nodes": 2, "gpus_per_node": 8, "tasks_per_node": 8}
    assert asked.items() >= (expected | {"timeout_min": 90, "slurm_partition": "gpu"}).items()


@pytest.mark.slow  # 15 s; test_readme.py runs the demo in this process
def test_demo_by_command(command, tmp_path):
    output = tmp_path / "demo"
    code, out, err = command("demo", "--output", output, "--epochs", "1")
    assert code == 0
    assert [line for line in err.splitlines() if not line.startswith("step ")] == []  # a log is told how training goes
    assert "No module named 'hf_vit'" in out
    assert "probabilities differ by at most" in out
    last = out.strip().splitlines()[-1]
    accuracy = re.fullmatch(r"accuracy (\d+\.\d\d)% in \d+ s", last)[1]
    facts = Facts.load(output)
    assert f"{facts.records[-1].values['top1']:.2%}" == f"{accuracy}%"
    assert facts.records[-1].data.split == "test"
    assert facts.records[-1].data.size == 360
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    assert re.search(r"^# demo$", (output / "README.md").read_text(), re.MULTILINE)

    # A second demonstration replaces the first, and nothing else.
    claim_output(output)
    assert prepare_output(output, force=True) == output
    (output / "facts.json").unlink()
    code, _, err = command("demo", "--output", output, "--epochs", "1")
    assert code == 1
    assert "holds files that are not from hf-vit demo" in err


def test_output_of_others_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    for output in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError, match="holds files that are not from hf-vit demo"):
            claim_output(output)
    claim_output(tmp_path / "new")


def test_fresh_program_would_notice_an_importable_package(tmp_path):
    """Without the bar the import succeeds, and the program says so and fails."""
    without = FRESH_PROGRAM.replace("sys.meta_path.insert(0, Bar())", "")
    assert without != FRESH_PROGRAM
    (tmp_path / "hf_vit.py").touch()  # stands for the package, which takes seconds to import
    command = [sys.executable, "-c", without, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "hf_vit could be imported" in done.stderr


@pytest.mark.slow  # trains three models to the end
def test_promised_accuracy(tmp_path):
    settings = dict(command="hf-vit demo", report=print)
    results = [train_digits(tmp_path / f"{seed}", seed=seed, **settings) for seed in range(3)]
    assert sum(result.test.top1 for result in results) / 3 >= 0.99


def test_an_earlier_demonstration_stays_until_the_new_one_takes_its_place(tmp_path, monkeypatch):
    output = tmp_path / "demo"
    output.mkdir()
    append_record(output, make_record("training", values={}, command="hf-vit demo"))
    there = []

    def finished(config, data, folder, **options):
        (folder / "config.json").touch()
        there.append(output.exists())

    def replaced(real):
        def moving(source, target, *args):
            there.append(output.exists() or any(tmp_path.glob(".demo.*.former/facts.json")))
            return real(source, target, *args)

        return moving

    monkeypatch.setattr("hf_vit.training.demonstration.finetune", finished)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, replaced(getattr(os, name)))
    train_digits(output, seed=0, command="hf-vit demo", report=print)
    assert len(there) > 1
    assert all(there)
    assert [path.name for path in tmp_path.rglob("*")] == ["demo", "config.json"]


def test_a_full_disk_of_the_fresh_process_is_told_in_a_line(tmp_path, monkeypatch):
    model = HfHybridViTForImageClassification(make_digits_config())
    result = SimpleNamespace(model=model, processor=make_processor(model.config))
    (tmp_path / "config.json").touch()
    said = "Traceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: failed)
    with pytest.raises(UserError, match="cannot be written: No space left on device; free some space there"):
        compare_fresh(tmp_path, result)
