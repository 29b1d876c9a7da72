"""Self-training on unlabeled images: how their pseudo-labels come about, and Noisy Student (arXiv 1911.04252).

Legend: U unlabeled images, B labeled images of a batch, r unlabeled images per labeled one, K labels.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_vit.conversion.loading import Source
from hf_vit.data import ImageCollator, ImageData, TransformedImages, to_rgb, train_transform
from hf_vit.data.load import UnlabelledImages, load_unlabelled
from hf_vit.errors import UserError
from hf_vit.training.plan import Run
from hf_vit.training.tasks.classification import build_for_classes
from hf_vit.training.tasks.distillation import TaughtTask
from hf_vit.training.tasks.task import active_settings
from hf_vit.training.trainer.losses import smooth_labels
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe

SelfTrainingKind = Literal["noisy-student", "meta-pseudo-labels"]
# Of arXiv 1911.04252, section 3.1 (ratio: the authors' code, EfficientNet-B1 to B7; 14 for L2 in the paper), and of
# 2003.10580: the defaults of the authors' code.
_DEFAULTS: dict[SelfTrainingKind, dict[str, Any]] = {
    "noisy-student": {
        "unlabelled_ratio": 3,
        "pseudo_labels": "soft",
        "confidence": 0.3,
        "images_per_class": 130_000,
        "head_dropout": 0.5,
    },
    "meta-pseudo-labels": {"unlabelled_ratio": 4, "uda_weight": 1.0, "uda_temperature": 0.75, "uda_threshold": 0.6},
}
UNLABELLED = "unlabelled"
_AT_ONCE = 64  # images of a forward pass of the teacher


@final
@dataclass(frozen=True)
class SelfTrainingOptions:
    """How a student learns from unlabeled images and a teacher.

    A value of None is the default of its kind, see `settings`; those of the other kind are refused.

    Attributes:
        teacher: a classifier of the data's classes, see `open_teacher`.
        unlabelled: see `hf_vit.data.load.load_unlabelled`.
        kind: "noisy-student" (arXiv 1911.04252) or "meta-pseudo-labels" (arXiv 2003.10580).
        unlabelled_ratio: unlabeled images per labeled one, in every step: 3, or 4 for meta pseudo labels.
        pseudo_labels: of a noisy student: "soft", the teacher's probabilities (the default), or "hard", its first
            guess. Those of meta pseudo labels are drawn from the probabilities (algorithm 1).
        confidence: of a noisy student: unlabeled images are left out if the teacher's best probability is lower; 0.3.
        images_per_class: of a noisy student: the same number of images of every class: the surest, or all and some of
            them repeatedly; at most as many as the largest class has, and 130,000.
        head_dropout: of a noisy student: dropout before the head; 0.5.
        uda_weight: of meta pseudo labels: weight, at the end, of the teacher's consistency loss (UDA, arXiv
            1904.12848): it should answer to an augmented image as to the image; it rises from 0. 1.
        uda_temperature: sharpens its answer to the image; 0.75.
        uda_threshold: images whose best probability is lower do not count; 0.6.

    Raises:
        UserError: a value out of range, or of the other kind.
    """

    teacher: Any
    unlabelled: str
    kind: SelfTrainingKind = "noisy-student"
    unlabelled_ratio: int | None = None
    pseudo_labels: Literal["soft", "hard"] | None = None
    confidence: float | None = None
    images_per_class: int | None = None
    head_dropout: float | None = None
    uda_weight: float | None = None
    uda_temperature: float | None = None
    uda_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _DEFAULTS:
            raise UserError(f"self-training '{self.kind}' is unknown; choose {', '.join(_DEFAULTS)}")
        for name in sorted({name for values in _DEFAULTS.values() for name in values} - _DEFAULTS[self.kind].keys()):
            if getattr(self, name) is not None:
                raise UserError(f"{name} is not a setting of {self.kind}; leave it out")
        values = self.settings()
        if values.get("pseudo_labels", "soft") not in ("soft", "hard"):
            raise UserError(f"unknown pseudo-labels '{self.pseudo_labels}'; choose soft or hard")
        infinite = float("inf")
        for name, is_good, need in (
            ("unlabelled_ratio", lambda value: value >= 1, "at least 1"),
            ("images_per_class", lambda value: value >= 1, "at least 1"),
            ("confidence", lambda value: 0 <= value <= 1, "in 0..1"),
            ("uda_threshold", lambda value: 0 <= value <= 1, "in 0..1"),
            ("head_dropout", lambda value: 0 <= value < 1, "in 0..1, below 1"),
            ("uda_weight", lambda value: 0 <= value < infinite, "0 or more"),
            ("uda_temperature", lambda value: 0 < value < infinite, "above 0"),
        ):
            if name in values and not is_good(values[name]):
                raise UserError(f"{name} {values[name]} must be {need}")

    def settings(self) -> dict[str, Any]:
        """Return plain values, without teacher and images."""
        chosen = {name: getattr(self, name) for name in _DEFAULTS[self.kind] if getattr(self, name) is not None}
        return {"self_training": self.kind, **(_DEFAULTS[self.kind] | chosen)}


@final
class WithUnlabelled(torch.utils.data.Dataset[dict[str, Any]]):
    """Labeled examples, each with `ratio` unlabeled ones (of `rows`) under the key "unlabelled".

    An epoch is one of the labeled images. The unlabeled ones come in shuffled passes of their own, which run on
    through the epochs: each comes once a pass. Which ones come, and how they are augmented, depends on
    (seed, epoch, position) alone, as all order does (see `sampling`).
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

    def __init__(self, options: SelfTrainingOptions, device: str | None = None, skip_bad_images: bool = False) -> None:
        super().__init__(options, device)
        self._skip_bad_images = skip_bad_images
        self._images: UnlabelledImages | None = None

    @property
    def unlabelled(self) -> UnlabelledImages:
        """The unlabeled images, once a run is prepared."""
        assert self._images is not None
        return self._images

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

    def build(
        self, source: Source, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        if data.readers:
            raise UserError("self-training cannot draw unlabeled images from a stream; leave --streaming out")
        self.teacher = self.teacher.for_classes(data.label_names)
        if self._images is None:
            images = load_unlabelled(
                self.options.unlabelled,
                image_size=image_size,
                min_size=source.config.patch_stride,
                skip_bad_images=self._skip_bad_images,
            )
            learnable = images.without({image.digest for name in ("validation", "test") for image in data.seen[name]})
            if not learnable.seen:
                raise UserError(
                    f"all {len(images.seen)} unlabeled images of {images.name} are validation or test "
                    f"images of {data.name}; give others"
                )
            self._images = self.select(learnable)
        return build_for_classes(source, data, image_size, recipe)

    def learnt_from(self, run: Run) -> list[str]:
        return [*super().learnt_from(run), *(image.digest for image in self.unlabelled.seen)]

    def describe(self, run: Run) -> str:
        images = self.unlabelled
        left_out = f" ({images.left_out:,} left out)" if images.left_out else ""
        ratio = run.task["unlabelled_ratio"]
        return (
            f"{super().describe(run)}; {self.options.kind} with {ratio} of {len(images.seen):,} unlabelled images of "
            f"{images.name}{left_out} beside each"
        )

    def training_images(self, run: Run, transform: Any) -> WithUnlabelled:
        others = TransformedImages(self.unlabelled.table, self.unlabelled_transform(run))
        labelled = super().training_images(run, transform)
        return WithUnlabelled(labelled, others, self.rows(run), run.task["unlabelled_ratio"], run.options.seed)

    def select(self, images: UnlabelledImages) -> UnlabelledImages:
        """Return the images to learn from.

        Raises:
            UserError: there are none.
        """
        return images

    def rows(self, run: Run) -> list[int]:
        """Return the rows of the unlabeled images that one pass has."""
        return list(range(len(self.unlabelled.seen)))

    @abstractmethod
    def unlabelled_transform(self, run: Run) -> Any:
        """Return the transform of unlabeled images."""


def balanced_rows(confidence: torch.Tensor, classes: torch.Tensor, per_class: int, seed: int) -> list[int]:
    """Return rows with every class equally often (arXiv 1911.04252, section 3.1, data filtering and balancing).

    Of a class with more images the surest, by `confidence` [U] in `classes` [U]; of one with fewer all, as often as
    they fit in, and the rest by chance. A class without any stays without.
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

    # The collator smooths the labels: the teacher's probabilities stay as they are.
    arguments: ClassVar[dict[str, Any]] = {"label_smoothing_factor": 0.0}

    _probabilities: torch.Tensor  # [U, K] of the selected images
    _noise: RemovableHandle

    def build(
        self, source: Source, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        student, processor = super().build(source, data, image_size, recipe)
        rate = self.options.settings()["head_dropout"]
        head = student.get_submodule("classifier")
        self._noise = head.register_forward_pre_hook(
            lambda module, inputs: (F.dropout(inputs[0], rate, module.training), *inputs[1:])
        )
        return student, processor

    def released(self, module: Any) -> PreTrainedModel:
        self._noise.remove()
        return module

    def select(self, images: UnlabelledImages) -> UnlabelledImages:
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
        return UnlabelledImages(images.name, images.table.select(rows), seen, left_out)

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
