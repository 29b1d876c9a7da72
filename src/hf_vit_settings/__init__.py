"""What a user sets for a training: values of recipes, augmentation and run options, each a field with its help.

`hf-vit finetune` and `hf-vit pretrain` take their options from these fields: a new one is written here and where it is
used. The package stands beside `hf_vit`, whose import takes seconds, and imports nothing heavy, so that help is there
at once.
"""

import dataclasses
import difflib
import importlib.util
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin

# Panels of `--help`; a field without one is among the options that people need first.
OPTIMIZATION = "Optimization (default: the recipe's)"
WEIGHTS = "Trained weights (default: the recipe's)"
AUGMENTATION = "Augmentation of the training images (default: the recipe's)"
RUN = "Run"
TEACHER = "Distillation from a teacher (docs/training.md)"
UNLABELED = "Self-training on unlabeled images (docs/training.md)"
CONTRAST = "Momentum contrast"

# Where the Trainer's log can go -> the packages of which one is needed.
REPORTERS = {
    "none": (),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
# The forms of timm's policies.
POLICY = r"3a|rand(-(m\d+|n\d+|p\d*\.?\d+|mstd\d*\.?\d+|mmax\d+|inc[01]))*|(original|originalr|v0|v0r)(-mstd\d*\.?\d+)?"


class UserError(ValueError):
    """Bad input: the message says what was given, what is needed and the remedy.

    It is one printable line, whatever the names are that bad input brings into it.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


def setting(default: Any, help: str, panel: str | None = None, **more: Any) -> Any:
    """Make a field of a data class that a command takes as an option; MISSING as `default` makes it required.

    Args:
        default, help, panel: as in `--help`.
        **more: `option`, the name of the option where that is not the field's; `flags` of a switch, "--x/--no-x";
            `typed`, the type of what is typed where that is not the field's; the range of a number as `at_least`,
            `above`, `at_most` and `below`.
    """
    known = dict.fromkeys(("option", "flags", "typed", "at_least", "above", "at_most", "below"))
    return dataclasses.field(default=default, metadata={"help": help, "panel": panel, **known, **more})


_optimization, _weights, _augmentation, _run, _teacher, _unlabeled, _contrast = (
    partial(setting, panel=panel) for panel in (OPTIMIZATION, WEIGHTS, AUGMENTATION, RUN, TEACHER, UNLABELED, CONTRAST)
)


@dataclass(frozen=True)
class AugmentationConfig:
    """How the training images are varied; the default is not at all. `hf-vit finetune --help` explains each field.

    Applied in this order: crop, shift, rotation with shear and zoom, flip, RandAugment, policy, color jitter, erasing;
    mixup or cutmix act on batches, in `ImageCollator`. A crop has an aspect ratio of 3/4 to 4/3; what moves in is
    black, and what is moved by fractions of a pixel bilinear.
    """

    random_resized_crop: tuple[float, float] | None = _augmentation(
        None, "Random resized crop: smallest and largest share of the image's area; 0 0: off."
    )
    horizontal_flip: float = _augmentation(0.0, "Probability of a horizontal flip.")
    randaugment: tuple[int, int] | None = _augmentation(
        None, "RandAugment (arXiv 1909.13719): layers and magnitude (0 to 30); 0 0: off."
    )
    random_erasing: float = _augmentation(
        0.0, "Probability that noise replaces a rectangle of 2 to 33% (arXiv 1708.04896)."
    )
    mixup_alpha: float = _augmentation(0.0, "Beta parameter of mixup (arXiv 1710.09412); 0: off.")
    cutmix_alpha: float = _augmentation(
        0.0, "Beta parameter of cutmix (arXiv 1905.04899); 0: off. With mixup a batch gets one of them."
    )
    shift_px: float = _augmentation(
        0, "Largest translation in pixels of the model's input; whole numbers move by whole pixels."
    )
    rotation_degrees: float = _augmentation(0.0, "Largest rotation in degrees, either direction.")
    shear_degrees: float = _augmentation(0.0, "Largest shear in degrees, either direction.")
    zoom: float = _augmentation(0.0, "Largest zoom in or out, as a share: 0.1.")
    random_crop: int | None = _augmentation(
        None, "Random crop after padding with this many reflected pixels (arXiv 2204.07118)."
    )
    auto_augment: str | None = _augmentation(
        None, "timm augmentation policy (extra timm): rand-m9-mstd0.5-inc1, 3a; none: off."
    )
    color_jitter: float = _augmentation(
        0.0, "Largest change of brightness, contrast and saturation as a share; 0: off."
    )
    scale_jitter: tuple[float, float] | None = _augmentation(
        None, "Segmentation, detection: smallest and largest scale before a crop (arXiv 2012.07177); 0 0: off."
    )

    def __post_init__(self) -> None:
        crop, rand, edge = self.random_resized_crop, self.randaugment, self.random_crop
        policy, scales = self.auto_augment, self.scale_jitter
        for name, is_possible, need in (
            ("random_resized_crop", crop is None or 0 < crop[0] <= crop[1] <= 1, "0 < smallest <= largest <= 1"),
            ("horizontal_flip", 0 <= self.horizontal_flip <= 1, "a probability, 0..1"),
            ("randaugment", rand is None or (rand[0] >= 0 and 0 <= rand[1] <= 30), "layers, magnitude 0..30"),
            ("auto_augment", policy is None or re.fullmatch(POLICY, policy), "a policy: rand-m9-mstd0.5-inc1, 3a"),
            ("random_crop", edge is None or edge >= 0, "0 px or more"),
            ("random_crop", edge is None or crop is None, "one of random_crop and random_resized_crop"),
            ("color_jitter", 0 <= self.color_jitter <= 1, "a share, 0..1"),
            (
                "scale_jitter",
                scales is None or 0.05 <= scales[0] <= scales[1] <= 10,
                "0.05 <= smallest <= largest <= 10",
            ),
            ("scale_jitter", scales is None or crop is None, "one of scale_jitter and random_resized_crop"),
            ("random_erasing", 0 <= self.random_erasing <= 1, "a probability, 0..1"),
            ("mixup_alpha", self.mixup_alpha >= 0, "0 (off) or more"),
            ("cutmix_alpha", self.cutmix_alpha >= 0, "0 (off) or more"),
            ("shift_px", self.shift_px >= 0, "0 px or more"),
            ("rotation_degrees", 0 <= self.rotation_degrees <= 180, "0..180 degrees"),
            ("shear_degrees", 0 <= self.shear_degrees < 90, "0 to below 90 degrees"),
            ("zoom", 0 <= self.zoom < 1, "0 <= zoom < 1"),
        ):
            if not is_possible:
                raise UserError(f"augmentation {name} = {getattr(self, name)}; needed: {need}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training, checked, with their source. `hf-vit finetune --help` explains each field.

    Attributes:
        name, source, summary: what it is called, where its numbers come from, what it is for.
        learning_rates: the source's grid, which `--lr-sweep` tries; empty where it has none.
        architecture: fields of the configuration of a model with fresh weights; a checkpoint keeps its own. Of
            segmentation and detection those of the head, which is always new.
        image_size: (height, width) px; None keeps the model's.
        augmentation: of the training images.
    """

    name: str
    source: str
    summary: str
    optimizer: Literal["adamw", "sgd", "lamb", "lion", "muon"] = _optimization(
        "adamw", "adamw, sgd, lamb (arXiv 1904.00962), lion (2302.06675) or muon (2502.16982)."
    )
    learning_rate: float = setting(MISSING, "Peak of the learning rate, after the warm-up.", above=0)
    learning_rates: tuple[float, ...] = ()
    weight_decay: float = _optimization(
        0.0, "Weight decay of matrices and kernels; decoupled for adamw and lion.", at_least=0
    )
    momentum: float = _optimization(0.9, "Momentum of sgd and muon.", at_least=0, below=1)
    beta1: float = _optimization(0.9, "First beta of the other optimizers, and of muon's adamw.", at_least=0, below=1)
    beta2: float = _optimization(0.999, "Second beta of these optimizers.", at_least=0, below=1)
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = _optimization(
        "cosine", "Learning rate after the warm-up: cosine, linear, constant or warmup_stable_decay."
    )
    warmup: float = _optimization(0.0, "Warm-up: share of all steps if below 1, else steps.", at_least=0)
    cooldown: float = _optimization(
        0.2, "1 - sqrt decay of warmup_stable_decay: share of all steps if below 1, else steps.", above=0
    )
    min_learning_rate: float = _optimization(0.0, "Final learning rate of cosine and warmup_stable_decay.", at_least=0)
    epochs: float | None = setting(None, "Epochs: passes over the training split.", above=0)
    steps: int | None = setting(None, "Optimizer steps, instead of epochs.", above=0)
    batch_size: int = setting(MISSING, "Images per optimizer step, over all devices.", above=0)
    clip: float = _optimization(1.0, "Gradient clipping: largest norm; 0: off.", at_least=0)
    loss: Literal["ce", "bce"] = _optimization(
        "ce", "ce (softmax cross-entropy), or bce (binary cross-entropy, summed over the classes)."
    )
    bce_threshold: float | None = _optimization(
        None, "bce: targets of mixed images above it become 1, others 0 (arXiv 2110.00476).", at_least=0, below=1
    )
    class_weights: bool = _optimization(False, "Weight the loss by inverse class frequency (ce).")
    balanced_sampling: bool = _optimization(False, "Sample all classes equally often, with repetition.")
    repeated_augmentation: int = _optimization(
        1, "Differently augmented copies of an image per batch (arXiv 1901.09335).", at_least=1
    )
    new_head: bool = _optimization(
        False, "If the classes match, start a new head or keep the checkpoint's.", flags="--new-head/--keep-head"
    )
    head_bias: float | None = _optimization(None, "Initial bias of a new head. Default: 0, with bce -log(classes).")
    label_smoothing: float = _optimization(
        0.0, "Label smoothing: probability spread over all classes.", at_least=0, below=1
    )
    dropout: float | None = _optimization(None, "Dropout rate. Default: the model's.", at_least=0, below=1)
    drop_path: float | None = _optimization(
        None, "Drop path (stochastic depth) rate. Default: the model's.", at_least=0, below=1
    )
    architecture: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    tune: Literal["all", "head", "lora"] = setting(
        "all", "Weights to train: all, head, or lora (arXiv 2106.09685; extra peft)."
    )
    lora_rank: int = _weights(8, "Rank of LoRA's updates of queries and values.", above=0)
    lora_alpha: float = _weights(16.0, "LoRA's updates are scaled by alpha / rank.", above=0)
    layer_decay: float | None = _weights(
        None, "Layer-wise decay of the learning rate (arXiv 2106.08254).", above=0, at_most=1
    )
    average_decay: float | None = _weights(
        None,
        "Decay of an EMA of the weights, for example 0.9999; the EMA weights are evaluated and saved.",
        at_least=0,
        below=1,
    )
    sam_rho: float = _weights(0.0, "Radius of sharpness-aware minimization (arXiv 2010.01412); 0: off.", at_least=0)
    sam_micro_batches: bool = _weights(
        False, "Compute SAM's perturbation per micro-batch or per step.", flags="--sam-micro-batches/--sam-batch"
    )
    image_size: tuple[int, int] | None = None
    augmentation: AugmentationConfig = AugmentationConfig()
    evaluations: int = _optimization(20, "Validations and checkpoints in all, evenly spaced.", above=0)
    patience: int | None = _optimization(
        None, "Stop after so many evaluations without a better score or loss.", above=0
    )

    def __post_init__(self) -> None:
        _check(self)
        wrong = (
            (
                (self.epochs is None) == (self.steps is None),
                "give the length in epochs or in steps, and in one of them only",
            ),
            (
                self.tune == "lora" and self.average_decay is not None,
                "LoRA weights cannot be averaged; leave average_decay out, or tune all",
            ),
            (
                self.min_learning_rate and self.schedule not in ("cosine", "warmup_stable_decay"),
                f"the schedule {self.schedule} has no min_learning_rate; choose --min-learning-rate 0",
            ),
            (
                self.min_learning_rate > self.learning_rate,
                f"min_learning_rate {self.min_learning_rate:g} is above the learning rate {self.learning_rate:g}; "
                "choose a smaller one",
            ),
            (
                self.bce_threshold is not None and self.loss != "bce",
                "--bce-threshold works with --loss bce only; leave it out, or choose --loss bce",
            ),
            (
                self.sam_micro_batches and not self.sam_rho,
                "--sam-micro-batches needs --sam-rho; add it, or leave both out",
            ),
            (
                self.class_weights and self.loss == "bce",
                "--class-weights works with --loss ce only; leave one of the two out",
            ),
            (
                self.class_weights and self.balanced_sampling,
                "--class-weights and --balanced-sampling both balance classes; choose one of them",
            ),
        )
        if reasons := [reason for is_wrong, reason in wrong if is_wrong]:
            raise UserError(f"{reasons[0]}; see hf-vit finetune --help")

    def initial_head_bias(self, num_labels: int) -> float:
        """Return the first value of the head's bias.

        With "bce" a class is then predicted with probability 1 / K at first. Google's original codes have the same
        value as a rounded constant: -6.9 for 1,000 classes and -10 for 21,843 (big_vision's configs of arXiv
        2106.10270).
        """
        if self.head_bias is not None:
            return self.head_bias
        return -math.log(num_labels) if self.loss == "bce" else 0.0

    def override(self, **values: Any) -> "Recipe":
        """Return the recipe with other values; None changes nothing.

        (0, 0) switches random_resized_crop and scale_jitter off, "none" auto_augment; of the three random crops one
        replaces the others.

        Args:
            **values: names of `OVERRIDABLE`, or image_size.

        Raises:
            UserError: a value is out of range; the message names value and range.
        """
        given = {name: value for name, value in values.items() if value is not None}
        known = OVERRIDABLE | {"image_size"}
        for name in set(given) - known:
            near = difflib.get_close_matches(name, known, n=1) or sorted(known)
            raise UserError(f"unknown recipe value '{name}'; did you mean {near[0]}?")
        if "epochs" in given and "steps" in given:
            raise UserError("give the length either in epochs or in steps, not both")
        changes: dict[str, Any] = {}
        if "epochs" in given or "steps" in given:
            changes = {"epochs": None, "steps": None}
        varied = {name: given.pop(name) for name in list(given) if name in AUGMENTATION_FIELDS}
        for name in ("random_resized_crop", "scale_jitter"):
            if varied.get(name) == (0, 0):
                varied[name] = None
        if varied.get("auto_augment") == "none":
            varied["auto_augment"] = None
        if chosen := [crop for crop in _CROPS if varied.get(crop) is not None]:
            varied = {**dict.fromkeys(set(_CROPS) - set(chosen)), **varied}
        if varied:
            changes["augmentation"] = dataclasses.replace(self.augmentation, **varied)
        return dataclasses.replace(self, **changes | given)

    def settings(self) -> dict[str, Any]:
        """Return every value, plain: what facts record and `hf-vit recipes` prints."""
        values = {**vars(self)}
        del values["summary"], values["augmentation"]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in (values | vars(self.augmentation)).items()}


