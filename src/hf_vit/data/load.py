"""`load_data`: load and check the data that a `--data` argument names."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from hf_vit.data.annotations import Target
from hf_vit.data.builtin import SPLIT_NUMBERS, digits, photos
from hf_vit.data.fingerprints import hash_content, hash_states, hash_text, list_file_states, note_duplicates
from hf_vit.data.fractals import Fractals
from hf_vit.data.image_data import ImageData, get_tables, make_streams, refresh_scans
from hf_vit.data.images import ImageScan, keep_good, note_dark_images, scan_images, shorten_path, undecode_images
from hf_vit.data.labels import LabelMap, flatten_labels, is_multi_label, is_unlabeled, list_column, note_similar_names
from hf_vit.data.reading import (
    Columns,
    NamedColumns,
    RawTables,
    StreamReader,
    explain_read_errors,
    make_image_table,
    open_tables,
    read_labels,
)
from hf_vit.data.scan_memory import ScanMemory, note_recalled
from hf_vit.data.scenes import Scenes
from hf_vit.data.sources import DataSource, list_unlabeled_images, resolve_source
from hf_vit.data.splits import SPLIT_SEED, SPLITS, cut_rows, list_missing_splits
from hf_vit.data.tables import ImageTables, extract_column, find_target, infer_target, note_missing_classes, read_dense
from hf_vit.display import format_count
from hf_vit.errors import UnlabeledError, UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)
# Shards of a streamed folder, and so the highest number of loader workers or processes that can read it together.
_SHARDS = 16
_KEPT_BYTES = 256 << 20
_LABELS_AT_ONCE = 100


def load_data(
    source: str | os.PathLike[str] | ImageData,
    *,
    streaming: bool = False,
    skip_bad_images: bool = False,
    image_size: tuple[int, int] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    multi_label: bool = False,
    target: Target | None = "label",
    seed: int = SPLIT_SEED,
    check: bool = True,
    keep: bool = False,
    splits: Collection[str] | None = None,
    hash_others: bool = False,
) -> ImageData:
    """Load labeled images by name, path or Hub id, and check them before any training.

    Args:
        source: "digits", "photos" or "fractals:classes=100,images=1000" (built in, the last synthetic); a folder of
            class folders, with or without train, validation (val) and test above them; a list (.csv, .jsonl) of image
            files and labels, or the folder of metadata.csv or metadata.jsonl; a folder of IDX files, the format of
            MNIST; a parquet or webdataset (.tar) file, a folder or a glob of them; or a Hub data set id, `user/name` or
            `user/name:configuration`. An existing path is never taken for a Hub id. Data that is already loaded is
            returned as it is, if it is what `multi_label` and `target` allow; tables of classes that replaced those in
            its `splits` are scanned again.
        streaming: read while training instead of beforehand; images are then checked as they come.
        skip_bad_images: leave unreadable images out (and list them in `skipped`) instead of raising.
        image_size: (height, width) px of built-in images, "photos" up to 384 px a side, "fractals" as squares of the
            longer side; None for their original size. Images of other sources keep their size: the image processor
            resizes them.
        image_column, label_column: column names of a list or table, if they are not the usual ones; the label column
            may hold masks or objects. Several label columns of 0 and 1, "cat,dog", make the data multi-label.
        multi_label: accept multi-label data, which most functions cannot use.
        target: "label" for classes, "mask" for segmentation, "objects" for detection (see `ImageData`), or None for
            whatever the source contains. Masks and objects are in "scenes:images=1000,size=64,clutter=0,seed=0" (built
            in, synthetic), folders laid out as ADE20K (masks) or COCO (objects), a COCO file (.json), and parquet files
            and Hub data sets with a column of masks or objects.
        seed: of the cut if validation or test are missing. The built-in splits are fixed.
        check: decode every image now. Without it only hash, header and end of PNG and JPEG files are looked at, and
            damaged pixels raise UserError when they are read. `skip_bad_images` always checks.
        keep: keep the decoded pixels if they are at most 256 MiB, so that training need not decode them again.
        splits: the splits of images with classes whose images are read, None for all; a split that is cut needs those
            of train. The data lacks the other splits, and its fingerprint does not cover them.
        hash_others: keep the other splits and the fingerprint of the whole data, for which their images are hashed.

    Returns:
        The data. Missing validation and test splits were cut from train, about 10% each, by a hash of every image's
        file (`hf_vit.data.splits`). `notes` mentions such cuts, and duplicate images.

    Raises:
        UserError: the source, a label or an image cannot be used; the message gives the remedy.
    """
    if image_size is not None and min(image_size) < 1:
        raise UserError(
            f"the image size is {image_size[0]}x{image_size[1]} px, but both sides must be at least 1 px; "
            "choose a larger --image-size"
        )
    if isinstance(source, ImageData):
        if target not in (source.target, None):
            raise UserError(
                f"'{source.name}' was loaded with target='{source.target}'; load it with target='{target}' for this"
            )
        return _refuse_multi_label(refresh_scans(source), multi_label)
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            f"the data is a {type(source).__name__}; give a path, a Hub id, or the result of load_data "
            "(Dataset.to_parquet writes a file that can be given)"
        )
    data_source = resolve_source(os.fspath(source))
    selection = NamedColumns(image_column, label_column)
    if data_source.kind in ("builtin", "folder", "idx", "masks", "coco"):
        selection.check((), data_source.name)  # these have no columns, so the user may name none
    if data_source.kind == "builtin":
        data = _load_builtin(data_source.name, image_size, streaming, target)
        if Path(data.name).is_dir():
            data.notes.append(f"'{data.name}' is built in; for the folder give ./{data.name}")
        return _log_notes(data)
    goal = find_target(data_source, target)
    is_table = data_source.kind in ("parquet", "webdataset", "hub")
    opened = open_tables(data_source, streaming=streaming) if is_table else None
    goal = goal or infer_target(opened.features if opened else None, selection)
    options = _Options(image_column, skip_bad_images, seed, check or skip_bad_images, keep)
    if goal != "label":
        if streaming:
            raise UserError(f"the {goal} of '{data_source.name}' cannot be read as a stream; leave --streaming out")
        dense_tables = read_dense(data_source, opened, selection, goal)
        return _log_notes(_load_tables(data_source, dense_tables, replace(options, check=True, keep=False)))
    raw = read_labels(data_source, opened, selection, streaming=streaming)
    if streaming and is_table:
        return _log_notes(_stream_files(data_source, raw, options))
    tables = _number_labels(data_source.name, raw)
    if streaming:
        return _log_notes(_stream_tables(data_source, tables, options))
    others = _find_others(tables, splits)
    # Bad images are no part of the fingerprint, and hashes do not show them.
    hashed = others if hash_others and not skip_bad_images else []
    data = _load_tables(data_source, tables, options, hashed, left_out=[] if hash_others else others)
    return _log_notes(_refuse_multi_label(data, multi_label))


@dataclass(frozen=True)
class _Options:
    """The options of `load_data` that reading images needs, see there."""

    image_column: str | None
    skip_bad_images: bool
    seed: int
    check: bool
    keep: bool


def _refuse_multi_label(data: ImageData, multi_label: bool) -> ImageData:
    """Return the data; raise UserError if they are multi-label and the caller does not accept that."""
    if data.multi_label and not multi_label:
        raise UserError(
            f"'{data.name}' is multi-label, but this needs one class per image; use hf-vit finetune without a "
            "teacher or hf-vit evaluate --protocol multi-label, or give data with one class per image"
        )
    return data


def _log_notes(data: ImageData) -> ImageData:
    for note in data.notes:
        logger.info(note)
    return data


@dataclass(frozen=True)
class UnlabeledImages:
    """Images without labels.

    Attributes:
        name: for messages and facts.json.
        table: with the column "image".
        seen: scan of every row.
        left_out: number of images that were left out as unreadable or excluded.
    """

    name: str
    table: "Dataset"
    seen: list[ImageScan]
    left_out: int = 0

    @property
    def fingerprint(self) -> str:
        """Hash of the images' contents, 16 hexadecimal digits, independent of names and order."""
        return hash_text("\n".join(sorted(image.digest for image in self.seen)))

    def without(self, digests: Collection[str]) -> "UnlabeledImages":
        """Return the images whose SHA-256 is not among the digests."""
        rows = [row for row, image in enumerate(self.seen) if image.digest not in digests]
        return self if len(rows) == len(self.seen) else self.select(rows)

    def select(self, rows: Sequence[int]) -> "UnlabeledImages":
        """Return the images of these rows; the others count as left out."""
        left_out = self.left_out + len(self.seen) - len(rows)
        return UnlabeledImages(self.name, self.table.select(rows), [self.seen[row] for row in rows], left_out)


