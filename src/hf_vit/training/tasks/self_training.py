"""Self-training on unlabeled images: Noisy Student (arXiv 1911.04252) and Meta Pseudo Labels (arXiv 2003.10580).

Meta pseudo labels follow algorithm 1 (appendix B) where the authors' code differs: they are drawn from the teacher's
probabilities (of the code's soft ones the gradient vanishes), and the feedback is the improvement of the student, not
its negative. From the code come the moving baseline that is taken off the feedback, and the ramp and threshold of UDA.

Legend: U unlabeled images, B labeled images of a batch, r unlabeled images per labeled one, K labels.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TrainerCallback

from hf_vit.data import AugmentationConfig, ImageCollator, TransformedImages, to_rgb, train_transform
from hf_vit.data.load import UnlabeledImages, load_unlabeled
from hf_vit.errors import UserError
from hf_vit.loading.pixels import PixelScale
from hf_vit.models.pretrained_hf_vit import classification_loss
from hf_vit.training.plan import Run, Start
from hf_vit.training.processes import refusal_of, world_size
from hf_vit.training.tasks.classification import build_for_classes
from hf_vit.training.tasks.distillation import TaughtTask, Teacher
from hf_vit.training.tasks.task import Views, active_settings
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.losses import smooth_labels
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe, SelfTrainingOptions

UNLABELLED, TEACHER_STATE = "unlabelled", "teacher.pt"
_AT_ONCE = 64  # images of a forward pass of the teacher
_BASELINE_SHARE = 0.01  # of every new feedback in the baseline: the authors' code


@final
class WithUnlabelled(torch.utils.data.Dataset[dict[str, Any]]):
    """Labeled examples, each with `ratio` unlabeled ones (of `rows`) under the key "unlabelled".

    An epoch is one of the labeled images. The unlabeled ones come in shuffled passes of their own, which run on through
    the epochs. What comes, and how it is augmented, depends on (seed, epoch, position) alone (see `sampling`).
    """

    def __init__(
        self, labelled: TransformedImages, unlabelled: TransformedImages, rows: Sequence[int], ratio: int, seed: int
    ) -> None:
        self.labelled, self.unlabelled, self.ratio, self.seed = labelled, unlabelled, ratio, seed
        self.rows = torch.as_tensor(rows)
        unlabelled.set_epoch(0)  # the number of the draw tells the variations apart
        self._epoch = torch.tensor(0).share_memory_()
        self._orders: dict[int, torch.Tensor] = {}  # of the passes that were drawn from last

    def __len__(self) -> int:
        return len(self.labelled)

    def set_epoch(self, epoch: int) -> None:
        """Draw and augment as in this epoch from now on."""
        self._epoch.fill_(epoch)
        self.labelled.set_epoch(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return examples of the labeled images, each with its unlabeled ones."""
        begin = int(self._epoch) * len(self)
        draws = [(begin + index) * self.ratio + which for index in indices for which in range(self.ratio)]
        others = self.unlabelled.varied([self._row(draw) for draw in draws], draws)
        shares = (others[start : start + self.ratio] for start in range(0, len(others), self.ratio))
        return [
            {**example, UNLABELLED: share}
            for example, share in zip(self.labelled.__getitems__(indices), shares, strict=True)
        ]

    def _row(self, draw: int) -> int:
        number, place = divmod(draw, len(self.rows))
        if number not in self._orders:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, number))
            kept = {key: self._orders[key] for key in sorted(self._orders)[-1:]}
            self._orders = {**kept, number: torch.randperm(len(self.rows), generator=generator)}
        return int(self.rows[self._orders[number][place]])


class UnlabelledCollator:
    """Collates as `ImageCollator` does; `join` adds the examples of unlabeled images to the labeled batch."""

    def __init__(
        self, num_labels: int, join: Callable[[dict[str, torch.Tensor], list[dict[str, Any]]], dict[str, torch.Tensor]]
    ) -> None:
        self._labelled, self._join = ImageCollator(num_labels), join

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._labelled(examples)
        if UNLABELLED not in examples[0]:
            return batch
        return self._join(batch, [other for example in examples for other in example[UNLABELLED]])


