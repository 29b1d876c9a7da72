"""Records of everything measured about a model: `facts.json` beside its weights.

The file is a JSON list of records, oldest first. Every command that measures appends one; cards, tables and plots are
made from this file. A record:

| field    | type            | meaning                                                                             |
|----------|-----------------|-------------------------------------------------------------------------------------|
| kind     | str             | one of `KINDS`                                                                      |
| command  | str             | the command line, paths reduced to their last part, secrets redacted                |
| date     | ISO 8601, UTC   | when the record was made                                                            |
| seed     | int or null     | seed of the run                                                                     |
| data     | object or null  | name, fingerprint (content hash), split, size (images), revision (a Hub commit)     |
| versions | object          | Python and library versions                                                         |
| hardware | object          | device, name, cores, memory_gib; for a GPU also gpus and gpu_memory_gib             |
| seconds  | float or null   | duration of the measurement                                                         |
| weights  | str or null     | hash of the weights that the folder held (see `hash_weights`)                       |
| values   | object          | the measurements; accuracies and errors are fractions in [0, 1], times in seconds   |

Unknown fields are kept when a file is read and written again. JSON has no NaN or infinity, so these, and integers too
large for a float, are written as the strings "nan", "inf" and "-inf". All values pass through
`hf_vit.results.redaction`, so that the file holds no host names, user names, absolute paths or secrets.
"""

import functools
import hashlib
import json
import math
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self, cast

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)

from hf_vit.environment import list_versions, read_hardware
from hf_vit.errors import UserError
from hf_vit.repositories.reading import WEIGHTS, list_shards
from hf_vit.results.redaction import redact_command, redact_values
from hf_vit.writing import write_atomically

FACTS_NAME = "facts.json"
KINDS = ("training", "evaluation", "conversion", "analysis", "benchmark")

_Values = Annotated[dict[str, JsonValue], BeforeValidator(lambda value: _to_json(value))]


class DataFact(BaseModel):
    """The images of a measurement: data set, hash of its content, split, number of images, and Hub commit."""

    model_config = ConfigDict(extra="allow")

    name: str
    fingerprint: str | None = None
    split: str | None = None
    size: int | None = None
    revision: str | None = None


class Record(BaseModel):
    """One measurement with everything needed to judge or repeat it; the module's docstring lists the fields."""

    model_config = ConfigDict(extra="allow")

    kind: str
    command: str
    date: datetime
    seed: int | None = None
    data: DataFact | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: _Values = Field(default_factory=dict)
    seconds: FiniteFloat | None = None
    weights: str | None = None
    values: _Values = Field(default_factory=dict)


_RECORDS = TypeAdapter(list[Record])


def describe_invalid_field(error: ValidationError) -> str:
    """Return the first field that is not valid and why: "0.kind: Input should be a valid string"."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class Facts(BaseModel):
    """All records of one model folder, oldest first."""

    records: list[Record] = Field(default_factory=list[Record])
    _folder: Path | None = PrivateAttr(None)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read `folder/facts.json`, redacted as by `save`; return no records if there is no such file.

        Raises:
            UserError: the file is damaged.
        """
        path = Path(folder) / FACTS_NAME
        try:
            records = _RECORDS.validate_json(path.read_text(encoding="utf-8"))
            facts = cls(records=_RECORDS.validate_python(_redact_records(records)))
            facts._folder = Path(folder)
            return facts
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            reason = describe_invalid_field(error) if isinstance(error, ValidationError) else "not UTF-8 text"
            name = Path(path.parent.name) / path.name
            remedy = "restore it from a backup, or move it away to start a new one"
            raise UserError(f"{name} is damaged ({reason}); {remedy}") from error

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `folder/facts.json` in one move, so that a reader sees either the old file or the new one."""
        write_atomically(Path(folder) / FACTS_NAME, self.to_json())

    def to_json(self) -> str:
        """Return the content of facts.json, redacted."""
        records = _redact_records(self.records)
        return json.dumps(records, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    def filter_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, oldest first."""
        return [record for record in self.records if record.kind == kind]

    def find_latest(self, kind: str) -> Record | None:
        """Return the last record of one kind, or None."""
        return next(reversed(self.filter_kind(kind)), None)

    def find_thresholds(self) -> dict[str, Any]:
        """Return the last threshold of every class for the current weights; not all data have all classes."""
        thresholds = (record.values.get("thresholds") for record in self.select_current())  # a list for other protocols
        return {name: value for part in thresholds if isinstance(part, dict) for name, value in part.items()}

    def list_origins(self) -> list[Record]:
        """Return the records of how the weights were made (training and conversion), oldest first."""
        return [record for record in self.records if record.kind in ("training", "conversion")]

    def select_current(self) -> list[Record]:
        """Return the last training or conversion and all measurements after it of the weights that the folder holds.

        Measurements of other weights, which a program that records nothing has replaced since, are left out.
        """
        origins = [index for index, record in enumerate(self.records) if record.kind in ("training", "conversion")]
        first = origins[-1] if origins else 0
        current = enumerate(self.records[first:], start=first)
        return [record for index, record in current if index in origins or not self._is_of_other_weights(record)]

    @property
    def has_replaced_weights(self) -> bool:
        """Whether a program that records nothing replaced the weights after the last training or conversion."""
        return any(map(self._is_of_other_weights, self.list_origins()[-1:]))

    def _is_of_other_weights(self, record: Record) -> bool:
        return record.weights is not None and self._weights is not None and record.weights != self._weights

    @functools.cached_property
    def _weights(self) -> str | None:
        """The hash of the weights that the folder holds now; None without a folder or weights."""
        return None if self._folder is None else hash_weights(self._folder)


