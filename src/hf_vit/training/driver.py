"""The one driver of training: prepare a run, train it or take it up again, complete its folder.

What is learnt is a `Task`'s; how, a recipe's.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.utils import logging as transformers_logging

from hf_vit.data import ImageData
from hf_vit.data.annotations import Target
from hf_vit.data.augmentation import open_policy
from hf_vit.environment import keep_freed_memory
from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.hub.card import write_card
from hf_vit.hub.licenses import need_license
from hf_vit.hub.preflight import check_repo_id
from hf_vit.loading.start import ModelSource, find_model
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, as_pair
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.trained_images import write_trained
from hf_vit.training.processes import first_goes_first, is_first, missing_explained, need_same, wait_for_all
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.run.checkpoints import find_best, has_ended
from hf_vit.training.run.data import load_images
from hf_vit.training.run.decisions import Run, micro_batch_size, total_steps, use_bf16, vision_config
from hf_vit.training.run.failures import explained
from hf_vit.training.run.learning_curve import LEARNING_CURVE_NAME, plot_learning_curve
from hf_vit.training.run.options import FinetuneOptions
from hf_vit.training.run.output import alone_in, deliver, is_finished, need_space_for, refuse_taken, tidy
from hf_vit.training.run.resuming import enter_run, find_checkpoint, take_up
from hf_vit.training.run.training_record import data_fact, run_values
from hf_vit.training.tasks.task import Result, Task, TrainingResult
from hf_vit.training.trainer.callbacks.progress import Clock, LiveProgress, callbacks_of
from hf_vit.training.trainer.callbacks.stopping import StopOnTermination
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import import_timm_optim
from hf_vit.training.trainer.sharding import whole_model
from hf_vit.training.trainer.sharing import check_before

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A training as it was asked for.

    Attributes:
        model: a folder, a variant, a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or that of the run to be resumed.
        recipe, options: how it is trained and run.
        command: what was typed, for the facts.
    """

    model: str | HfViTBaseConfig
    data: str
    output: Path
    recipe: Recipe
    options: FinetuneOptions
    command: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Start:
    """What every run of a job starts from, opened once: the model's source, the images, (height, width) px."""

    source: ModelSource
    data: ImageData
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Trained:
    """A run that was trained to its end, the trainer with its released weights, and the seconds spent training."""

    run: Run
    trainer: HfViTTrainer
    seconds: float


# What trains a job: once, or for every learning rate of a sweep.
TrainJob = Callable[[Task[Any], Job, Start, Say], Trained]


def carry_out(task: Task[Result], job: Job, say: Say, train: TrainJob) -> Result:
    """Do a job from its checks to its finished folder, which no other run can enter meanwhile.

    Bad input raises before anything is written, cheapest first. A run that is resumed and found finished is tidied up.

    Args:
        task: what is learnt.
        job: everything else that was asked for.
        say: is told what is being done, a line at a time.
        train: `train_once`, or more often.

    Raises:
        UserError: bad input, a full disk, too little memory, or a loss that is not a number.
    """
    with quiet_transformers(), missing_explained(job.options.process_timeout), ExitStack() as held:
        with first_goes_first(job.options.device, job.options.process_timeout):
            check(task, job, say)
            held.enter_context(alone_in(job.output))
            start = _opened(task, job, say)
        if start is None:
            return _finished(task, job, say)
        need_same("training data", start.data.fingerprint)
        result = complete(task, train(task, job, start, say))
        if (remark := task.remark(result)) is not None:
            say(remark)
        return result


def check(task: Task[Any], job: Job, say: Say) -> None:
    """Refuse what can be refused without opening anything.

    Raises:
        UserError: see `carry_out`.
    """
    task.check(job.recipe)
    micro_batch_size(job.recipe.batch_size, job.options.micro_batch_size, task.accumulates)
    if job.options.streaming and not task.streams:
        raise UserError("images with masks or boxes are not streamed; leave --streaming out")
    if job.options.streaming and (job.recipe.class_weights or job.recipe.balanced_sampling):
        raise UserError("the classes of a stream are not known beforehand; balance them without --streaming")
    if job.options.streaming and job.recipe.repeated_augmentation > 1:
        raise UserError(
            "the images of a stream come once an epoch; choose --repeated-augmentation 1, or no --streaming"
        )
    if job.recipe.optimizer in ("lamb", "lion", "muon"):
        import_timm_optim(job.recipe.optimizer)
    if job.recipe.augmentation.auto_augment is not None:
        open_policy(job.recipe.augmentation.auto_augment)
    if job.options.push is not None and is_first():
        check_repo_id(job.options.push)
        need_license(job.options.license, job.model if isinstance(job.model, str) else None)
        check_before(job.options.push, say, private=job.options.private)


def _opened(task: Task[Any], job: Job, say: Say) -> Start | None:
    """What the job starts from; None where it is to be resumed and is finished."""
    if job.options.resume and is_finished(job.output):
        return None
    refuse_taken(job.output, job.options.resume)
    return open_start(job, say, multi_label=task.multi_label, target=task.target)


