"""What a place holds before and after a command, and what may be found there when the command was struck."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from campaigns.commands import Command
from campaigns.watched import Outcome, Watcher

from hf_vit.hub.card import is_rendered, render_card
from hf_vit.hub.model_folder import CARD_NAME

# What may be there while a command is at work and after it was struck: hidden files and folders, a run's checkpoints,
# and the system's folder for temporary files. The libraries' own cache is theirs.
_UNFINISHED = re.compile(r"(^|/)(\.[^/]+|checkpoints)(/|$)|^tmp(/|$)")
_THEIRS = re.compile(r"^home(/|$)|^tmp/(torchinductor_|\.ses$)")
# Fields of JSON that differ from run to run.
_PASSING = re.compile(
    r"date|seconds|per_second|speed|load|quiet|memory|hardware|times_as_fast|median|lower|upper|rows|versions"
)


def files_in(place: Path) -> dict[str, str]:
    """Path -> a digest of what the file says, without times and speeds; of a folder, ""."""
    found = {str(path.relative_to(place)): path for path in sorted(place.rglob("*"))}
    return {
        name: "" if path.is_dir() else "unfinished" if _UNFINISHED.search(name) else _digest(path)
        for name, path in found.items()
        if not _THEIRS.search(name)
    }


def final(files: Mapping[str, str]) -> dict[str, str]:
    """The files at their final places."""
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
        # A measurement that was recorded by the struck run, and again by the next, is no other fact.
        return sorted({json.dumps(item) for item in items}) if is_facts else items
    return value


@dataclass(frozen=True)
class Prepared:
    """A command with what it starts from and what it leads to.

    Attributes:
        start: a folder like the place before the command.
        before, after: `files_in` the place.
        changes: what an unbroken run changes, "call path".
        seconds: of an unbroken run.
    """

    command: Command
    start: Path
    before: dict[str, str]
    after: dict[str, str]
    changes: list[str]
    seconds: float

    def lay_out(self, place: Path) -> None:
        """Make the place what it is before the command."""
        _fill(place, self.start)


def _fill(place: Path, source: Path) -> None:
    for path in place.iterdir():  # it may be a disk of its own
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)


def prepare(watcher: Watcher, command: Command, template: Path, start: Path) -> Prepared:
    """Run what comes before the command, and the command itself twice, unbroken: cold and warm."""
    _fill(watcher.place, template)
    (watcher.place / "tmp").mkdir(exist_ok=True)
    for arguments in command.earlier:
        outcome = watcher.run(*arguments)
        assert outcome.code == 0, outcome
    shutil.copytree(watcher.place, start, symlinks=True)
    before = files_in(watcher.place)
    outcome = watcher.warm(*command.arguments)
    assert outcome.code == 0, outcome
    after = files_in(watcher.place)
    prepared = Prepared(command, start, before, after, outcome.changes, outcome.seconds)
    unfinished = [name for name in after.keys() - before.keys() if _UNFINISHED.search(name)]
    assert not unfinished, f"an unbroken run leaves {unfinished}"
    prepared.lay_out(watcher.place)
    outcome = watcher.run(*command.arguments)
    check_done(prepared, watcher.place)  # or no struck one could be held against it
    return replace(prepared, seconds=outcome.seconds)


def check_struck(prepared: Prepared, place: Path) -> str:
    """What a struck command left.

    Returns:
        "earlier"; "new"; "aside" between the two moves of a replacement, when the earlier folder lies hidden beside; or
        "between", which is files of both, all of them whole.

    Raises:
        AssertionError: a file at its final place is neither the earlier nor the new one; a folder that loads as a model
            holds files of both, or not all.
    """
    found, earlier, new = final(files_in(place)), final(prepared.before), final(prepared.after)
    if found in (earlier, new):
        return "new" if found == new else "earlier"
    if any(place.glob(".*.former")):
        earlier = {name: digest for name, digest in earlier.items() if not name.startswith("out/")}
        new = {name: digest for name, digest in new.items() if not name.startswith("out/")}
        assert all(found.get(name) in (earlier.get(name), new.get(name)) for name in earlier | found | new)
        return "aside"
    for name in earlier.keys() | found.keys() | new.keys():
        known = found.get(name) in (earlier.get(name), new.get(name))
        assert known or _tells_the_facts(place / name), f"{name} is neither the earlier nor the new one"
    for folder in {name.rpartition("/")[0] for name in found if name.endswith("/config.json")}:
        inside: list[dict[str, str]] = [
            {name: digest for name, digest in files.items() if name.startswith(f"{folder}/")}
            for files in (found, earlier, new)
        ]
        weights = [{name: one for name, one in files.items() if _is_of_model(name)} for files in inside]
        assert weights[0] in weights[1:], f"the model in {folder} is of two"
    return "between"


def _tells_the_facts(file: Path) -> bool:
    """Whether it is the card of the facts beside it: a model that is trained and not yet shared has a card of its own.

    Before config.json, which comes last, the folder is no model, and its card is that of none.
    """
    if file.name != CARD_NAME or not file.is_file():
        return False
    if not (file.parent / "config.json").exists():
        return is_rendered(file.parent)
    return file.read_text() == render_card(file.parent)


def _is_of_model(name: str) -> bool:
    return name.endswith((".safetensors", ".py", "config.json", ".npz", ".onnx", ".xml", ".bin"))


def check_done(prepared: Prepared, place: Path) -> None:
    """The place holds just what an unbroken run leaves.

    Raises:
        AssertionError: it does not.
    """
    found, wanted = files_in(place), prepared.after
    stale = sorted(found.keys() - wanted.keys())
    assert not stale, f"left behind: {', '.join(stale)[:300]}"
    other = sorted(name for name in wanted if found.get(name) != wanted[name])
    assert not other, f"not as after an unbroken run: {', '.join(other)[:300]}"


def go_on(watcher: Watcher, prepared: Prepared, run: Callable[..., Outcome] | None = None) -> str:
    """Run a struck command again, as its message says, to the end.

    Returns:
        How: "again", "--resume", "--force", or "was complete".
    """
    arguments = prepared.command.arguments
    outcome = watcher.run(*arguments)
    how = "again"
    if outcome.code:
        check_line(outcome)
        how = next((flag for flag in ("--resume", "--force") if flag in outcome.err), "was complete")
        if how == "was complete":
            assert "finished model" in outcome.err or "not empty" in outcome.err, f"no way on: {outcome.err}"
        if "finished model" in outcome.err:
            how = "--resume"
        if how.startswith("--"):
            outcome = watcher.run(*arguments, how)
            assert outcome.code == 0, f"{how}: {outcome.err}"
    check_done(prepared, watcher.place)
    return how


def check_line(outcome: Outcome) -> str:
    """The one line that a command which failed prints on standard error, beside notes and a training's log.

    Raises:
        AssertionError: it prints another number of lines.
    """
    lines = [line for line in outcome.err.splitlines() if line.strip() and not line.startswith(("note: ", "step "))]
    assert len(lines) == 1, f"{len(lines)} lines on standard error: {' | '.join(lines)[-600:]}"
    assert lines[0].startswith("hf-vit: "), lines[0]
    return lines[0]
