"""`load_data`: from what a user types after `--data` to checked splits."""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hf_vit.data.annotations import Target
from hf_vit.data.builtin import SPLIT_NUMBERS, digits, photos
from hf_vit.data.dense_reading import read_dense
from hf_vit.data.dense_tables import DenseTables, tell_unseen
from hf_vit.data.fingerprints import content_fingerprint, digests_of, file_states, states_fingerprint, tell_copies
from hf_vit.data.fractals import Fractals
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import Seen, keep_good, scan, short_name, tell_dark
from hf_vit.data.labels import LabelMap, is_multi_label, is_unlabelled
from hf_vit.data.reading import (
    Columns,
    NamedColumns,
    StreamCut,
    StreamReader,
    Tables,
    broken_file,
    hub_commit,
    image_table,
    read_files,
    read_folder,
    read_hub,
    read_list,
)
from hf_vit.data.scenes import Scenes
from hf_vit.data.sources import DataSource, image_files, is_builtin, resolve_source
from hf_vit.data.splits import SPLIT_SEED, SPLITS, cut_rows, missing_splits
from hf_vit.errors import UserError
from hf_vit.repositories.stores import is_folder, place_of

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)
# Shards of a streamed folder: at most this many loader workers or processes share the reading.
_SHARDS = 16


def load_data(
    source: str,
    *,
    streaming: bool = False,
    skip_bad_images: bool = False,
    image_size: tuple[int, int] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    multi_label: bool = False,
    target: Target | None = "label",
    seed: int = SPLIT_SEED,
) -> ImageData:
    """Load labelled images by name, path or Hub id, and check them before any training.

    Args:
        source: "digits", "photos" or "fractals:classes=100,images=1000" (built in, the last synthetic); a folder of
            class folders, with or without train, validation (val) and test above them; a list (.csv, .jsonl) of image
            files and labels, or the folder of metadata.csv or metadata.jsonl; a parquet or webdataset (.tar) file, a
            folder or a glob of them; or a Hub data set id, `user/name` or `user/name:configuration`. An existing path
            is never taken for a Hub id.
        streaming: read while training instead of beforehand; images are then checked as they come.
        skip_bad_images: leave unreadable images out (named in `skipped`) instead of raising.
        image_size: (height, width) in px in which the built-in sets come, "photos" up to 384 px a side, "fractals" as
            squares of the longer side; None for their own pixels. Other sources keep theirs: the image processor
            resizes.
        image_column, label_column: of a list or table, where they are not called as usual; the latter also of masks
            or objects. Several label columns of
            0 and 1, "cat,dog", are classes of which an image may have several or none.
        target: "label"; "mask" for a class a pixel, "objects" for boxes, with masks where there are: see `ImageData`.
            None for what the source is laid out for. Such sources are "scenes:images=1000,size=64,clutter=0,seed=0"
            (built in, synthetic, for either), folders as ADE20K's (masks) and COCO's (objects), a COCO file (.json),
            parquet files and Hub data sets with a column of masks or objects.
        multi_label: take data whose images have a list of classes each, which most uses cannot do with.
        seed: of the cut where validation or test are missing. The built-in splits are fixed.

    Returns:
        The data. Missing validation and test splits were cut from train, about 10% each, by a hash of every image's
        file (`hf_vit.data.splits`), and `notes` says so. Images that occur more than once are told there, too.

    Raises:
        UserError: anything wrong with the source, a label or an image, with the remedy.
    """
    if image_size is not None and min(image_size) < 1:
        raise UserError(f"image size {image_size[0]}x{image_size[1]} px; both sides must be at least 1 px")
    resolved = resolve_source(source)
    named = NamedColumns(image_column, label_column)
    if resolved.kind in ("builtin", "folder", "masks", "coco"):
        named.check((), resolved.name)
    if resolved.kind == "builtin":
        return _builtin_data(resolved.name, image_size, streaming, target)
    if broken := broken_file(resolved):
        raise UserError(f"'{resolved.name}' cannot be read as {resolved.kind}: {broken}; put it back, or remove it")
    tables = read_dense(resolved, named, target)
    if tables is not None:
        data = _dense_data(resolved, tables, streaming, skip_bad_images, seed)
    else:
        data = _read(resolved, named, streaming, skip_bad_images, seed)
    if data.multi_label and not multi_label:
        raise UserError(
            f"the images of '{data.name}' have several classes each, for which there are hf-vit data, finetune without "
            "a teacher, and evaluate --protocol multi-label; for this give data with one class an image"
        )
    for note in data.notes:
        logger.info(note)
    return data


