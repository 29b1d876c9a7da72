"""`hf-vit compare`."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import (
    collect_options,
    describe_progress,
    format_command,
    handle_interrupt,
    print_notes,
    print_safely,
    print_table,
)
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from hf_vit.comparison import ModelResult, SpeedResult

# Columns of a table in the terminal besides the model's name; wider results are split into several tables.
_COLUMNS = 5


@options.with_options(
    *("split", "batch_size", "skip_bad_images", "image_column", "label_column", "device", "optimize", "runner"),
    *("address", "seed"),
)
def compare(
    context: typer.Context,
    models: list[str] = arg(..., "Two or more models: folders, Hub ids, timm:NAME or timm:FOLDER."),
    data: str = options.DATA,
    output: Path = opt(..., "Folder for tables, plots and the page.", file_okay=False),
    probe: bool = opt(
        False, "Fit a linear probe for models whose head does not have the classes of the data.", "--probe"
    ),
    corruption: list[str] | None = opt(
        None,
        "Kind of corruption to apply; repeat for more. Default: gaussian_noise, defocus_blur, contrast and "
        "jpeg_compression.",
    ),
    severity: int = opt(3, "Severity of the corruptions, 1 (weak) to 5 (strong).", min=1, max=5),
    epsilon: list[float] | None = opt(
        None, "FGSM attack: largest change of a pixel in units of 1/255; repeat for more. Default: 1 and 4."
    ),
    robustness: bool = opt(True, "Measure accuracy on corrupted and attacked images."),
    robustness_images: int = opt(500, "Number of test images to corrupt and attack.", min=1),
    probe_images: int = opt(10_000, "Maximum number of training images for a probe.", min=1),
    image_size: str | None = opt(
        None, "Size in pixels of the images in the built-in data sets digits and photos, such as 64 or 64x48."
    ),
    speed_turns: int = opt(10, "Number of timed forward passes per model; 0 measures no speed.", min=0),
    speed_batch_size: int = opt(8, "Images per timed forward pass.", min=1),
    **shared: Any,
) -> None:
    """Compare image classifiers of any library: accuracy, calibration, robustness, FLOPs, speed, memory."""
    values = collect_options(locals(), "corruption", "epsilon", "robustness")
    from hf_vit.comparison import ComparisonSettings, save_comparison
    from hf_vit.comparison import compare as run_comparison
    from hf_vit.errors import UserError
    from hf_vit.results.facts import Facts

    for option, chosen in {"--corruption": corruption, "--epsilon": epsilon}.items():
        if chosen and not robustness:
            given = " ".join(map(str, chosen))
            raise UserError(f"{option} {given} has no effect with --no-robustness; leave one of them out")
    for model in models:
        if Path(model).is_dir():
            Facts.load(model)  # raises for damaged facts before the work begins
    defaults = ComparisonSettings()
    values["corruptions"] = tuple(corruption or defaults.corruptions) if robustness else ()
    values["epsilons"] = tuple(epsilon or defaults.epsilons) if robustness else ()
    values["image_size"] = options.parse_size(image_size)
    settings = ComparisonSettings(**{field.name: values.pop(field.name) for field in fields(ComparisonSettings)})
    with handle_interrupt(lambda: describe_progress(output)):
        run = run_comparison(**values, settings=settings, report=print_safely)
    print_notes(run.data.notes, run.data.skipped)
    recorded_models = save_comparison(run, command=format_command(context), seed=settings.seed)
    if recorded_models:
        print_safely(f"recorded in facts.json of {', '.join(recorded_models)}")
    _print_table(run.results, run.speed)
    print_safely(f"tables, plot and page in {output}")


def _print_table(results: "list[ModelResult]", speed: "SpeedResult | None") -> None:
    """Print the results in tables of `_COLUMNS` columns, and the sentences that summarize them."""
    from hf_vit.comparison.tables import explain_table, make_rows

    rows = make_rows(results, speed)
    name, *headers = rows[0]
    for start in range(0, len(headers), _COLUMNS):
        columns = [name, *headers[start : start + _COLUMNS]]
        print_table(([row[header] for header in columns] for row in rows), *columns)
    for sentence in explain_table(results, speed):
        print_safely(sentence)
