"""What the memory of activations costs: a process that runs a model does not fetch it anew in every pass."""

import ctypes
import os
import platform
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models.families import FAMILIES
from training.conftest import save_model
from zygote import Zygote

import hf_vit
from hf_vit.environment import keep_freed_memory
from hf_vit.loading.model import load_model

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IS_SET = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
of_glibc = pytest.mark.skipif(IS_SET or platform.libc_ver()[0] != "glibc", reason="whose own rules are tested")


def faults(how: str, megabytes: int) -> int:
    """Bytes of pages fetched by six tensors of so many megabytes, six times; in a process of its own."""
    model = FAMILIES["plain"].build("classification", num_labels=10)
    if how == "optimized":
        hf_vit.optimize_for_inference(model, engine="torch")
    elif how == "opened by its name":
        load_model(save_model(model, "saved"))
    elif how == "trained":
        hf_vit.finetune(model.config, "digits", "trained", steps=1, evaluations=1, batch_size=4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        at_once = [torch.ones(megabytes * 250_000) for _ in range(6)]
        del at_once
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()


@of_glibc
@pytest.mark.skipif(HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(), reason="a page is 2 MB here")
@pytest.mark.parametrize(
    ("how", "megabytes", "times"),
    [
        ("alone", 40, 6),  # glibc gives back what is above 32 MiB
        ("optimized", 40, 2),
        ("optimized", 10, 2),
        ("opened by its name", 40, 2),
        pytest.param("trained", 40, 2, marks=pytest.mark.slow),
    ],
)
def test_activations_are_not_given_back_to_the_system(how: str, megabytes: int, times: int, warm: Zygote, tmp_path):
    """Their pages are fetched once, or twice: glibc alone fetches them all six times."""
    program = warm.start("inference.test_allocations:faults", tmp_path / "process", how=how, megabytes=megabytes)
    assert program.wait(120) == 0, program.err
    fetched = int((program.folder / "answer.json").read_text()) / 1e6 / (6 * megabytes)
    assert (fetched > 5) if times == 6 else (fetched < times)


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
