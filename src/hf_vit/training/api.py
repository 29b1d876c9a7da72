"""The main jobs: `finetune` on labels, masks or boxes, a sweep over learning rates included, and `pretrain` without."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.errors import DivergedError, UserError
from hf_vit.evaluation.runners import running
from hf_vit.hub.card import refresh_card
from hf_vit.loading.start import find_dense_head
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, as_pair
from hf_vit.training.plan import Job, Run, Start, use_bf16
from hf_vit.training.processes import is_first, report_on_first, world_size
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run import Say, read_run, run_job, seconds_of, train_once, write_run
from hf_vit.training.tasks.classification import Classification
from hf_vit.training.tasks.dense import Detection, Segmentation
from hf_vit.training.tasks.distillation import Distillation, DistillationOptions
from hf_vit.training.tasks.momentum_contrast import Contrast, ContrastiveOptions
from hf_vit.training.tasks.patch_prediction import NextPatch, PatchPrediction, RandomMasking
from hf_vit.training.tasks.self_training import MetaPseudoLabels, NoisyStudent, SelfTrainingOptions
from hf_vit.training.tasks.task import FinetuneResult, PretrainResult, Task, best_evaluation
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sharing import share_finished
from hf_vit_settings import RUN_FIELDS, FinetuneOptions

if TYPE_CHECKING:
    from hf_vit.evaluation.ray_runner import RayRunner

TASKS: dict[str, type[Any]] = {
    "classification": Classification,
    "distillation": Distillation,
    "noisy-student": NoisyStudent,
    "meta-pseudo-labels": MetaPseudoLabels,
    "segmentation": Segmentation,
    "detection": Detection,
    "masked-patch": PatchPrediction,
    "next-patch": PatchPrediction,
    "contrastive": Contrast,
}
FINETUNED = ("classification", "segmentation", "detection")
OBJECTIVES = [name for name, task in TASKS.items() if not task.has_labels]


def finetune(
    model: str | Path | HfViTBaseConfig,
    data: str | Path,
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
        distillation: a teacher, and what is learned from it beside the labels.
        self_training: a teacher, and images that it labels.
        lr_sweep: True tries every learning rate of the recipe's grid on the validation split, a sequence those; the
            best run is kept, and it alone looks at the test split.
        runner: "ray" trains the rates of a sweep at once: one on every GPU, or as many cores as here, of machines that
            share model, data and output under these names.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        options: how to run it, if not by keyword.
        command: what was typed, for the facts.
        report: gets a line at a time about what is being done.
        **settings: fields of `FinetuneOptions` (`image_size=32`, `seed=1`, `resume=True`), and values of the recipe or
            its augmentation (`epochs=5`, `mixup_alpha=0.2`); None changes nothing.

    Raises:
        UserError: bad input, a full disk, too little memory, a loss that is not a number, or a push that failed (the
            model is complete then).
    """
    say, name = report_on_first(report), _task_name(task, head, head_width, distillation, self_training)
    job = _job(name, model, data, output, recipe, options, command, settings)
    options = job.options
    if runner == "ray" and (lr_sweep is False or world_size() > 1):
        raise UserError(
            "--runner ray needs --lr-sweep and does not work under torchrun; add --lr-sweep, or leave the runner out"
        )
    if lr_sweep is not False and task != "classification":
        raise UserError(f"a learning-rate sweep compares accuracies, which {task} does not have; leave it out")
    rates = None if lr_sweep is False else _sweep_rates(job.recipe, lr_sweep)
    if task != "classification":
        learner = TASKS[task](head or find_dense_head(job.model_name, task), head_width)
    elif self_training is not None:
        learner = TASKS[name](self_training, options.device, options.skip_bad_images)
    else:
        learner = Classification() if distillation is None else Distillation(distillation, options.device)
    with running(runner, address, options.device) as ray:
        train = train_once if rates is None else partial(_sweep, rates, ray)
        result: FinetuneResult = run_job(learner, job, say, train)
    if options.push is None or not is_first():
        return result
    refresh_card(result.folder, license=options.license)
    shared = share_finished(
        result.folder, options.push, say, private=options.private, share_images=options.share_images
    )
    return replace(result, pushed=shared)


