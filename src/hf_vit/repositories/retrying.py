"""Doing something with the Hub, and again where the failure is one that passes: which, how often, how long between."""

import logging
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session
from huggingface_hub.utils import logging as client_log

from hf_vit.errors import UserError, one_line

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


def chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, the outermost first."""
    links: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is not None and current not in links:
            links.append(current)
            waiting += [current.__cause__, current.__context__]
    return links


def response_of(error: BaseException) -> Any:
    """The HTTP response behind an error; None without one."""
    return next((link.response for link in chain(error) if isinstance(link, HfHubHTTPError)), None)


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error; None without one."""
    response = response_of(error)
    if response is not None:
        return int(response.status_code)
    for link in chain(error):  # hf_xet's errors are text alone
        if match := re.search(r"\bHTTP status[^(]*\((\d{3}) |\bstatus code:? (\d{3})\b", str(link)):
            return int(match[1] or match[2])
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
    if isinstance(error, UserError) or not isinstance(error, Exception):  # told already; an interruption
        return False
    status = status_of(error)
    return status in _PASSING if status is not None else is_connection(error)


def wait_asked(error: BaseException) -> float | None:
    """Seconds that the answer asks to wait: Retry-After as a number or a date, or the rest of a rate limit's window."""
    response = response_of(error)
    if response is None:
        return None
    after: str = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", after):
        return float(after)
    try:
        return max(0.0, (parsedate_to_datetime(after).astimezone(UTC) - datetime.now(UTC)).total_seconds())
    except ValueError:  # none, or no date
        pass
    window = re.search(r"\bt\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
    return float(window[1]) if window and response.status_code == 429 else None


def reason(error: BaseException) -> str:
    """The telling line of an error: the server's own words, else the innermost cause. No query of an address."""
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

    beginning, number = time.monotonic(), 0
    while True:
        number += 1
        try:
            with _one_attempt():
                return action()
        except Exception as error:
            if not is_passing(error):
                raise
            if (result := _unless_failing(landed)) is not None:
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


def _unless_failing(landed: Callable[[], _Answer | None]) -> _Answer | None:
    """`landed`, where asking may fail for the same reason as the action did."""
    try:
        with _one_attempt():
            return landed()
    except Exception as error:
        if not is_passing(error):
            raise
        return None


@contextmanager
def _one_attempt() -> Generator[None]:
    """Within, a connection on which nothing moves for `STALL` seconds raises, and the client's own log is silent.

    The log names signed addresses, over a hundred lines for a storage that always fails; every wait is told by `say`.
    """
    session, verbosity = get_session(), client_log.get_verbosity()
    timeout, session.timeout = session.timeout, STALL
    client_log.set_verbosity(max(verbosity, logging.ERROR))
    try:
        yield
    finally:
        session.timeout = timeout
        client_log.set_verbosity(verbosity)
