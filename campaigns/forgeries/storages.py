"""PyTorch files whose storages lie: about their bytes, places, types, views, and what is made of them."""

import random
from typing import Any

import numpy as np

from campaigns.forgeries.archives import NAMES
from campaigns.forgeries.forgery import Arrays
from campaigns.forgeries.pickles import (
    ODD,
    ORDERED,
    REBUILD,
    Call,
    Name,
    Pairs,
    Stored,
    pickled,
    tensors_of,
    torch_file,
)

KINDS = {
    "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": None, "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?", "ComplexFloatStorage": "<c8",
    "QInt8Storage": None, "QInt32Storage": None, "QUInt4x2Storage": None, "ComplexDoubleStorage": "<c16",
    "UntypedStorage": None,
}  # fmt: skip
PLACES = (
    "cuda", "cuda:0", "cuda:99", "meta", "mps", "xla:0", "hpu", "", "cpu:1", "CPU", "x" * 3000, "../x", None, 0,
    ("cpu",),
)  # fmt: skip


def forge_storages(arrays: Arrays, rng: random.Random) -> tuple[bytes, Arrays | None]:
    """(a file one of whose storages lies, the arrays it holds by its own word where those are others)."""
    tensors = tensors_of(arrays)
    name, other = rng.sample(sorted(tensors), 2)
    forge = rng.choice(_STORAGES)
    result = forge(tensors, name, other, rng)
    if isinstance(result, tuple):
        return result[0], arrays | result[1]
    if isinstance(result, bytes):
        return result, None
    return torch_file(tensors), None if result is None else arrays | result


