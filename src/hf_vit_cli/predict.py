"""`hf-vit predict`."""

from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import pass_on, print_table, tell
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_vit.evaluation import DensePrediction, Prediction

# What of a prediction is printed: as JSON, the header of its table, and the rows.
Described = tuple[dict[str, Any], list[str], list[list[str]]]


@options.takes("batch_size", "draft", "optimize", "device", "runner", "address")
def predict(
    model: str = options.CHECKPOINT,
    images: list[str] = arg(
        ..., "Image files, folders of images, or patterns ('photos/**/*.jpg').", metavar="IMAGE..."
    ),
    top: int = opt(5, "Classification: number of classes to show per image. Regression models show all values.", min=1),
    threshold: float = opt(0.5, "Detection: smallest score of an object."),
    as_json: bool = options.JSON,
    output: str | None = opt(
        None,
        "Classification: .csv or .parquet file for the predictions (path or URL). Segmentation, "
        "detection: new folder for JSON and pictures.",
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

    Unreadable images are an error, unless --output or --skip-bad-images is given; then they are skipped and reported.
    With --output alone the exit code is still 1, as the table lacks a row.
    """
    values = pass_on(locals(), "as_json")
    from hf_vit.errors import UserError
    from hf_vit.evaluation import predict as run

    every = run(**values, report=lambda line: tell(f"note: {line}", err=True))
    bad = [each for each in every if each.problem is not None]
    if output is None:
        _print([each for each in every if each.problem is None], as_json)
    else:
        tell(f"predictions in {output}")
    for each in bad:
        tell(f"left out: {each.problem}", err=True)
    if bad and not skip_bad_images:
        raise UserError(f"{len(bad):,} could not be read; replace them, or add --skip-bad-images")


def _print(predictions: "Sequence[Prediction | DensePrediction]", as_json: bool) -> None:
    from hf_vit.evaluation import Prediction

    described = [_of_classes(each) if isinstance(each, Prediction) else _of_places(each) for each in predictions]
    if as_json:
        import json

        listed = [{"image": each.image} | told for each, (told, _, _) in zip(predictions, described, strict=True)]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    table: list[list[str] | None] = []
    for each, (_, _, rows) in zip(predictions, described, strict=True):
        table += [*(["" if rank else each.image, *row] for rank, row in enumerate(rows)), None]
    print_table(table, "image", *max((header for _, header, _ in described), key=len, default=["class", "probability"]))


def _of_classes(prediction: "Prediction") -> Described:
    labels, header = prediction.labels, ["output", "value"] if prediction.are_values else ["class", "probability"]
    told: dict[str, Any] = {"predictions": [{"label": name, "score": score} for name, score in prediction.scores]}
    rows = [[name, f"{score:.6g}" if prediction.are_values else f"{score:.2%}"] for name, score in prediction.scores]
    if labels is not None:
        header, told = [*header, "answer"], told | {"labels": labels}
        rows = [[name, score, "yes" if name in labels else "no"] for name, score in rows]
    return told, header, rows


def _of_places(prediction: "DensePrediction") -> Described:
    rows = [
        [
            answer["label"],
            f"{answer['share'] if 'share' in answer else answer['score']:.2%}",
            " ".join(f"{side:.0f}" for side in answer.get("box", ())),
        ]
        for answer in prediction.answers
    ]
    header = ["class", "share of pixels, or score", "box (x1 y1 x2 y2 px)"]
    return {"answers": prediction.answers}, header, rows or [["nothing", "", ""]]
