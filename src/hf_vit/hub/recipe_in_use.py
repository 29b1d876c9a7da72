"""Of a recorded recipe what took part in the training: settings of what was off are no part of its story."""

from collections.abc import Mapping

# What is off at 0, None or "no".
_SWITCHES = frozenset(
    {"label_smoothing", "dropout", "drop_path", "sam_rho", "clip", "horizontal_flip", "randaugment", "random_erasing",
     "mixup_alpha", "cutmix_alpha", "shift_px", "rotation_degrees", "shear_degrees", "zoom", "new_head", "head_bias",
     "learning_rates", "auto_augment", "color_jitter", "random_crop", "min_learning_rate", "architecture",
     "scale_jitter"}
)  # fmt: skip
# Settings -> what they belong to: (setting, its values).
_PARTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "momentum": ("optimizer", ("sgd", "muon")),
    **dict.fromkeys(("beta1", "beta2"), ("optimizer", ("adamw", "lamb", "lion", "muon"))),
    "cooldown": ("schedule", ("warmup_stable_decay",)),
    **dict.fromkeys(("lora_rank", "lora_alpha"), ("tune", ("lora",))),
    "bce_threshold": ("loss", ("bce",)),
}


def in_use(recipe: Mapping[str, object]) -> dict[str, object]:
    """The recipe without what was switched off, and without what belongs to it."""
    kept = {name: value for name, value in recipe.items() if value or name not in _SWITCHES}
    if not recipe.get("sam_rho"):
        kept.pop("sam_micro_batches", None)
    if recipe.get("repeated_augmentation") == 1:
        del kept["repeated_augmentation"]
    return {name: value for name, value in kept.items() if name not in _PARTS or _belongs(name, recipe)}


def _belongs(name: str, recipe: Mapping[str, object]) -> bool:
    setting, values = _PARTS[name]
    return setting not in recipe or recipe[setting] in values
