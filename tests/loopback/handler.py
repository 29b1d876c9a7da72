"""One request to the Hub: who asks, which fault strikes, which route answers. `routes.py` and `xet.py` hold the routes.

Faults on demand. A fault is a JSON object:

    {"path": regex searched in the raw path, "method": any by default, "times": 1 (-1: always),
     "action": ..., and the action's own fields}

The actions:

status            this status instead of an answer: status, headers, body, message
slow              the answer comes late: seconds
held              the answer comes when the faults are cleared
cut_request       the connection breaks while the body is read: after (bytes)
cut_response      the connection breaks while the answer is sent: after (bytes)
lost_reply        the work is done, the connection breaks instead of an answer
corrupt_request   one bit of the body is flipped as it arrives
corrupt_response  one bit of the answer is flipped as it is sent
headers           other headers than the true ones: headers
"""

import contextlib
import hmac
import io
import json
import re
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from loopback.store import Refusal, Store

TOKENS = {"hf_alice_write": ("alice", "write"), "hf_alice_read": ("alice", "read"), "hf_bob_write": ("bob", "write")}
ORGANISATIONS = {"acme": {"alice": "write", "bob": "read"}}
_PIECE = 1 << 16

Answer = Callable[..., None]


@dataclass(frozen=True)
class Route:
    methods: tuple[str, ...]
    path: re.Pattern[str]
    answer: Answer
    storage: bool


ROUTES: list[Route] = []


def route(methods: str, path: str, storage: bool = False) -> Callable[[Answer], Answer]:
    """Register a function for an address of the Hub, or of the storage; {repo} is a model's id, or spaces/ and one."""
    pattern = re.compile("^" + path.replace("{repo}", r"(?P<repo_id>(?:spaces/)?[^/]+/[^/]+)") + "$")

    def register(answer: Answer) -> Answer:
        ROUTES.append(Route(tuple(methods.split("|")), pattern, answer, storage))
        return answer

    return register


@dataclass
class Faults:
    """The faults in force, counted request by request."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    active: list[dict[str, Any]] = field(default_factory=list)

    def clear(self) -> None:
        with self.lock:
            self.active = []

    def add(self, fault: dict[str, Any]) -> None:
        with self.lock:
            self.active.append({"seen": 0, "fired": 0, **fault})

    def take(self, method: str, path: str) -> dict[str, Any]:
        """The fault that this request meets; {} for none. Every matching fault counts the request."""
        taken: dict[str, Any] = {}
        with self.lock:
            for fault in self.active:
                if fault.get("method", method) != method or not re.search(fault["path"], path):
                    continue
                fault["seen"] += 1
                if not taken and (fault.get("times", 1) < 0 or fault["seen"] <= fault.get("times", 1)):
                    taken = fault
                    fault["fired"] += 1
        return taken


def flip_last_bit(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


@dataclass
class Hub:
    """What all requests share."""

    store: Store
    secret: str
    endpoint: str = ""
    storage: str = ""
    faults: Faults = field(default_factory=Faults)
    log: list[dict[str, Any]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to an empty Hub without faults."""
        self.faults.clear()
        self.log.clear()
        self.sizes = {"largest_regular": 10 << 20, "largest_lfs": 50 * 1000**3}
        self.store.clear()

    def sign(self, text: str) -> str:
        return hmac.new(self.key, text.encode(), "sha256").hexdigest()[:32]


