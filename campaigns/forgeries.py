"""What a checkpoint file may hold instead of what it should: tables of lies about each field of each format."""

import io
import json
import pickle
import random
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from originals.cases import CASES, FORMATS, Case
from originals.google import make_checkpoint
from originals.pytorch import of_timm
from safetensors.torch import save

from campaigns.formats import (
    END,
    ORDERED,
    REBUILD,
    Arrays,
    Member,
    Raw,
    Stored,
    archive_of,
    call,
    deflated,
    dict_of,
    members_of,
    npy_header,
    npy_start,
    pickled,
    safetensors_of,
    stored,
    tensors_of,
    torch_file,
    whole,
    word,
)

Draw = random.Random
TRACE = Path(tempfile.gettempdir()) / "hf_vit_forged_trace"  # what payloads would create
MIB = 2**20


@dataclass(frozen=True)
class Forgery:
    """A forged or damaged checkpoint.

    Attributes:
        files: name -> bytes, or the place that a symbolic link of that name points to.
        source: the file or folder to convert.
        arrays: what the file says it holds; None for the arrays of the good file.
        declared: (field, value) that a file beside the weights says.
        never: whether it must be refused, even where the same model could be made of it.
        output: name of the folder to write.
    """

    files: Mapping[str, bytes | str]
    source: str
    arrays: Arrays | None = None
    declared: tuple[str, Any] | None = None
    never: bool = False
    output: str = "model"


@dataclass(frozen=True)
class Bench:
    """A good checkpoint in one format, and the model that it becomes."""

    name: str
    format: str
    arrays: Arrays
    data: bytes
    model: Mapping[str, bytes]

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def files(self, data: bytes | None = None) -> dict[str, bytes]:
        return self.case.files(self.data if data is None else data, FORMATS[self.format].suffix)

    @property
    def source(self) -> str:
        return next(iter(self.files(b""))).partition("/")[0]

    def forged(self, data: bytes, arrays: Arrays | None = None) -> Forgery:
        return Forgery(self.files(data), self.source, arrays)


Forge = Callable[[Bench, Draw], Forgery]


