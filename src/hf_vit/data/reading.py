"""Open a source as `datasets` tables or streams, and find the image and label columns."""

import csv
import functools
import glob
import hashlib
import importlib
import json
import logging
import os
import re
import tarfile
import textwrap
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hf_vit.data.files import FileNames, refuse_text
from hf_vit.data.fingerprints import hash_text
from hf_vit.data.idx import read_idx_split, store_images
from hf_vit.data.images import ImageScan, decode_scanned, hash_image, raise_bad_image, shorten_path
from hf_vit.data.labels import LabelMap, convert_labels, normalize_label, normalize_name, summarize_names
from hf_vit.data.pixels import encode_images
from hf_vit.data.sources import DataSource, group_by_split
from hf_vit.data.splits import SPLITS, assign_split, split_name
from hf_vit.errors import UserError, to_one_line
from hf_vit.repositories.reading import guard_hub_access, refuse_pointer
from hf_vit.repositories.stores import is_store_url, read_sizes

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset
    from huggingface_hub.hf_api import DatasetInfo

logger = logging.getLogger(__name__)
_IMAGE_NAMES = ("image", "img", "picture")
_PATH_NAMES = ("file_name", "image", "filename", "file", "path", "image_path", "filepath", "img", "picture")
_LABEL_NAMES = ("label", "labels", "cls", "class", "target", "fine_label", "cls.txt")
_SPLIT_NAMES = ("split", "Split", "SPLIT")  # one that is not recognized would be ignored without a word
# Larger streams are not read again to find the position of a bad image.
_SEARCHED_BYTES = 1 << 30
# Maximum length of a list's cell; the csv module's default is 131,072 characters.
_CELL = (1 << 31) - 1
# The value of a column that occurs twice in a row of a list.
_DUPLICATE = object()
# Values of an indicator column (one class), as pandas and other programs write them.
_INDICATORS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
# How numbers of JSON are read; a bare NaN, which json.dumps and pandas write, is a missing value.
_AS_TEXT: dict[str, Any] = {
    "parse_int": str,
    "parse_float": str,
    "parse_constant": lambda text: None if text == "NaN" else text,
}
# Decoded images in a stream's buffer; few, so that large photographs do not fill the memory.
_BATCH = 16


@dataclass(frozen=True)
class Columns:
    """The image and label columns of a table.

    Attributes:
        image: image column.
        label: label column, followed by a key if the label is inside a JSON column, as in webdataset files.
        indicators: columns of 0 and 1, one for each class, in place of the label column.
    """

    image: str = "image"
    label: tuple[str, ...] = ("label",)
    indicators: tuple[str, ...] = ()

    @property
    def label_columns(self) -> list[str]:
        """The columns that hold the labels."""
        return list(self.indicators) or [self.label[0]]

    def labels(self, batch: Mapping[str, Any]) -> list[Any]:
        """Return the raw labels of a batch of columns; raise UserError if an indicator is neither 0 nor 1."""
        if self.indicators:
            return self._list_indicated(batch)
        values: list[Any] = list(batch[self.label[0]])
        for key in self.label[1:]:
            values = [None if value is None else value.get(key) for value in values]
        return normalize_label(values)

    def _list_indicated(self, batch: Mapping[str, Any]) -> list[list[str]]:
        """Return for every row the names of the label columns that hold 1."""
        columns = convert_labels({name: normalize_label(list(batch[name])) for name in self.indicators})
        for name, values in columns.items():
            invalid = [value for value in values if str(value).lower() not in _INDICATORS]
            if invalid:
                raise UserError(
                    f"the label column {name} holds {invalid[0]!r}, but multi-label columns hold 0 or 1; write 1 "
                    "for images of the class and 0 for others"
                )
        rows = zip(*columns.values(), strict=True)
        return [
            [name for name, value in zip(columns, row, strict=True) if _INDICATORS[str(value).lower()]] for row in rows
        ]


@dataclass(frozen=True)
class NamedColumns:
    """The columns that the user named, or None for the usual names; several label columns are written "cat,dog"."""

    image: str | None = None
    label: str | None = None

    @property
    def indicators(self) -> tuple[str, ...]:
        """The label columns if the user named several, else ()."""
        names = tuple(name.strip() for name in (self.label or "").split(","))
        return names if len(names) > 1 else ()

    def check(self, columns: Iterable[str], name: str) -> None:
        """Raise UserError if a named column is not among the columns of the data set `name`."""
        existing = list(columns)
        labels = [("--label-column", label) for label in self.indicators or (self.label,)]
        for option, column in (("--image-column", self.image), *labels):
            if column is not None and column not in existing:
                raise UserError(
                    f"'{name}' has no column '{column}' ({option}); choose one of {', '.join(map(str, existing))}"
                )