def load_unlabeled(
    source: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    min_size: tuple[int, int] = (1, 1),
    skip_bad_images: bool = False,
) -> UnlabeledImages:
    """Load images for training without labels, and check every one of them.

    Args:
        source: a folder of images, or any source of `load_data`, whose labels are ignored. Of a source with splits only
            train is loaded, and folders "unlabeled" beside it.
        image_size, skip_bad_images: see `load_data`.
        min_size: (height, width) px that every image must have.

    Raises:
        UserError: the source has no images, or one cannot be read.
    """
    from datasets import Image, concatenate_datasets

    source = os.fspath(source)
    name, paths = list_unlabeled_images(source)
    if paths:
        table = make_image_table(paths)
        scans = scan_images(table, "unlabelled")
        skipped = 0
    else:
        data = load_data(source, image_size=image_size, skip_bad_images=skip_bad_images, multi_label=True)
        splits = ("train", *data.cut)  # splits that were cut from the training images belong to them
        parts = [cast("Dataset", data.split(split)).select_columns(["image"]) for split in splits]
        table = concatenate_datasets(parts)
        name = data.name
        skipped = len(data.skipped)
        scans = [image for split in splits for image in data.seen[split]]
    rows, bad = keep_good({"unlabelled": scans}, min_size, skip_bad_images)
    good_rows = rows["unlabelled"]
    table = table.select(good_rows).cast_column("image", Image())
    return UnlabeledImages(name, table, [scans[row] for row in good_rows], skipped + len(bad))