class Payload:
    """What must never run: unpickled, it creates `TRACE`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (TRACE,)


# Names of members, keys and files; what the system or a library may take for something else than a file of weights.
NAMES = (
    "../up", "/root", "C:/x", "a\\b", "a//b", "./a", "a/../../b", "", ".", "..", "con", "nul.npy", "a\0b", "a\nb",
    "a\x1b[2J", "é", "\u202e", "\ud800", "\U0001d538", "\uff41", " ", "a" * 300, "a" * 60_000, "archive/data/../0",
    "data.pkl", "a/data.pkl", "%s", "{0}",
)  # fmt: skip
PLACES = (
    "", ".", "..", "/", "../outside.safetensors", "/etc/passwd", "/dev/zero", "/dev/stdin", "a/b.safetensors",
    "model/../x", "~/x", "x" * 250, "é" * 120, "x\n", "x\0", "\x1b[2J", "\u202e", "\ud800", "con", "nul", "x:y", "x ",
    ".x", "-x", "http://localhost/x", "file:///etc/passwd", "config.json", "model.safetensors.index.json",
    "model.safetensors", "model-00001-of-00002.safetensors\0", "*", "%s", "$HOME", "x.",
)  # fmt: skip


# Any file


def damage_bytes(bench: Bench, draw: Draw) -> Forgery:
    """Up to three places changed, of those bytes whose change must be noticed."""
    data, checked = bench.data, FORMATS[bench.format].checked(bench.data)
    way = draw.choice(("flip", "flip", "flip", "truncate", "insert", "delete", "copy", "append", "zeros"))
    size = checked if way in ("flip", "copy", "zeros") else len(data)  # the other ways change the file's length
    edited = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        # An archive's directory stands at its end, a header at its start: both get more of the attention.
        ranges = (0, size), (size * 3 // 4, size), (0, size // 8 + 1)
        place, value = draw.randrange(*draw.choice(ranges)) % max(len(edited), 1), draw.randrange(256)
        if way == "flip":
            edited[place] ^= value or 1
        elif way == "append":
            edited += bytes([value]) * (value + 1)
        elif way in ("copy", "zeros"):
            length = min(value, size - place)
            edited[place : place + length] = edited[:length] if way == "copy" else bytes(length)
        else:
            ends = {"truncate": len(edited), "insert": place, "delete": place + 1 + value % 64}
            edited[place : ends[way]] = bytes([value]) if way == "insert" else b""
    return bench.forged(bytes(edited))


def edit_arrays(bench: Bench, draw: Draw) -> Forgery:
    """One array of a sound checkpoint edited, or its name; `silent` are edits that nothing in the file contradicts."""
    form, arrays = FORMATS[bench.format], dict(bench.arrays)
    text = "".join(draw.choices("abcsteprng/_0123456789.*\\:", k=draw.randrange(1, 13)))
    key = draw.choice(sorted(arrays))
    array, place, names = arrays[key], draw.randrange(len(key) + 1), draw.sample(list(arrays), len(arrays))
    broken = array.copy()
    broken.flat[draw.randrange(array.size)] = draw.choice([np.nan, np.inf, -np.inf])
    others = {name: one for name, one in arrays.items() if name != key}
    shapes = [one for one in (array.T, array[None], array.ravel(), array[..., None]) if one.shape != array.shape]
    edits: dict[str, Arrays] = {
        "drop": others, "rename": others | {text: array}, "add": {text: array} | arrays,
        "value": arrays | {key: broken}, "mistype": others | {key[:place] + text[0] + key[place + 1 :]: array},
        "dtype": arrays | {key: array.astype(draw.choice(form.dtypes))}, "shape": arrays | {key: draw.choice(shapes)},
        "less": arrays | {key: array[:-1] if array.ndim else array},
        "more": arrays | {key: np.concatenate([array, array]) if array.ndim else array},
        "order": {name: arrays[name] for name in names},
    }  # fmt: skip
    silent = bench.case.silent.get(key, ())
    return bench.forged(form.dump(edits[draw.choice([kind for kind in edits if kind not in silent])]))


# Zip archives (.npz, .pth)


def forge_archive(bench: Bench, draw: Draw) -> Forgery:
    """One member lies, or the directory does."""
    members = members_of(bench.data)
    index = draw.randrange(len(members))
    one = members[index]
    lie = draw.choice([1, -1, 7, -7, 64, 4096, -4096, 2**31, 2**32 - 1, -one.size, draw.randrange(1, 2**20)])
    archives, of_member = lies_of_archive(members, index, lie, draw), lies_of_member(one, lie, draw)
    kind = draw.choice([*archives, *of_member, *of_member])
    if kind in of_member:
        members[index] = of_member[kind]
    return bench.forged(archive_of(members) if kind in of_member else archives[kind])


def lies_of_member(one: Member, lie: int, draw: Draw) -> dict[str, Member]:
    true, content, bits = (one.crc, len(one.data), one.size), one.content, bytearray(one.data or b"x")
    bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(8)
    name = draw.choice(NAMES).encode("utf-8", "surrogatepass")[:65_000] + draw.choice([b"", b".npy"])
    name = draw.choice([name, one.name.rpartition(b"/")[0] + b"/" + name])
    sizes = {"true": true[:0:-1], "that lies": (draw.choice([2**40, 2**63, 2**64 - 1, 0]), 2**40), "cut": (1, 1)}
    extras = {kind: struct.pack("<2H2Q", 1, 16, *both) for kind, both in sizes.items()}
    extras["cut"] = extras["cut"][: lie % 20]
    records = [(record, (field,)) for record in ("local", "central") for field in range(3)] + [("central", (1, 2))]
    changes: dict[str, dict[str, Any]] = {
        "name": {"name": name, "local_name": draw.choice([name, one.name]), "flags": draw.choice([0, 0x800])},
        "bit": {"data": bytes(bits)}, "method": {"method": draw.choice([1, 6, 8, 9, 12, 14, 93, 95, 99, 65535])},
        "encrypted": {"flags": one.flags | draw.choice([1, 0x40, 0x41, 0x2000])},
        "flags": {"flags": draw.randrange(2**16)}, "place": {"offset": lie},
        "local name": {"local_name": draw.choice([b"x", one.name[::-1], one.name * 2])},
        "extra": {"extra": one.extra + bytes(abs(lie) % 300)},
        "comment": {"comment": b"PK\5\6" + bytes(abs(lie) % 300)},
        **{f"zip64 {kind}": {"central": (None, -1, -1), "central_extra": extra} for kind, extra in extras.items()},
        **{f"{record} {fields}": {record: [value + lie if i in fields else None for i, value in enumerate(true)]}
           for record, fields in records},
    }  # fmt: skip
    contents = {
        "cut": content[: max(0, one.size - abs(lie) % 100 - 1)], "longer": content + bytes(abs(lie) % 100 + 1),
        "nothing": b"", "nested archive": archive_of([one, stored("a.npy", b"")]),
    }  # fmt: skip
    members = {kind: replace(one, **fields) for kind, fields in changes.items()}
    members |= {kind: stored(one.name, data) for kind, data in contents.items()}
    return members | {"repacked": replace((stored if one.method else deflated)(one.name, content), extra=one.extra)}


def lies_of_archive(members: list[Member], index: int, lie: int, draw: Draw) -> dict[str, bytes]:
    one, count, good = members[index], len(members), archive_of(members)
    place = draw.choice([place for place, other in enumerate(members) if other.size != one.size])
    swapped, again = list(members), draw.choice([one, replace(members[-1], name=one.name)])
    swapped[index], swapped[place] = replace(members[place], name=one.name), replace(one, name=members[place].name)
    further = stored(draw.choice(NAMES)[:65_000], bytes(abs(lie) % 99))
    end = END.unpack(good[-END.size :])
    values = [end[4], end[4], end[5], end[6]]
    values[draw.randrange(4)] += lie if draw.random() < 0.7 else 0
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *(value % 2**64 for value in values))
    zip64 += struct.pack("<4sLQL", b"PK\6\7", 0, len(good) - END.size, 1)
    zip64 += END.pack(b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return {
        "swapped": archive_of(swapped), "member twice": archive_of(draw.sample([*members, again], count + 1)),
        "shuffled": archive_of(members, order=draw.sample(range(count), count)), "two archives": good * 2,
        "listed twice": archive_of(members, order=[*range(count), index]), "zip64 end": good[: -END.size] + zip64,
        "end record": archive_of(members, end={draw.randrange(7): lie or 1}),
        "before": b"PK\3\4"[: draw.choice([0, 4])] + bytes(abs(lie) % 99) + good,
        "after": good + bytes(abs(lie) % 99 + 1), "second directory": good + archive_of(members[:index]),
        "archive comment": archive_of(members, comment=b"PK\5\6" * draw.randrange(1, 20)),
        "further member": archive_of([*members, further]),
    }  # fmt: skip


# Members of .npz files

DESCRIPTIONS = (
    "'|O'", "'O'", "'=f4'", "'f4'", "'<f2'", "'<f8'", "'<f16'", "'|V2'", "'|V4'", "'<V4'", "'<i4'", "'<u8'", "'|b1'",
    "'<c8'", "'<c16'", "'<U1'", "'|S4'", "'<M8[s]'", "'<m8'", "'(2,)<f4'", "'<f4,<f4'", "[('a', '<f4')]",
    "[('a', '|O')]", "[('a', '<f4'), ('a', '<f4')]", "('<f4', (1,))", "''", "'float'", "'nonsense'", "None", "4",
    "[]", "{'names': ['a'], 'formats': ['<f4']}", "'" + "f" * 5000 + "'", "b'<f4'", "__import__('os').system('true')",
    "()",
)  # fmt: skip
SHAPES = (
    "()", "(0,)", "(-1,)", "(1,)", "(2**70,)", "(4611686018427387904, 4)", "(1000000, 1000000)",
    "99999999999999999999999", "(99999999999999999999999,)", "(1.0,)", "('4',)", "(None,)", "(True,)", "[4]",
    "((4,),)", "{4}", "4", "None", "(4L,)", "(0, 99999999999999999999999)", "(" + "1," * 2000 + ")", "(1,) * 9**9",
    "(" * 300 + ")" * 300, "(4,", "'x'", "(-2, -2)",
)  # fmt: skip
DEEP = (30, 200, 3000)
NPY_TEXTS = (
    b"{}", b"[]", b"", b"\n", b"{'descr': '<f4'}", *(b"{" * deep for deep in DEEP),
    *(b"(" * deep + b")" * deep for deep in DEEP), *(b"-" * deep + b"1" for deep in DEEP),
    *(b"-1" * deep for deep in DEEP),
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}", b"\xff" * 40, b"'\x00'",
    b"1 if 1 else 2", b"[].append", b"lambda: 0", b"{**{}}", b"{1: 2}", b"f'{1}'", b"...",
    b"{'shape': (4,), 'fortran_order': False, 'descr': '<f4', 'descr': '|O'}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}#" + b"x" * 9000,
)  # fmt: skip
VERSIONS = ((2, 0), (2, 0), (3, 0), (0, 0), (1, 1), (9, 9), (255, 255))


def forge_npy(bench: Bench, draw: Draw) -> Forgery:
    """One other member; its sizes and checksums in the archive are right."""
    members = members_of(bench.data)
    index = draw.randrange(len(members))
    with np.load(io.BytesIO(bench.data)) as arrays:
        array = arrays[members[index].name.decode().removesuffix(".npy")]
    header, data = ("'<f4'", "False", repr(array.shape)), array.tobytes()
    lies = {"descr": DESCRIPTIONS, "order": ("True", "None", "1", "'x'", "[]"), "shape": SHAPES}
    told = dict(zip(lies, header, strict=True))
    told |= {field: draw.choice(lies[field]) for field in draw.sample([*lies], draw.choice([1, 1, 1, 2]))}
    turned = array.T if told["order"] == "True" and array.ndim > 1 else array  # what it says is then so
    good, honest = npy_header(*header) + data, io.BytesIO()
    ways = (np.asfortranarray(array), array.astype(">f4"), array.astype("<f8"), array.astype(">f8"))
    np.lib.format.write_array(honest, draw.choice(ways), version=draw.choice([(1, 0), (2, 0)]))
    shape = draw.choice(["()", "(1,)", repr(array.shape)])
    magic = draw.choice([b"", b"\x93NUMP", b"\x93NUMPX", b"PK\3\4", b"\x80\4"])
    content = draw.choice([
        *(2 * [npy_header(**told) + turned.tobytes("C")]), npy_header(*header, draw.choice(VERSIONS)) + data,
        npy_header(*header, size=draw.choice([0, 1, 117, 119, 500, 9_000, 65_535, draw.randrange(2**16)])) + data,
        npy_start(draw.choice(NPY_TEXTS)) + data, honest.getvalue(), magic + good[6 * draw.randrange(2) :],
        npy_header(draw.choice(["'|O'", "'O'", "[('a', '|O')]"]), "False", shape) + pickle.dumps(Payload()),
        draw.choice([good[: -draw.randrange(1, 9)], good + bytes(draw.randrange(1, 99)), good[:9], good * 2]),
    ])  # fmt: skip
    members[index] = draw.choice([stored, deflated])(members[index].name, content)
    return bench.forged(archive_of(members))


# .safetensors headers

HEADER_VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, 0.5, 4.0, 1e308, "", "x", "F32", "x" * 5000, [],
    [1], [[0]], {}, {"a": 1}, [0, 1, 2], [-4, 4], [4, 0], [0, 2**63], [0, 2**64], [2**62, 2**62], [1.5, 2],
    ["0", "4"], [None, 4], "\ud800",
)  # fmt: skip
DTYPES = ("F64", "F16", "BF16", "I32", "U8", "BOOL", "I64", "C64", "F8_E4M3", "F4", "Q4", "f32", "", "F32 ")
METADATA = (*HEADER_VALUES, {"a": "b"}, {"format": "pt"}, {"a\n": "\x1b"}, {"a": None}, {"a": {}})
HEADER_KINDS = (*(6 * ["entry"]), "length", "text", "key", "twice", "swapped", "metadata", "data", "data", "order")


def forge_safetensors(bench: Bench, draw: Draw) -> Forgery:
    file, arrays, end = bench.data, bench.arrays, 8 + int.from_bytes(bench.data[:8], "little")
    text, data = file[8:end], file[end:]
    header, kind = json.loads(text), draw.choice(HEADER_KINDS)
    key, other = draw.sample(sorted(set(header) - {"__metadata__"}), 2)
    if kind == "length":
        sizes = [0, 1, end, end - 9, end - 7, 2**20, 10**8, 10**8 + 1, 2**31, 2**53, 2**63, 2**64 - 1, len(data)]
        return bench.forged(safetensors_of(text, data, draw.choice(sizes)))
    if kind in ("text", "twice"):
        again = f", {json.dumps(key)}: {json.dumps(header[draw.choice([key, other])])}}}"
        return bench.forged(
            safetensors_of(forge_text(text, key, draw) if kind == "text" else text.rstrip()[:-1] + again.encode(), data)
        )
    if kind == "entry":
        forge_entry(header, key, draw)
    elif kind == "key":
        header[draw.choice(NAMES)] = header.pop(key) if draw.random() < 0.5 else header[key]
    elif kind == "swapped":
        one, two = header[key], header[other]
        one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
        if arrays[key].nbytes == arrays[other].nbytes:
            places = {key: arrays[other].reshape(arrays[key].shape), other: arrays[key].reshape(arrays[other].shape)}
            return bench.forged(safetensors_of(header, data), arrays | places)
    elif kind == "metadata":
        header["__metadata__"] = draw.choice(METADATA)
    elif kind == "order":
        header = {name: header[name] for name in draw.sample([*header], len(header))}
    else:
        data = draw.choice([data[:-1], data + b"\0", data[1:], b"", data * 2, data[:-4], data + bytes(8), data[:99]])
    return bench.forged(safetensors_of(header, data))


def forge_entry(header: dict[str, Any], key: str, draw: Draw) -> None:
    entry = header[key]
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    step = draw.choice([1, 2, 4, 8, 1024, end - begin, 2**40])
    shapes = [[*shape, 2], [*shape, 0], shape[1:], [*shape, 2**62], [2**32, 2**32], [-1, *shape], [step], [*shape, 1]]
    signs = ((1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0), (1, -1))  # overlaps, gaps, backwards, out of the file
    lies: dict[str, list[Any]] = {
        "dtype": [*DTYPES], "shape": [one for one in shapes if one != shape],
        "data_offsets": [[begin + a * step, end + b * step] for a, b in signs],
    }  # fmt: skip
    field = draw.choice(["dtype", "shape", "shape", "data_offsets", "data_offsets", "entry", "gone"])
    if field == "entry":
        header[key] = draw.choice(HEADER_VALUES)
    elif field == "gone":
        del entry[draw.choice(sorted(entry))]
    else:
        entry[field] = draw.choice(lies[field] if draw.random() < 0.6 else HEADER_VALUES)


def forge_text(text: bytes, key: str, draw: Draw) -> bytes:
    name, deep = json.dumps(key).encode(), draw.choice([100, 200, 100_000])
    changes = ((name, name[:-1] + b'\\u0000"'), (name, name[:-1] + b'\\ud800"'), (name, b'"\xff"'), (b":", b"="),
               (b"0", b"00"), (b"[0,", b"[-0,"), (b"[0,", b"[0.0,"), (b"}", b",}"), (b"[0,", b"[0e0,"),
               (b"F32", b"F\\u00332"))  # fmt: skip
    return draw.choice([
        text + b" " * draw.randrange(1, 99), b" " + text, text + b"\n", b"\xef\xbb\xbf" + text, text + b"\0", text * 2,
        text[:-1], text + b",", b"[" * deep, b'{"a":' * deep, b"null", b"[]", b"{}", b'"x"', text.swapcase(),
        b"{" + b" " * 10**6 + text[1:], *(text.replace(*change) for change in changes),
    ])  # fmt: skip


# Storages and pickles of PyTorch files

ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), 0.5, float("nan"),
    float("inf"), "", "x", "0", "x" * 5000, b"", b"x", (), (1,), (-1,), (2**62, 4), (2**31, 2**31, 4), (0.5,), ("4",),
    (None,), ((1,),), [], [1], [4, 4], {}, {"a": 1}, word("torch FloatStorage"), word("torch float32"), ORDERED,
    Raw(b"]\x94h\0a"), Raw(b"}q\0h\0h\0s"),
)  # fmt: skip
STORAGES = {
    "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": None, "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?", "ComplexFloatStorage": "<c8",
    "QInt8Storage": None, "QInt32Storage": None, "QUInt4x2Storage": None, "ComplexDoubleStorage": "<c16",
    "UntypedStorage": None,
}  # fmt: skip
DEVICES = (
    "cuda", "cuda:0", "cuda:99", "meta", "mps", "xla:0", "hpu", "", "cpu:1", "CPU", "x" * 3000, "../x", None, 0,
    ("cpu",),
)  # fmt: skip
REBUILDS = (
    *(f"torch._utils _rebuild_{name}" for name in (
        "tensor", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor", "qtensor", "tensor_v4",
        "meta_tensor_no_storage", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor", "nested_tensor",
        "wrapper_subclass", "sparse_csr_tensor")),
    "torch Tensor", "torch.nn.parameter Parameter", "torch._tensor _rebuild_from_type_v2", "torch Size",
    "torch FloatTensor",
)  # fmt: skip
SUBCLASSES = ("torch Tensor", "torch.nn.parameter Parameter", "torch.masked MaskedTensor", "collections OrderedDict")
COO, QUANTIZED = call("torch.serialization _get_layout", ("torch.sparse_coo",)), word("torch per_tensor_affine")
GREEDY = ("torch Tensor", "torch FloatTensor", "torch FloatStorage", "torch ByteTensor", "builtins bytearray")
BYTE_ORDERS = (b"big", b"big", b"little", b"", b"BIG", b"little\n", b"x" * 99, b"\xff", None)
STATES = ("_metadata", "_metadata", "items", "keys", "__class__", "__len__", "values", "get", "x" * 3000, "\n")


def lies_about(one: Stored, draw: Draw) -> dict[str, list[Any]]:
    """Return field -> what it may say instead; each may also be any odd value."""
    shape, true, count, member = one.array.shape, one.stride, one.numel, one.member or b""
    step = draw.choice([1, 2, 4, 8, 64, 4096, draw.randrange(1, len(member) + 1), len(member)])
    cut, at, odd = one.whole_identity, draw.randrange(5), draw.choice([*ODD, "module"])
    identities = [cut[:at], (*cut, odd), (*cut[:at], odd, *cut[at + 1 :])]
    plain = one.pickle()
    index = Stored(np.zeros((1, 1)), one.key, one.member, 1, (1, 1), (1, 1), kind=word("torch LongStorage"))
    return {
        "member": [member[:-step], member[:-step], member + bytes(step), None],
        "numel": [count + 1, count - 1, 2 * count, count // 2, 4 * count], "offset": [1, count, -count, 16, -16],
        "size": [(*shape, 2), tuple(2 * n for n in shape[:1]) + shape[1:], tuple(-n for n in shape), shape[:-1],
                 (*shape, 0), [*shape]],
        "stride": [(*true, 1), (0,) * len(true), (2**62,) * len(true), *(tuple(k * n for n in true) for k in (-1, 2))],
        "place": [*DEVICES], "key": [name[:60_000] for name in NAMES], "identity": identities, "rebuild": [*REBUILDS],
        "kind": [word(f"torch {kind}") for kind in STORAGES],
        "more": [(), (False,), (True, ORDERED), (False, ORDERED, {}), (False, {}), (odd, draw.choice(ODD))],
        "value": [
            call("torch._utils _rebuild_parameter", (plain, draw.random() < 0.5, ORDERED)),  # honest
            call("torch._utils _rebuild_sparse_tensor", (COO, (index.pickle(), plain, shape, False))),
            call("torch._utils _rebuild_meta_tensor_no_storage", (word("torch float32"), one.size, true, False)),
            *(call("torch._tensor _rebuild_from_type_v2", (word(REBUILD), word(name), one.arguments, {}))
              for name in SUBCLASSES),
            *(call(name, (size,)) for name in GREEDY[:3] for size in (4, 2**40, "x")),
        ],
    }  # fmt: skip


def forge_storages(bench: Bench, draw: Draw) -> Forgery:
    """A storage lies about its bytes, place, type or views; or what is made of it does, or its dict."""
    tensors = tensors_of(bench.arrays)
    name, other = draw.sample(sorted(tensors), 2)
    one, two, held = tensors[name], tensors[other], None  # what the file then holds, where these are other arrays
    lies = lies_about(one, draw)
    way = draw.choice([*lies, *lies, "member", "kind", *(2 * ["value"]), *WAYS, "swapped"])
    if way in WAYS:
        data, held = store_otherwise(way, tensors, name, other, draw)
        return bench.forged(data, None if held is None else bench.arrays | held)
    if way == "swapped":
        one.member, two.member = two.member, one.member
        if one.array.size == two.array.size:
            held = {name: two.array.reshape(one.array.shape), other: one.array.reshape(two.array.shape)}
    else:
        free = way in ("member", "kind", "rebuild", "key", "more", "value") or draw.random() < 0.5
        setattr(one, way, draw.choice(lies[way] if free else [odd for odd in ODD if odd not in ((1,), [1])]))
    if way == "key" and draw.random() < 0.3:
        one.member = None
    return bench.forged(torch_file(tensors), None if held is None else bench.arrays | held)


WAYS = (
    "transposed", "shared", "clash", "retyped", "byte order", "negated", "quantized", "container", "key twice",
    "attributes",
)  # fmt: skip


def store_otherwise(way: str, tensors: dict[str, Stored], name: str, other: str, draw: Draw) -> tuple[bytes, Any]:
    """Return a file that stores tensors in another way, and the arrays it then holds where these are others."""
    one, two, held = tensors[name], tensors[other], None
    given: dict[str, Any] = {}
    match way:
        case "transposed":  # honest: the columns one after the other
            one.member, one.stride = one.array.T.tobytes(), tuple(n // 4 for n in np.asfortranarray(one.array).strides)
        case "shared":  # a tensor that lies in another one's storage
            name, other = sorted((name, other), key=lambda key: tensors[key].array.size)
            one, two = tensors[name], tensors[other]
            last = two.array.size - one.array.size
            one.key, one.member, one.numel, one.offset = two.key, two.member, two.numel, draw.randrange(last + 1)
            inside = two.array.ravel()[one.offset : one.offset + one.array.size]
            held = {name: inside.reshape(one.array.shape)}
        case "clash":  # two storages of one key, of which torch takes what the first says; they may be one
            one.key = two.key
            if draw.random() < 0.5:
                one.kind = word(f"torch {draw.choice([*STORAGES])}")
            last = tensors[max(name, other, key=list(tensors).index)].array  # whose bytes are there
            if one.numel == two.numel:
                held = {key: last.reshape(tensors[key].array.shape) for key in (name, other)}
        case "retyped":  # values of another type, and the storage says so
            kind = draw.choice([kind for kind, dtype in STORAGES.items() if dtype])
            values = one.array.astype(STORAGES[kind])
            one.kind, one.member = word(f"torch {kind}"), values.tobytes()
            held = {name: values} if kind == "HalfStorage" else None
        case "byte order":
            given["byteorder"] = draw.choice(BYTE_ORDERS)
            for each in tensors.values() if given["byteorder"] == b"big" else ():
                each.member = each.array.astype(">f4").tobytes()
        case "negated":  # a view that is negated, or conjugated, when it is read
            sign = draw.choice(["neg", "conj", "x"])
            one.more = (False, ORDERED, {sign: True})
            held = {name: -one.array} if sign == "neg" else None
        case "quantized":
            one.kind = word(f"torch {draw.choice(['QInt8Storage', 'QUInt8Storage', 'QInt32Storage'])}")
            one.more = ((QUANTIZED, draw.choice([0.1, 0.0, float("nan"), "x"]), 0), False, ORDERED)
            one.rebuild = "torch._utils _rebuild_qtensor"
        case "container":  # dicts, lists and keys of every kind around the tensors
            pairs, pickle_of_one = [(key, each.pickle()) for key, each in tensors.items()], one.pickle()
            odd, state = draw.choice([*ODD, pickle_of_one, *NAMES]), dict_of(pairs)
            value = draw.choice([
                dict_of([*pairs, (odd, pickle_of_one)]), dict_of([*pairs, ("extra", odd)]), dict_of([(odd, state)]),
                [state], (state, odd), dict_of([("model", state), ("optimizer", odd)]),
                dict_of([("model", state), ("model.x", state)]), pickle_of_one, odd, [each for _, each in pairs],
                dict_of((key.split(".") if draw.random() < 0.1 else key, each) for key, each in pairs),
            ])  # fmt: skip
            given["pickle"] = whole(pickled(value))
        case "key twice":  # the last one counts, as in any dict
            pairs = [*((key, each.pickle()) for key, each in tensors.items()), (name, two.pickle())]
            given["pickle"], held = whole(dict_of(pairs)), {name: two.array}
        case "attributes":  # a dict with attributes; `_metadata` is torch's own
            key, odd = draw.choice(STATES), draw.choice(ODD)
            given["state"] = draw.choice([{key: odd}, odd, {key: ORDERED}]) or {}
    return torch_file(tensors, **given), held


GLOBALS = (
    "os system", "posix system", "subprocess Popen", "builtins exec", "builtins eval", "builtins open",
    "builtins getattr", "builtins __import__", "builtins compile", "builtins setattr", "__builtin__ eval",
    "pathlib Path.touch", "shutil copyfile", "importlib import_module", "codecs open", "_codecs encode",
    "operator attrgetter", "functools partial", "types CodeType", "types FunctionType", "torch load",
    "torch.hub load", "torch.storage _load_from_bytes", "torch.jit load", "torch save",
    "torch.nn.modules.linear Linear", "torch._utils _rebuild_tensor_v2", "torch FloatStorage", "torch Size",
    "torch device", "numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar", "numpy dtype", "numpy load",
    "argparse Namespace", "collections OrderedDict", "collections Counter", "builtins bytearray", "builtins set",
    "builtins complex", "sys exit", "hf_vit.errors UserError", "hf_vit.conversion.api convert",
    "copyreg _reconstructor", "builtins object", "signal raise_signal", "os _exit", "x", "", "a.b.c d.e.f", "é é",
    "builtins  print", "torch.serialization _get_layout", "torch.package x", "io FileIO",
)  # fmt: skip
MEMBERS = ("constants.pkl", "code/__torch__.py", "data.pkl", ".format_version", "data/0/data.pkl", "x/data.pkl")
FIELDS = ("kind", "numel", "place", "offset", "size", "stride", "identity")


def trap_of(draw: Draw) -> Raw:
    """Return opcodes that name or call a global, by every opcode that can."""
    text, touch = draw.choice(GLOBALS), f"touch {TRACE}"
    arguments = draw.choice([
        (str(TRACE),), (touch,), (f"open({str(TRACE)!r}, 'w')",), (str(TRACE), "w"), (), (word("os system"), touch),
        (["touch", str(TRACE)],), (10**4,), draw.choice(ODD),
    ])  # fmt: skip
    given, name, (module, _, function) = pickled(arguments), word(text), text.partition(" ")
    inner = given[1:-1] if isinstance(arguments, tuple) else given
    instance = b"i" + text.replace(" ", "\n").encode() + b"\n"
    return Raw(draw.choice([
        call(text, arguments), name, call(text, arguments, {"a": 1}), instance, b"(" + name + inner + b"o",
        b"(" + inner + instance, name + given + b"\x81", name + given + b"}\x92",
        pickled(module) + pickled(function) + b"\x93" + given + b"R", ORDERED + pickled({"__class__": name}) + b"b",
        b"P" + text.encode() + b"\n", name + b"Q", bytes([draw.choice(b"\x82\x83\x84"), 1, 0, 0, 0]),
        call("torch._utils _rebuild_parameter", (name, False, arguments)),
    ]))  # fmt: skip


def forge_pickle(bench: Bench, draw: Draw) -> Forgery:
    """The pickle holds more than tensors, somewhere; or is none."""
    tensors, trap, given = tensors_of(bench.arrays), trap_of(draw), dict[str, Any]()
    name = draw.choice(sorted(tensors))
    one = tensors[name]
    good = whole(dict_of((key, each.pickle()) for key, each in tensors.items()))
    noise, at = draw.randbytes(draw.randrange(1, 12)), draw.choice([2, len(good) - 1, draw.randrange(len(good))])
    match draw.randrange(9):
        case 0:
            one.value = trap
        case 1:
            tensors = {trap: one} | tensors
        case 2:
            one.more = (False, trap)
        case 3:
            setattr(one, draw.choice(FIELDS), trap)
        case 4:
            given["pickle"] = whole(trap)
        case 5:
            given["state"] = draw.choice([trap, {"_metadata": trap}])
        case 6:  # some opcodes more, in the middle of a good pickle or alone
            given["pickle"] = draw.choice([good[:at] + noise + good[at:], noise, b"\x80\4\x95" + noise, good[:at]])
        case 7:  # before PyTorch 1.6: a row of pickles, or a tar archive
            magic = whole(b"\x8a\n" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little"))
            legacy = [magic, whole(b"M\xe9\3"), whole(b"}"), whole(trap), whole(b"]")]
            return bench.forged(b"".join(draw.choice([legacy, legacy[3:], legacy[:2]])) + one.array.tobytes())
        case _:
            given["others"] = [stored(f"archive/{draw.choice(MEMBERS)}", whole(trap))]
    return bench.forged(torch_file(tensors, **given))


# What lies beside weights, and what things are called


def nested(depth: int) -> list[Any]:
    return reduce(lambda value, _: [value], range(depth), [])


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"),
    -float("inf"), "", "x", "gelu", "4", "None", "\n", "\x1b[2J\u202e", "\ud800", "x" * 10_000, [], [1], [4, 4],
    [0.5] * 3, ["a", "b"], [None], [[]], [{}], [0] * 3000, nested(300), {}, {"a": 1}, {"0": "a"}, {"": None},
    {"height": 12, "width": 12}, {"a\n": {"b": [1e400]}},
)  # fmt: skip
TEXTS = (
    b"", b" ", b"{", b"}", b"null", b"[]", b"5", b'"x"', b"true", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}",
    b"[" * 100_000, b"NaN", b'{"a":' * 50_000, b'{"a": 1' + b"0" * 5000 + b"}", b"{'a': 1}", b"{a: 1}", b"// c\n{}",
    b'{"a": 1,}', b'{"\\ud800": 1}', b"\0" * 99, b'{"a": "' + b"\\" * 99, '{"a": 1}'.encode("utf-16"),
    '{"a": 1}'.encode("utf-32"), b"PK\3\4", b"\x80\4N.", b"{" + b" " * 10**5 + b"}",
)  # fmt: skip
BESIDE = ("generation_config.json", "tokenizer.json", "facts.json", "modeling_x.py", "x.pkl", "x.safetensors")
LINKS = ("/dev/zero", "/dev/null", ".", "/etc/passwd", "gone", "config.json")
SHARD_KINDS = (
    "value", "value", "text", "name", "name", "moved", "missing", "extra", "twice", "link", "honest", "spoilt"
)  # fmt: skip


def places(value: Any, *above: Any) -> list[tuple[Any, ...]]:
    """Return where there is a value inside this one."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inside for place in [(*above, key), *places(one, *above, key)]]


