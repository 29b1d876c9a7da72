"""Real images through a graph with the image processor in it, and through processor and model in Python: same answers.

The photographs that scikit-image and scikit-learn ship, cut at random and kept as JPEG, and scikit-learn's digits; each
goes through a small classifier that was trained on others of its kind.
"""

import io
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import sklearn.datasets
import torch
from PIL import Image
from skimage import data as skimage_data
from torch.nn import functional as F
from transformers import ViTImageProcessor

from campaigns.engine import Campaign
from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion import export

SEED = 0
TRAINED = 400  # images that the classifier learns from
IMAGES = {"photographs, squeezed": 400, "photographs, cropped": 300, "digits": 300}

PROCESSORS = {
    "photographs, squeezed": ViTImageProcessor(size={"height": 48, "width": 48}),
    "photographs, cropped": ViTImageProcessor(
        size={"shortest_edge": 56}, resample=3, do_center_crop=True, crop_size={"height": 48, "width": 48},
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
    "digits": ViTImageProcessor(size={"height": 24, "width": 24}),
}  # fmt: skip


@cache
def photographs() -> list[np.ndarray]:
    names = ("astronaut", "coffee", "chelsea", "rocket", "hubble_deep_field", "retina")
    bundled = sklearn.datasets.load_sample_images().images
    return [*(getattr(skimage_data, name)() for name in names), *bundled]


def part_of_photograph(draw: random.Random, sides: tuple[int, int]) -> tuple[Image.Image, int]:
    """(a part of one, as JPEG keeps it, which it is of)."""
    label = draw.randrange(len(photographs()))
    photograph = photographs()[label]
    height, width = (min(draw.randint(*sides), side) for side in photograph.shape[:2])
    top, left = draw.randint(0, photograph.shape[0] - height), draw.randint(0, photograph.shape[1] - width)
    part, file = Image.fromarray(photograph[top : top + height, left : left + width]), io.BytesIO()
    part.save(file, "JPEG", quality=draw.randint(60, 95))
    return Image.open(file).convert("RGB"), label


load_digits = cache(sklearn.datasets.load_digits)


def digit(index: int) -> tuple[Image.Image, int]:
    digits = load_digits()
    return Image.fromarray((digits.images[index] * 15.9375).astype(np.uint8)).convert("RGB"), int(digits.target[index])


def trained(group: str) -> Any:
    """A classifier that has seen a few hundred images of the group, none of those that it is tried with."""
    torch.manual_seed(SEED)
    draw, processor = random.Random("training"), PROCESSORS[group]
    is_digits, side = group == "digits", 24 if group == "digits" else 48
    given = [digit(index) if is_digits else part_of_photograph(draw, (100, 400)) for index in range(TRAINED)]
    pixel_values = processor(images=[image for image, _ in given], return_tensors="pt")["pixel_values"]
    labels = torch.tensor([label for _, label in given])
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = HfViTConfig(image_size=side, patch_size=8, num_labels=10 if is_digits else 8, **sizes)
    model = HfViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(8):
        for rows in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(pixel_values[rows]).logits, labels[rows]).backward()
            optimizer.step()
    return model.eval()


class Pair:
    """A trained model with its processor, and its graph."""

    def __init__(self, group: str, folder: Path) -> None:
        self.group, self.model, self.processor = group, trained(group), PROCESSORS[group]
        self.model.save_pretrained(folder / "model")
        self.processor.save_pretrained(folder / "model")
        export(folder / "model", folder / "out", "onnx", preprocessing=True)
        self.session = onnxruntime.InferenceSession(folder / "out/model.onnx", providers=["CPUExecutionProvider"])

    def attempt(self, number: int) -> str:
        """How close the answers are; right or wrong of what the model says of the image."""
        if self.group == "digits":
            image, label = digit(TRAINED + number)
        else:
            image, label = part_of_photograph(random.Random(number), (16, 800))
        with torch.inference_mode():
            pixel_values = self.processor(images=image, return_tensors="pt")["pixel_values"]
            ours = self.model(pixel_values).logits[0].double().softmax(-1).numpy()
        (logits,) = self.session.run(["logits"], {"images": np.array(image)[None]})
        theirs = torch.from_numpy(logits[0]).double().softmax(-1).numpy()
        difference, (first, second) = abs(ours - theirs).max(), np.sort(ours)[::-1][:2]
        assert difference <= 1e-3, f"probabilities of an image of {image.size} px differ by {difference:.1e}"
        assert first - second <= 2e-3 or ours.argmax() == theirs.argmax()
        bound = next(bound for bound in (1e-6, 1e-5, 1e-4, 1e-3) if difference <= bound)
        return f"within {bound:.0e}, {'right' if ours.argmax() == label else 'wrong'}"


def cases() -> list[str]:
    return [f"{group}/{number}" for group, count in IMAGES.items() for number in range(count)]


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    pair_of = cache(lambda group: Pair(group, folder / group.replace(", ", "_")))

    def attempt(case: str) -> str:
        group, number = case.split("/")
        return pair_of(group).attempt(int(number))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of itself
        yield attempt


PROMISE = "a graph with the image processor in it answers real images as processor and model do in Python"
SETTINGS = {"seed": SEED, "images": IMAGES}
CAMPAIGN = Campaign(
    "preprocessing_in_graphs", PROMISE, cases, prepare, SETTINGS, lambda case: case.startswith("digits/")
)
