"""A labeled image data set, ready to train on or to evaluate with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from hf_vit.data.annotations import Target
from hf_vit.data.fingerprints import content_fingerprint, file_states, tell_changes
from hf_vit.data.images import Seen, keep_good, scan, short_name
from hf_vit.data.reading import StreamReader
from hf_vit.data.sources import DataSource
from hf_vit.display import Displayed, shortened
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(repr=False)
class ImageData(Displayed):
    """Named splits of images with one of several classes each, a mask of classes or objects in boxes.

    Attributes:
        name: for people and for facts.json.
        fingerprint: 16 hexadecimal digits of a hash over every image's content, class and split. Where the files lie,
            what they are called and their order do not matter. Streams: over the files as a whole.
        splits: "train", "validation", "test" (those there are) -> a table or a stream with the columns "image" (a
            Pillow image) and what `target` says.
        label_names: the classes, in the order of their numbers.
        skipped: bad images that were left out.
        notes: what a user should be told: splits that were cut, files that were ignored.
        source: where it is read from; None for data of other making.
        revision: the commit of a data set of the Hub.
        files: what `file_states` said of its files when it was loaded.
        cut: the splits that were cut from train.
        multi_label: "label" is a list of class numbers, of any length.
        target: "label": column "label", a class number. "mask": column "mask", a Pillow image of mode "L" and of the
            image's size whose values are class numbers, or 255 where nothing is judged. "objects": column "objects",
            {"bbox": [[x, y, width, height], ...] in px, "category": class numbers, "area": px, "iscrowd": 0 or 1 each}
            as in COCO and, where there are masks, "segmentation": Pillow images of mode "1" and of the image's size, or
            None.
        seen: of tables what the scan saw, row by row.
        sizes: of streams the number of images where it is known.
        readers: of streams the undecoded stream and what reads it.
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
    seen: dict[str, list[Seen]] = field(default_factory=dict[str, list[Seen]], repr=False)
    sizes: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    readers: "dict[str, tuple[IterableDataset, StreamReader]]" = field(
        default_factory=dict[str, tuple[Any, StreamReader]], repr=False
    )

    def overview(self) -> dict[str, object]:
        counts = {name: self.num_examples(name) for name in self.splits}
        images = {name: "a stream" if count is None else f"{count:,} images" for name, count in counts.items()}
        classes = f"{len(self.label_names):,} ({shortened(self.label_names)})"
        skipped = {"skipped": f"{len(self.skipped):,} bad images"} if self.skipped else {}
        return {"name": self.name, **images, "classes": classes, **skipped, "fingerprint": self.fingerprint}

    def changed_files(self) -> str:
        """Return which files are missing or changed since the data was loaded; see `tell_changes`."""
        if self.source is None:
            return ""
        return tell_changes(self.files, file_states(self.source, contents=bool(self.readers)))

    def num_examples(self, split: str) -> int | None:
        """Return the number of images of a split; None for a stream that does not tell."""
        data = self.split(split)
        return len(cast("Dataset", data)) if hasattr(data, "__len__") else self.sizes.get(split)

    def split(self, name: str) -> "Dataset | IterableDataset":
        """Return one split.

        Raises:
            UserError: the data has no such split.
        """
        if name not in self.splits:
            have = ", ".join(self.splits)
            raise UserError(f"'{self.name}' has no split '{name}' (it has {have}); choose one of these or add it")
        return self.splits[name]


def tables_of(data: ImageData) -> "dict[str, Dataset]":
    """Return the splits of data that is no stream."""
    return cast("dict[str, Dataset]", data.splits)


def as_streams(data: ImageData, readers: "dict[str, tuple[IterableDataset, StreamReader]]") -> ImageData:
    """Return the same data, read as streams."""
    splits = {split: reader.over(stream) for split, (stream, reader) in readers.items()}
    return replace(data, splits=splits, readers=readers)


def check_images(data: ImageData, min_size: int | tuple[int, int] = 1, skip_bad_images: bool = False) -> ImageData:
    """Make sure that every image is readable, and large enough to train on, before any training.

    Tables: every image is decoded once, unless that was done already (`load_data` does), with a progress bar for big
    sets. Streams: the same is checked, with the same words, while they flow.

    Args:
        data: from `load_data`.
        min_size: px, a side or (height, width): the model's patch.
        skip_bad_images: leave bad images out and name them in `skipped`; small ones of the training split alone, as
            every command judges the same images of the others. The fingerprint depends on no model and keeps them.

    Returns:
        The data without bad images; the same object when nothing had to change.

    Raises:
        UserError: there is a bad image (named, with the count of the others), or nothing is left of a split.
    """
    smallest = (min_size, min_size) if isinstance(min_size, int) else min_size
    if data.readers:
        readers = dict(data.readers)
        for split, (stream, reader) in data.readers.items():
            least = smallest if split == "train" or not skip_bad_images else (1, 1)
            checked = replace(reader, min_size=least, skip_bad_images=skip_bad_images, skipped=data.skipped)
            readers[split] = stream, checked
        return as_streams(data, readers)
    if not data.seen:
        data.seen.update({split: scan(table, split) for split, table in tables_of(data).items()})
    if not skip_bad_images:
        keep_good(data.seen, smallest, False)
        return data
    kept = _with_rows(data, *keep_good(data.seen, (1, 1), True))
    if kept is not data:
        kept.fingerprint = content_fingerprint(tables_of(kept), kept.seen, kept.label_names)
    train = {split: seen for split, seen in kept.seen.items() if split == "train"}
    return _with_rows(kept, *keep_good(train, smallest, True))


def _with_rows(data: ImageData, rows: Mapping[str, list[int]], bad: list[str]) -> ImageData:
    """Return the data with these rows of some splits, and all of the others; the same object where no image is bad."""
    if not bad:
        return data
    tables = tables_of(data).items()
    splits = {split: table.select(rows[split]) if split in rows else table for split, table in tables}
    seen = data.seen | {split: [data.seen[split][row] for row in kept] for split, kept in rows.items()}
    return replace(data, splits=splits, seen=seen, skipped=[*data.skipped, *map(short_name, bad)])
