"""The training itself: a prepared `Run` through `HfViTTrainer`, and its failures in one line each."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.nn import functional as F
from transformers import EarlyStoppingCallback, EvalPrediction, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

from hf_vit.data import ImageCollator, eval_transform, train_transform, transform_split
from hf_vit.errors import DivergedError, UserError, is_out_of_memory
from hf_vit.models.linear_hf_vit import EMULATES_BFLOAT16
from hf_vit.subjects.device import pick_device
from hf_vit.training.finetuning import Run
from hf_vit.training.run.checkpoints import (
    find_best,
    has_ended,
    is_full_disk,
    last_complete,
    read_state,
    remove_incomplete,
)
from hf_vit.training.run.processes import is_first, world_size
from hf_vit.training.trainer.adapters import LoraAdapter, train_head_only
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.losses import BinaryCrossEntropy
from hf_vit.training.trainer.optimizers import optimizer_of
from hf_vit.training.trainer.progress import Clock, LiveProgress
from hf_vit.training.trainer.sam import SharpnessAware

_Kind = TypeVar("_Kind", bound=TrainerCallback)
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
# What remains between two checkpoints of equal accuracy; below the smallest difference of accuracies.
_LOSS_WEIGHT = 1e-6


def train(run: Run, say: Callable[[str], None], build: Callable[[Run], HfViTTrainer]) -> tuple[HfViTTrainer, float]:
    """Train a run to its end, from its checkpoint if it has one, with the trainer that `build` makes of it.

    Returns:
        The trainer with the best checkpoint's weights in its model, and the seconds spent training in all sessions.

    Raises:
        UserError: a full disk, too little memory, a loss that is not a number.
    """
    trainer = build(run)
    with _explained(run, trainer):
        if run.checkpoint is None:
            trainer.train()
        else:
            find_best(run.checkpoint)
            if has_ended(run.checkpoint):
                say("the training itself had ended")
                _take_up(trainer, run)
            else:
                trainer.train(resume_from_checkpoint=str(run.checkpoint))
    return trainer, next(clock for clock in _callbacks(trainer, Clock)).seconds


def build_trainer(run: Run, kind: type[HfViTTrainer] = HfViTTrainer, **extras: Any) -> HfViTTrainer:
    """The trainer of a classifier's run, ready to go; `extras` are what its `kind` wants beside a run's settings."""
    recipe, seed = run.recipe, run.options.seed
    training = train_transform(run.processor, recipe.augmentation, seed)
    augmentation = recipe.augmentation
    callbacks: list[Any] = [Clock()]
    if recipe.patience is not None:
        callbacks.append(EarlyStoppingCallback(recipe.patience))
    choose_attention(run, run.model)
    return kind(
        model=run.model,
        args=training_arguments(run),
        train_dataset=cast(Any, transform_split(run.data, "train", training, seed=seed)),
        eval_dataset=cast(Any, transform_split(run.data, "validation", eval_transform(run.processor))),
        data_collator=ImageCollator(
            len(run.data.label_names), augmentation.mixup_alpha, augmentation.cutmix_alpha, seed=seed
        ),
        processing_class=run.processor,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=summarize_logits,
        optimizer_cls_and_kwargs=optimizer_of(recipe),
        callbacks=callbacks,
        **weights_of(run),
        **extras,
    )


def choose_attention(run: Run, model: Any) -> None:
    """On CPUs under autocast torch's fused attention is slow backwards (2.5 times the whole step, measured).

    Where bfloat16 is emulated the fused one takes an eighth less memory for at most a sixteenth more time.
    """
    if run.bf16 and pick_device(run.options.device).type == "cpu" and not EMULATES_BFLOAT16:
        model.set_attn_implementation("eager")


def training_arguments(run: Run, **changes: Any) -> TrainingArguments:
    """A recipe in the words of transformers' Trainer; `changes` are what another objective needs otherwise."""
    recipe, options = run.recipe, run.options
    interval = max(1, -(-run.steps // recipe.evaluations))
    settings: dict[str, Any] = dict(
        output_dir=str(run.work),
        max_steps=run.steps,
        per_device_train_batch_size=run.micro_batch_size,
        per_device_eval_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=recipe.batch_size // (run.micro_batch_size * world_size()),
        ddp_find_unused_parameters=False,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=_SCHEDULES[recipe.schedule],
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        label_smoothing_factor=recipe.label_smoothing,
        bf16=run.bf16,
        use_cpu=pick_device(options.device).type == "cpu",
        eval_strategy="steps",
        save_strategy="steps",
        logging_strategy="steps",
        eval_steps=interval,
        save_steps=interval,
        logging_steps=interval,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        dataloader_num_workers=options.num_workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=options.seed,
        report_to="none",
        log_level="error",
        # Its default follows the log level; live progress is shown on terminals alone.
        disable_tqdm=False,
    )
    arguments = TrainingArguments(**(settings | changes))
    # Several visible GPUs would silently multiply the batch (DataParallel); torchrun is the way to use them.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # pyright: ignore[reportPrivateUsage]
    return arguments


def weights_of(run: Run) -> dict[str, Any]:
    """Which weights learn and which are released, as keywords of `HfViTTrainer`; an adapter is put into the model.

    Raises:
        UserError: peft is not installed, or the model has nothing to tune that way.
    """
    recipe = run.recipe
    settings: dict[str, Any] = {"layer_decay": recipe.layer_decay, "average_decay": recipe.average_decay}
    if recipe.sam_rho:
        settings["sharpness"] = SharpnessAware(recipe.sam_rho, recipe.sam_micro_batches)
    if recipe.loss == "bce":
        settings["compute_loss_func"] = BinaryCrossEntropy(recipe.bce_threshold)
    if recipe.tune == "head":
        train_head_only(run.model)
    elif recipe.tune == "lora":
        settings["adapter"] = LoraAdapter(run.model, recipe.lora_rank, recipe.lora_alpha)
    return settings


def summarize_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """What the metrics need of logits [B, K]: [B, 2], whether the first guess is right, and the log-likelihood."""
    first: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    right = (first.argmax(-1) == labels).float()
    return torch.stack([right, F.cross_entropy(first.float(), labels, reduction="none")], dim=-1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy, and the score by which the best checkpoint is chosen: accuracy first, then the smaller loss."""
    right, loss = np.asarray(prediction.predictions).T
    accuracy = float(right.mean())
    return {"accuracy": accuracy, "score": accuracy - _LOSS_WEIGHT * float(loss.mean())}


def _take_up(trainer: HfViTTrainer, run: Run) -> None:
    """The state of a training that had ended: its log, its clock and its best weights."""
    assert run.checkpoint is not None
    state = read_state(run.checkpoint)
    trainer.state = TrainerState(**state)
    clock = (state.get("stateful_callbacks") or {}).get("Clock")
    if clock:
        for callback in _callbacks(trainer, Clock):
            callback.earlier = float(clock["attributes"]["earlier"])
    trainer.load_released(state.get("best_model_checkpoint") or str(run.checkpoint))


def _callbacks(trainer: HfViTTrainer, kind: type[_Kind]) -> list[_Kind]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


def _tell_changed_files(run: Run, error: Exception) -> None:
    """Raise in place of an error that came of files which were taken away or changed while they were read."""
    if changes := run.data.changed_files():
        kept = last_complete(run.work)
        rest = f"go on from {kept.name} with --resume" if kept else "start again with --resume"
        raise UserError(f"of the training data {changes}; put it back as it was, then {rest}") from error


def _too_little_memory(run: Run) -> str:
    size, smaller = run.micro_batch_size, "smaller images or a smaller model"
    message = f"there is too little memory for {size} images at once; choose "
    if size > 1:
        contrasts = run.objective.get("objective") == "contrastive"  # whose batches cannot be accumulated
        flag = "--batch-size" if contrasts else "--micro-batch-size"
        same = "" if contrasts else " (the result stays the same)"
        message += f"a smaller {flag} than {size}{same}, {smaller}"
    else:
        message += smaller
    if last_complete(run.work) is None:
        return f"{message}, and start again with --resume"
    return f"{message}, in another --output"


@contextmanager
def _explained(run: Run, trainer: HfViTTrainer) -> Generator[None]:
    """Turn what can befall a training into one line that says how to go on."""
    try:
        yield
    except UserError as error:
        # From a loader's worker it arrives wrapped in the worker's traceback.
        kind = DivergedError if isinstance(error, DivergedError) else UserError
        raise kind(str(error).rpartition("UserError: ")[2].strip()) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(_too_little_memory(run)) from error
        if not is_full_disk(error):
            _tell_changed_files(run, error)
            raise
        with suppress(OSError):
            if is_first():
                remove_incomplete(run.work)
        kept = last_complete(run.work)
        rest = f"{kept.name} is complete: free space, then go on with --resume" if kept else "nothing was kept"
        raise UserError(f"the disk of {run.output} is full; {rest}") from error
    finally:
        for progress in _callbacks(trainer, LiveProgress):
            progress.close()
