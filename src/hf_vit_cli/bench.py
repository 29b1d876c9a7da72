"""`hf-vit bench`: measure speed on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import Command, format_command, print_safely, print_table
from hf_vit_cli.options import arg, opt
from hf_vit_settings import FinetuneOptions

if TYPE_CHECKING:
    from hf_vit.speed.measuring import SpeedFile
    from hf_vit.speed.peers import MeasuredCell

bench = typer.Typer(help="Measure speed on this machine: models, saved models and exports, data loading.")


@bench.command("models", cls=Command)
def model_speed(
    context: typer.Context,
    variants: list[str] | None = arg(None, "Variants to measure, such as S/16 or R50+B/16. Default: S/16 and B/16."),
    work: list[str] | None = opt(None, "Workload to measure: inference or training; repeat for more. Default: both."),
    dtype: list[str] | None = opt(None, "Data type: float32 or bfloat16; repeat for more. Default: float32."),
    batch: list[int] | None = opt(None, "Batch size in images; repeat for more. Default: 1 and 8, for training 8."),
    image_size: int = opt(224, "Image size in pixels."),
    contestant: list[str] | None = opt(
        None, "Implementation to measure, such as hf_vit or timm; repeat for more. Default: all."
    ),
    compiled: bool = opt(
        False,
        "Also measure with torch.compile, once as usual and once with the weights frozen as constants.",
        "--compiled",
    ),
    engines: bool = opt(False, "Also measure OpenVINO and ONNX Runtime, in float32 and in int8.", "--engines"),
    checkpointing: bool = opt(False, "Use activation checkpointing in training.", "--checkpointing"),
    turns: int = opt(
        15, "Number of measurements per model and build; a larger number gives a more precise result.", min=1
    ),
    builds: int = opt(
        1, "Number of times that the models are built anew, as speed depends on where in memory they are.", min=1
    ),
    threads: int | None = opt(None, "Number of torch threads. Default: all cores.", min=1),
    device: str = opt("cpu", "torch device to measure on."),
    peak_tflops: float | None = opt(
        None, "Peak speed of the device in TFLOP/s, such as 312; adds the share of it that is reached."
    ),
    output: Path | None = opt(None, "JSON file for the results; updated after every measurement.", dir_okay=False),
) -> None:
    """Compare the speed of hf_vit, transformers, timm, vit-pytorch and torch's encoder on identical shapes."""
    import itertools
    from dataclasses import asdict

    import torch

    from hf_vit.environment import pick_device, require
    from hf_vit.speed.measuring import SpeedFile
    from hf_vit.speed.peers import (
        FORMS,
        OURS,
        PACKED,
        PEERS,
        PRODUCTS,
        Cell,
        Shape,
        make_compiled_forms,
        measure_cell,
    )

    device = str(pick_device(device))
    if threads is not None:
        torch.set_num_threads(threads)
    works = work or ["inference", "training"]
    sizes = variants or ["S/16", "B/16"]
    cells: list[Cell] = []
    for kind, size, precision in itertools.product(works, sizes, dtype or ["float32"]):
        checkpoints = checkpointing and kind == "training"
        for images in batch or ([1, 8] if kind == "inference" else [8]):
            cells.append(Cell(kind, Shape(size, image_size), precision, images, device, checkpoints))  # pyright: ignore[reportArgumentType] - checked by the class
    names = contestant or [*OURS, *PEERS, PRODUCTS, PRODUCTS + PACKED]
    if compiled:
        compiled_names = make_compiled_forms(contestant or ["hf_vit", *PEERS])
        names = list(dict.fromkeys([*names, *compiled_names]))  # some are among the default names
    if engines:
        libraries = ("openvino", "nncf", "onnx", "onnxscript", "onnxruntime")
        require(*libraries, purpose="--engines", extra="openvino,export")
        implementations = contestant or ["hf_vit optimized", "transformers", "timm", "vit-pytorch"]
        names += [f"{name}, {form}" for form in FORMS for name in implementations]
        names += [] if contestant else [f"{PRODUCTS}, openvino"]
    speeds = SpeedFile(output, format_command(context), device, turns=turns, builds=builds)
    for cell in cells:
        peak = None if peak_tflops is None else peak_tflops * 1e12
        results = measure_cell(cell, names, turns, builds=builds, memory=cell.work == "training", peak_flops=peak)
        speeds.add(asdict(results), results.load)
        print_cell(results)
    print_conditions(speeds, output)


