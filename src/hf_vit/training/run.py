"""One run of a training: check, prepare, train or resume, and write the finished folder.

    OUTPUT/                                the finished model, config.json last
    OUTPUT/checkpoints/run.json            the settings of the run
    OUTPUT/checkpoints/data_files.json     the files of its data, with hashes or sizes
    OUTPUT/checkpoints/checkpoint-<step>/  weights, optimizer, random states
    OUTPUT/.lock                           during a run, and after a killed one

Checkpoints are removed when the model is complete, unless they are kept on request. A `Task` defines the model and the
loss, a recipe the optimization.
"""

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError, safe_open
from transformers import set_seed
from transformers.trainer_callback import TrainerState

from hf_vit.conversion.progress import quiet_transformers
from hf_vit.data import AugmentationConfig, check_images, load_data, load_images
from hf_vit.data.annotations import LABELED
from hf_vit.data.augmentation import open_policy
from hf_vit.data.fingerprints import describe_changes
from hf_vit.data.labels import summarize_names
from hf_vit.data.overview import note_imbalance
from hf_vit.data.sources import refuse_output_in
from hf_vit.display import format_count
from hf_vit.environment import keep_freed_memory
from hf_vit.errors import DivergedError, UserError, explain_refusal, is_out_of_memory
from hf_vit.families import find_family, refuse_other_channels
from hf_vit.hub.card import write_card
from hf_vit.hub.card_metadata import find_license, record_base_license, require_license
from hf_vit.loading.folders import WORK_FOLDER, list_checkpoints
from hf_vit.loading.model import get_source_name
from hf_vit.loading.start import choose_image_size, find_model, get_least_size
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.repositories.hub import check_repo_id
from hf_vit.results.delivery import fill_folder
from hf_vit.results.facts import DataFact, append_record, make_record, redact_json
from hf_vit.results.figures import make_figure, save_figure
from hf_vit.results.trained_images import write_trained
from hf_vit.training.features import refuse_random_model, restore_backbone
from hf_vit.training.plan import (
    Job,
    Run,
    Start,
    count_steps,
    get_vision_config,
    get_work_folder,
    limit_evaluation,
    micro_batch_size,
    note_limited_evaluation,
    note_memory,
    note_short_training,
    use_bf16,
)
from hf_vit.training.processes import (
    explain_lost_contact,
    is_main,
    require_same,
    run_main_process_first,
    wait_for_all,
    world_size,
)
from hf_vit.training.tasks.task import DEFAULTS, Result, Task, TrainingResult, find_active_settings
from hf_vit.training.trainer.callbacks import Clock, LiveProgress, StopOnTermination, find_callbacks
from hf_vit.training.trainer.distributed import gather_model
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import import_timm_optim
from hf_vit.training.trainer.sharing import check_before
from hf_vit.writing import cache_folder, remove_leftovers, settle_folder, write_atomically

ReportLine = Callable[[str], None]

RUN_NAME = "run.json"
_FILES_NAME = "data_files.json"
_STATE_NAME = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_ARCHIVES = ("stream_*.pt", "teacher.pt", "pytorch_model_fsdp*.bin")
_LOCK, _REMOVED = ".lock", ".checkpoints-removed"
_SCALING = ("image_mean", "image_std", "resample")  # fields of the image processor that decide a model's pixels
# Fields of a config that saving sets, and those of the classes, which are a setting of their own.
_NOT_COMPARED = ("architectures", "auto_map", "dtype", "transformers_version", "id2label", "label2id", "problem_type")
# Logged metrics of the validation split -> axis label of the plot.
_SCORES = {"eval_accuracy": "accuracy", "eval_mean_iou": "mean intersection over union", "eval_ap50": "AP50"}
# Trains a job, once or for every learning rate of a sweep, and returns a trainer with the released weights.
TrainJob = Callable[[Task[Any], Job, Start, ReportLine], tuple[Run, HfViTTrainer]]


