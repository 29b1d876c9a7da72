"""The trainer of models that predict masks or boxes: they have their own loss, and images are judged one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import EvalLoopOutput

from hf_vit.data.annotations import IGNORED
from hf_vit.families import DENSE_HEADS
from hf_vit.training.dense_model import model_inputs
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer

# A model's answer to one image, and the truth; on the CPU.
Judged = tuple[Any, Any]

_MEANS_OF_PIXELS = (DENSE_HEADS["linear"].model_type, DENSE_HEADS["upernet"].model_type)


class Judge(NamedTuple):
    """Counts a validation split, at the size that the model sees.

    Attributes:
        add: counts an answer and the truth.
        answers: of a model's outputs and the collator's batch: what the model answers to each image, and the truth.
        metrics: what was counted, by name; "score" chooses the best checkpoint.
    """

    add: Callable[[Any, Any], None]
    answers: Callable[[Any, Mapping[str, Any]], list[Judged]]
    metrics: Callable[[], dict[str, float]]


class DenseTrainer(HfViTTrainer):
    """A `HfViTTrainer` that takes the loss from the model as it is and evaluates by a `Judge`.

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
        """Return the model's own loss."""
        outputs = model(**model_inputs(cast(Any, self.bare_model()), inputs))
        # Of no pixel transformers' loss is NaN.
        loss = self._weighed(outputs.loss, inputs) if self._count(inputs) else 0 * outputs.logits.sum()
        return (loss, outputs) if return_outputs else loss

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """Return the judged pixels, where the loss is their mean; images where it is one of boxes or queries."""
        if cast(Any, self.bare_model()).config.model_type not in _MEANS_OF_PIXELS:
            return len(batch["pixel_values"])
        return (batch["labels"] != IGNORED).sum()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return this process' batches: every image comes once, in one process."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size, world = self.args.eval_batch_size, self.args.world_size
        batches = [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]
        own: Any = batches[self.args.process_index :: world]
        return DataLoader(dataset, batch_sampler=own, collate_fn=self.data_collator)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as transformers does; the metrics are the judge's, and the loss of the models that have one."""
        self._judge, self._losses = self.new_judge(), list[tuple[float, int]]()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        together = self.args.eval_batch_size * self.args.world_size
        if len(dataloader) * together < len(cast(Any, dataloader.dataset)):  # this process has a batch less than others
            self._gather([], [])
        weight = sum(count for _, count in self._losses)
        loss = {"loss": sum(loss * count for loss, count in self._losses) / weight} if weight else {}
        prefix = kwargs.get("metric_key_prefix", "eval")
        cast(Any, output.metrics).update({f"{prefix}_{k}": v for k, v in (self._judge.metrics() | loss).items()})
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Have the judge count a batch at the size that the model sees; transformers' loop keeps nothing of it."""
        network, batch = cast(Any, self.bare_model()), self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = network(**model_inputs(network, batch))
            answers = self._judge.answers(outputs, batch)
        count = int(self._count(batch))
        self._gather([] if outputs.loss is None or not count else [(float(outputs.loss), count)], answers)
        return None, None, None

    def _gather(self, losses: list[tuple[float, int]], answers: Sequence[Judged]) -> None:
        """Count a batch of every process: its loss with what it is the mean of, and its answers."""
        self._losses += gather_object(losses)
        for answer, truth in gather_object(list(answers)):
            self._judge.add(answer, truth)