@dataclass(frozen=True)
class RawTables:
    """The splits of a source with undecoded images ({"bytes", "path"}) and raw labels.

    Attributes:
        splits: split -> table or stream.
        columns: where the images and labels are.
        label_names: the classes, or None if the source does not name them.
        notes: for the user.
        revision: commit of a Hub data set.
        labels: split -> labels of folders and lists, whose tables have no label column.
        schemas: name and schema of every parquet file.
    """

    splits: dict[str, Any]
    columns: Columns = Columns()
    label_names: list[str] | None = None
    notes: list[str] = field(default_factory=list[str])
    revision: str | None = None
    labels: dict[str, list[Any]] | None = None
    schemas: "Sequence[tuple[str, Any]]" = ()

    @property
    def features(self) -> "Features | None":
        """The columns and their types; None for a stream without this information."""
        return next(iter(self.splits.values())).features


def make_image_table(paths: "Iterable[str | Path]") -> "Dataset":
    """Return a table with an undecoded column "image" whose rows name the files."""
    import pyarrow as pa

    names = list(map(str, paths))
    for name in names:
        refuse_text(name)
    return store_images([pa.nulls(len(names), pa.binary())], [pa.array(names, pa.string())])


def open_tables(source: DataSource, *, streaming: bool) -> RawTables:
    """Open parquet or webdataset files, or a Hub data set, with all columns.

    The caller must refuse rows that name files instead of images, see `refuse_foreign_images`.
    """
    importlib.import_module("hf_vit.data.mask_features")  # registers the types of masks, which `to_parquet` writes
    if source.kind == "hub":
        return _open_hub(source, streaming=streaming)
    from datasets import load_dataset

    schemas = _check_files(source)
    if source.kind == "webdataset":
        from datasets.packaged_modules.webdataset.webdataset import WebDataset

        WebDataset.DECODERS["cls"] = _parse_class_number  # the default, int, reads 1 and 01 as one class
    # load_dataset takes patterns, so brackets in file names must be escaped.
    files = {split: [glob.escape(str(path.resolve())) for path in paths] for split, paths in source.files.items()}
    # It reads a file again if its time has changed; a copy or an archive may set the time of the file that it replaces.
    states = [os.stat(path) for _, path in source.name_files() if source.is_local]
    version = hash_text(repr([(state.st_size, state.st_ctime_ns) for state in states]))
    with explain_read_errors(source):
        _refuse_class_mismatch(source.name, schemas)
        splits: Any = load_dataset(source.kind, version, data_files=files, streaming=streaming)
    present = {split: splits[split] for split in SPLITS if split in splits}
    return RawTables(_divide(present, source.name), schemas=schemas)


def _divide(splits: dict[str, Any], source_name: str) -> dict[str, Any]:
    """Divide a single table or stream by its column "split", unless no value of the column names a split."""
    table, *others = splits.values()
    column = _find_name(_SPLIT_NAMES, table.features or ())
    if others or column is None:
        return splits
    classes = dict(enumerate(getattr(table.features[column], "names", None) or ()))
    values = [value for batch in table.select_columns([column]).iter(1000) for value in batch[column]]
    texts = [str(classes.get(value, value)) for value in values]
    names = list(map(split_name, texts))
    present = [split for split in SPLITS if split in names]
    if not present:
        return splits
    if None in names:  # undivided, test images would be trained on
        raise UserError(f"'{source_name}' has the split {texts[names.index(None)]!r}; write train, validation or test")
    if hasattr(table, "__len__"):
        return {split: table.select(np.flatnonzero(np.asarray(names) == split)) for split in present}
    filters = {split: functools.partial(_is_of_split, split, classes) for split in present}
    return {split: table.filter(is_of_split, input_columns=column) for split, is_of_split in filters.items()}


def _is_of_split(split: str, classes: Mapping[int, str], value: Any) -> bool:
    return split_name(str(classes.get(value, value))) == split


