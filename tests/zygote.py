"""Fresh processes in milliseconds: a warm one imports the libraries once, then forks a process for every job.

A fork is a process in which everything is imported and nothing has been used. Jobs come to the warm one as JSON lines
on standard input, answers leave on standard output. It stays single-threaded, or a fork might hang.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


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

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)


def answer(prepare: Callable[[], object], **functions: Callable[..., object]) -> None:
    """Be the warm process: prepare, then answer every job by the function of its name."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    prepare()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(functions[job.pop("do")](**job)), file=channel, flush=True)
    os._exit(0)  # libraries tell of what they leave behind


def warm_up(names: Iterable[str]) -> int:
    """Import modules, so that no fork has to; how many threads there are then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with suppress(Exception):  # what cannot be imported by itself is left to the job
                importlib.import_module(name)
    freeze()
    return threading.active_count()


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
