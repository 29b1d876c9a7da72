"""Reading a source into `datasets` tables or streams, and finding the image and the label among their columns."""

import csv
import functools
import glob
import hashlib
import json
import logging
import math
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_vit.data.images import Seen, open_image, raise_bad, short_name, tell_dark
from hf_vit.data.labels import LabelMap, first_of, plain_label, plain_name, typed_labels
from hf_vit.data.sources import DataSource, Listing, find_file
from hf_vit.data.splits import SPLITS, part_of, split_name
from hf_vit.errors import UserError
from hf_vit.repositories.reading import reading
from hf_vit.repositories.stores import in_store, sizes

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

_IMAGE_NAMES = ("image", "img", "picture")
_PATH_NAMES = ("file_name", "image", "filename", "file", "path", "image_path", "filepath", "img", "picture")
_LABEL_NAMES = ("label", "labels", "cls", "class", "target", "fine_label", "cls.txt")
_NESTED = ("json", "jsn")
# A stream that is larger is not read again to tell where a bad image stands.
_SEARCHED_BYTES = 1 << 30
# Characters that a cell of a list may have; the csv module stops at 131,072.
_CELL = (1 << 31) - 1
# Red, green, blue and opacity.
_CHANNELS = 4
# Stands for the value of a column that a row of a list has more than once.
_TWICE = object()
# What a column of a class of its own may hold, as pandas and others write it.
_INDICATORS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


@dataclass(frozen=True)
class Columns:
    """Where a table keeps its images and labels.

    Attributes:
        image: column.
        label: column, or a path, as webdataset may keep it inside a json column.
        indicators: in its stead a column of 0 and 1 for every class.
    """

    image: str
    label: tuple[str, ...]
    indicators: tuple[str, ...] = ()

    @property
    def labelling(self) -> list[str]:
        """The columns that labels are made of."""
        return list(self.indicators) or [self.label[0]]

    def labels(self, batch: Mapping[str, Any]) -> list[Any]:
        """The raw labels of a batch of columns.

        Raises:
            UserError: an indicator is neither 0 nor 1.
        """
        if self.indicators:
            columns = typed_labels({name: plain_label(list(batch[name])) for name in self.indicators})
            for name, values in columns.items():
                if wrong := [value for value in values if str(value).lower() not in _INDICATORS]:
                    raise UserError(
                        f"the column {name} holds {wrong[0]!r}; needed, of several label columns: 1 where an image has "
                        "the class and 0 where not"
                    )
            rows = ((_INDICATORS[str(value).lower()] for value in row) for row in zip(*columns.values(), strict=True))
            return [[name for name, has in zip(columns, row, strict=True) if has] for row in rows]
        values: list[Any] = list(batch[self.label[0]])
        for key in self.label[1:]:
            values = [None if value is None else value.get(key) for value in values]
        return plain_label(values)


@dataclass(frozen=True)
class NamedColumns:
    """The columns that a user named, or None for what they are usually called; of several labels "cat,dog"."""

    image: str | None = None
    label: str | None = None

    @property
    def indicators(self) -> tuple[str, ...]:
        """The label columns, where there are several."""
        names = tuple(name.strip() for name in (self.label or "").split(","))
        return names if len(names) > 1 else ()

    def check(self, have: Iterable[str], name: str) -> None:
        """Make sure that they are there.

        Raises:
            UserError: one is not.
        """
        columns = list(have)
        labels = self.indicators or (self.label,)
        for option, given in (("--image-column", self.image), *(("--label-column", name) for name in labels)):
            if given is not None and given not in columns:
                raise UserError(f"'{name}' has no column '{given}' ({option}); it has {', '.join(map(str, columns))}")


@dataclass(frozen=True)
class Tables:
    """Splits as they were read: `columns.image` undecoded ({"bytes", "path"}), labels raw.

    `label_names` is None where the source does not name its classes, `revision` where it has no commit. `labels` are
    those of lists, which are no column of the tables.
    """

    splits: "dict[str, Dataset] | dict[str, IterableDataset]"
    columns: Columns
    label_names: list[str] | None
    notes: list[str] = field(default_factory=list[str])
    revision: str | None = None
    labels: dict[str, list[Any]] | None = None