@contextmanager
def explain_read_errors(source: DataSource) -> Generator[None]:
    """Turn the errors of pyarrow, tarfile and datasets while files are read into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        remedy = "; give all values of a field the same type" if "incompatible types" in str(cause) else ""
        if "column names don't match" in str(cause):
            remedy = "; give all files the same columns"
        raise UserError(f"'{source.name}' cannot be read as {source.kind}: {_shorten(cause)}{remedy}") from error


def _parse_class_number(content: bytes) -> int:
    """Return the number in a .cls file of webdataset; raise UserError for other text."""
    text = content.decode("utf-8", "backslashreplace").strip()
    if not re.fullmatch("0|-?[1-9][0-9]{0,17}", text):
        raise UserError(
            f"a .cls file holds {text!r:.40}, which is not a class number such as 0 or 12; write it without leading "
            "zeros, or write class names into .txt files instead, and give --label-column txt"
        )
    return int(text)


def read_labels(source: DataSource, opened: RawTables | None, selection: NamedColumns, *, streaming: bool) -> RawTables:
    """Return the images and raw labels of a folder or list, or of the tables that `open_tables` opened."""
    if opened is None:
        if source.kind == "idx":
            return _read_idx(source)
        return _read_folder(source) if source.kind == "folder" else _read_list(source, selection)
    name, features = source.name, opened.features
    if features is None:
        raise UserError(f"'{name}' does not list its columns, so it cannot be read as a stream; leave --streaming out")
    columns = _find_columns(features, name, selection)
    notes = [*opened.notes]  # `encode_images` adds to this copy
    _refuse_mixed_labels(name, opened.schemas, columns.label_columns)
    used_columns = [columns.image, *columns.label_columns]
    selected_tables = {split: table.select_columns(used_columns) for split, table in opened.splits.items()}
    splits = encode_images(
        selected_tables, columns.image, name, notes, may_read_twice=not streaming or source.kind != "hub"
    )
    for table in () if streaming else splits.values():  # `StreamReader` checks every row of a stream
        refuse_foreign_images(table, columns.image, source)
    label_feature = features[columns.label_columns[0]]
    label_feature = getattr(label_feature, "feature", label_feature)  # of a list of labels
    names: Iterable[str] | None = columns.indicators or getattr(label_feature, "names", None)
    return replace(opened, splits=splits, columns=columns, label_names=names and list(names), notes=notes)


# ---- parquet and webdataset files


def _check_files(source: DataSource) -> list[tuple[str, Any]]:
    """Return the name and schema of every parquet file; raise UserError if a parquet or tar file is damaged."""
    from pyarrow import parquet

    schemas: list[tuple[str, Any]] = []
    for name, path in source.name_files():
        refuse_pointer(path, f"the file {name} of '{source.name}'")
        columns: list[str] = []
        try:
            with path.open("rb") as file:
                if source.kind == "parquet":
                    schema = parquet.read_schema(file)
                    schemas.append((name, schema))
                    columns = schema.names
                else:
                    _check_tar(file, is_compressed=path.suffix != ".tar")
        except Exception as error:  # pyarrow, tarfile and gzip each raise their own
            raise UserError(
                f"'{source.name}' cannot be read as {source.kind}, because {name} is damaged "
                f"({_shorten(error):.120}); restore or remove this file"
            ) from error
        duplicates = [column for column, count in Counter(columns).items() if count > 1]
        if duplicates:
            raise UserError(f"{name} of '{source.name}' has the column '{duplicates[0]}' twice; rename one of the two")
    return schemas


def _check_tar(file: IO[bytes], *, is_compressed: bool) -> None:
    """Raise an error if a tar file is damaged at its beginning or, unless it is compressed, at its end."""
    with tarfile.open(fileobj=file):  # reads the first header
        pass
    if not is_compressed:
        file.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
        if any(file.read()):
            raise tarfile.ReadError("truncated: the two empty blocks at the end of a .tar are missing")


def _refuse_mixed_labels(name: str, schemas: Sequence[tuple[str, Any]], columns: Sequence[str]) -> None:
    """Raise UserError if a label column is text in some parquet files and not in others.

    `datasets` casts all files to the type of one file, which would turn the label 01 into 1.
    """
    from pyarrow import types

    for column in columns:
        first_files: dict[bool, tuple[str, Any]] = {}  # whether the column is text -> file and type
        for file, schema in schemas:
            if column in schema.names:
                kind: Any = schema.field(column).type
                while hasattr(kind, "value_type"):  # lists and categories
                    kind = kind.value_type
                first_files.setdefault(types.is_string(kind) or types.is_large_string(kind), (file, kind))
        if len(first_files) > 1:
            (text_file, _), (other_file, other_kind) = first_files[True], first_files[False]
            raise UserError(
                f"the label column '{column}' of '{name}' is text in {text_file}, but {other_kind} in "
                f"{other_file}; save it with the same type in all files"
            )


def _refuse_class_mismatch(name: str, schemas: Iterable[tuple[str, Any]]) -> None:
    """Raise UserError if parquet files name the classes of a column differently.

    `datasets` reads all files with the class names of the first one.
    """
    from datasets import Features

    first_classes: dict[str, tuple[str, list[str]]] = {}
    for file, schema in schemas:
        pending: list[tuple[str, Any]] = list(Features.from_arrow_schema(schema).items())
        while pending:  # a column may contain other columns
            column, feature = pending.pop()
            names = getattr(feature, "names", None)
            if isinstance(names, list):
                classes = list(map(normalize_name, names))
                first, others = first_classes.setdefault(column, (file, classes))
                if classes != others:
                    raise UserError(
                        f"the class numbers in the column '{column}' of '{name}' mean {summarize_names(others)} in "
                        f"{first}, but {summarize_names(classes)} in {file}; save all files with the same class "
                        "names, or write names instead of numbers"
                    )
            inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
            pending += [(column, child) for child in inner if child is not None]


# ---- folders and lists


def _read_folder(source: DataSource) -> RawTables:
    """Return the images of class folders; raise UserError if a class has no folder in train."""
    names = sorted({label for classes in source.folder.values() for label in classes})
    for label in names if "train" in source.folder else ():
        if label not in source.folder["train"]:
            split = next(split for split, classes in source.folder.items() if label in classes)
            raise UserError(
                f"class '{label}' of '{source.name}' is in {split}, but not in train; add a class folder "
                f"with this name to train, or remove the one in {split}"
            )
    folders = {split: sorted(source.folder[split].items()) for split in SPLITS if split in source.folder}
    files = {split: [path for _, paths in classes for path in paths] for split, classes in folders.items()}
    labels = {split: [label for label, paths in classes for _ in paths] for split, classes in folders.items()}
    splits = {split: make_image_table(paths) for split, paths in files.items()}
    return RawTables(splits, label_names=names, labels=labels)


def _read_idx(source: DataSource) -> RawTables:
    """Return the images and labels of IDX files."""
    parts = {split: read_idx_split(files) for split, files in source.files.items()}
    return RawTables(
        {split: table for split, (table, _, _) in parts.items()},
        label_names=next(iter(parts.values()))[2],
        labels={split: labels for split, (_, labels, _) in parts.items()},
    )


def _read_list(source: DataSource, selection: NamedColumns) -> RawTables:
    """Read the image files and labels of CSV or JSON Lines files.

    The split of a row is in its column "split", else in the path of a list of validation or test, else in a folder of
    the image's path. Cells stay text until all lists are read, and `convert_labels` then converts the labels.
    """
    paths: dict[str, list[Path]] = {}
    labels: dict[str, list[Any]] = {}
    names = FileNames()
    for list_split, file in ((split, file) for split, files in source.files.items() for file in files):
        rows = list(_read_list_rows(file, source.name, selection))
        image_files = [names.find(file.parent / path) for path, _, _ in rows]
        top = _find_top(os.path.abspath(str(file.parent)), {os.path.dirname(str(path)) for path in image_files})
        for image_file, (_, label, raw_split) in zip(image_files, rows, strict=True):
            split = list_split
            if raw_split is not None:
                split = split_name(str(raw_split))
            elif list_split == "train":  # but val.csv may list images in train, which may also name a class
                split = _find_split(os.path.dirname(str(image_file)), top) or list_split
            if split is None:
                raise UserError(
                    f"{file.name} has the split {raw_split!r}, which is unknown; write train, validation or test"
                )
            paths.setdefault(split, []).append(image_file)
            labels.setdefault(split, []).append(label)
    source.folder.update({split: {"": paths[split]} for split in SPLITS if split in paths})
    splits = {split: make_image_table(paths[split]) for split in SPLITS if split in paths}
    typed_labels = labels if selection.indicators else convert_labels(labels)
    return RawTables(splits, label_names=list(selection.indicators) or None, labels=typed_labels)


def _find_top(list_folder: str, image_folders: Iterable[str]) -> str:
    """Return the folder below which folders name splits: the list's, or the images' common one if some are outside."""
    paths = list(map(os.path.abspath, image_folders))
    if not all(Path(path).is_relative_to(list_folder) for path in paths):
        with suppress(ValueError):  # on two drives of Windows
            return os.path.commonpath(paths)  # folders above it, such as /home/dev, name no split
    return list_folder


@functools.lru_cache(maxsize=1024)
def _find_split(folder: str, top: str) -> str | None:
    """Return the first split that a folder on the way from `top` to `folder` names, or None."""
    path = Path(os.path.abspath(folder))
    parts = path.relative_to(top).parts if path.is_relative_to(top) else ()
    return next(filter(None, map(split_name, parts)), None)


def _refuse_list_path(file: Path, path: str) -> None:
    """Raise UserError if a list names a URL, or a list in an object store a file outside its folder."""
    if is_store_url(file) and (path.startswith("/") or "://" in path or ".." in path.split("/")):
        raise UserError(
            f"{file.name} names {path[:80]!r}, which is outside its folder; write a path relative to the list"
        )
    if "://" in path:
        raise UserError(
            f"{file.name} names the URL {path[:80]!r}, but only files are read; download the images and write "
            "their file names"
        )


def _read_cells(file: Path, name: str, usable: set[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of all columns of a list, and its rows with the usable columns alone, which saves memory."""
    columns: dict[str, None] = {}  # a set that keeps the order
    rows: list[dict[str, Any]] = []
    read_rows = _read_json_rows if file.suffix.lower() == ".jsonl" else _read_csv_rows
    limit = csv.field_size_limit(_CELL)
    try:
        for row in read_rows(file):
            if not row.keys() <= columns.keys():
                columns |= dict.fromkeys(row)
            rows.append({column: row[column] for column in usable & row.keys()})
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        remedy = "; save it in UTF-8" if isinstance(error, UnicodeError) else ""
        raise UserError(f"{file.name} of '{name}' cannot be read as a list: {_shorten(error)}{remedy}") from error
    finally:
        csv.field_size_limit(limit)
    return list(columns), rows


