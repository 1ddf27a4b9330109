"""Tar archives, member by member: ustar, pax and GNU, their long names, base-256 numbers and sparse files.

After POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header", and the GNU tar manual, "Basic Tar Format" and "Storing
Sparse Files". Written for speed and for strangers' archives: the standard library's reader takes several times as long for a header as
all else here takes for a small file, takes a garbled header for the end, and wants to seek.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dsec.environments.sources.bytestreams import ByteSource
from dsec.environments.sources.pax import apply_records, decimal, merge_records, parse_records
from dsec.environments.sources.refusals import damaged, refuse
from libdsec.errors import InvalidArgument

__all__ = ["HARD_LINK", "Member", "TarReader"]

HARD_LINK: Final = 0
"""The `kind` of a hard link, which has no S_IFMT bits of its own."""

_BLOCK: Final = 512
_FIELDS: Final = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
_ZERO: Final = bytes(_BLOCK)
_EXTENDED_LIMIT: Final = 16 << 20
"""Of all extended headers of one member together."""

_GLOBAL_LIMIT: Final = 1 << 20
_GLOBAL_RECORDS_LIMIT: Final = 1024
"""Of what is said once for all members: it is kept, and gone through for each of them."""

_MAP_LINE_LIMIT: Final = 64
_RUNS_LIMIT: Final = 1 << 18
_SIZE_LIMIT: Final = 1 << 44
"""What ext4 allows, too. The holes of a file larger than that would fill a disk with nothing but their list."""

_KINDS: Final = {
    b"0": stat.S_IFREG,
    b"\0": stat.S_IFREG,
    b"7": stat.S_IFREG,
    b"S": stat.S_IFREG,
    b"1": HARD_LINK,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}


@dataclass(slots=True)
class Member:
    """One entry as its headers say, the extended ones applied. `kind` is its S_IFMT bits or HARD_LINK."""

    name: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    """Of the file, holes included."""
    link: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    runs: list[tuple[int, int]] | None = None
    """Of a sparse file: offset and length of each stretch that is not a hole."""
    stored: int = 0
    """Bytes that lie in the archive."""


class TarReader:
    """The members of the archive in `source`, in order; of each, what of its content is wanted must be read before the next.

    An archive without its end mark is refused, unless `need_end` is False and it ends just where a header would begin (some writers leave
    the mark out; the caller then has a digest to go by).
    """

    def __init__(self, source: ByteSource, *, need_end: bool = True) -> None:
        self._source = source
        self._need_end = need_end
        self._global: dict[bytes, bytes] = {}
        self._left = 0
        self._padding = 0
        self.name = b""
        """Of the last member."""

    def __iter__(self) -> Iterator[Member]:
        while (member := self._next()) is not None:
            self.name = member.name
            yield member

    def content(self, member: Member) -> Iterator[bytes | int]:
        """The member's bytes; an int is the length of a hole. InvalidArgument if the archive ends in it."""
        if member.runs is None:
            yield from self._data(member.stored)
            return
        position = 0
        for offset, length in member.runs:
            if offset > position:
                yield offset - position
            yield from self._data(length)
            position = offset + length
        if member.size > position:
            yield member.size - position

    def _data(self, size: int) -> Iterator[bytes]:
        for piece in self._source.pieces(size):
            self._left -= len(piece)
            size -= len(piece)
            yield piece
        if size:
            raise self._cut_off()

    def _cut_off(self) -> Exception:
        return damaged(f"it is cut off or garbled after {os.fsdecode(self.name)!r:.200}")

    def _next(self) -> Member | None:
        if count := self._left + self._padding:
            self._left = self._padding = 0
            if self._source.skip(count) < count:
                raise self._cut_off()
        records: dict[bytes, bytes] = {}
        sparse: list[tuple[int, int]] = []
        long_name = long_link = b""
        left = _EXTENDED_LIMIT
        while True:
            header = self._source.take(_BLOCK)
            if len(header) < _BLOCK:
                if header or self._need_end or records or long_name or long_link:
                    raise self._cut_off()
                return None
            if header == _ZERO:
                return None
            kind = header[156:157]
            match kind:
                case b"L":
                    data = self._extended(header, left)
                    long_name = data.rstrip(b"\0")
                case b"K":
                    data = self._extended(header, left)
                    long_link = data.rstrip(b"\0")
                case b"g":
                    data = self._extended(header, min(left, _GLOBAL_LIMIT))
                    self._keep_global(parse_records(data, []))
                case b"x" | b"X":
                    data = self._extended(header, left)
                    merge_records(records, parse_records(data, sparse))
                case _:
                    break
            left -= _BLOCK + len(data)
        member = self._plain(header, kind)
        member.name = long_name or member.name
        member.link = long_link or member.link
        if kind == b"S":
            self._old_sparse(member, header)
        if self._global or records:
            self._apply(member, {**self._global, **records}, sparse)
        if member.kind == stat.S_IFREG:
            if kind == b"\0" and member.name.endswith(b"/"):  # before ustar a folder was a file whose name ends so
                member.kind, member.size, member.stored = stat.S_IFDIR, 0, 0
            if member.runs is not None:
                _check_runs(member)
            self._left, self._padding = member.stored, -member.stored % _BLOCK
        return member

    # -- headers -------------------------------------------------------------------------------------------------------------------------

    def _keep_global(self, records: dict[bytes, bytes]) -> None:
        self._global |= records
        if len(self._global) > _GLOBAL_RECORDS_LIMIT or sum(len(key) + len(value) for key, value in self._global.items()) > _GLOBAL_LIMIT:
            raise damaged("too much is said for all members at once")

    def _extended(self, header: bytes, left: int) -> bytes:
        size = _number(self._checked(header)[4], "a size")
        if not 0 <= size <= left:
            raise damaged(f"a header of {size} bytes, or too many of them")
        data = self._source.take(size)
        padding = -size % _BLOCK
        if len(data) < size or self._source.skip(padding) < padding:
            raise self._cut_off()
        return data

    def _checked(self, header: bytes) -> tuple[bytes, ...]:
        fields: tuple[bytes, ...] = _FIELDS.unpack(header)
        try:
            expected = _number(fields[6], "a checksum")
        except InvalidArgument:
            raise self._cut_off() from None
        # adler32's low half is 1 + the sum of the bytes, modulo 65521: far quicker than adding them up
        found = zlib.adler32(header[156:], zlib.adler32(b"        ", zlib.adler32(header[:148]))) & 0xFFFF
        if found != (expected + 1) % 65521 and expected != _signed_sum(header):
            raise self._cut_off()
        return fields

    def _plain(self, header: bytes, kind: bytes) -> Member:
        name, mode, uid, gid, size, mtime, _, _, link, magic, _, _, _, major, minor, prefix = self._checked(header)
        name = name.partition(b"\0")[0]
        if magic == b"ustar\0" and (folder := prefix.partition(b"\0")[0]):
            name = folder + b"/" + name
        what = _KINDS.get(kind)
        if what is None:
            refuse(name, f"is of an unknown type {kind!r}")
        member = Member(
            name,
            what,
            _number(mode, "a mode") & 0o7777,
            _number(uid, "an owner"),
            _number(gid, "a group"),
            _number(mtime, "a time") * 1_000_000_000,
            link=link.partition(b"\0")[0],
        )
        if what == stat.S_IFREG:
            member.size = member.stored = _size(_number(size, "a size"), name)
        elif what in (stat.S_IFCHR, stat.S_IFBLK):
            member.major, member.minor = _number(major, "a device"), _number(minor, "a device")
        return member

    def _apply(self, member: Member, records: dict[bytes, bytes], sparse: list[tuple[int, int]]) -> None:
        apply_records(member, records)
        if member.kind != stat.S_IFREG:
            return
        if b"size" in records:
            member.size = member.stored = _size(decimal(records[b"size"], "a size"), member.name)
        real = records.get(b"GNU.sparse.realsize", records.get(b"GNU.sparse.size"))
        if records.get(b"GNU.sparse.major") == b"1":
            member.runs = self._map_in_data(member)
        elif (text := records.get(b"GNU.sparse.map")) is not None:
            if text.count(b",") > 2 * _RUNS_LIMIT:
                refuse(member.name, "has too many holes")
            numbers = [decimal(number, "a hole") for number in text.split(b",") if number]
            member.runs = _pairs(numbers, member.name)
        elif sparse or b"GNU.sparse.numblocks" in records:
            member.runs = sparse
        if member.runs is not None:
            member.name = records.get(b"GNU.sparse.name", member.name)
            if real is not None:
                member.size = _size(decimal(real, "a size"), member.name)

    # -- sparse files --------------------------------------------------------------------------------------------------------------------

    def _old_sparse(self, member: Member, header: bytes) -> None:
        """GNU's own type: four stretches in the header, more in blocks after it."""
        numbers = [header[offset : offset + 12] for offset in range(386, 482, 12)]
        more, member.size = header[482], _size(_number(header[483:495], "a size"), member.name)
        while more:
            block = self._source.take(_BLOCK)
            if len(block) < _BLOCK:
                raise self._cut_off()
            numbers += [block[offset : offset + 12] for offset in range(0, 504, 12)]
            more = block[504]
            if len(numbers) > 2 * _RUNS_LIMIT:
                refuse(member.name, "has too many holes")
        member.runs = _pairs([_number(number, "a hole") for number in numbers if number[0]], member.name)

    def _map_in_data(self, member: Member) -> list[tuple[int, int]]:
        """Version 1.0: the content begins with lines of decimal numbers, their count first, filled up to a block."""
        numbers: list[int] = []
        rest = b""
        while not numbers or len(numbers) < 1 + 2 * numbers[0]:
            block = self._source.take(min(_BLOCK, member.stored))
            if len(block) < _BLOCK or len(rest) > _MAP_LINE_LIMIT:
                raise damaged(f"{os.fsdecode(member.name)!r:.200} has a garbled list of holes")
            member.stored -= _BLOCK
            *lines, rest = (rest + block).split(b"\n")
            numbers += [decimal(line, "a hole") for line in lines]
            if numbers and numbers[0] > _RUNS_LIMIT:
                refuse(member.name, "has too many holes")
        return _pairs(numbers[1:], member.name)


