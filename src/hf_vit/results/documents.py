"""JSON files of results: documents that a later run can read, and rows of a benchmark."""

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ValidationError

from hf_vit.environment import list_versions, read_hardware
from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_command, redact_values
from hf_vit.writing import write_atomically


class ModelInput(BaseModel):
    """A measured model: its name, its kind, and a hash of its weights and config."""

    name: str
    kind: str
    fingerprint: str
    origin: str | None = None


class Document(BaseModel):
    """A file of results.

    `command` is the command that writes it, `format` the version of its fields. The same model, data and settings give
    the same bytes: the file holds no dates, durations or paths, except where it reports speed. `model_json_schema()` of
    the class returns its JSON schema.
    """

    command: ClassVar[str]

    format: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the document in a file, or None if the file does not exist.

        Raises:
            UserError: the file is not such a document.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            remedy = "move it away, or choose another output folder"
            raise UserError(f"{path} was not written by this version of {cls.command}; {remedy}") from error

    def write(self, path: Path) -> None:
        """Write the file in one move, and create its folder if needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = redact_values(json.loads(self.model_dump_json()))
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def list_differing_fields(stored: BaseModel, current: BaseModel) -> list[str]:
    """Return the names of the fields in which inputs differ from those in a file, where names may be redacted."""
    redacted = stored.model_validate(redact_values(current.model_dump(mode="json")))
    return [name for name in type(stored).model_fields if getattr(stored, name) != getattr(redacted, name)]


class Measurements:
    """Rows of a benchmark in a dated file that is rewritten after every row, so that a killed run keeps its rows.

    Args:
        path: the file; None keeps the rows in memory only.
        command: the command that was run, as a line or as arguments; secrets and local folders are redacted.
        device: torch device.
        packages: further packages whose versions affect the numbers.
        settings: further settings that affect the numbers (rounds, batch sizes).
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
            raise UserError(f"the folder {path.parent} for the results does not exist; create it first")
        self.path = path
        self.rows: list[Mapping[str, Any]] = []
        package_versions: dict[str, str] = {}
        for package in packages:
            with suppress(metadata.PackageNotFoundError):
                package_versions[package] = metadata.version(package)
        self.head = {
            "date": datetime.date.today().isoformat(),
            "command": redact_command(command),
            "hardware": {**read_hardware(device), "threads": torch.get_num_threads()},
            "versions": list_versions() | package_versions,
            **settings,
        }

    def add(self, row: Mapping[str, Any], **summary: object) -> None:
        """Append a row and write the file; `summary` holds values that apply to all rows."""
        self.rows.append(round_floats(row))
        self.write(**summary)

    def write(self, **summary: object) -> None:
        """Write all rows, with values that apply to all of them."""
        if self.path is not None:
            content = json.loads(json.dumps({**self.head, **summary, "rows": self.rows}))
            write_atomically(self.path, json.dumps(redact_values(content), indent=1) + "\n")


def round_floats(value: Any) -> Any:
    """Return a value with floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    return value
