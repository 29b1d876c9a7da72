"""Trainings as jobs: what Slurm is given, how they stand, and that a job which is preempted goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import slurm
import submitit  # noqa: F401  # sets logging up and closes the streams of handlers: not while one is captured
import torch
from transformers import AutoModelForImageClassification

from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

TRAIN = ("finetune", "model", "--data", "colours", "--device", "cpu", "--batch-size", "8")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def cluster(place, monkeypatch):
    folder = slurm.install(place / "slurm")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def told(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def options(script: Path) -> dict[str, str]:
    """What a script asks sbatch for."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), flags=re.MULTILINE)
    return dict(lines)


def test_what_sbatch_is_given(cluster, place, told):
    sweep = ("--sweep", "learning-rate=0.001,0.01", "--sweep", "seed=0,1")
    asked = ("--partition", "gpu", "--gpus", "4", "--nodes", "2", "--cpus", "8", "--memory", "64", "--hours", "1.5")
    code, out, err = told("submit", *sweep, *asked, "--sbatch", "account=vision", "--", *TRAIN, "--output", "out/a b")
    assert (code, err) == (0, "")
    assert "queued 4 jobs (4242_0, 4242_1, 4242_2, 4242_3)" in out
    assert "hf-vit submit --status 'out/a b.jobs'" in out
    given = options(cluster / "script.sh")
    expected = {"array": "0-3%4", "partition": "gpu", "gpus-per-node": "4", "ntasks-per-node": "4", "nodes": "2"}
    expected |= {"cpus-per-task": "8", "mem": "64GB", "time": "90", "account": "vision", "open-mode": "append"}
    assert given.items() >= expected.items()
    assert given["requeue"] == "", "a switch: Slurm itself queues a preempted job again"
    assert given["signal"] == "USR2@120"
    assert " --kill-on-bad-exit=1 " in (cluster / "script.sh").read_text()
    jobs = json.loads((place / "out/a b.jobs/jobs.json").read_text())
    assert [Path(job["output"]).name for job in jobs["jobs"]] == [
        f"learning-rate={rate}_seed={seed}" for rate in ("0.001", "0.01") for seed in (0, 1)
    ]


def test_how_jobs_stand(cluster, place, told):
    told("submit", "--sweep", "seed=0,1,2,3", "--jobs", "jobs", "--", *TRAIN, "--output", "out")
    rows = ("4242_0|COMPLETED|n1", "4242_0.batch|COMPLETED|n1", "4242_1|RUNNING|n2", "4242_[2-3]|PENDING|None assigned")
    (cluster / "states.txt").write_text("\n".join(("JobID|State|NodeList", *rows)))
    for name in ("config.json", "facts.json"):
        (place / "out/seed=0").mkdir(parents=True, exist_ok=True)
        (place / "out/seed=0" / name).write_text("{}")
    lines = (
        "submitit INFO (x) - Starting",
        "step 3 of 9: loss \x1b[31m2.1",
        "submitit INFO (x) - Bypassing signal SIGTERM",
    )
    (place / "jobs/4242_1_0_log.out").write_text("\n".join(lines))
    code, out, err = told("submit", "--status", "jobs")
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "4242_" in line]
    assert [cell[:3] for cell in cells] == [
        ["4242_0", "seed=0", "finished"],
        ["4242_1", "seed=1", "running"],
        ["4242_2", "seed=2", "pending"],
        ["4242_3", "seed=3", "pending"],
    ]
    assert cells[1][3].startswith("step 3 of 9")
    assert "\x1b" not in out
    assert (cluster / "sacct.txt").read_text() == "-o JobID,State,NodeList --parsable2 -j 4242\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to submit; give a command: hf-vit submit -- finetune ..."),
        ("-- finetun m", "'finetun' is no command that can go on with --resume; give one of finetune, pretrain"),
        ("-- evaluate m --data d", "'evaluate' is no command that can go on with --resume; give one of "),
        ("-- submit -- finetune", "'submit' is no command that can go on with --resume; give one of "),
        ("-- finetune m", "--data, --output must be given; hf-vit finetune --help tells what it takes"),
        ("-- finetune m --data d --output out --epochs x", "--epochs 'x': "),
        ("-- finetune m --data d --output taken", "the output folder taken is not empty; choose a new or empty one"),
        ("--jobs taken -- finetune m --data d --output out", "the folder for jobs taken is not empty; choose "),
        ("--jobs out/jobs -- finetune m --data d --output out", "out/jobs lies in the output folder out; choose one "),
        ("--sweep seed=0,1 -- finetune m --data d --output out --push a/b", "every job of the sweep would push to a/b"),
        ("--jobs a%j -- finetune m --data d --output out", "a%j has a name that Slurm would read; choose one "),
        ("--sweep seed=0,x -- finetune m --data d --output out", "--seed 'x': "),
        ("--sweep sede=0 -- finetune m --data d --output out", "no such option: --sede"),
        ("--sweep seed -- finetune m --data d --output out", "--sweep 'seed' is not understood; give OPTION=VALUE"),
        ("--sweep seed=1,1 -- finetune m --data d --output out", "--sweep 'seed=1,1' gives a job twice; give "),
        ("--sweep output=a,b -- finetune m --data d --output out", "choose another option"),
        ("--sweep data=a/b,a-b -- finetune m --data d --output out", "two jobs of the sweep would write out/data=a-b"),
        ("--sbatch array=0-9 -- finetune m --data d --output out", "--sbatch 'array=0-9' is decided by hf-vit submit"),
        ("--sbatch account -- finetune m --data d --output out", "--sbatch 'account' is not understood; give NAME="),
        ("--local --nodes 2 -- finetune m --data d --output out", "--nodes 2 would change nothing with --local; "),
        ("--status taken", "taken holds no jobs.json of hf-vit submit; give the folder that it named"),
        ("-- finetune m --data d --output out", "there is no sbatch on this machine; submit from one of a Slurm cl"),
    ],
)
def test_what_cannot_be_submitted_is_told_in_one_line(words, message, place, told, monkeypatch):
    (place / "taken").mkdir()
    (place / "taken/mine.txt").touch()
    code, out, err = told("submit", *words.split())
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert message in err
    assert sorted(os.listdir(place)) == ["taken"]