def _read_list_rows(file: Path, name: str, selection: NamedColumns) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path of the image, raw label, split or None) for every row of a list."""
    normalized = NamedColumns(normalize_label(selection.image), normalize_label(selection.label))
    named = {normalized.image or "", normalized.label or "", *normalized.indicators}
    columns, rows = _read_cells(file, name, {*named, *_PATH_NAMES, *_LABEL_NAMES, *_SPLIT_NAMES})
    if not rows:
        return
    used_columns = _choose_list_columns(columns, file.name, normalized)
    image, split = used_columns.image, _find_name(_SPLIT_NAMES, columns) or "split"
    for number, row in enumerate(rows, start=1):
        for column in (image, *used_columns.label_columns, split):
            if row.get(column) is _DUPLICATE:
                raise UserError(f"row {number} of {file.name} has the key '{column}' twice; remove or rename one")
        if not isinstance(row.get(image), str) or not row[image]:
            raise UserError(
                f"row {number} of {file.name} has {row.get(image)!r} in the column {image}; write an image file's name"
            )
        _refuse_list_path(file, row[image])
    labels = used_columns.labels({column: [row.get(column) for row in rows] for column in used_columns.label_columns})
    splits = [normalize_label(row.get(split)) for row in rows]
    no_split = "" if any(splits) else None  # an empty cell is unknown, an empty column no column
    for row, raw_label, raw_split in zip(rows, labels, splits, strict=True):
        yield row[image], raw_label, raw_split or no_split


def _choose_list_columns(columns: Collection[str], file_name: str, selection: NamedColumns) -> Columns:
    """Return the image and label columns of a list; raise UserError if one is missing."""
    selection.check(columns, file_name)
    image = selection.image or _find_name(_PATH_NAMES, columns)
    label = selection.label or _find_name(_LABEL_NAMES, columns)
    if image is None or label is None:
        content = "image files, such as file_name" if image is None else "classes, such as label"
        option = "--image-column" if image is None else "--label-column"
        raise UserError(
            f"{file_name} has the columns {', '.join(columns)}, but none of {content}; name it with {option}, or move "
            f"{file_name} away if the folder names are the classes"
        )
    return Columns(image, (label,), selection.indicators)


def _read_csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every row of a CSV file as column -> text; the delimiter is the most frequent of tab, ; and comma."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header_line = next((line for line in file if line.strip()), "")
        stated_delimiter = re.fullmatch("sep=([\t;,])", header_line.strip("\r\n"))  # Excel reads such a line
        if stated_delimiter:
            header_line = next(file, "")
        unquoted = re.sub('"[^"]*"', "", header_line)
        delimiter = stated_delimiter[1] if stated_delimiter else max("\t;,", key=unquoted.count)
        cells = csv.reader(chain([header_line], file), delimiter=delimiter, skipinitialspace=True, strict=True)
        header = [normalize_name(name) for name in next(cells)]
        if not header:
            raise ValueError("the file is empty; write a header, and a row for every image")
        duplicates = {name: _DUPLICATE for name, count in Counter(header).items() if count > 1}
        for number, row in enumerate(filter(any, cells), start=1):  # Excel writes rows of empty cells
            if len(row) != len(header):
                raise ValueError(
                    f"row {number} has {len(row)} cells, but the header has {len(header)}; write one for each column"
                )
            yield {**dict(zip(header, row, strict=True)), **duplicates}


def _read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every object of a JSON Lines file, with numbers and booleans as text."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            try:
                row = json.loads(line, object_pairs_hook=_make_row, **_AS_TEXT)
            except json.JSONDecodeError as error:
                raise ValueError(f"row {number}: {error.msg} at character {error.pos}") from error
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object {{...}}; write one for every image")
            yield row


def _make_row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object with normalized keys and text values; a repeated key gets the value `_DUPLICATE`."""
    row: dict[str, Any] = {}
    for raw_name, value in pairs:
        name = normalize_name(raw_name)
        row[name] = _DUPLICATE if name in row else _to_text(value)
    return row


