"""The code that shows how a shared model is used: for its card, and for `hf-vit verify` to run."""

import json
from typing import Literal

from hf_vit.errors import one_line

# What brings the architecture: this package, transformers itself, or the code that travels with the weights.
Architecture = Literal["hf_vit", "transformers", "travelling"]

_EXAMPLE = """\
{imports}
from transformers import AutoImageProcessor, {auto_class}

repo = {repo}
processor = AutoImageProcessor.from_pretrained(repo)
model = {auto_class}.from_pretrained(repo{trust})

{image}
outputs = model(**processor(images=image, return_tensors="pt"))
print({answer})"""
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


def example(repo: str, *, is_classifier: bool, architecture: Architecture, is_multi_label: bool = False) -> str:
    """A few lines of Python that load a model and print what it says of image.png.

    Every word of them is this package's own but for the name of the repository or folder, which is one string.
    """
    answer = "model.config.id2label[outputs.logits.argmax(-1).item()]"
    if is_multi_label:
        answer = "[name for number, name in model.config.id2label.items() if outputs.logits[0, number] > 0]"
    imports, image = _WITH_PACKAGE if architecture == "hf_vit" else _WITHOUT
    return _EXAMPLE.format(
        imports=imports,
        image=image,
        auto_class="AutoModelForImageClassification" if is_classifier else "AutoModel",
        repo=json.dumps(one_line(repo), ensure_ascii=False),
        trust=", trust_remote_code=True" if architecture == "travelling" else "",
        answer=answer if is_classifier else "outputs.pooler_output.shape",
    )
