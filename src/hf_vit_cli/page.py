"""`hf-vit page`."""

from pathlib import Path

from hf_vit_cli.command import print_safely
from hf_vit_cli.options import arg, opt


def page(
    models: list[str] = arg(..., "One or more models: folders, Hub ids, or any checkpoints that hf-vit convert reads."),
    output: Path = opt(..., "New folder for the page.", show_default=False),
    images: str | None = opt(
        None, "Data set whose test images are shown as examples; given as in --data of evaluate.", metavar="DATA"
    ),
    runtime: Path | None = opt(
        None, "Folder with the files of ONNX Runtime Web. Default: download them once and cache them.", metavar="DIR"
    ),
) -> None:
    """Write a static web page that runs models in the browser: classes, attention, features."""
    from hf_vit.pages.making import make_page

    result = make_page(models, output, images=images, runtime=runtime)
    print_safely(f"saved in {result.output} ({result.megabytes:.1f} MB without the runtime)")
    print_safely(f"to see it, run python -m http.server --directory {result.output} and open http://localhost:8000")
