"""Headers that lie: of the .npy members of an .npz file, and of .safetensors files."""

import io
import json
import pickle
import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np

from campaigns.forgeries.archives import NAMES, archive_of, deflated, members_of, stored
from campaigns.forgeries.forgery import Arrays
from campaigns.forgeries.pickles import Payload

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


def npy_header(descr: str, order: str, shape: str, version: tuple[int, int] = (1, 0), size: int | None = None) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    return _around(text.encode(), version, size)


def _around(text: bytes, version: tuple[int, int], size: int | None = None) -> bytes:
    """The magic string and the length before a header."""
    length = struct.pack("<H" if version == (1, 0) else "<I", (len(text) if size is None else size) % 2**16)
    return b"\x93NUMPY" + bytes(version) + length + text


def forge_npy(data: bytes, payload: Payload, rng: random.Random) -> bytes:
    """An .npz file with one other member; its sizes and checksums in the archive are right."""
    members = members_of(data)
    index = rng.randrange(len(members))
    one = members[index]
    with np.load(io.BytesIO(data)) as arrays:
        array = arrays[one.name.decode().removesuffix(".npy")]
    content = rng.choice(_NPY)(array, payload, rng)
    pack = stored if rng.random() < 0.5 else deflated
    members[index] = replace(pack(one.name.decode(), content))
    return archive_of(members)


def _header_and_data(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    """The good content with one or several lies in its header."""
    told = {"descr": "'<f4'", "order": "False", "shape": repr(array.shape)}
    lies = {"descr": DESCRIPTIONS, "order": ("True", "None", "1", "'x'", "[]"), "shape": SHAPES}
    for field in rng.sample(sorted(told), rng.choice([1, 1, 1, 2])):
        told[field] = rng.choice(lies[field])
    if told["order"] == "True" and array.ndim > 1:
        array = array.T  # what it says is then so
    return npy_header(**told) + array.tobytes("C")


def _version(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    version = rng.choice([(2, 0), (2, 0), (3, 0), (0, 0), (1, 1), (9, 9), (255, 255)])
    return npy_header("'<f4'", "False", repr(array.shape), version) + array.tobytes()


def _length(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 117, 119, 500, 9_000, 65_535, rng.randrange(2**16)])
    return npy_header("'<f4'", "False", repr(array.shape), size=size) + array.tobytes()


def _text(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    """Another text in the place of the header."""
    deep = rng.choice([30, 200, 3000])
    text = rng.choice([
        b"{}", b"[]", b"", b"\n", b"{" * deep, b"(" * deep + b")" * deep, b"-" * deep + b"1", b"{'descr': '<f4'}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}", b"\xff" * 40, b"'\x00'",
        b"1 if 1 else 2", b"[].append", b"lambda: 0",
        b"{'shape': (4,), 'fortran_order': False, 'descr': '<f4', 'descr': '|O'}", b"{**{}}", b"{1: 2}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}#" + b"x" * 9000, b"f'{1}'", b"...", b"-1" * deep,
    ])  # fmt: skip
    return _around(text, (1, 0)) + array.tobytes()


def _honest(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    """The same numbers in another way to write them."""
    file = io.BytesIO()
    others = (np.asfortranarray(array), array.astype(">f4"), array.astype("<f8"), array.astype(">f8"))
    np.lib.format.write_array(file, rng.choice(others), version=rng.choice([(1, 0), (2, 0)]))
    return file.getvalue()


def _objects(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    """An array of objects, as numpy would unpickle it."""
    shape = rng.choice(["()", "(1,)", repr(array.shape)])
    return npy_header(rng.choice(["'|O'", "'O'", "[('a', '|O')]"]), "False", shape) + pickle.dumps(payload)


def _magic(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    good = npy_header("'<f4'", "False", repr(array.shape)) + array.tobytes()
    return rng.choice([b"", b"\x93NUMP", b"\x93NUMPX", b"PK\3\4", b"\x80\4"]) + good[6 * rng.randrange(2) :]


def _size(array: np.ndarray, payload: Payload, rng: random.Random) -> bytes:
    good = npy_header("'<f4'", "False", repr(array.shape)) + array.tobytes()
    return rng.choice([good[: -rng.randrange(1, 9)], good + bytes(rng.randrange(1, 99)), good[:9], good * 2])


_NPY = (_header_and_data, _header_and_data, _version, _length, _text, _honest, _objects, _magic, _size)


# What may stand in the place of any value of a .safetensors header.
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, 0.5, 4.0, 1e308, "", "x", "F32", "x" * 5000, [],
    [1], [[0]], {}, {"a": 1}, [0, 1, 2], [-4, 4], [4, 0], [0, 2**63], [0, 2**64], [2**62, 2**62], [1.5, 2],
    ["0", "4"], [None, 4], "\ud800",
)  # fmt: skip
DTYPES = ("F64", "F16", "BF16", "I32", "U8", "BOOL", "I64", "C64", "F8_E4M3", "F4", "Q4", "f32", "", "F32 ")


def safetensors_of(header: object, data: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", (len(text) if size is None else size) % 2**64) + text + data


def forge_safetensors(file: bytes, arrays: Arrays, rng: random.Random) -> tuple[bytes, Arrays | None]:
    """(the file with another header, the arrays it then holds by its own word where those are others)."""
    end = 8 + int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8:end]), file[end:]
    kind = rng.choice(
        ["entry"] * 6 + ["length", "text", "key", "twice", "swapped", "metadata", "data", "data", "order"]
    )
    key, other = rng.sample(sorted(set(header) - {"__metadata__"}), 2)
    if kind == "entry":
        return safetensors_of(_with_forged_entry(header, key, rng), data), None
    if kind == "length":
        lie = rng.choice(
            [0, 1, end, end - 9, end - 7, 2**20, 10**8, 10**8 + 1, 2**31, 2**53, 2**63, 2**64 - 1, len(data)]
        )
        return safetensors_of(file[8:end], data, lie), None
    if kind == "text":
        return safetensors_of(_forged_text(file[8:end], key, rng), data), None
    if kind == "key":
        header[rng.choice(NAMES)] = header.pop(key) if rng.random() < 0.5 else header[key]
    elif kind == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(key)}: {json.dumps(header[rng.choice([key, other])])}}}"
        return safetensors_of(text.encode(), data), None
    elif kind == "swapped":
        header[key]["data_offsets"], header[other]["data_offsets"] = (
            header[other]["data_offsets"],
            header[key]["data_offsets"],
        )
        if arrays[key].nbytes != arrays[other].nbytes:
            return safetensors_of(header, data), None
        places = {key: arrays[other].reshape(arrays[key].shape), other: arrays[key].reshape(arrays[other].shape)}
        return safetensors_of(header, data), arrays | places
    elif kind == "metadata":
        header["__metadata__"] = rng.choice(
            [*VALUES, {"a": "b"}, {"format": "pt"}, {"a\n": "\x1b"}, {"a": None}, {"a": {}}]
        )
    elif kind == "order":
        names = list(header)
        rng.shuffle(names)
        header = {name: header[name] for name in names}
    else:
        data = rng.choice([data[:-1], data + b"\0", data[1:], b"", data * 2, data[:-4], data + bytes(8), data[:99]])
    return safetensors_of(header, data), None


