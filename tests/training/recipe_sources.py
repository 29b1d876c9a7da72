"""What the sources say, typed from them and not from the recipes: recipe -> where it stands -> values.

What no source names for a recipe has the value of `UNNAMED`: off, or what the optimizers' authors propose.
"""

from typing import Any

UNNAMED: dict[str, Any] = dict(
    optimizer="adamw", learning_rates=[], weight_decay=0.0, momentum=0.9, beta1=0.9, beta2=0.999, schedule="cosine",
    warmup=0.0, cooldown=0.2, min_learning_rate=0.0, epochs=None, steps=None, clip=1.0, loss="ce", bce_threshold=None,
    class_weights=False, balanced_sampling=False, repeated_augmentation=1, new_head=False, head_bias=None,
    label_smoothing=0.0, dropout=None, drop_path=None, architecture={}, tune="all", lora_rank=8, lora_alpha=16.0,
    layer_decay=None, average_decay=None, sam_rho=0.0, sam_micro_batches=False, image_size=None, evaluations=20,
    patience=None, random_resized_crop=None, random_crop=None, horizontal_flip=0.0, randaugment=None,
    auto_augment=None, color_jitter=0.0, random_erasing=0.0, mixup_alpha=0.0, cutmix_alpha=0.0, shift_px=0,
    rotation_degrees=0.0, shear_degrees=0.0, zoom=0.0, scale_jitter=None,
)  # fmt: skip

_Named = dict[str, dict[str, Any]]
SOURCES: dict[str, _Named] = {}

# ---- arXiv 2010.11929

_CODE_CROP = {"vit_jax, input_pipeline.py": dict(random_resized_crop=[0.05, 1.0], horizontal_flip=0.5)}
_TABLE_3 = [  # recipe, epochs, base rate, decay of the rate, weight decay, dropout
    ("vit-jft-b", 7, 8e-4, "linear", 0.1, 0.0),
    ("vit-jft-l32", 7, 6e-4, "linear", 0.1, 0.0),
    ("vit-jft-l16", 14, 4e-4, "linear", 0.1, 0.0),
    ("vit-jft-h14", 14, 3e-4, "linear", 0.1, 0.0),
    ("resnet-jft-50", 7, 1e-3, "linear", 0.1, 0.0),
    ("resnet-jft-101", 7, 8e-4, "linear", 0.1, 0.0),
    ("resnet-jft-152", 7, 6e-4, "linear", 0.1, 0.0),
    ("hybrid-jft-b", 7, 8e-4, "linear", 0.1, 0.0),
    ("hybrid-jft-l32", 7, 2e-4, "linear", 0.1, 0.0),
    ("hybrid-jft-l16", 14, 4e-4, "linear", 0.1, 0.0),
    ("vit-i21k-b", 90, 1e-3, "linear", 0.03, 0.1),
    ("vit-i21k-l", 90, 1e-3, "linear", 0.03, 0.1),
    ("vit-i1k", 300, 3e-3, "cosine", 0.3, 0.1),
]
for _name, _epochs, _rate, _schedule, _decay, _dropout in _TABLE_3:
    SOURCES[_name] = {
        "table 3, row": dict(
            epochs=_epochs, learning_rate=_rate, schedule=_schedule, weight_decay=_decay, dropout=_dropout
        ),
        "table 3, caption": dict(batch_size=4096, warmup=10_000, image_size=[224, 224]),
        "section 4.1": dict(optimizer="adamw", beta1=0.9, beta2=0.999),
        # Appendix B.1: "gradient clipping at global norm 1" in training on ImageNet.
        "appendix B.1": dict(clip=1.0 if _name == "vit-i1k" else 0.0),
        **_CODE_CROP,
    }

