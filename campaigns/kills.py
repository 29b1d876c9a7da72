"""Every command that writes, killed or refused by the system at its changes of files: whole output, or one line.

A forked process runs each command with an audit hook that counts the files it opens for writing, renames, removes and
makes. At a chosen change the hook sends a signal or fails the call as a full, broken or read-only disk does; other
signals come at random moments, which also strike what compiled code writes.
"""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import zygote

from campaigns.commands import READING, SHARING, WRITING, Line, make_template
from campaigns.engine import Campaign

SIGNALS = {"SIGKILL": 12, "SIGINT": 4, "SIGTERM": 4}  # signal -> at how many changes of each command
MOMENTS = 6  # SIGKILLs of each command at random moments
# Error -> at how many changes, and which audit events it befalls: a full disk takes no more but gives back.
_GROWING = ("open", "os.mkdir", "os.link", "os.symlink")
_EVERY = (*_GROWING, "os.rename", "os.remove", "os.rmdir", "os.truncate")
ERRORS = {
    "ENOSPC": (8, _GROWING), "FULL": (4, _EVERY), "EDQUOT": (1, _GROWING), "EIO": (1, ("open",)),
    "EMFILE": (1, ("open",)), "EROFS": (1, _EVERY), "EACCES": (1, _EVERY),
}  # fmt: skip
PLENTY = 256 << 20  # bytes of a disk on which everything fits
REPO = "alice/my-vit"


class Striker:
    """An audit hook that counts the changes of files within a folder, and strikes at one of them.

    Args:
        place: the folder.
        log: file that receives a line for each change.
        what: a signal; an error, with which this change and those after it fail; or "FULL": the place is a tmpfs, which
            is made so small that nothing more fits.
        at: number of the change, from 1; 0 for none.
    """

    def __init__(self, place: str, log: Path, what: str = "", at: int = 0) -> None:
        self.root, self.what, self.at, self.count = os.path.realpath(place), what, at, 0
        self.events = ERRORS[what][1] if what in ERRORS else _EVERY
        self.is_paused, self.log = False, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_paused or event not in self.events:
            return
        path = changed_path(event, arguments)
        if path is None or not path.startswith(self.root + os.sep):
            return
        self.count += 1
        os.write(self.log, f"{event} {path}\n".encode())
        if not self.at or self.count < self.at:
            return
        if self.what == "FULL" and self.count == self.at:
            disk = os.statvfs(self.root)
            self.is_paused = True
            resize(self.root, (disk.f_blocks - disk.f_bfree) * disk.f_bsize)
            self.is_paused = False
        elif self.what.startswith("SIG") and self.count == self.at:
            os.kill(os.getpid(), getattr(signal, self.what))
        elif self.what in ERRORS and self.what != "FULL":
            code = getattr(errno, self.what)
            raise OSError(code, os.strerror(code), path)


