"""Fresh processes in milliseconds: a warm one imports the libraries once, then forks a process for every job.

    python -m zygote MODULE ...

A fork is a process in which everything is imported and nothing has been used. Jobs come to the warm one as JSON lines
on standard input, answers leave on standard output. It stays single-threaded, or a fork might hang.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
# Where processes of their own find the tests, the campaigns and whatever this one was given.
SEARCH_PATH = os.pathsep.join(filter(None, (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH"))))


class Zygote:
    """The tests' side of a warm process.

    Args:
        arguments: of Python: the module, which calls `answer`.
        folder: where it works.
        environment: all its variables.
    """

    def __init__(self, *arguments: str, folder: Path, environment: Mapping[str, str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, **pipes)

    def ask(self, do: str, **job: Any) -> Any:
        """What its function for `do` returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do, **job}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the warm process ended"
        return json.loads(line)

    def start(
        self, name: str, folder: Path, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> "Program":
        """Start a function, "module:name", in a folder and with these variables beside the usual ones."""
        folder.mkdir(parents=True, exist_ok=True)
        given = {"folder": str(folder), "environment": environment or {}, "arguments": arguments}
        return Program(self, self.ask("start", name=name, **given), folder)

    def start_two(self, name: str, folder: Path, **arguments: Any) -> list["Program"]:
        """Start it in two processes that know of each other, as torchrun does; they work in process-0 and process-1."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [known | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        return [self.start(name, folder / f"process-{each['RANK']}", each, **arguments) for each in ranks]

    def together(self, name: str, folder: Path, seconds: float = 280, **arguments: Any) -> str:
        """Run it in two such processes; the first that fails ends both.

        Returns:
            What those say that failed; empty if none did.
        """
        programs = self.start_two(name, folder, **arguments)
        end = time.monotonic() + seconds
        while None in (codes := [each.wait(0.1) for each in programs]) and time.monotonic() < end:
            if any(codes):
                break
        for each in programs:
            if each.code is None:
                each.kill()
        return "".join(f"{each.folder.name}: exit code {each.code}\n{each.err}" for each in programs if each.code != 0)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)


class Program:
    """A process that was forked; `code` is its exit code, negative for a signal, None until it was waited for."""

    def __init__(self, zygote: Zygote, pid: int, folder: Path) -> None:
        self._zygote, self.pid, self.folder = zygote, pid, folder
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        if self.code is None:
            self.code = self._zygote.ask("wait", pid=self.pid, seconds=seconds)
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait(10) == -signal.SIGKILL

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")


def answer(prepare: Callable[[], object], **functions: Callable[..., object]) -> None:
    """Be the warm process: prepare, then answer every job by the function of its name."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    prepare()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(functions[job.pop("do")](**job)), file=channel, flush=True)
    os._exit(0)  # libraries tell of what they leave behind


def warm_up(names: Iterable[str]) -> None:
    """Import modules, so that no fork has to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with suppress(Exception):  # what cannot be imported by itself is left to the job
                importlib.import_module(name)
    freeze()


def freeze() -> None:
    """What all forks share is not looked through by the collector, and so not copied, by each of them."""
    gc.collect()
    gc.freeze()


def fork(work: Callable[[], object], folder: Path) -> int:
    """Fork a process that does its work and ends; it prints into the files `stdout` and `stderr` of a folder.

    Returns:
        Its process ID.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(
    name: str,
    folder: str,
    environment: Mapping[str, str],
    arguments: Mapping[str, Any],
    before: Callable[[], object] = lambda: None,
) -> int:
    """Fork a process that calls a function, "module:name", in a folder; what it returns is in answer.json there."""

    def work() -> None:
        os.chdir(folder)
        os.environ.update(environment)
        before()
        module, _, function = name.partition(":")
        result = getattr(importlib.import_module(module), function)(**arguments)
        (Path(folder) / "answer.json").write_text(json.dumps(result))

    return fork(work, Path(folder))


def wait(pid: int, seconds: float) -> int | None:
    """Exit code of a process (negative: the signal that killed it), None if it still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    answer(lambda: warm_up(sys.argv[1:]), start=start, wait=wait)
