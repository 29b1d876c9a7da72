"""Writers of zip archives, .npy and .safetensors headers and PyTorch pickles in which every field may lie.

They know nothing of numpy's, safetensors' and torch's writers but the formats.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
LOCAL, CENTRAL, END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
UNCHANGED = (None, None, None)


@dataclass(frozen=True)
class Member:
    """A member of a zip archive; both records of it are true but for what is given.

    `local` and `central` replace (checksum, compressed size, size) in a record; `offset` is added to the true one.
    """

    name: bytes
    data: bytes
    size: int
    crc: int
    method: int = 0
    flags: int = 0
    extra: bytes = b""
    central_extra: bytes = b""
    comment: bytes = b""
    local_name: bytes | None = None
    local: Sequence[int | None] = UNCHANGED
    central: Sequence[int | None] = UNCHANGED
    offset: int = 0

    @property
    def content(self) -> bytes:
        return zlib.decompress(self.data, -15) if self.method == 8 else self.data

    def record(self, lies: Sequence[int | None]) -> tuple[int, ...]:
        true = (self.crc, len(self.data), self.size)
        values = [true[i] if lie is None else lie for i, lie in enumerate(lies)]
        return self.flags, self.method, 0, 33, *(value % 2**32 for value in values)


def stored(name: str | bytes, data: bytes) -> Member:
    text = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
    return Member(text, data, len(data), zlib.crc32(data), flags=0 if text.isascii() else 0x800)


def deflated(name: str | bytes, data: bytes) -> Member:
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    return replace(stored(name, data), data=press.compress(data) + press.flush(), method=8)


def members_of(data: bytes) -> list[Member]:
    """Return the members of a good archive, with the padding that aligns them."""
    members: list[Member] = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name_size, extra_size = struct.unpack_from("<2H", data, info.header_offset + 26)
            begin = info.header_offset + LOCAL.size + name_size
            extra, begin = data[begin : begin + extra_size], begin + extra_size
            content = data[begin : begin + info.compress_size]
            member = Member(info.filename.encode(), content, info.file_size, info.CRC, info.compress_type)
            members.append(replace(member, extra=b"" if extra[:2] == b"\1\0" else extra))
    return members


def archive_of(
    members: Sequence[Member],
    comment: bytes = b"",
    order: Iterable[int] | None = None,
    end: Mapping[int, int] | None = None,
) -> bytes:
    """Return the archive; `order` of the directory, `end`: field of the end record -> what is added to it."""
    file, places = bytearray(), list[int]()
    for one in members:
        places.append(len(file))
        name = one.name if one.local_name is None else one.local_name
        file += LOCAL.pack(b"PK\3\4", 20, *one.record(one.local), len(name), len(one.extra))
        file += name + one.extra + one.data
    begin, listed = len(file), [*(range(len(members)) if order is None else order)]
    for index in listed:
        one = members[index]
        sizes = len(one.name), len(one.central_extra), len(one.comment)
        place = (places[index] + one.offset) % 2**32
        file += CENTRAL.pack(b"PK\1\2", 20, 20, *one.record(one.central), *sizes, 0, 0, 0, place)
        file += one.name + one.central_extra + one.comment
    record = [0, 0, len(listed), len(listed), len(file) - begin, begin, len(comment)]
    for index, lie in (end or {}).items():
        record[index] = (record[index] + lie) % (2**32 if index in (4, 5) else 2**16)
    return bytes(file) + END.pack(b"PK\5\6", *record) + comment


def npy_header(descr: str, order: str, shape: str, version: tuple[int, int] = (1, 0), size: int | None = None) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    return npy_start(text.encode(), version, size)


def npy_start(text: bytes, version: tuple[int, int] = (1, 0), size: int | None = None) -> bytes:
    length = struct.pack("<H" if version == (1, 0) else "<I", (len(text) if size is None else size) % 2**16)
    return b"\x93NUMPY" + bytes(version) + length + text


def safetensors_of(header: object, data: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", (len(text) if size is None else size) % 2**64) + text + data


class Raw(bytes):
    """Opcodes of a pickle."""


def word(text: str) -> Raw:
    """Return a global, given as "module name"."""
    return Raw(b"c" + text.replace(" ", "\n").encode() + b"\n")


def call(function: str, arguments: Any, state: Any = None) -> Raw:
    built = b"" if state is None else pickled(state) + b"b"
    return Raw(word(function) + pickled(arguments) + b"R" + built)


def dict_of(pairs: Iterable[tuple[Any, Any]]) -> Raw:
    """Return a dict, whose keys may be anything and twice."""
    return Raw(b"}(" + b"".join(pickled(key) + pickled(one) for key, one in pairs) + b"u")


def pickled(value: Any) -> Raw:
    """Return opcodes that put the value on the stack."""
    match value:
        case Raw():
            return value
        case None | bool():
            code = {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int() if -(2**31) <= value < 2**31:
            code = b"J" + struct.pack("<i", value)
        case int():
            size = value.bit_length() // 8 + 1
            code = b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            code = b"G" + struct.pack(">d", value)
        case str() | bytes():
            text = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            code = (b"B" if text is value else b"X") + struct.pack("<I", len(text)) + text
        case tuple() | list():
            begin, end = (b"(", b"t") if isinstance(value, tuple) else (b"](", b"e")
            code = begin + b"".join(map(pickled, value)) + end
        case dict():
            code = dict_of(value.items())
        case _:
            raise TypeError(value)
    return Raw(code)


def whole(opcodes: bytes) -> bytes:
    return b"\x80\2" + opcodes + b"."


ORDERED = call("collections OrderedDict", ())
FLOATS = word("torch FloatStorage")
REBUILD = "torch._utils _rebuild_tensor_v2"


@dataclass
class Stored:
    """A tensor of a PyTorch file: what the pickle says of it, and the bytes of its storage; all may lie."""

    array: np.ndarray
    key: Any
    member: bytes | None
    numel: Any
    size: Any
    stride: Any
    kind: Any = FLOATS
    place: Any = "cpu"
    offset: Any = 0
    rebuild: str = REBUILD
    more: tuple[Any, ...] = (False, ORDERED)
    identity: Any = None  # of its storage
    value: Any = None  # in the place of the tensor

    @property
    def whole_identity(self) -> tuple[Any, ...]:
        return "storage", self.kind, self.key, self.place, self.numel

    @property
    def arguments(self) -> tuple[Any, ...]:
        storage = Raw(pickled(self.identity or self.whole_identity) + b"Q")
        return storage, self.offset, self.size, self.stride, *self.more

    def pickle(self) -> Any:
        return call(self.rebuild, self.arguments) if self.value is None else self.value


def tensors_of(arrays: Arrays) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for number, (name, array) in enumerate(arrays.items()):
        strides = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
        tensors[name] = Stored(array, str(number), array.tobytes(), array.size, array.shape, strides)
    return tensors


def torch_file(
    tensors: Mapping[Any, Stored] | None = None,
    pickle: bytes | None = None,
    byteorder: bytes | None = b"little",
    others: Iterable[Member] = (),
    state: Any = None,
) -> bytes:
    """Return the archive of a state dict; `pickle` in the place of its own, `state` as the state of its dict."""
    tensors = tensors or {}
    if pickle is None:
        content = dict_of((name, one.pickle()) for name, one in tensors.items())
        pickle = whole(content if state is None else ORDERED + content[1:] + pickled(state) + b"b")
    files = {"data.pkl": pickle} | ({} if byteorder is None else {"byteorder": byteorder})
    files |= {f"data/{one.key}": one.member for one in tensors.values() if one.member is not None}
    files["version"] = b"3\n"
    return archive_of([*(stored(f"archive/{name}", content) for name, content in files.items()), *others])
