"""Two machines of one training whose network is cut for good, or for a moment.

    python -m pytest tests/campaigns/test_cut_networks.py -m slow    # as root, who may make networks

The machines are network namespaces of this one, joined by a cable that is pulled at random moments. For good: both
sides end within the time that a process waits for the others, and say so in a line. For a moment: the weights are
those of an unbroken training.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from campaigns.ledger import Campaign, failures
from campaigns.small_training import BOUND, SETTINGS, SILENCE, prepare, same_weights, unbroken
from campaigns.strikes import THINNED

HOSTS = ("hf_vit_a", "hf_vit_b")
CABLE = ("hfvit0", "hfvit1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Two hosts, joined by a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", CABLE[0], "netns", HOSTS[0], "type", "veth", "peer", "name", CABLE[1], "netns", HOSTS[1])
        for host, end, address in zip(HOSTS, CABLE, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", end, "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def weights(place: Path) -> dict[str, torch.Tensor]:
    return unbroken(place)


class Launch:
    """A training by two machines, a process each; the disk is one."""

    def __init__(self, place: Path, name: str) -> None:
        self.output = place / name
        self.logs = [place / f"{name}-{host}.txt" for host in HOSTS]
        words = ["--model", place / "model", "--data", place / "colours", "--output", self.output, "--device", "cpu"]
        words += ["--precision", "fp32", "--process-timeout", SILENCE]
        words += [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", value)]
        self.processes = []
        for number, (host, end, log) in enumerate(zip(HOSTS, CABLE, self.logs, strict=True)):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", number]
            launcher += ["--nproc-per-node", 1, "--master-addr", ADDRESSES[0], "--master-port", 29517]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": end}
            command = ["ip", "netns", "exec", host, *launcher, "-m", "hf_vit", "finetune", *words]
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(list(map(str, command)), env=environment, stdout=file, stderr=file)
                )
        self.begun = time.monotonic()

    def wait_until_step(self, step: int) -> bool:
        """Whether this checkpoint was written before the training ended."""
        written = self.output / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json"
        while all(process.poll() is None for process in self.processes):
            if written.exists():
                return True
            time.sleep(0.02)
        return False

    def end(self) -> list[int]:
        """The exit statuses; the launch is bounded in time."""
        try:
            return [process.wait(max(1.0, BOUND - (time.monotonic() - self.begun))) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                if process.poll() is None:
                    for child in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                        child.kill()
            raise AssertionError(f"it hangs: {[log.read_text()[-300:] for log in self.logs]}") from None

    def check_weights(self, weights: dict[str, torch.Tensor]) -> str:
        assert self.end() == [0, 0], [log.read_text()[-1500:] for log in self.logs]
        return same_weights(self.output, weights)

    def check_lines(self) -> str:
        """Each side says in a line of its own that it lost the other."""
        assert 0 not in self.end(), [log.read_text()[-300:] for log in self.logs]
        for number, log in enumerate(self.logs):
            said = [line for line in log.read_text().splitlines() if line.startswith("hf-vit")]
            assert len(said) == 1, log.read_text()[-1500:]
            assert f"process {number} of 2 has lost another one" in said[0], said
        return "one line each"


def pull(seconds: float | None) -> None:
    """The cable, and plug it in again after so many seconds; None: when the test ends."""
    ip("-n", HOSTS[0], "link", "set", CABLE[0], "down")
    if seconds is not None:
        time.sleep(seconds)
        plug()


def plug() -> None:
    ip("-n", HOSTS[0], "link", "set", CABLE[0], "up")


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_cut_networks(network: None, place: Path, weights: dict[str, torch.Tensor]) -> None:
    def cases() -> Iterator[str]:
        moments = random.Random(0)
        for what, count in (("for good", 10), ("for a moment", 10)):
            for number in range(-(-count // THINNED)):
                yield f"{what}/{number} after step {moments.randrange(1, 7)}, {moments.uniform(0, 0.5):.3f} s"

    def attempt(case: str) -> str:
        kind, rest = case.split("/")
        step, later = rest.split(" after step ")[1].removesuffix(" s").split(", ")
        launch = Launch(place, case.replace("/", "-").replace(" ", "-").replace(",", ""))
        try:
            if not launch.wait_until_step(int(step)):
                return f"ended before, {launch.check_weights(weights)}"
            time.sleep(float(later))
            pull(3 if kind == "for a moment" else None)
            if kind == "for a moment":
                return launch.check_weights(weights)
            try:
                return launch.check_lines()
            except AssertionError:  # it was about to end
                if any(process.returncode for process in launch.processes):
                    raise
                return f"ended, {launch.check_weights(weights)}"
        finally:
            plug()

    command = "pytest -m slow tests/campaigns/test_cut_networks.py"
    assert not failures(Campaign("cut_networks", command, seed=0, thinned=THINNED).run(cases(), attempt))
