"""What models of segmentation and detection say of image files: answers, masks and pictures."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_vit.data.overview import paint_classes, paint_objects
from hf_vit.data.tiles import Tiles
from hf_vit.errors import UserError
from hf_vit.evaluation.prediction import image_files, opened_images
from hf_vit.evaluation.reading import enough_for
from hf_vit.loading.model import LoadedModel, label_names_of
from hf_vit.loading.outputs import dense_task_of, detect, segment
from hf_vit.results.delivery import free_folder, new_folder
from hf_vit.results.writing import saying_why

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

PREDICTIONS_NAME = "predictions.json"


@dataclass(frozen=True)
class DensePrediction:
    """What a model of segmentation or detection says of one image file; or why it says nothing.

    Attributes:
        image: the file.
        answers: of segmentation every class that was seen, {"label", "share" of the pixels}, the largest first; of
            detection every object, {"label", "score", "box": [x1, y1, x2, y2] px}, the surest first.
        problem: why there is no answer.
        mask: [H, W] uint8: of segmentation the class of every pixel; of a detector with masks the number of the answer
            that is seen there, from 1 on, and 0 for the ground; None where there is none.
        picture: the image with the answers drawn into it.
    """

    image: str
    answers: list[dict[str, Any]]
    problem: str | None = None
    mask: "NDArray[np.uint8 | np.uint16] | None" = field(default=None, compare=False, repr=False)
    picture: "Image | None" = field(default=None, compare=False, repr=False)


def each_dense_prediction(
    subject: LoadedModel,
    paths: Sequence[str | os.PathLike[str]],
    *,
    threshold: float = 0.5,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    tiles: bool = False,
) -> Iterator[DensePrediction]:
    """Predict image files, and the images of folders, one after the other.

    Args:
        subject: a model of segmentation or detection; see `load_model`.
        paths, batch_size, skip_bad_images: as for `predict_images`.
        threshold: how sure a detector must be of an object.
        tiles: what is larger than the model's images is not made smaller, but cut into tiles of their size that
            overlap by a quarter; see `Tiles.join_classes` and `Tiles.join_boxes`. A detector draws no masks then.

    Raises:
        UserError: a file is missing or unreadable, or the threshold is no probability.
    """
    if not 0 <= threshold < 1:
        raise UserError(f"threshold {threshold} must be at least 0 and below 1")
    files = list(image_files(paths))
    for start in range(0, len(files), batch_size):
        chosen = files[start : start + batch_size]
        opened = opened_images(chosen, skip_bad_images)
        images = [one for one in opened if not isinstance(one, str)]
        said = _said_by_tiles(subject, images, threshold, batch_size) if tiles else _said(subject, images, threshold)
        for path, one in zip(chosen, opened, strict=True):
            told = {"answers": [], "problem": one} if isinstance(one, str) else next(said)
            yield DensePrediction(str(path), **told)


def write_dense_predictions(
    predictions: Iterator[DensePrediction], output: str | os.PathLike[str]
) -> list[DensePrediction]:
    """Write answers into a new folder, which appears complete or not at all.

    It holds predictions.json, a list of {"image", "answers", "mask", "picture", "problem"} (what there is of them), and
    the PNG files that these name: masks/NAME.png and pictures/NAME.png.

    Returns:
        The images that were passed over.

    Raises:
        UserError: the folder is not empty, nothing can be written there, or there is no image.
    """
    place, names = free_folder(Path(output)), set[str]()
    passed_over, listed = list[DensePrediction](), list[dict[str, Any]]()
    with new_folder(place) as folder:
        for each in predictions:
            entry: dict[str, Any] = {"image": each.image}
            listed.append(entry)
            if each.problem is not None:
                passed_over.append(each)
                entry["problem"] = each.problem
                continue
            entry["answers"] = each.answers
            entry |= _drawn(each, folder, _free_name(Path(each.image).stem, names))
        with saying_why(place):
            (folder / PREDICTIONS_NAME).write_text(json.dumps(listed, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return passed_over


def _drawn(prediction: DensePrediction, folder: Path, name: str) -> dict[str, str]:
    """Write mask and picture; returns what predictions.json says of them."""
    from PIL import Image

    mask = None if prediction.mask is None else Image.fromarray(prediction.mask)
    written: dict[str, str] = {}
    for key, image in (("mask", mask), ("picture", prediction.picture)):
        if image is not None:
            written[key] = f"{key}s/{name}.png"
            with saying_why(folder):
                (folder / f"{key}s").mkdir(exist_ok=True)
                image.save(folder / written[key])
    return written


def _free_name(stem: str, names: set[str]) -> str:
    """A name that no other image has, on file systems that know no case, too."""
    name = next(each for number in count() if (each := stem + (f"-{number}" if number else "")).lower() not in names)
    names.add(name.lower())
    return name


def _said(subject: LoadedModel, images: "Sequence[Image]", threshold: float) -> Iterator[dict[str, Any]]:
    """Answers, mask and picture of every image."""
    for image, each in zip(images, _predicted(subject, images, threshold), strict=True):
        yield _told(subject, image, each)


def _said_by_tiles(
    subject: LoadedModel, images: "Sequence[Image]", threshold: float, batch_size: int
) -> Iterator[dict[str, Any]]:
    """As `_said`, one image after the other, `batch_size` tiles a step."""
    for image in images:
        tiles = Tiles((image.height, image.width), subject.input_size, min(subject.input_size) // 4)
        crops = tiles.crops(image)
        predicted: list[Any] = []
        while batch := list(islice(crops, batch_size)):
            predicted += _predicted(subject, batch, threshold)
        if len(tiles) == 1:
            joined: Any = predicted[0]
        elif dense_task_of(subject.model) == "segmentation":
            joined = tiles.join_classes(predicted)
        else:
            joined = tiles.join_boxes(predicted)
        yield _told(subject, image, joined)


def _predicted(subject: LoadedModel, images: "Sequence[Image]", threshold: float) -> list[Any]:
    """On the CPU: of segmentation the class of every pixel [H, W] of each image, else its objects by name."""
    if not images:
        return []
    model, processor = subject.model, subject.processor
    pixel_values, sizes = subject.pixel_values(images), [(image.height, image.width) for image in images]
    with torch.inference_mode(), enough_for(pixel_values):
        if dense_task_of(model) == "segmentation":
            return [each.cpu() for each in segment(model, processor, pixel_values, sizes)]
        objects = detect(model, processor, pixel_values, sizes, threshold=threshold)
    return [{name: value.cpu() for name, value in each.items()} for each in objects]


def _told(subject: LoadedModel, image: "Image", predicted: Any) -> dict[str, Any]:
    describe = _segmented if dense_task_of(subject.model) == "segmentation" else _detected
    return describe(image, predicted, label_names_of(subject.model))


def _segmented(image: "Image", classes: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    shares = torch.bincount(classes.flatten().long(), minlength=len(names)).double() / classes.numel()
    order = shares.argsort(descending=True, stable=True).tolist()
    return {
        "answers": [{"label": names[k], "share": float(shares[k])} for k in order if shares[k]],
        "mask": classes.numpy().astype(np.uint8 if len(names) <= 256 else np.uint16),
        "picture": paint_classes(image, classes, len(names)),
    }


def _detected(image: "Image", objects: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    told = zip(objects["labels"].tolist(), objects["scores"].tolist(), objects["boxes"].tolist(), strict=True)
    mask: NDArray[np.uint8] | None = None
    if "masks" in objects:
        mask = np.zeros((image.height, image.width), dtype=np.uint8)
        for number, seen in reversed(list(enumerate(objects["masks"].numpy()))):  # the surest on top
            mask[seen] = min(number + 1, 255)
    return {
        "answers": [{"label": names[k], "score": score, "box": box} for k, score, box in told],
        "mask": mask,
        "picture": paint_objects(image, objects, names),
    }
