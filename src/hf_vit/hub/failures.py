"""The Hub's failures in one line each: what happened, why, and what to do. Also: which pass, and how long to wait."""

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session

from hf_vit.errors import UserError

ATTEMPTS = 5
# No new attempt after so many seconds: the client itself has been retrying in the meantime.
PATIENCE = 130.0
# A server that asks for a longer wait is not waited for.
LONGEST_WAIT = 120.0
# A connection on which nothing moves for so long is given up; huggingface_hub itself waits for ever.
STALL = 120.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)
# What the HTTP library raises; which one it is depends on huggingface_hub's version.
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
_Answer = TypeVar("_Answer")


def login_help() -> str:
    """Where a token is looked for, and how to get one."""
    return (
        f"a token is looked for in the environment variable HF_TOKEN, then in the file {constants.HF_TOKEN_PATH}; "
        "run `hf auth login`, or set HF_TOKEN to one with write rights (huggingface.co/settings/tokens)"
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


def chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, the outermost first."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is not None and current not in found:
            found.append(current)
            waiting += [current.__cause__, current.__context__]
    return found


def response_of(error: BaseException) -> Any:
    """The HTTP response behind an error; None without one."""
    for link in chain(error):
        if isinstance(link, HfHubHTTPError):
            return link.response
    return None


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error; None without one."""
    response = response_of(error)
    if response is not None:
        return int(response.status_code)
    for link in chain(error):  # hf_xet's errors are text alone
        found = re.search(r"\bHTTP status[^(]*\((\d{3}) |\bstatus code:? (\d{3})\b", str(link))
        if found:
            return int(found[1] or found[2])
    return None


def is_connection(error: BaseException) -> bool:
    """Whether the network, or the server's silence, is behind an error."""
    kinds = (_HTTP_ERROR, ConnectionError, TimeoutError)
    # hf_xet raises RuntimeError and OSError of its own for what befalls its connections.
    words = re.compile(r"error sending request|connection|timed? ?out|reset by peer|network|incomplete message", re.I)
    return any(
        isinstance(link, kinds) or (type(link) in (RuntimeError, OSError) and words.search(str(link)))
        for link in chain(error)
        if not isinstance(link, OfflineModeIsEnabled | HfHubHTTPError)
    )


def is_passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    status = status_of(error)
    return status in _PASSING if status is not None else is_connection(error)


def wait_asked(error: BaseException) -> float | None:
    """Seconds of the answer's Retry-After."""
    response = response_of(error)
    value = response.headers.get("Retry-After", "") if response is not None else ""
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None


def try_again(
    action: Callable[[], _Answer],
    doing: str,
    *,
    say: Callable[[str], None],
    landed: Callable[[], _Answer | None] = lambda: None,
) -> _Answer:
    """Do something with the Hub, and again while the failure is one that passes: at most `ATTEMPTS` times.

    Args:
        doing: names the action in messages: "the upload".
        say: is told of every wait.
        landed: looks whether a failed attempt had its effect all the same (a lost reply), and gives its result.

    Raises:
        Exception: that of the last attempt.
        UserError: the server asks for a longer wait than `LONGEST_WAIT`.
    """
    began = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _stalls_are_errors():
                return action()
        except Exception as error:
            if not is_passing(error):
                raise
            found = _quietly(landed)
            if found is not None:
                return found
            wait = wait_asked(error)
            if wait is not None and wait > LONGEST_WAIT:
                raise UserError(
                    f"{doing}: the Hub asks to wait {wait:.0f} s ({reason(error)}); run the same command again then"
                ) from error
            if attempt == ATTEMPTS or time.monotonic() - began > PATIENCE:
                raise
            wait = 2.0 ** (attempt - 1) if wait is None else wait
            say(f"{doing} failed ({reason(error)}); attempt {attempt + 1} of {ATTEMPTS} in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("unreachable")


def _quietly(landed: Callable[[], _Answer | None]) -> _Answer | None:
    """`landed`, where asking may fail for the same reason as the action did."""
    try:
        with _stalls_are_errors():
            return landed()
    except Exception as error:
        if not is_passing(error):
            raise
        return None


@contextmanager
def _stalls_are_errors() -> Generator[None]:
    """Within, a connection on which nothing moves for `STALL` seconds raises."""
    session = get_session()
    before = session.timeout
    session.timeout = STALL
    try:
        yield
    finally:
        session.timeout = before


def reason(error: BaseException) -> str:
    """The telling line of an error: the server's own words, else the innermost cause."""
    for link in chain(error):
        if isinstance(link, HfHubHTTPError):
            words = (link.server_message or link.response.headers.get("X-Error-Message") or "").strip()
            return f"HTTP {link.response.status_code}" + (f": {' '.join(words.split())}" if words else "")
    causes = [link for link in chain(error) if str(link).strip()]
    innermost = causes[-1] if causes else error
    text = " ".join(str(innermost).split()) or type(innermost).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def explain(error: BaseException, repo_id: str, *, explicit_token: bool = False) -> UserError:
    """A failure of the Hub as the one line a user reads."""
    if isinstance(error, UserError):
        return error
    status = status_of(error)
    if isinstance(error, OfflineModeIsEnabled) or constants.is_offline_mode():
        return UserError("offline mode is on, so the Hub cannot be reached; unset HF_HUB_OFFLINE")
    if isinstance(error, LocalTokenNotFoundError):
        return UserError(f"there is no token for the Hub: {login_help()}")
    if isinstance(error, HFValidationError):
        return UserError(f"'{repo_id}' cannot be the name of a repository ({reason(error)})")
    if isinstance(error, GatedRepoError):
        return UserError(f"{repo_id} is gated: ask for access on {constants.ENDPOINT}/{repo_id}, then log in")
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{repo_id} has no such revision; its branches and tags: {constants.ENDPOINT}/{repo_id}/tree")
    if status == 401 and "Invalid credentials" in reason(error):
        return UserError(f"{token_source(explicit_token)} is invalid or expired: {login_help()}")
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return UserError(
            f"{repo_id} was not found, or this token (or its absence) does not allow to see it; check the name. "
            f"By the way: {login_help()}"
        )
    if status == 403:
        return UserError(
            f"{token_source(explicit_token)} gives no right to write to {repo_id} ({reason(error)}); use a token with "
            "the role write, or propose the change with --create-pr"
        )
    if status == 429:
        return UserError(f"the Hub limits the rate of requests ({reason(error)}); try again later")
    if status is not None and status >= 500:
        return UserError(f"the Hub fails at the moment ({reason(error)}); try again later")
    if status is None and is_connection(error):
        return UserError(f"the Hub or its storage cannot be reached ({reason(error)}); check the network, try again")
    return UserError(f"the Hub refused: {reason(error)}")
