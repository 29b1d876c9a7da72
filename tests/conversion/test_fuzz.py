"""Whatever is done to a good file: the same model, or a refusal. Nothing else, and nothing half written."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from originals.cases import CASES, FORMATS, Arrays, Case, Format

from hf_vit.conversion.origins.registry import ORIGINS
from hf_vit.errors import UserError


def test_every_origin_is_a_case():
    assert {name.split()[0] for name in CASES} == {origin.name for origin in ORIGINS}


@dataclass(frozen=True)
class Bench:
    """A case with its files in every format, the model that they all become, and a place to work."""

    case: Case
    arrays: Arrays
    files: Mapping[str, bytes]
    model: Mapping[str, bytes]
    folder: Path


def attempt(case: Case, form: Format, data: bytes, folder: Path) -> Mapping[str, bytes] | str:
    """What a file becomes, or the refusal; `folder` is empty before and after."""
    with TemporaryDirectory(dir=folder) as name:
        source = Path(name) / f"source{form.suffix}"
        source.write_bytes(data)
        try:
            return case.run(source, Path(name), **case.options)
        except UserError as error:
            assert {path.name for path in Path(name).iterdir()} <= {source.name, "saved"}
            return str(error)


def set_up(case: Case, checkpoint: Callable[..., Arrays], folder: Path) -> Bench:
    arrays = case.make(checkpoint)
    files = {name: FORMATS[name].dump(arrays) for name in case.formats}
    models = [attempt(case, FORMATS[name], data, folder) for name, data in files.items()]
    assert not isinstance(models[0], str), models[0]
    assert all(model == models[0] for model in models)
    return Bench(case, arrays, files, models[0], folder)


@pytest.fixture(scope="module", params=CASES)
def bench(request, checkpoint, tmp_path_factory):
    return set_up(CASES[request.param], checkpoint, tmp_path_factory.mktemp("fuzz"))


def same_model_or_refusal(bench: Bench, form: Format, data: bytes) -> str:
    found = attempt(bench.case, form, data, bench.folder)
    if not isinstance(found, str):
        assert found == bench.model
        return "same model"
    assert "\n" not in found
    assert len(found) < 3000
    return "refused"


@st.composite
def damaged(draw, size: int, checked: int):
    """A function that damages the bytes of a file."""
    kind = draw(st.sampled_from(["flip", "flip", "flip", "truncate", "insert", "delete", "copy", "append"]))
    size = checked if kind in ("flip", "copy") else size  # the other kinds change the file's length
    # The directory of an archive stands at its end, a header at its start: both get more of the attention.
    anywhere = st.one_of(st.integers(0, size - 1), st.integers(size * 3 // 4, size - 1), st.integers(0, size // 8))
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
                length = min(value, size - place)
                edited[place : place + length] = edited[:length]
            else:
                edited += bytes([value]) * (value + 1)
        return bytes(edited)

    return edit


KINDS = ("drop", "rename", "add", "mistype", "dtype", "shape", "less", "more", "value", "order")


@st.composite
def edited(draw, case: Case, keys: list[str], dtypes: tuple[str, ...]):
    """A function that edits one array of a checkpoint, or its name; the file itself is sound."""
    key = draw(st.sampled_from(keys))
    kind = draw(st.sampled_from([kind for kind in KINDS if kind not in case.silent.get(key, ())]))
    text = draw(st.text(st.sampled_from("abcsteprng/_0123456789.*\\:"), min_size=1, max_size=12))
    place = draw(st.integers(0, len(key)))
    choice = draw(st.integers(0, 9))
    note(f"{kind} {key!r} {text!r} at {place}, choice {choice}")

    def edit(arrays: Arrays) -> Arrays:
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
            arrays[key] = array.astype(dtypes[choice % len(dtypes)])
        elif kind == "shape":
            forms = [array.T, array[None], array.ravel(), array[..., None]]
            forms = [form for form in forms if form.shape != array.shape]  # that a square was turned shows nowhere
            arrays[key] = forms[choice % len(forms)]
        elif kind in ("less", "more") and array.ndim:
            arrays[key] = array[:-1] if kind == "less" else np.concatenate([array, array])
        elif kind == "value":
            arrays[key] = array.copy()
            arrays[key].flat[choice % array.size] = (np.nan, np.inf, -np.inf)[choice % 3]
        elif kind == "order":
            names = list(arrays)
            random.Random(choice).shuffle(names)
            arrays = {name: arrays[name] for name in names}
        return arrays

    return edit


def check_bytes(bench: Bench, data) -> str:
    name = data.draw(st.sampled_from(bench.case.formats))
    form, good = FORMATS[name], bench.files[name]
    edit = data.draw(damaged(len(good), form.checked(good)))
    return same_model_or_refusal(bench, form, edit(good))


def check_keys(bench: Bench, data) -> str:
    form = FORMATS[data.draw(st.sampled_from(bench.case.formats))]
    edit = data.draw(edited(bench.case, sorted(bench.arrays), form.dtypes))
    return same_model_or_refusal(bench, form, form.dump(edit(bench.arrays)))


CHECKS = {"damaged bytes": check_bytes, "edited keys": check_keys}
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example]
FAST = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=QUIET)
LONG = settings(max_examples=120, deadline=None, suppress_health_check=QUIET, phases=(Phase.explicit, Phase.generate))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@given(data=st.data())
@FAST
def test_damaged_files(bench, check, data):
    check(bench, data)


def count(bench: Bench, check: Callable[[Bench, Any], str]) -> Counter[str]:
    """What many examples gave."""
    counted: Counter[str] = Counter()

    @given(data=st.data())
    @LONG
    def run(data):
        counted[check(bench, data)] += 1

    run()
    return counted


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_cases(checkpoint, tmp_path):
    """At least 2,000 cases; prints how many gave the same model and how many were refused (pytest -s)."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for name, case in CASES.items():
        (tmp_path / name).mkdir()
        bench = set_up(case, checkpoint, tmp_path / name)
        for what, check in CHECKS.items():
            counts[name, what] = count(bench, check)
            print(f"{name}, {what}: {dict(counts[name, what])}")
    assert sum(counted.total() for counted in counts.values()) >= 2000
    assert all(counted["refused"] for counted in counts.values())
    assert sum(counted["same model"] for counted in counts.values()) >= 100
