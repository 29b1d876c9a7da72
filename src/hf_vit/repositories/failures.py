"""The Hub's failures in one line each: what happened, why, and what to do."""

import errno
import os
import re
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_vit.errors import UserError
from hf_vit.repositories.retrying import chain, is_connection, reason, status_of, wait_asked


def login_help() -> str:
    """Where a token is looked for, and how to get one."""
    return (
        f"run `hf auth login`, which writes {constants.HF_TOKEN_PATH}, or set HF_TOKEN to a token with write rights "
        "(huggingface.co/settings/tokens)"
    )


def token_source(explicit: bool) -> str:
    """Where the token in use comes from, in words."""
    stored = Path(constants.HF_TOKEN_PATH).is_file()
    if explicit:
        return "the token that was given"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            override = f", which overrides the one that `hf auth login` stored in {constants.HF_TOKEN_PATH}"
            return f"the token of the environment variable {name}" + override * stored
    return f"the token in {constants.HF_TOKEN_PATH}" if stored else "the token of this environment"


def explain(error: BaseException, repo_id: str, *, explicit_token: bool = False, reading: bool = False) -> UserError:
    """A failure of the Hub as the one line a user reads; `reading`: nothing was to be written there."""
    if isinstance(error, UserError):
        return error
    telling = (HFValidationError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    error = next((link for link in chain(error) if isinstance(link, telling)), error)
    if isinstance(error, HFValidationError):
        return UserError(f"'{repo_id}' cannot be the name of a repository ({reason(error)})")
    if isinstance(error, OfflineModeIsEnabled) or constants.is_offline_mode():
        return UserError("offline mode is on, so the Hub cannot be reached; unset HF_HUB_OFFLINE")
    if isinstance(error, LocalTokenNotFoundError):
        return UserError(f"there is no token for the Hub: {login_help()}")
    if isinstance(error, GatedRepoError):
        ask = f"{repo_id} is gated: ask for access on {constants.ENDPOINT}/{repo_id}"
        known = explicit_token or get_token() is not None
        then = f" as the owner of {token_source(explicit_token)}" if known else f", then log in: {login_help()}"
        return UserError(ask + then)
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{repo_id} has no such revision; its branches and tags: {constants.ENDPOINT}/{repo_id}/tree")
    status = status_of(error)
    if status is None:
        return _explain_without_answer(error)
    return _explain_status(status, error, repo_id, explicit_token, reading)


def _explain_without_answer(error: BaseException) -> UserError:
    """No server said anything: the disk, the network, or what nobody thought of."""
    if any(getattr(link, "errno", None) == errno.ENOSPC or "os error 28" in str(link) for link in chain(error)):
        return UserError(
            f"the disk is full ({reason(error)}); make room, or name a folder on another disk in HF_HOME, where "
            "downloads are kept"
        )
    if is_connection(error):
        return UserError(f"the Hub or its storage cannot be reached ({reason(error)}); check the network, try again")
    return UserError(f"the Hub refused: {reason(error)}")


def _explain_status(status: int, error: BaseException, repo_id: str, explicit_token: bool, reading: bool) -> UserError:
    if status == 401 and "Invalid credentials" in reason(error):
        return UserError(f"{token_source(explicit_token)} is invalid or expired: {login_help()}")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return UserError(
            f"{repo_id} was not found, or this token (or its absence) has no access; check the name, or log "
            f"in: {login_help()}"
        )
    if status in (402, 403) and re.search(r"\b(storage|quota)\b", reason(error), re.IGNORECASE):
        return UserError(
            f"the Hub has no room left for {repo_id} ({reason(error)}); delete what its owner no longer needs, or ask "
            "for more storage"
        )
    if status == 403 and reading:
        return UserError(f"{token_source(explicit_token)} gives no right to read {repo_id} ({reason(error)})")
    if status == 403:
        return UserError(
            f"{token_source(explicit_token)} gives no right to write to {repo_id} ({reason(error)}); use a token with "
            "the role write, or propose the change with --create-pr"
        )
    if status == 429:
        wait = wait_asked(error)
        when = "later" if wait is None else f"in {wait:.0f} s"
        return UserError(f"the Hub limits the rate of requests ({reason(error)}); try again {when}")
    if status >= 500:
        return UserError(f"the Hub has an internal error ({reason(error)}); try again later")
    return UserError(f"the Hub refused: {reason(error)}")
