"""The plan of a run: everything that is decided before the first step, and the arguments of transformers' Trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments, ViTImageProcessor

from hf_vit.conversion.loading import Source
from hf_vit.cost.memory import measure_step
from hf_vit.data import ImageData
from hf_vit.data.labels import list_column
from hf_vit.environment import emulates_bfloat16, get_cpu_capabilities, measure_free_memory, pick_device
from hf_vit.errors import UserError
from hf_vit.families import find_family
from hf_vit.loading.folders import WORK_FOLDER
from hf_vit.loading.start import WITHOUT_POOLER
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, as_pair
from hf_vit.training.processes import make_refusal, world_size
from hf_vit.training.trainer.losses import BinaryCrossEntropy, WeightedCrossEntropy
from hf_vit.training.trainer.sam import SharpnessAware
from hf_vit.training.trainer.weights import LoraAdapter, train_head_only, train_last_blocks
from hf_vit_settings import FinetuneOptions, Recipe

_LARGEST_MICRO_BATCH = 128
_BF16_FROM_WIDTH = 128
_DENSE_PATCHES = 784  # of a Local-ViT, up to which attention takes no longer for all pairs than by its pattern
# Evaluations of fewer images in all are not limited, and a limited one has at least so many of each split.
_FEW_IMAGES, _LEAST_IMAGES = 10_000, 500
_MOST_INITIAL = 0.1  # share of the initial weights in an average without a note
_FLOAT32 = 4  # bytes
_NOTED_BYTES = 1 << 30  # a smaller step is not worth an estimate
_FLOATS_PER_CHANNEL = 16  # of every token and block that a backward pass needs, about
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def get_work_folder(output: Path) -> Path:
    """Return OUTPUT/checkpoints as an absolute path, which checkpoints store."""
    return output.absolute() / WORK_FOLDER


def log_folder(output: Path) -> Path:
    """Return OUTPUT/runs for TensorBoard's files; for a trial of a sweep a folder in it."""
    output = output.absolute()
    work = output.parent
    return work.parent / "runs" / output.name if work.name == WORK_FOLDER else output / "runs"


@dataclass(frozen=True)
class Start:
    """The model's source, the data and the image size (height, width) px, which all runs of a job share."""

    source: Source
    data: ImageData
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Job:
    """The arguments of a training, see `finetune`; `keeps_evaluations` if their number was given, not the recipe's."""

    model_name: str | HfViTBaseConfig
    data_name: str | ImageData
    output: Path
    recipe: Recipe
    options: FinetuneOptions
    command: str | Sequence[str] | None = None
    keeps_evaluations: bool = False

    @property
    def work(self) -> Path:
        """The folder of the checkpoints, OUTPUT/checkpoints."""
        return get_work_folder(self.output)


@dataclass(frozen=True, kw_only=True)
class Run(Job, Start):
    """A job with everything that is decided before its first step.

    Attributes:
        model: the module to train.
        processor: its image processor.
        task: settings of the task, see `Task.settings`.
        steps: number of optimizer steps.
        micro_batch_size: images per forward pass of one process.
        bf16: compute in bfloat16.
        checkpoint: the checkpoint to resume from, or None.
        trials: results of all trials of a sweep, of which this run is the best, or of `--tune auto`.
        reason: of `--tune auto`, why these weights are trained.
    """

    model: nn.Module
    processor: ViTImageProcessor
    task: Mapping[str, Any]
    steps: int
    micro_batch_size: int
    bf16: bool
    checkpoint: Path | None
    trials: Sequence[Mapping[str, Any]] = ()
    reason: str = ""

    @property
    def config(self) -> HfViTBaseConfig:
        """The configuration of the vision model, or of the backbone of a segmentation or detection model."""
        return get_vision_config(self.model)

    def describe(self) -> str:
        """Describe the run in one line."""
        height, width = as_pair(self.config.image_size)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        images = self.data.num_examples("train")
        classes = f" of {len(self.data.label_names)} classes" if len(self.data.label_names) > 1 else ""
        teacher = f", teacher {self.task['teacher']}" if "teacher" in self.task else ""
        return (
            f"{self.source.name} ({parameters:,} parameters, {height}x{width} px{teacher}) on {self.data.name}: "
            f"{'a stream' if images is None else f'{images:,} images'}{classes}, "
            f"recipe {self.recipe.name}, {self.steps:,} steps of {self.recipe.batch_size} images in "
            f"{'bf16' if self.bf16 else 'fp32'}"
        )


