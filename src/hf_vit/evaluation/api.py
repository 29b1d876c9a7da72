"""`evaluate` and `predict`: a model by its name, and what is kept of the result."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.conversion.loading import find_source
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.prediction import (
    DensePrediction,
    Prediction,
    each_prediction,
    image_files,
    write_dense_predictions,
    write_predictions,
)
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.evaluation.runners import choose_engine, running
from hf_vit.families import DenseTask, regression_reason
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import describe_engine
from hf_vit.loading.outputs import get_dense_task

if TYPE_CHECKING:
    from hf_vit.evaluation.protocols.registry import ProtocolRun


def evaluate(
    model: Any,
    data: str | ImageData,
    *,
    protocol: str | None = None,
    output: str | os.PathLike[str] | None = None,
    device: str | None = None,
    command: str | Sequence[str] | None = None,
    **options: Any,
) -> "ProtocolRun":
    """Evaluate a model, and record the result in the facts and card of its folder.

    Args:
        model: see `load_model`: a folder, a Hub id, "timm:NAME", a checkpoint, or (model, image processor).
        data: see `load_data`, or what it gave.
        protocol: of `PROTOCOLS`; None: "segmentation" or "detection" where the model does that, else "top1".
        output: folder for numbers and pictures; by default pictures lie with the model.
        device: torch device; by default a GPU where there is one.
        command: what was typed, for the facts.
        **options: those of `evaluate_protocol`, and those of the protocol.

    Returns:
        What was measured, as `result`, of what, and the `record` of it with its warnings.

    Raises:
        UserError: see `evaluate_protocol`; or nothing can be written there: the message tells what was measured.
    """
    # Not above: `predict` needs no protocol, and what protocols import takes a second.
    from hf_vit.evaluation.protocols.frame import percent
    from hf_vit.evaluation.protocols.registry import evaluate_protocol
    from hf_vit.evaluation.saving import drawn_before, save_protocol
    from hf_vit.hub.card import refresh_card

    refuse_output_in(data, output)
    protocol = protocol or _dense_task(model) or "top1"
    if output is not None:
        drawn_before(Path(output) / f"{protocol.replace('-', '_')}.json")
    run = evaluate_protocol(protocol, model, data, device=device, **options)
    try:
        run = replace(run, record=save_protocol(run, output, command=command, device=device))
    except UserError as error:
        measured = ", ".join(f"{name} {percent(value)}" for name, value in run.result.headline().items())
        raise UserError(f"{error} (measured: {measured})") from error
    if run.examination.subject.folder is not None:
        refresh_card(run.examination.subject.folder)
    return run


def predict(
    model: Any,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    top: int = 5,
    threshold: float = 0.5,
    output: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    tiles: bool = False,
    draft: bool = False,
    device: str | None = None,
    optimize: bool = False,
    runner: str = "local",
    address: str | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Prediction] | list[DensePrediction]:
    """Predict classes, masks or boxes for images.

    Args:
        model: see `load_model`: a folder, a Hub id, "timm:NAME", a checkpoint, or (model, image processor).
        images: an image file, a folder of images or a pattern ("photos/**/*.jpg"), or several of them.
        top: classes an image, the most likely ones, of a classifier.
        threshold: how sure a detector must be of an object.
        output: of a classifier a .csv or .parquet file for the answers, a row an image, see `write_predictions`; of a
            model for masks or boxes a new folder, see `write_dense_predictions`.
        batch_size: images a step.
        skip_bad_images: an unreadable image gets no answer and the `problem`, instead of an error.
        tiles: of a model for masks or boxes: what is larger than its images is cut into tiles of their size.
        draft: decode JPEG files at the smallest of their own scales that covers the size that images are resized to, of
            a classifier: faster, and other pixels by a little.
        device: torch device; by default a GPU where there is one.
        optimize: compute a model that is loaded here by what is fastest for so many images (`select_engine`).
        runner: "local"; or "ray", of a classifier given by its name: a model on every GPU or machine, which share model
            and images under these names.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        report: is told, in one line each, what computes an optimized model, and what says that answers are values.

    Returns:
        The answers; with `output`, which holds them, those to the images that were passed over as unreadable.

    Raises:
        UserError: the model names no classes, there is no such image, it cannot be read, or a classifier is to see
            tiles.
    """
    paths = [images] if isinstance(images, str | os.PathLike) else images
    is_dense, is_named = _dense_task(model) is not None, isinstance(model, str | os.PathLike)
    if runner == "ray" and (is_dense or not is_named):
        what = "a model for masks or boxes" if is_named else "a model that was made in Python"
        raise UserError(f"{what} runs in one process; leave --runner ray out")
    if tiles and not is_dense:
        raise UserError("tiles are for models that predict masks or boxes; leave --tiles out for a classifier")
    if draft and is_dense:
        raise UserError("segmentation and detection decode images in full; leave --draft out")
    options: dict[str, Any] = {"batch_size": batch_size, "skip_bad_images": skip_bad_images or output is not None}
    with running(runner, address, device) as ray:
        if is_dense:
            answers = each_prediction(load_model(model, device), paths, threshold=threshold, tiles=tiles, **options)
            return list(answers) if output is None else write_dense_predictions(answers, output)
        subject = load_model(model, device if ray is None else "cpu", as_classifier=True)
        if report is not None and (reason := regression_reason(subject.model)) is not None:
            report(f"{subject.name} is a regression model ({reason}): its scores are predicted values")
        count = sum(1 for _ in image_files(paths)) if optimize and is_named else None
        engine, remote = choose_engine(subject, model, count, ray, optimize=optimize)
        if engine is not None and report is not None:
            report(describe_engine(engine))
        options |= {"top": top, "draft": draft, "remote": remote}
        if output is not None:
            return write_predictions(subject, paths, output, **options)
        return list(each_prediction(subject, paths, **options))


def _dense_task(model: Any) -> DenseTask | None:
    """Return what a model predicts for the places of an image, before it is opened; None: nothing of the kind."""
    if isinstance(model, LoadedModel | tuple):
        return get_dense_task(model.model if isinstance(model, LoadedModel) else cast("tuple[Any, Any]", model)[0])
    head = find_source(model).dense_head
    return None if head is None else head.task