def run_job(task: Task[Result], job: Job, report: ReportLine, train: TrainJob) -> Result:
    """Run a job from its checks to its finished folder, which is locked against other runs, and return its result.

    Checks run before anything is written, the cheapest first. Resuming a finished run only removes its checkpoints.
    """
    output, options = job.output, job.options
    with quiet_transformers(), explain_lost_contact(options.process_timeout), ExitStack() as stack:
        with run_main_process_first(options.device, options.process_timeout):
            check(task, job, report)
            stack.enter_context(lock_output(output))
            start = None
            if not (options.resume and is_finished(output)):
                check_output(output, options.resume)
                start = open_start(job, report, task)
        if start is None:
            result = task.recall(output, job.recipe)
            remedy = "to train it further, give it as the model of a run with another output"
            report(f"{output} already holds a finished model, so there is nothing to resume; {remedy}")
            wait_for_all()
            if is_main():
                _tidy(output, options.keep_checkpoints)
            return result
        require_same("training data", start.data.fingerprint)
        result = _complete(task, *train(task, job, start, report))
        warning = task.make_warning(result)
        if warning is not None:
            report(warning)
        return result


# Check


def check(task: Task[Any], job: Job, report: ReportLine) -> None:
    """Raise UserError for arguments that cannot work, without opening model or data."""
    recipe, options = job.recipe, job.options
    refuse_output_in(job.data_name, job.output)
    if options.cache_features:
        _check_caching(task, job)
    task.check(recipe)
    size = micro_batch_size(recipe.batch_size, options.micro_batch_size, task.accumulates)
    if size <= recipe.repeated_augmentation and (recipe.augmentation.mixup_alpha or recipe.augmentation.cutmix_alpha):
        raise UserError(
            f"mixup and cutmix mix different images of a micro-batch, but its size is {size}; choose a size above "
            f"{recipe.repeated_augmentation} (--micro-batch-size), or set --mixup-alpha and --cutmix-alpha to 0"
        )
    if options.streaming and not task.streams:
        raise UserError("--streaming does not work for segmentation and detection; leave --streaming out")
    if options.streaming and (recipe.class_weights or recipe.balanced_sampling):
        raise UserError(
            "classes cannot be balanced while streaming; leave --streaming out, or --class-weights and "
            "--balanced-sampling"
        )
    if options.streaming and recipe.repeated_augmentation > 1:
        raise UserError(
            "a stream gives every image once per epoch, but --repeated-augmentation is "
            f"{recipe.repeated_augmentation}; set it to 1, or leave --streaming out"
        )
    if recipe.optimizer in ("lamb", "lion", "muon"):
        import_timm_optim(recipe.optimizer)
    if recipe.augmentation.auto_augment is not None:
        open_policy(recipe.augmentation.auto_augment)
    if options.push is not None and is_main():
        check_repo_id(options.push)
        require_license(options.license, job.model_name if isinstance(job.model_name, str) else None)
        check_before(options.push, report, private=options.private)


def _check_caching(task: Task[Any], job: Job) -> None:
    """Raise UserError if features vary from epoch to epoch, so that they cannot be cached."""
    tune = job.recipe.tune
    augmentation = find_active_settings(job.recipe, [field.name for field in fields(AugmentationConfig)])
    variation = ", ".join(f"{name} {value}" for name, value in augmentation.items())
    reason = ""
    if not task.caches_features:
        reason = "needs a classifier that has no teacher; leave --task or --teacher out"
    elif tune != "head":
        reason = f"needs a frozen backbone, which --tune {tune} trains; use --tune head"
    elif job.options.streaming:
        reason = "needs a table, and a stream is read anew in every epoch; leave --streaming out"
    elif augmentation:
        reason = (
            f"needs the same images in every epoch, but the recipe {job.recipe.name} varies them ({variation}); set "
            "these options to 0 (pairs to 0 0, a policy to none), choose another recipe"
        )
    if reason:
        raise UserError(f"--cache-features {reason}, or leave --cache-features out")
    with suppress(OSError):  # a cache that cannot be written raises UserError; empty folders are removed again
        os.removedirs(cache_folder("features"))


@contextmanager
def lock_output(output: Path) -> Generator[None]:
    """Lock the output folder against other runs (in the main process); create it, and remove it if it stays empty."""
    if not is_main():
        yield
        return
    if output.exists() and not output.is_dir():
        raise UserError(f"the output {output} is a file; choose a folder with --output")
    absent = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with ExitStack() as stack:
            try:
                output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(WeakFileLock(output / _LOCK, timeout=0.1))  # with 0 even a free lock fails
            except TimeoutError as error:
                raise UserError(
                    f"another run is using {output}; wait until it ends, or choose another --output"
                ) from error
            except OSError as error:
                raise UserError(
                    f"the output folder {output} cannot be written: {error.strerror or error}; choose another --output"
                ) from error
            try:
                yield
            finally:
                # Removed while it is locked: a process that has opened it meanwhile notices that and tries again.
                with suppress(OSError):
                    (output / _LOCK).unlink()
    finally:
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()


