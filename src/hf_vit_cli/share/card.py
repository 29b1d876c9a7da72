"""`hf-vit card`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_vit_cli import options


def card(
    model: Annotated[Path, typer.Argument(help="Folder of a saved model.", show_default=False)],
    repo: Annotated[str | None, typer.Option(help="Name on the Hub, for the examples: user/name.")] = None,
    license: Annotated[str | None, typer.Option(help="Hub license id, for example apache-2.0 or cc-by-4.0.")] = None,
    share_images: options.ShareImages = False,
) -> None:
    """Write a model's card, MODEL/README.md, from its recorded facts."""
    from hf_vit.errors import UserError
    from hf_vit.hub.card import write_card
    from hf_vit.hub.preflight import check_repo_id

    if repo is not None:
        check_repo_id(repo)
    if not model.is_dir():
        raise UserError(f"there is no folder {model}; give the folder of a saved model")
    print(f"wrote {write_card(model, repo_id=repo, license=license, share_images=share_images)}")
