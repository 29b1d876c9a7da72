"""`hf-vit verify`."""

from typing import Annotated

import typer


def verify(
    repo: Annotated[str, typer.Argument(help="Name on the Hub: user/name.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; by default main.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Also run the card's examples and the model's own code."),
    ] = False,
) -> None:
    """Download a shared model, compare every checksum, load it and ask it about an image."""
    from hf_vit.hub.preflight import check_repo_id
    from hf_vit.hub.verify import describe, verify_repo

    check_repo_id(repo)
    result = verify_repo(repo, revision=revision, trust_remote_code=trust_remote_code, report=typer.echo)
    typer.echo(describe(result))
