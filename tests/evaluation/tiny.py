"""A tiny image classifier of transformers, and labelled images to measure it on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from models.families import FAMILIES
from PIL import Image as PillowImage
from training.conftest import save_model
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.data import ImageData
from hf_vit.data import make_processor as processor_of
from hf_vit.evaluation.examination import Examination
from hf_vit.loading.model import LoadedModel, load_model

NAMES = ("ant", "bee", "cow", "dog", "eel", "fox")


def make_images(count: int, seed: int = 0, side: int = 12) -> list[PillowImage.Image]:
    """Noise about a colour of its own for every image."""
    generator = np.random.default_rng(seed)
    colours = generator.integers(0, 200, (count, 1, 1, 3))
    pixels = (colours + generator.integers(0, 56, (count, side, side, 3))).astype(np.uint8)
    return [PillowImage.fromarray(array) for array in pixels]


def make_dataset(count: int, names: Sequence[str] = NAMES, seed: int = 0, side: int = 12) -> Dataset:
    labels = np.random.default_rng(seed + 1).integers(0, len(names), count).tolist()
    features = Features({"image": Image(), "label": ClassLabel(names=list(names))})
    return Dataset.from_dict({"image": make_images(count, seed, side), "label": labels}, features=features)


def make_classifier(names: Sequence[str] = NAMES, seed: int = 0, **fields: Any) -> ViTForImageClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    model = ViTForImageClassification(ViTConfig(**{**sizes, "image_size": 8, "patch_size": 4, **labels, **fields}))
    # Large weights: predictions that differ from image to image, with confidences far from 1 / K.
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embeddings." not in name.replace("patch_embeddings", ""):
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def save_ours(folder: Path) -> HfViTForImageClassification:
    """A classifier of ours with the same names, in large weights, and its processor."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    labels: Any = {"id2label": dict(enumerate(NAMES)), "label2id": {name: n for n, name in enumerate(NAMES)}}
    model = HfViTForImageClassification(HfViTConfig(image_size=8, patch_size=4, **sizes, **labels)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_model(model, folder)
    return model


def make_processor() -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True)


def pixels_of(images: Iterable[PillowImage.Image]) -> torch.Tensor:
    """[B, C, H, W] as transformers makes it of all images at once."""
    return make_processor()(images=list(images), return_tensors="pt")["pixel_values"]


@torch.no_grad()
def logits_of(model: ViTForImageClassification, images: Iterable[PillowImage.Image]) -> torch.Tensor:
    """All images at once, without a line of the code under test."""
    return model(pixels_of(images)).logits


def choose_features(tokens: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """Of the tokens [.., N, D] of some layers, of which the first is the class token."""
    classes, patches = [layer[..., 0, :] for layer in tokens], [layer[..., 1:, :] for layer in tokens]
    means = [layer.mean(dim=-2) for layer in patches]
    parts = {"class": classes, "mean": means, "class+mean": [*classes, means[-1]], "patches": patches}
    return torch.cat(parts[kind], dim=-1)


def fit_probe(features: np.ndarray, labels: Any, strength: float) -> Any:
    """Fit scikit-learn's logistic regression of standardized features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(features, labels)


def make_data(train: int = 72, validation: int = 24, test: int = 30, side: int = 12) -> ImageData:
    """Three splits of noise; every class has images in each."""
    sizes = {"train": train, "validation": validation, "test": test}
    splits = {name: make_dataset(size, seed=10 * place, side=side) for place, (name, size) in enumerate(sizes.items())}
    return ImageData("noise", "0123456789abcdef", splits, list(NAMES))


def examine(model: Any = None, data: ImageData | None = None, **options: Any) -> Examination:
    """A classifier of transformers with its processor, on noise."""
    subject = load_model(model if isinstance(model, LoadedModel) else (model or make_classifier(), make_processor()))
    return Examination(subject, data or make_data(), **{"progress": False, **options})


def our_subject(family: str, **fields: Any) -> LoadedModel:
    """A tiny classifier of ours with the classes of `NAMES`."""
    model = FAMILIES[family].build("classification", num_labels=len(NAMES), **fields).eval()
    model.config.id2label = dict(enumerate(NAMES))
    return load_model((model, processor_of(model.config)))


def make_animals(root: Path, images: int, train: int | None = None, side: int = 16) -> Path:
    """Write a folder of train, validation and test, each with so many images of two of the model's classes."""
    made = iter(make_images(72, side=side))
    for split in ("train", "validation", "test"):
        for name in ("fox", "ant"):
            (root / split / name).mkdir(parents=True)
            for index in range(train or images if split == "train" else images):
                next(made).save(root / split / name / f"{index}.png")
    return root
