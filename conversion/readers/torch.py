"""Reading PyTorch files (.pth, .pt, .bin) of unknown origin: tensors only, mapped into memory, no pickled object.

Such a file is a zip archive: one pickle with the names, one member for the bytes of each storage. The pickle goes
through `torch.load(weights_only=True)`, which runs no code of the file; what the archive says is checked first.
What `torch.load` leaves unchecked is why this reader is ours: a storage that claims more bytes than its member has is
given the bytes that follow, whatever they are.
"""

import argparse
import mmap
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.conversion.readers.checkpoint import CheckpointReader, Shape, existing_file, one_line, refuse_unsafe_key
from hf_vit.conversion.readers.pickles import refuse_hungry
from hf_vit.errors import UserError

MAX_DEPTH = 8  # of dicts and lists inside each other; an optimizer's state has 4
MAX_VALUES = 1_000_000  # tensors, numbers and texts; references make a small pickle hold any number
MAX_GROWTH = 2.7  # of the file, in float32: half-precision numbers double; tensors that share their bytes fill memory
CHUNK = 2**22
LOCAL_HEADER_SIZE = 30  # of a zip archive, without name and extra field


@final
class TorchReader(CheckpointReader):
    """The tensors of one PyTorch file; those of nested dicts are named "outer.inner".

    Raises:
        UserError: the file is missing, empty, of the format before PyTorch 1.6, damaged, or holds more than tensors,
            numbers and text.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path)
        members = self._checked_archive()
        self._tensors = _flattened(self._load(), self.path.name)
        if not self._tensors:
            raise UserError(f"{self.path.name} holds no tensor at all; it is no checkpoint")
        for key, tensor in self._tensors.items():
            refuse_unsafe_key(key, self.path.name)
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
                raise UserError(f"'{key}' in {self.path.name} is no plain tensor; weights need to be dense and in full")
        self._refuse_lies(members)
        for key in filter(self._overlaps_itself, self._tensors):
            raise UserError(f"'{key}' in {self.path.name} has places that share memory; save a copy of it (`clone`)")
        self._refuse_growth()
        self._shares = Counter(tensor.untyped_storage().data_ptr() for tensor in self._tensors.values())

    def close(self) -> None:
        self._tensors = {}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    def read_floats(self, key: str) -> torch.Tensor:
        tensor = self.checked(key, self._tensors[key])
        return tensor.clone() if self._shares[tensor.untyped_storage().data_ptr()] > 1 else tensor

    def _checked_archive(self) -> dict[int, int]:
        """Verify names, storage and checksum of every member; where the bytes of each storage begin -> how many."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos, members = archive.infolist(), dict[int, int]()
                if len({info.filename for info in infos}) != len(infos):
                    raise ValueError("a member's name is there twice")
                if infos and (begin := min(info.header_offset for info in infos)):
                    raise ValueError(f"its first member begins after {begin} bytes of something else")
                for info in infos:
                    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                        raise ValueError(f"'{info.filename[:80]}' is compressed or encrypted")
                    with archive.open(info) as member:  # reading to the end verifies the checksum
                        while member.read(CHUNK):
                            pass
                    if info.filename.endswith("data.pkl"):
                        refuse_hungry(archive.read(info))
                    if info.file_size and re.search(r"(^|/)data/[^/]+$", info.filename):
                        members[self._begin(info)] = info.file_size
                return members
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            ValueError,
            NotImplementedError,
            RuntimeError,
            OSError,
        ) as error:
            raise UserError(
                f"{self.path.name} is no readable PyTorch file ({one_line(error)}); get the file again"
            ) from error

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """Where a member's bytes begin in the file: after its own header, whose last two fields are lengths."""
        with self.path.open("rb") as file:
            file.seek(info.header_offset + LOCAL_HEADER_SIZE - 4)
            name, extra = struct.unpack("<2H", file.read(4))
        return info.header_offset + LOCAL_HEADER_SIZE + name + extra

    def _load(self) -> Any:
        try:
            # A namespace of a training script's options holds names and values and does nothing.
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f" ({named[1]})" if named else ""
            raise UserError(
                f"{self.path.name} holds pickled Python objects{what}, which are never loaded; save its tensors alone, "
                "best as .safetensors"
            ) from error
        except Exception as error:  # whatever the unpickler meets in bytes that are no pickle of tensors
            raise UserError(
                f"{self.path.name} is no readable PyTorch file ({one_line(error)}); get the file again"
            ) from error

    def _refuse_lies(self, members: Mapping[int, int]) -> None:
        """Raise a UserError unless every tensor lies within exactly one member of the archive.

        `torch.load` maps the whole file to one address, which it does not tell; it begins a page, and puts the first
        storage at the beginning of a member.
        """
        storages = {key: tensor.untyped_storage() for key, tensor in self._tensors.items() if tensor.numel()}
        first = min((storage.data_ptr() for storage in storages.values()), default=0)

        def lies(begin: int) -> list[tuple[str, int]]:
            """(key, bytes that are there), if the first storage is the member that begins there."""
            there = {key: members.get(one.data_ptr() - first + begin, 0) for key, one in storages.items()}
            return [
                (key, size) for key, size in there.items() if not self._needs(key) <= size == storages[key].nbytes()
            ]

        begins = [begin for begin in members if (first - begin) % mmap.PAGESIZE == 0]
        for key, size in min(map(lies, begins or [0]), key=len):
            raise UserError(
                f"{self.path.name} is damaged at '{key}' (shape {list(self._tensors[key].shape)} does not fit the "
                f"{size} bytes that are there); get the file again"
            )

    def _refuse_growth(self) -> None:
        """Raise a UserError where tensors that share their bytes need far more memory than the file has."""
        total, size = sum(4 * tensor.numel() for tensor in self._tensors.values()), self.path.stat().st_size
        if total > MAX_GROWTH * size:
            raise UserError(f"{self.path.name} would grow from {size} to {total} bytes, as its tensors share theirs")

    def _overlaps_itself(self, key: str) -> bool:
        """Whether two places of the tensor may be one in memory."""
        extent = 0
        for step, side in sorted(zip(self._tensors[key].stride(), self._tensors[key].shape, strict=True)):
            if side > 1 and step <= extent:
                return True
            extent += step * (side - 1)
        return False

    def _needs(self, key: str) -> int:
        """Bytes of a tensor that is in full."""
        return self._tensors[key].numel() * self._tensors[key].itemsize


def _flattened(value: object, file_name: str) -> dict[str, torch.Tensor]:
    """All tensors of nested dicts and lists, their keys joined by dots; numbers and text are passed over."""
    tensors: dict[str, torch.Tensor] = {}
    waiting: list[tuple[str, object, int]] = [("", value, 0)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return tensors
        name, found, depth = waiting.pop()
        if isinstance(found, torch.Tensor):
            if name in tensors:
                raise UserError(f"{file_name} holds '{name[:80]}' twice; which one counts is unknown")
            tensors[name] = found.detach()
            continue
        if isinstance(found, dict):
            inner = list(dict.items(found))  # pyright: ignore[reportUnknownArgumentType] (a file may set `items`)
        elif isinstance(found, list | tuple):
            inner = list(enumerate(found))
        else:
            continue
        if depth == MAX_DEPTH or len(inner) > MAX_VALUES:
            raise UserError(f"{file_name} nests deeper than any checkpoint does, at '{name[:80]}'")
        waiting += [(f"{name}.{key}" if name else str(key), one, depth + 1) for key, one in reversed(inner)]
    raise UserError(f"{file_name} holds more than {MAX_VALUES} values beside its arrays; it is no checkpoint")
