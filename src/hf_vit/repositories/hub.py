"""Send requests to the Hub: retry temporary failures, and explain others in one line with a remedy."""

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

from hf_vit.errors import UserError, to_one_line

ATTEMPTS = 5
PATIENCE = 130.0  # seconds after which no new attempt starts; the client itself also retries
LONGEST_WAIT = 120.0  # seconds; if the server asks for a longer wait, the user has to retry
STALL = 120.0  # seconds without data after which a connection is closed; huggingface_hub has no limit
_TEMPORARY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # of the HTTP library, which depends on huggingface_hub's version
# hf_xet raises RuntimeError and OSError for connection failures.
_CONNECTION_FAILURE = re.compile(
    r"error sending request|connection|timed? ?out|reset by peer|network|incomplete message", re.I
)
_Result = TypeVar("_Result")


def check_repo_id(repo_id: str) -> None:
    """Raise a UserError if this cannot be a repository's name ("user/name", or "name" for one of the user's own)."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = str(error).partition(": ")[0].split(" Use ")[0]
        remedy = "give user/name with letters, digits, -, _ and ."
        raise UserError(f"'{repo_id}' cannot be the name of a repository ({reason}); {remedy}") from error


def list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and all its causes, the outermost first."""
    errors = list[BaseException]()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if current not in errors:
            errors.append(current)
            queue += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
    return errors


def find_response(error: BaseException) -> Any:
    """Return the HTTP response that caused an error, or None."""
    return next((cause.response for cause in list_causes(error) if isinstance(cause, HfHubHTTPError)), None)


def find_status(error: BaseException) -> int | None:
    """Return the HTTP status that caused an error, or None."""
    response = find_response(error)
    if response is not None:
        return int(response.status_code)
    for cause in list_causes(error):  # errors of hf_xet contain the status only as text
        if match := re.search(r"\bHTTP status[^(]*\((\d{3}) |\bstatus code:? (\d{3})\b", str(cause)):
            return int(match[1] or match[2])
    return None


