"""`hf-vit diff`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import print_tables, tell
from hf_vit_cli.options import arg, opt

_OneMore = "folder, Hub id, user/name@REVISION, timm:NAME, or a file that hf-vit convert reads."


@options.takes(
    *("split", "batch_size", "skip_bad_images", "image_column", "label_column", "device", "seed"),
)
def diff(
    model: str = arg(..., f"Model: {_OneMore}"),
    other: str = arg(..., f"The second model: {_OneMore}"),
    data: str | None = opt(None, "Compare predictions for these images, as in --data of evaluate.", show_default=False),
    output: Path | None = opt(None, "Folder for metrics and plots.", file_okay=False),
    num_images: int | None = opt(None, "With --data: number of images to compare.", min=1),
    **shared: Any,
) -> None:
    """Compare two models or two revisions: config, weights per layer, predictions."""
    from hf_vit.audit.differences import diff as compare_models
    from hf_vit.errors import UserError

    if data is None and (
        num_images or any(shared[name] for name in ("skip_bad_images", "image_column", "label_column"))
    ):
        raise UserError("--num-images, --skip-bad-images and the column options need --data; add it, or leave them out")
    difference = compare_models(model, other, data=data, num_images=num_images, **shared)
    print_tables(difference.tables())
    if output is not None:
        difference.save(output)
        tell(f"metrics and plots in {output}")
