"""Damage that may happen to any file: changed bytes, and arrays that are gone, renamed, reshaped or of another type."""

import random
from collections.abc import Mapping

import numpy as np

from campaigns.forgeries.forgery import Arrays

WAYS = ("flip", "flip", "flip", "truncate", "insert", "delete", "copy", "append", "zeros")
EDITS = ("drop", "rename", "add", "mistype", "dtype", "shape", "less", "more", "value", "order")


def damage_bytes(data: bytes, checked: int, rng: random.Random) -> bytes:
    """The file with up to three places changed; `checked`: of how many of its first bytes a change must be noticed."""
    way = rng.choice(WAYS)
    size = checked if way in ("flip", "copy", "zeros") else len(data)  # the other ways change the file's length
    if way == "truncate":
        return data[: _place(size, rng)]
    edited = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        place, value = _place(size, rng) % len(edited), rng.randrange(256)
        if way == "flip":
            edited[place] ^= value or 1
        elif way == "insert":
            edited[place:place] = bytes([value])
        elif way == "delete":
            del edited[place : place + 1 + value % 64]
        elif way == "append":
            edited += bytes([value]) * (value + 1)
        else:
            length = min(value, size - place)
            edited[place : place + length] = edited[:length] if way == "copy" else bytes(length)
    return bytes(edited)


def _place(size: int, rng: random.Random) -> int:
    """The directory of an archive stands at its end, a header at its start: both get more of the attention."""
    return rng.choice([rng.randrange(size), rng.randrange(size * 3 // 4, size), rng.randrange(size // 8 + 1)])


def edit_arrays(
    arrays: Arrays, dtypes: tuple[str, ...], silent: Mapping[str, tuple[str, ...]], rng: random.Random
) -> Arrays:
    """One array of a sound checkpoint edited, or its name.

    Args:
        dtypes: that the format can hold: those of weights that lose no digit, and others.
        silent: key -> kinds of edit that nothing else in the file contradicts.
    """
    arrays, key = dict(arrays), rng.choice(sorted(arrays))
    array, text = arrays[key], "".join(rng.choices("abcsteprng/_0123456789.*\\:", k=rng.randrange(1, 13)))
    kind = rng.choice([kind for kind in EDITS if kind not in silent.get(key, ())])
    if kind == "drop":
        del arrays[key]
    elif kind == "rename":
        arrays[text] = arrays.pop(key)
    elif kind == "add":
        arrays[text] = arrays.get(text, array)
    elif kind == "mistype":
        place = rng.randrange(len(key) + 1)
        arrays[key[:place] + text[0] + key[place + 1 :]] = arrays.pop(key)
    elif kind == "dtype":
        arrays[key] = array.astype(rng.choice(dtypes))
    elif kind == "shape":
        forms = [array.T, array[None], array.ravel(), array[..., None]]
        arrays[key] = rng.choice([form for form in forms if form.shape != array.shape])  # a square's turn shows nowhere
    elif kind in ("less", "more") and array.ndim:
        arrays[key] = array[:-1] if kind == "less" else np.concatenate([array, array])
    elif kind == "value":
        arrays[key] = array.copy()
        arrays[key].flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    elif kind == "order":
        names = list(arrays)
        rng.shuffle(names)
        arrays = {name: arrays[name] for name in names}
    return arrays
