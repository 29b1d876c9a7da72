"""The main job: train an image classifier on labelled images, judge it once on the test split, save it with facts."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hf_vit.errors import UserError
from hf_vit.training.processes import first_goes_first, is_first, need_same, told_by_first, world_size
from hf_vit.training.recipes import Recipe, find_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_vit.data import ImageData
    from hf_vit.evaluation import ClassificationResult
    from hf_vit.hub.push import PushResult
    from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
    from hf_vit.training.distillation import DistillationOptions, Distiller
    from hf_vit.training.model_source import ModelSource

Precision = Literal["auto", "fp32", "bf16"]
# What makes a run's model and image processor of: the source, the data, (height, width) px, the recipe.
Build = Callable[["ModelSource", "ImageData", tuple[int, int], Recipe], tuple[Any, Any]]
# The split of data that comes without validation or test is part of the data, not of a run: every seed of a training,
# and a later `hf-vit evaluate`, has the same test images.
SPLIT_SEED = 0
_LARGEST_MICRO_BATCH = 128
_BF16_FROM_WIDTH = 128


@dataclass(frozen=True)
class FinetuneOptions:
    """How to run a recipe; nothing here is meant to change what is learnt, but for the seed.

    Attributes:
        image_size: (height, width) px; None takes the recipe's, else the model's. Learned positions are resampled.
        micro_batch_size: images a forward pass; gradients are accumulated exactly up to the recipe's batch size. None
            chooses the largest divisor of it up to 128.
        precision: "bf16" computes in bfloat16 (weights stay float32); "auto" does where it pays.
        seed: of weights, order, augmentation and dropout.
        num_workers: processes that prepare images; 0 prepares them in this one.
        streaming: read the data while training; needs a recipe with `steps`, or data that tell their size.
        skip_bad_images: leave out unreadable images instead of stopping.
        resume: go on from the last complete checkpoint in the output folder.
        keep_checkpoints: keep OUTPUT/checkpoints when the run is complete.
        device: torch device; by default a GPU where there is one.
        push: repository on the Hub to share the finished model in; looked at before the training.
        private: make that repository private.
    """

    image_size: tuple[int, int] | None = None
    micro_batch_size: int | None = None
    precision: Precision = "auto"
    seed: int = 0
    num_workers: int = 0
    streaming: bool = False
    skip_bad_images: bool = False
    resume: bool = False
    keep_checkpoints: bool = False
    device: str | None = None
    push: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UserError(f"micro batch size {self.micro_batch_size} must be at least 1")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UserError(f"precision '{self.precision}' is unknown; choose auto, fp32 or bf16")
        if self.image_size is not None and min(self.image_size) < 1:
            raise UserError(f"image size {self.image_size[0]}x{self.image_size[1]} px must be at least 1x1")
        if self.num_workers < 0 or self.seed < 0:
            raise UserError(f"seed ({self.seed}) and number of workers ({self.num_workers}) cannot be negative")


@dataclass(frozen=True)
class FinetuneResult:
    """A finished training.

    Attributes:
        folder: holds model, processor, facts.json, learning_curve.png and README.md.
        model: the best checkpoint by validation accuracy, in evaluation mode.
        processor: its image processor.
        validation: accuracy and loss of that checkpoint on the validation split.
        test: measured once, on the untouched test split.
        steps, best_step: optimizer steps done, and the one the best checkpoint was taken after.
        seconds: spent training, evaluations and checkpoints included.
        history: the Trainer's log, one entry a logging or evaluation.
        pushed: what was shared on the Hub, if that was asked for.
    """

    folder: Path
    model: "PreTrainedModel"
    processor: Any
    recipe: Recipe
    validation: dict[str, float]
    test: "ClassificationResult"
    steps: int
    best_step: int
    seconds: float
    history: list[dict[str, Any]] = field(repr=False)
    pushed: "PushResult | None" = None


@dataclass
class Run:
    """Everything decided before the first step."""

    recipe: Recipe
    options: FinetuneOptions
    output: Path
    data: "ImageData"
    source: "ModelSource"
    model: Any
    processor: Any
    steps: int
    micro_batch_size: int
    bf16: bool
    checkpoint: Path | None
    command: str | Sequence[str] | None
    objective: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def work(self) -> Path:
        """Where checkpoints are."""
        return work_folder(self.output)


def work_folder(output: Path) -> Path:
    """OUTPUT/checkpoints, as an absolute path: checkpoints remember where the best one is."""
    from hf_vit.training.checkpoints import WORK_FOLDER

    return output.absolute() / WORK_FOLDER


def finetune(
    model: "str | HfViTBaseConfig",
    data: str,
    output: str | Path,
    *,
    recipe: str | Recipe = "default-small",
    distillation: "DistillationOptions | None" = None,
    options: FinetuneOptions | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **overrides: Any,
) -> FinetuneResult:
    """Fine-tune a checkpoint, or train a variant from scratch, and leave a complete model folder.

    Bad input raises before any training. A killed run leaves its last complete checkpoint in OUTPUT/checkpoints, and
    with `resume` goes on to the numbers that it would have had. Under torchrun or accelerate launch all processes train
    together; every one returns the result, and the first alone writes, reports and pushes.

    Args:
        model: a folder, a variant such as "S/16" or "Ti/4" (fresh weights), a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or with `resume` that of the run.
        recipe: a name of `RECIPES`, or a recipe.
        distillation: a teacher, and what is learnt from it beside the labels.
        options: how to run it.
        command: what was typed, for the facts.
        report: is told what is being done, a line at a time.
        **overrides: values of the recipe or its augmentation; None changes nothing.

    Raises:
        UserError: bad input, a full disk, too little memory, a loss that is not a number, or a push that failed (the
            model is complete then).
    """
    say = told_by_first(report)
    options = options or FinetuneOptions()
    chosen = (find_recipe(recipe) if isinstance(recipe, str) else recipe).override(**overrides)
    with quiet_transformers():
        if distillation is not None and chosen.loss == "bce":
            raise UserError("a teacher is learnt from with the softmax cross-entropy; choose --loss ce")
        learning = None if distillation is None else _distiller(distillation, options.device)
        build = learning.build if learning else build_for_classes
        settings = learning.settings() if learning else None
        with first_goes_first(options.device):
            run = prepare(model, data, Path(output), chosen, options, command, say, build, settings)
        need_same("training data", run.data.fingerprint)
        from hf_vit.training.completion import complete
        from hf_vit.training.running import build_trainer, train

        trainer, seconds = train(run, say, learning.build_trainer if learning else build_trainer)
        result = complete(run, trainer, seconds)
        return result if options.push is None or not is_first() else _share(result, options.push, options.private, say)


def _distiller(options: "DistillationOptions", device: str | None) -> "Distiller":
    from hf_vit.training.distillation import Distiller

    return Distiller(options, device)


def _share(result: FinetuneResult, repo_id: str, private: bool, say: Callable[[str], None]) -> FinetuneResult:
    from hf_vit.training.sharing import share_finished

    return replace(result, pushed=share_finished(result.folder, repo_id, say, private=private))


def prepare(
    model: "str | HfViTBaseConfig",
    data: str,
    output: Path,
    recipe: Recipe,
    options: FinetuneOptions,
    command: str | Sequence[str] | None,
    say: Callable[[str], None],
    build: Build,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Check everything that can be wrong, cheapest first, and build the model.

    `settings` are those of the objective, which a resumed run must share beside the recipe's.
    """
    from transformers import set_seed

    from hf_vit.data import check_images, load_data
    from hf_vit.models.configuration_hf_vit import as_pair
    from hf_vit.training.model_source import find_model

    micro = micro_batch_size(recipe.batch_size, options.micro_batch_size)
    if recipe.optimizer in ("lamb", "lion"):
        import_timm_optim(recipe.optimizer)
    if options.push is not None and is_first():
        from hf_vit.training.sharing import check_before

        check_before(options.push, say, private=options.private)
    checkpoint = open_output(output, options.resume, say)
    source = find_model(model)
    size = options.image_size or recipe.image_size or as_pair(source.config.image_size)
    images = load_data(
        data,
        streaming=options.streaming,
        skip_bad_images=options.skip_bad_images,
        image_size=size,
        seed=SPLIT_SEED,
    )
    images = check_images(images, source.config.patch_stride, options.skip_bad_images)
    for note in images.notes:
        say(f"note: {note}")
    if images.skipped:
        say(f"left out {len(images.skipped)} unreadable images")
    for split in ("train", "validation", "test"):
        images.split(split)
    set_seed(options.seed)
    built, processor = build(source, images, size, recipe)
    steps = total_steps(recipe, images.num_examples("train"))
    run = Run(recipe, options, output, images, source, built, processor, steps, micro, False, checkpoint, command)
    run.bf16, run.objective = use_bf16(options, built), settings or {}
    check_disk(run)
    enter_run(run, run.objective)
    say(describe(run))
    return run


