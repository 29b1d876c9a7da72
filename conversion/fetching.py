"""Bring a checkpoint to this machine: from a local path, an https:// or gs:// URL, the Hub, or a name of timm.

A download never mixes two versions of a file. It is stored in the Hub's cache for assets of libraries
(`huggingface_hub.cached_assets_path`), in a folder for the version that the server reports, and named `*.partial` until
it is complete.
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
from hf_vit.conversion.readers import CheckpointReader, Companions, hash_files, open_checkpoint, shorten_reason
from hf_vit.errors import UserError
from hf_vit.repositories.reading import download_model, guard_hub_access
from hf_vit.results.redaction import redact_text
from hf_vit.writing import cache_folder

TIMM, WRAPPER = "timm:", "timm_wrapper"  # the second is the model_type of transformers' classes around timm's
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = re.compile(
    rf"hf://(?:models/)?(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>refs/pr/\d+|[^/@]+))?(?:/(?P<path>.+?))?/?"
)
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
ATTEMPTS = 5  # attempts in a row without new bytes before giving up
MAX_VERSIONS = 3  # versions of a file seen during one download before giving up
FIRST_PAUSE = 0.5  # seconds; doubled after every attempt without new bytes
GOOGLE_STORAGE = "https://storage.googleapis.com/"
TIMEOUT = 60  # seconds without a byte
_CHANGED = "the file kept changing on the server during the download"
_TEMPORARY_STATUS = (408, 416, 425, 429)  # HTTP errors 4xx after which another attempt may succeed


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on this machine."""

    path: Path  # local file or folder
    name: str  # name in messages and records: the name of a local file, or a URL without its query
    companions: Companions | None = None  # replaces the JSON files beside the weights

    def open(self) -> CheckpointReader:
        reader = open_checkpoint(self.path)
        if self.companions is not None:
            reader.companions = self.companions
        elif (config := reader.companions.config or {}).get("model_type") == WRAPPER:
            reader.companions = replace(reader.companions, config=convert_wrapper_config(config))
        return reader


def fetch(source: str | Path, sha256: str | None = None) -> LocalCheckpoint:
    """Bring a checkpoint to this machine, and check its SHA-256 digest if one is given.

    Args:
        source: path; https:// or gs:// URL; `hf://owner/name[@revision]/file`, or without a file for a model that
            transformers or timm saved; timm:NAME (released weights), timm:NAME@FILE or timm:FOLDER.
        sha256: 64 hexadecimal digits that the file must have.

    Raises:
        UserError: there is no such source, it cannot be downloaded, or its digest is not `sha256`.
    """
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise UserError(f"--sha256 {sha256[:80]!r} is not a SHA-256 digest; give its 64 hexadecimal digits")
    checkpoint = _fetch(str(source), sha256 is not None)
    path, name = checkpoint.path, checkpoint.name
    if sha256 is None or not path.exists():
        return checkpoint
    if path.is_dir():
        raise UserError(
            f"--sha256 checks a single file, but {name} is a folder; give the weight file itself, or leave --sha256 out"
        )
    actual = hash_files([path])
    if actual != sha256.lower():
        if name != path.name and not str(source).startswith(TIMM):
            path.unlink()  # it was downloaded; download it again next time
        raise UserError(
            f"{name} has the SHA-256 {actual}, but --sha256 is {sha256.lower()}, so nothing was written; "
            "check the digest and the source"
        )
    return checkpoint


def is_local(source: str | Path) -> bool:
    """Return whether a file or folder of this name exists."""
    return os.path.exists(Path(source))  # no error for a name that is too long


def is_within(folder: Path, path: str | Path) -> bool:
    """Return whether a path, with links resolved, is the folder or inside it."""
    real = Path(os.path.realpath(path))  # Path.resolve raises an error for a link to itself
    return folder in (real, *real.parents)


def _fetch(source: str, has_hash: bool) -> LocalCheckpoint:
    """Bring a checkpoint to this machine without checking its digest."""
    is_path = is_local(source)  # an existing path takes precedence over any other meaning
    scheme = None if is_path else re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", source)
    if not is_path and source.startswith(TIMM):
        return _fetch_from_timm(source)
    if scheme is None:
        return LocalCheckpoint(Path(source), Path(source).name)  # opening it raises the error
    kind = scheme[1].lower()
    name = redact_text(source)
    if kind == "hf":
        return _fetch_from_hub(source)
    if kind == "http" and not has_hash and urlsplit(source).hostname not in _THIS_MACHINE:
        raise UserError(f"{name} would be downloaded without encryption; use https://, or add --sha256")
    if kind not in ("https", "http", "gs"):
        raise UserError(
            f"{name} cannot be downloaded, because URLs with {kind}:// are not supported; give a path or a "
            "URL that begins with https://, gs:// or hf://"
        )
    return LocalCheckpoint(download(source, checked_later=has_hash), name)


