"""A Trainer that releases other weights than those it goes on with: their average, or adapters merged into them."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_vit.errors import UserError
from hf_vit.training.trainer.adapters import LoraAdapter
from hf_vit.training.trainer.averaging import WeightAverage

TRAINING_WEIGHTS = "training_weights.safetensors"


class ReleasingTrainer(Trainer):
    """A `Trainer` whose evaluations judge, and whose checkpoints hold, the weights that are released.

    model.safetensors of a checkpoint is a model that loads: of averaged weights, or without adapter. What a resumed
    training goes on from lies beside it, in training_weights.safetensors. When the training is over, the model has the
    released weights and no adapter.

    Args:
        average_decay: of a `WeightAverage`; None: none.
        adapter: that was put into the model; None: none.

    Raises:
        UserError: both, or averaging over sharded weights.
    """

    def __init__(
        self, *args: Any, average_decay: float | None = None, adapter: LoraAdapter | None = None, **kwargs: Any
    ) -> None:
        if average_decay is not None and adapter is not None:
            raise UserError("LoRA's factors cannot be averaged and merged; give average_decay or adapter")
        self.average_decay, self.adapter = average_decay, adapter
        self.average: WeightAverage | None = None
        super().__init__(*args, **kwargs)
        if average_decay is not None and self.is_fsdp_enabled:
            raise UserError("weights that are sharded (FSDP) cannot be averaged; leave average_decay out, or use DDP")
        if average_decay is not None:
            self.add_callback(_AverageUpdate(self))

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and leave the released weights in the model."""
        if self.average_decay is not None:
            self.average = WeightAverage(self._bare_model(), self.average_decay)
        output = super().train(*args, **kwargs)
        if self.average is not None:
            self.average.swap()
        self._forget(merge=True)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As transformers', of the weights that are released."""
        with self._released():
            return super().evaluate(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.adapter is not None:
            state_dict = self.adapter.merged_state(self._bare_model())
        with self._released():
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and (self.average is not None or self.adapter is not None):
            state = {name: value.contiguous() for name, value in self._bare_model().state_dict().items()}
            save_file(state, Path(output_dir) / TRAINING_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.average_decay is None and self.adapter is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights, bare = Path(resume_from_checkpoint) / TRAINING_WEIGHTS, self._bare_model()
        if not weights.is_file():
            raise UserError(f"{weights.parent} lacks {weights.name}; it belongs to a training of other settings")
        if self.average_decay is not None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.average = WeightAverage(bare, self.average_decay)
        bare.load_state_dict(load_file(weights))

    def _load_best_model(self) -> None:
        self._forget(merge=False)
        super()._load_best_model()

    def load_released(self, checkpoint: str) -> None:
        """End the training with the weights that a checkpoint releases."""
        self.state.best_model_checkpoint = checkpoint
        self._load_best_model()

    def _forget(self, merge: bool) -> None:
        """From now on the model's own weights are the released ones."""
        self.average = None
        if self.adapter is not None:
            self.adapter.remove(merge)
            self.adapter = None

    @contextmanager
    def _released(self) -> Generator[None]:
        with nullcontext() if self.average is None else self.average.in_place():
            yield

    def _bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)


@final
class _AverageUpdate(TrainerCallback):
    """Takes every step's weights into the average."""

    def __init__(self, trainer: ReleasingTrainer) -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.trainer.average is not None:
            self.trainer.average.update()
