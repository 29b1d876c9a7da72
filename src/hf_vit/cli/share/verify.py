"""`hf-vit verify`."""

from typing import Annotated

import typer


def verify(
    repo: Annotated[str, typer.Argument(help="Name on the Hub: user/name.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; by default main.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Also run the code that comes with the model, and any example."),
    ] = False,
) -> None:
    """Download a shared model, compare every checksum, and run the examples of its card."""
    from hf_vit.hub.preflight import check_repo_id
    from hf_vit.hub.verify import describe, verify_repo

    check_repo_id(repo)
    result = verify_repo(repo, revision=revision, trust_remote_code=trust_remote_code, report=typer.echo)
    typer.echo(describe(result))
