"""What segmentation and detection share: a head on a backbone, joint transforms, and one protocol that judges."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from hf_vit.data import ImageData, dense_collator, dense_transforms
from hf_vit.data.transforms import refuse_apart
from hf_vit.environment import pick_device
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.dense.detection import DetectionResult
from hf_vit.evaluation.protocols.dense.meters import need_metrics
from hf_vit.evaluation.protocols.dense.segmentation import SegmentationResult
from hf_vit.evaluation.protocols.registry import ProtocolRun
from hf_vit.evaluation.saving import save_protocol
from hf_vit.families import DENSE_HEADS, DenseTask
from hf_vit.loading.model import load_model
from hf_vit.loading.start import ModelSource
from hf_vit.results.facts import Record
from hf_vit.training.dense_model import build_dense_model
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.record import recipe_values
from hf_vit.training.tasks.classification import FinetuneResult, best_evaluation
from hf_vit.training.tasks.task import Task
from hf_vit.training.trainer.callbacks import Patience
from hf_vit.training.trainer.dense_trainer import DenseTrainer, Judge

# Settings of a recipe that are of labels -> what they are where they are off.
_OF_LABELS: Mapping[str, Any] = {
    "loss": "ce",
    "class_weights": False,
    "balanced_sampling": False,
    "label_smoothing": 0.0,
    "new_head": False,
    "head_bias": None,
    "tune": "all",
    "sam_rho": 0.0,
    "repeated_augmentation": 1,
}


class HeadTask(Task[FinetuneResult]):
    """Abstract: a head for masks or boxes on one of the backbones; judged once on the test split.

    Args:
        head: by name, of `DENSE_HEADS`; None: the first of the task.
        width: its channels; None is what its library takes.

    Raises:
        UserError: the task has no such head, or none of this width.
    """

    trainer_class = DenseTrainer
    streams = False
    # In a batch without objects what judges boxes learns nothing; nor does the last norm of a BiT, which no map passes.
    arguments: ClassVar[dict[str, Any]] = {"ddp_find_unused_parameters": True}
    # The task's name, and that of the protocol that judges it.
    name: ClassVar[DenseTask]
    # The measurements of the validation split that are kept, that by which the best checkpoint is chosen first.
    measured: ClassVar[tuple[str, ...]]

    def __init__(self, head: str | None = None, width: int | None = None) -> None:
        heads = [name for name, each in DENSE_HEADS.items() if each.task == self.name]
        self.head, self.width = heads[0] if head is None else head, width
        if self.head not in heads:
            raise UserError(f"there is no head '{head}' for {self.name}; choose {', '.join(heads)}")
        self.auto_class = getattr(transformers, DENSE_HEADS[self.head].auto_class)
        if width is not None and width < 1:
            raise UserError(f"a head is at least 1 channel wide, not {width}; give a larger --head-width")

    @abstractmethod
    def new_judge(self, run: Run) -> Judge:
        """What an evaluation of the validation split counts with."""

    @abstractmethod
    def judge_test(self, examination: Examination) -> SegmentationResult | DetectionResult:
        """What the protocol measures on the test split."""

    @abstractmethod
    def recalled_test(self, judged: Record) -> SegmentationResult | DetectionResult:
        """What a record says of the test; without pictures."""

    def settings(self) -> dict[str, Any]:
        return {"task": self.name, "head": self.head, "head_width": self.width}

    def check(self, recipe: Recipe) -> None:
        need_metrics()
        for name, off in _OF_LABELS.items():
            if (value := getattr(recipe, name)) != off:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{self.name} has no {flag} ({value}); leave that out, or choose its own recipe")
        refuse_apart(recipe.augmentation)

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        return build_dense_model(
            source,
            self.head,
            data.label_names,
            image_size=image_size,
            width=self.width,
            use_masks=has_object_masks(data),
            backbone_dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            **recipe.architecture,
        )

    def transforms(self, run: Run) -> tuple[Any, Any]:
        return dense_transforms(run.processor, self.target, run.recipe.augmentation, run.options.seed)

    def collator(self, run: Run) -> Callable[..., Any]:
        return dense_collator

    def describe(self, run: Run) -> str:
        return f"{run.describe()}; {self.name}, head {self.head}"

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        return [] if run.recipe.patience is None else [Patience(run.recipe.patience)]

    def trainer_values(self, run: Run) -> dict[str, Any]:
        recipe = run.recipe
        return {
            "new_judge": lambda: self.new_judge(run),
            "layer_decay": recipe.layer_decay,
            "average_decay": recipe.average_decay,
        }

    def conclude(self, run: Run, model: PreTrainedModel, state: TrainerState, seconds: float) -> FinetuneResult:
        model.to(pick_device(run.options.device))  # pyright: ignore[reportArgumentType]
        best = best_evaluation(state)
        return FinetuneResult(
            folder=run.output,
            model=model,
            processor=run.processor,
            recipe=run.recipe,
            validation={name: best[f"eval_{name}"] for name in (*self.measured, "loss") if f"eval_{name}" in best},
            test=self.judge_test(_test_images(run, model)),
            steps=state.global_step,
            best_step=int(best["step"]),
            seconds=seconds,
            history=state.log_history,
        )

    def values(self, run: Run, result: FinetuneResult) -> dict[str, Any]:
        return {
            "recipe": recipe_values(run),
            **run.task,
            "best_step": result.best_step,
            **{f"validation_{name}": value for name, value in result.validation.items()},
        }

    def write(self, run: Run, result: FinetuneResult, folder: Path) -> None:
        test = ProtocolRun(self.name, result.test, _test_images(run, result.model), {}, result.test.seconds)
        save_protocol(test, folder=folder, command=run.command, device=run.options.device)

    def recall(self, folder: Path, recipe: Recipe) -> FinetuneResult:
        shared, values, later = self.recalled(folder, recipe, "best_step")
        judged = next(record for record in later if record.kind == "evaluation")
        named: Sequence[str] = (*self.measured, "loss")
        return FinetuneResult(
            **shared,
            validation={name: values[f"validation_{name}"] for name in named if f"validation_{name}" in values},
            test=self.recalled_test(judged),
            best_step=values["best_step"],
        )


def has_object_masks(data: ImageData) -> bool:
    """Whether objects have masks, too."""
    features: Any = data.split("train").features
    return data.target == "objects" and "segmentation" in features["objects"]


def _test_images(run: Run, model: PreTrainedModel) -> Examination:
    """The model and the images that it is judged by once."""
    subject = load_model((model, run.processor))
    return Examination(subject, run.data, batch_size=run.micro_batch_size, progress=False)
