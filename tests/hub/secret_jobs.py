"""A command in an environment full of secrets."""

import os
from pathlib import Path


def command_with_secrets(arguments: list[str]) -> None:
    """hf-vit, with a stored token, tokens of others in the environment and a secret in the home folder."""
    from hub.jobs import program, stored_token

    stored_token("hf_alice_write")
    home = Path.cwd()
    (home / ".secret").write_text("x")
    os.environ |= {"AWS_SECRET_ACCESS_KEY": "x", "WANDB_TOKEN": "x", "HOME": str(home)}
    program(*arguments)
