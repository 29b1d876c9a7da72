"""`hf-vit scaling-law`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.options import arg, opt


def scaling_law(
    sources: Annotated[
        list[str], arg("CSV or JSON files of compute and error, or folders of trained models.", metavar="RUNS...")
    ],
    output: Annotated[Path | None, opt("PNG file for the plot.", dir_okay=False)] = None,
    unit: Annotated[str, opt("Unit of compute in the plot. Folders give exaFLOPs.")] = "exaFLOPs",
    shift: Annotated[bool, opt("Fit the offset d of compute; --no-shift sets it to 0.", "--shift/--no-shift")] = True,
    predict: Annotated[
        list[float] | None, opt("Also predict the error at this compute, with its 95% interval.")
    ] = None,
    as_json: Annotated[bool, opt("Print JSON.", "--json")] = False,
) -> None:
    """Fit a scaling law E = a (C + d)^-b + c to at least 5 runs (4 without d), with 95% intervals."""
    from hf_vit.cost import fit_scaling_law, plot_scaling_law, read_points
    from hf_vit.errors import UserError

    if output is not None:
        read = [Path(source).expanduser().absolute() for source in sources]
        if output.suffix.lower() != ".png" or output.absolute() in read:
            raise UserError(f"{output} is not a PNG file name; give one that ends in .png")
        if not output.absolute().parent.is_dir():
            raise UserError(f"there is no folder {output.parent} for the plot; make it first")
    if bad := [compute for compute in predict or [] if compute <= 0]:
        raise UserError(f"--predict is {bad[0]:g}; it needs a compute above 0")
    law = fit_scaling_law([point for source in sources for point in read_points(source)], shift)
    if output is not None:
        plot_scaling_law(law, output, unit)
    predicted = [(compute, float(law.error(compute)), *map(float, law.interval(compute))) for compute in predict or []]
    if as_json:
        import dataclasses
        import json

        told = [{"compute": each, "error": error, "interval": between} for each, error, *between in predicted]
        typer.echo(json.dumps(dataclasses.asdict(law) | {"predictions": told}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "fit", "95% interval", title=str(law), title_justify="left")
    for name, (low, high) in law.intervals.items():
        table.add_row(name, f"{getattr(law, name):.4g}", f"{low:.4g} to {high:.4g}")
    for compute, error, low, high in predicted:
        table.add_row(f"error at {compute:g}", f"{error:.4g}", f"{low:.4g} to {high:.4g}")
    table.add_row("residual (rms)", f"{law.residual:.2g}", f"{len(law.points)} runs")
    Console().print(table)
    if output is not None:
        typer.echo(f"plot in {output}")
