"""SIGTERM, by which batch systems and containers announce the end: a checkpoint first, then stop."""

import signal
import threading
from types import FrameType
from typing import Any, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_vit.training.processes import world_size


@final
class StopOnTermination(TrainerCallback):
    """After SIGTERM the running step is finished, a checkpoint written, and `KeyboardInterrupt` raised.

    transformers' own `enable_jit_checkpoint` waits three seconds first, and writes a training that has ended. Several
    processes would have to agree on the step: theirs end at once, as before.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if world_size() == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
            # Calls of the system go on after it: torch takes an interrupted opening of a file for a failed one.
            signal.siginterrupt(signal.SIGTERM, False)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._is_asked:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
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
