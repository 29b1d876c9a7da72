"""transformers' Trainer with what image classifiers need: decay groups, soft labels, exact resuming, no pickles."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedModel, PrinterCallback, ProgressCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.import_utils import is_in_notebook

from hf_vit.errors import DivergedError, UserError
from hf_vit.families import family_of, problem_type_of
from hf_vit.training.processes import need_same
from hf_vit.training.trainer.callbacks.progress import LiveProgress, LoggedProgress
from hf_vit.training.trainer.layer_decay import parameter_groups
from hf_vit.training.trainer.losses import BinaryCrossEntropy, WeightedCrossEntropy, smooth_labels, soft_cross_entropy
from hf_vit.training.trainer.released import ReleasingTrainer
from hf_vit.training.trainer.sam import SharpnessAware
from hf_vit.training.trainer.sampling import EpochBatches, EpochSampler, SeededDataset, as_is
from hf_vit.training.trainer.sharding import check_sharding
from hf_vit.training.trainer.sharing import SharingTrainer
from hf_vit.training.trainer.streaming import SeededStream, StreamingTrainer, stream_loader

_CALMER = "lower the learning rate, lengthen the warm-up, or clip gradients (1.0)"


class HfViTTrainer(SharingTrainer, StreamingTrainer, ReleasingTrainer):
    """A `Trainer` for image classifiers. Use it as transformers' own; what differs:

    - No weight decay on biases, norms, tokens, position tables, LayerScale or probes: only on matrices and kernels.
    - Labels may be class indices [B] or probabilities [B, K] (mixup, cutmix); `label_smoothing_factor` goes with both,
      and shapes the training loss only: `eval_loss` is the plain cross-entropy.
    - Order, augmentation and mixing of the images depend on (seed, epoch, position) alone (see `sampling`), so that a
      resumed training repeats an unbroken one step by step; several processes see what a single one would, and of a
      stream each its own part.
    - With `average_decay`, evaluations judge and checkpoints release the average of the weights; with `adapter`, the
      weights with the adapter merged (see `ReleasingTrainer`).
    - `compute_loss_func=BinaryCrossEntropy()` trains with one yes or no a class, `WeightedCrossEntropy` with weights.
    - A loss that is not a number stops the training with step, learning rate and remedy, before it spoils the weights;
      on an accelerator, which would have to wait for every step, when it is logged, and in a resumed training at once.
    - `save_model` writes no pickle (`training_args.bin`); only checkpoints to resume from hold optimizer state.
    - Live progress on a terminal and in notebooks; elsewhere, on standard error, a line for every evaluation and one a
      minute.
    - `push_to_hub=True` looks at token and repository before the training, and at its end shares what
      `hf_vit.push_to_hub` shares, in one commit: no checkpoints, no pickle, a card with facts. A failure raises. (The
      stock Trainer uploads its whole folder with every checkpoint, and swallows failures.)

    Args:
        layer_decay: factor on the learning rate from each layer to the one below (see `layer_decay`); None: 1.
        sampling_weights: [images] how often each is drawn, relative to the others, with repetition; None: all once.
        repeated_augmentation: how often an image comes in its batch, each time varied anew; not of streams.
        sharpness: makes every step one of sharpness-aware minimisation.
        data_fact, average_decay, adapter: see `SharingTrainer` and `ReleasingTrainer`.

    Raises:
        UserError: the loss of a step is NaN or infinite; the model cannot be shared; another order of the images was
            asked for.
    """

    def __init__(
        self,
        *args: Any,
        layer_decay: float | None = None,
        sampling_weights: Sequence[float] | None = None,
        repeated_augmentation: int = 1,
        sharpness: SharpnessAware | None = None,
        **kwargs: Any,
    ) -> None:
        self.repeated_augmentation = repeated_augmentation
        self.layer_decay, self.sampling_weights, self.sharpness = layer_decay, sampling_weights, sharpness
        self._step_loss: torch.Tensor | float = 0.0  # of the micro-batches of one step
        self._mean_count: torch.Tensor | float | None = None  # of the micro-batches of one step, see `_count`
        self._diverged_at: torch.Tensor | None = None  # the first step whose loss was no number, or 0, on the device
        self._flops_per_value: int | None = None
        super().__init__(*args, **kwargs)
        # An accelerator would wait for every loss that is read: there it is read when it is logged.
        self._looks_later = self.args.device.type != "cpu"
        if (strategy := self.args.train_sampling_strategy) != "random":
            raise UserError(
                f"HfViTTrainer has a seeded order of its own and no train_sampling_strategy={strategy!r}; leave that "
                "out, or use transformers' Trainer"
            )
        if self.compute_loss_func is None and _is_of_transformers(self.model) and self._takes_probabilities():
            self.compute_loss_func = soft_cross_entropy
        climbs_alone = sharpness is not None and sharpness.micro_batches
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_sharding(plugin, getattr(self.model, "config", None), climbs_alone)
        # Trainer's own smoother knows no soft labels.
        self.label_smoother = None
        # The transforms need the image column, which is no argument of the model.
        self.args.remove_unused_columns = False
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        if self.args.disable_tqdm or is_in_notebook():  # where transformers shows a table
            return
        self.add_callback(LiveProgress() if sys.stderr.isatty() else LoggedProgress(lambda: float(self._step_loss)))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay: the weights of dense layers and convolutions."""
        return [
            f"{path}.weight" if path else "weight"
            for path, module in model.named_modules()
            if not isinstance(module, nn.Embedding) and getattr(module, "weight", None) is not None
            if isinstance(module.weight, nn.Parameter) and module.weight.ndim >= 2
        ]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, with a rate for every layer where `layer_decay` asks for it.

        Raises:
            UserError: the model has no numbered layers.
        """
        if self.optimizer is None and self.layer_decay is not None:
            learner = cast(nn.Module, self.model if model is None else model)
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, None)
            groups = parameter_groups(
                learner,
                self.get_decay_parameter_names(learner),
                learning_rate=self.args.learning_rate,
                weight_decay=self.args.weight_decay,
                layer_decay=self.layer_decay,
            )
            # What the Trainer takes instead of its own groups.
            self.optimizer_cls_and_kwargs = kind, {**settings, "params": groups}
        return super().create_optimizer(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches in a seeded order, each transformed and collated under a seed of its own."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        self._flops_per_value = None
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        workers = self.args.dataloader_num_workers
        rank, world = self.args.process_index, self.args.world_size
        size, drop_last, device = self._train_batch_size, self.args.dataloader_drop_last, self.accelerator.device
        options: dict[str, Any] = {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
            "pin_memory": self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        }
        # datasets.IterableDataset is one of torch's only when torch was imported first: both are told by their name.
        if isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__"):
            stream = SeededStream(self.train_dataset, seed, rank, world)
            self.stream = stream_loader(
                stream, self.data_collator, device, batch_size=size, drop_last=drop_last, **options
            )
            return self.stream
        dataset = SeededDataset(self.train_dataset, self.data_collator, seed)
        need_same("numbers of training images", len(dataset))
        sampler = EpochSampler(len(dataset), seed, self.sampling_weights, self.repeated_augmentation)
        batches = EpochBatches(sampler, size, drop_last, rank, world)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=as_is, **options)
        # As for a single process: the batches are dealt out already.
        return prepare_data_loader(
            loader,
            device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=options["pin_memory"],
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Every image is judged by, whatever training drops at the end of an epoch."""
        dropped, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = dropped

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The model's own loss, on smoothed labels while it trains."""
        labels = inputs.get("labels")
        if labels is not None and model.training:
            soft = self._training_labels(labels)
            if num_items_in_batch is not None:
                # It counts label elements: a row of probabilities has K of them.
                num_items_in_batch = num_items_in_batch * (soft.numel() // labels.numel())
            inputs = {**inputs, "labels": soft}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training and num_items_in_batch is None:
            loss = self._weighed(loss, inputs)
        return (loss, outputs) if return_outputs else loss

    def _weighed(self, loss: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """A micro-batch's mean as its part of the step's: the Trainer takes all for as large, which the last is not."""
        return loss if self._mean_count is None else loss * (self._count(batch) / self._mean_count)

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """How much the loss of a micro-batch is the mean of, where the Trainer does not count labels: images."""
        return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 1)

    def _training_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Class indices [B] or probabilities [B, K] as the loss wants them."""
        smoothing = self.args.label_smoothing_factor
        if isinstance(self.compute_loss_func, BinaryCrossEntropy | WeightedCrossEntropy):
            return self.compute_loss_func.targets(labels, self._num_labels(), smoothing)
        if smoothing > 0 and self._takes_probabilities():
            return smooth_labels(labels, self._num_labels(), smoothing)
        return labels

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, which sharpness-aware minimisation must know beforehand."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_loss = 0.0
        self._mean_count = None
        if items is None and batches:
            total, parts = sum(map(self._count, batches)), len(batches)
            if self.args.world_size > 1:
                total, parts = cast(Any, self.accelerator.reduce(torch.tensor([float(total), parts], device=device)))
            self._mean_count = total / parts
        if self.sharpness is not None:
            self.sharpness.begin(batches)
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One forward and backward pass; two with sharpness-aware minimisation.

        Raises:
            DivergedError: the loss is NaN or infinite.
        """
        learn = super().training_step

        def run(batch: dict[str, Any]) -> torch.Tensor:
            return self._checked(learn(model, batch, num_items_in_batch))

        loss = run(inputs) if self.sharpness is None else self.sharpness.backward(model, inputs, run)
        self._step_loss = self._step_loss + loss
        return loss

    def _checked(self, loss: torch.Tensor) -> torch.Tensor:
        is_finite, step = torch.isfinite(loss).all(), self.state.global_step + 1
        if self._looks_later:
            now = step * ~is_finite
            before = self._diverged_at
            self._diverged_at = now if before is None else torch.where(before > 0, before, now)
            return loss
        if bool(is_finite):
            return loss
        raise DivergedError(
            f"the loss became {float(loss.mean())} at step {step} (learning rate {self._get_learning_rate():.3g}, "
            f"gradients clipped at {self.args.max_grad_norm:g}); {_CALMER}"
        )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        flow = self.control
        looks = flow.should_log or flow.should_evaluate or flow.should_save or flow.should_training_stop
        if looks and self._diverged_at is not None and (step := int(self._diverged_at)):
            raise DivergedError(
                f"the loss became no number at step {step} (seen at step {self.state.global_step}, when it is logged, "
                f"gradients clipped at {self.args.max_grad_norm:g}); {_CALMER}"
            )
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's, which would count the model's parameters anew at every step."""
        values = inputs.get(getattr(self.model, "main_input_name", ""))
        if values is None:
            return super().floating_point_ops(inputs)
        if self._flops_per_value is None:
            self._flops_per_value = super().floating_point_ops(inputs) // values.numel()
        return self._flops_per_value * values.numel()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "config", None), PreTrainedConfig):
            model.config.save_pretrained(folder)  # Trainer itself saves the weights alone

    def _num_labels(self) -> int:
        return int(self.accelerator.unwrap_model(self.model).config.num_labels)

    def _takes_probabilities(self) -> bool:
        return problem_type_of(self.accelerator.unwrap_model(self.model)) == "single_label_classification"


def _is_of_transformers(model: Any) -> bool:
    """Whether it is a classifier of transformers' own, which takes probabilities for several classes an image."""
    if hasattr(model, "get_base_model"):  # peft's
        model = model.get_base_model()
    known = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    return any(each.__name__ in known for each in type(model).__mro__) and family_of(model.config.model_type) is None
