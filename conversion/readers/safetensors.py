"""Reading .safetensors files: the library maps them into memory and checks that header and bytes agree."""

from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open

from hf_vit.conversion.readers.checkpoint import CheckpointReader, Shape, existing_file, one_line, refuse_unsafe_key
from hf_vit.errors import UserError

MAX_HEADER = 2 * 2**20  # bytes; some 150 an array
FLOAT_NAMES = ("F16", "BF16", "F32", "F64")


@final
class SafetensorsReader(CheckpointReader):
    """The arrays of one .safetensors file.

    The format has no checksum: a changed number is not noticed. Hub downloads are verified by their hash.

    Raises:
        UserError: the file is missing, empty, or its header does not describe exactly the bytes that follow.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path)
        with self.path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > MAX_HEADER:
            raise UserError(f"{self.path.name} has a header of {header} bytes; a checkpoint has less than {MAX_HEADER}")
        try:
            opened = safe_open(self.path, framework="pt")
        except (SafetensorError, OSError, ValueError, OverflowError, MemoryError) as error:
            raise UserError(
                f"{self.path.name} is no readable .safetensors file ({one_line(error)}); get the file again"
            ) from error
        self._file = opened.__enter__()
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        for key in self._file.keys():  # noqa: SIM118 (no dict)
            refuse_unsafe_key(key, self.path.name)
            described = self._file.get_slice(key)
            self._shapes[key], self._dtypes[key] = tuple(described.get_shape()), str(described.get_dtype())
        if not self._shapes:
            raise UserError(f"{self.path.name} is a .safetensors file without any array; get the file again")

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes)

    def read_floats(self, key: str) -> torch.Tensor:
        held = self._dtypes[key]
        if held not in FLOAT_NAMES:
            raise UserError(f"'{key}' in {self.path.name} holds {held}; weights need {', '.join(FLOAT_NAMES)}")
        return self.checked(key, self._file.get_tensor(key))
