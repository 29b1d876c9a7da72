"""Recipes of dense prediction: segmentation and detection.

A source's two or three steps down in the learning rate are here one cooldown that begins at the first of them; where
it trains the backbone at a tenth of the rate, --layer-decay does that layer by layer.
"""

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.training.recipes.definition import Recipe

# mmsegmentation's: a factor of .5 to 2, a crop, a flip, contrast and saturation within a half.
_ADE20K = AugmentationConfig(scale_jitter=(0.5, 2.0), horizontal_flip=0.5, color_jitter=0.5)
_COCO = AugmentationConfig(scale_jitter=(0.6, 1.0), horizontal_flip=0.5)


def _small(task: str, what: str, evaluations: int) -> Recipe:
    return Recipe(
        name=f"{task}-small",
        source="this package: customary values, not tuned; on generated scenes benchmarks/dense.py "
        "takes Muon, at rates chosen on their validation split",
        summary=f"{what}: a thousand images or so, from scratch or from a checkpoint, on one machine",
        learning_rate=1e-3,
        weight_decay=0.05,
        warmup=0.1,
        epochs=30,
        batch_size=16,
        augmentation=AugmentationConfig(random_resized_crop=(0.5, 1.0), horizontal_flip=0.5),
        evaluations=evaluations,
    )


DENSE: tuple[Recipe, ...] = (
    _small("segmentation", "masks", evaluations=10),
    _small("detection", "boxes", evaluations=5),
    Recipe(
        name="segmenter-ade20k",
        source="arXiv 2105.05633, section 4.1, and its code's config.yml and train.py: polynomial decay of power .9 to "
        "1e-5, here linear to 0; the 64 epochs are 160,000 steps",
        summary="Segmenter: ADE20K at 512 px from a checkpoint; --head linear is its linear decoder",
        optimizer="sgd",
        learning_rate=1e-3,
        schedule="linear",
        epochs=64,
        batch_size=8,
        clip=0.0,
        dropout=0.0,
        drop_path=0.1,
        image_size=(512, 512),
        augmentation=_ADE20K,
    ),
    Recipe(
        name="upernet-ade20k",
        source="BEiT's code (arXiv 2106.08254), upernet_beit_base_12_512_slide_160k_ade20k_pt2ft.py",
        summary="UperNet on a ViT-B: ADE20K at 512 px from a checkpoint",
        learning_rate=3e-5,
        schedule="linear",
        weight_decay=0.05,
        warmup=1500,
        steps=160_000,
        batch_size=16,
        clip=0.0,
        drop_path=0.1,
        layer_decay=0.9,
        image_size=(512, 512),
        augmentation=_ADE20K,
    ),
    Recipe(
        name="mask2former-ade20k",
        source="arXiv 2112.01527, section 4.1, and its code's Base-ADE20K-SemanticSegmentation.yaml: polynomial decay "
        "of power .9, here linear",
        summary="Mask2Former: ADE20K at 512 px from a checkpoint",
        learning_rate=1e-4,
        schedule="linear",
        weight_decay=0.05,
        steps=160_000,
        batch_size=16,
        clip=0.01,
        image_size=(512, 512),
        augmentation=_ADE20K,
    ),
    Recipe(
        name="vitdet-coco",
        source="arXiv 2203.16527, appendix A.2, and detectron2's mask_rcnn_vitdet_b_100ep.py: steps down after 163,889 "
        "and 177,546 of 184,375",
        summary="ViTDet: Mask R-CNN on a ViT-B, COCO at 1024 px from a checkpoint",
        learning_rate=1e-4,
        schedule="warmup_stable_decay",
        weight_decay=0.1,
        warmup=250,
        cooldown=20_486,
        steps=184_375,
        batch_size=64,
        clip=0.0,
        drop_path=0.1,
        layer_decay=0.7,
        image_size=(1024, 1024),
        augmentation=AugmentationConfig(scale_jitter=(0.1, 2.0), horizontal_flip=0.5),
    ),
    Recipe(
        name="mask-rcnn-coco",
        source="torchvision's references/detection/train.py (8 devices of 2 images; steps down after 16 and 22 of 26 "
        "epochs) and engine.py (1,000 steps of warm-up)",
        summary="Mask R-CNN as torchvision trains its ResNet-50, COCO",
        optimizer="sgd",
        learning_rate=0.02,
        schedule="warmup_stable_decay",
        weight_decay=1e-4,
        warmup=1000,
        cooldown=10 / 26,
        epochs=26,
        batch_size=16,
        clip=0.0,
        augmentation=AugmentationConfig(horizontal_flip=0.5),
    ),
    Recipe(
        name="detr-coco",
        source="arXiv 2005.12872, section 4 and appendix A.4, and its code's main.py: a step down after 200 of 300 "
        "epochs; a shorter side of 480 to 800 px, without the crops",
        summary="DETR: COCO",
        learning_rate=1e-4,
        schedule="warmup_stable_decay",
        weight_decay=1e-4,
        cooldown=1 / 3,
        epochs=300,
        batch_size=64,
        clip=0.1,
        augmentation=_COCO,
    ),
    Recipe(
        name="deformable-detr-coco",
        source="arXiv 2010.04159, section 5, and its code's main.py: a step down after 40 of 50 epochs; images as "
        "DETR's",
        summary="Deformable DETR: COCO",
        learning_rate=2e-4,
        schedule="warmup_stable_decay",
        weight_decay=1e-4,
        epochs=50,
        batch_size=32,
        clip=0.1,
        augmentation=_COCO,
    ),
)
