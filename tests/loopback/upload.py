"""Routes: how files come in - upload modes, LFS with signed addresses, commits."""

import base64
import binascii
import hmac
import json
import re
from typing import Any
from urllib.parse import quote

from loopback.card_rules import card_errors
from loopback.handler import Handler, route
from loopback.refusal import Refusal
from loopback.store import LFS_SUFFIXES, git_oid, lfs_pointer


def check_signature(request: Handler, text: str) -> None:
    if not hmac.compare_digest(request.query.get("sig", [""])[0], request.hub.sign(text)):
        raise Refusal(403, "SignatureDoesNotMatch")
    if request.headers.get("Authorization"):
        raise Refusal(400, "InvalidArgument: Only one auth mechanism allowed")


@route("POST", "/api/models/{repo}/preupload/(?P<revision>[^/]+)")
def upload_modes(request: Handler, repo_id: str, revision: str) -> None:
    proposal = "create_pr" in request.query and request.user is not None
    repo = request.repo(repo_id, "read" if proposal else "write")
    tree = request.store.tree(repo, request.store.resolve(repo, revision)[1])
    answers: list[dict[str, Any]] = []
    for file in request.json()["files"]:
        large = file["size"] >= request.hub.sizes["largest_regular"] or b"\0" in base64.b64decode(file["sample"])
        mode = "lfs" if large or file["path"].endswith(LFS_SUFFIXES) else "regular"
        answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        if entry := tree.get(file["path"]):
            answer["oid"] = entry["sha256"] if entry["lfs"] else entry["oid"]
        answers.append(answer)
    request.reply({"files": answers, "commitOid": request.store.resolve(repo, revision)[1]})


@route("POST", r"/{repo}\.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, repo_id: str) -> None:
    asked = request.json()
    proposal = asked.get("ref") is None and request.user is not None
    repo = request.repo(repo_id, "read" if proposal else "write")
    answers: list[dict[str, Any]] = []
    for item in asked["objects"]:
        sha256, size = item["oid"], item["size"]
        answer: dict[str, Any] = {"oid": sha256, "size": size, "authenticated": True}
        if size > request.hub.sizes["largest_lfs"]:
            answer["error"] = {"code": 422, "message": f"File is too large: {size} bytes"}
        elif sha256 not in repo["uploaded"]:
            key = f"{repo['id']}/{sha256}/{size}"
            upload = f"{request.hub.storage}/lfs/{quote(key)}?sig={request.hub.sign(key)}"
            verify = f"{request.hub.endpoint}/api/lfs-verify/{repo['id']}"
            answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        answers.append(answer)
    content = {"transfer": "basic", "objects": answers}
    request.reply(content, headers={"Content-Type": "application/vnd.git-lfs+json"})


@route("PUT", r"/lfs/(?P<key>.+)", storage=True)
def lfs_upload(request: Handler, key: str) -> None:
    check_signature(request, key)
    repo_id, sha256, size = key.rsplit("/", 2)
    request.store.put(request.chunks(), sha256, int(size))
    request.store.note_upload(repo_id, sha256)
    request.reply(b"", headers={"ETag": f'"{sha256}"'})


@route("POST", "/api/lfs-verify/{repo}")
def lfs_verify(request: Handler, repo_id: str) -> None:
    request.repo(repo_id)
    asked = request.json()
    path = request.store.blob(asked["oid"])
    if not path.exists() or path.stat().st_size != asked["size"]:
        raise Refusal(404, "LFS object not found, or of another size")
    request.reply()


@route("POST", "/api/models/{repo}/commit/(?P<revision>[^/]+)")
def commit(request: Handler, repo_id: str, revision: str) -> None:
    proposal = request.query.get("create_pr", ["0"])[0] in ("1", "true")
    if request.user is None:
        raise Refusal(401, "Invalid username or password.")
    repo = request.repo(repo_id, "read" if proposal else "write")
    header, operations = _read_operations(request.body())
    store = request.store
    with store.lock:
        reference, head = store.resolve(repo, revision)
        if reference is None or reference.startswith("refs/tags/"):
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if header.get("parentCommit") and header["parentCommit"] != head:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(store.tree(repo, head))
        for kind, value in operations:
            _apply(request, repo, tree, kind, value)
        oid = store.new_commit(repo, head, tree, header["summary"], request.user)
        url = f"{request.hub.endpoint}/{repo['id']}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        if proposal:
            repo["pull_requests"] += 1
            reference = f"refs/pr/{repo['pull_requests']}"
            answer["pullRequestUrl"] = f"{url}/discussions/{repo['pull_requests']}"
        repo["refs"][reference] = oid
        store.save(repo)
    request.reply(answer)


def _read_operations(body: bytes) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    try:
        lines = [json.loads(line) for line in body.split(b"\n") if line.strip()]
        operations = [(line["key"], line["value"]) for line in lines]
    except (ValueError, KeyError) as error:
        raise Refusal(400, "Malformed ndjson payload") from error
    if not operations or operations[0][0] != "header" or not operations[0][1].get("summary"):
        raise Refusal(400, "Missing commit header, or an empty summary")
    return operations[0][1], operations[1:]


def _apply(request: Handler, repo: dict[str, Any], tree: dict[str, Any], kind: str, value: dict[str, Any]) -> None:
    path = value["path"]
    if not re.fullmatch(r"[^/]+(/[^/]+)*/?", path) or {".", "..", ".git"} & set(path.split("/")):
        raise Refusal(400, f"Invalid path in repo: {path}")
    if kind == "file":
        tree[path] = _regular_file(request, repo, path, value)
    elif kind == "lfsFile":
        sha256 = value["oid"]
        if sha256 not in repo["uploaded"] or not request.store.blob(sha256).exists():
            raise Refusal(400, f"an LFS pointer pointed to a file that does not exist. Offending file: - {path}")
        size = request.store.blob(sha256).stat().st_size
        tree[path] = {"sha256": sha256, "size": size, "oid": git_oid(lfs_pointer(sha256, size)), "lfs": True}
    elif kind == "deletedFile":
        if tree.pop(path, None) is None:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    else:
        raise Refusal(400, f"Unknown operation: {kind}")


def _regular_file(request: Handler, repo: dict[str, Any], path: str, value: dict[str, Any]) -> dict[str, Any]:
    try:
        data = base64.b64decode(value["content"], validate=True)
    except binascii.Error as error:
        raise Refusal(400, f"Invalid base64 content for {path}") from error
    limit = request.hub.sizes["largest_regular"]
    if len(data) > limit:
        raise Refusal(400, f"Your push was rejected: files larger than {limit} bytes. Offending files: - {path}")
    errors = card_errors(data.decode("utf-8", "replace"), bool(repo["sdk"])) if path == "README.md" else []
    if errors:
        raise Refusal(400, "Invalid metadata in README.md: " + "; ".join(errors))
    sha256, size = request.store.put([data])
    return {"sha256": sha256, "size": size, "oid": git_oid(data), "lfs": False}