_B_1_1 = {
    "appendix B.1.1": dict(
        optimizer="sgd", momentum=0.9, batch_size=512, schedule="cosine", clip=1.0, weight_decay=0.0
    ),
    "section 4.1": dict(image_size=[384, 384]),
    "vit_jax, configs/common.py": dict(warmup=500),
    **_CODE_CROP,
}
_SMALL = [0.001, 0.003, 0.01, 0.03]
SOURCES |= {
    # The middle of each grid is this package's choice; --lr-sweep tries all.
    "vit-finetune-imagenet": {
        **_B_1_1,
        "table 4": dict(steps=20_000, learning_rates=[0.003, 0.01, 0.03, 0.06]),
        "this package": dict(learning_rate=0.01),
    },
    "vit-finetune-imagenet-512": {
        **_B_1_1,
        "table 4": dict(steps=20_000, learning_rates=[0.003, 0.01, 0.03, 0.06]),
        "section 4.1": dict(image_size=[512, 512], average_decay=0.9999),
        "this package": dict(learning_rate=0.01),
    },
    "vit-finetune-cifar": {
        **_B_1_1,
        "table 4": dict(steps=10_000, learning_rates=_SMALL),
        "this package": dict(learning_rate=0.01),
    },
    "vit-finetune-pets": {
        **_B_1_1,
        "table 4": dict(steps=500, learning_rates=_SMALL),
        "vit_jax, configs/common.py": {},
        "this package": dict(learning_rate=0.01, warmup=100),  # 500 would be all
    },
    "vit-finetune": {
        **_B_1_1,
        "table 4, VTAB": dict(steps=2500, learning_rate=0.01),
        "table 4": dict(learning_rates=_SMALL),
    },
    "vit-jax": {**_B_1_1, "vit_jax, configs/common.py": dict(learning_rate=0.03, warmup=500, steps=10_000)},
    "vit-self-supervised": {
        "appendix B.1.2": dict(learning_rate=2e-4, warmup=10_000, steps=1_000_000, batch_size=4096, schedule="cosine"),
        **_CODE_CROP,
    },
}

# ---- arXiv 2106.10270: section 3.3, levels: alpha of mixup, (layers, magnitude) of RandAugment

for _level, _mixup, _layers, _magnitude in [
    ("none", 0.0, 0, 0),
    ("light1", 0.0, 2, 0),
    ("light2", 0.2, 2, 10),
    ("medium1", 0.2, 2, 15),
    ("medium2", 0.5, 2, 15),
    ("strong1", 0.5, 2, 20),
    ("strong2", 0.8, 2, 20),
]:
    for _suffix, _rate in (("", 0.0), ("-dropout", 0.1)):
        _policy = f"rand-m{_magnitude}-n{_layers}-p1-mmax20" if _layers else None
        SOURCES[f"augreg-{_level}{_suffix}"] = {
            "section 3.3": dict(
                mixup_alpha=_mixup, auto_augment=_policy, dropout=_rate, drop_path=_rate, weight_decay=0.1
            ),
            "section 3.4": dict(batch_size=4096, warmup=10_000, schedule="cosine", epochs=300, image_size=[224, 224]),
            "section 3.4: clipping": dict(clip=1.0),
            "big_vision, configs/vit_i1k.py": dict(learning_rate=1e-3, loss="bce"),
            **_CODE_CROP,
        }

SOURCES["better-vit"] = {
    "arXiv 2205.01580, section 2": dict(
        batch_size=1024,
        dropout=0.0,
        architecture={"pooling": "gap", "position_embedding": "sincos_2d"},
        auto_augment="rand-m10-n2-p1-mmax20",
        mixup_alpha=0.2,
    ),
    # wd 0.0001 beside lr 0.001: decoupled from the rate, where AdamW's is multiplied by it.
    "big_vision, configs/vit_s16_i1k.py": dict(
        learning_rate=0.001, weight_decay=0.0001 / 0.001, warmup=10_000, epochs=90, clip=1.0, image_size=[224, 224]
    ),
    **_CODE_CROP,
}

# ---- arXiv 2012.12877, 2204.07118

SOURCES["deit"] = {
    "2012.12877, table 9": dict(
        epochs=300, batch_size=1024, optimizer="adamw", learning_rate=0.0005 * 1024 / 512, schedule="cosine",
        weight_decay=0.05, warmup=5 / 300, label_smoothing=0.1, dropout=0.0, drop_path=0.1, clip=0.0,
        auto_augment="rand-m9-mstd0.5-inc1", mixup_alpha=0.8, cutmix_alpha=1.0, random_erasing=0.25,
    ),
    "its code, samplers.py and main.py": dict(repeated_augmentation=3, min_learning_rate=1e-5, image_size=[224, 224]),
    "timm's create_transform": dict(random_resized_crop=[0.08, 1.0], horizontal_flip=0.5),
}  # fmt: skip

