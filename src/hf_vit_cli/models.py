"""`hf-vit models`."""

from pathlib import Path

import typer

from hf_vit_cli.command import print_tables, tell
from hf_vit_cli.options import arg, opt


def models(
    places: list[str] | None = arg(
        None, "Folders of models, users or organizations on the Hub, or papers (the papers' variants). Default: papers."
    ),
    search: str | None = opt(None, "Only models with this in their name."),
    family: str | None = opt(None, "plain, hybrid, axial, local, axial_resnet, bit, mixer, or a model_type (vit)."),
    judged_on: str | None = opt(None, "Only results on data sets with this in their name."),
    max_parameters: float | None = opt(None, "Only models with at most this many parameters (30e6).", min=1),
    checkpoints: bool = opt(False, "Also list where weights are available.", "--checkpoints"),
    as_json: bool = opt(False, "Print JSON.", "--json"),
    output: Path | None = opt(None, "Write an HTML page with one leaderboard per data set.", dir_okay=False),
) -> None:
    """List models: the papers' variants, folders, a user's repositories; with size, FLOPs, results and checkpoints."""
    from hf_vit.catalogue.listing import list_models

    listing = list_models(
        places or (), search=search, family=family, judged_on=judged_on, max_parameters=max_parameters
    )
    if output is not None:
        listing.save_page(output)
        tell(f"{len(listing.entries):,} models in {output}")
    elif as_json:
        typer.echo(listing.to_json())
    else:
        print_tables(listing.tables())
        if checkpoints:
            for entry in listing.entries:
                tell("".join(f"{entry.name} {checkpoint}\n" for checkpoint in entry.checkpoints), nl=False)
