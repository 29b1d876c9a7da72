"""What lies beside weights, and what things are called: JSON of every type in every place, indexes, shards, names."""

import functools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from campaigns.forgeries.archives import NAMES
from campaigns.forgeries.forgery import Arrays, Forgery

Dump = Callable[[Arrays], bytes]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"),
    -float("inf"), "", "x", "gelu", "4", "None", "\n", "\x1b[2J\u202e", "\ud800", "x" * 10_000, [], [1], [4, 4],
    [0.5] * 3, ["a", "b"], [None], [[]], [{}], [0] * 3000, _nested(300), {}, {"a": 1}, {"0": "a"}, {"": None},
    {"height": 12, "width": 12}, {"a\n": {"b": [1e400]}},
)  # fmt: skip
TEXTS = (
    b"", b" ", b"{", b"}", b"null", b"[]", b"5", b'"x"', b"true", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{}{}",
    b"[" * 100_000, b"NaN", b'{"a":' * 50_000, b'{"a": 1' + b"0" * 5000 + b"}", b"{'a': 1}", b"{a: 1}", b"// c\n{}",
    b'{"a": 1,}', b'{"\\ud800": 1}', b"\0" * 99, b'{"a": "' + b"\\" * 99, '{"a": 1}'.encode("utf-16"),
    '{"a": 1}'.encode("utf-32"), b"PK\3\4", b"\x80\4N.", b"{" + b" " * 10**5 + b"}",
)  # fmt: skip
# What the system or a library may take for something else than a file of weights.
PLACES = (
    "", ".", "..", "/", "../outside.safetensors", "/etc/passwd", "/dev/zero", "/dev/stdin", "a/b.safetensors",
    "model/../x", "~/x", "x" * 250, "é" * 120, "x\n", "x\0", "\x1b[2J", "\u202e", "\ud800", "con", "nul", "x:y", "x ",
    ".x", "-x", "http://localhost/x", "file:///etc/passwd", "config.json", "model.safetensors.index.json",
    "model.safetensors", "model-00001-of-00002.safetensors\0", "*", "%s", "$HOME", "x.",
)  # fmt: skip
LIES = ("value", "value", "text", "name", "name", "moved", "missing", "extra", "twice", "link", "honest", "spoilt")
BESIDE = ("generation_config.json", "tokenizer.json", "facts.json", "modeling_x.py", "x.pkl", "x.safetensors")


def places(value: Any, *above: Any) -> list[tuple[Any, ...]]:
    """Where there is a value inside this one."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inside for place in [(*above, key), *places(one, *above, key)]]


def value_at(values: Any, place: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda inner, key: inner[key], place, values)


def with_value(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place."""
    copy = json.loads(json.dumps(values))
    value_at(copy, place[:-1])[place[-1]] = value
    return copy


def forge_json(files: Mapping[str, bytes], name: str, rng: random.Random) -> Forgery:
    """One value of the file `name` in a saved folder is another, a key is gone or there twice, or the whole text is."""
    content, folder = json.loads(files[name]), name.partition("/")[0]
    kind, value = rng.random(), rng.choice(VALUES)
    place = rng.choice([place for place in places(content) if place[-1] != "crop_pct"])  # which decides about "size"
    if kind < 0.05:
        return Forgery({**files, name: rng.choice(TEXTS)}, folder)
    if kind < 0.1:
        key = rng.choice([*NAMES, *PLACES])
        return Forgery({**files, name: json.dumps(content | {key: value}).encode()}, folder)
    if kind < 0.15:
        twice = json.dumps(content)[:-1] + f", {json.dumps(place[0])}: {json.dumps(value)}}}"
        return Forgery({**files, name: twice.encode()}, folder, declared=(place[0], value))
    former = value_at(content, place)
    if isinstance(former, dict) and isinstance(value, dict):
        value = former | value
    forged = json.dumps(with_value(content, place, value)).encode()
    return Forgery({**files, name: forged}, folder, declared=(place[0] if len(place) < 3 else place[-1], value))


