"""What a `--data` argument names: a built-in set, a folder, a list, parquet or webdataset files, or a Hub data set."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from hf_vit.data.labels import plain_name
from hf_vit.data.splits import split_name
from hf_vit.errors import UserError
from hf_vit.repositories.stores import find, in_store, is_folder, matches, place_of, saying_what, sizes

_MASK_FOLDERS = ("annotations", "masks")
# Files of COCO that tell of something else.
_OTHER_JSON = re.compile(r"caption|keypoint|panoptic|stuff|image_info", re.IGNORECASE)
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')


@dataclass(frozen=True)
class Layout:
    """A folder, or file, of images with masks or objects.

    Attributes:
        kind: "masks" as ADE20K has them, or "coco".
        root: the folder.
        files: split -> its file of annotations (coco).
        folder: split -> "images" and "annotations" -> files (masks).
        notes: what the user should be told.
    """

    kind: Literal["coco", "masks"]
    root: Path
    files: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    folder: dict[str, dict[str, list[Path]]] = field(default_factory=dict[str, dict[str, list[Path]]])
    notes: list[str] = field(default_factory=list[str])


def dense_layout(root: Path, suffixes: Sequence[str]) -> Layout | None:
    """How a folder is laid out; None if neither as ADE20K nor as COCO.

    Args:
        root: a folder.
        suffixes: of images, in small letters.

    Raises:
        UserError: a split has several files of annotations.
    """
    listed = [path for path in _candidates(root) if is_coco(path)]
    if listed:
        return coco_layout(root, listed)
    masks = next((root / name for name in _MASK_FOLDERS if (root / name).is_dir()), None)
    if masks is None or not (root / "images").is_dir():
        return None
    images, annotations = (_dense_splits(folder, suffixes) for folder in (root / "images", masks))
    if not images or not annotations:
        return None
    folder = {
        split: {"images": images[split], "annotations": annotations.get(split, [])}
        for split in images
        if split in annotations
    }
    notes = [
        f"split '{split}' of '{root.resolve().name}' has no masks and was left out" for split in images.keys() - folder
    ]
    return Layout("masks", root, folder=folder, notes=notes) if folder else None


def coco_layout(root: Path, listed: Sequence[Path]) -> Layout:
    """Files of annotations by their splits, which their names tell, or the folders that they are in."""
    files: dict[str, list[Path]] = {}
    for path in listed:
        words = re.split(r"[^A-Za-z]+", "/".join(path.relative_to(root).parts))
        named = [name for name in map(split_name, words) if name]
        files.setdefault(named[-1] if named else "train", []).append(path)
    for split, paths in files.items():
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths[:2])
            raise UserError(f"'{root.name}' has several files of annotations for {split}: {names}; keep one of them")
    return Layout("coco", root, files=files)


def is_coco(path: Path) -> bool:
    """Whether a file of JSON may be one of COCO's, by the words in it."""
    content = path.read_bytes()
    return all(key in content for key in _COCO_KEYS)


def _candidates(root: Path) -> list[Path]:
    places = [*root.glob("*.json"), *root.glob("annotations/*.json"), *root.glob("*/_annotations.coco.json")]
    return sorted(path for path in places if path.is_file() and not _OTHER_JSON.search(path.name))


def _dense_splits(folder: Path, suffixes: Sequence[str]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.suffix.lower() in suffixes and not any(part.startswith(".") for part in inside) and path.is_file():
            split = split_name(inside[0]) if len(inside) > 1 else None
            splits.setdefault(split or "train", []).append(path)
    return splits


BUILTIN_NAMES = ("digits", "photos", "fractals", "scenes")
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".webp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".tga"),
)
_FILES: tuple[tuple[Literal["parquet", "webdataset", "list"], tuple[str, ...]], ...] = (
    ("parquet", (".parquet",)),
    ("webdataset", (".tar", ".tar.gz", ".tgz")),
    ("list", (".csv", ".tsv", ".jsonl")),
)
# A list of images that lies beside them, by the convention of `datasets` the first of the names.
_LISTS = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in (".csv", ".tsv", ".jsonl"))
# user/name, name, and either with :configuration.
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")