def stacked(examples: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the pixels of examples, [n, ...]."""
    return torch.stack([torch.as_tensor(example["pixel_values"]) for example in examples])


class SelfTraining(TaughtTask):
    """Abstract: a classifier that learns from labeled images and from unlabeled ones with pseudo-labels.

    Unlabeled images whose contents are among the validation and test images are left out.
    """

    options: SelfTrainingOptions
    unlabelled: UnlabeledImages  # once a run is prepared

    def __init__(self, options: SelfTrainingOptions, device: str | None = None, skip_bad_images: bool = False) -> None:
        super().__init__(options, device)
        self._skip_bad_images = skip_bad_images

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "unlabelled": f"{self.unlabelled.name} {self.unlabelled.fingerprint}",
            "unlabelled_images": len(self.unlabelled.seen),
            "unlabelled_images_left_out": self.unlabelled.left_out,
        }

    def check(self, recipe: Recipe) -> None:
        names = ("loss", "class_weights", "mixup_alpha", "cutmix_alpha", "repeated_augmentation")
        if active := active_settings(recipe, names):
            wrong = ["--loss bce" if name == "loss" else f"--{name.replace('_', '-')}" for name in active]
            raise UserError(
                f"{', '.join(wrong)} of the recipe {recipe.name}: pseudo-labels need the plain softmax "
                f"cross-entropy; leave it out, or choose --recipe {self.options.kind}"
            )

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        data = start.data
        if data.readers:
            raise UserError("self-training cannot draw unlabeled images from a stream; leave --streaming out")
        self.teacher = self.teacher.for_classes(data.label_names)
        if not hasattr(self, "unlabelled"):
            images = load_unlabeled(
                self.options.unlabelled,
                image_size=start.image_size,
                min_size=start.source.config.patch_stride,
                skip_bad_images=self._skip_bad_images,
            )
            learnable = images.without({image.digest for name in ("validation", "test") for image in data.seen[name]})
            if not learnable.seen:
                raise UserError(
                    f"all {len(images.seen)} unlabeled images of {images.name} are validation or test "
                    f"images of {data.name}; give others"
                )
            self.unlabelled = self.select(learnable)
        return build_for_classes(start, recipe)

    def learnt_from(self, run: Run) -> list[str]:
        return [*super().learnt_from(run), *(image.digest for image in self.unlabelled.seen)]

    def describe(self, run: Run) -> str:
        images, ratio = self.unlabelled, run.task["unlabelled_ratio"]
        left_out = f" ({images.left_out:,} left out)" if images.left_out else ""
        return (
            f"{super().describe(run)}; {self.options.kind} with {ratio} of {len(images.seen):,} unlabelled images of "
            f"{images.name}{left_out} beside each"
        )

    def training_images(self, run: Run, transform: Any) -> WithUnlabelled:
        others = TransformedImages(self.unlabelled.table, self.unlabelled_transform(run))
        labelled = super().training_images(run, transform)
        return WithUnlabelled(labelled, others, self.rows(run), run.task["unlabelled_ratio"], run.options.seed)

    def select(self, images: UnlabeledImages) -> UnlabeledImages:
        """Return the images to learn from."""
        return images

    def rows(self, run: Run) -> list[int]:
        """Return the rows of the unlabeled images that one pass has."""
        return list(range(len(self.unlabelled.seen)))

    @abstractmethod
    def unlabelled_transform(self, run: Run) -> Any:
        """Return the transform of unlabeled images."""


def balanced_rows(confidence: torch.Tensor, classes: torch.Tensor, per_class: int, seed: int) -> list[int]:
    """Return rows with every class equally often (arXiv 1911.04252, section 3.1, data filtering and balancing).

    Of a class with more images the surest, by `confidence` [U] in `classes` [U]; of one with fewer all, and some again.
    """
    rows: list[int] = []
    for label in classes.unique().tolist():
        inside = torch.nonzero(classes == label)[:, 0]
        inside = inside[confidence[inside].argsort(descending=True, stable=True)][:per_class]
        whole, rest = divmod(per_class, len(inside))
        generator = torch.Generator().manual_seed(derive_seed(seed, label))
        again = inside[torch.randperm(len(inside), generator=generator)[:rest]]
        rows += [*inside.tolist() * whole, *again.tolist()]
    return rows


@final
class NoisyStudent(SelfTraining):
    """Noisy Student: the teacher, without noise, labels clean images once; the student learns them under noise.

    The noise is the recipe's (RandAugment, stochastic depth) and dropout before the head. Labeled and unlabeled
    images make one batch, whose mean cross-entropy is the loss (section 3.1).
    """

    recipe = "noisy-student"
    # The collator smooths the labels: the teacher's probabilities stay as they are.
    arguments: ClassVar[dict[str, Any]] = {"label_smoothing_factor": 0.0}

    _probabilities: torch.Tensor  # [U, K] of the selected images
    _noise: RemovableHandle

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        student, processor = super().build(start, recipe)
        rate = self.options.settings()["head_dropout"]
        head = student.get_submodule("classifier")
        self._noise = head.register_forward_pre_hook(
            lambda module, inputs: (F.dropout(inputs[0], rate, module.training), *inputs[1:])
        )
        return student, processor

    def released(self, module: Any) -> PreTrainedModel:
        self._noise.remove()
        return module

    def select(self, images: UnlabeledImages) -> UnlabeledImages:
        least, table = self.options.settings()["confidence"], cast(Any, images.table)
        batches = (table[start : start + _AT_ONCE]["image"] for start in range(0, len(table), _AT_ONCE))
        logits = [self.teacher.classify([to_rgb(image) for image in batch]) for batch in batches]
        probabilities = torch.cat(logits).softmax(dim=1)
        sure = probabilities.amax(dim=1)
        rows = torch.nonzero(sure >= least)[:, 0].tolist()
        if not rows:
            raise UserError(
                f"teacher {self.teacher.subject.name} labels none of the {len(images.seen)} unlabeled "
                f"images of {images.name} confidently enough: highest confidence {float(sure.max()):.2f}, "
                f"needed {least:g}; lower --confidence, or train a better teacher"
            )
        self._probabilities = probabilities[rows]
        seen = [images.seen[row] for row in rows]
        left_out = images.left_out + len(images.seen) - len(rows)
        return UnlabeledImages(images.name, images.table.select(rows), seen, left_out)

    def rows(self, run: Run) -> list[int]:
        sure, classes = self._probabilities.max(dim=1)
        most = min(int(classes.bincount().max()), run.task["images_per_class"])
        return balanced_rows(sure, classes, most, run.options.seed)

    def settings(self) -> dict[str, Any]:
        counts = self._probabilities.argmax(dim=1).bincount(minlength=self._probabilities.shape[1])
        return {**super().settings(), "unlabelled_images_of_classes": counts.tolist()}

    def unlabelled_transform(self, run: Run) -> Any:
        return train_transform(run.processor, run.recipe.augmentation, derive_seed(run.options.seed, 1))

    def collator(self, run: Run) -> Any:
        hard = run.task["pseudo_labels"] == "hard"
        return UnlabelledCollator(
            len(run.data.label_names), Join(self._probabilities, run.recipe.label_smoothing, hard)
        )


@final
class Join:
    """One batch [B (1 + r), C, H, W] of labeled and unlabeled images; its labels are probabilities [B (1 + r), K]."""

    def __init__(self, probabilities: torch.Tensor, smoothing: float, hard: bool) -> None:
        self._smoothing, self._num_labels = smoothing, probabilities.shape[1]
        self._targets = self._smooth(probabilities.argmax(dim=1)) if hard else probabilities

    def __call__(self, batch: dict[str, torch.Tensor], unlabelled: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        taught = self._targets[[example["index"] for example in unlabelled]]
        return {
            "pixel_values": torch.cat([batch["pixel_values"], stacked(unlabelled)]),
            "labels": torch.cat([self._smooth(batch["labels"]), taught]),
        }

    def _smooth(self, labels: torch.Tensor) -> torch.Tensor:
        return smooth_labels(labels, self._num_labels, self._smoothing)


def consistency_loss(weak: torch.Tensor, strong: torch.Tensor, temperature: float, threshold: float) -> torch.Tensor:
    """Return UDA's loss (arXiv 1904.12848), nats: the answer to a strongly varied image should be that to the image.

    Of logits [n, K]; no gradient flows into the weak ones, sharpened by the temperature. Images whose likeliest class
    has less probability than the threshold do not count.
    """
    targets = (weak.detach() / temperature).softmax(dim=1)
    counts = targets.amax(dim=1) >= threshold
    return (F.cross_entropy(strong, targets, reduction="none") * counts).mean()


def improvement(loss: torch.Tensor, weights: Sequence[nn.Parameter], before: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return how far a step has lowered a loss, to first order: its gradient at the new weights, times the step back.

    After a step of plain SGD this is algorithm 1's feedback, the product of eta, the gradient of CE(y_l, S(x_l)) at the
    new weights and that of CE(y_u, S(x_u)) at the old ones; after one of another optimizer, that of the step it made.
    """
    slopes: list[torch.Tensor | None] = list(torch.autograd.grad(loss, weights, allow_unused=True))
    parts = [
        ((old - new.detach()) * slope).sum()
        for old, new, slope in zip(before, weights, slopes, strict=True)
        if slope is not None
    ]
    return torch.stack(parts).sum()


@final
class TeachersLesson:
    """Gathers the gradients of the teacher's `weights` from the micro-batches of a step."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = weights
        self.slopes: list[torch.Tensor | None] = [None] * len(weights)

    def add(self, loss: torch.Tensor, of_labels: torch.Tensor) -> None:
        """Add a micro-batch: the teacher's own loss, and that of its pseudo-labels, which waits for the feedback."""
        gradients = torch.autograd.grad(of_labels, self.weights, retain_graph=True, allow_unused=True)
        slopes: list[torch.Tensor | None] = list(gradients)
        loss.backward()
        self.slopes = [
            old if new is None else new if old is None else old + new
            for old, new in zip(self.slopes, slopes, strict=True)
        ]

    @torch.no_grad()
    def finish(self, feedback: torch.Tensor) -> None:
        """Add feedback * grad CE(pseudo-labels) to the weights' gradients, and begin anew."""
        for weight, slope in zip(self.weights, self.slopes, strict=True):
            if slope is not None:
                weight.grad = slope * feedback if weight.grad is None else weight.grad + slope * feedback
        self.slopes = [None] * len(self.weights)


@final
class MetaPseudoLabelsTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose student learns pseudo-labels alone, and whose teacher, a copy, learns along.

    Every step: the teacher labels the strongly varied unlabeled images by chance; the student learns these labels; the
    teacher learns the labeled images, consistency (`consistency_loss`), and to give such labels more often the more
    they have improved the student on the labeled images (`improvement`). Its optimizer is the student's, at the same
    rate and schedule. Only the student is evaluated and released (algorithm 1).
    """

    def __init__(self, *args: Any, teacher: Teacher, self_training: SelfTrainingOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = copy.deepcopy(teacher.subject.model).float().requires_grad_(True).to(self.args.device)
        self.teacher = replace(teacher, subject=replace(teacher.subject, model=model))
        self.self_training = self_training.settings()
        self.baseline = torch.zeros((), device=self.args.device)
        self.lesson = TeachersLesson(list(model.parameters()))
        self.teacher_optimizer: torch.optim.Optimizer
        self._scale = PixelScale.from_processor(self.processing_class)
        self._batches: list[dict[str, Any]] = []
        self.before: list[torch.Tensor] = []  # the student's weights before its step
        self.add_callback(_TeachersTurn(self))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the student's optimizer, and the teacher's, of the same kind."""
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, None)
        learner = self.teacher.subject.model
        decaying = set(self.get_decay_parameter_names(learner))
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, weight in learner.named_parameters():
            parts[name in decaying].append(weight)
        groups = [
            {"params": weights, "weight_decay": self.args.weight_decay * decays} for decays, weights in parts.items()
        ]
        settings = {name: value for name, value in settings.items() if name != "params"}
        self.teacher_optimizer = cast(Any, kind)(groups, **settings)
        return super().create_optimizer(model)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and keep them: their labeled images measure it when it is made."""
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
        """Return the student's loss on the teacher's pseudo-labels while it trains; the teacher learns along."""
        if UNLABELLED not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        lesson = {"pixel_values": inputs[UNLABELLED][:, 1], "labels": self._teach(inputs)}
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch * (len(lesson["labels"]) // len(inputs["labels"]))
        return super().compute_loss(model, lesson, return_outputs, num_items_in_batch)

    def _teach(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return pseudo-labels [B r] of a micro-batch, and add its part to the teacher's lesson."""
        labels, chosen = inputs["labels"], self.self_training
        views = [inputs["pixel_values"], *inputs[UNLABELLED].unbind(1)]
        self.teacher.subject.model.train()
        with self.accelerator.autocast():
            known, strong = (self.teacher.logits(views[which], self._scale) for which in (0, 2))
            weak = self.teacher.answer(views[1], self._scale)
        weight = chosen["uda_weight"] * self.state.global_step / self.state.max_steps
        own = F.cross_entropy(known, labels, label_smoothing=self.args.label_smoothing_factor)
        own = own + weight * consistency_loss(weak, strong, chosen["uda_temperature"], chosen["uda_threshold"])
        self._checked(own.detach())
        guesses = torch.multinomial(strong.detach().softmax(dim=1), 1)[:, 0]
        share = self._share(labels)
        self.lesson.add(share * own, share * F.cross_entropy(strong, guesses))
        return guesses

    def _share(self, labels: torch.Tensor) -> float:
        """Return the share of a micro-batch in its step."""
        return len(labels) / sum(len(batch["labels"]) for batch in self._batches)

    def teach_teacher(self) -> None:
        """Make the teacher's step, after the student's."""
        feedback = torch.stack([self._improved(self._prepare_inputs(batch)) for batch in self._batches]).sum()
        self.baseline = torch.lerp(self.baseline, feedback, _BASELINE_SHARE)
        self.lesson.finish(feedback - self.baseline)
        if self.args.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self.lesson.weights, self.args.max_grad_norm)
        scheduled: Any = self.optimizer
        factor = scheduled.param_groups[0]["lr"] / scheduled.param_groups[0]["initial_lr"]
        for group in self.teacher_optimizer.param_groups:
            group["lr"] = self.args.learning_rate * factor
        self.teacher_optimizer.step()
        self.teacher_optimizer.zero_grad()

    def _improved(self, batch: dict[str, Any]) -> torch.Tensor:
        model: Any = self.model
        with self.accelerator.autocast():
            outputs = model(pixel_values=batch["pixel_values"])
        loss = classification_loss(outputs.logits, batch["labels"]) * self._share(batch["labels"])
        return improvement(loss, self.student_weights(), self.before)

    def student_weights(self) -> list[nn.Parameter]:
        """Return the weights that the student learns."""
        model: Any = self.model
        return [weight for weight in model.parameters() if weight.requires_grad]

    def _save_training_state(self, checkpoint: Path) -> None:
        super()._save_training_state(checkpoint)
        state = {
            "model": self.teacher.subject.model.state_dict(),
            "optimizer": self.teacher_optimizer.state_dict(),
            "baseline": self.baseline,
        }
        torch.save(state, checkpoint / TEACHER_STATE)

    def _begin_training(self) -> None:
        super()._begin_training()
        if self._checkpoint is not None:
            state = torch.load(self._checkpoint / TEACHER_STATE, weights_only=True, map_location=self.args.device)
            self.teacher.subject.model.load_state_dict(state["model"])
            self.teacher_optimizer.load_state_dict(state["optimizer"])
            self.baseline = state["baseline"]


