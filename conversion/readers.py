"""Read checkpoint files from unknown sources: run none of their code, and verify their declared sizes.

Libraries read the bytes (zipfile, NumPy's .npy headers, `torch.load(weights_only=True, mmap=True)`, `safe_open`).
Before memory is allocated, each .npy header is compared with its entry in the archive, and each storage with its
member: if a storage declares more bytes than its member has, `torch.load` would read whatever follows in the file.
"""

import argparse
import hashlib
import io
import json
import math
import mmap
import os
import pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, cast, final

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open

from hf_vit.errors import UserError
from hf_vit.repositories.reading import POINTER

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

MAX_NAME = 200  # characters of a key; about 80 in practice
# The names of 21,843 classes take 2 MiB as JSON. In Python a value takes some 200 bytes, however short its text is.
MAX_JSON_BYTES, MAX_JSON_VALUES = 4 * 2**20, 250_000
MAX_MEMBERS = 65_534  # limit of the zip format without extensions; a checkpoint has hundreds
MAX_NPY_HEADER = 10_000  # bytes; 128 in practice
# Deflate cannot expand data more than this (RFC 1951: 258 bytes for 2 bits).
MAX_DEFLATE_RATIO = 1032
# Weights hardly compress: half-precision ones take 2.5 times their compressed size in float32. An .npz file that grows
# more, and to more than FREE_BYTES, is a zip bomb.
MAX_GROWTH = 2.7
FREE_BYTES = 16 * 2**20
MAX_SAFETENSORS_HEADER = 2 * 2**20  # bytes; an array takes some 150
MAX_SHARDS = 1000
_LINEAR_HEAD = "linear_head."
MAX_DEPTH = 8  # nesting of dicts and lists; an optimizer's state has 4 levels
MAX_VALUES = 1_000_000  # tensors, numbers and texts; by references, a small pickle can hold any number
MAX_OPCODES = 250_000  # of a pickle; each may create an object of 200 bytes; a state dict needs some 30 per tensor
MAX_BUILDS = 16  # BUILD opcodes of a pickle; a model needs one for an OrderedDict and one for its options
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # exponent bits, all ones in NaN and infinity
_END_RECORD = struct.Struct("<4s4H2LH")  # of a zip archive
_LOCAL_HEADER_SIZE = 30  # without the file's name
# Callables in a pickle that can fill memory in one call and make no tensor; and those that copy existing objects.
_GREEDY, _COPYING = ("bytearray", "encode"), ("OrderedDict", "Counter", "Size", "set")

# Of the configs the first that exists is read. The full processor, which may contain the other, also covers text.
CONFIG, OPEN_CLIP_CONFIG = "config.json", "open_clip_config.json"
PROCESSOR, FULL_PROCESSOR = "preprocessor_config.json", "processor_config.json"
# Names that transformers, timm and OpenCLIP give to the weight file of a folder.
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
READABLE = "an .npz, .safetensors or PyTorch file, or a folder that transformers or timm saved"
_SAVE_TENSORS = (
    "never loaded; save only its tensors: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')"
)
_SIGNATURES = {
    b"\x93NUMPY": "a single .npy array instead of an .npz archive",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x80": "a Python pickle (an old .pth or .bin file), which is never loaded",
    b"\x1f\x8b": "compressed by gzip (unpack it with gunzip)",
    POINTER[:16]: "a Git LFS pointer instead of the file itself (git lfs pull downloads it)",
    b"<": "a web page instead of the file itself",
}


@dataclass(frozen=True)
class Companions:
    """The JSON files beside the weights in a folder that transformers or timm saved; empty for a single file."""

    config: Mapping[str, Any] | None = None  # config.json, or open_clip_config.json
    processor: Mapping[str, Any] | None = None  # preprocessor_config.json, or the images' part of processor_config.json
    read: Callable[[str], torch.Tensor] | None = None  # key -> array of the checkpoint


NO_COMPANIONS = Companions()


