"""What a recipe is: a complete set of training settings, checked, with its source."""

import difflib
import math
import operator
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args, get_origin

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.errors import UserError

_UNVARIED = AugmentationConfig()


def _number(default: Any = MISSING, **limits: float) -> Any:
    """Return a field of finite numbers within limits: above, at_least, below, at_most."""
    return field(default=default, metadata={"limits": limits})


@dataclass(frozen=True, kw_only=True)
class Recipe:
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

    name: str
    source: str
    summary: str
    optimizer: Literal["adamw", "sgd", "lamb", "lion", "muon"] = "adamw"
    learning_rate: float = _number(above=0)
    learning_rates: tuple[float, ...] = ()
    weight_decay: float = _number(0.0, at_least=0)
    momentum: float = _number(0.9, at_least=0, below=1)
    beta1: float = _number(0.9, at_least=0, below=1)
    beta2: float = _number(0.999, at_least=0, below=1)
    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    warmup: float = _number(0.0, at_least=0)
    cooldown: float = _number(0.2, above=0)
    min_learning_rate: float = _number(0.0, at_least=0)
    epochs: float | None = _number(None, above=0)
    steps: int | None = _number(None, above=0)
    batch_size: int = _number(above=0)
    clip: float = _number(1.0, at_least=0)
    loss: Literal["ce", "bce"] = "ce"
    bce_threshold: float | None = _number(None, at_least=0, below=1)
    class_weights: bool = False
    balanced_sampling: bool = False
    repeated_augmentation: int = _number(1, at_least=1)
    new_head: bool = False
    head_bias: float | None = _number(None)
    label_smoothing: float = _number(0.0, at_least=0, below=1)
    dropout: float | None = _number(None, at_least=0, below=1)
    drop_path: float | None = _number(None, at_least=0, below=1)
    architecture: dict[str, Any] = field(default_factory=dict[str, Any])
    tune: Literal["all", "head", "lora"] = "all"
    lora_rank: int = _number(8, above=0)
    lora_alpha: float = _number(16.0, above=0)
    layer_decay: float | None = _number(None, above=0, at_most=1)
    average_decay: float | None = _number(None, at_least=0, below=1)
    sam_rho: float = _number(0.0, at_least=0)
    sam_micro_batches: bool = False
    image_size: tuple[int, int] | None = None
    augmentation: AugmentationConfig = _UNVARIED
    evaluations: int = _number(20, above=0)
    patience: int | None = _number(None, above=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _checked(each, getattr(self, each.name)))
        for is_wrong, message in (
            ((self.epochs is None) == (self.steps is None), "the length is given either in epochs or in steps"),
            (
                self.tune == "lora" and self.average_decay is not None,
                "LoRA's factors cannot be averaged and merged; leave average_decay out, or tune all",
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
                "bce_threshold is a setting of the loss bce; choose --loss bce",
            ),
            (
                self.sam_micro_batches and not self.sam_rho,
                "sam_micro_batches is a setting of sharpness-aware minimisation; give --sam-rho",
            ),
            (
                self.class_weights and self.loss == "bce",
                "class weights are a setting of the loss ce; leave one of the two out",
            ),
            (
                self.class_weights and self.balanced_sampling,
                "class weights and balanced sampling make up for the same; choose one of the two",
            ),
        ):
            if is_wrong:
                raise UserError(f"{message}; see hf-vit finetune --help")

    def initial_head_bias(self, num_labels: int) -> float:
        """Return the first value of the head's bias.

        With "bce" a class is then answered with probability 1 / K at first. Google's original codes have the same
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
        changes = {name: value for name, value in values.items() if value is not None}
        known = OVERRIDABLE | {"image_size"}
        for name in set(changes) - known:
            near = difflib.get_close_matches(name, known, n=1) or sorted(known)
            raise UserError(f"a recipe has no value '{name}'; did you mean {near[0]}?")
        if "epochs" in changes and "steps" in changes:
            raise UserError("give the length either in epochs or in steps, not both")
        if "epochs" in changes or "steps" in changes:
            changes = {"epochs": None, "steps": None} | changes
        varied: dict[str, Any] = {name: changes.pop(name) for name in _AUGMENTATION if name in changes}
        for name, off in (("random_resized_crop", (0, 0)), ("scale_jitter", (0, 0)), ("auto_augment", "none")):
            if varied.get(name) == off:
                varied[name] = None
        if any(varied.get(crop) is not None for crop in _CROPS):
            varied = dict.fromkeys(_CROPS) | varied
        if varied:
            changes["augmentation"] = replace(self.augmentation, **varied)
        return replace(self, **changes)

    def settings(self) -> dict[str, Any]:
        """Return every value, plain: what facts record and `hf-vit recipes` prints."""
        values = {name: value for name, value in vars(self).items() if name not in ("summary", "augmentation")}
        plain = values | vars(self.augmentation)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


_WORDS = {
    "above": ("greater than", operator.gt),
    "at_least": ("greater than or equal to", operator.ge),
    "below": ("less than", operator.lt),
    "at_most": ("less than or equal to", operator.le),
}


def _checked(known: "Field[Any]", value: Any) -> Any:
    """Return a value of a field in its type.

    Raises:
        UserError: it has another one, or is out of range.
    """
    kind: Any = known.type
    parts, need = (kind, *get_args(kind)), ""
    if value is None and type(None) in parts:
        return value
    value = cast(Any, value)
    try:
        if get_origin(kind) is Literal:
            *others, last = (repr(choice) for choice in parts[1:])
            need = "" if value in parts else f"{', '.join(others)} or {last}"
        elif any(get_origin(part) is tuple for part in parts):
            need = "" if isinstance(value, tuple | list) else "a valid tuple"
            value = value if need else tuple(value)
        elif bool in parts:
            need = "" if value in (True, False) else "a valid boolean"
            value = value if need else bool(value)
        elif "limits" in known.metadata:
            number = float(value)
            for limit, edge in known.metadata["limits"].items():
                word, holds = _WORDS[limit]
                need = need or ("" if holds(number, edge) else f"{word} {edge:g}")
            if not math.isfinite(number):
                need = "a finite number"
            elif int in parts and not number.is_integer():
                need = "a valid integer, got a number with a fractional part"
            value = value if need else int(number) if int in parts else number
    except (TypeError, ValueError):
        need = "a valid number"
    if need:
        raise UserError(f"{known.name} = {value!r}: Input should be {need}; see hf-vit finetune --help")
    return value


_CROPS = ("random_resized_crop", "random_crop", "scale_jitter")
_AUGMENTATION = tuple(each.name for each in fields(AugmentationConfig))
# Values without a flag of `hf-vit finetune`, or with an option beside the recipe.
_FIXED = {"name", "source", "summary", "learning_rates", "image_size", "architecture", "augmentation"}
# Values that a flag of `hf-vit finetune` may change.
OVERRIDABLE = frozenset({each.name for each in fields(Recipe)} - _FIXED) | frozenset(_AUGMENTATION)
