"""Callbacks: live progress on a terminal, and a clock that goes on counting when a training is resumed."""

import time
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

_Kind = TypeVar("_Kind", bound=TrainerCallback)


def callbacks_of(trainer: Trainer, kind: type[_Kind]) -> list[_Kind]:
    """The callbacks of one kind that a trainer has."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


class LiveProgress(TrainerCallback):
    """One line that shows steps, epoch, loss and the newest evaluation; silent where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            disable=not console.is_terminal,
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
        for key, text in (("epoch", "epoch {:.1f}"), ("loss", "loss {:.3f}"), ("eval_accuracy", "validation {:.2%}")):
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
