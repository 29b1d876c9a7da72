"""The Python example of a shared model, shown in its card and run by `hf-vit verify`."""

import json
from typing import Literal

from hf_vit.errors import to_one_line
from hf_vit.hub.model_folder import ModelConfig
from hf_vit.loading.outputs import TASKS, get_dense_task

# Where the architecture's code comes from: hf_vit, transformers, or the files beside the weights.
Architecture = Literal["hf_vit", "transformers", "remote code"]

_EXAMPLE = """\
{imports}
from transformers import AutoImageProcessor, {auto_class}

repo = {repo}
processor = AutoImageProcessor.from_pretrained(repo{processor_trust})
model = {auto_class}.from_pretrained(repo{trust})

{image}
{outputs}
{answer}"""
_OUTPUTS = 'outputs = model(**processor(images=image, return_tensors="pt"))'
# Where the image processor keeps the shape of images: with hf_vit, and without.
_OWN_SHAPE_WITH_PACKAGE = """\
from hf_vit.data.transforms import fill_patches

pixel_values = fill_patches(image, processor, model.config.patch_stride, processor.max_num_patches)
outputs = model(pixel_values[None])"""
_OWN_SHAPE = """\
def count_patches(scale):  # rows and columns
    return [max(1, math.ceil(side * scale / px)) for side, px in zip(image.size[::-1], model.config.patch_stride)]

low, high = 1e-6, 100.0  # the image is resized to as many patches as fit
while high - low >= 1e-5:
    scale = (low + high) / 2
    low, high = (scale, high) if math.prod(count_patches(scale)) <= processor.max_num_patches else (low, scale)
height, width = (number * px for number, px in zip(count_patches(low), model.config.patch_stride))
size = {"height": height, "width": width}
outputs = model(**processor(images=image, size=size, return_tensors="pt"))"""
# Imports and lines that load the image; with and without hf_vit they give the pixels that hf_vit's commands use.
_WITH_PACKAGE = (
    """\
import hf_vit  # registers the architecture
from hf_vit.data import to_rgb
from PIL import Image""",
    'image = to_rgb(Image.open("image.png"))',
)
_WITHOUT_PACKAGE = (
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


# Lines that print dense predictions: pixels per class, or objects with their boxes.
_PRINT_SEGMENTS = """\
classes = processor.post_process_semantic_segmentation(outputs, target_sizes=[image.size[::-1]])[0]
for number, pixels in zip(*classes.unique(return_counts=True)):
    print(model.config.id2label[number.item()], pixels.item(), "px")"""
_PRINT_OBJECTS = """\
detections = {detections}
is_certain = detections["scores"] > 0.5
labels, boxes = detections["labels"][is_certain].tolist(), detections["boxes"][is_certain].tolist()
for label, box in zip(labels, boxes):
    print(model.config.id2label[label], box)
print(len(labels), "objects")"""


def make_example(config: ModelConfig, repo: str, architecture: Architecture, keeps_shapes: bool = False) -> str:
    """Return Python code that loads a model and prints its prediction for image.png.

    The code is trustworthy: only the repository's name varies, and it is quoted. With `keeps_shapes` the image
    processor of a model of hf_vit keeps the shape of images.
    """
    imports, image = _WITH_PACKAGE if architecture == "hf_vit" else _WITHOUT_PACKAGE
    image += '.convert("L")' if getattr(config, "num_channels", 3) == 1 else ""
    outputs = _OUTPUTS
    if keeps_shapes and architecture == "hf_vit":
        outputs = _OWN_SHAPE_WITH_PACKAGE
    elif keeps_shapes and architecture == "remote code":
        outputs, imports = _OWN_SHAPE, f"import math\n\n{imports}"
    head = next((ending for ending in ("ForImageClassification", *TASKS) if ending in config.architecture), "")
    trust = ", trust_remote_code=True" if architecture == "remote code" or config.own_class else ""
    return _EXAMPLE.format(
        imports=imports,
        image=image,
        auto_class=f"AutoModel{head}",
        repo=json.dumps(to_one_line(repo), ensure_ascii=False),
        trust=trust,
        processor_trust=trust if config.own_class else "",
        outputs=outputs,
        answer=_print_prediction(config),
    )


def _print_prediction(config: ModelConfig) -> str:
    task = get_dense_task(config.architecture)
    if task == "segmentation":
        return _PRINT_SEGMENTS
    if task == "detection":
        sizes = "threshold=0.5, target_sizes=[image.size[::-1]]"
        detections = f"processor.post_process_object_detection(outputs, {sizes})[0]"
        if "MaskRCNN" in config.architecture:
            detections = "outputs.detections[0]  # px of the resized image"
        return _PRINT_OBJECTS.format(detections=detections)
    if not config.is_classifier:
        # Some models of transformers, such as ViT-MSN and I-JEPA, return no pooled features.
        return f"print(outputs.{'pooler_output' if config.is_ours else 'last_hidden_state'}.shape)"
    if config.is_regression:
        return "print({name: outputs.logits[0, number].item() for number, name in model.config.id2label.items()})"
    if config.is_multi_label:
        return "print([name for number, name in model.config.id2label.items() if outputs.logits[0, number] > 0])"
    return "print(model.config.id2label[outputs.logits.argmax(-1).item()])"
