"""From a path to the reader that its content asks for: a file, or a folder that transformers or timm saved."""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.conversion.origins.registry import READABLE
from hf_vit.conversion.readers.checkpoint import CheckpointReader, Companions, Shape
from hf_vit.conversion.readers.npz import NpzReader
from hf_vit.conversion.readers.safetensors import SafetensorsReader
from hf_vit.conversion.readers.torch import TorchReader
from hf_vit.errors import UserError

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
# As transformers and timm name the weights of a folder; the first that is there is read.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
MAX_JSON = 32 * 2**20  # bytes; an index of 1,000 layers has less than one
MAX_SHARDS = 1000

_SIGNATURES = {
    b"\x93NUMPY": "a single .npy array, not an .npz archive of many",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x80": "a Python pickle (an old .pth or .bin file), which is never loaded; save its tensors as .safetensors",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
}


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint file, or a folder with config.json and weights.

    Raises:
        UserError: there is nothing, or nothing that can be read; the message says what it is instead.
    """
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the path of a checkpoint{READABLE}")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise UserError(f"{path.name} is empty; get the file again")
    if head.startswith(b"PK"):
        return TorchReader(path) if _is_torch_archive(path) else NpzReader(path)
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return SafetensorsReader(path)
    what = next((what for signature, what in _SIGNATURES.items() if head.startswith(signature)), None)
    what = what or "no .npz archive, .safetensors or PyTorch file: it is damaged, or another kind of file"
    raise UserError(f"{path.name} is {what}{READABLE}")


def open_folder(folder: Path) -> CheckpointReader:
    """Open the weights of a saved folder, and read what its config and preprocessor files say.

    Raises:
        UserError: a file is missing, damaged, or does not fit the others.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is a folder without {CONFIG}; give a file, or a folder that transformers or timm saved"
        )
    config = read_json(folder / CONFIG)
    processor = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else None
    found = [name for name in WEIGHTS if (folder / name).is_file() or (folder / f"{name}.index.json").is_file()]
    if not found:
        raise UserError(f"{folder} holds no weights; it needs {' or '.join(WEIGHTS)}, or the index of its parts")
    single = folder / found[0]
    reader = open_checkpoint(single) if single.is_file() else ShardedReader(folder / f"{found[0]}.index.json")
    reader.companions = Companions(config, processor)
    return reader


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of reasonable size.

    Raises:
        UserError: the file is none.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"more than {MAX_JSON} bytes")
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is no readable JSON ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(found, dict):
        raise UserError(f"{path.name} holds no JSON object; get the file again")
    return found  # pyright: ignore[reportUnknownVariableType] (JSON's keys are text)


@final
class ShardedReader(CheckpointReader):
    """The arrays of a checkpoint in several files, as an index (`*.index.json`) beside them lists.

    Raises:
        UserError: index and files disagree about any key.
    """

    def __init__(self, index: Path) -> None:
        self.path = index
        keys: Any = read_json(index).get("weight_map")
        if not isinstance(keys, dict) or not keys:
            raise UserError(f"{index.name} has no 'weight_map' from keys to files; get the file again")
        weight_map: dict[str, Any] = keys
        names = sorted({str(name) for name in weight_map.values()})
        if len(names) > MAX_SHARDS or not all(re.fullmatch(r"[\w-][\w.-]{0,199}", name) for name in names):
            raise UserError(f"{index.name} names files that no library writes, such as {names[0][:80]!r}")
        self._readers: dict[str, CheckpointReader] = {}
        try:
            for name in names:
                self._readers[name] = open_checkpoint(index.with_name(name))
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
                while data := file.read(2**22):
                    digest.update(data)
        return digest.hexdigest()

    def read_floats(self, key: str) -> torch.Tensor:
        return self._readers[self._files[key]].read_floats(key)


def _is_torch_archive(path: Path) -> bool:
    """Whether a zip archive has the pickle that PyTorch writes; what is damaged is left to the reader of .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") or name == "data.pkl" for name in archive.namelist())
    except Exception:  # damaged: the reader says how, with every check it has
        return False
