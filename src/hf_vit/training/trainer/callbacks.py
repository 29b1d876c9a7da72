"""Callbacks of a training: progress on a terminal or in a log, a clock that survives a kill, patience, and SIGTERM."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, final

from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments
from transformers.trainer_callback import ExportableState

from hf_vit.training.processes import world_size

_Kind = TypeVar("_Kind", bound=TrainerCallback)
# What an evaluation logs -> what it is called.
_SCORES = {
    "eval_accuracy": "validation accuracy {:.2%}",
    "eval_mean_iou": "validation mIoU {:.2%}",
    "eval_ap50": "validation AP50 {:.2%}",
}


def callbacks_of(trainer: Trainer, kind: type[_Kind]) -> list[_Kind]:
    """Return the callbacks of one kind that a trainer has."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


class LiveProgress(ProgressCallback):
    """transformers' bar on a terminal, with epoch, loss and the newest evaluation behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._news: dict[str, str] = {}

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Show no second bar."""

    def on_log(
        self, args: Arguments, state: State, control: Control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        texts = {"epoch": "epoch {:.1f}", "loss": "loss {:.3f}", **_SCORES}
        self._news |= {key: text.format(logs[key]) for key, text in texts.items() if logs and key in logs}
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(", ".join(self._news.values()))

    def close(self) -> None:
        """Give the terminal back; also after an error."""
        if self.training_bar is not None:
            self.training_bar.close()


class LoggedProgress(TrainerCallback):
    """A line for every evaluation and, between them, one a minute, on standard error: for logs, where no bar lives.

    `step_loss` returns the loss of the last step; `say` gets a line at a time.
    """

    interval = 60.0  # seconds

    def __init__(self, step_loss: Callable[[], float], say: Callable[[str], None] | None = None) -> None:
        self._step_loss = step_loss
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._logged: dict[str, float] = {}
        self._begin = self._last = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        self._begin = self._last = time.perf_counter()
        self._first_step = state.global_step

    def on_log(
        self, args: Arguments, state: State, control: Control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        self._logged |= logs or {}

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        # A step that is evaluated gets its line with the results.
        if time.perf_counter() - self._last >= self.interval and not control.should_evaluate:
            rate = kwargs["lr_scheduler"].get_last_lr()[0]
            self._tell(args, state, [f"loss {self._step_loss():.4f}", f"learning rate {rate:.2e}"])

    def on_evaluate(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        texts = {"loss": "loss {:.4f}", "learning_rate": "learning rate {:.2e}", "eval_loss": "validation loss {:.4f}"}
        texts |= _SCORES
        self._tell(args, state, [text.format(self._logged[key]) for key, text in texts.items() if key in self._logged])
        self._logged.clear()  # what is not logged again is old

    def _tell(self, args: Arguments, state: State, news: list[str]) -> None:
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

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        self._begin = time.perf_counter()

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        self.earlier, self._begin = self.seconds, None


class Patience(EarlyStoppingCallback):
    """Stops after so many evaluations in which neither the score nor the loss on the validation split got better.

    Accuracy alone would give up a model that still learns: on few images it stands still while the loss falls.
    Evaluations during the warm-up of the learning rate do not count.
    """

    def __init__(self, early_stopping_patience: int) -> None:
        super().__init__(early_stopping_patience)
        self.lowest_loss: float | None = None

    def on_evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - the Trainer always gives the metrics
        self, args: Arguments, state: State, control: Control, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        loss = metrics.get("eval_loss")  # some detectors have none on a validation split
        is_lower = loss is not None and (self.lowest_loss is None or loss < self.lowest_loss)
        if is_lower:
            self.lowest_loss = loss
        if state.global_step <= args.get_warmup_steps(state.max_steps):
            return
        if is_lower:
            self.early_stopping_patience_counter = 0
            return
        super().on_evaluate(args, state, control, metrics, **kwargs)

    def state(self) -> dict[str, Any]:
        counted = {"early_stopping_patience_counter": self.early_stopping_patience_counter}
        patience = {"early_stopping_patience": self.early_stopping_patience}
        return {"args": patience, "attributes": counted | {"lowest_loss": self.lowest_loss}}


@final
class StopOnTermination(TrainerCallback):
    """After SIGTERM the running step is finished, a checkpoint written, and `KeyboardInterrupt` raised.

    transformers' `enable_jit_checkpoint` waits three seconds first, and writes a training that has ended. Several
    processes would have to agree on the step: theirs end at once.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Any = None

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if world_size() == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
            # Calls of the system go on after it: torch takes an interrupted opening of a file for a failed one.
            signal.siginterrupt(signal.SIGTERM, False)

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if self._is_asked:
            control.should_save = True

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if self._is_asked:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Give the signal back; also after an error."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        self.close()  # a second one ends the process at once
