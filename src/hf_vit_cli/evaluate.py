"""`hf-vit evaluate`."""

from pathlib import Path
from typing import Any, cast

import typer

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, format_command, print_notes, print_safely, print_tables
from hf_vit_cli.options import opt


@options.with_options(
    *("split", "batch_size", "skip_bad_images", "image_column", "label_column", "streaming", "optimize"),
    *("device", "runner", "address", "seed", "max_num_patches", "draft", "features", "layers", "norm"),
)
def evaluate(
    context: typer.Context,
    model: str = options.CHECKPOINT,
    data: str = options.DATA,
    protocol: str | None = opt(
        None,
        "Protocol: top1, few-shot, linear-probe, knn, calibration, robustness, corruptions, patch-drop, multi-label, "
        "real, objectnet, vtab, segmentation or detection. Default: top1, or the model's task.",
        show_default=False,
    ),
    output: Path | None = opt(
        None, "Folder for metrics and plots. Default: the model's folder, metrics in facts.json.", file_okay=False
    ),
    num_images: int | None = opt(None, "Evaluate on this many randomly drawn images. Default: all.", min=1),
    shots: list[int] | None = opt(None, "few-shot: training images per class; repeat for more."),
    trials: int | None = opt(None, "few-shot: number of random draws of the training images."),
    neighbors: list[int] | None = opt(None, "knn: number of neighbors; repeat for more."),
    temperature: bool | None = opt(
        None, "calibration: fit a temperature on the validation split.", "--temperature/--no-temperature"
    ),
    epsilons: list[float] | None = opt(
        None, "robustness: size of the perturbation in units of 1/255; repeat for more."
    ),
    steps: int | None = opt(None, "robustness: number of PGD steps."),
    kinds: list[str] | None = opt(None, "corruptions: kind of corruption; repeat for more."),
    patch_size: int | None = opt(None, "patch-drop: patch size in pixels; default: the model's."),
    fill: str | None = opt(None, "patch-drop: color of dropped patches, mean (the image's mean) or black."),
    real_labels: str | None = opt(
        None,
        "real: file real.json with the ReaL labels, from github.com/google-research/reassessed-imagenet.",
        metavar="FILE",
    ),
    mappings: str | None = opt(None, "objectnet: the folder 'mappings' of objectnet-1.0.", metavar="DIR"),
    **shared: Any,
) -> None:
    """Evaluate a model: accuracy, calibration, results per class; mIoU of masks, AP of boxes; or another protocol."""
    values = collect_options(locals())
    from hf_vit.evaluation import evaluate as measure
    from hf_vit.loading.optimizing import describe_engine
    from hf_vit.writing import is_writable

    # Only the options that were given, as a protocol refuses options of other protocols.
    values = {name: value for name, value in values.items() if value not in (None, [], ())}
    run = measure(**values, command=format_command(context))
    print_notes(run.examination.data.notes)
    if run.engine is not None:
        print_safely(f"note: {describe_engine(run.engine)}", err=True)
    print_tables(run.result.tables(run.examination.describe_images(run.result.num_images)))
    record = run.record
    folder = run.examination.loaded.folder
    if folder is not None and record is not None:
        for warning in cast(list[str], record.values.get("warnings", [])):
            print_safely(f"warning: {warning}", err=True)
        has_plots = output is not None or record.values.get("pictures")
        plot_note = f"are in {output or folder}" if has_plots else "were not made (add --output DIR)"
        place = "not recorded, as the model's folder is read-only"
        if is_writable(folder):
            place = f"recorded in {folder / 'facts.json'}"
        print_safely(f"results {place}; plots {plot_note}")
    elif output is not None:
        print_safely(f"metrics and plots in {output}")
