"""Recipes: complete sets of training settings as data, each with its source.

Shown by `hf-vit recipes`, chosen with `--recipe NAME`; a flag overrides one value. What was really used is recorded in
the model's facts.
"""

import difflib

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.errors import UserError
from hf_vit.training.recipes.definition import OVERRIDABLE, Recipe
from hf_vit.training.recipes.dense import DENSE
from hf_vit.training.recipes.original import ORIGINAL
from hf_vit.training.recipes.published import PUBLISHED

__all__ = ["OVERRIDABLE", "RECIPES", "Recipe", "find_recipe"]

_OWN = (
    Recipe(
        name="default-small",
        source="this package; weight decay and label smoothing as DeiT's (arXiv 2012.12877, table 9)",
        summary="a few hundred to some ten thousand images, from scratch or from a checkpoint, on one machine",
        learning_rate=3e-4,
        learning_rates=(1e-4, 3e-4, 1e-3),
        weight_decay=0.05,
        warmup=0.1,
        epochs=30,
        batch_size=64,
        label_smoothing=0.1,
        augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5),
        patience=10,
    ),
    Recipe(
        name="small-data",
        source="this package: chosen on validation images, three seeds (benchmarks/small_data.py); "
        "weight decay and label smoothing as DeiT's (arXiv 2012.12877, table 9)",
        summary="a plain ViT on a thousand images or less, from scratch or after fractals",
        optimizer="muon",
        momentum=0.95,
        learning_rate=3e-3,
        learning_rates=(1e-3, 3e-3),
        weight_decay=0.05,
        warmup=0.1,
        epochs=100,
        batch_size=64,
        label_smoothing=0.1,
        average_decay=0.99,
        augmentation=AugmentationConfig(random_resized_crop=(0.6, 1.0), rotation_degrees=10.0),
    ),
    Recipe(
        name="digits",
        source="this package: chosen on the validation split of the digits, over several seeds",
        summary="the 1,797 digits at 16x16 px, from scratch in a minute",
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
        name="digits-hybrid",
        source="this package: chosen by cross-validation on the digits' training and validation images",
        summary="the 1,797 digits at 32x32 px for a small hybrid, from scratch in a minute (hf-vit demo)",
        learning_rate=2.5e-3,
        weight_decay=0.05,
        warmup=0.1,
        epochs=80,
        batch_size=128,
        label_smoothing=0.1,
        average_decay=0.99,
        augmentation=AugmentationConfig(shift_px=4.5, rotation_degrees=15, shear_degrees=10, zoom=0.15),
        evaluations=4,
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
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (*_OWN, *ORIGINAL, *PUBLISHED, *DENSE)}


def find_recipe(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=2, cutoff=0.3) or list(RECIPES)
        raise UserError(f"no recipe '{name}'; did you mean {' or '.join(near)}? (hf-vit recipes lists all)")
    return RECIPES[name]
