"""The papers' recipes, row by row of their tables.

What a source does and this package does not is said in the recipe's `source`. RandAugment reaches at 10 of the sources'
scale the strength of 30 of torchvision's, with which it ends: see `_randaugment`.
"""

from typing import Any

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.training.recipes.definition import Recipe

_VIT = "arXiv 2010.11929"
_CROP_AND_FLIP = "crop and flip as the original code's defaults"
_AS_ORIGINAL: dict[str, Any] = {"random_resized_crop": (0.05, 1.0), "horizontal_flip": 0.5}

# Table 3: recipe, row, epochs, learning rate, schedule, weight decay, dropout, remark. JFT has 303 million images.
_TABLE_3 = (
    ("vit-jft-b", "ViT-B/{16,32}, JFT-300M", 7, 8e-4, "linear", 0.1, 0.0, ""),
    ("vit-jft-l32", "ViT-L/32, JFT-300M", 7, 6e-4, "linear", 0.1, 0.0, ""),
    ("vit-jft-l16", "ViT-L/16, JFT-300M", 14, 4e-4, "linear", 0.1, 0.0, "; 7 epochs in the shorter run"),
    ("vit-jft-h14", "ViT-H/14, JFT-300M", 14, 3e-4, "linear", 0.1, 0.0, ""),
    ("resnet-jft-50", "R50x{1,2}, JFT-300M", 7, 1e-3, "linear", 0.1, 0.0, ""),
    ("resnet-jft-101", "R101x1, JFT-300M", 7, 8e-4, "linear", 0.1, 0.0, ""),
    ("resnet-jft-152", "R152x{1,2}, JFT-300M", 7, 6e-4, "linear", 0.1, 0.0, ""),
    ("hybrid-jft-b", "R50+ViT-B/{16,32}, JFT-300M", 7, 8e-4, "linear", 0.1, 0.0, ""),
    ("hybrid-jft-l32", "R50+ViT-L/32, JFT-300M", 7, 2e-4, "linear", 0.1, 0.0, ""),
    ("hybrid-jft-l16", "R50+ViT-L/16, JFT-300M", 14, 4e-4, "linear", 0.1, 0.0, "; 7 epochs in the shorter run"),
    ("vit-i21k-b", "ViT-B/{16,32}, ImageNet-21k", 90, 1e-3, "linear", 0.03, 0.1, ""),
    ("vit-i21k-l", "ViT-L/{16,32}, ImageNet-21k", 90, 1e-3, "linear", 0.03, 0.1, "; 30 epochs in the shorter run"),
    ("vit-i1k", "ViT-*, ImageNet", 300, 3e-3, "cosine", 0.3, 0.1, "; gradients clipped at 1"),
)

_SMALL_GRID = (0.001, 0.003, 0.01, 0.03)
# Table 4: recipe, row, steps, learning rate, grid, share of the training images that the paper keeps as dev split.
_TABLE_4 = (
    ("vit-finetune-imagenet", "ImageNet", 20_000, 0.01, (0.003, 0.01, 0.03, 0.06), "1%"),
    ("vit-finetune-cifar", "CIFAR-10 and CIFAR-100", 10_000, 0.01, _SMALL_GRID, "2%"),
    ("vit-finetune-pets", "Oxford-IIIT Pets and Flowers-102", 500, 0.01, _SMALL_GRID, "10%"),
)

# Level: alpha of mixup, magnitude of RandAugment's two layers.
_AUGREG_LEVELS: dict[str, tuple[float, int | None]] = {
    "none": (0.0, None),
    "light1": (0.0, 0),
    "light2": (0.2, 10),
    "medium1": (0.2, 15),
    "medium2": (0.5, 15),
    "strong1": (0.5, 20),
    "strong2": (0.8, 20),
}

