"""Recipes of other papers, row by row of their tables.

What a source does and this package does not is said in the recipe's `source`. RandAugment is named in timm's words.
"""

from typing import Any

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.training.recipes.definition import Recipe

# ResNet strikes back: procedure, epochs, rate, decay, smoothing, drop path, side px, RandAugment, mixup, accuracy.
_RSB_TABLE_2 = (
    ("a1", 600, 5e-3, 0.01, 0.1, 0.05, 224, 7, 0.2, "80.4%"),
    ("a2", 300, 5e-3, 0.02, 0.0, 0.05, 224, 7, 0.1, "79.8%"),
    ("a3", 100, 8e-3, 0.02, 0.0, 0.0, 160, 6, 0.1, "78.1%"),
)


def _resnet_strikes_back(
    name: str,
    epochs: int,
    rate: float,
    decay: float,
    smoothing: float,
    drop_path: float,
    side: int,
    magnitude: int,
    mixup: float,
    accuracy: str,
) -> Recipe:
    return Recipe(
        name=f"rsb-{name}",
        source=f"arXiv 2110.00476, table 2, column {name.upper()}; threshold .2: timm's configurations"
        + ("" if name == "a3" else "; three copies of repeated augmentation, as DeiT's code"),
        summary=f"ResNet strikes back, {name.upper()}: {accuracy} on ImageNet with a ResNet-50 there",
        optimizer="lamb",
        learning_rate=rate,
        weight_decay=decay,
        warmup=5 / epochs,
        epochs=epochs,
        batch_size=2048,
        clip=0.0,
        loss="bce",
        bce_threshold=0.2,
        repeated_augmentation=1 if name == "a3" else 3,
        label_smoothing=smoothing,
        drop_path=drop_path,
        image_size=(side, side),
        augmentation=AugmentationConfig(
            random_resized_crop=(0.08, 1.0),
            horizontal_flip=0.5,
            auto_augment=f"rand-m{magnitude}-mstd0.5-inc1",
            mixup_alpha=mixup,
            cutmix_alpha=1.0,
        ),
    )


_RAND_9 = "rand-m9-mstd0.5-inc1"  # RandAugment 9/0.5 in the tables
_DEIT = Recipe(
    name="deit",
    source="arXiv 2012.12877, table 9, column DeiT-B (rate 5e-4 x batch / 512, 5 epochs of warm-up); last rate and "
    "three copies of repeated augmentation: its code, whose warm-up begins at 1e-6 and whose average of the weights "
    "(.99996) is kept beside them and not evaluated",
    summary="DeiT: ImageNet from scratch, 81.8% with a ViT-B/16 there",
    learning_rate=1e-3,
    weight_decay=0.05,
    warmup=5 / 300,
    min_learning_rate=1e-5,
    epochs=300,
    batch_size=1024,
    clip=0.0,
    repeated_augmentation=3,
    label_smoothing=0.1,
    dropout=0.0,
    drop_path=0.1,
    image_size=(224, 224),
    augmentation=AugmentationConfig(
        random_resized_crop=(0.08, 1.0),
        horizontal_flip=0.5,
        auto_augment=_RAND_9,
        random_erasing=0.25,
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
    ),
)

_LION = Recipe(
    name="lion",
    source="arXiv 2302.06675, section 5: a rate 3 to 10 times smaller and a decay as much larger than AdamW's, here 5 "
    "times those of default-small, whose other values these are; betas: algorithm 2",
    summary="default-small with Lion",
    optimizer="lion",
    learning_rate=6e-5,
    learning_rates=(3e-5, 6e-5, 1e-4),
    weight_decay=0.25,
    beta1=0.9,
    beta2=0.99,
    warmup=0.1,
    epochs=30,
    batch_size=64,
    label_smoothing=0.1,
    augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5),
    patience=10,
)

# What the papers tell of noise; the rest is default-small's, as theirs is of EfficientNets and ImageNet.
_SELF_TRAINING = tuple(
    Recipe(
        name=name,
        source=f"{source}; the other values: default-small's, as the source's are of EfficientNets on ImageNet",
        summary=f"{summary} on a few thousand images, on one machine (--self-training {name})",
        learning_rate=3e-4,
        learning_rates=(1e-4, 3e-4, 1e-3),
        weight_decay=0.05,
        warmup=0.1,
        epochs=30,
        batch_size=64,
        label_smoothing=smoothing,
        drop_path=drop_path,
        augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5, randaugment=(2, 30)),
        patience=10,
    )
    for name, source, summary, smoothing, drop_path in (
        (
            "noisy-student",
            "arXiv 1911.04252, section 3.1: RandAugment of two layers (27 as torchvision's strongest, 10) and "
            "stochastic depth .2; label smoothing .1: its code",
            "Noisy Student",
            0.1,
            0.2,
        ),
        (
            "meta-pseudo-labels",
            "the code of arXiv 2003.10580: RandAugment of two layers (17 as torchvision's strongest, 10), no "
            "label smoothing",
            "Meta Pseudo Labels",
            0.0,
            None,
        ),
    )
)

_DEIT_3_CODE = "section 3 and the command in its code's README_revenge.md (there all layers have the drop path's rate)"


def _deit_3(name: str, source: str, summary: str, **values: Any) -> Recipe:
    """LAMB, 3-Augment and colour jitter, LayerScale; batch 2048, 5 epochs of warm-up, rates down to 1e-5."""
    fixed: dict[str, Any] = {"optimizer": "lamb", "batch_size": 2048, "clip": 1.0, "dropout": 0.0}
    fixed |= {"min_learning_rate": 1e-5, "warmup": 5 / values["epochs"]}
    fixed |= {"architecture": {"layer_scale_init_value": 1e-4, "position_on_class_token": False}}
    return Recipe(name=name, source=f"arXiv 2204.07118, {source}", summary=summary, **(fixed | values))


