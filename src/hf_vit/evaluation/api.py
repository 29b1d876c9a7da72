"""The doors of `hf-vit evaluate` and `hf-vit predict`: a model by its name, and what is kept of the result."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_vit.data import ImageData
from hf_vit.evaluation.prediction import Prediction, predict_images, write_predictions
from hf_vit.evaluation.protocols.registry import ProtocolRun, evaluate_protocol
from hf_vit.evaluation.saving import save_protocol
from hf_vit.hub.card import refresh_card
from hf_vit.subjects.subject import open_subject


def evaluate(
    model: Any,
    data: str | ImageData,
    *,
    protocol: str = "top1",
    output: str | os.PathLike[str] | None = None,
    device: str | None = None,
    command: str | Sequence[str] | None = None,
    **options: Any,
) -> ProtocolRun:
    """Measure an image classifier, and keep the result: in the facts and the card of its folder, where it has one.

    Args:
        model: see `open_subject`: a folder, a Hub id, "timm:NAME", a checkpoint, or (model, image processor).
        data: see `load_data`, or what it gave.
        protocol: of `PROTOCOLS`.
        output: folder for numbers and pictures; by default pictures lie with the model.
        device: torch device; by default a GPU where there is one.
        command: what was typed, for the facts.
        **options: `split`, `num_images`, `batch_size`, `max_num_patches`, `seed`, `streaming` and the others of
            `evaluate_protocol`, and those of the protocol.

    Returns:
        What was measured, as `result`, of what, and the `record` of it with its warnings.

    Raises:
        UserError: see `evaluate_protocol`; or nothing can be written there.
    """
    run = evaluate_protocol(protocol, model, data, device=device, **options)
    run = replace(run, record=save_protocol(run, output, command=command, device=device))
    if run.examination.subject.folder is not None:
        refresh_card(run.examination.subject.folder)
    return run


def predict(
    model: Any,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    output: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    device: str | None = None,
) -> list[Prediction]:
    """Say what images show.

    Args:
        model: see `open_subject`: a folder, a Hub id, "timm:NAME", a checkpoint, or (model, image processor).
        images: an image file, a folder of images or a pattern ("photos/**/*.jpg"), or several of them.
        top: classes an image, the most likely ones.
        output: .csv or .parquet file for the answers, a row an image; see `write_predictions`.
        batch_size: images a step.
        skip_bad_images: an unreadable image gets no answer and the `problem`, instead of an error.
        device: torch device; by default a GPU where there is one.

    Returns:
        The answers; with `output`, which holds them, those to the images that were passed over as unreadable.

    Raises:
        UserError: the model names no classes, there is no such image, or it cannot be read.
    """
    paths = [images] if isinstance(images, str | os.PathLike) else images
    subject = open_subject(model, device, as_classifier=True)
    if output is not None:
        return write_predictions(subject, paths, output, top=top, batch_size=batch_size)
    return predict_images(subject, paths, top=top, batch_size=batch_size, skip_bad_images=skip_bad_images)
