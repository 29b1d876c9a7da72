"""What the Hub keeps: on disk blobs by SHA-256 and xorbs; repositories with references and commits, and Xet's files."""

import datetime
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".npz", ".npy", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".onnx", ".zip", ".gz")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()

FIRST_PAGE = {"README.md": b"---\nsdk: static\n---\n", "index.html": b"<html></html>", "style.css": b"body {}"}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


class Refusal(Exception):  # noqa: N818 - no error of the server
    """An HTTP status with a message, an error code (`X-Error-Code`) and a JSON body, as the real Hub gives them."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message} if body is None else body
        self.headers = {"X-Error-Message": message.replace("\n", " "), **(headers or {})}
        if code:
            self.headers["X-Error-Code"] = code


class Store:
    """Blobs and repositories. A tree maps a path to {"sha256", "size", "oid", "lfs"}."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            for folder in ("blobs", "tmp", "xorbs"):
                shutil.rmtree(self.root / folder, ignore_errors=True)
                (self.root / folder).mkdir(parents=True)
            self.repos: dict[str, dict[str, Any]] = {}
            self.collections: dict[str, dict[str, Any]] = {}
            self.xet: dict[str, dict[str, Any]] = {"files": {}, "of_sha256": {}, "xorbs": {}}

    # Blobs

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256[:2] / sha256

    def put(self, chunks: Iterable[bytes], sha256: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Hash while writing; admit by an atomic move, and only if hash and size are as claimed."""
        hasher, count = hashlib.sha256(), 0
        handle, temporary = tempfile.mkstemp(dir=self.root / "tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                for chunk in chunks:
                    hasher.update(chunk)
                    count += len(chunk)
                    file.write(chunk)
            found = hasher.hexdigest()
            if (sha256 and found != sha256) or (size is not None and count != size):
                raise Refusal(400, f"content mismatch: claimed {sha256} of {size} bytes, got {found} of {count} bytes")
            self.blob(found).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, self.blob(found))
            return found, count
        finally:
            Path(temporary).unlink(missing_ok=True)

    # Repositories

    def create(self, repo_id: str, private: bool, sdk: str | None = None) -> dict[str, Any]:
        """A new repository, with one commit: .gitattributes, and of a static Space a first page, as on the real Hub."""
        repo = {
            **{"id": repo_id, "_id": secrets.token_hex(12), "private": private, "gated": False, "granted": []},
            **{"created": now(), "sdk": sdk, "refs": {}, "commits": {}, "uploaded": set(), "pull_requests": 0},
        }
        tree: dict[str, Any] = {}
        for path, data in {".gitattributes": GITATTRIBUTES, **(FIRST_PAGE if sdk == "static" else {})}.items():
            sha256, size = self.put([data])
            tree[path] = {"sha256": sha256, "size": size, "oid": git_oid(data), "lfs": False}
        repo["refs"]["refs/heads/main"] = self.new_commit(repo, tree)
        self.repos[repo_id.lower()] = repo
        return repo

    def new_commit(self, repo: dict[str, Any], tree: dict[str, Any]) -> str:
        oid = secrets.token_hex(20)
        repo["commits"][oid] = {"tree": tree, "date": now()}
        return oid

    def tree(self, repo: dict[str, Any], oid: str) -> dict[str, Any]:
        return repo["commits"][oid]["tree"]

    def resolve(self, repo: dict[str, Any], revision: str) -> tuple[str | None, str]:
        """(reference or None, commit) of a branch, a tag, a full reference or a commit."""
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in repo["refs"]:
                return name, repo["refs"][name]
        if revision in repo["commits"]:
            return None, revision
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def note_upload(self, repo_id: str, sha256: str) -> None:
        """Remember that a blob was uploaded to this repository: commits may name no other."""
        with self.lock:
            repo = self.repos.get(repo_id.lower())
            if repo:
                repo["uploaded"].add(sha256)

    def fsck(self) -> list[str]:
        """Everything that is wrong: blobs that are missing or not what they say, and files that were left."""
        problems = [
            f"{repo['id']}@{oid[:8]} {path}: blob {entry['sha256'][:12]} is damaged or missing"
            for repo in self.repos.values()
            for oid, commit in repo["commits"].items()
            for path, entry in commit["tree"].items()
            if not self._sound(entry)
        ]
        left = list((self.root / "tmp").iterdir())
        return problems + [f"{len(left)} temporary files were left"] * bool(left)

    def _sound(self, entry: dict[str, Any]) -> bool:
        path = self.blob(entry["sha256"])
        if not path.exists() or path.stat().st_size != entry["size"]:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
