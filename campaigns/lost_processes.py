"""A training of two processes, of which one is killed, silent or slow, or whose network is cut.

A lost process that torchrun starts again, a slow one and a cable that is plugged in again cost nothing: the weights
are those of an unbroken training. Otherwise every process that is left says so in one line. The two hosts of a cut
network are network namespaces of this machine (root and iproute2), joined by a cable.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from training.conftest import COLOURS, make_colour_folder

from campaigns.commands import save_classifier
from campaigns.engine import Campaign
from campaigns.launches import Launch
from hf_vit.training import FinetuneOptions, finetune

# What happens -> how often, and the checkpoints (first, past the last) between which it does.
KINDS = {
    "killed": (50, 0, 8), "silent": (10, 1, 8), "slow": (5, 1, 3), "cut for good": (10, 1, 7),
    "cut a moment": (10, 1, 7),
}  # fmt: skip
SILENCE = 30  # seconds that a process waits for the others
# What torchrun gives processes to end before it kills them, and as much for everything else on a busy machine.
BOUND = SILENCE + 30 + 240
SETTINGS: dict[str, Any] = {
    "steps": 8, "evaluations": 8, "batch_size": 16, "optimizer": "sgd", "learning_rate": 0.1, "mixup_alpha": 0,
    "dropout": 0, "drop_path": 0,
}  # fmt: skip
HOSTS, CABLE, ADDRESSES = ("hf_vit_a", "hf_vit_b"), ("hfvit0", "hfvit1"), ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def set_cable(state: str) -> None:
    ip("-n", HOSTS[0], "link", "set", CABLE[0], state)


@contextmanager
def network() -> Iterator[None]:
    """Make two hosts, joined by a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise PermissionError("network namespaces need root and iproute2")
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


class Training(Launch):
    """A training by two processes, on this machine or on the two hosts; their disk is one."""

    def __init__(self, place: Path, name: str, kind: str) -> None:
        super().__init__(BOUND)
        self.output, is_cut = place / name, kind.startswith("cut")
        launchers: list[Any] = [("--standalone", "--nproc-per-node", 2, "--max-restarts", int(kind == "killed"))]
        words = ["--model", place / "model", "--data", place / "colours", "--output", self.output, "--device", "cpu"]
        words += ["--precision", "fp32", "--process-timeout", BOUND if kind == "slow" else SILENCE]
        words += [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", value)]
        if is_cut:
            at = ("--nproc-per-node", 1, "--master-addr", ADDRESSES[0], "--master-port", 29517)
            launchers = [("--nnodes", 2, "--node-rank", number, *at) for number in range(2)]
        else:
            words.append("--resume")
        for number, launcher in enumerate(launchers):
            command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "hf_vit", "finetune", *words]
            host = ("ip", "netns", "exec", HOSTS[number]) if is_cut else ()
            cable = {"GLOO_SOCKET_IFNAME": CABLE[number]} if is_cut else {}
            self.start(place / f"{name}-{number}.txt", *host, *command, **cable)

    def rank(self, number: int) -> psutil.Process | None:
        """Return the process of that rank, as long as there is one."""
        for child in self.children():
            with suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child
        return None

    def saved(self) -> int:
        states = (self.output / "checkpoints").glob("checkpoint-*/trainer_state.json")
        return max((int(path.parent.name.rpartition("-")[2]) for path in states), default=0)

    def check_weights(self, weights: dict[str, torch.Tensor]) -> str:
        assert not any(self.end()), self.text[-4000:]
        trained = load_file(self.output / "model.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, atol=1e-6, rtol=0, msg=name)
        assert sorted(path.name for path in self.output.glob(".*")) == []
        return "same weights"

    def check_lines(self, ranks: Sequence[int]) -> str:
        """Assert that each process of these ranks says in one line that it lost the other."""
        assert 0 not in self.end(), self.text[-600:]
        lines = [line for line in self.text.splitlines() if line.startswith("hf-vit")]
        assert len(lines) == len(ranks), self.text[-1500:]
        for rank in ranks:
            assert any(f"process {rank} of 2 lost contact with another process" in line for line in lines), lines
        return "one line each"


def strike(kind: str, rank: int, victim: psutil.Process, launch: Training, weights: dict[str, torch.Tensor]) -> str:
    if kind == "killed":
        victim.kill()
    elif kind == "slow":
        launch.slow_down(lambda: [victim])
    elif kind == "cut a moment":
        set_cable("down")
        time.sleep(3)
        set_cable("up")
    else:
        victim.suspend() if kind == "silent" else set_cable("down")
        codes = launch.end()
        if any(codes):
            return launch.check_lines([1 - rank] if kind == "silent" else [0, 1])
        return f"ended, {launch.check_weights(weights)}"  # it was about to
    return launch.check_weights(weights)


def cases() -> list[str]:
    """What happens to which process, at which checkpoint and how many seconds later."""
    draw = random.Random(0)
    return [
        f"{kind}/{number} rank {draw.randrange(2)} at {draw.randrange(first, last)} + {draw.uniform(0, 0.3):.3f} s"
        for kind, (count, first, last) in KINDS.items()
        for number in range(count)
    ]


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    make_colour_folder(folder / "colours", 24)
    save_classifier(folder / "model", sorted(COLOURS), hidden_dropout_prob=0.0)
    options = FinetuneOptions(device="cpu", precision="fp32")
    finetune(str(folder / "model"), str(folder / "colours"), folder / "one", options=options, **SETTINGS)
    weights = load_file(folder / "one" / "model.safetensors")

    with ExitStack() as stack:
        joined = cache(lambda: stack.enter_context(network()))

        def attempt(case: str) -> str:
            kind, rank, step, later = re.fullmatch(r"([\w ]+)/\d+ rank (\d) at (\d) \+ (.*) s", case).groups()
            try:
                if kind.startswith("cut"):
                    joined()
            except PermissionError as error:
                return f"not tried: {error}"
            launch = Training(folder, re.sub(r"\W+", "-", case), kind)
            try:
                launch.wait_until(lambda: launch.saved() >= int(step) and launch.rank(int(rank)) is not None)
                time.sleep(float(later))
                victim = launch.rank(int(rank))
                if victim is None:
                    return f"ended before, {launch.check_weights(weights)}"
                return strike(kind, int(rank), victim, launch, weights)
            finally:
                if kind.startswith("cut"):
                    set_cable("up")

        yield attempt


PROMISE = "a training whose process or network is lost ends with the weights of an unbroken one, or in one line"
COUNTS = {"kinds": {kind: count for kind, (count, _, _) in KINDS.items()}}
CAMPAIGN = Campaign("lost_processes", PROMISE, cases, prepare, COUNTS, lambda case: case.startswith("killed/"))