def is_finished(output: Path) -> bool:
    """Return whether a folder holds a complete model, whatever else is in it."""
    return (output / "config.json").is_file() and (output / "facts.json").is_file()


def check_output(output: Path, resume: bool) -> None:
    """Raise UserError (in the main process) unless the output is empty, or holds an unfinished run to resume."""
    if not is_main():
        return
    work = get_work_folder(output)
    remove_leftovers(work)
    with suppress(OSError):
        work.rmdir()  # empty if a run was killed before it was recorded
    existing = sorted(path.name for path in output.iterdir() if path.name != _LOCK) if output.exists() else []
    if not existing:
        return
    if is_finished(output):
        raise UserError(f"the output folder {output} holds a finished model; choose a new or empty --output")
    if not (work / RUN_NAME).is_file():
        files = f"other files ({', '.join(existing[:3])})"
        raise UserError(f"the output folder {output} holds {files}; choose a new or empty folder with --output")
    if not resume:
        raise UserError(f"the output folder {output} holds an unfinished run; add --resume, or delete the folder")


def open_start(job: Job, report: ReportLine, task: Task[Any] | type[Task[Any]] = Task) -> Start:
    """Find the model, load all three splits, and check every image unless it is streamed."""
    source = find_model(job.model_name)
    refuse_other_channels(source.config, source.name)
    if job.recipe.tune == "auto" and not source.has_weights:
        raise UserError(
            f"--tune auto needs a pretrained model, but all weights of {source.name} are new; give a checkpoint, or "
            "--tune all"
        )
    options = job.options
    crop = job.recipe.augmentation.random_crop
    size, notes = choose_image_size(source, options.image_size, job.recipe.image_size)
    for note in notes:
        report(f"note: {note}")
    if (crop or 0) >= min(size):
        raise UserError(
            f"--random-crop {crop} is too large for images of {size[0]}x{size[1]} px; choose a value below {min(size)}"
        )
    images = (load_data if task.has_labels else load_images)(
        job.data_name,
        streaming=options.streaming,
        skip_bad_images=options.skip_bad_images,
        image_size=size,
        image_column=options.image_column,
        label_column=options.label_column,
        multi_label=task.multi_label,
        target=task.target,
        keep=True,
    )
    images = check_images(images, get_least_size(source), options.skip_bad_images)
    for note in (*images.notes, *note_imbalance(images)):
        report(f"note: {note}")
    if images.skipped:
        report(f"skipped {format_count(len(images.skipped), 'unreadable image')}")
    for split in ("train", "validation", "test"):
        dataset = images.split(split)  # raises if it is missing
        if images.readers and split != "train" and next(iter(dataset), None) is None:
            raise UserError(
                f"the stream {images.name} has no {split} image; give more images, or leave --streaming out"
            )
        scans = () if images.target == "label" else images.seen[split]
        if scans and not any(scan.annotation and scan.annotation.amounts for scan in scans):
            raise UserError(
                f"no {split} image has {LABELED[images.target]}, so no model could be measured on this split; annotate "
                f"some of them, or move the split away: {split} images are then cut from the training images"
            )
    return Start(source, images, size)


# Prepare


def prepare(task: Task[Any], job: Job, start: Start, report: ReportLine) -> Run:
    """Decide all settings, build the model, check the free space on the disk, and record the run."""
    checkpoint = _find_checkpoint(job, report)
    keep_freed_memory()
    set_seed(job.options.seed)
    model, processor = task.build(start, job.recipe)
    if job.options.cache_features:
        refuse_random_model(model)
    run = Run(
        **vars(job),
        **vars(start),
        model=model,
        processor=processor,
        task=task.settings(),
        steps=count_steps(job.recipe, start.data.num_examples("train"), "dataloader_drop_last" in task.arguments),
        micro_batch_size=micro_batch_size(job.recipe.batch_size, job.options.micro_batch_size, task.accumulates),
        bf16=use_bf16(job.options, get_vision_config(model)),
        checkpoint=checkpoint,
    )
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    state = weights * {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1, "muon": 2}[job.recipe.optimizer]
    if job.recipe.average_decay is not None or job.recipe.tune == "lora":
        state += weights  # checkpoints have training weights besides the released ones
    # The model, three checkpoints (one being written), and 16 MiB for processor, code, plots and file overhead.
    total_bytes = weights + 3 * (weights + state + task.count_extra_bytes()) + (16 << 20)
    require_space(run.output, total_bytes - sum(path.stat().st_size for path in run.work.rglob("*") if path.is_file()))
    record_run(run)
    report(task.describe(run))
    for note in (*note_short_training(run), *note_limited_evaluation(run), *note_memory(run)):
        report(f"note: {note}")
    return run


