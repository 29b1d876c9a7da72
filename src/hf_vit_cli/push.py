"""`hf-vit push`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import collect_options, print_safely
from hf_vit_cli.options import arg, opt
from hf_vit_settings import UserError


@options.with_options("share_images")
def push(
    model: Path = arg(..., "Folder of a saved model, or with --space the folder of a page."),
    repo: str = arg(..., "Repository on the Hub: user/name, or name for your own account."),
    sdk: str | None = arg(None, "After --space: gradio, for a saved model with an app. Default: static, for a page."),
    private: bool = opt(False, "If the repository does not exist, create it as private.", "--private"),
    revision: str | None = opt(None, "Branch to push to; created from main if it does not exist."),
    create_pr: bool = opt(False, "Open a pull request instead of committing.", "--create-pr"),
    tag: str | None = opt(None, "Tag for the new commit, for example v1.0."),
    collection: str | None = opt(None, "Collection to add the repository to: a title (created if needed) or a slug."),
    license: str | None = opt(
        None, "Hub license id, for example apache-2.0. Default: the card's, else the base model's."
    ),
    max_shard_size: str = opt("5GB", "Maximum size of a weight file, such as 5GB; larger files are split."),
    space: bool = opt(
        False, "Push a page of hf-vit page as a static Space; with --space gradio a model with an app.", "--space"
    ),
    dry_run: bool = opt(False, "Run all checks without changing anything on the Hub.", "--dry-run"),
    **shared: Any,
) -> None:
    """Push a model to the Hub in one commit: weights, code, processor, card, plots and records."""
    values = collect_options(locals(), "model", "repo", "sdk")
    if sdk is not None:
        if not space:
            raise UserError(f"unexpected argument {sdk}; write --space {sdk} for a Space, or remove it")
        values["space"] = sdk
    from hf_vit.hub.push import push_to_hub

    result = push_to_hub(model, repo, **values, report=print_safely)
    print_safely(result.describe())