def image_table(paths: "Iterable[str | Path]") -> "Dataset":
    """Return a table with the column "image", undecoded, whose rows name these files."""
    from datasets import Dataset, Features, Image

    stored = [{"bytes": None, "path": str(path)} for path in paths]
    return Dataset.from_dict({"image": stored}, features=Features({"image": Image(decode=False)}))


def read_folder(source: DataSource) -> Tables:
    """Tables of a folder of class folders; nothing is decoded or copied, the rows name the files."""
    from datasets import ClassLabel

    names = sorted({label for classes in source.folder.values() for label in classes})
    untrained = [label for label in names if "train" in source.folder and label not in source.folder["train"]]
    if untrained:
        split = next(split for split, classes in source.folder.items() if untrained[0] in classes)
        raise UserError(
            f"class '{untrained[0]}' of '{source.name}' is in {split} but not in train; add a folder of that name to "
            "train, or remove the other"
        )
    splits: dict[str, Dataset] = {}
    for split in (name for name in SPLITS if name in source.folder):
        rows = [(path, label) for label, paths in sorted(source.folder[split].items()) for path in sorted(paths)]
        numbers: Any = [names.index(label) for _, label in rows]
        table = image_table(path for path, _ in rows)
        splits[split] = table.add_column("label", numbers, feature=ClassLabel(names=names))  # pyright: ignore[reportArgumentType]
    return Tables(splits, Columns("image", ("label",)), names)


def read_files(source: DataSource, named: NamedColumns, *, streaming: bool) -> Tables:
    """Tables or streams of parquet or webdataset files."""
    tables = _tables(open_files(source, streaming=streaming), source, named, streaming)
    if source.kind == "parquet":
        _refuse_mixed_labels(source, tables.columns.labelling)
    return tables


def _refuse_mixed_labels(source: DataSource, columns: Sequence[str]) -> None:
    """Make sure that a label column is text in all parquet files or in none: `datasets` casts to one file's type.

    Raises:
        UserError: it is text in one and something else in another, so that "01" would become 1.
    """
    from pyarrow import parquet, types

    known: dict[str, dict[bool, tuple[str, Any]]] = {column: {} for column in columns}
    for name, path in source.named_files():
        with path.open("rb") as file:
            schema = parquet.read_schema(file)
        for column in known.keys() & schema.names:
            kind: Any = schema.field(column).type
            while hasattr(kind, "value_type"):  # of lists, and of categories
                kind = kind.value_type
            known[column].setdefault(types.is_string(kind) or types.is_large_string(kind), (name, kind))
    for column, kinds in known.items():
        if len(kinds) == 2:
            (text, _), (other, kind) = kinds[True], kinds[False]
            raise UserError(
                f"the label column '{column}' of '{source.name}' is text in {text}, {kind} in {other}; save the column "
                "with the same type in all files"
            )


def open_files(source: DataSource, *, streaming: bool) -> dict[str, Any]:
    """What `datasets` makes of parquet or webdataset files, with all columns."""
    from datasets import load_dataset

    # load_dataset takes patterns: a bracket in a file name must not become one.
    files = {split: [glob.escape(str(path.resolve())) for path in paths] for split, paths in source.files.items()}
    if source.kind == "parquet":
        _refuse_other_classes(source)
    try:
        loaded: Any = load_dataset(source.kind, data_files=files, streaming=streaming)
    except Exception as error:  # pyarrow, tarfile and datasets each raise their own
        cause = error.__cause__ or error
        raise UserError(f"'{source.name}' cannot be read as {source.kind}: {_one_line(cause)}") from error
    return dict(loaded)


def _refuse_other_classes(source: DataSource) -> None:
    """Make sure that files of one data set name the classes of a column alike: `datasets` reads all by the first's.

    Raises:
        UserError: two do not.
    """
    known: dict[str, tuple[str, list[str]]] = {}
    for name, path in source.named_files():
        for column, classes in _named_classes(path):
            first, others = known.setdefault(column, (name, classes))
            if classes != others:
                raise UserError(
                    f"'{source.name}' numbers the classes of the column '{column}' in {first} ({first_of(others)}) "
                    f"otherwise than in {name} ({first_of(classes)}); save all of its files with the same class names, "
                    "or with names in place of numbers"
                )