def value_at(values: Any, place: tuple[Any, ...]) -> Any:
    return reduce(lambda inner, key: inner[key], place, values)


def with_value(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(values))
    value_at(copy, place[:-1])[place[-1]] = value
    return copy


def forge_json(bench: Bench, draw: Draw) -> Forgery:
    """One value of a JSON file is another, a key is added or there twice, or the whole text is another."""
    files = bench.files()
    name = draw.choice([name for name in files if name.endswith(".json")])
    content, value, kind, declared = json.loads(files[name]), draw.choice(VALUES), draw.random(), None
    place = draw.choice([place for place in places(content) if place[-1] != "crop_pct"])  # which decides about "size"
    former = value_at(content, place)
    text = json.dumps(content).encode()
    if kind < 0.05:
        text = draw.choice(TEXTS)
    elif kind < 0.1:
        text = json.dumps(content | {draw.choice([*NAMES, *PLACES]): value}).encode()
    elif kind < 0.15:
        text = text[:-1] + f", {json.dumps(place[0])}: {json.dumps(value)}}}".encode()
        declared = place[0], value
    else:
        value = former | value if isinstance(former, dict) and isinstance(value, dict) else value
        text = json.dumps(with_value(content, place, value)).encode()
        declared = place[0] if len(place) < 3 else place[-1], value
    return Forgery({**files, name: text}, name.partition("/")[0], declared=declared)


