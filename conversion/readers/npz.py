"""Reading .npz files of unknown origin: no pickle, no extraction, nothing taken on trust.

A .npz file is a zip archive of .npy members. Members that are stored uncompressed are mapped into memory, the others
are inflated; either way the checksum is verified and a member gives exactly the bytes that its .npy header declares.
Checksums and values of mapped members may be checked by other threads while their arrays are already in use.
This reader is ours because `numpy.load` trusts the archive: names, declared sizes, and as much memory as it asks for.
"""

import io
import math
import mmap
import re
import struct
import sys
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from numpy.lib import format as npy

from hf_vit.conversion.readers.checkpoint import MAX_NAME, CheckpointReader, Shape, existing_file, one_line
from hf_vit.errors import UserError

MAX_MEMBERS = 65_534  # more need another form of archive; a checkpoint has hundreds
MAX_HEADER = 10_000  # bytes of a .npy header: 128 in practice
# Deflate cannot expand more than this (RFC 1951: 258 bytes for 2 bits); a larger claim is a lie.
MAX_DEFLATE_RATIO = 1032
# Weights hardly compress: half-precision ones fill 2.5 times their compressed file in float32. A file that grows more
# than that AND to this size is made to fill the machine.
MAX_GROWTH, FREE_BYTES = 2.7, 16 * 2**20
CHECKING_THREADS = 2
END_RECORD = struct.Struct("<4s4H2LH")
LOCAL_HEADER = struct.Struct("<4s5H3L2H")

# What zipfile, zlib and the .npy header parser raise on damaged bytes.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    SyntaxError,
    tokenize.TokenError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    MemoryError,
)


@dataclass(frozen=True)
class Member:
    """One array of the file: where it lies, and what its .npy header declares."""

    info: zipfile.ZipInfo
    shape: Shape
    dtype: np.dtype[Any]
    fortran_order: bool
    header_bytes: int

    @property
    def is_stored(self) -> bool:
        """Whether its bytes lie in the file as they are."""
        return self.info.compress_type == zipfile.ZIP_STORED

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_bfloat16(self) -> bool:
        """Whether these are JAX's bfloat16: numpy knows no such type and writes two bytes without meaning, "|V2"."""
        return self.dtype == np.dtype("V2")


