"""What the campaign runs in client processes, in an environment full of secrets."""

import os
import sys
from pathlib import Path
from typing import Any


def surround(secrets: dict[str, str]) -> None:
    """A home and a folder for temporary files of this process' own, and secrets."""
    here = Path.cwd()
    for name in ("home", "tmp"):
        (here / name).mkdir()
    os.environ |= {**secrets, "HOME": str(here / "home"), "TMPDIR": str(here / "tmp")}


def command(arguments: list[str], secrets: dict[str, str]) -> None:
    """hf-vit, as from a shell."""
    surround(secrets)
    sys.argv = ["hf-vit", *arguments]
    from hf_vit_cli.main import main

    if arguments[0] == "page":
        from pages.small_runtime import take_small_files

        take_small_files()
    main(arguments)


def python(name: str, source: str, secrets: dict[str, str]) -> None:
    """A function of the package that takes a repository; a UserError is told as the program tells it."""
    surround(secrets)
    import hf_vit

    call: Any = getattr(hf_vit, name)
    try:
        call(source)
    except hf_vit.UserError as error:
        print(f"hf-vit: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def upload(repo_id: str, folder: str) -> None:
    """A model folder as it is, by huggingface_hub alone."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo_id)
    HfApi().upload_folder(repo_id=repo_id, folder_path=folder)