def _task_name(
    task: str,
    head: str | None,
    head_width: int | None,
    distillation: DistillationOptions | None,
    self_training: SelfTrainingOptions | None,
) -> str:
    """Return the line of `TASKS` that `finetune` was asked for."""
    if task not in FINETUNED:
        raise UserError(f"unknown task '{task}'; choose {', '.join(FINETUNED)}")
    if task == "classification" and (head or head_width) is not None:
        raise UserError("--head and --head-width need --task segmentation or detection; add it, or leave them out")
    if task != "classification" and (distillation is not None or self_training is not None):
        raise UserError(f"a teacher works for classification only, not {task}; leave one of the two out")
    if task != "classification":
        return task
    if distillation is not None and self_training is not None:
        raise UserError("distillation and self_training exclude each other; give one of them")
    if self_training is not None:
        return self_training.kind
    return "classification" if distillation is None else "distillation"


def _job(
    task: str,
    model: str | Path | HfViTBaseConfig,
    data: str | Path,
    output: str | Path,
    recipe: str | Recipe | None,
    options: FinetuneOptions | None,
    command: str | Sequence[str] | None,
    settings: Mapping[str, Any],
) -> Job:
    """Return a job with the `settings` of a caller: fields of the options, the others of the recipe."""
    chosen = {name: value for name, value in settings.items() if name in RUN_FIELDS and value is not None}
    if isinstance(chosen.get("image_size"), int):
        chosen["image_size"] = as_pair(chosen["image_size"])
    options = replace(options or FinetuneOptions(), **chosen)
    base = recipe or TASKS[task].recipe
    base = find_recipe(base) if isinstance(base, str) else base
    base = base.override(**{name: value for name, value in settings.items() if name not in RUN_FIELDS})
    return Job(str(model) if isinstance(model, Path) else model, str(data), Path(output), base, options, command)


def pretrain(
    model: str | Path | HfViTBaseConfig,
    data: str | Path,
    output: str | Path,
    *,
    objective: str = "masked-patch",
    recipe: str | Recipe | None = None,
    target: str = "mean_color",
    masking: RandomMasking | None = None,
    static_masks: bool = False,
    contrastive: ContrastiveOptions | None = None,
    class_token: bool | None = None,
    num_hidden_groups: int | None = None,
    causal: bool = False,
    options: FinetuneOptions | None = None,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **settings: object,
) -> PretrainResult:
    """Pre-train a variant or a checkpoint on images, whose labels are not looked at, and leave a complete model folder.

    Bad input raises before any training; a killed run goes on with `resume`, as `finetune`'s does.

    Args:
        model: a variant such as "S/16" or "Ti/4" (fresh weights), a folder, a Hub id, or a configuration.
        data, output, options, command, report, **settings: as of `finetune`.
        objective: a name of `OBJECTIVES`.
        recipe: a name of `RECIPES`, or a recipe; None takes the objective's small one.
        target: of patch prediction: "mean_color", "downsampled" or "pixels" (arXiv 2010.11929, B.1.2).
        masking: of "masked-patch"; by default the paper's.
        static_masks: every image keeps the mask it got first.
        contrastive: of "contrastive"; by default the paper's (arXiv 2104.02057).
        class_token: False: none, and the mean of the patches instead; None keeps the model's.
        num_hidden_groups: layers share weights in so many groups; None keeps the model's.
        causal: masked prediction with causal attention ("next-patch" always has it).

    Raises:
        UserError: bad input, a full disk, too little memory, or a loss that is not a number.
    """
    if objective not in OBJECTIVES:
        raise UserError(f"objective '{objective}' is unknown; choose {', '.join(OBJECTIVES)}")
    job = _job(objective, model, data, output, recipe, options, command, settings)
    fields: dict[str, Any] = {}
    if class_token is not None:
        fields |= {"pooling": "token" if class_token else "gap", "use_class_token": None}
    if num_hidden_groups is not None:
        fields["num_hidden_groups"] = num_hidden_groups
    if causal:
        fields["is_causal"] = True
    if objective == "contrastive":
        task: Task[PretrainResult] = Contrast(contrastive or ContrastiveOptions(), fields)
    else:
        policy = NextPatch() if objective == "next-patch" else masking or RandomMasking()
        task = PatchPrediction(target, policy, static_masks, fields)
    return run_job(task, job, report_on_first(report), train_once)