def build_for_classes(
    source: "ModelSource", data: "ImageData", image_size: tuple[int, int], recipe: Recipe, **fields: Any
) -> tuple[Any, Any]:
    """A classifier of the data's classes, and its image processor; `fields` are of the classifier's configuration."""
    from hf_vit.training.model_source import build_classifier, build_processor

    classifier = build_classifier(
        source,
        data.label_names,
        image_size=image_size,
        dropout=recipe.dropout,
        drop_path=recipe.drop_path,
        head_bias=recipe.initial_head_bias(len(data.label_names)),
        **fields,
    )
    return classifier, build_processor(source, cast(Any, classifier.config))


def open_output(output: Path, resume: bool, say: Callable[[str], None]) -> Path | None:
    """Make sure that the output folder is free, or holds a run to be resumed.

    Returns:
        The checkpoint to go on from; None to start.

    Raises:
        UserError: it holds something else, or is no folder.
    """
    from hf_vit.training.checkpoints import RUN_NAME, last_complete, remove_incomplete

    if output.exists() and not output.is_dir():
        raise UserError(f"the output {output} is a file; choose a new or empty folder")
    inside = sorted(path.name for path in output.iterdir()) if output.exists() else []
    work = work_folder(output)
    if not is_first():  # the first process has looked
        return last_complete(work) if resume else None
    if not inside:
        if resume:
            say(f"{output} holds no run to resume; it is started anew")
        return None
    if not (work / RUN_NAME).is_file():
        finished = {"config.json", "facts.json"} <= set(inside)
        held = "a finished model" if finished else f"something else ({', '.join(inside[:3])})"
        more = " (there is nothing to resume)" if finished and resume else ""
        raise UserError(f"the output folder {output} holds {held}{more}; choose a new or empty one")
    if not resume:
        raise UserError(f"{output} holds an unfinished run; go on with --resume, or delete the folder")
    for name in remove_incomplete(work):
        say(f"removed {name}, which was not written to its end")
    checkpoint = last_complete(work)
    say(f"going on from {checkpoint.name}" if checkpoint else "no checkpoint is complete yet: starting from step 0")
    return checkpoint


