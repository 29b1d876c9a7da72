"""Resolve a `--data` argument: built-in data, a folder, a list, parquet or webdataset files, or a Hub data set.

Folders for segmentation are laid out as ADE20K: images/{training,validation}/NAME.jpg and
annotations/{training,validation}/NAME.png, or both without splits; "annotations" may be called "masks". Folders for
detection are laid out as COCO: one JSON file with "images", "annotations" and "categories" for each split, in the
folder, in annotations/, or beside the images of its split.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from hf_vit.data.files import IMAGE_SUFFIXES, Parts, count_suffixes, is_image, note_ignored_files, walk
from hf_vit.data.idx import group_idx_files, is_mapping_name, list_companions, parse_idx_name
from hf_vit.data.labels import normalize_name
from hf_vit.data.splits import split_name
from hf_vit.display import format_count
from hf_vit.errors import UnlabeledError, UserError
from hf_vit.repositories.stores import is_folder, is_store_url, match_objects, read_sizes, to_path

Kind = Literal["builtin", "folder", "list", "parquet", "webdataset", "idx", "hub", "masks", "coco"]
BUILTIN_NAMES = ("digits", "photos", "fractals", "scenes")
_TABLES: dict[Kind, tuple[str, ...]] = {"parquet": (".parquet",), "webdataset": (".tar", ".tar.gz", ".tgz")}
_FILES: dict[Kind, tuple[str, ...]] = {**_TABLES, "list": (".csv", ".tsv", ".jsonl")}
# File names of a list of images beside the images; `datasets` uses the first one.
_LISTS = tuple(f"{name}{suffix}" for name in ("metadata", "labels") for suffix in _FILES["list"])
# user/name or name, each with an optional :configuration.
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")
# COCO files for other tasks.
_OTHER_JSON = re.compile(r"caption|keypoint|panoptic|stuff|image_info", re.IGNORECASE)
_COCO_KEYS = (b'"images"', b'"annotations"', b'"categories"')
_KINDS = "a Hub data set id, 'digits', 'photos', 'fractals' or 'scenes'"


@dataclass(frozen=True)
class DataSource:
    """A resolved `--data` argument.

    Attributes:
        kind: format of the source; "list" is a CSV or JSON Lines file of image files and labels, "masks" and "coco" are
            folders for segmentation and detection, "idx" files of MNIST's format.
        name: for messages and records, without the directories above the data.
        files: split -> files (parquet, webdataset, lists, COCO annotations; IDX: images, labels, classes).
        folder: split -> class -> image files. Lists and COCO have the one class "" once they are read, "masks" has
            "images" and "annotations" in place of classes.
        notes: for the user.
        root: the folder of "masks" or "coco".
    """

    kind: Kind
    name: str
    files: dict[str, list[Path]] = field(default_factory=dict[str, list[Path]])
    folder: dict[str, dict[str, list[Path]]] = field(default_factory=dict[str, dict[str, list[Path]]])
    notes: list[str] = field(default_factory=list[str])
    root: Path | None = None

    @cached_property
    def is_local(self) -> bool:
        """Whether all files are on this machine; only tables on this machine may name further files."""
        return self.kind != "hub" and not any(is_store_url(path) for _, path in self.name_files())

    def name_files(self) -> Iterator[tuple[str, Path]]:
        """Yield every file with its name for messages: split/file, or split/class/file of a class folder."""
        for split, paths in self.files.items():
            for path in paths:
                yield f"{split}/{path.name}", path
        for split, classes in self.folder.items():
            for label, paths in classes.items():
                prefix = "".join(f"{part}/" for part in (split, label) if part)
                for path in paths:
                    yield f"{prefix}{path.name}", path


def is_builtin(source: str) -> bool:
    """Return whether the source is built-in data; "fractals" and "scenes" may have options after a colon."""
    return source in BUILTIN_NAMES or source.startswith(("fractals:", "scenes:"))


def refuse_output_in(data: object, output: str | os.PathLike[str] | None) -> None:
    """Raise UserError if the output is in the folder of the data, where the next command would read it as images."""
    if output is None or not isinstance(data, str | os.PathLike) or is_builtin(str(data)):
        return
    outer, inner = (os.path.join(os.path.realpath(str(to_path(path))), "") for path in (data, output))
    if inner.startswith(outer) and is_folder(to_path(data)):
        raise UserError(f"the output {output} is in the folder of the data, {data}; choose one outside that folder")


def resolve_source(source: str) -> DataSource:
    """Resolve the name of a data set; built-in names take precedence over paths, and existing paths over Hub ids."""
    if is_builtin(source):
        return DataSource("builtin", source)
    if not source.strip():
        raise UserError(f"the data source is an empty text; give a folder, parquet or tar files, {_KINDS}")
    path = to_path(source)
    if is_store_url(source):
        return _resolve_url(path, source)
    return _resolve_local_path(path, source) or _resolve_hub_id(source)


def _resolve_url(path: Path, source: str) -> DataSource:
    """Return the source at a folder, file or pattern of an object store; raise UserError if nothing is there."""
    name = Path(source).name
    if is_folder(path):
        if _resolve_dense_folder(path, name):
            raise UserError(
                f"'{source}' holds masks or objects as separate files, which can only be read from a local "
                "folder; download it, or give parquet files"
            )
        return _resolve_folder(path, source, name)
    paths = list(read_sizes([path])) or match_objects(source)
    if not paths:
        raise UserError(f"'{source}' does not exist; give a folder of class folders, parquet or tar files")
    return _resolve_files(paths, name, source)


def _resolve_local_path(path: Path, source: str) -> DataSource | None:
    """Return the source at a local folder, file or pattern, else None."""
    if path.is_dir():
        name = path.resolve().name  # "." has no name before it is resolved
        return _resolve_dense_folder(path, name) or _resolve_folder(path, source, name)
    if path.suffix.lower() == ".json" and path.is_file() and _is_coco(path):
        return _make_coco_source(path.parent, path.name, [path])
    paths = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    return _resolve_files(paths, path.name, source) if paths else None


def _resolve_hub_id(source: str) -> DataSource:
    """Return the source of a Hub data set; raise UserError if the text is a pattern or looks like a path."""
    if any(character in source for character in "*?["):
        raise UserError(f"no file matches '{source}'; give another pattern, such as 'data/*.parquet'")
    suffixes = (*(suffix for suffixes in _FILES.values() for suffix in suffixes), ".zip", *IMAGE_SUFFIXES)
    is_path = source.startswith(("/", "./", "../", "~", ".\\", "..\\")) or source.lower().endswith(suffixes)
    if is_path or _HUB_ID.fullmatch(source) is None:
        raise UserError(f"'{source}' does not exist; give a folder of class folders, parquet or tar files, {_KINDS}")
    return DataSource("hub", source)


def _resolve_files(paths: Sequence[Path], name: str, source: str) -> DataSource:
    """Return the source of files of one format, which their suffix tells; raise UserError for several formats."""
    idx_files = [path for path in paths if parse_idx_name(path.name)]
    if idx_files and all(path in idx_files or is_mapping_name(path.name) for path in paths):
        return _make_idx_source(paths if len(paths) > 1 else list_companions(paths[0]), name, source)
    root = os.path.commonpath([str(path.parent) for path in paths])
    parts = [Path(os.path.relpath(str(path), root)).parts for path in paths]  # of a pattern with its folders
    for kind, suffixes in _FILES.items():
        if all(path.name.lower().endswith(suffixes) for path in paths):
            return DataSource(kind, name, files=_divide_files(zip(paths, parts, strict=True)))
    problem = f"'{source}' is not a data set file" if len(paths) == 1 else f"'{source}' mixes files of several formats"
    raise UserError(
        f"{problem}; give .parquet files, .tar files (webdataset), a list (.csv, .jsonl) or a folder of class folders"
    )


def _make_idx_source(paths: Sequence[Path], name: str, source: str) -> DataSource:
    files, notes = group_idx_files(paths, source)
    return DataSource("idx", name, files=files, notes=notes)


def group_by_split(files: Iterable[tuple[Path, Parts]]) -> dict[str, list[Path]]:
    """Group files by the split in their file or folder names (train-00000-of-00002.parquet, val/0.tar), else ""."""
    splits: dict[str, list[Path]] = {}
    for path, parts in files:
        words = re.split(r"[^A-Za-z]+", "/".join(parts))
        split_names = [name for name in map(split_name, words) if name]
        split = split_names[-1] if split_names else ""  # of several the nearest to the end of the path
        splits.setdefault(split, []).append(path)
    return {split: sorted(paths) for split, paths in splits.items()}


def _divide_files(files: Iterable[tuple[Path, Parts]]) -> dict[str, list[Path]]:
    """Group files by split; those whose names tell none are of train, unless other files are named so."""
    splits = group_by_split(files)
    unnamed = splits.pop("", [])
    if unnamed and "train" in splits:
        raise UserError(
            f"'{unnamed[0].name}' names no split, but other files name train; write train, validation or test into the "
            "name of every file or its folder, or move the file away"
        )
    return {"train": unnamed, **splits} if unnamed else splits


def _resolve_dense_folder(root: Path, name: str) -> DataSource | None:
    """Return the source of a folder that is laid out as ADE20K or COCO, else None."""
    candidates = [*root.glob("*.json"), *root.glob("annotations/*.json"), *root.glob("*/_annotations.coco.json")]
    files = [path for path in candidates if path.is_file() and not _OTHER_JSON.search(path.name)]
    if annotation_files := sorted(filter(_is_coco, files)):
        return _make_coco_source(root, name, annotation_files)
    mask_folders = [root / name for name in ("annotations", "masks") if (root / name).is_dir()]
    masks = next(filter(None, map(_group_images_by_split, mask_folders)), None)  # one may hold XML or JSON files
    if masks is None or not (root / "images").is_dir():
        return None
    folders = [parts[0] for parts in walk(root / "images", depth=1)[1]]
    others = [folder for folder in folders if not split_name(folder)]
    if others and others != folders:  # else these images would be trained on
        raise UserError(f"'{name}/images' holds split folders and '{others[0]}', which is not a split; move it away")
    images = _group_images_by_split(root / "images")
    splits = {split: {"images": images[split], "annotations": masks[split]} for split in images if split in masks}
    unlabeled = (split for split in images if split not in masks)
    notes = [f"split '{split}' of '{root.resolve().name}' was left out, because it has no masks" for split in unlabeled]
    return DataSource("masks", name, folder=splits, notes=notes, root=root) if splits else None


def _group_images_by_split(folder: Path) -> dict[str, list[Path]]:
    """Group the images below a folder by the split that their first subfolder names, else train."""
    splits: dict[str, list[Path]] = {}
    files, _ = walk(folder)
    for parts in filter(_has_image_name, files):
        split = split_name(parts[0]) or "train"  # the name of an image file names no split
        splits.setdefault(split, []).append(folder.joinpath(*parts))
    return splits


def _make_coco_source(root: Path, name: str, annotation_files: Sequence[Path]) -> DataSource:
    """Return the source of COCO annotation files, whose split is in their own name or in that of their folder."""
    files = _divide_files((path, path.relative_to(root).parts) for path in annotation_files)
    for split, paths in files.items():
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths[:2])
            raise UserError(f"'{root.name}' has several annotation files for {split}: {names}; keep only one of them")
    return DataSource("coco", name, files, root=root)


def _is_coco(path: Path) -> bool:
    content = path.read_bytes()
    return all(key in content for key in _COCO_KEYS)


def _has_image_name(parts: Parts) -> bool:
    return is_image(parts[-1])


def list_unlabeled_images(source: str) -> tuple[str, list[Path]]:
    """Return the name of a folder and all images below it; of splits only train's, and those of a folder "unlabeled".

    A folder of tables or lists gives no images, because these list their images themselves; nor do other sources.
    """
    root = to_path(source)
    name = root.resolve().name
    if not source.strip() or is_builtin(source) or not is_folder(root):  # an empty text would be the current folder
        return name, []
    dense = _resolve_dense_folder(root, root.name)
    if dense is not None and dense.kind == "masks":
        return name, (dense.folder.get("train") or next(iter(dense.folder.values())))["images"]
    files, _ = walk(root)
    if _find_data_files(files):
        return name, []
    images = list(filter(_has_image_name, files))
    splits_of_folders = {parts[0]: split_name(parts[0]) for parts in images if len(parts) > 1}
    split_names = set(filter(None, splits_of_folders.values()))
    # A folder "train" beside "bus" and "car" is a class.
    if len(split_names) > 1 or (split_names and all(splits_of_folders.values())):
        images = [parts for parts in images if split_name(parts[0]) == "train" or parts[0].startswith("unlabel")]
    return name, [root.joinpath(*parts) for parts in images]


def _find_data_files(files: list[Parts]) -> tuple[Kind, list[Parts]] | None:
    """Return the format and the files of a folder's tables, lists or IDX files, the first that it holds, else None."""
    for kind, suffixes in _TABLES.items():
        tables = [parts for parts in files if parts[-1].lower().endswith(suffixes)]
        if tables:
            return kind, tables
    lists = [parts for parts in files if parts[-1].lower() in _LISTS]  # other .csv files need not list images
    if lists:
        return "list", lists
    if any(parse_idx_name(parts[-1]) for parts in files):
        return "idx", files  # with the text files that name the classes
    return None


