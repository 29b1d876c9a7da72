"""The settings of a training: recipes, augmentation and run options, as fields with their help.

`hf-vit finetune` and `hf-vit pretrain` make their options from these fields: a new option needs a field here and the
code that uses it. The package is separate from `hf_vit`, whose import takes seconds, and imports nothing heavy, so that
`--help` appears at once.
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
from typing import Any, Literal, get_args, get_origin

# Panels of `--help`; fields without a panel are the most important options, which come first.
OPTIMIZATION = "Optimization (default: the recipe's)"
WEIGHTS = "Trained weights (default: the recipe's)"
AUGMENTATION = "Augmentation of the training images (default: the recipe's)"
RUN = "Run"
TEACHER = "Distillation from a teacher (docs/training.md)"
UNLABELED = "Self-training on unlabeled images (docs/training.md)"
CONTRAST = "Momentum contrast"

# Destination of the Trainer's log -> packages, one of which must be installed.
REPORTERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
# The forms of timm's policies.
POLICY = r"3a|rand(-(m\d+|n\d+|p\d+\.?\d*|mstd\d+\.?\d*|mmax\d+|inc[01]))*|(original|originalr|v0|v0r)(-mstd\d+\.?\d*)?"


class UserError(ValueError):
    """Bad input; the message names it, and says what is needed and how to repair it.

    The message is one line: line breaks become spaces, and other characters that cannot be printed are escaped.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


def setting(default: Any, help: str, panel: str | None = None, **more: Any) -> Any:
    """Make a dataclass field that is also an option of a command; with MISSING as `default` it is required.

    Args:
        default, help, panel: as in `--help`.
        **more: `option`, the name of the option if it is not the field's; `flags` of a switch, "--x/--no-x"; `typed`,
            the type of the option's value if it is not the field's; the range of a number as `at_least`, `above`,
            `at_most` and `below`.
    """
    unset = dict.fromkeys(("option", "flags", "typed", "at_least", "above", "at_most", "below"))
    return dataclasses.field(default=default, metadata={"help": help, "panel": panel, **unset, **more})


_optimization, _weights, _augmentation, _run, _teacher, _unlabeled, _contrast = (
    partial(setting, panel=panel) for panel in (OPTIMIZATION, WEIGHTS, AUGMENTATION, RUN, TEACHER, UNLABELED, CONTRAST)
)


