"""`finetune` on labels, masks or boxes, with an optional learning-rate sweep, and `pretrain` without labels."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hf_vit.data import ImageData
from hf_vit.errors import DivergedError, UserError
from hf_vit.evaluation.runners import open_runner
from hf_vit.hub.card import refresh_card
from hf_vit.loading.start import find_dense_head
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, as_pair
from hf_vit.training.plan import Job, Run, Start, count_steps, use_bf16
from hf_vit.training.processes import is_main, report_on_main, world_size
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.run import ReportLine, get_seconds, make_trials_error, read_run, run_job, train_once, write_run
from hf_vit.training.tasks.classification import Classification, ClassifierTask
from hf_vit.training.tasks.dense import Detection, Segmentation
from hf_vit.training.tasks.distillation import Distillation, DistillationOptions
from hf_vit.training.tasks.momentum_contrast import Contrast, ContrastiveOptions
from hf_vit.training.tasks.patch_prediction import NextPatch, PatchPrediction, RandomMasking
from hf_vit.training.tasks.self_training import MetaPseudoLabels, NoisyStudent
from hf_vit.training.tasks.task import FinetuneResult, PretrainResult, Task, find_best_evaluation
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sharing import share_finished
from hf_vit.training.trainer.weights import LoraAdapter
from hf_vit_settings import RUN_FIELDS, FinetuneOptions, SelfTrainingOptions

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
# Share of the steps that each trial of --tune auto takes. A step costs one unit if only the head is trained, about two
# with LoRA and three with all weights, so that trials and training together cost at most 0.3 * (1 + 2 + 3) + 1 = 2.8
# times a training of the head alone, and less for the others.
_TRIAL_SHARE = 0.3
# Times the lowest rate of the recipe's grid: the fewer weights, the larger the best rate. These were the best of two or
# three for DINOv2-S/14 on 100 real images with AdamW (benchmarks/real_images.py, trials of its part "few").
_RATE_FACTORS = {"head": 100, "lora": 10, "all": 1}


def finetune(
    model: str | Path | HfViTBaseConfig,
    data: str | Path | ImageData,
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
    """Fine-tune a checkpoint, or train a variant from scratch, and write a complete model folder.

    Input is checked before training. A killed run leaves its last complete checkpoint in OUTPUT/checkpoints, and with
    `resume` it continues to the same results. Under torchrun or accelerate launch all processes train together and
    return the result; only the main process writes, reports and pushes.

    Args:
        model: a folder, a variant such as "S/16" or "Ti/4" (fresh weights), a Hub id, or a configuration.
        data: see `hf_vit.data.load_data`, or its result.
        output: a new or empty folder, or with `resume` the folder of the run.
        task: "classification", "segmentation" (masks) or "detection" (boxes).
        head: for segmentation "linear" (default), "upernet" or "mask2former"; for detection "mask-rcnn" (default),
            "detr" or "deformable-detr". A checkpoint for the task keeps its head by default.
        head_width: channels of the head; None for its library's default.
        recipe: a name in `RECIPES` or a recipe; by default "default-small", "segmentation-small" or "detection-small",
            or with `self_training` the recipe of its kind.
        distillation: a teacher, and the kind of distillation.
        self_training: a teacher, and the images that it labels.
        lr_sweep: True tries every learning rate of the recipe's grid, a sequence tries its rates. The run with the best
            validation score is kept, and only that one is evaluated on the test split. (`tune="auto"` of the recipe
            tries head, LoRA and all weights likewise, but for a share of the steps, and without `learning_rate` each at
            a rate of its own.)
        runner: "ray" trains the learning rates of a sweep together, each on a GPU or with as many cores as here. All
            machines need model, data and output under the same names.
        address: HOST:PORT of a Ray cluster; by default Ray is started on this machine.
        options: options of the run, if not given by keyword.
        command: the command line for the record.
        report: called with every progress message.
        **settings: fields of `FinetuneOptions` (`image_size=32`, `seed=1`, `resume=True`), of the recipe and of its
            augmentation (`epochs=5`, `mixup_alpha=0.2`); None changes nothing.

    Raises:
        UserError: the input is wrong, disk or memory are too small, the loss is NaN or infinite, or a push failed (in
            which case the model is complete).
    """
    report_line = report_on_main(report)
    task_key = _find_task(task, head, head_width, distillation, self_training)
    job = _make_job(task_key, model, data, output, recipe, options, command, settings)
    run_options = job.options
    has_rate = settings.get("learning_rate") is not None
    rates = _find_rates(job.recipe, task, lr_sweep, runner, has_rate)
    if task != "classification":
        training_task = TASKS[task](head or find_dense_head(job.model_name, task), head_width)
    elif self_training is not None:
        training_task = TASKS[task_key](self_training, run_options.device, run_options.skip_bad_images)
    else:
        training_task = Classification() if distillation is None else Distillation(distillation, run_options.device)
    with open_runner(runner, address, run_options.device) as ray:
        train = partial(_tune, has_rate or isinstance(recipe, Recipe)) if job.recipe.tune == "auto" else train_once
        if rates:
            train = partial(_sweep, rates, ray)
        result: FinetuneResult = run_job(training_task, job, report_line, train)
    if run_options.push is None or not is_main():
        return result
    refresh_card(result.folder, license=run_options.license)
    sharing = {"private": run_options.private, "share_images": run_options.share_images}
    return replace(result, pushed=share_finished(result.folder, run_options.push, report_line, **sharing))


def _find_task(
    task: str,
    head: str | None,
    head_width: int | None,
    distillation: DistillationOptions | None,
    self_training: SelfTrainingOptions | None,
) -> str:
    """Return the key in `TASKS` for the arguments of `finetune`; raise UserError if they do not go together."""
    if task not in FINETUNED:
        raise UserError(f"--task {task} is unknown; choose one of {', '.join(FINETUNED)}")
    if task != "classification":
        if distillation is not None or self_training is not None:
            raise UserError(f"a teacher can only be used for classification, not for {task}; leave the teacher out")
        return task
    if (head or head_width) is not None:
        raise UserError(
            "--head and --head-width only work with --task segmentation or detection; add such a --task, or "
            "leave them out"
        )
    if self_training is None:
        return "classification" if distillation is None else "distillation"
    if distillation is not None:
        raise UserError("distillation and self-training cannot be combined; give only one of them")
    return self_training.kind


def _make_job(
    task: str,
    model: str | Path | HfViTBaseConfig,
    data: str | Path | ImageData,
    output: str | Path,
    recipe: str | Recipe | None,
    options: FinetuneOptions | None,
    command: str | Sequence[str] | None,
    settings: Mapping[str, Any],
) -> Job:
    """Build a job; `settings` are fields of the options or of the recipe, which they change."""
    # NumPy's numbers would not be written to JSON, and some libraries refuse them.
    settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
    run_fields = {name: value for name, value in settings.items() if name in RUN_FIELDS and value is not None}
    if isinstance(run_fields.get("image_size"), int):
        run_fields["image_size"] = as_pair(run_fields["image_size"])
    run_options = replace(options or FinetuneOptions(), **run_fields)
    named = recipe or TASKS[task].recipe
    base = find_recipe(named) if isinstance(named, str) else named
    changed = base.override(**{name: value for name, value in settings.items() if name not in RUN_FIELDS})
    source = str(model) if isinstance(model, Path) else model
    data_name = str(data) if isinstance(data, Path) else data
    if isinstance(data, ImageData):
        run_options = replace(run_options, streaming=bool(data.readers))
    keeps_evaluations = settings.get("evaluations") is not None
    return Job(source, data_name, Path(output).expanduser(), changed, run_options, command, keeps_evaluations)


def pretrain(
    model: str | Path | HfViTBaseConfig,
    data: str | Path | ImageData,
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
    """Pre-train a variant or a checkpoint on images without labels, and write a complete model folder.

    Input is checked before training, and a killed run continues with `resume`, as in `finetune`.

    Args:
        model: a variant such as "S/16" or "Ti/4" (fresh weights), a folder, a Hub id, or a configuration.
        data, output, options, command, report, **settings: see `finetune`.
        objective: a name in `OBJECTIVES`.
        recipe: a name in `RECIPES` or a recipe; by default the objective's small recipe.
        target: of patch prediction, "mean_color", "downsampled" or "pixels" (arXiv 2010.11929, B.1.2).
        masking: for "masked-patch"; by default the paper's.
        static_masks: mask every image in the same way in all epochs.
        contrastive: for "contrastive"; by default the paper's (arXiv 2104.02057).
        class_token: False replaces the class token by the mean of the patches; None keeps the model's setting.
        num_hidden_groups: number of groups of layers that share weights; None keeps the model's setting.
        causal: use causal attention in masked prediction ("next-patch" always does).

    Raises:
        UserError: the input is wrong, disk or memory are too small, or the loss is NaN or infinite.
    """
    if objective not in OBJECTIVES:
        raise UserError(f"--objective {objective} is unknown; choose one of {', '.join(OBJECTIVES)}")
    job = _make_job(objective, model, data, output, recipe, options, command, settings)
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
    return run_job(task, job, report_on_main(report), train_once)


def _find_rates(
    recipe: Recipe, task: str, lr_sweep: bool | Sequence[float], runner: str, has_rate: bool
) -> tuple[float, ...] | None:
    """Return the learning rates of a sweep, given or the recipe's grid, or None without a sweep.

    Raises UserError for bad or repeated rates, and if a sweep does not work with the other arguments of `finetune`.
    """
    if runner == "ray" and lr_sweep is False:
        raise UserError("--runner ray runs the trials of --lr-sweep; add --lr-sweep, or leave --runner out")
    if runner == "ray" and world_size() > 1:
        raise UserError("--runner ray does not work under torchrun; start the command without torchrun")
    if lr_sweep is False:
        return None
    if has_rate:
        raise UserError("--lr-sweep and --sweep-rates try rates of their own; leave them or --learning-rate out")
    if recipe.tune == "auto":
        raise UserError("--lr-sweep and --tune auto each try several trainings; give only one of them")
    if task != "classification":
        raise UserError(f"--lr-sweep compares validation accuracies, but {task} has no accuracy; leave --lr-sweep out")
    rates = recipe.learning_rates if isinstance(lr_sweep, bool) else tuple(float(rate) for rate in lr_sweep)
    if not rates:
        raise UserError(
            f"the recipe {recipe.name} has no learning rates for --lr-sweep; give some, such as --sweep-rates "
            "0.001,0.003,0.01"
        )
    for rate in rates:
        recipe.override(learning_rate=rate)
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise UserError(f"the learning rates {', '.join(map(str, rates))} contain a duplicate; give every rate once")
    return rates


def _sweep(
    rates: Sequence[float], runner: "RayRunner | None", task: Task[Any], job: Job, start: Start, report_line: ReportLine
) -> tuple[Run, HfViTTrainer]:
    """Train a job with every learning rate, and return the best run with its trainer (arXiv 2010.11929, B.1.1).

    Every trial is a separate run in OUTPUT/checkpoints, so that a killed sweep can be resumed. The best trial is loaded
    again at the end. Without a runner the trials run one after the other in this process.
    """
    if start.data.multi_label:
        raise UserError("--lr-sweep compares validation accuracies, which multi-label data lacks; leave --lr-sweep out")
    _record_trials(job, {"sweep_rates": list(rates)})
    recipes = [job.recipe.override(learning_rate=rate) for rate in rates]
    jobs = [replace(job, output=job.work / f"rate-{recipe.learning_rate:g}", recipe=recipe) for recipe in recipes]
    trials: list[dict[str, Any]] = [{}] * len(jobs)
    for number, trial in _run_trials(jobs, runner, task, start, report_line):
        trials[number] = trial
        is_finite = trial["score"] is not None
        results = f"validation accuracy {trial['accuracy']:.2%}, loss {trial['loss']:.4f}" if is_finite else "diverged"
        report_line(f"learning rate {trial['learning_rate']:g}: {results}")
    finished_trials = [number for number, trial in enumerate(trials) if trial["score"] is not None]
    if not finished_trials:
        raise UserError(
            f"the loss became NaN or infinite at every learning rate ({', '.join(map(str, rates))}); give "
            "lower ones with --sweep-rates"
        )
    best = jobs[max(finished_trials, key=lambda number: trials[number]["score"])]
    report_line(f"loading the best trial (learning rate {best.recipe.learning_rate:g})")
    run, trainer = train_once(task, replace(best, options=replace(job.options, resume=True)), start, report_line)
    return replace(run, output=job.output, trials=trials), trainer


def _record_trials(job: Job, settings: dict[str, Any]) -> None:
    """Record which trials a run consists of, or raise UserError if it is resumed with others."""
    old_settings = read_run(job.work)
    if old_settings is None:
        if is_main():
            write_run(job.work, settings)
    elif old_settings != settings:
        raise make_trials_error(job.output, old_settings)


def _tune(
    has_own_rate: bool, task: Task[Any], job: Job, start: Start, report_line: ReportLine
) -> tuple[Run, HfViTTrainer]:
    """Try head, LoRA and all weights for a share of the steps, then train with the best one by validation.

    With AdamW, a grid of rates in the recipe and none from the user, each has one of `_RATE_FACTORS` times the lowest.
    Trials and training are separate runs in OUTPUT/checkpoints, so that a killed one can be resumed.
    """
    steps = count_steps(job.recipe, start.data.num_examples("train"))
    trial_steps = int(_TRIAL_SHARE * steps)
    if not trial_steps:
        raise UserError(
            f"--tune auto tries each choice for {_TRIAL_SHARE:.0%} of the steps, but the training has only {steps} and "
            f"needs {math.ceil(1 / _TRIAL_SHARE)}; train longer (--epochs), or give --tune head, lora or all"
        )
    lengths: dict[str, float] = {}
    for name in ("warmup", "cooldown"):
        length = getattr(job.recipe, name)  # steps or, if below 1, a share of the training
        lengths[name] = length if length < 1 else max(1, round(_TRIAL_SHARE * length))
    short = job.recipe.override(steps=trial_steps, evaluations=1, **lengths)
    one_rate = has_own_rate or job.recipe.optimizer != "adamw" or not job.recipe.learning_rates

    def make_trial(choice: str) -> Recipe:
        rate = job.recipe.learning_rate
        if not one_rate:
            rate = max(_RATE_FACTORS[choice] * min(job.recipe.learning_rates), job.recipe.min_learning_rate)
        return short.override(tune=choice, learning_rate=rate)

    recipes = {"head": make_trial("head")}
    try:
        lora = make_trial("lora")
        LoraAdapter(cast(Any, task.build(start, short)[0]))
        recipes["lora"] = lora
    except UserError as error:
        report_line(f"note: --tune auto tries no LoRA: {error}")
    recipes["all"] = make_trial("all")
    choices = ", ".join(f"{choice} (learning rate {recipe.learning_rate:g})" for choice, recipe in recipes.items())
    _record_trials(job, {"tune": f"auto, of {choices}"})
    trials: list[dict[str, Any]] = []
    for name, recipe in recipes.items():
        report_line(f"trying --tune {name}, learning rate {recipe.learning_rate:g}, {trial_steps:,} of {steps:,} steps")
        trial = replace(job, output=job.work / f"tune-{name}", recipe=recipe, keeps_evaluations=True)
        trials.append({"tune": name, **_run_trial(trial, task, start, report_line)})
    choice, reason = choose_tuning(trials)
    report_line(f"--tune auto chooses {choice}: {reason}")
    recipe = job.recipe.override(tune=choice, learning_rate=recipes[choice].learning_rate)
    best = replace(job, output=job.work / "chosen", recipe=recipe)
    run, trainer = train_once(task, best, start, report_line)
    return replace(run, output=job.output, trials=trials, reason=reason), trainer


def choose_tuning(trials: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return which weights to train, and the reason.

    The validation score decides. Of accuracies that differ by less than one standard error of their difference from the
    highest one, which is noise on few images, the smaller loss does.
    """
    finished = [trial for trial in trials if trial["score"] is not None]
    if not finished:
        raise UserError("the loss became NaN or infinite in every trial of --tune auto; give a smaller --learning-rate")
    best = max(finished, key=lambda trial: trial["score"])
    metric = next(name for name in ClassifierTask.metrics if name in best)
    scores = [f"{trial['tune']} {trial[metric]:.2%}" for trial in finished]
    scores += [f"{trial['tune']} diverged" for trial in trials if trial not in finished]
    reason = f"validation {metric.replace('_', ' ')} {', '.join(scores)}"
    if metric != "accuracy" or best["images"] is None:
        return best["tune"], reason

    def is_close(trial: Mapping[str, Any]) -> bool:
        # The variance of a difference is the sum of both, and that of an accuracy p on n images p (1 - p) / n.
        variance = sum(value * (1 - value) for value in (best[metric], trial[metric])) / best["images"]
        return best[metric] - trial[metric] <= math.sqrt(variance)

    close = list(filter(is_close, finished))
    if len(close) == 1:
        return best["tune"], reason
    losses = ", ".join(f"{trial['tune']} {trial['loss']:.4f}" for trial in close)
    names = " and ".join(trial["tune"] for trial in close)
    noise = f"differences of {names} may be chance on {best['images']:,} images"
    lowest = min(close, key=lambda trial: trial["loss"])
    return lowest["tune"], f"{reason}; {noise}, so the loss decides: {losses}"


