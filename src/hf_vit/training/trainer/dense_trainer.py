"""`DenseTrainer` for segmentation and detection, which uses the model's loss and metrics of masks or boxes."""

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

# Prediction and truth of one image, on the CPU.
Judged = tuple[Any, Any]

_MEANS_OF_PIXELS = (DENSE_HEADS["linear"].model_type, DENSE_HEADS["upernet"].model_type)


class Judge(NamedTuple):
    """Functions that compute metrics of a validation split, at the size of the model's input.

    Attributes:
        add: adds the prediction and the truth of an image.
        answers: (outputs of the model, batch) -> prediction and truth of every image.
        metrics: returns metrics by name; "score" selects the best checkpoint.
    """

    add: Callable[[Any, Any], None]
    answers: Callable[[Any, Mapping[str, Any]], list[Judged]]
    metrics: Callable[[], dict[str, float]]


class DenseTrainer(HfViTTrainer):
    """An `HfViTTrainer` that uses the loss of the model, and evaluates with a `Judge`.

    Several processes divide the batches of an evaluation and add all results, so that each of them has the metrics that
    a single process would have.

    Args:
        new_judge: returns a `Judge` for an evaluation.
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
        """Return the loss of the model."""
        outputs = model(**model_inputs(cast(Any, self.bare_model()), inputs))
        # Without pixels transformers' loss is NaN, so it is replaced by 0.
        loss = self._weight_loss(outputs.loss, inputs) if self._count(inputs) else 0 * outputs.logits.sum()
        return (loss, outputs) if return_outputs else loss

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """Return the number of labeled pixels if the loss is their mean, else the number of images."""
        if cast(Any, self.bare_model()).config.model_type not in _MEANS_OF_PIXELS:
            return len(batch["pixel_values"])
        return (batch["labels"] != IGNORED).sum()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return the batches of this process; every image is in one process."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size, world = self.args.eval_batch_size, self.args.world_size
        batches = [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]
        process_batches: Any = batches[self.args.process_index :: world]
        return DataLoader(dataset, batch_sampler=process_batches, collate_fn=self.data_collator)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as transformers does, with the metrics of the judge, and the loss if the model has one."""
        self._judge, self._losses = self.new_judge(), list[tuple[float, int]]()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        images_per_round = self.args.eval_batch_size * self.args.world_size
        num_images = len(cast(Any, dataloader.dataset))
        if len(dataloader) * images_per_round < num_images:  # other processes have one more batch
            self._gather([], [])
        weight = sum(count for _, count in self._losses)
        loss = {"loss": sum(loss * count for loss, count in self._losses) / weight} if weight else {}
        prefix, metrics = kwargs.get("metric_key_prefix", "eval"), self._judge.metrics() | loss
        cast(Any, output.metrics).update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add a batch to the metrics of the judge, and return nothing for transformers' loop to store."""
        network, batch = cast(Any, self.bare_model()), self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = network(**model_inputs(network, batch))
            answers = self._judge.answers(outputs, batch)
        count = int(self._count(batch))
        self._gather([] if outputs.loss is None or not count else [(float(outputs.loss), count)], answers)
        return None, None, None

    def _gather(self, losses: list[tuple[float, int]], answers: Sequence[Judged]) -> None:
        """Add the losses (with the number of items they are means of) and predictions of all processes."""
        self._losses += gather_object(losses)
        for answer, truth in gather_object(list(answers)):
            self._judge.add(answer, truth)
