"""One strike at one command: what it is struck with, and what must come of it.

Kills must leave the earlier output or the new one, whole; what the system refuses must be told in one line; and the
command that is run again, as its message says, ends as one that was never struck.
"""

import errno
import os
import random
import re

from campaigns.commands import READING, SHARING, WRITING, Command
from campaigns.places import Prepared, check_done, check_line, check_struck, go_on
from campaigns.watched import Outcome, Watcher
from campaigns.zygote import BEFALLEN, resize

PLENTY = 256 << 20  # bytes of a disk on which everything fits
# Trainings write what `finetune` writes, by the same code: one of so many changes is struck at.
_EVERY = dict.fromkeys(("pretrain-masked-patch", "pretrain-next-patch", "pretrain-contrastive"), 20)
_EVERY |= {"finetune": 2, "finetune-sweep": 30, "demo": 40}


# A campaign for want of time: only one of so many of these changes. The record says it.
THINNED = int(os.environ.get("HF_VIT_STRIKES_THINNED", "1"))


def every_change(prepared: Prepared, name: str, what: str, thinned: int = 1) -> list[int]:
    """The numbers of the changes to strike at, to one after the last; of files of code that are copied in a row one."""
    is_code = [False, *(change.endswith(".py") for change in _befallen(prepared, what)), False]
    numbers = [number for number in range(1, len(is_code)) if not (is_code[number] and is_code[number - 1])]
    return numbers[:: _EVERY.get(name, 1) * thinned * THINNED]


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
        what: see `zygote.Striker`.

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
    assert reason in line or "for want of space" in line, f"the reason is missing: {line}"
    assert re.search(r"; (free|make|have|raise|choose)", line), f"the remedy is missing: {line}"
    return f"{left}, {go_on(watcher, prepared)}"


def named(name: str) -> Command:
    """The command of this name."""
    return (WRITING | READING | SHARING)[name]
