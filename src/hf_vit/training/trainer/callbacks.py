"""Callbacks of a training: progress on a terminal or in a log, training time, early stopping, and SIGTERM."""

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, final

from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Arguments
from transformers.trainer_callback import ExportableState

from hf_vit.loading.folders import list_checkpoints, parse_step
from hf_vit.training.processes import world_size
from hf_vit.writing import settle_folder

_Kind = TypeVar("_Kind", bound=TrainerCallback)
# Logged metrics -> text for people.
_SCORES = {
    "eval_accuracy": "validation accuracy {:.2%}",
    "eval_mean_iou": "validation mIoU {:.2%}",
    "eval_ap50": "validation AP50 {:.2%}",
}


def find_callbacks(trainer: Trainer, kind: type[_Kind]) -> list[_Kind]:
    """Return the callbacks of a trainer that are instances of a class."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


class LiveProgress(ProgressCallback):
    """transformers' progress bar with epoch, loss and the latest evaluation."""

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
        """Close the bar, also after an error."""
        if self.training_bar is not None:
            self.training_bar.close()


class LoggedProgress(TrainerCallback):
    """Writes a line on standard error for every evaluation and every minute, for logs without a progress bar.

    `step_loss` returns the loss of the last step; `report` is called with every line.
    """

    interval = 60.0  # seconds

    def __init__(self, step_loss: Callable[[], float], report: Callable[[str], None] | None = None) -> None:
        self._step_loss = step_loss
        self._print_line = report or (lambda line: print(line, file=sys.stderr, flush=True))
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
        # An evaluation writes its own line.
        if time.perf_counter() - self._last >= self.interval and not control.should_evaluate:
            rate = kwargs["lr_scheduler"].get_last_lr()[0]
            self._report(args, state, [f"loss {self._step_loss():.4f}", f"learning rate {rate:.2e}"])

    def on_evaluate(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        texts = {"loss": "loss {:.4f}", "learning_rate": "learning rate {:.2e}", "eval_loss": "validation loss {:.4f}"}
        texts |= _SCORES
        news = [text.format(self._logged[key]) for key, text in texts.items() if key in self._logged]
        self._report(args, state, news)
        self._logged.clear()

    def _report(self, args: Arguments, state: State, news: list[str]) -> None:
        """Write a line with step, news, throughput and remaining time."""
        self._last = time.perf_counter()
        steps = state.global_step - self._first_step
        if not state.is_world_process_zero or not steps:  # without steps there is no throughput
            return
        seconds = self._last - self._begin
        images = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        remaining = round(seconds / steps * (state.max_steps - state.global_step))
        throughput = f"{images / seconds:,.1f} images/s, {timedelta(seconds=remaining)} left"
        self._print_line(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join([*news, throughput])}")


class Clock(TrainerCallback, ExportableState):
    """Measures the training time, including that before an interruption (up to the resumed checkpoint)."""

    def __init__(self) -> None:
        self.earlier = 0.0
        self._begin: float | None = None

    @property
    def seconds(self) -> float:
        """Training time until now."""
        return self.earlier + (0.0 if self._begin is None else time.perf_counter() - self._begin)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"earlier": self.seconds}}

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        # transformers restores callbacks on request only; the checkpoint of another trainer has no time.
        stored: Any = state.stateful_callbacks
        if not state.global_step:  # a new training, perhaps after one that was interrupted
            self.earlier, self._begin = 0.0, None
            stored["Clock"] = self.state()
        self.earlier = stored.setdefault("Clock", self.state())["attributes"]["earlier"]
        self._begin = time.perf_counter()

    def on_train_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        self.earlier = self.seconds
        self._begin = None


class Patience(EarlyStoppingCallback):
    """Stops a training after a number of evaluations without a better validation score or a lower validation loss.

    The loss counts too, because accuracy on few images may stay constant while the loss falls. Evaluations during the
    warm-up of the learning rate do not count.
    """

    def __init__(self, early_stopping_patience: int) -> None:
        super().__init__(early_stopping_patience)
        self.lowest_loss: float | None = None

    def on_evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - the Trainer always gives the metrics
        self, args: Arguments, state: State, control: Control, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Count validations without a lower loss as well; none of them counts during the warm-up."""
        loss = metrics.get("eval_loss")  # some detectors have no validation loss
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
        attributes = {"early_stopping_patience_counter": self.early_stopping_patience_counter}
        patience = {"early_stopping_patience": self.early_stopping_patience}
        return {"args": patience, "attributes": attributes | {"lowest_loss": self.lowest_loss}}


@final
class KeepCheckpoints(TrainerCallback):
    """Keeps the newest checkpoint and the best, or the newest two, by their steps: a clock may be set back."""

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if args.should_save:
            work = Path(str(args.output_dir))
            settle_folder(work / f"checkpoint-{state.global_step}")
            kept_steps = {state.global_step, state.best_global_step or state.global_step}
            others = [folder for folder in list_checkpoints(work) if parse_step(folder) not in kept_steps]
            for folder in others[: len(others) + len(kept_steps) - 2]:
                shutil.rmtree(folder, ignore_errors=True)


@final
class StopOnTermination(TrainerCallback):
    """After SIGTERM, finishes the step, writes a checkpoint and raises `KeyboardInterrupt`.

    transformers' `enable_jit_checkpoint` waits for three seconds, and marks the training as ended. Several processes
    would have to agree on a step, so they end at once.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._previous_handler: Any = None

    def on_train_begin(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if world_size() == 1 and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._request_stop)
            # Restart interrupted system calls, because torch reports an interrupted opening of a file as a failure.
            if hasattr(signal, "siginterrupt"):  # not on Windows
                signal.siginterrupt(signal.SIGTERM, False)

    def on_step_end(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if self._is_requested:
            control.should_save = True

    def on_save(self, args: Arguments, state: State, control: Control, **kwargs: Any) -> None:
        if self._is_requested:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Restore the previous signal handler, also after an error."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM; a second signal ends the process at once."""
        self._is_requested = True
        self.close()