def load_images(source: str | os.PathLike[str] | ImageData, **options: Any) -> ImageData:
    """Load images to learn from without their classes: what `load_data` takes, or a folder of images.

    The images of a folder without class folders all have the class "image". Arguments and errors are those of
    `load_data`.
    """
    from datasets import ClassLabel

    try:
        return load_data(source, **options)
    except UnlabeledError:
        name, paths = list_unlabeled_images(str(source))
        if options.get("streaming") or not paths:
            raise
    table = make_image_table(paths).add_column(
        "label", cast(Any, np.zeros(len(paths), np.int64)), feature=ClassLabel(names=["image"])
    )
    notes = [f"'{name}' is read without classes, as it has no two class folders"]
    folder = DataSource("folder", name, folder={"train": {"image": paths}})
    choices = _Options(None, options.get("skip_bad_images", False), SPLIT_SEED, True, options.get("keep", False))
    return _log_notes(_load_tables(folder, ImageTables({"train": table}, ["image"], notes), choices))


def _load_builtin(name: str, image_size: tuple[int, int] | None, streaming: bool, target: Target | None) -> ImageData:
    """Load a built-in data set: digits, photos, fractals or scenes; the last two are computed.

    The fingerprint of computed images is a hash of their settings, that of others a hash of their content.
    """
    kind = name.partition(":")[0]
    default_size = None if image_size is None else max(image_size)
    if kind == "scenes":
        scenes = Scenes.parse(name)
        if streaming:
            raise UserError(f"'{scenes.name}' cannot be read as a stream; leave --streaming out")
        return scenes.load(scenes.size or default_size or 64, target or "objects")
    if target not in ("label", None):
        raise UserError(f"'{name}' has neither masks nor objects; give 'scenes', or other data with annotations")
    if kind == "fractals":
        fractals = Fractals.parse(name)
        size = fractals.size or default_size or 32
        if not streaming:
            return fractals.load(size)
        sizes = {split: fractals.count(split) for split in SPLIT_NUMBERS}
        data = ImageData(fractals.name, hash_text(fractals.name), {}, fractals.label_names, sizes=sizes)
        return _set_readers(data, {split: fractals.stream(split, size) for split in sizes})
    data = (digits if name == "digits" else photos)(image_size)
    return _shuffle_streams(replace(data, seen={}), False) if streaming else data


