"""What a `--data` argument names: a built-in set, a folder, a list, parquet or webdataset files, or a Hub data set.

Folders for segmentation are as ADE20K's: images/{training,validation}/NAME.jpg and
annotations/{training,validation}/NAME.png, or both without splits; "masks" for "annotations" will do. Those for
detection are as COCO's: a file of JSON with "images", "annotations" and "categories" a split, in the folder, in
annotations/, or beside the images of its split.
"""

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from hf_vit.data.files import IMAGE_SUFFIXES, Parts, is_image, kinds_of, tell_ignored, walk
from hf_vit.data.labels import plain_name
from hf_vit.data.splits import split_name
from hf_vit.errors import UserError
from hf_vit.repositories.stores import in_store, is_folder, matches, place_of, sizes

BUILTIN_NAMES = ("digits", "photos", "fractals", "scenes")
_TABLES = {"parquet": (".parquet",), "webdataset": (".tar", ".tar.gz", ".tgz")}
_FILES: dict[str, tuple[str, ...]] = {**_TABLES, "list": (".csv", ".tsv", ".jsonl")}
# A list of images that lies beside them, by the convention of `datasets` the first of the names.
_LISTS = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in _FILES["list"])
# user/name, name, and either with :configuration.
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")
# Files of COCO that tell of something else.
_OTHER_JSON = re.compile(r"caption|keypoint|panoptic|stuff|image_info", re.IGNORECASE)
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')
_KINDS = "a Hub data set id, 'digits', 'photos', 'fractals' or 'scenes'"


@dataclass(frozen=True)
class DataSource:
    """A `--data` argument, understood.

    Attributes:
        kind: where to read from; "list" is a CSV file or lines of JSON that name image files and their labels, "masks"
            and "coco" are folders for segmentation and detection.
        name: for people and facts; no directories above the data.
        files: split -> files (parquet, webdataset, lists, annotations of COCO).
        folder: split -> class -> image files (of class folders; of lists and COCO, once they are read, without a class;
            of masks "images" and "annotations").
        notes: what the user should be told.
        root: the folder of "masks" or "coco".
    """

    kind: Literal["builtin", "folder", "list", "parquet", "webdataset", "hub", "masks", "coco"]
    name: str
    files: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    folder: dict[str, dict[str, list[Path]]] = field(default_factory=dict[str, dict[str, list[Path]]])
    notes: list[str] = field(default_factory=list[str])
    root: Path | None = None

    @cached_property
    def may_name_files(self) -> bool:
        """Whether its tables may name files of this machine in place of images: tables of this machine may."""
        return self.kind != "hub" and not any(in_store(path) for _, path in self.named_files())

    def named_files(self) -> Iterator[tuple[str, Path]]:
        """Yield every file with its name for people: split/file, or split/class/file of a folder."""
        for split, paths in self.files.items():
            for path in paths:
                yield f"{split}/{path.name}", path
        for split, classes in self.folder.items():
            for label, paths in classes.items():
                for path in paths:
                    yield "/".join(part for part in (split, label, path.name) if part), path


def is_builtin(source: str) -> bool:
    """Return whether this is the name of built-in data: "digits", "photos", "fractals", "scenes" or
    "fractals:classes=10".
    """
    return source in BUILTIN_NAMES or source.startswith(("fractals:", "scenes:"))