# ResNet strikes back: procedure, epochs, rate, decay, smoothing, drop path, side px, RandAugment, mixup, accuracy.
_RSB_TABLE_2 = (
    ("a1", 600, 5e-3, 0.01, 0.1, 0.05, 224, 7, 0.2, "80.4%"),
    ("a2", 300, 5e-3, 0.02, 0.0, 0.05, 224, 7, 0.1, "79.8%"),
    ("a3", 100, 8e-3, 0.02, 0.0, 0.0, 160, 6, 0.1, "78.1%"),
)


def _pre_training(
    name: str, row: str, epochs: int, rate: float, schedule: str, decay: float, dropout: float, remark: str
) -> Recipe:
    return Recipe(
        name=name,
        source=f"{_VIT}, table 3 and its caption, row {row}{remark}; {_CROP_AND_FLIP}",
        summary=f"the paper's pre-training: {row}",
        learning_rate=rate,
        weight_decay=decay,
        schedule=schedule,  # pyright: ignore[reportArgumentType] - checked by the class
        warmup=10_000,
        epochs=epochs,
        batch_size=4096,
        clip=1.0 if name == "vit-i1k" else 0.0,
        dropout=dropout,
        image_size=(224, 224),
        augmentation=AugmentationConfig(**_AS_ORIGINAL),
    )


def _fine_tuning(name: str, source: str, summary: str, **values: Any) -> Recipe:
    """Section B.1.1: SGD, momentum 0.9, batch 512, cosine, clip 1, no weight decay, 384 px."""
    fixed: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 512, "schedule": "cosine", "clip": 1.0}
    fixed |= {"warmup": 500, "image_size": (384, 384), "augmentation": AugmentationConfig(**_AS_ORIGINAL)}
    return Recipe(name=name, source=source, summary=summary, **(fixed | values))