def micro_batch_size(batch_size: int, asked: int | None) -> int:
    """Images a forward pass of one process.

    Raises:
        UserError: the processes, or the asked number, do not divide the batch.
    """
    share, rest = divmod(batch_size, world_size())
    if rest:
        raise UserError(
            f"{world_size()} processes do not divide the batch size {batch_size}; choose a multiple of their number"
        )
    if asked is None:
        return next(size for size in range(min(share, _LARGEST_MICRO_BATCH), 0, -1) if share % size == 0)
    if share % asked:
        of_each = "" if world_size() == 1 else f" of which each of {world_size()} processes has {share}"
        raise UserError(
            f"micro batch size {asked} does not divide the batch size {batch_size}{of_each}; choose a divisor of it"
        )
    return asked


def total_steps(recipe: Recipe, images: int | None) -> int:
    """Optimizer steps of a recipe.

    Raises:
        UserError: epochs of a stream whose length is unknown.
    """
    if recipe.steps is not None:
        return recipe.steps
    assert recipe.epochs is not None
    if images is None:
        raise UserError("the length of this stream is unknown, so epochs cannot be counted; give --steps instead")
    return max(1, math.ceil(recipe.epochs * math.ceil(images / recipe.batch_size)))


def use_bf16(options: FinetuneOptions, model: Any) -> bool:
    """Whether to compute in bfloat16.

    Raises:
        UserError: bf16 was asked for and the GPU has none.
    """
    import torch

    from hf_vit.evaluation.loading import pick_device

    device = pick_device(options.device)
    if options.precision == "fp32":
        return False
    if device.type == "cuda":
        if options.precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise UserError("this GPU cannot compute in bf16; use --precision fp32")
        return torch.cuda.is_bf16_supported()
    if options.precision == "bf16":
        return True
    # CPUs without matrix units are slower in bf16, and narrow models lose more by casts than products gain.
    return bool(_cpu_capabilities().get("amx_bf16")) and model.config.hidden_size >= _BF16_FROM_WIDTH


