"""The table of recipes: complete training settings as data, each with its source.

`hf-vit recipes` shows the table, `--recipe NAME` selects a recipe, and flags override single values; facts record the
values of a training. A row has the name, the source, the purpose, and the values in up to three groups: optimization,
length, and images. The text of the source also says what this package does differently. RandAugment is written as in
timm. Several steps of the learning rate downwards are replaced by one cooldown that starts at the first of them; a
source's lower rate for the backbone is replaced by --layer-decay.
"""

import difflib
from typing import Any

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.errors import UserError
from hf_vit_settings import OVERRIDABLE, Recipe

__all__ = ["OVERRIDABLE", "RECIPES", "Recipe", "find_recipe"]

RECIPES: dict[str, Recipe] = {}


def _add_recipe(name: str, source: str, summary: str, *groups: dict[str, Any]) -> None:
    """Add a recipe to the table."""
    values = {key: value for group in groups for key, value in group.items()}
    augmentation = {key: values.pop(key) for key in list(values) if key in AugmentationConfig.__dataclass_fields__}
    recipe = Recipe(
        name=name, source=source, summary=summary, augmentation=AugmentationConfig(**augmentation), **values
    )
    RECIPES[name] = recipe


# --- this package's own ---

_HALF_CROP = dict(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5)
_SMALL: dict[str, Any] = dict(
    **dict(learning_rate=3e-4, learning_rates=(1e-4, 3e-4, 1e-3), weight_decay=0.05, label_smoothing=0.1),
    **dict(warmup=0.1, epochs=30, batch_size=64, patience=10, **_HALF_CROP),
)

_add_recipe(
    "default-small",
    "this package; weight decay and label smoothing as DeiT's (arXiv 2012.12877, table 9)",
    "a few hundred to some ten thousand images, from scratch or from a checkpoint, on one machine",
    _SMALL,
)
_add_recipe(
    "small-data",
    "this package: chosen on validation images, three seeds (benchmarks/small_data.py); "
    "weight decay and label smoothing as DeiT's (arXiv 2012.12877, table 9)",
    "a plain ViT on a thousand images or less, from scratch or after fractals",
    dict(optimizer="muon", momentum=0.95, learning_rate=3e-3, learning_rates=(1e-3, 3e-3), weight_decay=0.05),
    dict(warmup=0.1, epochs=100, batch_size=64, label_smoothing=0.1, average_decay=0.99),
    dict(random_resized_crop=(0.6, 1.0), rotation_degrees=10.0),
)
_add_recipe(
    "digits",
    "this package: chosen on the validation split of the digits, over several seeds",
    "the 1,797 digits at 16x16 px, from scratch in a minute",
    dict(learning_rate=1.5e-3, weight_decay=0.05, label_smoothing=0.1),
    dict(warmup=0.1, epochs=80, batch_size=64),
    dict(shift_px=1.6, rotation_degrees=10, shear_degrees=5, zoom=0.1),
)
_add_recipe(
    "digits-hybrid",
    "this package: chosen by cross-validation on the digits' training and validation images",
    "the 1,797 digits at 32x32 px for a small hybrid, from scratch in a minute (hf-vit demo)",
    dict(learning_rate=2.5e-3, weight_decay=0.05, label_smoothing=0.1, average_decay=0.99),
    dict(warmup=0.1, epochs=80, batch_size=128, evaluations=4),
    dict(shift_px=4.5, rotation_degrees=15, shear_degrees=10, zoom=0.15),
)
_add_recipe(
    "pretrain-small",
    "this package; Adam and cosine as arXiv 2010.11929, appendix B.1.2",
    "masked or next patch prediction on a few thousand images, on one machine (hf-vit pretrain)",
    dict(learning_rate=1e-3, weight_decay=0.05),
    dict(warmup=0.1, epochs=100, batch_size=64, evaluations=10),
    _HALF_CROP,
)
_add_recipe(
    "contrastive-small",
    "this package; weight decay and crop as MoCo v3's",
    "momentum contrast on a few thousand images, on one machine (hf-vit pretrain)",
    dict(learning_rate=1e-3, weight_decay=0.1),
    dict(warmup=0.1, epochs=100, batch_size=256, evaluations=10),
    dict(random_resized_crop=(0.2, 1.0), horizontal_flip=0.5),
)