def _load_tables(
    source: DataSource,
    tables: ImageTables,
    options: _Options,
    hashed: Collection[str] = (),
    left_out: Collection[str] = (),
) -> ImageData:
    """Return tables as data: scan every image, leave out bad ones, and cut missing splits.

    The images of the splits in `hashed` are only hashed, those in `left_out` not even read; `tables` loses these.
    """
    import datasets

    missing = list_missing_splits(list(tables.images))  # a split that is left out is not missing
    for split in left_out:
        del tables.images[split]
    scans, memories = _scan_splits(source, tables, options, hashed)
    checked = {split: images for split, images in scans.items() if split not in hashed}
    rows, bad = keep_good(checked, (1, 1), options.skip_bad_images)
    rows |= {split: list(range(len(scans[split]))) for split in hashed}
    good_scans = {split: [scans[split][row] for row in rows[split]] for split in scans}
    tables.conclude(good_scans)
    data = _make_data(source, tables, files=list_file_states(source, contents=False))
    data.seen = good_scans
    data.skipped = list(map(shorten_path, bad))
    data.notes += note_recalled(memories, sum(map(len, scans.values())))
    _set_splits(data, {split: tables.select_rows(split, rows[split]) for split in scans}, missing, options.seed)
    data.notes += note_duplicates(get_tables(data), data.seen, data.label_names)
    peak = max((image.peak for images in data.seen.values() for image in images), default=0)
    data.notes += note_dark_images(peak, 16)
    if data.target != "label":
        data.notes += note_missing_classes(data.seen.get("train", ()), data.label_names)
    data.splits = {split: table.cast_column("image", datasets.Image()) for split, table in get_tables(data).items()}
    data.fingerprint = hash_content(get_tables(data), data.seen, data.label_names)
    return data


def _scan_splits(
    source: DataSource, tables: ImageTables, options: _Options, hashed: Collection[str]
) -> tuple[dict[str, list[ImageScan]], list[ScanMemory]]:
    """Scan the images of every split, or only hash them; return the scans, and the memories that they were kept in."""
    scans: dict[str, list[ImageScan]] = {}
    memories: list[ScanMemory] = []
    kept_bytes = _KEPT_BYTES if options.keep else 0  # for the pixels of all splits together
    for split, table in tables.images.items():
        annotate = partial(tables.annotate, split) if tables.target != "label" else None
        memory = ScanMemory(source, split, options.image_column, decode=options.check)
        memories.append(memory)
        depth = "hash" if split in hashed else "pixels" if options.check else "header"
        scans[split] = scan_images(table, split, annotate, depth=depth, kept_bytes=kept_bytes, recall=memory.recall)
        if split not in hashed:
            memory.store(scans[split])
        kept_bytes -= sum(len(scan.pixels or b"") for scan in scans[split])
    return scans, memories


def _stream_tables(source: DataSource, tables: ImageTables, options: _Options) -> ImageData:
    """Return a folder or list as streams, whose images are scanned when they are read."""
    if tables.multi_label:
        _refuse_multi_label_stream(source.name)
    data = _make_data(source, tables, files=list_file_states(source))
    data.fingerprint = hash_states(data.files)
    _set_splits(data, tables.images, list_missing_splits(list(tables.images)), options.seed)
    return _shuffle_streams(data, options.skip_bad_images)


def _refuse_multi_label_stream(name: str) -> NoReturn:
    raise UserError(f"'{name}' is multi-label and cannot be read as a stream; leave --streaming out")


def _make_data(source: DataSource, tables: ImageTables, files: dict[str, str]) -> ImageData:
    """Return data with all attributes except the splits."""
    names = tables.label_names or []
    notes = [*source.notes, *tables.notes, *note_similar_names(names)]
    kinds: Any = dict(multi_label=tables.multi_label, target=tables.target)
    return ImageData(
        source.name, "", {}, names, notes=notes, source=source, revision=tables.revision, files=files, **kinds
    )


