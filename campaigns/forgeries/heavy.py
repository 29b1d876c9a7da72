"""Files that claim to be large, or would become so: bombs, huge shapes, headers and pickles of countless values."""

import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from originals.google import make_checkpoint
from originals.pytorch import of_timm
from safetensors.torch import save

from campaigns.forgeries.archives import archive_of, deflated, stored
from campaigns.forgeries.forgery import Arrays, Forgery
from campaigns.forgeries.headers import npy_header, safetensors_of
from campaigns.forgeries.pickles import Name, Raw, pickled, tensors_of, torch_file

MIB = 2**20


def _alone(data: bytes, suffix: str) -> Forgery:
    return Forgery({f"heavy{suffix}": data}, f"heavy{suffix}")


def bomb(arrays: Arrays, rng: random.Random) -> Forgery:
    """A network of zeros, which deflate makes a thousandth of; half a GiB, or just below what is let through."""
    size = rng.choice([512, 200, 70, 40, 30, 23, 20, 12]) * MIB
    kind = rng.choice(["<f4", "<f2", "<f8", ">f4", "|V2", "<f2"])
    number = rng.choice([1, 2, 8])
    side = max(1, size // np.dtype(kind).itemsize // number)
    content = npy_header(repr(kind), "False", f"({side},)") + bytes(side * np.dtype(kind).itemsize)
    return _alone(archive_of([deflated(f"{index}.npy", content) for index in range(number)]), ".npz")


def network(arrays: Arrays, rng: random.Random) -> Forgery:
    """A larger network to the last array, of numbers that compress little or of zeros, in any precision."""
    if "cls_token" in arrays:
        return torch_network(rng)
    head = rng.choice([8, 32, 64])
    kind = rng.choice(["float32", "float16", "float64", ">f4", "float16"])
    larger = make_checkpoint(depth=6, heads=8, head_size=head, mlp=32 * head, labels=1000, dtype=kind, patch=(16, 16))
    if rng.random() < 0.5:
        larger = {key: np.zeros_like(array) for key, array in larger.items()}
    file = io.BytesIO()
    (np.savez_compressed if rng.random() < 0.6 else np.savez)(file, **larger)
    return Forgery({"heavy.npz": file.getvalue()}, "heavy.npz", larger)


def torch_network(rng: random.Random) -> Forgery:
    """The same in PyTorch's formats."""
    width, kind = rng.choice([64, 256, 512]), rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    model = of_timm(embed_dim=width, num_heads=width // 64, depth=6)
    state = {name: value.to(kind) for name, value in model.state_dict().items()}
    file, suffix = io.BytesIO(), rng.choice([".safetensors", ".pth"])
    file.write(save(state)) if suffix == ".safetensors" else torch.save(state, file)
    held = {name: value.float().numpy() for name, value in state.items()}
    return Forgery({f"heavy{suffix}": file.getvalue()}, f"heavy{suffix}", held)


def nested_bomb(arrays: Arrays, rng: random.Random) -> Forgery:
    inner = archive_of([deflated("0.npy", bytes(rng.choice([1, 16, 100]) * MIB))])
    for _ in range(rng.randrange(1, 5)):
        inner = archive_of([deflated(f"{index}.npy", inner) for index in range(rng.randrange(1, 9))])
    return _alone(inner, ".npz")


def huge_claim(arrays: Arrays, rng: random.Random) -> Forgery:
    """A shape of gigabytes over some bytes, in each format."""
    side = rng.choice([2**28, 2**31, 2**33, 2**40, 2**60])
    kind = rng.randrange(3)
    if kind == 0:
        pack = rng.choice([stored, deflated])
        return _alone(archive_of([pack("a.npy", npy_header("'<f4'", "False", f"({side},)") + bytes(64))]), ".npz")
    if kind == 1:
        ends = rng.choice([[0, 4 * side], [0, 64], [4 * side, 4 * side + 64]])
        header = {"a": {"dtype": "F32", "shape": [side], "data_offsets": ends}}
        return _alone(safetensors_of(header, bytes(64)), ".safetensors")
    tensors = tensors_of({"a": np.ones(16, np.float32)})
    one = tensors["a"]
    one.numel, one.size, one.stride = rng.choice([16, side]), rng.choice([(side,), (16,)]), rng.choice([(0,), (1,)])
    return _alone(torch_file(tensors), ".pth")


def shared(arrays: Arrays, rng: random.Random) -> Forgery:
    """Tensors by the hundred in the bytes of one."""
    base = torch.ones(rng.choice([1, 2, 4]) * MIB // 4, rng.choice([1, 4]))
    file = io.BytesIO()
    torch.save({f"blocks.{i}.mlp.fc1.weight": base for i in range(rng.choice([2, 10, 100, 900]))}, file)
    return _alone(file.getvalue(), ".pth")


def pickle_of_countless(arrays: Arrays, rng: random.Random) -> Forgery:
    """One opcode a million times, or arguments that ask for memory."""
    count = rng.choice([2**16, 2**20, 2**22])
    word = rng.choice([
        b"]", b"}", b")", b"\x8f", b"N", b"K\1", b"K\1\x85", b"X\0\0\0\0", b"(", b"h\0", b"G" + bytes(8), b"]q\0",
        b"(t", b"h\0h\0\x86", b"ccollections\nOrderedDict\n)R", b"ctorch\nSize\n)R", b"cbuiltins\nset\n)R",
        b"ccollections\nCounter\n)R",
    ])  # fmt: skip
    asked = rng.choice([2**26, 2**30, 2**33, 2**40])
    calls = [
        pickled(Name(f"torch {kind}")) + pickled((asked,)) + b"R"
        for kind in ("Tensor", "FloatTensor", "FloatStorage", "ByteTensor")
    ] + [
        pickled(Name("builtins bytearray")) + pickled((asked,)) + b"R",
        pickled(Name("_codecs encode")) + pickled(("x" * MIB, "utf-32")) + b"R",
    ]
    copied = b"]q\1(" + b"N" * min(count, 10**5) + b"ec"
    copied += rng.choice([b"builtins\nset", b"torch\nSize", b"collections\nOrderedDict", b"collections\nCounter"])
    copies = copied + b"\nq\2" + b"h\2h\1\x85R" * rng.choice([9, 999, 20_000])
    body = rng.choice([word * count, rng.choice(calls) * rng.choice([1, 1, 20]), copies])
    base = b"\x80\2]q\0(" + rng.choice([body + b"e.", pickled(Raw(body)) + b"l."])
    return _alone(torch_file(tensors_of({"a": np.ones(4, np.float32)}), opcodes=base), ".pth")


def json_of_countless(arrays: Arrays, rng: random.Random) -> Forgery:
    count = rng.choice([2**14, 2**18, 2**20, 2**22])
    text = rng.choice([
        lambda: b'{"a":[' + b"[]," * count + b"1]}", lambda: b'{"a":[' + b"{}," * count + b"1]}",
        lambda: b'{"a":[' + b"1.5," * count + b"1]}", lambda: json.dumps({str(i): i for i in range(count)}).encode(),
        lambda: b'{"a": "' + "\U0001d538".encode() * count + b'"}', lambda: b'{"a":' * 900 + b"1" + b"}" * 900,
        lambda: json.dumps({"weight_map": {str(i): "x.safetensors" for i in range(count // 8)}}).encode(),
        lambda: json.dumps({"model_type": "vit", "id2label": {str(i): str(i) for i in range(count // 8)}}).encode(),
        lambda: b" " * count * 9,
    ])()  # fmt: skip
    name = rng.choice(["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
    files = {f"saved/{one}": b'{"model_type": "vit"}' for one in ("config.json", "preprocessor_config.json")}
    files["saved/pytorch_model.bin"] = torch_file(tensors_of({"a": np.ones(4, np.float32)}))
    if name.startswith("model"):
        del files["saved/pytorch_model.bin"]
    return Forgery(files | {f"saved/{name}": text}, "saved")


def header_of_countless(arrays: Arrays, rng: random.Random) -> Forgery:
    """A .safetensors header of many empty arrays, or an archive of many members."""
    count = rng.choice([2**12, 2**16, 2**18, 2**20])
    kind = rng.randrange(4)
    if kind == 0:
        entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        text = "{" + ",".join(entry.format(i) for i in range(count)) + "}"
        return _alone(safetensors_of(text.encode(), b""), ".safetensors")
    if kind == 1:
        entry: Any = {"dtype": "F32", "shape": [0] * count, "data_offsets": [0, 0]}
        return _alone(safetensors_of({"a": entry, "__metadata__": {"a": "x" * count}}, b""), ".safetensors")
    if kind == 2:
        return _alone(struct.pack("<Q", 90 * MIB) + b"{" + b" " * (90 * MIB - 1), ".safetensors")
    few = min(count, 20_000)
    content, pack = npy_header("'<f4'", "False", "(0,)"), rng.choice([stored, deflated])
    return _alone(archive_of([pack(f"{i}.npy", content) for i in range(few)]), rng.choice([".npz", ".pth"]))


HEAVY: tuple[Callable[[Arrays, random.Random], Forgery], ...] = (
    bomb, network, network, network, nested_bomb, huge_claim, shared, pickle_of_countless, json_of_countless,
    header_of_countless,
)  # fmt: skip


def forge_heavy(arrays: Arrays, rng: random.Random) -> Forgery:
    return rng.choice(HEAVY)(arrays, rng)
