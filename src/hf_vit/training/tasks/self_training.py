"""Self-training on unlabeled images: Noisy Student (arXiv 1911.04252) and Meta Pseudo Labels (arXiv 2003.10580).

Where the paper of meta pseudo labels and its code differ, this follows algorithm 1 (appendix B): the labels are drawn
from the teacher's probabilities (with the code's soft labels the gradient vanishes), and the feedback is the student's
improvement, not its negative. The moving baseline of the feedback and UDA's ramp and threshold are those of the code.

Legend: U unlabeled images, B labeled images of a batch, r unlabeled images per labeled one, n images, K classes.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer, TrainerCallback

from hf_vit.data import AugmentationConfig, ImageCollator, TransformedImages, train_transform
from hf_vit.data.images import decode_image, undecode_images
from hf_vit.data.load import UnlabeledImages, load_unlabeled
from hf_vit.errors import UserError
from hf_vit.loading.pixels import PixelScale
from hf_vit.loading.start import get_least_size
from hf_vit.models.pretrained_hf_vit import compute_classification_loss
from hf_vit.training.plan import Run, Start
from hf_vit.training.processes import make_refusal, world_size
from hf_vit.training.tasks.classification import build_for_classes
from hf_vit.training.tasks.distillation import TaughtTask, Teacher
from hf_vit.training.tasks.task import Views, find_active_settings, stack_pixels
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.losses import smooth_labels
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe, SelfTrainingOptions

UNLABELLED, TEACHER_STATE = "unlabelled", "teacher.pt"
_TEACHER_BATCH = 64  # images per forward pass
# Settings that do not work with pseudo-labels -> the option that turns them off.
_TURNED_OFF = {
    "loss": "--loss ce",
    "class_weights": "--no-class-weights",
    "mixup_alpha": "--mixup-alpha 0",
    "cutmix_alpha": "--cutmix-alpha 0",
    "repeated_augmentation": "--repeated-augmentation 1",
}
_BASELINE_SHARE = 0.01  # weight of a new feedback in the baseline, as in the authors' code


@final
class WithUnlabeled(torch.utils.data.Dataset[dict[str, Any]]):
    """Labeled examples, each with `ratio` unlabeled ones (from `rows`) under the key "unlabelled".

    An epoch is one pass over the labeled images. The unlabeled images have shuffled passes of their own, independent of
    the epochs. Order and augmentation depend on (seed, epoch, position) only (see `sampling`).
    """

    def __init__(
        self, labeled: TransformedImages, unlabeled: TransformedImages, rows: Sequence[int], ratio: int, seed: int
    ) -> None:
        self.labeled = labeled
        self.unlabeled = unlabeled
        self.ratio = ratio
        self.seed = seed
        self.rows = torch.as_tensor(rows)
        unlabeled.set_epoch(0)  # the epoch stays 0 because the number of the draw already varies the augmentation
        self._epoch = 0
        self._orders: dict[int, torch.Tensor] = {}  # pass -> order, of the last two passes

    def __len__(self) -> int:
        return len(self.labeled)

    def set_epoch(self, epoch: int) -> None:
        """Use the draws and augmentations of this epoch from now on."""
        self._epoch = epoch
        self.labeled.set_epoch(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the examples of labeled images, each with its unlabeled ones."""
        start = self._epoch * len(self)
        draws = [(start + index) * self.ratio + copy for index in indices for copy in range(self.ratio)]
        unlabeled = self.unlabeled.varied([self._get_row(draw) for draw in draws], draws)
        groups = (unlabeled[first : first + self.ratio] for first in range(0, len(unlabeled), self.ratio))
        pairs = zip(self.labeled.__getitems__(indices), groups, strict=True)
        return [{**example, UNLABELLED: group} for example, group in pairs]

    def _get_row(self, draw: int) -> int:
        """Return the row of the unlabeled image with this number, counted through all passes."""
        pass_number, position = divmod(draw, len(self.rows))
        if pass_number not in self._orders:
            for old_pass in sorted(self._orders)[:-1]:
                del self._orders[old_pass]
            generator = torch.Generator().manual_seed(derive_seed(self.seed, pass_number))
            self._orders[pass_number] = torch.randperm(len(self.rows), generator=generator)
        return int(self.rows[self._orders[pass_number][position]])


