"""A grid of learning rates tried on the validation split; the best run is kept (arXiv 2010.11929, section B.1.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.errors import DivergedError, UserError
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.training.driver import Job, Say, Start, Trained, train_once
from hf_vit.training.processes import is_first
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.run.checkpoints import RUN_NAME, read_run, work_folder, write_run
from hf_vit.training.run.decisions import use_bf16
from hf_vit.training.tasks.classification import best_evaluation
from hf_vit.training.tasks.task import Task

if TYPE_CHECKING:
    from hf_vit.evaluation.ray_runner import RayRunner


@dataclass(frozen=True)
class Trial:
    """What a learning rate gave on the validation split; None where the loss became infinite.

    Attributes:
        score: by which checkpoints and trials are compared: accuracy first, then the smaller loss.
        seconds: spent training.
    """

    learning_rate: float
    accuracy: float | None = None
    loss: float | None = None
    score: float | None = None
    best_step: int | None = None
    seconds: float | None = None

    def describe(self) -> str:
        """In one line."""
        if self.accuracy is None:
            return f"learning rate {self.learning_rate:g}: diverged"
        return f"learning rate {self.learning_rate:g}: validation accuracy {self.accuracy:.2%}, loss {self.loss:.4f}"


def rates_of(recipe: Recipe, asked: bool | Sequence[float]) -> tuple[float, ...]:
    """The grid: what was asked for, else the recipe's.

    Raises:
        UserError: there is none, a rate is no positive number, or one comes twice.
    """
    rates = recipe.learning_rates if isinstance(asked, bool) else tuple(float(rate) for rate in asked)
    if not rates:
        raise UserError(f"the recipe {recipe.name} has no grid of learning rates; give --sweep-rates 0.001,0.003,0.01")
    for rate in rates:
        recipe.override(learning_rate=rate)
    if len({trial_name(rate) for rate in rates}) < len(rates):
        raise UserError(f"a learning rate comes twice in {', '.join(map(str, rates))}; give each once")
    return rates


def trial_name(rate: float) -> str:
    """Folder of a trial in OUTPUT/checkpoints."""
    return f"rate-{rate:g}"


@dataclass(frozen=True)
class Sweep:
    """Trains a job once for every rate, and takes up the best one again (a `TrainJob` of the driver).

    Every trial is a run of its own in OUTPUT/checkpoints, so a sweep that was killed goes on where it was.

    Attributes:
        rates: see `rates_of`.
        runner: machines that share model, data and output; None: one rate after the other in this process.
    """

    rates: Sequence[float]
    runner: "RayRunner | None" = None

    def __call__(self, task: Task[Any], job: Job, start: Start, say: Say) -> Trained:
        """The best trial, whose `run.trials` are all and whose `run.output` is the job's.

        Raises:
            UserError: all diverged, the sweep was begun with other rates, or images have several classes each.
        """
        if start.data.multi_label:
            raise UserError("learning rates are compared by accuracy, which several classes an image do not have")
        enter_sweep(job.output, self.rates)
        trials = dict[int, Trial]()
        for number, trial in self._tried(task, [_job_of(job, rate) for rate in self.rates], start, say):
            trials[number] = trial
            say(trial.describe())
        finished = [trials[number] for number in sorted(trials) if trials[number].score is not None]
        if not finished:
            raise UserError(
                f"the loss became infinite at every learning rate ({', '.join(map(str, self.rates))}); try lower ones"
            )
        best = max(finished, key=lambda trial: trial.score or 0.0).learning_rate
        say(f"taking up learning rate {best:g} again")
        again = _job_of(job, best)
        trained = train_once(task, replace(again, options=replace(again.options, resume=True)), start, say)
        run = replace(trained.run, output=job.output, trials=[asdict(trials[number]) for number in sorted(trials)])
        return replace(trained, run=run)

    def _tried(self, task: Task[Any], jobs: list[Job], start: Start, say: Say) -> Iterator[tuple[int, Trial]]:
        """(number, trial) of every job, as they are done."""
        if self.runner is None:
            yield from ((number, _try(job, task, start, say)) for number, job in enumerate(jobs))
            return
        from hf_vit.evaluation.ray_tasks import independent

        # What a lost machine began goes on elsewhere, in the precision of this one, which takes the best up again.
        options = jobs[0].options
        precision = "bf16" if use_bf16(options, cast(HfViTBaseConfig, start.source.config)) else "fp32"
        jobs = [replace(job, options=replace(options, resume=True, precision=precision)) for job in jobs]
        yield from independent(self.runner, _try, jobs, task, start, _silent)


def enter_sweep(output: Path, rates: Sequence[float]) -> None:
    """Record a sweep in its folder, or make sure that it goes on with the same rates.

    Raises:
        UserError: it was begun otherwise.
    """
    work, settings = work_folder(output), {"sweep_rates": list(rates)}
    started = read_run(work) if (work / RUN_NAME).is_file() else None
    if started is not None and started != settings:
        begun = ",".join(f"{rate:g}" for rate in started.get("sweep_rates", [])) or "none"
        raise UserError(
            f"{output} was begun with the learning rates to sweep: {begun}; go on with the same, or choose another "
            "output folder"
        )
    if started is None and is_first():
        write_run(work, settings)


def _job_of(job: Job, rate: float) -> Job:
    return replace(
        job,
        output=work_folder(job.output) / trial_name(rate),
        recipe=job.recipe.override(learning_rate=rate),
    )


def _silent(line: str) -> None:
    """What a process on another machine tells."""


def _try(job: Job, task: Task[Any], start: Start, say: Say) -> Trial:
    rate = job.recipe.learning_rate
    try:
        trained = train_once(task, job, start, say)
    except DivergedError:
        return Trial(rate)
    best = best_evaluation(trained.trainer.state)
    return Trial(
        rate,
        best["eval_accuracy"],
        best["eval_loss"],
        best["eval_score"],
        int(best["step"]),
        round(trained.seconds, 2),
    )
