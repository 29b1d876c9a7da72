"""What a killed conversion leaves behind stands in nobody's way."""

import os
import subprocess
import sys
from pathlib import Path

from hf_vit.results.delivery import new_folder


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
