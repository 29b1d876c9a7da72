"""The main job: train a model on images with labels, masks or boxes, judge it once on the test split, save it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hf_vit.errors import UserError
from hf_vit.evaluation.runners import running
from hf_vit.hub.card import refresh_card
from hf_vit.loading.start import own_head
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.training.driver import Job, carry_out, train_once
from hf_vit.training.processes import is_first, told_by_first, world_size
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run.options import FinetuneOptions, chosen_options
from hf_vit.training.sweeping import Sweep, rates_of
from hf_vit.training.tasks.classification import FinetuneResult
from hf_vit.training.tasks.distillation import DistillationOptions
from hf_vit.training.tasks.registry import TASKS, TaskChoices
from hf_vit.training.tasks.self_training import SelfTrainingOptions
from hf_vit.training.trainer.sharing import share_finished


def finetune(
    model: str | HfViTBaseConfig,
    data: str,
    output: str | Path,
    *,
    task: str = "classification",
    head: str | None = None,
    head_width: int | None = None,
    recipe: str | Recipe | None = None,
    distillation: DistillationOptions | None = None,
    self_training: SelfTrainingOptions | None = None,
    lr_sweep: bool | Sequence[float] = False,
    runner: str = "local",
    address: str | None = None,
    options: FinetuneOptions | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **settings: object,
) -> FinetuneResult:
    """Fine-tune a checkpoint, or train a variant from scratch, and leave a complete model folder.

    Bad input raises before any training. A killed run leaves its last complete checkpoint in OUTPUT/checkpoints, and
    with `resume` goes on to the numbers that it would have had. Under torchrun or accelerate launch all processes train
    together; every one returns the result, and the first alone writes, reports and pushes.

    Args:
        model: a folder, a variant such as "S/16" or "Ti/4" (fresh weights), a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or with `resume` that of the run.
        task: "classification", "segmentation" (of masks) or "detection" (of boxes).
        head: of segmentation "linear" (the default), "upernet" or "mask2former"; of detection "mask-rcnn" (the
            default), "detr" or "deformable-detr". A checkpoint for this task is trained on with its own by default.
        head_width: channels of that head; None is what its library takes.
        recipe: a name of `RECIPES`, or a recipe; None: "default-small", with `self_training` that of its kind's name,
            and "segmentation-small" or "detection-small".
        distillation: a teacher, and what is learnt from it beside the labels.
        self_training: a teacher, and images that it labels.
        lr_sweep: True tries every learning rate of the recipe's grid on the validation split, a sequence those; the
            best run is kept, and it alone looks at the test split.
        runner: "ray" trains the rates of a sweep at once: one on every GPU, or as many cores as here, of machines that
            share model, data and output under these names.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        options: how to run it, if not by keyword.
        command: what was typed, for the facts.
        report: is told what is being done, a line at a time.
        **settings: fields of `FinetuneOptions` (`image_size=32`, `seed=1`, `resume=True`), and values of the recipe or
            its augmentation (`epochs=5`, `mixup_alpha=0.2`); None changes nothing.

    Raises:
        UserError: bad input, a full disk, too little memory, a loss that is not a number, or a push that failed (the
            model is complete then).
    """
    say, (options, values) = told_by_first(report), chosen_options(options, settings)
    line = TASKS[_task_name(task, head, head_width, distillation, self_training)]
    named = line.recipe if recipe is None else recipe
    chosen = (find_recipe(named) if isinstance(named, str) else named).override(**values)
    rates = _rates(chosen, lr_sweep, task, runner)
    learning = line.make(
        TaskChoices(
            distillation=distillation,
            self_training=self_training,
            skip_bad_images=options.skip_bad_images,
            device=options.device,
            head=head or own_head(model, task),
            head_width=head_width,
        )
    )
    job = Job(model, data, Path(output), chosen, options, command)
    with running(runner, address, options.device) as ray:
        train = train_once if rates is None else Sweep(rates, ray)
        result: FinetuneResult = carry_out(learning, job, say, train)
    if options.push is None or not is_first():
        return result
    refresh_card(result.folder, license=options.license)
    shared = share_finished(
        result.folder, options.push, say, private=options.private, share_images=options.share_images
    )
    return replace(result, pushed=shared)


def _rates(recipe: Recipe, lr_sweep: bool | Sequence[float], task: str, runner: str) -> tuple[float, ...] | None:
    """Those of a sweep; None where there is none."""
    if runner == "ray" and (lr_sweep is False or world_size() > 1):
        raise UserError("Ray runs the rates of a sweep, one process each; give --lr-sweep without torchrun, or no ray")
    if lr_sweep is False:
        return None
    if task != "classification":
        raise UserError(f"learning rates are compared by accuracy, which {task} does not have; leave the sweep out")
    return rates_of(recipe, lr_sweep)


FINETUNED = ("classification", "segmentation", "detection")


def _task_name(
    task: str,
    head: str | None,
    head_width: int | None,
    distillation: DistillationOptions | None,
    self_training: SelfTrainingOptions | None,
) -> str:
    if task not in FINETUNED:
        raise UserError(f"there is no task '{task}' to fine-tune for; choose {', '.join(FINETUNED)}")
    if task == "classification" and (head or head_width) is not None:
        raise UserError("--head and --head-width are of segmentation and detection; give --task, or leave them out")
    if task != "classification" and (distillation is not None or self_training is not None):
        raise UserError(f"a teacher teaches classification, not {task}; leave one of the two out")
    if task != "classification":
        return task
    if distillation is not None and self_training is not None:
        raise UserError("a teacher teaches by distillation or labels images; give distillation or self_training")
    if self_training is not None:
        return self_training.kind
    return "classification" if distillation is None else "distillation"
