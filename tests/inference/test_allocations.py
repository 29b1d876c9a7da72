"""What the memory of activations costs: a process that runs a model does not fetch it anew in every pass."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_vit.environment import keep_freed_memory

FAULTS = """
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(6):
    at_once = [torch.ones({numbers}) for _ in range(6)]
    del at_once
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PLAIN = "import resource, torch\n"
MODEL = """
import resource
import torch
import hf_vit

size = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
config = hf_vit.HfViTConfig(image_size=16, patch_size=8, num_labels=10, **size)
model = hf_vit.HfViTForImageClassification(config)
"""
RUN = {
    "optimized": "hf_vit.optimize_for_inference(model, engine='torch')",
    "opened by its name": """
from hf_vit.loading.model import load_model
model.save_pretrained("saved")
from transformers import ViTImageProcessor
ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained("saved")
load_model("saved")
""",
    "trained": "hf_vit.finetune(config, 'digits', 'trained', steps=1, evaluations=1, batch_size=4)",
}
ALLOCATION = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
of_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")


def faults(program: str, megabytes: int, folder: Path) -> float:
    """Megabytes of pages fetched by six tensors of so many megabytes, six times."""
    code = program + FAULTS.format(numbers=megabytes * 250_000)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, env=ALLOCATION
    )
    return int(ran.stdout.splitlines()[-1]) * resource.getpagesize() / 1e6


@of_glibc
@pytest.mark.parametrize(
    ("how", "megabytes"),
    [  # every process imports all libraries: 5 s and more
        ("optimized", 40),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (*((how, 40) for how in list(RUN)[1:]), ("optimized", 10))
        ),
    ],
)
def test_activations_are_not_given_back_to_the_system(how: str, megabytes: int, tmp_path):
    """Their pages are fetched once, or twice: glibc alone fetches them all six times where they are above 32 MiB."""
    assert faults(f"{MODEL}\n{RUN[how]}", megabytes, tmp_path) < 2 * 6 * megabytes


@of_glibc
@pytest.mark.skipif(HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(), reason="a page is 2 MB here")
@pytest.mark.parametrize("program", [PLAIN, pytest.param(MODEL, marks=pytest.mark.slow)])  # as above
def test_glibc_alone_gives_them_back(program: str, tmp_path):
    assert faults(program, 40, tmp_path) > 5 * 6 * 40


@of_glibc
def test_what_the_environment_says_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", None)  # which would fail
    for name, value in (("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=0")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert not keep_freed_memory()


@pytest.mark.parametrize(
    ("system", "largest", "kept"),
    [
        ("linux", 2**40, True),
        ("linux", 2**25, True),
        ("linux", 2**20, False),
        *((system, None, False) for system in ("linux", "darwin", "win32")),
    ],
)
def test_older_c_libraries_take_less_and_others_nothing(system: str, largest: int | None, kept: bool, monkeypatch):
    taken = {}

    def mallopt(which: int, value: int) -> int:
        if value <= (largest or 0) or which == -1:
            taken[which] = value
        return int(which in taken)

    library = SimpleNamespace() if largest is None else SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() is kept
    assert taken.get(-3) == (min(largest or 0, 2**28) if kept else None)
