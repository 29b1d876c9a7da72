"""`hf-vit embed`."""

from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, describe_progress, handle_interrupt, print_notes, print_safely
from hf_vit_cli.options import opt


@options.with_options(
    *("batch_size", "max_num_patches", "draft", "streaming", "skip_bad_images", "image_column", "label_column"),
    *("optimize", "device", "runner", "address", "seed", "features", "layers", "norm"),
)
def embed(
    model: str = options.CHECKPOINT,
    data: str = options.DATA,
    output: str = opt(
        ..., "Folder for the parquet files, or a URL: s3://, gs://, hf://datasets/...", show_default=False
    ),
    split: list[str] | None = opt(None, "Split of the data set; repeat for more. Default: all."),
    predictions: bool = opt(False, "Write the most likely classes instead of embeddings.", "--predictions"),
    top: int = opt(5, "With --predictions: number of classes per image.", min=1),
    num_processes: int | None = opt(
        None,
        "Number of processes; each loads the model, on its own GPU if there are several. Default: 1, with Ray "
        "one per GPU.",
        min=1,
    ),
    rows_per_file: int = opt(4096, "Images per parquet file; from a stream, every shard becomes one file.", min=1),
    **shared: Any,
) -> None:
    """Write embeddings or predictions of a data set to parquet files; run again to resume."""
    values = collect_options(locals(), "split")
    from hf_vit.display import format_count, make_progress_bar
    from hf_vit.evaluation.embedding import embed as run
    from hf_vit.loading.optimizing import describe_engine

    bar = make_progress_bar("embedding", "files")
    with handle_interrupt(lambda: describe_progress(output)), bar:
        task = bar.add_task("", total=None)
        result = run(**values, splits=split, report=lambda done, files: bar.update(task, completed=done, total=files))
    if result.engine is not None:
        print_safely(f"note: {describe_engine(result.engine)}", err=True)
    print_notes(result.notes, result.skipped)
    resumed_note = f" ({result.done_before} already written)" if result.done_before else ""
    counts = f"{format_count(result.rows, 'row')} in {format_count(len(result.files), 'file')}{resumed_note}"
    print_safely(f"{counts} and manifest.json in {result.folder}")
