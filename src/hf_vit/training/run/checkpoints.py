"""Where a run keeps what it needs to be resumed, and which of it survived a kill or a full disk.

    OUTPUT/checkpoints/run.json            how the run was started
    OUTPUT/checkpoints/data_files.json     the files of its data, with hashes or sizes
    OUTPUT/checkpoints/checkpoint-<step>/  weights, optimizer, random states

It lies apart from the files that are shared, and is removed when the run is complete unless it is to be kept.
"""

import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError
from hf_vit.loading.folders import WORK_FOLDER, checkpoints_in
from hf_vit.results.writing import write_atomically

RUN_NAME = "run.json"
_FILES_NAME, _MOST_FILES = "data_files.json", 100_000
_STATE_NAME = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_ARCHIVES = ("stream_*.pt", "teacher.pt", "pytorch_model_fsdp*.bin")


def work_folder(output: Path) -> Path:
    """OUTPUT/checkpoints, as an absolute path: checkpoints remember where the best one is."""
    return output.absolute() / WORK_FOLDER


def log_folder(output: Path) -> Path:
    """OUTPUT/runs, where TensorBoard's files stay when the run is complete; of a trial in a sweep a folder in there."""
    output = output.absolute()
    if output.parent.name == WORK_FOLDER:
        return output.parent.parent / "runs" / output.name
    return output / "runs"


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: every file is there and none is cut off.

    The Trainer writes its state last, but for what other processes write; archives carry their directory at the end,
    a safetensors header says how long the file must be, and folders of sharded weights get their metadata last.
    """
    processes = (read_run(checkpoint.parent) or {}).get("world_size", 1)
    try:
        state = json.loads((checkpoint / _STATE_NAME).read_text(encoding="utf-8"))
        json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        random_states = list(checkpoint.glob("rng_state*.pth"))
        # "optimizer.bin" is that of sharded weights, brought together; "optimizer_0" holds the shards.
        optimizer = [path for name in _OPTIMIZERS if (path := checkpoint / name).exists()]
        others = [path for name in _ARCHIVES for path in checkpoint.glob(name)]
        zipped = [checkpoint / "scheduler.pt", *optimizer, *random_states, *others]
        weights = list(checkpoint.glob("*.safetensors"))
        sharded, sharded_optimizer = (list(checkpoint.glob(name)) for name in ("pytorch_model_fsdp_?", "optimizer_?"))
        return (
            isinstance(state, dict)
            and bool(weights or sharded)
            and bool(optimizer or sharded_optimizer)
            and len(random_states) == processes
            and all(zipfile.is_zipfile(path) for path in zipped)
            and all(_is_whole(path) for path in weights)
            and all((folder / ".metadata").is_file() for folder in (*sharded, *sharded_optimizer))
        )
    except (OSError, ValueError):
        return False


def _is_whole(weights: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            return len(file.keys()) > 0
    except SafetensorError:
        return False


def last_complete(work: Path) -> Path | None:
    """The newest checkpoint that can be resumed from; None when there is none."""
    return next((path for path in reversed(checkpoints_in(work)) if is_complete(path)), None)


def remove_incomplete(work: Path) -> list[str]:
    """Delete what a killed process or a full disk left half-written; returns the names."""
    broken = [path for path in checkpoints_in(work) if not is_complete(path)]
    for path in broken:
        shutil.rmtree(path)
    return [path.name for path in broken]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's state of a complete checkpoint."""
    return json.loads((checkpoint / _STATE_NAME).read_text(encoding="utf-8"))


def find_best(checkpoint: Path) -> None:
    """Point a checkpoint's state to the best checkpoint beside it, wherever the run's folder was moved to."""
    state = read_state(checkpoint)
    best = checkpoint.with_name(f"checkpoint-{state.get('best_global_step')}")
    state["best_model_checkpoint"] = str(best.resolve()) if is_complete(best) else None
    write_atomically(checkpoint / _STATE_NAME, json.dumps(state, indent=2, sort_keys=True) + "\n")


def has_ended(checkpoint: Path) -> bool:
    """Whether training was over at this checkpoint: all steps done, or stopped early."""
    control = (read_state(checkpoint).get("stateful_callbacks") or {}).get("TrainerControl") or {}
    return bool((control.get("args") or {}).get("should_training_stop"))


def write_run(work: Path, settings: Mapping[str, Any]) -> None:
    """Record how a run is started."""
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(work / RUN_NAME, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def write_files(work: Path, files: Mapping[str, str]) -> None:
    """Record the data's files, so that a change can be told by name; not of folders of very many images."""
    if 0 < len(files) <= _MOST_FILES:
        write_atomically(work / _FILES_NAME, json.dumps(files, indent=1, sort_keys=True) + "\n")


def read_files(work: Path) -> dict[str, str] | None:
    """The data's files as they were; None where they were not recorded."""
    try:
        return json.loads((work / _FILES_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_run(work: Path) -> dict[str, Any] | None:
    """How a run was started; None when the folder holds no run.

    Raises:
        UserError: the record is damaged.
    """
    try:
        settings = json.loads((work / RUN_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{work / RUN_NAME} is damaged ({error}); delete {work} to start anew") from error
    return settings