_DEIT_3 = {
    "README_revenge.md, all commands": dict(
        batch_size=2048, optimizer="lamb", schedule="cosine", dropout=0.0, cutmix_alpha=1.0
    ),
    "main.py": dict(min_learning_rate=1e-5),
    "models_v2.py": dict(architecture={"layer_scale_init_value": 1e-4, "position_on_class_token": False}),
    # The default of LAMB there, NVIDIA's and timm's.
    "LAMB": dict(clip=1.0),
    "augment.py": dict(auto_augment="3a", color_jitter=0.3, horizontal_flip=0.5),
}
SOURCES |= {
    "deit3": {
        **_DEIT_3,
        "README_revenge.md, deit_base_patch16_LS": dict(
            learning_rate=3e-3, epochs=800, weight_decay=0.05, image_size=[192, 192], warmup=5 / 800, mixup_alpha=0.8,
            drop_path=0.2, repeated_augmentation=3, loss="bce",
        ),
        "augment.py, without --src": dict(random_resized_crop=[0.08, 1.0]),
    },
    "deit3-resolution": {
        **_DEIT_3,
        "README_revenge.md, fine-tuning at 224": dict(
            learning_rate=1e-5, epochs=20, weight_decay=0.1, image_size=[224, 224], warmup=5 / 20, mixup_alpha=0.8,
            drop_path=0.2, label_smoothing=0.1, optimizer="adamw", batch_size=64 * 8,
        ),
        "LAMB": dict(clip=0.0),
        "augment.py": dict(auto_augment="rand-m9-mstd0.5-inc1", horizontal_flip=0.5, random_resized_crop=[0.08, 1.0]),
    },
    "deit3-i21k": {
        **_DEIT_3,
        "README_revenge.md, ImageNet-21k, deit_base_patch16_LS": dict(
            learning_rate=0.001, epochs=240, weight_decay=0.02, image_size=[224, 224], warmup=5 / 240, drop_path=0.1,
            label_smoothing=0.1,
        ),
        "augment.py, --src": dict(random_crop=4),
    },
    "deit3-finetune": {
        **_DEIT_3,
        "README_revenge.md, fine-tuning on ImageNet-1k, deit_base_patch16_LS": dict(
            learning_rate=0.0003, epochs=50, weight_decay=0.02, image_size=[224, 224], warmup=5 / 50, drop_path=0.15,
            label_smoothing=0.1,
        ),
        "augment.py, --src": dict(random_crop=4),
    },
}  # fmt: skip

# ---- arXiv 2110.00476, table 2: epochs, rate, decay, smoothing, drop path, px, RandAugment, mixup, copies

for _name, _epochs, _rate, _decay, _smoothing, _drop, _side, _rand, _mixup, _copies in [
    ("rsb-a1", 600, 5e-3, 0.01, 0.1, 0.05, 224, 7, 0.2, 3),
    ("rsb-a2", 300, 5e-3, 0.02, 0.0, 0.05, 224, 7, 0.1, 3),
    ("rsb-a3", 100, 8e-3, 0.02, 0.0, 0.0, 160, 6, 0.1, 1),
]:
    SOURCES[_name] = {
        "table 2": dict(
            epochs=_epochs, learning_rate=_rate, weight_decay=_decay, label_smoothing=_smoothing, drop_path=_drop,
            image_size=[_side, _side], auto_augment=f"rand-m{_rand}-mstd0.5-inc1", mixup_alpha=_mixup, cutmix_alpha=1.0,
            repeated_augmentation=_copies, batch_size=2048, optimizer="lamb", schedule="cosine", warmup=5 / _epochs,
            loss="bce", clip=0.0, horizontal_flip=0.5,
        ),
        "timm's configurations": dict(bce_threshold=0.2, random_resized_crop=[0.08, 1.0]),
    }  # fmt: skip

# ---- others

