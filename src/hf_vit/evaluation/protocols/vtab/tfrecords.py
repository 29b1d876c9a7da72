"""TFRecord files of tf.train.Example, without TensorFlow: as much of both formats as pictures with a class need.

A record is its length (8 bytes, little-endian), a checksum (4), the content, a checksum (4); checksums are passed over.
An Example is a protobuf message: {features = 1: {feature = 1, a map: {key = 1, value = 2: {bytes_list = 1 or
int64_list = 3: {value = 1}}}}}.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import final

from PIL import Image

from hf_vit.data.images import decode_image
from hf_vit.errors import UserError

_BYTES_LIST, _INT64_LIST = 1, 3


@final
class RecordedImages:
    """Pictures ("image", an encoded file) and classes ("label") of all files NAME.tfrecord* of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        files = sorted(folder.glob(f"{name}.tfrecord*"))
        if not files:
            raise ValueError(f"there is no {name}.tfrecord")
        self.places = [(file, start, size) for file in files for start, size in record_places(file)]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int, /) -> tuple[Image.Image, int]:
        path, start, size = self.places[row]
        try:
            with path.open("rb") as file:
                file.seek(start)
                values = example(file.read(size))
            image, label = values["image"], values["label"]
            if not isinstance(image, bytes) or not isinstance(label, int):
                raise ValueError("image or label is of another type")
            picture = decode_image(io.BytesIO(image))
        except (OSError, ValueError, LookupError) as error:
            raise UserError(f"record {row:,} of {path} is no picture with a class ({error}); copy it again") from error
        return picture, label


def record_places(path: Path) -> Iterator[tuple[int, int]]:
    """(offset, size) in bytes of the content of every record.

    Raises:
        ValueError: the file ends within a record.
    """
    end, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while place < end:
            file.seek(place)
            size = int.from_bytes(file.read(8), "little")
            if place + 16 + size > end:
                raise ValueError(f"{path.name} ends within a record")
            yield place + 12, size
            place += 16 + size


def example(message: bytes) -> dict[str, bytes | int]:
    """The first value of every feature of an Example, by name.

    Raises:
        ValueError: the bytes are no such message.
    """
    values: dict[str, bytes | int] = {}
    for _, features in _parts(message):
        for _, entry in _parts(features):
            named = dict(_fields(entry))
            name, feature = named.get(1), named.get(2)
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name or no value")
            for kind, stored in _parts(feature):
                first = next(iter(_fields(stored)), (0, b""))[1]
                if kind == _INT64_LIST and isinstance(first, bytes):  # packed
                    first = _varint(first, 0)[0]
                if kind in (_BYTES_LIST, _INT64_LIST):
                    values[name.decode()] = first
    return values


def _parts(message: bytes) -> Iterator[tuple[int, bytes]]:
    for number, value in _fields(message):
        if not isinstance(value, bytes):
            raise ValueError("a number stands where a message is needed")
        yield number, value


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number of the field, value) of a protobuf message of integers and of what has a length."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value, place = _varint(message, place)
        if key & 7 == 2:
            if place + value > len(message):
                raise ValueError("a message ends within a field")
            yield key >> 3, message[place : place + value]
            place += value
        elif key & 7 == 0:
            yield key >> 3, value
        else:
            raise ValueError(f"a field of wire type {key & 7}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """(number, where the next field begins): seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        if place >= len(message):
            raise ValueError("a message ends within a number")
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
