"""A warm process that forks one for every command, watches what it writes, and strikes where it is told to.

    python -m campaigns.zygote

Jobs come as JSON lines on standard input, answers leave on standard output (see `watched`). It stays single-threaded,
so that a fork is a process in which everything is imported and nothing has been used.
"""

import errno
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork a process that runs `hf-vit` with the job's arguments, and answer what became of it."""
    sys.stdout.flush()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        _be_command(job, theirs)
    theirs.close()
    striker = Striker(**job["strike"])
    striker.pid, striker.place = pid, job["place"]
    start = time.monotonic()
    code = answer_for(pid, ours, Path(job["place"]), striker.decide, striker.look, job["seconds"])
    ours.close()
    seconds = time.monotonic() - start
    return {"code": code, "changes": striker.seen, "struck": striker.struck, "seconds": seconds}


def _be_command(job: dict[str, Any], channel: socket.socket) -> None:
    code = 1
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(job["log"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.chdir(job["place"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from hf_vit_cli.main import main

        be_watched(channel)
        main(job["arguments"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if job["names"]:  # what the command imported
            (Path(job["log"]) / "modules").write_text("\n".join(sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_up(names: list[str]) -> dict[str, Any]:
    """Import modules, so that no fork has to."""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except Exception:  # what cannot be imported by itself is left to the command
                continue
    gc.collect()
    gc.freeze()
    return {"threads": threading.active_count()}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the test run is pytest's
    tempfile.tempdir = os.environ["TMPDIR"]  # or Python would try it out by writing
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up(["hf_vit_cli.main", "hf_vit.conversion"])  # or the first command would import them for itself alone
    for line in sys.stdin:
        job = json.loads(line)
        answer = warm_up(job["names"]) if job["do"] == "warm" else run(job)
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