class UnlabeledCollator:
    """Combines examples as `ImageCollator` does; `join` then adds their unlabeled examples to the labeled batch."""

    def __init__(
        self, num_labels: int, join: Callable[[dict[str, torch.Tensor], list[dict[str, Any]]], dict[str, torch.Tensor]]
    ) -> None:
        self._collate_labeled = ImageCollator(num_labels)
        self._join = join

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate the labeled images, and add the unlabeled ones that training examples carry."""
        batch = self._collate_labeled(examples)
        if UNLABELLED not in examples[0]:
            return batch
        return self._join(batch, [unlabeled for example in examples for unlabeled in example[UNLABELLED]])


class SelfTraining(TaughtTask):
    """Abstract: a task whose classifier learns from labeled images, and from unlabeled ones with pseudo-labels.

    Unlabeled images with the content of validation or test images are left out.
    """

    options: SelfTrainingOptions
    unlabeled: UnlabeledImages  # exists after `build`

    def __init__(self, options: SelfTrainingOptions, device: str | None = None, skip_bad_images: bool = False) -> None:
        super().__init__(options, device)
        self._skip_bad_images = skip_bad_images

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "unlabelled": f"{self.unlabeled.name} {self.unlabeled.fingerprint}",
            "unlabelled_images": len(self.unlabeled.seen),
            "unlabelled_images_left_out": self.unlabeled.left_out,
        }

    def check(self, recipe: Recipe) -> None:
        active = find_active_settings(recipe, tuple(_TURNED_OFF))
        if active:
            values = ", ".join(f"{name} {value}" for name, value in active.items())
            remedy = f"use --recipe {self.options.kind}"
            if recipe.bce_threshold is None:  # else --loss ce alone is refused
                remedy = f"add {' '.join(map(_TURNED_OFF.__getitem__, active))}, or {remedy}"
            raise UserError(f"pseudo-labels do not work with {values} of the recipe {recipe.name}; {remedy}")

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the student, and on the first call read the unlabeled images that are not in other splits."""
        data = start.data
        if data.readers:
            raise UserError("--streaming does not work with self-training; leave --streaming out")
        self.teacher = self.teacher.select_classes(data.label_names)
        if not hasattr(self, "unlabeled"):
            images = load_unlabeled(
                self.options.unlabelled,
                image_size=start.image_size,
                min_size=get_least_size(start.source),
                skip_bad_images=self._skip_bad_images,
            )
            allowed_images = images.without(
                {image.digest for name in ("validation", "test") for image in data.seen[name]}
            )
            if not allowed_images.seen:
                raise UserError(
                    f"all {len(images.seen)} unlabeled images of {images.name} are also validation or test images of "
                    f"{data.name}; give other unlabeled images"
                )
            self.unlabeled = self.select(allowed_images)
        return build_for_classes(start, recipe)

    def list_training_digests(self, run: Run) -> list[str]:
        return [*super().list_training_digests(run), *(image.digest for image in self.unlabeled.seen)]

    def describe(self, run: Run) -> str:
        images = self.unlabeled
        ratio = run.task["unlabelled_ratio"]
        left_out = f" ({images.left_out:,} skipped)" if images.left_out else ""
        return (
            f"{super().describe(run)}; {self.options.kind} with {ratio} unlabeled images per labeled one, from "
            f"{len(images.seen):,} of {images.name}{left_out}"
        )

    def choose_images(self, run: Run, transform: Any) -> WithUnlabeled:
        unlabeled = TransformedImages(self.unlabeled.table, self.make_unlabeled_transform(run))
        labeled = super().choose_images(run, transform)
        return WithUnlabeled(labeled, unlabeled, self.list_rows(run), run.task["unlabelled_ratio"], run.options.seed)

    def select(self, images: UnlabeledImages) -> UnlabeledImages:
        """Select the images to learn from; by default all."""
        return images

    def list_rows(self, run: Run) -> list[int]:
        """Return the rows of the unlabeled images in one pass."""
        return list(range(len(self.unlabeled.seen)))

    @abstractmethod
    def make_unlabeled_transform(self, run: Run) -> Any:
        """Make the transform of unlabeled images."""


