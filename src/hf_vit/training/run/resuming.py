"""Going on from a checkpoint: which one, with the same settings, and a training that had ended already."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from transformers.trainer_callback import TrainerState

from hf_vit.data.fingerprints import tell_changes
from hf_vit.errors import UserError
from hf_vit.loading.folders import WORK_FOLDER
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.redaction import redact_values
from hf_vit.training.processes import is_first, world_size
from hf_vit.training.run.checkpoints import (
    RUN_NAME,
    last_complete,
    read_files,
    read_run,
    read_state,
    remove_incomplete,
    work_folder,
    write_files,
    write_run,
)
from hf_vit.training.run.decisions import Run
from hf_vit.training.run.output import is_finished
from hf_vit.training.trainer.callbacks.progress import Clock, callbacks_of
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

_ABSENT = "(not set)"


def find_checkpoint(output: Path, resume: bool, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from; None to start. What was not written to its end is removed."""
    if not resume:
        return None
    work = work_folder(output)
    if not is_first():  # the first process has looked
        return last_complete(work)
    if not (work / RUN_NAME).is_file():
        say(f"{output} holds no run to resume; it is started anew")
        return None
    for name in remove_incomplete(work):
        say(f"removed {name}, which was not written to its end")
    checkpoint = last_complete(work)
    say(f"going on from {checkpoint.name}" if checkpoint else "no checkpoint is complete yet: starting from step 0")
    return checkpoint


def way_on(output: Path) -> str:
    """What is left of a run that was stopped, and how it goes on; a sweep's runs lie one folder deeper."""
    work = work_folder(output)
    if is_finished(output):
        return f"the model in {output} is complete" + ("; --resume tidies up beside it" if work.exists() else "")
    if not (work / RUN_NAME).is_file():
        return "nothing was written yet; start again with the same command"
    kept = last_complete(work)
    if kept is not None:
        return f"{kept.name} in {output} is complete; --resume goes on from it"
    if any(last_complete(trial) for trial in work.glob(f"*/{WORK_FOLDER}")):
        return f"what was done is in {output}; --resume goes on from it"
    return "no checkpoint was complete yet; --resume starts again from step 0"


def enter_run(run: Run) -> None:
    """Record how the run is started, or make sure that it is resumed with the same settings.

    Raises:
        UserError: see `refuse_other_settings`.
    """
    if not is_first():
        return
    settings = {
        **run.task,
        **{name: value for name, value in run.recipe.settings().items() if name not in ("name", "source")},
        "model": Path(run.source.name).name if run.source.has_weights else run.source.name,
        "data": f"{run.data.name} {run.data.fingerprint}",
        "image_size": list(as_pair(run.config.image_size)),
        "micro_batch_size": run.micro_batch_size,
        "total_steps": run.steps,
        "bf16": run.bf16,
        "seed": run.options.seed,
        "streaming": run.options.streaming,
        "world_size": world_size(),
    }
    if run.data.cut:  # another rule would train on images that the run is to be judged by
        settings["splits"] = f"{' and '.join(run.data.cut)} cut by content"
    if run.options.streaming:
        settings["num_workers"] = run.options.num_workers
    settings = cast(dict[str, Any], redact_values(json.loads(json.dumps(settings))))
    started = read_run(run.work)
    if started is None or run.checkpoint is None:  # nothing is lost by other settings
        write_run(run.work, settings)
        write_files(run.work, run.data.files)
    else:
        before = read_files(run.work)
        changes = "" if before is None else tell_changes(before, run.data.files)
        refuse_other_settings(started, settings, run.output, changes)


def refuse_other_settings(
    started: Mapping[str, Any], now: Mapping[str, Any], output: Path, changed_files: str = ""
) -> None:
    """A run goes on as it was started, or its result would be neither this run's nor that one's.

    Args:
        started, now: the settings.
        output: for the message.
        changed_files: of the data, see `tell_changes`.

    Raises:
        UserError: settings differ; the message names them.
    """
    different = [
        f"{name} was {started.get(name, _ABSENT)}, now {now.get(name, _ABSENT)}"
        for name in sorted({*started, *now})
        if started.get(name, _ABSENT) != now.get(name, _ABSENT)
    ]
    if not different:
        return
    other_data = changed_files and started.get("data") != now.get("data")
    files = f" ({changed_files}: put the data back as it was)" if other_data else ""
    raise UserError(
        f"--resume goes on as {output} was started, but {'; '.join(different)}{files}; give the same settings, or "
        "another output folder"
    )


def take_up(trainer: HfViTTrainer, checkpoint: Path) -> None:
    """The state of a training that had ended: its log, its clock and its best weights."""
    state = read_state(checkpoint)
    trainer.state = TrainerState(**state)
    clock = (state.get("stateful_callbacks") or {}).get("Clock")
    if clock:
        for callback in callbacks_of(trainer, Clock):
            callback.earlier = float(clock["attributes"]["earlier"])
    trainer.load_released(state.get("best_model_checkpoint") or str(checkpoint))
