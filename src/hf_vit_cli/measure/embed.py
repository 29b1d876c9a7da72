"""`hf-vit embed`."""

from typing import Annotated

import typer

from hf_vit_cli import options
from hf_vit_cli.stopping import finished_parts, stoppable


def embed(
    model: Annotated[str, typer.Argument(help="Folder, Hub id, timm:NAME, or a checkpoint file.", show_default=False)],
    data: options.Data,
    output: Annotated[
        str, typer.Option(help="Folder for the parquet files, or s3://, gs://, hf://datasets/...", show_default=False)
    ],
    split: Annotated[list[str] | None, typer.Option(help="Repeat for more; by default all.")] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="The most likely classes instead of embeddings.")
    ] = False,
    top: Annotated[int, typer.Option(help="Classes a prediction.", min=1)] = 5,
    num_processes: Annotated[
        int | None,
        typer.Option(help="Each with the model, a GPU each where there are; by default 1, of Ray all GPUs.", min=1),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images a forward pass.", min=1)] = 32,
    max_num_patches: options.MaxNumPatches = None,
    draft: options.Draft = False,
    rows_per_file: Annotated[int, typer.Option(help="Images a file; of a stream a shard is a file.", min=1)] = 4096,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while computing.")] = False,
    skip_bad_images: options.SkipBadImages = False,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    optimize: options.Optimize = True,
    device: options.Device = None,
    runner: options.Runner = "local",
    address: options.Address = None,
    seed: Annotated[int, typer.Option(help="Of splits that are cut where the data has none.", min=0)] = 0,
) -> None:
    """Write embeddings or predictions of a data set into parquet files; a stopped run goes on by the same command."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hf_vit.evaluation.embedding import embed as run
    from hf_vit.loading.optimizing import engine_note

    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TextColumn("files"), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with stoppable(lambda: finished_parts(output)), bar:
        task = bar.add_task("", total=None)
        result = run(
            model,
            data,
            output,
            splits=split,
            predictions=predictions,
            top=top,
            num_processes=num_processes,
            batch_size=batch_size,
            max_num_patches=max_num_patches,
            draft=draft,
            rows_per_file=rows_per_file,
            streaming=streaming,
            skip_bad_images=skip_bad_images,
            image_column=image_column,
            label_column=label_column,
            device=device,
            optimize=optimize,
            seed=seed,
            runner=runner,
            address=address,
            report=lambda done, files: bar.update(task, completed=done, total=files),
        )
    if result.engine is not None:
        typer.echo(f"note: {engine_note(result.engine)}", err=True)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if result.skipped:
        typer.echo(f"left out {len(result.skipped)} unreadable images: {', '.join(result.skipped[:10])}", err=True)
    before = f" ({result.done_before} were there already)" if result.done_before else ""
    typer.echo(f"{result.rows:,} rows in {len(result.files)} files{before} and manifest.json in {result.folder}")