def _find_checkpoint(job: Job, report: ReportLine) -> Path | None:
    """Return the checkpoint to resume from, or None; remove incomplete checkpoints."""
    if not job.options.resume:
        return None
    if is_main():
        if not (job.work / RUN_NAME).is_file():
            report(f"{job.output} holds no run to resume, so a new run starts")
            return None
        for removed_name in _remove_incomplete(job.work):
            report(f"removed the incomplete checkpoint {removed_name}")
    checkpoint = find_last_complete(job.work)
    report(f"resuming from {checkpoint.name}" if checkpoint else "no checkpoint is complete yet; starting from step 0")
    return checkpoint


def require_space(folder: Path, needed: int) -> None:
    """Raise UserError if the disk of a folder, which need not exist, has fewer than `needed` free bytes."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"the disk of {folder} has {_format_bytes(free)} free, but the training needs about "
            f"{_format_bytes(needed)} for the model and its checkpoints; free some space, or choose another --output"
        )


def _format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _collect_settings(run: Run) -> dict[str, Any]:
    """Return the settings that must stay the same when the run is resumed, redacted, as JSON stores them."""
    names = run.data.label_names
    settings = {
        **run.task,
        **{name: value for name, value in run.recipe.settings().items() if name not in ("name", "source")},
        "model": Path(run.source.name).name if run.source.has_weights else run.source.name,
        "data": f"{run.data.name} {run.data.fingerprint}",
        # The first classes with a hash of all in their order, which the fingerprint of data does not cover.
        "classes": f"{summarize_names(names)} ({hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]})",
        "image_size": list(as_pair(run.config.image_size)),
        **{name: json.loads(run.processor.to_json_string()).get(name) for name in _SCALING},
        "micro_batch_size": run.micro_batch_size,
        "total_steps": run.steps,
        "bf16": run.bf16,
        "seed": run.options.seed,
        "streaming": run.options.streaming,
        "world_size": world_size(),
    }
    if run.data.cut:  # another way to cut splits could put test images into the training
        settings["splits"] = f"{' and '.join(run.data.cut)} cut by content"
    evaluations, num_images = limit_evaluation(run)
    if num_images is not None:  # scores of other images, as version 0.2 has, cannot be compared
        settings["limited_evaluation"] = [evaluations, num_images]
    if run.options.cache_features:  # features differ in the last digits from those of a training step
        settings["cache_features"] = True
    if run.options.streaming:  # its fingerprint does not cover the columns
        settings |= {name: getattr(run.options, name) for name in ("num_workers", "image_column", "label_column")}
    return cast(dict[str, Any], redact_json(settings))


def record_run(run: Run) -> None:
    """Write the settings of the run, or raise UserError if it is resumed with other settings."""
    if not is_main():
        return
    settings = _collect_settings(run)
    old_settings = read_run(run.work)
    if old_settings is not None and "model" not in old_settings:
        raise make_trials_error(run.output, old_settings)
    if old_settings is None or run.checkpoint is None:  # without a checkpoint other settings do no harm
        write_run(run.work, settings)
        if 0 < len(run.data.files) <= 100_000:  # for the names of changed files in a later error
            write_atomically(run.work / _FILES_NAME, json.dumps(run.data.files, indent=1, sort_keys=True) + "\n")
        return
    # A run of an earlier version lacks newer options, which leave everything as it was by default.
    newer = ("classes", "image_column", "label_column", *_SCALING)
    old_values = DEFAULTS | {name: settings[name] for name in newer if name in settings} | old_settings
    names = sorted({*old_settings, *settings})
    values = ((name, old_values.get(name, "(not set)"), settings.get(name, "(not set)")) for name in names)
    different = [f"{name} was {old} and is now {new}" for name, old, new in values if old != new]
    if not different:  # the folder of the model may hold another one by now
        checkpoint_config = json.loads((run.checkpoint / "config.json").read_text(encoding="utf-8"))
        old_config = checkpoint_config.get("backbone_config") or checkpoint_config
        different = [
            f"{name} was {old_config[name]} and is now {value}"
            for name, value in json.loads(run.config.to_json_string()).items()
            if name not in _NOT_COMPARED and old_config.get(name, value) != value
        ]
    if not different:
        return
    changes = ""
    if old_settings.get("data") != settings["data"]:
        with suppress(OSError, ValueError):
            changes = describe_changes(json.loads((run.work / _FILES_NAME).read_text(encoding="utf-8")), run.data.files)
    files = f" ({changes}: restore the data)" if changes else ""
    raise UserError(
        f"--resume needs the settings that {run.output} was started with, but "
        f"{'; '.join(different)}{files}; give the old settings, or another --output"
    )


def make_trials_error(output: Path, old_settings: Mapping[str, Any]) -> UserError:
    """Return the error of a sweep, or of `--tune auto`, that is resumed as another training."""
    old_rates = ",".join(f"{rate:g}" for rate in old_settings.get("sweep_rates", []))
    old_start = f"the learning rates {old_rates}" if old_rates else f"--tune {old_settings.get('tune')}"
    return UserError(
        f"the run in {output} was started with {old_start}; resume it with the same, or choose another --output"
    )


def read_run(work: Path) -> dict[str, Any] | None:
    """Read the settings of a run; None if the folder has no run. Raise UserError if they are damaged."""
    try:
        return json.loads((work / RUN_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{work / RUN_NAME} is damaged ({error}); delete the folder {work} to start again") from error


def write_run(work: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run."""
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(work / RUN_NAME, json.dumps(settings, indent=2, sort_keys=True) + "\n")


