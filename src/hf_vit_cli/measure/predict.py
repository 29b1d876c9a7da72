"""`hf-vit predict`."""

from typing import Annotated

import typer

from hf_vit_cli import options


def predict(
    model: Annotated[
        str,
        typer.Argument(help="Image classifier: folder, Hub id, timm:NAME, or a checkpoint file.", show_default=False),
    ],
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Image files, or folders of images.", show_default=False)
    ],
    top: Annotated[int, typer.Option(help="Classes to show for every image.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    skip_bad_images: options.SkipBadImages = False,
    device: options.Device = None,
) -> None:
    """Say what images show: the most likely classes with their probabilities."""
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hf_vit.evaluation import predict_images
    from hf_vit.subjects.subject import open_subject

    subject = open_subject(model, device, as_classifier=True)
    every = predict_images(subject, images, top=top, batch_size=batch_size, skip_bad_images=skip_bad_images)
    predictions = [found for found in every if found.problem is None]
    for found in every:
        if found.problem is not None:
            typer.echo(f"left out: {found.problem}", err=True)
    if as_json:
        listed = [
            {"image": found.image, "predictions": [{"label": name, "score": score} for name, score in found.scores]}
            for found in predictions
        ]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    table = Table("image", "class", "probability")
    for found in predictions:
        for rank, (name, score) in enumerate(found.scores):
            table.add_row("" if rank else escape(found.image), escape(name), f"{score:.2%}")
        table.add_section()
    Console().print(table)
