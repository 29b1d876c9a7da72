"""Zip archives (.npz, .pth) whose records lie: names, sizes, places, checksums, flags, and what lies around them."""

import io
import random
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace

LOCAL, CENTRAL, END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
END64, LOCATOR = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
NAMES = (
    "../up", "/root", "C:/x", "a\\b", "a//b", "./a", "a/../../b", "", ".", "..", "con", "nul.npy", "a\0b", "a\nb",
    "a\x1b[2J", "é", "\u202e", "\ud800", "\U0001d538", "\uff41", " ", "a" * 300, "a" * 60_000, "archive/data/../0",
    "data.pkl", "a/data.pkl", "%s", "{0}",
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One member; what the two records say of it is what it is, but for what is given here."""

    name: bytes
    data: bytes
    size: int
    crc: int
    method: int = 0
    flags: int = 0
    extra: bytes = b""
    central_extra: bytes = b""
    comment: bytes = b""
    local_name: bytes | None = None
    local: tuple[int | None, int | None, int | None] = (None, None, None)  # checksum, compressed size, size
    central: tuple[int | None, int | None, int | None] = (None, None, None)
    offset: int = 0  # added to the true one


def members_of(data: bytes) -> list[Member]:
    """The members of a good archive, with the padding that aligns them."""
    found: list[Member] = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name_size, extra_size = struct.unpack_from("<2H", data, info.header_offset + 26)
            begin = info.header_offset + LOCAL.size + name_size
            extra, begin = data[begin : begin + extra_size], begin + extra_size
            found.append(
                Member(
                    info.filename.encode(),
                    data[begin : begin + info.compress_size],
                    info.file_size,
                    info.CRC,
                    info.compress_type,
                    extra=b"" if extra[:2] == b"\1\0" else extra,
                )
            )
    return found


def stored(name: str | bytes, data: bytes) -> Member:
    """A member as it is."""
    text = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
    return Member(text, data, len(data), zlib.crc32(data), flags=0 if text.isascii() else 0x800)


def deflated(name: str, data: bytes) -> Member:
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    return replace(stored(name, data), data=press.compress(data) + press.flush(), method=8)


def archive_of(
    members: list[Member], comment: bytes = b"", order: list[int] | None = None, end: dict[int, int] | None = None
) -> bytes:
    """The archive; `order` of the directory, `end`: field of the end record -> what is added to it."""
    file, places = bytearray(), list[int]()
    for one in members:
        places.append(len(file))
        fields = _told((one.crc, len(one.data), one.size), one.local)
        name = one.name if one.local_name is None else one.local_name
        file += LOCAL.pack(b"PK\3\4", 20, one.flags, one.method, 0, 33, *fields, len(name), len(one.extra))
        file += name + one.extra + one.data
    begin = len(file)
    for index in range(len(members)) if order is None else order:
        one = members[index]
        fields = _told((one.crc, len(one.data), one.size), one.central)
        sizes = len(one.name), len(one.central_extra), len(one.comment)
        place = (places[index] + one.offset) % 2**32
        file += CENTRAL.pack(b"PK\1\2", 20, 20, one.flags, one.method, 0, 33, *fields, *sizes, 0, 0, 0, place)
        file += one.name + one.central_extra + one.comment
    count = len(members) if order is None else len(order)
    record = [0, 0, count, count, len(file) - begin, begin, len(comment)]
    for index, lie in (end or {}).items():
        record[index] = (record[index] + lie) % (2**32 if index in (4, 5) else 2**16)
    return bytes(file) + END.pack(b"PK\5\6", *record) + comment


def _told(true: tuple[int, int, int], lies: tuple[int | None, int | None, int | None]) -> tuple[int, ...]:
    return tuple((one if lie is None else lie) % 2**32 for one, lie in zip(true, lies, strict=True))


def zip64(crc_and_sizes: tuple[int, int]) -> bytes:
    """The extra field that says sizes beyond 4 GiB, or smaller ones."""
    return struct.pack("<2H2Q", 1, 16, *crc_and_sizes)


def forge_archive(data: bytes, rng: random.Random) -> bytes:
    """Another archive of the same members, one of which lies, or the directory does."""
    members = members_of(data)
    index = rng.randrange(len(members))
    one = members[index]
    lie = rng.choice([1, -1, 7, -7, 64, 4096, -4096, 2**31, 2**32 - 1, -one.size, rng.randrange(1, 2**20)])
    kind = rng.choice(sorted(_OF_MEMBER) * 2 + sorted(_OF_ARCHIVE))
    if kind in _OF_MEMBER:
        members[index] = _OF_MEMBER[kind](one, lie, rng)
        return archive_of(members)
    return _OF_ARCHIVE[kind](members, index, lie, rng)


def _renamed(one: Member, lie: int, rng: random.Random) -> Member:
    name = rng.choice(NAMES).encode("utf-8", "surrogatepass")[:65_000]
    name += rng.choice([b"", b".npy"])
    name = rng.choice([name, one.name.rpartition(b"/")[0] + b"/" + name])
    return replace(one, name=name, local_name=rng.choice([name, one.name]), flags=rng.choice([0, 0x800]))


def _unpacked(one: Member) -> bytes:
    return zlib.decompress(one.data, -15) if one.method == 8 else one.data


def _repacked(one: Member, lie: int, rng: random.Random) -> Member:
    """The same content the other way."""
    plain = _unpacked(one)
    other = stored(one.name, plain) if one.method else deflated(one.name.decode(), plain)
    return replace(other, extra=one.extra)


def _bit_of_data(one: Member, lie: int, rng: random.Random) -> Member:
    if not one.data:
        return replace(one, crc=1)
    place = rng.randrange(len(one.data))
    return replace(
        one, data=one.data[:place] + bytes([one.data[place] ^ 1 << rng.randrange(8)]) + one.data[place + 1 :]
    )


_OF_MEMBER = {
    "renamed": _renamed,
    "repacked": _repacked,
    "bit of the data": _bit_of_data,
    "method": lambda one, lie, rng: replace(one, method=rng.choice([1, 6, 8, 9, 12, 14, 93, 95, 99, 65535])),
    "encrypted": lambda one, lie, rng: replace(one, flags=one.flags | rng.choice([1, 0x40, 0x41, 0x2000])),
    "flags": lambda one, lie, rng: replace(one, flags=rng.randrange(2**16)),
    "checksum here": lambda one, lie, rng: replace(one, central=(one.crc + lie, None, None)),
    "checksum there": lambda one, lie, rng: replace(one, local=(one.crc + lie, None, None)),
    "packed size here": lambda one, lie, rng: replace(one, central=(None, len(one.data) + lie, None)),
    "packed size there": lambda one, lie, rng: replace(one, local=(None, len(one.data) + lie, None)),
    "size here": lambda one, lie, rng: replace(one, central=(None, None, one.size + lie)),
    "size there": lambda one, lie, rng: replace(one, local=(None, None, one.size + lie)),
    "sizes here": lambda one, lie, rng: replace(one, central=(None, len(one.data) + lie, one.size + lie)),
    "zip64": lambda one, lie, rng: replace(one, central=(None, -1, -1), central_extra=zip64((one.size, len(one.data)))),
    "zip64 that lies": lambda one, lie, rng: replace(
        one, central=(None, -1, -1), central_extra=zip64((rng.choice([2**40, 2**63, 2**64 - 1, 0]), 2**40))
    ),
    "zip64 cut": lambda one, lie, rng: replace(one, central=(None, -1, -1), central_extra=zip64((1, 1))[: lie % 20]),
    "place": lambda one, lie, rng: replace(one, offset=lie),
    "other local name": lambda one, lie, rng: replace(one, local_name=rng.choice([b"x", one.name[::-1], one.name * 2])),
    "extra": lambda one, lie, rng: replace(one, extra=one.extra + bytes(abs(lie) % 300)),
    "comment": lambda one, lie, rng: replace(one, comment=b"PK\5\6" + bytes(abs(lie) % 300)),
    "cut": lambda one, lie, rng: stored(one.name, _unpacked(one)[: max(0, one.size - abs(lie) % 100 - 1)]),
    "longer": lambda one, lie, rng: stored(one.name, _unpacked(one) + bytes(abs(lie) % 100 + 1)),
    "nested archive": lambda one, lie, rng: stored(one.name, archive_of([one, stored("a.npy", b"")])),
    "nothing": lambda one, lie, rng: stored(one.name, b""),
}


def _twice(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    again = rng.choice([members[index], replace(members[-index], name=members[index].name)])
    members.insert(rng.randrange(len(members) + 1), again)
    return archive_of(members)


def _swapped(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    """The content of two members that differ in size."""
    one = members[index]
    others = [place for place, other in enumerate(members) if other.size != one.size]
    place = rng.choice(others)
    other = members[place]
    members[index] = replace(other, name=one.name, local_name=None)
    members[place] = replace(one, name=other.name, local_name=None)
    return archive_of(members)


def _shuffled(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    order = list(range(len(members)))
    rng.shuffle(order)
    return archive_of(members, order=order)


def _listed_twice(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    return archive_of(members, order=[*range(len(members)), index])


def _end_record(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    return archive_of(members, end={rng.randrange(7): lie or 1})


def _with_zip64_end(members: list[Member], index: int, lie: int, rng: random.Random) -> bytes:
    data = archive_of(members)
    end = END.unpack(data[-END.size :])
    lies = [end[4], end[4], end[5], end[6]]
    if rng.random() < 0.7:
        lies[rng.randrange(4)] += lie
    record = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, *(value % 2**64 for value in lies))
    locator = LOCATOR.pack(b"PK\6\7", 0, len(data) - END.size, 1)
    return data[: -END.size] + record + locator + END.pack(b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)


_OF_ARCHIVE = {
    "member twice": _twice, "swapped": _swapped, "shuffled directory": _shuffled, "listed twice": _listed_twice,
    "end record": _end_record, "zip64 end": _with_zip64_end, "before": lambda members, index, lie,
    rng: b"PK\3\4"[: rng.choice([0, 4])] + bytes(abs(lie) % 99) + archive_of(members), "after": lambda members, index,
    lie, rng: archive_of(members) + bytes(abs(lie) % 99 + 1), "comment": lambda members, index, lie,
    rng: archive_of(members, comment=b"PK\5\6" * rng.randrange(1, 20)), "second directory": lambda members, index,
    lie, rng: archive_of(members) + archive_of(members[:index]), "further member": lambda members, index, lie,
    rng: archive_of( [*members, stored(rng.choice(NAMES)[:65_000], bytes(abs(lie) % 99))] ),
    "two archives": lambda members, index, lie, rng: archive_of(members) * 2,
}  # fmt: skip
