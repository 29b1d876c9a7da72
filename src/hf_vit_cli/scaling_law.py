"""`hf-vit scaling-law`."""

from pathlib import Path

import typer

from hf_vit_cli.command import print_safely, print_table
from hf_vit_cli.options import JSON, arg, opt


def scaling_law(
    sources: list[str] = arg(
        ..., "Runs: CSV or JSON files with compute and error, or folders of trained models.", metavar="RUNS..."
    ),
    output: Path | None = opt(None, "PNG file for the plot.", dir_okay=False),
    unit: str = opt("exaFLOPs", "Unit of compute for the plot's axis; model folders give exaFLOPs."),
    shift: bool = opt(True, "Fit the compute offset d; --no-shift sets it to 0.", "--shift/--no-shift"),
    predict: list[float] | None = opt(
        None, "Also predict the error at this compute, with its 95% interval; repeat for more."
    ),
    as_json: bool = JSON,
) -> None:
    """Fit a scaling law E = a (C + d)^-b + c to at least 5 runs (4 without d), with 95% intervals."""
    from hf_vit.cost import fit_scaling_law, plot_scaling_law, read_points
    from hf_vit.errors import UserError
    from hf_vit.results.facts import FACTS_NAME

    computes = predict or []
    inputs = [Path(source).expanduser().resolve() for source in sources]
    runs = [path.parent if path.name == FACTS_NAME else path for path in inputs]
    if repeated := [source for source, run in zip(sources, runs, strict=True) if runs.count(run) > 1]:
        raise UserError(f"{repeated[-1]} was given twice; give every run once")
    if output is not None:
        if output.suffix.lower() != ".png" or output.resolve() in inputs:
            raise UserError(f"--output {output} cannot be used for the plot; give the name of a new .png file")
        if not output.absolute().parent.is_dir():
            raise UserError(f"the folder {output.parent} for the plot does not exist; create it first")
    if computes and min(computes) <= 0:
        raise UserError(f"--predict {min(computes):g} is not a compute above 0; give a positive number")
    law = fit_scaling_law([point for source in sources for point in read_points(source)], shift)
    if output is not None:
        plot_scaling_law(law, output, unit)
    errors = [float(law.error(compute)) for compute in computes]
    intervals = [list(map(float, law.interval(compute))) for compute in computes]
    if as_json:
        import dataclasses
        import json

        keys = ("compute", "error", "interval")
        predictions = [dict(zip(keys, row, strict=True)) for row in zip(computes, errors, intervals, strict=True)]
        typer.echo(json.dumps(dataclasses.asdict(law) | {"predictions": predictions}, indent=2))
        return
    values = [(name, getattr(law, name), *interval) for name, interval in law.intervals.items()]
    for compute, error, (low, high) in zip(computes, errors, intervals, strict=True):
        values.append((f"error at {compute:g}", error, low, high))
    rows = [(name, f"{value:.4g}", f"{low:.4g} to {high:.4g}") for name, value, low, high in values]
    rows.append(("residual (rms)", f"{law.residual:.2g}", f"{len(law.points)} runs"))
    print_table(rows, "", "fit", "95% interval", title=str(law))
    if output is not None:
        print_safely(f"plot in {output}")