def _table_4() -> list[Recipe]:
    code = "warm-up, crop and flip as the original code's defaults"
    rows = [
        _fine_tuning(
            name,
            f"{_VIT}, table 4, row {row}, and section B.1.1 (there {dev} of the training images are the dev split that "
            f"--lr-sweep chooses on); {code}",
            f"the paper's fine-tuning on {row}",
            steps=steps,
            learning_rate=rate,
            learning_rates=grid,
            # 500 steps of warm-up would be all of the shortest.
            warmup=min(500, steps // 5),
        )
        for name, row, steps, rate, grid, dev in _TABLE_4
    ]
    imagenet = rows[0].model_copy(
        update={
            "name": "vit-finetune-imagenet-512",
            "source": f"{_VIT}, table 4, row ImageNet; 512 px and Polyak averaging 0.9999: section 4.1; {code}",
            "summary": "the same as in table 2: 512 px (ViT-H/14: 518) and averaged weights",
            "image_size": (512, 512),
            "average_decay": 0.9999,
        }
    )
    vtab = _fine_tuning(
        "vit-finetune",
        f"{_VIT}, table 4 (VTAB row: 2,500 steps, rate .01; the grid is that of CIFAR, Pets and Flowers) and section "
        f"4.1; {code}",
        "the paper's fine-tuning of a pre-trained checkpoint; --lr-sweep tries .001, .003, .01 and .03",
        steps=2500,
        learning_rate=0.01,
        learning_rates=_SMALL_GRID,
    )
    jax = _fine_tuning(
        "vit-jax",
        "github.com/google-research/vision_transformer, vit_jax/configs/common.py (defaults; steps: preset of CIFAR)",
        "the defaults of the original code",
        steps=10_000,
        learning_rate=0.03,
    )
    return [vtab, *rows, imagenet, jax]


def _randaugment(magnitude: int) -> tuple[int, int]:
    """(layers, magnitude of torchvision) of two layers in the sources' scale; above 10, torchvision's strongest."""
    return 2, min(30, 3 * magnitude)


def _augreg(level: str, regularized: bool) -> Recipe:
    mixup, magnitude = _AUGREG_LEVELS[level]
    weaker = f" (RandAugment's magnitude {magnitude} as torchvision's strongest, 10)" if (magnitude or 0) > 10 else ""
    randaugment = None if magnitude is None else _randaugment(magnitude)
    rate = 0.1 if regularized else 0.0
    return Recipe(
        name=f"augreg-{level}" + ("-dropout" if regularized else ""),
        source=f"arXiv 2106.10270, sections 3.3 and 3.4, level {level}{weaker}, dropout and stochastic depth {rate:g} "
        "(weight decay .1; the paper's other is .03); rate, loss and level: big_vision's configs of the paper",
        summary=f"How to train your ViT: augmentation {level}, {'with' if regularized else 'without'} regularisation",
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup=10_000,
        epochs=300,
        batch_size=4096,
        loss="bce",
        dropout=rate,
        drop_path=rate,
        image_size=(224, 224),
        augmentation=AugmentationConfig(mixup_alpha=mixup, randaugment=randaugment, **_AS_ORIGINAL),
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
    without = "RandAugment's noise" if name == "a3" else "RandAugment's noise and repeated augmentation"
    return Recipe(
        name=f"rsb-{name}",
        source=f"arXiv 2110.00476, table 2, column {name.upper()}, without {without}; threshold .2: timm's "
        "configurations",
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
        label_smoothing=smoothing,
        drop_path=drop_path,
        image_size=(side, side),
        augmentation=AugmentationConfig(
            random_resized_crop=(0.08, 1.0),
            horizontal_flip=0.5,
            randaugment=_randaugment(magnitude),
            mixup_alpha=mixup,
            cutmix_alpha=1.0,
        ),
    )


_DEIT = Recipe(
    name="deit",
    source="arXiv 2012.12877, table 9, column DeiT-B (rate 5e-4 x batch / 512, 5 epochs of warm-up), without "
    "RandAugment's noise and repeated augmentation",
    summary="DeiT: ImageNet from scratch, 81.8% with a ViT-B/16 there",
    learning_rate=1e-3,
    weight_decay=0.05,
    warmup=5 / 300,
    epochs=300,
    batch_size=1024,
    clip=0.0,
    label_smoothing=0.1,
    dropout=0.0,
    drop_path=0.1,
    image_size=(224, 224),
    augmentation=AugmentationConfig(
        random_resized_crop=(0.08, 1.0),
        horizontal_flip=0.5,
        randaugment=_randaugment(9),
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
        augmentation=AugmentationConfig(
            random_resized_crop=(0.5, 1.0), horizontal_flip=0.5, randaugment=_randaugment(magnitude)
        ),
        patience=10,
    )
    for name, source, summary, magnitude, smoothing, drop_path in (
        (
            "noisy-student",
            "arXiv 1911.04252, section 3.1: RandAugment of two layers (27 as torchvision's strongest, 10) and "
            "stochastic depth .2; label smoothing .1: its code",
            "Noisy Student",
            27,
            0.1,
            0.2,
        ),
        (
            "meta-pseudo-labels",
            "the code of arXiv 2003.10580: RandAugment of two layers (17 as torchvision's strongest, 10), no "
            "label smoothing",
            "Meta Pseudo Labels",
            17,
            0.0,
            None,
        ),
    )
)

_SELF_SUPERVISED = (
    Recipe(
        name="vit-self-supervised",
        source=f"{_VIT}, appendix B.1.2; {_CROP_AND_FLIP}",
        summary="the paper's masked patch prediction; its ViT-B/16 reached 79.9% on ImageNet after fine-tuning",
        learning_rate=2e-4,
        warmup=10_000,
        steps=1_000_000,
        batch_size=4096,
        augmentation=AugmentationConfig(**_AS_ORIGINAL),
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

PUBLISHED: tuple[Recipe, ...] = (
    *_table_4(),
    *(_pre_training(*row) for row in _TABLE_3),
    *(_augreg(level, regularized) for level in _AUGREG_LEVELS for regularized in (False, True)),
    _DEIT,
    *(_resnet_strikes_back(*row) for row in _RSB_TABLE_2),
    _LION,
    *_SELF_TRAINING,
    *_SELF_SUPERVISED,
)
