"""Reading a checkpoint in several files, as an index beside them lists them."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.conversion.readers.checkpoint import CheckpointReader, Shape
from hf_vit.conversion.readers.json import read_json
from hf_vit.errors import UserError

MAX_SHARDS = 1000


@final
class ShardedReader(CheckpointReader):
    """The arrays of a checkpoint in several files, as an index (`*.index.json`) beside them lists.

    Args:
        index: the file.
        open_file: gives the reader of one of the files.

    Raises:
        UserError: index and files disagree about any key.
    """

    def __init__(self, index: Path, open_file: Callable[[Path], CheckpointReader]) -> None:
        self.path = index
        keys: object = read_json(index).get("weight_map")
        if not isinstance(keys, dict) or not keys:
            raise UserError(f"{index.name} has no 'weight_map' from keys to files; get the file again")
        weight_map: dict[str, Any] = keys
        names = sorted({str(name) for name in weight_map.values()})
        if len(names) > MAX_SHARDS or not all(re.fullmatch(r"[\w-][\w.-]{0,199}", name) for name in names):
            raise UserError(f"{index.name} names files that no library writes, such as {names[0][:80]!r}")
        self._readers: dict[str, CheckpointReader] = {}
        try:
            for name in names:
                self._readers[name] = open_file(index.with_name(name))
            self._check(weight_map)
        except BaseException:
            self.close()
            raise
        self._files: Mapping[str, str] = {key: str(name) for key, name in weight_map.items()}

    def _check(self, weight_map: Mapping[str, Any]) -> None:
        held = [(key, name) for name, reader in self._readers.items() for key in reader.shapes]
        wrong = set(held) ^ {(key, str(name)) for key, name in weight_map.items()}
        if wrong:
            key, name = min(wrong)
            raise UserError(
                f"{self.path.name} and the files it lists disagree about {len(wrong)} keys, such as '{key[:80]}' in "
                f"{name}; get all files again"
            )

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: shape for reader in self._readers.values() for key, shape in reader.shapes.items()}

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in self._readers:
            with self.path.with_name(name).open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()

    def read_floats(self, key: str) -> torch.Tensor:
        return self._readers[self._files[key]].read_floats(key)
