"""Watches every system call by which a process changes files, and strikes at any of them.

The kernel holds the process at such a call and asks (seccomp's user notifications, Linux 5.5 and newer; no privilege is
needed), so what C++ and Rust write is seen like what Python writes. At a chosen one the process is killed, or the call
fails with an error of the system. Threads and child processes are watched as well.
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Name -> its number on x86_64 and on aarch64 (None: not there), and its arguments that say which file: "fd" is one that
# is open, "path" a name, "at" a folder that is open with a name in the next argument.
_CALLS: dict[str, tuple[int | None, int | None, tuple[tuple[str, int], ...]]] = {
    "open": (2, None, (("path", 0),)),
    "creat": (85, None, (("path", 0),)),
    "openat": (257, 56, (("at", 0),)),
    "write": (1, 64, (("fd", 0),)),
    "pwrite64": (18, 68, (("fd", 0),)),
    "writev": (20, 66, (("fd", 0),)),
    "pwritev": (296, 70, (("fd", 0),)),
    "sendfile": (40, 71, (("fd", 0),)),
    "copy_file_range": (326, 285, (("fd", 2),)),
    "fallocate": (285, 47, (("fd", 0),)),
    "ftruncate": (77, 46, (("fd", 0),)),
    "truncate": (76, 45, (("path", 0),)),
    "fsync": (74, 82, (("fd", 0),)),
    "fdatasync": (75, 83, (("fd", 0),)),
    "mkdir": (83, None, (("path", 0),)),
    "mkdirat": (258, 34, (("at", 0),)),
    "rename": (82, None, (("path", 0), ("path", 1))),
    "renameat": (264, 38, (("at", 0), ("at", 2))),
    "renameat2": (316, 276, (("at", 0), ("at", 2))),
    "link": (86, None, (("path", 1),)),
    "linkat": (265, 37, (("at", 2),)),
    "symlink": (88, None, (("path", 1),)),
    "symlinkat": (266, 36, (("at", 1),)),
    "unlink": (87, None, (("path", 0),)),
    "unlinkat": (263, 35, (("at", 0),)),
    "rmdir": (84, None, (("path", 0),)),
}
_IS_ARM = platform.machine() == "aarch64"
_NUMBERS = {number: name for name, line in _CALLS.items() if (number := line[_IS_ARM]) is not None}
_FLAGS = {"open": 1, "openat": 2}  # the argument that says whether it opens for writing
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SECCOMP = 277 if _IS_ARM else 317
_FILTER, _NEW_LISTENER, _NO_NEW_PRIVILEGES = 1, 8, 38
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_AT_WORKING_FOLDER = -100
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of the kernel's packet filters


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def be_watched(channel: socket.socket) -> None:
    """From now on every change of files by this process waits for an answer; the other end of `channel` is asked."""
    lines = [struct.pack("HBBI", _LOAD, 0, 0, 0)]  # the call's number
    for number, name in _NUMBERS.items():
        if name in _FLAGS:  # past the four lines, or: load the flags, any that writes?
            lines += [
                struct.pack("HBBI", _EQUAL, 0, 4, number),
                struct.pack("HBBI", _LOAD, 0, 0, 16 + 8 * _FLAGS[name]),
                struct.pack("HBBI", _ANY_BIT, 0, 1, _WRITING),
                struct.pack("HBBI", _RETURN, 0, 0, _ASK),
                struct.pack("HBBI", _RETURN, 0, 0, _ALLOW),
            ]
        else:
            lines += [struct.pack("HBBI", _EQUAL, 0, 1, number), struct.pack("HBBI", _RETURN, 0, 0, _ASK)]
    lines.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    program, libc = _Program(len(lines), b"".join(lines)), ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener = libc.syscall(_SECCOMP, _FILTER, _NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "these tests need Linux 5.5 or newer with seccomp's user notifications")
    socket.send_fds(channel, [b"listener"], [listener])
    os.close(listener)
    channel.close()


@dataclass(frozen=True)
class Change:
    """A call that is about to change files.

    Attributes:
        call: name of the system call.
        path: the file; the new name where it is a rename.
        pid: of the thread that calls.
    """

    call: str
    path: str
    pid: int


# Decides about a change: None lets it happen, a number is the error it fails with.
Decide = Callable[[Change], int | None]


def answer_for(
    pid: int,
    channel: socket.socket,
    folder: Path,
    decide: Decide,
    look: Callable[[float], None],
    seconds: float,
) -> int | None:
    """Decide about every change within `folder` until the process `pid`, a child of this one, ends.

    Args:
        pid, channel: the process, and the other end of what it gave to `be_watched`.
        folder: changes elsewhere happen.
        decide: is asked about each within.
        look: is told the seconds that have passed, again and again.
        seconds: after so many the process is killed.

    Returns:
        Its exit code (negative: the signal that killed it); None if it had to be killed after so many seconds.
    """
    _, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    if not descriptors:  # it ended before
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    listener, start = descriptors[0], time.monotonic()
    root = f"{os.path.realpath(folder)}{os.sep}"
    try:
        while True:
            ready = select.select([listener], [], [], 0.005)[0]
            if ready and (question := _receive(listener)) is not None:
                identity, change = question
                inside = change is not None and change.path.startswith(root)
                _answer(listener, identity, decide(change) if inside and change is not None else None)
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            passed = time.monotonic() - start
            look(passed)
            if passed > seconds:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
    finally:
        os.close(listener)


def _receive(listener: int) -> tuple[int, Change | None] | None:
    buffer = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):  # killed meanwhile
            return None
        raise
    identity, pid, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", buffer)
    name = _NUMBERS[number]
    try:
        paths = [_path(pid, kind, arguments, place) for kind, place in _CALLS[name][2]]
    except OSError:  # of a process that is gone, or of what is no file
        return identity, None
    return identity, Change(name, paths[-1], pid)


def _path(pid: int, kind: str, arguments: Sequence[int], place: int) -> str:
    if kind == "fd":
        return os.readlink(f"/proc/{pid}/fd/{arguments[place] & 0xFFFFFFFF}")
    name = _text(pid, arguments[place + (kind == "at")])
    folder = ctypes.c_int(arguments[place] & 0xFFFFFFFF).value if kind == "at" else _AT_WORKING_FOLDER
    start = os.readlink(f"/proc/{pid}/cwd" if folder == _AT_WORKING_FOLDER else f"/proc/{pid}/fd/{folder}")
    return os.path.normpath(os.path.join(start, name))


def _text(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = b""
        while b"\0" not in content and len(content) < 8192:
            content += memory.read(4096 - (address + len(content)) % 4096)  # to the end of the page
    return os.fsdecode(content.partition(b"\0")[0])


def _answer(listener: int, identity: int, error: int | None) -> None:
    answer = struct.pack("QqiI", identity, 0, -(error or 0), 0 if error else 1)  # 1: do the call
    try:
        fcntl.ioctl(listener, _ANSWER, answer)
    except OSError as failure:
        if failure.errno != errno.ENOENT:  # killed, or interrupted by a signal, after which it calls again
            raise
