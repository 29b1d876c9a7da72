"""Tables of built-in images, which lie uncompressed in memory; and the numbers in a built-in set's name."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_vit.data.checks import Seen
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

# The splits of what is made by a formula, as it draws them.
SPLIT_NUMBERS = {"train": 1, "validation": 2, "test": 3}
# What a table in memory may hold; Arrow's offsets end at twice that.
LARGEST_TABLE = 1 << 30


@dataclass(frozen=True)
class Builtin:
    """Splits of a built-in data set and what is known of every image; hashes are of the original pixels."""

    splits: "dict[str, Dataset]"
    label_names: list[str]
    seen: dict[str, list[Seen]]


def make_table(encoded: Sequence[bytes], seen: Sequence[Seen], labels: Sequence[int], names: list[str]) -> "Dataset":
    """A table with the columns "image" and "label" of encoded images."""
    import pyarrow as pa
    from datasets import ClassLabel, Dataset, DatasetInfo, Features
    from datasets import Image as ImageFeature
    from datasets.table import InMemoryTable

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=names)})
    stored = [pa.array(encoded, pa.binary()), pa.array([image.name for image in seen], pa.string())]
    columns = [pa.StructArray.from_arrays(stored, ["bytes", "path"]), pa.array(labels, pa.int64())]
    table = InMemoryTable(pa.table(columns, schema=features.arrow_schema))
    # Dataset.from_dict would encode, copy and hash every byte again: 20 s for the photos at 384 px instead of 2.
    identity = hashlib.sha256(repr(list(seen)).encode()).hexdigest()[:16]
    return Dataset(table, info=DatasetInfo(features=features), fingerprint=identity)


def netpbm(pixels: bytes, size: tuple[int, int], mode: str = "RGB") -> bytes:
    """An image file of (width, height) px."""
    # Uncompressed: at 224 px PNG costs 21 ms to write and 1.4 ms to read, this 0.07 and 0.06 ms.
    return (b"P5" if mode == "L" else b"P6") + b" %d %d 255\n" % size + pixels


def read_numbers(name: str, limits: Mapping[str, tuple[int, int]], example: str) -> dict[str, int]:
    """The numbers behind the colon of a name, "fractals:classes=10,seed=1", each of which may be left out.

    Args:
        name: as the user wrote it.
        limits: which numbers there are -> least and most.
        example: how it is written in full.

    Raises:
        UserError: it is written otherwise, or a number is out of range.
    """
    values: dict[str, int] = {}
    for part in filter(None, name.partition(":")[2].split(",")):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,12})\s*", part)
        if match is None or match[1] not in limits:
            raise UserError(f"'{name}': '{part}' is not understood; write {example}, or some of these")
        least, most = limits[match[1]]
        values[match[1]] = int(match[2])
        if not least <= values[match[1]] <= most:
            raise UserError(f"'{name}': {match[1]} is {match[2]}; choose {least} to {most}")
    return values
