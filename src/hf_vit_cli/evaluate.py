"""`hf-vit evaluate`."""

from pathlib import Path
from typing import Any, cast

import typer

from hf_vit_cli import options
from hf_vit_cli.command import command_line, print_tables, tell
from hf_vit_cli.options import opt

_OF_PROTOCOLS = (
    *("shots", "trials", "neighbors", "temperature", "epsilons", "steps", "kinds", "patch_size", "fill"),
    *("real_labels", "mappings"),
)


@options.takes(
    *("split", "batch_size", "skip_bad_images", "image_column", "label_column", "streaming", "optimize"),
    *("device", "runner", "address", "seed", "max_num_patches", "draft"),
)
def evaluate(
    context: typer.Context,
    model: str = options.CHECKPOINT,
    data: str = options.DATA,
    protocol: str | None = opt(
        None,
        "top1, few-shot, linear-probe, knn, calibration, robustness, corruptions, patch-drop, "
        "multi-label, real, objectnet, vtab, segmentation or detection. Default: top1, or the model's "
        "task.",
        show_default=False,
    ),
    output: Path | None = opt(
        None, "Folder for metrics and plots; default: plots go to the model's folder.", file_okay=False
    ),
    num_images: int | None = opt(None, "Evaluate on this many images, drawn at random.", min=1),
    shots: list[int] | None = opt(None, "few-shot: images per class; repeat for more."),
    trials: int | None = opt(None, "few-shot: random draws of the images."),
    neighbors: list[int] | None = opt(None, "knn: number of neighbors; repeat for more."),
    temperature: bool | None = opt(
        None, "calibration: fit a temperature on the validation split.", "--temperature/--no-temperature"
    ),
    epsilons: list[float] | None = opt(None, "robustness: size of the perturbation in 1/255; repeat for more."),
    steps: int | None = opt(None, "robustness: number of PGD steps."),
    kinds: list[str] | None = opt(None, "corruptions: one kind; repeat for more."),
    patch_size: int | None = opt(None, "patch-drop: patch size in pixels; default: the model's."),
    fill: str | None = opt(None, "patch-drop: mean (of the image) or black."),
    real_labels: str | None = opt(None, "real: real.json as published.", metavar="FILE"),
    mappings: str | None = opt(None, "objectnet: the folder mappings of objectnet-1.0.", metavar="DIR"),
    **shared: Any,
) -> None:
    """Evaluate a model: accuracy, calibration, results per class; mIoU of masks, AP of boxes; or another protocol."""
    from hf_vit.evaluation import evaluate as measure
    from hf_vit.loading.optimizing import describe_engine

    run = measure(
        model,
        data,
        protocol=protocol,
        output=output,
        command=command_line(context),
        num_images=num_images,
        **shared,
        **{name: value for name in _OF_PROTOCOLS if (value := context.params[name]) not in (None, [], ())},
    )
    for note in run.examination.data.notes:
        tell(f"note: {note}", err=True)
    if run.engine is not None:
        tell(f"note: {describe_engine(run.engine)}", err=True)
    print_tables(run.result.tables(run.examination.judged(run.result.num_images)))
    record, folder = run.record, run.examination.subject.folder
    if folder is not None and record is not None:
        for warning in cast(list[str], record.values.get("warnings", [])):
            tell(f"warning: {warning}", err=True)
        where = (
            "none (write them with --output DIR)"
            if output is None and not record.values.get("pictures")
            else f"in {output or folder}"
        )
        tell(f"recorded in {folder / 'facts.json'}; plots {where}")
    elif output is not None:
        tell(f"metrics and plots in {output}")
