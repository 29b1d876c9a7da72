"""The models of a training by step: the folders that it leaves, `OUTPUT/checkpoints/checkpoint-<step>/`."""

import re
from pathlib import Path

WORK_FOLDER = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint folder is named after; -1 for other folders."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints_in(work: Path) -> list[Path]:
    """Checkpoint folders, complete or not, by step."""
    return sorted((path for path in work.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0), key=step_of)