def _to_text(value: Any) -> Any:
    """Convert a boolean, or the booleans of a list, to "true" or "false"."""
    if isinstance(value, list):
        return [_to_text(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value).lower() if isinstance(value, bool) else value


# ---- data sets of the Hub: files outside the repository are refused before anything is read


def _open_hub(source: DataSource, *, streaming: bool) -> RawTables:
    """Open a Hub data set; without a network, the version in the cache."""
    from datasets import load_dataset
    from huggingface_hub import HfApi

    repo, _, configuration = source.name.partition(":")
    problem = f"'{source.name}' does not exist as a path, and cannot be loaded as a Hub data set"
    try:
        with guard_hub_access(repo):
            info = HfApi().dataset_info(repo, timeout=10)
            commit = info.sha
    except UserError as error:  # no network or unknown name, for which `datasets` would retry for half a minute
        if not _is_cached(repo):
            raise UserError(f"{problem}: {error}; check the spelling of the path or id") from error
        info = commit = None  # load the cached version
    if info is not None:
        patterns = list(_read_file_patterns(repo, commit))
        _refuse_outside_files(repo, patterns)
        if not patterns:  # then all parquet files are one configuration
            _refuse_hub_class_mismatch(repo, info)
    try:
        dataset: Any = load_dataset(repo, configuration or None, revision=commit, streaming=streaming)
        raw_splits = dict(dataset)
    except Exception as error:  # the message of `datasets` gives the reason, such as a missing configuration
        cause = error.__cause__ or error
        if "pickle" in str(cause) or "weights_only" in str(cause):
            raise UserError(
                f"{repo} holds pickles, which could run code, so it was not loaded; give another data set"
            ) from error
        hint = "" if configuration else f" (to choose a configuration, write {repo}:CONFIGURATION)"
        raise UserError(f"{problem}: {_shorten(cause)}{hint}") from error
    if streaming:  # `datasets` would decode files, whose bytes decide their split
        raw_splits = {name: part.decode(False) if part.features else part for name, part in raw_splits.items()}
    splits, notes = _rename_splits(raw_splits, source.name)
    table, *others = splits.values()
    if not streaming:
        splits = _divide(splits, source.name)
    elif not others and _find_name(_SPLIT_NAMES, table.features or ()):  # reading it downloads all images
        notes.append(f"the column 'split' of '{source.name}' divides no stream; leave --streaming out to divide by it")
    return RawTables(splits, notes=notes, revision=commit)


def _rename_splits(raw_splits: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the splits under our names, a single split as train; and notes on ignored splits."""
    splits: dict[str, Any] = {}
    notes: list[str] = []
    for raw_name, table in raw_splits.items():
        split = split_name(raw_name)
        if split and split not in splits:
            splits[split] = table
        else:
            reason = f"as it has another one for {split}" if split else "which is none of train, validation and test"
            notes.append(f"ignored the split '{raw_name}' of '{name}', {reason}")
    if splits:
        return {split: splits[split] for split in SPLITS if split in splits}, notes
    if len(raw_splits) == 1:
        return {"train": next(iter(raw_splits.values()))}, []
    raise UserError(
        f"'{name}' has the splits {', '.join(raw_splits)}, but needs at least one of train, validation and test; "
        "rename one of them"
    )


def _is_cached(repo: str) -> bool:
    """Return whether the cache of `datasets` holds this data set, so that it loads without the Hub."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *user, name = repo.split("/")
    return Path(config.HF_DATASETS_CACHE, "___".join([*user, camelcase_to_snakecase(name)])).expanduser().is_dir()


def _refuse_hub_class_mismatch(repo: str, info: "DatasetInfo") -> None:
    """Raise UserError if the parquet files of a Hub data set number the classes differently.

    `datasets` reads all with the class names of the first; one file of every split shows whether others differ.
    """
    from huggingface_hub import HfFileSystem
    from pyarrow import parquet

    paths = [Path(file.rfilename) for file in info.siblings or () if file.rfilename.endswith(".parquet")]
    names = [files[0].as_posix() for files in group_by_split((path, path.parts) for path in paths).values()]
    with guard_hub_access(repo):
        files = [HfFileSystem().open(f"datasets/{repo}@{info.sha}/{name}") for name in names]
        _refuse_class_mismatch(repo, zip(names, map(parquet.read_schema, files), strict=True))


def _refuse_outside_files(repo: str, patterns: Iterable[str]) -> None:
    """Raise UserError if the data set's card names files outside its repository."""
    for pattern in patterns:
        if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~", "\\")) or ".." in pattern.split("/"):
            raise UserError(
                f"{repo} names files outside its repository ({pattern[:80]!r}), which hf_vit does not read for "
                "safety; give another data set"
            )


def _read_file_patterns(repo: str, commit: str | None) -> Iterator[str]:
    """Yield every file pattern in the data set's card or .huggingface.yaml."""
    import yaml
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in ("README.md", ".huggingface.yaml"):
        with guard_hub_access(repo):
            try:
                text = Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit)).read_text("utf-8")
            except EntryNotFoundError:
                continue
        front = text.split("\n---", 1)[0].removeprefix("---") if name.endswith(".md") else text
        try:
            metadata: object = yaml.safe_load(front)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UserError(
                f"{name} of {repo} is not valid YAML, so its author must correct it; give another data set"
            ) from error
        yield from _find_patterns(metadata)


