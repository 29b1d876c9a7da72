"""Results and checkpoints that were published for the papers' variants, each with its source.

Accuracies are from arXiv 2010.11929, tables 2 and 6; those of AugReg hybrids (arXiv 2106.10270) from the table in the
README of google-research/vision_transformer. Checkpoint URLs are from the READMEs of google-research/vision_transformer
and google-research/big_transfer, from the Hub (original weights in the layout of transformers) and from timm's model
names. `hf-vit convert` reads all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hf_vit.variants import VARIANTS

TOP1 = "top-1 accuracy"
_PAPER = "arXiv 2010.11929, table"
_AUGREG_PAGE = "arXiv 2106.10270, google-research/vision_transformer, table of AugReg models, row"


@dataclass(frozen=True)
class Score:
    """A published result.

    Attributes:
        data: data set, with its split if known.
        metric: name of the metric.
        value: a fraction in [0, 1].
        source: where it was published.
    """

    data: str
    metric: str
    value: float
    source: str


_TABLE_2_DATA = ("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Oxford-IIIT Pets", "Oxford Flowers-102", "VTAB")
# Variant -> (row of the table, percent on each of _TABLE_2_DATA).
_TABLE_2 = {
    "H/14": ("Ours-JFT (ViT-H/14)", (88.55, 90.72, 99.50, 94.55, 97.56, 99.68, 77.63)),
    "L/16": ("Ours-I21k (ViT-L/16)", (85.30, 88.62, 99.15, 93.25, 94.67, 99.61, 72.72)),
}
# Variant -> rows of the table as (name, epochs on JFT, percent on ImageNet).
_TABLE_6 = {
    "B/32": (("ViT-B/32", 7, 80.73),),
    "B/16": (("ViT-B/16", 7, 84.15),),
    "L/32": (("ViT-L/32", 7, 84.37),),
    "L/16": (("ViT-L/16", 7, 86.30), ("ViT-L/16", 14, 87.12)),
    "H/14": (("ViT-H/14", 14, 88.08),),
    "R50+B/16": (("R50x1+ViT-B/16", 7, 85.58),),
    "R50+L/32": (("R50x1+ViT-L/32", 7, 85.68),),
    "R50+L/16": (("R50x1+ViT-L/16", 7, 86.60), ("R50x1+ViT-L/16", 14, 87.12)),
}
# Variant -> percent on ImageNet at 384 px.
_AUGREG_SCORES = {"R+Ti/16": 75.40, "R26+S/32": 83.85, "R50+L/32": 85.99}

_MIXERS = ("Mixer-B_16", "Mixer-L_16")
# Folder in gs:// -> files; "ViT-B_16-224" was fine-tuned at 224 px, fine-tuned files without that suffix at 384 px.
_FOLDERS = {
    "vit_models/imagenet21k": ("ViT-B_8", "ViT-B_16", "ViT-B_32", "ViT-L_16", "ViT-L_32", "ViT-H_14", "R50+ViT-B_16"),
    "vit_models/imagenet21k+imagenet2012": (
        *("ViT-B_8", "ViT-B_16", "ViT-B_16-224", "ViT-B_32", "ViT-L_16", "ViT-L_16-224", "ViT-L_32", "R50+ViT-B_16"),
    ),
    "mixer_models/imagenet1k": _MIXERS,
    "mixer_models/imagenet21k": _MIXERS,
    "mixer_models/sam": ("Mixer-B_16", "Mixer-B_32"),
}
# Variant -> (file in gs://vit_models/augreg, learning rate in the name of its fine-tuned version).
_AUGREG = {
    "L/16": ("L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "B/16": ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.03"),
    "S/16": ("S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03"),
    "R50+L/32": ("R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01"),
    "R26+S/32": ("R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "Ti/16": ("Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
    "B/32": ("B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "S/32": ("S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "R+Ti/16": ("R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
}
_BIT_NAMES = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
_HUB_NAMES = {
    "B/16": ("vit-base-patch16-224-in21k", "vit-base-patch16-224", "vit-base-patch16-384"),
    "B/32": ("vit-base-patch32-224-in21k", "vit-base-patch32-384"),
    "L/16": ("vit-large-patch16-224-in21k", "vit-large-patch16-224", "vit-large-patch16-384"),
    "L/32": ("vit-large-patch32-224-in21k", "vit-large-patch32-384"),
    "H/14": ("vit-huge-patch14-224-in21k",),
    "BiT-R50x1": ("bit-50",),
}
_TIMM_NAMES = {
    **{
        f"{size}/{patch}": f"vit_{width}_patch{patch}_224"
        for size, width in (("Ti", "tiny"), ("S", "small"), ("B", "base"), ("L", "large"), ("H", "huge"))
        for patch in VARIANTS[size].patches
    },
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
    "Mixer-B/16": "mixer_b16_224",
    "Mixer-L/16": "mixer_l16_224",
    **{f"BiT-{name}": f"resnetv2_{name[1:]}_bit" for name in _BIT_NAMES},
}


def published_scores(variant: str) -> Iterator[Score]:
    """Yield the results that the papers state for a variant."""
    if variant in _TABLE_2:
        row, percents = _TABLE_2[variant]
        for data, percent in zip(_TABLE_2_DATA, percents, strict=True):
            metric = "mean accuracy of 19 tasks" if data == "VTAB" else TOP1
            yield Score(data, metric, _to_fraction(percent), f"{_PAPER} 2, {row}")
    for row, epochs, percent in _TABLE_6.get(variant, ()):
        yield Score("ImageNet", TOP1, _to_fraction(percent), f"{_PAPER} 6, {row}, {epochs} epochs on JFT")
    if variant in _AUGREG_SCORES:
        yield Score("ImageNet", TOP1, _to_fraction(_AUGREG_SCORES[variant]), f"{_AUGREG_PAGE} {variant}, 384 px")


def published_checkpoints(variant: str) -> Iterator[str]:
    """Yield the published checkpoints of a variant, named as `hf-vit convert` accepts them."""
    for folder, files in _FOLDERS.items():
        for file in files:
            if file.removesuffix("-224").replace("ViT-", "").replace("_", "/") == variant:
                yield f"gs://{folder}/{file}.npz"
    if variant in _AUGREG:
        file, rate = _AUGREG[variant]
        yield f"gs://vit_models/augreg/{file}.npz"
        yield f"gs://vit_models/augreg/{file}--imagenet2012-steps_20k-lr_{rate}-res_384.npz"
    name = variant.removeprefix("BiT-")
    if name in _BIT_NAMES:
        yield from (f"gs://bit_models/BiT-{kind}.npz" for kind in (f"S-{name}", f"M-{name}", f"M-{name}-ILSVRC2012"))
    yield from (f"hf://google/{repo}" for repo in _HUB_NAMES.get(variant, ()))
    if variant in _TIMM_NAMES:
        yield f"timm:{_TIMM_NAMES[variant]}"


def _to_fraction(percent: float) -> float:
    return round(percent / 100, 6)
