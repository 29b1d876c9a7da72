"""JSON files of results: documents that a later run reads again to go on, and rows of a benchmark."""

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ValidationError

from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_command, redact_values
from hf_vit.results.writing import write_atomically


class ModelInput(BaseModel):
    """A model that was measured: its name, its kind, and a hash of weights and config."""

    name: str
    kind: str
    fingerprint: str
    origin: str | None = None


class Document(BaseModel):
    """A file of results; `command` writes it, `format` is the version of its fields.

    The same model, data and settings give the same bytes: no dates, times or paths are in such a file, except where it
    tells of speed. Its JSON schema is `model_json_schema()` of its class.
    """

    command: ClassVar[str]

    format: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the document in a file; None if there is none."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise UserError(f"{path} is not a result of this version of {cls.command}; move it") from error

    def write(self, path: Path) -> None:
        """Write in one move; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = redact_values(json.loads(self.model_dump_json()))
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def differing(one: BaseModel, other: BaseModel) -> list[str]:
    """Return the names of the fields in which two values of a class differ."""
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)]


class Measurements:
    """Rows of a benchmark in a dated file, rewritten after every row so that a killed run keeps what it has.

    Args:
        path: the file; None keeps all in memory alone.
        command: what was typed, as a line or as arguments; secrets and places are left out.
        device: torch device.
        packages: others whose versions decide about the numbers.
        settings: whatever else does (turns, batch sizes).
    """

    def __init__(
        self,
        path: Path | None,
        command: str | Sequence[str],
        device: str,
        packages: Sequence[str] = (),
        **settings: object,
    ) -> None:
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"there is no folder {path.parent} for the results; make it first")
        self.path = path
        self.rows: list[Mapping[str, Any]] = []
        others: dict[str, str] = {}
        for package in packages:
            with suppress(metadata.PackageNotFoundError):
                others[package] = metadata.version(package)
        self.head = {
            "date": datetime.date.today().isoformat(),
            "command": redact_command(command),
            "hardware": {**hardware(device), "threads": torch.get_num_threads()},
            "versions": versions() | others,
            **settings,
        }

    def add(self, row: Mapping[str, Any], **whole: object) -> None:
        """Write with one more row; `whole`: what is now true of all of them."""
        self.rows.append(_rounded(row))
        self.write(**whole)

    def write(self, **whole: object) -> None:
        """Write the rows as they are."""
        if self.path is not None:
            content = json.loads(json.dumps({**self.head, **whole, "rows": self.rows}))
            write_atomically(self.path, json.dumps(redact_values(content), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Return a value with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