class Handler(BaseHTTPRequestHandler):
    """A request to either origin; `server` gives each its class with `hub` and `is_storage` set."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    disable_nagle_algorithm = True  # or every body waits 40 ms until the client has acknowledged the headers
    hub: Hub
    is_storage: bool

    def log_message(self, *arguments: Any) -> None:
        """Nothing on standard error: `hub.log` tells more."""

    # The body

    def chunks(self) -> Iterator[bytes]:
        """The body, once, with the faults that strike on its way."""
        if self.body_read:
            return
        self.body_read = True
        action = self.fault.get("action")
        cut = self.fault.get("after", 0) if action == "cut_request" else None
        corrupt, count = action == "corrupt_request", 0
        for chunk in self._raw_chunks():
            if corrupt and chunk:
                chunk, corrupt = flip_last_bit(chunk), False
            count += len(chunk)
            if cut is not None and count >= cut:
                self.drop()
                raise ConnectionAbortedError("fault: cut_request")
            yield chunk

    def _raw_chunks(self) -> Iterator[bytes]:
        if not self._is_chunked():
            yield from self._read(int(self.headers.get("Content-Length") or 0))
            return
        while True:
            size = int(self.rfile.readline().split(b";")[0] or b"0", 16)
            yield from self._read(size)
            self.rfile.readline()
            if size == 0:
                return

    def _read(self, left: int) -> Iterator[bytes]:
        while left:
            chunk = self.rfile.read(min(left, _PIECE))
            if not chunk:
                raise ConnectionAbortedError("the client went away in the middle of its body")
            left -= len(chunk)
            yield chunk

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    def body(self) -> bytes:
        return b"".join(self.chunks())

    def json(self) -> Any:
        try:
            return json.loads(self.body() or b"{}")
        except ValueError as error:
            raise Refusal(400, "Invalid JSON body") from error

    # The answer

    def drop(self) -> None:
        """Break the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def reply(self, content: Any = None, status: int = 200, headers: dict[str, Any] | None = None) -> None:
        """Answer with JSON, or with bytes as they are."""
        data = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json; charset=utf-8"
        self._send(status, {"Content-Type": kind, **(headers or {})}, io.BytesIO(data), len(data))

    def reply_file(self, path: Path, headers: dict[str, Any]) -> None:
        """Answer with a file, or the range of it that was asked for."""
        size = path.stat().st_size
        start, end, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "").strip())
        if asked:
            start, end, status = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size, 206
            if start >= end:
                raise Refusal(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        with path.open("rb") as file:
            file.seek(start)
            self._send(status, {"Accept-Ranges": "bytes", **headers}, file, end - start)

    def _send(self, status: int, headers: dict[str, Any], content: Any, length: int) -> None:
        for _ in self.chunks():  # read what is left, or the client sees a broken pipe instead of the answer
            pass
        action = self.fault.get("action")
        self.record["status"] = status
        if action == "lost_reply":
            self.record["status"] = f"{status}, lost"
            return self.drop()
        self.send_response(status)
        lies = self.fault["headers"] if action == "headers" else {}
        for name, value in {**headers, "Content-Length": length, "X-Request-Id": self.record["id"], **lies}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return None
        stop = self.fault.get("after", 0) if action == "cut_response" else None
        flip, sent = action == "corrupt_response", 0
        while sent < length:
            chunk = content.read(min(length - sent, _PIECE))
            if flip:
                chunk, flip = flip_last_bit(chunk), False
            if stop is not None and sent + len(chunk) >= stop:
                self.wfile.write(chunk[: max(0, stop - sent)])
                self.wfile.flush()
                return self.drop()
            self.wfile.write(chunk)
            sent += len(chunk)
        return None

    # The request

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        self.query, self.body_read, self.fault = parse_qs(address.query), False, {}
        self.store = self.hub.store
        self.record = {"origin": "storage" if self.is_storage else "hub", "method": self.command, "path": self.path,
                       "hub_token": self._token() in TOKENS, "id": secrets.token_hex(6), "status": None}  # fmt: skip
        control = address.path.startswith("/_test/")
        try:
            try:
                if not control:
                    self._meet_fault()
                self._authenticate(control)
                self._dispatch(address.path)
            except Refusal as refusal:
                self.reply(refusal.body, refusal.status, refusal.headers)
        except (ConnectionError, TimeoutError) as error:
            self.record["status"] = self.record["status"] or f"aborted: {error}"
            self.close_connection = True
        except Exception:  # a mistake of this server must be seen: the tests look for it in the log
            self.record["bug"] = traceback.format_exc()
            self.drop()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def _meet_fault(self) -> None:
        self.hub.log.append(self.record)
        self.fault = self.hub.faults.take(self.command, self.path)
        action = self.fault.get("action")
        if action:
            self.record["fault"] = action
        if action == "slow":
            time.sleep(self.fault["seconds"])
        elif action == "held":
            while self.fault in self.hub.faults.active:
                time.sleep(0.01)
        elif action == "status":
            message = self.fault.get("message", "injected fault")
            raise Refusal(self.fault["status"], message, body=self.fault.get("body"), headers=self.fault.get("headers"))
        elif action == "cut_request" and not self._is_chunked() and not int(self.headers.get("Content-Length") or 0):
            self.drop()
            raise ConnectionAbortedError("fault: cut_request")

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def _authenticate(self, control: bool) -> None:
        self.user: str | None = None
        self.role: str | None = None
        if control:
            if self.headers.get("X-Test-Secret") != self.hub.secret:
                raise Refusal(403, "test control needs X-Test-Secret")
        elif self._token() and not self.is_storage:
            if self._token() not in TOKENS:
                raise Refusal(401, "Invalid credentials in Authorization header")
            self.user, self.role = TOKENS[self._token()]

    def _dispatch(self, path: str) -> None:
        path = re.sub("^(/api)?/datasets/", lambda found: "/api/models/" if found[1] else "/", path)
        path = re.sub("^/api/spaces/", "/api/models/spaces/", path)
        for known in ROUTES:
            match = known.path.match(path)
            if match and self.command in known.methods and known.storage == self.is_storage:
                named = {name: unquote(value) if value else value for name, value in match.groupdict().items()}
                return known.answer(self, **named)
        self.record["unknown"] = True
        raise Refusal(404, f"no such page: {self.command} {path}")

    # Rights

    def may(self, namespace: str, write: bool = False) -> bool:
        rights = ORGANISATIONS.get(namespace, {}).get(self.user or "")
        return self.user == namespace or rights == "write" or (rights == "read" and not write)

    def repo(self, repo_id: str, need: str = "read") -> dict[str, Any]:
        """The repository, if the asker may "read" of it, read its "content" (gated), or "write" to it."""
        repo, namespace = self.store.repos.get(repo_id.lower()), repo_id.split("/")[-2]
        if repo is None or (repo["private"] and not self.may(namespace)):
            # As the real Hub: what may not be seen does not exist, and who is not logged in learns not even that.
            status = 401 if self.user is None else 404
            raise Refusal(status, "Repository not found", "RepoNotFound")
        if need == "write":
            self.check_write(namespace)
        elif need == "content" and repo["gated"] and not self.may(namespace) and self.user not in repo["granted"]:
            status = 401 if self.user is None else 403
            raise Refusal(status, f"Access to model {repo_id} is restricted; ask for access on its page.", "GatedRepo")
        return repo

    def check_write(self, namespace: str) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        if self.role != "write":
            raise Refusal(403, "Forbidden: you must use a write token to upload to a repository.")
        if not self.may(namespace, write=True):
            raise Refusal(403, "You don't have the required permissions to perform this action.")
