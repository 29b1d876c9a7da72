"""Write a page for one image as a single file; the model runs now, so that nothing runs in the browser."""

import base64
import io
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.pages.description import describe_model
from hf_vit.pages.graph import ModelWithMaps

if TYPE_CHECKING:
    from PIL.Image import Image

# Content security policy of the single file, which replaces that of a page with several files.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src data:"
)
_FILES = ("index.html", "style.css", "page.js")


def make_still_page(
    model: PreTrainedModel, processor: Any, image: "Image", name: str, folder: Path | None = None
) -> str:
    """Return the HTML page of a classifier and one image.

    Values are rounded to half precision. The browser treats all names as text.

    Args:
        model: a classifier of hf_vit.
        processor: its image processor.
        image: RGB image.
        name: the model's name on the page.
        folder: folder with its facts.json, if there is one.
    """
    description = describe_model(model, processor, name, folder)
    implementation = model.config._attn_implementation or "eager"
    pixel_values = processor(images=image, return_tensors="pt")["pixel_values"]
    traced_model = ModelWithMaps(model)
    try:
        model.set_attn_implementation("eager")  # other implementations return no attention maps
        with torch.no_grad():
            outputs = dict(
                zip(traced_model.names, traced_model(pixel_values.to(model.device, model.dtype)), strict=True)
            )
    finally:
        model.set_attn_implementation(implementation)
    if (positions := traced_model.positions()) is not None:
        outputs["positions"] = positions
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    content = {
        "page": {"models": [description | {"outputs": list(outputs), "bytes": 0, "folder": ""}], "examples": []},
        "image": f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}",
        "outputs": {output: _encode_tensor(values) for output, values in outputs.items()},
    }
    json_text = json.dumps(content).replace("<", "\\u003c")
    return _inline_files(f'<script type="application/json" id="still">{json_text}</script>')


def _encode_tensor(values: torch.Tensor) -> dict[str, Any]:
    """Return shape and base64 data of a tensor in little-endian half precision."""
    halves = values.detach().cpu().numpy().astype("<f2")
    return {"dims": list(halves.shape), "data": base64.b64encode(halves.tobytes()).decode()}


def _inline_files(data: str) -> str:
    """Return index.html with style, data and script inlined."""
    index, style, script = ((resources.files("hf_vit.pages") / "static" / file).read_text("utf-8") for file in _FILES)
    before_policy, _, after_policy = index.partition('content="default-src')
    index = f'{before_policy}content="{_POLICY}{after_policy[after_policy.index(chr(34)) :]}'
    index = index.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    return index.replace(
        '<script type="module" src="page.js"></script>', f'{data}<script type="module">{script}</script>'
    )
