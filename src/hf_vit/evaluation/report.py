"""What is kept of an evaluation: a record in facts.json, pictures, and a card that shows both."""

import os
from collections.abc import Sequence
from pathlib import Path

from hf_vit.evaluation.plots import CONFUSION_MATRIX_NAME, WRONG_IMAGES_NAME, plot_confusion_matrix, plot_wrong_images
from hf_vit.evaluation.protocols.top1 import ClassificationResult
from hf_vit.results.facts import DataFact, Record, append_record, new_record


def save_evaluation(
    folder: str | os.PathLike[str],
    result: ClassificationResult,
    *,
    data: DataFact,
    command: str | Sequence[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    pictures: str | os.PathLike[str] | None = None,
) -> Record:
    """Append an evaluation to `folder/facts.json` and draw its pictures.

    Args:
        folder: the model's folder.
        data: which images were evaluated; its size is taken from the result.
        command: what was typed; this process' own arguments by default.
        seed: seed of the data split.
        device: torch device the evaluation ran on.
        pictures: another folder for the pictures; they then do not appear in the card.
    """
    here = pictures is None or Path(pictures).resolve() == Path(folder).resolve()
    names = draw_evaluation(folder if pictures is None else pictures, result, data)
    values = result.values() | ({"pictures": names} if here and names else {})
    data = data.model_copy(update={"size": result.num_images})
    record = new_record(
        "evaluation", values=values, command=command, seed=seed, data=data, seconds=result.seconds, device=device
    )
    append_record(folder, record)
    return record


def draw_evaluation(folder: str | os.PathLike[str], result: ClassificationResult, data: DataFact) -> list[str]:
    """Write the confusion matrix and the wrongly classified images as PNG; a picture of an earlier run is replaced.

    Returns:
        The names of the files written: no matrix above 1,000 classes, no images where none was wrong.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    if result.confusion_matrix is not None:
        title = " ".join(part for part in (data.name, data.split) if part)
        plot_confusion_matrix(
            result.confusion_matrix, result.label_names, Path(folder) / CONFUSION_MATRIX_NAME, title=title
        )
        written.append(CONFUSION_MATRIX_NAME)
    if result.wrong:
        plot_wrong_images(result.wrong, Path(folder) / WRONG_IMAGES_NAME)
        written.append(WRONG_IMAGES_NAME)
    for name in {CONFUSION_MATRIX_NAME, WRONG_IMAGES_NAME} - set(written):
        (Path(folder) / name).unlink(missing_ok=True)
    return written
