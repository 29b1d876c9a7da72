"""Scans of images that have not changed since an earlier command checked them.

    HF_ASSETS_CACHE/hf_vit/scans/data/<data set and split>.npz

An image is unchanged if its file, or the files of its table, have the same absolute path, size and times as then. Only
good images of files on this machine are remembered, and only by this user's own commands: nothing comes from the data.
"""

import hashlib
import io
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import PIL

from hf_vit.data.images import ImageScan
from hf_vit.data.sources import DataSource
from hf_vit.errors import UserError
from hf_vit.repositories.stores import is_store_url
from hf_vit.writing import cache_folder, write_atomically

OFF = "HF_VIT_CHECK_ALL"
_VERSION = f"2 {PIL.__version__}"  # of the file's layout, and of what decodes images
# Fewer images are checked in a moment.
_LEAST_IMAGES, _LEAST_PIXELS = 1000, 100_000_000
_SETTLED = 2 * 10**9  # ns; a file that is younger may change again within the same tick of its file system's clock
_DIGEST = 32  # bytes


@final
class ScanMemory:
    """The remembered scans of one split.

    Args:
        source: where the images come from.
        split: the name of the split.
        column: the image column of a table, if the user named it.
        decode: whether this command decodes the images; then scans of headers alone do not count.

    Attributes:
        count: the number of images that were recalled.
        note: of one line, if the file was damaged.
    """

    def __init__(self, source: DataSource, split: str, column: str | None, decode: bool) -> None:
        files = (source.files.get(split, ()), *source.folder.get(split, {}).values())
        paths = [str(path) for part in files for path in part]
        self.count = 0
        self.note = ""
        self._decode = decode
        self._path: Path | None = None  # of the file; None: nothing is remembered
        self._keys: dict[int, bytes] = {}  # row -> hash of the path, size and times of its file
        self._recalled = set[int]()  # rows
        self._start = time.time_ns()
        self._known: dict[bytes, int] = {}  # such a hash of an earlier command -> its row in `_columns`
        self._columns: dict[str, Any] = {}  # the file's arrays, see `store`
        if os.environ.get(OFF) or not paths or is_store_url(paths[0]):
            return
        self._table_state: str | None = None  # of the files that hold all images, "" if it is not known
        if source.kind in ("parquet", "webdataset", "idx"):
            # Of all splits, as the range of numbers in all of them decides how pixels without a file are encoded.
            self._table_state = _describe_files((str(path) for _, path in source.name_files()), self._start)
        if self._table_state and column is not None:
            self._table_state += f"\n{column}"
        folders = {os.path.abspath(folder) for folder in set(map(os.path.dirname, paths))}
        with suppress(UserError, ValueError):  # the cache cannot be written; the folders are on two drives of Windows
            name = f"{source.kind} {source.name} {os.path.commonpath(folders)} {split}"
            digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
            self._path = cache_folder("scans", "data") / f"{digest[:32]}.npz"
            self._read(self._path)

    def _read(self, path: Path) -> None:
        """Set `_columns` and `_known` from the file of an earlier command; set `note` if the file is damaged."""
        try:
            content = path.read_bytes()
        except OSError:  # no earlier command
            return
        digest, archive = content[:_DIGEST], content[_DIGEST:]
        try:
            if hashlib.sha256(archive).digest() != digest:
                raise ValueError("its content has changed")
            with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            if str(columns["version"]) == _VERSION:
                rows = np.flatnonzero(columns["decoded"]) if self._decode else np.arange(len(columns["keys"]))
                self._known = {columns["keys"][row].tobytes(): int(row) for row in rows}
                self._columns = columns
        except (ValueError, KeyError, OSError) as error:
            self.note = f"the record of earlier checks {path} is damaged ({error}), so all images are checked again"

    def recall(self, row: int, stored_image: Mapping[str, Any], default_name: str, kept_bytes: int) -> ImageScan | None:
        """Return the scan of an image that has not changed, else None.

        An image of at most `kept_bytes` is decoded in any case, as its pixels are kept for the training.
        """
        if self._path is None:
            return None
        path = stored_image.get("path")
        state = self._table_state
        if path is not None and stored_image.get("bytes") is None:  # tables may name files, too
            state = _describe_files([path], self._start)
        elif state:
            state = f"{state}\n{row}"
        if not state:
            return None
        key = hashlib.sha256(state.encode(errors="surrogateescape")).digest()
        self._keys[row] = key
        index = self._known.get(key)
        if index is None:
            return None
        height, width, peak, is_turned = self._columns["values"][index].tolist()
        if 3 * height * width <= kept_bytes:
            return None
        self._recalled.add(row)
        digest = self._columns["digests"][index].tobytes().hex()
        return ImageScan(str(path or default_name), digest, height, width, peak=peak, is_turned=bool(is_turned))

    def store(self, scans: Sequence[ImageScan]) -> None:
        """Remember the good images of the split, and forget all others; a full disk is no error."""
        self.count = len(self._recalled)
        num_known = sum(key in self._known for key in self._keys.values())
        rows = [row for row in self._keys if scans[row].problem is None]
        is_large = len(rows) >= _LEAST_IMAGES or sum(scan.height * scan.width for scan in scans) >= _LEAST_PIXELS
        is_unchanged = num_known == len(rows) == len(self._columns.get("keys", ()))
        if self._path is None or not is_large or is_unchanged:
            return
        keys = [self._keys[row] for row in rows]
        good_scans = [scans[row] for row in rows]
        indices = [self._known.get(key) for key in keys]
        digests = b"".join(bytes.fromhex(scan.digest) for scan in good_scans)
        columns: dict[str, Any] = {
            "version": _VERSION,
            "keys": np.frombuffer(b"".join(keys), np.uint8).reshape(-1, _DIGEST),
            "digests": np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST),
            "values": [[scan.height, scan.width, scan.peak, scan.is_turned] for scan in good_scans],
            # A scan that was recalled was decoded if it was so in the earlier command.
            "decoded": [self._decode if index is None else self._columns["decoded"][index] for index in indices],
        }
        file = io.BytesIO()
        np.savez(file, **columns)
        content = file.getvalue()
        with suppress(UserError):
            write_atomically(self._path, hashlib.sha256(content).digest() + content)


def note_recalled(memories: Sequence[ScanMemory], total: int) -> list[str]:
    """Return what a command says if it did not check all images itself."""
    notes = [memory.note for memory in memories if memory.note]
    count = sum(memory.count for memory in memories)
    if count:
        notes.append(
            f"{count:,} of {total:,} images were not read to check them: paths, sizes and times of the files are as in "
            f"an earlier check ({OFF}=1 checks all)"
        )
    return notes


def _describe_files(paths: Iterable[str], now: int) -> str:
    """Return the paths, sizes and times of files; "" if one is missing or has just been written."""
    lines: list[str] = []
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return ""
        if status.st_ctime_ns > now - _SETTLED:
            return ""
        # The time of the last change (ctime) is set by every write, also by one that restores the time of the content.
        lines.append(f"{os.path.abspath(path)}\t{status.st_size}\t{status.st_mtime_ns}\t{status.st_ctime_ns}")
    return "\n".join(lines)
