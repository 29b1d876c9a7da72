"""`hf-vit models`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli.command import print_tables
from hf_vit_cli.options import arg, opt


def models(
    places: Annotated[
        list[str] | None,
        arg("Folders of models, users or organizations on the Hub, or papers (the papers' variants). Default: papers."),
    ] = None,
    search: Annotated[str | None, opt("Only models with this in their name.")] = None,
    family: Annotated[
        str | None, opt("plain, hybrid, axial, local, axial_resnet, bit, mixer, or a model_type (vit).")
    ] = None,
    judged_on: Annotated[str | None, opt("Only results on data sets with this in their name.")] = None,
    max_parameters: Annotated[float | None, opt("Only models with at most this many parameters (30e6).", min=1)] = None,
    checkpoints: Annotated[bool, opt("Also list where weights are available.", "--checkpoints")] = False,
    as_json: Annotated[bool, opt("Print JSON.", "--json")] = False,
    output: Annotated[Path | None, opt("Write an HTML page with one leaderboard per data set.", dir_okay=False)] = None,
) -> None:
    """List models: the papers' variants, folders, a user's repositories; with size, FLOPs, results and checkpoints."""
    from hf_vit.catalogue.listing import list_models

    listing = list_models(
        places or (), search=search, family=family, judged_on=judged_on, max_parameters=max_parameters
    )
    if output is not None:
        listing.save_page(output)
        typer.echo(f"{len(listing.entries):,} models in {output}")
    elif as_json:
        typer.echo(listing.to_json())
    else:
        print_tables(listing.tables())
        if checkpoints:
            for entry in listing.entries:
                typer.echo("".join(f"{entry.name} {checkpoint}\n" for checkpoint in entry.checkpoints), nl=False)