# Train


def train_once(task: Task[Any], job: Job, start: Start, report: ReportLine) -> tuple[Run, HfViTTrainer]:
    """Prepare a run and train it, from its checkpoint if it has one."""
    with run_main_process_first(job.options.device, job.options.process_timeout):
        run = prepare(task, job, start, report)
    try:
        trainer = task.build_trainer(run)
    except UserError:
        if run.checkpoint is None and is_main():
            shutil.rmtree(run.work)  # nothing was trained, so nothing is to be resumed
        raise
    try:
        with _explain_errors(run, task.accumulates):
            if run.checkpoint is None:
                trainer.train()
            else:
                _resume(trainer, run.checkpoint, report)
    finally:
        if run.options.cache_features:
            restore_backbone(run.model)
        for kind in (LiveProgress, StopOnTermination):
            for callback in find_callbacks(trainer, kind):
                callback.close()
    return run, trainer


def get_seconds(trainer: HfViTTrainer) -> float:
    """Return the seconds spent training."""
    return find_callbacks(trainer, Clock)[0].seconds


@contextmanager
def _explain_errors(run: Run, accumulates: bool) -> Generator[None]:
    """Turn errors of torch, the system and data libraries into a UserError that says how to continue."""
    try:
        yield
    except UserError as error:
        reason = explain_refusal(error.__cause__ or error, elsewhere=False)
        if reason:
            raise UserError(_explain_unwritable(run, reason)) from error
        # An error of a loader's worker contains the worker's traceback.
        message = str(error).rpartition("UserError: ")[2].strip()
        if isinstance(error, DivergedError):
            raise DivergedError(f"{message}; use another --output with the new settings") from error
        raise UserError(message) from error
    except Exception as error:
        message = _explain(run, error, accumulates)
        if message is None:
            raise
        raise UserError(message) from error


