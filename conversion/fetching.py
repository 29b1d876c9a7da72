"""Bringing a checkpoint to this machine: a local path, an https:// or gs:// address, the Hub, or a name of timm.

Downloads go through fsspec, block by block, and are never stitched together from two versions of a file. What arrived
lies in the Hub's cache folder for assets of libraries (`huggingface_hub.cached_assets_path`), in a folder of the
version that the server names, as `*.partial` until the last byte is there and the server still names that version.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from hf_vit.conversion.progress import progress
from hf_vit.conversion.readers import CheckpointReader, Companions, one_line, open_checkpoint
from hf_vit.errors import UserError
from hf_vit.repositories.reading import model_folder, reading
from hf_vit.results.redaction import redact_text

TIMM, WRAPPER = "timm:", "timm_wrapper"  # the second is the model_type of transformers' classes around timm's
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = re.compile(
    rf"hf://(?:models/)?(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>refs/pr/\d+|[^/@]+))?(?:/(?P<path>.+?))?/?"
)
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
BLOCK = 8 * 2**20  # bytes that one request asks for
ATTEMPTS = 5  # in a row that bring nothing
MAX_VERSIONS = 3  # a file that changes more often while it is fetched is given up
FIRST_PAUSE = 0.5  # seconds; doubled after every attempt that brought nothing
GOOGLE_STORAGE = "https://storage.googleapis.com/"
CONNECT_TIMEOUT, READ_TIMEOUT = 30, 60  # seconds
_TEMPORARY_STATUS = (408, 425, 429)  # HTTP's 4xx that ask to come again; all others say that it is no use
_CHANGED_STATUS = 412


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint at hand.

    Attributes:
        path: local file or folder.
        name: what messages and facts call it: the name of a local file, the address of another without its query.
        companions: what is known of it beside what lies with it.
    """

    path: Path
    name: str
    companions: Companions | None = None

    def open(self) -> CheckpointReader:
        """See `open_checkpoint`."""
        reader = open_checkpoint(self.path)
        if self.companions is not None:
            reader.companions = self.companions
        elif (config := reader.companions.config or {}).get("model_type") == WRAPPER:
            reader.companions = replace(reader.companions, config=config_of_wrapper(config))
        return reader


def fetch(source: str | Path, sha256: str | None = None) -> LocalCheckpoint:
    """Bring a checkpoint to this machine, and hold it against its SHA-256.

    Args:
        source: path; https:// or gs:// address; `hf://owner/name[@revision]/file`, or without a file for a model that
            transformers or timm saved; timm:NAME (released weights), timm:NAME@FILE or timm:FOLDER.
        sha256: 64 hexadecimal digits that the file must have.

    Raises:
        UserError: there is no such source, it cannot be had, or it is another file than `sha256` says.
    """
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise UserError(f"--sha256 {sha256[:80]!r} is not a SHA-256 digest; give 64 hexadecimal digits")
    checkpoint = _fetch(str(source), sha256 is not None)
    path, name = checkpoint.path, checkpoint.name
    if sha256 is None or not path.exists():
        return checkpoint
    if path.is_dir():
        raise UserError(f"{name} is a folder and has no SHA-256; give its weight file, or leave --sha256 out")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256.lower():
        if name != path.name:
            path.unlink()  # a download: get it anew next time
        raise UserError(f"{name} does not match --sha256: its SHA-256 is {actual}; nothing was written")
    return checkpoint


def is_local(source: str | Path) -> bool:
    """Whether there is such a file or folder."""
    try:
        return Path(source).exists()
    except OSError:  # a name that is too long, for one
        return False


def is_within(folder: Path, place: str | Path) -> bool:
    """Whether a place is the folder or lies in it, where links lead."""
    real = Path(os.path.realpath(place))  # of a link that leads to itself, Path.resolve raises
    return folder in (real, *real.parents)


def _fetch(source: str, has_hash: bool) -> LocalCheckpoint:
    is_path = is_local(source)  # a path wins, whatever it looks like
    scheme = None if is_path else re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", source)
    if not is_path and source.startswith(TIMM):
        return _from_timm(source)
    if scheme is None:
        return LocalCheckpoint(Path(source), Path(source).name)  # opening it says what is wrong
    kind = scheme[1].lower()
    if kind == "hf":
        return _from_hub(source)
    if kind == "http" and not has_hash and urlsplit(source).hostname not in _THIS_MACHINE:
        raise UserError(
            f"{redact_text(source)} would be downloaded without encryption; use https://, or give the file's --sha256"
        )
    if kind not in ("https", "http", "gs"):
        raise UserError(
            f"{redact_text(source)} cannot be downloaded: give a path or a URL that begins with https://, "
            "gs:// or hf://"
        )
    return LocalCheckpoint(download(source, checked_later=has_hash), redact_text(source))


