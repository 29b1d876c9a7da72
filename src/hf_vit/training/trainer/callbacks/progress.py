"""Callbacks: live progress on a terminal, lines in a log, and a clock that goes on counting in a resumed training."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

_Kind = TypeVar("_Kind", bound=TrainerCallback)
# What an evaluation logs -> what it is called.
SCORES = {
    "eval_accuracy": "validation accuracy",
    "eval_mean_iou": "validation mIoU",
    "eval_ap50": "validation AP50",
}


def callbacks_of(trainer: Trainer, kind: type[_Kind]) -> list[_Kind]:
    """The callbacks of one kind that a trainer has."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


class LiveProgress(TrainerCallback):
    """One line that shows steps, epoch, loss and the newest evaluation, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("training", news="", start=False)
        self._news: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.is_world_process_zero:
            self._bar.start()
            self._bar.start_task(self._task)
            self._bar.update(self._task, total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        scores = ((key, f"{name} {{:.2%}}") for key, name in SCORES.items())
        for key, text in (("epoch", "epoch {:.1f}"), ("loss", "loss {:.3f}"), *scores):
            if logs and key in logs:
                self._news[key] = text.format(logs[key])
        self._bar.update(self._task, news=", ".join(self._news.values()))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; also after an error."""
        self._bar.stop()


class LoggedProgress(TrainerCallback):
    """A line for every evaluation and, between them, one a minute, on standard error: for logs, where no bar lives.

    Args:
        step_loss: the loss of the step that was just taken.
        say: is told a line at a time.
    """

    interval = 60.0  # seconds

    def __init__(self, step_loss: Callable[[], float], say: Callable[[str], None] | None = None) -> None:
        self._step_loss = step_loss
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._logged: dict[str, float] = {}
        self._begin = self._last = 0.0
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._begin = self._last = time.perf_counter()
        self._first_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        self._logged |= logs or {}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # At a step that is evaluated the line comes with what that says.
        if time.perf_counter() - self._last >= self.interval and not control.should_evaluate:
            rate = kwargs["lr_scheduler"].get_last_lr()[0]
            self._tell(args, state, [f"loss {self._step_loss():.4f}", f"learning rate {rate:.2e}"])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        texts = {
            "loss": "loss {:.4f}",
            "learning_rate": "learning rate {:.2e}",
            "eval_loss": "validation loss {:.4f}",
            **{key: f"{name} {{:.2%}}" for key, name in SCORES.items()},
        }
        self._tell(args, state, [text.format(self._logged[key]) for key, text in texts.items() if key in self._logged])
        self._logged.clear()  # what is not logged again is old

    def _tell(self, args: TrainingArguments, state: TrainerState, news: list[str]) -> None:
        self._last = time.perf_counter()
        steps = state.global_step - self._first_step
        if not state.is_world_process_zero or not steps:  # before or after a training there is no pace
            return
        seconds = self._last - self._begin
        images = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        left = round(seconds / steps * (state.max_steps - state.global_step))
        pace = f"{images / seconds:,.1f} images/s, {timedelta(seconds=left)} left"
        self._say(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join([*news, pace])}")


class Clock(TrainerCallback, ExportableState):
    """Seconds spent training, those before an interruption (up to the resumed checkpoint) included."""

    def __init__(self) -> None:
        self.earlier = 0.0
        self._begin: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self.earlier + (0.0 if self._begin is None else time.perf_counter() - self._begin)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"earlier": self.seconds}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._begin = time.perf_counter()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.earlier, self._begin = self.seconds, None
