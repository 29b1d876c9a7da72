"""Reading the JSON files that lie beside weights."""

import json
from pathlib import Path
from typing import Any

from hf_vit.conversion.readers.checkpoint import one_line
from hf_vit.errors import UserError

# An index of 1,000 layers has less than one MiB, the names of 21,843 classes have two. Python's objects take some 200
# bytes a value, however short its text is.
MAX_BYTES, MAX_VALUES = 4 * 2**20, 250_000


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of reasonable size.

    Raises:
        UserError: the file is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        text = path.read_bytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        content: object = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is no readable JSON ({one_line(error)}); get the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} holds no JSON object; get the file again")
    return content  # pyright: ignore[reportUnknownVariableType] (JSON's keys are text)
