"""Routes: Xet - tokens from the Hub; xorbs, shards and reconstructions at the storage; and its wire format, version 1.

Xorbs are compressed chunks, shards say which chunks make which file.
"""

import base64
import binascii
import hmac
import os
import re
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from loopback.handler import Handler, route
from loopback.store import Refusal

_PLAIN, _GROUPED = 0, 2  # compression schemes; 1 is LZ4 without byte grouping


class Chunk(NamedTuple):
    """A decoded chunk, and where it stands in the serialised xorb."""

    data: bytes
    start: int
    end: int


class Segment(NamedTuple):
    """Chunks start..end of a xorb, `size` bytes when decoded."""

    xorb: str
    size: int
    start: int
    end: int


def hash_text(raw: bytes) -> str:
    """32 bytes as addresses show them: four little-endian words of 64 bits."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def decode_xorb(body: bytes) -> list[Chunk]:
    """The chunks of a serialised xorb."""
    chunks: list[Chunk] = []
    place = 0
    while place < len(body) and body[place : place + 7] != b"XETBLOB":
        packed = int.from_bytes(body[place + 1 : place + 4], "little")
        scheme, size = body[place + 4], int.from_bytes(body[place + 5 : place + 8], "little")
        data, end = body[place + 8 : place + 8 + packed], place + 8 + packed
        try:
            data = data if scheme == _PLAIN else pa.decompress(data, size, codec="lz4", asbytes=True)
        except (OSError, pa.ArrowException) as error:
            raise Refusal(400, "malformed LZ4 frame") from error
        data = _ungroup(data) if scheme == _GROUPED else data
        if end > len(body) or scheme > _GROUPED or len(data) != size:
            raise Refusal(400, "malformed xorb")
        chunks.append(Chunk(data, place, end))
        place = end
    return chunks


def _ungroup(data: bytes) -> bytes:
    """Undo byte grouping: first every fourth byte from 0, then from 1, ..."""
    result, place = bytearray(len(data)), 0
    for offset in range(4):
        count = len(result[offset::4])
        result[offset::4] = data[place : place + count]
        place += count
    return bytes(result)


def parse_shard(body: bytes) -> Iterator[tuple[str, list[Segment], str | None]]:
    """The files of a shard: Xet's hash, segments, and SHA-256."""
    place = 48
    while body[place : place + 32] != b"\xff" * 32:
        if place + 48 > len(body):
            raise Refusal(400, "malformed shard")
        name = hash_text(body[place : place + 32])
        flags, count = struct.unpack_from("<II", body, place + 32)
        segments = []
        for entry in range(place + 48, place + 48 * (count + 1), 48):
            segments.append(Segment(hash_text(body[entry : entry + 32]), *struct.unpack_from("<III", body, entry + 36)))
        place += 48 * (count + 1 + count * bool(flags & 1 << 31))  # verification entries
        sha256 = None
        if flags & 1 << 30:  # metadata: the file's SHA-256
            sha256 = hash_text(body[place : place + 32])
            place += 48
        yield name, segments, sha256


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
    for name, segments, sha256 in parse_shard(request.body()):
        if sum(segment.size for segment in segments) > request.hub.sizes["largest_lfs"]:
            raise Refusal(413, "File is too large")
        # Refused unless the rebuilt file has the SHA-256 that was claimed.
        found, _size = request.store.put(_rebuild(request, segments), sha256)
        with request.store.lock:
            request.store.xet["files"][name] = segments
            request.store.xet["of_sha256"][found] = name
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
    """Which chunks of which xorbs make the asked bytes of a file."""
    check_token(request, "read")
    segments: list[Segment] | None = request.store.xet["files"].get(name)
    if segments is None:
        raise Refusal(404, "unknown file")
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "bytes=0-"))
    assert asked is not None
    start, end = int(asked[1]), int(asked[2] or 1 << 62) + 1
    terms: list[dict[str, Any]] = []
    sources: dict[str, list[dict[str, Any]]] = {}
    place, first = 0, 0
    for segment in segments:
        lengths = request.store.xet["xorbs"][segment.xorb]
        used: list[int] = []
        for index in range(segment.start, segment.end):
            if place + lengths[index][0] > start and place < end:
                first = place if not terms and not used else first
                used.append(index)
            place += lengths[index][0]
        if used:
            chunks = {"start": used[0], "end": used[-1] + 1}
            size = sum(lengths[index][0] for index in used)
            terms.append({"hash": segment.xorb, "unpacked_length": size, "range": chunks})
            url = f"{request.hub.storage}/xorb/{segment.xorb}?sig={request.hub.sign('xorb/' + segment.xorb)}"
            bytes_of = {"start": lengths[used[0]][1], "end": lengths[used[-1]][2] - 1}
            source = {"range": chunks, "url": url, "url_range": bytes_of}
            known = sources.setdefault(segment.xorb, [])
            known += [source] if source not in known else []
    if start >= place > 0:
        raise Refusal(416, "past the end")
    request.reply({"offset_into_first_range": start - first, "terms": terms, "fetch_info": sources})


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
