"""The tests' side: start the Hub, inject faults, look at its log, and run client code in processes of its own."""

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zygote import SEARCH_PATH, Zygote

# What must not leak from this process into a client's: tokens, endpoints, caches, proxies.
_SCRUBBED = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class Loopback:
    """A running Hub. `with Loopback(folder) as hub: ...`"""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "loopback", "--root", str(folder / "store"), "--ready-file", str(ready)]
        environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=folder, env=environment)
        end = time.monotonic() + 30
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the loopback Hub did not start")
            time.sleep(0.01)
        self.store = folder / "store"
        found = json.loads(ready.read_text())
        self.endpoint, self.storage, self._secret = found["endpoint"], found["storage"], found["secret"]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def _control(self, method: str, what: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        headers = {"X-Test-Secret": self._secret}
        request = urllib.request.Request(f"{self.endpoint}/_test/{what}", data, headers, method=method)
        with self._opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())

    def fault(self, path: str, action: str, **fields: Any) -> None:
        """Inject a fault: see `handler.py`."""
        self._control("POST", "faults", {"path": path, "action": action, **fields})

    def fired(self) -> int:
        """How often faults struck."""
        return sum(fault["fired"] for fault in self._control("GET", "faults"))

    def clear_faults(self) -> None:
        self._control("DELETE", "faults")

    def settle(self) -> None:
        """Wait until the Hub has answered every request, those of killed clients, too."""
        while any(entry["status"] is None and "bug" not in entry for entry in self.log()):
            time.sleep(0.01)

    def wait_for_fault(self, job: "Job") -> None:
        """Wait until a job has met a fault."""
        while self.fired() == 0:
            os.kill(job.pid, 0)
            time.sleep(0.005)

    def reset(self) -> None:
        """An empty Hub."""
        self._control("DELETE", "all")

    def settings(self, repo_id: str, **changes: Any) -> None:
        """What its owner changes on a repository's page: private, gated, granted."""
        self._control("POST", "repo", {"id": repo_id, **changes})

    def plant(
        self, repo_id: str, files: dict[str, bytes | None], like: str | None = None, large: Iterable[str] = ()
    ) -> None:
        """Make a repository of files with any names, beside those of another one but for what is None here."""
        encoded = {path: None if data is None else base64.b64encode(data).decode() for path, data in files.items()}
        self._control("POST", "plant", {"id": repo_id, "like": like, "files": encoded, "large": list(large)})

    def limit(self, **sizes: int) -> None:
        """Other limits: largest_regular, largest_lfs (bytes)."""
        self._control("POST", "sizes", sizes)

    def fsck(self) -> list[str]:
        return self._control("GET", "fsck")

    def log(self) -> list[dict[str, Any]]:
        return self._control("GET", "log")

    def get(self, path: str, token: str = "hf_alice_write") -> Any:
        """A JSON answer of the Hub's own interface, as its owner sees it; None where it says 404."""
        request = urllib.request.Request(self.endpoint + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with self._opener.open(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def head(self, repo_id: str, branch: str = "main") -> str | None:
        """The commit a branch stands at; None where there is none."""
        references = self.get(f"/api/models/{repo_id}/refs")
        heads = {entry["name"]: entry["targetCommit"] for entry in references["branches"]} if references else {}
        return heads.get(branch)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, str]:
        """Path -> SHA-256 (LFS) or git hash (regular) of what a revision holds, without .gitattributes."""
        found = self.get(f"/api/models/{repo_id}/tree/{revision}?recursive=true") or []
        files = {entry["path"]: entry.get("lfs", entry)["oid"] for entry in found if entry["type"] == "file"}
        files.pop(".gitattributes", None)
        return files


def content_hash(data: bytes, lfs: bool) -> str:
    """The hash by which `Loopback.files` tells a file."""
    if lfs:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """What became of a job: exit code (negative: killed), what it printed, what its function returned."""

    code: int
    out: str
    err: str
    answer: Any = None


class Client:
    """Runs jobs, functions "module:name" of the tests, in fresh processes whose Hub is a `Loopback`.

    Every process sees an environment without HF_* and proxy variables but for those given here, and the same HF_HOME,
    which `clear` empties. `transport`, "xet" or "lfs", may be changed from job to job.
    """

    def __init__(self, hub: Loopback, folder: Path, profile: str = "with", transport: str = "xet") -> None:
        self.folder, self.transport, self.jobs = folder, transport, 0
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(_SCRUBBED)}
        on = ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS",
              "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # fmt: skip
        environment = {
            **kept, **dict.fromkeys(on, "1"), "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(self.home),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "20ms", "NO_PROXY": "127.0.0.1", "PYTHONPATH": SEARCH_PATH,
        }  # fmt: skip
        self.warm = Zygote("-m", "loopback.processes", profile, folder=folder, environment=environment)
        self.close = self.warm.close

    def clear(self) -> None:
        """Empty HF_HOME: no token, no cache."""
        shutil.rmtree(self.home)
        self.home.mkdir()

    def start(self, name: str, /, *, token: str | None = "hf_alice_write", **arguments: Any) -> "Job":
        """Start a job; with a token in its environment, or without."""
        self.jobs += 1
        folder = self.folder / f"job-{self.jobs}"
        folder.mkdir()
        given = {
            "environment": {"HF_TOKEN": token} if token else {},
            "transport": self.transport,
            "arguments": arguments,
        }
        return Job(self, folder, self.warm.ask("start", name=name, folder=str(folder), **given))

    def attempt(self, name: str, /, **arguments: Any) -> Outcome:
        """Run a job to its end, however it ends."""
        return self.start(name, **arguments).wait()

    def run(self, name: str, /, **arguments: Any) -> Any:
        """Run a job that must succeed; what its function returns."""
        outcome = self.attempt(name, **arguments)
        assert outcome.code == 0, f"{outcome.out}\n{outcome.err}"
        return outcome.answer

    def command(self, *words: object, **arguments: Any) -> str:
        """Run `hf-vit`, which must succeed; what it prints."""
        outcome = self.attempt("hub.jobs:command", arguments=[str(word) for word in words], **arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out


@dataclass
class Job:
    """A running job."""

    client: Client
    folder: Path
    pid: int
    outcome: Outcome | None = field(default=None)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 120) -> Outcome:
        if self.outcome is None:
            code = self.client.warm.ask("wait", pid=self.pid, seconds=seconds)
            if code is None:
                self.kill()
                self.client.warm.ask("wait", pid=self.pid, seconds=10)
                raise TimeoutError(f"the job did not end within {seconds} s:\n{self._read('stderr')}")
            answer = self.folder / "answer.json"
            content = json.loads(answer.read_text()) if answer.exists() else None
            self.outcome = Outcome(code, self._read("stdout"), self._read("stderr"), content)
        return self.outcome

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""
