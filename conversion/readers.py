"""Reading checkpoint files of unknown origin: no code of a file runs, and no claim of its is believed.

Libraries read the bytes (zipfile, NumPy's .npy headers, `torch.load(weights_only=True, mmap=True)`, `safe_open`).
Before memory is taken, each .npy header is held against its entry in the archive, and each storage against its member:
`torch.load` gives a storage that claims more bytes than its member has the bytes that follow, whatever they are.
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
from collections.abc import Callable, Generator, Mapping
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
# The names of 21,843 classes have two MiB. Python's objects take some 200 bytes a value, however short its text is.
MAX_JSON_BYTES, MAX_JSON_VALUES = 4 * 2**20, 250_000
MAX_MEMBERS = 65_534  # more need another form of archive; a checkpoint has hundreds
MAX_NPY_HEADER = 10_000  # bytes; 128 in practice
# Deflate cannot expand more than this (RFC 1951: 258 bytes for 2 bits); a larger claim is a lie.
MAX_DEFLATE_RATIO = 1032
# Weights hardly compress: half-precision ones fill 2.5 times their compressed file in float32. A .npz file that grows
# more than that AND to this size is made to fill the machine.
MAX_GROWTH, FREE_BYTES = 2.7, 16 * 2**20
MAX_SAFETENSORS_HEADER = 2 * 2**20  # bytes; some 150 an array
MAX_SHARDS = 1000
MAX_DEPTH = 8  # of dicts and lists inside each other; an optimizer's state has 4
MAX_VALUES = 1_000_000  # tensors, numbers and texts; references make a small pickle hold any number
MAX_OPCODES = 250_000  # of a pickle; each may make an object of 200 bytes, and a state dict needs some 30 a tensor
MAX_BUILDS = 16  # an OrderedDict with attributes, a namespace of options: one a model
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # all ones in NaN and infinity
_END_RECORD, _LOCAL_HEADER_SIZE = struct.Struct("<4s4H2LH"), 30  # of a zip archive, the latter without names
# Callables of a pickle that fill memory with one call and make no tensor, and that copy what was made before.
_GREEDY, _COPYING = ("bytearray", "encode"), ("OrderedDict", "Counter", "Size", "set")

CONFIG, OF_OPEN_CLIP = "config.json", "open_clip_config.json"  # the first that is there is read; so of the others
PROCESSOR, WHOLE_PROCESSOR = "preprocessor_config.json", "processor_config.json"  # the latter of text, too
# As transformers, timm and OpenCLIP name the weights of a folder.
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
READABLE = "a .npz, .safetensors or PyTorch file, or a folder that transformers or timm saved"
_SAVE_TENSORS = "never loaded; save only its tensors (model.state_dict()), best as .safetensors"
_SIGNATURES = {
    b"\x93NUMPY": "a single .npy array, not an .npz archive of many",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x80": "a Python pickle (an old .pth or .bin file), which is never loaded; save its tensors as .safetensors",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
    POINTER[:16]: "a Git LFS pointer; fetch the file with git lfs pull",
    b"<": "a web page; download the file itself",
}


@dataclass(frozen=True)
class Companions:
    """What lies beside the weights in a folder that transformers or timm saved; nothing beside a single file."""

    config: Mapping[str, Any] | None = None  # config.json, or open_clip_config.json
    processor: Mapping[str, Any] | None = None  # preprocessor_config.json, or the images' part of processor_config.json
    read: Callable[[str], torch.Tensor] | None = None  # key -> array of the checkpoint itself


NOTHING_BESIDE = Companions()


class CheckpointReader(ABC):
    """Abstract: the arrays of one checkpoint by key, read on demand; use as a context manager.

    Opening checks everything that can be checked without reading the arrays: `shapes` is complete and honest.
    Several threads may read. Arrays that were read stay valid when the file is closed.

    Attributes:
        path: the file, or the folder.
        shapes: key -> shape of every array.
        companions: what lies beside the weights.
    """

    companions = NOTHING_BESIDE

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
    def beside(self) -> Companions:
        """Return the companions, with a way to read arrays of this file."""
        return replace(self.companions, read=self.read_floats)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    @abstractmethod
    def _open(self) -> dict[str, Shape]:
        """Open the file, check it and return the shape of every array."""

    @abstractmethod
    def read_floats(self, key: str) -> torch.Tensor:
        """Return an array of finite floats on the CPU, in the precision of the file.

        Raises:
            UserError: the array is damaged, holds no floats, or NaN or infinite values.
        """

    def sha256(self) -> str:
        """Return the hash of the whole file, in hexadecimal; of several files, of their bytes one after the other."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def checked(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; raise a UserError where it holds no floats, or such as are not finite."""
        if tensor.dtype not in FLOATS:
            raise self._no_floats(key, tensor.dtype)
        if not all_finite(tensor):
            raise UserError(
                f"'{key}' in {self.path.name} holds NaN or infinite values, {int((~torch.isfinite(tensor)).sum())} of "
                f"{tensor.numel()}; the training run that wrote it has diverged or the file is damaged"
            )
        return tensor

    def _no_floats(self, key: str, dtype: object) -> UserError:
        held = str(dtype).removeprefix("torch.")
        return UserError(
            f"'{key}' in {self.path.name} holds {held}; weights need float16, bfloat16, float32 or float64"
        )

    @contextmanager
    def _refusing(self, complaint: str) -> Generator[None]:
        """Turn what the libraries raise on bad bytes into one clear line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of many kinds, by libraries that meet bytes they do not expect
            raise UserError(f"{self.path.name} {complaint} ({one_line(error)}); download the file again") from error


class Member(NamedTuple):
    """One array of a .npz file, as its .npy header declares it."""

    info: zipfile.ZipInfo
    shape: Shape
    dtype: np.dtype[Any]
    is_fortran: bool
    header_bytes: int


@final
class NpzReader(CheckpointReader):
    """The arrays of one .npz file: no pickle, no extraction, declared sizes as the archive has them."""

    def _open(self) -> dict[str, Shape]:
        with self._refusing("cannot be read as an .npz archive"):
            self._zip = self._opened.enter_context(zipfile.ZipFile(self.path))
        infos, size = self._zip.infolist(), self.path.stat().st_size
        with self._refusing("is damaged"):
            # zipfile takes a directory that ends early for a short one; the end record says how many entries it has.
            with self.path.open("rb") as file:
                file.seek(size - _END_RECORD.size - len(self._zip.comment))
                declared = _END_RECORD.unpack(file.read(_END_RECORD.size))[4]
            if declared != len(infos):
                raise ValueError(f"its directory lists {len(infos)} members, {declared} were written")
            _refuse_bytes_before(infos)
        if not infos:
            raise UserError(f"{self.path.name} is an archive without arrays; download the file again")
        if len(infos) > MAX_MEMBERS:
            raise UserError(f"{self.path.name} holds {len(infos)} members; a checkpoint has at most {MAX_MEMBERS}")
        self.members: dict[str, Member] = {}
        for info in infos:
            key = self._key_of(info)
            if key in self.members:
                raise UserError(f"{self.path.name} holds '{key}' twice; save it with each key once")
            with self._refusing(f"is damaged at '{key}'"):
                self.members[key] = self._read_member(info, size)
        total = sum(4 * math.prod(member.shape) for member in self.members.values())
        if total > max(FREE_BYTES, MAX_GROWTH * size):
            raise UserError(
                f"{self.path.name} would grow from {size} to {total} bytes: this is a zip bomb or almost "
                "all zeros; if the weights are right, save them uncompressed with numpy.savez"
            )
        return {key: member.shape for key, member in self.members.items()}

    def _key_of(self, info: zipfile.ZipInfo) -> str:
        # zipfile normalizes NULs and, on some systems, separators: the raw name must already be clean.
        name, raw = info.filename, info.orig_filename
        if re.search(r"[\\\0]|^[A-Za-z]:", raw) or {"", ".", ".."} & {*name.split("/")} or len(raw) > MAX_NAME:
            raise UserError(f"{self.path.name} holds a member with the unsafe name {raw[:80]!r}")
        if not name.isprintable() or not name.endswith(".npy"):
            raise UserError(f"{self.path.name} holds {name!r}, which is not a .npy array; give an .npz file of weights")
        return name.removesuffix(".npy")

    def _read_member(self, info: zipfile.ZipInfo, file_size: int) -> Member:
        """Read a .npy header, and hold its size against the archive's."""
        if info.flag_bits & 0x1:
            raise ValueError("encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"compression method {info.compress_type} is not one that numpy writes")
        if not 0 <= info.header_offset < file_size:
            raise ValueError("the archive's directory points outside of the file")
        ratio = 1 if info.compress_type == zipfile.ZIP_STORED else MAX_DEFLATE_RATIO
        if info.file_size > info.compress_size * ratio:
            raise ValueError(f"{info.compress_size} compressed bytes cannot hold {info.file_size}")
        with self._zip.open(info) as member:
            file = io.BytesIO(member.read(MAX_NPY_HEADER))
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f".npy version {version} is not one that holds weights")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers written by Python 2 are fine, and published files may have them
            read_header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, is_fortran, dtype = read_header(file)
        if any(side < 0 for side in shape) or math.prod(shape) > sys.maxsize:
            raise ValueError(f"impossible shape {shape}")
        if dtype.hasobject:
            raise ValueError("it holds pickled Python objects, which are never loaded")
        needed, there = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
        if needed != there:
            raise ValueError(f"shape {list(shape)} of {dtype} needs {needed} bytes, {there} are there")
        return Member(info, tuple(int(side) for side in shape), dtype, bool(is_fortran), file.tell())

    def read_floats(self, key: str) -> torch.Tensor:
        info, shape, dtype, is_fortran, header_bytes = self.members[key]
        # JAX's bfloat16: numpy knows no such type and writes two bytes without meaning, "|V2".
        is_bfloat16 = dtype == np.dtype("V2")
        if not is_bfloat16 and (dtype.kind != "f" or dtype.itemsize not in (2, 4, 8)):
            raise self._no_floats(key, dtype)
        with self._refusing(f"is damaged at '{key}'"):
            data = memoryview(bytearray(info.file_size))
            if info.compress_type == zipfile.ZIP_STORED:  # of which zipfile would make copies
                with self.path.open("rb") as file:
                    file.seek(_begin_of(info, file))
                    if file.readinto(data) != len(data) or zlib.crc32(data) != info.CRC:
                        raise ValueError("bad checksum")
            else:
                with self._zip.open(info) as file:  # which verifies the checksum when the last byte is read
                    if cast("io.BufferedIOBase", file).readinto(data) != len(data) or file.read(1):
                        raise ValueError("the array is shorter or longer than its header says")
            flat = np.frombuffer(data, np.dtype("<i2") if is_bfloat16 else dtype, offset=header_bytes)
            array = flat.reshape(shape, order="F" if is_fortran else "C")
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        return self.checked(key, tensor.view(torch.bfloat16) if is_bfloat16 else tensor)