def _resolve_folder(root: Path, source: str, name: str) -> DataSource:
    """Return the source of a folder with tables, a list, or class folders with or without split folders above them."""
    files, folders = walk(root)
    match = _find_data_files(files)
    if match:
        kind, data_files = match
        paths = [root.joinpath(*parts) for parts in data_files]
        if kind == "idx":
            return _make_idx_source(paths, name, source)
        folders_of_lists = [path.parent for path in paths] if kind == "list" else []
        if twins := [path.name for path in paths if folders_of_lists.count(path.parent) > 1]:
            raise UserError(f"'{source}' holds {twins[0]} and {twins[1]} in one folder; give one of them by its path")
        count = 0 if kind == "list" else sum(map(_has_image_name, files))
        note = f"'{name}' is read from its {kind} files, such as {paths[0].name}, not from its {count:,} image files"
        files_by_split = _divide_files(zip(paths, data_files, strict=True))
        return DataSource(kind, name, files=files_by_split, notes=[note] if count else [])
    images = list(filter(_has_image_name, files))
    others = [] if len(images) == len(files) else [parts[-1] for parts in files if not _has_image_name(parts)]
    if not images:
        if any(other.endswith(".arrow") for other in others):
            raise UserError(
                f"'{source}' was written by save_to_disk, which hf_vit does not read; write parquet files with "
                "dataset.to_parquet(FILE)"
            )
        contents = f"no images (only {count_suffixes(others)})" if files else "no files"
        raise UserError(f"'{source}' holds {contents}; give one folder of images per class, parquet files or tar files")
    layout, notes = _group_by_split_and_class(root, source, images, folders)
    return DataSource("folder", name, folder=layout, notes=[*note_ignored_files(others, name), *notes])