def _named_classes(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(column, names) of what a parquet file tells of its class numbers, which may lie inside another column."""
    from datasets import Features
    from pyarrow import parquet

    with path.open("rb") as file:
        told: Any = Features.from_arrow_schema(parquet.read_schema(file))
    waiting = [(str(column), feature) for column, feature in told.items()]
    while waiting:
        column, feature = waiting.pop()
        if isinstance(names := getattr(feature, "names", None), list):
            yield column, list(map(plain_name, names))
        inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
        waiting += [(column, each) for each in inner if each is not None]


def read_list(source: DataSource, named: NamedColumns) -> Tables:
    """Tables of CSV files or lines of JSON that name image files, from where they lie, and their labels.

    A column "split" deals the rows out; without one the list's own place does, or the folder of the image. Cells are
    text until all lists are read; then `typed_labels` types the labels.
    """
    paths: dict[str, list[Path]] = {}
    labels: dict[str, list[Any]] = {}
    folders: dict[Path, Listing] = {}
    for listed, place in ((split, place) for split, places in source.files.items() for place in places):
        folder, is_remote = place.parent, in_store(place)
        for path, label, told in _listed(place, source.name, named):
            part = _split_of(path, listed) if told is None else split_name(str(told))
            if part is None:
                raise UserError(f"{place.name}: split '{told}' is none; needed: train, validation or test")
            if is_remote and (path.startswith("/") or "://" in path or ".." in path.split("/")):
                raise UserError(f"{place.name} names {path[:80]!r}, which is not below it; correct it")
            paths.setdefault(part, []).append(find_file(folder / path, folders))
            labels.setdefault(part, []).append(label)
    source.folder.update({split: {"": paths[split]} for split in SPLITS if split in paths})
    splits = {split: image_table(paths[split]) for split in SPLITS if split in paths}
    typed = labels if named.indicators else typed_labels(labels)
    return Tables(splits, Columns("image", ("label",)), list(named.indicators) or None, labels=typed)


def _split_of(path: str, listed: str) -> str | None:
    """By the image's own folder, train/cat.png, or by the list's."""
    return next((name for name in map(split_name, Path(path).parts[:1]) if name), listed)


def _listed(place: Path, name: str, named: NamedColumns) -> Iterator[tuple[str, Any, Any]]:
    """(image's path, label, split or None) of every row of a list."""
    named = NamedColumns(*(plain_label(each) for each in (named.image, named.label)))
    kept = {named.image or "", named.label or "", *named.indicators, *_PATH_NAMES, *_LABEL_NAMES, "split"}
    have: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    limit = csv.field_size_limit(_CELL)
    try:
        for row in (_json_rows if place.suffix.lower() == ".jsonl" else _csv_rows)(place):
            if not row.keys() <= have.keys():
                have |= dict.fromkeys(row)
            rows.append({column: row[column] for column in kept & row.keys()})
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        remedy = "; save it in UTF-8" if isinstance(error, UnicodeError) else ""
        raise UserError(f"{place.name} of '{name}' cannot be read as a list: {_one_line(error)}{remedy}") from error
    finally:
        csv.field_size_limit(limit)
    if not rows:
        return
    image = named.image or next((column for column in _PATH_NAMES if column in have), None)
    label = named.label or next((column for column in _LABEL_NAMES if column in have), None)
    named.check(have, place.name)
    if image is None or label is None:
        what = "image files, such as file_name" if image is None else "classes, such as label"
        option = "--image-column" if image is None else "--label-column"
        raise UserError(
            f"{place.name} has the columns {', '.join(have)}; needed: one of {what}, or name it by {option}"
        )
    columns = Columns(image, (label,), named.indicators)
    for number, row in enumerate(rows, start=1):
        for column in (image, *columns.labelling, "split"):
            if row.get(column) is _TWICE:
                raise UserError(f"{place.name}, row {number}: '{column}' is there twice; remove or rename one")
        if not isinstance(row.get(image), str) or not row[image]:
            raise UserError(
                f"{place.name}, row {number}: {row.get(image)!r} in the column {image} is no file's name; correct it"
            )
    labels = columns.labels({column: [row.get(column) for row in rows] for column in columns.labelling})
    for row, value in zip(rows, labels, strict=True):
        yield row[image], value, plain_label(row.get("split"))


def _csv_rows(place: Path) -> Iterator[dict[str, Any]]:
    """Every row of a CSV file by its columns, as text.

    Raises:
        ValueError: there is no header, or a row has not as many cells.
    """
    with place.open(encoding="utf-8-sig", newline="") as file:
        first = next((line for line in file if line.strip()), "")
        delimiter = max("\t;,", key=first.count)
        cells = csv.reader(chain([first], file), delimiter=delimiter, skipinitialspace=True, strict=True)
        header = [plain_name(name) for name in next(cells)]
        if not header:
            raise ValueError("it is empty")
        twice = {name: _TWICE for name, count in Counter(header).items() if count > 1}
        for number, row in enumerate(filter(None, cells), start=1):
            if len(row) != len(header):
                raise ValueError(f"row {number} has {len(row)} cells, the header {len(header)}")
            yield {**dict(zip(header, row, strict=True)), **twice}


def _json_rows(place: Path) -> Iterator[dict[str, Any]]:
    """Every object of a file of lines of JSON, with numbers and truth values as text.

    Raises:
        ValueError: a line holds none.
    """
    with place.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            try:
                row = json.loads(line, object_pairs_hook=_fields, parse_int=str, parse_float=str, parse_constant=str)
            except json.JSONDecodeError as error:
                raise ValueError(f"row {number}: {error.msg} at character {error.pos}") from error
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is no object, {{...}}")
            yield row


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {plain_name(name): _text_of(value) for name, value in pairs}
    if len(fields) < len(pairs):
        counts = Counter(plain_name(name) for name, _ in pairs)
        fields |= {name: _TWICE for name, count in counts.items() if count > 1}
    return fields


def _text_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_of(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value).lower() if isinstance(value, bool) else value


def broken_file(source: DataSource) -> str | None:
    """The first parquet or tar file that is cut off or none, and why; None if all begin and end as they must."""
    for name, path in source.named_files():
        try:
            if source.kind == "parquet":
                from pyarrow import parquet

                with path.open("rb") as file:
                    parquet.read_metadata(file)
            elif source.kind == "webdataset":
                _look_into(path)
        except Exception as error:  # pyarrow, tarfile and gzip each raise their own
            reason = " ".join(str(error).split()) or type(error).__name__
            return f"the file {name} is damaged ({reason:.120})"
    return None


def _look_into(path: Path) -> None:
    with path.open("rb") as content, tarfile.open(fileobj=content):  # reads the first header
        pass
    if path.suffix == ".tar":
        with path.open("rb") as file:
            file.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
            if any(file.read()):
                raise tarfile.ReadError("cut off: the two empty blocks at its end are missing")


def read_hub(source: DataSource, named: NamedColumns, *, streaming: bool) -> Tables:
    """Tables or streams of a Hub data set: `user/name`, or `user/name:configuration`."""
    splits, notes, commit = open_hub(source, streaming=streaming)
    tables = _tables(splits, source, named, streaming)
    return replace(tables, notes=[*notes, *tables.notes], revision=commit)


def open_hub(source: DataSource, *, streaming: bool) -> tuple[dict[str, Any], list[str], str | None]:
    """What `datasets` makes of a Hub data set, with all columns; what is to be told of it; and its commit.

    What its rows name in place of images is not refused yet: see `refuse_places`.
    """
    repo, _, configuration = source.name.partition(":")
    neither = f"'{source.name}' is no existing path, and as a data set of the Hub it could not be loaded"
    try:
        with reading(repo):
            commit = hub_commit(repo)
    except UserError as error:  # no network, unknown name: datasets itself would retry for half a minute, noisily
        if not _is_cached(repo):
            raise UserError(f"{neither}: {error}; check the spelling of the path or id") from error
        commit = None
    try:
        loaded: Any = load_hub(repo, commit, configuration or None, streaming=streaming)
    except UserError:
        raise
    except Exception as error:  # no configuration chosen, no images: datasets' text says which
        chosen = "" if configuration else f" (a choice of configuration is written {repo}:CONFIGURATION)"
        cause = error.__cause__ or error
        if "pickle" in str(cause) or "weights_only" in str(cause):
            raise UserError(
                f"{repo} holds pickles, which could run code, so it was not loaded; give other data"
            ) from error
        raise UserError(f"{neither}: {_one_line(cause)}{chosen}") from error
    read: dict[str, Any] = dict(loaded)
    known = {name: split_name(name) for name in read}
    splits = {split: read[name] for name, split in known.items() if split}
    notes = [f"split '{name}' of '{source.name}' was left out" for name, split in known.items() if not split]
    if not splits and len(read) == 1:
        splits, notes = {"train": next(iter(read.values()))}, []
    if not splits:
        raise UserError(f"'{source.name}' has the splits {', '.join(read)}; needed: train, validation or test")
    return splits, notes, commit


def image_places(source: DataSource, column: str) -> Mapping[str, list[str]]:
    """SHA-256 of every stored image -> which files and rows hold it, by their names for people.

    The files are read again, once a process: this is for telling which image is bad. Empty for a source that has no
    files of many images, or more than `_SEARCHED_BYTES` of them.
    """
    if source.kind not in ("parquet", "webdataset"):
        return {}
    return _image_places(source.kind, tuple(source.named_files()), column)


@functools.lru_cache(maxsize=1)
def _image_places(kind: str, named_files: tuple[tuple[str, Path], ...], column: str) -> Mapping[str, list[str]]:
    if sum(sizes(path for _, path in named_files).values()) > _SEARCHED_BYTES:
        return {}
    places: dict[str, list[str]] = {}
    for name, path in named_files:
        for row, content in _parquet_images(path, column) if kind == "parquet" else _tar_images(path):
            places.setdefault(hashlib.sha256(content).hexdigest(), []).append(f"{name}, {row}")
    return places


def _parquet_images(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    from pyarrow import parquet

    row = 0
    with path.open("rb") as file:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=64, columns=[column]):
            for stored in batch.column(0).to_pylist():
                content = stored.get("bytes") if isinstance(stored, dict) else stored
                if not isinstance(content, list):  # of pixels, which is no file
                    yield f"row {row}", content if isinstance(content, bytes) else b""
                row += 1


def _tar_images(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as content, tarfile.open(fileobj=content) as file:
        for member in file:
            if content := file.extractfile(member):
                yield member.name, content.read()


def hub_commit(repo: str) -> str | None:
    """The commit of a Hub data set that loading now gives; raises what huggingface_hub raises."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repo, timeout=10).sha


def _is_cached(repo: str) -> bool:
    """Whether `datasets` has built this data set before, and so can load it without the Hub."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *user, name = repo.split("/")
    return Path(config.HF_DATASETS_CACHE, "___".join([*user, camelcase_to_snakecase(name)])).expanduser().is_dir()


def _tables(read: dict[str, Any], source: DataSource, named: NamedColumns, streaming: bool) -> Tables:
    name = source.name
    features: Features | None = next(iter(read.values())).features
    if features is None:
        raise UserError(f"'{name}' does not tell its columns as a stream; load it without streaming")
    columns = find_columns(features, name, named)
    chosen = [columns.image, *columns.labelling]
    selected = {split: read[split].select_columns(chosen) for split in SPLITS if split in read}
    notes: list[str] = []
    splits = undecoded(selected, columns.image, name, notes, may_read_twice=not streaming or source.kind != "hub")
    for table in () if streaming else splits.values():  # of a stream every row is looked at as it comes
        refuse_places(table, columns.image, source)
    label = features[columns.labelling[0]]
    names: Iterable[str] | None = columns.indicators or getattr(getattr(label, "feature", label), "names", None)
    return Tables(splits, columns, None if names is None else list(names), notes)


def undecoded(
    splits: Mapping[str, Any], column: str, name: str, notes: list[str], *, may_read_twice: bool = True
) -> dict[str, Any]:
    """Return tables or streams with an undecoded column of images; lists of pixels become PNG or TIFF files.

    Integers are 8-bit values where no split has one outside of 0..255, however wide their type is.

    Args:
        splits: as `datasets` reads them.
        column: with the images.
        name: of the data, for errors.
        notes: what is to be told of them.
        may_read_twice: whether a first pass may look for the highest number.

    Raises:
        UserError: the lists are no images.
    """
    import pyarrow as pa
    import pyarrow.compute
    from datasets import Dataset, Features, Image

    pc: Any = pyarrow.compute  # whose functions are made when it is imported
    features: Features = next(iter(splits.values())).features
    kind: Any = features.arrow_schema.field(column).type
    kind = leaf = getattr(kind, "storage_type", kind)  # of Array2D and Array3D
    while pa.types.is_list(leaf) or pa.types.is_large_list(leaf) or pa.types.is_fixed_size_list(leaf):
        leaf = leaf.value_type
    image = Image(decode=False)
    if leaf == kind:
        return {split: table.cast_column(column, image) for split, table in splits.items()}
    where, low, high = f"the column '{column}' of '{name}'", 0, 255
    if not may_read_twice and pa.types.is_integer(leaf) and leaf != pa.uint8():
        raise UserError(f"{where} holds pixels as numbers of 8 or of 16 bits; load it without streaming")
    if may_read_twice and pa.types.is_integer(leaf):
        stored = (part for table in splits.values() for part in table.with_format("arrow").iter(1000))
        flat = (pc.list_flatten(part.column(column).cast(kind), recursive=True) for part in stored)
        ends = [end for part in flat for end in pc.min_max(part).as_py().values() if end is not None]
        low, high = min(ends, default=0), max(ends, default=0)
        notes += tell_dark(high, 8)
    encode = functools.partial(_encoded, column=column, where=where, low=low, high=high)
    encoded: dict[str, Any] = {}
    for split, table in splits.items():
        if isinstance(table, Dataset):
            batches: Any = table.iter(1000)
            images = [each for batch in batches for each in encode(batch)[column]]
            encoded[split] = table.remove_columns([column]).add_column(column, images, feature=image)  # pyright: ignore[reportArgumentType]
        else:
            encoded[split] = table.map(encode, batched=True, features=Features({**features, column: image}))
    return encoded


def _encoded(batch: Mapping[str, Any], *, column: str, where: str, low: int, high: int) -> dict[str, list[Any]]:
    from datasets.features.image import encode_np_array

    images: list[Any] = []
    for numbers in batch[column]:
        if numbers is None:
            images.append({"bytes": None, "path": None})
            continue
        try:
            pixels = np.array(numbers)
        except ValueError:  # rows of different lengths
            pixels = np.array(None)
        if pixels.ndim == 3 and pixels.shape[2] > _CHANNELS and pixels.shape[0] in (1, 3, _CHANNELS):
            pixels = np.moveaxis(pixels, 0, 2)
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        is_whole, is_byte = pixels.dtype.kind in "ui", low >= 0 and high <= 255
        has_colors = pixels.ndim == 3 and pixels.shape[2] <= _CHANNELS and is_whole and is_byte
        if not (has_colors or (pixels.ndim == 2 and pixels.dtype.kind in "uifb")) or not pixels.size:
            shape = "x".join(map(str, pixels.shape)) or "different lengths"
            ends = f", numbers from {low:,} to {high:,}" if is_whole else f" ({pixels.dtype})"
            sides = ((math.isqrt(pixels.size // depth), depth) for depth in (1, 3))
            fit = [f"{side}x{side}x{depth}" for side, depth in sides if side * side * depth == pixels.size]
            raise UserError(
                f"{where} holds lists of {shape}{ends}; needed: height x width numbers, or height x width x channels "
                f"whole numbers from 0 to 255{f', such as {fit[0]}' if pixels.ndim == 1 and fit else ''}; change them"
            )
        if is_whole:
            whole = np.iinfo(np.int32)
            pixels = pixels.astype(np.uint8) if is_byte else pixels.clip(whole.min, whole.max).astype(np.int32)
        images.append(encode_np_array(pixels))
    return {column: images}


def find_columns(features: "Features", name: str, named: NamedColumns | None = None) -> Columns:
    """The image and the label column.

    Raises:
        UserError: there is none, or several and none of them has a usual name; or a named one is not there.
    """
    from datasets import ClassLabel, Image

    named = named or NamedColumns()
    named.check(features, name)

    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    usual = [column for column in _IMAGE_NAMES if column in features]
    candidates = [named.image] if named.image else [column for column in usual if column in typed] or typed or usual
    have = f"'{name}' has the columns {', '.join(map(str, features))}"
    if not candidates or (len(candidates) > 1 and candidates[0] not in _IMAGE_NAMES):
        raise UserError(f"{have}; needed: one column of images, best called 'image', or named by --image-column")
    if named.label:
        return Columns(candidates[0], (named.label,), named.indicators)
    for label in _LABEL_NAMES:
        if label in features:
            return Columns(candidates[0], (label,))
    for nested in _NESTED:
        fields = features.get(nested)
        for label in _LABEL_NAMES:
            if isinstance(fields, dict) and label in fields:
                return Columns(candidates[0], (nested, label))
    classes = [column for column, feature in features.items() if isinstance(feature, ClassLabel)]
    if len(classes) == 1:
        return Columns(candidates[0], (classes[0],))
    raise UserError(
        f"{have}; needed: a column 'label' with the class of every image, as a number or a name, or another by "
        "--label-column"
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


# Where a card, or the file in its stead, tells `datasets` which files are read.
_DECLARING = ("README.md", ".huggingface.yaml")
_PATTERNS = ("data_files", "data_dir")


def load_hub(repo: str, commit: str | None, configuration: str | None, *, streaming: bool) -> Any:
    """What `datasets` makes of a data set, split by split, from its own files alone.

    Args:
        repo: user/name.
        commit: to be read; None where the Hub cannot be asked, for what was read before.
        configuration: None for the only one.

    Raises:
        UserError: it names files of another place.
        Exception: whatever `datasets` raises.
    """
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, load_dataset

    if commit is not None:
        for pattern in _declared(repo, commit):
            _refuse_pattern(repo, pattern)
    is_quiet = are_progress_bars_disabled() or sys.stderr.isatty()
    if not is_quiet:  # bars are for terminals
        disable_progress_bars()
    try:
        return load_dataset(repo, configuration, revision=commit, streaming=streaming)
    finally:
        if not is_quiet:
            enable_progress_bars()


def _declared(repo: str, commit: str) -> Iterator[str]:
    """Every pattern of files in the data set's own description."""
    import yaml
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in _DECLARING:
        with reading(repo):
            try:
                text = Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit)).read_text("utf-8")
            except EntryNotFoundError:
                continue
        front = text.split("\n---", 1)[0].removeprefix("---") if name.endswith(".md") else text
        try:
            described: object = yaml.safe_load(front)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UserError(f"{name} of {repo} cannot be read as YAML; its author has to mend it") from error
        yield from _patterns_in(described)


def _patterns_in(value: object, within: bool = False, depth: int = 0) -> Iterator[str]:
    """Texts under a key that names files, at any depth."""
    if within and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and depth < 20:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _patterns_in(item, (within and key != "split") or key in _PATTERNS, depth + 1)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list) and depth < 20:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _patterns_in(item, within, depth + 1)  # pyright: ignore[reportUnknownArgumentType]


def _refuse_pattern(repo: str, pattern: str) -> None:
    """Relative ones stay inside the repository."""
    if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~", "\\")) or ".." in pattern.split("/"):
        raise UserError(f"{repo} names files of another place ({pattern[:80]!r}), which are not read; give other data")


def refuse_places(table: "Dataset", column: str, source: DataSource) -> None:
    """Refuse a table whose images, instead of being in it, are to be read from somewhere else.

    A stranger's may only name what lies in the Hub's caches, one of this machine no addresses.

    Raises:
        UserError: names the first.
    """
    import pyarrow.compute
    from datasets import config
    from huggingface_hub import constants

    pc: Any = pyarrow.compute  # whose functions are made when it is imported
    images: Any = table.data.column(column)
    outside = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    caches = [os.path.realpath(place) for place in (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE)]
    for path in pc.unique(outside).to_pylist():
        if path is None:
            continue
        if is_foreign(source, path) and not any(os.path.realpath(path).startswith(place + os.sep) for place in caches):
            refuse_image(source.name, path)


def is_foreign(source: DataSource, path: object) -> bool:
    """Whether a table of this source has no business there."""
    return not source.may_name_files or "://" in str(path)


def refuse_image(repo: str, path: object) -> None:
    """The error of an image that a table wants to be read from somewhere."""
    raise UserError(
        f"{repo} names a file in place of an image ({str(path)[:80]!r}), which is not read; give data that hold their "
        "images"
    )


logger = logging.getLogger(__name__)

# Decoded images waiting inside a stream; small, so that a stream of large photographs stays small in memory.
_BATCH = 16


@dataclass(frozen=True)
class StreamCut:
    """Which part of a training stream is wanted, when validation or test are cut from it."""

    missing: tuple[str, ...]
    wanted: str
    seed: int


@dataclass(frozen=True)
class StreamReader:
    """Batched map function of a stream: undecoded rows in, RGB images and class numbers out.

    A bad image raises UserError, or with skip_bad_images is left out, named in a warning and in `skipped` (of this
    process: in a loader's worker the list is the worker's own). It is named by its file and row, see `places`.
    """

    columns: Columns
    labels: LabelMap
    split: str
    min_size: tuple[int, int] = (1, 1)
    skip_bad_images: bool = False
    cut: StreamCut | None = None
    skipped: list[str] = field(default_factory=list[str])
    source: DataSource | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        images: list[Any] = []
        labels: list[int] = []
        for stored, raw in zip(batch[self.columns.image], self.columns.labels(batch), strict=True):
            if self.cut is not None and not self._wanted(stored):
                continue
            path = stored.get("path")
            if stored.get("bytes") is None and self.source is not None and is_foreign(self.source, path):
                refuse_image(self.source.name, path)
            seen, image = open_image(stored, "")
            problem = seen.problem_below(self.min_size)
            if image is not None and problem is None:
                if raw not in self.labels.numbers:
                    self.labels.number(raw, f"image '{self.places(seen)[0]}'")
                labels.append(self.labels.numbers[raw])
                images.append(image)
            elif self.skip_bad_images:
                self._skip(map(short_name, self.places(seen)))
            else:
                raise_bad(replace(seen, name=self.places(seen)[0]), problem or "is corrupt")
        return {"image": images, "label": labels}

    def places(self, seen: Seen) -> list[str]:
        """Where an image stands, for people: file and row, of several equal ones all; else what is known of it."""
        known = image_places(self.source, self.columns.image).get(seen.digest) if self.source else None
        return known or [seen.name or f"of split {self.split} with SHA-256 {seen.digest[:12]}"]

    def _skip(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.skipped:  # a stream passes once an epoch
                self.skipped.append(name)
                logger.warning("left out the unreadable image %s", name)

    def _wanted(self, stored: Mapping[str, Any]) -> bool:
        assert self.cut is not None
        content: bytes | None = stored.get("bytes")
        if content is None:  # of a file that cannot be read its name must do: whose part it is will tell of it
            content = str(stored.get("path")).encode()
        digest = hashlib.sha256(content).hexdigest()
        return part_of(digest, self.cut.missing, seed=self.cut.seed) == self.cut.wanted

    def over(self, stream: "IterableDataset") -> "IterableDataset":
        """The stream of {"image": RGB image, "label": class number} that this reader makes of an undecoded one."""
        columns: Sequence[str] = [self.columns.image, self.columns.label[0]]
        return stream.map(self, batched=True, batch_size=_BATCH, remove_columns=list(columns))