@final
class SafetensorsReader(CheckpointReader):
    """The arrays of one .safetensors file; the library checks that its header describes exactly the bytes that follow.

    The format has no checksum: a changed number is not noticed. Hub downloads are verified by their hash.
    """

    def _open(self) -> dict[str, Shape]:
        with self.path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > MAX_SAFETENSORS_HEADER:
            raise UserError(
                f"{self.path.name} has a header of {header} bytes; a checkpoint has less than {MAX_SAFETENSORS_HEADER}"
            )
        with self._refusing("cannot be read as a .safetensors file"):
            self._file: Any = self._opened.enter_context(safe_open(self.path, framework="pt"))
        slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118 (no dict)
        if not slices:
            raise UserError(f"{self.path.name} is a .safetensors file without tensors; download the file again")
        for key in slices:
            _refuse_unsafe_key(key, self.path.name)
        self._dtypes = {key: str(described.get_dtype()) for key, described in slices.items()}
        return {key: tuple(described.get_shape()) for key, described in slices.items()}

    def read_floats(self, key: str) -> torch.Tensor:
        if self._dtypes[key] not in ("F16", "BF16", "F32", "F64"):  # before a large array is read
            raise self._no_floats(key, self._dtypes[key])
        return self.checked(key, self._file.get_tensor(key))


