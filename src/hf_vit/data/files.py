"""List the images of folders, in the same way for data sets, predictions, embeddings and analyses."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from hf_vit.data.labels import normalize_name
from hf_vit.errors import UserError
from hf_vit.repositories.stores import explain_store_errors, is_store_url, list_objects

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".dib", ".gif", ".webp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".tga"),
)
Parts = tuple[str, ...]
# Folders that macOS archives, Synology disks, Windows and Linux put beside images.
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
# Longest part of a path that the usual file systems allow.
_MAX_NAME = 255
# The first characters of PNG, JPEG, GIF and WebP files in base64.
_BASE64 = re.compile("data:image/|(^|/)(iVBORw0KG|9j/4|R0lGOD|UklGR)")


def is_image(name: str) -> bool:
    """Return whether a file name ends like an image file."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def walk(root: Path, depth: int | None = None) -> tuple[list[Parts], list[Parts]]:
    """Return all files and folders below `root` (no deeper than `depth`) as sorted tuples of path parts.

    Hidden names and system folders are skipped. Links are followed, and a broken link is listed as a file.
    """
    if is_store_url(root):
        visible = (parts for parts in list_objects(root) if not any(map(_is_hidden, parts)))
        files = [parts for parts in visible if depth is None or len(parts) <= depth]
        # An object store has no folders; they are the beginnings of its names.
        return files, sorted({parts[:end] for parts in files for end in range(1, len(parts))})
    files: list[Parts] = []
    folders: list[Parts] = []
    chains: dict[Path, frozenset[tuple[int, int]]] = {}  # of every folder: itself and those above it
    for current, folder_names, file_names in os.walk(root, followlinks=True):
        # os.walk enters only the folders that remain in folder_names.
        folder, status = Path(current), os.stat(current)
        above, identity = chains.get(folder.parent, frozenset()), (status.st_dev, status.st_ino)
        if identity in above:  # a link may lead back to a folder above
            folder_names.clear()
            continue
        chains[folder] = above | {identity}
        parts = folder.relative_to(root).parts
        folder_names[:] = sorted(name for name in folder_names if not _is_hidden(name))
        folders += [(*parts, name) for name in folder_names]
        files += [(*parts, name) for name in file_names if not _is_hidden(name)]
        if depth is not None and len(parts) + 1 >= depth:
            folder_names.clear()
    for entry in (*folders, *files):
        refuse_name("/".join(entry))
    return sorted(files), sorted(folders)


def refuse_name(path: object) -> None:
    """Raise UserError if a file name is not valid UTF-8, because no table or report could hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        escaped_path = str(path).encode("utf-8", "backslashreplace").decode()
        raise UserError(
            f"the file name {escaped_path} is not valid UTF-8; rename the file, or copy it again with UTF-8 names"
        ) from error


def refuse_text(path: str) -> None:
    """Raise UserError if the text of a row cannot be the name of an image file, such as an image in base64."""
    refuse_name(path)
    parts = path.split("/")
    is_base64 = _BASE64.search(path) and "." not in parts[-1]
    if is_base64 or any(len(part) > _MAX_NAME for part in parts):
        raise UserError(
            f"the text '{path[:20]}...' ({len(path):,} characters) is not an image file name; if it is an "
            "image in base64, store the bytes that base64.b64decode returns instead"
        )


def list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the images directly in a folder, and notes on its other files and its folders, empty if there are none."""
    files, folders = walk(folder, depth=1)
    names = [parts[-1] for parts in files]
    images = [folder / name for name in names if is_image(name)]
    # "." has no name before it is resolved; a URL cannot be resolved.
    folder_name = folder.name if is_store_url(folder) else folder.resolve().name
    notes = note_ignored_files([name for name in names if not is_image(name)], folder_name)
    if folders:
        notes.append(f"ignored the folders in '{folder_name}', such as '{folders[0][-1]}', as it has images itself")
    return images, notes


def note_ignored_files(names: Sequence[str], folder: str) -> list[str]:
    """Return a list with a note that counts the ignored files of a folder by suffix, empty without such files."""
    files = "1 file" if len(names) == 1 else f"{len(names)} files"
    return [f"ignored {files} in '{folder}' that are not images ({count_suffixes(names)})"] if names else []


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _SYSTEM_FOLDERS


def count_suffixes(names: Iterable[str], most: int = 3) -> str:
    """Return the most frequent suffixes with their counts, such as "2 .txt, 1 .db"."""
    kinds = Counter(PurePath(name).suffix.lower() or "no suffix" for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(most))


class FileNames:
    """Find files whose names on disk differ from those in a list in Unicode form, blanks around them or slashes."""

    def __init__(self) -> None:
        self._folders: dict[Path, tuple[Path, dict[str, str]]] = {}  # folder -> result of `_list`

    def find(self, path: Path) -> Path:
        """Return the existing file whose name matches the path; the path itself if there is none."""
        folder = path.parent
        if folder not in self._folders:
            self._folders[folder] = self._list(folder)
        actual_folder, names = self._folders[folder]
        name = names.get(path.name) or names.get(normalize_name(path.name))
        if name is not None:
            return path if name == path.name and actual_folder == folder else actual_folder / name
        if "\\" in path.name and not is_store_url(path):  # written on Windows
            return self.find(Path(str(path).replace("\\", "/")))
        return path

    def _list(self, folder: Path) -> tuple[Path, dict[str, str]]:
        """Return the folder as it is spelled on disk, and a map from normalized and exact names to exact names."""
        # os.path.isdir accepts names that are too long, but no URLs.
        is_folder = Path.is_dir if is_store_url(folder) else os.path.isdir
        with explain_store_errors(folder, "listed"):
            is_root = folder == folder.parent
            actual_folder = folder if is_root or is_folder(folder) else self.find(folder)
            names = [entry.name for entry in actual_folder.iterdir()] if is_folder(actual_folder) else []
        exact_names = {name: name for name in names}  # they come last, because they take precedence
        return actual_folder, {normalize_name(name): name for name in names} | exact_names