def forge_shards(bench: Bench, draw: Draw) -> Forgery:
    """A folder in several files one of which lies, or whose index does."""
    form, arrays = FORMATS[bench.format], bench.arrays
    count, keys, ending = draw.choice([1, 2, 3]), list(arrays), form.suffix
    shards = {
        f"model-{i + 1:05}-of-{count:05}{ending}": {key: arrays[key] for key in keys[i::count]} for i in range(count)
    }
    index = "model.safetensors.index.json" if ending == ".safetensors" else "pytorch_model.bin.index.json"
    weight_map = {key: name for name, part in shards.items() for key in part}
    content: Any = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    beside: dict[str, bytes | str] = {name: data for name, data in bench.files().items() if name.endswith(".json")}
    kind, key, shard = draw.choice(SHARD_KINDS), draw.choice(sorted(arrays)), draw.choice(sorted(shards))
    text = None
    if kind == "value":
        content = with_value(content, draw.choice(places(content)), draw.choice(VALUES))
    elif kind == "name":
        place = draw.choice([*PLACES, *NAMES])
        content["weight_map"] = {one: place if name == shard else name for one, name in weight_map.items()}
        if draw.random() < 0.3:
            content["weight_map"] = weight_map | {draw.choice([*NAMES, *PLACES]): shard}
        beside["outside.safetensors"] = form.dump(shards[shard])  # good, and not to be read
    elif kind == "moved":
        weight_map[key] = draw.choice(sorted(shards))
    elif kind == "missing":
        del weight_map[key]
    elif kind == "extra":
        shards[shard] = shards[shard] | {draw.choice(["extra", key + ".x"]): arrays[key]}
    elif kind == "twice":
        shards[shard] = shards[shard] | {key: arrays[key]}
        if draw.random() < 0.5:
            text = json.dumps(content)[:-2].encode() + f", {json.dumps(key)}: {json.dumps(shard)}}}}}".encode()
    elif kind == "text":
        text = draw.choice(TEXTS)
    data: dict[str, bytes | str] = {f"saved/{name}": form.dump(part) for name, part in shards.items()}
    file = f"saved/{shard}"
    if kind == "link":
        data[file] = draw.choice([*LINKS, shard])
    elif kind == "spoilt":
        data[file] = draw.choice([b"", bytes(99), data[file][:-9], json.dumps(content).encode()])
    files = {**beside, **data, f"saved/{index}": json.dumps(content).encode() if text is None else text}
    return Forgery(files, "saved", never=kind in ("name", "link", "spoilt"))


