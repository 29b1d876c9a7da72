"""`evaluate` and `predict` a model by name, and record the results."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL.Image import Image

from hf_vit.conversion.loading import find_source
from hf_vit.data import ImageData
from hf_vit.data.sources import refuse_output_in
from hf_vit.errors import UserError
from hf_vit.evaluation.prediction import (
    DensePrediction,
    Prediction,
    iterate_predictions,
    list_image_files,
    write_dense_predictions,
    write_predictions,
)
from hf_vit.evaluation.reading import restored_modes
from hf_vit.evaluation.runners import keep_sizes, open_runner, prepare_engine
from hf_vit.families import DenseTask, find_regression_reason, get_first_class_name
from hf_vit.loading.graphs import find_graph
from hf_vit.loading.model import LoadedModel, load_model, refuse_optimized, unwrap_model
from hf_vit.loading.optimizing import describe_engine
from hf_vit.loading.outputs import get_dense_task
from hf_vit.writing import is_writable

if TYPE_CHECKING:
    from hf_vit.evaluation.protocols.registry import ProtocolRun


def evaluate(
    model: Any,
    data: str | Path | ImageData,
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
        data: see `load_data`, or its result.
        protocol: a name in `PROTOCOLS`; by default "segmentation" or "detection" for such models, else "top1".
        output: folder for metrics and plots; by default plots are written to the model's folder. Needed if that folder
            is read-only, where nothing is recorded.
        device: torch device, by default a GPU if there is one.
        command: the command line for the record.
        **options: options of `evaluate_protocol` and of the protocol.

    Returns:
        The run with its `result`, and the `record` with its warnings.

    Raises:
        UserError: see `evaluate_protocol`; or the results cannot be written, in which case the message contains them.
    """
    # Imported here, because protocols take a second to import and `predict` needs none.
    from hf_vit.evaluation.protocols.frame import percent
    from hf_vit.evaluation.protocols.registry import evaluate_protocol
    from hf_vit.evaluation.saving import find_own_plots, save_protocol
    from hf_vit.hub.card import refresh_card

    refuse_output_in(data, output)
    protocol = protocol or _find_dense_task(model) or "top1"
    records_here = output is None and isinstance(model, str | os.PathLike) and Path(model).is_dir()
    if records_here and find_graph(str(model)) is None and not is_writable(model):
        raise UserError(
            f"the folder {model} is read-only, but the results are written to it; add --output DIR (output=...), or "
            "make the folder writable"
        )
    if output is not None:
        output = Path(output).expanduser()
        find_own_plots(output / f"{protocol.replace('-', '_')}.json")
        if isinstance(model, tuple):
            reason = "no file of results can name its weights (leave output out to measure it)"
            refuse_optimized(unwrap_model(cast("tuple[Any, Any]", model)[0]), reason)
    run = evaluate_protocol(protocol, model, data, device=device, **options)
    try:
        run = replace(run, record=save_protocol(run, output, command=command, device=device))
    except (OSError, UserError) as error:
        measured = ", ".join(f"{name} {percent(value)}" for name, value in run.result.headline().items())
        raise UserError(f"{error} (the results are: {measured})") from error
    if (folder := run.examination.loaded.folder) is not None and is_writable(folder):
        refresh_card(folder)
    return run


def predict(
    model: Any,
    images: str | os.PathLike[str] | Image | Iterable[str | os.PathLike[str] | Image],
    *,
    top: int = 5,
    threshold: float = 0.5,
    output: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    skip_bad_images: bool = False,
    tiles: bool = False,
    max_num_patches: int | None = None,
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
        images: an image file, a folder of images, a pattern ("photos/**/*.jpg") or a Pillow image, or several of them;
            give files if there are many, as Pillow images are all kept in memory.
        top: number of classes per image, the most likely first, for a classifier.
        threshold: lowest score of a detected object.
        output: for a classifier a .csv or .parquet file with a row per image, see `write_predictions`; for segmentation
            and detection a new folder, see `write_dense_predictions`.
        batch_size: images per forward pass.
        skip_bad_images: give unreadable images a `problem` and no prediction instead of raising an error.
        tiles: cut images that are larger than the model's into tiles of its size, for segmentation and detection.
        max_num_patches: see `evaluate_protocol`.
        draft: decode JPEG files at the smallest of their scales that is not below the model's size, for a classifier;
            faster, with slightly different pixels.
        device: torch device, by default a GPU if there is one.
        optimize: run a model that is given by name on the engine that pays for so many images (`select_engine`), for
            images of one size.
        runner: "local"; or "ray" for a classifier that is given by name, with one model on every GPU or machine. All
            machines need the model and the images under the same names.
        address: HOST:PORT of a Ray cluster; by default Ray is started on this machine.
        report: receives notices: the engine of an optimized model, and that the scores are values of a regression.

    Returns:
        The predictions; with `output` only those of unreadable images, as all are in the output.

    Raises:
        UserError: the model has no class names, an image is missing or unreadable, or an option does not fit the model.
    """
    image_paths = [images] if isinstance(images, str) or not isinstance(images, Iterable) else list(images)
    num_images = sum(1 for _ in list_image_files(image_paths))  # refuses missing images before the model is loaded
    is_dense = _find_dense_task(model) is not None
    is_named = isinstance(model, str | os.PathLike)
    if runner == "ray" and not is_named:
        raise UserError("Ray cannot load a model object; give the model's folder or Hub id, or leave runner='ray' out")
    if runner == "ray" and is_dense:
        raise UserError("--runner ray does not work with a segmentation or detection model; leave --runner ray out")
    if tiles and not is_dense:
        raise UserError(
            "--tiles only works for segmentation and detection, but this is a classifier; leave --tiles out"
        )
    if draft and is_dense:
        raise UserError("--draft only works for classifiers, not for segmentation and detection; leave --draft out")
    if max_num_patches is not None and (is_dense or draft):
        other = "--draft" if draft else "segmentation and detection"
        raise UserError(f"--max-num-patches does not work with {other}; leave --max-num-patches out")
    options: dict[str, Any] = {"batch_size": batch_size, "skip_bad_images": skip_bad_images or output is not None}
    with restored_modes(model), open_runner(runner, address, device) as ray:
        if is_dense:
            options |= {"threshold": threshold, "tiles": tiles}
            predictions = iterate_predictions(load_model(model, device), image_paths, **options)
            return list(predictions) if output is None else write_dense_predictions(predictions, output)
        loaded = load_model(model, device if ray is None else "cpu", as_classifier=True)
        reason = find_regression_reason(loaded.model)
        if report is not None and reason is not None:
            report(
                f"{loaded.name} is a regression model ({reason}), so its scores are predicted values, not probabilities"
            )
        loaded, max_num_patches = keep_sizes(loaded, max_num_patches, needs_one_size=draft)
        engine, remote = prepare_engine(
            loaded, model, num_images, ray, optimize=optimize, max_num_patches=max_num_patches
        )
        if engine is not None and report is not None:
            report(describe_engine(engine))
        options |= {"top": top, "draft": draft, "remote": remote}
        if output is not None:
            return write_predictions(loaded, image_paths, output, **options)
        return list(iterate_predictions(loaded, image_paths, **options))


def _find_dense_task(model: Any) -> DenseTask | None:
    """Return the dense task of a model, which need not be loaded; None for other models."""
    if isinstance(model, LoadedModel):
        return get_dense_task(model.model)
    if isinstance(model, tuple):
        return get_dense_task(unwrap_model(cast("tuple[Any, Any]", model)[0]))
    return get_dense_task(get_first_class_name(find_source(model).stored.get("architectures")))
