"""Opening a source as `datasets` tables or streams, and finding the image and the label among their columns."""

import csv
import functools
import glob
import hashlib
import json
import logging
import math
import os
import re
import tarfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_vit.data.files import FileNames, refuse_text
from hf_vit.data.images import Seen, open_image, raise_bad, short_name, tell_dark
from hf_vit.data.labels import LabelMap, first_of, plain_label, plain_name, typed_labels
from hf_vit.data.sources import DataSource
from hf_vit.data.splits import SPLITS, part_of, split_name
from hf_vit.errors import UserError
from hf_vit.repositories.reading import reading
from hf_vit.repositories.stores import in_store, sizes

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

logger = logging.getLogger(__name__)
_IMAGE_NAMES = ("image", "img", "picture")
_PATH_NAMES = ("file_name", "image", "filename", "file", "path", "image_path", "filepath", "img", "picture")
_LABEL_NAMES = ("label", "labels", "cls", "class", "target", "fine_label", "cls.txt")
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
# Decoded images waiting inside a stream; small, so that a stream of large photographs stays small in memory.
_BATCH = 16


@dataclass(frozen=True)
class Columns:
    """Where a table keeps its images and labels.

    Attributes:
        image: column.
        label: column, or a path, as webdataset may keep it inside a json column.
        indicators: in its stead a column of 0 and 1 for every class.
    """

    image: str = "image"
    label: tuple[str, ...] = ("label",)
    indicators: tuple[str, ...] = ()

    @property
    def labelling(self) -> list[str]:
        """The columns that labels are made of."""
        return list(self.indicators) or [self.label[0]]

    def labels(self, batch: Mapping[str, Any]) -> list[Any]:
        """Return the raw labels of a batch of columns; refuse an indicator that is neither 0 nor 1."""
        if self.indicators:
            columns = typed_labels({name: plain_label(list(batch[name])) for name in self.indicators})
            for name, values in columns.items():
                if wrong := [value for value in values if str(value).lower() not in _INDICATORS]:
                    raise UserError(
                        f"the column {name} holds {wrong[0]!r}; label columns need 1 where an image has the "
                        "class and 0 where not"
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
        """Raise UserError where one of them is not there."""
        columns = list(have)
        labels = self.indicators or (self.label,)
        for option, given in (("--image-column", self.image), *(("--label-column", name) for name in labels)):
            if given is not None and given not in columns:
                raise UserError(f"'{name}' has no column '{given}' ({option}); it has {', '.join(map(str, columns))}")


@dataclass(frozen=True)
class RawTables:
    """Splits as they were opened, or with `columns` chosen: `columns.image` undecoded ({"bytes", "path"}), labels raw.

    `label_names` is None where the source does not name its classes, `revision` where it has no commit. `labels` are
    those of folders and lists, which are no column of the tables; `schemas` those of parquet files.
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
        """The columns and their types; None of a stream that does not tell them."""
        return next(iter(self.splits.values())).features


def image_table(paths: "Iterable[str | Path]") -> "Dataset":
    """Return a table with the column "image", undecoded, whose rows name these files."""
    from datasets import Dataset, Features, Image

    stored = [{"bytes": None, "path": str(path)} for path in paths]
    for row in stored:
        refuse_text(str(row["path"]))
    return Dataset.from_dict({"image": stored}, features=Features({"image": Image(decode=False)}))


def open_tables(source: DataSource, *, streaming: bool) -> RawTables:
    """Open parquet or webdataset files, or a data set of the Hub, with all columns.

    What its rows name in place of images is not refused yet: see `refuse_places`.
    """
    if source.kind == "hub":
        return _open_hub(source, streaming=streaming)
    from datasets import load_dataset

    schemas = _check_files(source)
    _refuse_other_classes(source.name, schemas)
    if source.kind == "webdataset":
        from datasets.packaged_modules.webdataset.webdataset import WebDataset

        WebDataset.DECODERS["cls"] = _class_number  # else int, which makes one class of 1 and 01
    # load_dataset takes patterns: a bracket in a file name must not become one.
    files = {split: [glob.escape(str(path.resolve())) for path in paths] for split, paths in source.files.items()}
    try:
        loaded: Any = load_dataset(source.kind, data_files=files, streaming=streaming)
    except Exception as error:  # pyarrow, tarfile and datasets each raise their own
        cause = _shown(error.__cause__ or error)
        remedy = "; give all values of a field the same type" if "incompatible types" in cause else ""
        raise UserError(f"'{source.name}' cannot be read as {source.kind}: {cause}{remedy}") from error
    return RawTables({split: loaded[split] for split in SPLITS if split in loaded}, schemas=schemas)


def _class_number(content: bytes) -> int:
    """Return the number in a .cls file of webdataset."""
    text = content.decode("utf-8", "backslashreplace").strip()
    if not re.fullmatch("0|-?[1-9][0-9]{0,17}", text):
        raise UserError(
            f"a .cls file holds {text!r:.40}, which is not written as a class number; write such classes into .txt "
            "files, and give --label-column txt"
        )
    return int(text)


def read_labels(source: DataSource, opened: RawTables | None, named: NamedColumns, *, streaming: bool) -> RawTables:
    """Return images and raw labels: of a folder or a list, or the columns that hold them in what was `opened`."""
    if opened is None:
        return _read_folder(source) if source.kind == "folder" else _read_list(source, named)
    name, features = source.name, opened.features
    if features is None:
        raise UserError(f"'{name}' cannot list its columns when streamed; load it without streaming")
    columns, notes = _find_columns(features, name, named), [*opened.notes]
    _refuse_mixed_labels(name, opened.schemas, columns.labelling)
    chosen = [columns.image, *columns.labelling]
    selected = {split: table.select_columns(chosen) for split, table in opened.splits.items()}
    splits = undecoded(selected, columns.image, name, notes, may_read_twice=not streaming or source.kind != "hub")
    for table in () if streaming else splits.values():  # of a stream every row is looked at as it comes
        refuse_places(table, columns.image, source)
    label = features[columns.labelling[0]]
    names: Iterable[str] | None = columns.indicators or getattr(getattr(label, "feature", label), "names", None)
    return replace(opened, splits=splits, columns=columns, label_names=names and list(names), notes=notes)


# ---- parquet and webdataset files


def _check_files(source: DataSource) -> list[tuple[str, Any]]:
    """Return the name and schema of every parquet file; refuse files, tar too, that are cut off or of another kind."""
    from pyarrow import parquet

    schemas: list[tuple[str, Any]] = []
    for name, path in source.named_files():
        try:
            with path.open("rb") as file:
                if source.kind == "parquet":
                    schemas.append((name, schema := parquet.read_schema(file)))
                    if twice := [column for column, count in Counter(schema.names).items() if count > 1]:
                        raise UserError(f"{name} of '{source.name}' has the column '{twice[0]}' twice; rename one")
                    continue
                with tarfile.open(fileobj=file):  # reads the first header
                    pass
                if path.suffix == ".tar":
                    file.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
                    if any(file.read()):
                        raise tarfile.ReadError("cut off: the two empty blocks at its end are missing")
        except UserError:
            raise
        except Exception as error:  # pyarrow, tarfile and gzip each raise their own
            raise UserError(
                f"'{source.name}' cannot be read as {source.kind}: the file {name} is damaged ({_shown(error):.120}); "
                "put it back, or remove it"
            ) from error
    return schemas


def _refuse_mixed_labels(name: str, schemas: Iterable[tuple[str, Any]], columns: Sequence[str]) -> None:
    """A label column is text in all parquet files or in none: `datasets` casts to one file's type, so 01 became 1."""
    from pyarrow import types

    known: dict[str, dict[bool, tuple[str, Any]]] = {column: {} for column in columns}
    for file, schema in schemas:
        for column in known.keys() & schema.names:
            kind: Any = schema.field(column).type
            while hasattr(kind, "value_type"):  # of lists, and of categories
                kind = kind.value_type
            known[column].setdefault(types.is_string(kind) or types.is_large_string(kind), (file, kind))
    for column, kinds in known.items():
        if len(kinds) == 2:
            (text, _), (other, kind) = kinds[True], kinds[False]
            raise UserError(
                f"the label column '{column}' of '{name}' is text in {text}, {kind} in {other}; save the column with "
                "the same type in all files"
            )


def _refuse_other_classes(name: str, schemas: Iterable[tuple[str, Any]]) -> None:
    """Files of one data set name the classes of a column alike: `datasets` reads all by the first's names."""
    from datasets import Features

    known: dict[str, tuple[str, list[str]]] = {}
    for file, schema in schemas:
        waiting: list[tuple[str, Any]] = list(Features.from_arrow_schema(schema).items())
        while waiting:  # names may lie inside of another column
            column, feature = waiting.pop()
            if isinstance(names := getattr(feature, "names", None), list):
                classes = list(map(plain_name, names))
                first, others = known.setdefault(column, (file, classes))
                if classes != others:
                    raise UserError(
                        f"'{name}' numbers the classes of the column '{column}' in {first} ({first_of(others)}) "
                        f"differently than in {file} ({first_of(classes)}); save all of its files with the same class "
                        "names, or with names in place of numbers"
                    )
            inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
            waiting += [(column, each) for each in inner if each is not None]


# ---- folders and lists


def _read_folder(source: DataSource) -> RawTables:
    names = sorted({label for classes in source.folder.values() for label in classes})
    untrained = [label for label in names if "train" in source.folder and label not in source.folder["train"]]
    if untrained:
        split = next(split for split, classes in source.folder.items() if untrained[0] in classes)
        raise UserError(
            f"class '{untrained[0]}' of '{source.name}' is in {split} but not in train; add a folder of that name to "
            "train, or remove the other"
        )
    rows = {
        split: [(path, label) for label, paths in sorted(source.folder[split].items()) for path in sorted(paths)]
        for split in SPLITS
        if split in source.folder
    }
    splits = {split: image_table(path for path, _ in pairs) for split, pairs in rows.items()}
    return RawTables(splits, label_names=names, labels={s: [label for _, label in rows[s]] for s in rows})


def _read_list(source: DataSource, named: NamedColumns) -> RawTables:
    """Read CSV files or lines of JSON that name image files, from where they lie, and their labels.

    A column "split" deals the rows out; without one the list's own place does, or the folder of the image. Cells are
    text until all lists are read; then `typed_labels` types the labels.
    """
    paths: dict[str, list[Path]] = {}
    labels: dict[str, list[Any]] = {}
    names = FileNames()
    for listed, place in ((split, place) for split, places in source.files.items() for place in places):
        for path, label, split in _listed(place, source.name, named):
            # Else by the image's own folder, train/cat.png, or by the list's.
            of_folder = next((name for name in map(split_name, Path(path).parts[:1]) if name), listed)
            part = of_folder if split is None else split_name(str(split))
            if part is None:
                raise UserError(f"{place.name}: unknown split '{split}'; needed: train, validation or test")
            if in_store(place) and (path.startswith("/") or "://" in path or ".." in path.split("/")):
                raise UserError(f"{place.name} names {path[:80]!r}, which is outside its folder; correct it")
            if "://" in path:
                raise UserError(f"{place.name} names the address {path[:80]!r}; download the images and name the files")
            paths.setdefault(part, []).append(names.find(place.parent / path))
            labels.setdefault(part, []).append(label)
    source.folder.update({split: {"": paths[split]} for split in SPLITS if split in paths})
    splits = {split: image_table(paths[split]) for split in SPLITS if split in paths}
    typed = labels if named.indicators else typed_labels(labels)
    return RawTables(splits, label_names=list(named.indicators) or None, labels=typed)


def _listed(place: Path, name: str, named: NamedColumns) -> Iterator[tuple[str, Any, Any]]:
    """Yield (image's path, label, split or None) of every row of a list."""
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
        raise UserError(f"{place.name} of '{name}' cannot be read as a list: {_shown(error)}{remedy}") from error
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
        remedy = f", or move {place.name} away if the names of its folders are the classes" if image else ""
        raise UserError(
            f"{place.name} has the columns {', '.join(have)}; needed: one of {what}, or name one with {option}{remedy}"
        )
    columns = Columns(image, (label,), named.indicators)
    for number, row in enumerate(rows, start=1):
        for column in (image, *columns.labelling, "split"):
            if row.get(column) is _TWICE:
                raise UserError(f"{place.name}, row {number}: '{column}' appears twice; remove or rename one")
        if not isinstance(row.get(image), str) or not row[image]:
            raise UserError(
                f"{place.name}, row {number}: {row.get(image)!r} in the column {image} is not a file name; correct it"
            )
    labels = columns.labels({column: [row.get(column) for row in rows] for column in columns.labelling})
    for row, value in zip(rows, labels, strict=True):
        yield row[image], value, plain_label(row.get("split"))


def _csv_rows(place: Path) -> Iterator[dict[str, Any]]:
    """Yield every row of a CSV file by its columns, as text."""
    with place.open(encoding="utf-8-sig", newline="") as file:
        first = next((line for line in file if line.strip()), "")
        if stated := re.fullmatch("sep=([\t;,])", first.strip("\r\n")):  # for Excel
            first = next(file, "")
        delimiter = stated[1] if stated else max("\t;,", key=first.count)
        cells = csv.reader(chain([first], file), delimiter=delimiter, skipinitialspace=True, strict=True)
        header = [plain_name(name) for name in next(cells)]
        if not header:
            raise ValueError("it is empty")
        twice = {name: _TWICE for name, count in Counter(header).items() if count > 1}
        for number, row in enumerate(filter(any, cells), start=1):  # Excel writes rows of empty cells
            if len(row) != len(header):
                raise ValueError(f"row {number} has {len(row)} cells, the header {len(header)}")
            yield {**dict(zip(header, row, strict=True)), **twice}


def _json_rows(place: Path) -> Iterator[dict[str, Any]]:
    """Yield every object of a file of lines of JSON, with numbers and truth values as text."""
    with place.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            try:
                row = json.loads(line, object_pairs_hook=_fields, parse_int=str, parse_float=str, parse_constant=str)
            except json.JSONDecodeError as error:
                raise ValueError(f"row {number}: {error.msg} at character {error.pos}") from error
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object {{...}}")
            yield row


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(plain_name(name) for name, _ in pairs)
    return {
        name: _text_of(value) if counts[name] == 1 else _TWICE
        for name, value in ((plain_name(name), value) for name, value in pairs)
    }


def _text_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_of(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return str(value).lower() if isinstance(value, bool) else value


# ---- data sets of the Hub: what files say of other places is refused before any of these is looked at


def _open_hub(source: DataSource, *, streaming: bool) -> RawTables:
    from datasets import load_dataset

    repo, _, configuration = source.name.partition(":")
    neither = f"'{source.name}' is not a path, and cannot be loaded as a data set of the Hub"
    try:
        with reading(repo):
            commit = hub_commit(repo)
    except UserError as error:  # no network, unknown name: datasets itself would retry for half a minute, noisily
        if not _is_cached(repo):
            raise UserError(f"{neither}: {error}; check the spelling of the path or id") from error
        commit = None  # what was read before is loaded
    for pattern in () if commit is None else _declared(repo, commit):
        if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~", "\\")) or ".." in pattern.split("/"):
            raise UserError(
                f"{repo} names files outside the repository ({pattern[:80]!r}), which are not read; give other data"
            )
    try:
        loaded: Any = load_dataset(repo, configuration or None, revision=commit, streaming=streaming)
        read = dict(loaded)
    except Exception as error:  # no configuration chosen, no images: datasets' text says which
        cause = error.__cause__ or error
        if "pickle" in str(cause) or "weights_only" in str(cause):
            raise UserError(
                f"{repo} holds pickles, which could run code, so it was not loaded; give other data"
            ) from error
        chosen = "" if configuration else f" (a choice of configuration is written {repo}:CONFIGURATION)"
        raise UserError(f"{neither}: {_shown(cause)}{chosen}") from error
    known = {name: split_name(name) for name in read}
    splits = {split: read[name] for name, split in known.items() if split}
    notes = [f"split '{name}' of '{source.name}' was left out" for name, split in known.items() if not split]
    if not splits and len(read) == 1:
        splits, notes = {"train": next(iter(read.values()))}, []
    if not splits:
        raise UserError(f"'{source.name}' has the splits {', '.join(read)}; needed: train, validation or test")
    return RawTables({split: splits[split] for split in SPLITS if split in splits}, notes=notes, revision=commit)


def hub_commit(repo: str) -> str | None:
    """Return the commit of a Hub data set that loading now gives; raises what huggingface_hub raises."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repo, timeout=10).sha


def _is_cached(repo: str) -> bool:
    """Return whether `datasets` has built this data set before, and so can load it without the Hub."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *user, name = repo.split("/")
    return Path(config.HF_DATASETS_CACHE, "___".join([*user, camelcase_to_snakecase(name)])).expanduser().is_dir()


def _declared(repo: str, commit: str) -> Iterator[str]:
    """Yield every pattern of files in the data set's own description: its card, or the file in its stead."""
    import yaml
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in ("README.md", ".huggingface.yaml"):
        with reading(repo):
            try:
                text = Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit)).read_text("utf-8")
            except EntryNotFoundError:
                continue
        front = text.split("\n---", 1)[0].removeprefix("---") if name.endswith(".md") else text
        try:
            described: object = yaml.safe_load(front)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UserError(f"{name} of {repo} cannot be read as YAML; its author must correct it") from error
        yield from _patterns_in(described)


