"""`hf-vit page`."""

from pathlib import Path

from hf_vit_cli.command import tell
from hf_vit_cli.options import arg, opt


def page(
    models: list[str] = arg(..., "Folder, Hub id, or whatever hf-vit convert reads."),
    output: Path = opt(..., "New folder for the page.", show_default=False),
    images: str | None = opt(
        None, "Show test images of this data set as examples; same values as --data.", metavar="DATA"
    ),
    runtime: Path | None = opt(
        None, "Folder with the files of ONNX Runtime Web. Default: download them once.", metavar="DIR"
    ),
) -> None:
    """Write a static web page that runs models in the browser: classes, attention, features."""
    from hf_vit.pages.making import make_page

    result = make_page(models, output, images=images, runtime=runtime)
    tell(f"saved in {result.output} ({result.megabytes:.1f} MB, and the runtime)")
    tell(f"see it: python -m http.server --directory {result.output}, then http://localhost:8000")
