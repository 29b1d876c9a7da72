"""`hf-vit evaluate`."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from hf_vit_cli import options
from hf_vit_cli.result_tables import print_tables


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Model: folder, Hub id, timm:NAME, or a file that hf-vit convert reads.", show_default=False
        ),
    ],
    data: options.Data,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="top1, few-shot, linear-probe, knn, calibration, robustness, corruptions, patch-drop, multi-label, "
            "real, objectnet, vtab, segmentation or detection; by default what the model does.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for numbers and pictures; by default pictures lie with the model.", file_okay=False),
    ] = None,
    skip_bad_images: options.SkipBadImages = False,
    image_column: options.ImageColumn = None,
    label_column: options.LabelColumn = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while evaluating.")] = False,
    optimize: options.Optimize = True,
    device: options.Device = None,
    runner: options.Runner = "local",
    address: options.Address = None,
    seed: Annotated[int, typer.Option(help="Of every draw.", min=0)] = 0,
    num_images: Annotated[int | None, typer.Option(help="Judge by so many images.", min=1)] = None,
    max_num_patches: options.MaxNumPatches = None,
    draft: options.Draft = False,
    shots: Annotated[list[int] | None, typer.Option(help="few-shot: images a class; repeat for more.")] = None,
    trials: Annotated[int | None, typer.Option(help="few-shot: draws of the images.")] = None,
    neighbors: Annotated[list[int] | None, typer.Option(help="knn: how many vote; repeat for more.")] = None,
    temperature: Annotated[
        bool | None, typer.Option("--temperature/--no-temperature", help="calibration: fit one on validation images.")
    ] = None,
    epsilons: Annotated[list[float] | None, typer.Option(help="robustness: size (1/255); repeat for more.")] = None,
    steps: Annotated[int | None, typer.Option(help="robustness: steps of PGD.")] = None,
    kinds: Annotated[list[str] | None, typer.Option(help="corruptions: one kind; repeat for more.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="patch-drop: px; by default the model's.")] = None,
    fill: Annotated[str | None, typer.Option(help="patch-drop: mean (of the image) or black.")] = None,
    real_labels: Annotated[str | None, typer.Option(metavar="FILE", help="real: real.json as published.")] = None,
    mappings: Annotated[str | None, typer.Option(metavar="DIR", help="objectnet: its folder of mappings.")] = None,
) -> None:
    """Measure a model: accuracy, calibration, every class; mIoU of masks, AP of boxes; or by another protocol."""
    of_protocol: dict[str, Any] = {
        "shots": shots,
        "trials": trials,
        "neighbors": neighbors,
        "temperature": temperature,
        "epsilons": epsilons,
        "steps": steps,
        "kinds": kinds,
        "patch_size": patch_size,
        "fill": fill,
        "real_labels": real_labels,
        "mappings": mappings,
    }
    from hf_vit.evaluation import evaluate as measure
    from hf_vit.loading.optimizing import engine_note
    from hf_vit_cli.command_line import command_line

    run = measure(
        model,
        data,
        protocol=protocol,
        output=output,
        command=command_line(context),
        split=split,
        num_images=num_images,
        batch_size=batch_size,
        max_num_patches=max_num_patches,
        draft=draft,
        seed=seed,
        device=device,
        optimize=optimize,
        runner=runner,
        address=address,
        streaming=streaming,
        skip_bad_images=skip_bad_images,
        image_column=image_column,
        label_column=label_column,
        **{name: value for name, value in of_protocol.items() if value is not None},
    )
    for note in run.examination.data.notes:
        typer.echo(f"note: {note}", err=True)
    if run.engine is not None:
        typer.echo(f"note: {engine_note(run.engine)}", err=True)
    print_tables(run.result.tables(run.examination.judged(run.result.num_images)))
    record, folder = run.record, run.examination.subject.folder
    if folder is not None and record is not None:
        for warning in cast(list[str], record.values.get("warnings", [])):
            typer.echo(f"warning: {warning}", err=True)
        where = (
            "none (--output DIR draws them)"
            if output is None and not record.values.get("pictures")
            else f"in {output or folder}"
        )
        typer.echo(f"recorded in {folder / 'facts.json'}; pictures {where}")
    elif output is not None:
        typer.echo(f"numbers and pictures in {output}")
