"""A sample of the strikes that `test_kills` and `test_full_disks` deal out, by one warm process."""

from collections.abc import Callable

import pytest
from campaigns import strikes
from campaigns.places import Prepared
from campaigns.watched import Watcher

NAME = "convert-report"


def test_killed_at_some_changes(watcher: Watcher, prepared: Callable[[str], Prepared]) -> None:
    command = prepared(NAME)
    for at in (1, *strikes.some_changes(command, NAME, "SIGKILL", 1), len(command.changes)):
        assert strikes.kill(watcher, command, "SIGKILL", at) != "ended"
    assert strikes.kill(watcher, command, "SIGINT", 1) == "earlier, again"


@pytest.mark.parametrize("what", ["ENOSPC", "EIO", "EROFS", "EMFILE"])
def test_refused_at_the_first_change(what: str, watcher: Watcher, prepared: Callable[[str], Prepared]) -> None:
    assert strikes.refuse(watcher, prepared(NAME), what, 1) == "earlier, again"


def test_the_moments_are_spread_over_a_command(prepared: Callable[[str], Prepared]) -> None:
    command = prepared(NAME)
    last = len(command.changes)
    every, few = strikes.every_change(command, NAME, "SIGKILL", 1), strikes.every_change(command, NAME, "SIGKILL", 99)
    calls = [command.changes[at - 1].partition(" ")[0] for at in every]
    assert every == sorted(set(every))
    assert set(few) <= set(every)
    assert (len(few), few[0], few[-1]) == (strikes.SEVERAL, every[0], every[-1])
    assert every[0] == 1
    assert every[-1] > last - 5
    assert {"mkdir", "openat", "write", "fsync", "rename"} <= set(calls)
