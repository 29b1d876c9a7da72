"""Bringing a checkpoint to this machine: a local path, an https:// or gs:// address, the Hub, or a name of timm.

A download is never stitched together from two versions of a file. What arrived lies in the Hub's cache folder for
assets of libraries (`huggingface_hub.cached_assets_path`), in a folder of the version that the server names, as
`*.partial` until the last byte is there.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import time
from base64 import b64encode
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import Request, urlopen

from hf_vit.conversion.progress import progress
from hf_vit.conversion.readers import CheckpointReader, Companions, one_line, open_checkpoint
from hf_vit.errors import UserError
from hf_vit.repositories.reading import download_model, guard_hub_access
from hf_vit.results.redaction import redact_text

TIMM, WRAPPER = "timm:", "timm_wrapper"  # the second is the model_type of transformers' classes around timm's
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = re.compile(
    rf"hf://(?:models/)?(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>refs/pr/\d+|[^/@]+))?(?:/(?P<path>.+?))?/?"
)
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
ATTEMPTS = 5  # in a row that bring nothing
MAX_VERSIONS = 3  # a file that changes more often while it is fetched is given up
FIRST_PAUSE = 0.5  # seconds; doubled after every attempt that brought nothing
GOOGLE_STORAGE = "https://storage.googleapis.com/"
TIMEOUT = 60  # seconds without a byte
_CHANGED = "the file changed on the server while it was fetched"
_TEMPORARY_STATUS = (408, 416, 425, 429)  # of HTTP's 4xx; all others say that it is no use to try again


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint at hand."""

    path: Path  # local file or folder
    name: str  # in messages and facts: the name of a local file, the address of another without its query
    companions: Companions | None = None  # what is known of it beside what lies with it

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
    """Return whether there is such a file or folder."""
    try:
        return Path(source).exists()
    except OSError:  # a name that is too long, for one
        return False


def is_within(folder: Path, place: str | Path) -> bool:
    """Return whether a place is the folder or lies in it, where links lead."""
    real = Path(os.path.realpath(place))  # of a link that leads to itself, Path.resolve raises
    return folder in (real, *real.parents)


def _fetch(source: str, has_hash: bool) -> LocalCheckpoint:
    is_path = is_local(source)  # a path wins, whatever it looks like
    scheme = None if is_path else re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", source)
    if not is_path and source.startswith(TIMM):
        return _from_timm(source)
    if scheme is None:
        return LocalCheckpoint(Path(source), Path(source).name)  # opening it says what is wrong
    kind, name = scheme[1].lower(), redact_text(source)
    if kind == "hf":
        return _from_hub(source)
    if kind == "http" and not has_hash and urlsplit(source).hostname not in _THIS_MACHINE:
        raise UserError(f"{name} would be downloaded without encryption; use https://, or give the file's --sha256")
    if kind not in ("https", "http", "gs"):
        raise UserError(f"{name} cannot be downloaded: give a path or a URL that begins with https://, gs:// or hf://")
    return LocalCheckpoint(download(source, checked_later=has_hash), name)


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
    """Return what timm says of the weights of a name, with their tag or timm's choice of it."""
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

    repo, revision, path = named["repo"], named["revision"], named["path"]
    try:
        if path is None:
            return LocalCheckpoint(download_model(repo, revision), source)
        with guard_hub_access(repo):
            return LocalCheckpoint(Path(hf_hub_download(repo, path, revision=revision)), source)
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
    is_private = url.startswith("gs://") and importlib.util.find_spec("gcsfs") is not None
    attempt = _copy_from_bucket if is_private else _attempt

    def bytes_here() -> int:
        return sum(file.stat().st_size for file in folder.glob("*/*"))

    with WeakFileLock(folder / ".lock"):
        idle, most, versions = 0, bytes_here(), set[str | None]()
        while True:
            try:
                return attempt(url, folder, checked_later, versions)
            except _InterruptedError as error:
                here = bytes_here()
                idle, most = (0, here) if here > most else (idle + 1, most)
                if idle >= ATTEMPTS or len(versions) > MAX_VERSIONS:
                    kept = "the downloaded part is kept; run the same command again to continue"
                    raise _refusal(url, f"{one_line(error)}; {kept if here else 'check the address'}") from error
                if idle:
                    time.sleep(FIRST_PAUSE * 2 ** (idle - 1))


def _refusal(url: str, why: str) -> UserError:
    return UserError(f"{redact_text(url)} cannot be downloaded: {why}")


