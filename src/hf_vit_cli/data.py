"""`hf-vit data`."""

from pathlib import Path
from typing import Any, Literal

from hf_vit_cli import options
from hf_vit_cli.command import print_safely, print_table
from hf_vit_cli.options import arg, opt


@options.with_options("skip_bad_images", "image_column", "label_column")
def data(
    source: str = arg(..., "Data set, given as in --data of other commands.", metavar="DATA"),
    output: Path | None = opt(
        None, "Folder for contact_sheet.png, which shows some images of every class.", file_okay=False
    ),
    target: Literal["label", "mask", "objects"] | None = opt(
        None,
        "Annotations to read: label (one per image), mask (segmentation) or objects (detection).",
        show_default="as the data set is laid out",
    ),
    **shared: Any,
) -> None:
    """Inspect a data set before training: classes, counts, sizes, duplicates, unreadable files."""
    import io

    from hf_vit.data import load_data
    from hf_vit.data.overview import draw_contact_sheet, note_imbalance, overview
    from hf_vit.data.sources import refuse_output_in
    from hf_vit.display import format_count, shorten_list
    from hf_vit.writing import write_atomically

    refuse_output_in(source, output)
    are_skipped = shared.pop("skip_bad_images")
    images = load_data(source, skip_bad_images=True, multi_label=True, target=target, **shared)
    summary = overview(images)
    splits = list(images.splits)
    split_sizes = [images.num_examples(split) or 0 for split in splits]
    rows: list[list[str] | None] = [
        [name, *(f"{counts[split]:,}" for split in splits)] for name, counts in summary.counts.items()
    ]
    rows.append(None)
    if summary.unit != "images":
        totals = [sum(counts[split] for counts in summary.counts.values()) for split in splits]
        rows.append([f"all {summary.unit}", *(f"{total:,}" for total in totals)])
    rows.append(["all" if summary.unit == "images" else "images", *(f"{size:,}" for size in split_sizes)])
    print_table(rows, "class", *splits, title=f"{images.name}: {sum(split_sizes):,} images")
    smallest, median, largest = (f"{height}x{width}" for height, width in summary.sizes)
    print_safely(f"sizes: {smallest} to {largest} px (height x width), median {median}")
    modes = ", ".join(f"{mode} {count:,}" for mode, count in summary.modes.items())
    print_safely(f"modes: {modes} (of {sum(summary.modes.values()):,} images inspected)")
    for note in (*images.notes, *note_imbalance(images)):
        print_safely(f"note: {note}")
    if images.skipped:
        advice = "" if are_skipped else "; other commands need --skip-bad-images to skip them"
        count = format_count(len(images.skipped), "image")
        print_safely(f"unreadable: {count} ({shorten_list(images.skipped)}){advice}")
    if output is not None:
        sheet = io.BytesIO()
        draw_contact_sheet(images).save(sheet, "PNG")
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "contact_sheet.png", sheet.getvalue())
        print_safely(f"contact sheet: {output / 'contact_sheet.png'}")