def print_conditions(speeds: "SpeedFile", output: Path | None) -> None:
    """Print a note if other processes used more than half a core, and where the results are."""
    if not speeds.is_quiet:
        load = f"{max(speeds.loads):.1f} cores"
        note = f"note: other processes used {load} during the measurement, so the ratios are unreliable"
        print_safely(f"{note}; measure again on an idle machine", err=True)
    if output is not None:
        print_safely(f"results written to {output}")


def print_cell(results: "MeasuredCell") -> None:
    """Print the results of one cell as a table: speed, ratio to transformers, and memory."""
    cell = results.cell
    reference = "transformers"
    size = f"{cell.shape.variant} at {cell.shape.image_size} px"
    details = ", checkpointing" if cell.checkpointing else ""
    title = f"{cell.work}, {size}, {cell.dtype}, batch {cell.batch}, {cell.device}{details}"
    shows_utilization = any(outcome.utilisation is not None for outcome in results.outcomes.values())
    rows: list[list[str]] = []
    for name, outcome in results.outcomes.items():
        memory = "" if outcome.memory is None else f"{outcome.memory / 1e6:,.0f} MB"
        utilization = [f"{outcome.utilisation or 0:.1%}"] if shows_utilization else []
        rows.append(
            [name, f"{outcome.images_per_second:,.2f}", str(outcome.ratios.get(reference, "")), memory, *utilization]
        )
    header = ["", "images/s", f"x {reference} (quartiles)", "peak memory"]
    header += ["utilization"] if shows_utilization else []
    print_table(rows, *header, title=title)
    for name, reason in results.absent.items():
        print_safely(f"did not measure {name}: {reason}")


@bench.command("saved", cls=Command)
def saved_speed(
    context: typer.Context,
    models: list[str] = arg(..., "Two or more models: folders, Hub ids, timm:NAME, or exported files."),
    batch: list[int] | None = opt(None, "Images per forward pass; repeat for more. Default: 1 and 8.", min=1),
    turns: int = opt(
        15, "Number of measurements per model and batch size; a larger number gives a more precise result.", min=1
    ),
    threads: int | None = opt(None, "Number of threads of torch and ONNX Runtime. Default: all cores.", min=1),
    device: str = opt("cpu", "torch device to measure on."),
    output: Path | None = opt(None, "JSON file for the results; updated after every batch size.", dir_okay=False),
) -> None:
    """Compare the speed of saved models and exported graphs with the first one."""
    from dataclasses import asdict

    import torch

    from hf_vit.loading import load_models
    from hf_vit.speed.measuring import SpeedFile, make_noise, measure_forwards

    if threads is not None:
        torch.set_num_threads(threads)
    loaded_models = {loaded.name: loaded for loaded in load_models(models, device)}
    speeds = SpeedFile(output, format_command(context), device, turns=turns)
    sizes = batch or [1, 8]
    samples = {size: {name: make_noise(loaded, size) for name, loaded in loaded_models.items()} for size in sizes}
    for size in sizes:
        results, load = measure_forwards(loaded_models, samples[size], turns)
        speeds.add({"batch": size, "models": {name: asdict(speed) for name, speed in results.items()}}, load)
        rows = [
            (name, f"{speed.images_per_second.median:,.2f}", str(speed.times_as_fast))
            for name, speed in results.items()
        ]
        print_table(rows, "", "images/s", "times as fast (quartiles)", title=f"batch {size}")
    print_conditions(speeds, output)


@bench.command("data", cls=Command)
@options.with_options(
    *("image_size", "micro_batch_size", "precision", "num_workers", "device", "streaming", "skip_bad_images")
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
    run_options = FinetuneOptions(**shared)
    speed = measure_input(model, data, recipe=recipe, options=run_options, seconds=seconds)
    workers = f"{speed.num_workers} workers" if speed.num_workers else "no workers"
    rates = {
        "data loading alone, images/s": speed.data,
        "training steps alone, images/s": speed.model,
        "both together, images/s": speed.together,
    }
    title = f"micro-batches of {speed.micro_batch_size}, {workers}"
    print_table([(name, f"{rate:,.1f}") for name, rate in rates.items()], title=title)
    if speed.limit == "model":
        print_safely(
            f"the model is the bottleneck: data loading could supply {speed.data / speed.model:.1f} times as "
            "many images"
        )
    else:
        ratio = f"{speed.model / speed.data:.1f} times as many images"
        print_safely(f"data loading is the bottleneck: the model could train on {ratio}; try more --num-workers")
    if speed.is_cached:
        print_safely("prepared images are cached in memory, so the first epoch is slower than measured here")
