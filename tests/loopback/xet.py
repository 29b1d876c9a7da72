"""Routes: Xet - tokens from the Hub; xorbs, shards and reconstructions at the storage."""

import base64
import binascii
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopback.handler import Handler, route
from loopback.refusal import Refusal
from loopback.xet_format import Segment, decode_xorb, parse_shard


def xorb_path(request: Handler, name: str) -> Path:
    return request.store.root / "xorbs" / name


@route("GET", "/api/models/{repo}/xet-(?P<kind>read|write)-token/(?P<revision>[^/]+)")
def token(request: Handler, repo_id: str, kind: str, revision: str) -> None:
    proposal = "create_pr" in request.query and request.user is not None
    repo = request.repo(repo_id, "content" if kind == "read" else "read" if proposal else "write")
    expiry = int(time.time()) + 900
    body = f"{kind}|{repo['id']}|{expiry}"
    text = base64.urlsafe_b64encode(f"{body}|{request.hub.sign(body)}".encode()).decode()
    store = request.hub.storage + "/xet"
    headers = {"X-Xet-Cas-Url": store, "X-Xet-Access-Token": text, "X-Xet-Token-Expiration": expiry}
    request.reply({"accessToken": text, "casUrl": store, "exp": expiry}, headers=headers)


def check_token(request: Handler, need: str) -> str:
    """The repository that the token was made for."""
    sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
    try:
        body, _, signature = base64.urlsafe_b64decode(sent).decode().rpartition("|")
        kind, repo_id, expiry = body.split("|")
    except (ValueError, binascii.Error) as error:
        raise Refusal(401, "xet: not a token of this store") from error
    valid = hmac.compare_digest(signature, request.hub.sign(body)) and int(expiry) >= time.time()
    if not valid or (need == "write" and kind != "write"):
        raise Refusal(401 if need == "read" else 403, "xet: token refused")
    return repo_id


@route("POST", r"/xet/v1/xorbs/[\w-]+/(?P<name>[0-9a-f]{64})", storage=True)
def put_xorb(request: Handler, name: str) -> None:
    check_token(request, "write")
    body = request.body()
    chunks = decode_xorb(body)
    path = xorb_path(request, name)
    new = not path.exists()
    temporary = path.with_name(f"{name}.{secrets.token_hex(4)}")
    temporary.write_bytes(body)
    os.replace(temporary, path)
    with request.store.lock:
        request.store.xet["xorbs"][name] = [(len(chunk.data), chunk.start, chunk.end) for chunk in chunks]
    request.reply({"was_inserted": new})


@route("POST", "/xet/v1/shards", storage=True)
def put_shard(request: Handler) -> None:
    repo_id = check_token(request, "write")
    for file in parse_shard(request.body()):
        if sum(segment.size for segment in file.segments) > request.hub.sizes["largest_lfs"]:
            raise Refusal(413, "File is too large")
        # Refused unless the rebuilt file has the SHA-256 that was claimed.
        found, _size = request.store.put(_rebuild(request, file.segments), file.sha256)
        with request.store.lock:
            request.store.xet["files"][file.hash] = file.segments
            request.store.xet["of_sha256"][found] = file.hash
        request.store.note_upload(repo_id, found)
    request.reply({"result": 1})


def _rebuild(request: Handler, segments: list[Segment]) -> Iterator[bytes]:
    for segment in segments:
        path = xorb_path(request, segment.xorb)
        if not path.exists():
            raise Refusal(400, f"the shard names an unknown xorb {segment.xorb}")
        chunks = decode_xorb(path.read_bytes())[segment.start : segment.end]
        part = b"".join(chunk.data for chunk in chunks)
        if len(part) != segment.size:
            raise Refusal(400, "a segment of the shard has another length")
        yield part


@route("GET", "/xet/v1/chunks/.*", storage=True)
def known_chunk(request: Handler) -> None:
    raise Refusal(404, "chunk unknown: nothing is shared between repositories here")


@route("GET", "/xet/v1/reconstructions/(?P<name>[0-9a-f]{64})", storage=True)
def reconstruction(request: Handler, name: str) -> None:
    """Which ranges of which xorbs make the asked bytes of a file."""
    check_token(request, "read")
    segments: list[Segment] | None = request.store.xet["files"].get(name)
    if segments is None:
        raise Refusal(404, "unknown file")
    size = sum(segment.size for segment in segments)
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "bytes=0-"))
    assert asked is not None
    start, end = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size
    if start >= size and size:
        raise Refusal(416, "past the end")
    terms: list[dict[str, Any]] = []
    sources: dict[str, list[dict[str, Any]]] = {}
    place, first = 0, None
    for segment in segments:
        if place + segment.size > start and place < end:
            begin, term, source = _term(request, segment, place, (start, end))
            first = begin if first is None else first
            terms.append(term)
            known = sources.setdefault(segment.xorb, [])
            if source not in known:
                known.append(source)
        place += segment.size
    request.reply({"offset_into_first_range": start - (first or 0), "terms": terms, "fetch_info": sources})


def _term(
    request: Handler, segment: Segment, place: int, asked: tuple[int, int]
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The chunks of a segment that overlap the asked bytes: where they begin in the file, the term, its source."""
    lengths = request.store.xet["xorbs"][segment.xorb]
    used, begin = [], None
    for index in range(segment.start, segment.end):
        if place + lengths[index][0] > asked[0] and place < asked[1]:
            used.append(index)
            begin = place if begin is None else begin
        place += lengths[index][0]
    assert begin is not None
    chunks = {"start": used[0], "end": used[-1] + 1}
    size = sum(lengths[index][0] for index in used)
    url = f"{request.hub.storage}/xorb/{segment.xorb}?sig={request.hub.sign('xorb/' + segment.xorb)}"
    bytes_of = {"start": lengths[used[0]][1], "end": lengths[used[-1]][2] - 1}
    term = {"hash": segment.xorb, "unpacked_length": size, "range": chunks}
    return begin, term, {"range": chunks, "url": url, "url_range": bytes_of}


@route("GET", "/xorb/(?P<name>[0-9a-f]{64})", storage=True)
def get_xorb(request: Handler, name: str) -> None:
    if request.query.get("sig", [""])[0] != request.hub.sign("xorb/" + name):
        raise Refusal(403, "SignatureDoesNotMatch")
    request.reply_file(xorb_path(request, name), {})


@route("POST", "(?:/xet)?/v1/telemetry", storage=True)
def telemetry(request: Handler) -> None:
    request.reply()


@route("GET|POST", "/xet/v[12]/(?:xorb-grants|xorb-commits|shards|reconstructions)/?.*", storage=True)
def second_version(request: Handler) -> None:
    raise Refusal(404, "not offered: the client falls back to version 1")