def _cpu_capabilities() -> Mapping[str, Any]:
    import torch

    # Not in torch 2.11, the oldest supported.
    read = getattr(torch.cpu, "get_capabilities", None)
    return read() if read is not None else {}


def check_disk(run: Run) -> None:
    """Raise before training if the disk has no room for the finished model and three checkpoints (one being written).

    Raises:
        UserError: see `need_space`.
    """
    from hf_vit.training.checkpoints import need_space

    weights = sum(parameter.numel() * 4 for parameter in run.model.parameters())
    state = weights * {"adamw": 2, "lamb": 2, "sgd": 1, "lion": 1}[run.recipe.optimizer]
    if run.recipe.average_decay is not None or run.recipe.tune == "lora":
        state += weights  # what training goes on from, beside what is released
    # 16 MiB for processor, code, pictures and the files' own overhead.
    need_space(run.output, weights + 3 * (weights + state) + (16 << 20))


def import_timm_optim(optimizer: str) -> Any:
    """timm's optimizers.

    Raises:
        UserError: timm is not installed.
    """
    try:
        from timm import optim
    except ImportError as error:
        raise UserError(
            f"the optimizer {optimizer} is timm's, which is not installed: pip install 'hf-vit[timm]'; or choose "
            "--optimizer adamw"
        ) from error
    return optim


def enter_run(run: Run, objective: Mapping[str, Any]) -> None:
    """Record how the run is started, or make sure that it is resumed with the same settings."""
    if not is_first():
        return
    from hf_vit.training.checkpoints import read_run, refuse_other_settings, write_run

    settings = {
        **objective,
        **{name: value for name, value in run.recipe.settings().items() if name not in ("name", "source")},
        "model": run.source.name if run.source.checkpoint is None else Path(run.source.name).name,
        "data": f"{run.data.name} {run.data.fingerprint}",
        "image_size": list(_pair(run.model.config.image_size)),
        "micro_batch_size": run.micro_batch_size,
        "total_steps": run.steps,
        "bf16": run.bf16,
        "seed": run.options.seed,
        "streaming": run.options.streaming,
        "world_size": world_size(),
    }
    if run.options.streaming:
        settings["num_workers"] = run.options.num_workers
    started = read_run(run.work)
    if started is None:
        write_run(run.work, settings)
    else:
        refuse_other_settings(started, settings, run.output)


def describe(run: Run) -> str:
    """What is about to be trained, in one line."""
    config = run.model.config
    height, width = _pair(config.image_size)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    images = run.data.num_examples("train")
    teacher = f", taught by {run.objective['teacher']}" if "teacher" in run.objective else ""
    return (
        f"{run.source.name} ({parameters:,} parameters, {height}x{width} px{teacher}) on {run.data.name}: "
        f"{'a stream' if images is None else f'{images:,} images'} of {len(run.data.label_names)} classes, "
        f"recipe {run.recipe.name}, {run.steps:,} steps of {run.recipe.batch_size} images in "
        f"{'bf16' if run.bf16 else 'fp32'}"
    )


def _pair(value: Any) -> tuple[int, int]:
    from hf_vit.models.configuration_hf_vit import as_pair

    return as_pair(value)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without a bar for every file that transformers writes, and without its advice: a training tells of itself."""
    from transformers.utils import logging

    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