def _with_forged_entry(header: dict[str, Any], key: str, rng: random.Random) -> dict[str, Any]:
    entry, field = header[key], rng.choice(["dtype", "shape", "data_offsets", "offsets", "shape", "entry", "gone"])
    begin, end = entry["data_offsets"]
    step = rng.choice([1, 2, 4, 8, 1024, end - begin, 2**40])
    if field == "entry":
        header[key] = rng.choice(VALUES)
    elif field == "gone":
        del entry[rng.choice(sorted(entry))]
    elif field == "offsets":  # overlaps, gaps, backwards, out of the file
        signs = rng.choice([(1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0), (1, -1)])
        entry["data_offsets"] = [begin + signs[0] * step, end + signs[1] * step]
    elif field == "dtype" and rng.random() < 0.7:
        entry["dtype"] = rng.choice(DTYPES)
    elif field == "shape" and rng.random() < 0.5:
        shape = entry["shape"]
        forms = [
            [*shape, 2],
            [*shape, 0],
            shape[1:],
            [*shape, 2**62],
            [2**32, 2**32],
            [-1, *shape],
            [step],
            [*shape, 1],
        ]
        entry["shape"] = rng.choice([form for form in forms if form != shape])
    else:
        entry[field] = rng.choice(VALUES)
    return header


def _forged_text(text: bytes, key: str, rng: random.Random) -> bytes:
    name, deep = json.dumps(key).encode(), rng.choice([100, 200, 100_000])
    return rng.choice([
        text + b" " * rng.randrange(1, 99), b" " + text, text + b"\n", b"\xef\xbb\xbf" + text, text + b"\0", text * 2,
        text[:-1], text.replace(name, name[:-1] + b"\\u0000\""), text.replace(name, name[:-1] + b"\\ud800\""),
        text + b",", text.replace(name, b'"\xff"'), text.replace(b":", b"="), b"[" * deep, b'{"a":' * deep, b"null",
        b"[]", b"{}", b'"x"', text.replace(b"0", b"00"), text.replace(b"[0,", b"[-0,"),
        text.replace(b"[0,", b"[0.0,"), text.replace(b"}", b",}"), text.replace(b"[0,", b"[0e0,"),
        text.replace(b"F32", b"F\\u00332"), text.swapcase(), b"{" + b" " * 10**6 + text[1:],
    ])  # fmt: skip
