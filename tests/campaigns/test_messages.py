"""Every command x bad inputs of every kind: one line that says what was given and what to do, and nothing else.

    python -m pytest tests/campaigns/test_messages.py -m slow

A refusal is one line on standard error that begins with `hf-vit:`, names what was given, and ends with a remedy; exit
code 1 or 2; nothing on standard output, no traceback, no line of a library; and nothing was written.
"""

import ast
import contextlib
import io
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import psutil
import pytest
import typer
from campaigns.bad_inputs import BESIDE, ENDLESS, FREE, GOOD, KINDS, REPLACES, VALUES, prepare
from campaigns.ledger import Campaign, failures
from pages.small_runtime import SMALL_FILES

from hf_vit_cli.main import build_app, main

SECONDS, MEMORY = 120, 4 << 30  # for one call
# What is told before a value is looked at.
FIRST = ("offline mode", "no token for the Hub", "too little memory", "ray is not installed")
TALKING = ("finetune", "pretrain", "soup", "compare", "analyze")  # say on standard output what they do, line by line
CHECKPOINT = Path(__file__).parents[1] / "golden" / "vit_tok.ckpt.npz"
# What Python does not show of a library's warnings.
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
# An advice, behind a semicolon or in other words that tell what would be right.
REMEDY = re.compile(
    r"; |: write |\bchoose\b|\bgive\b|\buse\b|\binstall\b|\bmust (be|hold)\b|should be|\bmake\b|\btry\b"
)


def functions(app: typer.Typer | None = None, path: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of every command, in groups as well."""
    app = app or build_app()
    for command in app.registered_commands:
        yield f"{path}{command.name}", command.callback
    for group in app.registered_groups:
        yield from functions(group.typer_instance, f"{path}{group.name} ")


FILE_WRITERS = ("scaling-law", "bench models", "bench saved")
HINTS = {name: typing.get_type_hints(function) for name, function in functions()}


def kind_of(name: str, hint: Any) -> str | None:
    """What is bad for a parameter; None where nothing is."""
    inner = [hint, *typing.get_args(hint)]
    basic = {each for part in inner for each in (part, *typing.get_args(part))}
    if bool in basic or hint is typer.Context or name in FREE or name == "return":
        return None
    numbers = [kind for kind, number in (("int", int), ("float", float)) if number in basic]
    kinds = numbers or [kind for kind, names in KINDS.items() if name in names]
    assert kinds, f"--{name} is new: say in bad_inputs.KINDS what it takes"
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
    """What is typed, and the bad value."""
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

    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patched.setattr(logging.Logger, "callHandlers", log)
        patched.setattr("hf_vit.pages.runtime.FILES", SMALL_FILES)
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
    """Every file and folder below, links not followed."""
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
    command = case.split("/")[0]
    before = tree(root)
    code, out, err, foreign = call(words)
    after = tree(root)
    typed = " ".join(words)[:300]
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


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("messages")
    prepare(root, CHECKPOINT)
    return root


@pytest.fixture
def tried(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Tries a case, and takes away what it wrote."""
    monkeypatch.chdir(sandbox)
    here = set(os.listdir(sandbox))

    def attempt_and_tidy(case: str) -> str:
        try:
            return attempt(sandbox, case)
        finally:
            for name in set(os.listdir(sandbox)) - here:
                shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)

    return attempt_and_tidy


# Tracebacks, endless reading, work lost or garbage written, when the campaign first looked.
FAILED_ONCE = (
    "card/model/'deep_config'", "card/license/'a b'", "cost/images/'inf'", "cost/model/'deep_config'",
    "evaluate/model/'config_null'", "evaluate/model/'broken_index'", "evaluate/model/'deep_config'",
    "evaluate/output/''", "evaluate/output/'/proc/out'", "evaluate/output/'dangling'", "evaluate/device/'meta'",
    "evaluate/seed/'99999999999999999999'", "evaluate/batch_size/'99999999999999999999'",
    "export/model/'config_list'", "export/model/'truncated'", "export/model/'other_weights'",
    "export/model/'too_large'", "push/max_shard_size/'nan'", "push/max_shard_size/'0GB'", "predict/images/'pipe'",
    "predict/images/''", "scaling-law/sources/'/dev/zero'", "scaling-law/sources/'deep.json'",
    "finetune/config/'/dev/zero'", "convert/model/'loop'", "convert/model/'truncated'", "convert/labels/'deep.json'",
    "embed/data/'empty'", "embed/seed/'-1'", "finetune/push/'user/'", "page/images/'" + 300 * "a" + "'",
    "data/source/'fractals:classes=10,images=99999999'", "data/source/'broken_coco'", "data/source/'empty_coco'",
    "finetune/data/'coco/annotations.json'", "embed/output/'s3://'", "evaluate/output/'ftp://host/out'",
    "convert/output/'nosuch:/out'",
)  # fmt: skip


@pytest.mark.parametrize("case", FAILED_ONCE)
def test_what_failed_once_is_refused(case: str, tried: Callable[[str], str]) -> None:
    assert tried(case) == "refused"


@pytest.mark.parametrize("words", ["--corruption contrast", "--epsilon 2"])
def test_what_would_change_nothing_is_refused(words: str, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sandbox)
    typed = f"compare model model_2 --data colours --output out --no-robustness {words}".split()
    code, out, err, foreign = call(typed)
    assert (code, out, foreign) == (1, "", [])
    assert "would change nothing with --no-robustness; leave one of them out" in err


def test_no_line_of_a_library_is_seen_from_outside(sandbox: Path) -> None:
    """What a user sees on the two streams, of a call that transformers, torchao and datasets take part in."""
    words = ["embed", "model", "--data", "parquet.parquet", "--output", "out"]
    program = [sys.executable, "-c", "from hf_vit_cli.main import main; main()", *words]
    done = subprocess.run(program, cwd=sandbox, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hf-vit: 'parquet.parquet' has the columns a, b; needed: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_sample_of_the_campaign(tried: Callable[[str], str]) -> None:
    sample = random.Random(0).sample(all_cases(), 25)
    assert [case for case in sample if tried(case) not in ("refused", "accepted")] == []


@pytest.mark.slow
@pytest.mark.timeout(7200, method="thread")
def test_bad_inputs_are_refused_in_one_line(tried: Callable[[str], str]) -> None:
    command = "python -m pytest tests/campaigns/test_messages.py -m slow"
    counts = Campaign("messages", command, cases_drawn=len(all_cases())).run(all_cases(), tried)
    assert failures(counts) == []
