"""One strike at one command: what it is struck with, and what must come of it.

Kills must leave the earlier output or the new one, whole; what the system refuses must be told in one line; and the
command that is run again, as its message says, ends as one that was never struck.
"""

import errno
import os
import random
import re
from itertools import groupby

from campaigns.commands import READING, SHARING, WRITING, Command
from campaigns.places import Prepared, check_done, check_line, check_struck, go_on
from campaigns.striker import BEFALLEN, resize
from campaigns.watched import Outcome, Watcher

PLENTY = 256 << 20  # bytes of a disk on which everything fits
# A campaign for want of time: only one of so many moments, but of each command several. The record says it.
THINNED, SEVERAL = int(os.environ.get("HF_VIT_STRIKES_THINNED", "1")), 6
# What these write, `finetune` or `verify` writes by the same code: several moments will do.
_LIKE_ANOTHER = ("finetune-", "pretrain-", "demo", "verify-")


def every_change(prepared: Prepared, name: str, what: str, thinned: int = THINNED) -> list[int]:
    """The numbers of the changes to strike at, the first and the last among them; of alike ones in a row the middle."""
    rows = groupby(enumerate(_befallen(prepared, what), 1), lambda numbered: _kind(numbered[1]))
    numbers = [[number for number, _ in row] for _, row in rows]
    moments = [row[len(row) // 2] for row in numbers]
    wanted = SEVERAL if name.startswith(_LIKE_ANOTHER) else max(SEVERAL, len(moments) // thinned)
    count = min(len(moments), wanted)
    return [moments[round(index * (len(moments) - 1) / max(count - 1, 1))] for index in range(count)]


def _kind(change: str) -> str:
    """Alike in a row: files of code that are copied, what is removed from a folder, the pieces of a file."""
    call, _, path = change.partition(" ")
    if path.endswith(".py") and call != "rename":
        return "copied"
    return f"removed {os.path.dirname(path)}" if call in ("unlink", "unlinkat", "rmdir") else change


def some_changes(prepared: Prepared, name: str, what: str, count: int) -> list[int]:
    """A seeded choice."""
    last = len(_befallen(prepared, what))
    return sorted(random.Random(name + what).sample(range(1, last + 1), min(count, last)))


def _befallen(prepared: Prepared, what: str) -> list[str]:
    """The changes that `what` can strike at."""
    return [change for change in prepared.changes if what not in BEFALLEN or BEFALLEN[what](change.partition(" ")[0])]


def kill(watcher: Watcher, prepared: Prepared, what: str, at: int = 0, after: float | None = None) -> str:
    """Kill a command, or tell it to end, and go on.

    Returns:
        What was left, and how it went on.

    Raises:
        AssertionError: a promise was broken.
    """
    prepared.lay_out(watcher.place)
    outcome = watcher.run(*prepared.command.arguments, what=what, at=at, after=after)
    left = check_struck(prepared, watcher.place)
    if outcome.code == 0:  # it had ended, or was about to
        check_done(prepared, watcher.place)
        return "ended"
    if what == "SIGKILL":
        assert outcome.code == -9, outcome
    elif what == "SIGINT" or outcome.code == 130:
        assert outcome.code == 130, outcome
        check_stopped(watcher, prepared, outcome)
    else:
        assert outcome.code in (-15, 143), outcome
    return f"{left}, {go_on(watcher, prepared)}"


def check_stopped(watcher: Watcher, prepared: Prepared, outcome: Outcome) -> None:
    """What a stopped command says is true.

    Raises:
        AssertionError: it is not.
    """
    line, out = check_line(outcome), watcher.place / "out"
    assert line.startswith("hf-vit: stopped; "), line
    if kept := re.search(r"(checkpoint-\d+) in out is complete", line):
        assert any(out.rglob(kept[1])), line
    elif "what is finished is in out" in line or "what was done is in out" in line:
        assert any(out.iterdir()), line
    elif "nothing was written yet" in line or "nothing is finished yet" in line:
        assert not [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")], line
    elif "is complete" in line:
        assert {path.name for path in out.iterdir()} >= {"config.json", "facts.json", "model.safetensors"}, line
    else:
        assert "nothing is left half-written" in line or "no checkpoint was complete yet" in line, line


def refuse(watcher: Watcher, prepared: Prepared, what: str, at: int) -> str:
    """Let the system refuse a change, and those after it; then put that right and go on.

    Args:
        what: see `striker.Striker`.

    Returns:
        What was left, and how it went on.

    Raises:
        AssertionError: a promise was broken.
    """
    prepared.lay_out(watcher.place)
    outcome = watcher.run(*prepared.command.arguments, what=what, at=at)
    if what == "FULL":
        resize(watcher.place, PLENTY)
    left = check_struck(prepared, watcher.place)
    if outcome.code == 0:
        assert left == "new", f"exit 0, but what is there is {left}"
        return f"did without, {go_on(watcher, prepared)}"  # what it could not remove goes then
    assert outcome.code == 1, outcome
    line = check_line(outcome)
    reason = os.strerror(errno.ENOSPC if what == "FULL" else getattr(errno, what))
    told = (reason, "for want of space", "MiB free and")  # the last before a training starts
    assert any(one in line for one in told), f"the reason is missing: {line}"
    assert re.search(r"; (free|make|have|raise|choose)", line), f"the remedy is missing: {line}"
    return f"{left}, {go_on(watcher, prepared)}"


def named(name: str) -> Command:
    """The command of this name."""
    return (WRITING | READING | SHARING)[name]