def _copy_from_bucket(url: str, folder: Path, checked_later: bool, versions: set[str | None]) -> Path:
    """Fetch a file of a bucket by gcsfs, which knows the user's account."""
    import fsspec

    filesystem: Any = fsspec.filesystem("gs")
    try:
        info = filesystem.info(url)
        target, partial = _places(folder, url, str(info.get("etag")), info.get("size"))
        if not target.is_file():
            filesystem.get_file(url, str(partial))
            _finish(folder, partial, target)
    except Exception as error:  # of many kinds
        raise _refusal(url, f"{one_line(error)}; check the address") from error
    return target


def _attempt(url: str, folder: Path, checked_later: bool, versions: set[str | None]) -> Path:
    """Fetch what is not here yet of the file as the server has it now."""
    size, version = now = _probe(url)
    versions.add(version)
    if size is None and not checked_later:
        why = "the server does not say how large the file is, so that a part would pass for the whole"
        raise _refusal(url, f"{why}; give its --sha256")
    target, partial = _places(folder, url, version, size)
    if version is None:  # nothing tells whether what is here is part of what is there
        target.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
    if target.is_file():
        return target
    start = partial.stat().st_size if size is not None and partial.is_file() else 0
    if not start or start != size:
        with _get(url, f"bytes={start}-" if start else "") as response:
            if _describe(response) != now:
                raise _InterruptedError(_CHANGED)
            _write(response, url, partial, start if response.status == 206 else 0, size)
    if version is not None and _probe(url) != now:
        partial.unlink()
        raise _InterruptedError(_CHANGED)
    if size is not None and partial.stat().st_size < size:
        raise _InterruptedError("the connection broke off")
    _finish(folder, partial, target)
    return target


def _probe(url: str) -> tuple[int | None, str | None]:
    with _get(url, "bytes=0-0") as response:
        return _describe(response)


def _get(url: str, part: str = "") -> HTTPResponse:
    address = urlsplit(GOOGLE_STORAGE + url.removeprefix("gs://") if url.startswith("gs://") else url)
    account, _, host = address.netloc.rpartition("@")  # urllib would take a password for a port, and name it
    headers = {"User-Agent": "hf_vit"} | ({"Range": part} if part else {})
    request = Request(quote(address._replace(netloc=host).geturl(), safe="%/:=&?~#+!$,;'@()*[]"), headers=headers)
    if account:  # not sent on to where the server redirects
        request.add_unredirected_header("Authorization", f"Basic {b64encode(unquote(account).encode()).decode()}")
    with _sorting(url):
        return urlopen(request, timeout=TIMEOUT)


def _describe(response: HTTPResponse) -> tuple[int | None, str | None]:
    """Return size in bytes and version (ETag or date) of the whole file, as far as the server tells."""
    told = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    return int(told) if told.isdecimal() else None, response.headers.get("ETag", response.headers.get("Last-Modified"))


def _write(response: HTTPResponse, url: str, partial: Path, start: int, size: int | None) -> None:
    """Add the rest of the answer to what is there from `start` on."""
    with partial.open("ab" if start else "wb") as file, progress(partial.stem, size) as advance:
        advance(start)
        while True:
            with _sorting(url):
                part = response.read(2**20)
            if not part:
                break
            file.write(part)
            advance(len(part))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _sorting(url: str) -> Generator[None]:
    """Sort what the network raises: no use to try again (UserError), or worth it."""
    try:
        yield
    except HTTPError as error:
        error.close()
        if 400 <= error.code < 500 and error.code not in _TEMPORARY_STATUS:
            raise _refusal(url, f"the server answers {error.code} {error.reason}; check the address") from error
        raise _InterruptedError(f"the server answers {error.code}") from error
    except (OSError, HTTPException) as error:
        raise _InterruptedError(one_line(error)) from error


def _places(folder: Path, url: str, version: str | None, size: int | None) -> tuple[Path, Path]:
    """Return where the whole file of this version goes, and where a part of it."""
    place = folder / hashlib.sha256(f"{version} {size}".encode()).hexdigest()[:16]
    place.mkdir(exist_ok=True)
    name = Path(unquote(urlsplit(url).path)).name or "checkpoint"
    return place / name, place / f"{name}.partial"


def _finish(folder: Path, partial: Path, target: Path) -> None:
    """Give the whole file its name, and remove other versions."""
    partial.replace(target)
    for other in folder.iterdir():
        if other.is_dir() and other != target.parent:
            shutil.rmtree(other, ignore_errors=True)
