"""A run in the words of transformers' Trainer."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_vit.environment import emulates_bfloat16, pick_device
from hf_vit.families import family_of
from hf_vit.training.processes import world_size
from hf_vit.training.run.decisions import Run
from hf_vit.training.trainer.adapters import LoraAdapter, train_head_only
from hf_vit.training.trainer.losses import BinaryCrossEntropy, WeightedCrossEntropy
from hf_vit.training.trainer.sam import SharpnessAware

_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def choose_attention(run: Run, model: PreTrainedModel) -> None:
    """On CPUs under autocast torch's fused attention is slow backwards (2.5 times the whole step, measured).

    Where bfloat16 is emulated the fused one takes an eighth less memory for at most a sixteenth more time.
    """
    if (family := family_of(run.config.model_type)) is None or not family.is_vit:
        return
    if run.bf16 and pick_device(run.options.device).type == "cpu" and not emulates_bfloat16():
        model.set_attn_implementation("eager")


def training_arguments(run: Run, **changes: Any) -> TrainingArguments:
    """A recipe in the words of transformers' Trainer; `changes` are what a task needs otherwise."""
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
        **schedule_of(run),
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        label_smoothing_factor=0.0 if run.data.multi_label else recipe.label_smoothing,
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
        report_to=options.report_to,
        log_level="error",
        # Its default follows the log level.
        disable_tqdm=False,
    )
    arguments = TrainingArguments(**(settings | changes))
    # Several visible GPUs would silently multiply the batch (DataParallel); torchrun is the way to use them.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # pyright: ignore[reportPrivateUsage]
    return arguments


def schedule_of(run: Run) -> dict[str, Any]:
    """The recipe's schedule of the learning rate in transformers' words, beside its warm-up."""
    recipe = run.recipe
    lowest = recipe.min_learning_rate / recipe.learning_rate
    if recipe.schedule == "cosine" and lowest:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": lowest}}
    if recipe.schedule != "warmup_stable_decay":
        return {"lr_scheduler_type": _SCHEDULES[recipe.schedule]}
    warmup, cooldown = (
        math.ceil(length * run.steps if length < 1 else length) for length in (recipe.warmup, recipe.cooldown)
    )
    settings = {
        "num_decay_steps": min(cooldown, max(1, run.steps - warmup)),
        "decay_type": "1-sqrt",
        "min_lr_ratio": lowest,
    }
    return {"lr_scheduler_type": recipe.schedule, "lr_scheduler_kwargs": settings}


def weights_of(run: Run) -> dict[str, Any]:
    """Which weights learn and which are released, as keywords of `HfViTTrainer`; an adapter is put into the model.

    Raises:
        UserError: peft is not installed, or the model has nothing to tune that way.
    """
    recipe = run.recipe
    settings: dict[str, Any] = {"layer_decay": recipe.layer_decay, "average_decay": recipe.average_decay}
    settings["repeated_augmentation"] = recipe.repeated_augmentation
    if recipe.sam_rho:
        settings["sharpness"] = SharpnessAware(recipe.sam_rho, recipe.sam_micro_batches)
    if recipe.loss == "bce":
        settings["compute_loss_func"] = BinaryCrossEntropy(recipe.bce_threshold)
    if recipe.class_weights:
        settings["compute_loss_func"] = WeightedCrossEntropy.balanced(_labels(run), len(run.data.label_names))
    if recipe.balanced_sampling:
        balanced = WeightedCrossEntropy.balanced(_labels(run), len(run.data.label_names)).weights
        settings["sampling_weights"] = [balanced[label] for label in _labels(run)]
    if recipe.tune == "head":
        train_head_only(run.model)
    elif recipe.tune == "lora":
        settings["adapter"] = LoraAdapter(run.model, recipe.lora_rank, recipe.lora_alpha)
    return settings


def _labels(run: Run) -> list[int]:
    """The classes of all training images; a stream's are not known (see `hf_vit.training.driver.check`)."""
    table: Any = run.data.split("train")
    return list(table["label"])