# --- the Vision Transformer's authors ---

_VIT = "arXiv 2010.11929"
_AS_CODE = "crop and flip as the original code's defaults"
_VIT_CROP = dict(random_resized_crop=(0.05, 1.0), horizontal_flip=0.5)
_PX_224 = dict(image_size=(224, 224))

# Section B.1.1 and table 4: recipe, row, steps, learning rate, grid, share of the images that the paper keeps as dev
# split.
_FINE_TUNING = dict(optimizer="sgd", momentum=0.9, batch_size=512, warmup=500, image_size=(384, 384), **_VIT_CROP)
_WARM_UP = "warm-up, crop and flip as the original code's defaults"
_SMALL_GRID = (0.001, 0.003, 0.01, 0.03)
_add_recipe(
    "vit-finetune",
    f"{_VIT}, table 4 (VTAB row: 2,500 steps, rate .01; the grid is that of CIFAR, Pets and Flowers) and section "
    f"4.1; {_WARM_UP}",
    "the paper's fine-tuning of a pre-trained checkpoint; --lr-sweep tries .001, .003, .01 and .03",
    _FINE_TUNING,
    dict(steps=2500, learning_rate=0.01, learning_rates=_SMALL_GRID),
)
_IMAGENET_GRID = (0.003, 0.01, 0.03, 0.06)
for _name, _row, _steps, _grid, _dev in (
    ("vit-finetune-imagenet", "ImageNet", 20_000, _IMAGENET_GRID, "1%"),
    ("vit-finetune-cifar", "CIFAR-10 and CIFAR-100", 10_000, _SMALL_GRID, "2%"),
    ("vit-finetune-pets", "Oxford-IIIT Pets and Flowers-102", 500, _SMALL_GRID, "10%"),
):
    _add_recipe(
        _name,
        f"{_VIT}, table 4, row {_row}, and section B.1.1 (there {_dev} of the training images are the dev split that "
        f"--lr-sweep chooses on); {_WARM_UP}"
        + ("; of whose 500 steps of warm-up, all there are, a fifth" if _steps == 500 else ""),
        f"the paper's fine-tuning on {_row}",
        _FINE_TUNING,
        dict(steps=_steps, warmup=min(500, _steps // 5), learning_rate=0.01, learning_rates=_grid),
    )
_add_recipe(
    "vit-finetune-imagenet-512",
    f"{_VIT}, table 4, row ImageNet; 512 px and Polyak averaging 0.9999: section 4.1; {_WARM_UP}",
    "the same as in table 2: 512 px (ViT-H/14: 518) and averaged weights",
    _FINE_TUNING,
    dict(steps=20_000, learning_rate=0.01, learning_rates=_IMAGENET_GRID),
    dict(image_size=(512, 512), average_decay=0.9999),
)
_add_recipe(
    "vit-jax",
    "github.com/google-research/vision_transformer, vit_jax/configs/common.py (defaults; steps: preset of CIFAR)",
    "the defaults of the original code",
    _FINE_TUNING,
    dict(steps=10_000, learning_rate=0.03),
)

# Table 3: recipe, row, epochs, learning rate, schedule, weight decay, dropout, remark. JFT has 303 million images.
for _name, _row, _epochs, _rate, _schedule, _decay, _dropout, _remark in (
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
):
    _add_recipe(
        _name,
        f"{_VIT}, table 3 and its caption, row {_row}{_remark}; {_AS_CODE}",
        f"the paper's pre-training: {_row}",
        dict(learning_rate=_rate, schedule=_schedule, weight_decay=_decay, dropout=_dropout),
        dict(warmup=10_000, epochs=_epochs, batch_size=4096, clip=1.0 if _name == "vit-i1k" else 0.0),
        _PX_224 | _VIT_CROP,
    )

# How to train your ViT: level, alpha of mixup, magnitude of RandAugment's two layers. Google's RandAugment has a scale
# that goes beyond 10, and is always applied, without noise.
for _level, _mixup, _magnitude in (
    ("none", 0.0, None),
    ("light1", 0.0, 0),
    ("light2", 0.2, 10),
    ("medium1", 0.2, 15),
    ("medium2", 0.5, 15),
    ("strong1", 0.5, 20),
    ("strong2", 0.8, 20),
):
    _policy = None if _magnitude is None else f"rand-m{_magnitude}-n2-p1-mmax20"
    for _rate in (0.0, 0.1):
        _add_recipe(
            f"augreg-{_level}" + ("-dropout" if _rate else ""),
            f"arXiv 2106.10270, sections 3.3 and 3.4, level {_level}, dropout and stochastic depth {_rate:g} "
            "(weight decay .1; the paper's other is .03); rate, loss and level: big_vision's configs of the paper; "
            "timm's RandAugment, which lacks its cutout",
            f"How to train your ViT: augmentation {_level}, {'with' if _rate else 'without'} regularization",
            dict(learning_rate=1e-3, weight_decay=0.1, loss="bce", dropout=_rate, drop_path=_rate),
            dict(warmup=10_000, epochs=300, batch_size=4096),
            dict(mixup_alpha=_mixup, auto_augment=_policy, **_PX_224, **_VIT_CROP),
        )
_add_recipe(
    "better-vit",
    "arXiv 2205.01580, section 2, and big_vision's vit_s16_i1k.py (90 epochs, 300 in the longer run): its decay "
    "of 1e-4 is not multiplied by the rate of 1e-3, AdamW's .1 is; a linear head, which the paper finds good enough; "
    "timm's RandAugment, which lacks its cutout",
    "Better plain ViT: ImageNet from scratch, 76.5% in 90 epochs with a ViT-S/16 there",
    dict(learning_rate=1e-3, weight_decay=0.1, dropout=0.0),
    dict(warmup=10_000, epochs=90, batch_size=1024),
    dict(architecture={"pooling": "gap", "position_embedding": "sincos_2d"}),
    dict(auto_augment="rand-m10-n2-p1-mmax20", mixup_alpha=0.2, **_PX_224, **_VIT_CROP),
)
_add_recipe(
    "vit-self-supervised",
    f"{_VIT}, appendix B.1.2; {_AS_CODE}",
    "the paper's masked patch prediction; its ViT-B/16 reached 79.9% on ImageNet after fine-tuning",
    dict(learning_rate=2e-4, warmup=10_000, steps=1_000_000, batch_size=4096),
    _VIT_CROP,
)

# --- other papers on classification ---

_RAND_9 = "rand-m9-mstd0.5-inc1"  # RandAugment 9/0.5 in the tables
_MIXED = dict(horizontal_flip=0.5, auto_augment=_RAND_9, mixup_alpha=0.8, cutmix_alpha=1.0)
_CROP = dict(random_resized_crop=(0.08, 1.0))
_add_recipe(
    "deit",
    "arXiv 2012.12877, table 9, column DeiT-B (rate 5e-4 x batch / 512, 5 epochs of warm-up); last rate and "
    "three copies of repeated augmentation: its code, whose warm-up begins at 1e-6 and whose average of the weights "
    "(.99996) is kept beside them and not evaluated",
    "DeiT: ImageNet from scratch, 81.8% with a ViT-B/16 there",
    dict(learning_rate=1e-3, weight_decay=0.05, clip=0.0, label_smoothing=0.1, dropout=0.0, drop_path=0.1),
    dict(warmup=5 / 300, min_learning_rate=1e-5, epochs=300, batch_size=1024, repeated_augmentation=3),
    dict(random_erasing=0.25, **_PX_224, **_CROP, **_MIXED),
)
_BCE_BIAS = "a new head's bias begins at -log(classes), there near 0"
# ResNet strikes back: procedure, epochs, rate, decay, smoothing, drop path, side px, RandAugment, mixup, accuracy.
for _name, _epochs, _rate, _decay, _smoothing, _drop_path, _side, _magnitude, _mixup, _accuracy in (
    ("a1", 600, 5e-3, 0.01, 0.1, 0.05, 224, 7, 0.2, "80.4%"),
    ("a2", 300, 5e-3, 0.02, 0.0, 0.05, 224, 7, 0.1, "79.8%"),
    ("a3", 100, 8e-3, 0.02, 0.0, 0.0, 160, 6, 0.1, "78.1%"),
):
    _add_recipe(
        f"rsb-{_name}",
        f"arXiv 2110.00476, table 2, column {_name.upper()}; threshold .2: timm's configurations"
        + ("" if _name == "a3" else "; three copies of repeated augmentation, as DeiT's code")
        + f"; {_BCE_BIAS}",
        f"ResNet strikes back, {_name.upper()}: {_accuracy} on ImageNet with a ResNet-50 there",
        dict(optimizer="lamb", learning_rate=_rate, weight_decay=_decay, clip=0.0, loss="bce", bce_threshold=0.2),
        dict(label_smoothing=_smoothing, drop_path=_drop_path, repeated_augmentation=1 if _name == "a3" else 3),
        dict(warmup=5 / _epochs, epochs=_epochs, batch_size=2048, image_size=(_side, _side)),
        dict(auto_augment=f"rand-m{_magnitude}-mstd0.5-inc1", mixup_alpha=_mixup, cutmix_alpha=1.0),
        dict(horizontal_flip=0.5, **_CROP),
    )
_add_recipe(
    "lion",
    "arXiv 2302.06675, section 5: a rate 3 to 10 times smaller and a decay as much larger than AdamW's, here 5 "
    "times those of default-small, whose other values these are; betas: algorithm 2",
    "default-small with Lion",
    _SMALL,
    dict(optimizer="lion", learning_rate=6e-5, learning_rates=(3e-5, 6e-5, 1e-4), weight_decay=0.25, beta2=0.99),
)
# The noise is as in the papers; theirs is of EfficientNets and ImageNet.
_AS_SMALL = "the other values: default-small's, as the source's are of EfficientNets on ImageNet"
_add_recipe(
    "noisy-student",
    "arXiv 1911.04252, section 3.1: RandAugment of two layers (27 as torchvision's strongest, 10) and stochastic "
    f"depth .2; label smoothing .1: its code; {_AS_SMALL}",
    "Noisy Student on a few thousand images, on one machine (--self-training noisy-student)",
    _SMALL,
    dict(drop_path=0.2, randaugment=(2, 30)),
)
_add_recipe(
    "meta-pseudo-labels",
    "the code of arXiv 2003.10580: RandAugment of two layers (17 as torchvision's strongest, 10), no label "
    f"smoothing; {_AS_SMALL}",
    "Meta Pseudo Labels on a few thousand images, on one machine (--self-training meta-pseudo-labels)",
    _SMALL,
    dict(label_smoothing=0.0, randaugment=(2, 30)),
)
_add_recipe(
    "muon",
    "arXiv 2502.16982, sections 2.2 and 3: momentum .95, AdamW's rate and decay kept, here those of "
    "default-small, whose other values these are; timm moves the patch projection and the head likewise",
    "default-small with Muon",
    _SMALL,
    dict(optimizer="muon", momentum=0.95),
)

# DeiT III: LAMB, 3-Augment and color jitter, LayerScale.
_DEIT_3_SOURCE = (
    "arXiv 2204.07118, section 3 and the command in its code's README_revenge.md (there all layers have the drop "
    "path's rate, and LAMB's epsilon is 1e-8, here timm's 1e-6)"
)
_DEIT_3: dict[str, Any] = dict(
    **dict(optimizer="lamb", batch_size=2048, clip=1.0, dropout=0.0, min_learning_rate=1e-5),
    architecture={"layer_scale_init_value": 1e-4, "position_on_class_token": False},
)
_THREE_AUGMENT = dict(horizontal_flip=0.5, auto_augment="3a", color_jitter=0.3, cutmix_alpha=1.0)
_SIMPLE_CROP = dict(random_crop=4, **_PX_224, **_THREE_AUGMENT)
# apex's FusedLAMB clips at 1, by default. Gradients of a sum over ImageNet's classes are 1,000 times those of the mean.
_SUM = dict(loss="bce", bce_threshold=0.0, clip=1000.0)
_SUM_SOURCE = (
    "targets above 0 become 1: its engine.py; clipped at 1,000, as the loss is a sum over the classes, there a mean; "
    + _BCE_BIAS
)
_add_recipe(
    "deit3",
    f"{_DEIT_3_SOURCE} for ViT-B: ImageNet at 192 px, which deit3-resolution takes to 224 px; {_SUM_SOURCE}",
    "DeiT III: ImageNet from scratch, 83.8% with a ViT-B/16 there",
    _DEIT_3 | dict(learning_rate=3e-3, weight_decay=0.05, drop_path=0.2, **_SUM),
    dict(warmup=5 / 800, epochs=800, repeated_augmentation=3, image_size=(192, 192)),
    dict(mixup_alpha=0.8, **_CROP, **_THREE_AUGMENT),
)
_add_recipe(
    "deit3-resolution",
    f"{_DEIT_3_SOURCE} for ViT-B at 224 px after 192 px",
    "DeiT III: the last 20 epochs at a higher resolution",
    _DEIT_3 | dict(optimizer="adamw", learning_rate=1e-5, weight_decay=0.1, clip=0.0, label_smoothing=0.1),
    dict(warmup=5 / 20, epochs=20, batch_size=512, drop_path=0.2),
    _PX_224 | _CROP | _MIXED,
)
_add_recipe(
    "deit3-i21k",
    f"{_DEIT_3_SOURCE} for ViT-B on ImageNet-21k",
    "DeiT III: pre-training on ImageNet-21k, with simple random crops",
    _DEIT_3 | dict(learning_rate=1e-3, weight_decay=0.02, label_smoothing=0.1, drop_path=0.1),
    dict(warmup=5 / 240, epochs=240),
    _SIMPLE_CROP,
)
_add_recipe(
    "deit3-finetune",
    f"{_DEIT_3_SOURCE} for ViT-B on ImageNet after ImageNet-21k",
    "DeiT III: fine-tuning after deit3-i21k, 85.7% with a ViT-B/16 there",
    _DEIT_3 | dict(learning_rate=3e-4, weight_decay=0.02, label_smoothing=0.1, drop_path=0.15),
    dict(warmup=5 / 50, epochs=50),
    _SIMPLE_CROP,
)
# ViT-5 (hf_vit's variants ViT-5-S/16, ...): DeiT III's recipe at the nominal size.
_VIT5_SOURCE = (
    "the commands for ViT-5-S on 8 GPUs in the README of arXiv 2602.08071's code (wangf3014/ViT-5); EMA and last rate: "
    "defaults of its main.py"
)
_VIT5 = dict(dropout=0.0, min_learning_rate=1e-5, drop_path=0.05, average_decay=0.99996) | _PX_224 | _CROP
_add_recipe(
    "vit5",
    f"{_VIT5_SOURCE}; {_SUM_SOURCE} (1: the default of apex's FusedLAMB); there all layers have the drop path's rate, "
    "and LAMB's epsilon is 1e-8, here timm's 1e-6",
    "ViT-5: ImageNet from scratch",
    _VIT5 | dict(optimizer="lamb", learning_rate=4e-3, weight_decay=0.05, batch_size=2048),
    dict(warmup=5 / 800, epochs=800, repeated_augmentation=3, **_SUM),
    dict(mixup_alpha=0.8, **_THREE_AUGMENT),
)
_add_recipe(
    "vit5-finetune",
    f"{_VIT5_SOURCE}, as are warm-up and mixing",
    "ViT-5: fine-tuning from vit5",
    _VIT5 | dict(learning_rate=1e-5, weight_decay=0.1, clip=0.0, label_smoothing=0.1),
    dict(warmup=5 / 20, epochs=20, batch_size=512),
    _MIXED,
)
_add_recipe(
    "mae-finetune",
    "arXiv 2111.06377, table 9, ViT-B (rate 1e-3 x batch / 256; ViT-L and H: 50 epochs, drop path .1 and .2); "
    "crop and flip: its code",
    "MAE's end-to-end fine-tuning of a self-supervised ViT",
    dict(learning_rate=4e-3, weight_decay=0.05, clip=0.0, label_smoothing=0.1, drop_path=0.1, layer_decay=0.75),
    dict(warmup=5 / 100, epochs=100, batch_size=1024),
    _PX_224 | _CROP | _MIXED,
)
_add_recipe(
    "cct-cifar",
    "arXiv 2104.05704 and its code's cct_7-3x1_cifar10_300epochs.yml, without the 10 epochs at the last rate "
    "and the end of mixing after epoch 175, with a warm-up from 0 instead of 1e-5; drop path: its models' default",
    "Compact transformers: CIFAR at 32 px from scratch",
    dict(learning_rate=5.5e-4, weight_decay=0.06, clip=0.0, label_smoothing=0.1, drop_path=0.1),
    dict(warmup=10 / 300, min_learning_rate=1e-5, epochs=300, batch_size=128),
    dict(image_size=(32, 32), random_resized_crop=(0.8, 1.0), **_MIXED),
)
_add_recipe(
    "moco-v3",
    "arXiv 2104.02057, section 4 (rate 1.5e-4 x batch / 256, 40 of 300 epochs of warm-up) and its code, "
    "which decays biases and norms as well",
    "the paper's momentum contrast of ViTs",
    dict(learning_rate=2.4e-3, weight_decay=0.1, clip=0.0),
    dict(warmup=40 / 300, epochs=300, batch_size=4096),
    dict(horizontal_flip=0.5, **_CROP),
)

# --- segmentation and detection ---

for _task, _target, _evaluations in (("segmentation", "masks", 10), ("detection", "boxes", 5)):
    _add_recipe(
        f"{_task}-small",
        "this package: customary values, not tuned; on generated scenes benchmarks/dense.py "
        "takes Muon, at rates chosen on their validation split",
        f"{_target}: about a thousand images, from scratch or from a checkpoint, on one machine",
        dict(learning_rate=1e-3, weight_decay=0.05),
        dict(warmup=0.1, epochs=30, batch_size=16, evaluations=_evaluations),
        _HALF_CROP,
    )
# mmsegmentation's: a factor of .5 to 2, a crop, a flip, contrast and saturation within a half. At a factor of 1 the
# shorter side has 512 px there, but the longer one here, which is 4/3 of it in most images.
_ADE20K = dict(image_size=(512, 512), scale_jitter=(0.67, 2.67), horizontal_flip=0.5, color_jitter=0.5)
# The codes of both DETRs train every decoder layer; by transformers' default only the last one gets a loss.
_COCO: dict[str, Any] = dict(scale_jitter=(0.6, 1.0), horizontal_flip=0.5, architecture={"auxiliary_loss": True})
_COOLS_DOWN = dict(schedule="warmup_stable_decay")
_add_recipe(
    "segmenter-ade20k",
    "arXiv 2105.05633, section 4.1, and its code's config.yml and train.py: polynomial decay of power .9 to "
    "1e-5, here linear to 0; the 64 epochs are 160,000 steps",
    "Segmenter: ADE20K at 512 px from a checkpoint; --head linear is its linear decoder",
    dict(optimizer="sgd", learning_rate=1e-3, schedule="linear", clip=0.0, dropout=0.0, drop_path=0.1),
    dict(epochs=64, batch_size=8),
    _ADE20K,
)
_add_recipe(
    "upernet-ade20k",
    "BEiT's code (arXiv 2106.08254), upernet_beit_base_12_512_slide_160k_ade20k_pt2ft.py",
    "UperNet on a ViT-B: ADE20K at 512 px from a checkpoint",
    dict(learning_rate=3e-5, schedule="linear", weight_decay=0.05, clip=0.0, drop_path=0.1, layer_decay=0.9),
    dict(warmup=1500, steps=160_000, batch_size=16),
    _ADE20K,
)
_add_recipe(
    "mask2former-ade20k",
    "arXiv 2112.01527, section 4.1, and its code's Base-ADE20K-SemanticSegmentation.yaml: polynomial decay "
    "of power .9, here linear",
    "Mask2Former: ADE20K at 512 px from a checkpoint",
    dict(learning_rate=1e-4, schedule="linear", weight_decay=0.05, clip=0.01),
    dict(steps=160_000, batch_size=16),
    _ADE20K,
)
_add_recipe(
    "vitdet-coco",
    "arXiv 2203.16527, appendix A.2, and detectron2's mask_rcnn_vitdet_b_100ep.py: steps down after 163,889 "
    "and 177,546 of 184,375",
    "ViTDet: Mask R-CNN on a ViT-B, COCO at 1024 px from a checkpoint",
    dict(learning_rate=1e-4, weight_decay=0.1, clip=0.0, drop_path=0.1, layer_decay=0.7),
    dict(warmup=250, cooldown=20_486, steps=184_375, batch_size=64, **_COOLS_DOWN),
    dict(image_size=(1024, 1024), scale_jitter=(0.1, 2.0), horizontal_flip=0.5),
)
_add_recipe(
    "mask-rcnn-coco",
    "torchvision's references/detection/train.py (8 devices of 2 images; steps down after 16 and 22 of 26 "
    "epochs) and engine.py (1,000 steps of warm-up)",
    "Mask R-CNN as torchvision trains its ResNet-50, COCO",
    dict(optimizer="sgd", learning_rate=0.02, weight_decay=1e-4, clip=0.0),
    dict(warmup=1000, cooldown=10 / 26, epochs=26, batch_size=16, **_COOLS_DOWN),
    dict(horizontal_flip=0.5),
)
_add_recipe(
    "detr-coco",
    "arXiv 2005.12872, section 4 and appendix A.4, and its code's main.py: a step down after 200 of 300 "
    "epochs; a shorter side of 480 to 800 px, without the crops",
    "DETR: COCO",
    dict(learning_rate=1e-4, weight_decay=1e-4, clip=0.1),
    dict(cooldown=1 / 3, epochs=300, batch_size=64, **_COOLS_DOWN),
    _COCO,
)
_add_recipe(
    "deformable-detr-coco",
    "arXiv 2010.04159, section 5, and its code's main.py: a step down after 40 of 50 epochs; images as DETR's",
    "Deformable DETR: COCO",
    dict(learning_rate=2e-4, weight_decay=1e-4, clip=0.1),
    dict(epochs=50, batch_size=32, **_COOLS_DOWN),
    _COCO,
)


def find_recipe(name: str) -> Recipe:
    """Return the recipe with this name.

    Raises:
        UserError: the name is unknown; the message suggests similar ones.
    """
    if name not in RECIPES:
        similar = difflib.get_close_matches(name, RECIPES, n=2, cutoff=0.3) or list(RECIPES)
        raise UserError(
            f"the recipe '{name}' is unknown; did you mean {' or '.join(similar)}? (hf-vit recipes lists all)"
        )
    return RECIPES[name]
