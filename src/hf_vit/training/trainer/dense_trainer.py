"""The trainer of models that predict masks or boxes: their loss is their own, and images are judged one by one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import EvalLoopOutput

from hf_vit.data.annotations import IGNORED
from hf_vit.families import DENSE_HEADS
from hf_vit.training.dense_model import model_inputs
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

# What a model answers to one image, and what is true of it; on the CPU.
Judged = tuple[Any, Any]

_MEANS_OF_PIXELS = (DENSE_HEADS["linear"].model_type, DENSE_HEADS["upernet"].model_type)


class Judge(ABC):
    """Abstract: what an evaluation of the validation split counts."""

    @abstractmethod
    def answers(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        """What the outputs of a model in evaluation mode answer to a batch of the collator's, and the truth."""

    @abstractmethod
    def add(self, answer: Any, truth: Any) -> None:
        """Count an image."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """What was counted, by name; "score" is that by which the best checkpoint is chosen."""


class DenseTrainer(HfViTTrainer):
    """A `HfViTTrainer` that takes the loss from the model as it is and judges by a `Judge`.

    Several processes judge every image once, batch by batch in turn, and count all of them: each has what one process
    alone would have.

    Args:
        new_judge: makes what an evaluation counts with.
    """

    def __init__(self, *args: Any, new_judge: Callable[[], Judge], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.new_judge = new_judge
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The model's own loss."""
        bare: Any = self.bare_model()
        outputs = model(**model_inputs(bare, inputs))
        # Of no pixel transformers' loss is NaN.
        loss = self._weighed(outputs.loss, inputs) if self._count(inputs) else 0 * outputs.logits.sum()
        return (loss, outputs) if return_outputs else loss

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """The judged pixels, where the loss is their mean; images where it is one of boxes or queries."""
        bare: Any = self.bare_model()
        if bare.config.model_type not in _MEANS_OF_PIXELS:
            return len(batch["pixel_values"])
        return (batch["labels"] != IGNORED).sum()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """This process' batches: every image comes once, in one process."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size, world = self.args.eval_batch_size, self.args.world_size
        batches = [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]
        own: Any = batches[self.args.process_index :: world]
        return DataLoader(dataset, batch_sampler=own, collate_fn=self.data_collator)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Judge a split by the model's answers at the size that it sees, and by its loss where it tells one."""
        model: Any = self.accelerator.unwrap_model(self.model)
        model.eval()
        judge, losses, images = self.new_judge(), list[tuple[float, int]](), 0
        own = iter(dataloader)
        dataset: Any = dataloader.dataset
        together = self.args.eval_batch_size * self.args.world_size
        for _ in range(-(-len(dataset) // together)):
            told, answered = self._answered(model, judge, next(own, None))
            for loss in gather_object(told):
                losses.append(loss)
            for answer, truth in gather_object(answered):
                judge.add(answer, truth)
                images += 1
        metrics = judge.metrics()
        if losses:
            metrics["loss"] = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=named, num_samples=images)  # pyright: ignore[reportArgumentType]

    def _answered(
        self, model: Any, judge: Judge, batch: dict[str, Any] | None
    ) -> tuple[list[tuple[float, int]], Sequence[Judged]]:
        """The loss of a batch, if the model tells one, with how much it is the mean of; and its answers."""
        if batch is None:  # a process has none left where others have
            return [], []
        batch = self._prepare_inputs(batch)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**model_inputs(model, batch))
            answered = judge.answers(outputs, batch)
        count = int(self._count(batch))
        return ([] if outputs.loss is None or not count else [(float(outputs.loss), count)]), answered