def test_what_sbatch_refuses_leaves_nothing(cluster, place, told):
    (cluster / "refusal").write_text("sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch failed\n")
    for existed in (False, True):
        if existed:
            (place / "jobs").mkdir()
        code, out, err = told("submit", "--partition", "gpu", "--jobs", "jobs", "--", *TRAIN, "--output", "out")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "sbatch refuses (sbatch: error: invalid partition specified: gpu" in err
        assert (place / "jobs").exists() == existed
        assert not existed or not os.listdir(place / "jobs")


def test_status_without_sacct(cluster, place, told, monkeypatch):
    told("submit", "--", *TRAIN, "--output", "out")
    (cluster / "sacct").unlink()
    code, _, err = told("submit", "--status", "out.jobs")
    assert (code, err.count("\n")) == (1, 1)
    assert "sacct, which is not here; use a machine of the cluster" in err


@pytest.fixture
def data(place, colours, tiny_checkpoint):
    shutil.copytree(colours, place / "colours")
    shutil.copytree(tiny_checkpoint, place / "model")


def preempt_after_a_checkpoint(output: Path, process: psutil.Process) -> None:
    """Send what Slurm sends, to submitit's process and its whole group, when a checkpoint is complete."""
    end = time.monotonic() + 120
    while not list(output.glob("checkpoints/checkpoint-*/trainer_state.json")):
        assert time.monotonic() < end
        assert process.status() != psutil.STATUS_ZOMBIE, "it ended before"
        time.sleep(0.01)
    assert not (output / "config.json").exists()
    (task,) = [each for each in process.children(recursive=True) if "submitit.core._submit" in each.cmdline()]
    task.send_signal(signal.SIGTERM)
    task.send_signal(signal.SIGUSR2)


def same_weights(one: Path, other: Path) -> bool:
    states = [AutoModelForImageClassification.from_pretrained(folder).state_dict() for folder in (one, other)]
    return all(torch.allclose(states[0][name], states[1][name], rtol=0, atol=1e-6) for name in states[0])


def test_a_preempted_job_is_queued_again_and_goes_on(data, place, told, warm):
    """By submitit's local executor; to the weights of an unbroken training."""
    train = (*TRAIN, "--steps", "60", "--evaluations", "20")
    words = ["submit", "--local", "--", *train, "--output", "out"]
    process = warm.start("hf_vit_cli.main:main", place, {"COLUMNS": "200"}, arguments=words)
    preempt_after_a_checkpoint(place / "out", psutil.Process(process.pid))
    assert (process.wait(240), process.err) == (0, "")
    assert " finished " in process.out
    (log,) = (place / "out.jobs").glob("*_log.out")
    assert re.search(r"stopped; checkpoint-\d+ in out is complete", log.read_text())
    assert re.search(r"going on from checkpoint-\d+", log.read_text())
    assert Facts.load(place / "out").records[0].kind == "training"
    assert told(*train, "--output", "unbroken")[0] == 0
    assert same_weights(place / "out", place / "unbroken")


@pytest.mark.slow
def test_the_script_of_sbatch_runs_and_asks_to_be_queued_again(data, cluster, place, told):
    train = (*TRAIN, "--steps", "60", "--evaluations", "20")
    told("submit", "--sweep", "seed=3,4", "--hours", "1", "--", *train, "--output", "out")
    variables = {"SLURM_JOB_ID": "4243", "SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_ID": "1"}
    start = {"env": {**os.environ, **variables}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", cluster / "script.sh"], **start)
    preempt_after_a_checkpoint(place / "out/seed=4", psutil.Process(process.pid))
    process.wait(120)
    assert (cluster / "scontrol.txt").read_text() == "requeue 4242_1\n"
    assert subprocess.run(["bash", cluster / "script.sh"], timeout=240, check=False, **start).returncode == 0
    assert re.search(r"going on from checkpoint-\d+", (place / "out.jobs/4242_1_0_log.out").read_text())
    assert told(*train, "--output", "unbroken", "--seed", "4")[0] == 0
    assert same_weights(place / "out/seed=4", place / "unbroken")


@pytest.mark.slow
def test_a_machine_with_two_processes_and_a_job_that_fails(data, place, told):
    """`--gpus 2` starts two processes that train together; where a job fails the table and the last line say so."""
    sweep = ("--local", "--gpus", "2", "--sweep", "batch-size=8,7", "--", *TRAIN, "--steps", "2", "--evaluations", "1")
    code, out, err = told("submit", *sweep, "--output", "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "1 of 2 jobs did not finish; look into " in err
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "batch-size" in line]
    assert [cell[1:3] for cell in cells] == [["batch-size=8", "finished"], ["batch-size=7", "unfinished"]]
    assert Facts.load(place / "out/batch-size=8").records[0].values["world_size"] == 2