def open_start(job: Job, say: Say, *, multi_label: bool = False, target: Target = "label") -> Start:
    """Find the model and load the images.

    Raises:
        UserError: there is no such model, or the data cannot be trained on.
    """
    source = find_model(job.model)
    size = job.options.image_size or job.recipe.image_size or as_pair(source.config.image_size)
    if (job.recipe.augmentation.random_crop or 0) >= min(size):
        raise UserError(
            f"--random-crop {job.recipe.augmentation.random_crop} reflects more than there is of images of "
            f"{size[0]}x{size[1]} px; choose less than {min(size)}"
        )
    images = load_images(job.data, source.config.patch_stride, size, job.options, say, multi_label, target)
    return Start(source, images, size)


def train_once(task: Task[Any], job: Job, start: Start, say: Say) -> Trained:
    """Prepare the run of a job and train it to its end, from its checkpoint if it has one.

    Raises:
        UserError: a full disk, too little memory, a loss that is not a number; other settings than the checkpoint's.
    """
    with first_goes_first(job.options.device, job.options.process_timeout):
        run = prepare(task, job, start, say)
    trainer = task.build_trainer(run)
    try:
        with explained(run, task.accumulates):
            _train(run, trainer, say)
    finally:
        for kind in (LiveProgress, StopOnTermination):
            for callback in callbacks_of(trainer, kind):
                callback.close()
    return Trained(run, trainer, callbacks_of(trainer, Clock)[0].seconds)


def prepare(task: Task[Any], job: Job, start: Start, say: Say) -> Run:
    """Decide everything, build the model, and enter the run into its folder.

    Raises:
        UserError: the task cannot be had with this model or data, the disk is too small, or a resumed run was started
            with other settings.
    """
    checkpoint = find_checkpoint(job.output, job.options.resume, say)
    keep_freed_memory()
    set_seed(job.options.seed)
    model, processor = task.build(start.source, start.data, start.image_size, job.recipe)
    run = Run(
        recipe=job.recipe,
        options=job.options,
        command=job.command,
        output=job.output,
        source=start.source,
        data=start.data,
        model=model,
        processor=processor,
        task=task.settings(),
        steps=total_steps(job.recipe, start.data.num_examples("train")),
        micro_batch_size=micro_batch_size(job.recipe.batch_size, job.options.micro_batch_size, task.accumulates),
        bf16=use_bf16(job.options, vision_config(model)),
        checkpoint=checkpoint,
    )
    need_space_for(run, task.kept_bytes())
    enter_run(run)
    say(task.describe(run))
    return run


def complete(task: Task[Result], trained: Trained) -> Result:
    """Judge the finished model, write everything beside the checkpoints, and move it into the output folder.

    Raises:
        UserError: the disk is full; the checkpoints stay.
    """
    run, trainer = trained.run, trained.trainer
    module = trainer.bare_model()
    for name in ("forward", "_original_forward"):  # accelerate's bfloat16 autocast, which the saved model lacks
        module.__dict__.pop(name, None)
    model = whole_model(task.released(module))
    model.eval()
    if (family := family_of(vision_config(model).model_type)) is not None and family.is_vit:
        # The attention that the saved model is loaded with; a head without sdpa keeps its own.
        model.set_attn_implementation("sdpa" if model._supports_sdpa else {"backbone_config": "sdpa"})  # pyright: ignore[reportPrivateUsage]
    result = task.conclude(run, model, trainer.state, trained.seconds)
    deliver(run, lambda folder: _write(task, run, result, folder))
    return result


def _train(run: Run, trainer: HfViTTrainer, say: Say) -> None:
    if run.checkpoint is None:
        trainer.train()
        return
    find_best(run.checkpoint)
    if has_ended(run.checkpoint):
        say("the training itself had ended")
        take_up(trainer, run.checkpoint)
    else:
        trainer.train(resume_from_checkpoint=str(run.checkpoint))


def _finished(task: Task[Result], job: Job, say: Say) -> Result:
    result = task.recall(job.output, job.recipe)
    say(f"{job.output} holds a finished model: there is nothing to resume")
    wait_for_all()
    if is_first():
        tidy(job.output, job.options.keep_checkpoints)
    return result


def _write(task: Task[Result], run: Run, result: Result, folder: Path) -> None:
    result.model.save_pretrained(folder)
    run.processor.save_pretrained(folder)
    plot_learning_curve(result.history, folder / LEARNING_CURVE_NAME)
    append_record(
        folder,
        new_record(
            "training",
            command=run.command,
            seed=run.options.seed,
            data=data_fact(run, "train", run.data.num_examples("train")),
            seconds=result.seconds,
            device=run.options.device,
            values=_values(run, result) | task.values(run, result),
        ),
    )
    base = run.source.checkpoint
    write_trained(folder, task.learnt_from(run), [base] if base else [])
    task.write(run, result, folder)
    write_card(folder, share_images=run.options.share_images)


def _values(run: Run, result: TrainingResult) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    return run_values(run, parameters, result.steps, result.seconds, result.history)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without a bar for every file that transformers writes, and without its advice: a training tells of itself."""
    verbosity, shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()
