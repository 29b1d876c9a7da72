"""Talk to the Hub: try again what may pass, and tell in one line what failed, why, and what to do."""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session, validate_repo_id
from huggingface_hub.utils import logging as client_log

from hf_vit.errors import UserError, one_line

ATTEMPTS = 5
PATIENCE = 130.0  # seconds after which no new attempt begins: the client itself has been retrying meanwhile
LONGEST_WAIT = 120.0  # a server that asks for more is not waited for
STALL = 120.0  # seconds without a byte after which a connection is given up; huggingface_hub itself waits for ever
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # of the HTTP library, which depends on huggingface_hub's version
# hf_xet raises RuntimeError and OSError of its own for what befalls its connections.
_BROKEN = re.compile(r"error sending request|connection|timed? ?out|reset by peer|network|incomplete message", re.I)
_Answer = TypeVar("_Answer")


def check_repo_id(repo_id: str) -> None:
    """Refuse what cannot be a repository's name: "user/name", or "name" for one's own."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        why = str(error).partition(": ")[0].split(" Use ")[0]
        raise UserError(
            f"'{repo_id}' cannot be the name of a repository ({why}); give user/name of letters, digits, -, _ and ."
        ) from error


def chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the outermost first."""
    links, waiting = list[BaseException](), [error]
    while waiting:
        current = waiting.pop(0)
        if current not in links:
            links.append(current)
            waiting += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
    return links