@dataclass(frozen=True)
class FinetuneOptions:
    """How to run a recipe; only the seed is meant to change what is learned. `hf-vit finetune --help` explains each.

    `image_size` is (height, width) px. With 0 workers this process prepares the images.
    """

    image_size: tuple[int, int] | None = setting(
        None,
        "Input size in pixels: 224 or 224x160. Position embeddings are resampled. Default: the recipe's or model's.",
        typed=str,
    )
    micro_batch_size: int | None = setting(
        None, "Images per forward pass; gradients are accumulated exactly. Default: at most 128."
    )
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "fp32, bf16 (weights stay float32) or auto: bf16 where it is faster."
    )
    seed: int = setting(
        0, "Random seed for weight initialization, data order, augmentation, masks and dropout.", at_least=0
    )
    num_workers: int = setting(0, "Data loading processes.", at_least=0)
    streaming: bool = _run(False, "Stream the data instead of loading it; needs --steps or a known size.")
    skip_bad_images: bool = _run(False, "Leave out unreadable images, and training images smaller than a patch.")
    resume: bool = setting(False, "Resume from the last complete checkpoint in the output directory.")
    keep_checkpoints: bool = _run(False, "Keep OUTPUT/checkpoints when the run is complete.")
    image_column: str | None = _run(None, "Column of a list or table with the images, or their files.")
    label_column: str | None = _run(
        None, "Column with the classes (multi-label: the columns cat,dog of 0 and 1), masks or objects."
    )
    device: str | None = setting(None, "torch device, such as cpu or cuda:1. Default: a GPU if there is one.")
    process_timeout: int = _run(1800, "Seconds to wait for other processes (torchrun) before the run stops.")
    report_to: str = _run("none", "Also log to tensorboard (OUTPUT/runs), wandb or trackio.")
    push: str | None = setting(None, "Repository on the Hub, user/name, to push the finished model to.")
    private: bool = _run(False, "With --push: create a private repository.")
    license: str | None = _run(None, "With --push: Hub license id. Default: the base model's.")
    share_images: bool = _run(False, "Also show plots that contain images of the data in the model card.")

    def __post_init__(self) -> None:
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UserError(f"micro batch size {self.micro_batch_size} must be at least 1")
        if self.process_timeout < 1:
            raise UserError(f"process timeout {self.process_timeout} must be at least 1 second")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise UserError(f"precision '{self.precision}' is unknown; choose auto, fp32 or bf16")
        if self.report_to not in REPORTERS:
            raise UserError(f"report_to '{self.report_to}' is unknown; choose {', '.join(REPORTERS)}")
        needed = REPORTERS[self.report_to]
        if needed and not any(map(importlib.util.find_spec, needed)):
            raise UserError(
                f"--report-to {self.report_to} needs the package {self.report_to}, which is not installed; "
                f"pip install {self.report_to}"
            )
        if self.image_size is not None and min(self.image_size) < 1:
            raise UserError(f"image size {self.image_size[0]}x{self.image_size[1]} px must be at least 1x1")
        if self.num_workers < 0 or self.seed < 0:
            raise UserError(f"seed ({self.seed}) and number of workers ({self.num_workers}) cannot be negative")


