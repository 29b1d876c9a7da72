"""Xet's wire format, version 1: xorbs (compressed chunks) and shards (which chunks make which file)."""

import struct
from dataclasses import dataclass

from loopback.refusal import Refusal

_PLAIN, _GROUPED = 0, 2  # compression schemes; 1 is LZ4 without byte grouping


@dataclass(frozen=True)
class Chunk:
    """A decoded chunk, and where it stands in the serialised xorb."""

    data: bytes
    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Chunks start..end of a xorb, `size` bytes when decoded."""

    xorb: str
    size: int
    start: int
    end: int


@dataclass(frozen=True)
class ShardFile:
    """A file as a shard describes it."""

    hash: str
    segments: list[Segment]
    sha256: str | None


def hash_text(raw: bytes) -> str:
    """32 bytes as addresses show them: four little-endian words of 64 bits."""
    return "".join(f"{int.from_bytes(raw[place : place + 8], 'little'):016x}" for place in range(0, 32, 8))


def decode_xorb(body: bytes) -> list[Chunk]:
    """The chunks of a serialised xorb."""
    chunks: list[Chunk] = []
    place = 0
    while place < len(body) and body[place : place + 7] != b"XETBLOB":
        packed = int.from_bytes(body[place + 1 : place + 4], "little")
        scheme = body[place + 4]
        size = int.from_bytes(body[place + 5 : place + 8], "little")
        data = body[place + 8 : place + 8 + packed]
        if len(data) != packed or scheme > _GROUPED or body[place] != 0:
            raise Refusal(400, "malformed xorb")
        if scheme != _PLAIN:
            data = decode_lz4_frame(data)
        if scheme == _GROUPED:
            data = _ungroup(data)
        if len(data) != size:
            raise Refusal(400, "xorb chunk of another length")
        chunks.append(Chunk(data, place, place + 8 + packed))
        place += 8 + packed
    return chunks


def _ungroup(data: bytes) -> bytes:
    """Undo byte grouping: first every fourth byte from 0, then from 1, ..."""
    whole, rest = divmod(len(data), 4)
    result, place = bytearray(len(data)), 0
    for offset in range(4):
        count = whole + (offset < rest)
        result[offset::4] = data[place : place + count]
        place += count
    return bytes(result)


def decode_lz4_frame(data: bytes) -> bytes:
    """An LZ4 frame without a content checksum, decoded in plain Python."""
    flags = data[4]
    place = 7 + 8 * bool(flags & 8) + 4 * bool(flags & 1)
    result = bytearray()
    while True:
        word = int.from_bytes(data[place : place + 4], "little")
        place += 4
        if word == 0 and place == len(data):
            return bytes(result)
        block = data[place : place + (word & 0x7FFFFFFF)]
        if not block or len(block) < word & 0x7FFFFFFF:
            raise Refusal(400, "malformed LZ4 frame")
        place += len(block) + 4 * bool(flags & 16)
        if word & 0x80000000:
            result += block
        else:
            _decode_lz4_block(block, result)


def _decode_lz4_block(block: bytes, result: bytearray) -> None:
    place = 0

    def length(nibble: int) -> int:
        nonlocal place
        total, more = nibble, nibble == 15
        while more:
            total += block[place]
            more = block[place] == 255
            place += 1
        return total

    while place < len(block):
        token = block[place]
        place += 1
        literals = length(token >> 4)
        result += block[place : place + literals]
        place += literals
        if place >= len(block):
            return
        offset = block[place] | block[place + 1] << 8
        place += 2
        left = length(token & 15) + 4
        while left > 0:  # a copy may reach into what it writes
            part = result[-offset:][:left] if offset >= left else result[-offset:]
            result += part
            left -= len(part)


def parse_shard(body: bytes) -> list[ShardFile]:
    """The files of a shard."""
    files: list[ShardFile] = []
    place = 48
    while body[place : place + 32] != b"\xff" * 32:
        if place + 48 > len(body):
            raise Refusal(400, "malformed shard")
        name = hash_text(body[place : place + 32])
        flags, count = struct.unpack_from("<II", body, place + 32)
        place += 48
        segments: list[Segment] = []
        for _ in range(count):
            _flags, size, start, end = struct.unpack_from("<IIII", body, place + 32)
            segments.append(Segment(hash_text(body[place : place + 32]), size, start, end))
            place += 48
        if flags & 1 << 31:  # verification entries
            place += 48 * count
        sha256 = None
        if flags & 1 << 30:  # metadata: the file's SHA-256
            sha256 = hash_text(body[place : place + 32])
            place += 48
        files.append(ShardFile(name, segments, sha256))
    return files