def balance_rows(confidence: torch.Tensor, classes: torch.Tensor, per_class: int, seed: int) -> list[int]:
    """Return the rows of `per_class` images of every class (arXiv 1911.04252, section 3.1, filtering and balancing).

    Of a class with more images, those with the highest `confidence` [n] are kept; the images of a smaller class are
    repeated. `classes` [n] are the pseudo-labels of all n images.
    """
    rows: list[int] = []
    for label in classes.unique().tolist():
        members = torch.nonzero(classes == label)[:, 0]
        members = members[confidence[members].argsort(descending=True, stable=True)][:per_class]
        repeats, rest = divmod(per_class, len(members))
        generator = torch.Generator().manual_seed(derive_seed(seed, label))
        extra = members[torch.randperm(len(members), generator=generator)[:rest]]
        rows += [*members.tolist() * repeats, *extra.tolist()]
    return rows


@final
class NoisyStudent(SelfTraining):
    """Noisy Student: the teacher labels the unchanged images once, and the student learns these labels under noise.

    The noise is that of the recipe (RandAugment, stochastic depth) and dropout before the head. Labeled and unlabeled
    images form one batch, whose mean cross-entropy is the loss (section 3.1).
    """

    recipe = "noisy-student"
    # The collator smooths class indices itself, because the teacher's probabilities must stay unchanged.
    arguments: ClassVar[dict[str, Any]] = {"label_smoothing_factor": 0.0}

    _probabilities: torch.Tensor  # [U, K], the teacher's, of the selected images
    _noise: list[RemovableHandle]

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the student, with dropout before its heads."""
        student, processor = super().build(start, recipe)
        rate = self.options.settings()["head_dropout"]

        def drop(head: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            return F.dropout(inputs[0], rate, head.training)

        heads = [head for name, head in student.named_children() if name.endswith("classifier")]
        self._noise = [head.register_forward_pre_hook(drop) for head in heads]
        return student, processor

    def get_released(self, module: Any) -> PreTrainedModel:
        for handle in self._noise:
            handle.remove()
        return module

    def select(self, images: UnlabeledImages) -> UnlabeledImages:
        """Keep the images that the teacher labels with enough confidence, and their probabilities."""
        minimum = self.options.settings()["confidence"]
        table = undecode_images(images.table)
        batches = (table[start : start + _TEACHER_BATCH]["image"] for start in range(0, len(table), _TEACHER_BATCH))
        logits = [self.teacher.classify(list(map(decode_image, batch))) for batch in batches]
        probabilities = torch.cat(logits).softmax(dim=1)
        confidence = probabilities.amax(dim=1)
        rows = torch.nonzero(confidence >= minimum)[:, 0].tolist()
        if not rows:
            raise UserError(
                f"teacher {self.teacher.loaded.name} labels none of the {len(images.seen)} images of "
                f"{images.name}: its highest confidence is {float(confidence.max()):.2f}, below --confidence "
                f"{minimum:g}; lower --confidence, or train a better teacher"
            )
        self._probabilities = probabilities[rows]
        return images.select(rows)

    def list_rows(self, run: Run) -> list[int]:
        confidence, classes = self._probabilities.max(dim=1)
        per_class = min(int(classes.bincount().max()), run.task["images_per_class"])
        return balance_rows(confidence, classes, per_class, run.options.seed)

    def settings(self) -> dict[str, Any]:
        counts = self._probabilities.argmax(dim=1).bincount(minlength=self._probabilities.shape[1])
        return {**super().settings(), "unlabelled_images_of_classes": counts.tolist()}

    def make_unlabeled_transform(self, run: Run) -> Any:
        return train_transform(run.processor, run.recipe.augmentation, derive_seed(run.options.seed, 1))

    def make_collator(self, run: Run) -> Any:
        is_hard = run.task["pseudo_labels"] == "hard"
        return UnlabeledCollator(
            len(run.data.label_names), JoinPseudoLabeled(self._probabilities, run.recipe.label_smoothing, is_hard)
        )


@final
class JoinPseudoLabeled:
    """Appends unlabeled images to a labeled batch: [B (1 + r), C, H, W] with probabilities [B (1 + r), K] as labels.

    Hard pseudo-labels are the teacher's most likely classes, smoothed like the labels.
    """

    def __init__(self, probabilities: torch.Tensor, smoothing: float, is_hard: bool) -> None:
        self._smooth = partial(smooth_labels, num_labels=probabilities.shape[1], smoothing=smoothing)
        self._targets = self._smooth(probabilities.argmax(dim=1)) if is_hard else probabilities

    def __call__(self, batch: dict[str, torch.Tensor], unlabeled: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pseudo_labels = self._targets[[example["index"] for example in unlabeled]]
        return {
            "pixel_values": torch.cat([batch["pixel_values"], stack_pixels(unlabeled)]),
            "labels": torch.cat([self._smooth(batch["labels"]), pseudo_labels]),
        }


def consistency_loss(weak: torch.Tensor, strong: torch.Tensor, temperature: float, threshold: float) -> torch.Tensor:
    """Return UDA's loss (arXiv 1904.12848) in nats between logits [n, K] of weakly and strongly augmented images.

    The targets are the probabilities of the weak logits, sharpened by the temperature and without gradient. Images
    whose most likely class has a probability below the threshold add 0 to the mean.
    """
    targets = (weak.detach() / temperature).softmax(dim=1)
    is_confident = targets.amax(dim=1) >= threshold
    return (F.cross_entropy(strong, targets, reduction="none") * is_confident).mean()


def estimate_improvement(
    loss: torch.Tensor, weights: Sequence[nn.Parameter], old_weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Estimate to first order how much a step has lowered a loss: its gradient at the new weights times (old - new).

    After a step of plain SGD this is algorithm 1's feedback, the product of eta, the gradient of CE(y_l, S(x_l)) at the
    new weights and that of CE(y_u, S(x_u)) at the old ones. Other optimizers only change the step.
    """
    gradients: list[torch.Tensor | None] = list(torch.autograd.grad(loss, weights, allow_unused=True))
    products = [
        ((old - new.detach()) * gradient).sum()
        for old, new, gradient in zip(old_weights, weights, gradients, strict=True)
        if gradient is not None
    ]
    return torch.stack(products).sum()


