"""The code that shows how a shared model is used: for its card, and for `hf-vit verify` to run."""

import json
from typing import Literal

from hf_vit.errors import one_line
from hf_vit.hub.model_folder import ModelConfig

# What brings the architecture: this package, transformers itself, or the code that travels with the weights.
Architecture = Literal["hf_vit", "transformers", "travelling"]

_EXAMPLE = """\
{imports}
from transformers import AutoImageProcessor, {auto_class}

repo = {repo}
processor = AutoImageProcessor.from_pretrained(repo{processor_trust})
model = {auto_class}.from_pretrained(repo{trust})

{image}
outputs = model(**processor(images=image, return_tensors="pt"))
{answer}"""
# What hf-vit's own commands and training see: the same pixels by either way.
_WITH_PACKAGE = (
    """\
import hf_vit  # registers the architecture
from hf_vit.data import to_rgb
from PIL import Image""",
    """\
image = to_rgb(Image.open("image.png"))""",
)
_WITHOUT = (
    """\
import numpy as np
from PIL import Image, ImageOps""",
    """\
image = ImageOps.exif_transpose(Image.open("image.png"))
if image.mode.startswith("I"):  # 16 bits
    image = Image.fromarray((np.asarray(image) / 257).round().astype("uint8"))
if image.has_transparency_data:  # on white
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
image = image.convert("RGB")""",
)


# What is printed of dense predictions: the classes that are seen, or the objects and where they are.
_SEGMENTED = """\
classes = processor.post_process_semantic_segmentation(outputs, target_sizes=[image.size[::-1]])[0]
for number, pixels in zip(*classes.unique(return_counts=True)):
    print(model.config.id2label[number.item()], pixels.item(), "px")"""
_DETECTED = """\
found = {found}
sure = found["scores"] > 0.5
for label, box in zip(found["labels"][sure].tolist(), found["boxes"][sure].tolist()):
    print(model.config.id2label[label], box)
print(len(found["labels"][sure]), "objects")"""


def example(config: ModelConfig, repo: str, architecture: Architecture) -> str:
    """Return a few lines of Python that load a model and print what it says of image.png.

    Every word of them is this package's own but for the name of the repository or folder, which is one string.
    """
    imports, image = _WITH_PACKAGE if architecture == "hf_vit" else _WITHOUT
    trust = ", trust_remote_code=True" if architecture == "travelling" or config.own_class else ""
    return _EXAMPLE.format(
        imports=imports,
        image=image,
        auto_class=_auto_class(config),
        repo=json.dumps(one_line(repo), ensure_ascii=False),
        trust=trust,
        processor_trust=trust if config.own_class else "",
        answer=_answer(config),
    )


def _auto_class(config: ModelConfig) -> str:
    if config.dense_head is not None:
        return config.dense_head.auto_class
    return "AutoModelForImageClassification" if config.is_classifier else "AutoModel"


def _answer(config: ModelConfig) -> str:
    if (head := config.dense_head) is not None:
        if head.task == "segmentation":
            return _SEGMENTED
        sizes = "threshold=0.5, target_sizes=[image.size[::-1]]"
        found = f"processor.post_process_object_detection(outputs, {sizes})[0]"
        return _DETECTED.format(
            found="outputs.detections[0]  # px of the resized image" if head.name == "mask-rcnn" else found
        )
    if not config.is_classifier:
        return "print(outputs.pooler_output.shape)"
    if config.is_regression:
        return "print({name: outputs.logits[0, number].item() for number, name in model.config.id2label.items()})"
    if config.is_multi_label:
        return "print([name for number, name in model.config.id2label.items() if outputs.logits[0, number] > 0])"
    return "print(model.config.id2label[outputs.logits.argmax(-1).item()])"
