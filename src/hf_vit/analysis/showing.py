"""`show`: show a model's view of one image in a notebook, or as a page in a single file that runs no model."""

import base64
import html
import io
import json
import os
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.analysis.analysis import AnalysisSettings, Context
from hf_vit.analysis.head_maps import HeadMaps
from hf_vit.analysis.images import open_images
from hf_vit.analysis.rollout import AttentionRollout
from hf_vit.data.images import decode_image
from hf_vit.errors import UserError, to_one_line
from hf_vit.evaluation.reading import restored_modes
from hf_vit.families import find_family, get_problem_type
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.pages.description import describe_model
from hf_vit.pages.graph import ModelWithMaps, count_inner_values
from hf_vit.results.figures import encode_figure
from hf_vit.writing import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

_HEIGHT_PX = 900
_MAX_BYTES = 10**8  # of attention and features in half precision, as the notebook stores all of it


@final
@dataclass(frozen=True)
class Shown:
    """A page about one image; a notebook shows it in a frame, and `save` writes it to a file.

    Attributes:
        name: name of the model.
        page: HTML that needs no other file.
    """

    name: str
    page: str = field(repr=False)

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed frame."""
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" title="{html.escape(self.name)}" '
            f'style="width: 100%; height: {_HEIGHT_PX}px; border: 0"></iframe>'
        )

    def save(self, file: str | Path) -> None:
        """Write the page as one HTML file; raise UserError if it cannot be written."""
        write_atomically(Path(file), self.page)


def show(model: object, image: "Image | str | os.PathLike[str]") -> Shown:
    """Show one image in a notebook: classes, attention, rollout, features and positions of a classifier.

    The page is the one that `hf-vit page` writes, for this image only. All values are computed now, in half precision,
    and stored in the notebook, so that it works without a network. A model without such a page gets the plots of its
    attention that `analyze` draws: models of other libraries, models without classes, models that are too large for a
    notebook, and models whose image processor the page does not support.

    Args:
        model: a folder, a Hub id, "timm:NAME", or (model, image processor); see `load_model`.
        image: a Pillow image, or a file.

    Raises:
        UserError: the model supports neither, or the image cannot be read.
    """
    with restored_modes(model):
        loaded = load_model(model, "cpu", inside=True)
        try:
            decoded = decode_image(image)
        except (OSError, SyntaxError, ValueError) as error:
            if not isinstance(image, str | os.PathLike):
                raise
            raise UserError(f"{image} cannot be read as an image: {to_one_line(error)}; give another file") from error
        obstacle = _find_page_obstacle(loaded)
        if obstacle is None:
            try:
                page = make_still_page(loaded.model, loaded.processor, decoded, loaded.name, loaded.folder)  # pyright: ignore[reportArgumentType]
                return Shown(loaded.name, page)
            except UserError as error:  # the page does not support the image processor
                obstacle = str(error)
        return Shown(loaded.name, _draw_attention(loaded, decoded, obstacle))


def _find_page_obstacle(loaded: LoadedModel) -> str | None:
    """Return why a model has no page, or None."""
    config: Any = getattr(loaded.model, "config", None)
    is_ours = find_family(str(getattr(config, "model_type", None))) is not None
    if not is_ours or not loaded.label_sets or get_problem_type(config) == "regression":
        return "only classifiers of hf_vit, and models that hf_vit can convert to them, have a page"
    if loaded.processor is None:
        return "the model has no image processor"
    size = 2 * count_inner_values(config)
    return None if size <= _MAX_BYTES else f"its attention maps of {size / 1e6:,.0f} MB are too large for a notebook"


def _draw_attention(loaded: LoadedModel, image: "Image", obstacle: str) -> str:
    """Return plots of the model's attention as HTML that needs no other file."""
    context = Context(loaded, open_images([image], 1), AnalysisSettings(num_images=1, num_pictures=1, batch_size=1))
    figures: list[str] = []
    for analysis_class in (AttentionRollout, HeadMaps):
        reason = analysis_class.find_obstacle(context)
        if reason is not None:
            raise UserError(
                f"{loaded.name} cannot be shown ({obstacle}), and its attention cannot be drawn ({reason}); give a "
                "model of hf_vit, or one that hf_vit can convert"
            )
        analysis = analysis_class(context)
        for title, figure in analysis.draw(analysis.measure()).items():
            picture = base64.b64encode(encode_figure(figure)).decode()
            caption = html.escape(title)
            figures.append(
                f'<figure><img src="data:image/png;base64,{picture}" alt="{caption}" style="max-width: 100%">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    return f"<!doctype html><meta charset=utf-8><h1>{html.escape(loaded.name)}</h1>{''.join(figures)}"


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
            results = traced_model(pixel_values.to(model.device, model.dtype))
    finally:
        model.set_attn_implementation(implementation)
    outputs = dict(zip(traced_model.names, results, strict=True))
    positions = traced_model.positions()
    if positions is not None:
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
    halves = values.detach().cpu().half().numpy().astype("<f2")
    return {"dims": list(halves.shape), "data": base64.b64encode(halves.tobytes()).decode()}


def _inline_files(data: str) -> str:
    """Return index.html with style, data and script inlined."""
    index, style, script = ((resources.files("hf_vit.pages") / "static" / file).read_text("utf-8") for file in _FILES)
    before_policy, _, after_policy = index.partition('content="default-src')
    page = f'{before_policy}content="{_POLICY}{after_policy[after_policy.index(chr(34)) :]}'
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    return page.replace(
        '<script type="module" src="page.js"></script>', f'{data}<script type="module">{script}</script>'
    )
