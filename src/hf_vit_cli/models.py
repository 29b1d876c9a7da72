"""`hf-vit models`."""

from pathlib import Path

import typer

from hf_vit_cli.command import print_safely, print_tables
from hf_vit_cli.options import JSON, arg, opt


def models(
    places: list[str] | None = arg(
        None,
        "Where to look: folders of models, Hub users or organizations, or the word papers for the "
        "papers' variants. Default: papers.",
    ),
    search: str | None = opt(None, "Only list models whose name contains this text."),
    family: str | None = opt(
        None,
        "Only list this family: plain, hybrid, axial, local, axial_resnet, bit, mixer, or a model_type such as vit.",
    ),
    judged_on: str | None = opt(None, "Only list results on data sets whose name contains this text."),
    max_parameters: float | None = opt(
        None, "Only list models with at most this many parameters (such as 30e6).", min=1
    ),
    checkpoints: bool = opt(False, "Also list the published checkpoints.", "--checkpoints"),
    as_json: bool = JSON,
    output: Path | None = opt(None, "Write an HTML page with one leaderboard per data set.", dir_okay=False),
) -> None:
    """List models: the papers' variants, folders, a user's repositories; with size, FLOPs, results and checkpoints."""
    from hf_vit.catalogue.listing import list_models
    from hf_vit.display import format_count

    listing = list_models(places or (), search=search, family=family, data=judged_on, max_parameters=max_parameters)
    if output is not None:
        listing.save_page(output)
        print_safely(f"{format_count(len(listing.entries), 'model')} in {output}", err=as_json)
    if as_json:
        typer.echo(listing.to_json())
    elif output is None:
        print_tables(listing.tables())
        if checkpoints:
            for entry in listing.entries:
                for checkpoint in entry.checkpoints:
                    print_safely(f"{entry.name} {checkpoint}")
