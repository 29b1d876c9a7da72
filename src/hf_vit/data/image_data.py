"""A labeled image data set, ready to train on or to evaluate with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hf_vit.data.annotations import Target
from hf_vit.data.fingerprints import describe_changes, hash_content, hash_text, list_file_states
from hf_vit.data.images import ImageScan, hash_image, keep_good, scan_images, shorten_path, undecode_images
from hf_vit.data.labels import refuse_surrogates
from hf_vit.data.reading import StreamReader
from hf_vit.data.sources import DataSource
from hf_vit.display import Displayed, shorten_list
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(repr=False)
class ImageData(Displayed):
    """Named splits of images with a class, a mask of classes or objects with boxes.

    Attributes:
        name: for messages and facts.json.
        fingerprint: hash of every image's content, class and split, 16 hexadecimal digits; paths, names and order do
            not matter. For streams a hash of the files.
        splits: "train", "validation", "test" (those that exist) -> a table or a stream with the columns "image" (a
            Pillow image) and the column of `target`.
        label_names: the classes, in the order of their numbers.
        skipped: bad images that were left out.
        notes: for the user, such as splits that were cut and files that were ignored.
        source: the source that the data was loaded from, or None.
        revision: commit of a Hub data set.
        files: `list_file_states` when the data was loaded.
        cut: the splits that were cut from train.
        multi_label: "label" is a list of class numbers, of any length.
        target: "label": column "label", a class number. "mask": column "mask", a Pillow image of mode "L" and of the
            image's size whose values are class numbers, or 255 for ignored pixels. "objects": column "objects",
            {"bbox": [[x, y, width, height], ...] in px, "category": class numbers, "area": px, "iscrowd": 0 or 1} as in
            COCO and, for objects with masks, "segmentation": Pillow images of mode "1" and of the image's size, or
            None.
        seen: for tables the scan of every row.
        sizes: for streams the number of images, if it is known.
        readers: for streams the undecoded stream and its reader.
    """

    name: str
    fingerprint: str
    splits: "Mapping[str, Dataset | IterableDataset]"
    label_names: list[str]
    skipped: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    source: DataSource | None = None
    revision: str | None = None
    files: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    cut: tuple[str, ...] = ()
    multi_label: bool = False
    target: Target = "label"
    seen: dict[str, list[ImageScan]] = field(default_factory=dict[str, list[ImageScan]], repr=False)
    sizes: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    readers: "dict[str, tuple[IterableDataset, StreamReader]]" = field(
        default_factory=dict[str, tuple[Any, StreamReader]], repr=False
    )
    _read: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False)  # streams of the readers

    def __post_init__(self) -> None:
        refuse_surrogates(self.label_names)

    def overview(self) -> dict[str, object]:
        """Return what `print` shows, name -> value, with a line per split after the name."""
        counts = {name: self.num_examples(name) for name in self.splits}
        split_sizes = {name: "a stream" if count is None else f"{count:,} images" for name, count in counts.items()}
        classes = f"{len(self.label_names):,} ({shorten_list(self.label_names)})"
        skipped = {"skipped": f"{len(self.skipped):,} bad images"} if self.skipped else {}
        return {"name": self.name, **split_sizes, "classes": classes, **skipped, "fingerprint": self.fingerprint}

    def changed_files(self) -> str:
        """Describe which files were changed, added or removed since the data was loaded, see `describe_changes`."""
        if self.source is None:
            return ""
        return describe_changes(self.files, list_file_states(self.source, contents=bool(self.readers)))

    def num_examples(self, split: str) -> int | None:
        """Return the number of images of a split, or None for a stream of unknown length."""
        data = self.split(split)
        if hasattr(data, "__len__"):
            return len(cast("Dataset", data))
        return self.sizes.get(split) if data is self._read.get(split) else None  # another stream has another length

    def split(self, name: str) -> "Dataset | IterableDataset":
        """Return one split; raise a UserError if the data has no such split."""
        if name not in self.splits:
            names = ", ".join(self.splits)
            raise UserError(f"'{self.name}' has no split '{name}'; choose one of {names}, or add the split")
        return self.splits[name]


def get_tables(data: ImageData) -> "dict[str, Dataset]":
    """Return the splits of data that is not streamed."""
    return cast("dict[str, Dataset]", data.splits)


def match_scans(data: ImageData, split: str) -> Sequence[ImageScan]:
    """Return the scans of a split's rows; () if another table, such as a selection, replaced the one scanned."""
    scans, table = data.seen.get(split, ()), get_tables(data)[split]
    if len(scans) != len(table):
        return ()
    step = max(1, len(table) // 16)
    some = undecode_images(table.select_columns(["image"]).select(range(0, len(table), step)))
    for scan, stored in zip(scans[::step], some["image"], strict=True):
        path = (stored or {}).get("path")
        if (scan.name != path) if path else (scan.digest != hash_image(stored or {}, "")[0].digest):
            return ()
    return scans


def refresh_scans(data: ImageData) -> ImageData:
    """Return the data with scans and fingerprint of the tables that replaced those of `load_data`, if any."""
    tables = get_tables(data)
    if not data.seen or data.target != "label" or not all(hasattr(table, "__len__") for table in tables.values()):
        return data
    changed = {split: scan_images(table, split) for split, table in tables.items() if not match_scans(data, split)}
    if not changed and data.fingerprint == hash_text(data.name):  # of computed images
        return data
    seen = data.seen | changed
    fingerprint = hash_content(tables, seen, data.label_names)  # also of labels that replaced others
    return replace(data, seen=seen, fingerprint=fingerprint) if changed or fingerprint != data.fingerprint else data


def make_streams(data: ImageData, readers: "dict[str, tuple[IterableDataset, StreamReader]]") -> ImageData:
    """Return the same data with the streams of the readers as splits."""
    read = {split: reader.apply(stream) for split, (stream, reader) in readers.items()}
    streams = replace(data, splits=dict(read), readers=readers)
    streams._read = read
    return streams


def find_stream(data: ImageData, split: str) -> "tuple[IterableDataset, StreamReader | None]":
    """Return a split's undecoded stream and its reader; of a stream in its place, such as its `take`, that and None."""
    stream: Any = data.split(split)
    return data.readers[split] if stream is data._read.get(split) else (stream, None)


def check_images(data: ImageData, min_size: int | tuple[int, int] = 1, skip_bad_images: bool = False) -> ImageData:
    """Check before training that every image is readable and large enough.

    Images of tables are decoded once, unless `load_data` has done so. Images of streams are checked when they are read.

    Args:
        data: from `load_data`.
        min_size: px, a side or (height, width): the patch size of the model.
        skip_bad_images: leave bad images out and list them in `skipped`. Images below `min_size` are left out of the
            training split only, because all commands must evaluate the same images. The fingerprint does not depend on
            the model, so it includes them.

    Returns:
        The data without bad images; the same object if there are none.

    Raises:
        UserError: an image is bad, or a split has no good image.
    """
    smallest = (min_size, min_size) if isinstance(min_size, int) else min_size
    if data.readers:
        readers = dict(data.readers)
        for split, (stream, reader) in data.readers.items():
            min_px = smallest if split == "train" or not skip_bad_images else (1, 1)
            new_reader = replace(reader, min_size=min_px, skip_bad_images=skip_bad_images, skipped=data.skipped)
            readers[split] = stream, new_reader
        replaced = {split: stream for split, stream in data.splits.items() if stream is not data._read.get(split)}
        checked = make_streams(data, readers)
        checked.splits = {**checked.splits, **replaced}
        return checked
    if not data.seen:
        data.seen.update({split: scan_images(table, split) for split, table in get_tables(data).items()})
    if not skip_bad_images:
        keep_good(data.seen, smallest, False)
        return data
    readable = _select_rows(data, *keep_good(data.seen, (1, 1), True))
    if readable is not data:
        readable.fingerprint = hash_content(get_tables(readable), readable.seen, readable.label_names)
    train = {"train": readable.seen["train"]} if "train" in readable.seen else {}
    return _select_rows(readable, *keep_good(train, smallest, True))


def draw_images(data: ImageData, split: str, count: int | None, seed: int) -> ImageData:
    """Return the data with at most `count` images of a split, drawn by the seed; None for all."""
    total = data.num_examples(split)
    if count is None or total is None or count >= total:
        return data
    rows = sorted(np.random.default_rng(seed).permutation(total)[:count].tolist())
    return _select_rows(data, {split: rows})


def _select_rows(data: ImageData, rows: Mapping[str, list[int]], bad: Sequence[str] = ()) -> ImageData:
    """Return the data with only these rows of some splits, without `bad` images; the same object if they are all."""
    if all(len(selected) == data.num_examples(split) for split, selected in rows.items()):
        return data
    splits = {split: table.select(rows[split]) if split in rows else table for split, table in get_tables(data).items()}
    seen = {
        split: [scans[row] for row in rows[split]] if split in rows else scans for split, scans in data.seen.items()
    }
    return replace(data, splits=splits, seen=seen, skipped=[*data.skipped, *map(shorten_path, bad)])
