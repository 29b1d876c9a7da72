"""`hf-vit predict`."""

from typing import TYPE_CHECKING, Annotated

import typer

from hf_vit_cli import options

if TYPE_CHECKING:
    from hf_vit.evaluation import DensePrediction, Prediction


def predict(
    model: Annotated[
        str,
        typer.Argument(help="Model: folder, Hub id, timm:NAME, or a checkpoint file.", show_default=False),
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...",
            help="Image files, folders of images, or patterns ('photos/**/*.jpg').",
            show_default=False,
        ),
    ],
    top: Annotated[
        int,
        typer.Option(
            help="Classifier: classes to show for every image; a regression model gives all its values.", min=1
        ),
    ] = 5,
    threshold: Annotated[float, typer.Option(help="Detector: how sure it must be of an object.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Classifier: write a row an image into this .csv or .parquet file, which may be in an object store, "
            "instead. Masks and boxes: write them, as JSON and pictures, into this new folder.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Unreadable images are no failure: exit code 0.")
    ] = False,
    tiles: Annotated[
        bool,
        typer.Option(
            "--tiles",
            help="Masks and boxes: cut images that are larger than the model's into tiles of its size, which overlap "
            "by a quarter, instead of making them smaller.",
        ),
    ] = False,
    draft: options.Draft = False,
    optimize: options.Optimize = True,
    device: options.Device = None,
    runner: options.Runner = "local",
    address: options.Address = None,
) -> None:
    """Say what images show: the most likely classes, the classes of the pixels, or objects with their boxes.

    An image that cannot be read ends it before anything is said, but for --output and --skip-bad-images: they pass it
    over and tell of it. With --output alone the exit code is 1 then, for a table with a hole.
    """
    from hf_vit.errors import UserError
    from hf_vit.evaluation import DensePrediction
    from hf_vit.evaluation import predict as run

    every = run(
        model,
        images,
        top=top,
        threshold=threshold,
        output=output,
        batch_size=batch_size,
        skip_bad_images=skip_bad_images,
        tiles=tiles,
        draft=draft,
        device=device,
        optimize=optimize,
        runner=runner,
        address=address,
        report=lambda line: typer.echo(f"note: {line}", err=True),
    )
    bad = [each for each in every if each.problem is not None]
    if output is None:
        good = [each for each in every if each.problem is None]
        dense = [each for each in good if isinstance(each, DensePrediction)]
        if dense:
            _print_dense(dense, as_json)
        else:
            _print([each for each in good if not isinstance(each, DensePrediction)], as_json)
    else:
        typer.echo(f"predictions in {output}")
    for each in bad:
        typer.echo(f"left out: {each.problem}", err=True)
    if bad and not skip_bad_images:
        raise UserError(
            f"images are left out: {len(bad):,}; mend them, or say that it is no failure: --skip-bad-images"
        )


def _print(predictions: "list[Prediction]", as_json: bool) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        listed = [
            {"image": each.image, "predictions": [{"label": name, "score": score} for name, score in each.scores]}
            | ({} if each.labels is None else {"labels": each.labels})
            for each in predictions
        ]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    several = any(each.labels is not None for each in predictions)
    are_values = any(each.are_values for each in predictions)
    names = ("output", "value") if are_values else ("class", "probability")
    table = Table("image", *names, *(["answer"] if several else []))
    for each in predictions:
        for rank, (name, score) in enumerate(each.scores):
            answer = ["yes" if name in each.labels else "no"] if each.labels is not None else []
            shown = f"{score:.6g}" if are_values else f"{score:.2%}"
            table.add_row("" if rank else escape(each.image), escape(name), shown, *answer)
        table.add_section()
    Console().print(table)


def _print_dense(predictions: "list[DensePrediction]", as_json: bool) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        listed = [{"image": each.image, "answers": each.answers} for each in predictions]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    table = Table("image", "class", "share of pixels, or score", "box (x1 y1 x2 y2 px)")
    for each in predictions:
        for rank, answer in enumerate(each.answers):
            box = " ".join(f"{side:.0f}" for side in answer.get("box", ()))
            share = answer["share"] if "share" in answer else answer["score"]
            table.add_row("" if rank else escape(each.image), escape(answer["label"]), f"{share:.2%}", box)
        if not each.answers:
            table.add_row(escape(each.image), "nothing", "", "")
        table.add_section()
    Console().print(table)