def resolve_source(source: str) -> DataSource:
    """Decide what `source` names. Existing paths win over Hub ids; the built-in names win over everything."""
    if is_builtin(source):
        return DataSource("builtin", source)
    if not source.strip():
        raise UserError(f"no data given; give a folder, parquet or tar files, {_KINDS}")
    place, is_stored = place_of(source).expanduser(), in_store(source)
    name = Path(source).name if is_stored else place.name
    if is_folder(place) if is_stored else place.is_dir():
        name = name if is_stored else place.resolve().name
        dense = _dense_folder(place, name)
        if dense and is_stored:
            raise UserError(
                f"'{source}' holds masks or objects as files, which are read from local folders only; give "
                "parquet files or a local folder"
            )
        return dense or _folder(place, source, name)
    if is_stored:
        paths = list(sizes([place])) or matches(source)
    elif place.suffix.lower() == ".json" and place.is_file() and _is_coco(place):
        return _coco(place.parent, place.name, [place])
    else:
        paths = [place] if place.exists() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    if paths:
        return _from_files(paths, name, source)
    if is_stored:
        raise UserError(f"there is no '{source}'; give a folder of class folders, parquet or tar files")
    if any(character in source for character in "*?["):
        raise UserError(f"no file matches '{source}'; give parquet or tar files, or a folder of class folders")
    suffixes = (*(suffix for suffixes in _FILES.values() for suffix in suffixes), ".zip", *IMAGE_SUFFIXES)
    is_path = source.startswith(("/", "./", "../", "~", ".\\", "..\\")) or source.lower().endswith(suffixes)
    if is_path or _HUB_ID.fullmatch(source) is None:
        raise UserError(f"'{source}' does not exist; give a folder of class folders, parquet or tar files, {_KINDS}")
    return DataSource("hub", source)


def _from_files(paths: Sequence[Path], name: str, source: str) -> DataSource:
    for kind, suffixes in _FILES.items():
        if all(path.name.lower().endswith(suffixes) for path in paths):
            return DataSource(kind, name, files=_by_split((path, (path.name,)) for path in paths))  # pyright: ignore[reportArgumentType]
    what = f"'{source}' is not a data set file" if len(paths) == 1 else f"'{source}' mixes kinds of files"
    raise UserError(
        f"{what}; needed: .parquet files, .tar files (webdataset), a list (.csv, .jsonl), or a folder of class folders"
    )


def _by_split(files: Iterable[tuple[Path, Parts]]) -> dict[str, list[Path]]:
    """Return splits told by file or folder names: train-00000-of-00002.parquet, val/0.tar. Without a word: train."""
    splits: dict[str, list[Path]] = {}
    for path, parts in files:
        named = [name for name in map(split_name, re.split(r"[^A-Za-z]+", "/".join(parts))) if name]
        splits.setdefault(named[-1] if named else "train", []).append(path)
    return {split: sorted(paths) for split, paths in splits.items()}


def _dense_folder(root: Path, name: str) -> DataSource | None:
    """Return a folder that is laid out as ADE20K or COCO, by its files alone; None if it is neither."""
    places = [*root.glob("*.json"), *root.glob("annotations/*.json"), *root.glob("*/_annotations.coco.json")]
    listed = sorted(path for path in places if path.is_file() and not _OTHER_JSON.search(path.name) and _is_coco(path))
    if listed:
        return _coco(root, name, listed)
    masks = next((root / inside for inside in ("annotations", "masks") if (root / inside).is_dir()), None)
    if masks is None or not (root / "images").is_dir():
        return None
    images, annotations = (_images_by_split(folder) for folder in (root / "images", masks))
    both = {
        split: {"images": images[split], "annotations": annotations[split]} for split in images if split in annotations
    }
    notes = [
        f"split '{split}' of '{root.resolve().name}' has no masks and was left out" for split in images.keys() - both
    ]
    return DataSource("masks", name, folder=both, notes=notes, root=root) if both else None


def _images_by_split(folder: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for parts in filter(_is_image, walk(folder)[0]):
        split = split_name(parts[0]) if len(parts) > 1 else None
        splits.setdefault(split or "train", []).append(folder.joinpath(*parts))
    return splits


def _coco(root: Path, name: str, listed: Sequence[Path]) -> DataSource:
    """Return files of annotations by their splits, which their names tell, or the folders that they are in."""
    files = _by_split((path, path.relative_to(root).parts) for path in listed)
    for split, paths in files.items():
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths[:2])
            raise UserError(f"'{root.name}' has several files of annotations for {split}: {names}; keep one of them")
    return DataSource("coco", name, files, root=root)


def _is_coco(path: Path) -> bool:
    content = path.read_bytes()
    return all(key in content for key in _COCO_KEYS)


