"""Recipes: complete sets of training settings as data, each with its source.

Shown by `hf-vit recipes`, chosen with `--recipe NAME`; a flag overrides one value. What was really used is recorded in
the model's facts.
"""

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.errors import UserError


class Recipe(BaseModel):
    """Settings of a training.

    Attributes:
        name, source, summary: what it is called, where its numbers come from, what it is for.
        optimizer: "adamw" or "sgd".
        learning_rate: its peak, after the warm-up.
        weight_decay: decoupled for AdamW; on matrices and kernels only.
        momentum: of SGD.
        beta1, beta2: of AdamW.
        schedule: of the learning rate after the warm-up.
        warmup: a share of all steps if below 1, else a number of steps.
        epochs, steps: length; one of the two.
        batch_size: images a step, over all devices and accumulated micro-batches.
        clip: largest norm of the gradient; 0 is off.
        label_smoothing: share of the probability that goes to all classes evenly.
        dropout, drop_path: rates; None keeps the model's.
        image_size: (height, width) px; None keeps the model's.
        augmentation: of the training images.
        evaluations: how often, evenly spaced, the validation split is evaluated and a checkpoint written.
        patience: stop after so many evaluations without a better one; None never stops early.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    source: str
    summary: str
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    steps: int | None = Field(default=None, gt=0)
    batch_size: int = Field(gt=0)
    clip: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    dropout: float | None = Field(default=None, ge=0, lt=1)
    drop_path: float | None = Field(default=None, ge=0, lt=1)
    image_size: tuple[int, int] | None = None
    augmentation: AugmentationConfig = AugmentationConfig()
    evaluations: int = Field(default=20, gt=0)
    patience: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_length(self) -> "Recipe":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("the length is given either in epochs or in steps")
        return self

    def override(self, **values: Any) -> "Recipe":
        """The recipe with other values; None changes nothing, (0, 0) switches random_resized_crop off.

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
        varied = {name: given.pop(name) for name in list(given) if name in AugmentationConfig.__dataclass_fields__}
        if varied.get("random_resized_crop") == (0, 0):
            varied["random_resized_crop"] = None
        changes |= given
        if varied:
            changes["augmentation"] = AugmentationConfig(**{**vars(self.augmentation), **varied})
        try:
            return Recipe(**changes)
        except ValidationError as error:
            first = error.errors()[0]
            where = "_".join(str(part) for part in first["loc"])
            raise UserError(f"{where} = {first['input']!r}: {first['msg']}; see hf-vit finetune --help") from error

    def settings(self) -> dict[str, Any]:
        """Every value, plain: what facts record and `hf-vit recipes` prints."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        values.pop("summary")
        augmentation: AugmentationConfig = values.pop("augmentation")
        return {name: list(v) if isinstance(v, tuple) else v for name, v in (values | vars(augmentation)).items()}


# What a flag of `hf-vit finetune` may change.
OVERRIDABLE = frozenset(Recipe.model_fields) - {"name", "source", "summary", "image_size", "augmentation"} | frozenset(
    AugmentationConfig.__dataclass_fields__
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="default-small",
            source="this package; weight decay and label smoothing as DeiT's (arXiv 2012.12877, table 9)",
            summary="a few hundred to some ten thousand images, from scratch or from a checkpoint, on one machine",
            learning_rate=3e-4,
            weight_decay=0.05,
            warmup=0.1,
            epochs=30,
            batch_size=64,
            label_smoothing=0.1,
            augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5),
            patience=10,
        ),
        Recipe(
            name="digits",
            source="this package: chosen on the validation split of the digits, over several seeds",
            summary="the 1,797 digits at 16x16 px, from scratch in a minute (hf-vit demo)",
            learning_rate=1.5e-3,
            weight_decay=0.05,
            warmup=0.1,
            epochs=80,
            batch_size=64,
            label_smoothing=0.1,
            augmentation=AugmentationConfig(shift_px=1.6, rotation_degrees=10, shear_degrees=5, zoom=0.1),
            evaluations=20,
        ),
        Recipe(
            name="vit-finetune",
            source="arXiv 2010.11929, table 4 (VTAB row: 2,500 steps, rate .01) and section 4.1; warm-up, crop and "
            "flip as the original code's defaults",
            summary="the paper's fine-tuning of a pre-trained checkpoint; --learning-rate .001, .003, .01 or .03",
            optimizer="sgd",
            momentum=0.9,
            learning_rate=0.01,
            warmup=500,
            steps=2500,
            batch_size=512,
            image_size=(384, 384),
            augmentation=AugmentationConfig(random_resized_crop=(0.05, 1.0), horizontal_flip=0.5),
        ),
        Recipe(
            name="pretrain-small",
            source="this package; Adam and cosine as arXiv 2010.11929, appendix B.1.2",
            summary="masked or next patch prediction on a few thousand images, on one machine (hf-vit pretrain)",
            learning_rate=1e-3,
            weight_decay=0.05,
            warmup=0.1,
            epochs=100,
            batch_size=64,
            augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5),
            evaluations=10,
        ),
        Recipe(
            name="vit-self-supervised",
            source="arXiv 2010.11929, appendix B.1.2; crop and flip as the original code's defaults",
            summary="the paper's masked patch prediction; its ViT-B/16 reached 79.9% on ImageNet after fine-tuning",
            learning_rate=2e-4,
            warmup=10_000,
            steps=1_000_000,
            batch_size=4096,
            augmentation=AugmentationConfig(random_resized_crop=(0.05, 1.0), horizontal_flip=0.5),
        ),
        Recipe(
            name="contrastive-small",
            source="this package; weight decay and crop as MoCo v3's",
            summary="momentum contrast on a few thousand images, on one machine (hf-vit pretrain)",
            learning_rate=1e-3,
            weight_decay=0.1,
            warmup=0.1,
            epochs=100,
            batch_size=256,
            augmentation=AugmentationConfig(random_resized_crop=(0.2, 1.0), horizontal_flip=0.5),
            evaluations=10,
        ),
        Recipe(
            name="moco-v3",
            source="arXiv 2104.02057, section 4 (rate 1.5e-4 x batch / 256, 40 of 300 epochs of warm-up) and its code",
            summary="the paper's momentum contrast of ViTs",
            learning_rate=2.4e-3,
            weight_decay=0.1,
            warmup=40 / 300,
            epochs=300,
            batch_size=4096,
            clip=0.0,
            augmentation=AugmentationConfig(random_resized_crop=(0.08, 1.0), horizontal_flip=0.5),
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=2, cutoff=0.3) or list(RECIPES)
        raise UserError(f"no recipe '{name}'; did you mean {' or '.join(near)}? (hf-vit recipes lists all)")
    return RECIPES[name]
