"""The recipes of the Vision Transformer's authors, row by row of their tables.

What a source does and this package does not is said in the recipe's `source`. RandAugment is named in timm's words.
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
    shorter = "; of whose 500 steps of warm-up, all there are, a fifth"
    rows = [
        _fine_tuning(
            name,
            f"{_VIT}, table 4, row {row}, and section B.1.1 (there {dev} of the training images are the dev split that "
            f"--lr-sweep chooses on); {code}{shorter if steps == 500 else ''}",
            f"the paper's fine-tuning on {row}",
            steps=steps,
            learning_rate=rate,
            learning_rates=grid,
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


def _randaugment(magnitude: int) -> str:
    """Google's, of two layers in its own scale, which goes beyond 10: always applied, without noise."""
    return f"rand-m{magnitude}-n2-p1-mmax20"


def _augreg(level: str, regularized: bool) -> Recipe:
    mixup, magnitude = _AUGREG_LEVELS[level]
    policy = None if magnitude is None else _randaugment(magnitude)
    rate = 0.1 if regularized else 0.0
    return Recipe(
        name=f"augreg-{level}" + ("-dropout" if regularized else ""),
        source=f"arXiv 2106.10270, sections 3.3 and 3.4, level {level}, dropout and stochastic depth {rate:g} "
        "(weight decay .1; the paper's other is .03); rate, loss and level: big_vision's configs of the paper; timm's "
        "RandAugment, which lacks its cutout",
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
        augmentation=AugmentationConfig(mixup_alpha=mixup, auto_augment=policy, **_AS_ORIGINAL),
    )


_BETTER_VIT = Recipe(
    name="better-vit",
    source="arXiv 2205.01580, section 2, and big_vision's vit_s16_i1k.py (90 epochs, 300 in the longer run): its decay "
    "of 1e-4 is not multiplied by the rate of 1e-3, AdamW's .1 is; a linear head, which the paper finds good enough; "
    "timm's RandAugment, which lacks its cutout",
    summary="Better plain ViT: ImageNet from scratch, 76.5% in 90 epochs with a ViT-S/16 there",
    learning_rate=1e-3,
    weight_decay=0.1,
    warmup=10_000,
    epochs=90,
    batch_size=1024,
    dropout=0.0,
    image_size=(224, 224),
    architecture={"pooling": "gap", "position_embedding": "sincos_2d"},
    augmentation=AugmentationConfig(auto_augment=_randaugment(10), mixup_alpha=0.2, **_AS_ORIGINAL),
)

_SELF_SUPERVISED = Recipe(
    name="vit-self-supervised",
    source=f"{_VIT}, appendix B.1.2; {_CROP_AND_FLIP}",
    summary="the paper's masked patch prediction; its ViT-B/16 reached 79.9% on ImageNet after fine-tuning",
    learning_rate=2e-4,
    warmup=10_000,
    steps=1_000_000,
    batch_size=4096,
    augmentation=AugmentationConfig(**_AS_ORIGINAL),
)

ORIGINAL: tuple[Recipe, ...] = (
    *_table_4(),
    *(_pre_training(*row) for row in _TABLE_3),
    *(_augreg(level, regularized) for level in _AUGREG_LEVELS for regularized in (False, True)),
    _BETTER_VIT,
    _SELF_SUPERVISED,
)
