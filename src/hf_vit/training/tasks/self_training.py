"""Learning from images without labels, which a teacher labels: what the ways of doing so have in common."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, final

from torch import nn

from hf_vit.data import ImageData, TransformedImages
from hf_vit.data.load import UnlabelledImages, load_unlabelled
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.classification import ClassifierTask, build_for_classes
from hf_vit.training.tasks.teacher import open_teacher
from hf_vit.training.tasks.unlabelled import WithUnlabelled

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
    "meta-pseudo-labels": {
        "unlabelled_ratio": 4,
        "uda_weight": 1.0,
        "uda_temperature": 0.75,
        "uda_threshold": 0.6,
    },
}


@final
@dataclass(frozen=True)
class SelfTrainingOptions:
    """What is learnt from images without labels, and from whose labels for them.

    A value of None is the default of its kind, see `settings`; those of the other kind are refused.

    Attributes:
        teacher: a classifier of the data's classes, see `open_teacher`.
        unlabelled: see `hf_vit.data.load.load_unlabelled`.
        kind: "noisy-student" (arXiv 1911.04252) or "meta-pseudo-labels" (arXiv 2003.10580).
        unlabelled_ratio: unlabelled images a labelled one, in every step: 3, or 4 of meta pseudo labels.
        pseudo_labels: of a noisy student: "soft", the teacher's probabilities (the default), or "hard", its first
            guess. Those of meta pseudo labels are drawn from the probabilities (algorithm 1).
        confidence: of a noisy student: unlabelled images of whose class the teacher is less sure are left out; 0.3.
        images_per_class: of a noisy student: of every class as many are learnt from: the surest, or all and some of
            them repeatedly; at most as many as the largest class has, and 130,000.
        head_dropout: of a noisy student: dropout of what enters the head; 0.5.
        uda_weight: of meta pseudo labels: what it weighs in the teacher's loss that it says of a varied image the same
            as of the image (UDA, arXiv 1904.12848), at the end; it rises from 0. 1.
        uda_temperature: which sharpens what it says of the image; 0.75.
        uda_threshold: images of which it is less sure do not count; 0.6.

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
                raise UserError(f"{name} is no setting of {self.kind}; leave it out")
        values = self._values()
        for name in ("unlabelled_ratio", "images_per_class"):
            if values.get(name, 1) < 1:
                raise UserError(f"{name} {values[name]} must be at least 1")
        if values.get("pseudo_labels", "soft") not in ("soft", "hard"):
            raise UserError(f"pseudo labels '{self.pseudo_labels}' are unknown; choose soft or hard")
        for name in ("confidence", "uda_threshold", "head_dropout"):
            value = values.get(name, 0)
            if not 0 <= value <= 1 or (name == "head_dropout" and value == 1):
                raise UserError(f"{name} {value} must be in 0..1{', below 1' if name == 'head_dropout' else ''}")
        if not 0 <= values.get("uda_weight", 0) < float("inf"):
            raise UserError(f"uda_weight {self.uda_weight} must be 0 or more")
        if not 0 < values.get("uda_temperature", 1) < float("inf"):
            raise UserError(f"uda_temperature {self.uda_temperature} must be above 0")

    def _values(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _DEFAULTS[self.kind]}
        return _DEFAULTS[self.kind] | {name: value for name, value in given.items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """Plain values, without teacher and images."""
        return {"self_training": self.kind, **self._values()}


class SelfTraining(ClassifierTask):
    """Abstract: a classifier that learns from labelled images and from those that its teacher labels.

    Unlabelled images whose contents are among those that the model is validated or tested on are left out.

    Args:
        options: see there.
        device: of the teacher.
        skip_bad_images: leave unreadable images out.

    Raises:
        UserError: the teacher cannot be had.
    """

    def __init__(self, options: SelfTrainingOptions, device: str | None = None, skip_bad_images: bool = False) -> None:
        self.options = options
        self.teacher = open_teacher(options.teacher, device)
        self._skip_bad_images = skip_bad_images
        self._images: UnlabelledImages | None = None

    @property
    def unlabelled(self) -> UnlabelledImages:
        """The unlabelled images, once a run is prepared."""
        assert self._images is not None
        return self._images

    def settings(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.subject.name,
            "teacher_fingerprint": self.teacher.subject.fingerprint,
            **self.options.settings(),
            "unlabelled": f"{self.unlabelled.name} {self.unlabelled.fingerprint}",
            "unlabelled_images": len(self.unlabelled.seen),
            "unlabelled_images_left_out": self.unlabelled.left_out,
        }

    def check(self, recipe: Recipe) -> None:
        asked = {
            "--loss bce": recipe.loss == "bce",
            "--class-weights": recipe.class_weights,
            "--mixup-alpha": recipe.augmentation.mixup_alpha > 0,
            "--cutmix-alpha": recipe.augmentation.cutmix_alpha > 0,
            "--repeated-augmentation": recipe.repeated_augmentation > 1,
        }
        if wrong := [flag for flag, is_asked in asked.items() if is_asked]:
            raise UserError(
                f"{', '.join(wrong)} of the recipe {recipe.name}: pseudo labels are learnt with the plain softmax "
                f"cross-entropy; leave that out, or choose --recipe {self.options.kind}"
            )

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        """The student and its image processor.

        Raises:
            UserError: the teacher has other labels than the data; there are no unlabelled images, or they cannot be
                read; the data are a stream.
        """
        if data.readers:
            raise UserError(
                "the unlabelled images are drawn beside the labelled ones by their numbers, which a stream does not "
                "have; leave --streaming out"
            )
        self.teacher = self.teacher.for_classes(data.label_names)
        if self._images is None:
            self._images = self._label(self._load(source, data, image_size))
        return build_for_classes(source, data, image_size, recipe)

    def _load(self, source: ModelSource, data: ImageData, image_size: tuple[int, int]) -> UnlabelledImages:
        images = load_unlabelled(
            self.options.unlabelled,
            image_size=image_size,
            min_size=source.config.patch_stride,
            skip_bad_images=self._skip_bad_images,
        )
        judged = {image.digest for split in ("validation", "test") for image in data.seen[split]}
        kept = images.without(judged)
        if not kept.seen:
            raise UserError(
                f"all {len(images.seen)} unlabelled images of {images.name} are among the validation and test images "
                f"of {data.name}; give others"
            )
        return kept

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
        """Labelled images, each with its share of the unlabelled ones."""
        others = TransformedImages(self.unlabelled.table, self.unlabelled_transform(run))
        labelled = super().training_images(run, transform)
        return WithUnlabelled(labelled, others, self.rows(run), run.task["unlabelled_ratio"], run.options.seed)

    @abstractmethod
    def _label(self, images: UnlabelledImages) -> UnlabelledImages:
        """The images that can be learnt from.

        Raises:
            UserError: there are none.
        """

    @abstractmethod
    def rows(self, run: Run) -> list[int]:
        """Of the unlabelled images those of a pass."""

    @abstractmethod
    def unlabelled_transform(self, run: Run) -> Any:
        """How unlabelled images are varied."""