def _explain(run: Run, error: Exception, accumulates: bool) -> str | None:
    """Return a message for an error with a known cause and remedy, else None."""
    if is_out_of_memory(error):
        return _explain_memory(run, accumulates)
    system_reason = explain_refusal(error, elsewhere=False)
    if system_reason:
        return _explain_unwritable(run, system_reason)
    if "DataLoader worker (pid" in str(error):
        # The number of workers of a stream must stay the same when it is resumed.
        reason = " ".join(str(error).split()).rstrip(".")
        fewer = "" if run.options.streaming and find_last_complete(run.work) else " or choose a smaller --num-workers"
        return (
            f"a data loading process was killed, probably because memory ran out ({reason}); free some "
            f"memory{fewer}, then {_explain_resume(run)}"
        )
    if run.checkpoint is not None and "parameter group" in str(error):  # torch's error for an optimizer's state
        return (
            f"{run.checkpoint.name} in {run.output} was written by a version that exempts other weights from weight "
            "decay, so it cannot be resumed; use that version, or another --output"
        )
    # Any error may be caused by files that were removed or changed during the training.
    changes = run.data.changed_files()
    if not changes:
        return None
    return f"the training data changed during the run: {changes}; restore it, then {_explain_resume(run)}"


def _explain_memory(run: Run, accumulates: bool) -> str:
    """Return the error of too little memory; smaller micro-batches help only a task that accumulates gradients."""
    size = run.micro_batch_size
    name, effect = ("micro-batch", " (the result stays the same)") if accumulates else ("batch", "")
    smaller = f"a smaller --{name}-size than {size}{effect}, " if size > 1 else ""
    alternatives = f"{smaller}smaller images or a smaller model"
    restart = "and start again with --resume" if find_last_complete(run.work) is None else "in another --output"
    return f"out of memory for {format_count(size, 'image')} at once; choose {alternatives}, {restart}"


def _explain_unwritable(run: Run, reason: str) -> str:
    """Remove incomplete checkpoints, which may free space, and return the error of an output that cannot be written."""
    with suppress(OSError):
        if is_main():
            _remove_incomplete(run.work)
    return f"the output {run.output} cannot be written: {reason}, then {_explain_resume(run)}"


def _explain_resume(run: Run) -> str:
    """Return the remedy of an error after which the run can be resumed."""
    last = find_last_complete(run.work)
    return f"continue from {last.name} with --resume" if last else "start it again with --resume"


# Resume


def _resume(trainer: HfViTTrainer, checkpoint: Path, report: ReportLine) -> None:
    """Resume a training from a checkpoint; if it had ended, only load its log, its time and its best weights."""
    state = read_state(checkpoint)
    # The stored path of the best checkpoint is wrong if the run's folder was moved.
    best_checkpoint = checkpoint.with_name(f"checkpoint-{state.get('best_global_step')}")
    if is_complete(best_checkpoint):
        state["best_model_checkpoint"] = str(best_checkpoint.resolve())
    else:  # so that the scores are those of the saved weights
        state |= dict.fromkeys(("best_model_checkpoint", "best_global_step", "best_metric"))
    write_atomically(checkpoint / _STATE_NAME, json.dumps(state, indent=2, sort_keys=True) + "\n")
    callbacks: dict[str, Any] = state.get("stateful_callbacks") or {}
    control = (callbacks.get("TrainerControl") or {}).get("args") or {}
    if not control.get("should_training_stop"):  # by its last step or early
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return
    report("the training is already finished")
    trainer.state = TrainerState(**state)
    if clock := callbacks.get("Clock"):
        find_callbacks(trainer, Clock)[0].earlier = float(clock["attributes"]["earlier"])
    trainer.load_released(state["best_model_checkpoint"] or str(checkpoint))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer's state of a complete checkpoint."""
    return json.loads((checkpoint / _STATE_NAME).read_text(encoding="utf-8"))


