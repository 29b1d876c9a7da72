"""Routes: how files go out - trees, and files with redirects to the storage."""

import hashlib
import json
from typing import Any
from urllib.parse import parse_qs

from loopback.handler import Handler, route
from loopback.refusal import Refusal
from loopback.store import lfs_pointer
from loopback.upload import check_signature


def describe(request: Handler, path: str, entry: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "file", "oid": entry["oid"], "size": entry["size"], "path": path}
    if entry["lfs"]:
        sha256, size = entry["sha256"], entry["size"]
        answer["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(lfs_pointer(sha256, size))}
        if xet_hash := request.store.xet["of_sha256"].get(sha256):
            answer["xetHash"] = xet_hash
    return answer


@route("GET", "/api/models/{repo}/tree/(?P<revision>[^/]+)(?:/(?P<within>.+))?")
def tree(request: Handler, repo_id: str, revision: str, within: str | None) -> None:
    repo = request.repo(repo_id)
    oid = request.store.resolve(repo, revision)[1]
    recursive = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
    above = f"{within}/" if within else ""
    found: dict[str, Any] = {}
    for path, entry in request.store.tree(repo, oid).items():
        if not path.startswith(above):
            continue
        parts = path.removeprefix(above).split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            folder = above + "/".join(parts[:depth])
            folder_oid = hashlib.sha1((oid + folder).encode()).hexdigest()
            found[folder] = {"type": "directory", "oid": folder_oid, "size": 0, "path": folder}
        if recursive or len(parts) == 1:
            found[path] = describe(request, path, entry)
    if within and not found:
        raise Refusal(404, "Entry not found", "EntryNotFound")
    request.reply([found[path] for path in sorted(found)], headers={"X-Repo-Commit": oid})


@route("POST", "/api/models/{repo}/paths-info/(?P<revision>[^/]+)")
def paths_info(request: Handler, repo_id: str, revision: str) -> None:
    repo = request.repo(repo_id)
    found = request.store.tree(repo, request.store.resolve(repo, revision)[1])
    raw = request.body()
    asked = json.loads(raw)["paths"] if raw[:1] == b"{" else parse_qs(raw.decode()).get("paths", [])
    request.reply([describe(request, path, found[path]) for path in asked if path in found])


@route("GET|HEAD", "/{repo}/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Handler, repo_id: str, revision: str, path: str) -> None:
    repo = request.repo(repo_id, "content")
    oid = request.store.resolve(repo, revision)[1]
    headers: dict[str, Any] = {"X-Repo-Commit": oid}
    entry = request.store.tree(repo, oid).get(path)
    if entry is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers=headers)
    sha256 = entry["sha256"]
    if not entry["lfs"]:
        headers |= {"ETag": f'"{entry["oid"]}"', "Content-Type": "text/plain; charset=utf-8"}
        return request.reply_file(request.store.blob(sha256), headers)
    headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": entry["size"], "Content-Type": "text/plain"}
    if xet_hash := request.store.xet["of_sha256"].get(sha256):
        token = f"{request.hub.endpoint}/api/models/{repo['id']}/xet-read-token/{oid}"
        headers |= {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": token, "Link": f'<{token}>; rel="xet-auth"'}
    location = f"{request.hub.storage}/get/{sha256}?sig={request.hub.sign('get/' + sha256)}"
    return request.reply(b"Found", 302, {**headers, "Location": location})


@route("GET|HEAD", "/get/(?P<sha256>[0-9a-f]{64})", storage=True)
def stored_file(request: Handler, sha256: str) -> None:
    check_signature(request, "get/" + sha256)
    request.reply_file(request.store.blob(sha256), {"ETag": f'"{sha256}"'})
