"""`hf-vit bench`: what is fast and what is not, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import Command, command_line, print_table, tell
from hf_vit_cli.options import arg, opt
from hf_vit_settings import FinetuneOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_vit.speed.measuring import ForwardSpeed
    from hf_vit.speed.peers import MeasuredCell
    from hf_vit.training.input_speed import InputSpeed

bench = typer.Typer(
    help="Measure speed on this machine: models and their peers, saved models and exports, data loading."
)


@bench.command("models", cls=Command)
def model_speed(
    context: typer.Context,
    variants: list[str] | None = arg(None, "Variants to measure. Default: S/16 and B/16."),
    work: list[str] | None = opt(None, "Work to measure: inference or training; repeat for more. Default: both."),
    dtype: list[str] | None = opt(None, "float32 or bfloat16; repeat for more. Default: float32."),
    batch: list[int] | None = opt(None, "Images per step; repeat for more. Default: 1 and 8, for training 8."),
    image_size: int = opt(224, "Image size in pixels."),
    contestant: list[str] | None = opt(
        None, "Contestant; repeat for more. Default: all forms of hf_vit and every peer."
    ),
    compiled: bool = opt(False, "Also measure each compiled, with and without frozen weights.", "--compiled"),
    engines: bool = opt(False, "Also measure OpenVINO and ONNX Runtime, with and without int8.", "--engines"),
    checkpointing: bool = opt(False, "Use activation checkpointing in training.", "--checkpointing"),
    turns: int = opt(15, "Measurements of every model per build.", min=1),
    builds: int = opt(1, "Number of builds; averages over where weights lie in memory.", min=1),
    threads: int | None = opt(None, "Threads of torch. Default: all cores.", min=1),
    device: str = opt("cpu", "torch device."),
    peak_tflops: float | None = opt(None, "Peak TFLOP/s of the device, to compute utilization."),
    output: Path | None = opt(None, "JSON file for the results, updated after every measurement.", dir_okay=False),
) -> None:
    """Compare the speed of hf_vit, transformers, timm, vit-pytorch and torch's encoder on identical shapes."""
    import itertools
    from dataclasses import asdict

    import torch

    from hf_vit.environment import pick_device
    from hf_vit.speed.measuring import BUSY, SpeedFile, others_load
    from hf_vit.speed.peers import (
        OURS,
        PACKED,
        PEERS,
        PRODUCTS,
        Cell,
        Shape,
        compiled_forms,
        engine_forms,
        measure_cell,
    )

    device = str(pick_device(device))
    if threads is not None:
        torch.set_num_threads(threads)
    works, sizes = work or ["inference", "training"], variants or ["S/16", "B/16"]
    cells = [
        Cell(kind, Shape(size, image_size), precision, images, device, checkpointing and kind == "training")  # pyright: ignore[reportArgumentType] - checked by the class
        for kind, size, precision in itertools.product(works, sizes, dtype or ["float32"])
        for images in batch or ([1, 8] if kind == "inference" else [8])
    ]
    names = contestant or [*OURS, *PEERS, PRODUCTS, PRODUCTS + PACKED]
    if compiled:
        names = list(dict.fromkeys([*names, *compiled_forms(contestant or ["hf_vit", *PEERS])]))
    if engines:
        plain = contestant or ["hf_vit optimized", "transformers", "timm", "vit-pytorch"]
        names += engine_forms(plain) + ([] if contestant else [f"{PRODUCTS}, openvino"])
    load = others_load()
    speeds = SpeedFile(output, command_line(context), device, turns=turns, builds=builds)
    for cell in cells:
        peak = None if peak_tflops is None else peak_tflops * 1e12
        measured = measure_cell(cell, names, turns, builds=builds, memory=cell.work == "training", peak_flops=peak)
        speeds.add(asdict(measured), measured.load)
        print_cell(measured)
    if load > BUSY:
        tell(
            f"note: other processes used {load:.1f} cores, so ratios vary; measure again when the machine is idle",
            err=True,
        )
    if output is not None:
        tell(f"written to {output}")