@final
class TorchReader(CheckpointReader):
    """The tensors of one PyTorch file (.pth, .pt, .bin), mapped into memory; nested dicts are named "outer.inner"."""

    def _open(self) -> dict[str, Shape]:
        with self._refusing("cannot be read as a PyTorch file"):
            members = self._check_archive()
            content = self._load()
        self._tensors = _flatten(content, self.path.name)
        self._opened.callback(self._tensors.clear)
        if not self._tensors:
            raise UserError(f"{self.path.name} holds no tensors, so it is not a checkpoint")
        for key, tensor in self._tensors.items():
            _refuse_unsafe_key(key, self.path.name)
            is_view = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
            if is_view or tensor.device.type != "cpu":
                raise UserError(f"'{key}' in {self.path.name} is not a dense tensor; save dense weights")
        self._refuse_lies(members)
        for key, tensor in self._tensors.items():
            if _overlaps_itself(tensor):
                raise UserError(f"'{key}' in {self.path.name} overlaps itself in memory; save a copy of it (`clone`)")
        total, size = sum(4 * tensor.numel() for tensor in self._tensors.values()), self.path.stat().st_size
        if total > MAX_GROWTH * size:
            raise UserError(
                f"{self.path.name} would grow from {size} to {total} bytes, because its tensors share memory"
            )
        self._shares = Counter(tensor.untyped_storage().data_ptr() for tensor in self._tensors.values())
        return {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}

    def read_floats(self, key: str) -> torch.Tensor:
        tensor = self.checked(key, self._tensors[key])
        return tensor.clone() if self._shares[tensor.untyped_storage().data_ptr()] > 1 else tensor

    def _check_archive(self) -> dict[int, int]:
        """Verify names, sizes and checksum of every member; return where each storage begins -> how many bytes."""
        members: dict[int, int] = {}
        with zipfile.ZipFile(self.path) as archive, self.path.open("rb") as file:
            infos = archive.infolist()
            if len({info.filename for info in infos}) != len(infos):
                raise ValueError("a member's name is there twice")
            _refuse_bytes_before(infos)
            for info in infos:
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                    raise ValueError(f"'{info.filename[:80]}' is compressed or encrypted")
                with archive.open(info) as member:  # reading to the end verifies the checksum
                    while member.read(2**22):
                        pass
                if info.filename.endswith("data.pkl"):
                    _refuse_hungry(archive.read(info), self.path.name)
                if info.file_size and re.search(r"(^|/)data/[^/]+$", info.filename):
                    members[_begin_of(info, file)] = info.file_size
        return members

    def _load(self) -> Any:
        try:
            # A namespace of a training script's options holds names and values and does nothing.
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            objects = f"Python objects ({named[1]})" if named else "Python objects"
            raise UserError(f"{self.path.name} holds pickled {objects}, which are {_SAVE_TENSORS}") from error

    def _refuse_lies(self, members: Mapping[int, int]) -> None:
        """Raise a UserError unless every tensor lies within exactly one member of the archive.

        `torch.load` maps the whole file to one address, which it does not tell; it begins a page, and puts the first
        storage at the beginning of a member.
        """
        tensors = {key: tensor for key, tensor in self._tensors.items() if tensor.numel()}
        storages = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
        first = min((storage.data_ptr() for storage in storages.values()), default=0)

        def find_lies(begin: int) -> list[tuple[str, int]]:
            """Return (key, bytes that are there), if the first storage is the member that begins there."""
            there = {key: members.get(one.data_ptr() - first + begin, 0) for key, one in storages.items()}
            return [
                (key, size) for key, size in there.items() if not tensors[key].nbytes <= size == storages[key].nbytes()
            ]

        begins = [begin for begin in members if (first - begin) % mmap.PAGESIZE == 0]
        for key, size in min(map(find_lies, begins or [0]), key=len):
            raise UserError(
                f"{self.path.name} is damaged at '{key}' (shape {list(tensors[key].shape)} does not fit the "
                f"{size} bytes that are there); download the file again"
            )