def _find_patterns(value: Any, within: bool = False, depth: int = 0) -> Iterator[str]:
    """Yield all texts below the keys "data_files" and "data_dir", except the names of splits."""
    if within and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list) and depth < 20:
        items = value.items() if isinstance(value, Mapping) else ((None, entry) for entry in value)
        for key, item in items:
            is_within = (within and key != "split") or key in ("data_files", "data_dir")
            yield from _find_patterns(item, is_within, depth + 1)


def refuse_foreign_images(table: "Dataset", column: str, source: DataSource) -> None:
    """Raise UserError if rows of a table name image files that the table may not read.

    Tables of the Hub or an object store may only name files in the Hub's caches; local tables may not name URLs.
    """
    import pyarrow.compute
    from datasets import config
    from huggingface_hub import constants

    pc: Any = pyarrow.compute  # Any: its functions are created at import
    images: Any = table.data.column(column)
    named_files = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    caches = [os.path.realpath(cache) for cache in (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE)]
    for path in pc.unique(named_files).drop_null().to_pylist():
        try:
            _refuse_foreign(source, path)
        except UserError:
            actual_path = os.path.realpath(path)
            if not any(actual_path.startswith(cache + os.sep) for cache in caches):
                raise


def _refuse_foreign(source: DataSource, path: str) -> None:
    """Raise UserError if a row's path is not the name of a file that tables of this source may read."""
    refuse_text(path)
    repo = f"hf://datasets/{source.name.partition(':')[0]}@"  # a stream of a folder on the Hub names its own files
    is_own = source.kind == "hub" and path.startswith(repo) and ".." not in path.split("/")
    if not is_own and (not source.is_local or "://" in path):
        raise UserError(
            f"{source.name} names a file instead of an image ({path[:80]!r}), which is not read for "
            "safety; give data that contains its images"
        )


