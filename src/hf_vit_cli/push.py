"""`hf-vit push`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_vit_cli import options
from hf_vit_cli.options import arg, opt


@options.takes("share_images")
def push(
    model: Annotated[Path, arg("Folder of a saved model; of a page with --space.")],
    repo: Annotated[str, arg("Name on the Hub: user/name, or name for your own.")],
    private: Annotated[bool, opt("Create a private repository.", "--private")] = False,
    revision: Annotated[str | None, opt("Branch; made from main if it is not there.")] = None,
    create_pr: Annotated[bool, opt("Propose the change as a pull request.", "--create-pr")] = False,
    tag: Annotated[str | None, opt("Name for the new commit, for example v1.0.")] = None,
    collection: Annotated[
        str | None, opt("Put it into this collection: a title, made if there is none, or a slug.")
    ] = None,
    license: Annotated[str | None, opt("Hub license id; else the card's or base model's.")] = None,
    max_shard_size: Annotated[str, opt("Larger weight files are split.")] = "5GB",
    space: Annotated[bool, opt("Share the page that hf-vit page wrote, as a static Space.", "--space")] = False,
    dry_run: Annotated[bool, opt("Check everything, change nothing.", "--dry-run")] = False,
    **shared: Any,
) -> None:
    """Share a model: weights, code, processor, card, pictures and facts in one commit, checked before and after."""
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
