"""The code that shows how a shared model is used: for its card, and for `hf-vit verify` to run."""

import json
from typing import Literal

from hf_vit.errors import one_line

# What brings the architecture: this package, transformers itself, or the code that travels with the weights.
Architecture = Literal["hf_vit", "transformers", "travelling"]

_EXAMPLE = """\
{package}from PIL import Image
from transformers import AutoImageProcessor, {auto_class}

repo = {repo}
processor = AutoImageProcessor.from_pretrained(repo)
model = {auto_class}.from_pretrained(repo{trust})

image = Image.open("image.png").convert("RGB")
outputs = model(**processor(images=image, return_tensors="pt"))
print({answer})"""


def example(repo: str, *, is_classifier: bool, architecture: Architecture) -> str:
    """A few lines of Python that load a model and print what it says of image.png.

    Every word of them is this package's own but for the name of the repository or folder, which is one string.
    """
    answer = "model.config.id2label[outputs.logits.argmax(-1).item()]"
    return _EXAMPLE.format(
        package="import hf_vit  # registers the architecture\n" if architecture == "hf_vit" else "",
        auto_class="AutoModelForImageClassification" if is_classifier else "AutoModel",
        repo=json.dumps(one_line(repo), ensure_ascii=False),
        trust=", trust_remote_code=True" if architecture == "travelling" else "",
        answer=answer if is_classifier else "outputs.pooler_output.shape",
    )
