"""`load_data`: from what a user types after `--data` to checked splits."""

import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hf_vit.data.annotations import Target
from hf_vit.data.builtin import SPLIT_NUMBERS, digits, photos
from hf_vit.data.fingerprints import content_fingerprint, digests_of, file_states, states_fingerprint, tell_copies
from hf_vit.data.fractals import Fractals
from hf_vit.data.image_data import ImageData, as_streams, tables_of
from hf_vit.data.images import Seen, keep_good, scan, short_name, tell_dark
from hf_vit.data.labels import LabelMap, is_multi_label, is_unlabelled, tell_alike
from hf_vit.data.reading import (
    Columns,
    NamedColumns,
    RawTables,
    StreamReader,
    hub_commit,
    image_table,
    open_tables,
    read_labels,
)
from hf_vit.data.scenes import Scenes
from hf_vit.data.sources import DataSource, is_builtin, resolve_source, unlabelled_files
from hf_vit.data.splits import SPLIT_SEED, SPLITS, cut_rows, missing_splits
from hf_vit.data.tables import ImageTables, find_target, read_dense, target_of_columns, tell_unseen
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
    """Load labeled images by name, path or Hub id, and check them before any training.

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
            or objects. Several label columns of 0 and 1, "cat,dog", are classes of which an image may have several or
            none.
        multi_label: take data whose images have a list of classes each, which most uses cannot do with.
        target: "label"; "mask" for a class a pixel, "objects" for boxes, with masks where there are: see `ImageData`.
            None for what the source is laid out for. Such sources are "scenes:images=1000,size=64,clutter=0,seed=0"
            (built in, synthetic, for either), folders as ADE20K's (masks) and COCO's (objects), a COCO file (.json),
            parquet files and Hub data sets with a column of masks or objects.
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
    goal = find_target(resolved, target)
    is_table = resolved.kind in ("parquet", "webdataset", "hub")
    opened = open_tables(resolved, streaming=streaming) if is_table else None
    goal = goal or target_of_columns(opened.features if opened else None)
    if goal != "label":
        if streaming:
            raise UserError(f"'{resolved.name}' has {goal}, which are not streamed; load it without streaming")
        data = _table_data(resolved, read_dense(resolved, opened, named, goal), skip_bad_images, seed)
    else:
        raw = read_labels(resolved, opened, named, streaming=streaming)
        if streaming and is_table:
            data = _stream_data(resolved, raw, skip_bad_images, seed)
        else:
            load = _streamed_tables if streaming else _table_data
            data = load(resolved, _labelled(resolved.name, raw), skip_bad_images, seed)
    if data.multi_label and not multi_label:
        raise UserError(
            f"the images of '{data.name}' are multi-label; use hf-vit data, finetune without a teacher, or "
            "evaluate --protocol multi-label, or give data with one class per image"
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
        """Return the images whose contents are not among these."""
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
    paths = unlabelled_files(root) if source.strip() and not is_builtin(source) and is_folder(root) else []
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


def _builtin_data(name: str, image_size: tuple[int, int] | None, streaming: bool, target: Target | None) -> ImageData:
    kind, side, identity = name.partition(":")[0], None if image_size is None else max(image_size), None
    if kind == "scenes":
        scenes, target = Scenes.parse(name), target or "objects"
        if streaming:
            raise UserError(f"'{scenes.name}' is not streamed; load it without streaming")
        builtin = scenes.load(scenes.size or side or 64, target)
        name, identity = scenes.name, f"{scenes.name} {target}"
    elif target not in ("label", None):
        raise UserError(f"'{name}' has neither masks nor objects; give 'scenes', or data that have them")
    elif kind == "fractals":
        fractals = Fractals.parse(name)
        size = fractals.size or side or 32
        name = identity = fractals.name
        if streaming:
            sizes = {split: fractals.count(split) for split in SPLIT_NUMBERS}
            data = ImageData(name, _short_hash(name), {}, fractals.label_names, sizes=sizes)
            return _as_streams(data, {split: fractals.stream(split, size) for split in sizes})
        builtin = fractals.load(size)
    else:
        builtin = (digits if name == "digits" else photos)(image_size)
    splits, seen, names = builtin.splits, builtin.seen, builtin.label_names
    fingerprint = _short_hash(identity) if identity else content_fingerprint(splits, seen, names)
    data = ImageData(name, fingerprint, splits, names, seen={} if streaming else seen, target=target or "label")
    return _shuffled_streams(data, False) if streaming else data


def _table_data(source: DataSource, tables: ImageTables, skip_bad_images: bool, seed: int) -> ImageData:
    """Look at every image, leave out the bad ones, cut the missing splits."""
    import datasets

    seen = {split: scan(table, split, partial(tables.annotated, split)) for split, table in tables.images.items()}
    rows, bad = keep_good(seen, (1, 1), skip_bad_images)
    good = {split: [seen[split][row] for row in rows[split]] for split in seen}
    tables.conclude(good)
    data = _data_of(source, tables, files=file_states(source, contents=False))
    data.seen, data.skipped = good, list(map(short_name, bad))
    _cut(data, {split: tables.table(split, rows[split]) for split in seen}, seed)
    data.notes += tell_copies(tables_of(data), data.seen, data.label_names)
    data.notes += tell_dark(max((image.peak for images in data.seen.values() for image in images), default=0), 16)
    if data.target != "label":
        data.notes += tell_unseen(data.seen.get("train", ()), data.label_names)
    data.splits = {split: table.cast_column("image", datasets.Image()) for split, table in tables_of(data).items()}
    data.fingerprint = content_fingerprint(tables_of(data), data.seen, data.label_names)
    return data


def _streamed_tables(source: DataSource, tables: ImageTables, skip_bad_images: bool, seed: int) -> ImageData:
    """Do the same for a folder or a list whose images are looked at while they flow."""
    if tables.multi_label:
        raise UserError(
            f"the images of '{source.name}' are multi-label, which cannot be streamed; load them without streaming"
        )
    data = _data_of(source, tables, files=file_states(source))
    data.fingerprint = states_fingerprint(data.files)
    _cut(data, tables.images, seed)
    return _shuffled_streams(data, skip_bad_images)


def _data_of(source: DataSource, tables: ImageTables, files: dict[str, str]) -> ImageData:
    names = tables.label_names or []
    data = ImageData(source.name, "", {}, names, notes=[*source.notes, *tables.notes, *tell_alike(names)])
    data.source, data.revision, data.files = source, tables.revision, files
    data.multi_label, data.target = tables.multi_label, tables.target
    return data


def _labelled(name: str, raw: RawTables) -> ImageTables:
    """Return tables with the columns "image" (undecoded) and "label" (class numbers, or lists of them)."""
    from datasets import ClassLabel, List

    column, notes = raw.columns.image, [*raw.notes]
    labels = raw.labels
    if labels is None:
        chosen = {split: table.select_columns(raw.columns.labelling) for split, table in raw.splits.items()}
        labels = {split: raw.columns.labels(table[:]) for split, table in chosen.items()}
    hidden = [split for split in labels if split != "train" and is_unlabelled(labels[split])]
    notes += [f"split '{split}' of '{name}' has no labels and was left out" for split in hidden]
    labels = {split: values for split, values in labels.items() if split not in hidden}
    everything = [label for values in labels.values() for label in values]
    if not everything:
        raise UserError(f"'{name}' holds no labeled images")
    classes, multi_label = _label_map(name, raw, labels.get("train") or everything), is_multi_label(everything)
    kind = ClassLabel(names=classes.names)
    images: dict[str, Dataset] = {}
    for split, values in labels.items():
        numbers = [classes.number(value, f"image {row} of split {split}") for row, value in enumerate(values)]
        table = raw.splits[split].select_columns([column])
        table = table.rename_columns({} if column == "image" else {column: "image"})
        images[split] = table.add_column("label", numbers, feature=List(kind) if multi_label else kind)
    return ImageTables(images, classes.names, notes, raw.revision, multi_label)


def _label_map(name: str, raw: RawTables, values: list[Any]) -> LabelMap:
    names = raw.label_names
    labels = LabelMap.of_values(values, name) if names is None else LabelMap.of_names(names)
    listed = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if len({labels.numbers.get(value) for value in listed} - {None}) < 2:
        raise UserError(f"'{name}' holds images of one class only ({labels.names[0]}); a classifier needs at least two")
    return labels


def _cut(data: ImageData, splits: "dict[str, Dataset]", seed: int) -> None:
    """Put the splits into `data`, missing ones cut from train."""
    data.splits, data.cut = splits, tuple(missing_splits(list(splits)))
    if not data.cut:
        return
    train, seen = splits["train"], data.seen.get("train")
    digests = digests_of(train) if seen is None else [image.digest for image in seen]
    # What has no label is dealt out as if it were all of one class.
    labels, names = (
        ([0] * len(train), ["image"]) if data.target != "label" else (list(train["label"]), data.label_names)
    )
    parts, notes = cut_rows(digests, labels, names, data.cut, seed=seed)
    cut = {split: train.select(rows) for split, rows in parts.items()}
    data.splits = {split: cut[split] if split in cut else splits[split] for split in SPLITS}
    if seen is not None:
        data.seen = data.seen | {split: [seen[row] for row in rows.tolist()] for split, rows in parts.items()}
    sizes = " and ".join(f"{len(cut[split])} images for {split}" for split in data.cut)
    data.notes += [f"{sizes} were split off the {len(train)} training images (by content hash, seed {seed})", *notes]


def _shuffled_streams(data: ImageData, skip_bad_images: bool) -> ImageData:
    """Return the same data as streams; shuffled once, as the tables are sorted by class."""
    import datasets

    data.sizes = {split: len(table) for split, table in tables_of(data).items()}
    streams: dict[str, IterableDataset] = {}
    for split, table in tables_of(data).items():
        undecoded = table.cast_column("image", datasets.Image(decode=False)).shuffle(seed=0)
        streams[split] = undecoded.to_iterable_dataset(num_shards=min(_SHARDS, len(table)))
    return _as_streams(data, streams, skip_bad_images)


def _as_streams(data: ImageData, streams: "dict[str, IterableDataset]", skip_bad_images: bool = False) -> ImageData:
    """Data of streams with the columns "image" and "label"."""
    labels = LabelMap.of_names(data.label_names)
    readers = {
        split: (stream, StreamReader(Columns(), labels, split, skip_bad_images=skip_bad_images, skipped=data.skipped))
        for split, stream in streams.items()
    }
    return as_streams(data, readers)


def _stream_data(source: DataSource, raw: RawTables, skip_bad_images: bool, seed: int) -> ImageData:
    """Return streams of parquet, webdataset or Hub files; classes that these do not name are read in a first pass."""
    read = raw.splits
    if raw.label_names is not None:
        labels = LabelMap.of_names(raw.label_names)
    elif source.kind == "hub":
        raise UserError(f"'{source.name}' does not name its classes, which streaming needs; load it without streaming")
    else:
        batches = read.get("train", next(iter(read.values()))).select_columns(raw.columns.labelling).iter(1000)
        labels = _label_map(source.name, raw, [label for each in batches for label in set(raw.columns.labels(each))])
    missing = tuple(missing_splits(list(read)))
    data = ImageData(source.name, "", {}, labels.names, notes=[*raw.notes], source=source, revision=raw.revision)
    data.files, data.cut = file_states(source), missing
    if source.kind == "hub":
        data.fingerprint = _short_hash(f"{source.name} {hub_commit(source.name.partition(':')[0])}")
    else:
        data.fingerprint = states_fingerprint(data.files)
    readers: dict[str, tuple[IterableDataset, StreamReader]] = {}
    for split in (name for name in SPLITS if name in read or name in missing):
        is_cut = bool(missing) and (split == "train" or split in missing)
        parts = missing if is_cut else ()
        reader = StreamReader(raw.columns, labels, split, (1, 1), skip_bad_images, data.skipped, source, parts, seed)
        readers[split] = read["train" if is_cut else split], reader
    if missing:
        data.notes.append(
            f"about 10% of the training images each are used for {' and '.join(missing)} (by content hash)"
        )
    return as_streams(data, readers)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