SOURCES |= {
    "mae-finetune": {
        "2111.06377, table 9": dict(
            optimizer="adamw", learning_rate=1e-3 * 1024 / 256, weight_decay=0.05, beta1=0.9, beta2=0.999,
            layer_decay=0.75, batch_size=1024, schedule="cosine", warmup=5 / 100, epochs=100,
            auto_augment="rand-m9-mstd0.5-inc1", label_smoothing=0.1, mixup_alpha=0.8, cutmix_alpha=1.0, drop_path=0.1,
        ),
        "its code": dict(random_resized_crop=[0.08, 1.0], horizontal_flip=0.5, clip=0.0, image_size=[224, 224]),
    },
    "cct-cifar": {
        "cct_7-3x1_cifar10_300epochs.yml": dict(
            image_size=[32, 32], random_resized_crop=[0.8, 1.0], auto_augment="rand-m9-mstd0.5-inc1", mixup_alpha=0.8,
            cutmix_alpha=1.0, random_erasing=0.0, batch_size=128, learning_rate=55e-5, min_learning_rate=1e-5,
            schedule="cosine", weight_decay=6e-2, epochs=300, warmup=10 / 300, optimizer="adamw", label_smoothing=0.1,
        ),
        "src/cct.py": dict(drop_path=0.1),
        "timm's train.py": dict(clip=0.0, horizontal_flip=0.5),
    },
    "moco-v3": {
        "2104.02057, section 4": dict(
            batch_size=4096, learning_rate=1.5e-4 * 4096 / 256, warmup=40 / 300, epochs=300, weight_decay=0.1,
            optimizer="adamw", schedule="cosine",
        ),
        "its code": dict(random_resized_crop=[0.08, 1.0], horizontal_flip=0.5, clip=0.0),
    },
}  # fmt: skip

# ---- this package's own: chosen, not read; two rates by a paper's rule

_DEFAULT_SMALL = dict(
    learning_rate=3e-4, learning_rates=[1e-4, 3e-4, 1e-3], warmup=0.1, epochs=30, batch_size=64, patience=10,
    random_resized_crop=[0.5, 1.0], horizontal_flip=0.5,
)  # fmt: skip
_LIKE_DEIT = {"2012.12877, table 9": dict(weight_decay=0.05, label_smoothing=0.1)}
SOURCES |= {
    "default-small": {"this package": _DEFAULT_SMALL, **_LIKE_DEIT},
    "small-data": {
        "this package": dict(
            optimizer="muon", learning_rate=3e-3, learning_rates=[1e-3, 3e-3], warmup=0.1, epochs=100, batch_size=64,
            average_decay=0.99,
            random_resized_crop=[0.6, 1.0], rotation_degrees=10.0,
        ),
        **_LIKE_DEIT,
        "2502.16982": dict(momentum=0.95),
    },
    "lion": {
        "this package": _DEFAULT_SMALL,
        **_LIKE_DEIT,
        "2302.06675, section 5: 5 times": dict(
            learning_rate=3e-4 / 5, learning_rates=[3e-5, 6e-5, 1e-4], weight_decay=0.05 * 5
        ),
        "2302.06675, algorithm 2": dict(optimizer="lion", beta1=0.9, beta2=0.99),
    },
    "muon": {
        "this package": _DEFAULT_SMALL,
        **_LIKE_DEIT,
        "2502.16982, sections 2 and 3": dict(optimizer="muon", momentum=0.95),
    },
    "noisy-student": {
        "this package": _DEFAULT_SMALL,
        **_LIKE_DEIT,
        # Magnitude 27 of 10: torchvision's strongest.
        "1911.04252, section 3.1": dict(randaugment=[2, 30], drop_path=0.2),
        "its code": dict(label_smoothing=0.1),
    },
    "meta-pseudo-labels": {
        "this package": _DEFAULT_SMALL,
        **_LIKE_DEIT,
        # Magnitude 17 of 10: torchvision's strongest.
        "the code of 2003.10580": dict(randaugment=[2, 30], label_smoothing=0.0),
    },
    "digits": {
        "this package": dict(
            learning_rate=1.5e-3, warmup=0.1, epochs=80, batch_size=64, shift_px=1.6, rotation_degrees=10,
            shear_degrees=5, zoom=0.1,
        ),
        **_LIKE_DEIT,
    },
    "digits-hybrid": {
        "this package": dict(
            learning_rate=2.5e-3, warmup=0.1, epochs=80, batch_size=128, average_decay=0.99, shift_px=4.5,
            rotation_degrees=15, shear_degrees=10, zoom=0.15, evaluations=4,
        ),
        **_LIKE_DEIT,
    },
    "pretrain-small": {
        "this package": dict(
            learning_rate=1e-3, weight_decay=0.05, warmup=0.1, epochs=100, batch_size=64,
            random_resized_crop=[0.5, 1.0], horizontal_flip=0.5, evaluations=10,
        )
    },
    "contrastive-small": {
        "this package": dict(learning_rate=1e-3, warmup=0.1, epochs=100, batch_size=256, evaluations=10),
        "2104.02057": dict(weight_decay=0.1, random_resized_crop=[0.2, 1.0], horizontal_flip=0.5),
    },
}  # fmt: skip