@final
class NpzReader(CheckpointReader):
    """The arrays of one .npz file by key, read on demand; use as a context manager.

    Opening reads the directory and every array's header; `shapes` is then complete and honest: declared sizes agree
    with the archive's. Arrays are checked when read.

    Raises:
        UserError: the file is missing, empty, no .npz, truncated, damaged, or unsafe in any of the ways named above.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path)
        self._file = self.path.open("rb")
        try:
            # A private copy-on-write view: torch wants writable memory, and the file must never change.
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            with self._refusing("is no readable .npz archive"):
                self._zip = zipfile.ZipFile(self._file)
            self.members: Mapping[str, Member] = self._directory()
            self._pool, self._checks = ThreadPoolExecutor(CHECKING_THREADS), list[Future[None]]()
            self._begun: dict[str, Future[torch.Tensor]] = {}
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid: the mapping lives as long as they do."""
        self._pool.shutdown(cancel_futures=True)
        self._zip.close()
        self._file.close()

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: member.shape for key, member in self.members.items()}

    def read(self, key: str) -> torch.Tensor:
        """One array as a CPU tensor in the machine's byte order; stored float32 shares memory with the file's mapping.

        Raises:
            UserError: the array is damaged, or holds neither numbers nor truth values.
        """
        member = self.members[key]
        with self._refusing(f"is damaged at '{key}'"):
            if not self.is_mapped(key):  # what will be turned into float32 needs no map
                return self._tensor(member, self._unpacked(member))
            data = self._stored(member)
            self._verify_checksum(member, data)
            return self._tensor(member, data[member.header_bytes :])

    def is_mapped(self, key: str) -> bool:
        return self.members[key].is_stored and self.members[key].dtype == np.float32

    def map_floats(self, key: str) -> torch.Tensor:
        """As `read_floats`; a stored float32 array lies in the file's mapping, and is checked by another thread."""
        if not self.is_mapped(key):
            begun = self._begun.pop(key, None)
            return self.read_floats(key) if begun is None else begun.result()
        member = self.members[key]
        with self._refusing(f"is damaged at '{key}'"):
            data = self._stored(member)
            tensor = self._tensor(member, data[member.header_bytes :])
        self._checks.append(self._pool.submit(self._check, key, data, tensor))
        return tensor

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Inflate in other threads what is not mapped; its errors are raised when it is asked for."""
        for key in keys:
            if not self.is_mapped(key) and key not in self._begun:
                self._begun[key] = self._pool.submit(self.read_floats, key)

    def confirm(self) -> None:
        """Wait for the checks of all arrays that `map_floats` gave.

        Raises:
            UserError: one of them is damaged, or holds NaN or infinite values.
        """
        checks, self._checks = self._checks, []
        for check in checks:
            check.result()

    def _check(self, key: str, data: memoryview, tensor: torch.Tensor) -> None:
        with self._refusing(f"is damaged at '{key}'"):
            self._verify_checksum(self.members[key], data)
        self.checked(key, tensor)

    @staticmethod
    def _tensor(member: Member, data: memoryview | bytearray) -> torch.Tensor:
        dtype = np.dtype("<i2") if member.is_bfloat16 else member.dtype
        flat = np.frombuffer(data, dtype=dtype, count=math.prod(member.shape))
        array = flat.reshape(member.shape, order="F" if member.fortran_order else "C")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if member.is_bfloat16 else tensor

    def read_floats(self, key: str) -> torch.Tensor:
        """One array of finite floats, in the precision of the file.

        Raises:
            UserError: as `read`, or the array holds no floats, or NaN or infinite values.
        """
        dtype = self.members[key].dtype
        if not self.members[key].is_bfloat16 and (dtype.kind != "f" or dtype.itemsize not in (2, 4, 8)):
            raise UserError(
                f"'{key}' in {self.path.name} holds {dtype}; weights need float16, bfloat16, float32 or float64"
            )
        return self.checked(key, self.read(key))

    @contextmanager
    def _refusing(self, complaint: str) -> Generator[None]:
        """Turn what the parsers raise on bad bytes into one clear line."""
        try:
            yield
        except UserError:
            raise
        except DAMAGE as error:
            raise UserError(f"{self.path.name} {complaint} ({one_line(error)}); get the file again") from error

    def _directory(self) -> dict[str, Member]:
        infos = self._zip.infolist()
        with self._refusing("is damaged"):
            # zipfile takes a directory that ends early for a short one; the end record says how many entries it has.
            end = len(self._map) - END_RECORD.size - len(self._zip.comment)
            declared = END_RECORD.unpack(self._map[end : end + END_RECORD.size])[4]
            if declared != len(infos):
                raise ValueError(f"its directory lists {len(infos)} members, {declared} were written")
            # Of two archives one after the other zipfile reads the last alone.
            if infos and (begin := min(info.header_offset for info in infos)):
                raise ValueError(f"its first member begins after {begin} bytes of something else")
        if not infos:
            raise UserError(f"{self.path.name} is an archive without any array; get the file again")
        if len(infos) > MAX_MEMBERS:
            raise UserError(f"{self.path.name} holds {len(infos)} members; a checkpoint has at most {MAX_MEMBERS}")
        members: dict[str, Member] = {}
        for info in infos:
            key = self._key(info)
            if key in members:
                raise UserError(f"{self.path.name} holds '{key}' twice; which one counts is unknown")
            with self._refusing(f"is damaged at '{key}'"):
                members[key] = self._member(info)
        total, size = sum(4 * math.prod(member.shape) for member in members.values()), self.path.stat().st_size
        if total > max(FREE_BYTES, MAX_GROWTH * size):
            raise UserError(
                f"{self.path.name} would grow from {size} to {total} bytes: a zip bomb, or hardly anything but zeros; "
                "save weights that are meant so by numpy.savez, uncompressed"
            )
        return members

    def _key(self, info: zipfile.ZipInfo) -> str:
        """The array's name, after the checks that a member's name must pass."""
        name = info.filename
        # zipfile normalises NULs and, on some systems, separators: the raw name must already be clean.
        raw = info.orig_filename
        unsafe = re.search(r"[\\\0]|^[A-Za-z]:", raw) or any(part in ("", ".", "..") for part in name.split("/"))
        if unsafe or len(raw) > MAX_NAME:
            raise UserError(f"{self.path.name} holds a member with the unsafe name {raw[:80]!r}")
        if not name.isprintable() or not name.endswith(".npy"):
            raise UserError(
                f"{self.path.name} holds {name!r}, which is no .npy array: this is no .npz of weights; give one"
            )
        return name.removesuffix(".npy")

    def _member(self, info: zipfile.ZipInfo) -> Member:
        if info.flag_bits & 0x1:
            raise ValueError("encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"compression method {info.compress_type} is not one that numpy writes")
        if not 0 <= info.header_offset < len(self._map):
            raise ValueError("the archive's directory points outside of the file")
        stored = info.compress_type == zipfile.ZIP_STORED
        if info.file_size > info.compress_size * (1 if stored else MAX_DEFLATE_RATIO):
            raise ValueError(f"{info.compress_size} compressed bytes cannot hold {info.file_size}")
        with self._zip.open(info) as file:
            header = io.BytesIO(file.read(MAX_HEADER))
        shape, fortran_order, dtype = _npy_header(header)
        if dtype.hasobject:
            raise ValueError("it holds pickled Python objects, which are never loaded")
        member = Member(info, shape, dtype, fortran_order, header.tell())
        if member.data_bytes + member.header_bytes != info.file_size:
            raise ValueError(
                f"shape {list(shape)} of {dtype} needs {member.data_bytes} bytes, "
                f"{info.file_size - member.header_bytes} are there"
            )
        return member

    def _stored(self, member: Member) -> memoryview:
        """The member's bytes in the mapping, header first; found as zipfile finds them."""
        info = member.info
        start = info.header_offset
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        fields = LOCAL_HEADER.unpack(self._map[start : start + LOCAL_HEADER.size])
        start += LOCAL_HEADER.size
        if fields[0] != b"PK\x03\x04" or self._map[start : start + fields[9]] != name:
            raise ValueError("the local header does not fit the archive's directory")
        start += fields[9] + fields[10]
        view = memoryview(self._map)[start : start + info.file_size]
        if len(view) != info.file_size:
            raise ValueError("bad checksum")
        return view

    @staticmethod
    def _verify_checksum(member: Member, data: memoryview) -> None:
        if zlib.crc32(data) != member.info.CRC:
            raise ValueError("bad checksum")

    def _unpacked(self, member: Member) -> bytearray:
        data = bytearray(member.data_bytes)
        with self._zip.open(member.info) as file:
            file.read(member.header_bytes)
            # Exactly the declared bytes; zipfile verifies the checksum when the last one is read.
            if cast("io.BufferedIOBase", file).readinto(data) != len(data) or file.read(1):
                raise ValueError("the array is shorter or longer than its header says")
        return data


def _npy_header(file: io.BytesIO) -> tuple[Shape, bool, np.dtype[Any]]:
    """Parse a .npy header: shape, whether in Fortran order, dtype. Leaves the file at the first byte of data."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f".npy version {version} is not one that holds weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers written by Python 2 are fine, and published files may have them
        shape, fortran_order, dtype = readers[cast("Any", version)](file)
    if any(side < 0 for side in shape) or math.prod(shape) > sys.maxsize:
        raise ValueError(f"impossible shape {shape}")
    return tuple(int(side) for side in shape), bool(fortran_order), dtype
