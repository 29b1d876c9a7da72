"""What was measured about a model: `facts.json` beside its weights.

The file is a JSON list of records, oldest first. Every command that measures appends one; cards, tables and plots
are made from it, never from memory. A record:

| field    | type            | meaning                                                                             |
|----------|-----------------|-------------------------------------------------------------------------------------|
| kind     | str             | one of `KINDS`                                                                      |
| command  | str             | what was typed, paths reduced to their last part, secrets redacted                  |
| date     | ISO 8601, UTC   | when the record was made                                                            |
| seed     | int or null     | seed of the run                                                                     |
| data     | object or null  | name, fingerprint (content hash), split, size (images), revision (a Hub commit)     |
| versions | object          | Python and library versions                                                         |
| hardware | object          | device, name, cores, memory_gib; for a GPU also gpus and gpu_memory_gib             |
| seconds  | float or null   | duration of what was measured                                                       |
| values   | object          | the measurements; accuracies and errors are fractions in [0, 1], times in seconds   |

Fields that this version does not know are kept when a file is read and written again. JSON has no NaN or infinity:
they, and integers too large for a float, are kept as the strings "nan", "inf" and "-inf". Nothing personal belongs
here: no host or user names, no absolute paths, no secrets; whatever is written goes through `hf_vit.results.redaction`.
"""

import json
import math
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, JsonValue, TypeAdapter, ValidationError

from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_command, redact_values
from hf_vit.results.writing import write_atomically

FACTS_NAME = "facts.json"
KINDS = ("training", "evaluation", "conversion", "analysis", "benchmark")

_Values = Annotated[dict[str, JsonValue], BeforeValidator(lambda value: _plain(value))]


class DataFact(BaseModel):
    """Which images: a data set's public name, a hash of its content, split, number of images; of the Hub its commit."""

    model_config = ConfigDict(extra="allow")

    name: str
    fingerprint: str | None = None
    split: str | None = None
    size: int | None = None
    revision: str | None = None


class Record(BaseModel):
    """One measurement and everything needed to judge or repeat it; see the module's table."""

    model_config = ConfigDict(extra="allow")

    kind: str
    command: str
    date: datetime
    seed: int | None = None
    data: DataFact | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: _Values = Field(default_factory=dict)
    seconds: FiniteFloat | None = None
    values: _Values = Field(default_factory=dict)


_RECORDS = TypeAdapter(list[Record])


class Facts(BaseModel):
    """All records of one model folder, oldest first."""

    records: list[Record] = Field(default_factory=list[Record])

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read `folder/facts.json`; a folder without one has no records yet."""
        path = Path(folder) / FACTS_NAME
        try:
            return cls(records=_RECORDS.validate_json(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            reason = "not UTF-8 text"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                reason = f"{where}: {first['msg']}" if where else first["msg"]
            name = Path(path.parent.name) / path.name
            raise UserError(
                f"{name} is damaged ({reason}); restore it from a backup, or move it away to start a new one"
            ) from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `folder/facts.json` in one move: a reader sees the old file or the new one, never half of one."""
        records = [_recorded(record.model_dump(mode="json")) for record in self.records]
        text = json.dumps(records, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        write_atomically(Path(folder) / FACTS_NAME, text + "\n")

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, oldest first."""
        return [record for record in self.records if record.kind == kind]

    def latest(self, kind: str) -> Record | None:
        """Return the last record of one kind; None without one."""
        return next(reversed(self.of_kind(kind)), None)

    def origins(self) -> list[Record]:
        """Return the records that tell where weights came from, oldest first."""
        return [record for record in self.records if record.kind in ("training", "conversion")]


def append_record(folder: str | os.PathLike[str], record: Record) -> None:
    """Add a record to `folder/facts.json`; two processes that append at once both find theirs in the file.

    Raises:
        UserError: the folder does not exist, or its facts.json is damaged (which then stays as it is).
    """
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder} to write {FACTS_NAME} into; save the model there first")
    with exclusive(folder):
        facts = Facts.load(folder)
        facts.records.append(record)
        facts.save(folder)


def is_recorded(folder: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> bool:
    """Return whether a record of `folder/facts.json` holds these values: what a command that goes on asks."""
    wanted = _recorded(values)
    return any(_holds(cast(JsonValue, record.values), wanted) for record in Facts.load(folder).of_kind(kind))


def _holds(value: JsonValue, wanted: JsonValue) -> bool:
    if isinstance(value, dict) and isinstance(wanted, dict):
        return all(name in value and _holds(value[name], item) for name, item in wanted.items())
    return value == wanted


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
    """Return a record of now, on this machine, with these library versions.

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
        data = DataFact.model_validate(_recorded(data.model_dump()))
    return Record(
        kind=kind,
        command=redact_command(sys.argv if command is None else command),
        date=datetime.now(UTC).replace(microsecond=0),
        seed=seed,
        data=data,
        versions=versions(),
        hardware=hardware(device),
        seconds=None if seconds is None else round(float(seconds), 3),
        values=cast(dict[str, JsonValue], _recorded(values)),
    )


def fraction(value: object) -> float | None:
    """Return a value that can be an accuracy or an error, a number in [0, 1]; None for all else in facts.json."""
    return float(value) if isinstance(value, float | int) and 0 <= value <= 1 else None


@contextmanager
def exclusive(folder: str | os.PathLike[str], *, wait: bool = True) -> Generator[None]:
    """Hold the folder's advisory lock, where the system has one; it leaves no lock file behind to be shared."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock a folder
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise UserError(
                    f"another process is writing to {folder}; wait until it has finished, or choose another folder"
                ) from error
        yield
    finally:
        os.close(descriptor)


def _recorded(value: object) -> JsonValue:
    return redact_values(_plain(value))


def _plain(value: Any) -> JsonValue:
    """Return a value as JSON knows it: arrays as lists, NaN and infinities as strings."""
    if value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else f"{'-' * (value < 0)}inf"
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _plain(value.tolist())
    raise ValueError(
        f"a record cannot hold a {type(value).__name__} ({value!r:.60}); give numbers, text, lists or dicts"
    )
