"""`hf-vit page`."""

from pathlib import Path
from typing import Annotated

import typer


def page(
    models: Annotated[list[str], typer.Argument(help="Folder, Hub id, or whatever hf-vit convert reads.")],
    output: Annotated[Path, typer.Option(help="New folder for the page.", show_default=False)],
    images: Annotated[
        str | None, typer.Option(metavar="DATA", help="Show test images of this data as examples, as --data elsewhere.")
    ] = None,
    runtime: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with ONNX Runtime Web's files; else fetched once.")
    ] = None,
) -> None:
    """Write a static page that runs models in the visitor's browser: classes, attention, features; all or nothing."""
    from hf_vit.pages.making import make_page

    result = make_page(models, output, images=images, runtime=runtime)
    typer.echo(f"saved in {result.output} ({result.megabytes:.1f} MB, and the runtime)")
    typer.echo(f"see it: python -m http.server --directory {result.output}, then http://localhost:8000")