def _member_size(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    """Short or long, with a checksum that is right."""
    one = tensors[name]
    size = len(one.member or b"")
    step = rng.choice([1, 2, 4, 8, 64, 4096, rng.randrange(1, size + 1), size])
    one.member = (one.member or b"")[:-step] if rng.random() < 0.6 else (one.member or b"") + bytes(step)


def _numel(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    one = tensors[name]
    one.numel = rng.choice([one.numel + 1, one.numel - 1, one.numel * 2, one.numel // 2, 4 * one.numel, *ODD])


def _offset(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    tensors[name].offset = rng.choice([1, tensors[name].numel, -tensors[name].numel, 16, -16, *ODD])


def _size(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    one = tensors[name]
    shape = one.array.shape
    negative = tuple(-side for side in shape)
    forms = [(*shape, 2), (2 * shape[0], *shape[1:]), negative, shape[:-1], (*shape, 0), list(shape)]
    one.size = rng.choice([*forms, *ODD])
    if rng.random() < 0.3:
        one.stride = rng.choice([(0,) * len(shape), (1,) * len(shape), *ODD])


def _stride(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    one = tensors[name]
    true = one.stride
    steps = [tuple(factor * step for step in true) for factor in (-1, 2)]
    forms = [(0,) * len(true), *steps, (2**62,) * len(true), (*true, 1)]
    one.stride = rng.choice([*forms, *[odd for odd in ODD if odd not in ((1,), [1], list(true))]])


def _transposed(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    """Honest: the columns one after the other."""
    one = tensors[name]
    one.member = one.array.T.tobytes()
    one.stride = tuple(step // 4 for step in np.asfortranarray(one.array).strides)


def _swapped_members(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> Arrays | None:
    one, two = tensors[name], tensors[other]
    one.member, two.member = two.member, one.member
    if one.array.size != two.array.size:
        return None
    return {name: two.array.reshape(one.array.shape), other: one.array.reshape(two.array.shape)}


def _shared(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> Arrays | None:
    """A tensor that lies in another one's storage."""
    one, two = tensors[name], tensors[other]
    if two.array.size < one.array.size:
        one, two, name = two, one, other
    last = two.array.size - one.array.size
    one.key, one.member, one.numel = two.key, two.member, two.numel
    one.offset = rng.choice([0, last, rng.randrange(last + 1)])
    inside = two.array.ravel()[one.offset : one.offset + one.array.size]
    return {name: inside.reshape(one.array.shape)}


def _clash(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> Arrays | None:
    """Two storages of one key, of which torch takes the first's word; they may be one."""
    tensors[name].key = tensors[other].key
    if rng.random() < 0.5:
        tensors[name].kind = Name(f"torch {rng.choice(list(KINDS))}")
    last = tensors[max(name, other, key=list(tensors).index)].array  # whose bytes are there
    if tensors[name].numel != tensors[other].numel:
        return None
    return {one: last.reshape(tensors[one].array.shape) for one in (name, other)}


def _kind(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> Arrays | None:
    one, kind = tensors[name], rng.choice(list(KINDS))
    one.kind, dtype = Name(f"torch {kind}"), KINDS[kind]
    if dtype is None or rng.random() < 0.3:
        return None
    values = np.resize(one.array, one.array.shape).astype(dtype)
    one.member = values.tobytes()
    return {name: values} if kind in ("HalfStorage",) else None


def _place(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    tensors[name].place = rng.choice([*PLACES, *ODD])


def _identity(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    one = tensors[name]
    whole = ["storage", one.kind, one.key, one.place, one.numel]
    kind = rng.randrange(4)
    if kind == 0:
        one.identity = tuple(whole[: rng.randrange(5)])
    elif kind == 1:
        one.identity = (*whole, rng.choice(ODD))
    elif kind == 2:
        whole[rng.randrange(5)] = rng.choice([*ODD, "module"])
        one.identity = tuple(whole)
    else:
        one.identity = rng.choice([odd for odd in ODD if odd])


def _key(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    """A storage's name that no library gives; the member is there or not."""
    one = tensors[name]
    one.key = rng.choice(NAMES)[:60_000]
    if rng.random() < 0.3:
        one.member = None


def _missing(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> None:
    tensors[name].member = None


def _byteorder(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> bytes:
    told = rng.choice([b"big", b"big", b"little", b"", b"BIG", b"little\n", b"x" * 99, b"\xff", None])
    if told == b"big":
        for one in tensors.values():
            one.member = one.array.astype(">f4").tobytes()
    return torch_file(tensors, byteorder=told)


REBUILDS = (
    "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_device_tensor_from_numpy", "torch Tensor",
    "torch._utils _rebuild_device_tensor_from_cpu_tensor", "torch._utils _rebuild_nested_tensor",
    "torch.nn.parameter Parameter", "torch._utils _rebuild_wrapper_subclass", "torch._tensor _rebuild_from_type_v2",
    "torch Size", "torch FloatTensor", "torch._utils _rebuild_sparse_csr_tensor", "torch._utils _rebuild_tensor_v4",
)  # fmt: skip
COO, QUANTISED = Call("torch.serialization _get_layout", ("torch.sparse_coo",)), Name("torch per_tensor_affine")


def _rebuilt(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> Arrays | None:
    """By another function, with its arguments or with those of a plain tensor."""
    one, float32 = tensors[name], Name("torch float32")
    plain = one.pickle()
    kind = rng.randrange(9)
    if kind == 0:
        one.rebuild = rng.choice(REBUILDS)
    elif kind == 1:
        one.more = rng.choice(
            [(), (False,), (True, ORDERED), (False, ORDERED, {}), (False, {}), (rng.choice(ODD), rng.choice(ODD))]
        )
    elif kind == 2:  # a view that is negated, or conjugated, when it is read
        one.more = (False, ORDERED, {rng.choice(["neg", "conj", "x"]): True})
        return {name: -one.array} if one.more[2].get("neg") else None
    elif kind == 3:  # honest
        one.value = Call("torch._utils _rebuild_parameter", (plain, rng.random() < 0.5, ORDERED))
    elif kind == 4:
        indices = Stored(
            np.zeros((1, 1), "i8"), one.key, one.member, Name("torch LongStorage"), 1, size=(1, 1), stride=(1, 1)
        )
        one.value = Call(
            "torch._utils _rebuild_sparse_tensor", (COO, (indices.pickle(), plain, one.array.shape, False))
        )
    elif kind == 5:
        one.kind = Name(f"torch {rng.choice(['QInt8Storage', 'QUInt8Storage', 'QInt32Storage'])}")
        one.more = ((QUANTISED, rng.choice([0.1, 0.0, float("nan"), "x"]), 0), False, ORDERED)
        one.rebuild = "torch._utils _rebuild_qtensor"
    elif kind == 6:
        one.value = Call("torch._utils _rebuild_meta_tensor_no_storage", (float32, one.size, one.stride, False))
    elif kind == 7:
        subclass = (
            "torch Tensor",
            "torch.nn.parameter Parameter",
            "torch.masked MaskedTensor",
            "collections OrderedDict",
        )
        one.value = Call(
            "torch._tensor _rebuild_from_type_v2", (Name(REBUILD), Name(rng.choice(subclass)), plain.arguments, {})
        )
    else:
        one.value = Call(
            rng.choice(["torch Tensor", "torch FloatTensor", "torch FloatStorage"]), (rng.choice([4, 2**40, "x"]),)
        )
    return None


def _container(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> bytes:
    """Dicts, lists and keys of every kind around the tensors."""
    pairs = tuple((key, one.pickle()) for key, one in tensors.items())
    odd = rng.choice([*ODD, tensors[name].pickle(), *NAMES])
    value: Any = rng.choice([
        Pairs((*pairs, (odd, tensors[name].pickle()))), Pairs((*pairs, ("extra", odd))),
        Pairs(((odd, Pairs(pairs)),)), Pairs((("model", Pairs(pairs)), ("optimizer", odd))), [Pairs(pairs)],
        (Pairs(pairs), odd), [one for _, one in pairs], Pairs((("model", Pairs(pairs)), ("model.x", Pairs(pairs)))),
        Pairs(tuple((key.split(".") if rng.random() < 0.1 else key, one) for key, one in pairs)),
        tensors[name].pickle(), odd,
    ])  # fmt: skip
    return torch_file(tensors, opcodes=b"\x80\2" + pickled(value) + b".")


def _key_twice(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> tuple[bytes, Arrays]:
    """The last one counts, as in any dict."""
    pairs = (*((key, one.pickle()) for key, one in tensors.items()), (name, tensors[other].pickle()))
    return torch_file(tensors, opcodes=b"\x80\2" + pickled(Pairs(pairs)) + b"."), {name: tensors[other].array}


def _attributes(tensors: dict[str, Stored], name: str, other: str, rng: random.Random) -> bytes:
    """An OrderedDict with attributes of the file's choice; `_metadata` is torch's own."""
    word = rng.choice(
        ["_metadata", "_metadata", "items", "keys", "__class__", "__len__", "values", "get", "x" * 3000, "\n"]
    )
    return torch_file(tensors, state=rng.choice([{word: rng.choice(ODD)}, rng.choice(ODD), {word: ORDERED}]) or {})


_STORAGES = (
    _member_size, _member_size, _numel, _offset, _size, _stride, _transposed, _swapped_members, _swapped_members,
    _shared, _clash, _kind, _kind, _place, _identity, _key, _missing, _byteorder, _rebuilt, _rebuilt, _rebuilt,
    _container, _container, _key_twice, _attributes,
)  # fmt: skip