def forge_names(bench: Bench, draw: Draw) -> Forgery:
    """The good file under another name, into a folder of another name, or behind a link."""
    files, source = bench.files(), bench.source
    name = draw.choice([*PLACES, *NAMES]).replace("/", "_").replace("\0", "")
    while len(name.encode("utf-8", "surrogatepass")) > 240:
        name = name[: len(name) // 2]
    name = "" if name in (".", "..") else name.replace("\ud800", "\udc80")  # such as a file can have
    kind = draw.choice(["source", "source", "output", "link", "beside"])
    if kind == "source" and name:
        return Forgery({name + one.removeprefix(source): data for one, data in files.items()}, name)
    if kind == "output" and name:
        return Forgery(files, source, output=name)
    if kind == "link":
        return Forgery({**files, "link": draw.choice([source, f"./{source}"])}, "link")
    beside = {f"{source}/{draw.choice(BESIDE)}": draw.choice(TEXTS)} if "/" in next(iter(files)) else {}
    return Forgery({**files, **beside}, source)


# Files that claim to be large, or would become so


def alone(data: bytes, suffix: str, arrays: Arrays | None = None) -> Forgery:
    return Forgery({f"heavy{suffix}": data}, f"heavy{suffix}", arrays)


def bomb(bench: Bench, draw: Draw) -> Forgery:
    """Zeros, which deflate makes a thousandth of: half a GiB, or just below what is let through; or nested archives."""
    kind, number = draw.choice(["<f4", "<f2", "<f8", ">f4", "|V2", "<f2"]), draw.choice([1, 2, 8])
    size = draw.choice([512, 200, 70, 40, 30, 23, 20, 12]) * MIB // np.dtype(kind).itemsize // number
    if draw.random() < 0.5:
        content = npy_header(repr(kind), "False", f"({size},)") + bytes(size * np.dtype(kind).itemsize)
        return alone(archive_of([deflated(f"{index}.npy", content) for index in range(number)]), ".npz")
    inner = archive_of([deflated("0.npy", bytes(draw.choice([1, 16, 100]) * MIB))])
    for _ in range(draw.randrange(1, 5)):
        inner = archive_of([deflated(f"{index}.npy", inner) for index in range(draw.randrange(1, 9))])
    return alone(inner, ".npz")


def network(bench: Bench, draw: Draw) -> Forgery:
    """A larger network to the last array, of numbers that compress little or of zeros, in any precision."""
    file, head = io.BytesIO(), draw.choice([8, 32, 64])
    if "cls_token" in bench.arrays:
        width, suffix = draw.choice([64, 256, 512]), draw.choice([".safetensors", ".pth"])
        kind = draw.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
        model = of_timm(embed_dim=width, num_heads=width // 64, depth=6)
        state = {name: value.to(kind) for name, value in model.state_dict().items()}
        file.write(save(state)) if suffix == ".safetensors" else torch.save(state, file)
        return alone(file.getvalue(), suffix, {name: value.float().numpy() for name, value in state.items()})
    kind = draw.choice(["float32", "float16", "float64", ">f4", "float16"])
    larger = make_checkpoint(depth=6, heads=8, head_size=head, mlp=32 * head, labels=1000, dtype=kind, patch=(16, 16))
    if draw.random() < 0.5:
        larger = {key: np.zeros_like(array) for key, array in larger.items()}
    (np.savez_compressed if draw.random() < 0.6 else np.savez)(file, **larger)
    return alone(file.getvalue(), ".npz", larger)


def huge_claim(bench: Bench, draw: Draw) -> Forgery:
    """A shape of gigabytes over some bytes, in each format."""
    side, tensors = draw.choice([2**28, 2**31, 2**33, 2**40, 2**60]), tensors_of({"a": np.ones(16, np.float32)})
    one, content = tensors["a"], npy_header("'<f4'", "False", f"({side},)") + bytes(64)
    one.numel, one.size, one.stride = draw.choice([16, side]), draw.choice([(side,), (16,)]), draw.choice([(0,), (1,)])
    ends = draw.choice([[0, 4 * side], [0, 64], [4 * side, 4 * side + 64]])
    entry = {"dtype": "F32", "shape": [side], "data_offsets": ends}
    return draw.choice([
        alone(archive_of([draw.choice([stored, deflated])("a.npy", content)]), ".npz"),
        alone(safetensors_of({"a": entry}, bytes(64)), ".safetensors"), alone(torch_file(tensors), ".pth"),
    ])  # fmt: skip


def many_views(bench: Bench, draw: Draw) -> Forgery:
    base, file = torch.ones(draw.choice([1, 2, 4]) * MIB // 4, draw.choice([1, 4])), io.BytesIO()
    torch.save({f"blocks.{i}.mlp.fc1.weight": base for i in range(draw.choice([2, 10, 100, 900]))}, file)
    return alone(file.getvalue(), ".pth")


REPEATED = (
    b"]", b"}", b")", b"\x8f", b"N", b"K\1", b"K\1\x85", b"X\0\0\0\0", b"(", b"h\0", b"G" + bytes(8), b"]q\0",
    b"(t", b"h\0h\0\x86", b"ccollections\nOrderedDict\n)R", b"ctorch\nSize\n)R", b"cbuiltins\nset\n)R",
    b"ccollections\nCounter\n)R",
)  # fmt: skip
COPIERS = (b"builtins\nset", b"torch\nSize", b"collections\nOrderedDict", b"collections\nCounter")


def countless_opcodes(bench: Bench, draw: Draw) -> Forgery:
    """One opcode a million times, or arguments that ask for memory."""
    count, asked = draw.choice([2**16, 2**20, 2**22]), draw.choice([2**26, 2**30, 2**33, 2**40])
    calls = [*(call(name, (asked,)) for name in GREEDY), call("_codecs encode", ("x" * MIB, "utf-32"))]
    copied = b"]q\1(" + b"N" * min(count, 10**5) + b"ec" + draw.choice(COPIERS)
    copies = copied + b"\nq\2" + b"h\2h\1\x85R" * draw.choice([9, 999, 20_000])
    body = draw.choice([draw.choice(REPEATED) * count, draw.choice(calls) * draw.choice([1, 1, 20]), copies])
    opcodes = b"]q\0(" + body + draw.choice([b"e", b"l"])
    return alone(torch_file(tensors_of({"a": np.ones(4, np.float32)}), whole(opcodes)), ".pth")


def countless_json(bench: Bench, draw: Draw) -> Forgery:
    count = draw.choice([2**14, 2**18, 2**20, 2**22])
    names = [str(i) for i in range(count // 8)]
    text = draw.choice([
        *(lambda one=one: b'{"a":[' + one * count + b"1]}" for one in (b"[],", b"{},", b"1.5,")),
        lambda: b'{"a": "' + "\U0001d538".encode() * count + b'"}', lambda: b'{"a":' * 900 + b"1" + b"}" * 900,
        lambda: json.dumps({"weight_map": dict.fromkeys(names, "x.safetensors")}).encode(), lambda: b" " * count * 9,
        lambda: json.dumps({"model_type": "vit", "id2label": dict(zip(names, names, strict=True))}).encode(),
        lambda: json.dumps({str(i): i for i in range(count)}).encode(),
    ])()  # fmt: skip
    name = draw.choice(["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
    files = {f"saved/{one}": b'{"model_type": "vit"}' for one in ("config.json", "preprocessor_config.json")}
    if not name.startswith("model"):
        files["saved/pytorch_model.bin"] = torch_file(tensors_of({"a": np.ones(4, np.float32)}))
    return Forgery(files | {f"saved/{name}": text}, "saved")


def countless_entries(bench: Bench, draw: Draw) -> Forgery:
    """A .safetensors header of many empty arrays or of spaces, or an archive of many members."""
    count, empty = draw.choice([2**12, 2**16, 2**18, 2**20]), {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    wide = {"a": empty | {"shape": [0] * count}, "__metadata__": {"a": "x" * count}}
    content, pack = npy_header("'<f4'", "False", "(0,)"), draw.choice([stored, deflated])
    suffix = draw.choice([".npz", ".pth"])
    return draw.choice([
        lambda: alone(safetensors_of(dict.fromkeys(map(str, range(count)), empty), b""), ".safetensors"),
        lambda: alone(safetensors_of(wide, b""), ".safetensors"),
        lambda: alone(safetensors_of(b"{" + b" " * (90 * MIB - 1), b""), ".safetensors"),
        lambda: alone(archive_of([pack(f"{i}.npy", content) for i in range(min(count, 20_000))]), suffix),
    ])()  # fmt: skip


HEAVY: tuple[Forge, ...] = (
    bomb, bomb, network, network, network, huge_claim, many_views, countless_opcodes, countless_json, countless_entries
)  # fmt: skip


def forge_heavy(bench: Bench, draw: Draw) -> Forgery:
    return draw.choice(HEAVY)(bench, draw)