def _is_image(parts: Parts) -> bool:
    return is_image(parts[-1])


def unlabelled_files(root: Path) -> list[Path]:
    """Return the images of a folder, wherever in it they lie; of its train folder alone where there are folders of
    splits.

    None of a folder of tables or lists, which tell of their images themselves.
    """
    dense = _dense_folder(root, root.name)
    if dense is not None and dense.kind == "masks":
        return (dense.folder.get("train") or next(iter(dense.folder.values())))["images"]
    files, _ = walk(root)
    tables = (*_TABLES["parquet"], *_TABLES["webdataset"])
    if any(parts[-1].lower().endswith(tables) or parts[-1].lower() in _LISTS for parts in files):
        return []
    images = list(filter(_is_image, files))
    folders = {parts[0]: split_name(parts[0]) for parts in images if len(parts) > 1}
    named = set(filter(None, folders.values()))
    if len(named) > 1 or (named and all(folders.values())):  # "train" beside "bus" and "car" is a class
        images = [parts for parts in images if split_name(parts[0]) == "train"]
    return [root.joinpath(*parts) for parts in images]


def _folder(root: Path, source: str, name: str) -> DataSource:
    """Return a folder of tables, of a list, or of class folders with or without folders of splits above them."""
    files, folders = walk(root)
    for kind, suffixes in _FILES.items():
        chosen = [parts for parts in files if parts[-1].lower().endswith(suffixes)]
        if kind == "list":  # others may tell of something else
            chosen = [parts for parts in chosen if parts[-1].lower() in _LISTS]
        if chosen:
            return DataSource(kind, name, files=_by_split((root.joinpath(*parts), parts) for parts in chosen))  # pyright: ignore[reportArgumentType]
    images = list(filter(_is_image, files))
    if any(parts[-1].endswith(".arrow") for parts in files) and not images:
        raise UserError(f"'{source}' was written by save_to_disk; write parquet files: dataset.to_parquet(FILE)")
    if not images:
        instead = f"no images (found: {kinds_of(parts[-1] for parts in files)})" if files else "no files"
        raise UserError(
            f"'{source}' holds {instead}; needed: one folder of images per class, parquet files or tar files"
        )
    notes = tell_ignored([parts[-1] for parts in files if not _is_image(parts)], name)
    split_folders = {parts[0] for parts in images if len(parts) > 2 and split_name(parts[0])}
    others = sorted({parts[0] for parts in folders if not split_name(parts[0])})
    if split_folders and others:
        raise UserError(
            f"'{source}' holds the split folder '{min(split_folders)}' beside '{others[0]}', which is not a "
            "split; keep only train, validation and test there, each with the class folders"
        )
    layout: dict[str, dict[str, list[Path]]] = {}
    for above in sorted({parts[:1] for parts in folders}) if split_folders else [()]:
        depth, place = len(above), "/".join((source.rstrip("/"), *above))
        inside = [parts for parts in images if parts[:depth] == above]
        loose = [parts for parts in inside if len(parts) == depth + 1]
        names = sorted({parts[depth] for parts in folders if len(parts) == depth + 1 and parts[:depth] == above})
        if not names:
            instead = f"images such as '{loose[0][-1]}' but no class folders" if loose else "no class folders"
            raise UserError(
                f"'{place}' holds {instead}; put the images of every class into a folder with the class's name"
            )
        if loose:
            number = "1 image" if len(loose) == 1 else f"{len(loose)} images"
            notes.append(f"{number} beside the class folders in '{place}' were ignored")
        if empty := sorted(set(names) - {parts[depth] for parts in inside if len(parts) > depth + 1}):
            raise UserError(f"class folder '{place}/{empty[0]}' holds no images; add some or remove the folder")
        classes = layout.setdefault(split_name(above[0]) or "" if above else "train", {})
        for parts in inside:
            if len(parts) > depth + 1:
                classes.setdefault(plain_name(parts[depth]) or parts[depth], []).append(root.joinpath(*parts))
    return DataSource("folder", name, folder=layout, notes=notes)