def _group_by_split_and_class(
    root: Path, source: str, images: list[Parts], folders: list[Parts]
) -> tuple[dict[str, dict[str, list[Path]]], list[str]]:
    """Return split -> class -> image files of class folders, and notes on the images beside the class folders.

    Raise UserError if split folders stand beside other folders. Without split folders all images are of train.
    """
    notes: list[str] = []
    split_folders = {parts[0] for parts in images if len(parts) > 2 and split_name(parts[0])}
    others = sorted({parts[0] for parts in folders if not split_name(parts[0])})
    if split_folders and others:
        raise UserError(
            f"'{source}' holds the split folder '{min(split_folders)}' beside '{others[0]}', which is not a "
            "split; keep only train, validation and test there, and put the class folders into each of them"
        )
    layout: dict[str, dict[str, list[Path]]] = {}
    tops: list[Parts] = sorted({parts[:1] for parts in folders})
    prefixes = tops if split_folders or (len(tops) > 1 and not others) else [()]  # "train" alone may be a class
    for prefix in prefixes:
        folder_name = "/".join((source.rstrip("/"), *prefix))
        images_below = [parts for parts in images if parts[: len(prefix)] == prefix]
        num_loose = sum(len(parts) == len(prefix) + 1 for parts in images_below)
        classes = _group_by_class(root, prefix, images_below, folders, folder_name)
        if num_loose:
            notes.append(f"ignored {format_count(num_loose, 'image')} beside the class folders in '{folder_name}'")
        split = (split_name(prefix[0]) or "") if prefix else "train"
        for label, paths in classes.items():  # "val" and "validation" are the same split
            layout.setdefault(split, {}).setdefault(label, []).extend(paths)
    return layout, notes