@final
class ShardedReader(CheckpointReader):
    """The arrays of a checkpoint in several files, as an index (`*.index.json`) beside them lists."""

    def _open(self) -> dict[str, Shape]:
        keys: object = read_json(self.path).get("weight_map")
        if not isinstance(keys, dict) or not keys:
            raise UserError(f"{self.path.name} has no 'weight_map' from keys to files; download the file again")
        weight_map: dict[str, Any] = keys
        self._places = {key: str(name) for key, name in weight_map.items()}
        names = sorted(set(self._places.values()))
        if len(names) > MAX_SHARDS or not all(re.fullmatch(r"[\w-][\w.-]{0,199}", name) for name in names):
            raise UserError(f"{self.path.name} names unexpected files, such as {names[0][:80]!r}")
        self._readers: dict[str, CheckpointReader] = {}
        for name in names:
            self._readers[name] = self._opened.enter_context(open_file(self.path.with_name(name)))
        held = {(key, name) for name, reader in self._readers.items() for key in reader.shapes}
        if wrong := held ^ set(self._places.items()):
            key, name = min(wrong)
            raise UserError(
                f"{self.path.name} and the files it lists disagree on {len(wrong)} keys, such as '{key[:80]}' in "
                f"{name}; download all files again"
            )
        return {key: shape for reader in self._readers.values() for key, shape in reader.shapes.items()}

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in self._readers:
            with self.path.with_name(name).open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()

    def read_floats(self, key: str) -> torch.Tensor:
        return self._readers[self._places[key]].read_floats(key)


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint file, or a folder with config.json and weights.

    Raises:
        UserError: there is nothing, or nothing that can be read; the message says what it is instead.
    """
    path = Path(path)
    if not os.path.isdir(path):  # which takes names that are too long, too
        return open_file(path)
    try:
        return _open_folder(path)
    except UserError as error:  # of one of its files, by its name alone
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error


def open_file(path: Path) -> CheckpointReader:
    """Open a single file by its content, whatever its name; see `open_checkpoint`."""
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}; give {READABLE}")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise UserError(f"{path.name} is empty; download the file again")
    if head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                is_torch = any(re.search(r"(^|/)data\.pkl$", name) for name in archive.namelist())
        except Exception:  # damaged: the reader says how, with every check it has
            is_torch = False
        return TorchReader(path) if is_torch else NpzReader(path)
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return SafetensorsReader(path)
    what = next((what for signature, what in _SIGNATURES.items() if head.startswith(signature)), None)
    what = what or "not an .npz, .safetensors or PyTorch file: it is damaged or of another kind"
    raise UserError(f"{path.name} is {what}; give {READABLE}")


def _open_folder(folder: Path) -> CheckpointReader:
    configs = [folder / name for name in (CONFIG, OF_OPEN_CLIP) if (folder / name).is_file()]
    if not configs and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds only an adapter; merge it into its base model (merge_and_unload of peft) and save that"
        )
    if not configs:
        raise UserError(
            f"{folder} is a folder without {CONFIG}; give a file, or a folder that transformers or timm saved"
        )
    processor: object = None
    if (folder / PROCESSOR).is_file():
        processor = read_json(folder / PROCESSOR)
    elif (folder / WHOLE_PROCESSOR).is_file():  # beside what is said of texts
        processor = read_json(folder / WHOLE_PROCESSOR).get("image_processor")
    if not isinstance(processor, dict | None):
        raise UserError(f"{WHOLE_PROCESSOR} gives image_processor={processor!r:.80}; it needs the fields of one")
    companions = Companions(read_json(configs[0]), processor)
    weights = [name for name in WEIGHTS if (folder / name).is_file() or (folder / f"{name}.index.json").is_file()]
    if not weights:
        raise UserError(f"{folder} holds no weights; it needs {' or '.join(WEIGHTS)}, or the index of its parts")
    single = folder / weights[0]
    reader = open_file(single) if single.is_file() else ShardedReader(folder / f"{single.name}.index.json")
    reader.companions = companions
    return reader


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of reasonable size; a UserError says what else the file is."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        text = path.read_bytes()
        if sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
            raise ValueError(f"more than {MAX_JSON_VALUES} values")
        content: object = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is not valid JSON ({one_line(error)}); download the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} holds no JSON object; download the file again")
    return content  # pyright: ignore[reportUnknownVariableType] (JSON's keys are text)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether floats on the CPU hold neither NaN nor infinity.

    By NumPy, in one thread: those that torch would wake for it wait for more to do, on cores that others work on.
    """
    if exponent := _EXPONENTS.get(tensor.dtype):
        return not bool((tensor.view(torch.int16).numpy() & exponent == exponent).any())
    array = tensor.numpy()
    with np.errstate(all="ignore"):  # a sum takes less time, and may overflow
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def one_line(error: BaseException) -> str:
    """Return what a library says about damaged bytes, short and in one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _refuse_unsafe_key(key: str, file_name: str) -> None:
    """Raise a UserError for a key that no model has: too long, or with characters that would spoil a message."""
    if not key or len(key) > MAX_NAME or not key.isprintable():
        raise UserError(f"{file_name} holds an array with the unsafe name {key[:80]!r}")


def _refuse_bytes_before(infos: list[zipfile.ZipInfo]) -> None:
    """Raise a ValueError for two archives one after the other, of which zipfile reads the last alone."""
    if infos and (begin := min(info.header_offset for info in infos)):
        raise ValueError(f"its first member begins after {begin} bytes of something else")


def _begin_of(info: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Return where a member's bytes begin: after a header of its own, whose last two fields are lengths."""
    file.seek(info.header_offset + _LOCAL_HEADER_SIZE - 4)
    return info.header_offset + _LOCAL_HEADER_SIZE + sum(struct.unpack("<2H", file.read(4)))