def split(arrays: Arrays, parts: int, ending: str) -> dict[str, Arrays]:
    """File -> the arrays in it, as libraries name shards."""
    names, keys = [f"model-{i + 1:05}-of-{parts:05}.{ending}" for i in range(parts)], list(arrays)
    return {name: {key: arrays[key] for key in keys[i::parts]} for i, name in enumerate(names)}


def forge_shards(files: Mapping[str, bytes], arrays: Arrays, dump: Dump, suffix: str, rng: random.Random) -> Forgery:
    """A folder in several files one of which lies, or whose index does."""
    shards = split(arrays, rng.choice([1, 2, 3]), suffix.removeprefix("."))
    index = "model.safetensors.index.json" if suffix == ".safetensors" else "pytorch_model.bin.index.json"
    weight_map = {key: name for name, part in shards.items() for key in part}
    content: Any = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    beside: dict[str, bytes | str] = {name: data for name, data in files.items() if name.endswith(".json")}
    kind = rng.choice(LIES)
    key, shard = rng.choice(sorted(arrays)), rng.choice(sorted(shards))
    never, declared = False, b""
    if kind == "value":
        content = with_value(content, rng.choice(places(content)), rng.choice(VALUES))
    elif kind == "name":
        place = rng.choice([*PLACES, *NAMES])
        content["weight_map"] = {one: place if name == shard else name for one, name in weight_map.items()}
        if rng.random() < 0.3:
            weight_map[rng.choice([*NAMES, *PLACES])] = shard
            content["weight_map"] = weight_map
        beside["outside.safetensors"] = dump(shards[shard])  # good, and not to be read
        never = True
    elif kind == "moved":
        weight_map[key] = rng.choice(sorted(shards))
    elif kind == "missing":
        del weight_map[key]
    elif kind == "extra":
        shards[shard] = shards[shard] | {rng.choice(["extra", key + ".x"]): arrays[key]}
    elif kind == "twice":
        shards = {name: part | ({key: arrays[key]} if name == shard else {}) for name, part in shards.items()}
        declared = f", {json.dumps(key)}: {json.dumps(shard)}}}".encode() if rng.random() < 0.5 else b""
    data: dict[str, bytes | str] = {f"saved/{name}": dump(part) for name, part in shards.items()}
    if kind == "link":
        data[f"saved/{shard}"] = rng.choice(
            ["/dev/zero", "/dev/null", ".", shard, "/etc/passwd", "gone", "config.json"]
        )
        never = True
    elif kind == "spoilt":
        data[f"saved/{shard}"] = rng.choice([b"", bytes(99), data[f"saved/{shard}"][:-9], json.dumps(content).encode()])
        never = True
    text = json.dumps(content).encode()
    if kind == "text":
        text = rng.choice(TEXTS)
    elif declared:
        text = text[:-2] + declared + b"}"
    return Forgery({**beside, **data, f"saved/{index}": text}, "saved", never=never)


def forge_places(files: Mapping[str, bytes], source: str, rng: random.Random) -> Forgery:
    """The good file under another name, into a folder of another name, or behind a link."""
    name = _possible(rng.choice([*PLACES, *NAMES]))
    kind = rng.choice(["source", "source", "output", "link", "beside"])
    if kind == "source" and name:
        return Forgery({name + one.removeprefix(source): data for one, data in files.items()}, name)
    if kind == "output" and name:
        return Forgery(files, source, output=name)
    if kind == "link":
        return Forgery({**files, "link": rng.choice([source, f"./{source}"])}, "link")
    if "/" not in next(iter(files)):
        return Forgery(files, source)
    return Forgery({**files, f"{source}/{rng.choice(BESIDE)}": rng.choice(TEXTS)}, source)


def _possible(name: str) -> str:
    """A name that a file can have, at one level below another."""
    name = name.replace("/", "_").replace("\0", "")
    while len(name.encode("utf-8", "surrogateescape" if name.isascii() else "surrogatepass")) > 240:
        name = name[: len(name) // 2]
    return "" if name in (".", "..") else name.replace("\ud800", "\udc80")
