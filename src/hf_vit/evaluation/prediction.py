"""The most likely classes of image files."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_vit.errors import UserError
from hf_vit.evaluation.reading import finite_logits
from hf_vit.subjects.subject import Subject

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image file, best first, as (label, probability); or why it has none."""

    image: str
    scores: list[tuple[str, float]]
    problem: str | None = None


def predict_images(
    subject: Subject,
    paths: Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
) -> list[Prediction]:
    """Classify image files, and the images of folders.

    Args:
        subject: an image classifier; see `open_subject`.
        paths: image files; a folder stands for the images directly inside it, by name.
        top: classes to report for every image, at most all.
        batch_size: images a step.
        skip_bad_images: an unreadable file gets no scores, and the `problem`, instead of an error.

    Raises:
        UserError: the model names no classes, a file is missing or is not a readable image, a folder holds no image,
            `top` is below 1.
    """
    if top < 1:
        raise UserError(f"top {top} must be at least 1")
    files = list(image_files(paths))
    if not subject.label_sets:
        raise UserError(f"{subject.name} has no named classes to answer with; give an image classifier")
    names = subject.label_sets[-1]  # of synonyms the words: timm's first set are WordNet's numbers
    predictions: list[Prediction] = []
    for start in range(0, len(files), batch_size):
        chosen = files[start : start + batch_size]
        opened = [_opened(path, skip_bad_images) for path in chosen]
        scores = iter(_scores(subject, [one for one in opened if not isinstance(one, str)], names, top))
        predictions += [
            Prediction(str(path), [], one) if isinstance(one, str) else Prediction(str(path), next(scores))
            for path, one in zip(chosen, opened, strict=True)
        ]
    return predictions


def _opened(path: Path, skip_bad_images: bool) -> "Image | str":
    """The image, or why it is left out."""
    try:
        return read_image(path)
    except UserError as error:
        if not skip_bad_images:
            raise
        return str(error)


def _scores(
    subject: Subject, images: "Sequence[Image]", names: Sequence[str], top: int
) -> list[list[tuple[str, float]]]:
    """For every image the most likely classes, best first."""
    import torch

    if not images:
        return []
    with torch.inference_mode():
        logits = finite_logits(subject.model, subject.pixel_values(images))
    best = logits.double().softmax(-1).topk(min(top, logits.shape[-1]), dim=-1)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[(names[int(i)], value) for i, value in zip(indices, values, strict=True)] for values, indices in pairs]


def image_files(paths: Iterable[str | os.PathLike[str]]) -> Iterable[Path]:
    """The files, folders replaced by the image files directly inside them."""
    from PIL import Image

    known = Image.registered_extensions()
    for given in paths:
        if "://" in str(given):
            raise UserError(f"{given} is an address; give image files: download it first")
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        inside = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in known and entry.is_file())
        if not inside:
            raise UserError(f"folder {path} holds no image; give image files or a folder with images directly inside")
        yield from inside


def read_image(path: str | os.PathLike[str]) -> "Image":
    """Open an image file of any mode as RGB.

    Raises:
        UserError: the file is missing, or is not a readable image; the message names it.
    """
    from PIL import Image, UnidentifiedImageError

    from hf_vit.data import to_rgb

    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device may never end
        raise UserError(f"{path} is no file; give an image file")
    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except FileNotFoundError as error:
        raise UserError(f"there is no image {path}; check the path") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that can be read; convert it to PNG or JPEG") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{path} is too large to be opened safely ({error}); make it smaller") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow's decoders raise these for truncated or damaged files.
        raise UserError(f"{path} cannot be read ({error}); convert it to PNG or JPEG") from error