def _fetch_from_timm(source: str) -> LocalCheckpoint:
    """Find a folder or file of timm's, or download the released weights of a name from the Hub."""
    name = source.removeprefix(TIMM)
    if not name:
        raise UserError(
            f"{source} has no model name; give one, such as {TIMM}vit_base_patch16_224 (see timm.list_models())"
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        return LocalCheckpoint(folder, TIMM + folder.resolve().name)
    architecture, _, file = name.partition("@")
    pretrained_config = _find_pretrained_config(architecture)
    # The name decides, not the repository's config.json: timm's CLIPs with QuickGELU share those with the exact GELU.
    companions = Companions({"architecture": architecture, "pretrained_cfg": pretrained_config})
    if file:
        return LocalCheckpoint(Path(file).expanduser(), f"{TIMM}{architecture}@{Path(file).name}", companions)
    repo = pretrained_config.get("hf_hub_id")
    if not repo:
        raise UserError(
            f"timm has no pretrained weights for {architecture}; choose a model from timm.list_models(pretrained=True)"
        )
    return LocalCheckpoint(_fetch_from_hub(f"hf://{repo}").path, source, companions)


def convert_wrapper_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert config.json of transformers' wrapper around a timm model to timm's form.

    Without a `pretrained_cfg` it gets that of its architecture, with the input size from its arguments.
    """
    timm_config = {name: value for name, value in config.items() if name != "model_type"}
    if not timm_config.get("pretrained_cfg"):
        pretrained_config = _find_pretrained_config(str(config.get("architecture")))
        size = (config.get("model_args") or {}).get("img_size")
        if size is not None:
            pretrained_config["input_size"] = [3, *(size if isinstance(size, list) else [size, size])]
        timm_config["pretrained_cfg"] = pretrained_config
    return timm_config


def _find_pretrained_config(architecture: str) -> dict[str, Any]:
    """Return timm's `pretrained_cfg` for a model name, with its tag or timm's default tag."""
    try:
        from timm.models import get_pretrained_cfg

        pretrained_config = get_pretrained_cfg(architecture)
    except ImportError as error:
        raise UserError(f"{TIMM}{architecture} needs timm; install with pip install timm") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"timm cannot find {architecture} ({shorten_reason(error)}); choose from timm.list_models(pretrained=True)"
        ) from error
    if pretrained_config is None:
        raise UserError(f"timm has no model {architecture}; choose a name from timm.list_models(pretrained=True)")
    return pretrained_config.to_dict()


def _fetch_from_hub(source: str) -> LocalCheckpoint:
    """Download a file or a model of the Hub from an hf:// URL."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is not a Hub URL; give hf://owner/name or hf://owner/name[@revision]/file")
    from huggingface_hub import hf_hub_download

    repo, revision, path = match["repo"], match["revision"], match["path"]
    try:
        if path is None:
            return LocalCheckpoint(download_model(repo, revision), source)
        with guard_hub_access(repo):
            return LocalCheckpoint(Path(hf_hub_download(repo, path, revision=revision)), source)
    except UserError as error:
        raise UserError(f"{source} cannot be downloaded from the Hub: {error}") from error


class _InterruptedError(Exception):
    """A transfer failed for a reason that may be temporary, such as a new version of the file on the server."""


def download(url: str, *, checked_later: bool = False, sha256: str | None = None) -> Path:
    """Return the file of an https:// or gs:// URL, from the cache if the server's version is there.

    Args:
        url: URL of the file. gs:// uses gcsfs if it is installed, otherwise the public URL of the bucket.
        checked_later: the caller checks the file's digest, so the server need not report its size.
        sha256: a cached file with this digest is returned without asking the server.

    Raises:
        UserError: the server refuses, fails several times in a row, or the file keeps changing.
    """
    from huggingface_hub.utils import WeakFileLock

    folder = cache_folder("downloads", hashlib.sha256(url.encode()).hexdigest()[:16])

    def count_bytes() -> int:
        return sum(file.stat().st_size for file in folder.glob("*/*"))

    with WeakFileLock(folder / ".lock"):
        for file in folder.glob("*/*") if sha256 else ():
            if hash_files([file]) == sha256:
                return file
        if url.startswith("gs://") and importlib.util.find_spec("gcsfs") is not None:
            return _copy_from_bucket(url, folder)
        num_failures = 0
        most_bytes = count_bytes()
        versions = set[str | None]()
        while True:
            try:
                return _download_once(url, folder, checked_later, versions)
            except _InterruptedError as error:
                num_bytes = count_bytes()
                if num_bytes > most_bytes:
                    num_failures, most_bytes = 0, num_bytes
                else:
                    num_failures += 1
                if num_failures >= ATTEMPTS or len(versions) > MAX_VERSIONS:
                    resuming = "run the same command again to continue with the downloaded part"
                    remedy = resuming if num_bytes else "check the URL"
                    raise _download_error(url, f"{shorten_reason(error)}; {remedy}") from error
                if num_failures:
                    time.sleep(FIRST_PAUSE * 2 ** (num_failures - 1))


def _download_error(url: str, reason: str) -> UserError:
    """Return the error for a failed download, without secrets of the URL."""
    return UserError(f"{redact_text(url)} cannot be downloaded: {reason}")


def _copy_from_bucket(url: str, folder: Path) -> Path:
    """Download a file of a bucket with gcsfs, which uses the user's account."""
    import fsspec

    filesystem: Any = fsspec.filesystem("gs")
    try:
        info = filesystem.info(url)
        target, partial = _make_cache_paths(folder, url, str(info.get("etag")), info.get("size"))
        if not target.is_file():
            filesystem.get_file(url, str(partial))
            _finish(folder, partial, target)
    except Exception as error:  # gcsfs raises many types of errors
        raise _download_error(url, f"{shorten_reason(error)}; check the URL") from error
    return target


def _download_once(url: str, folder: Path, checked_later: bool, versions: set[str | None]) -> Path:
    """Download the rest of the file, if it is still the server's version; raise _InterruptedError to try again.

    The server's version is added to `versions`.
    """
    size, version = description = _ask_server(url)
    versions.add(version)
    if size is None and not checked_later:
        reason = "the server does not report the file's size, so an incomplete download would go unnoticed"
        raise _download_error(url, f"{reason}; give the file's digest with --sha256")
    target, partial = _make_cache_paths(folder, url, version, size)
    if version is None:  # the partial file may belong to another version
        target.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
    if target.is_file():
        return target
    num_bytes_here = partial.stat().st_size if size is not None and partial.is_file() else 0
    if not num_bytes_here or num_bytes_here != size:
        with _open_url(url, f"bytes={num_bytes_here}-" if num_bytes_here else "") as response:
            if _describe(response) != description:
                raise _InterruptedError(_CHANGED)
            # The server may send the whole file instead, also as a part.
            is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {num_bytes_here}-")
            _write(response, url, partial, num_bytes_here if is_rest else 0, size)
    if version is not None and _ask_server(url) != description:
        partial.unlink()
        raise _InterruptedError(_CHANGED)
    if size is not None and partial.stat().st_size < size:
        raise _InterruptedError("the connection was lost")
    _finish(folder, partial, target)
    return target


def _ask_server(url: str) -> tuple[int | None, str | None]:
    """Return size and version of the file on the server, see `_describe`."""
    with _open_url(url, "bytes=0-0") as response:
        return _describe(response)


def _open_url(url: str, byte_range: str = "") -> HTTPResponse:
    """Send a request for a URL, or for a range of its bytes."""
    address = urlsplit(GOOGLE_STORAGE + url.removeprefix("gs://") if url.startswith("gs://") else url)
    account, _, host = address.netloc.rpartition("@")  # urllib would read a password as a port, and print it
    headers = {"User-Agent": "hf_vit"} | ({"Range": byte_range} if byte_range else {})
    request = Request(quote(address._replace(netloc=host).geturl(), safe="%/:=&?~#+!$,;'@()*[]"), headers=headers)
    if account:  # unredirected, so that another server does not get the password
        request.add_unredirected_header("Authorization", f"Basic {b64encode(unquote(account).encode()).decode()}")
    with _classify_errors(url):
        response = urlopen(request, timeout=TIMEOUT)
    if request.type == "https" and response.url.startswith("http:"):
        response.close()
        reason = f"the server redirects to {redact_text(response.url)}, without encryption"
        raise _download_error(url, f"{reason}; give that URL with --sha256, or another one")
    return response


def _describe(response: HTTPResponse) -> tuple[int | None, str | None]:
    """Return size in bytes and version (ETag or date) of the whole file, each None if the server does not report it."""
    headers = response.headers
    size = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    version = headers.get("ETag", headers.get("Last-Modified"))
    return int(size) if size.isdecimal() else None, version


def _write(response: HTTPResponse, url: str, partial: Path, start: int, size: int | None) -> None:
    """Append the body of a response to the partial file, whose first `start` bytes are there already."""
    with partial.open("ab" if start else "wb") as file, progress(partial.stem, size) as advance:
        advance(start)
        while True:
            with _classify_errors(url):
                chunk = response.read(2**20)
            if not chunk:
                break
            file.write(chunk)
            advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _classify_errors(url: str) -> Generator[None]:
    """Turn network errors into _InterruptedError if another attempt may help, else into a UserError."""
    try:
        yield
    except HTTPError as error:
        error.close()
        if 400 <= error.code < 500 and error.code not in _TEMPORARY_STATUS:
            raise _download_error(url, f"the server answers {error.code} {error.reason}; check the URL") from error
        raise _InterruptedError(f"the server answers {error.code}") from error
    except (OSError, HTTPException) as error:
        raise _InterruptedError(shorten_reason(error)) from error


def _make_cache_paths(folder: Path, url: str, version: str | None, size: int | None) -> tuple[Path, Path]:
    """Return the paths of the complete and of the partial file of a version; create their folder."""
    version_folder = folder / hashlib.sha256(f"{version} {size}".encode()).hexdigest()[:16]
    version_folder.mkdir(exist_ok=True)
    name = Path(unquote(urlsplit(url).path)).name or "checkpoint"
    return version_folder / name, version_folder / f"{name}.partial"


def _finish(folder: Path, partial: Path, target: Path) -> None:
    """Rename the complete file, and remove other versions."""
    partial.replace(target)
    for other in folder.iterdir():
        if other.is_dir() and other != target.parent:
            shutil.rmtree(other, ignore_errors=True)