def _number_labels(name: str, raw: RawTables) -> ImageTables:
    """Convert raw labels to class numbers: tables with the columns "image" (undecoded) and "label"."""
    from datasets import ClassLabel, List

    columns = raw.columns
    raw_labels = raw.labels or {
        split: columns.labels(table.select_columns(columns.label_columns)[:]) for split, table in raw.splits.items()
    }
    hidden = [split for split, values in raw_labels.items() if split != "train" and is_unlabeled(values)]
    labels = {split: values for split, values in raw_labels.items() if split not in hidden}
    all_labels = [label for values in labels.values() for label in values]
    classes = _make_label_map(name, raw, labels.get("train") or all_labels)
    multi_label = is_multi_label(all_labels)
    kind = ClassLabel(names=classes.names)
    images: dict[str, Dataset] = {}
    for split, values in labels.items():
        numbers = [classes.get_number(value, f"image {row} of split {split}") for row, value in enumerate(values)]
        # An array, because `datasets` hashes a list one number at a time.
        number_column: Any = numbers if multi_label else np.asarray(numbers)
        table = extract_column(raw.splits[split], columns.image, "image")
        images[split] = table.add_column("label", number_column, feature=List(kind) if multi_label else kind)
    return ImageTables(images, classes.names, [*raw.notes, *_note_hidden(name, hidden)], raw.revision, multi_label)


def _note_hidden(name: str, splits: Sequence[str]) -> list[str]:
    """Return a note on every split without labels."""
    return [f"split '{split}' of '{name}' was left out, because it has no labels" for split in splits]


def _make_label_map(name: str, raw: RawTables, values: list[Any]) -> LabelMap:
    """Return the classes of a data set; raise UserError if its labels are of fewer than two."""
    if not values:
        raise UserError(f"'{name}' holds no labeled image; add labels, or give another data set")
    lengths = {len(value) for value in values if isinstance(value, list)}
    if len(lengths) == 1 and max(lengths) > 1 and all(value in (0, 1) for value in flatten_labels(values)):
        raise UserError(
            f"the labels of '{name}' are lists of {max(lengths)} zeros and ones, but a list names the classes of an "
            "image; write [1, 2] for [0, 1, 1], or a column of 0 and 1 for every class"
        )
    names = raw.label_names
    labels = LabelMap.from_values(values, name) if names is None else LabelMap.from_names(names)
    if len({labels.numbers.get(value) for value in flatten_labels(values)} - {None}) < 2:
        raise UnlabeledError(
            f"all images of '{name}' have the class {labels.names[0]}, but a classifier needs at least two "
            "classes; add images of another class"
        )
    return labels


def _find_others(tables: ImageTables, splits: Collection[str] | None) -> list[str]:
    """Return the splits whose images are not needed for `splits`; none if one of these does not exist."""
    cut = list_missing_splits(list(tables.images))
    needed = {"train" if split in cut else split for split in splits or tables.images}
    return [split for split in tables.images if split not in needed] if needed <= tables.images.keys() else []


def _set_splits(data: ImageData, splits: "dict[str, Dataset]", missing: Sequence[str], seed: int) -> None:
    """Set the splits of `data` and their scans, with missing splits cut from train if it was read; add notes."""
    data.splits = splits
    data.cut = tuple(missing if "train" in splits else ())
    if not data.cut:
        return
    train = splits["train"]
    scans = data.seen.get("train")
    digests = [image.digest for image in scans or scan_images(train, "train", depth="hash")]
    is_label = data.target == "label"  # images with masks or objects are cut as if they had one class
    labels, names = (list_column(train, "label"), data.label_names) if is_label else ([0] * len(train), ["image"])
    rows_by_split, notes = cut_rows(digests, labels, names, data.cut, seed=seed)
    cut_tables = {split: train.select(rows) for split, rows in rows_by_split.items()}
    all_tables = splits | cut_tables
    data.splits = {split: all_tables[split] for split in SPLITS if split in all_tables}
    if scans is not None:
        data.seen = data.seen | {split: [scans[row] for row in rows.tolist()] for split, rows in rows_by_split.items()}
    sizes = " and ".join(f"{format_count(len(cut_tables[split]), 'image')} for {split}" for split in data.cut)
    data.notes += [f"{sizes} were split off the {len(train)} training images (by content hash, seed {seed})", *notes]