def get_vision_config(model: nn.Module) -> HfViTBaseConfig:
    """Return the configuration of the backbone if a model has one, else that of the model."""
    return cast(HfViTBaseConfig, getattr(model.config, "backbone_config", None) or model.config)


def micro_batch_size(batch_size: int, requested: int | None, accumulates: bool = True) -> int:
    """Return the images per forward pass of one process, by default the largest divisor of its share up to 128.

    Without gradient accumulation a process runs its whole share of the batch at once. Raises `UserError` if the batch
    cannot be divided among the processes, or into micro-batches of the requested size.
    """
    share, rest = divmod(batch_size, world_size())
    if rest:
        raise make_refusal("batch", processes=world_size(), batch_size=batch_size)
    if not accumulates:
        if requested not in (None, share):
            raise make_refusal("contrastive parts", share=share, parts=requested)
        return share
    if requested is None:
        return next(size for size in range(min(share, _LARGEST_MICRO_BATCH), 0, -1) if share % size == 0)
    if share % requested:
        shares = "" if world_size() == 1 else f", of which each of {world_size()} processes has {share}"
        raise UserError(
            f"the micro-batch size {requested} does not divide the batch size {batch_size}{shares}; choose a "
            "divisor for --micro-batch-size"
        )
    return requested


def count_steps(recipe: Recipe, images: int | None, drop_last: bool = False) -> int:
    """Return the optimizer steps of a recipe; raise UserError for epochs of a stream of unknown length.

    With `drop_last` an epoch has full batches only.
    """
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    if images is None:
        raise UserError(
            "the number of images in the stream is unknown, so epochs cannot be counted; give --steps instead"
        )
    round_batches = math.floor if drop_last else math.ceil
    return max(1, math.ceil(recipe.epochs * round_batches(images / recipe.batch_size)))


