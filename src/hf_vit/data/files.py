"""Folders of images, listed in one way for data, predictions, embeddings and analyses."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from hf_vit.data.labels import plain_name
from hf_vit.errors import UserError
from hf_vit.repositories.stores import find, in_store, saying_what

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".webp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".tga"),
)
Parts = tuple[str, ...]
# What systems put beside images: resource forks of a zip from macOS, thumbnails of a Synology disk, trash.
_OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
# How PNG, JPEG, GIF and WebP files begin in base64.
_BASE64 = re.compile("data:image/|(^|/)(iVBORw0KG|9j/4|R0lGOD|UklGR)")


def is_image(name: str) -> bool:
    """Return whether a file's name is one of an image."""
    return PurePath(name).suffix.lower() in IMAGE_SUFFIXES


def walk(root: Path, depth: int | None = None) -> tuple[list[Parts], list[Parts]]:
    """Return all files and folders below `root` (no deeper than `depth`) as name tuples, sorted.

    Hidden ones and those of systems are left out, links are followed; one that leads nowhere is a file that is not
    there.
    """
    if in_store(root):
        inside = (parts for parts in find(root) if not any(map(_is_hidden, parts)))
        files = [parts for parts in inside if depth is None or len(parts) <= depth]
        return files, sorted({parts[:end] for parts in files for end in range(1, len(parts))})
    files: list[Parts] = []
    folders: list[Parts] = []
    seen: set[tuple[int, int]] = set()
    for here, names, contents in os.walk(root, followlinks=True):
        status, parts = os.stat(here), Path(here).relative_to(root).parts
        is_known = (status.st_dev, status.st_ino) in seen  # by a link back to a folder above
        seen.add((status.st_dev, status.st_ino))
        names[:] = [] if is_known else sorted(name for name in names if not _is_hidden(name))
        folders += [(*parts, name) for name in names]
        files += [(*parts, name) for name in contents if not is_known and not _is_hidden(name)]
        if depth is not None and len(parts) + 1 >= depth:
            names.clear()
    for inside in (*folders, *files):
        refuse_name("/".join(inside))
    return sorted(files), sorted(folders)


def refuse_name(path: str | os.PathLike[str]) -> None:
    """Raise UserError where a file's name is not UTF-8, before any work: no table or report can hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise UserError(
            f"the name of {shown} is not UTF-8; rename it, or copy it from where it came with names in UTF-8"
        ) from error


def refuse_text(path: str) -> None:
    """Raise UserError where a row holds text that cannot name an image file, such as the image in base64."""
    refuse_name(path)
    *_, name = parts = path.split("/")
    if (_BASE64.search(path) and "." not in name) or any(len(part) > 255 for part in parts):
        raise UserError(
            f"the text '{path[:20]}...' ({len(path):,} characters) is not the name of an image file; where "
            "it is an image in base64, store the bytes that base64.b64decode returns"
        )


def images_in(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the images directly inside of a folder, and a note on the other files there, if there are any."""
    names = [parts[-1] for parts in walk(folder, depth=1)[0]]
    others = [name for name in names if not is_image(name)]
    return [folder / name for name in names if is_image(name)], tell_ignored(
        others, (folder if in_store(folder) else folder.resolve()).name
    )


def tell_ignored(names: Sequence[str], folder: str) -> list[str]:
    """Return a note on the files of a folder that are no images, with their kinds."""
    files = "1 file" if len(names) == 1 else f"{len(names)} files"
    return [f"{files} in '{folder}' that are not images were ignored ({kinds_of(names)})"] if names else []


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _OF_SYSTEMS


def kinds_of(names: Iterable[str], most: int = 3) -> str:
    """Return what files there are, "2 .txt, 1 .db", the most frequent first."""
    kinds = Counter(PurePath(name).suffix.lower() or "no suffix" for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(most))


class FileNames:
    """Finds files that are there in another Unicode form, with blanks around their names, or with Windows' slashes."""

    def __init__(self) -> None:
        self._listed: dict[Path, tuple[Path, dict[str, str]]] = {}

    def find(self, path: Path) -> Path:
        """Return the file that looks like this path, as a list or a file of annotations names it; else the path."""
        folder = path.parent
        if folder not in self._listed:
            self._listed[folder] = self._list(folder)
        place, names = self._listed[folder]
        name = names.get(path.name) or names.get(plain_name(path.name))
        if name is None and "\\" in path.name and not in_store(path):
            return self.find(Path(str(path).replace("\\", "/")))
        return path if name is None or (name == path.name and place == folder) else place / name

    def _list(self, folder: Path) -> tuple[Path, dict[str, str]]:
        """Return the folder as it is spelled on the disk, and its contents by their names."""
        is_there = Path.is_dir if in_store(folder) else os.path.isdir  # which has no error of a name that is too long
        with saying_what(folder, "listed"):
            place = folder if is_there(folder) or folder == folder.parent else self.find(folder)
            names = [inside.name for inside in place.iterdir()] if is_there(place) else []
        return place, {plain_name(name): name for name in names} | {name: name for name in names}
