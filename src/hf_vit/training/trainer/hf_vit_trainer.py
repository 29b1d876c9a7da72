"""`HfViTTrainer`: transformers' Trainer with soft labels, exact resuming, released weights and no pickles."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast, final
from unittest.mock import patch

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import load_fsdp_model, save_fsdp_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, TrainOutput, get_last_checkpoint
from transformers.utils.import_utils import is_in_notebook

from hf_vit.errors import DivergedError, UserError
from hf_vit.families import find_family, get_problem_type
from hf_vit.models.modeling_hf_axial_resnet import LogitNorm
from hf_vit.results.facts import DataFact
from hf_vit.training.processes import require_same
from hf_vit.training.trainer.callbacks import Clock, LiveProgress, LoggedProgress
from hf_vit.training.trainer.distributed import check_sharding, reshard, share_statistics
from hf_vit.training.trainer.losses import TargetLoss, smooth_labels, soft_cross_entropy
from hf_vit.training.trainer.optimizers import make_parameter_groups
from hf_vit.training.trainer.sam import SharpnessAware
from hf_vit.training.trainer.sampling import (
    EpochBatches,
    EpochSampler,
    SeededDataset,
    SeededStream,
    derive_seed,
    ignore_sigterm_during,
    make_stream_loader,
    return_unchanged,
)
from hf_vit.training.trainer.sharing import check_trainer, share_training
from hf_vit.training.trainer.weights import LoraAdapter, WeightAverage

TRAINING_WEIGHTS = "training_weights.safetensors"
_RELEASED = 1  # accelerate's index of the second model, the released one, in a checkpoint of sharded weights


class HfViTTrainer(Trainer):
    """A `Trainer` for image classifiers, used like transformers' own. The differences are:

    - Weight decay applies to matrices and kernels only, not to biases, norms, tokens, position tables, LayerScale or
      probes.
    - Labels may be class indices [B] or probabilities [B, K] (mixup, cutmix). `label_smoothing_factor` works with both
      and changes the training loss only: `eval_loss` is the plain cross-entropy. A `compute_loss_func` of your own then
      gets probabilities, of which `num_items_in_batch` counts K for every image, as with mixup.
    - Order, augmentation and mixing of the images depend on (seed, epoch, position) alone (see `sampling`). A resumed
      training therefore repeats an uninterrupted one step by step, and several processes train on the same batches as
      a single one; of a stream every process reads its own part.
    - With `average_decay`, the average of the weights is evaluated and written into checkpoints; with `adapter`, the
      weights with the adapter merged. model.safetensors of a checkpoint is thus a model that loads. The weights from
      which a resumed training continues are in training_weights.safetensors beside it, sharded ones (FSDP2) in the
      files of accelerate. After the training the model has the released weights and no adapter.
    - `compute_loss_func=BinaryCrossEntropy()` trains with one yes or no per class, `WeightedCrossEntropy` with weights.
    - Batch norms with frozen weights keep their running statistics, and normalize with them.
    - A loss that is not a number stops the training before it spoils the weights; the error names step, learning rate
      and remedy. On an accelerator or in several processes this happens when the loss is logged, because reading it
      would delay every step.
    - `save_model` writes no pickle (`training_args.bin`); only checkpoints hold the optimizer's state.
    - Progress is live on a terminal and in notebooks. Elsewhere standard error gets a line per evaluation and one per
      minute.
    - `push_to_hub=True` checks token and repository before the training. At its end it shares in one commit what
      `hf_vit.push_to_hub` shares: no checkpoints, no pickle, a card with facts. A failure raises. (The stock Trainer
      uploads its whole folder with every checkpoint, and ignores failures.)

    Args:
        layer_decay: factor on the learning rate from each layer to the one below (see `make_parameter_groups`); None
            is 1.
        sampling_weights: [images], the relative probability of drawing each image, with repetition; None uses every
            image once.
        repeated_augmentation: number of differently augmented copies of an image in its batch; not for streams.
        sharpness: if given, every step is one of sharpness-aware minimization.
        average_decay: decay of a `WeightAverage`; None averages nothing.
        adapter: the adapter that was put into the model, if any.
        data_fact: name of the training data for the card of a shared model; by default that of the data set.
        license: license of a shared model; by default that of the checkpoint the training started from.

    Raises:
        UserError: the loss of a step is NaN or infinite; the model cannot be shared; another order of the images was
            requested; both `average_decay` and `adapter` were given.
    """

    def __init__(
        self,
        *args: Any,
        layer_decay: float | None = None,
        sampling_weights: Sequence[float] | None = None,
        repeated_augmentation: int = 1,
        sharpness: SharpnessAware | None = None,
        average_decay: float | None = None,
        adapter: LoraAdapter | None = None,
        data_fact: DataFact | None = None,
        license: str | None = None,
        **kwargs: Any,
    ) -> None:
        if average_decay is not None and adapter is not None:
            raise UserError(
                "average_decay cannot be combined with an adapter, as LoRA weights are not averaged; give one of them"
            )
        self.repeated_augmentation = repeated_augmentation
        self.layer_decay = layer_decay
        self.sampling_weights = sampling_weights
        self.sharpness = sharpness
        self.average_decay = average_decay
        self.adapter = adapter
        self.data_fact = data_fact
        self.license = license
        self.average: WeightAverage | None = None
        self.stream: Any = None  # the loader of a training stream
        self._is_training = torch.zeros((), dtype=torch.bool).share_memory_()  # for loader workers
        self._checkpoint: Path | None = None  # the one from which the training is resumed
        self._step_loss: torch.Tensor | float = 0.0  # sum over the micro-batches of one step
        self._mean_count: torch.Tensor | float | None = None  # mean of `_count` over the micro-batches of one step
        self._diverged_at: torch.Tensor | None = None  # on the device: the first step without a finite loss, or 0
        self._flops_per_value: int | None = None
        super().__init__(*args, **kwargs)
        # Reading a loss makes an accelerator wait, so that there it is read only when it is logged; and an error of one
        # process alone would leave the others waiting.
        self._checks_later = self.args.device.type != "cpu" or self.args.world_size > 1
        strategy = self.args.train_sampling_strategy
        if strategy != "random":
            raise UserError(
                f"train_sampling_strategy={strategy!r} does not work with HfViTTrainer, which has a seeded order "
                "of its own; leave it out, or use transformers' Trainer"
            )
        if self.compute_loss_func is None and _is_of_transformers(self.model):
            if self._takes_probabilities():
                self.compute_loss_func = soft_cross_entropy
            else:  # transformers' other losses are means over a micro-batch, whatever number they are given
                self.model_accepts_loss_kwargs = False
        uses_micro_batches = sharpness is not None and sharpness.micro_batches
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_sharding(plugin, getattr(self.model, "config", None), uses_micro_batches)
        self.label_smoother = None  # the Trainer's does not support soft labels
        self.args.remove_unused_columns = False  # the transforms need the images, which are no argument of the model
        self.args.hub_strategy = HubStrategy.END  # a model is shared once, when it is complete
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(Clock())
        self.add_callback(_BetweenSteps(self))
        if self.args.disable_tqdm or is_in_notebook():  # where transformers shows a table
            return
        self.add_callback(LiveProgress() if sys.stderr.isatty() else LoggedProgress(lambda: float(self._step_loss)))

    # Optimizer and data

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that decay: the weights of dense layers and convolutions."""
        names: list[str] = []
        for path, module in model.named_modules():
            if not isinstance(module, nn.Embedding | LogitNorm):
                parameters = module.named_parameters(path, recurse=False)
                # torch's attention has one "in_proj_weight".
                names += [name for name, weight in parameters if name.endswith("weight") and weight.ndim >= 2]
        return names

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with a rate for every layer where `layer_decay` asks for it."""
        if self.optimizer is not None or self.layer_decay is None:
            return super().create_optimizer(model)
        target_model = cast(nn.Module, self.model if model is None else model)
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, None)
        groups = make_parameter_groups(
            target_model,
            self.get_decay_parameter_names(target_model),
            learning_rate=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            layer_decay=self.layer_decay,
        )
        # The Trainer uses these groups instead of its own; the next trial of a search has other settings.
        with patch.object(self, "optimizer_cls_and_kwargs", (kind, {**settings, "params": groups})):
            return super().create_optimizer(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches in a seeded order, each transformed and collated under a seed of its own."""
        if self.train_dataset is None:
            raise ValueError("HfViTTrainer was created without training images; pass train_dataset=")
        self._flops_per_value = None
        args = self.args
        device = self.accelerator.device
        workers = self.args.dataloader_num_workers
        seed = args.seed if args.data_seed is None else args.data_seed
        options: dict[str, Any] = {
            "num_workers": workers,
            "worker_init_fn": partial(ignore_sigterm_during, self._is_training),
            "persistent_workers": workers > 0,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "generator": torch.Generator(),  # a resumed training would otherwise draw from the model's
        }
        rank, world, drop_last = args.process_index, args.world_size, args.dataloader_drop_last
        size = self._train_batch_size
        # datasets.IterableDataset is a subclass of torch's only if torch was imported first; its lack of a length
        # identifies it in any case.
        if isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__"):
            if self.sampling_weights is not None or self.repeated_augmentation > 1:
                raise UserError(
                    "a stream gives every image once per epoch; leave sampling_weights and repeated_augmentation out"
                )
            stream = SeededStream(self.train_dataset, seed, rank, world)
            options |= {"batch_size": size, "drop_last": drop_last}
            self.stream = make_stream_loader(stream, self.data_collator, device, **options)
            path = None if self._checkpoint is None else self._get_stream_file(self._checkpoint)
            if path is not None and path.is_file():
                self.stream.load_state_dict(torch.load(path, weights_only=True))
                args.ignore_data_skip = True  # the stream itself continues at the right image
            return self.stream
        dataset = SeededDataset(self.train_dataset, self.data_collator, seed)
        require_same("numbers of training images", len(dataset))
        sampler = EpochSampler(len(dataset), seed, self.sampling_weights, self.repeated_augmentation)
        batches = EpochBatches(sampler, size, drop_last, rank, world)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=return_unchanged, **options)
        # One process is stated here because `EpochBatches` has already divided the batches.
        return prepare_data_loader(
            loader, device, num_processes=1, process_index=0, put_on_device=True, non_blocking=options["pin_memory"]
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return batches of all images, also where training drops the last incomplete batch."""
        # The Trainer would return the persistent loader of the validation images for any data set.
        is_validation = eval_dataset is self.eval_dataset or isinstance(eval_dataset, str | None)
        persists = self.args.dataloader_persistent_workers and is_validation
        with patch.multiple(self.args, dataloader_drop_last=False, dataloader_persistent_workers=persists):
            loader: Any = super().get_eval_dataloader(eval_dataset)
        inner = getattr(loader, "base_dataloader", loader)  # which starts the workers of accelerate's loader
        inner.worker_init_fn = partial(ignore_sigterm_during, self._is_training)
        if persists:  # they would draw from the model's generator in the first evaluation, also in a resumed training
            inner.generator = torch.Generator()
        return loader

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> DataLoader[Any]:
        """Return batches of all images, as for an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    # Loss and steps

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss, on smoothed labels while it trains."""
        labels = inputs.get("labels")
        if labels is not None and model.training:
            soft = self._make_training_labels(labels)
            if num_items_in_batch is not None:
                # The Trainer counts label elements, and a row of probabilities has K of them.
                num_items_in_batch = num_items_in_batch * (soft.numel() // labels.numel())
            inputs = {**inputs, "labels": soft}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training and num_items_in_batch is None:
            loss = self._weight_loss(loss, inputs)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> Any:
        """Return transformers' contexts, with batch norms of frozen weights in evaluation mode."""
        for module in cast(nn.Module, self.model).modules():
            if hasattr(module, "running_var") and not getattr(module.weight, "requires_grad", True):
                module.eval()
        return super().compute_loss_context_manager()

    def _weight_loss(self, loss: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Weight a micro-batch's loss by its size, because the Trainer averages as if all were equally large."""
        return loss if self._mean_count is None else loss * (self._count(batch) / self._mean_count)

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """Return the number of images in a micro-batch, for tasks in which the Trainer does not count labels."""
        return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 1)

    def _make_training_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Convert class indices [B] or probabilities [B, K] to the targets of the loss, smoothed if requested."""
        loss, smoothing = self.compute_loss_func, self.args.label_smoothing_factor
        if not isinstance(loss, TargetLoss) and not (smoothing > 0 and self._takes_probabilities()):
            return labels
        convert = loss.targets if isinstance(loss, TargetLoss) else smooth_labels
        return convert(labels, cast(Any, self.bare_model()).config.num_labels, smoothing)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and pass them to sharpness-aware minimization, which needs them all."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_loss = 0.0
        self._mean_count = None
        if items is None and batches:
            total = sum(map(self._count, batches))
            parts = len(batches)
            if self.args.world_size > 1:
                total, parts = cast(Any, self.accelerator.reduce(torch.tensor([float(total), parts], device=device)))
            self._mean_count = total / parts
        if self.sharpness is not None:
            self.sharpness.begin(batches)
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run a forward and a backward pass, two with sharpness-aware minimization; check that the loss is finite."""
        training_step = super().training_step

        def run(batch: dict[str, Any]) -> torch.Tensor:
            return self._check_loss(training_step(model, batch, num_items_in_batch))

        loss = run(inputs) if self.sharpness is None else self.sharpness.backward(model, inputs, run)
        self._step_loss = self._step_loss + loss
        return loss

    def _check_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss; raise if it is not finite, on an accelerator later in `_raise_if_diverged`."""
        is_finite = torch.isfinite(loss).all()
        step = self.state.global_step + 1
        if self._checks_later:
            current = step * ~is_finite
            earlier = self._diverged_at
            self._diverged_at = current if earlier is None else torch.where(earlier > 0, earlier, current)
        elif not bool(is_finite):
            rate = cast(torch.optim.Optimizer, self.optimizer).param_groups[0]["lr"]
            self._raise_diverged(step, f"{float(loss.mean())} at step {step} (learning rate {rate:.3g}")
        return loss

    def _raise_if_diverged(self) -> None:
        """Raise in every process if the loss of an earlier step was not finite in one of them."""
        if self._diverged_at is None:
            return
        steps: Any = self.accelerator.gather(self._diverged_at[None])
        step = min((each for each in steps.tolist() if each), default=0)  # the others follow, by its gradients
        if step:
            self._raise_diverged(step, f"NaN or infinite at step {step} (noticed at step {self.state.global_step}")

    def _raise_diverged(self, step: int, description: str) -> NoReturn:
        """Raise the error of a loss that is not finite; the description leaves a bracket open."""
        remedy = "use a lower learning rate, a longer warm-up, or gradient clipping (1.0)"
        if step == 1:
            remedy = "no weight has changed yet, so look for the cause in the images, the model and its teacher"
        clipping = f"gradients clipped at {self.args.max_grad_norm:g}"
        raise DivergedError(f"the loss became {description}, {clipping}); {remedy}")

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the Trainer's count for these inputs, but count the model's parameters only once per training."""
        values = inputs.get(getattr(self.model, "main_input_name", ""))
        if values is None:
            return super().floating_point_ops(inputs)
        if self._flops_per_value is None:
            self._flops_per_value = super().floating_point_ops(inputs) // values.numel()
        return self._flops_per_value * values.numel()

    # Released weights, checkpoints, resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, put the released weights into the model, and share it if `push_to_hub=True`."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir)) or True
        self._checkpoint = None if isinstance(resume_from_checkpoint, bool | None) else Path(resume_from_checkpoint)
        ignores_skip = self.args.ignore_data_skip
        self._is_training.fill_(True)
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._is_training.fill_(False)
            self.args.ignore_data_skip = ignores_skip
            self._checkpoint = None
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is not None:
            self.load_released(best)
        elif self.average is not None:
            self.average.swap()
        self._drop_training_weights(merge=True)
        if self.args.push_to_hub:
            self.push_to_hub()
        return output

    def _begin_training(self) -> None:
        """Load the training weights of the checkpoint to resume from, or start a new average."""
        self._diverged_at = None
        if self.args.process_index:  # with one seed all processes would draw the same dropout
            torch.manual_seed(derive_seed(self.args.seed, self.args.process_index))
        if self._checkpoint is not None:
            self._load_training_weights(self._checkpoint)
        elif self.average_decay is not None:
            self._start_average()

    def _start_average(self) -> WeightAverage:
        self.average = WeightAverage(cast(nn.Module, self.model), cast(float, self.average_decay))
        return self.average

    def _load_training_weights(self, checkpoint: Path) -> None:
        """Load the released weights, and what `_save_training_state` wrote; the Trainer has loaded sharded weights."""
        if self.is_fsdp_enabled:
            if self.average_decay is not None:
                load_fsdp_model(*self._sharded(), str(checkpoint), model_index=_RELEASED)
                self._start_average()
                load_fsdp_model(*self._sharded(), str(checkpoint))
            return
        if self.adapter is None:
            self._load_weights(checkpoint)
            if self.average_decay is None:
                return
        weights = checkpoint / TRAINING_WEIGHTS
        if not weights.is_file():
            raise UserError(
                f"the checkpoint {checkpoint} has no {weights.name}, because it was written with other settings; "
                "resume with those settings"
            )
        state = load_file(weights)
        if self.average_decay is not None:
            self._start_average().take(state)
        self.bare_model().load_state_dict(state)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate or predict with the weights that would be released, as transformers does."""
        with self._use_released_weights():
            if self.args.world_size > 1:
                share_statistics(self.bare_model())
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights that would be released; of weights that stay sharded, save the configuration only.

        `_internal_call` is set by the Trainer, which saves a checkpoint or the model to push.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        plugin: Any = getattr(self.accelerator.state, "fsdp_plugin", None)
        stays_sharded = plugin is not None and "SHARDED" in str(plugin.state_dict_type)
        model: Any = self.bare_model()
        with self._use_released_weights():
            if self.adapter is None or stays_sharded:
                super().save_model(str(folder), _internal_call=True)
            else:
                state: Any = self.accelerator.get_state_dict(cast(nn.Module, self.model))
                if self.args.should_save:
                    model.save_pretrained(folder, state_dict=self.adapter.make_merged_state(state))
                    if self.processing_class is not None:
                        self.processing_class.save_pretrained(folder)
        if self.args.should_save:
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            is_saved = isinstance(model, PreTrainedModel) and not stays_sharded
            if not is_saved and isinstance(getattr(model, "config", None), PreTrainedConfig):
                model.config.save_pretrained(folder)  # the Trainer saves the weights only
        if _internal_call and output_dir is not None and not self.args.save_only_model:  # into a checkpoint
            self._save_training_state(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save", revision=self.args.hub_revision)

    def _save_training_state(self, checkpoint: Path) -> None:
        """Save the state that resuming needs in addition to the released weights and the Trainer's files."""
        if self.stream is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)  # the main process may not have created it yet
            torch.save(self.stream.state_dict(), self._get_stream_file(checkpoint))
        if self.is_fsdp_enabled:  # the Trainer saves sharded training weights itself
            if self.average is not None:
                with self._use_released_weights():
                    save_fsdp_model(*self._sharded(), str(checkpoint), model_index=_RELEASED)
        elif self.args.should_save and (self.average is not None or self.adapter is not None):
            state = {name: value.contiguous() for name, value in self.bare_model().state_dict().items()}
            if self.average is not None:
                state |= self.average.remainder()
            save_file(state, checkpoint / TRAINING_WEIGHTS)

    def load_released(self, checkpoint: str) -> None:
        """Replace the training weights by the released weights of a checkpoint."""
        if self.is_fsdp_enabled:
            index = 0 if self.average_decay is None else _RELEASED
            load_fsdp_model(*self._sharded(), checkpoint, model_index=index)
            self._drop_training_weights(merge=True)
            return
        self._drop_training_weights(merge=False)
        self._load_weights(Path(checkpoint))

    def _load_weights(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights, also where transformers saves them under names that its Trainer does not load.

        It saves a ViT with the names of its first version, for example.
        """
        model = self.bare_model()
        paths = sorted(checkpoint.glob("model*.safetensors"))
        state = {name: value for path in paths for name, value in load_file(path).items()}
        if isinstance(model, PreTrainedModel) and not state.keys() <= model.state_dict().keys():
            state = type(model).from_pretrained(checkpoint).state_dict()
        model.load_state_dict(state, strict=False)

    def _drop_training_weights(self, merge: bool) -> None:
        """Discard average and adapter, so that the model holds one set of complete weights."""
        self.average = None
        reshard(cast(nn.Module, self.model))
        if self.adapter is not None:
            self.adapter.remove(merge)
            self.adapter = None

    def _use_released_weights(self) -> AbstractContextManager[None]:
        """Put the released weights into the model inside a `with` block."""
        return nullcontext() if self.average is None else self.average.use_averages()

    def bare_model(self) -> nn.Module:
        """Return the model without the wrappers of distributed training and compilation."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _sharded(self) -> tuple[Any, Any, nn.Module]:
        """Return the leading arguments of accelerate's functions for sharded weights."""
        return self.accelerator.state.fsdp_plugin, self.accelerator, cast(nn.Module, self.model)

    def _get_stream_file(self, checkpoint: Path) -> Path:
        """Return the file with the position of this process in its part of a stream."""
        return checkpoint / f"stream_{self.args.process_index}.pt"

    def _takes_probabilities(self) -> bool:
        return get_problem_type(self.bare_model()) == "single_label_classification"

    # The Hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check before the training that its result can be shared; the repository is created when it is shared."""
        if self.is_world_process_zero():
            self.hub_model_id = check_trainer(self, token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model into the output folder, record the training, and share both; see `hf_vit.push_to_hub`.

        Returns a `PushResult` on the main process, None on others. A failure raises and leaves the saved model.
        """
        if not blocking:
            raise UserError("push_to_hub(blocking=False) would hide errors of the upload; use blocking=True")
        if not self.hub_model_id:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        return share_training(self, commit_message or "End of training", token, revision, private)


@final
class _BetweenSteps(TrainerCallback):
    """Updates the average, the epoch of a stream and the check of the loss of an `HfViTTrainer` between steps."""

    def __init__(self, trainer: HfViTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer._begin_training()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.average is not None:
            self.trainer.average.update()
        if self.trainer.stream is not None:  # a stream has no epochs: this is the share of the training done so far
            state.epoch = state.global_step / state.max_steps
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_log or control.should_evaluate or control.should_save or control.should_training_stop:
            self.trainer._raise_if_diverged()


def _is_of_transformers(model: Any) -> bool:
    """Return whether transformers defines the classifier; its loss would treat probabilities as multi-label targets."""
    if hasattr(model, "get_base_model"):  # a model wrapped by peft
        model = model.get_base_model()
    class_names = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    is_classifier = any(base.__name__ in class_names for base in type(model).__mro__)
    return is_classifier and find_family(model.config.model_type) is None