def limit_evaluation(run: Run) -> tuple[int, int | None]:
    """Return how often a training evaluates and on how many images, None for all, so that it does so no longer than
    it trains.

    A training step costs about three forward passes. Evaluations of fewer than `_FEW_IMAGES` in all, of streams and of
    masks and objects are not limited. A number of evaluations that was given stays.
    """
    evaluations = run.recipe.evaluations
    validation, test = (run.data.num_examples(split) for split in ("validation", "test"))
    if run.data.target != "label" or run.data.readers or run.options.cache_features or not (validation and test):
        return evaluations, None
    if "objective" in run.task:  # a pre-training is not tested
        test = 0
    allowed = 3 * run.steps * run.recipe.batch_size  # images that all evaluations together may have
    if evaluations * validation + test <= max(allowed, _FEW_IMAGES):
        return evaluations, None
    if not run.keeps_evaluations:
        evaluations = max(1, min(evaluations, (allowed - test) // validation))
    if evaluations * validation + test <= allowed:
        return evaluations, None
    return evaluations, max(_LEAST_IMAGES, allowed // (evaluations + 1))  # the test counts as one more


def note_limited_evaluation(run: Run) -> list[str]:
    """Return a note if a short training evaluates less often or on fewer images than its recipe says."""
    evaluations, images = limit_evaluation(run)
    if (evaluations, images) == (run.recipe.evaluations, None):
        return []
    times = "once" if evaluations == 1 else f"{evaluations} times"
    changes = [] if evaluations == run.recipe.evaluations else [f"{times} instead of {run.recipe.evaluations} times"]
    changes += [] if images is None else [f"on {images:,} images of each split"]
    return [
        f"a short training: it evaluates {', and '.join(changes)}, as it would otherwise evaluate longer than it "
        "trains; hf-vit evaluate measures all images"
    ]


def note_short_training(run: Run) -> list[str]:
    """Return notes if a training is too short for its warm-up or its average of weights, as a paper's on less data."""
    steps, recipe = run.steps, run.recipe
    notes: list[str] = []
    if recipe.warmup > steps:
        notes.append(
            f"the warm-up of {recipe.warmup:,g} steps is longer than the training of {steps:,}, so the learning rate "
            "never reaches its peak; give a shorter one, such as --warmup 0.1"
        )
    initial_share = (recipe.average_decay or 0.0) ** steps
    if initial_share > _MOST_INITIAL:
        notes.append(
            f"after {steps:,} steps the average of the weights, which is saved, still consists of the initial weights "
            f"by {initial_share:.0%}; give a smaller decay, such as --average-decay {max(0.0, 1 - 5 / steps):.3g}"
        )
    return notes


def note_memory(run: Run) -> list[str]:
    """Return a note on the memory of a large training step of a Vision Transformer classifier, from a step on tensors
    without values; none if only the head is trained, which needs little.
    """
    config: Any = run.model.config
    family = find_family(config.model_type)
    if family is None or not family.is_vit or not isinstance(run.model, family.classes["classification"]):
        return []
    if run.recipe.tune == "head":
        return []
    size = as_pair(config.image_size)
    tokens, blocks = math.prod(config.grid_of(*size)), config.num_hidden_layers
    if _FLOAT32 * _FLOATS_PER_CHANNEL * tokens * blocks * config.hidden_size * run.micro_batch_size < _NOTED_BYTES:
        return []
    shape = (run.micro_batch_size, config.num_channels, *size)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    gradients_and_adamw = 16 * parameters
    needed = measure_step(type(run.model), config, shape, run.bf16) + gradients_and_adamw
    device = pick_device(run.options.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else measure_free_memory()
    note = f"a step of {run.micro_batch_size} images needs about {needed / 1e9:.1f} GB of memory"
    return [f"{note}, but {free / 1e9:.1f} GB are free; choose a smaller --micro-batch-size" if needed > free else note]


def use_bf16(options: FinetuneOptions, config: HfViTBaseConfig) -> bool:
    """Return whether to compute in bfloat16; raise UserError if it is requested on a GPU without it."""
    if options.precision == "fp32":
        return False
    if pick_device(options.device).type == "cuda":
        if options.precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise UserError("this GPU does not support bf16; use --precision fp32")
        return options.precision == "bf16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if options.precision == "bf16":
        return True
    # bf16 is slower on CPUs without matrix units, and in narrow models, where casts cost more than products gain.
    return bool(get_cpu_capabilities().get("amx_bf16")) and config.hidden_size >= _BF16_FROM_WIDTH


def choose_attention(run: Run, model: PreTrainedModel) -> None:
    """Use eager attention for bfloat16 on CPUs, where the backward pass of torch's fused one is slow (2.5x per step).

    On CPUs that emulate bfloat16 the fused one needs 1/8 less memory and at most 1/16 more time, so it is kept; as it
    is for a Local-ViT of many patches, whose eager attention computes all pairs of them.
    """
    family = find_family(run.config.model_type)
    if family is None or not family.is_vit or (family.name == "local" and math.prod(run.config.grid) > _DENSE_PATCHES):
        return
    if run.bf16 and pick_device(run.options.device).type == "cpu" and not emulates_bfloat16():
        model.set_attn_implementation("eager")


def make_training_arguments(run: Run, **changes: Any) -> TrainingArguments:
    """Return a run's settings as arguments of transformers' Trainer; a task may replace some with `changes`."""
    recipe, options = run.recipe, run.options
    device = pick_device(options.device)
    evaluations, _ = limit_evaluation(run)
    interval = max(1, math.ceil(run.steps / evaluations))
    settings: dict[str, Any] = make_schedule_arguments(run) | dict(
        output_dir=str(run.work),
        max_steps=run.steps,
        per_device_train_batch_size=run.micro_batch_size,
        per_device_eval_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=recipe.batch_size // (run.micro_batch_size * world_size()),
        ddp_find_unused_parameters=False,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        label_smoothing_factor=0.0 if run.data.multi_label else recipe.label_smoothing,
        bf16=run.bf16,
        use_cpu=device.type == "cpu",
        **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), interval),
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        dataloader_num_workers=options.num_workers,
        dataloader_pin_memory=device.type == "cuda",
        seed=options.seed,
        report_to=options.report_to,
        **dict.fromkeys(("log_level", "log_level_replica"), "error"),
        disable_tqdm=False,  # its default depends on the log level
    )
    arguments = TrainingArguments(**(settings | changes))
    arguments.mixed_precision = "bf16" if run.bf16 else "no"  # whatever accelerate's configuration says
    # Otherwise DataParallel would multiply the batch by the number of visible GPUs.
    arguments._n_gpu = min(arguments.n_gpu, 1)  # pyright: ignore[reportPrivateUsage]
    if str(device).startswith("cuda:"):  # transformers would always take the first GPU
        torch.cuda.set_device(device)
        vars(arguments)["_setup_devices"] = device
    return arguments


def make_schedule_arguments(run: Run) -> dict[str, Any]:
    """Return the recipe's learning-rate schedule, except its warm-up, as arguments of the Trainer."""
    recipe = run.recipe
    min_ratio = recipe.min_learning_rate / recipe.learning_rate
    if recipe.schedule == "cosine" and min_ratio:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": min_ratio}}
    if recipe.schedule != "warmup_stable_decay":
        return {"lr_scheduler_type": _SCHEDULES[recipe.schedule]}
    # A number below 1 is a share of the training.
    durations = recipe.warmup, recipe.cooldown
    warmup, cooldown = (math.ceil(steps * run.steps if steps < 1 else steps) for steps in durations)
    decay_steps = min(cooldown, max(1, run.steps - warmup))
    settings = {"num_decay_steps": decay_steps, "decay_type": "1-sqrt", "min_lr_ratio": min_ratio}
    return {"lr_scheduler_type": recipe.schedule, "lr_scheduler_kwargs": settings}


def configure_weights(run: Run) -> dict[str, Any]:
    """Return keywords of `HfViTTrainer` for weights, loss and sampling; freeze weights or add an adapter in place."""
    recipe = run.recipe
    settings: dict[str, Any] = {
        "layer_decay": recipe.layer_decay,
        "average_decay": recipe.average_decay,
        "repeated_augmentation": recipe.repeated_augmentation,
    }
    if recipe.sam_rho:
        settings["sharpness"] = SharpnessAware(recipe.sam_rho, recipe.sam_micro_batches)
    if recipe.loss == "bce":
        settings["compute_loss_func"] = BinaryCrossEntropy(recipe.bce_threshold)
    if recipe.class_weights or recipe.balanced_sampling:
        # `hf_vit.training.run.check` has refused streams, whose labels are unknown.
        labels = list_column(cast(Any, run.data.split("train")), "label")
        balanced = WeightedCrossEntropy.balanced(labels, len(run.data.label_names))
        if recipe.class_weights:
            settings["compute_loss_func"] = balanced
        if recipe.balanced_sampling:
            settings["sampling_weights"] = [balanced.weights[label] for label in labels]
    if recipe.tune == "head":
        train_head_only(run.model)
    elif recipe.tune == "last-blocks":
        train_last_blocks(run.model, recipe.tuned_blocks)
    elif recipe.tune == "lora":
        settings["adapter"] = LoraAdapter(run.model, recipe.lora_rank, recipe.lora_alpha)
    poolers = [weight for name, weight in run.model.named_parameters() if ".pooler." in name]
    if poolers and run.source.door in WITHOUT_POOLER:  # these are new
        if run.options.cache_features:
            raise UserError(
                f"--cache-features needs a frozen backbone, but {run.source.name} was pre-trained without the pooling "
                "layer of its config, which is trained with the head; leave --cache-features out"
            )
        for weight in poolers:
            weight.requires_grad_(True)
    return settings
