"""`show`: one model and one image in a notebook, to look around in."""

import html
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hf_vit.data.images import to_rgb
from hf_vit.errors import UserError, one_line
from hf_vit.families import family_of
from hf_vit.pages.still import still_page
from hf_vit.results.writing import write_atomically
from hf_vit.subjects.subject import open_subject

if TYPE_CHECKING:
    from PIL.Image import Image

_HEIGHT_PX = 900


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
    """Look around in what a classifier makes of one image: classes, attention, rollout, features, positions.

    The same page as `hf-vit page` makes, of this image alone: everything is computed here, in half precision, so that
    it stays in the notebook and needs no network.

    Args:
        model: see `open_subject`: a folder, a Hub id, "timm:NAME", or (model, image processor); of this package, or
            what converts to it.
        image: a Pillow image, or a file.

    Raises:
        UserError: the model is no classifier of this package, its image processor does what the page cannot follow, or
            the image cannot be read.
    """
    subject = open_subject(model, "cpu", inside=True)
    shown: Any = subject.model
    kind = str(getattr(getattr(shown, "config", None), "model_type", None))
    if family_of(kind) is None or not subject.label_sets or subject.processor is None:
        raise UserError(
            f"{subject.name} cannot be shown as a page, which needs a classifier of hf_vit or one that converts to it; "
            "use hf_vit.analysis.analyze, which draws pictures"
        )
    return Shown(subject.name, still_page(shown, subject.processor, _opened(image), subject.name, subject.folder))


def _opened(image: "Image | str | os.PathLike[str]") -> "Image":
    from PIL import Image

    if not isinstance(image, str | os.PathLike):
        return to_rgb(image)
    try:
        with Image.open(image) as opened:
            return to_rgb(opened)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{image} cannot be read as an image: {one_line(error)}; give another file") from error