# ---- columns


def _find_columns(features: "Features", name: str, selection: NamedColumns) -> Columns:
    """Return the image and label columns; raise UserError if one is missing or several are possible."""
    from datasets import ClassLabel

    selection.check(features, name)
    columns = f"'{name}' has the columns {', '.join(map(str, features))}"
    image = selection.image or _find_image_column(features)
    if image is None:
        raise UserError(f"{columns}, but which one holds the images is unclear; give its name with --image-column")
    if label := selection.label or _find_name(_LABEL_NAMES, features):
        return Columns(image, (label,), selection.indicators)
    for json_column in ("json", "jsn"):  # webdataset
        fields: Any = features.get(json_column)
        if isinstance(fields, dict) and (label := _find_name(_LABEL_NAMES, fields)):
            return Columns(image, (json_column, label))
    classes = [column for column, feature in features.items() if isinstance(feature, ClassLabel)]
    if len(classes) == 1:
        return Columns(image, (classes[0],))
    raise UserError(
        f"{columns}, but none is known to hold the classes; name the column of class numbers or names "
        "'label', or give its name with --label-column"
    )


def _find_image_column(features: "Features") -> str | None:
    """Return the image column by name and type, else by type, else by name; None if several of a type have no name."""
    from datasets import Image

    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    usual = _find_name(_IMAGE_NAMES, typed or features)
    return typed[0] if usual is None and len(typed) == 1 else usual


def _find_name(usual_names: Iterable[str], columns: Collection[str]) -> str | None:
    """Return the first usual name that is among the columns, or None."""
    return next((name for name in usual_names if name in columns), None)


def _shorten(error: BaseException) -> str:
    """Return the text of an error in at most 300 characters, or its type."""
    return textwrap.shorten(str(error), 300, placeholder="...") or type(error).__name__


# ---- streams: every image is decoded, checked and assigned to its split when it is read


