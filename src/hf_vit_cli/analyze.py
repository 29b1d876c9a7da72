"""`hf-vit analyze`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import (
    collect_options,
    describe_progress,
    format_command,
    handle_interrupt,
    print_notes,
    print_safely,
)
from hf_vit_cli.options import arg, opt


@options.with_options("device", "optimize")
def analyze(
    context: typer.Context,
    model: str = arg(..., "Model: folder, Hub id, timm:NAME or checkpoint file; or a folder of checkpoints."),
    output: Path = opt(..., "Folder for metrics, plots and the report.", file_okay=False),
    images: str | None = opt(
        None, "Images to analyze: a folder of images, or a data set as in --data of evaluate.", show_default=False
    ),
    only: list[str] | None = opt(None, "Name of an analysis to run; repeat for more. Default: all."),
    against: str | None = opt(None, "For cka_between: second model to compare with."),
    cue_conflict: Path | None = opt(
        None, "For shape_bias: folder of cue-conflict images named like cat7-elephant1.png (shape, then texture)."
    ),
    class_map: Path | None = opt(
        None, 'JSON file that maps the classes of --cue-conflict to model labels: {"cat": ["tabby", ...], ...}.'
    ),
    num_images: int = opt(128, "Number of images to average over.", min=1),
    num_pictures: int = opt(4, "Number of images for which maps are plotted.", min=1),
    split: str = opt("test", "Split of --images: train, validation or test."),
    streaming: bool = opt(False, "Read the data as a stream; only its first images are used.", "--streaming"),
    batch_size: int = opt(8, "Images per forward pass.", min=1),
    cka_batch_size: int = opt(64, "For cka: images per minibatch.", min=4),
    rollout_identity: float = opt(0.5, "For rollout: weight of the residual connection, from 0 to below 1."),
    picture_format: str = opt("png", "Plot format: png or svg."),
    seed: int = opt(0, "Random seed for drawing images.", min=0),
    **shared: Any,
) -> None:
    """Analyze a model: attention, filters, positions, CKA, inductive biases; as JSON, plots and HTML."""
    values = collect_options(locals(), "model", "images", "output", "streaming")
    from hf_vit.analysis import AnalysisSettings, analyze_stages, stage_folders
    from hf_vit.analysis import analyze as run_analyses
    from hf_vit.data import load_data
    from hf_vit.errors import UserError

    if picture_format not in ("png", "svg"):
        raise UserError(f"--picture-format {picture_format} is unknown; use png or svg")
    settings = {field.name: values.pop(field.name) for field in fields(AnalysisSettings)}
    values["settings"] = AnalysisSettings(**settings)
    has_stages = bool(stage_folders(model))
    run_analysis: Any = analyze_stages if has_stages else run_analyses
    if not has_stages:  # stages are not recorded in the facts of one model
        values["command"] = format_command(context)
    with handle_interrupt(lambda: describe_progress(output)):
        source: object = images
        if streaming and images is not None:
            source = load_data(images, streaming=True, skip_bad_images=True)
        run = run_analysis(model, source, output, **values, report=print_safely)
    if not has_stages:
        print_notes(run.images.notes, run.images.skipped)
        for name, reason in run.left_out.items():
            print_safely(f"did not run {name}: {reason}")
        if run.record is not None:
            print_safely(f"recorded in {run.subject.folder / 'facts.json'}")
    print_safely(f"report in {output / 'report.html'}")