@dataclass(frozen=True)
class AugmentationConfig:
    """The augmentation of training images, by default none. `hf-vit finetune --help` explains each field.

    The order is crop, shift, rotation with shear and zoom, flip, RandAugment, policy, color jitter, erasing; mixup or
    cutmix is applied to batches in `ImageCollator`. A crop has an aspect ratio of 3/4 to 4/3. Transformed images are
    interpolated bilinearly (by RandAugment: the nearest pixel), and areas from outside the image are black (by a
    policy: the mean color).
    """

    random_resized_crop: tuple[float, float] | None = _augmentation(
        None, "Random resized crop: smallest and largest share of the image's area, such as 0.08 1; 0 0 turns it off."
    )
    horizontal_flip: float = _augmentation(0.0, "Probability of a horizontal flip, 0 to 1.")
    randaugment: tuple[int, int] | None = _augmentation(
        None, "RandAugment (arXiv 1909.13719): number of layers and magnitude (0 to 30), such as 2 9; 0 0 turns it off."
    )
    random_erasing: float = _augmentation(
        0.0, "Random erasing (arXiv 1708.04896): probability that noise replaces a rectangle of 2 to 33% of the image."
    )
    mixup_alpha: float = _augmentation(0.0, "Beta parameter of mixup (arXiv 1710.09412), such as 0.2; 0 turns it off.")
    cutmix_alpha: float = _augmentation(
        0.0,
        "Beta parameter of cutmix (arXiv 1905.04899), such as 1; 0 turns it off. With mixup, each batch "
        "gets one of the two.",
    )
    shift_px: float = _augmentation(
        0, "Largest random shift in pixels; with a whole number, images shift by whole pixels."
    )
    rotation_degrees: float = _augmentation(0.0, "Largest random rotation in degrees, in either direction.")
    shear_degrees: float = _augmentation(0.0, "Largest random shear in degrees, in either direction.")
    zoom: float = _augmentation(0.0, "Largest random zoom in or out, as a share: 0.1 is 10%.")
    random_crop: int | None = _augmentation(
        None, "Pad with this many reflected pixels, then crop at random (arXiv 2204.07118); 0 turns it off."
    )
    auto_augment: str | None = _augmentation(
        None,
        "timm augmentation policy, such as rand-m9-mstd0.5-inc1 or 3a (needs pip install timm); none turns it off.",
    )
    color_jitter: float = _augmentation(
        0.0, "Largest random change of brightness, contrast and saturation, as a share; 0 turns it off."
    )
    scale_jitter: tuple[float, float] | None = _augmentation(
        None,
        "For segmentation and detection: smallest and largest scale before a random crop (arXiv "
        "2012.07177); 0 0 turns it off.",
    )

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        crop, padding, scales = self.random_resized_crop, self.random_crop, self.scale_jitter
        rand, policy = self.randaugment, self.auto_augment
        is_crop = crop is None or 0 < crop[0] <= crop[1] <= 1
        is_rand = rand is None or (rand[0] >= 0 and 0 <= rand[1] <= 30)
        is_policy = policy is None or re.fullmatch(POLICY, policy)
        are_scales = scales is None or 0.05 <= scales[0] <= scales[1] <= 10
        for name, is_valid, rule in (
            ("random_resized_crop", is_crop, "must be two shares, 0 < smallest <= largest <= 1"),
            ("horizontal_flip", 0 <= self.horizontal_flip <= 1, "must be a probability from 0 to 1"),
            ("randaugment", is_rand, "must be a number of layers and a magnitude from 0 to 30"),
            ("auto_augment", is_policy, "must be a policy of timm, such as rand-m9-mstd0.5-inc1 or 3a"),
            ("random_crop", padding is None or padding >= 0, "must be 0 px or more"),
            ("random_crop", padding is None or crop is None, "cannot be combined with random_resized_crop"),
            ("color_jitter", 0 <= self.color_jitter <= 1, "must be a share from 0 to 1"),
            ("scale_jitter", are_scales, "must be two scales, 0.05 <= smallest <= largest <= 10"),
            ("scale_jitter", scales is None or crop is None, "cannot be combined with random_resized_crop"),
            ("random_erasing", 0 <= self.random_erasing <= 1, "must be a probability from 0 to 1"),
            ("mixup_alpha", self.mixup_alpha >= 0, "must be 0 (off) or more"),
            ("cutmix_alpha", self.cutmix_alpha >= 0, "must be 0 (off) or more"),
            ("shift_px", self.shift_px >= 0, "must be 0 px or more"),
            ("rotation_degrees", 0 <= self.rotation_degrees <= 180, "must be 0 to 180 degrees"),
            ("shear_degrees", 0 <= self.shear_degrees < 90, "must be 0 or more and below 90 degrees"),
            ("zoom", 0 <= self.zoom < 1, "must be 0 or more and below 1"),
        ):
            if not is_valid:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"the augmentation {name} is {getattr(self, name)}, but it {rule}; change {option}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The validated settings of a training with their source. `hf-vit finetune --help` explains each field.

    Attributes:
        name, source, summary: the name, the source of the numbers, and the purpose.
        learning_rates: the grid of the source, which `--lr-sweep` tries; empty if it has none.
        architecture: fields for the configuration of a model with new weights; for segmentation and detection fields of
            the head. A checkpoint keeps its configuration.
        image_size: (height, width) px; None is the model's.
        augmentation: the augmentation of the training images.
    """

    name: str
    source: str
    summary: str
    optimizer: Literal["adamw", "sgd", "lamb", "lion", "muon"] = _optimization(
        "adamw", "Optimizer: adamw, sgd, lamb (arXiv 1904.00962), lion (2302.06675) or muon (2502.16982)."
    )
    learning_rate: float = setting(MISSING, "Peak of the learning rate, after the warm-up.", above=0)
    learning_rates: tuple[float, ...] = ()
    weight_decay: float = _optimization(
        0.0, "Weight decay of matrices and convolution kernels; decoupled for adamw and lion.", at_least=0
    )
    momentum: float = _optimization(0.9, "Momentum of sgd and muon.", at_least=0, below=1)
    beta1: float = _optimization(
        0.9, "First beta of adamw, lamb and lion, and of the AdamW that muon uses for vectors.", at_least=0, below=1
    )
    beta2: float = _optimization(
        0.999, "Second beta of adamw, lamb and lion, and of the AdamW that muon uses for vectors.", at_least=0, below=1
    )
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = _optimization(
        "cosine", "Learning rate schedule after the warm-up: cosine, linear, constant or warmup_stable_decay."
    )
    warmup: float = _optimization(0.0, "Length of the warm-up: steps, or a share of all steps if below 1.", at_least=0)
    cooldown: float = _optimization(
        0.2,
        "Length of the decay at the end of warmup_stable_decay (1 - sqrt): steps, or a share of all steps if below 1.",
        above=0,
    )
    min_learning_rate: float = _optimization(
        0.0, "Final learning rate of cosine and warmup_stable_decay; the latter also begins with it.", at_least=0
    )
    epochs: float | None = setting(None, "Number of epochs, passes over the training split.", above=0)
    steps: int | None = setting(None, "Number of optimizer steps, in place of --epochs.", above=0)
    batch_size: int = setting(MISSING, "Images per optimizer step, over all devices.", above=0)
    clip: float = _optimization(1.0, "Clip gradients to this norm; 0 turns it off.", at_least=0)
    loss: Literal["ce", "bce"] = _optimization(
        "ce", "Loss: ce (softmax cross-entropy) or bce (binary cross-entropy, summed over the classes)."
    )
    bce_threshold: float | None = _optimization(
        None,
        "With --loss bce: mixed targets above this value become 1, others 0 (arXiv 2110.00476).",
        at_least=0,
        below=1,
    )
    class_weights: bool = _optimization(False, "Weight the loss by inverse class frequency; needs --loss ce.")
    balanced_sampling: bool = _optimization(
        False, "Sample all classes equally often; images of rare classes are repeated."
    )
    repeated_augmentation: int = _optimization(
        1, "Number of differently augmented copies of each image in a batch (arXiv 1901.09335).", at_least=1
    )
    new_head: bool = _optimization(
        False,
        "If the checkpoint was trained on the same classes: start with a new head, or keep the checkpoint's head.",
        flags="--new-head/--keep-head",
    )
    head_bias: float | None = _optimization(
        None, "Initial bias of a new head. Default: 0, or -log(number of classes) with --loss bce."
    )
    label_smoothing: float = _optimization(
        0.0, "Label smoothing: probability that is spread over all classes, such as 0.1.", at_least=0, below=1
    )
    dropout: float | None = _optimization(None, "Dropout rate. Default: the model's.", at_least=0, below=1)
    drop_path: float | None = _optimization(
        None, "Drop path (stochastic depth) rate. Default: the model's.", at_least=0, below=1
    )
    architecture: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    tune: Literal["all", "head", "last-blocks", "lora", "auto"] = setting(
        "all",
        "Weights to train: all, head, last-blocks (those and the head), lora (arXiv 2106.09685; needs the extra "
        "peft), or auto, which tries head, lora and all for 30% of the steps, with adamw each at a rate of its own "
        "unless --learning-rate is given, and takes the best on the validation split.",
    )
    tuned_blocks: int = _weights(2, "With --tune last-blocks: how many of the last blocks are trained.", above=0)
    lora_rank: int = _weights(8, "With --tune lora: rank of the updates of query and value projections.", above=0)
    lora_alpha: float = _weights(16.0, "With --tune lora: updates are scaled by alpha / rank.", above=0)
    layer_decay: float | None = _weights(
        None,
        "Layer-wise learning rate decay: each layer's rate is this times that of the next one (arXiv 2106.08254).",
        above=0,
        at_most=1,
    )
    average_decay: float | None = _weights(
        None,
        "Decay of an EMA of the weights, such as 0.9999; the EMA weights are evaluated and saved.",
        at_least=0,
        below=1,
    )
    sam_rho: float = _weights(
        0.0, "Radius rho of sharpness-aware minimization (SAM, arXiv 2010.01412); 0 turns it off.", at_least=0
    )
    sam_micro_batches: bool = _weights(
        False,
        "With --sam-rho: compute the perturbation per micro-batch instead of per step.",
        flags="--sam-micro-batches/--sam-batch",
    )
    image_size: tuple[int, int] | None = None
    augmentation: AugmentationConfig = AugmentationConfig()
    evaluations: int = _optimization(
        20, "Number of validations and checkpoints during the training, evenly spaced.", above=0
    )
    patience: int | None = _optimization(
        None, "Stop after this many validations without a better score or loss.", above=0
    )

    def __post_init__(self) -> None:
        """Raise a UserError for a value that is out of its range, or for settings that exclude each other."""
        _check(self)
        problem = ""
        lowest, highest = self.min_learning_rate, self.learning_rate
        if (self.epochs is None) == (self.steps is None):
            problem = "the length of the training is missing; give epochs or steps (--epochs or --steps)"
        elif self.tune == "lora" and self.average_decay is not None:
            problem = "an EMA (--average-decay) does not work with --tune lora; use --tune all, or another --recipe"
        elif lowest and self.schedule not in ("cosine", "warmup_stable_decay"):
            problem = (
                f"the schedule {self.schedule} ends at a learning rate of 0, but min_learning_rate is {lowest:g}; use "
                "--min-learning-rate 0, or --schedule cosine"
            )
        elif lowest > highest:
            problem = f"min_learning_rate {lowest:g} is above the learning rate {highest:g}; lower --min-learning-rate"
        elif self.bce_threshold is not None and self.loss != "bce":
            problem = "--bce-threshold only works with --loss bce; leave --bce-threshold out, or use --loss bce"
        elif self.sam_micro_batches and not self.sam_rho:
            problem = "--sam-micro-batches only works with --sam-rho; add --sam-rho, or leave --sam-micro-batches out"
        elif self.class_weights and self.loss == "bce":
            problem = "--class-weights only works with --loss ce; leave --class-weights out, or use --loss ce"
        elif self.class_weights and self.balanced_sampling:
            problem = "--class-weights and --balanced-sampling both balance classes and cannot be combined; use one"
        if problem:
            raise UserError(f"{problem}; see hf-vit finetune --help")

    def initial_head_bias(self, num_labels: int) -> float:
        """Return the initial value of the head's bias for K = `num_labels` classes.

        With the loss "bce" it is -log(K), so that every class has a probability of about 1 / K at the start. Google's
        code has such values as rounded constants: -6.9 for 1,000 classes and -10 for 21,843 (big_vision's configs of
        arXiv 2106.10270).
        """
        if self.head_bias is not None:
            return self.head_bias
        return -math.log(num_labels) if self.loss == "bce" else 0.0

    def override(self, **values: Any) -> "Recipe":
        """Return a copy of the recipe with other values; None changes nothing.

        (0, 0) switches an augmentation with two values off, 0 random_crop and "none" auto_augment. A random crop
        replaces the recipe's random crop of another kind, and loss="ce" removes the recipe's bce_threshold.

        Args:
            **values: names of `OVERRIDABLE`, or image_size.

        Raises:
            UserError: a name is unknown or a value out of range; the message has the allowed range.
        """
        new_values = {name: value for name, value in values.items() if value is not None}
        names = OVERRIDABLE | {"image_size"}
        for name in set(new_values) - names:
            close_names = difflib.get_close_matches(name, names, n=1) or sorted(names)
            raise UserError(f"unknown recipe value '{name}'; did you mean {close_names[0]}?")
        if "epochs" in new_values and "steps" in new_values:
            raise UserError("a training takes epochs or steps, but both were given; leave --epochs or --steps out")
        changes = {name: value for name, value in new_values.items() if name not in AUGMENTATION_FIELDS}
        if "epochs" in changes or "steps" in changes:  # one replaces the recipe's other
            changes = {"epochs": None, "steps": None, **changes}
        if changes.get("loss") == "ce":  # has no use for the threshold of a recipe with bce
            changes = {"bce_threshold": None, **changes}
        augmentation = {
            name: None if value == _OFF.get(name) else value
            for name, value in new_values.items()
            if name in AUGMENTATION_FIELDS
        }
        if any(augmentation.get(crop) is not None for crop in CROPS):
            augmentation = {**dict.fromkeys(CROPS), **augmentation}
        if augmentation:
            changes["augmentation"] = dataclasses.replace(self.augmentation, **augmentation)
        recipe = dataclasses.replace(self, **changes)
        for name, tune in {"tuned_blocks": "last-blocks", "lora_rank": "lora", "lora_alpha": "lora"}.items():
            if name in changes and recipe.tune not in (tune, "auto"):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} only works with --tune {tune}; add --tune {tune}, or leave {option} out")
        return recipe

    def settings(self) -> dict[str, Any]:
        """Return all values but the summary in one flat dictionary, for facts and `hf-vit recipes`."""
        values = {**vars(self)}
        del values["summary"], values["augmentation"]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in (values | vars(self.augmentation)).items()}


@dataclass(frozen=True)
class FinetuneOptions:
    """How to run a recipe; apart from seed and image size it should not change the result.

    `hf-vit finetune --help` explains each field. `image_size` is (height, width) px. With 0 workers this process
    prepares the images.
    """

    image_size: tuple[int, int] | None = setting(
        None,
        "Input size in pixels: 224 or 224x160. Position embeddings are resampled. Default: the recipe's or model's.",
        typed=str,
    )
    micro_batch_size: int | None = setting(
        None, "Images per forward pass; gradients are accumulated exactly. Default: at most 128.", above=0
    )
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "fp32, bf16 (weights stay float32) or auto: bf16 where it is faster."
    )
    seed: int = setting(
        0,
        "Random seed for weight initialization, data order, augmentation, masks and dropout.",
        at_least=0,
        below=2**32,
    )
    num_workers: int = setting(0, "Number of data loading processes.", at_least=0)
    streaming: bool = _run(False, "Read images as they are needed instead of loading the data set first.")
    skip_bad_images: bool = _run(
        False, "Skip unreadable images, and training images smaller than a patch, instead of stopping."
    )
    resume: bool = setting(False, "Resume from the last complete checkpoint in the output directory.")
    cache_features: bool = _run(
        False, "With --tune head: compute features once and keep them on disk; needs images without augmentation."
    )
    keep_checkpoints: bool = _run(False, "Keep OUTPUT/checkpoints when the run is complete.")
    image_column: str | None = _run(None, "Column of a table or list that holds the images or their file names.")
    label_column: str | None = _run(
        None,
        "Column with the classes, masks or objects; for multi-label data several columns of 0 and 1, such as cat,dog.",
    )
    device: str | None = setting(None, "torch device, such as cpu or cuda:1. Default: a GPU if there is one.")
    process_timeout: int = _run(
        1800, "Seconds to wait for the other processes of a distributed run before it stops.", above=0
    )
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _run(
        "none", "Log metrics to tensorboard (in OUTPUT/runs), wandb or trackio as well."
    )
    push: str | None = setting(None, "Repository on the Hub, user/name, to push the finished model to.")
    private: bool = _run(False, "With --push: make the new repository private.")
    license: str | None = _run(
        None, "With --push: license id on the Hub, such as mit or apache-2.0. Default: the base model's."
    )
    share_images: bool = _run(False, "Also show plots that contain images of the data set in the model card.")

    def __post_init__(self) -> None:
        """Raise a UserError for the first value that is out of its range."""
        _check(self)
        packages = REPORTERS.get(self.report_to)
        if packages and not any(map(importlib.util.find_spec, packages)):
            raise UserError(
                f"--report-to {self.report_to} needs the package {self.report_to}; install it with pip install "
                f"{self.report_to}"
            )
        if self.image_size is not None and min(self.image_size) < 1:
            raise UserError(
                f"the image size is {self.image_size[0]}x{self.image_size[1]} px, but both sides must be at least "
                "1 px; choose a larger --image-size"
            )


# The default weight of the teacher's loss: of soft targets arXiv 2012.12877, section 6, of hard ones its equation 3.
_WEIGHTS = {"hard": 0.5, "soft": 0.1, "logit": 0.1}
_TEMPERATURE = 3.0


@dataclass(frozen=True)
class DistillationOptions:
    """Settings of distillation; `hf-vit finetune --help` explains each field, and `open_teacher` the teacher.

    The distillation token learns the teacher's most likely class ("hard", arXiv 2012.12877, equation 3) or its
    probabilities ("soft", equation 2); with "logit" the student's logits learn the probabilities, without a token. The
    loss of probabilities is multiplied by the square of the temperature.
    """

    teacher: Any
    kind: Literal["hard", "soft", "logit"] = _teacher(
        "logit",
        "Kind of distillation: hard or soft (train DeiT's distillation token), or logit (the default).",
        option="distillation",
    )
    temperature: float | None = _teacher(None, "Temperature of soft targets (default 3).", above=0)
    weight: float | None = _teacher(
        None, "Share of the distillation loss in the total loss (default 0.5 for hard, 0.1 for others).",
        option="distillation_weight", at_least=0, at_most=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)
        if self.kind == "hard" and self.temperature is not None:
            raise UserError(
                "hard distillation uses no temperature; leave the temperature out, or choose soft or logit distillation"
            )

    @property
    def uses_token(self) -> bool:
        """Whether the student needs a distillation token with a head of its own."""
        return self.kind != "logit"

    def settings(self) -> dict[str, Any]:
        """Return the values with their defaults, without the teacher, as facts record them."""
        weight = _WEIGHTS[self.kind] if self.weight is None else self.weight
        settings: dict[str, Any] = {"distillation": self.kind, "distillation_weight": weight}
        if self.kind != "hard":
            settings["temperature"] = self.temperature or _TEMPERATURE
        return settings


# The defaults of both kinds: those of arXiv 1911.04252, section 3.1 (but the ratio is that of the authors' code for
# EfficientNet-B1 to B7; the paper has 14 for L2), and those of the authors' code of arXiv 2003.10580.
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
    """Settings of self-training with a teacher (see `open_teacher`) and unlabeled images (see `load_unlabeled`).

    `hf-vit finetune --help` explains each field. None is the default of the kind, and settings of the other kind are
    refused. A noisy student (arXiv 1911.04252) learns the same number of images of every class: those with the highest
    confidence, or repeated ones if there are too few. The labels of meta-pseudo-labels (arXiv 2003.10580) are drawn
    from the teacher's probabilities; a consistency loss (UDA, arXiv 1904.12848), whose weight rises from 0, makes the
    teacher predict the same for an image and its augmentation.
    """

    teacher: Any
    unlabelled: str
    kind: Literal["noisy-student", "meta-pseudo-labels"] = _unlabeled(
        "noisy-student", "Method: noisy-student (the default) or meta-pseudo-labels.", option="self_training"
    )
    unlabelled_ratio: int | None = _unlabeled(
        None,
        "Unlabeled images per labeled image in a batch (default 3; meta-pseudo-labels: 4).",
        option="unlabeled_ratio",
        at_least=1,
    )
    pseudo_labels: Literal["soft", "hard"] | None = _unlabeled(
        None, "noisy-student: kind of pseudo-labels, soft (the default) or hard."
    )
    confidence: float | None = _unlabeled(
        None,
        "noisy-student: leave out images whose pseudo-label has a lower confidence than this (default 0.3).",
        at_least=0,
        at_most=1,
    )
    images_per_class: int | None = _unlabeled(
        None,
        "noisy-student: largest number of unlabeled images per class. Default: that of the largest class.",
        at_least=1,
    )
    head_dropout: float | None = _unlabeled(
        None, "noisy-student: dropout rate before the head (default 0.5).", at_least=0, below=1
    )
    uda_weight: float | None = _unlabeled(
        None, "meta-pseudo-labels: weight of the UDA consistency loss (default 1).", at_least=0
    )
    uda_temperature: float | None = _unlabeled(
        None, "meta-pseudo-labels: temperature of the UDA targets (default 0.75).", above=0
    )
    uda_threshold: float | None = _unlabeled(
        None, "meta-pseudo-labels: smallest confidence of a UDA target (default 0.6).", at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        """Raise a UserError for a value that is out of its range, or an option of the other method."""
        _check(self)
        for name in sorted({*SELF_TRAINING_FIELDS} - _SELF_TRAINING[self.kind].keys() - {"kind"}):
            if getattr(self, name) is not None:
                raise UserError(f"{name} has no effect with {self.kind} self-training; leave it out")

    def settings(self) -> dict[str, Any]:
        """Return the values with the defaults of the kind, without teacher and images, as facts record them."""
        defaults = _SELF_TRAINING[self.kind]
        values = {name: getattr(self, name) for name in defaults if getattr(self, name) is not None}
        return {"self_training": self.kind, **(defaults | values)}


@dataclass(frozen=True)
class ContrastiveOptions:
    """Settings of momentum contrast; the defaults are those of arXiv 2104.02057, section 4.3, and of its code.

    `hf-vit pretrain --help` explains each field. The momentum rises to 1 along half a cosine. A hidden size of None is
    12 times the encoder's width, but at most 4096. Batch norm uses the images of all processes; with the other norms an
    image does not depend on others. A frozen patch embedding keeps its initial values, which the paper found stable; a
    stem of convolutions learns.
    """

    temperature: float = _contrast(0.2, "Temperature of the contrastive loss.", above=0)
    momentum: float = _contrast(
        0.99, "Momentum of the momentum encoder at the first step.", option="encoder_momentum", at_least=0,
        at_most=1,
    )  # fmt: skip
    projection_size: int = _contrast(256, "Output size of the projection head.", at_least=1)
    hidden_size: int | None = _contrast(None, "Hidden size of projection and prediction heads.", at_least=1)
    normalization: Literal["batch", "layer", "none"] = _contrast(
        "batch", "Normalization in projection and prediction heads: batch, layer or none."
    )
    freeze_patches: bool = _contrast(
        True,
        "Freeze the patch embedding, which makes the training of ViTs more stable.",
        flags="--freeze-patches/--train-patches",
    )

    def __post_init__(self) -> None:
        _check(self, "pretrain")


CROPS = ("random_resized_crop", "random_crop", "scale_jitter")
_OFF: Mapping[str, Any] = {
    **dict.fromkeys(("random_resized_crop", "scale_jitter", "randaugment"), (0, 0)),
    **{"random_crop": 0, "auto_augment": "none"},
}


def _list_fields(settings: Any) -> Mapping[str, Field[Any]]:
    """Return the fields of a dataclass that are options, by name."""
    return {field.name: field for field in fields(settings) if field.metadata}


RECIPE_FIELDS, AUGMENTATION_FIELDS, RUN_FIELDS = map(_list_fields, (Recipe, AugmentationConfig, FinetuneOptions))
DISTILLATION_FIELDS, SELF_TRAINING_FIELDS = map(_list_fields, (DistillationOptions, SelfTrainingOptions))
CONTRASTIVE_FIELDS = _list_fields(ContrastiveOptions)
# The values of a recipe that options of `hf-vit finetune` can change.
OVERRIDABLE = frozenset(RECIPE_FIELDS) | frozenset(AUGMENTATION_FIELDS)


def get_option_name(field: Field[Any]) -> str:
    """Return the name of the option that sets a field."""
    return field.metadata.get("option") or field.name


def _check(settings: Any, command: str = "finetune") -> None:
    """Convert the fields of a dataclass to their types, and raise a `UserError` for values out of range."""
    for field in fields(settings):
        object.__setattr__(settings, field.name, _convert(field, getattr(settings, field.name), command))


def _convert(field: Field[Any], value: Any, command: str) -> Any:
    """Convert a value to the type of its field; raise a `UserError` if it does not fit type or range."""
    types: tuple[Any, ...] = (field.type, *get_args(field.type))
    if NoneType in types and value is None:
        return None

    def make_error(need: str) -> UserError:
        return UserError(f"{get_option_name(field)} = {value!r}: Input should be {need}; see hf-vit {command} --help")

    choices = next((get_args(kind) for kind in types if get_origin(kind) is Literal), ())
    if choices and value not in choices:
        *others, last = map(repr, choices)
        raise make_error(f"{', '.join(others)} or {last}")
    if any(get_origin(kind) is tuple for kind in types):
        if not isinstance(value, tuple | list):
            raise make_error("a valid tuple")
        return tuple(item.item() if hasattr(item, "item") else item for item in value)  # of NumPy
    if bool in types:
        if value not in (True, False):
            raise make_error("a valid boolean")
        return bool(value)
    if int not in types and float not in types:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise make_error("a valid number") from None
    if not math.isfinite(number):
        raise make_error("a finite number")
    if int in types and not number.is_integer():
        raise make_error("a whole number")
    for name, (words, is_within) in _LIMITS.items():
        limit = field.metadata[name]
        if limit is not None and not is_within(number, limit):
            raise make_error(f"{words} {limit:.12g}")
    return int(number) if int in types else number


_LIMITS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("greater than", operator.gt),
    "at_least": ("greater than or equal to", operator.ge),
    "below": ("less than", operator.lt),
    "at_most": ("less than or equal to", operator.le),
}
