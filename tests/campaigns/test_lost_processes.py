"""Processes of one training that are killed, fall silent or are slow, under torchrun."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from campaigns.ledger import Campaign, failures
from campaigns.small_training import BOUND, SETTINGS, SILENCE, prepare, same_weights, unbroken
from campaigns.strikes import THINNED


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def weights(place: Path) -> dict[str, torch.Tensor]:
    return unbroken(place)


class Launch:
    """A training by two processes; torchrun starts them again `restarts` times."""

    def __init__(self, place: Path, name: str, restarts: int, patience: int = SILENCE) -> None:
        self.output, self.log = place / name, place / f"{name}.txt"
        arguments = ["--model", place / "model", "--data", place / "colours", "--output", self.output, "--resume"]
        arguments += ["--device", "cpu", "--precision", "fp32", "--process-timeout", patience]
        arguments += [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", value)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts]
        command = [sys.executable, *launcher, "-m", "hf_vit", "finetune", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
        self.begun = time.monotonic()

    def rank(self, number: int) -> psutil.Process | None:
        """The process of that rank, as long as there is one."""
        if self.process.poll() is not None:
            return None
        for child in psutil.Process(self.process.pid).children():
            try:
                if child.environ().get("RANK") == str(number):
                    return child
            except psutil.Error:
                continue
        return None

    def saved(self) -> int:
        """The step of its newest checkpoint."""
        found = (self.output / "checkpoints").glob("checkpoint-*/trainer_state.json")
        return max((int(path.parent.name.rpartition("-")[2]) for path in found), default=0)

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Whether it came to be so before the training ended."""
        while self.process.poll() is None:
            if is_so():
                return True
            time.sleep(0.02)
        return False

    def end(self) -> int:
        """Its exit status; the launch is bounded in time."""
        try:
            return self.process.wait(max(1.0, BOUND - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            children = psutil.Process(self.process.pid).children(recursive=True)
            for process in (*children, self.process):
                process.kill()
            raise AssertionError(f"it hangs: {self.log.read_text()[-300:]}") from None

    def check_weights(self, weights: dict[str, torch.Tensor]) -> str:
        assert self.end() == 0, self.log.read_text()[-4000:]
        said = same_weights(self.output, weights)
        assert sorted(path.name for path in self.output.glob(".*")) == []
        return said

    def check_line(self, silent: int) -> str:
        """The other process says in a line what befell it, and torchrun that the training failed."""
        assert self.end() != 0
        said = [line for line in self.log.read_text().splitlines() if line.startswith("hf-vit")]
        assert len(said) == 1, said
        assert f"process {1 - silent} of 2 has lost another one" in said[0]
        return "one line"


def test_a_killed_process_is_started_again_and_ends_as_one(place: Path, weights: dict[str, torch.Tensor]) -> None:
    launch = Launch(place, "sample", restarts=1)
    assert launch.wait_until(lambda: launch.saved() >= 2)
    victim = launch.rank(1)
    assert victim is not None
    victim.kill()
    assert launch.check_weights(weights) == "same weights"
    assert "going on from checkpoint-" in launch.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_lost_processes(place: Path, weights: dict[str, torch.Tensor]) -> None:
    def cases() -> Iterator[str]:
        moments = random.Random(0)
        for what, count, first, last in (("killed", 50, 0, 8), ("silent", 10, 1, 8), ("slow", 5, 1, 3)):
            for number in range(-(-count // THINNED)):
                after = f"{moments.randrange(first, last)} + {moments.uniform(0, 0.2):.3f} s"
                yield f"{what}/{number} rank {moments.randrange(2)} at checkpoint {after}"

    def attempt(case: str) -> str:
        found = re.fullmatch(r"(\w+)/\d+ rank (\d) at checkpoint (\d) \+ (.*) s", case)
        assert found is not None
        what, rank, step, later = found.groups()
        patience = BOUND if what == "slow" else SILENCE
        launch = Launch(place, re.sub(r"\W+", "-", case), restarts=int(what == "killed"), patience=patience)
        launch.wait_until(lambda: launch.saved() >= int(step) and launch.rank(int(rank)) is not None)
        time.sleep(float(later))
        victim = launch.rank(int(rank))
        if victim is None:
            return f"ended before, {launch.check_weights(weights)}"
        if what == "killed":
            victim.kill()
            return launch.check_weights(weights)
        if what == "silent":
            victim.suspend()
            try:
                return launch.check_line(int(rank))
            except AssertionError:  # it was about to end
                return f"ended, {launch.check_weights(weights)}"
        while launch.wait_until(victim.is_running):  # a tenth of the time
            try:
                victim.suspend()
                time.sleep(0.45)
                victim.resume()
                time.sleep(0.05)
            except psutil.Error:
                break
            if time.monotonic() - launch.begun > BOUND / 2:
                break
        return launch.check_weights(weights)

    command = "pytest -m slow tests/campaigns/test_lost_processes.py"
    assert not failures(Campaign("lost_processes", command, seed=0, thinned=THINNED).run(cases(), attempt))
