"""Getting a file from the network: resumed after a dropped connection, never stitched together from two versions.

The transfer goes through fsspec, block by block. What arrived lies in the Hub's cache folder for assets of libraries
(`huggingface_hub.cached_assets_path`), in a folder of the version that the server names (ETag, otherwise the date of
the last change), as `*.partial` until the last byte is there and the server still names the same version.
"""

import hashlib
import importlib.util
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from hf_vit.conversion.progress import progress
from hf_vit.conversion.readers.checkpoint import one_line
from hf_vit.errors import UserError
from hf_vit.results.redaction import redact_text

BLOCK = 8 * 2**20  # bytes that one request asks for
ATTEMPTS = 5  # in a row that bring nothing
MAX_VERSIONS = 3  # a file that changes more often while it is fetched is given up
FIRST_PAUSE = 0.5  # seconds; doubled after every attempt that brought nothing
GOOGLE_STORAGE = "https://storage.googleapis.com/"
CONNECT_TIMEOUT, READ_TIMEOUT = 30, 60  # seconds
_TEMPORARY_STATUS = (408, 425, 429)  # HTTP's 4xx that ask to come again; all others say that it is no use
_CHANGED_STATUS = 412


class _InterruptedError(Exception):
    """The transfer stopped for a reason that may pass."""


class _ChangedError(_InterruptedError):
    """The file is another one than when the transfer began."""


@dataclass(frozen=True)
class _Remote:
    """What the server says about the file.

    Attributes:
        size: in bytes; None if the server does not say.
        version: ETag or date of the last change; None if the server names neither.
        seekable: whether parts of the file can be asked for.
    """

    size: int | None
    version: str | None
    seekable: bool

    @property
    def folder_name(self) -> str:
        return hashlib.sha256(f"{self.version} {self.size}".encode()).hexdigest()[:16]


def download(url: str, *, checked_later: bool = False) -> Path:
    """The file behind an https:// or gs:// URL, from the cache if the server's version is there already.

    Args:
        url: of the file. gs:// goes through gcsfs where it is installed, otherwise to the public address of the bucket.
        checked_later: the caller holds the file against a known hash, so that a server may hide its size.

    Raises:
        UserError: the server refuses, does not answer several times in a row, or the file changes again and again.
    """
    from huggingface_hub import cached_assets_path
    from huggingface_hub.utils import WeakFileLock

    folder = cached_assets_path("hf_vit", "downloads", hashlib.sha256(url.encode()).hexdigest()[:16])
    with WeakFileLock(folder / ".lock"):
        return _Transfer(url, folder, checked_later).run()


