"""Tiny classifiers of every family, saved with a processor, and images to give them."""

from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from models import families
from PIL import Image, ImageCms
from transformers import ViTImageProcessor

FAMILIES = families.FAMILIES | families.OTHERS
LABELS = ("cat", "dog", "owl")


def save_classifier(folder: Path, family: str, choice: str, labels: tuple[str, ...] = LABELS, **settings: Any) -> Path:
    """A classifier of `models.families`; `settings` are its processor's."""
    model = FAMILIES[family].build("classification", choice)
    if model.config.num_labels:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: index for index, label in enumerate(labels)}
    model.save_pretrained(folder)
    height, width = np.broadcast_to(model.config.image_size, 2).tolist()
    ViTImageProcessor(
        **{"size": {"height": height, "width": width}, "do_convert_rgb": True, **settings}
    ).save_pretrained(folder)
    return folder


def outputs_of(maps: Any) -> dict[str, Any]:
    """The page's outputs that hold a model's attention maps: name -> values."""
    outputs: dict[str, Any] = {}
    for layer in maps:
        if isinstance(maps[layer], tuple):  # [1, A, lines, side, side]
            for name, lines in zip(("row", "column"), maps[layer], strict=True):
                outputs[f"{name}_attention_{layer}"] = lines[0].transpose(0, 1)
        else:
            outputs[f"attention_{layer}"] = maps[layer][0]
    return outputs


def save_images(folder: Path) -> list[Path]:
    """Ten images of several sizes and modes: noise, edges and gradients, transparent, turned by EXIF, tiny and wide."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    sizes = [(16, 16), (31, 47), (8, 8), (1, 1), (3, 200), (480, 640), (257, 129), (64, 64), (50, 40), (1000, 700)]
    files: list[Path] = []
    for number, (height, width) in enumerate(sizes):
        y, x = np.mgrid[:height, :width]
        noise = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        ramp = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x // 3 + y // 5) % 2 * 255], -1)
        image = Image.fromarray(noise if number % 2 else ramp.astype(np.uint8))
        options: dict[str, Any] = {}
        if number == 7:
            image.putalpha(Image.fromarray(generator.choice(np.array([0, 255], dtype=np.uint8), (height, width))))
        if number == 8:
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = 6
        files.append(folder / f"{number}.png")
        image.save(files[-1], **options)
    return files


def save_photographs(folder: Path) -> tuple[list[Path], list[Path]]:
    """A photograph of odd sides in files of many kinds: JPEG of several samplings and qualities, GIF, PNG, WebP.

    Returns:
        Those that every reader decodes alike, and those of which browsers round otherwise than Pillow and hf_vit.
    """
    photograph = Image.fromarray(skimage.data.astronaut()).crop((180, 20, 281, 151))
    generator = np.random.default_rng(0)
    noise = Image.fromarray(generator.integers(0, 256, (131, 101, 3), dtype=np.uint8))
    deep = Image.fromarray(generator.integers(0, 2**16, (131, 101), dtype=np.uint16))
    glass, turned = photograph.convert("RGBA"), Image.Exif()
    glass.putalpha(noise.convert("L"))
    turned[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    kinds: list[tuple[Image.Image, str, dict[str, Any]]] = [
        *((photograph, "jpg", {"quality": quality, "subsampling": "4:4:4"}) for quality in (95, 30)),
        *((photograph, "jpg", {"quality": quality, "subsampling": "4:2:2"}) for quality in (90, 60)),
        *((photograph, "jpg", {"quality": quality, "subsampling": "4:2:0"}) for quality in (95, 75, 10)),
        (photograph, "jpg", {"quality": 85, "progressive": True}),
        (photograph, "jpg", {"exif": turned}),
        (photograph, "jpg", {"icc_profile": profile}),
        (photograph.convert("L"), "jpg", {}),
        (photograph.convert("CMYK"), "jpg", {}),
        (noise, "jpg", {"quality": 80}),
        (photograph.quantize(64), "gif", {}),
        (photograph, "webp", {"quality": 70}),
        (glass, "png", {}),
        (deep, "png", {}),
        (glass, "webp", {"quality": 80}),
    ]
    folder.mkdir()
    files = [folder / f"{number}.{suffix}" for number, (_, suffix, _) in enumerate(kinds)]
    for file, (image, _, options) in zip(files, kinds, strict=True):
        image.save(file, **options)
    return files[:-2], files[-2:]
