"""`hf-vit data`."""

from pathlib import Path
from typing import Any, Literal

from hf_vit_cli import options
from hf_vit_cli.command import print_table, tell
from hf_vit_cli.options import arg, opt

_LISTED = 10


@options.takes("skip_bad_images", "image_column", "label_column")
def data(
    source: str = arg(..., "Data set, as in --data of other commands.", metavar="DATA"),
    output: Path | None = opt(None, "Folder for contact_sheet.png: some images of every class.", file_okay=False),
    target: Literal["label", "mask", "objects"] | None = opt(
        None, "Target: a label per image, a mask (segmentation) or objects (detection).", show_default="as laid out"
    ),
    **shared: Any,
) -> None:
    """Inspect a data set before training: classes, counts, sizes, duplicates, unreadable files."""
    import io

    from hf_vit.data import load_data
    from hf_vit.data.overview import contact_sheet, note_imbalance, overview
    from hf_vit.results.writing import write_atomically

    are_skipped = shared.pop("skip_bad_images")
    images = load_data(source, skip_bad_images=True, multi_label=True, target=target, **shared)
    seen = overview(images)
    splits, parts = list(images.splits), seen.counts.values()
    numbers = {split: images.num_examples(split) or 0 for split in splits}
    rows: list[list[str] | None] = [[name, *(f"{of[split]:,}" for split in splits)] for name, of in seen.counts.items()]
    rows.append(None)
    if seen.unit != "images":
        rows.append([f"all {seen.unit}", *(f"{sum(of[split] for of in parts):,}" for split in splits)])
    rows.append(["all" if seen.unit == "images" else "images", *(f"{number:,}" for number in numbers.values())])
    print_table(rows, "class", *splits, title=f"{images.name}: {sum(numbers.values()):,} images")
    smallest, middle, largest = (f"{height}x{width}" for height, width in seen.sizes)
    tell(f"sizes: {smallest} to {largest} px (height x width), median {middle}")
    modes = ", ".join(f"{mode} {count:,}" for mode, count in seen.modes.items())
    tell(f"modes: {modes} (of {sum(seen.modes.values()):,} images inspected)")
    for remark in (*images.notes, *note_imbalance(images)):
        tell(f"note: {remark}")
    if images.skipped:
        more = ", ..." if len(images.skipped) > _LISTED else ""
        advice = "" if are_skipped else "; other commands need --skip-bad-images to skip them"
        tell(f"unreadable: {len(images.skipped):,} images ({', '.join(images.skipped[:_LISTED])}{more}){advice}")
    if output is not None:
        sheet = io.BytesIO()
        contact_sheet(images).save(sheet, "PNG")
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "contact_sheet.png", sheet.getvalue())
        tell(f"contact sheet: {output / 'contact_sheet.png'}")
