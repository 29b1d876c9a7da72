"""The warm process that forks one for every command, watches what it writes, and strikes where it is told to.

python -m campaigns.striker
"""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zygote
from campaigns.system_calls import Change, answer_for, be_watched

# What an error of the system befalls: a full disk takes no more, but gives back; a broken one fails at its content.
_CONTENT = frozenset({"write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range"})
_OPENING = frozenset({"open", "openat", "creat"})
_GROWING = _CONTENT | _OPENING | {"fallocate", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat"}
BEFALLEN: dict[str, Callable[[str], bool]] = {
    "ENOSPC": _GROWING.__contains__,
    "EDQUOT": _GROWING.__contains__,
    "EIO": (_CONTENT | {"fsync", "fdatasync"}).__contains__,
    "EMFILE": _OPENING.__contains__,
    "EROFS": lambda call: True,
    "EACCES": lambda call: call not in _CONTENT | {"fsync", "fdatasync"},
}


class Striker:
    """Lets changes happen until the one it waits for.

    Args:
        at: number of the change, from 1; 0: never.
        what: "SIGKILL", "SIGTERM", "SIGINT", the error that this change, and those after it, fail with, or "FULL": the
            place is a tmpfs and is made so small that nothing more fits.
        after: seconds after which the signal comes instead, wherever the process is.
    """

    def __init__(self, at: int = 0, what: str = "", after: float | None = None) -> None:
        self.at, self.what, self.after = at, what, after
        self.seen: list[str] = []
        self.struck = ""
        self.pid, self.place = 0, ""

    def decide(self, change: Change) -> int | None:
        """See `system_calls.Decide`."""
        befallen = self.what not in BEFALLEN or BEFALLEN[self.what](change.call)
        if not befallen:
            return None
        self.seen.append(f"{change.call} {change.path}")
        if not self.at or len(self.seen) < self.at:
            return None
        if self.what not in BEFALLEN:
            self._strike(self.seen[-1])
            return None
        self.struck = self.struck or self.seen[-1]
        return getattr(errno, self.what)

    def look(self, seconds: float) -> None:
        """The time that has passed."""
        if self.after is not None and seconds >= self.after:
            self._strike(f"after {seconds:.2f} s")

    def _strike(self, where: str) -> None:
        if self.struck:
            return
        self.struck = where
        if self.what == "FULL":
            disk = os.statvfs(self.place)
            resize(self.place, (disk.f_blocks - disk.f_bfree) * disk.f_bsize)
        else:
            os.kill(self.pid, getattr(signal, self.what))


def resize(place: str | Path, size: int) -> None:
    """Another size in bytes for a tmpfs."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def run(
    arguments: list[str], place: str, log: str, strike: dict[str, Any], seconds: float, names: bool
) -> dict[str, Any]:
    """Fork a process that runs `hf-vit` with these arguments, and answer what became of it; see `watched`."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        ours.close()
        os.chdir(place)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from hf_vit_cli.main import main

        if arguments[0] == "page":
            from pages.small_runtime import take_small_files

            take_small_files()

        be_watched(theirs)
        try:
            main(arguments)
        finally:
            if names:  # what the command imported
                (Path(log) / "modules").write_text("\n".join(sys.modules))

    striker = Striker(**strike)
    striker.pid, striker.place = zygote.fork(work, Path(log)), place
    theirs.close()
    start = time.monotonic()
    code = answer_for(striker.pid, ours, Path(place), striker.decide, striker.look, seconds)
    ours.close()
    return {"code": code, "changes": striker.seen, "struck": striker.struck, "seconds": time.monotonic() - start}


def prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the test run is pytest's
    tempfile.tempdir = os.environ["TMPDIR"]  # or Python would try it out by writing
    zygote.warm_up(["hf_vit_cli.main", "hf_vit.conversion"])  # or the first command would import them for itself alone


if __name__ == "__main__":
    zygote.answer(prepare, warm_up=zygote.warm_up, run=run)