def response_of(error: BaseException) -> Any:
    """Return the HTTP response behind an error; None without one."""
    return next((link.response for link in chain(error) if isinstance(link, HfHubHTTPError)), None)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error; None without one."""
    if (response := response_of(error)) is not None:
        return int(response.status_code)
    for link in chain(error):  # hf_xet's errors are text alone
        if match := re.search(r"\bHTTP status[^(]*\((\d{3}) |\bstatus code:? (\d{3})\b", str(link)):
            return int(match[1] or match[2])
    return None


def wait_asked(error: BaseException) -> float | None:
    """Return the seconds that the answer asks to wait: Retry-After, or the rest of a rate limit's window."""
    if (response := response_of(error)) is None:
        return None
    after: str = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", after):
        return float(after)
    try:
        return max(0.0, (parsedate_to_datetime(after).astimezone(UTC) - datetime.now(UTC)).total_seconds())
    except ValueError:  # none, or no date
        window = re.search(r"\bt\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
        return float(window[1]) if window and response.status_code == 429 else None


def reason(error: BaseException) -> str:
    """Return the telling line of an error: the server's words, else the innermost cause. No query of an address."""
    links = chain(error)
    if http := next((link for link in links if isinstance(link, HfHubHTTPError)), None):
        words = (http.server_message or http.response.headers.get("X-Error-Message") or "").strip()
        text = f"HTTP {http.response.status_code}" + (f": {one_line(words)}" if words else "")
    else:
        innermost = next((link for link in reversed(links) if str(link).strip()), error)
        text = one_line(innermost) or type(innermost).__name__
    text = re.sub(r"(\w+://[^\s?'\"<>()]+)\?[^\s'\"<>()]*", r"\1", text)  # a signature opens what it signs
    return text if len(text) <= 300 else text[:297] + "..."


def try_again(
    action: Callable[[], _Answer],
    doing: str,
    *,
    say: Callable[[str], None] = lambda line: None,
    landed: Callable[[], _Answer | None] = lambda: None,
) -> _Answer:
    """Do something with the Hub, and again while the failure may pass: at most `ATTEMPTS` times.

    Args:
        doing: names the action in messages: "the upload".
        say: is told of every wait.
        landed: looks whether a failed attempt had its effect all the same (a lost reply), and gives its result.

    Raises:
        Exception: that of the last attempt.
        UserError: the server asks for a longer wait than `LONGEST_WAIT`.
    """
    beginning, number = time.monotonic(), 0
    while True:
        number += 1
        try:
            with _one_attempt():
                return action()
        except Exception as error:
            if not _may_pass(error):
                raise
            try:
                with _one_attempt():
                    result = landed()
            except Exception as failure:  # asking may fail for the same reason
                if not _may_pass(failure):
                    raise
                result = None
            if result is not None:
                return result
            asked = wait_asked(error)
            if asked is not None and asked > LONGEST_WAIT:
                raise UserError(
                    f"{doing}: the Hub asks to wait {asked:.0f} s ({reason(error)}); run the same command again then"
                ) from error
            if number >= ATTEMPTS or time.monotonic() - beginning >= PATIENCE:
                raise
            wait = 2.0 ** (number - 1) if asked is None else asked
            say(f"{doing} failed ({reason(error)}); attempt {number + 1} of {ATTEMPTS} in {wait:.0f} s")
            time.sleep(wait)


def _may_pass(error: Exception) -> bool:
    status = status_of(error)
    return not isinstance(error, UserError) and (status in _PASSING if status is not None else _is_connection(error))


def _is_connection(error: BaseException) -> bool:
    """Return whether the network, or the server's silence, is behind an error."""
    return any(
        isinstance(link, (_HTTP_ERROR, ConnectionError, TimeoutError))
        or (type(link) in (RuntimeError, OSError) and _BROKEN.search(str(link)))
        for link in chain(error)
        if not isinstance(link, OfflineModeIsEnabled | HfHubHTTPError)
    )


@contextmanager
def _one_attempt() -> Generator[None]:
    """Give up a stalled connection, and silence the client's log, which names signed addresses; `say` tells instead."""
    session, verbosity = get_session(), client_log.get_verbosity()
    timeout, session.timeout = session.timeout, STALL
    client_log.set_verbosity(max(verbosity, logging.ERROR))
    try:
        yield
    finally:
        session.timeout = timeout
        client_log.set_verbosity(verbosity)


def login_help() -> str:
    """Say how to get a token."""
    return (
        f"run `hf auth login`, which writes {constants.HF_TOKEN_PATH}, or set HF_TOKEN to a token with write rights "
        "(huggingface.co/settings/tokens)"
    )


def token_source(explicit: bool) -> str:
    """Say where the token in use comes from."""
    stored = Path(constants.HF_TOKEN_PATH).is_file()
    if explicit:
        return "the token that was given"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            override = f", which overrides the one that `hf auth login` stored in {constants.HF_TOKEN_PATH}"
            return f"the token of the environment variable {name}" + override * stored
    return f"the token in {constants.HF_TOKEN_PATH}" if stored else "the token of this environment"


def explain(error: BaseException, repo_id: str, *, explicit_token: bool = False, reading: bool = False) -> UserError:
    """Turn a failure of the Hub into the one line a user reads; `reading`: nothing was to be written there."""
    return error if isinstance(error, UserError) else UserError(_explain(error, repo_id, explicit_token, reading))


def _explain(error: BaseException, repo_id: str, explicit_token: bool, reading: bool) -> str:
    telling = (HFValidationError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    error = next((link for link in chain(error) if isinstance(link, telling)), error)
    why, status, token = reason(error), status_of(error), token_source(explicit_token)
    if isinstance(error, HFValidationError):
        return f"'{repo_id}' cannot be the name of a repository ({why})"
    if isinstance(error, OfflineModeIsEnabled) or constants.is_offline_mode():
        return "offline mode is on, so the Hub cannot be reached; unset HF_HUB_OFFLINE"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token for the Hub: {login_help()}"
    if isinstance(error, GatedRepoError):
        is_known = explicit_token or get_token() is not None
        then = f" as the owner of {token}" if is_known else f", then log in: {login_help()}"
        return f"{repo_id} is gated: ask for access on {constants.ENDPOINT}/{repo_id}{then}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no such revision; its branches and tags: {constants.ENDPOINT}/{repo_id}/tree"
    if status is None:  # no server said anything: the disk, the network, or what nobody thought of
        if any(getattr(link, "errno", None) == errno.ENOSPC or "os error 28" in str(link) for link in chain(error)):
            return (
                f"the disk is full ({why}); make room, or name a folder on another disk in HF_HOME, where downloads "
                "are kept"
            )
        if _is_connection(error):
            return f"the Hub or its storage cannot be reached ({why}); check the network, try again"
    elif status == 401 and "Invalid credentials" in why:
        return f"{token} is invalid or expired: {login_help()}"
    elif isinstance(error, RepositoryNotFoundError) or status == 401:
        return (
            f"{repo_id} was not found, or this token (or its absence) has no access; check the name, or log "
            f"in: {login_help()}"
        )
    elif status in (402, 403) and re.search(r"\b(storage|quota)\b", why, re.IGNORECASE):
        return (
            f"the Hub has no room left for {repo_id} ({why}); delete what its owner no longer needs, or ask for more "
            "storage"
        )
    elif status == 403 and reading:
        return f"{token} gives no right to read {repo_id} ({why})"
    elif status == 403:
        return (
            f"{token} gives no right to write to {repo_id} ({why}); use a token with the role write, or propose the "
            "change with --create-pr"
        )
    elif status == 429:
        wait = wait_asked(error)
        return (
            f"the Hub limits the rate of requests ({why}); try again {'later' if wait is None else f'in {wait:.0f} s'}"
        )
    elif status >= 500:
        return f"the Hub has an internal error ({why}); try again later"
    return f"the Hub refused: {why}"