def changed_path(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the file that an audited call is about to change; None where it changes none."""
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        return None
    path, folder = arguments[event in ("os.rename", "os.link", "os.symlink")], -1
    if isinstance(path, int):
        return None
    if event in ("os.remove", "os.rmdir", "os.mkdir"):
        folder = arguments[-1]
    start = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
    return os.path.normpath(os.path.join(start, os.fsdecode(path)))


def resize(place: str | Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def run_struck(arguments: list[str], place: str, log: str, strike: dict[str, Any]) -> int:
    """Fork a process that runs `hf-vit` in a place; return its process ID."""

    def work() -> None:
        os.chdir(place)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from hf_vit_cli.main import main

        if arguments[0] == "page":
            from pages.small_runtime import take_small_files

            take_small_files()
        sys.addaudithook(Striker(place, Path(log) / "changes", **strike))
        main(arguments)

    return zygote.fork(work, Path(log))


def prepare_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C belongs to the campaign
    tempfile.tempdir = os.environ["TMPDIR"]  # or Python would try the folder out by writing
    zygote.warm_up(["hf_vit_cli.main", "hf_vit.conversion", "hf_vit.training.api", "hf_vit.evaluation"])


@dataclass(frozen=True)
class Outcome:
    """What became of a command: exit code (negative: the signal that ended it), printed text, changes, seconds."""

    code: int | None
    out: str
    err: str
    changes: list[str]
    seconds: float


class Runner:
    """Runs commands in `place`, each in a process that is forked from a warm one.

    Args:
        folder: for the place, and for logs beside it.
        environment: variables beside the usual ones.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.place = folder, folder / "place"
        (self.place / "tmp").mkdir(parents=True)
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        quiet |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        here = {"HF_HOME": str(self.place / "home"), "TMPDIR": str(self.place / "tmp")}
        whole = {**os.environ, **quiet, **here, "PYTHONPATH": zygote.SEARCH_PATH, **environment}
        self.warm = zygote.Zygote("-W", "ignore", "-m", "campaigns.kills", folder=folder, environment=whole)
        self.close = self.warm.close

    def run(self, *arguments: str, after: float | None = None, what: str = "", at: int = 0) -> Outcome:
        """Run `hf-vit`; with `after`, the signal comes after so many seconds instead of at a change."""
        strike = {} if after is not None else {"what": what, "at": at}
        began = time.monotonic()
        pid = self.warm.ask("run", arguments=arguments, place=str(self.place), log=str(self.folder), strike=strike)
        code = None if after is None else self.warm.ask("wait", pid=pid, seconds=after)
        if after is not None and code is None:
            os.kill(pid, getattr(signal, what))
        if code is None:
            code = self.warm.ask("wait", pid=pid, seconds=120)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            self.warm.ask("wait", pid=pid, seconds=10)
        printed = [(self.folder / f"std{name}").read_text(errors="replace") for name in ("out", "err")]
        changes = (self.folder / "changes").read_text().splitlines()
        return Outcome(code, *printed, changes, time.monotonic() - began)


# What may be there after a strike: hidden files and folders, a run's checkpoints, temporary files. The libraries' own
# cache is theirs. Some fields of JSON differ from run to run.
_UNFINISHED = re.compile(r"(^|/)(\.[^/]+|checkpoints)(/|$)|^tmp(/|$)")
_THEIRS = re.compile(r"^home(/|$)|^tmp/(torchinductor_|\.ses$)")
_PASSING = re.compile(
    r"date|seconds|per_second|speed|load|quiet|memory|hardware|times_as_fast|median|lower|upper|rows|versions"
)


def files_in(place: Path) -> dict[str, str]:
    """Return path -> digest of a file's content without times and speeds; of a folder ""."""
    paths = {str(path.relative_to(place)): path for path in sorted(place.rglob("*"))}
    return {
        name: "" if path.is_dir() else "unfinished" if _UNFINISHED.search(name) else _digest(path)
        for name, path in paths.items()
        if not _THEIRS.search(name)
    }


def final(files: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if digest and not _UNFINISHED.search(name)}


def _digest(path: Path) -> str:
    content = re.sub(rb" --(resume|force)\b", b"", path.read_bytes())  # of the command, as it was typed
    if path.suffix == ".json":
        content = json.dumps(_lasting(json.loads(content), path.name == "facts.json")).encode()
    elif path.suffix in (".md", ".html", ".csv"):
        content = re.sub(rb"[0-9]+([.,][0-9]+)*|base64,[^\"]*", b"0", content)
    return sha256(content).hexdigest()[:16]


def _lasting(value: Any, is_facts: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in sorted(value.items()) if not _PASSING.search(key)}
    if isinstance(value, list):
        items = [_lasting(item) for item in value]
        # A measurement that both the struck run and the next one recorded is one fact.
        return sorted({json.dumps(item) for item in items}) if is_facts else items
    return value


class Prepared:
    """A command with what it starts from and what an unbroken run leads to."""

    def __init__(self, runner: Runner, commands: list[Line], template: Path, start: Path) -> None:
        self.runner, self.place, self.start = runner, runner.place, start
        *earlier, self.arguments = commands
        self.changes = cache(self.count_changes)
        fill(self.place, template)
        (self.place / "tmp").mkdir(exist_ok=True)
        for arguments in earlier:
            self.run_whole(*arguments)
        shutil.copytree(self.place, start, symlinks=True)
        self.before = files_in(self.place)
        self.run_whole(*self.arguments)
        self.after = files_in(self.place)
        unfinished = [name for name in self.after.keys() - self.before.keys() if _UNFINISHED.search(name)]
        assert not unfinished, f"an unbroken run leaves {unfinished}"
        self.lay_out()
        self.seconds = self.run_whole(*self.arguments).seconds
        self.check_done()  # or no struck run could be held against it

    def run_whole(self, *arguments: str) -> Outcome:
        outcome = self.runner.run(*arguments)
        assert outcome.code == 0, outcome
        return outcome

    def count_changes(self, what: str) -> int:
        """Return how many changes of an unbroken run a strike can fall on."""
        self.lay_out()
        return len(self.runner.run(*self.arguments, what=what).changes)

    def lay_out(self) -> None:
        """Make the place what it was before the command."""
        fill(self.place, self.start)

    def check_done(self) -> None:
        """Assert that the place holds just what an unbroken run leaves."""
        files = files_in(self.place)
        stale = sorted(files.keys() - self.after.keys())
        assert not stale, f"left behind: {', '.join(stale)[:300]}"
        other = sorted(name for name in self.after if files.get(name) != self.after[name])
        assert not other, f"not as after an unbroken run: {', '.join(other)[:300]}"

    def check_struck(self) -> str:
        """Return what a struck command left: "earlier", "new", "aside" (between two moves) or "between".

        Raises:
            AssertionError: a file at its final place is neither the earlier nor the new one; a folder that loads as a
                model holds weights of one and code of the other.
        """
        files, earlier, new = final(files_in(self.place)), final(self.before), final(self.after)
        if files in (earlier, new):
            return "new" if files == new else "earlier"
        if any(self.place.glob(".*.former")):  # the earlier output lies hidden beside its place
            earlier, new = ({k: v for k, v in each.items() if not k.startswith("out/")} for each in (earlier, new))
            assert all(files.get(name) in (earlier.get(name), new.get(name)) for name in earlier | files | new)
            return "aside"
        for name in earlier | files | new:
            known = files.get(name) in (earlier.get(name), new.get(name))
            assert known or is_card_of_its_facts(self.place / name), f"{name} is neither the earlier nor the new one"
        for folder in {name.rpartition("/")[0] for name in files if name.endswith("/config.json")}:
            paths = {name for name in files | earlier | new if name.startswith(f"{folder}/")}
            paths = [name for name in paths if name.endswith(_OF_MODELS)]
            left, *known = [[each.get(name) for name in paths] for each in (files, earlier, new)]
            assert left in known, f"the model in {folder} is of two"
        return "between"

    def resume(self) -> str:
        """Run the struck command again, as its message says, to the end; return how."""
        outcome = self.runner.run(*self.arguments)
        how = "again"
        if outcome.code:
            check_line(outcome)
            how = next((flag for flag in ("--resume", "--force") if flag in outcome.err), "was complete")
            if "finished model" in outcome.err:
                how = "--resume"
            if how.startswith("--"):
                outcome = self.runner.run(*self.arguments, how)
                assert outcome.code == 0, f"{how}: {outcome.err}"
            else:
                assert "not empty" in outcome.err, f"no way on: {outcome.err}"
        self.check_done()
        return how


_OF_MODELS = (".safetensors", ".py", "config.json", ".npz", ".onnx", ".xml", ".bin")


def is_card_of_its_facts(file: Path) -> bool:
    """Return whether it is the card of the facts beside it; before config.json, which comes last, that of none."""
    from hf_vit.hub.card import is_rendered, render_card

    if file.name != "README.md" or not file.is_file():
        return False
    if not (file.parent / "config.json").exists():
        return is_rendered(file.parent)
    return file.read_text() == render_card(file.parent)


def fill(place: Path, source: Path) -> None:
    for path in place.iterdir():  # the place itself may be a disk of its own
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)


