"""Files of results: JSON that a later run reads again, to go on where an earlier one stopped.

The same model, data and settings give the same bytes: no dates, times or paths are in such a file, except where it
tells of speed. Its JSON schema is `model_json_schema()` of its class.
"""

import json
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ValidationError

from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_values
from hf_vit.results.writing import write_atomically


class ModelInput(BaseModel):
    """A model that was measured: its name, its kind, and a hash of weights and config."""

    name: str
    kind: str
    fingerprint: str
    origin: str | None = None


class Document(BaseModel):
    """A file of results; `command` writes it, `format` is the version of its fields."""

    command: ClassVar[str]

    format: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The document in a file; None if there is none.

        Raises:
            UserError: the file is something else.
        """
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
    """Names of the fields in which two values of a class differ."""
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)]
