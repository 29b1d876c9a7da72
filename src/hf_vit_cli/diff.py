"""`hf-vit diff`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import print_safely, print_tables
from hf_vit_cli.options import arg, opt

_MODEL_FORMS = "folder, Hub id, user/name@REVISION, timm:NAME, or any checkpoint that hf-vit convert reads."


@options.with_options(*("split", "batch_size", "skip_bad_images", "image_column", "label_column", "device", "seed"))
def diff(
    model: str = arg(..., f"First model: {_MODEL_FORMS}"),
    other: str = arg(..., f"Second model: {_MODEL_FORMS}"),
    data: str | None = opt(
        None, "Also compare predictions on this data set, given as in --data of evaluate.", show_default=False
    ),
    output: Path | None = opt(
        None,
        "Folder for diff.json and a plot of disagreements; created if needed. Default: only print.",
        file_okay=False,
    ),
    num_images: int | None = opt(None, "With --data: number of images to compare predictions on.", min=1),
    **shared: Any,
) -> None:
    """Compare two models or two revisions: config, weights per layer, predictions."""
    from hf_vit.audit.differences import diff as compare_models
    from hf_vit.data.sources import refuse_output_in
    from hf_vit.errors import UserError

    if data is None and (
        num_images or any(shared[name] for name in ("skip_bad_images", "image_column", "label_column"))
    ):
        raise UserError(
            "--num-images, --skip-bad-images and the column options only work with --data; add --data, or "
            "leave them out"
        )
    refuse_output_in(data, output)
    difference = compare_models(model, other, data=data, num_images=num_images, **shared)
    print_tables(difference.tables())
    if output is not None:
        difference.save(output)
        print_safely(f"metrics and plots in {output}")