@dataclass(frozen=True)
class DataSource:
    """A `--data` argument, understood.

    Attributes:
        kind: where to read from; "list" is a CSV file or lines of JSON that name image files and their labels, "masks"
            and "coco" are folders for segmentation and detection (`hf_vit.data.sources`).
        name: for people and facts; no directories above the data.
        files: split -> files (parquet, webdataset, lists).
        folder: split -> class -> image files (folder of class folders; of lists, once they are read, without a class).
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
        """Every file with its name for people: split/file, or split/class/file of a folder."""
        for split, paths in self.files.items():
            for path in paths:
                yield f"{split}/{path.name}", path
        for split, classes in self.folder.items():
            for label, paths in classes.items():
                for path in paths:
                    yield "/".join(part for part in (split, label, path.name) if part), path


def is_builtin(source: str) -> bool:
    """Whether this is the name of built-in data: "digits", "photos", "fractals", "scenes" or "fractals:classes=10"."""
    return source in BUILTIN_NAMES or source.startswith(("fractals:", "scenes:"))


def resolve_source(source: str) -> DataSource:
    """Decide what `source` names. Existing paths win over Hub ids; the built-in names win over everything.

    Raises:
        UserError: a path that does not exist, holds no images, or is laid out in a way that leaves classes open.
    """
    if is_builtin(source):
        return DataSource("builtin", source)
    if not source.strip():
        raise UserError(
            "no data given; give a folder, parquet or tar files, a Hub data set id, 'digits', 'photos', 'fractals' or "
            "'scenes'"
        )
    if in_store(source):
        return _from_store(source)
    path = place_of(source).expanduser()
    if path.is_dir():
        dense = dense_layout(path, IMAGE_SUFFIXES)
        return _from_layout(dense, path.resolve().name) if dense else _from_folder(path, source, path.resolve().name)
    if path.suffix.lower() == ".json" and path.is_file() and is_coco(path):
        return _from_layout(coco_layout(path.parent, [path]), path.name)
    if path.exists():
        return _from_files([path], path.name, source)
    if any(character in source for character in "*?["):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        if not matches:
            raise UserError(f"no file matches '{source}'; give parquet or tar files, or a folder of class folders")
        return _from_files(matches, Path(source).name, source)
    if _looks_like_a_path(source):
        raise UserError(
            f"'{source}' does not exist; give a folder of class folders, parquet or tar files, a Hub data set id, "
            "'digits', 'photos', 'fractals' or 'scenes'"
        )
    return DataSource("hub", source)


def _from_store(address: str) -> DataSource:
    """Of an object store: a folder, a file or a pattern."""
    place, name = place_of(address), address.rstrip("/").rpartition("/")[2]
    if not is_folder(place):
        found = list(sizes([place])) or matches(address)
        if not found:
            raise UserError(f"there is no '{address}'; give a folder of class folders, parquet or tar files")
        return _from_files(found, name, address)
    if dense_layout(place, IMAGE_SUFFIXES):
        raise UserError(
            f"'{address}' holds masks or objects as files, which are not read from there; give parquet files, or a "
            "folder of this machine"
        )
    return _from_folder(place, address, name)


def image_files(root: Path) -> list[Path]:
    """The images of a folder, wherever in it they lie; of its train folder alone where there are folders of splits.

    None of a folder of tables or lists, which tell of their images themselves.
    """
    layout = dense_layout(root, IMAGE_SUFFIXES)
    if layout is not None and layout.kind == "masks":
        return (layout.folder.get("train") or next(iter(layout.folder.values())))["images"]
    files, _ = _walk(root)
    tables = tuple(suffix for kind, suffixes in _FILES if kind != "list" for suffix in suffixes)
    if any(parts[-1].lower().endswith(tables) or parts[-1].lower() in _LISTS for parts in files):
        return []
    images = [parts for parts in files if Path(parts[-1]).suffix.lower() in IMAGE_SUFFIXES]
    folders = {parts[0]: split_name(parts[0]) for parts in images if len(parts) > 1}
    named = set(filter(None, folders.values()))
    if len(named) > 1 or (named and all(folders.values())):  # "train" beside "bus" and "car" is a class
        images = [parts for parts in images if split_name(parts[0]) == "train"]
    return [root.joinpath(*parts) for parts in images]


Listing = tuple[Path | None, dict[str, str]]


def find_file(path: Path, folders: dict[Path, Listing]) -> Path:
    """Return the file that looks like this path, in whichever Unicode form and with blanks; the path if there is none.

    Args:
        path: as a list or a file of annotations names it.
        folders: what was listed so far: how a folder is spelled if otherwise, and its contents by their names.
    """
    folder = path.parent
    if (listing := folders.get(folder)) is None:
        listing = folders[folder] = _listing(folder)
    other, names = listing
    name = names.get(path.name) or names.get(plain_name(path.name))
    return path if name is None or (name == path.name and other is None) else (other or folder) / name


def _listing(folder: Path) -> Listing:
    there = Path.is_dir if in_store(folder) else os.path.isdir  # which has no error of a name that is too long
    with saying_what(folder, "listed"):
        found = next(place for place in (folder, *folder.parents) if there(place) or place == place.parent)
        for part in folder.parts[len(found.parts) :]:
            names = _names_in(found)
            found = found / (names.get(part) or names.get(plain_name(part), part))
        return None if found == folder else found, _names_in(found) if there(found) else {}


def _names_in(folder: Path) -> dict[str, str]:
    names = [place.name for place in folder.iterdir()]
    return {plain_name(name): name for name in names} | {name: name for name in names}


def _from_layout(layout: Layout, name: str) -> DataSource:
    return DataSource(layout.kind, name, layout.files, layout.folder, layout.notes, layout.root)


def _looks_like_a_path(source: str) -> bool:
    if source.startswith(("/", "./", "../", "~", ".\\", "..\\")):
        return True
    suffixes = (*(suffix for _, suffixes in _FILES for suffix in suffixes), ".zip", *IMAGE_SUFFIXES)
    return source.lower().endswith(suffixes) or _HUB_ID.fullmatch(source) is None


def _from_files(paths: Sequence[Path], name: str, source: str) -> DataSource:
    for kind, suffixes in _FILES:
        if all(path.name.lower().endswith(suffixes) for path in paths):
            return DataSource(kind, name, files=_by_split([(path, (path.name,)) for path in paths]))
    what = f"'{source}' is no data set file" if len(paths) == 1 else f"'{source}' mixes kinds of files"
    raise UserError(
        f"{what}; needed: .parquet files, .tar files (webdataset), a list (.csv, .jsonl), or a folder of class folders"
    )


def _by_split(files: Sequence[tuple[Path, tuple[str, ...]]]) -> dict[str, list[Path]]:
    """Splits told by file or folder names: train-00000-of-00002.parquet, val/0.tar. Without a word: train."""
    result: dict[str, list[Path]] = {}
    for path, parts in files:
        words = re.split(r"[^A-Za-z]+", "/".join(parts))
        named = [name for name in map(split_name, words) if name]
        result.setdefault(named[-1] if named else "train", []).append(path)
    return {split: sorted(paths) for split, paths in result.items()}


def _from_folder(root: Path, source: str, name: str) -> DataSource:
    files, folders = _walk(root)
    for kind, suffixes in _FILES:
        chosen = [parts for parts in files if parts[-1].lower().endswith(suffixes)]
        if kind == "list":  # others may tell of something else
            chosen = [parts for parts in chosen if parts[-1].lower() in _LISTS]
        if chosen:
            return DataSource(kind, name, files=_by_split([(root.joinpath(*parts), parts) for parts in chosen]))
    images = [parts for parts in files if Path(parts[-1]).suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise UserError(_nothing_found(source, files))
    notes: list[str] = []
    if len(images) < len(files):
        notes.append(f"{_count(len(files) - len(images), 'file')} in '{name}' that are no images were ignored")
    split_folders = {parts[0] for parts in images if len(parts) > 2 and split_name(parts[0])}
    if split_folders:
        others = sorted({parts[0] for parts in folders if not split_name(parts[0])})
        if others:
            raise UserError(
                f"'{source}' holds the split folder '{min(split_folders)}' beside '{others[0]}', which is none; keep "
                "only train, validation and test there, each with the class folders"
            )
        layout: dict[str, dict[str, list[Path]]] = {}
        for split_folder in sorted({parts[0] for parts in folders}):
            classes = _classes(root, images, folders, (split_folder,), source, notes)
            target = layout.setdefault(split_name(split_folder) or "", {})
            for label, paths in classes.items():
                target.setdefault(label, []).extend(paths)
        return DataSource("folder", name, folder=layout, notes=notes)
    return DataSource("folder", name, folder={"train": _classes(root, images, folders, (), source, notes)}, notes=notes)


def _classes(
    root: Path,
    images: Sequence[tuple[str, ...]],
    folders: Sequence[tuple[str, ...]],
    above: tuple[str, ...],
    source: str,
    notes: list[str],
) -> dict[str, list[Path]]:
    """Class -> image files, for the class folders inside `above` (a split folder, or nothing)."""
    depth = len(above)
    place = "/".join((source.rstrip("/"), *above))
    inside = [parts for parts in images if parts[:depth] == above]
    loose = [parts for parts in inside if len(parts) == depth + 1]
    names = sorted({parts[depth] for parts in folders if len(parts) == depth + 1 and parts[:depth] == above})
    if not names:
        instead = f"images such as '{loose[0][-1]}' but no class folders" if loose else "no class folders"
        raise UserError(f"'{place}' holds {instead}; put the images of every class into a folder with the class's name")
    if loose:
        notes.append(f"{_count(len(loose), 'image')} beside the class folders in '{place}' were ignored")
    inside = [parts for parts in inside if len(parts) > depth + 1]
    if empty := sorted(set(names) - {parts[depth] for parts in inside}):
        raise UserError(f"class folder '{place}/{empty[0]}' holds no images; add some or remove the folder")
    classes: dict[str, list[Path]] = {}
    for parts in inside:
        classes.setdefault(plain_name(parts[depth]) or parts[depth], []).append(root.joinpath(*parts))
    return classes


def _walk(root: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """All files and folders below `root` as name tuples, sorted; hidden ones and __MACOSX left out; links followed."""
    if in_store(root):
        files = [parts for parts in find(root) if not any(part.startswith(".") or part == "__MACOSX" for part in parts)]
        return files, sorted({parts[:depth] for parts in files for depth in range(1, len(parts))})
    files: list[tuple[str, ...]] = []
    folders: list[tuple[str, ...]] = []
    for here, names, contents in _visible(root):
        parts = here.relative_to(root).parts
        folders.extend((*parts, name) for name in names)
        files.extend((*parts, name) for name in contents)
    return sorted(files), sorted(folders)


def _visible(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    seen: set[tuple[int, int]] = set()
    for here, names, contents in os.walk(root, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:  # a link back to a folder above
            names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "__MACOSX")
        yield Path(here), names, [name for name in contents if not name.startswith(".")]


def _nothing_found(source: str, files: Sequence[tuple[str, ...]]) -> str:
    need = "needed: one folder of images a class, parquet files or tar files"
    if not files:
        return f"'{source}' holds no files; {need}"
    kinds = Counter(Path(parts[-1]).suffix.lower() or "no suffix" for parts in files)
    instead = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
    return f"'{source}' holds no images (found: {instead}); {need}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