def append_record(folder: str | os.PathLike[str], record: Record) -> None:
    """Append a record to `folder/facts.json`; a lock keeps the records of processes that append at the same time.

    Raises:
        UserError: the folder does not exist, or its facts.json is damaged (it then stays unchanged).
    """
    if not Path(folder).is_dir():
        raise UserError(f"{FACTS_NAME} cannot be written: {folder} does not exist; save the model there first")
    with lock_folder(folder):
        facts = Facts.load(folder)
        facts.records.append(record.model_copy(update={"weights": hash_weights(folder)}))
        facts.save(folder)


def hash_weights(folder: str | os.PathLike[str]) -> str | None:
    """Return the first 16 digits of the SHA-256 of a folder's tensors with names, types and shapes; None without them.

    It does not depend on how the tensors are divided among files.
    """
    folder = Path(folder)
    tensors: dict[str, tuple[str, Any]] = {}
    try:
        for name in list_shards(folder, str(folder)) or WEIGHTS[:1]:
            content = np.memmap(folder / name, np.uint8, "r")
            start = 8 + int.from_bytes(content[:8], "little")
            for tensor, entry in json.loads(bytes(content[8:start])).items():
                if tensor != "__metadata__":
                    begin, end = entry["data_offsets"]
                    form = f"{tensor}\t{entry['dtype']}\t{entry['shape']}\n"
                    tensors[tensor] = form, content[start + begin : start + end]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no weights, or damaged ones
        return None
    digest = hashlib.sha256()
    for _, (form, values) in sorted(tensors.items()):
        digest.update(form.encode())
        digest.update(values)
    return digest.hexdigest()[:16]


def is_recorded(folder: str | os.PathLike[str], kind: str, values: Mapping[str, Any]) -> bool:
    """Return whether a record of this kind in `folder/facts.json` contains these values."""
    required_values = redact_json(values)
    return any(
        _contains(cast(JsonValue, record.values), required_values) for record in Facts.load(folder).filter_kind(kind)
    )


def _contains(value: JsonValue, required_value: JsonValue) -> bool:
    """Return whether `value` equals `required`; a dict must contain the wanted entries and may have others."""
    if isinstance(value, dict) and isinstance(required_value, dict):
        return all(name in value and _contains(value[name], item) for name, item in required_value.items())
    return value == required_value


def make_record(
    kind: str,
    *,
    values: Mapping[str, Any],
    command: str | Sequence[str] | None = None,
    seed: int | None = None,
    data: DataFact | None = None,
    seconds: float | None = None,
    device: str | None = None,
) -> Record:
    """Return a record dated now, with this machine's hardware and the installed library versions.

    Args:
        kind: one of `KINDS`.
        values: the measurements; numpy and torch scalars and arrays become plain numbers and lists.
        command: the command that was run, as a line or as a list of arguments; by default this process's arguments.
        seed: random seed of the run.
        data: the images that were measured.
        seconds: duration of the measurement.
        device: torch device ("cpu", "cuda:0") whose hardware is recorded.

    Raises:
        ValueError: `kind` is unknown, or a value cannot be written as JSON.
    """
    if kind not in KINDS:
        raise ValueError(f"the record kind {kind!r} is unknown; choose from {', '.join(KINDS)}")
    if data is not None:
        data = DataFact.model_validate(redact_json(data.model_dump()))
    return Record(
        kind=kind,
        command=redact_command(sys.argv if command is None else command),
        date=datetime.now(UTC).replace(microsecond=0),
        seed=seed,
        data=data,
        versions=list_versions(),
        hardware=read_hardware(device),
        seconds=None if seconds is None else round(float(seconds), 3),
        values=cast(dict[str, JsonValue], redact_json(values)),
    )


def as_fraction(value: object) -> float | None:
    """Return a value as float if it is a number in [0, 1], as accuracies and errors are; otherwise None."""
    return float(value) if isinstance(value, float | int) and 0 <= value <= 1 else None


@contextmanager
def lock_folder(folder: str | os.PathLike[str], *, wait: bool = True) -> Generator[None]:
    """Hold an advisory lock on a folder, if the system supports it; no lock file is created.

    Args:
        folder: an existing folder.
        wait: wait for another process to release the lock; otherwise raise.

    Raises:
        UserError: another process holds the lock and `wait` is False.
    """
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


def _redact_records(records: Sequence[Record]) -> list[JsonValue]:
    return [redact_json(record.model_dump(mode="json")) for record in records]


def redact_json(value: object) -> JsonValue:
    """Return a value as JSON with secrets and local paths redacted."""
    return redact_values(_to_json(value))


def _to_json(value: Any) -> JsonValue:
    """Return a value in JSON types: arrays become lists; NaN, infinities and integers beyond floats become strings."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "-inf" if value < 0 else "inf"
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, BaseModel):
        return _to_json(value.model_dump())
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _to_json(value.tolist())
    raise ValueError(
        f"a record cannot store {value!r:.60} of type {type(value).__name__}; give numbers, text, lists or dicts"
    )
