"""Every command x bad inputs of every kind: one line that says what was given and what to do, and nothing else.

A refusal is one line on standard error that begins with `hf-vit:`, names what was given, and ends with a remedy; exit
code 1 or 2; nothing on standard output, no traceback, no line of a library; and nothing was written.
"""

import ast
import contextlib
import inspect
import io
import logging
import os
import re
import resource
import shutil
import signal
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from unittest.mock import patch

import psutil
import typer
from pages.small_runtime import SMALL_FILES

from campaigns.bad_input_files import BESIDE, ENDLESS, FREE, GOOD, KINDS, REPLACES, VALUES, write_files
from campaigns.engine import ROOT, Campaign
from hf_vit_cli.main import build_app, main

SECONDS, MEMORY = 120, 4 << 30  # for one call
# What is told before a value is looked at.
FIRST = ("offline mode", "no token for the Hub", "out of memory", "memory is full", "needs Ray")
TALKING = ("finetune", "pretrain", "soup", "compare", "analyze")  # say on standard output what they do, line by line
CHECKPOINT = ROOT / "tests/golden/vit_tok.ckpt.npz"
# What Python does not show of a library's warnings.
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
# An advice, behind a semicolon or in other words that tell what would be right.
REMEDY = re.compile(r"; |: write |should be|\bmust (be|hold)\b|\b(choose|give|use|install|make|try)\b")


def functions(app: typer.Typer, path: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of every command, in groups as well."""
    yield from ((f"{path}{command.name}", command.callback) for command in app.registered_commands)
    for group in app.registered_groups:
        yield from functions(group.typer_instance, f"{path}{group.name} ")


FILE_WRITERS = ("scaling-law", "bench models", "bench saved")


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of every parameter, those of shared options included."""
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    return {name: hints.get(name, parameter.annotation) for name, parameter in parameters.items()}


HINTS = {name: hints_of(function) for name, function in functions(build_app())}


def kind_of(name: str, hint: Any) -> str | None:
    """What is bad for a parameter; None where nothing is."""
    inner = [hint, *typing.get_args(hint)]
    basic = {each for part in inner for each in (part, *typing.get_args(part))}
    if bool in basic or hint is typer.Context or name in FREE or name == "return":
        return None
    numbers = [kind for kind, number in (("int", int), ("float", float)) if number in basic]
    kinds = numbers or [kind for kind, names in KINDS.items() if name in names.split()]
    assert kinds, f"--{name} is new: say in bad_input_files.KINDS what it takes"
    return kinds[0]


def all_cases() -> list[str]:
    """Command/parameter/the value as Python writes it."""
    return [
        f"{command}/{name}/{value!a}"
        for command, hints in HINTS.items()
        for name, hint in hints.items()
        if (kind := kind_of(name, hint)) is not None
        for value in VALUES[kind]
        if not (name in ENDLESS and value.isdigit() and int(value) > 1)
        and not (value == "notes.txt" and command in FILE_WRITERS)
    ]


# An argument that can be repeated, by its name as an option.
WRITTEN = {"models": "model", "sources": "source", "variants": "variant", "places": "place"}


def words_of(case: str) -> tuple[list[str], str]:
    command, name, written = case.split("/", 2)
    value = ast.literal_eval(written)
    good = [word for other, words in GOOD[command].items() if other not in (name, REPLACES.get(name)) for word in words]
    good += BESIDE.get((command, name), "").split()
    option = "--" + WRITTEN.get(name, name).replace("_", "-")
    if (command, name) == ("predict", "images"):
        option = "--image"
    hint = HINTS[command][name]
    pair = any(typing.get_origin(each) is tuple for each in (hint, *typing.get_args(hint)))
    bad = [option, value, value] if pair else [f"{option}={value}"]
    at = good.index("--") if "--" in good else len(good)  # what follows is another command
    return [*command.split(), *good[:at], *bad, *good[at:]], value


def call(words: list[str]) -> tuple[int, str, str, list[str]]:
    """(exit code, standard output, standard error, what libraries logged or warned of) of a call in this process."""
    out, err, foreign = io.StringIO(), io.StringIO(), []

    def log(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            foreign.append(f"{logger.name}: {record.getMessage()}")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("too long")

    patches = (patch.object(logging.Logger, "callHandlers", log), patch("hf_vit.pages.making.FILES", SMALL_FILES))
    with patches[0], patches[1], contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, limits[1]))
        signal.alarm(SECONDS)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                main(words)
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            signal.signal(signal.SIGALRM, before)
    foreign += [str(each.message) for each in warned if not issubclass(each.category, HIDDEN)]
    return code, out.getvalue(), err.getvalue(), foreign


def tree(root: Path) -> dict[str, tuple[int, int]]:
    places = [Path(folder) / name for folder, folders, files in os.walk(root) for name in (*folders, *files)]
    states = {str(place): os.lstat(place) for place in places}
    return {place: (stat.st_size, 0 if S_ISDIR(stat.st_mode) else stat.st_mtime_ns) for place, stat in states.items()}


def names(message: str, value: str) -> bool:
    """Whether a message says what was given: as it was typed, in part where it is long, or as a number is written."""
    value = "".join(letter for letter in value if letter.isprintable() or letter.isspace())
    shown = {value[:40], value.removeprefix("timm:")[:40], Path(value).name[:40], " ".join(value.split())[:40]}
    with contextlib.suppress(ValueError):
        shown |= {f"{float(value):g}", str(float(value))}
    return any(each in message for each in shown)


def attempt(root: Path, case: str) -> str:
    words, value = words_of(case)
    command, before = case.split("/")[0], tree(root)
    code, out, err, foreign = call(words)
    after, typed = tree(root), " ".join(words)[:300]
    assert not foreign, f"{typed}: a library said {foreign[0][:200]}"
    if code == 0:
        return "accepted"
    assert code in (1, 2), f"{typed}: exit {code}"
    lines = err.splitlines()
    assert len(lines) == 1, f"{typed}: {len(lines)} lines: {err[:300]}"
    assert err.startswith("hf-vit: "), f"{typed}: {err}"
    assert not out or command in TALKING, f"{typed}: printed {out[:100]}: {err}"
    assert names(err, value) or any(words in err for words in FIRST), f"{typed}: not named: {err}"
    assert REMEDY.search(err), f"{typed}: no remedy: {err}"
    assert before == after, f"{typed}: changed {sorted(before.items() ^ after.items())[:3]}: {err}"
    return "refused"


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield the function that tries a case in a folder full of bad files, and takes away what it wrote."""
    write_files(folder, CHECKPOINT)
    here = set(os.listdir(folder))

    def attempt_and_tidy(case: str) -> str:
        try:
            return attempt(folder, case)
        finally:
            for name in set(os.listdir(folder)) - here:
                shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)

    with contextlib.chdir(folder):
        yield attempt_and_tidy


PROMISE = "a bad input is one line on standard error that names what was given and a remedy; nothing was written"
CAMPAIGN = Campaign("bad_inputs", PROMISE, all_cases, prepare)