class CheckpointReader(ABC):
    """Abstract: the arrays of one checkpoint by key, read on demand; use as a context manager.

    Opening checks everything that can be checked without reading the arrays, so `shapes` (key -> shape of every array)
    is complete and correct. Several threads may read. Arrays remain valid after the file is closed.
    """

    companions = NO_COMPANIONS

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._opened = ExitStack()
        try:
            self.shapes = self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def readable_companions(self) -> Companions:
        """Return the companions with a function that reads arrays of this file."""
        return replace(self.companions, read=self.read_floats)

    def close(self) -> None:
        self._opened.close()

    @abstractmethod
    def _open(self) -> dict[str, Shape]:
        """Open the file, check it and return the shape of every array."""

    @abstractmethod
    def read_floats(self, key: str) -> torch.Tensor:
        """Return an array of finite floats on the CPU, in the precision of the file.

        Raises:
            UserError: the array is damaged, not floating point, or has NaN or infinite values.
        """

    def sha256(self) -> str:
        """Return the SHA-256 digest of the file in hexadecimal; for several files, of their concatenation."""
        return hash_files([self.path])

    def list_digests(self) -> dict[str, str]:
        """Return the SHA-256 digests that the record of a conversion has."""
        return {"sha256": self.sha256()}

    def _check_floats(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; raise a UserError if it is not floating point or has values that are not finite."""
        if tensor.dtype not in FLOATS:
            raise self._make_dtype_error(key, tensor.dtype)
        if not are_finite(tensor):
            raise UserError(
                f"'{key}' in {self.path.name} has {int((~torch.isfinite(tensor)).sum())} NaN or infinite values "
                f"of {tensor.numel()}, so its training diverged or the file is damaged; use another checkpoint"
            )
        return tensor

    def _make_dtype_error(self, key: str, dtype: object) -> UserError:
        dtype_name = str(dtype).removeprefix("torch.")
        return UserError(
            f"'{key}' in {self.path.name} is {dtype_name}, but weights must be float16, bfloat16, float32 or "
            "float64; save it in one of these types"
        )

    @contextmanager
    def _translate_errors(self, complaint: str) -> Generator[None]:
        """Turn errors that libraries raise for damaged bytes into one clear line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # libraries raise many types of errors for damaged bytes
            raise UserError(
                f"{self.path.name} {complaint}: {shorten_reason(error)}; download the file again"
            ) from error


class Member(NamedTuple):
    """One array of an .npz file, as its .npy header declares it."""

    info: zipfile.ZipInfo
    shape: Shape
    dtype: np.dtype[Any]
    is_fortran: bool
    header_bytes: int


@final
class NpzReader(CheckpointReader):
    """The arrays of one .npz file, without pickles and extraction; declared sizes must match the archive."""

    def _open(self) -> dict[str, Shape]:
        """Open the archive, check its directory, every member's header and the total size."""
        with self._translate_errors("cannot be read as an .npz archive"):
            self._zip = self._opened.enter_context(zipfile.ZipFile(self.path))
        infos = self._zip.infolist()
        size = self.path.stat().st_size
        with self._translate_errors("is damaged"):
            self._check_number_of_members(len(infos), size)
            _refuse_leading_bytes(infos)
        if not infos:
            raise UserError(f"{self.path.name} is an archive without arrays; download the file again")
        if len(infos) > MAX_MEMBERS:
            raise UserError(
                f"{self.path.name} holds {len(infos)} arrays, but hf_vit reads at most {MAX_MEMBERS}; give a file "
                "with only the model's weights"
            )
        self.members: dict[str, Member] = {}
        for info in infos:
            key = self._read_array_key(info)
            if key in self.members:
                raise UserError(f"{self.path.name} holds '{key}' twice; save the file again with each key once")
            with self._translate_errors(f"is damaged at '{key}'"):
                self.members[key] = self._read_member(info, size)
        total = sum(4 * math.prod(member.shape) for member in self.members.values())  # in float32
        if total > max(FREE_BYTES, MAX_GROWTH * size):
            raise UserError(
                f"{self.path.name} would grow from {size} to {total} bytes when unpacked, as a zip bomb does; if "
                "you trust the file, save its arrays again with numpy.savez (uncompressed)"
            )
        return {key: member.shape for key, member in self.members.items()}

    def _check_number_of_members(self, count: int, file_size: int) -> None:
        """Raise a ValueError unless the end record has this count, as zipfile accepts a truncated directory."""
        with self.path.open("rb") as file:
            file.seek(file_size - _END_RECORD.size - len(self._zip.comment))
            num_declared = _END_RECORD.unpack(file.read(_END_RECORD.size))[4]
        if num_declared != count:
            raise ValueError(f"its directory lists {count} of {num_declared} members")

    def _read_array_key(self, info: zipfile.ZipInfo) -> str:
        """Return the array's key, the member's name without .npy; raise a UserError for an unsafe name."""
        # Check the raw name, as zipfile normalizes NULs and, on some systems, separators.
        name, raw = info.filename, info.orig_filename
        has_unsafe_characters = re.search(r"[\\\0]|^[A-Za-z]:", raw)  # a backslash, NUL, or drive of Windows
        if has_unsafe_characters or {"", ".", ".."} & {*name.split("/")} or len(raw) > MAX_NAME:
            raise UserError(
                f"{self.path.name} holds a member with the unsafe name {raw[:80]!r}; do not use this file, but "
                "download the original"
            )
        if not name.isprintable() or not name.endswith(".npy"):
            raise UserError(
                f"{self.path.name} holds {name!r}, which is not an array; give an .npz file that holds only weights"
            )
        return name.removesuffix(".npy")

    def _refuse_member(self, info: zipfile.ZipInfo, file_size: int) -> None:
        """Raise an error for a member that is encrypted, compressed in another way than NumPy's, or impossible."""
        if info.flag_bits & 0x1:
            raise UserError(
                f"'{info.filename}' in {self.path.name} is encrypted, so hf_vit cannot read it; unpack the file "
                "with its password, and save the arrays with numpy.savez"
            )
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(
                f"'{info.filename}' in {self.path.name} is compressed in a way that NumPy never uses (method "
                f"{info.compress_type}); unpack the file and save the arrays with numpy.savez"
            )
        if not 0 <= info.header_offset < file_size:
            raise ValueError("its directory points outside the file")
        ratio = 1 if info.compress_type == zipfile.ZIP_STORED else MAX_DEFLATE_RATIO
        if info.file_size > info.compress_size * ratio:
            raise ValueError(f"its {info.compress_size} compressed bytes cannot expand to {info.file_size}")

    def _read_member(self, info: zipfile.ZipInfo, file_size: int) -> Member:
        """Read a .npy header and check its size against the archive's; a ValueError means damage."""
        self._refuse_member(info, file_size)
        with self._zip.open(info) as member:
            file = io.BytesIO(member.read(MAX_NPY_HEADER))
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            number = ".".join(map(str, version))
            raise UserError(
                f"'{info.filename}' in {self.path.name} has .npy version {number}, but only 1.0 and 2.0 are read; save "
                "plain arrays of numbers with numpy.savez"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # published files may have headers written by Python 2, which are fine
            read_header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, is_fortran, dtype = read_header(file)
        if any(side < 0 for side in shape) or math.prod(shape) > sys.maxsize:
            raise ValueError(f"its shape {shape} is impossible")
        if dtype.hasobject:
            raise UserError(
                f"'{info.filename}' in {self.path.name} holds Python objects, which are never loaded; save its numbers "
                "as float32 with numpy.savez"
            )
        needed_bytes = math.prod(shape) * dtype.itemsize
        stored_bytes = info.file_size - file.tell()
        if needed_bytes != stored_bytes:
            raise ValueError(f"its shape {list(shape)} in {dtype} needs {needed_bytes} bytes, but has {stored_bytes}")
        return Member(info, tuple(int(side) for side in shape), dtype, bool(is_fortran), file.tell())

    def read_floats(self, key: str) -> torch.Tensor:
        """Read one array, verify its checksum, and check its values."""
        info, shape, dtype, is_fortran, header_bytes = self.members[key]
        # numpy has no bfloat16 and writes JAX's as raw bytes, "|V2".
        is_bfloat16 = dtype == np.dtype("V2")
        if not is_bfloat16 and (dtype.kind != "f" or dtype.itemsize not in (2, 4, 8)):
            raise self._make_dtype_error(key, dtype)
        with self._translate_errors(f"is damaged at '{key}'"):
            data = self._read_bytes(info)
            flat = np.frombuffer(data, np.dtype("<i2") if is_bfloat16 else dtype, offset=header_bytes)
            array = flat.reshape(shape, order="F" if is_fortran else "C")
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        return self._check_floats(key, tensor.view(torch.bfloat16) if is_bfloat16 else tensor)

    def _read_bytes(self, info: zipfile.ZipInfo) -> memoryview:
        """Return a member's bytes, writable; raise a ValueError for a wrong checksum or length."""
        data = memoryview(bytearray(info.file_size))
        if info.compress_type == zipfile.ZIP_STORED:  # read directly, as zipfile would copy the bytes
            with self.path.open("rb") as file:
                file.seek(_read_data_offset(info, file))
                if file.readinto(data) != len(data) or zlib.crc32(data) != info.CRC:
                    raise ValueError("its checksum is wrong")
        else:
            with self._zip.open(info) as file:  # verifies the checksum when the last byte is read
                if cast("io.BufferedIOBase", file).readinto(data) != len(data) or file.read(1):
                    raise ValueError("it is shorter or longer than its header says")
        return data


@final
class SafetensorsReader(CheckpointReader):
    """The arrays of one .safetensors file; the library checks that its header describes exactly the bytes that follow.

    The format has no checksum, so a changed number goes unnoticed; downloads from the Hub are verified by their hash.
    """

    def _open(self) -> dict[str, Shape]:
        """Open the file, after checking the size of its header, and check the keys."""
        with self.path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_SAFETENSORS_HEADER:
            raise UserError(
                f"{self.path.name} has a header of {header_bytes} bytes, but hf_vit reads at most "
                f"{MAX_SAFETENSORS_HEADER}; the file is damaged or no checkpoint: download it again"
            )
        with self._translate_errors("cannot be read as a .safetensors file"):
            self._file: Any = self._opened.enter_context(safe_open(self.path, framework="pt"))
        slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118 (no dict)
        if not slices:
            raise UserError(f"{self.path.name} holds no tensors; download the file again")
        for key in slices:
            _refuse_unsafe_key(key, self.path.name)
        self._dtypes = {key: str(array_slice.get_dtype()) for key, array_slice in slices.items()}
        return {key: tuple(array_slice.get_shape()) for key, array_slice in slices.items()}

    def read_floats(self, key: str) -> torch.Tensor:
        if self._dtypes[key] not in ("F16", "BF16", "F32", "F64"):  # checked before a large array is read
            raise self._make_dtype_error(key, self._dtypes[key])
        return self._check_floats(key, self._file.get_tensor(key))


@final
class TorchReader(CheckpointReader):
    """The tensors of one PyTorch file (.pth, .pt, .bin), mapped into memory; nested dicts are named "outer.inner"."""

    def _open(self) -> dict[str, Shape]:
        """Load the file, map its tensors into memory, and check each tensor."""
        with self._translate_errors("cannot be read as a PyTorch file"):
            members = self._check_archive()
            content = self._load()
        self._tensors = _flatten(content, self.path.name)
        self._opened.callback(self._tensors.clear)
        if not self._tensors:
            raise UserError(f"{self.path.name} holds no tensors; give a checkpoint: {READABLE}")
        self._refuse_tensors(members)
        self._storage_uses = Counter(tensor.untyped_storage().data_ptr() for tensor in self._tensors.values())
        return {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    def _refuse_tensors(self, members: Mapping[int, int]) -> None:
        """Raise a UserError unless every tensor is dense, within its member, and has its memory for itself."""
        for key, tensor in self._tensors.items():
            _refuse_unsafe_key(key, self.path.name)
            is_special = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
            if is_special or tensor.device.type != "cpu":
                raise UserError(
                    f"'{key}' in {self.path.name} is not a dense tensor on the CPU; save it as tensor.to_dense().cpu()"
                )
        self._refuse_false_sizes(members)
        for key, tensor in self._tensors.items():
            if _overlaps_itself(tensor):
                raise UserError(f"'{key}' in {self.path.name} has elements that share memory; save tensor.clone()")
        total = sum(4 * tensor.numel() for tensor in self._tensors.values())  # bytes in float32
        size = self.path.stat().st_size
        if total > MAX_GROWTH * size:
            raise UserError(
                f"{self.path.name} has {size:,} bytes, but its tensors need {total:,}, because they share memory; "
                "save tensor.clone() of each instead"
            )

    def read_floats(self, key: str) -> torch.Tensor:
        """Return a tensor mapped from the file; a copy if another tensor has the same storage."""
        tensor = self._check_floats(key, self._tensors[key])
        return tensor.clone() if self._storage_uses[tensor.untyped_storage().data_ptr()] > 1 else tensor

    def _check_archive(self) -> dict[int, int]:
        """Verify names, sizes and checksums of all members; return position in the file -> bytes of each storage."""
        members: dict[int, int] = {}
        with zipfile.ZipFile(self.path) as archive, self.path.open("rb") as file:
            infos = archive.infolist()
            if len({info.filename for info in infos}) != len(infos):
                raise ValueError("two members have the same name")
            _refuse_leading_bytes(infos)
            for info in infos:
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                    raise UserError(
                        f"'{info.filename[:80]}' in {self.path.name} is compressed or encrypted; unpack the file, and "
                        "save its tensors with torch.save"
                    )
                with archive.open(info) as member:  # reading to the end verifies the checksum
                    while member.read(2**22):
                        pass
                if info.filename.endswith("data.pkl"):
                    _refuse_memory_attack(archive.read(info), self.path.name)
                if info.file_size and re.search(r"(^|/)data/[^/]+$", info.filename):
                    members[_read_data_offset(info, file)] = info.file_size
        return members

    def _load(self) -> Any:
        """Load the content without running code of the file; raise a UserError for objects that are not plain data."""
        try:
            # argparse.Namespace, in which training scripts save their options, only holds values.
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            class_match = re.search(r"GLOBAL ([\w.]+)", str(error))
            objects = f"Python objects ({class_match[1]})" if class_match else "Python objects"
            raise UserError(f"{self.path.name} holds {objects}, which are {_SAVE_TENSORS}") from error

    def _refuse_false_sizes(self, members: Mapping[int, int]) -> None:
        """Raise a UserError unless every tensor lies within exactly one member of the archive.

        `torch.load` maps the file to an unknown address, which is a multiple of the page size; the first storage in
        memory is at the beginning of some member. All members that fit this are tried.
        """
        tensors = {key: tensor for key, tensor in self._tensors.items() if tensor.numel()}
        storages = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
        first = min((storage.data_ptr() for storage in storages.values()), default=0)

        def find_misfits(begin: int) -> list[tuple[str, int]]:
            """Return (key, bytes of its member) of wrong tensors, if the first storage is the member at `begin`."""
            misfits: list[tuple[str, int]] = []
            for key, storage in storages.items():
                size = members.get(storage.data_ptr() - first + begin, 0)
                if not tensors[key].nbytes <= size == storage.nbytes():
                    misfits.append((key, size))
            return misfits

        begins = [begin for begin in members if (first - begin) % mmap.PAGESIZE == 0]
        fewest_misfits = min(map(find_misfits, begins or [0]), key=len)
        if fewest_misfits:
            key, size = fewest_misfits[0]
            raise UserError(
                f"{self.path.name} is damaged: '{key}' has the shape {list(tensors[key].shape)}, but {size} bytes "
                "are stored; download the file again"
            )


@final
class ShardedReader(CheckpointReader):
    """The arrays of a checkpoint in several files, which an index (`*.index.json`) lists."""

    def _open(self) -> dict[str, Shape]:
        """Open all files that the index lists, and check that they have exactly the listed keys."""
        weight_map: Any = read_json(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{self.path.name} has no 'weight_map' with the file of each key; download the file again")
        self._file_names = {key: str(name) for key, name in cast("dict[str, Any]", weight_map).items()}
        names = sorted(set(self._file_names.values()))
        if len(names) > MAX_SHARDS:
            raise UserError(
                f"{self.path.name} lists {len(names)} files, but hf_vit reads at most {MAX_SHARDS}; download the index "
                "again"
            )
        # Plain names without folders, so that an index cannot name files elsewhere.
        bad_name = next((name for name in names if not re.fullmatch(r"[\w-][\w.-]{0,199}", name)), None)
        if bad_name is not None:
            raise UserError(
                f"{self.path.name} lists the file {bad_name[:80]!r}, which is no shard's name; download the index again"
            )
        self._readers: dict[str, CheckpointReader] = {}
        for name in names:
            self._readers[name] = self._opened.enter_context(open_file(self.path.with_name(name)))
        actual_keys = {(key, name) for name, reader in self._readers.items() for key in reader.shapes}
        if differences := actual_keys ^ set(self._file_names.items()):
            key, name = min(differences)
            raise UserError(
                f"{self.path.name} does not match the files it lists: {len(differences)} keys differ, such as "
                f"'{key[:80]}' in {name}; download all files again"
            )
        return {key: shape for reader in self._readers.values() for key, shape in reader.shapes.items()}

    def sha256(self) -> str:
        """Return the digest of all files in the order of their names."""
        return hash_files(map(self.path.with_name, self._readers))

    def read_floats(self, key: str) -> torch.Tensor:
        return self._readers[self._file_names[key]].read_floats(key)


class HeadedReader(CheckpointReader):
    """The arrays of a checkpoint, which is closed with this reader, and those of a linear classifier in another file.

    The latter are named `linear_head.weight` and `linear_head.bias`.
    """

    def __init__(self, backbone: CheckpointReader, head: Path) -> None:
        self._backbone, self._head_path = backbone, head
        super().__init__(backbone.path)
        self.companions = backbone.companions

    def _open(self) -> dict[str, Shape]:
        """Open both files, and check that the second holds a linear classifier."""
        self._opened.enter_context(self._backbone)
        self._head = self._opened.enter_context(open_file(self._head_path))
        if sorted(self._head.shapes) != ["bias", "weight"] or len(self._head.shapes["weight"]) != 2:
            raise UserError(
                f"{self._head_path.name} is not a linear classifier's, which has the keys 'weight' and 'bias' only; "
                "give a file of DINOv2's or DINOv3's linear heads"
            )
        if any(key.startswith(_LINEAR_HEAD) for key in self._backbone.shapes):
            raise UserError(f"{self.path.name} has a linear head already; leave out --head {self._head_path.name}")
        return self._backbone.shapes | {f"{_LINEAR_HEAD}{key}": shape for key, shape in self._head.shapes.items()}

    def list_digests(self) -> dict[str, str]:
        """Return the digests of the backbone and of the head."""
        return self._backbone.list_digests() | {"linear_head_sha256": self._head.sha256()}

    def read_floats(self, key: str) -> torch.Tensor:
        reader = self._head if key.startswith(_LINEAR_HEAD) else self._backbone
        return reader.read_floats(key.removeprefix(_LINEAR_HEAD))


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint file, or a folder with config.json and weights; errors say what it is instead."""
    path = Path(path)
    if not os.path.isdir(path):  # Path.is_dir would raise an error for a name that is too long
        return open_file(path)
    with name_in_errors(str(path)):
        return _open_folder(path)


@contextmanager
def name_in_errors(name: str) -> Generator[None]:
    """Add the name of a checkpoint to every UserError of a block that lacks it."""
    try:
        yield
    except UserError as error:
        if name in str(error):
            raise
        raise UserError(f"{name}: {error}") from error


def open_file(path: Path) -> CheckpointReader:
    """Open a single file by its content, whatever its name; see `open_checkpoint`."""
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}; give {READABLE}")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise UserError(f"{path.name} is empty; download the file again")
    if head.startswith(b"PK"):  # a zip archive; PyTorch's has a pickle
        try:
            with zipfile.ZipFile(path) as archive:
                is_torch = any(re.search(r"(^|/)data\.pkl$", name) for name in archive.namelist())
        except Exception:  # damaged; the reader reports how
            is_torch = False
        return TorchReader(path) if is_torch else NpzReader(path)
    # A .safetensors file begins with the length of its header, 8 bytes, and the header, a JSON object.
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return SafetensorsReader(path)
    unknown = "not an .npz, .safetensors or PyTorch file: it is damaged or has another format"
    kind = next((kind for signature, kind in _SIGNATURES.items() if head.startswith(signature)), unknown)
    raise UserError(f"{path.name} is {kind}; give {READABLE}")


def check_archive(path: Path) -> None:
    """Raise a UserError for a damaged or forged archive of PyTorch, which a library would load without such checks."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"  # older files are pickles, of which libraries load only those of tensors
    if is_archive:
        open_file(path).close()


def _open_folder(folder: Path) -> CheckpointReader:
    """Open the weights of a folder together with its JSON files."""
    configs = [folder / name for name in (CONFIG, OPEN_CLIP_CONFIG) if (folder / name).is_file()]
    if not configs and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds only an adapter of peft; merge it into its base model with merge_and_unload(), "
            "save that with save_pretrained, and give its folder"
        )
    if not configs:
        raise UserError(f"{folder} has no {CONFIG}; give a weight file, or a folder that transformers or timm saved")
    companions = Companions(read_json(configs[0]), _read_image_processor(folder))
    weights = [name for name in WEIGHTS if (folder / name).is_file() or (folder / f"{name}.index.json").is_file()]
    if not weights:
        raise UserError(
            f"{folder} has a config.json, but no weights; add {' or '.join(WEIGHTS)}, or the index and all of "
            "its shards"
        )
    single = folder / weights[0]
    reader = open_file(single) if single.is_file() else ShardedReader(folder / f"{single.name}.index.json")
    reader.companions = companions
    return reader


def _read_image_processor(folder: Path) -> dict[str, Any] | None:
    """Return the fields of the folder's image processor from the file that transformers prefers; None without one."""
    processor: Any = None
    if (folder / FULL_PROCESSOR).is_file():
        processor = read_json(folder / FULL_PROCESSOR).get("image_processor")
    if processor is None and (folder / PROCESSOR).is_file():
        processor = read_json(folder / PROCESSOR)
    if not isinstance(processor, dict | None):
        raise UserError(
            f"{FULL_PROCESSOR} has image_processor={processor!r:.80}, but an object with fields is needed; "
            "download the file again"
        )
    return processor


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of reasonable size; raise a UserError that says what else the file is."""
    limits = f"hf_vit reads at most {MAX_JSON_BYTES:,} bytes and {MAX_JSON_VALUES:,} values; give the model's own file"
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"{path.name} has {size:,} bytes; {limits}")
        text = path.read_bytes()
        count = sum(map(text.count, (b",", b"[", b"{")))  # about as many as values
        if count > MAX_JSON_VALUES:
            raise UserError(f"{path.name} has {count:,} values; {limits}")
        content: object = json.loads(text)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is not valid JSON: {shorten_reason(error)}; download the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} holds JSON, but not an object ({{...}}); download the file again")
    return content  # pyright: ignore[reportUnknownVariableType] (JSON's keys are text)


def are_finite(tensor: torch.Tensor) -> bool:
    """Return whether floats on the CPU have neither NaN nor infinity.

    NumPy checks them in one thread; torch's threads would wait for more work on cores that others use.
    """
    exponent = _EXPONENTS.get(tensor.dtype)
    if exponent is not None:
        return not bool((tensor.view(torch.int16).numpy() & exponent == exponent).any())
    array = tensor.numpy()
    with np.errstate(all="ignore"):  # a finite sum is enough and faster to compute, but it may overflow
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def hash_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 digest of the concatenation of files, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def shorten_reason(error: BaseException) -> str:
    """Return what a library says about damaged bytes, shortened and in one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _refuse_unsafe_key(key: str, file_name: str) -> None:
    """Raise a UserError for a key that no model has: too long, or with characters that would garble a message."""
    if not key or len(key) > MAX_NAME or not key.isprintable():
        raise UserError(f"{file_name} holds an array with the unsafe name {key[:80]!r}; use another checkpoint")


def _refuse_leading_bytes(infos: list[zipfile.ZipInfo]) -> None:
    """Raise a ValueError for two concatenated archives, of which zipfile would only read the last."""
    begin = min((info.header_offset for info in infos), default=0)
    if begin:
        raise ValueError(f"its first member begins after {begin} unknown bytes")


def _read_data_offset(info: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Return where a member's bytes begin: after its local header and the parts whose lengths end the header."""
    file.seek(info.header_offset + _LOCAL_HEADER_SIZE - 4)
    return info.header_offset + _LOCAL_HEADER_SIZE + sum(struct.unpack("<2H", file.read(4)))


def _refuse_memory_attack(data: bytes, file_name: str) -> None:
    """Raise an error for a pickle that could fill the memory in `torch.load`, or that is not a pickle.

    `torch.load(weights_only=True)` runs no code of the file, but calls `bytearray`, `set` or `OrderedDict` with any
    arguments and any number of times. A state dict needs no copies of objects.
    """
    memo: dict[int, str] = {}  # index in the pickle's memo -> name of the callable
    callable_name = ""  # of the callable that the last instruction put on the stack; "" if it put none
    open_call = ""  # the callable in `_COPYING` whose arguments are being collected, up to its REDUCE
    builds = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if number == MAX_OPCODES:
            raise UserError(f"{file_name} has a pickle of over {MAX_OPCODES} instructions, which is {_SAVE_TENSORS}")
        if open_call and name in ("BINGET", "LONG_BINGET", "GLOBAL", "BINPERSID"):
            raise UserError(f"{file_name} has a pickle that copies values into {open_call}, which is {_SAVE_TENSORS}")
        if name in ("BINPUT", "LONG_BINPUT"):  # stores the top of the stack, and leaves it there
            memo[int(argument or 0)] = callable_name
            continue
        callable_name = ""
        if name == "GLOBAL":
            callable_name = str(argument).rpartition(" ")[2]
        elif name in ("BINGET", "LONG_BINGET"):
            callable_name = memo.get(int(argument or 0), "")
        elif name in ("REDUCE", "NEWOBJ"):
            open_call = ""
        elif name == "BUILD":
            builds += 1
        if callable_name in _GREEDY or builds > MAX_BUILDS:
            calls = f"its pickle calls {callable_name or 'BUILD'}, as pickles of whole models do"
            raise UserError(
                f"{file_name} holds more than tensors, numbers and text ({calls}), which is {_SAVE_TENSORS}"
            )
        if callable_name in _COPYING:
            open_call = callable_name


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may share memory: an axis steps less far than those inside it reach."""
    extent = 0
    for step, side in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if side > 1 and step <= extent:
            return True
        extent += step * (side - 1)
    return False


def _flatten(content: object, file_name: str) -> dict[str, torch.Tensor]:
    """Return all tensors of nested dicts and lists, their keys joined by dots; numbers and text are skipped."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, item, depth) in enumerate(_iterate_items("", content, 0)):
        if number == MAX_VALUES:
            raise UserError(f"{file_name} holds more than {MAX_VALUES} values; save only the model's state_dict")
        if depth > MAX_DEPTH:
            raise UserError(
                f"{file_name} nests dicts or lists too deeply at '{name[:80]}'; save only the model's state_dict"
            )
        if isinstance(item, torch.Tensor):
            if name in tensors:
                raise UserError(f"{file_name} holds '{name[:80]}' twice; save the file again with each key once")
            tensors[name] = item.detach()
    return tensors


def _iterate_items(name: str, item: Any, depth: int) -> Generator[tuple[str, object, int]]:
    """Iterate over (name, item, depth) of an object and everything in it."""
    yield name, item, depth
    if isinstance(item, dict | list | tuple):
        # Call dict's own method, as a file may set an attribute `items`.
        for key, child in dict.items(item) if isinstance(item, dict) else enumerate(item):
            yield from _iterate_items(f"{name}.{key}" if name else str(key), child, depth + 1)