def _patterns_in(value: Any, within: bool = False, depth: int = 0) -> Iterator[str]:
    """Texts under a key that names files, at any depth."""
    if within and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list) and depth < 20:
        for key, item in value.items() if isinstance(value, Mapping) else ((None, each) for each in value):
            is_within = (within and key != "split") or key in ("data_files", "data_dir")
            yield from _patterns_in(item, is_within, depth + 1)


def refuse_places(table: "Dataset", column: str, source: DataSource) -> None:
    """Refuse a table whose images, instead of being in it, are to be read from somewhere else.

    A stranger's may only name what lies in the Hub's caches, one of this machine no addresses.
    """
    import pyarrow.compute
    from datasets import config
    from huggingface_hub import constants

    pc: Any = pyarrow.compute  # whose functions are made when it is imported
    images: Any = table.data.column(column)
    outside = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    caches = [os.path.realpath(place) for place in (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE)]
    for path in pc.unique(outside).to_pylist():
        if path is not None and not any(os.path.realpath(path).startswith(place + os.sep) for place in caches):
            _refuse_foreign(source, path)


def _refuse_foreign(source: DataSource, path: object) -> None:
    """Refuse a place where a table of this source has no business, and what is none."""
    refuse_text(str(path))
    if not source.may_name_files or "://" in str(path):
        raise UserError(
            f"{source.name} names a file in place of an image ({str(path)[:80]!r}), which is not read; give data that "
            "hold their images"
        )


