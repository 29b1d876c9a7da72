"""A page of one image in one file: what the model says of it is computed here, so that nothing runs in the browser."""

import base64
import io
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.pages.description import description
from hf_vit.pages.graph import Inside

if TYPE_CHECKING:
    from PIL.Image import Image

# In place of the policy of a page with files of its own.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src data:"
)
_FILES = ("index.html", "style.css", "page.js")


def still_page(model: PreTrainedModel, processor: Any, image: "Image", name: str, folder: Path | None = None) -> str:
    """Return the page of a classifier of this package and one image, as HTML.

    Numbers are rounded to half precision. All words are text to the browser, whatever they hold.

    Args:
        image: RGB.
        name: what the page calls the model.
        folder: of its facts.json, where there is one.
    """
    about = description(model, processor, name, folder)
    implementation = model.config._attn_implementation or "eager"
    pixel_values = processor(images=image, return_tensors="pt")["pixel_values"]
    inside = Inside(model)
    try:
        model.set_attn_implementation("eager")  # the others give no attentions
        with torch.no_grad():
            outputs = dict(zip(inside.names, inside(pixel_values.to(model.device, model.dtype)), strict=True))
    finally:
        model.set_attn_implementation(implementation)
    if (positions := inside.positions()) is not None:
        outputs["positions"] = positions
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    still = {
        "page": {"models": [about | {"outputs": list(outputs), "bytes": 0, "folder": ""}], "examples": []},
        "image": f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}",
        "outputs": {each: _written(values) for each, values in outputs.items()},
    }
    words = json.dumps(still).replace("<", "\\u003c")
    return _assembled(f'<script type="application/json" id="still">{words}</script>')


def _written(values: torch.Tensor) -> dict[str, Any]:
    halves = values.detach().cpu().numpy().astype("<f2")
    return {"dims": list(halves.shape), "data": base64.b64encode(halves.tobytes()).decode()}


def _assembled(data: str) -> str:
    """Return the static files in one."""
    index, style, script = ((resources.files("hf_vit.pages") / "static" / file).read_text("utf-8") for file in _FILES)
    beginning, _, rest = index.partition('content="default-src')
    index = f'{beginning}content="{_POLICY}{rest[rest.index(chr(34)) :]}'
    index = index.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    return index.replace(
        '<script type="module" src="page.js"></script>', f'{data}<script type="module">{script}</script>'
    )