def _shuffle_streams(data: ImageData, skip_bad_images: bool) -> ImageData:
    """Replace the tables of `data` by streams of undecoded images, shuffled once as tables are sorted by class."""
    data.sizes = {split: len(table) for split, table in get_tables(data).items()}
    streams: dict[str, IterableDataset] = {}
    for split, table in get_tables(data).items():
        streams[split] = undecode_images(table).shuffle(seed=0).to_iterable_dataset(num_shards=min(_SHARDS, len(table)))
    return _set_readers(data, streams, skip_bad_images)


def _set_readers(data: ImageData, streams: "dict[str, IterableDataset]", skip_bad_images: bool = False) -> ImageData:
    """Set readers for streams with the columns "image" and "label"."""
    labels = LabelMap.from_names(data.label_names)
    readers = {
        split: (stream, StreamReader(Columns(), labels, split, skip_bad_images=skip_bad_images, skipped=data.skipped))
        for split, stream in streams.items()
    }
    return make_streams(data, readers)


def _find_stream_classes(source: DataSource, raw: RawTables) -> tuple[LabelMap, list[str]]:
    """Return the classes that the files name, or else those that a first pass finds; and the splits without labels.

    Raise UserError for multi-label data, and if the first pass finds a class that is not in the training split.
    """
    if raw.label_names is None and source.kind == "hub":
        raise UserError(f"'{source.name}' does not list its classes, so it cannot be streamed; leave --streaming out")
    labels: dict[str, list[Any]] = {}  # the distinct ones of every split
    for split, stream in raw.splits.items():
        distinct_labels = dict[Any, None]()
        for batch in stream.select_columns(raw.columns.label_columns).iter(_LABELS_AT_ONCE):
            values = raw.columns.labels(batch)
            if is_multi_label(values):
                _refuse_multi_label_stream(source.name)
            distinct_labels |= dict.fromkeys(values)
            if raw.label_names is not None:  # the first rows tell whether there are labels
                break
        labels[split] = [*distinct_labels]
    hidden = [split for split, values in labels.items() if split != "train" and values and is_unlabeled(values)]
    if raw.label_names is not None:
        return LabelMap.from_names(raw.label_names), hidden
    labels = {split: values for split, values in labels.items() if split not in hidden}
    classes = _make_label_map(source.name, raw, labels.get("train") or [*chain.from_iterable(labels.values())])
    for split, values in labels.items():
        for value in values:
            classes.get_number(value, f"an image of split {split}")
    return classes, hidden


def _stream_files(source: DataSource, raw: RawTables, options: _Options) -> ImageData:
    """Return streams of parquet, webdataset or Hub files, whose images are scanned when they are read."""
    with explain_read_errors(source):
        labels, hidden = _find_stream_classes(source, raw)
    raw_splits = {split: stream for split, stream in raw.splits.items() if split not in hidden} or raw.splits
    skip = options.skip_bad_images
    missing = tuple(list_missing_splits(list(raw_splits)))
    tables = ImageTables({}, labels.names, [*raw.notes, *_note_hidden(source.name, hidden)], raw.revision)
    data = _make_data(source, tables, files=list_file_states(source))
    data.cut, data.fingerprint = missing, hash_states(data.files)
    if source.kind == "hub":
        data.fingerprint = hash_text(f"{source.name} {raw.revision}")
    readers: dict[str, tuple[IterableDataset, StreamReader]] = {}
    for split in (name for name in SPLITS if name in raw_splits or name in missing):
        is_cut = bool(missing) and (split == "train" or split in missing)  # and read from the training stream
        cut = missing if is_cut else ()
        reader = StreamReader(raw.columns, labels, split, (1, 1), skip, data.skipped, source, cut, options.seed)
        readers[split] = raw_splits["train" if is_cut else split], reader
    if missing:
        data.notes.append(
            f"about 10% of the training images are used for {' and for '.join(missing)} (by content hash)"
        )
    return make_streams(data, readers)