def _refuse_hungry(data: bytes, file_name: str) -> None:
    """Raise an error for a pickle that would fill the memory before `torch.load` notices, or is none.

    `torch.load(weights_only=True)` runs no code of the file, but calls `bytearray`, `set` or `OrderedDict` with
    whatever the pickle says, as often as it says. A state dict needs no copy of anything.
    """
    called: dict[int, str] = {}  # place in the memo -> callable
    last, open_call, builds = "", "", 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if number == MAX_OPCODES:
            raise ValueError(f"its pickle has more than {MAX_OPCODES} opcodes")
        if open_call and name in ("BINGET", "LONG_BINGET", "GLOBAL", "BINPERSID"):
            raise ValueError(f"its pickle copies into {open_call}")
        if name in ("BINPUT", "LONG_BINPUT"):
            called[int(argument or 0)] = last
            continue
        last = ""
        if name == "GLOBAL":
            last = str(argument).rpartition(" ")[2]
        elif name in ("BINGET", "LONG_BINGET"):
            last = called.get(int(argument or 0), "")
        elif name in ("REDUCE", "NEWOBJ"):
            open_call = ""
        elif name == "BUILD":
            builds += 1
        if last in _GREEDY or builds > MAX_BUILDS:
            calls = f"its pickle calls {last or 'BUILD'}, as those of NumPy's scalars and of whole models do"
            raise UserError(
                f"{file_name} holds more than tensors, numbers and text ({calls}), which is {_SAVE_TENSORS}"
            )
        open_call = last if last in _COPYING else open_call


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two places of the tensor may be one in memory."""
    extent = 0
    for step, side in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if side > 1 and step <= extent:
            return True
        extent += step * (side - 1)
    return False


def _flatten(content: object, file_name: str) -> dict[str, torch.Tensor]:
    """Return all tensors of nested dicts and lists, their keys joined by dots; numbers and text are passed over."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, item, depth) in enumerate(_walk("", content, 0)):
        if number == MAX_VALUES:
            raise UserError(f"{file_name} holds more than {MAX_VALUES} values besides arrays; it is not a checkpoint")
        if depth > MAX_DEPTH:
            raise UserError(f"{file_name} nests deeper than any checkpoint does, at '{name[:80]}'")
        if isinstance(item, torch.Tensor):
            if name in tensors:
                raise UserError(f"{file_name} holds '{name[:80]}' twice; save it with each key once")
            tensors[name] = item.detach()
    return tensors


def _walk(name: str, item: Any, depth: int) -> Generator[tuple[str, object, int]]:
    yield name, item, depth
    if isinstance(item, dict | list | tuple):
        # A file may set `items`.
        for key, one in dict.items(item) if isinstance(item, dict) else enumerate(item):
            yield from _walk(f"{name}.{key}" if name else str(key), one, depth + 1)
