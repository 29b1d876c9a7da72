"""The main job: train an image classifier on labelled images, judge it once on the test split, save it with facts."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hf_vit.errors import UserError
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run.preparing import (
    check_disk,
    describe,
    enter_run,
    micro_batch_size,
    open_output,
    total_steps,
    use_bf16,
    work_folder,
)
from hf_vit.training.run.processes import first_goes_first, is_first, need_same, told_by_first
from hf_vit.training.trainer.optimizers import import_timm_optim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_vit.data import ImageData
    from hf_vit.evaluation import ClassificationResult
    from hf_vit.hub.push import PushResult
    from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
    from hf_vit.training.model_source import ModelSource
    from hf_vit.training.tasks.distillation import DistillationOptions, Distiller
    from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

Precision = Literal["auto", "fp32", "bf16"]
# What makes a run's model and image processor of: the source, the data, (height, width) px, the recipe.
Build = Callable[["ModelSource", "ImageData", tuple[int, int], Recipe], tuple[Any, Any]]
# The split of data that comes without validation or test is part of the data, not of a run: every seed of a training,
# and a later `hf-vit evaluate`, has the same test images.
SPLIT_SEED = 0


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
        trials: every learning rate of a sweep and what it gave on the validation split (see `sweeping.Trial`).
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
    trials: Sequence[Mapping[str, Any]] = ()
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
    trials: Sequence[Mapping[str, Any]] = ()

    @property
    def work(self) -> Path:
        """Where checkpoints are."""
        return work_folder(self.output)


def finetune(
    model: "str | HfViTBaseConfig",
    data: str,
    output: str | Path,
    *,
    recipe: str | Recipe = "default-small",
    distillation: "DistillationOptions | None" = None,
    lr_sweep: bool | Sequence[float] = False,
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
        lr_sweep: True tries every learning rate of the recipe's grid on the validation split, a sequence those; the
            best run is kept, and it alone looks at the test split.
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
        from hf_vit.training.run.completion import complete
        from hf_vit.training.run.running import build_trainer, train

        known: list[ImageData] = []

        def trained(recipe: Recipe, folder: Path, how: FinetuneOptions) -> "tuple[Run, HfViTTrainer, float]":
            with first_goes_first(how.device):
                source = known[0] if known else data
                run = prepare(model, source, folder, recipe, how, command, say, build, settings)
            need_same("training data", run.data.fingerprint)
            known[:] = [run.data]
            return run, *train(run, say, learning.build_trainer if learning else build_trainer)

        if lr_sweep is False:
            outcome = trained(chosen, Path(output), options)
        else:
            outcome = _swept(chosen, Path(output), options, lr_sweep, trained, say)
        result = complete(*outcome)
        return result if options.push is None or not is_first() else _share(result, options.push, options.private, say)


def _swept(
    recipe: Recipe,
    output: Path,
    options: FinetuneOptions,
    asked: bool | Sequence[float],
    trained: "Callable[[Recipe, Path, FinetuneOptions], tuple[Run, HfViTTrainer, float]]",
    say: Callable[[str], None],
) -> "tuple[Run, HfViTTrainer, float]":
    """The best of a sweep over learning rates."""
    from hf_vit.training.sweeping import rates_of, sweep

    rates = rates_of(recipe, asked)
    if options.push is not None and is_first():
        from hf_vit.training.run.sharing import check_before

        check_before(options.push, say, private=options.private)
    with first_goes_first(options.device):
        open_output(output, options.resume, lambda line: None)

    def run_trial(rate: float, folder: Path, resume: bool) -> "tuple[Run, HfViTTrainer, float]":
        return trained(recipe.override(learning_rate=rate), folder, replace(options, push=None, resume=resume))

    return sweep(output, rates, options.resume, run_trial, say)


def _distiller(options: "DistillationOptions", device: str | None) -> "Distiller":
    from hf_vit.training.tasks.distillation import Distiller

    return Distiller(options, device)


def _share(result: FinetuneResult, repo_id: str, private: bool, say: Callable[[str], None]) -> FinetuneResult:
    from hf_vit.training.run.sharing import share_finished

    return replace(result, pushed=share_finished(result.folder, repo_id, say, private=private))


def prepare(
    model: "str | HfViTBaseConfig",
    data: "str | ImageData",
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

    from hf_vit.models.configuration_hf_vit import as_pair
    from hf_vit.training.model_source import find_model

    micro = micro_batch_size(recipe.batch_size, options.micro_batch_size)
    if recipe.optimizer in ("lamb", "lion"):
        import_timm_optim(recipe.optimizer)
    if options.push is not None and is_first():
        from hf_vit.training.run.sharing import check_before

        check_before(options.push, say, private=options.private)
    checkpoint = open_output(output, options.resume, say)
    source = find_model(model)
    size = options.image_size or recipe.image_size or as_pair(source.config.image_size)
    images = _load_images(data, source.config.patch_stride, size, options, say) if isinstance(data, str) else data
    set_seed(options.seed)
    built, processor = build(source, images, size, recipe)
    steps = total_steps(recipe, images.num_examples("train"))
    run = Run(recipe, options, output, images, source, built, processor, steps, micro, False, checkpoint, command)
    run.bf16, run.objective = use_bf16(options, built), settings or {}
    check_disk(run)
    enter_run(run, run.objective)
    say(describe(run))
    return run


def _load_images(
    data: str, min_size: tuple[int, int], size: tuple[int, int], options: FinetuneOptions, say: Callable[[str], None]
) -> "ImageData":
    """All three splits, every image readable."""
    from hf_vit.data import check_images, load_data

    images = load_data(
        data,
        streaming=options.streaming,
        skip_bad_images=options.skip_bad_images,
        image_size=size,
        seed=SPLIT_SEED,
    )
    images = check_images(images, min_size, options.skip_bad_images)
    for note in images.notes:
        say(f"note: {note}")
    if images.skipped:
        say(f"left out {len(images.skipped)} unreadable images")
    for split in ("train", "validation", "test"):
        images.split(split)
    return images


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