@final
class _TeachersTurn(TrainerCallback):
    """Lets the teacher learn from every step of the student."""

    def __init__(self, trainer: MetaPseudoLabelsTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.before = [weight.detach().clone() for weight in self.trainer.student_weights()]

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.teach_teacher()


@final
class MetaPseudoLabels(SelfTraining):
    """Meta Pseudo Labels: the student learns only what the teacher says; fine-tune it on the labels afterwards."""

    recipe = "meta-pseudo-labels"
    trainer_class = MetaPseudoLabelsTrainer

    def check(self, recipe: Recipe) -> None:
        super().check(recipe)
        if world_size() > 1:
            raise refusal_of("meta pseudo labels")
        if recipe.sam_rho > 0:
            raise UserError("meta-pseudo-labels does not support --sam-rho; leave it out")
        if not self.teacher.subject.is_differentiable:
            raise UserError(f"teacher {self.teacher.subject.name} cannot be trained; give the model itself")

    def kept_bytes(self) -> int:
        return 3 * sum(weight.numel() * 4 for weight in self.teacher.subject.model.parameters())

    def transforms(self, run: Run) -> tuple[Any, Any]:
        _, judging = super().transforms(run)
        return train_transform(run.processor, _mild(run), run.options.seed), judging

    def unlabelled_transform(self, run: Run) -> Any:
        seed = run.options.seed
        weak = train_transform(run.processor, _mild(run), derive_seed(seed, 1))
        return Views(weak, train_transform(run.processor, run.recipe.augmentation, derive_seed(seed, 2)))

    def collator(self, run: Run) -> Any:
        return UnlabelledCollator(len(run.data.label_names), _beside)

    def trainer_values(self, run: Run) -> dict[str, Any]:
        return {**super().trainer_values(run), "teacher": self.teacher, "self_training": self.options}


def _mild(run: Run) -> AugmentationConfig:
    """Return the recipe's augmentation without RandAugment, policies, color jitter and erasing."""
    return replace(run.recipe.augmentation, randaugment=None, auto_augment=None, color_jitter=0.0, random_erasing=0.0)


def _beside(batch: dict[str, torch.Tensor], unlabelled: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {**batch, UNLABELLED: stacked(unlabelled)}