# The weight of the teacher's part; soft targets as arXiv 2012.12877, section 6, hard ones as its equation 3.
_WEIGHTS = {"hard": 0.5, "soft": 0.1, "logit": 0.1}
_TEMPERATURE = 3.0


@dataclass(frozen=True)
class DistillationOptions:
    """How a student learns from a teacher, see `open_teacher`. `hf-vit finetune --help` explains each field.

    The distillation token learns the teacher's first guess ("hard", arXiv 2012.12877, equation 3) or its probabilities
    ("soft", equation 2), or any student's logits learn these ("logit"). Gradients of soft targets are scaled by the
    square of the temperature.
    """

    teacher: Any
    kind: Literal["hard", "soft", "logit"] = _teacher(
        "logit", "hard or soft (DeiT's token), or logit (the default).", option="distillation"
    )
    temperature: float | None = _teacher(None, "Temperature of soft targets; default 3.", above=0)
    weight: float | None = _teacher(
        None, "Share of distillation in the loss; default .5 (hard) or .1.", option="distillation_weight",
        at_least=0, at_most=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)
        if self.kind == "hard" and self.temperature is not None:
            raise UserError("hard distillation has no temperature; choose soft or logit, or leave it out")

    @property
    def uses_token(self) -> bool:
        """Whether the student needs a distillation token with a head of its own."""
        return self.kind != "logit"

    def settings(self) -> dict[str, Any]:
        """Return plain values, without the teacher."""
        weight = _WEIGHTS[self.kind] if self.weight is None else self.weight
        settings: dict[str, Any] = {"distillation": self.kind, "distillation_weight": weight}
        if self.kind != "hard":
            settings["temperature"] = self.temperature or _TEMPERATURE
        return settings


