"""Sources over the network, against a server on this machine that behaves as badly as real ones do."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest

from hf_vit import conversion
from hf_vit.conversion import fetching
from hf_vit.conversion.fetching import fetch
from hf_vit.errors import UserError


@dataclass
class Site:
    """One file on a server, and how the server behaves."""

    data: bytes
    version: str | None = '"one"'  # its ETag; None for a server that gives none
    gives_parts: bool = True  # answers Range with 206
    gives_whole_parts: bool = False  # but sends everything then
    says_size: bool = True  # names Content-Length
    status: int = 500  # answers everything with this instead, while `failures` lasts
    failures: int = 0
    drops: list[int] = field(default_factory=list)  # bytes after which the next downloads break off
    before: Callable[[int], None] = lambda answered: None  # called with the number of answers, before the next one
    requests: list[str | None] = field(default_factory=list)  # the Range of each
    accounts: list[str | None] = field(default_factory=list)  # the Authorization of each
    url: str = ""

    @property
    def downloads(self) -> list[str | None]:
        """Requests for more than a look at size and version."""
        return [part for part in self.requests if part != "bytes=0-0"]


class Handler(BaseHTTPRequestHandler):
    """Answers for `site`, which the fixture sets."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets
    site: Site

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        site, part = self.site, self.headers.get("Range")
        site.before(len(site.requests))
        site.requests.append(part)
        site.accounts.append(self.headers.get("Authorization"))
        if urlsplit(self.path).path == "/moved/model.npz":
            return self.only(302, Location="/model.npz")
        if urlsplit(self.path).path != "/model.npz":
            return self.only(404)
        if site.failures:
            site.failures -= 1
            return self.only(site.status)
        data, status = site.data, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", part or "")
        if asked and site.gives_parts:
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            first = 0 if site.gives_whole_parts else first
            if first >= len(data):
                return self.only(416)
            data, status = data[first : last + 1], 206
        self.send_response(status)
        if site.version is not None:
            self.send_header("ETag", site.version)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{len(site.data)}")
        if site.says_size:
            self.send_header("Content-Length", str(len(data)))
        else:
            self.close_connection = True
        self.end_headers()
        if site.drops and part != "bytes=0-0":
            data = data[: site.drops.pop(0)]
            self.close_connection = True
        try:
            self.wfile.write(data)
        except OSError:  # the client had enough
            self.close_connection = True

    def only(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def site(server, tmp_path: Path, monkeypatch) -> Site:
    """A file of ten blocks of 64 KiB, small pauses, and an empty cache."""
    monkeypatch.setattr(fetching, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Handler.site = Site(np.random.default_rng(0).bytes(10 * 2**16))
    Handler.site.url = f"http://127.0.0.1:{server.server_port}/model.npz"
    return Handler.site


def files(tmp_path: Path) -> list[str]:
    """What the cache holds, without its lock."""
    return sorted(file.name for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.name != ".lock")


def test_a_file_in_place_of_the_cache_is_told(site, tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="remove a file in its place, or set HF_ASSETS_CACHE"):
        fetch(site.url)


def test_file_arrives_whole_and_once(site, tmp_path: Path):
    found = fetch(site.url + "?token=secret")
    assert found.path.read_bytes() == site.data
    assert found.name == site.url
    assert site.downloads == [None]
    assert fetch(site.url + "?token=secret").path == found.path
    assert site.downloads == [None], "what is here is not fetched again"
    assert files(tmp_path) == ["model.npz"]


@pytest.mark.parametrize(("gives_parts", "whole"), [(True, False), (True, True), (False, False)])
def test_dropped_connections_are_taken_up(site, gives_parts, whole):
    site.gives_parts, site.gives_whole_parts, site.drops = gives_parts, whole, [1000, 2**16 - 1, 0]
    assert fetch(site.url).path.read_bytes() == site.data


def test_second_command_goes_on_where_the_first_stopped(site, tmp_path: Path):
    site.drops = [6 * 2**16] + [0] * 99
    with pytest.raises(UserError, match=r"run the same command again to continue with the downloaded part"):
        fetch(site.url)
    assert files(tmp_path) == ["model.npz.partial"], "a part is never taken for the whole"
    site.drops = []
    site.requests.clear()
    assert fetch(site.url).path.read_bytes() == site.data
    assert site.downloads == [f"bytes={6 * 2**16}-"]


@pytest.mark.parametrize("version", ['"two"', 'W/"two"', None])
@pytest.mark.parametrize("answers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [10 * 2**16, 9 * 2**16 + 5, 11 * 2**16, 100])
def test_file_that_changes_meanwhile_is_not_stitched(site, version, answers, size):
    """It changes after so many answers, of which the first two downloads break off."""
    site.drops = [3 * 2**16, 2 * 2**16]
    if version is None or version.startswith("W/"):
        site.version = None if version is None else 'W/"one"'
    old, new = site.data, np.random.default_rng(1).bytes(size)

    def change(answered: int) -> None:
        if answered == answers:
            site.data, site.version = new, version

    site.before = change
    whole = fetch(site.url).path.read_bytes()
    assert whole in (new, old)
    assert whole == new or version is None


def test_file_that_never_stays_the_same_is_given_up(site):
    def change(answered: int) -> None:
        site.version = f'"{answered}"'

    site.before = change
    with pytest.raises(UserError, match="the file kept changing on the server"):
        fetch(site.url)
    assert len(site.requests) < 20


def test_new_version_replaces_the_old_one_in_the_cache(site, tmp_path: Path):
    fetch(site.url)
    site.data, site.version = b"new", '"two"'
    assert fetch(site.url).path.read_bytes() == b"new"
    assert files(tmp_path) == ["model.npz"]


def test_the_account_of_an_address_is_sent_to_its_server_alone(site):
    url = site.url.replace("//", "//ann:p%40ss@").replace("/model", "/moved/model")
    assert fetch(url).path.read_bytes() == site.data
    account = f"Basic {base64.b64encode(b'ann:p@ss').decode()}"
    assert site.accounts == [account, None] * (len(site.accounts) // 2), "not to the server that it redirects to"


def test_a_redirection_away_from_encryption_is_refused(site, monkeypatch):
    def answer(request: Request, timeout: float) -> Any:  # as a server of https would
        return urlopen(request.full_url.replace("https:", "http:"), timeout=timeout)

    monkeypatch.setattr(fetching, "urlopen", answer)
    with pytest.raises(UserError, match=r"redirects to http://127.*/model.npz, without encryption; .* with --sha256"):
        fetch(site.url.replace("http:", "https:").replace("/model", "/moved/model"))
    assert len(site.requests) == 2, "the one that was redirected, and none for the whole file"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_failure_is_waited_for(site, status):
    site.status, site.failures = status, 4  # HEAD and GET are asked each time
    assert fetch(site.url).path.read_bytes() == site.data


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (500, "the server answers 500; check the URL$"),
        (404, "the server answers 404 Not Found; check the URL"),
        (403, "the server answers 403 Forbidden; check the URL"),
        (401, "the server answers 401 Unauthorized; check the URL"),
    ],
)
def test_refusal_is_told(site, status, told, tmp_path: Path):
    site.status, site.failures = status, 100
    with pytest.raises(UserError, match=told) as error:
        fetch(site.url + "?token=secret")
    assert "secret" not in str(error.value)
    assert len(site.requests) <= 2 * fetching.ATTEMPTS
    assert files(tmp_path) == []


def test_server_that_is_not_there(site):
    with pytest.raises(UserError, match=r"model.npz cannot be downloaded: .*refused.*; check the URL"):
        fetch("http://127.0.0.1:1/model.npz")


def test_size_that_is_not_told_needs_a_hash(site):
    site.says_size = site.gives_parts = False
    with pytest.raises(UserError, match=r"does not report the file's size.*--sha256"):
        fetch(site.url)
    right = hashlib.sha256(site.data).hexdigest()
    assert fetch(site.url, right).path.read_bytes() == site.data
    site.drops, site.version = [1000] * 99, '"two"'
    with pytest.raises(UserError, match="but --sha256 is"):
        fetch(site.url, right)
    site.drops = []
    assert fetch(site.url, right).path.read_bytes() == site.data, "the part was not kept"


def test_hash(site, tmp_path: Path):
    right = hashlib.sha256(site.data).hexdigest()
    assert fetch(site.url, right.upper()).path.read_bytes() == site.data
    with pytest.raises(UserError, match=f"has the SHA-256 {right}, .* nothing was written"):
        fetch(site.url, "0" * 64)
    local = tmp_path / "local.npz"
    local.write_bytes(site.data)
    assert fetch(local, right).path == local
    with pytest.raises(UserError, match=f"local.npz has the SHA-256 {right}, but"):
        fetch(local, "0" * 64)
    with pytest.raises(UserError, match=r"timm:vit_tiny_patch16_224@local.npz has the SHA-256"):
        fetch(f"timm:vit_tiny_patch16_224@{local}", "0" * 64)
    assert local.is_file()
    with pytest.raises(UserError, match="is not a SHA-256"):
        fetch(local, right[:-1])
    with pytest.raises(UserError, match="is a folder"):
        fetch(tmp_path, right)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("http://example.org/a.npz", "would be downloaded without encryption"),
        ("ftp://example.org/a.npz", "give a path or a URL that begins with https://"),
        ("s3://bucket/a.npz", "give a path or a URL that begins with https://"),
        ("hf://owner", "is not a Hub URL; give hf://owner/name"),
        ("hf://datasets/owner/name/file", "cannot be downloaded from the Hub"),
        ("hf://owner/name/model.npz", "hf://owner/name/model.npz cannot be downloaded from the Hub: "),
        ("hf://owner/name", "hf://owner/name cannot be downloaded from the Hub: "),
    ],
)
def test_address_that_is_no_source(source, told):
    with pytest.raises(UserError, match=re.escape(told)):
        fetch(source)


def test_google_storage_without_its_library(monkeypatch):
    def refuse(request, timeout):
        raise UserError(f"asked for {request.full_url}")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(fetching, "urlopen", refuse)
    with pytest.raises(UserError, match=r"for https://storage.googleapis.com/vit_models/imagenet21k/ViT-B%2016\.npz$"):
        fetch("gs://vit_models/imagenet21k/ViT-B 16.npz")


def test_path_that_exists_wins(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gs:").mkdir()
    (tmp_path / "gs:" / "model.npz").write_text("x")
    assert fetch("gs:/model.npz").path.read_text() == "x"


def test_source_over_the_network(site, golden, tmp_path: Path, fails):
    site.data = (golden / "vit_gap.ckpt.npz").read_bytes()
    site.drops = [2**16 - 1, 100]
    conversion.convert(site.url, tmp_path / "model", sha256=hashlib.sha256(site.data).hexdigest())
    (record,) = json.loads((tmp_path / "model" / "facts.json").read_text())
    assert record["values"]["source"] == site.url
    fails(("convert", site.url, tmp_path / "other", "--sha256", "0" * 64), f"hf-vit: {site.url} has the SHA-256 ")
    assert not (tmp_path / "other").exists()
