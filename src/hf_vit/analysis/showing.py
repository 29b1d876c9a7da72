"""`show`: one model and one image in a notebook, to look around in."""

import base64
import html
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hf_vit.analysis.analysis import AnalysisSettings, Context
from hf_vit.analysis.head_maps import HeadMaps
from hf_vit.analysis.images import open_images
from hf_vit.analysis.rollout import AttentionRollout
from hf_vit.data.images import decode_image
from hf_vit.errors import UserError, one_line
from hf_vit.families import family_of
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.pages.graph import numbers_inside
from hf_vit.pages.still import still_page
from hf_vit.results.figures import encode_figure
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

_HEIGHT_PX = 900
_LARGEST_BYTES = 10**8  # of what happens inside, in half precision: a notebook keeps all of it


@final
@dataclass(frozen=True)
class Shown:
    """A page about one image: a notebook shows it in a frame of its own, `save` writes it as a file.

    Attributes:
        name: of the model.
        page: HTML that needs no other file.
    """

    name: str
    page: str = field(repr=False)

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" title="{html.escape(self.name)}" '
            f'style="width: 100%; height: {_HEIGHT_PX}px; border: 0"></iframe>'
        )

    def save(self, file: str | Path) -> None:
        """Write the page as one file, which any browser opens.

        Raises:
            UserError: nothing can be written there.
        """
        write_atomically(Path(file), self.page)


def show(model: object, image: "Image | str | os.PathLike[str]") -> Shown:
    """Show one image in a notebook: classes, attention, rollout, features and positions of a classifier.

    The same page as `hf-vit page` makes, of this image alone: everything is computed here, in half precision, so that
    it stays in the notebook and needs no network. Of a model that has no such page - of another library, no classifier,
    too large for a notebook, or of an image processor that the page cannot follow - the pictures of its attention, as
    `analyze` draws them.

    Args:
        model: see `load_model`: a folder, a Hub id, "timm:NAME", or (model, image processor).
        image: a Pillow image, or a file.

    Raises:
        UserError: the model has neither a page nor attention, or the image cannot be read.
    """
    subject = load_model(model, "cpu", inside=True)
    try:
        opened = decode_image(image)
    except (OSError, SyntaxError, ValueError) as error:
        if not isinstance(image, str | os.PathLike):
            raise
        raise UserError(f"{image} cannot be read as an image: {one_line(error)}; give another file") from error
    obstacle = _obstacle(subject)
    if obstacle is None:
        try:
            page = still_page(subject.model, subject.processor, opened, subject.name, subject.folder)  # pyright: ignore[reportArgumentType]
            return Shown(subject.name, page)
        except UserError as error:  # the image processor does what the page cannot
            obstacle = str(error)
    return Shown(subject.name, _pictures(subject, opened, obstacle))


def _obstacle(subject: LoadedModel) -> str | None:
    """Return why there is no page of a model; None where there is one."""
    config: Any = getattr(subject.model, "config", None)
    if family_of(str(getattr(config, "model_type", None))) is None or not subject.label_sets:
        return "only classifiers of hf_vit, and models that convert to them, have a page"
    if subject.processor is None:
        return "there is no image processor"
    size = 2 * numbers_inside(config)
    return None if size <= _LARGEST_BYTES else f"its attentions of {size / 1e6:,.0f} MB are too large for a notebook"


def _pictures(subject: LoadedModel, image: "Image", obstacle: str) -> str:
    """Return the attention of a model, drawn, as HTML that needs no other file."""
    context = Context(subject, open_images([image], 1), AnalysisSettings(num_images=1, num_pictures=1, batch_size=1))
    drawn: list[str] = []
    for kind in (AttentionRollout, HeadMaps):
        if (reason := kind.obstacle(context)) is not None:
            raise UserError(
                f"{subject.name} cannot be shown: {obstacle}, and its attention cannot be drawn ({reason}); give a "
                "model of hf_vit, or one that converts to it"
            )
        analysis = kind(context)
        for title, figure in analysis.draw(analysis.measure()).items():
            picture, words = base64.b64encode(encode_figure(figure)).decode(), html.escape(title)
            drawn.append(
                f'<figure><img src="data:image/png;base64,{picture}" alt="{words}" style="max-width: 100%">'
                f"<figcaption>{words}</figcaption></figure>"
            )
    return f"<!doctype html><meta charset=utf-8><h1>{html.escape(subject.name)}</h1>{''.join(drawn)}"
