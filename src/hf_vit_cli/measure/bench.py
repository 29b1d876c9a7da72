"""`hf-vit bench`: what is fast and what is not, on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from hf_vit_cli import options
from hf_vit_cli.command import Command
from hf_vit_cli.measure import bench_models, bench_saved

if TYPE_CHECKING:
    from hf_vit.training.input_speed import InputSpeed

bench = typer.Typer(help="Measure speed on this machine: models, saved ones and exports, the input of a training.")
bench.command("models", cls=Command)(bench_models.model_speed)
bench.command("saved", cls=Command)(bench_saved.saved_speed)


@bench.command("data", cls=Command)
def data_speed(
    context: typer.Context,
    model: options.Model,
    data: options.Data,
    recipe: Annotated[str, typer.Option(help="Settings by name; decides how images are varied.")] = "default-small",
    image_size: options.ImageSize = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Images a forward pass.")] = None,
    precision: options.Precision = "auto",
    num_workers: options.NumWorkers = 0,
    device: options.Device = None,
    streaming: options.Streaming = False,
    skip_bad_images: options.SkipBadImages = False,
    seconds: Annotated[float, typer.Option(help="Of each measurement.")] = 5.0,
) -> None:
    """The input's images/s beside the model's, and which of them limits a training."""
    from hf_vit.training.input_speed import measure_input

    chosen = options.finetune_options(context.params)
    found = measure_input(model, data, recipe=recipe, options=chosen, seconds=seconds)
    print_input_speed(found)


def print_input_speed(found: "InputSpeed") -> None:
    """The table, and what follows from it."""
    from rich.console import Console
    from rich.table import Table

    workers = f"{found.num_workers} workers" if found.num_workers else "no worker"
    title = f"micro-batches of {found.micro_batch_size}, {workers}"
    table = Table(title=title, title_justify="left", show_header=False)
    rows = {
        "input alone, images/s": found.data,
        "training steps alone, images/s": found.model,
        "both together, images/s": found.together,
    }
    for name, rate in rows.items():
        table.add_row(name, f"{rate:,.1f}")
    console = Console()
    console.print(table)
    if found.limit == "model":
        verdict = "the model limits: the input could feed"
        factor = found.data / found.model
    else:
        verdict = "the input limits: the model could train on"
        factor = found.model / found.data
    advice = "" if found.limit == "model" else "; try more --num-workers"
    console.print(f"{verdict} {factor:.1f} times as many images{advice}", soft_wrap=True, highlight=False)
    if found.is_cached:
        console.print("prepared images are kept in memory: the first epoch, which reads them, is slower")