def _group_by_class(
    root: Path, prefix: Parts, images: list[Parts], folders: list[Parts], folder_name: str
) -> dict[str, list[Path]]:
    """Group the images below the class folders in root/prefix; raise UserError if there is no class or an empty one."""
    depth = len(prefix)  # of the class's name in the parts of a path
    names = sorted({parts[depth] for parts in folders if len(parts) == depth + 1 and parts[:depth] == prefix})
    images_of_classes = [parts for parts in images if len(parts) > depth + 1]
    if not names:
        loose = [parts for parts in images if len(parts) == depth + 1]
        contents = f"images such as '{loose[0][-1]}' but no class folders" if loose else "no class folders"
        raise UnlabeledError(
            f"'{folder_name}' holds {contents}; put the images of every class into a folder with the class's name"
        )
    empty = sorted(set(names) - {parts[depth] for parts in images_of_classes})
    if empty:
        remedy = "add some, or move the folder away"
        if empty[0].lower() in ("labels", "annotations"):
            remedy = "if these are the labels of YOLO or Pascal VOC, convert them to one COCO file for --task detection"
        raise UserError(f"class folder '{folder_name}/{empty[0]}' holds no images; {remedy}")
    classes: dict[str, list[Path]] = {}
    labels = {name: normalize_name(name) or name for name in names}
    for parts in images_of_classes:
        classes.setdefault(labels[parts[depth]], []).append(root.joinpath(*parts))
    return classes
