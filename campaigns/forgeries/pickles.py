"""PyTorch files written from scratch, whose pickles hold every opcode and global.

The writer here knows nothing of `torch.save` but the format, so that a forger can say anything in any place.
"""

import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.forgeries.archives import Member, archive_of, stored
from campaigns.forgeries.forgery import Arrays


@dataclass(frozen=True)
class Payload:
    """What must never run: it would create the file. Pickled by `pickle`, it is a call of `Path.touch`."""

    trace: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@dataclass(frozen=True)
class Name:
    """A global: "module name"."""

    text: str


@dataclass(frozen=True)
class Call:
    """A global called with arguments."""

    name: str
    arguments: Any
    state: Any = None


@dataclass(frozen=True)
class Persistent:
    """What a persistent id stands for: a storage."""

    identity: Any


@dataclass(frozen=True)
class Raw:
    """Opcodes as they are."""

    opcodes: bytes


@dataclass(frozen=True)
class Pairs:
    """A dict, whose keys may be anything."""

    items: tuple[tuple[Any, Any], ...]


def pickled(value: Any) -> bytes:
    """Opcodes that put the value on the stack."""
    match value:
        case Raw(opcodes):
            return opcodes
        case Name(text):
            return b"c" + text.replace(" ", "\n").encode() + b"\n"
        case Call(name, arguments, state):
            built = b"" if state is None else pickled(state) + b"b"
            return pickled(Name(name)) + pickled(arguments) + b"R" + built
        case Persistent(identity):
            return pickled(identity) + b"Q"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            if -(2**31) <= value < 2**31:
                return b"J" + struct.pack("<i", value)
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple():
            return b"(" + b"".join(map(pickled, value)) + b"t"
        case list():
            return b"](" + b"".join(map(pickled, value)) + b"e"
        case dict():
            return pickled(Pairs(tuple(value.items())))
        case Pairs(items):
            return b"}(" + b"".join(pickled(key) + pickled(one) for key, one in items) + b"u"
        case _:
            raise TypeError(value)


ORDERED = Call("collections OrderedDict", ())
REBUILD = "torch._utils _rebuild_tensor_v2"


@dataclass
class Stored:
    """One tensor of the file: what the pickle says of it, and the bytes of its storage; all may lie."""

    array: np.ndarray
    key: str
    member: bytes | None
    kind: Any = Name("torch FloatStorage")
    numel: Any = 0
    place: Any = "cpu"
    offset: Any = 0
    size: Any = ()
    stride: Any = ()
    rebuild: str = REBUILD
    more: tuple[Any, ...] = (False, ORDERED)
    identity: Any = None
    value: Any = None  # in the place of the tensor

    def pickle(self) -> Any:
        if self.value is not None:
            return self.value
        identity = self.identity or ("storage", self.kind, self.key, self.place, self.numel)
        return Call(self.rebuild, (Persistent(identity), self.offset, self.size, self.stride, *self.more))


def tensors_of(arrays: Arrays) -> dict[str, Stored]:
    """Honest tensors."""
    found: dict[str, Stored] = {}
    for number, (name, array) in enumerate(arrays.items()):
        strides = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
        found[name] = Stored(array, str(number), array.tobytes(), numel=array.size, size=array.shape, stride=strides)
    return found


def torch_file(
    tensors: Mapping[Any, Stored] | None = None,
    opcodes: bytes | None = None,
    byteorder: bytes | None = b"little",
    others: tuple[Member, ...] = (),
    folder: str = "archive",
    state: Any = None,
) -> bytes:
    """The archive of a state dict; `opcodes` in the place of its pickle, `state` of its dict."""
    tensors = tensors or {}
    if opcodes is None:
        content = Pairs(tuple((name, one.pickle()) for name, one in tensors.items()))
        opcodes = pickled(content if state is None else Call("collections OrderedDict", (), None)) + (
            b"" if state is None else pickled(content)[1:] + pickled(state) + b"b"
        )
        opcodes = b"\x80\2" + opcodes + b"."
    members = [stored(f"{folder}/data.pkl", opcodes)]
    if byteorder is not None:
        members.append(stored(f"{folder}/byteorder", byteorder))
    contents = {one.key: one.member for one in tensors.values() if one.member is not None}
    members += [stored(f"{folder}/data/{key}", content) for key, content in contents.items()]
    return archive_of([*members, stored(f"{folder}/version", b"3\n"), *others])


ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**100, -(2**63), 0.5, float("nan"),
    float("inf"), "", "x", "0", "x" * 5000, b"", b"x", (), (1,), (-1,), (2**62, 4), (2**31, 2**31, 4), (0.5,), ("4",),
    (None,), ((1,),), [], [1], [4, 4], {}, {"a": 1}, Name("torch FloatStorage"), Name("torch float32"), ORDERED,
    Raw(b"]\x94h\0a"), Raw(b"}q\0h\0h\0s"),
)  # fmt: skip
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


