"""A conversion that is killed at any moment leaves no half-written model, and nothing that stands in the way."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_vit.conversion as conversion
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification
from hf_vit.results.delivery import new_folder

KILLS = 24
# Says when the imports are done, so that the kills fall into the conversion itself; waits before it begins.
PROGRAM = """
import sys
import transformers, hf_vit.conversion
from hf_vit.models import modeling_hf_vit
print("ready", flush=True)
sys.stdin.readline()
hf_vit.conversion.convert(sys.argv[1], sys.argv[2])
print("done", flush=True)
"""


def start(source: Path, output: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(source), str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def begin(process: subprocess.Popen) -> float:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return time.perf_counter()


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def is_complete(output: Path, arrays: dict[str, np.ndarray]) -> bool:
    """False for an output that is absent; anything in between fails the test."""
    if not output.exists():
        return False
    model = HfViTForImageClassification.from_pretrained(output)
    assert sum(value.numel() for value in model.state_dict().values()) == sum(map(np.size, arrays.values()))
    assert torch.equal(model.classifier.bias, torch.from_numpy(arrays["head/bias"]))
    assert {"facts.json", "preprocessor_config.json"} <= {file.name for file in output.iterdir()}
    return True


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_moments(checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint(depth=12, heads=8, head_size=64, mlp=2048, patch=(16, 16), grid=(14, 14), labels=1000)
    source = write_npz(arrays)
    process = start(source, tmp_path / "whole")
    began = begin(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    whole = time.perf_counter() - began  # without the end of the interpreter, which takes longer
    end(process)
    assert is_complete(tmp_path / "whole", arrays)
    moments, outcomes = random.Random(0), list[bool]()
    for kill in range(KILLS):
        output = tmp_path / f"model{kill % 3}"  # the same folder again and again: remains of one kill meet the next
        process = start(source, output)
        begin(process)
        time.sleep(moments.uniform(0, 1.1) * whole)
        end(process)
        outcomes.append(is_complete(output, arrays))
        if outcomes[-1]:
            shutil.rmtree(output)
    print(
        f"\n{KILLS} kills within {1.1 * whole:.1f} s: {outcomes.count(False)} absent, {outcomes.count(True)} complete"
    )
    assert outcomes.count(False) >= KILLS // 4, "the kills came too late to say anything"
    for number in range(3):
        result = conversion.convert(source, tmp_path / f"model{number}")
        assert is_complete(result.output, arrays)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.npz", "model0", "model1", "model2", "whole"]


def test_remains_of_a_dead_process_are_removed_and_those_of_others_kept(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    with new_folder(tmp_path / "model") as mine:
        name = mine.parent.name
    mark = f"-{os.getpid()}-"
    assert mark in name
    remains = {
        "dead": name.replace(mark, f"-{dead.pid}-"),
        "alive": name.replace(mark, f"-{os.getppid()}-"),
        "elsewhere": name.replace(mark, f"x-{dead.pid}-"),
        "of another output": name.replace(mark, f"-{dead.pid}-").replace(".model.", ".other."),
    }
    for remain in remains.values():
        (tmp_path / remain).mkdir()
        (tmp_path / remain / "half").write_text("half a model")
    (tmp_path / "model").rmdir()
    with new_folder(tmp_path / "model") as folder:
        (folder / "whole").touch()
    del remains["dead"]
    assert {path.name for path in tmp_path.iterdir()} == {"model", *remains.values()}