def _from_timm(source: str) -> LocalCheckpoint:
    """Find a folder or file of timm's, or the weights that it has released under a name, which are on the Hub."""
    name = source.removeprefix(TIMM)
    if not name:
        raise UserError(f"{source} has no model name; give {TIMM}NAME with a name that timm.list_models() lists")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return LocalCheckpoint(folder, TIMM + folder.resolve().name)
    architecture, _, file = name.partition("@")
    released = _released(architecture)
    if file:
        beside = Companions({"architecture": architecture, "pretrained_cfg": released})
        return LocalCheckpoint(Path(file).expanduser(), f"{TIMM}{architecture}@{Path(file).name}", beside)
    if not (repo := released.get("hf_hub_id")):
        raise UserError(
            f"timm has no weights for {architecture}; timm.list_models(pretrained=True) lists the pretrained ones"
        )
    return LocalCheckpoint(_from_hub(f"hf://{repo}").path, source)


def config_of_wrapper(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of transformers' class around a model of timm as timm writes it.

    One that was made without a `pretrained_cfg` has that of its architecture, at the size of its arguments.

    Raises:
        UserError: there is none, and timm is not installed or does not know the architecture.
    """
    timm_config = {name: value for name, value in config.items() if name != "model_type"}
    if not timm_config.get("pretrained_cfg"):
        released, size = _released(str(config.get("architecture"))), (config.get("model_args") or {}).get("img_size")
        if size is not None:
            released["input_size"] = [3, *(size if isinstance(size, list) else [size, size])]
        timm_config["pretrained_cfg"] = released
    return timm_config


def _released(architecture: str) -> dict[str, Any]:
    """What timm says of the weights of a name, with their tag or timm's choice of it."""
    try:
        from timm.models import get_pretrained_cfg

        released = get_pretrained_cfg(architecture)
    except ImportError as error:
        raise UserError(f"{TIMM}{architecture} needs timm: pip install timm") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{TIMM}{architecture}: {one_line(error)}; timm.list_models() lists the names") from error
    if released is None:
        raise UserError(f"timm knows no model {architecture}; timm.list_models() lists the names")
    return released.to_dict()


def _from_hub(source: str) -> LocalCheckpoint:
    named = _HUB.fullmatch(source)
    if named is None:
        raise UserError(
            f"{source!r} names no file of the Hub; give hf://owner/name/file or hf://owner/name@revision/file"
        )
    from huggingface_hub import hf_hub_download

    try:
        if named["path"] is None:
            return LocalCheckpoint(model_folder(named["repo"], named["revision"]), source)
        with reading(named["repo"]):
            path = hf_hub_download(named["repo"], named["path"], revision=named["revision"])
            return LocalCheckpoint(Path(path), source)
    except UserError as error:
        raise UserError(f"{source} cannot be downloaded from the Hub: {error}") from error


class _InterruptedError(Exception):
    """The transfer stopped for a reason that may pass, such as another version of the file on the server."""


def download(url: str, *, checked_later: bool = False) -> Path:
    """Return the file behind an https:// or gs:// URL, from the cache if the server's version is there already.

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
        import fsspec

        self._url, self._folder, self._checked_later = url, folder, checked_later
        self._name = Path(unquote(urlsplit(url).path)).name or "checkpoint"
        self._path, self._filesystem = url, Any
        if url.startswith("gs://") and importlib.util.find_spec("gcsfs"):
            self._filesystem: Any = fsspec.filesystem("gs")
        else:
            import aiohttp

            if url.startswith("gs://"):
                self._path = GOOGLE_STORAGE + quote(url.removeprefix("gs://"))
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
            client = {"timeout": timeout, "trust_env": True}  # proxies as the environment names them
            self._filesystem = fsspec.filesystem("https", client_kwargs=client)
        self._as_stream = False  # because the server ignores Range

    def run(self) -> Path:
        """Try until it is done, or nothing more arrives."""
        idle, most, versions = 0, self._bytes_here(), set[str | None]()
        while True:
            try:
                return self._attempt(versions, BLOCK >> idle)  # a poor connection gets smaller parts through
            except _InterruptedError as error:
                here = self._bytes_here()
                idle, most = (0, here) if here > most else (idle + 1, most)
                if idle >= ATTEMPTS or len(versions) > MAX_VERSIONS:
                    kept = "the downloaded part is kept; run the same command again to continue"
                    raise UserError(
                        f"{redact_text(self._url)} cannot be downloaded: {one_line(error)}; "
                        f"{kept if here else 'check the address'}"
                    ) from error
                if idle:
                    time.sleep(FIRST_PAUSE * 2 ** (idle - 1))

    def _bytes_here(self) -> int:
        return sum(file.stat().st_size for file in self._folder.glob("*/*"))

    def _attempt(self, versions: set[str | None], block: int) -> Path:
        size, version, can_seek = self._describe()
        versions.add(version)
        target = self._folder / hashlib.sha256(f"{version} {size}".encode()).hexdigest()[:16] / self._name
        partial = target.with_name(f"{target.name}.partial")
        if version is None:  # nothing tells whether what is here is part of what is there
            shutil.rmtree(target.parent, ignore_errors=True)
        if target.is_file():
            return target
        target.parent.mkdir(exist_ok=True)
        with partial.open("ab" if can_seek else "wb") as file, progress(self._name, size) as advance:
            advance(file.tell())
            for part in self._read_parts(file.tell(), block, size, version if can_seek else None, can_seek):
                file.write(part)
                advance(len(part))
            file.flush()
            os.fsync(file.fileno())
        if size not in (None, partial.stat().st_size) or self._describe() != (size, version, can_seek):
            partial.unlink()
            raise _InterruptedError("the file changed on the server while it was fetched")
        partial.replace(target)
        for other in self._folder.iterdir():
            if other.is_dir() and other != target.parent:
                shutil.rmtree(other, ignore_errors=True)
        return target

    def _describe(self) -> tuple[int | None, str | None, bool]:
        """Return size in bytes and version (ETag or date) as far as the server tells, and whether it gives parts."""
        with self._sorting():
            info: dict[str, Any] = self._filesystem.info(self._path, **self._headers())
        size = info.get("size")
        if size is None and not self._checked_later:
            raise UserError(
                f"{redact_text(self._url)} cannot be downloaded safely: the server does not say how large the file is, "
                "so that a part would pass for the whole; give its --sha256"
            )
        fields = ("ETag", "etag", "generation", "Last-Modified", "updated", "mtime")
        version = next((str(info[name]) for name in fields if info.get(name)), None)
        can_seek = size is not None and version is not None and info.get("partial", True) and not self._as_stream
        return size, version, can_seek

    def _read_parts(
        self, start: int, block: int, size: int | None, version: str | None, can_seek: bool
    ) -> Generator[bytes]:
        options: dict[str, Any] = {"block_size": block, "size": size} if can_seek else {"block_size": 0}
        with self._sorting():
            file = self._filesystem.open(self._path, "rb", cache_type="none", **options, **self._headers(version))
        with file:
            if can_seek:
                file.seek(start)
            while size is None or start < size:
                wanted = block if size is None else min(block, size - start)
                with self._sorting():
                    try:
                        part = file.read(wanted)
                    except ValueError as error:
                        if not can_seek:
                            raise
                        self._as_stream = True  # fsspec's word for a server that ignores Range
                        raise _InterruptedError("the server does not give parts of a file") from error
                if not part and size is None:
                    return
                if not part or len(part) > wanted:
                    raise _InterruptedError("the server sent more or fewer bytes than it announced")
                start += len(part)
                yield part

    def _headers(self, version: str | None = None) -> dict[str, Any]:
        """Return HTTP's conditions: the bytes as they are, and of this version or none (RFC 9110, section 13.1.1)."""
        if not self._path.startswith(("http://", "https://")):
            return {}
        is_strong = version is not None and version.startswith('"')
        return {"headers": {"Accept-Encoding": "identity"} | ({"If-Match": version} if is_strong else {})}

    @contextmanager
    def _sorting(self) -> Generator[None]:
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
                raise _InterruptedError("the file changed on the server while it was fetched") from error
            answer = f"the server answers {status}" if isinstance(status, int) else one_line(cause)
            if isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY_STATUS:
                answer = f"{answer} {getattr(cause, 'message', '')}".strip()
                raise UserError(
                    f"{redact_text(self._url)} cannot be downloaded: {answer}; check the address"
                ) from error
            raise _InterruptedError(answer) from error