def forge_pickle(arrays: Arrays, payload: Payload, rng: random.Random) -> bytes:
    """A file whose pickle holds more than tensors, somewhere; or is none."""
    tensors = tensors_of(arrays)
    name = rng.choice(sorted(tensors))
    one, word = tensors[name], Name(rng.choice(GLOBALS))
    command = f"touch {payload.trace}"
    trace = str(payload.trace)
    arguments = rng.choice([
        (trace,), (command,), (f"open({trace!r}, 'w')",), (trace, "w"), (), (Name("os system"), command),
        (["touch", trace],), (10**4,), rng.choice(ODD),
    ])  # fmt: skip
    inner = pickled(arguments)[1:-1] if isinstance(arguments, tuple) else pickled(arguments)
    text = word.text.partition(" ")
    trap = Raw(rng.choice([
        pickled(Call(word.text, arguments)), pickled(word), pickled(Call(word.text, arguments, {"a": 1})),
        b"i" + word.text.replace(" ", "\n").encode() + b"\n", b"(" + pickled(word) + inner + b"o",
        b"(" + inner + b"i" + word.text.replace(" ", "\n").encode() + b"\n",
        pickled(word) + pickled(arguments) + b"\x81", pickled(word) + pickled(arguments) + b"}\x92",
        pickled(text[0]) + pickled(text[2]) + b"\x93" + pickled(arguments) + b"R",
        pickled(ORDERED) + pickled({"__class__": word}) + b"b", b"P" + word.text.encode() + b"\n",
        pickled(word) + b"Q", bytes([rng.choice(b"\x82\x83\x84"), 1, 0, 0, 0]),
        pickled(Call("torch._utils _rebuild_parameter", (word, False, arguments))),
    ]))  # fmt: skip
    place = rng.randrange(9)
    if place == 0:
        one.value = trap
    elif place == 1:
        tensors = {trap: one} | tensors
    elif place == 2:
        one.more = (False, trap)
    elif place == 3:
        setattr(one, rng.choice(["kind", "numel", "place", "offset", "size", "stride", "identity"]), trap)
    elif place == 4:
        return torch_file(tensors, opcodes=b"\x80\2" + trap.opcodes + b".")
    elif place == 5:
        return torch_file(tensors, state=rng.choice([trap, {"_metadata": trap}]))
    elif place == 6:
        return _with_random_opcodes(tensors, rng)
    elif place == 7:  # before PyTorch 1.6: a row of pickles, or a tar archive
        magic = b"\x80\2\x8a\n" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b"."
        legacy = [magic, b"\x80\2M\xe9\3.", b"\x80\2}.", b"\x80\2" + trap.opcodes + b".", b"\x80\2]."]
        return b"".join(rng.choice([legacy, legacy[3:], legacy[:2]])) + one.array.tobytes()
    else:
        further = rng.choice(
            ["constants.pkl", "code/__torch__.py", "data.pkl", ".format_version", "data/0/data.pkl", "x/data.pkl"]
        )
        return torch_file(tensors, others=(stored(f"archive/{further}", b"\x80\2" + trap.opcodes + b"."),))
    return torch_file(tensors)


def _with_random_opcodes(tensors: dict[str, Stored], rng: random.Random) -> bytes:
    """Some opcodes more, in the middle of a good pickle or alone."""
    good = b"\x80\2" + pickled(Pairs(tuple((name, one.pickle()) for name, one in tensors.items()))) + b"."
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 12)))
    place = rng.choice([2, len(good) - 1, rng.randrange(len(good))])
    return torch_file(
        tensors, opcodes=rng.choice([good[:place] + noise + good[place:], noise, b"\x80\4\x95" + noise, good[:place]])
    )
