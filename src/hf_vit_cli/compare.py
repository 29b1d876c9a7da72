"""`hf-vit compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.command import command_line, finished_parts, print_table, stoppable, tell
from hf_vit_cli.options import arg, opt

if TYPE_CHECKING:
    from hf_vit.comparison import ModelResult, SpeedResult

# Of a table in a terminal, beside the model's name: the comparison is told in several.
_COLUMNS = 5


@options.takes(
    *("split", "batch_size", "skip_bad_images", "image_column", "label_column", "device", "optimize", "runner"),
    *("address", "seed"),
)
def compare(
    context: typer.Context,
    models: list[str] = arg(..., "Two or more models: folders, Hub ids, timm:NAME or timm:FOLDER."),
    data: str = options.DATA,
    output: Path = opt(..., "Folder for tables, plots and the page.", file_okay=False),
    probe: bool = opt(False, "Fit a linear probe for models without a head for these classes.", "--probe"),
    corruption: list[str] | None = opt(None, "Kind of corruption; repeat for more. Default: four."),
    severity: int = opt(3, "Severity of the corruptions.", min=1, max=5),
    epsilon: list[float] | None = opt(None, "Size of FGSM's perturbation in 1/255; repeat for more. Default: 1, 4."),
    robustness: bool = opt(True, "Corrupt and attack images."),
    robustness_images: int = opt(500, "Number of images to corrupt and attack.", min=1),
    probe_images: int = opt(10_000, "Largest number of training images of a probe.", min=1),
    image_size: str | None = opt(None, "Size of digits and photos in pixels: 64 or 64x48."),
    speed_turns: int = opt(10, "Timed forward passes of each model; 0: no speed.", min=0),
    speed_batch_size: int = opt(8, "Images per timed forward pass.", min=1),
    **shared: Any,
) -> None:
    """Compare image classifiers of any library: accuracy, calibration, robustness, FLOPs, speed, memory."""
    from hf_vit.comparison import ComparisonSettings, save_comparison
    from hf_vit.comparison import compare as run_comparison
    from hf_vit.errors import UserError
    from hf_vit.results.facts import Facts

    if not robustness and (corruption or epsilon):
        what = (
            f"--corruption {' '.join(corruption)}" if corruption else f"--epsilon {' '.join(map(str, epsilon or []))}"
        )
        raise UserError(f"{what} would change nothing with --no-robustness; leave one of them out")
    for model in models:
        if Path(model).is_dir():
            Facts.load(model)  # damaged facts are told before the work, not after it
    defaults = ComparisonSettings()
    settings = ComparisonSettings(
        corruptions=tuple(corruption or defaults.corruptions) if robustness else (),
        severity=severity,
        epsilons=tuple(epsilon or defaults.epsilons) if robustness else (),
        robustness_images=robustness_images,
        probe_images=probe_images,
        batch_size=shared.pop("batch_size"),
        seed=(seed := shared.pop("seed")),
        speed_turns=speed_turns,
        speed_batch_size=speed_batch_size,
    )
    with stoppable(lambda: finished_parts(output)):
        run = run_comparison(
            models,
            data,
            output,
            probe=probe,
            settings=settings,
            image_size=options.parse_size(image_size),
            report=tell,
            **shared,
        )
    for note in run.data.notes:
        tell(f"note: {note}", err=True)
    if run.data.skipped:
        tell(f"{len(run.data.skipped)} unreadable images left out: {', '.join(run.data.skipped)}")
    if recorded := save_comparison(run, command=command_line(context), seed=seed):
        tell(f"recorded in facts.json of {', '.join(recorded)}")
    _print_table(run.results, run.speed)
    tell(f"tables, plot and page in {output}")


def _print_table(results: "list[ModelResult]", speed: "SpeedResult | None") -> None:
    from rich.console import Console
    from rich.markup import escape

    from hf_vit.comparison.tables import sentences, shown_rows

    rows, console = shown_rows(results, speed), Console()
    name, *headers = rows[0]
    for start in range(0, len(headers), _COLUMNS):
        shown = [name, *headers[start : start + _COLUMNS]]
        print_table(([row[header] for header in shown] for row in rows), *shown)
    for sentence in sentences(results, speed):
        console.print(escape(sentence), highlight=False)