def check_line(outcome: Outcome) -> str:
    """Return the one line that a failed command prints on standard error beside notes and a training's log."""
    lines = [line for line in outcome.err.splitlines() if line.strip() and not line.startswith(("note: ", "step "))]
    assert len(lines) == 1, f"{len(lines)} lines on standard error: {' | '.join(lines)[-600:]}"
    assert lines[0].startswith("hf-vit: "), lines[0]
    return lines[0]


def kill(prepared: Prepared, what: str, **when: float) -> str:
    """Kill a command, or tell it to end, and resume it; return what was left, and how it went on."""
    prepared.lay_out()
    outcome = prepared.runner.run(*prepared.arguments, what=what, **when)
    left = prepared.check_struck()
    if outcome.code == 0:  # it had ended, or was about to
        prepared.check_done()
        return "ended"
    if what == "SIGKILL":
        assert outcome.code == -signal.SIGKILL, outcome
    elif what == "SIGINT" or outcome.code == 130:
        assert outcome.code == 130, outcome
        check_stopped(prepared.place / "out", check_line(outcome))
    else:
        assert outcome.code in (-signal.SIGTERM, 143), outcome
    return f"{left}, {prepared.resume()}"


def check_stopped(out: Path, line: str) -> None:
    """Assert that what a stopped command says is true."""
    assert line.startswith("hf-vit: stopped; "), line
    if checkpoint := re.search(r"(checkpoint-\d+) in out is complete", line):
        assert any(out.rglob(checkpoint[1])), line
    elif "finished parts are in out" in line or "finished work is in out" in line:
        assert any(out.iterdir()), line
    elif "nothing was written yet" in line or "nothing is finished yet" in line:
        assert not [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")], line
    elif "is complete" in line:
        assert {path.name for path in out.iterdir()} >= {"config.json", "facts.json", "model.safetensors"}, line
    else:
        assert "no incomplete files remain" in line or "there is no complete checkpoint yet" in line, line


def refuse(prepared: Prepared, what: str, at: int) -> str:
    """Let the system refuse a change and those after it, put that right, and resume; return what was left, and how."""
    prepared.lay_out()
    outcome = prepared.runner.run(*prepared.arguments, what=what, at=at)
    if what == "FULL":
        resize(prepared.place, PLENTY)
    left = prepared.check_struck()
    if outcome.code == 0:
        assert left == "new", f"exit 0, but what is there is {left}"
        return f"did without, {prepared.resume()}"  # what it could not remove goes then
    assert outcome.code == 1, outcome
    line = check_line(outcome)
    reason = os.strerror(errno.ENOSPC if what == "FULL" else getattr(errno, what))
    has_reason = any(each in line for each in (reason, "probably because the disk is full", "MiB free and"))
    assert has_reason, f"the reason is missing: {line}"
    assert re.search(r"; (free|make|have|raise|choose|check)", line), f"the remedy is missing: {line}"
    return f"{left}, {prepared.resume()}"


def cases() -> list[str]:
    """Each command's strikes: "command, what at a change/fraction of its changes", or of its seconds."""
    names = [f"{name}, unbroken/0 0" for name in READING]
    for name in WRITING | SHARING:
        draw = random.Random(name)
        counts = SIGNALS | ({} if name in SHARING else {what: count for what, (count, _) in ERRORS.items()})
        for what, count in counts.items():
            names += [f"{name}, {what} at a change/{number} {draw.random():.3f}" for number in range(count)]
        if name in WRITING:
            names += [f"{name}, SIGKILL at a moment/{k} {draw.uniform(0, 1.1):.3f}" for k in range(MOMENTS)]
    return names


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    """Yield the function that strikes; commands, a Hub and a disk are made when a case first needs them."""
    with ExitStack() as stack:
        template = make_template(folder / "template")
        shared: dict[str, dict[str, str]] = {}

        @cache
        def runner_of(kind: str) -> Runner:
            online: dict[str, str] = {}
            if kind == "hub":
                online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub().endpoint, "HF_TOKEN": "hf_alice_write"}
                online |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
            runner = Runner(folder / kind, **online)
            stack.callback(runner.close)
            if kind == "disk":
                mount = ["mount", "-t", "tmpfs", "-o", f"size={PLENTY}", "tmpfs", str(runner.place)]
                if subprocess.run(mount, capture_output=True, check=False).returncode:
                    raise PermissionError("no tmpfs can be mounted here")
                stack.callback(subprocess.run, ["umount", str(runner.place)], check=True)
            return runner

        @cache
        def hub() -> Any:
            from loopback.client import Loopback

            return stack.enter_context(Loopback(folder / "loopback"))

        @cache
        def command_of(name: str, kind: str) -> Prepared:
            start = folder / f"start-{kind}-{name}"
            command = Prepared(runner_of(kind), (WRITING | SHARING | READING)[name], template, start)
            if kind == "hub":
                shared[name] = files_on(hub())
            return command

        def attempt(case: str) -> str:
            group, _, which = case.partition("/")
            name, _, how = group.partition(", ")
            what, fraction = how.split()[0], float(which.split()[1])
            kind = "hub" if name in SHARING else "disk" if what == "FULL" else "local"
            try:
                command = command_of(name, kind)
            except PermissionError as error:
                return f"not tried: {error}"
            if name in READING:
                assert command.after == command.before, "it writes"
                return "writes nothing"
            if how.endswith("moment"):
                return kill(command, what, after=fraction * command.seconds)
            at = 1 + int(fraction * command.changes(what))
            if kind != "hub":
                return kill(command, what, at=at) if what in SIGNALS else refuse(command, what, at)
            if not name.startswith("verify"):
                hub().reset()
            outcome = kill(command, what, at=at)
            assert files_on(hub()) == shared[name], "the Hub does not hold what an unbroken run shares"
            assert hub().fsck() == []
            return outcome

        yield attempt


def files_on(hub: Any) -> dict[str, str]:
    """Return path -> hash of what the Hub holds; "" for files that hold times or names."""
    passing = ("facts.json", "README.md", ".png")
    files = hub.files(REPO) | hub.files(f"spaces/{REPO}")
    return {path: "" if path.endswith(passing) else digest for path, digest in files.items()}


CAMPAIGN = Campaign(
    name="kills",
    promise="the earlier output or the new one is whole, a refusal is one line with its remedy, and the same command "
    "resumes to what an unbroken run leaves",
    cases=cases,
    prepare=prepare,
    settings={"signals": SIGNALS, "moments": MOMENTS, "errors": {what: count for what, (count, _) in ERRORS.items()}},
    is_quick=lambda case: case.startswith("convert-report, ") and "FULL" not in case,
)

if __name__ == "__main__":
    zygote.answer(prepare_process, run=run_struck, wait=zygote.wait)