# ---- columns


def _find_columns(features: "Features", name: str, named: NamedColumns) -> Columns:
    """Return the image and the label column; refuse a table without, or with several of no usual name."""
    from datasets import ClassLabel, Image

    named.check(features, name)
    typed = [column for column, feature in features.items() if isinstance(feature, Image)]
    usual = [column for column in _IMAGE_NAMES if column in features]
    candidates = [named.image] if named.image else [column for column in usual if column in typed] or typed or usual
    have = f"'{name}' has the columns {', '.join(map(str, features))}"
    if not candidates or (len(candidates) > 1 and candidates[0] not in _IMAGE_NAMES):
        raise UserError(f"{have}; needed: one column of images, best named 'image', or named with --image-column")
    if named.label:
        return Columns(candidates[0], (named.label,), named.indicators)
    nested = [(column, label) for column in ("json", "jsn") for label in _LABEL_NAMES]
    classes = [(column,) for column, feature in features.items() if isinstance(feature, ClassLabel)]
    for column, *inside in (*((label,) for label in _LABEL_NAMES), *nested, *(classes if len(classes) == 1 else ())):
        fields: Any = features.get(column)
        if fields is not None and (not inside or (isinstance(fields, dict) and inside[0] in fields)):
            return Columns(candidates[0], (column, *inside))
    raise UserError(
        f"{have}; needed: a column 'label' with the class of every image, as a number or a name, or another by "
        "--label-column"
    )