def print_cell(measured: "MeasuredCell") -> None:
    """Print one cell as a table: speeds, memory, and the ratio to transformers."""
    cell, base = measured.cell, "transformers"
    pixels = f"{cell.shape.image_size} px"
    title = f"{cell.work}, {cell.shape.variant} at {pixels}, {cell.dtype}, batch {cell.batch}, {cell.device}"
    if cell.checkpointing:
        title += ", checkpointing"
    shows_use = any(outcome.utilisation is not None for outcome in measured.outcomes.values())
    rows: list[list[str]] = []
    for name, outcome in measured.outcomes.items():
        memory = "" if outcome.memory is None else f"{outcome.memory / 1e6:,.0f} MB"
        use = [f"{outcome.utilisation or 0:.1%}"] if shows_use else []
        rows.append([name, f"{outcome.images_per_second:,.2f}", str(outcome.ratios.get(base, "")), memory, *use])
    header = ["", "images/s", f"x {base} (quartiles)", "peak memory", *(["utilization"] if shows_use else [])]
    print_table(rows, *header, title=title)
    for name, reason in measured.absent.items():
        tell(f"without {name}: {reason}")


@bench.command("saved", cls=Command)
def saved_speed(
    context: typer.Context,
    models: list[str] = arg(..., "Two or more models: folders, Hub ids, timm:NAME, or exported files."),
    batch: list[int] | None = opt(None, "Images per forward pass; repeat for more. Default: 1 and 8.", min=1),
    turns: int = opt(15, "Measurements of every model.", min=1),
    threads: int | None = opt(None, "Threads of torch and ONNX Runtime. Default: all cores.", min=1),
    device: str = opt("cpu", "torch device."),
    output: Path | None = opt(None, "JSON file for the results, updated after every batch size.", dir_okay=False),
) -> None:
    """Compare the speed of saved models and exported graphs with the first one."""
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
        tell(
            f"note: other processes used {load:.1f} cores, so ratios vary; measure again when the machine is idle",
            err=True,
        )
    if output is not None:
        tell(f"written to {output}")


def print_speeds(measured: "Mapping[str, ForwardSpeed]", batch: int) -> None:
    """Print one batch size as a table."""
    rows = [(name, f"{s.images_per_second.median:,.2f}", str(s.times_as_fast)) for name, s in measured.items()]
    print_table(rows, "", "images/s", "times as fast (quartiles)", title=f"batch {batch}")


@bench.command("data", cls=Command)
@options.takes(
    *("image_size", "micro_batch_size", "precision", "num_workers", "device", "streaming", "skip_bad_images"),
)
def data_speed(
    context: typer.Context,
    model: str = options.MODEL,
    data: str = options.DATA,
    recipe: str = opt("default-small", "Recipe whose augmentation is used."),
    seconds: float = opt(5.0, "Duration of each measurement in seconds."),
    **shared: Any,
) -> None:
    """Measure the throughput of data loading and of training steps, and which one is the bottleneck."""
    from hf_vit.training.input_speed import measure_input

    shared["image_size"] = options.parse_size(shared["image_size"])
    chosen = FinetuneOptions(**shared)
    print_input_speed(measure_input(model, data, recipe=recipe, options=chosen, seconds=seconds))


def print_input_speed(found: "InputSpeed") -> None:
    """Print the table, and what follows from it."""
    workers = f"{found.num_workers} workers" if found.num_workers else "no worker"
    rates = {
        "input alone, images/s": found.data,
        "training steps alone, images/s": found.model,
        "both together, images/s": found.together,
    }
    title = f"micro-batches of {found.micro_batch_size}, {workers}"
    print_table([(name, f"{rate:,.1f}") for name, rate in rates.items()], title=title)
    if found.limit == "model":
        tell(f"the model is the bottleneck: the input could supply {found.data / found.model:.1f} times as many images")
    else:
        times = f"{found.model / found.data:.1f} times as many images"
        tell(f"the input is the bottleneck: the model could train on {times}; try more --num-workers")
    if found.is_cached:
        tell("prepared images are cached in memory: the first epoch is slower")
