"""Reading the JSON files that lie beside weights."""

import json
from pathlib import Path
from typing import Any

from hf_vit.conversion.readers.checkpoint import one_line
from hf_vit.errors import UserError

MAX_BYTES = 32 * 2**20  # an index of 1,000 layers has less than one MiB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of reasonable size.

    Raises:
        UserError: the file is none.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        content: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is no readable JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} holds no JSON object; get the file again")
    return content  # pyright: ignore[reportUnknownVariableType] (JSON's keys are text)