def _run_trials(
    jobs: list[Job], runner: "RayRunner | None", task: Task[Any], start: Start, report_line: ReportLine
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, validation results) of every trial when it ends; with a runner in any order."""
    if runner is None:
        yield from ((number, _run_trial(job, task, start, report_line)) for number, job in enumerate(jobs))
        return
    from hf_vit.evaluation.ray_runner import run_independent

    # `resume`: another machine continues the trial of a lost one. The precision is fixed to that of this machine, which
    # loads the best trial at the end.
    options = jobs[0].options
    precision = "bf16" if use_bf16(options, cast(HfViTBaseConfig, start.source.config)) else "fp32"
    jobs = [replace(job, options=replace(options, resume=True, precision=precision)) for job in jobs]
    yield from run_independent(runner, _run_trial, jobs, task, start, lambda line: None)


def _run_trial(job: Job, task: Task[Any], start: Start, report_line: ReportLine) -> dict[str, Any]:
    """Train a job and return its validation results, which are None if the loss diverged."""
    metrics = ("mean_average_precision" if start.data.multi_label else "accuracy", "loss", "score")
    trial: dict[str, Any] = {"learning_rate": job.recipe.learning_rate}
    trial |= dict.fromkeys((*metrics, "best_step", "images", "seconds"))
    try:
        _, trainer = train_once(task, job, start, report_line)
    except DivergedError:
        return trial
    best = find_best_evaluation(trainer.state)
    if not math.isfinite(best["eval_score"]):  # the last step has spoiled the weights
        return trial
    images = cast(Any, trainer.eval_dataset)
    trial |= {name: best[f"eval_{name}"] for name in metrics}
    trial |= {"best_step": int(best["step"]), "images": len(images) if hasattr(images, "__len__") else None}
    return trial | {"seconds": round(get_seconds(trainer), 2)}
