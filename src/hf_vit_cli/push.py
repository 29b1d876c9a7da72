"""`hf-vit push`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.options import arg, opt


@options.takes("share_images")
def push(
    model: Annotated[Path, arg("Folder of a saved model; with --space, of a page.")],
    repo: Annotated[str, arg("Repository on the Hub: user/name, or name for your own account.")],
    private: Annotated[bool, opt("Create a private repository.", "--private")] = False,
    revision: Annotated[str | None, opt("Branch to push to; created from main if it does not exist.")] = None,
    create_pr: Annotated[bool, opt("Open a pull request instead of committing.", "--create-pr")] = False,
    tag: Annotated[str | None, opt("Name for the new commit, for example v1.0.")] = None,
    collection: Annotated[
        str | None, opt("Collection to add the repository to: a title (created if needed) or a slug.")
    ] = None,
    license: Annotated[str | None, opt("Hub license id; else the card's or base model's.")] = None,
    max_shard_size: Annotated[str, opt("Largest weight file; larger ones are split: 5GB.")] = "5GB",
    space: Annotated[bool, opt("Push a page written by hf-vit page as a static Space.", "--space")] = False,
    dry_run: Annotated[bool, opt("Check everything without pushing.", "--dry-run")] = False,
    **shared: Any,
) -> None:
    """Push a model to the Hub in one commit: weights, code, processor, card, plots and records."""
    from hf_vit.hub.preflight import check_repo_id
    from hf_vit.hub.push import push_to_hub
    from hf_vit.hub.push_result import describe

    check_repo_id(repo)
    result = push_to_hub(
        model,
        repo,
        private=private,
        revision=revision,
        create_pr=create_pr,
        tag=tag,
        collection=collection,
        license=license,
        max_shard_size=max_shard_size,
        space=space,
        dry_run=dry_run,
        report=typer.echo,
        **shared,
    )
    typer.echo(describe(result))