# ---- dense prediction

_MMSEG = {"mmsegmentation's ADE20K pipeline": dict(scale_jitter=[0.5, 2.0], horizontal_flip=0.5, color_jitter=0.5)}
_STEPS = dict(schedule="warmup_stable_decay")
SOURCES |= {
    "segmenter-ade20k": {
        "2105.05633, section 4.1, and config.yml": dict(
            optimizer="sgd", learning_rate=1e-3, schedule="linear", epochs=64, batch_size=8, image_size=[512, 512],
        ),
        "its code's train.py": dict(dropout=0.0, drop_path=0.1, weight_decay=0.0, momentum=0.9, clip=0.0),
        **_MMSEG,
    },
    "upernet-ade20k": {
        "BEiT's code": dict(
            learning_rate=3e-5, beta1=0.9, beta2=0.999, weight_decay=0.05, layer_decay=0.9, drop_path=0.1,
            schedule="linear", warmup=1500, steps=160_000, batch_size=8 * 2, clip=0.0, image_size=[512, 512],
        ),
        **_MMSEG,
    },
    "mask2former-ade20k": {
        "its code's yaml": dict(
            learning_rate=1e-4, schedule="linear", weight_decay=0.05, steps=160_000, batch_size=16, clip=0.01,
            image_size=[512, 512], warmup=0,
        ),
        **_MMSEG,
    },
    "vitdet-coco": {
        "2203.16527, appendix A.2": dict(
            learning_rate=1e-4, weight_decay=0.1, batch_size=64, drop_path=0.1, layer_decay=0.7, warmup=250,
            image_size=[1024, 1024], scale_jitter=[0.1, 2.0], horizontal_flip=0.5,
        ),
        "detectron2": dict(**_STEPS, steps=184_375, cooldown=184_375 - 163_889, clip=0.0),
    },
    "mask-rcnn-coco": {
        "torchvision's train.py": dict(
            **_STEPS, optimizer="sgd", learning_rate=0.02, momentum=0.9, weight_decay=1e-4, epochs=26,
            batch_size=8 * 2, cooldown=(26 - 16) / 26, horizontal_flip=0.5,
        ),
        "its engine.py": dict(warmup=1000, clip=0.0),
    },
    "detr-coco": {
        "2005.12872, section 4": dict(
            **_STEPS, learning_rate=1e-4, weight_decay=1e-4, epochs=300, cooldown=(300 - 200) / 300, batch_size=64,
        ),
        "its code": dict(clip=0.1, horizontal_flip=0.5, scale_jitter=[480 / 800, 1.0]),
    },
    "deformable-detr-coco": {
        "2010.04159, section 5": dict(
            **_STEPS, learning_rate=2e-4, weight_decay=1e-4, epochs=50, cooldown=(50 - 40) / 50, batch_size=32,
        ),
        "its code": dict(clip=0.1, horizontal_flip=0.5, scale_jitter=[480 / 800, 1.0]),
    },
    **{
        name: {
            "this package": dict(
                learning_rate=1e-3, weight_decay=0.05, warmup=0.1, epochs=30, batch_size=16, evaluations=evaluations,
                random_resized_crop=[0.5, 1.0], horizontal_flip=0.5,
            )
        }
        for name, evaluations in (("segmentation-small", 10), ("detection-small", 5))
    },
}  # fmt: skip