def find_retry_after(error: BaseException) -> float | None:
    """Return the seconds to wait according to the response: Retry-After, or the rest of the rate limit's window."""
    response = find_response(error)
    if response is None:
        return None
    retry_after: str = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", retry_after):
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after).astimezone(UTC) - datetime.now(UTC)).total_seconds())
    except ValueError:  # the header is missing or not a date
        window = re.search(r"\bt\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
        return float(window[1]) if window and response.status_code == 429 else None


def summarize_error(error: BaseException) -> str:
    """Return the most informative line of an error (the server's message or the innermost cause), without queries."""
    causes = list_causes(error)
    http_error = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if http_error is not None:
        message = (http_error.server_message or http_error.response.headers.get("X-Error-Message") or "").strip()
        text = f"HTTP {http_error.response.status_code}" + (f": {to_one_line(message)}" if message else "")
    else:
        innermost = next((cause for cause in reversed(causes) if str(cause).strip()), error)
        text = to_one_line(innermost) or type(innermost).__name__
    # Cut the queries of URLs off, which may contain a signature that grants access.
    public_text = re.sub(r"(\w+://[^\s?'\"<>()]+)\?[^\s'\"<>()]*", r"\1", text)
    return public_text if len(public_text) <= 300 else public_text[:297] + "..."


def retry(
    action: Callable[[], _Result],
    action_name: str,
    *,
    report: Callable[[str], None] = lambda line: None,
    find_lost_result: Callable[[], _Result | None] = lambda: None,
) -> _Result:
    """Return the result of an action on the Hub, repeated after temporary failures, at most `ATTEMPTS` times.

    `report` is called with a line before every wait; `find_lost_result` returns the result of an attempt that succeeded
    although its reply was lost, else None.

    Raises:
        Exception: the error of the last attempt.
        UserError: the server asks for a longer wait than `LONGEST_WAIT`.
    """
    start = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        try:
            with _configure_client():
                return action()
        except Exception as error:
            if not _is_temporary(error):
                raise
            try:
                with _configure_client():
                    result = find_lost_result()
            except Exception as failure:  # this request may fail for the same reason
                if not _is_temporary(failure):
                    raise
                result = None
            if result is not None:
                return result
            requested_wait = find_retry_after(error)
            if requested_wait is not None and requested_wait > LONGEST_WAIT:
                problem = f"the Hub asks to wait {requested_wait:.0f} s before {action_name} ({summarize_error(error)})"
                raise UserError(f"{problem}; run the same command again after that") from error
            if attempt >= ATTEMPTS or time.monotonic() - start >= PATIENCE:
                raise
            wait = 2.0 ** (attempt - 1) if requested_wait is None else requested_wait
            report(
                f"{action_name} failed ({summarize_error(error)}); attempt {attempt + 1} of {ATTEMPTS} in {wait:.0f} s"
            )
            time.sleep(wait)


def _is_temporary(error: Exception) -> bool:
    """Return whether a later attempt may succeed."""
    if isinstance(error, UserError):
        return False
    status = find_status(error)
    return _is_connection_failure(error) if status is None else status in _TEMPORARY_STATUSES


def _is_connection_failure(error: BaseException) -> bool:
    """Return whether the network failed or the server did not reply."""
    return any(
        isinstance(cause, (_HTTP_ERROR, ConnectionError, TimeoutError))
        or (type(cause) in (RuntimeError, OSError) and _CONNECTION_FAILURE.search(str(cause)))
        for cause in list_causes(error)
        if not isinstance(cause, OfflineModeIsEnabled | HfHubHTTPError)
    )


@contextmanager
def _configure_client() -> Generator[None]:
    """Set a timeout for stalled connections, and silence the client's log, which prints signed URLs."""
    session = get_session()
    verbosity = client_log.get_verbosity()
    timeout = session.timeout
    session.timeout = STALL
    client_log.set_verbosity(max(verbosity, logging.ERROR))
    try:
        yield
    finally:
        session.timeout = timeout
        client_log.set_verbosity(verbosity)


def describe_login() -> str:
    """Return instructions for getting a token."""
    return (
        f"run `hf auth login`, which writes {constants.HF_TOKEN_PATH}, or set HF_TOKEN to a token with write rights "
        "(huggingface.co/settings/tokens)"
    )


def describe_token(explicit: bool) -> str:
    """Return a description of the token in use and where it comes from."""
    if explicit:
        return "the given token"
    token_file = constants.HF_TOKEN_PATH if Path(constants.HF_TOKEN_PATH).is_file() else None
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            override = f", which overrides the one that `hf auth login` stored in {token_file}" if token_file else ""
            return f"the token of the environment variable {name}{override}"
    return f"the token in {token_file}" if token_file else "the token of this environment"


def explain_hub_error(
    error: BaseException, repo_id: str, *, explicit_token: bool = False, reading: bool = False
) -> UserError:
    """Turn a failure of the Hub into a UserError of one line; after `reading`, write access is no remedy."""
    return error if isinstance(error, UserError) else UserError(_explain(error, repo_id, explicit_token, reading))


def _explain(error: BaseException, repo_id: str, explicit_token: bool, reading: bool) -> str:
    specific_errors = (HFValidationError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    error = next((cause for cause in list_causes(error) if isinstance(cause, specific_errors)), error)
    details, status = summarize_error(error), find_status(error)
    token, address = describe_token(explicit_token), f"{constants.ENDPOINT}/{repo_id}"
    if isinstance(error, HFValidationError):
        return f"'{repo_id}' cannot be the name of a repository ({details})"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token for the Hub: {describe_login()}"
    if isinstance(error, OfflineModeIsEnabled) or constants.is_offline_mode():
        return "offline mode is on, so the Hub cannot be reached; unset HF_HUB_OFFLINE"
    if isinstance(error, GatedRepoError):
        has_token = explicit_token or get_token() is not None
        next_step = f" as the owner of {token}" if has_token else f", then log in: {describe_login()}"
        return f"{repo_id} is gated: ask for access on {address}{next_step}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no such revision; see its branches and tags on {address}/tree"
    if status == 401 and "Invalid credentials" in details:
        return f"{token} is invalid or expired: {describe_login()}"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        problem = f"{repo_id} was not found on the Hub, or this token (or its absence) has no access"
        return f"{problem}; check the name, or log in: {describe_login()}"
    if status in (402, 403) and re.search(r"\b(storage|quota)\b", details, re.IGNORECASE):
        return f"the Hub has no room left for {repo_id} ({details}); delete what is not needed, or ask for more storage"
    if status == 403 and reading:
        return f"{token} gives no right to read {repo_id} ({details}); use another token, or ask its owner for access"
    if status == 403:
        problem = f"{token} gives no right to write to {repo_id} ({details})"
        return f"{problem}; use a token with the role write, or propose the change with --create-pr (create_pr=True)"
    if status == 429:
        wait = find_retry_after(error)
        moment = "later" if wait is None else f"in {wait:.0f} s"
        return f"the Hub limits the rate of requests ({details}); try again {moment}"
    if status is not None and status >= 500:
        return f"the Hub has an internal error ({details}); try again later"
    if status is not None:
        return f"the Hub refused the request: {details}; check the name and your rights, or try again later"
    # No reply came from a server: disk, network or an unexpected error.
    if any(getattr(each, "errno", None) == errno.ENOSPC or "os error 28" in str(each) for each in list_causes(error)):
        return f"the disk is full ({details}); make room, or set HF_HOME to a folder on another disk for downloads"
    if _is_connection_failure(error):
        return f"the Hub or its storage cannot be reached ({details}); check the network and try again"
    return f"the request to the Hub failed: {details}; check the name and your rights, or try again later"
