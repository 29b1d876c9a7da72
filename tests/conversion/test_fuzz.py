"""Whatever is done to a good file: the same digits, or a refusal. Nothing else, and nothing half written."""

import io
import itertools
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import hf_vit.conversion as conversion
from hf_vit.errors import UserError

# All sizes differ, so that no other order of axes fits by accident: D 6, A 2, K 3, M 5, R 7, L 4, 1 + 2x2 positions.
SIZES = {
    "depth": 2,
    "heads": 2,
    "head_size": 3,
    "mlp": 5,
    "patch": (4, 2),
    "grid": (2, 2),
    "representation": 7,
    "labels": 4,
}
counts: Counter[str] = Counter()


@pytest.fixture(scope="module")
def bench(checkpoint, tmp_path_factory):
    """A good file in both compressions, the model it converts to, and a place to work."""
    arrays = checkpoint(**SIZES)
    files = {stored: pack(arrays, stored) for stored in (True, False)}
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "good.npz").write_bytes(files[True])
    conversion.convert(folder / "good.npz", folder / "good")
    digits = (folder / "good" / "model.safetensors").read_bytes()
    (folder / "good.npz").write_bytes(files[False])
    conversion.convert(folder / "good.npz", folder / "good2")
    assert (folder / "good2" / "model.safetensors").read_bytes() == digits
    for name in ("good", "good2"):
        shutil.rmtree(folder / name)
    (folder / "good.npz").unlink()
    return arrays, files, digits, folder


def pack(arrays, stored: bool) -> bytes:
    file = io.BytesIO()
    (np.savez if stored else np.savez_compressed)(file, **arrays)
    return file.getvalue()


number = itertools.count()


def same_digits_or_refusal(data: bytes, digits: bytes, folder: Path) -> None:
    source, output = folder / f"{next(number)}.npz", folder / "model"
    source.write_bytes(data)
    refusal = None
    try:
        conversion.convert(source, output)
    except UserError as error:
        refusal = str(error)
    source.unlink()
    if refusal is None:
        found = (output / "model.safetensors").read_bytes()
        shutil.rmtree(output)
        assert found == digits
    else:
        assert "\n" not in refusal
        assert len(refusal) < 3000
    counts["same digits" if refusal is None else "refused"] += 1
    assert not list(folder.iterdir())


@st.composite
def damaged(draw, size: int):
    """A function that damages the bytes of a file."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "truncate", "insert", "delete", "copy", "append"]))
    # The directory at the end decides what everything else means: it gets half of the attention.
    anywhere = st.one_of(st.integers(0, size - 1), st.integers(size * 3 // 4, size - 1))
    if kind == "truncate":
        end = draw(anywhere)
        return lambda data: data[:end]
    places = draw(st.lists(anywhere, min_size=1, max_size=3))
    values = draw(st.binary(min_size=len(places), max_size=len(places)))
    note(f"{kind} at {places} of {size}: {values.hex()}")

    def edit(data: bytes) -> bytes:
        edited = bytearray(data)
        for place, value in zip(places, values, strict=True):
            place %= len(edited)
            if kind == "flip":
                edited[place] ^= value or 1
            elif kind == "insert":
                edited[place:place] = bytes([value])
            elif kind == "delete":
                del edited[place : place + 1 + value % 64]
            elif kind == "copy":
                edited[place : place + value] = edited[:value]
            else:
                edited += bytes([value]) * (value + 1)
        return bytes(edited)

    return edit


@st.composite
def edited(draw, keys: list[str]):
    """A function that edits one array of a checkpoint, or its name; the archive itself is sound."""
    key = draw(st.sampled_from(keys))
    kind = draw(st.sampled_from(["drop", "rename", "add", "mistype", "dtype", "shape", "value", "order"]))
    text = draw(st.text(st.sampled_from("abcsteprng/_0123456789.*\\:"), min_size=1, max_size=12))
    place = draw(st.integers(0, len(key)))
    choice = draw(st.integers(0, 9))
    note(f"{kind} {key!r} {text!r} at {place}, choice {choice}")

    def edit(arrays):
        arrays = dict(arrays)
        array = arrays[key]
        if kind == "drop":
            del arrays[key]
        elif kind == "rename":
            arrays[text] = arrays.pop(key)
        elif kind == "add":
            arrays[text] = arrays.get(text, array)
        elif kind == "mistype":
            name = key[:place] + text[0] + key[place + 1 :]
            arrays[name] = arrays.pop(key)
        elif kind == "dtype":
            arrays[key] = array.astype(["f8", ">f4", ">f8", "i4", "c8", "?", "i8", "U8", "S4", "u1"][choice])
        elif kind == "shape":
            forms = [array.T, array[None], array.ravel(), array[..., None]]
            if key != "embedding/kernel":  # no other array confirms the height of a patch
                forms += [array[:-1], np.concatenate([array, array])]
            arrays[key] = forms[choice % len(forms)]
        elif kind == "value":
            arrays[key] = array.copy()
            arrays[key].flat[choice % array.size] = (np.nan, np.inf, -np.inf)[choice % 3]
        else:
            names = list(arrays)
            random.Random(choice).shuffle(names)
            arrays = {name: arrays[name] for name in names}
        return arrays

    return edit


def check_bytes(bench, data, stored: bool) -> None:
    _, files, digits, folder = bench
    edit = data.draw(damaged(len(files[stored])))
    same_digits_or_refusal(edit(files[stored]), digits, folder)


def check_keys(bench, data, stored: bool) -> None:
    arrays, _, digits, folder = bench
    edit = data.draw(edited(sorted(arrays)))
    same_digits_or_refusal(pack(edit(arrays), stored), digits, folder)


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example]
FAST = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=QUIET)
LONG = settings(max_examples=1500, deadline=None, suppress_health_check=QUIET, phases=(Phase.explicit, Phase.generate))


@given(data=st.data(), stored=st.booleans())
@FAST
def test_damaged_bytes(bench, data, stored):
    check_bytes(bench, data, stored)


@given(data=st.data(), stored=st.booleans())
@FAST
def test_edited_keys(bench, data, stored):
    check_keys(bench, data, stored)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_cases(bench):
    """At least 2,000 cases; prints how many gave the same digits and how many were refused (pytest -s)."""
    counts.clear()

    @given(data=st.data(), stored=st.booleans())
    @LONG
    def bytes_run(data, stored):
        check_bytes(bench, data, stored)

    @given(data=st.data(), stored=st.booleans())
    @LONG
    def keys_run(data, stored):
        check_keys(bench, data, stored)

    bytes_run()
    keys_run()
    print(dict(counts))
    assert counts.total() >= 2000
    assert min(counts["refused"], counts["same digits"]) > 100
