"""When a training that gets no better is stopped early."""

from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments


class Patience(EarlyStoppingCallback):
    """Stops after so many evaluations in which neither the score nor the loss on the validation split got better.

    Accuracy alone would give up a model that still learns: on few images it stands still, or its best is one of chance,
    while the loss falls. Evaluations during the warm-up of the learning rate do not count.

    Args:
        early_stopping_patience: evaluations.
    """

    def __init__(self, early_stopping_patience: int) -> None:
        super().__init__(early_stopping_patience)
        self.lowest_loss: float | None = None

    def on_evaluate(  # pyright: ignore[reportIncompatibleMethodOverride] - the Trainer always gives the metrics
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        loss = metrics.get("eval_loss")  # some detectors tell none of a validation split
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
        """What a checkpoint keeps of it."""
        counted = {"early_stopping_patience_counter": self.early_stopping_patience_counter}
        return {
            "args": {"early_stopping_patience": self.early_stopping_patience},
            "attributes": counted | {"lowest_loss": self.lowest_loss},
        }