@dataclass(frozen=True)
class UnlabelledImages:
    """Images whose classes nobody looks at.

    Attributes:
        name: for people and for facts.json.
        table: with the column "image".
        seen: what the scan saw, row by row.
        left_out: how many were left out: unreadable, or excluded by their content.
    """

    name: str
    table: "Dataset"
    seen: list[Seen]
    left_out: int = 0

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over the images' contents; names and order do not matter."""
        return hashlib.sha256("\n".join(sorted(image.digest for image in self.seen)).encode()).hexdigest()[:16]

    def without(self, digests: Collection[str]) -> "UnlabelledImages":
        """Those whose contents are none of these."""
        rows = [row for row, image in enumerate(self.seen) if image.digest not in digests]
        if len(rows) == len(self.seen):
            return self
        left_out = self.left_out + len(self.seen) - len(rows)
        return UnlabelledImages(self.name, self.table.select(rows), [self.seen[row] for row in rows], left_out)


def load_unlabelled(
    source: str,
    *,
    image_size: tuple[int, int] | None = None,
    min_size: tuple[int, int] = (1, 1),
    skip_bad_images: bool = False,
) -> UnlabelledImages:
    """Load images to learn from without labels, every one of which is looked at.

    Args:
        source: a folder of images, in class folders or not; or as in `load_data`, whose labels do not count. Of a
            source with splits the training images are taken, of any other all.
        image_size, skip_bad_images: see `load_data`.
        min_size: (height, width) px that an image has at least.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    from datasets import Image, concatenate_datasets

    root = place_of(source).expanduser()
    paths = image_files(root) if source.strip() and not is_builtin(source) and is_folder(root) else []
    if paths:
        table = image_table(paths)
        name, seen, skipped = root.resolve().name, scan(table, "unlabelled"), 0
    else:
        data = load_data(source, image_size=image_size, skip_bad_images=skip_bad_images, multi_label=True)
        parts = [cast("Dataset", data.split(split)).select_columns(["image"]) for split in ("train", *data.cut)]
        table, name, skipped = concatenate_datasets(parts), data.name, len(data.skipped)
        seen = [image for split in ("train", *data.cut) for image in data.seen[split]]
    rows, bad = keep_good({"unlabelled": seen}, min_size, skip_bad_images)
    chosen = rows["unlabelled"]
    table = table.select(chosen).cast_column("image", Image())
    return UnlabelledImages(name, table, [seen[row] for row in chosen], skipped + len(bad))


def _read(source: DataSource, named: NamedColumns, streaming: bool, skip_bad_images: bool, seed: int) -> ImageData:
    if source.kind == "folder":
        tables = read_folder(source)
    elif source.kind == "list":
        tables = read_list(source, named)
    elif source.kind == "hub":
        tables = read_hub(source, named, streaming=streaming)
    else:
        tables = read_files(source, named, streaming=streaming)
    tables.notes.extend(source.notes)
    if streaming and source.kind not in ("folder", "list"):
        return _streams(source, tables, skip_bad_images, seed)
    return _tables_data(source, tables, streaming, skip_bad_images, seed)


def _builtin_data(name: str, image_size: tuple[int, int] | None, streaming: bool, target: Target | None) -> ImageData:
    if name.partition(":")[0] == "scenes":
        return _scenes_data(Scenes.parse(name), image_size, streaming, target or "objects")
    if target not in ("label", None):
        raise UserError(f"'{name}' has neither masks nor objects; give 'scenes', or data that have them")
    if name not in ("digits", "photos"):
        return _fractals_data(Fractals.parse(name), image_size, streaming)
    builtin = digits(image_size) if name == "digits" else photos(image_size)
    fingerprint = content_fingerprint(builtin.splits, builtin.seen, builtin.label_names)
    if streaming:
        return _streamed_tables(ImageData(name, fingerprint, builtin.splits, builtin.label_names), False)
    return ImageData(name, fingerprint, builtin.splits, builtin.label_names, seen=builtin.seen)


def _fractals_data(fractals: Fractals, image_size: tuple[int, int] | None, streaming: bool) -> ImageData:
    size = fractals.size or (32 if image_size is None else max(image_size))
    fingerprint = hashlib.sha256(fractals.name.encode()).hexdigest()[:16]
    if not streaming:
        builtin = fractals.load(size)
        return ImageData(fractals.name, fingerprint, builtin.splits, builtin.label_names, seen=builtin.seen)
    data = ImageData(fractals.name, fingerprint, {}, fractals.label_names)
    columns, labels = Columns("image", ("label",)), LabelMap.of_names(data.label_names)
    data.sizes = {split: fractals.count(split) for split in SPLIT_NUMBERS}
    for split in SPLIT_NUMBERS:
        data.readers[split] = fractals.stream(split, size), StreamReader(columns, labels, split, skipped=data.skipped)
    data.splits = {split: reader.over(stream) for split, (stream, reader) in data.readers.items()}
    return data


def _scenes_data(scenes: Scenes, image_size: tuple[int, int] | None, streaming: bool, target: Target) -> ImageData:
    if streaming:
        raise UserError(f"'{scenes.name}' is not streamed; load it without streaming")
    builtin = scenes.load(scenes.size or (64 if image_size is None else max(image_size)), target)
    fingerprint = hashlib.sha256(f"{scenes.name} {target}".encode()).hexdigest()[:16]
    return ImageData(scenes.name, fingerprint, builtin.splits, builtin.label_names, seen=builtin.seen, target=target)


def _tables_data(source: DataSource, tables: Tables, streaming: bool, skip_bad_images: bool, seed: int) -> ImageData:
    splits, names, multi_label = _labelled(source.name, tables)
    if multi_label and streaming:
        raise UserError(f"the images of '{source.name}' have several classes each; load them without streaming")
    data = ImageData(source.name, "", splits, names, notes=tables.notes, source=source, revision=tables.revision)
    data.multi_label = multi_label
    data.files = file_states(source, contents=streaming)
    if not streaming:
        seen = {split: scan(table, split) for split, table in splits.items()}
        rows, bad = keep_good(seen, (1, 1), skip_bad_images)
        splits = {split: table.select(rows[split]) for split, table in splits.items()}
        data.seen = {split: [seen[split][row] for row in rows[split]] for split in splits}
        data.skipped = list(map(short_name, bad))
    _deal_out(data, splits, seed)
    if streaming:
        data.fingerprint = _files_fingerprint(source, data.files)
        return _streamed_tables(data, skip_bad_images)
    return _decoded(data)


def _dense_data(
    source: DataSource, tables: DenseTables, streaming: bool, skip_bad_images: bool, seed: int
) -> ImageData:
    if streaming:
        raise UserError(f"'{source.name}' has {tables.target}, which are not streamed; load it without streaming")
    seen = {split: scan(table, split, partial(tables.annotated, split)) for split, table in tables.images.items()}
    rows, bad = keep_good(seen, (1, 1), skip_bad_images)
    good = {split: [seen[split][row] for row in rows[split]] for split in seen}
    names = tables.conclude(good)
    data = ImageData(
        source.name, "", {}, names, notes=[*source.notes, *tables.notes], source=source, target=tables.target
    )
    data.revision, data.seen, data.skipped = tables.revision, good, list(map(short_name, bad))
    data.files = file_states(source, contents=False)
    _deal_out(data, {split: tables.table(split, rows[split]) for split in seen}, seed)
    data.notes += tell_unseen(data.seen.get("train", ()), names)
    return _decoded(data)


def _deal_out(data: ImageData, splits: "dict[str, Dataset]", seed: int) -> None:
    """Put the splits into `data`, missing ones cut from train; and tell of images that occur more than once."""
    data.splits = splits
    data.cut = tuple(missing_splits(list(splits)))
    if data.cut:
        _cut(data, splits, seed)
    data.notes += tell_copies(data.splits, data.seen, data.label_names)  # pyright: ignore[reportArgumentType]
    data.notes += tell_dark(max((image.peak for seen in data.seen.values() for image in seen), default=0), 16)


def _decoded(data: ImageData) -> ImageData:
    import datasets

    tables = cast("dict[str, Dataset]", data.splits)
    decoded = {split: table.cast_column("image", datasets.Image()) for split, table in tables.items()}
    data.splits, data.fingerprint = decoded, content_fingerprint(decoded, data.seen, data.label_names)
    return data


def _labelled(name: str, tables: Tables) -> "tuple[dict[str, Dataset], list[str], bool]":
    """Tables with the columns "image" (undecoded) and "label" (class numbers), the class names, and if a list each."""
    from datasets import ClassLabel, List

    column, labelling = tables.columns.image, tables.columns.labelling
    read = cast("dict[str, Dataset]", tables.splits)
    raw = tables.labels
    if raw is None:
        raw = {split: tables.columns.labels(table.select_columns(labelling)[:]) for split, table in read.items()}
    for split in [split for split in raw if split != "train" and is_unlabelled(raw[split])]:
        tables.notes.append(f"split '{split}' of '{name}' has no labels and was left out")
        del raw[split]
    if not any(raw.values()):
        raise UserError(f"'{name}' holds no labelled images")
    labels = _label_map(name, tables, raw.get("train") or [label for values in raw.values() for label in values])
    multi_label = is_multi_label([label for values in raw.values() for label in values])
    classes = ClassLabel(names=labels.names)
    splits: dict[str, Dataset] = {}
    for split, values in raw.items():
        numbers = [labels.numbers_of(value, f"image {row} of split {split}") for row, value in enumerate(values)]
        table = read[split].select_columns([column]).rename_columns({} if column == "image" else {column: "image"})
        splits[split] = table.add_column("label", numbers, feature=List(classes) if multi_label else classes)  # pyright: ignore[reportArgumentType]
    return splits, labels.names, multi_label


def _label_map(name: str, tables: Tables, values: list[Any]) -> LabelMap:
    names = tables.label_names
    labels = LabelMap.of_values(values, name) if names is None else LabelMap.of_names(names)
    listed = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if len({labels.numbers.get(value) for value in listed} - {None}) < 2:
        raise UserError(f"'{name}' holds images of one class only ({labels.names[0]}); a classifier needs at least two")
    return labels


def _cut(data: ImageData, splits: "dict[str, Dataset]", seed: int) -> None:
    """Put the splits into `data`, those of `data.cut` cut from train."""
    train, seen = splits["train"], data.seen.get("train")
    digests = digests_of(train) if seen is None else [image.digest for image in seen]
    # What has no label is dealt out as if it were all of one class.
    labels, names = (
        ([0] * len(train), ["image"]) if data.target != "label" else (list(train["label"]), data.label_names)
    )
    parts, notes = cut_rows(digests, labels, names, data.cut, seed=seed)
    cut = {split: train.select(rows) for split, rows in parts.items()}
    data.splits = {split: cut.get(split, splits.get(split)) for split in SPLITS}  # pyright: ignore[reportAttributeAccessIssue]
    if seen is not None:
        data.seen = data.seen | {split: [seen[row] for row in rows.tolist()] for split, rows in parts.items()}
    sizes = " and ".join(f"{len(cut[split])} images for {split}" for split in data.cut)
    data.notes += [f"{sizes} were cut from the {len(train)} training images (by content, seed {seed})", *notes]


def _streamed_tables(data: ImageData, skip_bad_images: bool) -> ImageData:
    """The same data as streams; shuffled once, as the tables are sorted by class."""
    import datasets

    columns, labels = Columns("image", ("label",)), LabelMap.of_names(data.label_names)
    tables = cast("dict[str, Dataset]", data.splits)
    data.sizes = {split: len(table) for split, table in tables.items()}
    for split, table in tables.items():
        undecoded = table.cast_column("image", datasets.Image(decode=False)).shuffle(seed=0)
        stream = undecoded.to_iterable_dataset(num_shards=min(_SHARDS, len(table)))
        reader = StreamReader(columns, labels, split, skip_bad_images=skip_bad_images, skipped=data.skipped)
        data.readers[split] = (stream, reader)
    data.splits = {split: reader.over(stream) for split, (stream, reader) in data.readers.items()}
    return data


def _streams(source: DataSource, tables: Tables, skip_bad_images: bool, seed: int) -> ImageData:
    """Streams of parquet, webdataset or Hub files; classes that the source does not name are read in a first pass."""
    read = cast("dict[str, IterableDataset]", tables.splits)
    if tables.label_names is not None:
        labels = LabelMap.of_names(tables.label_names)
    elif source.kind == "hub":
        raise UserError(f"'{source.name}' does not name its classes, which streaming needs; load it without streaming")
    else:
        labels = _label_map(source.name, tables, list(_distinct(read.get("train", next(iter(read.values()))), tables)))
    files = file_states(source)
    fingerprint = _files_fingerprint(source, files)
    data = ImageData(source.name, fingerprint, {}, labels.names, notes=tables.notes, source=source, files=files)
    data.revision = tables.revision
    data.cut = missing = tuple(missing_splits(list(read)))
    for split in (name for name in SPLITS if name in read or name in missing):
        cut = StreamCut(missing, split, seed) if missing and (split == "train" or split in missing) else None
        stream = read["train"] if cut else read[split]
        reader = StreamReader(tables.columns, labels, split, (1, 1), skip_bad_images, cut, data.skipped, source)
        data.readers[split] = (stream, reader)
    data.splits = {split: reader.over(stream) for split, (stream, reader) in data.readers.items()}
    if missing:
        data.notes.append(f"about 10% of the training images each go to {' and '.join(missing)} (by content hash)")
    return data


def _distinct(stream: "IterableDataset", tables: Tables) -> Iterator[Any]:
    for batch in stream.select_columns(tables.columns.labelling).iter(batch_size=1000):
        yield from set(tables.columns.labels(batch))


def _files_fingerprint(source: DataSource, files: Mapping[str, str]) -> str:
    """Hash of a stream's files: contents up to 1 GiB together, names and sizes beyond; for the Hub, of the commit."""
    if source.kind == "hub":
        commit = hub_commit(source.name.partition(":")[0])
        return hashlib.sha256(f"{source.name} {commit}".encode()).hexdigest()[:16]
    return states_fingerprint(files)
