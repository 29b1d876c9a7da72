"""`hf-vit predict`."""

from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, print_safely, print_table
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_vit.evaluation import DensePrediction, Prediction


class FormattedPrediction(NamedTuple):
    """A prediction as JSON with the name of its image, and as header and rows of a table."""

    content: dict[str, Any]
    header: list[str]
    rows: list[list[str]]


@options.with_options("batch_size", "max_num_patches", "draft", "optimize", "device", "runner", "address")
def predict(
    model: str = options.CHECKPOINT,
    images: list[str] = arg(
        ...,
        "Images: files, folders (also of classes or IDX), or patterns such as 'photos/**/*.jpg'.",
        metavar="IMAGE...",
    ),
    top: int = opt(5, "Classification: number of classes to show per image. Regression models show all values.", min=1),
    threshold: float = opt(0.5, "Detection: minimum score of an object."),
    as_json: bool = options.JSON,
    output: str | None = opt(
        None,
        "Classification: .csv or .parquet file for the predictions (path or URL). Segmentation, "
        "detection: new folder for JSON and plots.",
        metavar="PATH",
    ),
    skip_bad_images: bool = opt(False, "Skip unreadable images and exit with code 0.", "--skip-bad-images"),
    tiles: bool = opt(
        False,
        "Segmentation, detection: cut large images into overlapping tiles of the model's size instead "
        "of resizing them.",
        "--tiles",
    ),
    **shared: Any,
) -> None:
    """Predict classes, masks or boxes for images.

    An unreadable image is an error. With --output its entry states the problem, and the exit code is 1 once the others
    are written; with --skip-bad-images it is reported, and the exit code is 0.
    """
    values = collect_options(locals(), "as_json")
    from hf_vit.display import format_count
    from hf_vit.errors import UserError
    from hf_vit.evaluation import predict as run

    if as_json and output is not None:
        raise UserError(f"--json prints predictions, but --output {output} takes them; leave one of them out")
    predictions = run(**values, report=lambda line: print_safely(f"note: {line}", err=True))
    unreadable = [prediction for prediction in predictions if prediction.problem is not None]
    if output is None:
        _print_predictions([prediction for prediction in predictions if prediction.problem is None], as_json)
    else:
        print_safely(f"predictions in {output}")
    for prediction in unreadable:
        print_safely(f"skipped: {prediction.problem}", err=True)
    if unreadable and not skip_bad_images:
        count = format_count(len(unreadable), "image")
        raise UserError(f"{count} could not be read; replace unreadable images, or add --skip-bad-images")


def _print_predictions(predictions: "Sequence[Prediction | DensePrediction]", as_json: bool) -> None:
    """Print predictions as JSON or as one table."""
    from hf_vit.evaluation import Prediction

    entries = [
        _format_classes(prediction) if isinstance(prediction, Prediction) else _format_dense(prediction)
        for prediction in predictions
    ]
    if as_json:
        import json

        typer.echo(json.dumps([entry.content for entry in entries], indent=2))
        return
    table: list[list[str] | None] = []
    for entry in entries:
        # The first row of an image names it; a line follows the last one.
        table += [*(["" if rank else entry.content["image"], *row] for rank, row in enumerate(entry.rows)), None]
    headers = [entry.header for entry in entries]
    print_table(table, "image", *max(headers, key=len, default=["class", "probability"]))


def _format_classes(prediction: "Prediction") -> FormattedPrediction:
    """Return the formatted classes of an image, or the values of a regression model."""
    labels = prediction.labels  # of a multi-label model, else None
    number_format = ".6g" if prediction.are_values else ".2%"
    scores = [{"label": name, "score": score} for name, score in prediction.scores]
    content: dict[str, Any] = {"image": prediction.image, "predictions": scores}
    header = ["output", "value"] if prediction.are_values else ["class", "probability"]
    rows = [[name, format(score, number_format)] for name, score in prediction.scores]
    if labels is not None:
        content["labels"] = labels
        header.append("predicted")
        for row in rows:
            row.append("yes" if row[0] in labels else "no")
    return FormattedPrediction(content, header, rows)


def _format_dense(prediction: "DensePrediction") -> FormattedPrediction:
    """Return the formatted classes of pixels, or the objects with their boxes."""
    rows: list[list[str]] = []
    for answer in prediction.answers:
        share_or_score = answer["share"] if "share" in answer else answer["score"]
        box = " ".join(f"{side:.0f}" for side in answer.get("box", ()))
        rows.append([answer["label"], f"{share_or_score:.2%}", box])
    header = ["class", "share of pixels, or score", "box (x1 y1 x2 y2 px)"]
    content = {"image": prediction.image, "answers": prediction.answers}
    return FormattedPrediction(content, header, rows or [["nothing found", "", ""]])