@final
class TeacherGradients:
    """Accumulates the gradients of the teacher's `weights` over the micro-batches of a step."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = weights
        # The gradients of the loss on pseudo-labels, whose factor is known only after the student's step.
        self.pending: list[torch.Tensor | None] = [None] * len(weights)

    def add(self, loss: torch.Tensor, pseudo_label_loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch: of the teacher's own loss, and of the loss on its pseudo-labels."""
        gradients = torch.autograd.grad(pseudo_label_loss, self.weights, retain_graph=True, allow_unused=True)
        loss.backward()
        for index, gradient in enumerate(cast(Sequence[torch.Tensor | None], gradients)):
            pending = self.pending[index]
            if gradient is not None:
                self.pending[index] = gradient if pending is None else pending + gradient

    @torch.no_grad()
    def finish(self, feedback: torch.Tensor) -> None:
        """Add feedback * the pending gradients to those of the weights, and clear them for the next step."""
        for weight, gradient in zip(self.weights, self.pending, strict=True):
            if gradient is not None:
                weight.grad = gradient * feedback if weight.grad is None else weight.grad + gradient * feedback
        self.pending = [None] * len(self.weights)


@final
class MetaPseudoLabelsTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose student learns pseudo-labels only, while a copy of the teacher is trained as well.

    In every step the labels of strongly augmented unlabeled images are drawn from the teacher's probabilities, and the
    student learns them. The teacher learns the labeled images, consistency (`consistency_loss`), and to prefer
    the pseudo-labels that improved the student on the labeled images (`estimate_improvement`). Its optimizer has the
    kind, rate and schedule of the student's. Only the student is evaluated and released (algorithm 1).
    """

    def __init__(self, *args: Any, teacher: Teacher, self_training: SelfTrainingOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = copy.deepcopy(teacher.loaded.model).float().requires_grad_(True).to(self.args.device)
        self.teacher = replace(teacher, loaded=replace(teacher.loaded, model=model))
        self.self_training = self_training.settings()
        self.baseline = torch.zeros((), device=self.args.device)
        self.teacher_gradients = TeacherGradients(list(model.parameters()))
        self.teacher_optimizer: torch.optim.Optimizer
        self._scale = PixelScale.from_processor(self.processing_class)
        self._batches: list[dict[str, Any]] = []
        self.old_weights: list[torch.Tensor] = []  # the student's weights before its step
        self.add_callback(_TeacherStep(self))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizers of student and teacher, which are of the same kind."""
        optimizer = super().create_optimizer(model)
        self.optimizer = None  # transformers creates one only where there is none
        self.teacher_optimizer = Trainer.create_optimizer(self, self.teacher.loaded.model)
        self.optimizer = optimizer
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and store them to measure the step on their labeled images afterwards."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._batches = batches
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the student's loss on the teacher's pseudo-labels in training, and on the labels in evaluation."""
        if UNLABELLED not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        student_inputs = {"pixel_values": inputs[UNLABELLED][:, 1], "labels": self._draw_labels(inputs)}
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch * (len(student_inputs["labels"]) // len(inputs["labels"]))
        return super().compute_loss(model, student_inputs, return_outputs, num_items_in_batch)

    def _draw_labels(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Draw the pseudo-labels [B r] of a micro-batch, and add its gradients to those of the teacher."""
        labels = inputs["labels"]
        options = self.self_training
        weak_images, strong_images = inputs[UNLABELLED].unbind(1)  # weakly and strongly augmented
        self.teacher.loaded.model.train()
        with self.accelerator.autocast():
            labeled = self.teacher.logits(inputs["pixel_values"], self._scale)
            strong = self.teacher.logits(strong_images, self._scale)
            with torch.no_grad():
                weak = self.teacher.logits(weak_images, self._scale)
        weight = options["uda_weight"] * self.state.global_step / self.state.max_steps
        loss = F.cross_entropy(labeled, labels, label_smoothing=self.args.label_smoothing_factor)
        loss = loss + weight * consistency_loss(weak, strong, options["uda_temperature"], options["uda_threshold"])
        self._check_loss(loss.detach())
        pseudo_labels = torch.multinomial(strong.detach().softmax(dim=1), 1)[:, 0]
        share = self._compute_share(labels)
        self.teacher_gradients.add(share * loss, share * F.cross_entropy(strong, pseudo_labels))
        return pseudo_labels

    def _compute_share(self, labels: torch.Tensor) -> float:
        """Return the share of a micro-batch with these labels in the images of its step."""
        return len(labels) / sum(len(batch["labels"]) for batch in self._batches)

    def update_teacher(self) -> None:
        """Make the teacher's optimizer step, after the student's."""
        feedback = torch.stack([self._measure_step(self._prepare_inputs(batch)) for batch in self._batches]).sum()
        self.baseline = torch.lerp(self.baseline, feedback, _BASELINE_SHARE)
        self.teacher_gradients.finish(feedback - self.baseline)
        if self.args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self.teacher_gradients.weights, self.args.max_grad_norm)
        student_optimizer: Any = self.optimizer
        factor = student_optimizer.param_groups[0]["lr"] / student_optimizer.param_groups[0]["initial_lr"]
        for group in self.teacher_optimizer.param_groups:
            group["lr"] = self.args.learning_rate * factor
        self.teacher_optimizer.step()
        self.teacher_optimizer.zero_grad()

    def _measure_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Estimate how much the student's step has lowered its loss on a labeled micro-batch."""
        model: Any = self.model
        with self.accelerator.autocast():
            outputs = model(pixel_values=batch["pixel_values"])
        loss = compute_classification_loss(outputs.logits, batch["labels"]) * self._compute_share(batch["labels"])
        return estimate_improvement(loss, self.list_student_weights(), self.old_weights)

    def list_student_weights(self) -> list[nn.Parameter]:
        """Return the trained weights of the student."""
        model: Any = self.model
        return [weight for weight in model.parameters() if weight.requires_grad]

    def _save_training_state(self, checkpoint: Path) -> None:
        """Save the teacher, its optimizer and the baseline in addition to the student's state."""
        super()._save_training_state(checkpoint)
        state = {
            "model": self.teacher.loaded.model.state_dict(),
            "optimizer": self.teacher_optimizer.state_dict(),
            "baseline": self.baseline,
        }
        torch.save(state, checkpoint / TEACHER_STATE)

    def _begin_training(self) -> None:
        """Load the state of student and teacher from the checkpoint to resume from."""
        super()._begin_training()
        if self._checkpoint is not None:
            state = torch.load(self._checkpoint / TEACHER_STATE, weights_only=True, map_location=self.args.device)
            self.teacher.loaded.model.load_state_dict(state["model"])
            self.teacher_optimizer.load_state_dict(state["optimizer"])
            self.baseline = state["baseline"]