class _Transfer:
    """One file on its way into `folder`."""

    def __init__(self, url: str, folder: Path, checked_later: bool) -> None:
        self._url, self._folder, self._checked_later = url, folder, checked_later
        self._name = Path(unquote(urlsplit(url).path)).name or "checkpoint"
        self._filesystem, self._path = _filesystem(url)
        self._as_stream = False  # because the server ignores Range
        self._block = BLOCK

    def run(self) -> Path:
        """Try until it is done, or nothing more arrives."""
        idle, most, versions = 0, self._bytes_here(), set[str | None]()
        while True:
            self._block = BLOCK >> idle  # a poor connection gets smaller parts through
            try:
                return self._attempt(versions)
            except _InterruptedError as error:
                here = self._bytes_here()
                idle, most = (0, here) if here > most else (idle + 1, most)
                if idle >= ATTEMPTS or len(versions) > MAX_VERSIONS:
                    kept = (
                        "what arrived is kept, and the same command goes on from there" if here else "check the address"
                    )
                    raise UserError(
                        f"{redact_text(self._url)} cannot be downloaded: {one_line(error)}; {kept}"
                    ) from error
                if idle:
                    time.sleep(FIRST_PAUSE * 2 ** (idle - 1))

    def _bytes_here(self) -> int:
        return sum(file.stat().st_size for file in self._folder.glob("*/*"))

    def _attempt(self, versions: set[str | None]) -> Path:
        remote = self._describe()
        versions.add(remote.version)
        target = self._folder / remote.folder_name / self._name
        partial = target.with_name(f"{target.name}.partial")
        if remote.version is None:  # nothing tells whether what is here is part of what is there
            shutil.rmtree(target.parent, ignore_errors=True)
        if target.is_file():
            return target
        target.parent.mkdir(exist_ok=True)
        self._fill(partial, remote)
        if remote.size not in (None, partial.stat().st_size) or self._describe() != remote:
            partial.unlink()
            raise _ChangedError("the file changed on the server while it was fetched")
        partial.replace(target)
        for other in self._folder.iterdir():
            if other.is_dir() and other != target.parent:
                shutil.rmtree(other, ignore_errors=True)
        return target

    def _describe(self) -> _Remote:
        with _refusing(self._url):
            info: dict[str, Any] = self._filesystem.info(self._path, **self._headers())
        size = info.get("size")
        if size is None and not self._checked_later:
            raise UserError(
                f"{redact_text(self._url)} cannot be downloaded safely: the server does not say how large the file is, "
                "so that a part would pass for the whole; give its --sha256"
            )
        fields = ("ETag", "etag", "generation", "Last-Modified", "updated", "mtime")
        version = next((str(info[name]) for name in fields if info.get(name)), None)
        seekable = size is not None and version is not None and info.get("partial", True) and not self._as_stream
        return _Remote(size, version, seekable)

    def _fill(self, partial: Path, remote: _Remote) -> None:
        """Append to the partial file until the server has no more."""
        with partial.open("ab" if remote.seekable else "wb") as file, progress(self._name, remote.size) as advance:
            here = file.tell()
            advance(here)
            for block in self._blocks(here, remote):
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())

    def _blocks(self, start: int, remote: _Remote) -> Generator[bytes]:
        options: dict[str, Any] = (
            {"block_size": self._block, "size": remote.size} if remote.seekable else {"block_size": 0}
        )
        with _refusing(self._url):
            file = self._filesystem.open(
                self._path, "rb", cache_type="none", **options, **self._headers(remote.version)
            )
        with file:
            if remote.seekable:
                file.seek(start)
            while remote.size is None or start < remote.size:
                wanted = min(self._block, remote.size - start) if remote.size is not None else self._block
                with _refusing(self._url):
                    block = self._read(file, wanted, remote)
                if not block and remote.size is None:
                    return
                if not block or len(block) > wanted:
                    raise _ChangedError("the server gave more or less than it had announced")
                start += len(block)
                yield block

    def _read(self, file: IO[bytes], wanted: int, remote: _Remote) -> bytes:
        try:
            return file.read(wanted)
        except ValueError as error:
            if not remote.seekable:
                raise
            self._as_stream = True  # fsspec's word for a server that ignores Range
            raise _InterruptedError("the server does not give parts of a file") from error

    def _headers(self, version: str | None = None) -> dict[str, Any]:
        """HTTP's conditions: the bytes as they are, and of this version or none (RFC 9110, section 13.1.1)."""
        if not self._path.startswith(("http://", "https://")):
            return {}
        strong = version is not None and version.startswith('"')
        return {"headers": {"Accept-Encoding": "identity"} | ({"If-Match": version} if strong else {})}


def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system that knows this kind of address, and the file's name in it."""
    import fsspec

    if url.startswith("gs://"):
        if importlib.util.find_spec("gcsfs"):
            return fsspec.filesystem("gs"), url
        url = GOOGLE_STORAGE + quote(url.removeprefix("gs://"))
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
    client = {"timeout": timeout, "trust_env": True}  # proxies as the environment names them
    return fsspec.filesystem("https", client_kwargs=client), url


@contextmanager
def _refusing(url: str) -> Generator[None]:
    """Sort what the many file systems of fsspec raise: no use to try again (UserError), or worth it."""
    try:
        yield
    except (UserError, _InterruptedError):
        raise
    except Exception as error:
        # fsspec says FileNotFoundError whatever happened, with the reason behind it.
        cause = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
        status: object = getattr(cause, "status", None) or getattr(cause, "code", None)
        if status == _CHANGED_STATUS:
            raise _ChangedError("the file changed on the server while it was fetched") from error
        if isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY_STATUS:
            said = f"the server answers {status} {getattr(cause, 'message', '')}".strip()
            raise UserError(f"{redact_text(url)} cannot be downloaded: {said}; check the address") from error
        said = f"the server answers {status}" if isinstance(status, int) else one_line(cause)
        raise _InterruptedError(said) from error
