"""`hf-vit analyze`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import command_line, finished_parts, stoppable
from hf_vit_cli.options import arg, opt


@options.takes("device", "optimize")
def analyze(
    context: typer.Context,
    model: Annotated[str, arg("Folder, Hub id, timm:NAME, a checkpoint file, or a folder of checkpoints.")],
    output: Annotated[Path, opt("Folder for numbers, plots and the report.", file_okay=False)],
    images: Annotated[
        str | None,
        opt(
            "A folder of images, or data: digits, photos, class folders, parquet or webdataset files, a Hub id.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[list[str] | None, opt("Analysis to run; repeat for more. Default: all.")] = None,
    against: Annotated[str | None, opt("A second model to compare with (CKA).")] = None,
    cue_conflict: Annotated[
        Path | None, opt("Images named like cat7-elephant1.png (shape-texture), for shape_bias.")
    ] = None,
    class_map: Annotated[
        Path | None, opt('JSON: their classes and the model\'s labels, {"cat": ["tabby", ...], ...}.')
    ] = None,
    num_images: Annotated[int, opt("Images to average over.", min=1)] = 128,
    num_pictures: Annotated[int, opt("Images to plot maps of.", min=1)] = 4,
    split: Annotated[str, opt("Split of --images: train, validation or test.")] = "test",
    streaming: Annotated[
        bool, opt("Read the data as a stream; only its first images are used.", "--streaming")
    ] = False,
    batch_size: Annotated[int, opt("Images per forward pass.", min=1)] = 8,
    cka_batch_size: Annotated[int, opt("Images per minibatch of CKA.", min=4)] = 64,
    rollout_identity: Annotated[
        float, opt("Share of the identity matrix (residual connection) in attention rollout: 0 to below 1.")
    ] = 0.5,
    picture_format: Annotated[str, opt("Plot format: png or svg.")] = "png",
    seed: Annotated[int, opt("Random seed for drawing images.", min=0)] = 0,
    **shared: Any,
) -> None:
    """Analyze a model: attention, filters, positions, CKA, inductive biases; as JSON, plots and HTML."""
    from hf_vit.analysis import AnalysisSettings, analyze_stages, stage_folders
    from hf_vit.analysis import analyze as run_analyses
    from hf_vit.data import load_data
    from hf_vit.errors import UserError

    if picture_format not in ("png", "svg"):
        raise UserError(f"unknown plot format '{picture_format}'; choose png or svg")
    settings = AnalysisSettings(
        num_images=num_images,
        batch_size=batch_size,
        num_pictures=num_pictures,
        rollout_identity=rollout_identity,
        cka_batch_size=cka_batch_size,
        seed=seed,
    )
    is_run = bool(stage_folders(model))
    make: Any = partial(
        analyze_stages if is_run else partial(run_analyses, command=command_line(context)),
        only=only,
        against=against,
        cue_conflict=cue_conflict,
        class_map=class_map,
        settings=settings,
        split=split,
        picture_format=picture_format,
        report=typer.echo,
        **shared,
    )
    with stoppable(lambda: finished_parts(output)):
        source: object = images
        if streaming and images is not None:
            source = load_data(images, streaming=True, skip_bad_images=True)
        run = make(model, source, output)
    if is_run:
        typer.echo(f"report in {output / 'report.html'}")
        return
    for note in run.images.notes:
        typer.echo(f"note: {note}", err=True)
    for name, reason in run.left_out.items():
        typer.echo(f"{name}: left out, {reason}")
    if run.images.skipped:
        typer.echo(f"{len(run.images.skipped)} unreadable images left out: {', '.join(run.images.skipped)}")
    if run.record is not None:
        typer.echo(f"recorded in {run.subject.folder / 'facts.json'}")
    typer.echo(f"report in {output / 'report.html'}")