def _pairs(numbers: list[int], name: bytes) -> list[tuple[int, int]]:
    if len(numbers) % 2 or len(numbers) > 2 * _RUNS_LIMIT:
        refuse(name, "has a garbled list of holes")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _check_runs(member: Member) -> None:
    end = 0
    for offset, length in member.runs or ():
        if offset < end or length < 0:
            refuse(member.name, "has holes that overlap")
        end = offset + length
    if end > member.size or sum(length for _, length in member.runs or ()) != member.stored:
        refuse(member.name, "has holes that are not those of its size")


def _number(field: bytes, what: str) -> int:
    """Octal digits, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        if field[0] == 0xFF:
            return int.from_bytes(field, "big", signed=True)
        raise damaged(f"{what} is garbled")
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    if not digits.isdigit():
        raise damaged(f"{what} is garbled")
    try:
        return int(digits, 8)
    except ValueError:
        raise damaged(f"{what} is garbled") from None


def _size(size: int, name: bytes) -> int:
    if not 0 <= size <= _SIZE_LIMIT:
        refuse(name, "has a size that cannot be")
    return size


def _signed_sum(header: bytes) -> int:
    """As some old writers added up."""
    values: tuple[int, ...] = struct.unpack("148b8x356b", header)
    return sum(values) + 256