@dataclass(frozen=True)
class StreamReader:
    """Map function that turns batches of undecoded rows of a stream into RGB images and class numbers.

    A bad image raises UserError; with `skip_bad_images` it is left out with a warning and added to `skipped` (every
    loader worker has its own list).

    Attributes:
        columns: where the images and labels are.
        labels: the classes.
        split: name of the split.
        min_size: (height, width) px that every image must have.
        skip_bad_images: leave bad images out instead of raising.
        skipped: names of the bad images.
        source: for the position of a bad image in its file.
        missing: splits that are cut from the training stream; the reader then keeps only the images of its own split.
        seed: of the cut.
    """

    columns: Columns
    labels: LabelMap
    split: str
    min_size: tuple[int, int] = (1, 1)
    skip_bad_images: bool = False
    skipped: list[str] = field(default_factory=list[str])
    source: DataSource | None = None
    missing: tuple[str, ...] = ()
    seed: int = 0

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Decode the images of a batch, and drop rows of other splits and unreadable images."""
        images: list[Any] = []
        labels: list[int] = []
        rows = (row or {} for row in batch[self.columns.image])
        for stored_image, raw_label in zip(rows, self.columns.labels(batch), strict=True):
            path = stored_image.get("path")
            if stored_image.get("bytes") is None and path is not None and self.source is not None:
                _refuse_foreign(self.source, path)
            scan, content = hash_image(stored_image, "")
            if self.missing and assign_split(scan.digest, self.missing, seed=self.seed) != self.split:
                continue
            scan, image = decode_scanned(scan, content)
            problem = scan.find_problem(self.min_size)
            if problem is None:
                if raw_label not in self.labels.numbers:  # raises; only now, because `_names` may read all files
                    self.labels.get_number(raw_label, f"image '{self._names(scan)[0]}'")
                labels.append(self.labels.numbers[raw_label])
                images.append(image)
            elif self.skip_bad_images:
                self._skip(scan)
            else:
                raise_bad_image(replace(scan, name=self._names(scan)[0]), problem)
        return {"image": images, "label": labels}

    def _skip(self, scan: ImageScan) -> None:
        """Warn of a bad image and of its duplicates, and add their names to `skipped`."""
        for name in map(shorten_path, self._names(scan)):
            if name not in self.skipped:  # the stream is read again in every epoch
                self.skipped.append(name)
                logger.warning("skipped the unreadable image %s", to_one_line(name))

    def _names(self, scan: ImageScan) -> list[str]:
        """Return file and row of an image and of its duplicates; else its path, or its split and digest."""
        positions: list[str] = []
        if self.source is not None and self.source.kind in ("parquet", "webdataset"):
            positions_by_digest = _locate_images(self.source.kind, tuple(self.source.name_files()), self.columns.image)
            positions = positions_by_digest.get(scan.digest, [])
        return positions or [scan.name or f"of split {self.split} with SHA-256 {scan.digest[:12]}"]

    def apply(self, stream: "IterableDataset") -> "IterableDataset":
        """Return a stream of {"image": RGB image, "label": class number} that reads an undecoded stream."""
        columns = [self.columns.image, self.columns.label[0]]
        return stream.map(self, batched=True, batch_size=_BATCH, remove_columns=columns)


@functools.lru_cache(maxsize=1)
def _locate_images(kind: str, named_files: tuple[tuple[str, Path], ...], column: str) -> Mapping[str, list[str]]:
    """Return the SHA-256 of every stored image with its positions, such as "train/a.parquet, row 3".

    The files are read once in every process, unless they are larger than `_SEARCHED_BYTES` together.
    """
    if sum(read_sizes(path for _, path in named_files).values()) > _SEARCHED_BYTES:
        return {}
    positions: dict[str, list[str]] = {}
    for name, path in named_files:
        for position, content in _iterate_images(kind, path, column):
            positions.setdefault(hashlib.sha256(content).hexdigest(), []).append(f"{name}, {position}")
    return positions


def _iterate_images(kind: str, path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    """Yield the position and the bytes of every image in a file; no bytes for an image that the file only names."""
    from pyarrow import parquet

    with path.open("rb") as file:
        if kind == "webdataset":
            with tarfile.open(fileobj=file) as archive:
                for member in archive:
                    part = archive.extractfile(member)
                    if part is not None:  # no folder
                        yield member.name, part.read()
            return
        batches = parquet.ParquetFile(file).iter_batches(batch_size=64, columns=[column])
        stored_images = (stored_image for batch in batches for stored_image in batch.column(0).to_pylist())
        for row, stored_image in enumerate(stored_images):
            content = stored_image.get("bytes") if isinstance(stored_image, dict) else stored_image
            if not isinstance(content, list):  # a list of pixels has no file
                yield f"row {row}", content if isinstance(content, bytes) else b""