def _three_augment(**values: Any) -> AugmentationConfig:
    return AugmentationConfig(horizontal_flip=0.5, auto_augment="3a", color_jitter=0.3, cutmix_alpha=1.0, **values)


_DEIT_3 = (
    _deit_3(
        "deit3",
        f"{_DEIT_3_CODE} for ViT-B: ImageNet at 192 px, which deit3-resolution takes to 224 px",
        "DeiT III: ImageNet from scratch, 83.8% with a ViT-B/16 there",
        learning_rate=3e-3,
        weight_decay=0.05,
        epochs=800,
        loss="bce",
        repeated_augmentation=3,
        drop_path=0.2,
        image_size=(192, 192),
        augmentation=_three_augment(random_resized_crop=(0.08, 1.0), mixup_alpha=0.8),
    ),
    _deit_3(
        "deit3-resolution",
        f"{_DEIT_3_CODE} for ViT-B at 224 px after 192 px",
        "DeiT III: the last 20 epochs at a higher resolution",
        optimizer="adamw",
        learning_rate=1e-5,
        weight_decay=0.1,
        min_learning_rate=1e-5,
        epochs=20,
        batch_size=512,
        clip=0.0,
        label_smoothing=0.1,
        drop_path=0.2,
        image_size=(224, 224),
        augmentation=AugmentationConfig(
            random_resized_crop=(0.08, 1.0),
            horizontal_flip=0.5,
            auto_augment=_RAND_9,
            mixup_alpha=0.8,
            cutmix_alpha=1.0,
        ),
    ),
    _deit_3(
        "deit3-i21k",
        f"{_DEIT_3_CODE} for ViT-B on ImageNet-21k",
        "DeiT III: pre-training on ImageNet-21k, with simple random crops",
        learning_rate=1e-3,
        weight_decay=0.02,
        epochs=240,
        label_smoothing=0.1,
        drop_path=0.1,
        image_size=(224, 224),
        augmentation=_three_augment(random_crop=4),
    ),
    _deit_3(
        "deit3-finetune",
        f"{_DEIT_3_CODE} for ViT-B on ImageNet after ImageNet-21k",
        "DeiT III: fine-tuning after deit3-i21k, 85.7% with a ViT-B/16 there",
        learning_rate=3e-4,
        weight_decay=0.02,
        epochs=50,
        label_smoothing=0.1,
        drop_path=0.15,
        image_size=(224, 224),
        augmentation=_three_augment(random_crop=4),
    ),
)

_MAE = Recipe(
    name="mae-finetune",
    source="arXiv 2111.06377, table 9, ViT-B (rate 1e-3 x batch / 256; ViT-L and H: 50 epochs, drop path .1 and .2); "
    "crop and flip: its code",
    summary="MAE's end-to-end fine-tuning of a self-supervised ViT",
    learning_rate=4e-3,
    weight_decay=0.05,
    beta2=0.999,
    warmup=5 / 100,
    epochs=100,
    batch_size=1024,
    clip=0.0,
    label_smoothing=0.1,
    drop_path=0.1,
    layer_decay=0.75,
    image_size=(224, 224),
    augmentation=AugmentationConfig(
        random_resized_crop=(0.08, 1.0),
        horizontal_flip=0.5,
        auto_augment=_RAND_9,
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
    ),
)

_CCT = Recipe(
    name="cct-cifar",
    source="arXiv 2104.05704 and its code's cct_7-3x1_cifar10_300epochs.yml, without the 10 epochs at the last rate "
    "and the end of mixing after epoch 175, with a warm-up from 0 instead of 1e-5; drop path: its models' default",
    summary="Compact transformers: CIFAR at 32 px from scratch",
    learning_rate=5.5e-4,
    weight_decay=0.06,
    warmup=10 / 300,
    min_learning_rate=1e-5,
    epochs=300,
    batch_size=128,
    clip=0.0,
    label_smoothing=0.1,
    drop_path=0.1,
    image_size=(32, 32),
    augmentation=AugmentationConfig(
        random_resized_crop=(0.8, 1.0),
        horizontal_flip=0.5,
        auto_augment=_RAND_9,
        mixup_alpha=0.8,
        cutmix_alpha=1.0,
    ),
)

_MUON = _LION.model_copy(
    update={
        "name": "muon",
        "source": "arXiv 2502.16982, sections 2.2 and 3: momentum .95, AdamW's rate and decay kept, here those of "
        "default-small, whose other values these are; timm moves the patch projection and the head likewise",
        "summary": "default-small with Muon",
        "optimizer": "muon",
        "learning_rate": 3e-4,
        "learning_rates": (1e-4, 3e-4, 1e-3),
        "weight_decay": 0.05,
        "momentum": 0.95,
        "beta2": 0.999,
    }
)

_MOCO_V3 = Recipe(
    name="moco-v3",
    source="arXiv 2104.02057, section 4 (rate 1.5e-4 x batch / 256, 40 of 300 epochs of warm-up) and its code, "
    "which decays biases and norms as well",
    summary="the paper's momentum contrast of ViTs",
    learning_rate=2.4e-3,
    weight_decay=0.1,
    warmup=40 / 300,
    epochs=300,
    batch_size=4096,
    clip=0.0,
    augmentation=AugmentationConfig(random_resized_crop=(0.08, 1.0), horizontal_flip=0.5),
)

PUBLISHED: tuple[Recipe, ...] = (
    _DEIT,
    *(_resnet_strikes_back(*row) for row in _RSB_TABLE_2),
    _LION,
    *_SELF_TRAINING,
    _MUON,
    *_DEIT_3,
    _MAE,
    _CCT,
    _MOCO_V3,
)