def undecoded(
    splits: Mapping[str, Any], column: str, name: str, notes: list[str], *, may_read_twice: bool = True
) -> dict[str, Any]:
    """Return tables or streams with an undecoded column of images; lists of pixels become PNG or TIFF files.

    A first pass, if it `may_read_twice`, looks for the lowest and highest number of all splits. Within 0..255 numbers
    are 8-bit values, however wide their type is; floats within 0..1 are fractions of 255. Lists that are no images are
    refused.
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
    if not may_read_twice and not (leaf == pa.uint8() or pa.types.is_boolean(leaf)):
        raise UserError(f"{where} holds pixels as {leaf}, whose range all rows must tell; load it without streaming")
    if may_read_twice and (pa.types.is_integer(leaf) or pa.types.is_floating(leaf)):
        stored = (part for table in splits.values() for part in table.with_format("arrow").iter(1000))
        flat = (pc.list_flatten(part.column(column).cast(kind), recursive=True) for part in stored)
        flat = (part.cast(pa.float64()) if pa.types.is_floating(leaf) else part for part in flat)
        ends = [end for part in flat for end in pc.min_max(part).as_py().values() if end is not None]
        low, high = min(ends, default=0), max(ends, default=0)
        notes += tell_dark(high, 8) if pa.types.is_integer(leaf) else []
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
        if pixels.dtype.kind == "f" and is_byte and np.isfinite(pixels).all():
            pixels = np.rint(pixels * (255 if high <= 1 else 1)).astype(np.uint8)
        has_colors = pixels.ndim == 3 and pixels.shape[2] <= _CHANNELS and pixels.dtype.kind in "ui" and is_byte
        if not (has_colors or (pixels.ndim == 2 and pixels.dtype.kind in "uifb")) or not pixels.size:
            shape = "x".join(map(str, pixels.shape)) or "different lengths"
            ends = f", numbers from {low:,} to {high:,}" if pixels.dtype.kind in "uif" else f" ({pixels.dtype})"
            sides = ((math.isqrt(pixels.size // depth), depth) for depth in (1, 3))
            fit = [f"{side}x{side}x{depth}" for side, depth in sides if side * side * depth == pixels.size]
            raise UserError(
                f"{where} holds lists of {shape}{ends}; needed: height x width numbers, or height x width x channels "
                f"from 0 to 255 or 0 to 1{f', such as {fit[0]}' if pixels.ndim == 1 and fit else ''}; change them"
            )
        if is_whole:
            whole = np.iinfo(np.int32)
            pixels = pixels.astype(np.uint8) if is_byte else pixels.clip(whole.min, whole.max).astype(np.int32)
        images.append(encode_np_array(pixels))
    return {column: images}


def _shown(error: BaseException) -> str:
    return textwrap.shorten(str(error), 300, placeholder="...") or type(error).__name__


# ---- streams: every image is decoded, checked and dealt to its split while it flows past


@dataclass(frozen=True)
class StreamReader:
    """Batched map function of a stream: undecoded rows in, RGB images and class numbers out.

    A bad image raises UserError, or with skip_bad_images is left out, named in a warning and in `skipped` (of this
    process: in a loader's worker the list is the worker's own). It is named by its file and row, see `_names`. Where
    splits are `missing`, this one is the part of a training stream that is cut by content and `seed`.
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
        images: list[Any] = []
        labels: list[int] = []
        rows = (row or {} for row in batch[self.columns.image])
        for stored, raw in zip(rows, self.columns.labels(batch), strict=True):
            if self.missing:
                content: bytes | None = stored.get("bytes")
                if content is None:  # of a file that cannot be read its name must do: whose part it is will tell of it
                    content = str(stored.get("path")).encode()
                digest = hashlib.sha256(content).hexdigest()
                if part_of(digest, self.missing, seed=self.seed) != self.split:
                    continue
            if stored.get("bytes") is None and stored.get("path") is not None and self.source is not None:
                _refuse_foreign(self.source, stored.get("path"))
            seen, image = open_image(stored, "")
            problem = seen.problem_below(self.min_size)
            if problem is None:
                if raw not in self.labels.numbers:
                    self.labels.number(raw, f"image '{self._names(seen)[0]}'")
                labels.append(self.labels.numbers[raw])
                images.append(image)
                continue
            if not self.skip_bad_images:
                raise_bad(replace(seen, name=self._names(seen)[0]), problem)
            for name in map(short_name, self._names(seen)):
                if name not in self.skipped:  # a stream passes once an epoch
                    self.skipped.append(name)
                    logger.warning("left out the unreadable image %s", name)
        return {"image": images, "label": labels}

    def _names(self, seen: Seen) -> list[str]:
        """Return where an image stands, for people: file and row, of several equal ones all; else what is known of
        it.
        """
        known: list[str] = []
        if self.source is not None and self.source.kind in ("parquet", "webdataset"):
            places = _image_places(self.source.kind, tuple(self.source.named_files()), self.columns.image)
            known = places.get(seen.digest, [])
        return known or [seen.name or f"of split {self.split} with SHA-256 {seen.digest[:12]}"]

    def over(self, stream: "IterableDataset") -> "IterableDataset":
        """Return the stream of {"image": RGB image, "label": class number} that this reader makes of an undecoded
        one.
        """
        columns: Sequence[str] = [self.columns.image, self.columns.label[0]]
        return stream.map(self, batched=True, batch_size=_BATCH, remove_columns=list(columns))


