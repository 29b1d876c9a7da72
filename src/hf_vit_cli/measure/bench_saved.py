"""`hf-vit bench saved`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_vit_cli.command_line import command_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_vit.speed.measuring import ForwardSpeed


def saved_speed(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(help="Two or more: folders, Hub ids, timm:NAME, or what export wrote.", show_default=False),
    ],
    batch: Annotated[list[int] | None, typer.Option(help="Images a forward; 1 and 8 by default.", min=1)] = None,
    turns: Annotated[int, typer.Option(help="Of every model.", min=1)] = 15,
    threads: Annotated[int | None, typer.Option(help="Of torch and ONNX graphs; all cores by default.", min=1)] = None,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="JSON file, rewritten after every batch.", dir_okay=False)] = None,
) -> None:
    """Saved models, and graphs that were exported from them, beside the first: forward passes on noise, in turns."""
    from dataclasses import asdict

    import torch

    from hf_vit.loading import load_models
    from hf_vit.speed.measuring import SpeedFile, measure_forwards, noise_for

    if threads is not None:
        torch.set_num_threads(threads)
    subjects = {subject.name: subject for subject in load_models(models, device)}
    speeds = SpeedFile(output, command_line(context), device, turns=turns)
    sizes = batch or [1, 8]
    samples = {size: {name: noise_for(subject, size) for name, subject in subjects.items()} for size in sizes}
    for size in sizes:
        measured, load = measure_forwards(subjects, samples[size], turns)
        speeds.add({"batch": size, "models": {name: asdict(speed) for name, speed in measured.items()}}, load)
        print_speeds(measured, size)
    if not speeds.is_quiet:
        load = max(speeds.loads)
        typer.echo(f"note: others kept {load:.1f} cores busy: ratios scatter; repeat in a quiet moment", err=True)
    if output is not None:
        typer.echo(f"written to {output}")


def print_speeds(measured: "Mapping[str, ForwardSpeed]", batch: int) -> None:
    """One batch size as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "images/s", "times as fast (quartiles)", title=f"batch {batch}", title_justify="left")
    for name, speed in measured.items():
        table.add_row(escape(name), f"{speed.images_per_second.median:,.2f}", str(speed.times_as_fast))
    Console().print(table)
