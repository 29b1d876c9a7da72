"""`hf-vit embed`."""

from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import finished_parts, pass_on, stoppable, tell
from hf_vit_cli.options import opt


@options.takes(
    *("batch_size", "max_num_patches", "draft", "streaming", "skip_bad_images", "image_column", "label_column"),
    *("optimize", "device", "runner", "address", "seed"),
)
def embed(
    model: str = options.CHECKPOINT,
    data: str = options.DATA,
    output: str = opt(..., "Folder for the parquet files, or s3://, gs://, hf://datasets/...", show_default=False),
    split: list[str] | None = opt(None, "Split; repeat for more. Default: all."),
    predictions: bool = opt(False, "Write the most likely classes instead of embeddings.", "--predictions"),
    top: int = opt(5, "Classes per prediction.", min=1),
    num_processes: int | None = opt(
        None,
        "Number of processes, each with its own model and GPU if there are any. Default: 1, with Ray one per GPU.",
        min=1,
    ),
    rows_per_file: int = opt(4096, "Images per file; of a stream, every shard becomes one file.", min=1),
    **shared: Any,
) -> None:
    """Write embeddings or predictions of a data set to parquet files; run again to resume."""
    values = pass_on(locals(), "split")
    from hf_vit.display import progress_bar
    from hf_vit.evaluation.embedding import embed as run
    from hf_vit.loading.optimizing import describe_engine

    bar = progress_bar("embedding", "files")
    with stoppable(lambda: finished_parts(output)), bar:
        task = bar.add_task("", total=None)
        result = run(**values, splits=split, report=lambda done, files: bar.update(task, completed=done, total=files))
    if result.engine is not None:
        tell(f"note: {describe_engine(result.engine)}", err=True)
    for note in result.notes:
        tell(f"note: {note}", err=True)
    if result.skipped:
        tell(f"left out {len(result.skipped)} unreadable images: {', '.join(result.skipped[:10])}", err=True)
    before = f" ({result.done_before} were there already)" if result.done_before else ""
    tell(f"{result.rows:,} rows in {len(result.files)} files{before} and manifest.json in {result.folder}")