@functools.lru_cache(maxsize=1)
def _image_places(kind: str, named_files: tuple[tuple[str, Path], ...], column: str) -> Mapping[str, list[str]]:
    """SHA-256 of every stored image -> which files and rows hold it, by their names for people.

    The files are read again, once a process, if they are not larger than `_SEARCHED_BYTES`.
    """
    if sum(sizes(path for _, path in named_files).values()) > _SEARCHED_BYTES:
        return {}
    places: dict[str, list[str]] = {}
    for name, path in named_files:
        for row, content in _stored_images(kind, path, column):
            places.setdefault(hashlib.sha256(content).hexdigest(), []).append(f"{name}, {row}")
    return places


def _stored_images(kind: str, path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    from pyarrow import parquet

    with path.open("rb") as file:
        if kind == "webdataset":
            with tarfile.open(fileobj=file) as archive:
                yield from ((each.name, part.read()) for each in archive if (part := archive.extractfile(each)))
            return
        batches = parquet.ParquetFile(file).iter_batches(batch_size=64, columns=[column])
        for row, stored in enumerate(each for batch in batches for each in batch.column(0).to_pylist()):
            content = stored.get("bytes") if isinstance(stored, dict) else stored
            if not isinstance(content, list):  # of pixels, which is no file
                yield f"row {row}", content if isinstance(content, bytes) else b""