# Of arXiv 1911.04252, section 3.1 (ratio: the authors' code, EfficientNet-B1 to B7; 14 for L2 in the paper), and of
# 2003.10580: the defaults of the authors' code.
_SELF_TRAINING: dict[str, dict[str, Any]] = {
    "noisy-student": {
        "unlabelled_ratio": 3,
        "pseudo_labels": "soft",
        "confidence": 0.3,
        "images_per_class": 130_000,
        "head_dropout": 0.5,
    },
    "meta-pseudo-labels": {"unlabelled_ratio": 4, "uda_weight": 1.0, "uda_temperature": 0.75, "uda_threshold": 0.6},
}


@dataclass(frozen=True)
class SelfTrainingOptions:
    """How a student learns from unlabeled images and a teacher, see `open_teacher` and `load_unlabeled`.

    `hf-vit finetune --help` explains each field. A value of None is the default of its kind, see `settings`; those of
    the other kind are refused. A noisy student (arXiv 1911.04252) learns as many images of every class, the surest, or
    all and some of them repeatedly. Pseudo labels of meta-pseudo-labels (arXiv 2003.10580) are drawn from the teacher's
    probabilities; it should answer to an augmented image as to the image (UDA, arXiv 1904.12848), whose weight rises
    from 0.
    """

    teacher: Any
    unlabelled: str
    kind: Literal["noisy-student", "meta-pseudo-labels"] = _unlabeled(
        "noisy-student", "noisy-student (the default) or meta-pseudo-labels.", option="self_training"
    )
    unlabelled_ratio: int | None = _unlabeled(
        None,
        "Unlabeled images per labeled one; default 3, or 4 (meta-pseudo-labels).",
        option="unlabeled_ratio",
        at_least=1,
    )
    pseudo_labels: Literal["soft", "hard"] | None = _unlabeled(None, "noisy-student: soft (the default) or hard.")
    confidence: float | None = _unlabeled(
        None, "noisy-student: smallest confidence of a label; default .3.", at_least=0, at_most=1
    )
    images_per_class: int | None = _unlabeled(
        None, "noisy-student: most images per class; default: those of the largest class.", at_least=1
    )
    head_dropout: float | None = _unlabeled(
        None, "noisy-student: dropout before the head; default .5.", at_least=0, below=1
    )
    uda_weight: float | None = _unlabeled(
        None, "meta-pseudo-labels: weight of the UDA consistency loss; default 1.", at_least=0
    )
    uda_temperature: float | None = _unlabeled(
        None, "meta-pseudo-labels: temperature of the UDA targets; default .75.", above=0
    )
    uda_threshold: float | None = _unlabeled(
        None, "meta-pseudo-labels: smallest confidence of UDA targets; default .6.", at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        _check(self)
        for name in sorted({*SELF_TRAINING_FIELDS} - _SELF_TRAINING[self.kind].keys() - {"kind"}):
            if getattr(self, name) is not None:
                raise UserError(f"{name} is not a setting of {self.kind}; leave it out")

    def settings(self) -> dict[str, Any]:
        """Return plain values, without teacher and images."""
        usual = _SELF_TRAINING[self.kind]
        chosen = {name: getattr(self, name) for name in usual if getattr(self, name) is not None}
        return {"self_training": self.kind, **(usual | chosen)}


@dataclass(frozen=True)
class ContrastiveOptions:
    """Settings of momentum contrast; the defaults are those of arXiv 2104.02057, section 4.3 and its code's.

    `hf-vit pretrain --help` explains each field. The momentum rises to 1 along half a cosine. A hidden size of None is
    4096, or 12 times the encoder's width below ViT-S. Batch norm sees the images of all processes; the other norms make
    a batch's parts independent. Frozen patches keep their initial values: the paper found training stable then.
    """

    temperature: float = _contrast(0.2, "Temperature of the contrastive loss.", above=0)
    momentum: float = _contrast(
        0.99, "Momentum of the momentum encoder at the first step.", option="encoder_momentum", at_least=0,
        at_most=1,
    )  # fmt: skip
    projection_size: int = _contrast(256, "Output size of the projector.", at_least=1)
    hidden_size: int | None = _contrast(None, "Hidden size of projector and predictor.", at_least=1)
    normalization: Literal["batch", "layer", "none"] = _contrast(
        "batch", "Normalization in projector and predictor: batch, layer or none."
    )
    freeze_patches: bool = _contrast(True, "Freeze the patch embedding.", flags="--freeze-patches/--train-patches")

    def __post_init__(self) -> None:
        _check(self, "pretrain")


_CROPS = ("random_resized_crop", "random_crop", "scale_jitter")


def _fields(settings: Any) -> Mapping[str, Field[Any]]:
    return {each.name: each for each in fields(settings) if each.metadata}


RECIPE_FIELDS, AUGMENTATION_FIELDS, RUN_FIELDS = map(_fields, (Recipe, AugmentationConfig, FinetuneOptions))
DISTILLATION_FIELDS, SELF_TRAINING_FIELDS = map(_fields, (DistillationOptions, SelfTrainingOptions))
CONTRASTIVE_FIELDS = _fields(ContrastiveOptions)
# What an option of `hf-vit finetune` may change in a recipe.
OVERRIDABLE = frozenset(RECIPE_FIELDS) | frozenset(AUGMENTATION_FIELDS)


def option_name(field: Field[Any]) -> str:
    """Return the name of the option that sets a field."""
    return field.metadata.get("option") or field.name


def _check(settings: Any, command: str = "finetune") -> None:
    """Give the fields of a data class values in their types and ranges, or refuse them."""
    for each in fields(settings):
        object.__setattr__(settings, each.name, _checked(each, getattr(settings, each.name), command))


def _checked(known: Field[Any], value: Any, command: str) -> Any:
    """Return a value in the type of its field."""
    kind: Any = known.type
    parts, need = (kind, *get_args(kind)), ""
    if value is None and NoneType in parts:
        return value
    value = cast(Any, value)
    try:
        choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
        if choices:
            *others, last = map(repr, choices)
            need = "" if value in choices else f"{', '.join(others)} or {last}"
        elif any(get_origin(part) is tuple for part in parts):
            need = "" if isinstance(value, tuple | list) else "a valid tuple"
            value = value if need else tuple(value)
        elif bool in parts:
            need = "" if value in (True, False) else "a valid boolean"
            value = value if need else bool(value)
        elif int in parts or float in parts:
            number = float(value)
            for limit, (words, holds) in _LIMITS.items():
                edge = known.metadata[limit]
                need = need or ("" if edge is None or holds(number, edge) else f"{words} {edge:g}")
            if not math.isfinite(number):
                need = "a finite number"
            elif int in parts and not number.is_integer():
                need = "a valid integer, got a number with a fractional part"
            value = value if need else int(number) if int in parts else number
    except (TypeError, ValueError):
        need = "a valid number"
    if need:
        raise UserError(f"{option_name(known)} = {value!r}: Input should be {need}; see hf-vit {command} --help")
    return value


_LIMITS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("greater than", operator.gt),
    "at_least": ("greater than or equal to", operator.ge),
    "below": ("less than", operator.lt),
    "at_most": ("less than or equal to", operator.le),
}
