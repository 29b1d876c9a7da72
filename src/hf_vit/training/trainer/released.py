"""A Trainer that releases other weights than those it goes on with: their average, or adapters merged into them."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast, final

from accelerate.utils import load_fsdp_model, save_fsdp_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_vit.errors import UserError
from hf_vit.training.trainer.adapters import LoraAdapter
from hf_vit.training.trainer.averaging import WeightAverage
from hf_vit.training.trainer.sharding import divide_again

TRAINING_WEIGHTS = "training_weights.safetensors"
_RELEASED = 1  # accelerate's number of the second model in a checkpoint of sharded weights


class ReleasingTrainer(Trainer):
    """A `Trainer` whose evaluations judge, and whose checkpoints hold, the weights that are released.

    model.safetensors of a checkpoint is a model that loads: of averaged weights, or without adapter. What a resumed
    training goes on from lies beside it, in training_weights.safetensors, of sharded weights (FSDP2) where accelerate
    puts it. When the training is over, the model has the released weights and no adapter.

    Args:
        average_decay: of a `WeightAverage`; None: none.
        adapter: that was put into the model; None: none.

    Raises:
        UserError: both.
    """

    def __init__(
        self, *args: Any, average_decay: float | None = None, adapter: LoraAdapter | None = None, **kwargs: Any
    ) -> None:
        if average_decay is not None and adapter is not None:
            raise UserError("LoRA's factors cannot be averaged and merged; give average_decay or adapter")
        self.average_decay, self.adapter = average_decay, adapter
        self.average: WeightAverage | None = None
        super().__init__(*args, **kwargs)
        if average_decay is not None:
            self.add_callback(_AverageUpdate(self))

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and leave the released weights in the model."""
        output = super().train(*args, **kwargs)
        if self.average is not None:
            self.average.swap()
        self._forget(merge=True)
        return output

    def _start_average(self) -> WeightAverage:
        """From now on average the weights, beginning with those that the model has."""
        assert self.average_decay is not None
        self.average = WeightAverage(cast(nn.Module, self.model), self.average_decay)
        return self.average

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As transformers', of the weights that are released."""
        with self._released():
            return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers', the weights that are released; of sharded ones that stay divided the configuration."""
        with self._released():
            super().save_model(output_dir, _internal_call)
        if self._keeps_parts() and self.args.should_save:
            cast(PreTrainedModel, self.bare_model()).config.save_pretrained(output_dir or str(self.args.output_dir))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.adapter is not None and self.args.should_save:
            state_dict = self.adapter.merged_state(state_dict or self.bare_model().state_dict())
        with self._released():
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.is_fsdp_enabled:  # which has saved what training goes on from
            if self.average is not None:
                with self._released():
                    save_fsdp_model(*self._sharded(), output_dir, model_index=_RELEASED)
        elif self.args.should_save and (self.average is not None or self.adapter is not None):
            state = {name: value.contiguous() for name, value in self.bare_model().state_dict().items()}
            if self.average is not None:
                state |= self.average.remainder()
            save_file(state, Path(output_dir) / TRAINING_WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.average_decay is None and (self.adapter is None or self.is_fsdp_enabled):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        if self.is_fsdp_enabled:
            load_fsdp_model(*self._sharded(), resume_from_checkpoint, model_index=_RELEASED)
            self._start_average()
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = Path(resume_from_checkpoint) / TRAINING_WEIGHTS
        if not weights.is_file():
            raise UserError(f"{weights.parent} lacks {weights.name}; it belongs to a training of other settings")
        state = load_file(weights)
        if self.average_decay is not None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self._start_average().take(state)
        self.bare_model().load_state_dict(state)

    def _load_best_model(self) -> None:
        if not self.is_fsdp_enabled:
            self._forget(merge=False)
            super()._load_best_model()
        elif self.average_decay is not None:
            self._forget(merge=False)
            load_fsdp_model(*self._sharded(), str(self.state.best_model_checkpoint), model_index=_RELEASED)
        else:
            super()._load_best_model()
            self._forget(merge=True)

    def load_released(self, checkpoint: str) -> None:
        """End the training with the weights that a checkpoint releases."""
        self.state.best_model_checkpoint = checkpoint
        self._load_best_model()

    def _forget(self, merge: bool) -> None:
        """From now on the model's own weights are the released ones."""
        self.average = None
        divide_again(cast(nn.Module, self.model))
        if self.adapter is not None:
            self.adapter.remove(merge)
            self.adapter = None

    @contextmanager
    def _released(self) -> Generator[None]:
        with nullcontext() if self.average is None else self.average.in_place():
            yield

    def bare_model(self) -> nn.Module:
        """The model without what several processes or compiling have put around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _sharded(self) -> tuple[Any, Any, nn.Module]:
        return self.accelerator.state.fsdp_plugin, self.accelerator, cast(nn.Module, self.model)

    def _keeps_parts(self) -> bool:
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "SHARDED" in str(plugin.state_dict_type)


@final
class _AverageUpdate(TrainerCallback):
    """Takes every step's weights into the average."""

    def __init__(self, trainer: ReleasingTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.trainer.average is None:  # of a resumed training it is loaded
            self.trainer._start_average()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.trainer.average is not None:
            self.trainer.average.update()