def _sweep_rates(recipe: Recipe, rates: bool | Sequence[float]) -> tuple[float, ...]:
    """Return the grid that was asked for, else the recipe's; each rate must be positive and come once."""
    rates = recipe.learning_rates if isinstance(rates, bool) else tuple(float(rate) for rate in rates)
    if not rates:
        raise UserError(f"the recipe {recipe.name} has no grid of learning rates; give --sweep-rates 0.001,0.003,0.01")
    for rate in rates:
        recipe.override(learning_rate=rate)
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise UserError(f"duplicate learning rate in {', '.join(map(str, rates))}; give each once")
    return rates


def _sweep(
    rates: Sequence[float], runner: "RayRunner | None", task: Task[Any], job: Job, start: Start, say: Say
) -> tuple[Run, HfViTTrainer]:
    """Train a job once for every rate, and take up the best one again (arXiv 2010.11929, section B.1.1).

    Every trial is a run of its own in OUTPUT/checkpoints, so a sweep that was killed continues where it was. Without a
    runner one rate comes after the other in this process. The run that is returned has all trials.
    """
    if start.data.multi_label:
        raise UserError("a learning-rate sweep compares accuracies, which multi-label data does not have; leave it out")
    settings, started = {"sweep_rates": list(rates)}, read_run(job.work)
    if started is not None and started != settings:
        begun = ",".join(f"{rate:g}" for rate in started.get("sweep_rates", [])) or "none"
        raise UserError(
            f"{job.output} was begun with the learning rates to sweep: {begun}; resume with the same, or "
            "choose another output folder"
        )
    if started is None and is_first():
        write_run(job.work, settings)
    jobs = [
        replace(job, output=job.work / f"rate-{rate:g}", recipe=job.recipe.override(learning_rate=rate))
        for rate in rates
    ]
    trials: dict[int, dict[str, Any]] = {}
    for number, trial in _try_all(jobs, runner, task, start, say):
        trials[number] = trial
        is_finite = trial["score"] is not None
        results = f"validation accuracy {trial['accuracy']:.2%}, loss {trial['loss']:.4f}" if is_finite else "diverged"
        say(f"learning rate {trial['learning_rate']:g}: {results}")
    finished = [number for number in sorted(trials) if trials[number]["score"] is not None]
    if not finished:
        raise UserError(
            f"the loss became infinite at every learning rate ({', '.join(map(str, rates))}); try lower ones"
        )
    best = jobs[max(finished, key=lambda number: trials[number]["score"])]
    say(f"resuming learning rate {best.recipe.learning_rate:g}")
    run, trainer = train_once(task, replace(best, options=replace(job.options, resume=True)), start, say)
    return replace(run, output=job.output, trials=[trials[number] for number in sorted(trials)]), trainer


def _try_all(
    jobs: list[Job], runner: "RayRunner | None", task: Task[Any], start: Start, say: Say
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and results on the validation split of every job, as they are done."""
    if runner is None:
        yield from ((number, _try(job, task, start, say)) for number, job in enumerate(jobs))
        return
    from hf_vit.evaluation.ray_runner import independent

    # What a lost machine began continues elsewhere, in the precision of this one, which takes the best up again.
    options = jobs[0].options
    precision = "bf16" if use_bf16(options, cast(HfViTBaseConfig, start.source.config)) else "fp32"
    jobs = [replace(job, options=replace(options, resume=True, precision=precision)) for job in jobs]
    yield from independent(runner, _try, jobs, task, start, _silent)


def _silent(line: str) -> None:
    """Drop what a process on another machine reports."""


def _try(job: Job, task: Task[Any], start: Start, say: Say) -> dict[str, Any]:
    names = ("accuracy", "loss", "score", "best_step", "seconds")
    trial: dict[str, Any] = {"learning_rate": job.recipe.learning_rate, **dict.fromkeys(names)}
    try:
        _, trainer = train_once(task, job, start, say)
    except DivergedError:
        return trial
    best = best_evaluation(trainer.state)
    trial |= {name: best[f"eval_{name}"] for name in ("accuracy", "loss", "score")}
    return trial | {"best_step": int(best["step"]), "seconds": round(seconds_of(trainer), 2)}
