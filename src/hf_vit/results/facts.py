"""What was measured about a model: `facts.json` beside its weights.

The file is a JSON list of records, oldest first. Every command that measures appends one; cards, tables and plots
are made from it, never from memory. A record:

| field    | type            | meaning                                                                             |
|----------|-----------------|-------------------------------------------------------------------------------------|
| kind     | str             | one of `KINDS`                                                                      |
| command  | str             | what was typed, paths reduced to their last part                                    |
| date     | ISO 8601, UTC   | when the record was made                                                            |
| seed     | int or null     | seed of the run                                                                     |
| data     | object or null  | name, fingerprint (content hash), split, size (images)                              |
| versions | object          | Python and library versions                                                         |
| hardware | object          | device, name, cores, memory_gib; for a GPU also gpus and gpu_memory_gib             |
| seconds  | float or null   | duration of what was measured                                                       |
| values   | object          | the measurements; accuracies and errors are fractions in [0, 1], times in seconds   |

Fields that this version does not know are kept when a file is read and written again. JSON has no NaN or infinity:
they are written as the strings "nan", "inf" and "-inf". Nothing personal belongs here: no host or user names, no
absolute paths.
"""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.writing import write_atomically

FACTS_NAME = "facts.json"
KINDS = ("training", "evaluation", "conversion", "analysis", "benchmark")

# An absolute path inside a longer text: at least two parts, not the tail of a URL, a fraction or a relative path.
_POSIX_PATH = re.compile(r"(?<![\w.:/~\-])~?/(?:[^\s/'\"`,;:=()]+/)+([^\s/'\"`,;:=()]*)")
_WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:[\\/](?:[^\s\\/'\"]+[\\/])*([^\s\\/'\"]*)")


class DataFact(BaseModel):
    """Which images: a data set's public name, a hash of its content, the split and its number of images."""

    model_config = ConfigDict(extra="allow")

    name: str
    fingerprint: str | None = None
    split: str | None = None
    size: int | None = None


class Record(BaseModel):
    """One measurement and everything needed to judge or repeat it; see the module's table."""

    model_config = ConfigDict(extra="allow")

    kind: str
    command: str
    date: datetime
    seed: int | None = None
    data: DataFact | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, JsonValue] = Field(default_factory=dict)
    seconds: float | None = None
    values: dict[str, JsonValue] = Field(default_factory=dict)


_RECORDS = TypeAdapter(list[Record])


class Facts(BaseModel):
    """All records of one model folder, oldest first."""

    records: list[Record] = Field(default_factory=list[Record])

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read `folder/facts.json`; a folder without one has no records yet.

        Raises:
            UserError: the file is not JSON, or is not a list of records.
        """
        path = Path(folder) / FACTS_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        except UnicodeDecodeError as error:
            raise _corrupt(path, "not UTF-8 text") from error
        try:
            return cls(records=_RECORDS.validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _corrupt(path, f"{where}: {first['msg']}" if where else first["msg"]) from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `folder/facts.json` in one move: a reader sees the old file or the new one, never half of one."""
        records = [record.model_dump(mode="json") for record in self.records]
        text = json.dumps(records, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        write_atomically(Path(folder) / FACTS_NAME, text + "\n")

    def of_kind(self, kind: str) -> list[Record]:
        """The records of one kind, oldest first."""
        return [record for record in self.records if record.kind == kind]


def append_record(folder: str | os.PathLike[str], record: Record) -> None:
    """Add a record to `folder/facts.json`; two processes that append at once both find theirs in the file.

    Raises:
        UserError: the folder does not exist, or its facts.json is damaged (which then stays as it is).
    """
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder} to write {FACTS_NAME} into; save the model there first")
    with _exclusive(Path(folder)):
        facts = Facts.load(folder)
        facts.records.append(record)
        facts.save(folder)


def new_record(
    kind: str,
    *,
    values: Mapping[str, Any],
    command: str | Sequence[str] | None = None,
    seed: int | None = None,
    data: DataFact | None = None,
    seconds: float | None = None,
    device: str | None = None,
) -> Record:
    """Make a record of now, on this machine, with these library versions.

    Args:
        kind: one of `KINDS`.
        values: the measurements; numpy and torch scalars and arrays become plain numbers and lists.
        command: what was typed, as a line or as a list of arguments; this process' own arguments by default.
        data: which images the values were measured on.
        seconds: duration of what was measured.
        device: torch device the work ran on ("cpu", "cuda:0"); decides whether the CPU or the GPU is named.

    Raises:
        ValueError: `kind` is unknown, or a value cannot be written as JSON.
    """
    if kind not in KINDS:
        raise ValueError(f"a record cannot be of kind {kind!r}; the kinds are {', '.join(KINDS)}")
    if data is not None:
        data = DataFact.model_validate(_plain(data.model_dump()))
    return Record(
        kind=kind,
        command=normalize_command(sys.argv if command is None else command),
        date=datetime.now(UTC).replace(microsecond=0),
        seed=seed,
        data=data,
        versions=versions(),
        hardware=hardware(device),
        seconds=None if seconds is None else round(float(seconds), 3),
        values=cast(dict[str, JsonValue], _plain(values)),
    )


def normalize_command(command: str | Sequence[str]) -> str:
    """The command as another person would type it: the program's plain name, paths reduced to their last part.

    >>> normalize_command(["/home/me/.venv/bin/hf-vit", "finetune", "--data", "/data/me/cats"])
    'hf-vit finetune --data cats'
    """
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError:  # unbalanced quotes: no list of arguments to be had
            return hide_paths(command)
    if not command:
        return ""
    program, *arguments = command
    # Split on both separators: a file written on one system is read on another.
    name = PureWindowsPath(program).name.removesuffix(".exe")
    if name == "__main__.py" and PureWindowsPath(program).parent.name == "hf_vit":
        name = "hf-vit"
    head = ["python", name] if name.endswith(".py") else [name]
    return shlex.join(head + [_shorten(argument) for argument in arguments])


def hide_paths(text: str) -> str:
    """Reduce every absolute path in a text to its last part."""
    return _POSIX_PATH.sub(r"\1", _WINDOWS_PATH.sub(r"\1", text))


@contextmanager
def _exclusive(folder: Path) -> Generator[None]:
    """Hold the folder's advisory lock, where the system has one; it leaves no lock file behind to be shared."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _corrupt(path: Path, reason: str) -> UserError:
    shown = Path(path.parent.name) / path.name
    return UserError(f"{shown} is damaged ({reason}); restore it from a backup, or move it away to start a new one")


def _shorten(argument: str) -> str:
    """One argument of a command line, `--option=value` included."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    if "://" in value:
        return option + equals + value
    if value.startswith("timm:"):  # the library's name before a folder
        return option + equals + "timm:" + _shorten(value.removeprefix("timm:"))
    posix, windows = PurePosixPath(value), PureWindowsPath(value)
    if windows.drive:
        value = windows.name or value
    elif posix.is_absolute() or ".." in posix.parts or value.startswith("~"):
        value = posix.name or value
    return option + equals + hide_paths(value)


def _plain(value: Any) -> JsonValue:
    """A value as JSON knows it: arrays as lists, NaN and infinities as strings, absolute paths reduced."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str | os.PathLike):
        text = os.fspath(cast("str | os.PathLike[str]", value))
        return PurePosixPath(text).name or text if PurePosixPath(text).is_absolute() else hide_paths(text)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {hide_paths(str(key)): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _plain(value.tolist())
    raise ValueError(
        f"a record cannot hold a {type(value).__name__} ({value!r:.60}); give numbers, text, lists or dicts"
    )