def find_last_complete(work: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return next((path for path in reversed(list_checkpoints(work)) if is_complete(path)), None)


def is_complete(checkpoint: Path) -> bool:
    """Return whether all files of a checkpoint exist and none is truncated."""
    num_processes = (read_run(checkpoint.parent) or {}).get("world_size", 1)
    try:
        # The Trainer writes its state last, except for files of other processes.
        state: Any = read_state(checkpoint)
        json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        random_states = list(checkpoint.glob("rng_state*.pth"))
        # Of sharded weights "optimizer.bin" is the full optimizer, and "optimizer_0" has its shards.
        optimizers = [checkpoint / name for name in _OPTIMIZERS if (checkpoint / name).exists()]
        sharded_weights = list(checkpoint.glob("pytorch_model_fsdp_?"))
        sharded_optimizers = list(checkpoint.glob("optimizer_?"))
        weights = list(checkpoint.glob("*.safetensors"))
        has_all = bool(weights or sharded_weights) and bool(optimizers or sharded_optimizers)
        if not has_all or len(random_states) != num_processes:
            return False
        for path in weights:
            with safe_open(path, framework="pt") as file:  # checks the length of the file, which the header contains
                if not file.keys():
                    return False
        archives = [path for name in _ARCHIVES for path in checkpoint.glob(name)]
        # Archives have their directory at the end, and folders of sharded weights get their metadata last.
        return (
            isinstance(state, dict)
            and all(map(zipfile.is_zipfile, (checkpoint / "scheduler.pt", *optimizers, *random_states, *archives)))
            and all((folder / ".metadata").is_file() for folder in (*sharded_weights, *sharded_optimizers))
        )
    except (OSError, ValueError, SafetensorError):
        return False


def _remove_incomplete(work: Path) -> list[str]:
    """Delete incomplete checkpoints, and return their names; raise an OSError for files that cannot be read."""
    broken = [path for path in list_checkpoints(work) if not is_complete(path)]
    for path in broken:
        for file in filter(Path.is_file, path.rglob("*")):
            file.open("rb").close()  # otherwise those of another user would seem to be incomplete
        shutil.rmtree(path)
    return [path.name for path in broken]


def describe_resume(output: Path) -> str:
    """Describe the state of an interrupted run or sweep, and how to resume it."""
    work = get_work_folder(output)
    if is_finished(output):
        return f"the model in {output} is complete" + ("; --resume removes the checkpoints" if work.exists() else "")
    if not (work / RUN_NAME).is_file():
        return "nothing was written yet; run the same command again"
    last = find_last_complete(work)
    if last is not None:
        return f"{last.name} in {output} is complete; continue with --resume"
    if any(find_last_complete(trial) for trial in work.glob(f"*/{WORK_FOLDER}")):
        return f"finished work is in {output}; continue with --resume"
    return "there is no complete checkpoint yet; --resume starts from step 0"


# Deliver


def _complete(task: Task[Result], run: Run, trainer: HfViTTrainer) -> Result:
    """Evaluate the finished model, write the model folder in the main process, and remove the checkpoints.

    Everything is written beside the checkpoints and then moved into the output. If that fails, the checkpoints remain.
    """
    module = trainer.bare_model()
    for name in ("forward", "_original_forward"):  # set by accelerate for bfloat16 autocast
        module.__dict__.pop(name, None)
    model = gather_model(task.get_released(module))
    model.eval()
    family = find_family(get_vision_config(model).model_type)
    if family is not None and family.is_vit:
        # The default attention of a loaded model; a head without sdpa keeps its attention.
        model.set_attn_implementation("sdpa" if model._supports_sdpa else {"backbone_config": "sdpa"})  # pyright: ignore[reportPrivateUsage]
    state = trainer.state
    shared = {
        "folder": run.output,
        "model": model,
        "processor": run.processor,
        "recipe": run.recipe,
        "steps": state.global_step,
        "seconds": get_seconds(trainer),
        "history": state.log_history,
    }
    result = task.conclude(run, state, shared)
    wait_for_all()
    if is_main():
        # With the name of the output, which is the model's name in the card.
        finished_folder = run.work / "finished" / run.output.absolute().name
        try:
            shutil.rmtree(finished_folder, ignore_errors=True)
            finished_folder.mkdir(parents=True)
            _write(task, run, result, finished_folder)
            settle_folder(finished_folder)
            fill_folder(run.output, finished_folder)
            finished_folder.rmdir()
        except Exception as error:  # safetensors, torch and the system raise different errors
            reason = explain_refusal(error.__cause__ or error, elsewhere=False)
            if reason is None:
                raise
            with suppress(OSError):
                shutil.rmtree(finished_folder)
            raise UserError(
                f"the output {run.output} cannot be written: {reason}, then continue with --resume (the checkpoints "
                "are complete)"
            ) from error
        _tidy(run.output, run.options.keep_checkpoints)
    wait_for_all()
    return result


def _write(task: Task[Result], run: Run, result: Result, folder: Path) -> None:
    """Write model, image processor, plot, record and model card into a folder."""
    result.model.save_pretrained(folder)
    run.processor.save_pretrained(folder)
    plot_learning_curve(result.history, folder / "learning_curve.png")
    data = run.data
    record = make_record(
        "training",
        command=run.command,
        seed=run.options.seed,
        data=DataFact(
            name=data.name,
            fingerprint=data.fingerprint,
            split="train",
            size=data.num_examples("train"),
            revision=data.revision,
        ),
        seconds=result.seconds,
        device=run.options.device,
        values=task.values(run, result, collect_run_values(run, result)),
    )
    append_record(folder, record)
    base = run.source.path if run.source.family else None
    write_trained(folder, task.list_training_digests(run), [base] if base else [])
    task.write(run, result, folder)
    write_card(folder, share_images=run.options.share_images)


def _tidy(output: Path, keep_checkpoints: bool) -> None:
    """Remove the checkpoints of a finished model; they are renamed first, so that a kill leaves no partial run."""
    work = get_work_folder(output)
    removed = output / _REMOVED
    if not keep_checkpoints and work.exists():
        shutil.rmtree(removed, ignore_errors=True)
        work.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def collect_run_values(run: Run, result: TrainingResult) -> dict[str, Any]:
    """Return the values that the record of every task has, with settings of the model that the recipe leaves open."""
    images_seen = _count_images_seen(run, result.steps)
    model_values = {
        "image_size": run.config.image_size,
        "dropout": getattr(run.config, "hidden_dropout_prob", None),  # ResNets have none
        "drop_path": getattr(run.config, "drop_path_rate", None),
        "architecture": {name: getattr(result.model.config, name, None) for name in run.recipe.architecture},
    }
    has_weights = run.source.has_weights
    values = {
        "recipe": run.recipe.settings() | model_values,
        "steps": result.steps,
        "planned_steps": run.steps,
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "micro_batch_size": run.micro_batch_size,
        "world_size": world_size(),
        "precision": "bf16" if run.bf16 else "fp32",
        "images_seen": images_seen,
        "images_per_second": round(images_seen / result.seconds, 2) if result.seconds else None,
        # The base name alone of a local path, which the card would take for a model of the Hub.
        "base_model" if has_weights else "variant": get_source_name(run.source),
    }
    others = {
        "training_loss": next((entry["loss"] for entry in reversed(result.history) if "loss" in entry), None),
        # The test split is evaluated in the precision of the saved weights.
        "validation_precision": "bf16" if run.bf16 else None,
        **(record_base_license(find_license(run.source.name)) if has_weights else {}),
        "origin": run.source.plan.origin if has_weights and run.source.family is None else None,
        "streaming": run.options.streaming or None,
        "cache_features": run.options.cache_features or None,
        "skipped_images": len(run.data.skipped) or None,
    }
    return values | {name: value for name, value in others.items() if value is not None}


def _count_images_seen(run: Run, steps: int) -> int:
    """Return how many images the steps processed: the last batch of an epoch of a table may be smaller than others."""
    batch = run.recipe.batch_size
    images = run.data.num_examples("train")
    copies = 1 + run.task.get("unlabelled_ratio", 0)  # a labeled image has so many unlabeled ones beside it
    if not images or run.data.readers or run.task.get("objective") == "contrastive":
        return steps * batch * copies
    epochs, remaining_steps = divmod(steps, math.ceil(images / batch))
    return (epochs * images + remaining_steps * batch) * copies


def plot_learning_curve(log_history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw loss and score over the epochs; return False and write no file if the log has no loss."""

    def list_points(key: str) -> list[tuple[float, float]]:
        return [(entry["epoch"], entry[key]) for entry in log_history if key in entry and "epoch" in entry]

    losses = {"training": list_points("loss"), "validation": list_points("eval_loss")}
    if not any(losses.values()):
        return False
    panels = [("loss", losses)]  # in nats for classifiers only
    for key, name in _SCORES.items():
        percentages = [(epoch, 100 * value) for epoch, value in list_points(key)]
        if percentages:
            panels.append((f"{name} (%)", {"validation": percentages}))
            break  # a task has one score
    figure = make_figure(9 if len(panels) > 1 else 5, 3.6)
    for number, (label, curves) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for name, points in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else "")
                axes.set_xlabel("epoch")
                axes.grid(visible=True, alpha=0.3)
        axes.set_ylabel(label)
        axes.legend()
    save_figure(figure, path)
    return True
