"""What a recipe is: a complete set of training settings, checked, with its source."""

import difflib
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.errors import UserError


class Recipe(BaseModel):
    """Settings of a training.

    Attributes:
        name, source, summary: what it is called, where its numbers come from, what it is for.
        optimizer: "adamw", "sgd", or of timm (the extra `timm`) "lamb" (arXiv 1904.00962), "lion" (2302.06675) or
            "muon": matrices and kernels move along their orthogonalised momentum, scaled to the size of AdamW's steps
            (2502.16982, section 2.2), and the others as with AdamW under Nesterov's momentum.
        learning_rate: its peak, after the warm-up.
        learning_rates: the source's grid, which `--lr-sweep` tries; empty where it has none.
        weight_decay: decoupled for AdamW and Lion; on matrices and kernels only.
        momentum: of SGD, and of Muon (Nesterov's).
        beta1, beta2: of the others.
        schedule: of the learning rate after the warm-up; "warmup_stable_decay" keeps it until the cooldown, in which it
            falls as 1 - sqrt (arXiv 2405.18392, section 3).
        warmup: a share of all steps if below 1, else a number of steps.
        cooldown: of "warmup_stable_decay", likewise.
        min_learning_rate: where "cosine" and "warmup_stable_decay" end.
        epochs, steps: length; one of the two.
        batch_size: images a step, over all devices and accumulated micro-batches.
        clip: largest norm of the gradient; 0 is off.
        loss: "ce", softmax cross-entropy; or "bce", a binary cross-entropy a class, summed over the classes.
        bce_threshold: with "bce": targets above it become 1 and the others 0 (arXiv 2110.00476); None
            keeps the targets of mixed images as they are.
        class_weights: with "ce": errors on a class count by how rare it is among the training images, 1 on average.
        balanced_sampling: an epoch draws as many images, with repetition, every class as often as the others.
        repeated_augmentation: how often an image comes in its batch, each time with variations of its own; an epoch has
            as many images as before, hence fewer different ones (arXiv 1901.09335; 2012.12877, table 9).
        new_head: start with a new head even where the checkpoint has one for the very classes of the data.
        head_bias: first value of a new head's bias; None: 0, and -log K with "bce" (see `initial_head_bias`).
        label_smoothing: share of the probability that goes to all classes evenly.
        dropout, drop_path: rates; None keeps the model's.
        architecture: fields of the configuration of a model with fresh weights; a checkpoint keeps its own. Of
            segmentation and detection those of the head, which is always new.
        tune: which weights learn: "all", "head", or "lora": low-rank updates of the queries' and values' projections
            (arXiv 2106.09685) and the head; they are merged into the weights that are released.
        lora_rank, lora_alpha: of the updates, which are scaled by alpha / rank.
        layer_decay: factor on the learning rate from each layer to the one below it (BEiT, arXiv 2106.08254).
        average_decay: of the moving average of the weights, which then is what is evaluated and released.
        sam_rho: radius of sharpness-aware minimisation (arXiv 2010.01412); 0 is off.
        sam_micro_batches: every micro-batch has a perturbation of its own (m-sharpness, section 4.1), not every step.
        image_size: (height, width) px; None keeps the model's.
        augmentation: of the training images.
        evaluations: how often, evenly spaced, the validation split is evaluated and a checkpoint written.
        patience: stop after so many evaluations in which neither the score nor the loss got better, the warm-up's not
            counted; None never stops early.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    source: str
    summary: str
    optimizer: Literal["adamw", "sgd", "lamb", "lion", "muon"] = "adamw"
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    learning_rates: tuple[float, ...] = ()
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    warmup: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    cooldown: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    min_learning_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    steps: int | None = Field(default=None, gt=0)
    batch_size: int = Field(gt=0)
    clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    loss: Literal["ce", "bce"] = "ce"
    bce_threshold: float | None = Field(default=None, ge=0, lt=1)
    class_weights: bool = False
    balanced_sampling: bool = False
    repeated_augmentation: int = Field(default=1, ge=1)
    new_head: bool = False
    head_bias: float | None = Field(default=None, allow_inf_nan=False)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    drop_path: float | None = Field(default=None, ge=0, lt=1)
    architecture: dict[str, Any] = {}
    tune: Literal["all", "head", "lora"] = "all"
    lora_rank: int = Field(default=8, gt=0)
    lora_alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    average_decay: float | None = Field(default=None, ge=0, lt=1)
    sam_rho: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    sam_micro_batches: bool = False
    image_size: tuple[int, int] | None = None
    augmentation: AugmentationConfig = AugmentationConfig()
    evaluations: int = Field(default=20, gt=0)
    patience: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_length(self) -> "Recipe":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("the length is given either in epochs or in steps")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if self.tune == "lora" and self.average_decay is not None:
            raise ValueError("LoRA's factors cannot be averaged and merged; leave average_decay out, or tune all")
        if self.min_learning_rate and self.schedule not in ("cosine", "warmup_stable_decay"):
            raise ValueError(f"the schedule {self.schedule} has no min_learning_rate; choose --min-learning-rate 0")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is above the learning rate {self.learning_rate:g}; "
                "choose a smaller one"
            )
        if self.bce_threshold is not None and self.loss != "bce":
            raise ValueError("bce_threshold is a setting of the loss bce; choose --loss bce")
        if self.sam_micro_batches and not self.sam_rho:
            raise ValueError("sam_micro_batches is a setting of sharpness-aware minimisation; give --sam-rho")
        if self.class_weights and self.loss == "bce":
            raise ValueError("class weights are a setting of the loss ce; leave one of the two out")
        if self.class_weights and self.balanced_sampling:
            raise ValueError("class weights and balanced sampling make up for the same; choose one of the two")
        return self

    def initial_head_bias(self, num_labels: int) -> float:
        """First value of the head's bias.

        With "bce" a class is then answered with probability 1 / K at first. Google's original codes have the same
        value as a rounded constant: -6.9 for 1,000 classes and -10 for 21,843 (big_vision's configs of arXiv
        2106.10270).
        """
        if self.head_bias is not None:
            return self.head_bias
        return -math.log(num_labels) if self.loss == "bce" else 0.0

    def override(self, **values: Any) -> "Recipe":
        """The recipe with other values; None changes nothing.

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
            raise UserError(f"a recipe has no value '{name}'; did you mean {near[0]}?")
        if "epochs" in given and "steps" in given:
            raise UserError("give the length either in epochs or in steps, not both")
        changes: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        if "epochs" in given or "steps" in given:
            changes |= {"epochs": None, "steps": None}
        varied: dict[str, Any] = {
            name: given.pop(name) for name in list(given) if name in AugmentationConfig.__dataclass_fields__
        }
        for name in ("random_resized_crop", "scale_jitter"):
            if varied.get(name) == (0, 0):
                varied[name] = None
        if varied.get("auto_augment") == "none":
            varied["auto_augment"] = None
        if chosen := [crop for crop in _CROPS if varied.get(crop) is not None]:
            varied = {**dict.fromkeys(set(_CROPS) - set(chosen)), **varied}
        changes |= given
        if varied:
            changes["augmentation"] = AugmentationConfig(**{**vars(self.augmentation), **varied})
        try:
            return Recipe(**changes)
        except ValidationError as error:
            first = error.errors()[0]
            where = "_".join(str(part) for part in first["loc"])
            value = f"{where} = {first['input']!r}: " if where else ""
            raise UserError(
                f"{value}{first['msg'].removeprefix('Value error, ')}; see hf-vit finetune --help"
            ) from error

    def settings(self) -> dict[str, Any]:
        """Every value, plain: what facts record and `hf-vit recipes` prints."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values.pop("summary")
        augmentation: AugmentationConfig = values.pop("augmentation")
        return {name: list(v) if isinstance(v, tuple) else v for name, v in (values | vars(augmentation)).items()}


_CROPS = ("random_resized_crop", "random_crop", "scale_jitter")
# What no flag of `hf-vit finetune` changes, or one that is an option beside the recipe.
_FIXED = {"name", "source", "summary", "learning_rates", "image_size", "architecture", "augmentation"}
# What a flag of `hf-vit finetune` may change.
OVERRIDABLE = (frozenset(Recipe.model_fields) - _FIXED) | frozenset(AugmentationConfig.__dataclass_fields__)