@final
class _TeacherStep(TrainerCallback):
    """Copies the student's weights before each of its steps, and updates the teacher after it."""

    def __init__(self, trainer: MetaPseudoLabelsTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.old_weights = [weight.detach().clone() for weight in self.trainer.list_student_weights()]

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.update_teacher()


@final
class MetaPseudoLabels(SelfTraining):
    """Meta Pseudo Labels: the student learns pseudo-labels only; it should be fine-tuned on labels afterwards."""

    recipe = "meta-pseudo-labels"
    trainer_class = MetaPseudoLabelsTrainer

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        if world_size() > 1:
            raise make_refusal("meta pseudo labels")
        if recipe.sam_rho > 0:
            raise UserError(f"--sam-rho {recipe.sam_rho:g} does not work with meta-pseudo-labels; leave --sam-rho out")
        if not self.teacher.loaded.is_differentiable:
            raise UserError(
                f"meta-pseudo-labels trains the teacher too, but {self.teacher.loaded.name} is optimized or "
                "exported and cannot be trained; give the original model"
            )

    def count_extra_bytes(self) -> int:
        return 3 * sum(weight.numel() * 4 for weight in self.teacher.loaded.model.parameters())

    def make_transforms(self, run: Run) -> tuple[Any, Any]:
        _, validation_transform = super().make_transforms(run)
        return train_transform(run.processor, _make_weak(run), run.options.seed), validation_transform

    def make_unlabeled_transform(self, run: Run) -> Any:
        seed = run.options.seed
        weak = train_transform(run.processor, _make_weak(run), derive_seed(seed, 1))
        return Views(weak, train_transform(run.processor, run.recipe.augmentation, derive_seed(seed, 2)))

    def make_collator(self, run: Run) -> Any:
        return UnlabeledCollator(len(run.data.label_names), _add_unlabeled)

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        return {**super().prepare_trainer(run), "teacher": self.teacher, "self_training": self.options}


def _make_weak(run: Run) -> AugmentationConfig:
    """Return the recipe's augmentation without RandAugment, policies, color jitter and erasing."""
    return replace(run.recipe.augmentation, randaugment=None, auto_augment=None, color_jitter=0.0, random_erasing=0.0)


def _add_unlabeled(batch: dict[str, torch.Tensor], unlabeled: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Add the views of unlabeled images to a labeled batch, under a key of their own."""
    return {**batch, UNLABELLED: stack_pixels(unlabeled)}
