"""A teacher that learns from how its pseudo labels help its student (Meta Pseudo Labels, arXiv 2003.10580).

Algorithm 1 (appendix B) to the letter where its authors' code differs: the pseudo labels are drawn from the teacher's
probabilities (of the code's soft ones the gradient vanishes), and the feedback is the improvement of the student, not
its negative. From the code come the moving baseline that is taken off the feedback, and the ramp and threshold of UDA.

Legend: B labelled images, r unlabelled images a labelled one, K labels.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_vit.data import AugmentationConfig, train_transform
from hf_vit.errors import UserError
from hf_vit.loading.pixels import PixelScale
from hf_vit.models.loss_hf_vit import classification_loss
from hf_vit.training.plan import Run
from hf_vit.training.processes import refusal_of, world_size
from hf_vit.training.tasks.distillation import Teacher
from hf_vit.training.tasks.self_training import (
    UNLABELLED,
    SelfTraining,
    SelfTrainingOptions,
    UnlabelledCollator,
    stacked,
)
from hf_vit.training.tasks.views import Views
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe

TEACHER_STATE = "teacher.pt"
_BASELINE_SHARE = 0.01  # of every new feedback in the baseline: the authors' code


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
        self.teacher_optimizer: torch.optim.Optimizer | None = None
        self.baseline = torch.zeros((), device=self.args.device)
        self.lesson = TeachersLesson(list(model.parameters()))
        self._scale = PixelScale.of_processor(self.processing_class)
        self._batches: list[dict[str, Any]] = []
        self._before: list[torch.Tensor] = []
        self.add_callback(_TeachersTurn(self))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the student's optimizer, and the teacher's, of the same kind."""
        chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, None)
        kind: Any = chosen[0]
        learner = self.teacher.subject.model
        decaying = set(self.get_decay_parameter_names(learner))
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, weight in learner.named_parameters():
            parts[name in decaying].append(weight)
        groups = [
            {"params": weights, "weight_decay": self.args.weight_decay * decays} for decays, weights in parts.items()
        ]
        self.teacher_optimizer = kind(groups, **{name: value for name, value in chosen[1].items() if name != "params"})
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

    def remember_student(self) -> None:
        """Keep the student's weights, before its step."""
        self._before = [weight.detach().clone() for weight in self._student_weights()]

    def teach_teacher(self) -> None:
        """Make the teacher's step, after the student's."""
        assert self.teacher_optimizer is not None
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
        return improvement(loss, self._student_weights(), self._before)

    def _student_weights(self) -> list[nn.Parameter]:
        model: Any = self.model
        return [weight for weight in model.parameters() if weight.requires_grad]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.teacher_optimizer is not None
        state = {
            "model": self.teacher.subject.model.state_dict(),
            "optimizer": self.teacher_optimizer.state_dict(),
            "baseline": self.baseline,
        }
        torch.save(state, Path(output_dir) / TEACHER_STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        assert self.teacher_optimizer is not None
        state = torch.load(Path(checkpoint) / TEACHER_STATE, weights_only=True, map_location=self.args.device)
        self.teacher.subject.model.load_state_dict(state["model"])
        self.teacher_optimizer.load_state_dict(state["optimizer"])
        self.baseline = state["baseline"]


@final
class _TeachersTurn(TrainerCallback):
    """Lets the teacher learn from every step of the student."""

    def __init__(self, trainer: MetaPseudoLabelsTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.trainer.remember_student()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.trainer.teach_teacher()


@final
class MetaPseudoLabels(SelfTraining):
    """Meta Pseudo Labels: the student learns only what the teacher says; fine-tune it on the labels afterwards."""

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
